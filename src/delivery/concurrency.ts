// How many connections a lane trusts itself to use at once. It learns from what attempts say: one more after as many
// good ones as there are connections, one less at the first bad one of a series (the model is Postfix's scheduler with
// feedback 1/N). A step up that was punished makes the next step wait twice as long, so that a peer with a fixed limit
// is asked for more only now and then. Pure.

export interface Concurrency {
  /** At least 1. */
  value(): number;
  /** An attempt went well; `isFull`: while as many were under way as might be. */
  good(isFull: boolean): void;
  /** The peer wants less, or could not be reached. */
  bad(): void;
  /** Begins anew, after the far end was away. */
  restart(): void;
  limit(max: number): void;
}

export const CONCURRENCY_FIRST = 5;
const PATIENCE_MAX = 32;

export function createConcurrency(options: {
  readonly max: number;
  readonly first?: number;
}): Concurrency {
  let { max } = options;
  const { first = CONCURRENCY_FIRST } = options;
  let value = Math.min(first, max);
  /** Parts of a step up, and of steps down that were made ahead. */
  let credit = 0;
  let debt = 0;
  let patience = 1;
  /** The value that was punished last. */
  let ceiling = Infinity;
  return {
    value: () => value,
    good(isFull) {
      // Nothing is learned about connections that are not used.
      if (value >= max || !isFull) return;
      credit += 1 / (value * (value + 1 >= ceiling ? patience : 1));
      if (credit < 1) return;
      credit = 0;
      debt = 0;
      value += 1;
      if (value > ceiling) {
        ceiling = Infinity;
        patience = 1;
      }
    },
    bad() {
      credit = 0;
      debt -= 1 / value;
      if (debt >= 0) return;
      debt += 1;
      patience = value === ceiling ? Math.min(patience * 2, PATIENCE_MAX) : 2;
      ceiling = value;
      value = Math.max(1, value - 1);
    },
    restart() {
      value = Math.min(first, max);
      credit = 0;
      debt = 0;
      patience = 1;
      ceiling = Infinity;
    },
    limit(next) {
      max = next;
      value = Math.min(value, max);
    },
  };
}
