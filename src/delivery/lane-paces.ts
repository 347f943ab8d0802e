// How fast one lane may go in one worker: new connections in a minute and messages in a second, each in proportion to the
// part of the lane's connections that the worker has, so that all workers together keep to the provider's numbers.
import { createPace, type Pace, type Rate } from './pace.ts';
import type { Limits } from './providers.ts';

export interface LanePaces {
  /** How long until a message may leave; `needsNew`: over a connection that is yet to be opened. */
  waitMs(needsNew: boolean): number;
  take(needsNew: boolean): void;
  /** `connections` of the limits' are this worker's, 0 to all. What was saved up while it had none is not given. */
  use(limits: Limits, connections: number): void;
}

const MINUTE_MS = 60_000;
const SECOND_MS = 1_000;

/** `now` is monotonic. `mayBurst`: nobody else has used the lane's rates just now. */
export function createLanePaces(now: () => number, mayBurst: () => boolean): LanePaces {
  let connection: Pace | null = null;
  let message: Pace | null = null;
  let hadNone = false;

  const paceFor = (before: Pace | null, rate: Rate | null, periodMs: number): Pace | null => {
    if (rate === null) return null;
    if (before === null) {
      const isSpent = hadNone || !mayBurst();
      return createPace({ ...rate, periodMs, ...(isSpent ? { isSpentAtMs: now() } : {}) });
    }
    before.use(rate, now());
    return before;
  };

  return {
    waitMs: (needsNew) =>
      Math.max(message?.waitMs(now()) ?? 0, needsNew ? (connection?.waitMs(now()) ?? 0) : 0),
    take(needsNew) {
      message?.take(now());
      if (needsNew) connection?.take(now());
    },
    use({ connectionsMax, newConnectionsPerMinute, messagesPerSecond }, connections) {
      const part = Math.min(1, connections / connectionsMax);
      if (part === 0) {
        hadNone ||= connection !== null || message !== null;
        connection = null;
        message = null;
        return;
      }
      const rateOf = (perPeriod: number | null, most: number): Rate | null =>
        perPeriod === null
          ? null
          : { perPeriod: perPeriod * part, burst: Math.min(most, perPeriod * part) };
      connection = paceFor(connection, rateOf(newConnectionsPerMinute, connections), MINUTE_MS);
      message = paceFor(message, rateOf(messagesPerSecond, Infinity), SECOND_MS);
      hadNone = false;
    },
  };
}
