// Telling processes apart although the kernel uses their numbers again: a pid and its start time together
// name one process. Part of the composition root.
import { readFileSync } from 'node:fs';
import type { LostRun } from './delivery/journal.ts';

/** Field 22 of /proc/<pid>/stat; the second field is in parentheses and may hold anything. */
const FIELDS_BEFORE_START = 19;
const POLL_MS = 20;
const END_MAX_MS = 10_000;

/** When a process started, in the kernel's clock ticks; null when it is gone or the kernel does not say. */
export function processStartTime(pid: number): string | null {
  try {
    const stat = readFileSync(`/proc/${pid}/stat`, 'utf8');
    const fields = stat.slice(stat.lastIndexOf(')') + 2).split(' ');
    return fields[0] === 'Z' ? null : (fields[FIELDS_BEFORE_START] ?? null);
  } catch {
    return null;
  }
}

/**
 * Makes sure that a worker process of an earlier start is gone before anybody takes over what it held. Does
 * nothing when the number belongs to another process by now.
 */
export async function endProcess(run: Pick<LostRun, 'pid' | 'startTime'>): Promise<void> {
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
