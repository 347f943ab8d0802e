// Whose turn it is to be called. Tenants take turns, and of each its endpoints; an endpoint has so many places that its
// own events wait for, so that one which is dead or slow delays nobody else. A new one has few places and gets more with
// every acknowledgement; one that fails again and again is called once in a while, until it answers. All in memory:
// another process, or the next start, finds out for itself.
import type { EndpointKey } from './fan-out.ts';

/** What this process knows of an endpoint. */
export interface Endpoint extends EndpointKey {
  /** It is believed to have events that are due; counts how often somebody said so. */
  due: number;
  /** The same, as it was when a claim found no more. */
  exhausted: number;
  /** Calls at a time. */
  places: number;
  /** Calls in a row that were not acknowledged. */
  failures: number;
  /** It was called by this process. */
  isKnown: boolean;
  /** On the clock of `performance.now()`. */
  pausedUntilMs: number;
  /** Claimed, and not stored yet what became of it. */
  held: number;
  /** Under way. */
  calls: number;
}

/** Claimed of all endpoints; each call is a socket. */
const HELD_MAX = 600;
/** And never more than is left for all others: so whoever comes next finds a place, however many take all they can. */
const HELD_BY_TENANT_MAX = 200;
/** Endpoints in trouble that are called at the same time: they never take the places of the others. */
const PROBES_MAX = 100;
/** As above. */
const PROBES_BY_TENANT_MAX = 25;
export const PLACES_MAX = 10;
const PLACES_FIRST = 3;
/** So many times its places an endpoint has claimed: the next call begins when one ends, not when its result is stored. */
const AHEAD = 4;
/** Calls in a row after which it has no more claimed than it can be called with. */
const FAILURES_UNTIL_CARE = 3;
const FAILURES_UNTIL_PROBES = 10;
const PROBE_PAUSE_MIN_MS = 1_000;
const PROBE_PAUSE_MAX_MS = 30_000;
/** Endpoints that are remembered. */
const ENDPOINTS_MAX = 5_000;

/** What a tenant has and wants. */
interface Share {
  held: number;
  /** Of its endpoints in trouble, those that are being called. */
  probes: number;
  waiting: Endpoint[];
}

export interface Turns {
  /** Null where there are too many to know: it comes by again with the next look. */
  find(key: EndpointKey): Endpoint | null;
  /** How many events to claim of which endpoints now. */
  shareOut(): readonly (EndpointKey & { readonly room: number })[];
  isProbed(endpoint: Endpoint): boolean;
  acknowledged(endpoint: Endpoint): void;
  failed(endpoint: Endpoint): void;
  /** It was failing before this process knew it: it begins with one call. */
  suspect(endpoint: Endpoint): void;
}

export function createTurns(): Turns {
  const endpoints = new Map<string, Endpoint>();
  let round = 0;

  const isProbed = ({ failures }: Endpoint): boolean => failures >= FAILURES_UNTIL_PROBES;
  const isIdle = (one: Endpoint): boolean =>
    one.held === 0 && one.due === one.exhausted && one.pausedUntilMs < performance.now();

  /** An endpoint is claimed for again when half of what it may have is left, so that claims are worth their cost. */
  const roomOf = (one: Endpoint): number => {
    if (one.due === one.exhausted) return 0;
    if (isProbed(one)) return one.held > 0 || one.pausedUntilMs > performance.now() ? 0 : 1;
    // A new one may hang as well as answer.
    const isTrusted = one.places > PLACES_FIRST && one.failures < FAILURES_UNTIL_CARE;
    const max = one.places * (isTrusted ? AHEAD : 1);
    return one.held > max / 2 ? 0 : max - one.held;
  };

  /** Those that have room, by tenant; whoever was first before is last now. */
  const collect = (): Share[] => {
    const tenants = new Map<string, Share>();
    for (const one of endpoints.values()) {
      const tenant = tenants.get(one.tenantId) ?? { held: 0, probes: 0, waiting: [] };
      tenants.set(one.tenantId, tenant);
      tenant.held += one.held;
      if (isProbed(one) && one.held > 0) tenant.probes += 1;
      if (roomOf(one) > 0) tenant.waiting.push(one);
    }
    round += 1;
    for (const tenant of tenants.values()) tenant.waiting = rotated(tenant.waiting, round);
    return rotated([...tenants.values()], round);
  };

  return {
    find(key) {
      const known = endpoints.get(key.webhookId);
      if (known !== undefined) return known;
      if (endpoints.size >= ENDPOINTS_MAX) {
        for (const [id, one] of endpoints) if (isIdle(one)) endpoints.delete(id);
        if (endpoints.size >= ENDPOINTS_MAX) return null;
      }
      const fresh = {
        tenantId: key.tenantId,
        webhookId: key.webhookId,
        due: 0,
        exhausted: 0,
        places: PLACES_FIRST,
        failures: 0,
        isKnown: false,
        pausedUntilMs: 0,
        held: 0,
        calls: 0,
      };
      endpoints.set(key.webhookId, fresh);
      return fresh;
    },

    shareOut() {
      const rooms = new Map<Endpoint, number>();
      let tenants = collect();
      let free = tenants.reduce((left, { held }) => left - held, HELD_MAX);
      let freeProbes = tenants.reduce((left, { probes }) => left - probes, PROBES_MAX);
      while (tenants.length > 0) {
        for (const tenant of tenants) {
          const next =
            tenant.held < Math.min(HELD_BY_TENANT_MAX, free) ? tenant.waiting.shift() : undefined;
          if (next === undefined) {
            tenant.waiting = [];
            continue;
          }
          if (isProbed(next)) {
            if (tenant.probes >= Math.min(PROBES_BY_TENANT_MAX, freeProbes)) continue;
            tenant.probes += 1;
            freeProbes -= 1;
          }
          const room = (rooms.get(next) ?? 0) + 1;
          rooms.set(next, room);
          tenant.held += 1;
          free -= 1;
          if (room < roomOf(next)) tenant.waiting.push(next);
        }
        tenants = tenants.filter(({ waiting }) => waiting.length > 0);
      }
      return [...rooms].map(([{ tenantId, webhookId }, room]) => ({ tenantId, webhookId, room }));
    },

    isProbed,

    acknowledged(one) {
      one.places = isProbed(one) ? PLACES_FIRST : Math.min(PLACES_MAX, one.places + 1);
      one.isKnown = true;
      one.failures = 0;
      one.pausedUntilMs = 0;
    },

    failed(one) {
      one.isKnown = true;
      one.failures += 1;
      if (!isProbed(one)) return;
      const doublings = Math.min(10, one.failures - FAILURES_UNTIL_PROBES);
      const pauseMs = Math.min(PROBE_PAUSE_MAX_MS, PROBE_PAUSE_MIN_MS * 2 ** doublings);
      one.pausedUntilMs = performance.now() + pauseMs;
    },

    suspect(one) {
      if (one.isKnown) return;
      one.isKnown = true;
      one.failures = FAILURES_UNTIL_PROBES - 1;
      one.places = 1;
    },
  };
}

function rotated<T>(items: readonly T[], by: number): T[] {
  const at = items.length === 0 ? 0 : by % items.length;
  return [...items.slice(at), ...items.slice(0, at)];
}
