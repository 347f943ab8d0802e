// How often something may happen: the generic cell rate algorithm. One number is kept, the time at which the next event
// would be on schedule; an event that comes too early for the burst that is allowed waits. Pure: the clock is passed in.

export interface Pace {
  /** How long until one more may happen; 0: now. */
  waitMs(nowMs: number): number;
  /** One more happens now, whether it may or not: what was taken too early makes the next ones wait longer. */
  take(nowMs: number): void;
}

/**
 * `perPeriod` events (above 0, fractions too) in `periodMs`; `burst` of them (at least 1) may come at once. `nowMs` is of
 * any clock that does not go back; where it does, nobody waits longer than after a full burst.
 */
export function createPace(options: {
  readonly perPeriod: number;
  readonly periodMs: number;
  readonly burst: number;
}): Pace {
  const intervalMs = options.periodMs / options.perPeriod;
  const toleranceMs = intervalMs * (Math.max(1, options.burst) - 1);
  let dueMs = -Infinity;
  return {
    waitMs(nowMs) {
      // A clock that was set back must not stop everything until it has come forward again.
      if (dueMs > nowMs + toleranceMs + intervalMs) dueMs = nowMs + toleranceMs + intervalMs;
      return Math.max(0, dueMs - toleranceMs - nowMs);
    },
    take(nowMs) {
      dueMs = Math.max(dueMs, nowMs) + intervalMs;
    },
  };
}
