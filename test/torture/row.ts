// What a row of the fault table is here: something is done to the program, things are counted, and a promise holds or does
// not. A row adds to its report as it goes; the first promise that does not hold decides its verdict.

/** Undone newest first, also after a failure and on a signal. */
export interface Undo {
  add(step: () => Promise<unknown>): void;
}

export interface Report {
  /** What was done, for the table. */
  did(words: string): void;
  /** What was counted. */
  counted(words: string): void;
  /** Notes a promise; false is a violation. */
  promise(holds: boolean, words: string): void;
}

export interface Torture {
  /** Times a row that comes in rounds is repeated; null: as often as the row says. */
  readonly rounds: number | null;
  /** Everything takes a fraction of its time: to try the harness, not to judge the program. */
  readonly short: boolean;
  readonly undo: Undo;
  readonly report: Report;
  /** Progress, for who watches. */
  say(words: string): void;
}

export interface Row {
  readonly name: string;
  /** In the fault table. */
  readonly number: number;
  readonly title: string;
  /** Null: it can run here. */
  readonly whyNot?: () => Promise<string | null>;
  run(torture: Torture): Promise<void>;
}

export type Verdict = 'holds' | 'violated' | 'skipped' | 'broken';

export interface Judged {
  readonly row: Pick<Row, 'name' | 'number' | 'title'>;
  readonly verdict: Verdict;
  readonly done: readonly string[];
  readonly counted: readonly string[];
  readonly violations: readonly string[];
  readonly seconds: number;
}

export const sleep = (ms: number): Promise<void> =>
  new Promise((resolve) => setTimeout(resolve, ms));

/** Repeats `read` until it gives something but null; throws with `what` after `maxMs`. */
export async function untilSo<T>(
  what: string,
  maxMs: number,
  read: () => Promise<T | null> | T | null,
): Promise<T> {
  const deadline = performance.now() + maxMs;
  for (;;) {
    const value = await read();
    if (value !== null) return value;
    if (performance.now() > deadline) throw new Error(`${what}: not within ${maxMs / 1_000} s`);
    await sleep(100);
  }
}

/** The value below which `part` of them lie; NaN of none. */
export function percentile(values: readonly number[], part: number): number {
  const sorted = values.toSorted((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * part))] ?? Number.NaN;
}
