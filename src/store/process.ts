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
