/**
 * The data directory: creates it (0700), locks it against a second appliance, keeps its generated
 * secrets.
 *
 * In: a path. Out: the directory, held until it is released, and its secrets by name. Refuses: a directory in
 * use, a directory it cannot write, a damaged secret.
 */
import { randomBytes } from 'node:crypto';
import { mkdir, open } from 'node:fs/promises';
import { dirname, join, resolve } from 'node:path';
import type { Logger } from '../log.ts';
import { linkIfFree, readText, syncDir, unlinkIfThere } from './files.ts';
import { describeHolder, LockHeld, takeLock } from './lock.ts';

const LOCK_NAME = 'mailstead.lock';
const SECRET_NAME = /^[a-z][a-z0-9-]{0,63}$/;
const SECRET_BYTES_MAX = 1_024;

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

/** The secret of a data directory that is there or that somebody else holds; null when it was never generated. */
export function readGeneratedSecret(
  path: string,
  name: string,
  bytes: number,
): Promise<string | null> {
  return readSecret(join(resolve(path), 'secrets', name), bytes);
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
  const text = (await readText(path))?.trim();
  if (text === undefined) return null;
  if (/^[0-9a-f]+$/.test(text) && text.length === bytes * 2) return text;
  // Never replaced silently: what was sealed or signed with it would be lost.
  throw new Error(`${path} is not a secret of ${bytes} bytes in hex; restore it from a backup`);
}
