// Commands that find an embedded Postgres running which another command started for itself: as long as they stay, it is not
// stopped. A guest holds a shared lock in the database, whoever stops the server the exclusive one, so nobody comes in between.
import { setTimeout as pause } from 'node:timers/promises';
import { Client } from 'pg';
import { isDatabaseUnavailable } from './unavailable.ts';

/** Any constant that no other program uses in the same database. */
const GUESTS_LOCK = 7_245_178_310;
const CONNECT_TIMEOUT_MS = 3_000;
const POLL_MS = 100;

/** How a guest goes; null: no server answers at that URL, or it is about to stop. Throws what is not about that. */
export async function enterAsGuest(url: string): Promise<(() => Promise<void>) | null> {
  const client = await connect(url);
  if (client === null) return null;
  const leave = (): Promise<void> => client.end().catch(() => undefined);
  try {
    if (await tryLock(client, 'pg_try_advisory_lock_shared')) return leave;
  } catch (error) {
    if (!isDatabaseUnavailable(error)) throw error;
  }
  await leave();
  return null;
}

/** Resolves when the last guest has gone, when the server has, or after `maxMs`; nobody comes in until `open` is called. */
export async function untilNoGuests(
  url: string,
  maxMs: number,
): Promise<{ open(): Promise<void> }> {
  const client = await connect(url);
  if (client === null) return { open: () => Promise.resolve() };
  try {
    for (let waitedMs = 0; waitedMs < maxMs; waitedMs += POLL_MS) {
      if (await tryLock(client, 'pg_try_advisory_lock')) break;
      await pause(POLL_MS);
    }
  } catch (error) {
    if (!isDatabaseUnavailable(error)) throw error;
  }
  return { open: () => client.end().catch(() => undefined) };
}

async function connect(url: string): Promise<Client | null> {
  const client = new Client({ connectionString: url, connectionTimeoutMillis: CONNECT_TIMEOUT_MS });
  client.on('error', () => undefined); // the server goes
  try {
    await client.connect();
    return client;
  } catch (error) {
    await client.end().catch(() => undefined);
    if (isDatabaseUnavailable(error)) return null;
    throw error;
  }
}

async function tryLock(
  client: Client,
  how: 'pg_try_advisory_lock' | 'pg_try_advisory_lock_shared',
): Promise<boolean> {
  const { rows } = await client.query<{ got: boolean }>(`select ${how}($1) as got`, [GUESTS_LOCK]);
  return rows[0]?.got === true;
}
