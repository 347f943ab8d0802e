// How long a worker that found nothing waits before it looks again. What is made ready in its own process nudges it; what
// other processes make ready it has to find, soon, and by a statement that costs the database next to nothing.

/** Where everything that makes mail ready nudges. */
const TOLD_MS = 1_000;
/** Mail of another process waits half of this on average. */
const UNTOLD_MS = 100;
/** One part in so many of the time may go into looking: behind long backlogs of closed lanes a claim costs more. */
const LOOKING_SHARE = 10;

/** `tookMs`: what the look that found nothing took. */
export const idleMs = (isTold: boolean, tookMs: number): number =>
  isTold ? TOLD_MS : Math.min(TOLD_MS, Math.max(UNTOLD_MS, tookMs * LOOKING_SHARE));
