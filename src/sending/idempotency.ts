// Idempotency keys: the same key and request give the same answer for 24 hours and nothing is sent
// twice. The key's row is written in the transaction that stores the email. A duplicate that arrives
// while the first is still being stored waits on that row's lock, then replays.
import { fromJson } from '../store/json.ts';
import { createHash } from 'node:crypto';
import type { Pool, PoolClient } from 'pg';
import { Refusal } from '../access/refusal.ts';

/** The path without `/api`, so that both mounts share their keys; SMTP submission shares those of `/emails`. */
export type Scope = '/emails' | '/emails/batch';

export interface IdempotentRequest {
  readonly tenantId: string;
  readonly scope: Scope;
  readonly key: string;
  readonly hash: Buffer;
}

export interface StoredAnswer {
  readonly status: number;
  readonly body: unknown;
}

/** The contract has no 409 for a batch. */
const CONFLICT_CODE = {
  '/emails': 'invalid_idempotent_request',
  '/emails/batch': 'invalid_idempotent_batch',
} as const satisfies Record<Scope, string>;
const KEY_MAX_CHARACTERS = 256;
export const WINDOW_HOURS = 24;

/** The key as given, or null when there is none. Throws when it is not 1 to 256 characters. */
export function checkIdempotencyKey(given: string | undefined): string | null {
  if (given === undefined) return null;
  // Headers arrive as one character a byte, whatever the caller's characters were.
  const length = [...Buffer.from(given, 'latin1').toString('utf8')].length;
  if (length >= 1 && length <= KEY_MAX_CHARACTERS) return given;
  throw new Refusal(
    'invalid_idempotency_key',
    `The idempotency key must be 1 to ${KEY_MAX_CHARACTERS} characters long.`,
  );
}

/** A hash that is equal for requests that mean the same: the order of keys does not matter. */
export function hashRequest(value: unknown): Buffer {
  const sorted = (_: string, at: unknown): unknown =>
    at !== null && typeof at === 'object' && !Array.isArray(at)
      ? Object.fromEntries(Object.entries(at).sort(([a], [b]) => (a < b ? -1 : 1)))
      : at;
  return createHash('sha256')
    .update(JSON.stringify(value, sorted) ?? '')
    .digest();
}

/**
 * The answer to the same request, if there was one within the window; null: none yet. So a replay is answered whatever
 * became of domain, template or time since; only takeKey decides who is the first. Throws when the key
 * belongs to another request.
 */
export async function findAnswer(
  db: Pool,
  request: IdempotentRequest,
): Promise<StoredAnswer | null> {
  const { rows } = await db.query<KeyRow>({
    name: 'find-idempotency-key',
    text: `select request_hash, status, response from idempotency_key
      where tenant_id = $1 and scope = $2 and key = $3
        and created_at > now() - interval '${WINDOW_HOURS} hours'`,
    values: [request.tenantId, request.scope, request.key],
  });
  return rows[0] === undefined ? null : answerOf(rows[0], request);
}

/**
 * Takes the key inside the caller's transaction, storing `answer` for later. Null: the key is ours,
 * go on. Otherwise the stored answer to replay. Throws when the key belongs to another request.
 */
export async function takeKey(
  client: PoolClient,
  request: IdempotentRequest,
  answer: StoredAnswer,
): Promise<StoredAnswer | null> {
  const { rowCount } = await client.query({
    name: 'take-idempotency-key',
    text: `insert into idempotency_key as k
        (tenant_id, scope, key, request_hash, status, response, created_at)
      values ($1, $2, $3, $4, $5, $6, now())
      on conflict (tenant_id, scope, key) do update
        set request_hash = excluded.request_hash, status = excluded.status,
          response = excluded.response, created_at = excluded.created_at
        where k.created_at <= now() - interval '${WINDOW_HOURS} hours'`,
    values: [
      request.tenantId,
      request.scope,
      request.key,
      request.hash,
      answer.status,
      JSON.stringify(answer.body),
    ],
  });
  if (rowCount === 1) return null;
  const { rows } = await client.query<KeyRow>({
    name: 'read-idempotency-key',
    text: `select request_hash, status, response from idempotency_key
      where tenant_id = $1 and scope = $2 and key = $3`,
    values: [request.tenantId, request.scope, request.key],
  });
  const stored = rows[0];
  if (stored === undefined) throw new Error('an idempotency key vanished while it was taken');
  return answerOf(stored, request);
}

interface KeyRow {
  request_hash: Buffer;
  status: number;
  response: unknown;
}

function answerOf(stored: KeyRow, request: IdempotentRequest): StoredAnswer {
  if (!stored.request_hash.equals(request.hash)) {
    throw new Refusal(
      CONFLICT_CODE[request.scope],
      'This idempotency key was used for a different request within the last 24 hours; use a new key.',
    );
  }
  return { status: stored.status, body: fromJson(stored.response) };
}

/** Forgets keys whose window has passed; at most `max` a call. How many. */
export async function forgetOldKeys(
  client: Pick<PoolClient, 'query'>,
  max: number,
): Promise<number> {
  const { rowCount } = await client.query(
    `delete from idempotency_key where (tenant_id, scope, key) in (
       select tenant_id, scope, key from idempotency_key
       where created_at < now() - interval '${WINDOW_HOURS} hours' order by created_at limit $1)`,
    [max],
  );
  return rowCount ?? 0;
}
