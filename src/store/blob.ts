// Message bytes that are too large for a row, on disk under the data directory. A blob is written and
// fsynced before the row that names it, so a row never points at nothing; a crash in between leaves
// a blob without a row, which sending/collect-blobs.ts finds. Every column that names a blob is called `blob_key`
// or ends so: that is how the rows are found.
import { mkdir, open, readdir, readFile, rename, rm, stat } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import { Readable } from 'node:stream';

/** Raw messages up to this size live in Postgres. */
export const INLINE_MAX_BYTES = 128 * 1024;

/** Of a blob, in bytes from its beginning. */
export interface BlobRange {
  readonly offset: number;
  readonly length: number;
}

export interface BlobStore {
  /** Durable once it resolves. */
  put(key: string, bytes: Uint8Array): Promise<void>;
  /**
   * The same for bytes that come one by one; a chunk may be overwritten when the next is asked for. When they or
   * the disk fail, nothing is left.
   */
  write(key: string, chunks: AsyncIterable<Uint8Array>): Promise<void>;
  /** The bytes, or null when there is no such blob. */
  get(key: string): Promise<Buffer | null>;
  /** The same as a stream, whole or a part of it. It must be read to its end or destroyed. */
  read(key: string, range?: BlobRange): Promise<Readable | null>;
  remove(key: string): Promise<void>;
  /**
   * The blobs that were written before, in no order; a blob that is removed meanwhile may still be named. What a
   * crash left half-written before then is removed on the way.
   */
  list(writtenBefore: Date): AsyncIterable<string>;
}

/** A blob store that says which one it is (blob-identity.ts). */
export interface MarkedBlobStore extends BlobStore {
  /** Null when it has none. */
  readMark(): Promise<string | null>;
  /** Replaces the one that is there; durable once it resolves. */
  writeMark(text: string): Promise<void>;
}

export const BLOB_KEY = /^[0-9a-f-]{36}$/;
/** Of the file, or the object, that holds the mark. */
export const MARK_NAME = 'blob-store-id';
const FOLDER = /^[0-9a-f]{2}$/;
const UNFINISHED = '.part';

export function openDiskBlobs(folder: string): MarkedBlobStore {
  const pathOf = (key: string): string => {
    if (!BLOB_KEY.test(key)) throw new Error('a blob key is a UUID');
    // The last characters of a UUIDv7 are random: 256 folders that fill evenly.
    return join(folder, key.slice(-2), key);
  };
  const write: BlobStore['write'] = async (key, chunks) => {
    const path = pathOf(key);
    await mkdir(dirname(path), { recursive: true });
    await writeDurably(path, chunks);
  };
  return {
    write,
    put: (key, bytes) => write(key, one(bytes)),
    async get(key) {
      try {
        return await readFile(pathOf(key));
      } catch (error) {
        return nullIfMissing(error);
      }
    },
    async read(key, range) {
      try {
        // Opened here, so that a blob that is not there is null and not an error of the stream.
        const file = await open(pathOf(key), 'r');
        if (range !== undefined && range.length === 0) {
          await file.close();
          return Readable.from([]);
        }
        return file.createReadStream(
          range === undefined ? {} : { start: range.offset, end: range.offset + range.length - 1 },
        );
      } catch (error) {
        return nullIfMissing(error);
      }
    },
    async remove(key) {
      await rm(pathOf(key), { force: true });
    },
    async *list(writtenBefore) {
      for (const part of (await readdir(folder)).filter((name) => FOLDER.test(name))) {
        for (const name of await readdir(join(folder, part))) {
          const path = join(folder, part, name);
          const found = await stat(path).catch(nullIfMissing);
          if (found === null || found.mtime >= writtenBefore) continue;
          if (name.endsWith(UNFINISHED)) await rm(path, { force: true });
          else if (BLOB_KEY.test(name)) yield name;
        }
      }
    },
    async readMark() {
      return (await readFile(join(folder, MARK_NAME), 'utf8').catch(nullIfMissing))?.trim() ?? null;
    },
    async writeMark(text) {
      await writeDurably(join(folder, MARK_NAME), one(Buffer.from(`${text}\n`)));
    },
  };
}

/** Under another name first; when that fails, nothing is left. */
async function writeDurably(path: string, chunks: AsyncIterable<Uint8Array>): Promise<void> {
  const draft = path + UNFINISHED;
  try {
    const file = await open(draft, 'w', 0o600);
    try {
      for await (const chunk of chunks) await writeFully(file, chunk);
      await file.sync();
    } finally {
      await file.close();
    }
    await rename(draft, path);
  } catch (error) {
    await rm(draft, { force: true });
    throw error;
  }
  const parent = await open(dirname(path), 'r');
  try {
    await parent.sync(); // the name must be durable too
  } finally {
    await parent.close();
  }
}

// oxlint-disable-next-line typescript/require-await -- an async iterable of one
async function* one(bytes: Uint8Array): AsyncGenerator<Uint8Array> {
  yield bytes;
}

async function writeFully(
  file: Awaited<ReturnType<typeof open>>,
  bytes: Uint8Array,
): Promise<void> {
  for (let at = 0; at < bytes.length;) {
    const { bytesWritten } = await file.write(bytes, at, bytes.length - at);
    at += bytesWritten;
  }
}

function nullIfMissing(error: unknown): null {
  if ((error as NodeJS.ErrnoException).code === 'ENOENT') return null;
  throw error;
}
