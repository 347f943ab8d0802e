// The lock that says a backup of this database is being taken. While it is held no blob is removed: the rows that
// the backup carries still name it, although newer ones may not. What is left over the daily collection finds.
import type { Pool } from 'pg';
import type { BlobStore } from './blob.ts';

/** An advisory lock; any constant that no other program uses in the same database. */
export const BACKUP_LOCK = 7_245_178_303;

/**
 * The same store, which keeps what is to be removed while a backup is taken. A blob is removed after the commit that
 * took its name out of the rows, and a backup takes its lock before it looks at them: so a look at the lock is enough.
 */
export function keepWhileBackedUp(blobs: BlobStore, pool: () => Pool): BlobStore {
  return {
    ...blobs,
    async remove(key) {
      if (await isBackedUp(pool())) return;
      await blobs.remove(key);
    },
  };
}

/** Whether a backup is being taken, right now. */
export async function isBackedUp(pool: Pool): Promise<boolean> {
  // Free: it is ours for the time of this statement, shared with others who ask.
  const { rows } = await pool.query<{ free: boolean }>({
    name: 'is-backed-up',
    text: 'select pg_try_advisory_xact_lock_shared($1) as free',
    values: [BACKUP_LOCK],
  });
  return rows[0]?.free !== true;
}
