// When a deferred delivery is tried again.

/** Jitter, so that what was deferred together is not tried together again. */
const JITTER = 0.2;

/**
 * The delay before the next attempt, after `attempt` attempts were made (1 for the first).
 *
 * The schedule's entry for this attempt, its last entry from then on, ±20 %. `random` is in [0, 1).
 * RFC 5321 §4.5.4.1 asks for 30 minutes in general and allows shorter pauses at first.
 */
export function nextDelayMs(
  scheduleMs: readonly number[],
  attempt: number,
  random: number,
): number {
  const planned = scheduleMs[Math.min(attempt, scheduleMs.length) - 1];
  if (planned === undefined) throw new Error('the retry schedule is empty');
  return Math.round(planned * (1 - JITTER + 2 * JITTER * random));
}
