// What a worker claimed and does not begin goes back to the queue here: gathered for a moment, so that many destinations
// of one closed lane cost one statement, and with a brake. A worker does not remember all destinations of a lane that has
// very many; claimed again and again only to go back, they would cost more than mail that moves.
import type { ClaimedDelivery } from '../queue/claim.ts';

export interface Returns {
  /** Resolves when they are back, or `release` has failed. */
  add(deliveries: readonly ClaimedDelivery[]): Promise<void>;
  /** Resolves when nothing is on its way back. */
  drain(): Promise<void>;
}

const GATHER_MS = 5;

/** `release` never rejects. */
export function createReturns(
  release: (deliveries: readonly ClaimedDelivery[]) => Promise<void>,
): Returns {
  const waiting: ClaimedDelivery[] = [];
  const running = new Set<Promise<void>>();
  let next: Promise<void> | null = null;

  const flush = async (): Promise<void> => {
    await new Promise((resolve) => setTimeout(resolve, GATHER_MS));
    next = null;
    await release(waiting.splice(0));
  };

  return {
    add(deliveries) {
      waiting.push(...deliveries);
      if (next === null) {
        const flushed = flush().finally(() => running.delete(flushed));
        next = flushed;
        running.add(flushed);
      }
      return next;
    },
    async drain() {
      while (running.size > 0) await Promise.all(running);
    },
  };
}

export interface Brake {
  /** So many were claimed for a lane that turned out to be closed. */
  note(count: number): void;
  isOn(): boolean;
}

/** Within a second more than this pulls it. */
const CAME_BACK_MAX = 200;
const SECOND_MS = 1_000;
const HOLD_MAX_MS = 8_000;

/** Holds for a second, and for twice as long each time it is pulled again right after. `now` is monotonic. */
export function createBrake(now: () => number): Brake {
  let count = 0;
  let since = now();
  let heldUntil = -Infinity;
  let holdMs = SECOND_MS;
  return {
    note(more) {
      const at = now();
      if (at - since > SECOND_MS) {
        count = 0;
        since = at;
      }
      count += more;
      if (count < CAME_BACK_MAX || at < heldUntil) return;
      holdMs = at - heldUntil < 2 * SECOND_MS ? Math.min(2 * holdMs, HOLD_MAX_MS) : SECOND_MS;
      heldUntil = at + holdMs;
      count = 0;
    },
    isOn: () => now() < heldUntil,
  };
}
