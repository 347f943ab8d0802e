/**
 * A lock between processes, also of several containers or machines: a file that names its holder.
 *
 * The file is only ever created by link(2), whole and at most once, so two starters cannot both get it. A dead
 * holder's file is not deleted but succeeded: the one who manages to link `<lock>.<token of the dead>.next`
 * holds the lock, and then puts its own file in the place of the dead one. Three ways to tell that a holder is
 * alive, best first: its pid and start time, when we share its boot and pid namespace; the flock(2) on its
 * file, when we only share its kernel (another container); else the file's mtime, which a holder moves every
 * 5 s. Refuses: a lock whose holder is alive, a file that is damaged.
 */
import { spawn } from 'node:child_process';
import { randomBytes } from 'node:crypto';
import { open, readdir, readFile, readlink, rename, stat, utimes } from 'node:fs/promises';
import type { FileHandle } from 'node:fs/promises';
import { hostname } from 'node:os';
import { basename, dirname, join } from 'node:path';
import { setTimeout as pause } from 'node:timers/promises';
import type { Logger } from '../log.ts';
import { hasCode, linkIfFree, readText, unlinkIfThere } from './files.ts';
import { isPidTaken, processStartTime } from './process.ts';

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

/** Whoever holds a lock, as its file says it. */
interface Holder {
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

/** Another live process holds the lock. */
export class LockHeld extends Error {
  override name = 'LockHeld';
  readonly holder: Holder;

  constructor(file: string, holder: Holder) {
    super(`${file} is held by ${describeHolder(holder)}`);
    this.holder = holder;
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
      startTime: processStartTime(process.pid),
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

function isProcessAlive(pid: number, startTime: string | null): boolean {
  return startTime === null ? isPidTaken(pid) : processStartTime(pid) === startTime;
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
  const text = await readText(path);
  if (text === null) return null;
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
