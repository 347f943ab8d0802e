/**
 * The data directory: creates it (0700), locks it against a second appliance, keeps its generated
 * secrets.
 *
 * The lock is a file that names its holder. It is only ever created by link(2), whole and at most
 * once, so two starters cannot both get it. A dead holder's file is not deleted but succeeded: the
 * one who manages to link `<lock>.<token of the dead>.next` holds the lock, and then puts its own
 * file in the place of the dead one. Three ways to tell that a holder is alive, best first: its pid
 * and start time, when we share its boot and pid namespace; the flock(2) on its file, when we only
 * share its kernel (another container); else the file's mtime, which a holder moves every 5 s.
 * Refuses: a directory in use, a directory it cannot write, a damaged secret.
 */
import { spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import {
  link,
  mkdir,
  open,
  readdir,
  readFile,
  readlink,
  rename,
  stat,
  unlink,
  utimes,
} from 'node:fs/promises';
import type { FileHandle } from 'node:fs/promises';
import { hostname } from 'node:os';
import { basename, dirname, join, resolve } from 'node:path';
import { setTimeout as pause } from 'node:timers/promises';
import type { Logger } from '../log.ts';

const LOCK_NAME = 'mailstead.lock';
const HEARTBEAT_MS = 5_000;
/** A holder that we can judge by its heartbeat only is dead after this long without one. */
const HEARTBEAT_MISSED_MS = 20_000;
const WATCH_POLL_MS = 250;
/** Each turn needs another process that got in between, so this is never reached in practice. */
const TAKE_TURNS_MAX = 100;
/** Every link of the chain is a starter that died in the middle of a takeover. */
const CHAIN_MAX = 100;
/** Files of starters that died before they had the lock are swept when they are this old. */
const LITTER_AGE_MS = 60_000;
const SECRET_NAME = /^[a-z][a-z0-9-]{0,63}$/;
const SECRET_BYTES_MAX = 1_024;

/** Whoever holds a lock, as its file says it. */
export interface Holder {
  /** Different for every lock ever taken. */
  readonly token: string;
  readonly pid: number;
  /** As processStartTime gives it; null without /proc, like the next two. */
  readonly startTime: string | null;
  readonly bootId: string | null;
  readonly pidNamespace: string | null;
  readonly hostname: string;
  /** ISO 8601. */
  readonly at: string;
  /** Whether the holder has flock(2) on its file for as long as it lives. */
  readonly kernelLock: boolean;
}

export interface Lock {
  /** Resolves when another process took the lock from us because we seemed dead (a paused machine). */
  readonly lost: Promise<void>;
  /** Frees the lock. Repeated calls do nothing. */
  release(): Promise<void>;
}

export interface DataDir {
  /** Absolute. */
  readonly path: string;
  /** Resolves when another appliance took the directory from us: stop writing at once. */
  readonly lost: Promise<void>;
  /**
   * The secret of that name as hex; generated from `bytes` random bytes and on disk, fsynced, when it
   * did not exist. Names are lower case letters, digits and hyphens.
   */
  secret(name: string, bytes: number): Promise<string>;
  /** Lets the next appliance in. Repeated calls do nothing. */
  release(): Promise<void>;
}

/** Another live process holds the lock. */
export class LockHeld extends Error {
  override name = 'LockHeld';
  readonly holder: Holder;

  constructor(file: string, holder: Holder) {
    super(`${file} is held by ${describeHolder(holder)}`);
    this.holder = holder;
  }
}

/** Another live appliance works on this data directory. */
export class DataDirInUse extends Error {
  override name = 'DataDirInUse';
}

/** The data directory cannot be created, read or written. */
export class DataDirUnusable extends Error {
  override name = 'DataDirUnusable';
}

/**
 * Creates the directory where it is missing (parents too) and holds its lock until `release`.
 *
 * Throws DataDirInUse or DataDirUnusable. Immediate, except when the lock belongs to a process of
 * another machine: then up to 5 s to see it alive, or 20 s to be sure that it is dead.
 */
export async function openDataDir(
  path: string,
  options: { readonly now: () => Date; readonly log?: Logger },
): Promise<DataDir> {
  const dir = resolve(path);
  try {
    await mkdir(dir, { recursive: true, mode: 0o700 });
    const lock = await takeLock(join(dir, LOCK_NAME), options);
    return {
      path: dir,
      lost: lock.lost,
      secret: (name, bytes) => readOrCreateSecret(join(dir, 'secrets'), name, bytes),
      release: lock.release,
    };
  } catch (error) {
    if (error instanceof LockHeld) {
      throw new DataDirInUse(
        `The data directory ${dir} is in use by ${describeHolder(error.holder)}. ` +
          'Stop that one first, or set MAILSTEAD_DATA_DIR to another directory.',
        { cause: error },
      );
    }
    throw new DataDirUnusable(
      `The data directory ${dir} cannot be used: ${error instanceof Error ? error.message : String(error)}. ` +
        'Make it writable for this user, or set MAILSTEAD_DATA_DIR to another directory.',
      { cause: error },
    );
  }
}

/**
 * When the process began: field 22 of /proc/<pid>/stat, clock ticks since boot. With the pid it names
 * one process of this boot. Null when there is no such living process, or no /proc to ask.
 */
export async function processStartTime(pid: number): Promise<string | null> {
  try {
    const line = await readFile(`/proc/${pid}/stat`, 'latin1');
    // proc(5): the name in parentheses may hold spaces and parentheses; after it comes field 3.
    const fields = line.slice(line.lastIndexOf(')') + 2).split(' ');
    const isZombie = /^[ZXx]$/.test(fields[0] ?? '');
    return isZombie ? null : (fields[22 - 3] ?? null);
  } catch {
    return null;
  }
}

/** One phrase for messages: pid, host and since when. */
export function describeHolder(holder: Holder): string {
  return `process ${holder.pid} on host ${holder.hostname} (since ${holder.at})`;
}

/**
 * Takes the lock `file`, whose directory must exist; a crashed holder's lock counts as free.
 *
 * Throws LockHeld. Not released by exit: the next taker finds the holder dead.
 */
export async function takeLock(
  file: string,
  options: { readonly now: () => Date; readonly log?: Logger },
): Promise<Lock> {
  await sweepLitter(file, options.now());
  const ticket = await writeTicket(file, options.now());
  try {
    for (let turn = 0; turn < TAKE_TURNS_MAX; turn++) {
      const end = await findEnd(file, options);
      if (end.holder !== null) throw new LockHeld(file, end.holder);
      if (!(await linkIfFree(ticket.path, end.free))) continue;
      // While we looked, another one may have succeeded the same dead holder and tidied up after it,
      // which frees the name that we just linked: only the chain from the root decides.
      if (!(await leadsTo(file, ticket.holder.token))) {
        await unlinkIfThere(end.free);
        continue;
      }
      if (end.free !== file) {
        await rename(ticket.path, file);
        for (const past of end.passed) await unlinkIfThere(past);
      }
      return keepLock(file, ticket, options.now);
    }
    throw new Error(`${file} changed hands ${TAKE_TURNS_MAX} times while we tried to take it`);
  } catch (error) {
    await ticket.handle.close();
    throw error;
  } finally {
    await unlinkIfThere(ticket.path);
  }
}

interface Ticket {
  readonly path: string;
  readonly holder: Holder;
  /** Open for as long as the lock is held: the kernel frees flock(2) with the last descriptor. */
  readonly handle: FileHandle;
}

async function writeTicket(file: string, now: Date): Promise<Ticket> {
  const token = randomBytes(8).toString('hex');
  const path = `${file}.${token}`;
  const handle = await open(path, 'wx+', 0o600);
  try {
    const holder: Holder = {
      token,
      pid: process.pid,
      startTime: await processStartTime(process.pid),
      bootId: await readBootId(),
      pidNamespace: await readPidNamespace(),
      hostname: hostname(),
      at: now.toISOString(),
      kernelLock: await lockInKernel(handle),
    };
    await handle.writeFile(`${JSON.stringify(holder)}\n`);
    await handle.sync();
    await handle.utimes(now, now);
    return { path, holder, handle };
  } catch (error) {
    await handle.close();
    await unlinkIfThere(path);
    throw error;
  }
}

function keepLock(file: string, ticket: Ticket, now: () => Date): Lock {
  let isReleased = false;
  let reportLoss: () => void = () => undefined;
  const lost = new Promise<void>((resolveLost) => {
    reportLoss = resolveLost;
  });
  const beat = async (): Promise<void> => {
    const holder = await readHolder(file);
    if (isReleased) return;
    if (holder?.token !== ticket.holder.token) {
      clearInterval(timer);
      reportLoss();
      return;
    }
    await utimes(file, now(), now());
  };
  // A beat that fails (a full or vanished disk) is a missed beat, which is what it should look like.
  const timer = setInterval(() => void beat().catch(() => undefined), HEARTBEAT_MS);
  timer.unref();
  return {
    lost,
    async release() {
      if (isReleased) return;
      isReleased = true;
      clearInterval(timer);
      try {
        if ((await readHolder(file))?.token === ticket.holder.token) await unlinkIfThere(file);
      } finally {
        await ticket.handle.close();
      }
    },
  };
}

type End =
  | { readonly holder: Holder }
  /** The name to link in order to hold the lock, and the names of its dead holders after the first. */
  | { readonly holder: null; readonly free: string; readonly passed: readonly string[] };

/** Follows the chain of dead holders to a live one, or to the name that nobody has linked yet. */
async function findEnd(
  file: string,
  options: { readonly now: () => Date; readonly log?: Logger },
): Promise<End> {
  const passed: string[] = [];
  let path = file;
  for (let length = 0; length < CHAIN_MAX; length++) {
    const holder = await readHolder(path);
    if (holder === null) return { holder: null, free: path, passed };
    if (await isAlive(path, holder, options)) return { holder };
    path = `${file}.${holder.token}.next`;
    passed.push(path);
  }
  throw new Error(`${file} has more than ${CHAIN_MAX} dead holders; delete ${file}*`);
}

async function leadsTo(file: string, token: string): Promise<boolean> {
  let path = file;
  for (let length = 0; length < CHAIN_MAX; length++) {
    const holder = await readHolder(path);
    if (holder === null) return false;
    if (holder.token === token) return true;
    path = `${file}.${holder.token}.next`;
  }
  return false;
}

async function isAlive(
  path: string,
  holder: Holder,
  options: { readonly now: () => Date; readonly log?: Logger },
): Promise<boolean> {
  const bootId = await readBootId();
  const sameKernel = bootId === holder.bootId && hasKernelInCommon(bootId, holder);
  if (sameKernel && holder.pidNamespace === (await readPidNamespace())) {
    return isProcessAlive(holder.pid, holder.startTime);
  }
  if (sameKernel && holder.kernelLock) {
    const isFree = await probeKernelLock(path);
    if (isFree !== null) return !isFree;
  }
  return hasHeartbeat(path, holder, options);
}

/** Where no boot has an id (macOS), the host name has to tell the machines apart. */
function hasKernelInCommon(bootId: string | null, holder: Holder): boolean {
  return bootId !== null || holder.hostname === hostname();
}

async function isProcessAlive(pid: number, startTime: string | null): Promise<boolean> {
  if (startTime !== null) return (await processStartTime(pid)) === startTime;
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return hasCode(error, 'EPERM');
  }
}

async function hasHeartbeat(
  path: string,
  holder: Holder,
  options: { readonly now: () => Date; readonly log?: Logger },
): Promise<boolean> {
  const first = await readMtime(path);
  if (first === null || options.now().getTime() - first > HEARTBEAT_MISSED_MS) return false;
  options.log?.info(
    { pid: holder.pid, host: holder.hostname, lock: path },
    'waiting to see whether the holder of the lock is still alive',
  );
  // Counted in polls and not by the clock, which belongs to the caller.
  for (let waitedMs = 0; waitedMs < HEARTBEAT_MISSED_MS; waitedMs += WATCH_POLL_MS) {
    await pause(WATCH_POLL_MS);
    const mtime = await readMtime(path);
    if (mtime === null) return false;
    if (mtime !== first) return true;
  }
  return false;
}

/** Whether flock(2) on the file is free, or null when we cannot ask. */
async function probeKernelLock(path: string): Promise<boolean | null> {
  let handle: FileHandle;
  try {
    handle = await open(path, 'r+');
  } catch (error) {
    return hasCode(error, 'ENOENT') ? true : null;
  }
  try {
    return await flock(handle);
  } finally {
    await handle.close();
  }
}

async function lockInKernel(handle: FileHandle): Promise<boolean> {
  return (await flock(handle)) === true;
}

/**
 * Node has no flock(2), but the lock belongs to the open file and not to a process: the `flock`
 * program takes it on our descriptor and leaves. Null when the machine has no such program.
 */
function flock(handle: FileHandle): Promise<boolean | null> {
  return new Promise((settle) => {
    const child = spawn('flock', ['-n', '-x', '3'], {
      stdio: ['ignore', 'ignore', 'ignore', handle.fd],
    });
    child.once('error', () => settle(null));
    child.once('exit', (code) => settle(code === 0));
  });
}

/** Null when there is no such file. */
async function readHolder(path: string): Promise<Holder | null> {
  let text: string;
  try {
    text = await readFile(path, 'utf8');
  } catch (error) {
    if (hasCode(error, 'ENOENT')) return null;
    throw error;
  }
  try {
    const holder = JSON.parse(text) as Partial<Holder> | null;
    if (typeof holder?.token === 'string' && /^[0-9a-f]+$/.test(holder.token)) {
      if (Number.isSafeInteger(holder.pid)) return holder as Holder;
    }
  } catch {
    // Not JSON: said below. We never write one like that, a file is linked when it is whole.
  }
  throw new Error(`${path} is damaged; delete it when no Mailstead runs on this directory`);
}

async function readBootId(): Promise<string | null> {
  return readFile('/proc/sys/kernel/random/boot_id', 'utf8').then(
    (text) => text.trim(),
    () => null,
  );
}

async function readPidNamespace(): Promise<string | null> {
  return readlink('/proc/self/ns/pid').catch(() => null);
}

async function readMtime(path: string): Promise<number | null> {
  return stat(path).then(
    (found) => found.mtimeMs,
    () => null,
  );
}

async function sweepLitter(file: string, now: Date): Promise<void> {
  const tickets = `${basename(file)}.`;
  for (const name of await readdir(dirname(file))) {
    if (!name.startsWith(tickets) || !/^[0-9a-f]{16}$/.test(name.slice(tickets.length))) continue;
    const path = join(dirname(file), name);
    const mtime = await readMtime(path);
    if (mtime !== null && now.getTime() - mtime > LITTER_AGE_MS) await unlinkIfThere(path);
  }
}

async function readOrCreateSecret(dir: string, name: string, bytes: number): Promise<string> {
  if (!SECRET_NAME.test(name)) throw new RangeError(`not a secret's name: ${name}`);
  if (!Number.isInteger(bytes) || bytes < 1 || bytes > SECRET_BYTES_MAX) {
    throw new RangeError(`a secret has 1 to ${SECRET_BYTES_MAX} bytes, not ${bytes}`);
  }
  const path = join(dir, name);
  const known = await readSecret(path, bytes);
  if (known !== null) return known;
  await mkdir(dir, { recursive: true, mode: 0o700 });
  const draft = join(dir, `.${name}.${randomBytes(8).toString('hex')}`);
  try {
    const handle = await open(draft, 'wx', 0o600);
    try {
      await handle.writeFile(`${randomBytes(bytes).toString('hex')}\n`);
      await handle.sync();
    } finally {
      await handle.close();
    }
    // Link, not rename: of two who generate the same secret at once, both go on with the first one's.
    await linkIfFree(draft, path);
  } finally {
    await unlinkIfThere(draft);
  }
  await syncDir(dir);
  await syncDir(dirname(dir));
  const created = await readSecret(path, bytes);
  if (created === null) throw new Error(`${path} vanished while it was created`);
  return created;
}

async function readSecret(path: string, bytes: number): Promise<string | null> {
  let text: string;
  try {
    text = (await readFile(path, 'utf8')).trim();
  } catch (error) {
    if (hasCode(error, 'ENOENT')) return null;
    throw error;
  }
  if (/^[0-9a-f]+$/.test(text) && text.length === bytes * 2) return text;
  // Never replaced silently: what was sealed or signed with it would be lost.
  throw new Error(`${path} is not a secret of ${bytes} bytes in hex; restore it from a backup`);
}

async function syncDir(dir: string): Promise<void> {
  const handle = await open(dir, 'r');
  try {
    await handle.sync();
  } finally {
    await handle.close();
  }
}

async function linkIfFree(from: string, to: string): Promise<boolean> {
  try {
    await link(from, to);
    return true;
  } catch (error) {
    if (hasCode(error, 'EEXIST')) return false;
    throw error;
  }
}

async function unlinkIfThere(path: string): Promise<void> {
  try {
    await unlink(path);
  } catch (error) {
    if (!hasCode(error, 'ENOENT')) throw error;
  }
}

function hasCode(error: unknown, code: string): boolean {
  return error instanceof Error && (error as NodeJS.ErrnoException).code === code;
}
