// Which blob store the rows of the database point into. The store has a mark (an id, and that of the appliance which made
// it), the database has the same id; a process whose store is another one must not start: it would find no large message,
// and what it stores would be found by nobody else.
import type { Pool, PoolClient } from 'pg';
import { applianceId, keepFact, NotThisAppliance, readFact } from './appliance-facts.ts';
import { findBlobColumns } from './blob-columns.ts';
import { MARK_NAME, type MarkedBlobStore } from './blob.ts';
import { newId } from './id.ts';

/** Any constant that no other program uses in the same database. */
const MARK_LOCK = 7_245_178_304;
/** Blobs of each column that are looked for; any may have been removed just now. */
const PROBES = 20;

export interface BlobStoreCheck {
  readonly pool: Pool;
  readonly blobs: MarkedBlobStore;
  /** For the operator: a folder, or a bucket without its password. */
  readonly where: string;
}

/**
 * Throws NotThisAppliance when the store is not the one of the database's rows. Marks both at the first start. A store
 * without a mark is taken for the right one when stored messages lie in it.
 */
export async function checkBlobStore(d: BlobStoreCheck): Promise<void> {
  const [mark, known] = [await readMark(d.blobs), await readFact(d.pool, 'blob_store')];
  if (mark !== null && mark.id === known) return;
  // Of processes that start at the same time one decides. No transaction: the store may be a network away.
  const client = await d.pool.connect();
  let broken: Error | undefined;
  try {
    await client.query('select pg_advisory_lock($1)', [MARK_LOCK]);
    await settle(d, client);
    await client.query('select pg_advisory_unlock($1)', [MARK_LOCK]);
  } catch (error) {
    broken = error as Error; // the lock goes with the connection
    throw error;
  } finally {
    client.release(broken);
  }
}

async function settle(d: BlobStoreCheck, client: PoolClient): Promise<void> {
  const appliance = await applianceId(client);
  const known = await readFact(client, 'blob_store');
  let mark = await readMark(d.blobs);
  if (mark === null) {
    const id = known ?? newId();
    const probed = await probe(d.blobs, client);
    if (probed === 'none is here') throw refuseEmpty(d, id);
    // Nothing is stored yet: a folder of this process alone would look the same.
    if (probed === 'none is named' && known !== null) throw refuseEmpty(d, id);
    await d.blobs.writeMark(`${id} ${appliance}`);
    mark = await readMark(d.blobs);
  }
  if (mark === null) throw new Error(`${d.where} does not keep what is written into it`);
  if (known === null && mark.appliance !== null && mark.appliance !== appliance) {
    throw new NotThisAppliance(
      `${d.where} holds the messages of another appliance than this database does; set MAILSTEAD_BLOB_STORE to a place of ` +
        `its own. If no other appliance works with it any more, remove ${MARK_NAME} from it and start again`,
    );
  }
  const kept = await keepFact(client, 'blob_store', mark.id);
  if (kept === mark.id) return;
  throw new NotThisAppliance(
    `${d.where} is not where this database's messages are kept: all processes of an appliance need the same blobs, so set ` +
      'MAILSTEAD_BLOB_STORE as the others have it, or mount their folder there. If its contents were moved here, ' +
      `write ${kept} into ${MARK_NAME} there and start again`,
  );
}

const refuseEmpty = ({ where }: BlobStoreCheck, id: string): NotThisAppliance =>
  new NotThisAppliance(
    `${where} is not where this database's messages are kept, or is not mounted: none of them is there. All processes of ` +
      'an appliance need the same blobs. If it is the right place all the same (they are lost, or there were none), ' +
      `write ${id} into ${MARK_NAME} there and start again`,
  );

interface Mark {
  readonly id: string;
  /** Null when an operator wrote it. */
  readonly appliance: string | null;
}

async function readMark(blobs: MarkedBlobStore): Promise<Mark | null> {
  const [id = '', appliance = null] = ((await blobs.readMark()) ?? '').split(/\s+/);
  return id === '' ? null : { id, appliance };
}

/** Looks for some of the blobs that rows name. */
async function probe(
  blobs: MarkedBlobStore,
  client: PoolClient,
): Promise<'one is here' | 'none is here' | 'none is named'> {
  let isNamed = false;
  for (const { table, column } of await findBlobColumns(client)) {
    // Newest first; each of these columns has an index that leaves out its nulls.
    const { rows } = await client.query<{ key: string }>(
      `select ${column} as key from ${table} where ${column} is not null order by ${column} desc limit ${PROBES}`,
    );
    for (const { key } of rows) {
      isNamed = true;
      const stream = await blobs.read(key, { offset: 0, length: 1 });
      stream?.destroy();
      if (stream !== null) return 'one is here';
    }
  }
  return isNamed ? 'none is here' : 'none is named';
}
