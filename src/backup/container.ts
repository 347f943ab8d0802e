// The file of a backup: a tar of small parts, compressed with zstd. First the manifest, last a trailer with counts, and
// behind it a digest over all bytes, so that a file that is cut off or damaged is known before anything is done with it.
//
// It is written as `<file>.part` and gets its name when it is whole and on the disk. Everything is streamed: neither side
// holds more than a few parts.
import { createHash } from 'node:crypto';
import { createReadStream } from 'node:fs';
import { lstat, open, rename, type FileHandle } from 'node:fs/promises';
import { dirname, resolve } from 'node:path';
import { pipeline } from 'node:stream/promises';
import { constants, createZstdCompress, createZstdDecompress } from 'node:zlib';
import { extract, pack } from 'tar-stream';
import { hasCode, linkIfFree, syncDir, unlinkIfThere } from '../store/files.ts';

/** Of one entry; tables and blobs are cut into parts of this size. */
export const PART_BYTES = 8 * 1024 * 1024;
/** A manifest names tables and columns, a trailer tables: far smaller. */
const ENTRY_MAX_BYTES = 2 * PART_BYTES;
const TRAILER = 'trailer.json';
/** Hex digits, which bytes are in a copy, cost level 3 many times what they cost here, and come out the same. */
const LEVEL = 1;
/** Reading for a file is worth as much as its compressed bytes; told this often. */
const DISK_CHUNK_BYTES = 1024 * 1024;

/**
 * The last bytes of a file: a frame that zstd skips, with the SHA-256 of all bytes before it. zstd itself does not miss the
 * very last block, and does not mind changed bits that mean the same.
 */
const END_MARK = Buffer.concat([
  Buffer.from([0x5e, 0x2a, 0x4d, 0x18, 41, 0, 0, 0]), // RFC 8878 §3.1.2, 41 bytes
  Buffer.from('mailstead'),
]);
const END_BYTES = END_MARK.length + 32;

/** The file cannot be written, or is not what it should be; the message is for the operator. */
export class BackupFailed extends Error {
  override name = 'BackupFailed';
}

/** A file that is cut off, damaged, or not a backup. */
export class BackupDamaged extends BackupFailed {
  override name = 'BackupDamaged';
}

export interface Entry {
  readonly name: string;
  readonly bytes: Buffer;
}

/** What a part says about itself at the end of the file. */
export interface Sum {
  readonly rows: number;
  readonly bytes: number;
  readonly sha256: string;
}

export interface Trailer {
  readonly entries: number;
  readonly tables: Readonly<Record<string, Sum>>;
  readonly blobs: { readonly count: number; readonly bytes: number };
}

export interface BackupWriter {
  add(entry: Entry): Promise<void>;
  /** Writes the trailer, syncs the file and gives it its name; its size in bytes. */
  finish(about: Omit<Trailer, 'entries'>): Promise<number>;
  /** Removes what was written. */
  abandon(): Promise<void>;
}

/** The name of a file that is not there yet, for who asks before the work. Throws BackupFailed. */
export async function refuseExisting(file: string): Promise<void> {
  // A link to nowhere counts, too: the name is taken.
  const found = await lstat(file).catch((error: unknown) => {
    if (hasCode(error, 'ENOENT')) return null;
    throw cannotWrite(file, error);
  });
  if (found !== null) {
    throw new BackupFailed(`${file} exists already; name another file or move that one away.`);
  }
}

/** Opens `<file>.part`, mode 0600. Throws BackupFailed, also when the file is there already. */
export async function createBackupFile(file: string): Promise<BackupWriter> {
  const path = resolve(file);
  const draft = `${path}.part`;
  await refuseExisting(path);
  let handle: FileHandle;
  try {
    // Left by a backup that was killed.
    await unlinkIfThere(draft);
    handle = await open(draft, 'wx', 0o600);
  } catch (error) {
    throw cannotWrite(path, error);
  }
  const tar = pack();
  const zstd = createZstdCompress({
    params: {
      [constants.ZSTD_c_compressionLevel]: LEVEL,
      [constants.ZSTD_c_checksumFlag]: 1,
    },
  });
  let size = 0;
  const outer = createHash('sha256');
  const written = pipeline(tar as AsyncIterable<Buffer>, zstd, async (chunks) => {
    for await (const chunk of chunks as AsyncIterable<Buffer>) {
      for (let at = 0; at < chunk.length;) {
        at += (await handle.write(chunk, at)).bytesWritten;
      }
      outer.update(chunk);
      size += chunk.length;
    }
  });
  let failed: unknown = null;
  written.catch((error: unknown) => (failed = error));
  let entries = 0;
  const write = async ({ name, bytes }: Entry): Promise<void> => {
    if (failed !== null) throw cannotWrite(path, failed);
    const taken = new Promise<void>((done, fail) => {
      tar.entry({ name, mode: 0o600, size: bytes.length }, bytes, (error) =>
        error === null || error === undefined ? done() : fail(error),
      );
    });
    try {
      await Promise.race([taken, written]);
    } catch (error) {
      taken.catch(() => undefined);
      throw cannotWrite(path, failed ?? error);
    }
  };
  let isClosed = false;
  const close = async (): Promise<void> => {
    if (isClosed) return;
    isClosed = true;
    await handle.close();
  };
  return {
    async add(entry) {
      entries += 1;
      await write(entry);
    },
    async finish(about) {
      const trailer: Trailer = { entries, ...about };
      await write({ name: TRAILER, bytes: Buffer.from(JSON.stringify(trailer)) });
      try {
        tar.finalize();
        await written;
        await handle.appendFile(Buffer.concat([END_MARK, outer.digest()]));
        size += END_BYTES;
        await handle.sync();
        await close();
        await giveName(draft, path);
        await syncDir(dirname(path));
      } catch (error) {
        throw cannotWrite(path, error);
      }
      return size;
    },
    async abandon() {
      tar.destroy();
      await written.catch(() => undefined);
      await close().catch(() => undefined);
      await unlinkIfThere(draft);
    },
  };
}

/** USB sticks and shares may know no links. */
const NO_LINKS = ['EPERM', 'ENOTSUP', 'EOPNOTSUPP', 'ENOSYS', 'EMLINK'];

async function giveName(draft: string, path: string): Promise<void> {
  try {
    if (!(await linkIfFree(draft, path))) {
      throw new BackupFailed(`${path} has come to be there meanwhile; name another file.`);
    }
  } catch (error) {
    if (!NO_LINKS.some((code) => hasCode(error, code))) throw error;
    await refuseExisting(path);
    await rename(draft, path);
  }
  await unlinkIfThere(draft);
}

function cannotWrite(file: string, error: unknown): BackupFailed {
  if (error instanceof BackupFailed) return error;
  const advice = hasCode(error, 'ENOSPC')
    ? 'the disk is full; make room or name a file on another one'
    : (error as Error).message;
  return new BackupFailed(`${file} cannot be written: ${advice}.`, { cause: error });
}

/**
 * The entries of a file in their order, without the trailer. What was read is proven at the end only: it throws
 * BackupDamaged then, or where the file cannot be read on; `onTrailer` is called when all is well.
 */
export async function* readEntries(
  file: string,
  about: {
    readonly onTrailer?: (trailer: Trailer) => void;
    /** Compressed bytes so far. */
    readonly onBytes?: (done: number) => void;
  } = {},
): AsyncGenerator<Entry> {
  let entries = 0;
  let trailer: Trailer | null = null;
  const end = await findEnd(file);
  const source = createReadStream(file, { end: end.at - 1, highWaterMark: DISK_CHUNK_BYTES });
  const outer = createHash('sha256');
  let done = 0;
  source.on('data', (chunk) => {
    outer.update(chunk);
    done += chunk.length;
    about.onBytes?.(done);
  });
  const tar = extract();
  const unzstd = createZstdDecompress();
  const flowing = pipeline(source, unzstd, tar as unknown as NodeJS.WritableStream);
  flowing.catch(() => undefined);
  try {
    for await (const found of tar) {
      const { name, size } = found.header;
      if (trailer !== null) throw damaged(file, 'something follows its end');
      if (size > ENTRY_MAX_BYTES) throw damaged(file, `${name} is too large for a part`);
      const chunks: Buffer[] = [];
      for await (const chunk of found as AsyncIterable<Buffer>) chunks.push(chunk);
      const entry = { name, bytes: Buffer.concat(chunks) };
      if (name === TRAILER) {
        trailer = JSON.parse(entry.bytes.toString()) as Trailer;
        continue;
      }
      entries += 1;
      yield entry;
    }
    await flowing;
  } catch (error) {
    if (error instanceof BackupFailed) throw error;
    // What goes wrong while an entry is used is not the file's fault.
    if (!isOfReading(error)) throw error;
    throw damaged(file, (error as Error).message, error);
  } finally {
    source.destroy();
    unzstd.destroy();
    tar.destroy();
  }
  if (trailer === null) throw damaged(file, 'its end is missing');
  if (done !== end.at || !outer.digest().equals(end.sha256)) {
    throw damaged(file, 'its bytes are not those that were written');
  }
  if (trailer.entries !== entries) {
    throw damaged(file, 'its contents are not those that were written');
  }
  about.onTrailer?.(trailer);
}

/** Where the compressed bytes end, and what they are. Throws when the file is not there or not whole. */
async function findEnd(file: string): Promise<{ at: number; sha256: Buffer }> {
  let handle: FileHandle;
  try {
    handle = await open(file, 'r');
  } catch (error) {
    if (hasCode(error, 'ENOENT')) throw new BackupFailed(`${file} does not exist.`);
    throw new BackupFailed(`${file} cannot be read: ${(error as Error).message}.`);
  }
  try {
    const about = await handle.stat();
    if (!about.isFile()) throw new BackupFailed(`${file} is not a file.`);
    const at = about.size - END_BYTES;
    const tail = Buffer.alloc(END_BYTES);
    if (at > 0) await handle.read(tail, 0, tail.length, at);
    const mark = tail.subarray(0, END_MARK.length);
    if (!mark.equals(END_MARK)) throw damaged(file, 'its end is missing');
    return { at, sha256: tail.subarray(END_MARK.length) };
  } finally {
    await handle.close();
  }
}

const READING = /zstd|Z_|ERR_STREAM|tar header|checksum|end of (?:file|data)|frame|JSON|corrupt/i;

function isOfReading(error: unknown): boolean {
  if (!(error instanceof Error)) return false;
  return READING.test(`${(error as NodeJS.ErrnoException).code ?? ''} ${error.message}`);
}

const damaged = (file: string, reason: string, cause?: unknown): BackupDamaged =>
  new BackupDamaged(
    `${file} is damaged or not a file of Mailstead (${reason}). Nothing was changed; use another backup.`,
    { cause },
  );
