// Message bytes that are too large for a row, on disk under the data directory. A blob is written and
// fsynced before the row that names it, so a row never points at nothing; a crash in between leaves
// a blob without a row.
import { mkdir, open, readFile, rename, rm } from 'node:fs/promises';
import { dirname, join } from 'node:path';

/** Raw messages up to this size live in Postgres. */
export const INLINE_MAX_BYTES = 128 * 1024;

export interface BlobStore {
  /** Durable once it resolves. */
  put(key: string, bytes: Uint8Array): Promise<void>;
  /** The bytes, or null when there is no such blob. */
  get(key: string): Promise<Buffer | null>;
  remove(key: string): Promise<void>;
}

const KEY = /^[0-9a-f-]{36}$/;

export function openDiskBlobs(folder: string): BlobStore {
  const pathOf = (key: string): string => {
    if (!KEY.test(key)) throw new Error('a blob key is a UUID');
    // The last characters of a UUIDv7 are random: 256 folders that fill evenly.
    return join(folder, key.slice(-2), key);
  };
  return {
    async put(key, bytes) {
      const path = pathOf(key);
      await mkdir(dirname(path), { recursive: true });
      const file = await open(`${path}.part`, 'w', 0o600);
      try {
        await file.writeFile(bytes);
        await file.sync();
      } finally {
        await file.close();
      }
      await rename(`${path}.part`, path);
      const parent = await open(dirname(path), 'r');
      try {
        await parent.sync(); // the name must be durable too
      } finally {
        await parent.close();
      }
    },
    async get(key) {
      try {
        return await readFile(pathOf(key));
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code === 'ENOENT') return null;
        throw error;
      }
    },
    async remove(key) {
      await rm(pathOf(key), { force: true });
    },
  };
}
