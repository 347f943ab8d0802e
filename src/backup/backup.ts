// The whole appliance as one file, while it runs: every row of one moment, the blobs that those rows name, the
// secrets that were generated here, and the operator's own files.
//
// Rows are copied in one transaction that reads a snapshot, blobs after it: a long snapshot keeps dead rows alive, which
// claims then pay for. A lock keeps blobs from being removed meanwhile (store/backup-lock.ts).
import { createReadStream } from 'node:fs';
import { open, readdir, readFile } from 'node:fs/promises';
import { join, resolve } from 'node:path';
import { createInterface } from 'node:readline';
import type { ClientBase } from 'pg';
import { BACKUP_LOCK } from '../store/backup-lock.ts';
import type { BlobStore } from '../store/blob.ts';
import { hasCode, unlinkIfThere } from '../store/files.ts';
import { connect, isBlobColumn, quote, quoteAll, readSchema, readTables } from './catalog.ts';
import type { Table } from './catalog.ts';
import {
  BackupFailed,
  createBackupFile,
  refuseExisting,
  type BackupWriter,
  type Sum,
} from './container.ts';
import { copyOut, inParts } from './copy.ts';
import { blobPart, checkOf, MANIFEST, manifestOf, tablePart } from './manifest.ts';

/** The lock's connection is asked for a sign of life this often: a backup without its lock is worth nothing. */
const LOCK_BEAT_MS = 15_000;
/** Blobs that rows name and the store does not have: so many are named. */
const MISSING_MAX = 20;

export interface BackupProgress {
  readonly step: 'rows' | 'blobs';
  /** Of this step, not compressed. */
  readonly bytes: number;
}

export interface BackupReport {
  readonly file: string;
  /** Of the file. */
  readonly bytes: number;
  readonly takenAt: string;
  readonly tables: number;
  readonly rows: number;
  readonly rowBytes: number;
  readonly blobs: number;
  readonly blobBytes: number;
  /** Blobs that rows name and that the store did not have, at most 20 of them. */
  readonly missingBlobs: readonly string[];
  /** How long the snapshot was held. */
  readonly snapshotMs: number;
}

export interface BackupOptions {
  readonly file: string;
  readonly databaseUrl: string;
  readonly blobs: BlobStore;
  /** The master secret; it goes into the file only when it was generated into the data directory. */
  readonly secret: string;
  readonly isSecretGenerated: boolean;
  readonly dataDir: string;
  readonly onProgress?: (progress: BackupProgress) => void;
  readonly signal?: AbortSignal;
}

/** Throws BackupFailed; whatever it throws, no file is left. */
export async function backUp(options: BackupOptions): Promise<BackupReport> {
  await refuseExisting(options.file);
  return withBackupLock(options.databaseUrl, async (guard) => {
    const writer = await createBackupFile(options.file);
    const keyFile = `${resolve(options.file)}.blobs.part`;
    try {
      const snapshot = await writeSnapshot(options, { writer, keyFile, guard });
      const blobs = await writeBlobs(options, { writer, keyFile, guard });
      guard();
      const { tables } = snapshot;
      const bytes = await writer.finish({
        tables,
        blobs: { count: blobs.count, bytes: blobs.bytes },
      });
      const sums = Object.values(tables);
      return {
        file: resolve(options.file),
        bytes,
        takenAt: snapshot.takenAt,
        tables: sums.length,
        rows: sums.reduce((sum, { rows }) => sum + rows, 0),
        rowBytes: sums.reduce((sum, table) => sum + table.bytes, 0),
        blobs: blobs.count,
        blobBytes: blobs.bytes,
        missingBlobs: blobs.missing,
        snapshotMs: snapshot.ms,
      };
    } catch (error) {
      await writer.abandon();
      throw error;
    } finally {
      await unlinkIfThere(keyFile);
    }
  });
}

/** Throws when the backup is to end: asked to, or without its lock. */
export type Guard = () => void;

/** Runs `work` while no blob is removed. One at a time: a second one is refused. */
export async function withBackupLock<T>(
  databaseUrl: string,
  work: (guard: Guard) => Promise<T>,
): Promise<T> {
  const client = await connect(databaseUrl);
  let lost: unknown = null;
  client.on('error', (error) => (lost ??= error));
  const beat = setInterval(() => {
    client.query('select 1').catch((error: unknown) => (lost ??= error));
  }, LOCK_BEAT_MS);
  try {
    const { rows } = await client.query<{ taken: boolean }>(
      'select pg_try_advisory_lock($1) as taken',
      [BACKUP_LOCK],
    );
    if (rows[0]?.taken !== true) {
      throw new BackupFailed('Another backup of this database is under way; wait for its end.');
    }
    return await work(() => {
      if (lost !== null) {
        throw new BackupFailed(
          'The database was away in the middle of the backup; start it again.',
          {
            cause: lost,
          },
        );
      }
    });
  } finally {
    clearInterval(beat);
    await client.end().catch(() => undefined); // the lock goes with it
  }
}

/** Runs `work` on rows as they are at one moment. */
export async function inSnapshot<T>(
  databaseUrl: string,
  work: (client: ClientBase) => Promise<T>,
): Promise<T> {
  const client = await connect(databaseUrl);
  try {
    await client.query('begin isolation level repeatable read, read only');
    const result = await work(client);
    await client.query('commit');
    return result;
  } finally {
    // Also ends a copy that is under way.
    await client.end().catch(() => undefined);
  }
}

async function writeSnapshot(
  options: BackupOptions,
  d: { readonly writer: BackupWriter; readonly keyFile: string; readonly guard: Guard },
): Promise<{ tables: Record<string, Sum>; takenAt: string; ms: number }> {
  const { writer } = d;
  const begunAt = performance.now();
  const result = await inSnapshot(options.databaseUrl, async (client) => {
    const schema = await readSchema(client);
    if (schema.length === 0) {
      throw new BackupFailed('The database has no tables of Mailstead: nothing to back up.');
    }
    const tables = await readTables(client);
    const takenAt = await snapshotTime(client);
    const manifest = manifestOf({
      kind: 'appliance',
      takenAt,
      schema,
      tables,
      secretCheck: checkOf(options.secret),
      tenant: null,
    });
    await writer.add({ name: MANIFEST, bytes: Buffer.from(JSON.stringify(manifest)) });
    for (const [name, bytes] of await ownFiles(options)) {
      await writer.add({ name: `files/${name}`, bytes });
    }
    const sums = await writeTables(client, {
      ...d,
      tables,
      queryOf: ({ name, columns }) => `select ${quoteAll(columns)} from ${quote(name)}`,
      onBytes: (bytes) => options.onProgress?.({ step: 'rows', bytes }),
      signal: options.signal,
    });
    await writeKeys(
      client,
      d.keyFile,
      blobKeyQuery(tables, () => 'true'),
    );
    await refuseMigrated(options.databaseUrl, schema);
    return { tables: sums, takenAt };
  });
  return { ...result, ms: Math.round(performance.now() - begunAt) };
}

/** To a snapshot, a table that was rewritten after it is empty: what a migration did meanwhile would be missing in silence. */
export async function refuseMigrated(
  databaseUrl: string,
  before: readonly string[],
): Promise<void> {
  const client = await connect(databaseUrl);
  try {
    if ((await readSchema(client)).join() === before.join()) return;
  } finally {
    await client.end().catch(() => undefined);
  }
  throw new BackupFailed('The database was migrated in the middle of the copy; start it again.');
}

/** By the database's clock, which rows are dated by. */
export async function snapshotTime(client: ClientBase): Promise<string> {
  const { rows } = await client.query<{ at: number }>(
    'select (extract(epoch from now()) * 1000)::float8 as at',
  );
  return new Date(rows[0]!.at).toISOString();
}

/** Copies tables into the file; what each of them was. */
export async function writeTables(
  client: ClientBase,
  d: {
    readonly writer: BackupWriter;
    readonly guard: Guard;
    readonly tables: readonly Table[];
    readonly queryOf: (table: Table) => string;
    readonly onBytes: (bytes: number) => void;
    readonly signal: AbortSignal | undefined;
  },
): Promise<Record<string, Sum>> {
  const sums: Record<string, Sum> = {};
  let bytes = 0;
  for (const table of d.tables) {
    let number = 0;
    sums[table.name] = await copyOut(client, d.queryOf(table), async (part) => {
      d.signal?.throwIfAborted();
      d.guard();
      await d.writer.add({ name: tablePart(table.name, number++), bytes: part });
      d.onBytes((bytes += part.length));
    });
  }
  return sums;
}

/** Every key that rows of the tables name, each once; `where` says which rows. */
export function blobKeyQuery(
  tables: readonly Table[],
  where: (table: Table) => string,
): string | null {
  const named = tables.flatMap((table) =>
    table.columns
      .filter(isBlobColumn)
      .map(
        (column) =>
          `select t.${quote(column)} from ${quote(table.name)} t where t.${quote(column)} is not null and (${where(table)})`,
      ),
  );
  return named.length === 0 ? null : named.join(' union ');
}

/** One key a line, in a file: there may be millions. */
export async function writeKeys(
  client: ClientBase,
  keyFile: string,
  query: string | null,
): Promise<void> {
  await unlinkIfThere(keyFile);
  const handle = await open(keyFile, 'wx', 0o600);
  try {
    if (query !== null) await copyOut(client, query, (part) => handle.appendFile(part));
  } finally {
    await handle.close();
  }
}

/** The blobs that the file of keys names. */
export async function writeBlobs(
  options: Pick<BackupOptions, 'blobs' | 'onProgress' | 'signal'>,
  d: { readonly writer: BackupWriter; readonly keyFile: string; readonly guard: Guard },
): Promise<{ count: number; bytes: number; missing: readonly string[] }> {
  const total = { count: 0, bytes: 0 };
  const missing: string[] = [];
  const input = createReadStream(d.keyFile);
  for await (const key of createInterface({ input, crlfDelay: Infinity })) {
    options.signal?.throwIfAborted();
    d.guard();
    const stream = await options.blobs.read(key);
    if (stream === null) {
      if (missing.length < MISSING_MAX) missing.push(key);
      continue;
    }
    let number = 0;
    for await (const bytes of inParts(stream as AsyncIterable<Buffer>)) {
      await d.writer.add({ name: blobPart(key, number++), bytes });
      total.bytes += bytes.length;
      options.onProgress?.({ step: 'blobs', bytes: total.bytes });
    }
    // Empty, and there all the same.
    if (number === 0) await d.writer.add({ name: blobPart(key, 0), bytes: Buffer.alloc(0) });
    total.count += 1;
  }
  return { ...total, missing };
}

/** Secrets that were generated here, the key that development remembers, and the operator's own files. */
async function ownFiles(
  options: Pick<BackupOptions, 'dataDir' | 'isSecretGenerated'>,
): Promise<readonly (readonly [string, Buffer])[]> {
  const { dataDir } = options;
  const wanted = [
    ...(options.isSecretGenerated ? await namesIn(dataDir, 'secrets', /^[a-z][a-z0-9-]*$/) : []),
    ...(await namesIn(dataDir, 'config', /^[a-z][a-z0-9-]*\.json$/)),
    'first-api-key',
  ];
  const files: (readonly [string, Buffer])[] = [];
  for (const name of wanted) {
    try {
      files.push([name, await readFile(join(dataDir, name))]);
    } catch (error) {
      if (!hasCode(error, 'ENOENT')) throw error;
    }
  }
  return files;
}

async function namesIn(dataDir: string, folder: string, names: RegExp): Promise<readonly string[]> {
  try {
    const found = await readdir(join(dataDir, folder));
    return found.filter((name) => names.test(name)).map((name) => `${folder}/${name}`);
  } catch (error) {
    if (hasCode(error, 'ENOENT')) return [];
    throw error;
  }
}
