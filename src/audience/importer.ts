// Reads the files of imports into contacts, some hundred rows in one transaction, which moves `read_bytes` too: whoever
// reads on after a crash begins there, so no row is lost and none comes twice. Several processes may do so at once: an
// import that one of them took is not due for the others for a while, and when that was too short, the second to store
// the same rows finds them stored. Tenants take turns of a second or two. Webhooks hear nothing of imported contacts.
import type { PoolClient } from 'pg';
import { Refusal } from '../access/refusal.ts';
import type { Logger } from '../log.ts';
import type { BlobStore } from '../store/blob.ts';
import { isBlobsUnavailable } from '../store/blobs-unavailable.ts';
import type { Subscription } from '../store/contact.ts';
import { LOWEST_ID } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import type { Store } from '../store/orm.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';
import { upsertContacts } from './contact-changes.ts';
import type { NewContact } from './contact-fields.ts';
import { HEAD_MAX_BYTES, readHeader, readRows, UnusableFile } from './import-file.ts';
import type { ColumnMap } from './import-request.ts';
import { contactOf, mappedProperties, planColumns, type Plan } from './import-rows.ts';
import { ensureProperties } from './properties.ts';

export interface Importer {
  /** Works on one import for a while; in how many milliseconds there may be more to do. */
  turn(): Promise<number>;
  /** The turn under way ends after the rows it has in hand. */
  stop(): void;
}

export interface ImporterOptions {
  readonly store: Store;
  readonly blobs: BlobStore;
  readonly log: Logger;
  /** Rows of one transaction, empty ones not among them. Default BATCH_ROWS. */
  readonly batchRows?: number;
  /** How long one import is read before it is the next one's turn. Default SLICE_MS. */
  readonly sliceMs?: number;
}

const BATCH_ROWS = 500;
/** Of the file: rows may be long, or empty. */
const BATCH_BYTES = 1024 * 1024;
const SLICE_MS = 2_000;
/** Renewed with every batch. */
const LEASE_MS = 30_000;
/** What other processes left is found within this time. */
const IDLE_MS = 5_000;
/** Without storing a single row in between. */
const TRIES_MAX = 8;
/** Doubles with every try. */
const BACKOFF_MS = 2_000;
const ERRORS_MAX = 1_000;
const FAILURE_MAX_CHARACTERS = 1_000;

interface Task {
  readonly tenantId: string;
  readonly id: string;
  readonly tries: number;
  readonly onConflict: 'upsert' | 'skip';
  readonly columnMap: ColumnMap | null;
  readonly segmentIds: readonly string[];
  readonly topics: readonly { readonly id: string; readonly subscription: Subscription }[];
  readonly blobKey: string | null;
  readonly sizeBytes: number;
  readonly readBytes: number;
  readonly readRows: number;
}

/** Where the reading stands; `rows` is the number of the last row. */
interface Mark {
  readonly bytes: number;
  readonly rows: number;
}

interface Batch {
  readonly contacts: readonly NewContact[];
  readonly errors: readonly { readonly row: number; readonly message: string }[];
  readonly from: Mark;
  readonly to: Mark;
  readonly isLast: boolean;
  /** Why nothing can be read behind it; null: something can, or it is the last. */
  readonly broken: string | null;
}

/** Another process went on with it. */
class Overtaken extends Error {
  override name = 'Overtaken';
}

export function createImporter(d: ImporterOptions): Importer {
  const { store, blobs, log } = d;
  let isStopped = false;
  /** The next turn is that of a tenant behind this one. */
  let behind = LOWEST_ID;

  const takeNext = async (): Promise<Task | null> => {
    const task = await take(store, behind);
    if (task !== null || behind === LOWEST_ID) return task;
    return take(store, LOWEST_ID);
  };

  const work = async (task: Task): Promise<void> => {
    if (task.tries > TRIES_MAX) throw new Error('every try ended before it stored anything');
    const plan = await prepare(d, task);
    const until = performance.now() + (d.sliceMs ?? SLICE_MS);
    for await (const batch of batchesOf(d, task, plan)) {
      await store.transact((client) => storeBatch(client, task, batch));
      if (batch.isLast) {
        await forget(blobs, task);
        return;
      }
      if (batch.broken !== null) throw new UnusableFile(batch.broken);
      if (isStopped || performance.now() > until) break;
    }
    await release(store, task);
  };

  const onFault = async (task: Task, error: unknown): Promise<void> => {
    if (error instanceof Overtaken) return;
    if (error instanceof UnusableFile || error instanceof Refusal) {
      await fail(d, task, error.message);
      return;
    }
    const about = { err: error, import: task.id, tries: task.tries };
    if (task.tries < TRIES_MAX) {
      log.warn(about, 'an import stopped; it goes on later');
      await putOff(store, task);
    } else {
      log.error(about, 'an import was given up');
      await fail(d, task, 'Something went wrong on our side; the rest of the file was not read.');
    }
  };

  return {
    async turn() {
      if (isStopped) return IDLE_MS;
      const task = await takeNext();
      if (task === null) {
        behind = LOWEST_ID;
        return IDLE_MS;
      }
      behind = task.tenantId;
      try {
        await work(task);
      } catch (error) {
        if (isBlobsUnavailable(error)) await giveBack(store, task);
        if (isDatabaseUnavailable(error)) throw error;
        await onFault(task, error);
      }
      return 0;
    },
    stop() {
      isStopped = true;
    },
  };
}

/** The oldest import that is due of the next tenant. */
async function take({ pool }: Store, behind: string): Promise<Task | null> {
  const { rows } = await pool.query<
    Omit<Task, 'columnMap' | 'segmentIds' | 'topics' | 'sizeBytes' | 'readBytes'> & {
      readonly columnMap: ColumnMap | string | null;
      readonly segmentIds: Task['segmentIds'] | string;
      readonly topics: Task['topics'] | string;
      readonly sizeBytes: string;
      readonly readBytes: string;
    }
  >({
    name: 'take-import',
    text: `with next as (
        select tenant_id, id from contact_import
        where status in ('queued', 'in_progress') and tenant_id > $1
          and (leased_until is null or leased_until <= now())
        order by tenant_id, id limit 1 for update skip locked
      )
      update contact_import i set status = 'in_progress', tries = i.tries + 1,
        leased_until = now() + $2 * interval '1 millisecond'
      from next where i.tenant_id = next.tenant_id and i.id = next.id
      returning i.tenant_id as "tenantId", i.id, i.tries, i.on_conflict as "onConflict",
        i.column_map as "columnMap", i.segment_ids as "segmentIds", i.topics,
        i.blob_key as "blobKey", i.size_bytes as "sizeBytes", i.read_bytes as "readBytes",
        i.read_rows as "readRows"`,
    values: [behind, LEASE_MS],
  });
  const [row] = rows;
  if (row === undefined) return null;
  return {
    ...row,
    columnMap: row.columnMap === null ? null : fromJson(row.columnMap),
    segmentIds: fromJson(row.segmentIds),
    topics: fromJson(row.topics),
    sizeBytes: Number(row.sizeBytes),
    readBytes: Number(row.readBytes),
  };
}

interface Prepared extends Plan {
  readonly delimiter: string;
}

/** As when the request came, but with the properties of now. Throws UnusableFile. */
async function prepare({ store, blobs }: ImporterOptions, task: Task): Promise<Prepared> {
  const length = Math.min(HEAD_MAX_BYTES, task.sizeBytes);
  const bytes =
    task.blobKey === null ? null : await blobs.read(task.blobKey, { offset: 0, length });
  if (bytes === null) throw new UnusableFile('The file is gone; send it again.');
  const pieces: Buffer[] = [];
  for await (const piece of bytes) pieces.push(piece as Buffer);
  const header = readHeader(Buffer.concat(pieces));
  const known = await store.transact((client) =>
    ensureProperties(client, task.tenantId, mappedProperties(task.columnMap), new Date()),
  );
  return { ...planColumns(header, task.columnMap, known), delimiter: header.delimiter };
}

/** From where the last one ended; the last is marked, and may be empty. */
async function* batchesOf(d: ImporterOptions, task: Task, plan: Prepared): AsyncGenerator<Batch> {
  const { readBytes: offset, blobKey, sizeBytes } = task;
  const bytes = await d.blobs.read(blobKey!, { offset, length: sizeBytes - offset });
  if (bytes === null) throw new UnusableFile('The file is gone; send it again.');
  let from: Mark = { bytes: offset, rows: task.readRows };
  let to = from;
  let contacts: NewContact[] = [];
  let errors: Batch['errors'][number][] = [];
  const cut = (end: Pick<Batch, 'isLast' | 'broken'>): Batch => {
    const batch = { contacts, errors, from, to, ...end };
    from = to;
    contacts = [];
    errors = [];
    return batch;
  };
  const about = { segmentIds: task.segmentIds, topics: task.topics };
  const batchRows = d.batchRows ?? BATCH_ROWS;
  let broken: string | null = null;
  try {
    for await (const row of readRows(bytes, plan.delimiter)) {
      to = { bytes: offset + row.endBytes, rows: to.rows + 1 };
      const contact = contactOf(row, plan);
      if (typeof contact === 'string') errors.push({ row: to.rows, message: contact });
      else if (contact !== null) contacts.push({ ...contact, ...about });
      const isSmall = to.bytes - from.bytes < BATCH_BYTES;
      if (isSmall && contacts.length + errors.length < batchRows) continue;
      yield cut({ isLast: false, broken: null });
    }
  } catch (error) {
    if (!(error instanceof UnusableFile)) throw error;
    broken = `Row ${to.rows + 1} cannot be read: ${error.message}`;
  }
  yield cut({ isLast: broken === null, broken });
}

/** Throws Overtaken where the rows are stored already. */
async function storeBatch(client: PoolClient, task: Task, batch: Batch): Promise<void> {
  const { tenantId, id, onConflict } = task;
  const { rows } = await client.query<{ failed: number }>({
    name: 'lock-import',
    text: `select failed from contact_import where tenant_id = $1 and id = $2
        and status = 'in_progress' and read_bytes = $3 and read_rows = $4
      for no key update`,
    values: [tenantId, id, batch.from.bytes, batch.from.rows],
  });
  const [held] = rows;
  if (held === undefined) throw new Overtaken();
  const outcomes = await upsertContacts(client, tenantId, batch.contacts, {
    at: new Date(),
    tells: false,
    onConflict,
  });
  const created = outcomes.filter(({ isNew }) => isNew).length;
  const known = outcomes.length - created;
  await storeErrors(client, task, batch.errors.slice(0, Math.max(0, ERRORS_MAX - held.failed)));
  await client.query({
    name: 'move-import',
    text: `update contact_import set read_bytes = $3, read_rows = $4, created = created + $5,
        updated = updated + $6, skipped = skipped + $7, failed = failed + $8, tries = 0,
        status = case when $9 then 'completed' else status end,
        completed_at = case when $9 then now() end,
        blob_key = case when not $9 then blob_key end,
        leased_until = case when not $9 then now() + $10 * interval '1 millisecond' end
      where tenant_id = $1 and id = $2`,
    values: [
      tenantId,
      id,
      batch.isLast ? task.sizeBytes : batch.to.bytes,
      batch.to.rows,
      created,
      onConflict === 'upsert' ? known : 0,
      onConflict === 'skip' ? known : 0,
      batch.errors.length,
      batch.isLast,
      LEASE_MS,
    ],
  });
}

async function storeErrors(
  client: PoolClient,
  { tenantId, id }: Task,
  errors: Batch['errors'],
): Promise<void> {
  if (errors.length === 0) return;
  await client.query({
    name: 'insert-import-errors',
    text: `insert into contact_import_error (tenant_id, import_id, row, message)
      select $1, $2, one.row, one.message from unnest($3::integer[], $4::text[]) as one (row, message)`,
    values: [tenantId, id, errors.map(({ row }) => row), errors.map(({ message }) => message)],
  });
}

/** Others may have it at once. */
async function release({ pool }: Store, { tenantId, id }: Task): Promise<void> {
  await pool.query({
    name: 'release-import',
    text: `update contact_import set tries = 0, leased_until = null
      where tenant_id = $1 and id = $2 and status = 'in_progress'`,
    values: [tenantId, id],
  });
}

async function putOff({ pool }: Store, { tenantId, id, tries }: Task): Promise<void> {
  await pool.query({
    name: 'put-off-import',
    text: `update contact_import set leased_until = now() + $3 * interval '1 millisecond'
      where tenant_id = $1 and id = $2 and status = 'in_progress'`,
    values: [tenantId, id, BACKOFF_MS * 2 ** tries],
  });
}

/** Later, as if it had not been taken: that the blob store is away says nothing against the file. */
async function giveBack({ pool }: Store, { tenantId, id, tries }: Task): Promise<void> {
  await pool.query({
    name: 'give-back-import',
    text: `update contact_import set tries = greatest(tries - 1, 0),
        leased_until = now() + $4 * interval '1 millisecond'
      where tenant_id = $1 and id = $2 and status = 'in_progress' and tries <= $3`,
    values: [tenantId, id, tries, IDLE_MS],
  });
}

/** For good; what was stored stays. */
async function fail({ store, blobs }: ImporterOptions, task: Task, why: string): Promise<void> {
  await store.pool.query({
    name: 'fail-import',
    text: `update contact_import set status = 'failed', failure = $3, completed_at = now(),
        leased_until = null, blob_key = null
      where tenant_id = $1 and id = $2 and status = 'in_progress'`,
    values: [task.tenantId, task.id, why.slice(0, FAILURE_MAX_CHARACTERS).toWellFormed()],
  });
  await forget(blobs, task);
}

/** No row names the file any more; what a crash leaves of it here is collected. */
async function forget(blobs: BlobStore, { blobKey }: Task): Promise<void> {
  if (blobKey !== null) await blobs.remove(blobKey);
}
