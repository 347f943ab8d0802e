/**
 * What an operator decides about leaving mail (config/delivery.json): the addresses of this machine that it leaves from,
 * the pools they form and who is given which, and the policies that go with them.
 *
 * In: the parsed file. Out: values that answer without asking anybody. Refuses, with the key and what to fix, whatever
 * it does not know: a policy that is silently ignored is worse than none.
 */
import { createHash } from 'node:crypto';
import { isIP } from 'node:net';
import type { AddressPolicy } from '../dns/mx-hosts.ts';
import { isHostName, toALabels } from '../dns/host-name.ts';
import { DEFAULT_POOL } from '../store/destination.ts';
import { duration, fields, isObject, list, oneOf, wrong } from '../mail/rule-file.ts';

/** Where mail leaves this machine. A family without an address of its own is not used, unless neither has one. */
export interface Egress {
  readonly name: string;
  /** Null in both: the system chooses. */
  readonly ipv4: string | null;
  readonly ipv6: string | null;
  /** Our name in EHLO; null: MAILSTEAD_HOSTNAME. */
  readonly helo: string | null;
}

/** What becomes of a delivery whose answer to the final dot was lost. */
export type UnknownPolicy = 'retry_once' | 'at_most_once';

export interface DeliveryPolicy {
  /** By pool; no list is empty. */
  readonly pools: ReadonlyMap<string, readonly Egress[]>;
  /** The first that fits decides. */
  readonly assign: readonly Assignment[];
  readonly addresses: AddressPolicy;
  readonly unknown: {
    readonly default: UnknownPolicy;
    readonly tenants: Readonly<Record<string, UnknownPolicy>>;
  };
  /** Whether mail goes through the smarthost when port 25 is blocked. */
  readonly spill: { readonly smarthost: boolean };
  /** `resolver`: a validating one that is trusted, as `address:port`; null: no DANE. */
  readonly dane: { readonly resolver: string | null };
  /** How long a delivery waits before its sender is told; above 0. */
  readonly delayedAfterMs: number;
  /** Hosts that are dialled to find out whether port 25 is open; empty: only real mail tells. */
  readonly port25Probes: readonly string[];
}

export interface Assignment {
  readonly tenant: string | null;
  /** The domain of `from`, in A-labels. */
  readonly domain: string | null;
  readonly pool: string;
}

/** What mail leaves from where the file says nothing: an address of the system's choice. */
export const SYSTEM_EGRESS: Egress = { name: DEFAULT_POOL, ipv4: null, ipv6: null, helo: null };

const EGRESSES_MAX = 1_000;
const POOLS_MAX = 1_000;
const ASSIGNMENTS_MAX = 100_000;
const TENANTS_MAX = 100_000;
const PROBES_MAX = 10;
/** A part of lanes' and destinations' names, so none of `/`, `@`, `:` or space. */
const NAME = /^[a-z0-9](?:[a-z0-9_-]{0,30}[a-z0-9])?$/;
const POLICIES: readonly AddressPolicy[] = ['ipv4_first', 'ipv6_first', 'ipv4_only', 'ipv6_only'];
const UNKNOWN_POLICIES: readonly UnknownPolicy[] = ['retry_once', 'at_most_once'];
const DELAYED_AFTER_MAX = { ms: 7 * 86_400_000, words: '7d' };

/** Throws an Error that names the key and says what is wrong with it. */
export function readDeliveryPolicy(file: unknown): DeliveryPolicy {
  const root = fields(file, 'the file', {
    egresses: {},
    pools: {},
    assign: [],
    addresses: 'ipv4_first',
    unknown: {},
    spill: {},
    dane: {},
    delayed_after: '4h',
    port25_probes: [],
  });
  const addresses = oneOf(root.addresses, 'addresses', POLICIES);
  const egresses = readEgresses(root.egresses, addresses);
  const pools = readPools(root.pools, egresses);
  const unknown = fields(root.unknown, 'unknown', { default: 'retry_once', tenants: {} });
  const spill = fields(root.spill, 'spill', { smarthost: false });
  const dane = fields(root.dane, 'dane', { resolver: null });
  if (typeof spill.smarthost !== 'boolean') throw wrong('spill.smarthost', 'true or false');
  return {
    pools,
    assign: list(root.assign, 'assign', ASSIGNMENTS_MAX).map((one, index) =>
      readAssignment(one, { at: `assign[${index}]`, pools }),
    ),
    addresses,
    unknown: {
      default: oneOf(unknown.default, 'unknown.default', UNKNOWN_POLICIES),
      tenants: Object.fromEntries(
        entries(unknown.tenants, 'unknown.tenants', TENANTS_MAX).map(([id, policy]) => [
          id,
          oneOf(policy, `unknown.tenants.${id}`, UNKNOWN_POLICIES),
        ]),
      ),
    },
    spill: { smarthost: spill.smarthost },
    dane: { resolver: readResolver(dane.resolver) },
    delayedAfterMs: duration(root.delayed_after, 'delayed_after', DELAYED_AFTER_MAX),
    port25Probes: list(root.port25_probes, 'port25_probes', PROBES_MAX).map((host, index) =>
      readHost(host, `port25_probes[${index}]`),
    ),
  };
}

/** The pool that mail of this tenant from this domain (A-labels) leaves through. */
export function poolOf(
  policy: DeliveryPolicy,
  { tenantId, domain }: { readonly tenantId: string; readonly domain: string },
): string {
  const found = policy.assign.find(
    (one) =>
      (one.tenant === null || one.tenant === tenantId) &&
      (one.domain === null || one.domain === domain),
  );
  return found?.pool ?? DEFAULT_POOL;
}

/** In no order that means anything; a pool that is gone: those of the default one. */
export const membersOf = ({ pools }: DeliveryPolicy, pool: string): readonly Egress[] =>
  pools.get(pool) ?? pools.get(DEFAULT_POOL) ?? [SYSTEM_EGRESS];

/**
 * Where mail of this email to this domain leaves: its whole pool, in an order that is the same at every attempt while the
 * pool is, so that a host that puts off strangers sees the same address again; the next ones are for when a way out is
 * closed.
 */
export function egressesOf(
  policy: DeliveryPolicy,
  about: { readonly pool: string; readonly emailId: string; readonly domain: string },
): readonly Egress[] {
  const pool = membersOf(policy, about.pool);
  if (pool.length === 1) return pool;
  // By a draw for each, so that an egress more or less moves only its own share.
  const draws = pool.map((egress) => ({ egress, draw: drawOf(egress, about) }));
  return draws.toSorted((a, b) => b.draw - a.draw).map(({ egress }) => egress);
}

const drawOf = (
  { name }: Egress,
  { emailId, domain }: { readonly emailId: string; readonly domain: string },
): number => createHash('sha256').update(`${name} ${emailId} ${domain}`).digest().readUIntBE(0, 6);

function readEgresses(value: unknown, addresses: AddressPolicy): ReadonlyMap<string, Egress> {
  return new Map(
    entries(value, 'egresses', EGRESSES_MAX).map(([name, one]) => {
      const at = `egresses.${name}`;
      const given = fields(one, at, { ipv4: null, ipv6: null, helo: null });
      const egress: Egress = {
        name: readName(name, at),
        ipv4: readAddress(given.ipv4, `${at}.ipv4`, 4),
        ipv6: readAddress(given.ipv6, `${at}.ipv6`, 6),
        helo: given.helo === null ? null : readHost(given.helo, `${at}.helo`),
      };
      const { ipv4, ipv6 } = egress;
      if (
        (addresses === 'ipv4_only' && ipv4 === null && ipv6 !== null) ||
        (addresses === 'ipv6_only' && ipv6 === null && ipv4 !== null)
      ) {
        throw new Error(
          `${at}: has no address of the family that \`addresses: ${addresses}\` allows`,
        );
      }
      return [name, egress] as const;
    }),
  );
}

function readPools(
  value: unknown,
  egresses: ReadonlyMap<string, Egress>,
): ReadonlyMap<string, readonly Egress[]> {
  const pools = new Map<string, readonly Egress[]>([[DEFAULT_POOL, [SYSTEM_EGRESS]]]);
  for (const [name, members] of entries(value, 'pools', POOLS_MAX)) {
    const at = `pools.${name}`;
    const found = list(members, at, EGRESSES_MAX).map((member) => {
      const egress = typeof member === 'string' ? egresses.get(member) : undefined;
      if (egress === undefined) {
        throw new Error(`${at}: ${JSON.stringify(member)} is none of the egresses`);
      }
      return egress;
    });
    if (found.length === 0) throw wrong(at, 'a list of at least one egress');
    pools.set(readName(name, at), [...new Set(found)]);
  }
  // Lanes are named after their egress: two of one name would share connections and limits.
  if (egresses.has(SYSTEM_EGRESS.name) && pools.get(DEFAULT_POOL)?.[0] === SYSTEM_EGRESS) {
    throw new Error(
      `egresses.${SYSTEM_EGRESS.name}: this is the name of the address of the system's choice, which mail leaves from while there is no \`pools.${DEFAULT_POOL}\`; set that, or choose another name`,
    );
  }
  return pools;
}

function readAssignment(
  value: unknown,
  { at, pools }: { readonly at: string; readonly pools: ReadonlyMap<string, unknown> },
): Assignment {
  const given = fields(value, at, { tenant: null, domain: null, pool: null });
  if (typeof given.pool !== 'string' || !pools.has(given.pool)) {
    throw new Error(`${at}.pool: ${JSON.stringify(given.pool)} is none of the pools`);
  }
  if (given.tenant === null && given.domain === null) {
    throw new Error(`${at}: says neither \`tenant\` nor \`domain\``);
  }
  if (given.tenant !== null && typeof given.tenant !== 'string') {
    throw wrong(`${at}.tenant`, 'the id of a tenant');
  }
  return {
    tenant: given.tenant,
    domain: given.domain === null ? null : readHost(given.domain, `${at}.domain`),
    pool: given.pool,
  };
}

function readName(name: string, at: string): string {
  if (NAME.test(name)) return name;
  throw new Error(`${at}: a name is at most 32 of a-z, 0-9, hyphen and underscore`);
}

function readAddress(value: unknown, at: string, family: 4 | 6): string | null {
  if (value === null) return null;
  if (typeof value === 'string' && isIP(value) === family) return value;
  throw wrong(at, `an IPv${family} address or null`);
}

function readHost(value: unknown, at: string): string {
  const name = typeof value === 'string' ? toALabels(value) : '';
  if (name.includes('.') && isHostName(name)) return name;
  throw wrong(at, 'a full host name');
}

function readResolver(value: unknown): string | null {
  if (value === null) return null;
  const match = typeof value === 'string' ? /^\[?([^\]]+)\]?:(\d{1,5})$/.exec(value) : null;
  const port = Number(match?.[2]);
  if (match !== null && isIP(match[1] ?? '') !== 0 && port > 0 && port <= 65_535) return match[0];
  throw wrong('dane.resolver', 'an address with a port, such as 127.0.0.1:53 or [::1]:53, or null');
}

function entries(value: unknown, at: string, max: number): readonly (readonly [string, unknown])[] {
  if (!isObject(value)) throw wrong(at, 'an object');
  const all = Object.entries(value);
  if (all.length > max) throw new Error(`${at}: has more than ${max} entries`);
  return all;
}
