// Removes blobs that no row names: what a crash between writing a blob and storing its row left behind. Which columns
// name blobs is read from the database, so that no table can be forgotten (store/blob.ts).
import type { BlobStore } from '../store/blob.ts';
import type { Store } from '../store/orm.ts';

const DAY_MS = 86_400_000;
/** Asked about in one statement. */
const BATCH = 500;
/** Of one run; the next goes on. */
const REMOVED_MAX = 10_000;

/**
 * Removes blobs older than a day without a row, at most 10,000; returns how many. A blob is written right before its
 * row, so a day is far longer than any write. Run by one process a day.
 */
export async function collectBlobs(store: Store, blobs: BlobStore, now: Date): Promise<number> {
  const holders = await findHolders(store);
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

interface Holder {
  readonly table: string;
  readonly column: string;
}

async function findHolders({ pool }: Store): Promise<readonly Holder[]> {
  const { rows } = await pool.query<Holder>(
    `select quote_ident(table_name) as table, quote_ident(column_name) as column
     from information_schema.columns
     where table_schema = current_schema() and column_name like '%blob\\_key'
     order by 1, 2`,
  );
  return rows;
}

async function withoutRow(
  { pool }: Store,
  holders: readonly Holder[],
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
