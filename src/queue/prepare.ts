// Emails whose attachments are still to be fetched: the work list of the fetcher, and the one way out of
// `preparing`, to ready or to failed. A lease says who fetches; whoever ends it first decides.
import type { PoolClient } from 'pg';
import { newId } from '../store/id.ts';
import { tellWebhooks } from '../timeline/outbox.ts';
import type { NewAttachment, Queryable } from './enqueue.ts';
import { showEmails } from './settle.ts';
import { failed } from './told.ts';

/** One email whose attachments somebody fetches now. */
export interface ClaimedFetch {
  readonly tenantId: string;
  readonly emailId: string;
  /** The number of this try, 1 for the first; fences what comes too late. */
  readonly attempt: number;
}

/** The composed message and where its attachments lie. */
export interface PreparedMessage {
  /** The bytes themselves, or the key of the blob that holds them: exactly one. */
  readonly raw: Buffer | null;
  readonly blobKey: string | null;
  readonly rawSizeBytes: number;
  readonly needsSmtpUtf8: boolean;
  /** All attachments of the email, in the order of their positions; ids stay those of acceptance. */
  readonly attachments: readonly NewAttachment[];
}

// Fair over tenants, as the claim of deliveries: those come first for whom the fewest are fetched now, and nobody gets
// more than $4 at a time. The email decides: while it is scheduled it may still be canceled, so nothing is fetched
// for it.
const CLAIM = `
  with recursive tenants as (
    (select tenant_id from attachment_fetch order by tenant_id limit 1)
    union all
    select (select f.tenant_id from attachment_fetch f where f.tenant_id > t.tenant_id
            order by f.tenant_id limit 1)
    from tenants t where t.tenant_id is not null
  ), shares as (
    select tenant_id, (select count(*) from unnest($3::uuid[]) a (id) where a.id = tenant_id) as used
    from tenants where tenant_id is not null
  ), due as (
    select j.tenant_id, j.email_id
    from (select tenant_id, used from shares where used < $4 order by used, random()) s
    cross join lateral (
      select f.tenant_id, f.email_id from attachment_fetch f
      join email e on e.tenant_id = f.tenant_id and e.id = f.email_id
      where f.tenant_id = s.tenant_id and f.due_at <= now()
        and (f.leased_until is null or f.leased_until < now()) and e.last_event <> 'scheduled'
      order by f.due_at limit $4 - s.used for update of f skip locked) j
    limit $1
  )
  update attachment_fetch f
  set leased_until = now() + $2 * interval '1 millisecond', attempts = f.attempts + 1
  from due
  where f.tenant_id = due.tenant_id and f.email_id = due.email_id
  returning f.tenant_id, f.email_id, f.attempts`;

/**
 * Leases at most `max` emails whose attachments are due, so that with the tenants of `active` (one entry for
 * each email) nobody has more than `perTenant`. Empty: nothing to fetch.
 */
export async function claimFetches(
  db: Queryable,
  options: {
    readonly max: number;
    readonly leaseMs: number;
    readonly perTenant: number;
    readonly active: readonly string[];
  },
): Promise<readonly ClaimedFetch[]> {
  const { rows } = await db.query<{ tenant_id: string; email_id: string; attempts: number }>({
    name: 'claim-fetches',
    text: CLAIM,
    values: [options.max, options.leaseMs, options.active, options.perTenant],
  });
  return rows.map((row) => ({
    tenantId: row.tenant_id,
    emailId: row.email_id,
    attempt: row.attempts,
  }));
}

/**
 * Gives a lease back; the next try is due in `delayMs`. `isCounted`: false where it is as if it had not been claimed. False:
 * the lease was not ours any more.
 */
export async function deferFetch(
  db: Queryable,
  fetch: ClaimedFetch,
  why: { readonly delayMs: number; readonly error: string; readonly isCounted?: boolean },
): Promise<boolean> {
  const { rowCount } = await db.query({
    name: 'defer-fetch',
    text: `update attachment_fetch
      set leased_until = null, due_at = now() + $4 * interval '1 millisecond', last_error = $5,
        attempts = attempts - $6::integer
      where tenant_id = $1 and email_id = $2 and attempts = $3`,
    values: [
      fetch.tenantId,
      fetch.emailId,
      fetch.attempt,
      Math.round(why.delayMs),
      why.error,
      Number(why.isCounted === false),
    ],
  });
  return rowCount === 1;
}

/**
 * Stores the composed message and makes the deliveries ready; call inside a transaction. The keys of blobs that
 * held staged attachments, for removal after the commit; null: somebody else ended it before, nothing
 * was written, and the blob of `stored` is the caller's to remove.
 */
export async function makeReady(
  client: PoolClient,
  tenantId: string,
  emailId: string,
  stored: PreparedMessage,
): Promise<readonly string[] | null> {
  const ended = await client.query({
    name: 'end-fetch',
    text: 'delete from attachment_fetch where tenant_id = $1 and email_id = $2',
    values: [tenantId, emailId],
  });
  if (ended.rowCount !== 1) return null;
  await client.query({
    name: 'store-prepared',
    text: `update email_content
      set raw = $3, blob_key = $4, raw_size_bytes = $5, needs_smtp_utf8 = $6
      where tenant_id = $1 and email_id = $2`,
    values: [
      tenantId,
      emailId,
      stored.raw,
      stored.blobKey,
      stored.rawSizeBytes,
      stored.needsSmtpUtf8,
    ],
  });
  const staged = await unstage(client, tenantId, emailId);
  const of = <T>(pick: (one: NewAttachment) => T): T[] => stored.attachments.map(pick);
  // By position: the ids were told to the tenant already.
  await client.query({
    name: 'place-attachments',
    text: `update attachment a
      set filename = n.filename, content_type = n.content_type, size_bytes = n.size_bytes,
        raw_offset = n.raw_offset, raw_length = n.raw_length
      from unnest($3::text[], $4::text[], $5::integer[], $6::integer[], $7::integer[])
        with ordinality as n (filename, content_type, size_bytes, raw_offset, raw_length, number)
      where a.tenant_id = $1 and a.email_id = $2 and a.position = n.number - 1`,
    values: [
      tenantId,
      emailId,
      of((one) => one.filename),
      of((one) => one.contentType),
      of((one) => one.sizeBytes),
      of((one) => one.rawOffset),
      of((one) => one.rawLength),
    ],
  });
  await client.query({
    name: 'prepared-ready',
    text: `update delivery set state = 'ready', due_at = now()
      where tenant_id = $1 and email_id = $2 and state = 'preparing'`,
    values: [tenantId, emailId],
  });
  return staged;
}

/**
 * Gives up: the deliveries end as failed; call inside a transaction. `cause` is a short code, `reply` a sentence
 * for the tenant. The keys of blobs that hold staged attachments, for removal after the commit; null:
 * the lease was not ours any more, nothing was written.
 */
export async function failPrepared(
  client: PoolClient,
  fetch: ClaimedFetch,
  why: { readonly cause: string; readonly reply: string },
): Promise<readonly string[] | null> {
  const { tenantId, emailId, attempt } = fetch;
  const ended = await client.query({
    name: 'end-fetch-try',
    text: `delete from attachment_fetch
      where tenant_id = $1 and email_id = $2 and attempts = $3`,
    values: [tenantId, emailId, attempt],
  });
  if (ended.rowCount !== 1) return null;
  const { rows } = await client.query<{ recipient: string }>({
    name: 'prepared-failed',
    text: `update delivery set state = 'failed', last_cause = $3, last_reply = $4
      where tenant_id = $1 and email_id = $2 and state = 'preparing' returning recipient`,
    values: [tenantId, emailId, why.cause, why.reply],
  });
  await tellWebhooks(
    client,
    rows.map(({ recipient }) =>
      failed({ tenantId, emailId, recipient }, { reason: why.cause, message: why.reply }),
    ),
  );
  await client.query({
    name: 'tell-failed',
    text: `insert into timeline (tenant_id, email_id, id, at, kind, detail)
      values ($1, $2, $3, now(), 'failed', $4)`,
    values: [
      tenantId,
      emailId,
      newId(),
      JSON.stringify({ code: why.cause, message: why.reply, attempts: attempt }),
    ],
  });
  // More than one: the row is locked for its recomputation, whatever their number.
  await showEmails(client, [{ tenantId, emailId, recipientCount: 2 }]);
  return unstage(client, tenantId, emailId);
}

/** Forgets where attachments are staged; the keys of the blobs that held them. */
export async function unstage(
  client: PoolClient,
  tenantId: string,
  emailId: string,
): Promise<readonly string[]> {
  const { rows } = await client.query<{ blob_key: string }>({
    name: 'unstage',
    text: `update attachment a set blob_key = null
      from (select id, blob_key from attachment
        where tenant_id = $1 and email_id = $2 and blob_key is not null) o
      where a.tenant_id = $1 and a.email_id = $2 and a.id = o.id
      returning o.blob_key`,
    values: [tenantId, emailId],
  });
  return rows.map(({ blob_key }) => blob_key);
}
