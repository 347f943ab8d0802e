// Facts of which the whole appliance has one each, in the database: whatever process comes first stores them, all others
// compare. They keep a process that belongs elsewhere from working with this database's rows.
import type { ClientBase, Pool } from 'pg';
import { newId } from './id.ts';
import { deriveKey } from './seal.ts';

type FactName = 'appliance' | 'blob_store' | 'secret_check';

/** This process is set up for another appliance than the database's; the message says what to do. */
export class NotThisAppliance extends Error {
  override name = 'NotThisAppliance';
}

/** Null when it is not stored yet. */
export async function readFact(db: Pick<Pool, 'query'>, name: FactName): Promise<string | null> {
  const { rows } = await db.query<{ value: string }>(
    'select value from appliance_fact where name = $1',
    [name],
  );
  return rows[0]?.value ?? null;
}

/** What is stored: `value`, or what somebody stored before. */
export async function keepFact(
  db: Pick<Pool, 'query'>,
  name: FactName,
  value: string,
): Promise<string> {
  const known = await readFact(db, name);
  if (known !== null) return known;
  await db.query(
    'insert into appliance_fact (name, value) values ($1, $2) on conflict (name) do nothing',
    [name, value],
  );
  return (await readFact(db, name)) ?? value;
}

/** The id of this appliance: of its database, and so of all of its processes. */
export const applianceId = (db: Pick<Pool, 'query'>): Promise<string> =>
  keepFact(db, 'appliance', newId());

/** For rows that were sealed elsewhere and come into a database that a start has already touched; older schemas know no facts. */
export async function forgetSecret(db: Pick<ClientBase, 'query'>): Promise<void> {
  const { rows } = await db.query<{ found: boolean }>(
    `select to_regclass('appliance_fact') is not null as found`,
  );
  if (rows[0]?.found !== true) return;
  await db.query(`delete from appliance_fact where name = 'secret_check'`);
}

/**
 * Throws NotThisAppliance when the rows were sealed with another master secret. `opens`: whether it opens what older
 * releases sealed, which kept no check; asked where there is none.
 */
export async function checkSecret(
  db: Pick<Pool, 'query'>,
  secret: string,
  opens: () => Promise<boolean> = () => Promise.resolve(true),
): Promise<void> {
  const check = deriveKey(secret, 'secret check').toString('hex');
  const isRight = (await readFact(db, 'secret_check')) !== null || (await opens());
  if (isRight && (await keepFact(db, 'secret_check', check)) === check) return;
  throw new NotThisAppliance(
    'the master secret is not the one that this database was begun with, so its keys could not be opened: set ' +
      'MAILSTEAD_SECRET to that one (without it, each data directory has its own in secrets/master)',
  );
}
