// How often something may happen: the generic cell rate algorithm. One number is kept, the time at which the next event
// would be on schedule; an event that comes too early for the burst that is allowed waits. Pure: the clock is passed in.

export interface Pace {
  /** How long until one more may happen; 0: now. */
  waitMs(nowMs: number): number;
  /** One more happens now, whether it may or not: what was taken too early makes the next ones wait longer. */
  take(nowMs: number): void;
  /** Another rate from now on. What was saved up stays, as far as the new burst lets it, and is not made more. */
  use(rate: Rate, nowMs: number): void;
}

/** `perPeriod` events (above 0, fractions too) in each period; `burst` of them (at least 1) may come at once. */
export interface Rate {
  readonly perPeriod: number;
  readonly burst: number;
}

/**
 * `nowMs` is of any clock that does not go back; where it does, nobody waits longer than after a full burst.
 * `isSpentAtMs`: begins as if the burst had been used at that time; absent: it may come at once.
 */
export function createPace(
  options: Rate & { readonly periodMs: number; readonly isSpentAtMs?: number },
): Pace {
  let intervalMs = options.periodMs / options.perPeriod;
  let toleranceMs = intervalMs * (Math.max(1, options.burst) - 1);
  let dueMs =
    options.isSpentAtMs === undefined ? -Infinity : options.isSpentAtMs + toleranceMs + intervalMs;
  /** A clock that was set back must not stop everything until it has come forward again. */
  const bound = (nowMs: number): void => {
    dueMs = Math.min(dueMs, nowMs + toleranceMs + intervalMs);
  };
  return {
    waitMs(nowMs) {
      bound(nowMs);
      return Math.max(0, dueMs - toleranceMs - nowMs);
    },
    take(nowMs) {
      dueMs = Math.max(dueMs, nowMs) + intervalMs;
    },
    use({ perPeriod, burst }, nowMs) {
      bound(nowMs);
      const most = Math.max(1, burst);
      const left = (toleranceMs + intervalMs - Math.max(0, dueMs - nowMs)) / intervalMs;
      intervalMs = options.periodMs / perPeriod;
      toleranceMs = intervalMs * (Math.max(1, burst) - 1);
      dueMs = nowMs + (most - Math.min(most, left)) * intervalMs;
    },
  };
}
