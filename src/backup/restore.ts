// A backup into an empty database: proven first, then blobs, then all rows in one transaction, so that a restore that is
// cut off leaves an empty database and can be begun again.
//
// A file of an earlier release goes into the schema that it was made with; then the migrations run that came since.
import { mkdir, open } from 'node:fs/promises';
import { dirname, join } from 'node:path';
import type { Client, ClientBase } from 'pg';
import type { Logger } from '../log.ts';
import type { BlobStore } from '../store/blob.ts';
import { hasCode, readText, syncDir } from '../store/files.ts';
import { MIGRATION_LOCK, openStore, SCHEMA } from '../store/orm.ts';
import { forgetSecret } from '../store/appliance-facts.ts';
import {
  connect,
  findRows,
  quote,
  quoteAll,
  readSchema,
  readTables,
  type Table,
} from './catalog.ts';
import { BackupFailed, readEntries, type Entry, type Sum, type Trailer } from './container.ts';
import { copyIn } from './copy.ts';
import { checkOf, readName, verifyFile, type Manifest, type Verified } from './manifest.ts';

const MIGRATING_CONNECTIONS = 2;
const MASTER = 'secrets/master';

export type RestoreStep = 'verify' | 'blobs' | 'rows' | 'migrate';

export interface RestoreOptions {
  readonly file: string;
  readonly databaseUrl: string;
  readonly blobs: BlobStore;
  /** MAILSTEAD_SECRET; null when it is generated into the data directory. */
  readonly secret: string | null;
  /** Absolute; made where it is missing. */
  readonly dataDir: string;
  readonly log: Logger;
  /** In the transaction that makes the rows visible; nothing can be sent before. */
  readonly beforeCommit?: (client: ClientBase) => Promise<void>;
  /** Compressed bytes of the file that the step has read. */
  readonly onProgress?: (step: RestoreStep, done: number) => void;
  readonly signal?: AbortSignal;
}

export interface RestoreReport {
  readonly takenAt: string;
  readonly tables: number;
  readonly rows: number;
  readonly blobs: number;
  /** Deliveries that were under way when the backup was taken: their fate is unknown. */
  readonly underWay: number;
  /** Migrations that ran after the rows were there. */
  readonly migrated: readonly string[];
  /** Tables of the file that are none of ours, and were left out. */
  readonly leftOut: readonly string[];
  /** The operator's files that were there already, and stayed. */
  readonly kept: readonly string[];
}

/** Throws BackupFailed with a sentence that says what to do; then the database is as empty as it was. */
export async function restore(options: RestoreOptions): Promise<RestoreReport> {
  const { file, databaseUrl, log } = options;
  const verified = await verifyFile(file, 'appliance', passOf(options, 'verify'));
  const { manifest, trailer } = verified;
  refuseNewer(manifest);
  await refuseOtherSecret(options, verified);
  await withClient(databaseUrl, async (client) => {
    await refuseUsed(client);
    await refuseAhead(client, manifest);
  });
  await migrateTo({ databaseUrl, log, to: manifest.schema.at(-1)! });
  const blobs = await restoreBlobs(options);
  const loaded = await withClient(databaseUrl, (client) => load(client, options, verified));
  options.onProgress?.('migrate', 0);
  const migrated = await migrateTo({ databaseUrl, log });
  await withClient(databaseUrl, async (client) => {
    // The claim and every list are planned by statistics that a copy does not bring.
    await client.query('analyze');
  });
  const sums = Object.values(trailer.tables);
  return {
    takenAt: manifest.takenAt,
    tables: sums.length - loaded.leftOut.length,
    rows: sums.reduce((sum, { rows }) => sum + rows, 0),
    blobs,
    migrated,
    ...loaded,
  };
}

/** How a pass over the file reports and ends early. */
const passOf = (
  { onProgress, signal }: Pick<RestoreOptions, 'onProgress' | 'signal'>,
  step: RestoreStep,
): { onBytes?: (done: number) => void; signal?: AbortSignal } => ({
  ...(onProgress === undefined ? {} : { onBytes: (done: number) => onProgress(step, done) }),
  ...(signal === undefined ? {} : { signal }),
});

export function refuseNewer({ schema }: Manifest): void {
  const unknown = schema.filter((name, at) => SCHEMA[at] !== name);
  if (unknown.length === 0 && schema.length > 0) return;
  throw new BackupFailed(
    `The file was written by a newer Mailstead (${unknown.join(', ')}); restore it with that version or a later one.`,
  );
}

async function refuseOtherSecret(
  { secret, dataDir }: Pick<RestoreOptions, 'secret' | 'dataDir'>,
  { manifest, files }: Verified,
): Promise<void> {
  const carried = files.get(`files/${MASTER}`)?.toString().trim();
  const isRight = (one: string): boolean => checkOf(one) === manifest.secretCheck;
  if (secret !== null) {
    if (isRight(secret)) return;
    throw new BackupFailed(
      'MAILSTEAD_SECRET is not the secret that the backup was made with, so its DKIM keys and webhook secrets could not be ' +
        'read. ' +
        (carried === undefined
          ? 'Set it to the one of that appliance.'
          : 'Unset it: the file brings its own.'),
    );
  }
  const own = (await readText(join(dataDir, MASTER)))?.trim();
  if (own !== undefined) {
    if (isRight(own)) return;
    throw new BackupFailed(
      `${join(dataDir, MASTER)} is another secret than that of the backup. Restore into an empty data directory, or move ` +
        'that file away if nothing needs it any more.',
    );
  }
  if (carried !== undefined && isRight(carried)) return;
  throw new BackupFailed(
    'The backup was made with MAILSTEAD_SECRET set, and does not hold it. Set MAILSTEAD_SECRET to the same value.',
  );
}

async function refuseUsed(client: ClientBase): Promise<void> {
  const table = await findRows(client);
  if (table === null) return;
  throw new BackupFailed(
    `The database is not empty (${table} has rows), and restoring replaces nothing. Stop the appliance and restore into an ` +
      'empty database, or into an empty data directory.',
  );
}

async function refuseAhead(client: ClientBase, manifest: Manifest): Promise<void> {
  const schema = await readSchema(client);
  if (schema.length <= manifest.schema.length) return;
  throw new BackupFailed(
    'The database is empty, but has the tables of a later version than the backup. Make a new database and restore into that.',
  );
}

async function migrateTo(d: {
  readonly databaseUrl: string;
  readonly log: Logger;
  /** Absent: all. */
  readonly to?: string;
}): Promise<readonly string[]> {
  const ran: string[] = [];
  const store = await openStore({
    url: d.databaseUrl,
    log: d.log,
    connectionsMax: MIGRATING_CONNECTIONS,
    migrate: true,
    onMigrated: (name) => ran.push(name),
    ...(d.to === undefined ? {} : { migrateTo: d.to }),
  });
  await store.close();
  return ran;
}

async function withClient<T>(url: string, work: (client: Client) => Promise<T>): Promise<T> {
  const client = await connect(url);
  try {
    return await work(client);
  } finally {
    // Not in order where something failed: Postgres rolls back what was under way.
    await client.end().catch(() => undefined);
  }
}

/** Each on the disk, or in the bucket, before a row names it. How many. */
async function restoreBlobs(options: RestoreOptions): Promise<number> {
  let count = 0;
  const entries = readEntries(options.file, passOf(options, 'blobs'));
  for await (const blob of groupEntries(entries, 'blobs', options.signal)) {
    await options.blobs.write(blob.item, blob.parts);
    count += 1;
  }
  return count;
}

export interface Group {
  readonly item: string;
  /** Must be read to the end. */
  readonly parts: AsyncIterable<Buffer>;
}

/** Entries of one group of names (`tables`, `blobs`), item by item; others are passed over. */
export async function* groupEntries(
  entries: AsyncIterable<Entry>,
  group: string,
  signal: AbortSignal | undefined,
): AsyncGenerator<Group> {
  const iterator = entries[Symbol.asyncIterator]();
  const next = async (): Promise<(Entry & { item: string }) | null> => {
    for (;;) {
      signal?.throwIfAborted();
      const { done, value } = await iterator.next();
      if (done === true) return null;
      const read = readName(value.name);
      if (read.group === group) return { ...value, item: read.item };
    }
  };
  try {
    let entry = await next();
    while (entry !== null) {
      const { item } = entry;
      const parts = async function* (): AsyncGenerator<Buffer> {
        while (entry !== null && entry.item === item) {
          yield entry.bytes;
          entry = await next();
        }
      };
      yield { item, parts: parts() };
    }
  } finally {
    await iterator.return?.();
  }
}

async function load(
  client: ClientBase,
  options: RestoreOptions,
  verified: Verified,
): Promise<Pick<RestoreReport, 'underWay' | 'leftOut' | 'kept'>> {
  const { manifest, trailer, files } = verified;
  await client.query('begin');
  // An appliance that starts meanwhile waits here until the rows are there.
  await client.query('select pg_advisory_xact_lock($1)', [MIGRATION_LOCK]);
  // One that is past its migrations waits here before it makes the first tenant.
  await client.query('lock table tenant');
  await refuseUsed(client);
  await refuseAhead(client, manifest);
  const tables = matchTables(manifest.tables, await readTables(client));
  const leftOut = manifest.tables
    .map(({ name }) => name)
    .filter((name) => !tables.some((table) => table.name === name));
  const entries = readEntries(options.file, passOf(options, 'rows'));
  const loaded = new Set<string>();
  for await (const { item, parts } of groupEntries(entries, 'tables', options.signal)) {
    const table = tables.find(({ name }) => name === item);
    if (table === undefined) {
      for await (const part of parts) void part;
      continue;
    }
    const sum = await copyIn(client, `${quote(item)} (${quoteAll(table.columns)})`, parts);
    refuseOther(item, sum, trailer);
    loaded.add(item);
  }
  for (const { name } of tables) {
    if (!loaded.has(name)) refuseOther(name, EMPTY, trailer);
  }
  const underWay = await countUnderWay(client);
  const kept = await writeFiles(options.dataDir, files);
  // Somebody may have generated one meanwhile.
  await refuseOtherSecret(options, verified);
  await forgetSecret(client);
  await options.beforeCommit?.(client);
  await client.query('commit');
  return { underWay, leftOut, kept };
}

const EMPTY: Pick<Sum, 'rows' | 'bytes'> = { rows: 0, bytes: 0 };

/** What came must be what went, by number and by digest. */
export function refuseOther(
  table: string,
  sum: Pick<Sum, 'rows' | 'bytes'> & { readonly sha256?: string },
  { tables }: Trailer,
): void {
  const wanted = tables[table];
  const isSame =
    wanted !== undefined &&
    wanted.rows === sum.rows &&
    wanted.bytes === sum.bytes &&
    (sum.sha256 === undefined || sum.sha256 === wanted.sha256);
  if (isSame) return;
  throw new BackupFailed(`The rows of ${table} are not those of the file; nothing was changed.`);
}

/** Tables of the file that the schema has. Throws when a column is missing there. */
export function matchTables(wanted: readonly Table[], found: readonly Table[]): readonly Table[] {
  return wanted.filter(({ name, columns }) => {
    const table = found.find((one) => one.name === name);
    if (table === undefined) return false;
    const missing = columns.filter((column) => !table.columns.includes(column));
    if (missing.length === 0) return true;
    throw new BackupFailed(
      `The file has columns that this version does not know (${name}: ${missing.join(', ')}); restore it with the version that wrote it.`,
    );
  });
}

/**
 * No worker is restored, so what they held is decided as after any lost one whose journal is not there: it counts as
 * lost after the final dot, is told as unknown, and is tried once more much later.
 */
async function countUnderWay(client: ClientBase): Promise<number> {
  const { rows } = await client.query<{ count: string }>(
    `select count(*) from delivery where state = 'in_flight'`,
  );
  return Number(rows[0]!.count);
}

/** On the disk before rows need them. Names of those that were there already and are others. */
async function writeFiles(
  dataDir: string,
  files: ReadonlyMap<string, Buffer>,
): Promise<readonly string[]> {
  const kept: string[] = [];
  for (const [entry, bytes] of files) {
    const name = entry.slice('files/'.length);
    // Names of our own making; anything else would leave the directory.
    if (!/^(?:(?:secrets|config)\/[a-z][a-z0-9-]*(?:\.json)?|first-api-key)$/.test(name)) continue;
    const path = join(dataDir, name);
    await mkdir(dirname(path), { recursive: true, mode: 0o700 });
    try {
      const handle = await open(path, 'wx', 0o600);
      try {
        await handle.writeFile(bytes);
        await handle.sync();
      } finally {
        await handle.close();
      }
      await syncDir(dirname(path));
    } catch (error) {
      if (!hasCode(error, 'EEXIST')) throw error;
      if ((await readText(path)) !== bytes.toString()) kept.push(name);
    }
  }
  return kept;
}
