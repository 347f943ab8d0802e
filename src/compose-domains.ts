// Builds what the API and the clock do with domains: part of the composition root.
import { isIP } from 'node:net';
import { HOME_DOMAIN } from './compose-verbs.ts';
import type { Config } from './config.ts';
import { createResolver } from './dns/resolver.ts';
import { recheckDomains } from './domains/check.ts';
import { createDomainVerbs, type DomainVerbs } from './domains/domains.ts';
import { isReservedName } from './domains/name.ts';
import { endRules } from './receiving/rule-status.ts';
import type { Store } from './store/orm.ts';

export interface ComposedDomains {
  readonly verbs: DomainVerbs;
  /** Checks what is due. */
  readonly recheck: () => Promise<void>;
  readonly close: () => void;
}

export function composeDomains(d: {
  readonly config: Config;
  readonly store: Store;
  readonly sealingKey: Buffer;
  readonly firstTenantId: string;
  /** See DomainDependencies. */
  readonly certificateFault?: () => string | null;
}): ComposedDomains {
  const { config } = d;
  const resolver = createResolver({ servers: config.dnsServers, keepsAnswers: false });
  const publicHost = new URL(config.publicUrl).hostname.replace(/^\[|\]$/g, '');
  const isDevelopment = config.mode === 'development';
  const parts = {
    store: d.store,
    sealingKey: d.sealingKey,
    resolver,
    place: {
      hostname: config.hostname,
      // A CNAME leads to a name.
      trackingHost: isIP(publicHost) === 0 ? publicHost : config.hostname,
    },
    now: () => new Date(),
    onReceivingEnd: endRules,
    ...(d.certificateFault === undefined ? {} : { certificateFault: d.certificateFault }),
    isAssumed: (tenantId: string | null, name: string) =>
      isDevelopment &&
      (name === HOME_DOMAIN
        ? tenantId === d.firstTenantId || tenantId === null
        : config.dnsServers === null && isReservedName(name)),
  };
  return {
    verbs: createDomainVerbs(parts),
    recheck: async () => void (await recheckDomains(parts)),
    close: () => resolver.close(),
  };
}
