/**
 * The data directory's lock against real processes: several at once, killed ones, one in another pid
 * namespace; and its secrets.
 */
import { spawn } from 'node:child_process';
import type { ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import * as fs from 'node:fs/promises';
import { hostname, tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createLogger } from '../../src/log.ts';
import { DataDirInUse, openDataDir } from '../../src/store/data-dir.ts';
import type { DataDir } from '../../src/store/data-dir.ts';
import { processStartTime } from '../../src/store/process.ts';
import { LOADER } from '../support/loader.ts';

interface Context {
  home: string;
}

const SOURCE = new URL('../../src/store/data-dir.ts', import.meta.url).href;
/** Opens the directory, says how it went, and stays until it is killed or its stdin closes. */
const OPENER = `
const { openDataDir } = await import(${JSON.stringify(SOURCE)});
process.stdin.resume().on('end', () => process.exit(0));
await openDataDir(process.argv[1], { now: () => new Date() }).then(
  (dir) => { globalThis.kept = dir; console.log('held ' + process.pid); },
  (error) => console.log('refused ' + error.name + ' ' + error.message),
);
`;
const NODE = [process.execPath, ...LOADER, '--input-type=module', '--eval', OPENER];

const test = suite<Context>('data directory');
const children = new Set<ChildProcess>();

test.before.each(async (context) => {
  context.home = await fs.mkdtemp(join(tmpdir(), 'mailstead-data-dir-'));
});
test.after.each(async (context) => {
  for (const child of children) await kill(child);
  await fs.rm(context.home, { recursive: true, force: true });
});

test('creates what is missing for its owner alone and leaves what exists', async ({ home }) => {
  await fs.chmod(home, 0o755);
  const data = await open(join(home, 'a', 'b'));
  assert.is(data.path, join(home, 'a', 'b'));
  assert.is((await fs.stat(data.path)).mode & 0o777, 0o700);
  assert.is((await fs.stat(home)).mode & 0o777, 0o755);
  await data.release();
  assert.equal(await fs.readdir(data.path), []);
});

test('refuses a path that cannot be a directory', async ({ home }) => {
  await fs.writeFile(join(home, 'file'), '');
  const error = await refusal(open(join(home, 'file', 'data')));
  assert.is(error.name, 'DataDirUnusable');
  assert.match(error.message, /MAILSTEAD_DATA_DIR/);
});

test('refuses a second opener in this process, until the first releases', async ({ home }) => {
  const first = await open(home);
  const error = await refusal(open(home));
  assert.instance(error, DataDirInUse);
  assert.match(error.message, `process ${process.pid} on host ${hostname()}`);
  assert.match(error.message, /Stop that one first, or set MAILSTEAD_DATA_DIR/);
  await first.release();
  const second = await open(home);
  await first.release(); // Must not free the lock of its successor.
  assert.instance(await refusal(open(home)), DataDirInUse);
  await second.release();
});

test('is refused while another process lives and taken at once when it was killed', async ({
  home,
}) => {
  const { child, answer } = await spawnOpener(NODE, home);
  assert.is(answer, `held ${child.pid}`);
  const error = await refusal(open(home));
  assert.instance(error, DataDirInUse);
  assert.match(error.message, `process ${child.pid} `);
  await kill(child);
  const said: string[] = [];
  const data = await open(home, said);
  assert.equal(said, [], 'no waiting');
  await data.release();
});

test('lets exactly one of several processes take a killed one’s place', async ({ home }) => {
  for (let round = 0; round < 2; round++) {
    const { child } = await spawnOpener(NODE, home);
    await kill(child);
    const openers = await Promise.all(Array.from({ length: 4 }, () => spawnOpener(NODE, home)));
    const answers = openers.map(({ answer }) => answer.split(' ').slice(0, 2).join(' '));
    const winner = openers.find(({ answer }) => answer.startsWith('held'));
    const expected = ['refused DataDirInUse', 'refused DataDirInUse', 'refused DataDirInUse'];
    assert.equal(answers.sort(), [`held ${winner?.child.pid}`, ...expected]);
    for (const opener of openers) await kill(opener.child);
  }
});

test('lets exactly one of many openers take a stale lock, whatever the order', async ({ home }) => {
  for (let round = 0; round < 40; round++) {
    if (round % 2 === 1) await writeLock(home, { startTime: '1' });
    const results = await Promise.allSettled(Array.from({ length: 8 }, () => open(home)));
    const winners = results.filter((result) => result.status === 'fulfilled');
    assert.is(winners.length, 1, `round ${round}`);
    for (const result of results) {
      if (result.status === 'rejected') assert.instance(result.reason, DataDirInUse);
    }
    assert.equal(await fs.readdir(home), ['mailstead.lock'], 'no litter');
    await winners[0]?.value.release();
  }
});

test('takes the lock of a process whose pid now belongs to another', async ({ home }) => {
  await writeLock(home, { startTime: '1' });
  await (await open(home)).release();
});

test('takes over where an earlier takeover died half-way', async ({ home }) => {
  await writeLock(home, { token: 'aa', startTime: '1' });
  await writeLock(home, { token: 'bb', startTime: '2' }, 'mailstead.lock.aa.next');
  const data = await open(home);
  assert.equal(await fs.readdir(home), ['mailstead.lock']);
  await data.release();
});

test('believes a live starter that has not finished its takeover', async ({ home }) => {
  await writeLock(home, { token: 'aa', startTime: '1' });
  await writeLock(home, { token: 'bb' }, 'mailstead.lock.aa.next');
  assert.instance(await refusal(open(home)), DataDirInUse);
});

test('judges a process of another machine by its heartbeat', async ({ home }) => {
  const lock = await writeLock(home, { bootId: 'another', hostname: 'elsewhere' });
  let beats = 0;
  const heart = setInterval(() => {
    beats += 1;
    void fs.utimes(lock, new Date(), new Date(Date.now() + beats));
  }, 50);
  try {
    const said: string[] = [];
    const error = await refusal(open(home, said));
    assert.instance(error, DataDirInUse);
    assert.match(error.message, 'on host elsewhere');
    assert.match(said.join(), /waiting to see whether the holder of the lock is still alive/);
  } finally {
    clearInterval(heart);
  }
  const later = new Date(Date.now() + 21_000);
  const data = await openDataDir(home, { now: () => later });
  await data.release();
});

test('asks the kernel about a process in another pid namespace', async ({ home }) => {
  const unshare = ['unshare', '--pid', '--fork', '--kill-child=KILL', '--mount-proc'];
  if (process.getuid?.() !== 0 || !(await canRun([...unshare, 'true']))) {
    console.log('skipped: another pid namespace needs root and unshare(1)');
    return;
  }
  const { child, answer } = await spawnOpener([...unshare, ...NODE], home);
  assert.is(answer, 'held 1');
  const said: string[] = [];
  const error = await refusal(open(home, said));
  assert.instance(error, DataDirInUse);
  assert.match(error.message, 'process 1 on host');
  await kill(child);
  // unshare(1) is gone before the kernel has ended the one it forked, and with it the flock.
  const data = await untilOpen(home, said);
  assert.equal(said, [], 'no waiting');
  await data.release();
});

test('tells the holder when the lock was taken from it', async ({ home }) => {
  const data = await open(home);
  await writeLock(home, { token: 'cc', hostname: 'elsewhere' }, 'thief');
  await fs.rename(join(home, 'thief'), join(home, 'mailstead.lock'));
  // The heartbeat's timer does not keep a process alive: this does.
  const awake = setInterval(() => undefined, 1_000);
  await data.lost;
  clearInterval(awake);
  await data.release();
  assert.match(await fs.readFile(join(home, 'mailstead.lock'), 'utf8'), 'elsewhere');
});

test('knows when a process began, and no dead one', async () => {
  const startTime = processStartTime(process.pid);
  if (process.platform === 'linux') assert.match(startTime ?? '', /^\d+$/);
  assert.is(processStartTime(2 ** 22 + 1), null);
});

test('generates a secret once and keeps it', async ({ home }) => {
  const data = await open(home);
  const racers = await Promise.all(Array.from({ length: 8 }, () => data.secret('master', 32)));
  assert.is(new Set(racers).size, 1);
  assert.match(racers[0] ?? '', /^[0-9a-f]{64}$/);
  assert.is.not(await data.secret('other', 32), racers[0]);
  await data.release();
  const again = await open(home);
  assert.is(await again.secret('master', 32), racers[0]);
  const secrets = join(home, 'secrets');
  assert.equal((await fs.readdir(secrets)).sort(), ['master', 'other']);
  assert.is((await fs.stat(secrets)).mode & 0o777, 0o700);
  assert.is((await fs.stat(join(secrets, 'master'))).mode & 0o777, 0o600);
  await again.release();
});

test('never replaces a damaged secret and refuses odd names', async ({ home }) => {
  const data = await open(home);
  await data.secret('master', 32);
  const path = join(home, 'secrets', 'master');
  for (const damaged of ['', 'ab', 'g'.repeat(64)]) {
    await fs.writeFile(path, damaged);
    assert.match((await refusal(data.secret('master', 32))).message, /restore it from a backup/);
    assert.is(await fs.readFile(path, 'utf8'), damaged);
  }
  for (const name of ['', '../up', 'Master', '.hidden']) {
    assert.instance(await refusal(data.secret(name, 32)), RangeError);
  }
  assert.instance(await refusal(data.secret('empty', 0)), RangeError);
  await data.release();
});

test.run();

function open(dir: string, said: string[] = []): Promise<DataDir> {
  const log = createLogger({ level: 'info', name: 'test', write: (line) => void said.push(line) });
  return openDataDir(dir, { now: () => new Date(), log });
}

async function untilOpen(dir: string, said: string[]): Promise<DataDir> {
  for (;;) {
    try {
      return await open(dir, said);
    } catch (error) {
      if (!(error instanceof DataDirInUse)) throw error;
    }
  }
}

async function refusal(promise: Promise<unknown>): Promise<Error> {
  const error: unknown = await promise.then(
    () => null,
    (reason: unknown) => reason,
  );
  if (error instanceof Error) return error;
  throw new Error('was not refused');
}

/** A lock file as this very process would write it, but for `changes`. Answers its path. */
async function writeLock(
  home: string,
  changes: Readonly<Record<string, unknown>>,
  name = 'mailstead.lock',
): Promise<string> {
  const probe = await fs.mkdtemp(join(home, 'probe-'));
  const real = await open(probe);
  const holder = JSON.parse(await fs.readFile(join(probe, 'mailstead.lock'), 'utf8')) as object;
  await real.release();
  await fs.rm(probe, { recursive: true });
  const path = join(home, name);
  await fs.writeFile(path, JSON.stringify({ ...holder, token: 'dead', ...changes }));
  return path;
}

async function spawnOpener(
  command: readonly string[],
  dir: string,
): Promise<{ readonly child: ChildProcess; readonly answer: string }> {
  const child = spawn(command[0] ?? '', [...command.slice(1), dir], {
    stdio: ['pipe', 'pipe', 'inherit'],
  });
  children.add(child);
  const [answer] = (await once(createInterface({ input: child.stdout }), 'line')) as [string];
  return { child, answer };
}

async function kill(child: ChildProcess): Promise<void> {
  children.delete(child);
  if (child.exitCode !== null || child.signalCode !== null) return;
  const gone = once(child, 'exit');
  child.kill('SIGKILL');
  await gone;
}

async function canRun(command: readonly string[]): Promise<boolean> {
  const child = spawn(command[0] ?? '', command.slice(1), { stdio: 'ignore' });
  return new Promise((settle) => {
    child.once('error', () => settle(false));
    child.once('exit', (code) => settle(code === 0));
  });
}
