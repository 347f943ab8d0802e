// Emails that wait for their time: waking them, canceling them, moving them. The row of the email decides who
// comes first: each of the three changes it only while it says `scheduled`, and locks it before its
// deliveries.
import type { PoolClient } from 'pg';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { noteLateChanges } from '../timeline/late-changes.ts';
import { SUPPRESSED, type Queryable } from './enqueue.ts';
import { unstage } from './prepare.ts';
import { suppressed as suppressedEvent, tellUntried } from './told.ts';
import { findSuppressedNow } from './withhold.ts';

/** The lane of schedules among the alarms: no mail leaves by it. */
export const SCHEDULE_LANE = 'schedule';

/** Deliveries looked at, so at least that divided by 150 emails. */
const BATCH = 1_000;
/** A call wakes at most this many times BATCH; the next alarm or sweep takes the rest. */
const BATCHES_MAX = 1_000;

const LOCK_DUE = `
  with due as (
    select tenant_id, email_id from delivery where state = 'scheduled' and due_at <= now()
    order by due_at limit ${BATCH}
  )
  select e.tenant_id, e.id from email e
  where (e.tenant_id, e.id) in (select tenant_id, email_id from due)
  for no key update skip locked`;

// A statement of its own: what was moved or canceled until the lock came is seen now.
const READ_DUE = `
  select d.tenant_id, d.email_id, d.position, d.recipient,
    exists (select 1 from attachment_fetch f
      where f.tenant_id = d.tenant_id and f.email_id = d.email_id) as is_fetched
  from unnest($1::uuid[], $2::uuid[]) as k (tenant_id, id)
  join delivery d on d.tenant_id = k.tenant_id and d.email_id = k.id
  where d.state = 'scheduled' and d.due_at <= now()`;

interface DueRow {
  tenant_id: string;
  email_id: string;
  position: number;
  recipient: string;
  is_fetched: boolean;
}

/** Sends on their way the emails whose time has come, in every process at once if need be; how many. */
export async function wakeScheduled(store: Store): Promise<number> {
  let woken = 0;
  for (let batch = 0; batch < BATCHES_MAX; batch++) {
    const count = await store.transact(wakeBatch);
    woken += count;
    if (count === 0) break;
  }
  return woken;
}

/** Wakes the emails of at most BATCH deliveries that nobody else holds; how many. */
async function wakeBatch(client: PoolClient): Promise<number> {
  const { rows: locked } = await client.query<{ tenant_id: string; id: string }>({
    name: 'lock-due',
    text: LOCK_DUE,
  });
  if (locked.length === 0) return 0;
  const { rows } = await client.query<DueRow>({
    name: 'read-due',
    text: READ_DUE,
    values: [locked.map((row) => row.tenant_id), locked.map((row) => row.id)],
  });
  if (rows.length === 0) return 0;
  const isSuppressedNow = await findSuppressedNow(
    client,
    rows.map(({ tenant_id: tenantId, recipient }) => ({ tenantId, recipient })),
  );
  const isSuppressed = ({ tenant_id: tenantId, recipient }: DueRow): boolean =>
    isSuppressedNow({ tenantId, recipient });
  const stateOf = (row: DueRow): string => {
    if (isSuppressed(row)) return 'suppressed';
    return row.is_fetched ? 'preparing' : 'ready';
  };
  await client.query({
    name: 'wake-scheduled',
    text: `update delivery d
      set state = w.state,
        last_cause = case when w.state = 'suppressed' then $5 else d.last_cause end,
        last_reply = case when w.state = 'suppressed' then $6 else d.last_reply end
      from unnest($1::uuid[], $2::uuid[], $3::smallint[], $4::text[])
        as w (tenant_id, email_id, position, state)
      where d.tenant_id = w.tenant_id and d.email_id = w.email_id and d.position = w.position`,
    values: [
      rows.map((row) => row.tenant_id),
      rows.map((row) => row.email_id),
      rows.map((row) => row.position),
      rows.map(stateOf),
      SUPPRESSED.cause,
      SUPPRESSED.reply,
    ],
  });
  const emails = [...Map.groupBy(rows, (row) => row.email_id).values()].map((ofEmail) => {
    const suppressed = ofEmail.filter(isSuppressed);
    const isLeft = suppressed.length < ofEmail.length;
    return { tenantId: ofEmail[0]!.tenant_id, id: ofEmail[0]!.email_id, suppressed, isLeft };
  });
  await client.query({
    name: 'show-woken',
    text: `update email e
      set last_event = case when w.is_left then 'queued' else 'suppressed' end,
        provider_last_error = case when w.is_left then e.provider_last_error
          else jsonb_build_object('code', $4::text, 'message', $5::text) end
      from unnest($1::uuid[], $2::uuid[], $3::boolean[]) as w (tenant_id, id, is_left)
      where e.tenant_id = w.tenant_id and e.id = w.id`,
    values: [
      emails.map(({ tenantId }) => tenantId),
      emails.map(({ id }) => id),
      emails.map(({ isLeft }) => isLeft),
      SUPPRESSED.cause,
      SUPPRESSED.reply,
    ],
  });
  const told = emails.filter(({ suppressed }) => suppressed.length > 0);
  await noteLateChanges(
    client,
    told.map(({ tenantId, id: emailId }) => ({ tenantId, emailId })),
  );
  if (told.length > 0) {
    await client.query({
      text: `insert into timeline (tenant_id, email_id, id, at, kind, detail)
        select tenant_id, email_id, id, now(), 'suppressed', detail
        from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::jsonb[])
          as t (tenant_id, email_id, id, detail)`,
      values: [
        told.map(({ tenantId }) => tenantId),
        told.map(({ id }) => id),
        told.map(() => newId()),
        told.map(({ suppressed }) =>
          JSON.stringify({ recipients: suppressed.map(({ recipient }) => recipient) }),
        ),
      ],
    });
  }
  await tellUntried(
    client,
    rows
      .filter(isSuppressed)
      .map(({ tenant_id: tenantId, email_id: emailId, recipient }) =>
        suppressedEvent({ tenantId, emailId, recipient }, SUPPRESSED.reply),
      ),
  );
  const nobodyLeft = emails.filter(({ isLeft }) => !isLeft);
  if (nobodyLeft.length > 0) {
    await client.query({
      text: `delete from attachment_fetch f
        using unnest($1::uuid[], $2::uuid[]) as k (tenant_id, email_id)
        where f.tenant_id = k.tenant_id and f.email_id = k.email_id`,
      values: [nobodyLeft.map(({ tenantId }) => tenantId), nobodyLeft.map(({ id }) => id)],
    });
  }
  return emails.length;
}

/** What became of the wish. `not_scheduled`: it was sent, canceled or never had a schedule. */
export type ScheduleChange = 'not_scheduled' | 'not_found';

/**
 * Cancels a scheduled email, for good: nothing of it is sent. The caller removes the blobs of attachments
 * that were staged for it.
 */
export async function cancelEmail(
  store: Store,
  tenantId: string,
  id: string,
): Promise<
  | { readonly outcome: 'canceled'; readonly blobKeys: readonly string[] }
  | { readonly outcome: ScheduleChange }
> {
  return store.transact(async (client) => {
    const { rowCount } = await client.query({
      text: `update email set last_event = 'canceled'
        where tenant_id = $1 and id = $2 and last_event = 'scheduled'`,
      values: [tenantId, id],
    });
    if (rowCount !== 1) return { outcome: await whyNot(client, tenantId, id) };
    await client.query({
      text: `update delivery set state = 'canceled'
        where tenant_id = $1 and email_id = $2 and state = 'scheduled'`,
      values: [tenantId, id],
    });
    await client.query({
      text: 'delete from attachment_fetch where tenant_id = $1 and email_id = $2',
      values: [tenantId, id],
    });
    await tell(client, { tenantId, id, kind: 'canceled', detail: {} });
    return { outcome: 'canceled', blobKeys: await unstage(client, tenantId, id) };
  });
}

/** In place, since every date is as long as mail/compose.ts wrote it. */
const MOVE_DATE = `
  update email_content
  set raw = overlay(raw placing $3::bytea
    from position('\\x0d0a446174653a20'::bytea in raw) + length('\\x0d0a446174653a20'::bytea))
  where tenant_id = $1 and email_id = $2 and position('\\x0d0a446174653a20'::bytea in raw) > 0`;

/** What the Date field of a message says that is sent at this time (RFC 5322 §3.3). */
export const dateText = (at: Date): Buffer => Buffer.from(at.toUTCString().replace('GMT', '+0000'));

/** Where the message of a scheduled email lies that is too large for its row; null for every other email. */
export async function findScheduledBlob(
  db: Queryable,
  tenantId: string,
  id: string,
): Promise<string | null> {
  const { rows } = await db.query<{ blob_key: string | null }>({
    text: `select k.blob_key from email e
      join email_content k on k.tenant_id = e.tenant_id and k.email_id = e.id
      where e.tenant_id = $1 and e.id = $2 and e.last_event = 'scheduled'`,
    values: [tenantId, id],
  });
  return rows[0]?.blob_key ?? null;
}

// Whichever was there: moves differ in nothing but the date, and the row of the email is locked.
const SWAP_BLOB = `
  update email_content k set blob_key = $3
  from (select blob_key from email_content where tenant_id = $1 and email_id = $2) before
  where k.tenant_id = $1 and k.email_id = $2 and k.blob_key is not null
  returning before.blob_key`;

/**
 * Moves a scheduled email to another time; its lifetime begins then, and its message says so. A message that lies
 * in a blob is changed by the caller: `blobKey` names a copy that says the new time. Of it and `replacedBlob`
 * the email has only the first once it is moved, and only the second where it was not.
 */
export async function rescheduleEmail(
  store: Store,
  tenantId: string,
  id: string,
  to: { readonly scheduledAt: Date; readonly blobKey: string | null },
): Promise<
  | { readonly outcome: 'rescheduled'; readonly replacedBlob: string | null }
  | { readonly outcome: ScheduleChange }
> {
  const { scheduledAt, blobKey } = to;
  return store.transact(async (client) => {
    const { rows } = await client.query<{ before: string | null }>({
      text: `select (extract(epoch from scheduled_at) * 1000)::bigint::text as before from email
        where tenant_id = $1 and id = $2 and last_event = 'scheduled' for no key update`,
      values: [tenantId, id],
    });
    const [found] = rows;
    if (found === undefined) return { outcome: await whyNot(client, tenantId, id) };
    await client.query({
      text: 'update email set scheduled_at = $3 where tenant_id = $1 and id = $2',
      values: [tenantId, id, scheduledAt],
    });
    await client.query({
      text: `update delivery
        set due_at = $3, expires_at = $3::timestamptz + (expires_at - due_at)
        where tenant_id = $1 and email_id = $2 and state = 'scheduled'`,
      values: [tenantId, id, scheduledAt],
    });
    await client.query({
      text: 'update attachment_fetch set due_at = $3 where tenant_id = $1 and email_id = $2',
      values: [tenantId, id, scheduledAt],
    });
    await client.query({ text: MOVE_DATE, values: [tenantId, id, dateText(scheduledAt)] });
    const replaced =
      blobKey === null
        ? null
        : await client.query<{ blob_key: string }>({
            text: SWAP_BLOB,
            values: [tenantId, id, blobKey],
          });
    const from = new Date(Number(found.before)).toISOString();
    const detail = { scheduled_at: scheduledAt.toISOString(), before: from };
    await tell(client, { tenantId, id, kind: 'rescheduled', detail });
    return { outcome: 'rescheduled', replacedBlob: replaced?.rows[0]?.blob_key ?? null };
  });
}

/** Missing and foreign are the same. */
async function whyNot(client: PoolClient, tenantId: string, id: string): Promise<ScheduleChange> {
  const { rowCount } = await client.query({
    text: 'select 1 from email where tenant_id = $1 and id = $2',
    values: [tenantId, id],
  });
  return rowCount === 0 ? 'not_found' : 'not_scheduled';
}

async function tell(
  client: PoolClient,
  fact: {
    readonly tenantId: string;
    readonly id: string;
    readonly kind: string;
    readonly detail: Readonly<Record<string, unknown>>;
  },
): Promise<void> {
  await client.query({
    text: `insert into timeline (tenant_id, email_id, id, at, kind, detail)
      values ($1, $2, $3, now(), $4, $5)`,
    values: [fact.tenantId, fact.id, newId(), fact.kind, JSON.stringify(fact.detail)],
  });
}

/** When scheduled emails are due within `horizonMs`, by time bucket; at most `max`, the earliest first. */
export async function scheduledTimes(
  db: Queryable,
  options: { readonly horizonMs: number; readonly bucketMs: number; readonly max: number },
): Promise<readonly Date[]> {
  const { rows } = await db.query<{ bucket: string }>({
    text: `
      select ceil(extract(epoch from due_at) * 1000 / $2)::bigint::text as bucket from delivery
      where state = 'scheduled' and due_at <= now() + $1 * interval '1 millisecond'
      group by 1 order by min(due_at) limit $3`,
    values: [options.horizonMs, options.bucketMs, options.max],
  });
  return rows.map(({ bucket }) => new Date(Number(bucket) * options.bucketMs));
}
