// Writes what comes at the same time in one statement, so that many share one commit and one fsync. On an idle appliance an
// item is written at once; under load those that come while others are being written form the next group.
import { DatabaseBusy } from './unavailable.ts';

/** Groups under way at a time: one is being planned while another waits for its fsync. */
const WRITERS = 3;
/** Above this the database is not keeping up, and whoever comes is better told than kept. */
const WAITING_MAX = 2_000;
/** Invalid data, a broken constraint, a limit of Postgres's: rolled back, and about what was to be written. */
const REFUSED = /^(?:22|23|54)/;

export interface GroupRules<Item, Result> {
  /** All of them or none; the results in their order. */
  readonly write: (items: readonly Item[]) => Promise<readonly Result[]>;
  /** How many of the first ones are the next group, at least one. */
  readonly countFirst: (waiting: Iterable<Item>) => number;
  /** Whoever has waited longer is told that the database is busy. */
  readonly waitingMaxMs: number;
}

interface Entry<Item, Result> {
  readonly since: number;
  readonly item: Item;
  readonly resolve: (result: Result) => void;
  readonly reject: (error: unknown) => void;
}

/** Resolves after the commit that holds the item. */
export function createGroupWriter<Item, Result>(
  rules: GroupRules<Item, Result>,
): (item: Item) => Promise<Result> {
  const waiting: Entry<Item, Result>[] = [];
  let writing = 0;

  const writeGroup = async (group: readonly Entry<Item, Result>[]): Promise<void> => {
    try {
      const results = await rules.write(group.map(({ item }) => item));
      for (const [at, { resolve }] of group.entries()) resolve(results[at]!);
    } catch (error) {
      // What the database refuses must not take the others with it; an SQL error has rolled all of them back. After a
      // lost connection nobody knows what was committed: everyone is told.
      const isRefused = REFUSED.test(String((error as { code?: string }).code));
      if (!isRefused || group.length === 1) for (const { reject } of group) reject(error);
      else for (const entry of group) await writeGroup([entry]);
    }
  };

  const items = function* (): Iterable<Item> {
    for (const { item } of waiting) yield item;
  };

  const pump = (): void => {
    const tooOld = Date.now() - rules.waitingMaxMs;
    while (waiting.length > 0 && waiting[0]!.since < tooOld)
      waiting.shift()!.reject(new DatabaseBusy());
    while (writing < WRITERS && waiting.length > 0) {
      writing += 1;
      void writeGroup(waiting.splice(0, rules.countFirst(items()))).finally(() => {
        writing -= 1;
        pump();
      });
    }
  };

  return (item) =>
    new Promise((resolve, reject) => {
      if (waiting.length >= WAITING_MAX) {
        reject(new DatabaseBusy());
        return;
      }
      waiting.push({ since: Date.now(), item, resolve, reject });
      // What is complete in one turn of the event loop goes together.
      if (waiting.length === 1) setImmediate(pump);
    });
}
