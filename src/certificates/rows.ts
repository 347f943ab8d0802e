// Tables certificate, acme_account, acme_order and acme_challenge: every statement of them. Of several processes one orders a
// name, because the order is leased in its row; a result counts only with that lease. Private keys are stored sealed.
import type { Pool, PoolClient } from 'pg';
import { seal, unseal } from '../store/seal.ts';
import type { Store } from '../store/orm.ts';

/** Longer than an order may take (acme.ts). */
export const LEASE_MS = 10 * 60_000;
/** Of all names together. Let's Encrypt allows 300 in three hours. */
const ORDERS_MAX = 20;
const ORDER_WINDOW_MS = 3_600_000;
/** Names that nobody wanted for this long are forgotten. */
const UNWANTED_MAX_MS = 30 * 86_400_000;
/** It is looked every half minute; the row is written this often. */
const WANTED_EVERY_MS = 3_600_000;
/** A challenge is answered for this long. */
const CHALLENGE_MS = 15 * 60_000;
/** Any constants that no other advisory lock of two keys has. */
const ORDER_LOCK = [724_518, 1] as const;

const ms = (column: string): string => `(extract(epoch from ${column}) * 1000)::bigint::text`;
const toDate = (text: string | null): Date | null =>
  text === null ? null : new Date(Number(text));

export interface Due {
  readonly name: string;
  readonly failures: number;
  /** Of the certificate in use; null: none. */
  readonly notAfter: Date | null;
  /** The lease: what becomes of it is stored with it or not at all. */
  readonly leasedUntil: Date;
}

/** Notes which names are wanted now, and forgets those that have not been for a month. */
export async function noteWanted(pool: Pool, names: readonly string[], now: Date): Promise<void> {
  await pool.query(
    `insert into certificate (name, wanted_at, next_try_at)
     select unnest($1::text[]), $2::timestamptz, $2::timestamptz
     on conflict (name) do update set wanted_at = excluded.wanted_at
     where certificate.wanted_at < excluded.wanted_at - interval '${WANTED_EVERY_MS} milliseconds'`,
    [names, now],
  );
  const unwanted = new Date(now.getTime() - UNWANTED_MAX_MS);
  await pool.query('delete from certificate where wanted_at < $1', [unwanted]);
  await pool.query('delete from acme_challenge where expires_at < $1', [now]);
  await pool.query('delete from acme_order where ordered_at < $1', [
    new Date(now.getTime() - ORDER_WINDOW_MS),
  ]);
}

/**
 * Leases the name among `names` that is due for longest, but the first of them, which mail itself needs, before all others; null:
 * none is.
 */
export async function takeDue(
  pool: Pool,
  names: readonly string[],
  now: Date,
): Promise<Due | null> {
  const leasedUntil = new Date(now.getTime() + LEASE_MS);
  const { rows } = await pool.query<{ name: string; failures: number; notAfterMs: string | null }>(
    `update certificate set leased_until = $3
     where name = (
       select name from certificate
       where name = any ($1) and next_try_at <= $2 and (leased_until is null or leased_until <= $2)
       order by name = ($1::text[])[1] desc, next_try_at limit 1 for update skip locked)
     returning name, failures, ${ms('not_after')} as "notAfterMs"`,
    [names, now, leasedUntil],
  );
  const [row] = rows;
  if (row === undefined) return null;
  return {
    name: row.name,
    failures: row.failures,
    notAfter: toDate(row.notAfterMs),
    leasedUntil,
  };
}

/** Null: an order may be sent now, and is counted. Else when the next may. */
export async function takeOrder(store: Store, name: string, now: Date): Promise<Date | null> {
  return store.transact(async (client) => {
    await client.query('select pg_advisory_xact_lock($1, $2)', [...ORDER_LOCK]);
    const since = new Date(now.getTime() - ORDER_WINDOW_MS);
    const { rows } = await client.query<{ count: number; oldestMs: string | null }>(
      `select count(*)::int as count, ${ms('min(ordered_at)')} as "oldestMs"
       from acme_order where ordered_at > $1`,
      [since],
    );
    const { count, oldestMs } = rows[0]!;
    if (count >= ORDERS_MAX) return new Date(Number(oldestMs) + ORDER_WINDOW_MS);
    await client.query('insert into acme_order (ordered_at, name) values ($1, $2)', [now, name]);
    return null;
  });
}

export interface Pair {
  /** PEM; our own certificate first. */
  readonly cert: string;
  /** PEM. */
  readonly key: string;
}

const keyContext = (name: string): string => `certificate ${name}`;

/** False: the lease is over, and somebody else has the name. */
export async function keepIssued(
  pool: Pool,
  { name, leasedUntil }: Due,
  issued: {
    readonly pair: Pair;
    readonly notBefore: Date;
    readonly notAfter: Date;
    readonly renewAt: Date;
    readonly sealingKey: Buffer;
  },
): Promise<boolean> {
  const { pair, notBefore, notAfter, renewAt, sealingKey } = issued;
  const sealed = seal(sealingKey, keyContext(name), Buffer.from(pair.key));
  const { rowCount } = await pool.query(
    `update certificate set chain = $3, sealed_key = $4, not_before = $5, not_after = $6, next_try_at = $7,
       failures = 0, last_error = null, leased_until = null
     where name = $1 and leased_until = $2`,
    [name, leasedUntil, pair.cert, sealed, notBefore, notAfter, renewAt],
  );
  return rowCount === 1;
}

/** `counts` is false for what was put off through no fault of the name. */
export async function putOff(
  pool: Pool,
  { name, leasedUntil }: Due,
  to: { readonly at: Date; readonly error: string; readonly counts: boolean },
): Promise<void> {
  await pool.query(
    `update certificate set next_try_at = $3, last_error = $4, failures = failures + $5, leased_until = null
     where name = $1 and leased_until = $2`,
    [name, leasedUntil, to.at, to.error, to.counts ? 1 : 0],
  );
}

/** For the next process: this one stops in the middle of the order. */
export async function releaseLease(pool: Pool, { name, leasedUntil }: Due): Promise<void> {
  await pool.query(
    'update certificate set leased_until = null where name = $1 and leased_until = $2',
    [name, leasedUntil],
  );
}

/** What a process compares with what it has: by name, the digest of the sealed key, which is another for each certificate. */
export async function readDigests(pool: Pool): Promise<ReadonlyMap<string, string>> {
  const { rows } = await pool.query<{ name: string; digest: string }>(
    'select name, md5(sealed_key) as digest from certificate where chain is not null',
  );
  return new Map(rows.map(({ name, digest }) => [name, digest]));
}

/** What is stored was sealed with another secret, or is damaged: it stays so. */
export class KeyUnreadable extends Error {
  override name = 'KeyUnreadable';
}

/** Throws KeyUnreadable, and what the database throws. Null: it is gone. */
export async function readPair(pool: Pool, name: string, sealingKey: Buffer): Promise<Pair | null> {
  const { rows } = await pool.query<{ chain: string; sealed_key: Buffer }>(
    'select chain, sealed_key from certificate where name = $1 and chain is not null',
    [name],
  );
  const [row] = rows;
  if (row === undefined) return null;
  try {
    return {
      cert: row.chain,
      key: unseal(sealingKey, keyContext(name), row.sealed_key).toString(),
    };
  } catch (error) {
    throw new KeyUnreadable('its key cannot be read with this MAILSTEAD_SECRET', { cause: error });
  }
}

export interface Account {
  /** PEM. */
  readonly key: string;
  /** Null: not registered yet. */
  readonly url: string | null;
  /** The address that the authority knows. */
  readonly contact: string | null;
  /** No orders before. */
  readonly pausedUntil: Date | null;
}

const accountContext = (directory: string): string => `acme account ${directory}`;

/** The account at this directory; `newKey` is its key when there is none. Two processes get the same. */
export async function openAccount(
  pool: Pool,
  directory: string,
  { sealingKey, newKey }: { readonly sealingKey: Buffer; readonly newKey: () => Promise<string> },
): Promise<Account> {
  const read = async (): Promise<Account | null> => {
    const { rows } = await pool.query<{
      sealed_key: Buffer;
      url: string | null;
      contact: string | null;
      pausedMs: string | null;
    }>(
      `select sealed_key, url, contact, ${ms('paused_until')} as "pausedMs"
       from acme_account where directory = $1`,
      [directory],
    );
    const [row] = rows;
    if (row === undefined) return null;
    const key = unseal(sealingKey, accountContext(directory), row.sealed_key).toString();
    return { key, url: row.url, contact: row.contact, pausedUntil: toDate(row.pausedMs) };
  };
  const known = await read();
  if (known !== null) return known;
  const sealed = seal(sealingKey, accountContext(directory), Buffer.from(await newKey()));
  await pool.query(
    'insert into acme_account (directory, sealed_key) values ($1, $2) on conflict do nothing',
    [directory, sealed],
  );
  return (await read())!;
}

/** `url` null: the authority does not know the account any more. */
export async function noteAccount(
  pool: Pool,
  directory: string,
  { url, contact }: Pick<Account, 'url' | 'contact'>,
): Promise<void> {
  await pool.query('update acme_account set url = $2, contact = $3 where directory = $1', [
    directory,
    url,
    contact,
  ]);
}

export async function pauseAccount(pool: Pool, directory: string, until: Date): Promise<void> {
  await pool.query('update acme_account set paused_until = $2 where directory = $1', [
    directory,
    until,
  ]);
}

export async function putChallenge(
  db: Pool | PoolClient,
  challenge: { readonly token: string; readonly keyAuthorization: string },
  now: Date,
): Promise<void> {
  await db.query(
    `insert into acme_challenge (token, key_authorization, expires_at) values ($1, $2, $3)
     on conflict (token) do update set key_authorization = excluded.key_authorization,
       expires_at = excluded.expires_at`,
    [challenge.token, challenge.keyAuthorization, new Date(now.getTime() + CHALLENGE_MS)],
  );
}

export async function dropChallenge(pool: Pool, token: string): Promise<void> {
  await pool.query('delete from acme_challenge where token = $1', [token]);
}

/** RFC 8555 §8.1: base64url without padding. */
const TOKEN = /^[A-Za-z0-9_-]{16,256}$/;

/** What to answer at /.well-known/acme-challenge/; null: none of ours, or its time is over. */
export async function findChallenge(pool: Pool, token: string, now: Date): Promise<string | null> {
  if (!TOKEN.test(token)) return null;
  const { rows } = await pool.query<{ answer: string }>(
    'select key_authorization as answer from acme_challenge where token = $1 and expires_at > $2',
    [token, now],
  );
  return rows[0]?.answer ?? null;
}
