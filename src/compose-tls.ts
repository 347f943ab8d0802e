// Builds what knows which encryption recipients' domains ask for (MTA-STS, DANE): part of the composition root.
import type { DeliverySetup } from './compose-delivery.ts';
import { createStsStore, refreshStsPolicies } from './delivery/sts-store.ts';
import { createAddressGuard, type AddressGuard } from './dns/address-guard.ts';
import { createSecureResolver, type SecureResolver } from './dns/dnssec.ts';
import { fetchStsPolicy } from './dns/mta-sts-fetch.ts';
import { createStsPolicies } from './dns/mta-sts.ts';
import { createResolver, type Resolver } from './dns/resolver.ts';
import { createTlsPolicies, type TlsPolicies } from './dns/tls-policy.ts';
import type { Logger } from './log.ts';
import { ownAddresses } from './own-addresses.ts';
import type { Store } from './store/orm.ts';

export function composeTlsPolicies(d: {
  readonly store: Store;
  readonly resolver: Resolver;
  readonly guard: AddressGuard;
  /** `address:port` of the validating resolver that is trusted now; null: no DANE. */
  readonly daneResolver: () => string | null;
  readonly log: Logger;
}): TlsPolicies {
  let secure: { readonly server: string; readonly resolver: SecureResolver } | null = null;
  return createTlsPolicies({
    sts: createStsPolicies({
      resolver: d.resolver,
      store: createStsStore(d.store.pool),
      fetch: (domain) => fetchStsPolicy(d, domain),
      now: () => new Date(),
      onUnkept: (error) => d.log.warn({ err: error }, 'an MTA-STS policy cannot be stored now'),
    }),
    resolver() {
      const server = d.daneResolver();
      if (server === null) return null;
      if (secure?.server !== server)
        secure = { server, resolver: createSecureResolver({ server }) };
      return secure.resolver;
    },
  });
}

/** The daily refresh of MTA-STS policies, for the process that has the jobs. */
export function composeStsRefresh(
  setup: Pick<DeliverySetup, 'dnsServers' | 'privateHosts'>,
  d: { readonly store: Store; readonly log: Logger },
): { readonly run: () => Promise<void>; readonly close: () => void } {
  const resolver = createResolver({ servers: setup.dnsServers, keepsAnswers: false });
  const guard = createAddressGuard({ allow: setup.privateHosts, ownAddresses });
  return {
    async run() {
      const fetch = (domain: string): ReturnType<typeof fetchStsPolicy> =>
        fetchStsPolicy({ resolver, guard }, domain);
      await refreshStsPolicies({ db: d.store.pool, resolver, fetch, log: d.log });
    },
    close: () => resolver.close(),
  };
}
