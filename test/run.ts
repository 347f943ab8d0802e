// Runs the tests: `npm test`, or `npm test -- queue smtp` for the files whose path has one of the words.
//
// In: every test/**/*.test.ts (not support/, bench/, torture/), each a uvu program. Out: one line per file, the
// output of failing files, the reasons of skipped tests, and at the end `N passed, N failed`
// (`, N skipped` may follow).
//
// Every file is a process with its own process group, several at once, over one embedded Postgres that is
// booted here (MAILSTEAD_TEST_DATABASE_ADMIN_URL). A file fails that exits non-zero, runs no test, prints no
// summary (a promise that never settles), leaves a process behind, or has not ended after two minutes (an
// open handle). Settings of this machine (MAILSTEAD_*) do not reach the tests.
import { spawn, spawnSync, type ChildProcess } from 'node:child_process';
import { readdirSync } from 'node:fs';
import { availableParallelism, constants } from 'node:os';
import { join, relative, sep } from 'node:path';

const FILE_TIMEOUT_MS = 120_000;
const DRAIN_MS = 2_000;
const CLUSTER_STOP_MS = 15_000;
const OUTPUT_CHARS_MAX = 200_000;
const SKIP_LINES_MAX = 200;
/** One more than there are cores, since files also wait. Above that, pauses that tests give to peers get too short. */
const PARALLEL = availableParallelism() + 1;
/** Whose files wait the longest: they begin first, so that none of them is left alone at the end. */
const FIRST = ['flow', 'jobs', 'store'];

const LOADER = join(import.meta.dirname, 'support/compiled.ts');
const BUILT = join(import.meta.dirname, '../dist-test');
const NOT_TESTS = ['support', 'bench', 'torture'];
/** The last line of uvu's summary. */
const SUMMARY_END = /^ {2}Duration: /m;
const ANSI = new RegExp(`${String.fromCharCode(27)}\\[[0-9;]*m`, 'g');

interface FileResult {
  readonly passed: number;
  readonly failed: number;
  readonly skipped: number;
  /** Why the file failed as a whole; null when its tests speak for themselves. */
  readonly problem: string | null;
  readonly output: string;
}

const running = new Set<ChildProcess>();
let stoppedBy: NodeJS.Signals | null = null;

const results = await main(process.argv.slice(2));
if (stoppedBy !== null) process.exit(128 + constants.signals[stoppedBy]);
process.exit(summarise(results));

async function main(words: readonly string[]): Promise<readonly FileResult[]> {
  const files = findTests(words);
  if (files.length === 0) {
    console.log(`no test file matches ${words.join(' ') || 'test/**/*.test.ts'}`);
    return [];
  }
  compile();
  for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) process.on(signal, stop);
  console.log(`${files.length} test files, ${PARALLEL} at once; starting Postgres`);
  const cluster = await startPostgres();
  try {
    const done = await runAll(files, childEnvironment(cluster.adminUrl));
    return cluster.failure === null ? done : [...done, cluster.failure];
  } finally {
    await withinMs(cluster.stop(), CLUSTER_STOP_MS);
  }
}

/** Once for all files: each process reads what this wrote (support/compiled.ts), or translates what changed since. */
function compile(): void {
  const root = join(import.meta.dirname, '..');
  const tsc = join(root, 'node_modules/typescript/bin/tsc');
  const { status } = spawnSync(process.execPath, [tsc, '-p', 'tsconfig.test.json'], {
    cwd: root,
    stdio: 'inherit',
  });
  if (status !== 0) throw new Error('the sources cannot be compiled');
}

interface Cluster {
  readonly adminUrl: string;
  readonly stop: () => Promise<void>;
  /** Counts as a failed test: without Postgres, what does not need it still runs. */
  readonly failure: FileResult | null;
}

async function startPostgres(): Promise<Cluster> {
  try {
    const { startCluster } = await import('./support/postgres.ts');
    const cluster = await startCluster();
    return { adminUrl: cluster.adminUrl, stop: () => cluster.stop(), failure: null };
  } catch (error) {
    const output = error instanceof Error ? (error.stack ?? error.message) : String(error);
    console.log(`Postgres did not start: ${output}`);
    const failure = { passed: 0, failed: 1, skipped: 0, problem: 'no Postgres', output };
    return { adminUrl: '', stop: async () => {}, failure };
  }
}

function stop(signal: NodeJS.Signals): void {
  stoppedBy = signal;
  for (const child of running) killGroup(child);
}

function findTests(words: readonly string[]): readonly string[] {
  const root = import.meta.dirname;
  return readdirSync(root, { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile() && entry.name.endsWith('.test.ts'))
    .map((entry) => relative(root, join(entry.parentPath, entry.name)).replaceAll(sep, '/'))
    .filter((file) => !NOT_TESTS.includes(file.split('/')[0] ?? ''))
    .filter((file) => words.length === 0 || words.some((word) => `test/${file}`.includes(word)))
    .sort((a, b) => rankOf(a) - rankOf(b) || (a < b ? -1 : 1));
}

function rankOf(file: string): number {
  return FIRST.includes(file.split('/')[0] ?? '') ? 0 : 1;
}

function childEnvironment(adminUrl: string): NodeJS.ProcessEnv {
  const kept = Object.entries(process.env).filter(
    ([name]) =>
      !name.startsWith('MAILSTEAD_') ||
      name.startsWith('MAILSTEAD_TEST_') ||
      name === 'MAILSTEAD_CORPORA',
  );
  const cache = { NODE_COMPILE_CACHE: join(BUILT, 'cache') };
  const database = adminUrl === '' ? {} : { MAILSTEAD_TEST_DATABASE_ADMIN_URL: adminUrl };
  return { ...Object.fromEntries(kept), ...cache, ...database };
}

/** Results in the order of `files`; stops early when a signal has come. */
async function runAll(
  files: readonly string[],
  env: NodeJS.ProcessEnv,
): Promise<readonly FileResult[]> {
  const results: FileResult[] = [];
  const endings: Promise<void>[] = [];
  const queue = [...files.entries()];
  const work = async (): Promise<void> => {
    for (let next = queue.shift(); next !== undefined && stoppedBy === null; next = queue.shift()) {
      const [index, file] = next;
      const startedAt = performance.now();
      const { summarised, ended } = runFile(file, env);
      // Timers of a library may keep a process for seconds after its last test; the next file need not wait.
      endings.push(
        ended.then((result) => {
          results[index] = result;
        }),
      );
      await Promise.race([summarised, ended]);
      const seconds = (performance.now() - startedAt) / 1000;
      endings.push(
        ended.then((result) => {
          if (stoppedBy === null) report(file, result, seconds);
        }),
      );
    }
  };
  await Promise.all(Array.from({ length: PARALLEL }, work));
  await Promise.all(endings);
  return results;
}

interface Run {
  /** uvu has said how it went. */
  readonly summarised: Promise<void>;
  readonly ended: Promise<FileResult>;
}

function runFile(file: string, env: NodeJS.ProcessEnv): Run {
  const { promise: summarised, resolve: tellSummary } = Promise.withResolvers<void>();
  const ended = new Promise<FileResult>((resolve) => {
    const child = spawn(process.execPath, ['--import', LOADER, join(import.meta.dirname, file)], {
      cwd: join(import.meta.dirname, '..'),
      env,
      detached: true, // A group of its own, so that what it starts can be killed with it.
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    running.add(child);
    let output = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream.setEncoding('utf8').on('data', (chunk: string) => {
        output = (output + chunk).slice(-OUTPUT_CHARS_MAX);
        if (SUMMARY_END.test(output)) tellSummary();
      });
    }
    let late = false;
    let leftBehind = false;
    let drain: NodeJS.Timeout | undefined;
    const timeout = setTimeout(() => {
      late = true;
      killGroup(child);
    }, FILE_TIMEOUT_MS);
    child.on('exit', () => {
      drain = setTimeout(() => {
        leftBehind = true; // Something that the test started holds the pipes.
        killGroup(child);
      }, DRAIN_MS);
    });
    child.on('error', (error) => {
      output += String(error);
    });
    child.on('close', (code, signal) => {
      clearTimeout(timeout);
      clearTimeout(drain);
      running.delete(child);
      killGroup(child);
      const badEnding = late
        ? `did not end within ${FILE_TIMEOUT_MS / 1000} s`
        : leftBehind
          ? 'left a process behind'
          : code === 0
            ? null
            : `ended with ${signal ?? `exit code ${code}`}`;
      resolve(judge(output.replace(ANSI, ''), badEnding));
    });
  });
  return { summarised, ended };
}

function killGroup(child: ChildProcess): void {
  if (child.pid === undefined) return;
  try {
    process.kill(-child.pid, 'SIGKILL');
  } catch {
    // Already gone.
  }
}

/** Reads uvu's summaries. Its total leaves skipped tests out. `badEnding` is null after exit code 0. */
function judge(output: string, badEnding: string | null): FileResult {
  const sum = (label: string): number =>
    [...output.matchAll(new RegExp(`^ {2}${label}: +(\\d+)$`, 'gm'))].reduce(
      (total, match) => total + Number(match[1]),
      0,
    );
  const total = sum('Total');
  const passed = sum('Passed');
  const skipped = sum('Skipped');
  const problem = !/^ {2}Total: /m.test(output)
    ? `printed no summary and ${badEnding ?? 'ended with exit code 0'}`
    : total + skipped === 0
      ? 'ran no test (is test.run() missing?)'
      : badEnding === null && passed < total
        ? 'did not run all of its tests (uvu swallows what a hook throws)'
        : badEnding !== null && passed === total
          ? badEnding
          : null;
  const failed = Math.max(total - passed, problem === null ? 0 : 1);
  return { passed, failed, skipped, problem, output };
}

function report(file: string, result: FileResult, seconds: number): void {
  const verdict = result.failed === 0 ? 'ok  ' : 'FAIL';
  const counts = `${result.passed} passed${result.skipped > 0 ? `, ${result.skipped} skipped` : ''}`;
  console.log(`${verdict} ${file} (${counts}) ${seconds.toFixed(1)} s`);
  if (result.failed > 0) {
    if (result.problem !== null) console.log(`     ${result.problem}`);
    console.log(result.output.trim().replace(/^(?=.)/gm, '     '));
    return;
  }
  const reasons = result.output.match(/^skipped: .*$/gm) ?? [];
  for (const reason of reasons.slice(0, SKIP_LINES_MAX)) console.log(`     ${reason}`);
}

/** Prints the last line; answers the exit code. */
function summarise(results: readonly FileResult[]): number {
  const sum = (key: 'passed' | 'failed' | 'skipped'): number =>
    results.reduce((total, result) => total + result[key], 0);
  const [passed, failed, skipped] = [sum('passed'), sum('failed'), sum('skipped')];
  console.log(`${passed} passed, ${failed} failed${skipped > 0 ? `, ${skipped} skipped` : ''}`);
  return failed > 0 || passed === 0 ? 1 : 0;
}

/** Waits for `work`, but no longer than `ms`; a failure is told, not thrown. */
async function withinMs(work: Promise<void>, ms: number): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const limit = new Promise<void>((resolve) => {
    timer = setTimeout(resolve, ms);
  });
  try {
    await Promise.race([work, limit]);
  } catch (error) {
    console.log(`Postgres did not stop in order: ${String(error)}`);
  } finally {
    clearTimeout(timer);
  }
}
