/**
 * The server process of a cluster: a child of ours that ends when we do, however we end.
 *
 * In: a cluster and the programs. Out: a server that accepts connections through a unix socket in a private
 * directory, and by no other way; its log lines go to ours. A note beside the cluster (`<dir>.socket`) says where
 * the socket is, for as long as the server runs.
 */
import { spawn } from 'node:child_process';
import type { ChildProcess } from 'node:child_process';
import { existsSync } from 'node:fs';
import * as fs from 'node:fs/promises';
import type { Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { createInterface } from 'node:readline';
import { setTimeout as pause } from 'node:timers/promises';
import { Client } from 'pg';
import type { Logger } from '../log.ts';
import { SUPERUSER } from './embedded-cluster.ts';
import type { Programs } from './embedded-programs.ts';
import { ENVIRONMENT, openForChild } from './embedded-spawn.ts';
import type { Account } from './embedded-spawn.ts';
import { hashOf, hasCode, readText } from './files.ts';

const DATABASE = 'mailstead';
const PORT = 5432; // Names the socket file; nothing listens on a port.
/** Of sockaddr_un.sun_path: 104 on macOS, 108 on Linux, the final NUL included. */
const SOCKET_PATH_MAX = 103;
/** Crash recovery replays up to max_wal_size, which takes a slow disk minutes. */
const START_MAX_MS = 600_000;
const FAST_STOP_MS = 20_000;
const IMMEDIATE_STOP_MS = 10_000;
const CONNECT_TIMEOUT_MS = 10_000;
const LAST_LINES_MAX = 20;

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

interface PostgresExit {
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

/** The URL of the server that runs on the cluster in `dir`, started by whichever process; or null. */
export async function runningPostgresUrl(dir: string): Promise<string | null> {
  const wanted = resolve(dir);
  const real = await fs.realpath(wanted).catch(() => wanted);
  const socketDir = (await readText(`${real}.socket`))?.trim() ?? '';
  const isThere = socketDir !== '' && existsSync(join(socketDir, `.s.PGSQL.${PORT}`));
  return isThere ? urlOf(socketDir, DATABASE) : null;
}

/** Resolves when the database `mailstead` accepts connections. `unlock` is called when the server has ended. */
export async function launch(d: {
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
      try {
        try {
          await removeTraces();
        } finally {
          await d.unlock();
        }
      } catch (error) {
        d.log.warn({ error }, 'Postgres left files behind');
      }
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

async function endsWithin(ended: Promise<unknown>, timeoutMs: number): Promise<boolean> {
  const timer = new AbortController();
  const late = pause(timeoutMs, false, { signal: timer.signal }).catch(() => false);
  const first = await Promise.race([ended.then(() => true), late]);
  timer.abort();
  return first;
}
