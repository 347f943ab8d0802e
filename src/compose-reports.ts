// Builds what sends the daily TLS reports: part of the composition root.
import { networkInterfaces } from 'node:os';
import type { OwnMailVerb } from './compose-verbs.ts';
import type { Config } from './config.ts';
import { createAddressGuard } from './dns/address-guard.ts';
import { createResolver } from './dns/resolver.ts';
import type { Logger } from './log.ts';
import { createTlsReporter, type TlsReporter } from './sending/tls-report.ts';
import type { Store } from './store/orm.ts';

/** Null where mail does not go to the hosts of its domains, so that there is nothing to report. */
export function composeTlsReporter(
  config: Config,
  d: {
    readonly store: Store;
    readonly log: Logger;
    readonly firstTenantId: string;
    readonly verbs: OwnMailVerb;
    /** PEM; in place of the certificate authorities that the runtime trusts. */
    readonly authorities?: readonly string[];
  },
): TlsReporter | null {
  if (config.delivery !== 'direct') return null;
  const resolver = createResolver({ servers: config.dnsServers });
  const ownAddresses = (): readonly string[] =>
    Object.values(networkInterfaces()).flatMap((list) =>
      (list ?? []).map(({ address }) => address),
    );
  const reporter = createTlsReporter({
    pool: d.store.pool,
    log: d.log,
    now: () => new Date(),
    hostname: config.hostname,
    tenantId: d.firstTenantId,
    resolver,
    web: {
      resolver,
      guard: createAddressGuard({ allow: config.privateHosts, ownAddresses }),
      ...(d.authorities === undefined ? {} : { authorities: d.authorities }),
    },
    accept: (message, key) => d.verbs.acceptReport(message, key),
  });
  return {
    run: () => reporter.run(),
    async stop() {
      const stopped = reporter.stop();
      resolver.close();
      await stopped;
    },
  };
}
