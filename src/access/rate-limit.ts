// API requests per tenant: a fixed window per key, in the memory of this process. `/x` and `/api/x`
// share the budget.
import { RateLimiterMemory, RateLimiterRes } from 'rate-limiter-flexible';
import { Refusal } from './refusal.ts';

export interface Rate {
  readonly headers: Readonly<Record<string, string>>;
  /** Null while there is budget. */
  readonly refusal: Refusal | null;
}

export interface RateLimiter {
  /** Counts one request of this key. */
  take(key: string): Promise<Rate>;
}

export function createRateLimiter(limit: {
  readonly requests: number;
  readonly windowMs: number;
}): RateLimiter {
  const { requests, windowMs } = limit;
  const seconds = windowMs / 1_000;
  const limiter = new RateLimiterMemory({ points: requests, duration: seconds });
  const policy = `${requests};w=${Math.max(1, Math.round(seconds))}`;

  const headersOf = (state: RateLimiterRes): Record<string, string> => ({
    'ratelimit-limit': String(requests),
    'ratelimit-policy': policy,
    'ratelimit-remaining': String(Math.max(0, state.remainingPoints)),
    'ratelimit-reset': String(Math.ceil(state.msBeforeNext / 1_000)),
  });
  return {
    async take(key) {
      try {
        return { headers: headersOf(await limiter.consume(key)), refusal: null };
      } catch (state) {
        if (!(state instanceof RateLimiterRes)) throw state;
        return {
          headers: headersOf(state),
          refusal: new Refusal(
            'rate_limit_exceeded',
            `Too many requests: at most ${requests} in ${seconds} s. Try again later.`,
            { retryAfterSeconds: Math.max(1, Math.ceil(state.msBeforeNext / 1_000)) },
          ),
        };
      }
    },
  };
}
