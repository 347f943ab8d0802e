// API requests per tenant: a fixed window per key, shared by all processes. A process takes its budget
// from Postgres in chunks and serves requests from its chunk in memory, so the processes together never
// exceed the limit and most requests cost no statement. Chunks shrink with what is left, so little is
// held where it is not wanted. While the database is away each process counts by itself.
// `/x` and `/api/x` and SMTP submission share the budget; callers without a key have one per address.
import { isIPv6 } from 'node:net';
import type { Pool } from 'pg';
import { RateLimiterMemory, RateLimiterPostgres, RateLimiterRes } from 'rate-limiter-flexible';
import type { Logger } from '../log.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';
import { Refusal } from './refusal.ts';

export interface Rate {
  readonly headers: Readonly<Record<string, string>>;
  /** Null while there is budget. */
  readonly refusal: Refusal | null;
}

export interface RateLimiter {
  /** Counts one request of this tenant. Never rejects. */
  take(tenantId: string): Promise<Rate>;
  /** Counts one request of a caller without a valid key, in the memory of this process. Never rejects. */
  takeStranger(address: string): Promise<Rate>;
}

export interface RateLimiterOptions {
  readonly requests: number;
  readonly windowMs: number;
  /** Where the windows of tenants are; absent: each process has its own. */
  readonly shared?: { readonly pool: Pool; readonly log: Logger };
}

/** A chunk is this part of what is left, and at least what is wanted right now. */
const CHUNK_PART = 1 / 10;
/** Tenants whose chunk is remembered; beyond it the oldest give theirs up. */
const LEASES_MAX = 20_000;
const TABLE = 'rate_limit';

/** Of one window of one tenant. */
interface Lease {
  /** By this process's clock. */
  readonly until: number;
  /** Taken and not used. */
  held: number;
  /** In the shared window, beside what is held, when it was last asked. */
  readonly left: number;
}

/** What one take from the budget gave. */
interface Grant {
  readonly granted: number;
  readonly left: number;
  readonly msBeforeNext: number;
}

type Take = (key: string, points: number) => Promise<Grant>;

export function createRateLimiter(options: RateLimiterOptions): RateLimiter {
  const { requests, windowMs, shared } = options;
  const seconds = windowMs / 1_000;
  const policy = `${requests};w=${Math.max(1, Math.round(seconds))}`;
  const own = takeFrom(new RateLimiterMemory({ points: requests, duration: seconds }), requests);
  const takeChunk = shared === undefined ? own : takeShared({ requests, seconds, own, ...shared });
  const leases = createLeases(takeChunk, requests);

  const rateOf = ({ granted, left, msBeforeNext }: Grant): Rate => ({
    headers: {
      'ratelimit-limit': String(requests),
      'ratelimit-policy': policy,
      'ratelimit-remaining': String(left),
      'ratelimit-reset': String(Math.ceil(msBeforeNext / 1_000)),
    },
    refusal:
      granted > 0
        ? null
        : new Refusal(
            'rate_limit_exceeded',
            `Too many requests: at most ${requests} in ${seconds} s. Try again later.`,
            { retryAfterSeconds: Math.max(1, Math.ceil(msBeforeNext / 1_000)) },
          ),
  });
  return {
    take: async (tenantId) => rateOf(await leases(tenantId)),
    takeStranger: async (address) => rateOf(await own(`ip ${networkOf(address)}`, 1)),
  };
}

/** One budget for a household: an IPv6 caller has 2^64 addresses. */
export function networkOf(address: string): string {
  if (!isIPv6(address) || address.toLowerCase().startsWith('::ffff:')) return address;
  const [head = '', tail] = address.split('%')[0]!.split('::');
  const before = head === '' ? [] : head.split(':');
  const after = tail === undefined || tail === '' ? [] : tail.split(':');
  const zeros = Array.from({ length: 8 - before.length - after.length }, () => '0');
  return [...before, ...zeros, ...after].slice(0, 4).join(':');
}

/** Takes points of a key's window; what is above the limit is not granted. */
function takeFrom(limiter: RateLimiterMemory | RateLimiterPostgres, limit: number): Take {
  return async (key, points) => {
    const state = await limiter.consume(key, points).catch((error: unknown) => {
      if (error instanceof RateLimiterRes) return error; // above the limit
      throw error;
    });
    const above = Math.max(0, state.consumedPoints - limit);
    return {
      granted: Math.max(0, points - above),
      left: Math.max(0, limit - state.consumedPoints),
      msBeforeNext: state.msBeforeNext,
    };
  };
}

function takeShared(d: {
  readonly requests: number;
  readonly seconds: number;
  readonly own: Take;
  readonly pool: Pool;
  readonly log: Logger;
}): Take {
  const limiter = new RateLimiterPostgres({
    storeClient: d.pool,
    storeType: 'pool',
    tableName: TABLE,
    tableCreated: true,
    clearExpiredByTimeout: false, // forgetOldWindows does
    keyPrefix: 'tenant',
    points: d.requests,
    duration: d.seconds,
  });
  const take = takeFrom(limiter, d.requests);
  return async (key, points) => {
    try {
      return await take(key, points);
    } catch (error) {
      if (!isDatabaseUnavailable(error)) {
        d.log.error(
          { err: error },
          'the shared rate limit does not work; this process counts alone',
        );
      }
      return d.own(key, points);
    }
  };
}

/** Serves single requests from chunks. Those that come while a chunk is being taken wait for it together. */
function createLeases(take: Take, limit: number): (key: string) => Promise<Grant> {
  const leases = new Map<string, Lease>();
  const queues = new Map<string, ((grant: Grant) => void)[]>();

  const remember = (key: string, lease: Lease): void => {
    leases.delete(key);
    if (leases.size >= LEASES_MAX) leases.delete(leases.keys().next().value!);
    leases.set(key, lease);
  };
  /** Every turn serves at least one, or refuses all. */
  const refill = async (key: string, queue: ((grant: Grant) => void)[]): Promise<void> => {
    let left = leases.get(key)?.left ?? limit;
    while (queue.length > 0) {
      const chunk = Math.max(Math.floor(left * CHUNK_PART), queue.length);
      const grant = await take(key, Math.min(limit, chunk));
      left = grant.left;
      let held = grant.granted;
      for (const answer of queue.splice(0, left === 0 ? queue.length : held)) {
        const granted = held > 0 ? 1 : 0;
        held -= granted;
        answer({ granted, left: left + held, msBeforeNext: grant.msBeforeNext });
      }
      remember(key, { until: Date.now() + grant.msBeforeNext, held, left });
    }
    queues.delete(key); // in the same turn as the last look at it
  };

  return (key) => {
    const lease = leases.get(key);
    const msBeforeNext = (lease?.until ?? 0) - Date.now();
    if (lease !== undefined && msBeforeNext <= 0) leases.delete(key);
    else if (lease !== undefined && lease.held > 0) {
      lease.held -= 1;
      return Promise.resolve({ granted: 1, left: lease.left + lease.held, msBeforeNext });
    } else if (lease !== undefined && lease.left === 0) {
      return Promise.resolve({ granted: 0, left: 0, msBeforeNext });
    }
    return new Promise((resolve) => {
      const queue = queues.get(key);
      if (queue !== undefined) {
        queue.push(resolve);
        return;
      }
      const waiting = [resolve];
      queues.set(key, waiting);
      void refill(key, waiting);
    });
  };
}

/** Forgets windows that have been over for a while; nothing depends on when. How many. */
export async function forgetOldWindows(db: Pick<Pool, 'query'>): Promise<number> {
  const { rowCount } = await db.query(
    `delete from ${TABLE} where expire < extract(epoch from now() - interval '1 hour') * 1000`,
  );
  return rowCount ?? 0;
}
