// Removes blobs that no row names: what a crash between writing a blob and storing its row left behind. Which columns
// name blobs is read from the database, so that no table can be forgotten (store/blob.ts).
import { findBlobColumns, type BlobColumn } from '../store/blob-columns.ts';
import type { BlobStore } from '../store/blob.ts';
import type { Store } from '../store/orm.ts';

const DAY_MS = 86_400_000;
/** Asked about in one statement. */
const BATCH = 500;
/** Removed at a time. */
const AT_ONCE = 8;
/** Of one run; the next goes on. */
const REMOVED_MAX = 10_000;

/**
 * Removes blobs older than a day without a row, at most 10,000; returns how many. A blob is written right before its
 * row, so a day is far longer than any write. Run by one process a day.
 */
export async function collectBlobs(store: Store, blobs: BlobStore, now: Date): Promise<number> {
  const holders = await findBlobColumns(store.pool);
  // Without a single column something is wrong with this query, not with every blob.
  if (holders.length === 0) throw new Error('no column names a blob');
  const orphans: string[] = [];
  let known = 0;
  const sort = async (keys: readonly string[]): Promise<void> => {
    const without = await withoutRow(store, holders, keys);
    known += keys.length - without.length;
    orphans.push(...without);
  };
  let batch: string[] = [];
  for await (const key of blobs.list(new Date(now.getTime() - DAY_MS))) {
    batch.push(key);
    if (batch.length < BATCH) continue;
    await sort(batch);
    batch = [];
    if (orphans.length >= REMOVED_MAX) break;
  }
  await sort(batch);
  // A folder of which this database knows nothing belongs to another one: a wrong URL must not empty it.
  if (known === 0) return 0;
  for (const key of orphans) await blobs.remove(key);
  return orphans.length;
}

/** Removes those of these blobs that no row names (any more); how many. What a crash or a stop leaves is collected later. */
export async function freeBlobs(
  store: Store,
  blobs: BlobStore,
  keys: readonly string[],
  signal?: AbortSignal,
): Promise<number> {
  if (keys.length === 0) return 0;
  const holders = await findBlobColumns(store.pool);
  let count = 0;
  for (let at = 0; at < keys.length; at += BATCH) {
    const free = await withoutRow(store, holders, keys.slice(at, at + BATCH));
    for (let next = 0; next < free.length; next += AT_ONCE) {
      if (signal?.aborted === true) return count + next;
      await Promise.all(free.slice(next, next + AT_ONCE).map((key) => blobs.remove(key)));
    }
    count += free.length;
  }
  return count;
}

async function withoutRow(
  { pool }: Store,
  holders: readonly BlobColumn[],
  keys: readonly string[],
): Promise<readonly string[]> {
  const named = holders.map(
    ({ table, column }) => `select ${column} from ${table} where ${column} = any($1)`,
  );
  const { rows } = await pool.query<{ key: string }>(
    `select key from unnest($1::text[]) as blob (key)
     where key not in (${named.join(' union all ')})`,
    [keys],
  );
  return rows.map(({ key }) => key);
}
