// Gathers decided attempts and settles them in batches. While the database is away it keeps what it
// has (the journal has it too) and tries again; the worker reads `isBehind` and begins nothing new.
import type { Logger } from '../log.ts';
import type { OutcomePolicy } from '../queue/outcome-policy.ts';
import { settle, type Settlement, type Waiting } from '../queue/settle.ts';
import type { Store } from '../store/orm.ts';
import { fencedResults } from '../telemetry/instruments.ts';
import { noteSettled } from './measured-attempts.ts';
import type { Journal } from './journal.ts';

const BATCH_MAX = 200;
/** What is decided within this time settles together. */
const GATHER_MS = 10;
const RETRY_MS = 500;

export interface Settler {
  add(settlement: Settlement): void;
  /** True while the database does not take results. */
  isBehind(): boolean;
  /** Resolves when everything added so far is stored. */
  drain(): Promise<void>;
  /** Tries nothing again: what is not stored by now is left to the journal. */
  end(): void;
}

export function createSettler(options: {
  readonly store: Store;
  readonly journal: Journal;
  readonly log: Logger;
  /** As the operator's file has it now. */
  readonly outcomes: () => OutcomePolicy;
  readonly onSettled: (batch: readonly Settlement[], waiting: readonly Waiting[]) => void;
}): Settler {
  const { store, journal, log } = options;
  const queue: Settlement[] = [];
  let running: Promise<void> | null = null;
  let behind = false;
  let ended = false;

  const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

  const run = async (): Promise<void> => {
    while (queue.length > 0) {
      if (queue.length < BATCH_MAX / 2) await sleep(GATHER_MS);
      const batch = queue.slice(0, BATCH_MAX);
      try {
        const beganAtMs = Date.now();
        const { fenced, waiting } = await settle(store, batch, options.outcomes());
        noteSettled(batch, beganAtMs);
        if (fenced > 0) fencedResults.inc(fenced);
        if (fenced > 0) log.warn({ fenced }, 'results came after their lease was gone');
        queue.splice(0, batch.length);
        behind = false;
        options.onSettled(batch, waiting);
        journal.settled(batch);
      } catch (error) {
        if (!behind) log.warn({ err: error }, 'results cannot be stored now; trying again');
        behind = true;
        if (ended) {
          queue.length = 0;
          return;
        }
        await sleep(RETRY_MS);
      }
    }
  };

  const start = (): void => {
    running ??= run().finally(() => {
      running = null;
      if (queue.length > 0) start(); // added between the last look and now
    });
  };

  return {
    add(settlement) {
      if (ended) return;
      queue.push(settlement);
      start();
    },
    end() {
      ended = true;
    },
    isBehind: () => behind,
    async drain() {
      while (running !== null) await running;
    },
  };
}
