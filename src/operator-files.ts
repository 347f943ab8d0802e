// The data that an operator may replace: config/*.json as it ships, or the file of the same name in `config/` of the
// data folder. Looked at again every few seconds, so an edit needs no restart. Part of the composition root.
import { readFileSync, statSync } from 'node:fs';
import { join } from 'node:path';
import type { Logger } from './log.ts';
import { parseFile } from './mail/rule-file.ts';

const SHIPPED = new URL('../config/', import.meta.url);
const LOOK_MS = 5_000;
const BYTES_MAX = 4 * 1024 * 1024;

export interface OperatorFile<T> {
  /** What the file says now: of a file that became wrong, what it said before. */
  current(): T;
  stop(): void;
}

/**
 * Opens `<name>.json`. `read` turns the parsed file into what it means and throws an Error that says what to fix: at the
 * start it stops the start, later it is logged.
 */
export function openOperatorFile<T>(
  name: string,
  d: {
    readonly folder: string;
    readonly read: (file: unknown) => T;
    readonly log: Logger;
    readonly lookMs?: number;
  },
): OperatorFile<T> {
  const own = join(d.folder, `${name}.json`);
  const shipped = new URL(`${name}.json`, SHIPPED);
  const stamp = (): string => {
    try {
      const { mtimeMs, size, ino } = statSync(own);
      return `${mtimeMs} ${size} ${ino}`;
    } catch (error) {
      // A file that is there and cannot be read is no reason to do what the shipped one says.
      return (error as NodeJS.ErrnoException).code === 'ENOENT' ? '' : String(error);
    }
  };
  const load = (at: string): T => {
    const path = at === '' ? shipped : own;
    try {
      const text = readFileSync(path, 'utf8');
      if (text.length > BYTES_MAX) throw new Error(`it is larger than ${BYTES_MAX} bytes`);
      return d.read(parseFile(text));
    } catch (error) {
      throw new Error(`${at === '' ? `config/${name}.json` : own}: ${(error as Error).message}`, {
        cause: error,
      });
    }
  };
  let seen = stamp();
  let value = load(seen);
  let wasGone = seen === '';
  const timer = setInterval(() => {
    const now = stamp();
    // Some editors remove a file before they write it anew: it is gone when it is gone twice.
    const isJustGone = now === '' && !wasGone;
    wasGone = now === '';
    if (now === seen || isJustGone) return;
    seen = now;
    try {
      value = load(now);
      d.log.info({ file: now === '' ? `config/${name}.json` : own }, 'read again');
    } catch (error) {
      d.log.error({ err: error }, 'the file cannot be used; what it said before stays in force');
    }
  }, d.lookMs ?? LOOK_MS);
  timer.unref();
  return { current: () => value, stop: () => clearInterval(timer) };
}
