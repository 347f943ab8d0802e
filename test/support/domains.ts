// Domains on a real database with a real DNS server of their own, two tenants, and a clock that a test sets.
import { recheckDomains } from '../../src/domains/check.ts';
import {
  createDomainVerbs,
  type DomainVerbs,
  type DomainView,
  type RecordView,
} from '../../src/domains/domains.ts';
import type { Caller } from '../../src/access/keys.ts';
import { createResolver } from '../../src/dns/resolver.ts';
import { createDomainLookup, type DomainLookup } from '../../src/domains/lookup.ts';
import { endRules } from '../../src/receiving/rule-status.ts';
import { newId } from '../../src/store/id.ts';
import type { Store } from '../../src/store/orm.ts';
import { startDns, type DnsServer, type DnsZones } from './dns.ts';
import { openQueue } from './queue.ts';

export const HOSTNAME = 'mail.host.test';
export const TRACKING_HOST = 'track.host.test';
export const HOUR_MS = 3_600_000;

export interface Domains {
  readonly store: Store;
  readonly dns: DnsServer;
  readonly verbs: DomainVerbs;
  /** Full-access callers of two tenants. */
  readonly one: Caller;
  readonly two: Caller;
  /** What the verbs take for now. */
  readonly clock: { now: Date };
  readonly assumed: Set<string>;
  /** What is wrong with the certificate of the inbound listener. */
  readonly certificate: { fault: string | null };
  readonly lookup: DomainLookup;
  recheck(): Promise<number>;
  /** Moves the clock to when the domain is due and checks; the minutes that it took. */
  recheckWhenDue(id: string): Promise<number | null>;
  stop(): Promise<void>;
}

export async function openDomains(): Promise<Domains> {
  const { store, tenantId, stop } = await openQueue();
  const otherId = newId();
  await store.pool.query('insert into tenant (id, name) values ($1, $2)', [otherId, 'second']);
  const dns = await startDns({});
  const resolver = createResolver({
    servers: [dns.server],
    timeoutMs: 150,
    tries: 1,
    keepsAnswers: false,
  });
  const clock = { now: new Date('2026-05-06T12:00:00.000Z') };
  const assumed = new Set<string>();
  const certificate: { fault: string | null } = { fault: null };
  const sealingKey = Buffer.alloc(32, 7);
  const parts = {
    store,
    resolver,
    sealingKey,
    place: { hostname: HOSTNAME, trackingHost: TRACKING_HOST },
    now: () => clock.now,
    onReceivingEnd: endRules,
    certificateFault: () => certificate.fault,
    isAssumed: (_tenantId: string | null, name: string) => assumed.has(name),
  };
  const callerOf = (tenant: string): Caller => {
    return { tenantId: tenant, keyId: newId(), permission: 'full_access', domainId: null };
  };
  const recheck = (): Promise<number> => recheckDomains(parts);
  return {
    store,
    dns,
    verbs: createDomainVerbs(parts),
    one: callerOf(tenantId),
    two: callerOf(otherId),
    clock,
    assumed,
    certificate,
    lookup: createDomainLookup(store.pool, sealingKey),
    recheck,
    async recheckWhenDue(id) {
      const { rows } = await store.pool.query<{ ms: string | null }>(
        'select (extract(epoch from next_check_at) * 1000)::bigint::text as ms from sending_domain where id = $1',
        [id],
      );
      const ms = rows[0]?.ms ?? null;
      if (ms === null) return null;
      const minutes = (Number(ms) - clock.now.getTime()) / 60_000;
      clock.now = new Date(Number(ms));
      await recheck();
      return minutes;
    },
    async stop() {
      resolver.close();
      await dns.stop();
      await stop();
    },
  };
}

/** Puts every record of the domain into the DNS, as a tenant would do it. */
export function publish(dns: DnsServer, domain: Pick<DomainView, 'records'>): void {
  Object.assign(dns.zones, zonesOf(domain));
}

/** What a tenant would publish, name by name. */
export function zonesOf(domain: {
  readonly records: readonly (Pick<RecordView, 'name' | 'type' | 'value'> & {
    readonly priority?: number | null;
  })[];
}): DnsZones {
  const zones: Record<string, { MX?: string[]; TXT?: string[]; CNAME?: string }> = {};
  for (const { name, type, value, priority } of domain.records) {
    const zone = (zones[name] ??= {});
    if (type === 'CNAME') zone.CNAME = value;
    else if (type === 'MX') zone.MX = [...(zone.MX ?? []), `${priority} ${value}`];
    else zone.TXT = [...(zone.TXT ?? []), value];
  }
  return zones;
}

/** `record type` and the status, one word each. */
export const statuses = (domain: Pick<DomainView, 'records'> | null): Record<string, string> =>
  Object.fromEntries(
    (domain?.records ?? []).map(({ name, record, type, status }) => [
      name.startsWith('mailstead-ed25519') ? 'Ed25519' : `${record} ${type}`,
      status,
    ]),
  );
