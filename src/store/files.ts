/**
 * File operations whose expected failure is an answer: a file that is not there, a name that is taken.
 *
 * In: paths. Out: null or false for the one failure that the caller expects. Every other failure is thrown as
 * it came.
 */
import { createHash } from 'node:crypto';
import { link, open, readFile, unlink } from 'node:fs/promises';

/** Whether it is a system error of that code, such as ENOENT. */
export function hasCode(error: unknown, code: string): boolean {
  return error instanceof Error && (error as NodeJS.ErrnoException).code === code;
}

/** The file as UTF-8; null when there is no such file. */
export async function readText(path: string): Promise<string | null> {
  try {
    return await readFile(path, 'utf8');
  } catch (error) {
    if (hasCode(error, 'ENOENT') || hasCode(error, 'ENOTDIR')) return null;
    throw error;
  }
}

/** The file as UTF-8. Throws EFBIG where it is larger. */
export async function readTextUpTo(path: string, bytesMax: number): Promise<string> {
  const file = await open(path, 'r');
  try {
    const { size } = await file.stat();
    if (size > bytesMax) throw Object.assign(new Error('too large'), { code: 'EFBIG' });
    return await file.readFile('utf8');
  } finally {
    await file.close();
  }
}

/** Whether the name `to` was free and is now the file `from` as well: link(2), whole or not at all. */
export async function linkIfFree(from: string, to: string): Promise<boolean> {
  try {
    await link(from, to);
    return true;
  } catch (error) {
    if (hasCode(error, 'EEXIST')) return false;
    throw error;
  }
}

export async function unlinkIfThere(path: string): Promise<void> {
  try {
    await unlink(path);
  } catch (error) {
    if (!hasCode(error, 'ENOENT')) throw error;
  }
}

/** Makes what was created or renamed in the directory outlive a power cut. */
export async function syncDir(dir: string): Promise<void> {
  const handle = await open(dir, 'r');
  try {
    await handle.sync();
  } finally {
    await handle.close();
  }
}

/** Twelve hex digits that stand for the value in the name of a file. */
export function hashOf(value: unknown): string {
  return createHash('sha256').update(JSON.stringify(value)).digest('hex').slice(0, 12);
}
