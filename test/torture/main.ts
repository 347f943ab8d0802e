// `npm run torture`: the long rows of the fault table, done to the built program on this machine, and what was counted.
//
//   --only a,b     these rows only
//   --rounds N     of rows that come in rounds
//   --short        everything takes a fraction of its time: to try the harness, not to judge the program
//   --list         the rows, and which tests hold the others
//
// Prints a table, and ends with 1 when a promise was not kept. Loopback only; what it starts it ends, what it writes it
// removes, also after a failure and on a signal.
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { killRows } from './kill.ts';
import { broadcastKill } from './broadcast.ts';
import { rolling } from './rolling.ts';
import { killInbound } from './kill-inbound.ts';
import { outageRows } from './outages.ts';
import { peerRows } from './peers.ts';
import { loadRows } from './crowds.ts';
import { clockRows } from './clocks.ts';
import { intruderRows } from './intruders.ts';
import { webhookStorm } from './webhooks.ts';
import { renderReport, renderTests, TESTS } from './report.ts';
import type { Judged, Row, Torture, Verdict } from './row.ts';

const ROWS: readonly Row[] = [
  ...killRows,
  killInbound,
  ...outageRows,
  ...peerRows,
  ...loadRows,
  ...clockRows,
  ...intruderRows,
  broadcastKill,
  webhookStorm,
  rolling,
].toSorted((a, b) => a.number - b.number);
const ROUNDS_MAX = 10_000;
const EXIT = { SIGINT: 130, SIGTERM: 143, SIGHUP: 129 } as const;

interface Options {
  readonly rows: readonly Row[];
  readonly rounds: number | null;
  readonly short: boolean;
  readonly list: boolean;
}

function readOptions(): Options {
  const { values } = parseArgs({
    options: {
      only: { type: 'string' },
      rounds: { type: 'string' },
      short: { type: 'boolean', default: false },
      list: { type: 'boolean', default: false },
    },
  });
  const rounds = values.rounds === undefined ? null : Number(values.rounds);
  if (rounds !== null && !(Number.isInteger(rounds) && rounds >= 1 && rounds <= ROUNDS_MAX)) {
    throw new Error(`--rounds must be a whole number from 1 to ${ROUNDS_MAX}`);
  }
  const names = values.only?.split(',') ?? ROWS.map(({ name }) => name);
  const rows = names.map((name) => {
    const row = ROWS.find((one) => one.name === name);
    if (row !== undefined) return row;
    throw new Error(`--only ${name}: there are ${ROWS.map((one) => one.name).join(', ')}`);
  });
  return { rows, rounds, short: values.short, list: values.list };
}

/** What the running row has started. */
const undos: (() => Promise<unknown>)[] = [];
let ending: Promise<void> | null = null;

async function undoAll(): Promise<void> {
  for (let undo = undos.pop(); undo !== undefined; undo = undos.pop()) {
    await undo().catch((error: unknown) => console.error('torture: not cleaned up:', error));
  }
}

async function runRow(row: Row, options: Options): Promise<Judged> {
  const startedAt = performance.now();
  const done: string[] = [];
  const counted: string[] = [];
  const violations: string[] = [];
  const judged = (verdict: Verdict): Judged => {
    const seconds = Math.round((performance.now() - startedAt) / 1_000);
    return { row, verdict, done, counted, violations, seconds };
  };
  const say = (words: string): void => console.error(`torture: ${row.name}: ${words}`);
  const torture: Torture = {
    rounds: options.rounds,
    short: options.short,
    say,
    undo: {
      add(step) {
        undos.push(step);
        if (ending !== null) throw new Error('stopping');
      },
    },
    report: {
      did: (words) => void done.push(words),
      counted: (words) => void counted.push(words),
      promise(holds, words) {
        if (holds) return;
        violations.push(words);
        say(`NOT KEPT: ${words}`);
      },
    },
  };
  try {
    const whyNot = (await row.whyNot?.()) ?? null;
    if (whyNot !== null) {
      done.push(whyNot);
      return judged('skipped');
    }
    say('begins');
    await row.run(torture);
    return judged(violations.length === 0 ? 'holds' : 'violated');
  } catch (error) {
    // A row that could not be run to its end has shown nothing.
    violations.push(error instanceof Error ? error.message : String(error));
    if (ending === null) console.error(error);
    return judged('broken');
  } finally {
    await undoAll();
  }
}

for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
  process.on(signal, () => {
    ending ??= undoAll().finally(() => process.exit(EXIT[signal]));
  });
}

// A stray error event must not leave servers and mounts behind either.
process.on('uncaughtException', (fault) => {
  console.error(fault);
  ending ??= undoAll().finally(() => process.exit(1));
});

const options = readOptions();
const missing = TESTS.flatMap(({ files }) => files).filter(
  (file) => !existsSync(join(import.meta.dirname, '../..', file)),
);
if (options.list) {
  for (const { name, number, title } of ROWS) console.log(`${number}\t${name}\t${title}`);
  console.log(renderTests());
} else {
  const judged: Judged[] = [];
  for (const row of options.rows) {
    judged.push(await runRow(row, options));
    if (ending !== null) break;
  }
  console.log(renderReport(judged, options));
  const bad = judged.filter(({ verdict }) => verdict === 'violated' || verdict === 'broken');
  process.exitCode = bad.length === 0 ? 0 : 1;
}
if (missing.length > 0) {
  console.error(`torture: the report names tests that are not there: ${missing.join(', ')}`);
  process.exitCode = 1;
}
// What a library keeps open must not keep us.
if (ending === null) setTimeout(() => process.exit(), 1_000).unref();
