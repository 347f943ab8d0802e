/**
 * The embedded Postgres with real clusters: what a start leaves behind, what a killed process leaves
 * behind, and what is refused. Runs as root (another user then runs Postgres) and as anybody else.
 */
import { spawn } from 'node:child_process';
import type { ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { existsSync } from 'node:fs';
import * as fs from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { basename, join } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as pause } from 'node:timers/promises';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createLogger } from '../../src/log.ts';
import { runningPostgresUrl, startEmbeddedPostgres } from '../../src/store/embedded.ts';
import type { EmbeddedPostgres } from '../../src/store/embedded.ts';
import { freshDatabase, startCluster } from '../support/postgres.ts';
import { LOADER } from '../support/loader.ts';

interface Context {
  /** Mode 0700 and ours, so another user that runs Postgres cannot enter it. */
  home: string;
  dir: string;
  /** What was logged at warn and above. */
  said: string[];
  start(changes?: Partial<Parameters<typeof startEmbeddedPostgres>[0]>): Promise<EmbeddedPostgres>;
}

const SOURCE = new URL('../../src/store/embedded.ts', import.meta.url).href;
/** Starts a server on the directory, says where, and stays until it is killed. */
const STARTER = `
const { startEmbeddedPostgres } = await import(${JSON.stringify(SOURCE)});
const nothing = () => undefined;
const log = { debug: nothing, info: nothing, warn: nothing, error: nothing };
setInterval(nothing, 1e6);
const dir = process.argv[1];
const { url, pid } = await startEmbeddedPostgres({ dir, log, durable: process.argv[2] === 'durable' });
console.log(JSON.stringify({ url, pid }));
`;
const WAIT_MAX_MS = 20_000;

const test = suite<Context>('embedded postgres');
const running = new Set<EmbeddedPostgres>();
const children = new Set<ChildProcess>();

test.before.each(async (context) => {
  context.home = await fs.mkdtemp(join(tmpdir(), 'mailstead-embedded-'));
  context.dir = join(context.home, 'data', 'postgres');
  context.said = [];
  const log = createLogger({
    level: 'warn',
    name: 'test',
    write: (line) => void context.said.push(line),
  });
  context.start = async (changes) => {
    const postgres = await startEmbeddedPostgres({
      dir: context.dir,
      log,
      durable: false,
      ...changes,
    });
    running.add(postgres);
    void postgres.exited.then(() => running.delete(postgres));
    return postgres;
  };
});
test.after.each(async (context) => {
  for (const child of children) await kill(child);
  for (const postgres of running) await postgres.stop();
  await fs.rm(context.home, { recursive: true, force: true });
});

test('starts a durable cluster of ours, keeps its data, and leaves nothing else behind', async (context) => {
  const { home, dir, said, start } = context;
  const first = await start({ durable: true, settings: { work_mem: '5MB' } });
  assert.equal(await query(first.url, 'select current_database() as name'), [
    { name: 'mailstead' },
  ]);
  assert.equal(await readSettings(first.url), {
    data_checksums: 'on',
    fsync: 'on',
    full_page_writes: 'on',
    idle_in_transaction_session_timeout: '1min',
    listen_addresses: '',
    max_connections: '100',
    max_wal_size: '1GB',
    server_encoding: 'UTF8',
    shared_buffers: '128MB',
    synchronous_commit: 'on',
    TimeZone: 'UTC',
    work_mem: '5MB',
  });
  const locale = `select datlocprovider as provider, datlocale as locale from pg_database`;
  assert.equal((await query(first.url, locale))[0], { provider: 'b', locale: 'C.UTF-8' });
  const socketPath = join(first.socketDir, '.s.PGSQL.5432');
  assert.ok(Buffer.byteLength(socketPath) < 100, socketPath);
  assert.is((await fs.stat(first.socketDir)).mode & 0o777, 0o700);
  assert.is(await runningPostgresUrl(dir), first.url);
  await query(first.url, 'create table kept as select 42 as answer');
  const conf = await fs.stat(join(dir, 'postgresql.conf'));
  await first.stop();
  await first.stop();

  assert.equal(await first.exited, { code: 0, signal: null, expected: true });
  assert.is(existsSync(first.socketDir), false);
  assert.is(await runningPostgresUrl(dir), null);
  assert.equal(await fs.readdir(join(home, 'data')), ['postgres']);
  assert.is((await fs.stat(home)).mode & 0o777, 0o700, 'folders above stay as they are');
  assert.is((await fs.stat(home)).uid, process.getuid?.());
  assert.is((await fs.stat(dir)).mode & 0o777, 0o700);
  assert.is(existsSync(join(dir, '.initialising')), false);

  const second = await start({ durable: true });
  assert.equal(await query(second.url, 'select answer from kept'), [{ answer: 42 }]);
  assert.is((await readSettings(second.url))['work_mem'], '4MB', 'settings of the last start only');
  assert.is((await fs.stat(join(dir, 'postgresql.conf'))).size, conf.size, 'not appended to again');
  await second.stop();
  assert.equal(said, []);
});

test('ends with the process that started it, however that ended', async ({ dir, start }) => {
  const { child, url, pid } = await spawnStarter(dir, 'durable');
  await query(url, 'create table kept as select 42 as answer');
  await kill(child);
  await until(() => !isRunning(pid));
  assert.is(existsSync(join(dir, 'postmaster.pid')), false, 'shut down in order');
  const next = await start();
  assert.equal(await query(next.url, 'select answer from kept'), [{ answer: 42 }]);
});

test('stops an orphan first, and loses nothing that was committed', async (context) => {
  const { dir, said, start } = context;
  const { child, url, pid } = await spawnStarter(dir, 'durable');
  const watchdog = await findWatchdog(dir);
  if (watchdog === null) {
    console.log('skipped: finding the watchdog needs /proc');
    return;
  }
  await query(url, 'create table kept as select 42 as answer');
  process.kill(watchdog, 'SIGKILL');
  await until(() => !isRunning(watchdog));
  await kill(child);
  assert.ok(isRunning(pid), 'an orphan now');
  const next = await start();
  assert.is(isRunning(pid), false);
  assert.is.not(next.pid, pid);
  assert.equal(await query(next.url, 'select answer from kept'), [{ answer: 42 }]);
  assert.match(said.join(''), 'stopping the Postgres that an earlier run left behind');
});

test('starts when the server itself was killed and its pid is another process now', async (context) => {
  const { dir, start } = context;
  const first = await start();
  await query(first.url, 'create table kept as select 42 as answer');
  const awake = setInterval(() => undefined, 1_000); // A server does not keep a process alive.
  process.kill(first.pid, 'SIGKILL');
  const exit = await first.exited;
  clearInterval(awake);
  assert.equal(exit, { code: null, signal: 'SIGKILL', expected: false });
  const pidFile = join(dir, 'postmaster.pid');
  const note = await fs.readFile(pidFile, 'utf8');
  const { uid, gid } = await fs.stat(pidFile); // Of the same user: Postgres ignores other people's.
  const other = spawn('sleep', ['1000'], process.getuid?.() === 0 ? { uid, gid } : {});
  children.add(other);
  await fs.writeFile(pidFile, note.replace(/^\d+/, String(other.pid)));
  const second = await start();
  assert.equal(await query(second.url, 'select answer from kept'), [{ answer: 42 }]);
  assert.ok(isRunning(other.pid ?? 0), 'a stranger is left alone');
});

test('refuses a second server on the same cluster', async ({ dir, start }) => {
  const results = await Promise.allSettled([start(), start(), start()]);
  const [winner] = results.flatMap((result) =>
    result.status === 'fulfilled' ? [result.value] : [],
  );
  const refused = results.flatMap((result) =>
    result.status === 'rejected' ? [result.reason as Error] : [],
  );
  assert.is(refused.length, 2);
  for (const error of refused) {
    assert.is(error.name, 'EmbeddedPostgresFailed');
    assert.match(
      error.message,
      `The database in ${dir} is in use by process ${process.pid} on host`,
    );
  }
  assert.equal(await query(winner?.url ?? '', 'select 1 as one'), [{ one: 1 }]);
});

test('does an interrupted initialisation again, even while the orphaned initdb runs', async (context) => {
  const { dir, start } = context;
  const child = spawnNode(STARTER, dir);
  await until(() => existsSync(join(dir, '.initialising', 'base')));
  await kill(child);
  assert.is(existsSync(join(dir, 'PG_VERSION')), false);
  // As if the process had been killed while it moved the files up.
  await fs.mkdir(join(dir, 'base', '1'), { recursive: true });
  await fs.mkdir(join(dir, 'lost+found'));
  const postgres = await start();
  assert.equal(await query(postgres.url, 'select 1 as one'), [{ one: 1 }]);
  assert.is(existsSync(join(dir, '.initialising')), false);
  assert.is(existsSync(join(dir, 'lost+found')), true);
});

test('touches no files that it does not know', async ({ dir, start }) => {
  await fs.mkdir(join(dir, 'photos'), { recursive: true });
  const error = await refusal(start());
  assert.match(error.message, `${dir} holds files (photos), but no complete Postgres cluster`);
  assert.equal(await fs.readdir(dir), ['photos']);
});

test('refuses a cluster of another major version', async ({ home, dir, start }) => {
  await fs.mkdir(dir, { recursive: true });
  await fs.writeFile(join(dir, 'PG_VERSION'), '15\n');
  const error = await refusal(start());
  assert.match(error.message, /made by Postgres 15, and this Mailstead brings Postgres 18\.\d+/);
  assert.match(error.message, /MAILSTEAD_DATABASE_URL/);
  assert.equal(await fs.readdir(join(home, 'data')), ['postgres'], 'the lock is free');
});

test('says what Postgres said when it does not start, and tidies up', async ({ home, start }) => {
  const sockets = join(home, 'tmp');
  await fs.mkdir(sockets);
  const error = await withTmpdir(sockets, () =>
    refusal(start({ settings: { shared_buffers: 'plenty' } })),
  );
  assert.match(error.message, /invalid value for parameter "shared_buffers": "plenty"/);
  assert.equal(await fs.readdir(join(home, 'data')), ['postgres']);
  assert.equal(await fs.readdir(sockets), []);
  assert.match((await refusal(start({ settings: { 'a = b\n': '' } }))).message, /not a Postgres/);
  const postgres = await withTmpdir(sockets, () => start());
  assert.ok(postgres.socketDir.startsWith(sockets));
  assert.equal(await query(postgres.url, 'select 1 as one'), [{ one: 1 }]);
});

test('goes elsewhere when somebody else has the name of the socket directory', async (context) => {
  if (process.getuid?.() !== 0) {
    console.log('skipped: making a directory that belongs to somebody else needs root');
    return;
  }
  const first = await context.start();
  const taken = first.socketDir;
  await first.stop();
  await fs.mkdir(taken);
  await fs.chown(taken, 12_345, 12_345);
  try {
    const second = await context.start();
    assert.is.not(second.socketDir, taken);
    assert.is((await fs.stat(second.socketDir)).mode & 0o777, 0o700);
    assert.equal(await query(second.url, 'select 1 as one'), [{ one: 1 }]);
  } finally {
    await fs.rmdir(taken);
  }
});

test('gives tests a cluster of their own and databases from a template', async () => {
  const cluster = await startCluster();
  assert.equal(await query(cluster.adminUrl, 'show fsync'), [{ fsync: 'off' }]);
  await cluster.stop();
  const template = await freshDatabase();
  await query(template.url, 'create table kept as select 42 as answer');
  const copy = await freshDatabase(basename(new URL(template.url).pathname));
  assert.equal(await query(copy.url, 'select answer from kept'), [{ answer: 42 }]);
  const idle = new Client({ connectionString: copy.url });
  idle.on('error', () => undefined); // Told that it was disconnected.
  await idle.connect();
  await copy.drop();
  await template.drop();
  assert.match((await refusal(query(copy.url, 'select 1'))).message, 'does not exist');
});

test.run();

async function query(url: string, text: string): Promise<readonly unknown[]> {
  const client = new Client({ connectionString: url });
  await client.connect();
  try {
    return (await client.query<Record<string, unknown>>(text)).rows;
  } finally {
    await client.end();
  }
}

async function readSettings(url: string): Promise<Readonly<Record<string, unknown>>> {
  const names = `data_checksums fsync full_page_writes idle_in_transaction_session_timeout
    listen_addresses max_connections max_wal_size server_encoding shared_buffers synchronous_commit
    TimeZone work_mem`.split(/\s+/);
  const columns = names.map((name) => `current_setting('${name}') as "${name}"`);
  return (await query(url, `select ${columns.join()}`))[0] as Readonly<Record<string, unknown>>;
}

function spawnNode(script: string, ...args: readonly string[]): ChildProcess {
  const node = [...LOADER, '--input-type=module', '--eval', script, ...args];
  const child = spawn(process.execPath, node, { stdio: ['ignore', 'pipe', 'inherit'] });
  children.add(child);
  return child;
}

async function spawnStarter(
  ...args: readonly string[]
): Promise<{ readonly child: ChildProcess; readonly url: string; readonly pid: number }> {
  const child = spawnNode(STARTER, ...args);
  assert.ok(child.stdout);
  const [line] = (await once(createInterface({ input: child.stdout }), 'line')) as [string];
  return { child, ...(JSON.parse(line) as { url: string; pid: number }) };
}

async function kill(child: ChildProcess): Promise<void> {
  children.delete(child);
  if (child.exitCode !== null || child.signalCode !== null) return;
  const gone = once(child, 'exit');
  child.kill('SIGKILL');
  await gone;
}

/** The shell beside the server: it has the cluster's directory open as fd 3, like the server. */
async function findWatchdog(dir: string): Promise<number | null> {
  const home = await fs.stat(dir);
  for (const name of await fs.readdir('/proc').catch(() => [])) {
    const open = await fs.stat(`/proc/${name}/fd/3`).catch(() => null);
    if (open?.dev !== home.dev || open.ino !== home.ino) continue;
    const program = await fs.readlink(`/proc/${name}/exe`).catch(() => '');
    if (program !== '' && !basename(program).startsWith('postgres')) return Number(name);
  }
  return null;
}

/** A zombie, which waits for a parent that may never ask, counts as gone. */
function isRunning(pid: number): boolean {
  if (existsSync('/proc/self')) return existsSync(`/proc/${pid}/exe`);
  try {
    return process.kill(pid, 0);
  } catch {
    return false;
  }
}

async function withTmpdir<T>(dir: string, work: () => Promise<T>): Promise<T> {
  const usual = process.env['TMPDIR'];
  process.env['TMPDIR'] = dir;
  try {
    return await work();
  } finally {
    if (usual === undefined) delete process.env['TMPDIR'];
    else process.env['TMPDIR'] = usual;
  }
}

async function until(condition: () => boolean): Promise<void> {
  for (let waitedMs = 0; !condition(); waitedMs += 5) {
    if (waitedMs > WAIT_MAX_MS) throw new Error(`never: ${condition.toString()}`);
    await pause(5);
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
