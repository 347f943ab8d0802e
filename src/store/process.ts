/**
 * Telling processes apart although the kernel uses their numbers again: a pid and its start time together name
 * one process of this boot.
 */
import { readFileSync } from 'node:fs';
import { hasCode } from './files.ts';

/**
 * When the process began: field 22 of /proc/<pid>/stat, clock ticks since boot. With the pid it names
 * one process of this boot. Null when there is no such living process, or no /proc to ask.
 */
export function processStartTime(pid: number): string | null {
  try {
    const line = readFileSync(`/proc/${pid}/stat`, 'latin1');
    // proc(5): the name in parentheses may hold spaces and parentheses; after it comes field 3.
    const fields = line.slice(line.lastIndexOf(')') + 2).split(' ');
    const isZombie = /^[ZXx]$/.test(fields[0] ?? '');
    return isZombie ? null : (fields[22 - 3] ?? null);
  } catch {
    return null;
  }
}

/** Whether some process has the number now, a zombie included. */
export function isPidTaken(pid: number): boolean {
  try {
    process.kill(pid, 0);
    return true;
  } catch (error) {
    return hasCode(error, 'EPERM');
  }
}

const POLL_MS = 20;
const END_MAX_MS = 10_000;

/**
 * Makes sure that a worker process of an earlier start is gone before anybody takes over what it held. Does
 * nothing when the number belongs to another process by now.
 */
export async function endProcess(run: {
  readonly pid: number;
  readonly startTime: string | null;
}): Promise<void> {
  const isAlive = (): boolean =>
    run.startTime !== null && processStartTime(run.pid) === run.startTime;
  if (!isAlive() || run.pid === process.pid) return;
  process.kill(run.pid, 'SIGKILL');
  const deadline = Date.now() + END_MAX_MS;
  while (isAlive()) {
    if (Date.now() > deadline)
      throw new Error(`process ${run.pid} of an earlier start does not end`);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}
