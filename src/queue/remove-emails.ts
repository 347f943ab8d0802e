// Takes away sent emails that are old, or what they say: the only place where an email, its deliveries and all that hangs
// on them are removed. Never what is unsent, or what somebody is still to hear of: an email goes only when every one
// of its deliveries has ended for good. That is part of the statement that removes, whose rows are locked before.
//
// Others lock the email first or its deliveries first, so nothing here waits for a row: what somebody holds is left for
// the next time.
import type { PoolClient } from 'pg';
import { UNKNOWNS_MAX } from '../store/delivery.ts';
import type { Queryable } from './enqueue.ts';
import { IS_DEAD } from './overview.ts';

/** What they say, with their records left; or all of them. */
export type EmailPart = 'bodies' | 'records';

/** Which emails are old enough. An email's age is that of the last that was done for it. */
export interface RemovalRules {
  readonly tenantId: string;
  readonly before: Date;
  /** Where a recipient was given up, so that the email can be released; null: it is kept. */
  readonly deadBefore: Date | null;
  /** Forwarded mail under a rewritten sender: what comes back is known by what is stored of it. */
  readonly forwardedBefore: Date;
}

export interface RemovableEmail {
  readonly id: string;
  readonly at: Date;
  /** What is stored of it, about. */
  readonly bytes: number;
}

/** The next ids in order behind `after` that such a removal has to look at, at most `max`; all of them below `below`. */
export async function nextEmails(
  db: Queryable,
  part: EmailPart,
  at: {
    readonly tenantId: string;
    readonly after: string;
    readonly below: string;
    readonly max: number;
  },
): Promise<readonly string[]> {
  const [table, id] = part === 'bodies' ? ['email_content', 'email_id'] : ['email', 'id'];
  const { rows } = await db.query<{ id: string }>({
    name: `next-to-remove-${part}`,
    text: `select ${id} as id from ${table} where tenant_id = $1 and ${id} > $2 and ${id} < $3
      order by ${id} limit $4`,
    values: [at.tenantId, at.after, at.below, at.max],
  });
  return rows.map((row) => row.id);
}

const AGE = `greatest(e.created_at, e.scheduled_at, e.provider_last_attempted_at, e.provider_dead_lettered_at)`;
const OF_EMAIL = `tenant_id = e.tenant_id and email_id = e.id`;

/**
 * Of an email as `e`: nothing of it is to be sent, and nobody is still to be told of it. Asked email by email, which is what
 * the offsets are for: where the planner joins, it may read all deliveries that there are for each step.
 */
const IS_SETTLED = `not exists (select 1 from delivery where ${OF_EMAIL}
    and not (state in ('delivered', 'bounced', 'failed', 'suppressed', 'canceled')
      or (state = 'unknown' and unknowns >= ${UNKNOWNS_MAX})) offset 0)
  and not exists (select 1 from attachment_fetch where ${OF_EMAIL} offset 0)
  and not exists (select 1 from forwarding_attempt where ${OF_EMAIL} and is_report_open offset 0)`;

/** Over $1: tenant, $2: ids, $3: before, $4: of dead letters, $5: of what was forwarded. */
const isRemovable = (part: EmailPart): string => `e.tenant_id = $1 and e.id = any ($2::uuid[])
  and ${AGE} < $3::timestamptz and ${IS_SETTLED}
  and (${AGE} < $4::timestamptz or not exists (select 1 from delivery where ${OF_EMAIL} and ${IS_DEAD} offset 0))
  and ${
    part === 'records'
      ? '$5::timestamptz is not null'
      : `exists (select 1 from email_content where ${OF_EMAIL}
          and (coalesce(envelope_from, '') = '' or ${AGE} < $5::timestamptz) offset 0)`
  }`;

const valuesOf = (rules: RemovalRules, ids: readonly string[]): unknown[] => [
  rules.tenantId,
  ids,
  rules.before,
  rules.deadBefore,
  rules.forwardedBefore,
];

/** Which of them may go, in order. */
export async function findRemovable(
  db: Queryable,
  part: EmailPart,
  about: { readonly rules: RemovalRules; readonly ids: readonly string[] },
): Promise<readonly RemovableEmail[]> {
  const { rows } = await db.query<{ id: string; ms: number; bytes: number }>({
    name: `find-removable-${part}`,
    text: `select e.id, (extract(epoch from ${AGE}) * 1000)::float8 as ms,
        coalesce(k.raw_size_bytes + coalesce(pg_column_size(k.html), 0)
          + coalesce(pg_column_size(k.text), 0), 0)::float8 as bytes
      from email e
      left join email_content k on k.tenant_id = e.tenant_id and k.email_id = e.id
      where ${isRemovable(part)} order by e.id`,
    values: valuesOf(about.rules, about.ids),
  });
  return rows.map(({ id, ms, bytes }) => ({ id, at: new Date(ms), bytes }));
}

/**
 * Locks those that may go, with their deliveries, until the transaction ends; what somebody else holds is left out.
 * Everything is looked at again once it is locked.
 */
export async function lockRemovable(
  client: PoolClient,
  part: EmailPart,
  about: { readonly rules: RemovalRules; readonly ids: readonly string[] },
): Promise<readonly RemovableEmail[]> {
  const { rules } = about;
  const emails = await client.query<{ id: string }>({
    name: `lock-removable-${part}`,
    text: `select e.id from email e where ${isRemovable(part)} order by e.id for update skip locked`,
    values: valuesOf(rules, about.ids),
  });
  if (emails.rows.length === 0) return [];
  const { rows } = await client.query<{ id: string }>({
    name: 'lock-removable-deliveries',
    text: `with held as materialized (
        select email_id from delivery where tenant_id = $1 and email_id = any ($2::uuid[])
        for update skip locked
      ), locked as materialized (
        select email_id, count(*) as count from held group by email_id
      ), known as materialized (
        select email_id, count(*) as count from delivery
        where tenant_id = $1 and email_id = any ($2::uuid[]) group by email_id
      )
      select i.id from unnest($2::uuid[]) as i (id)
      left join locked on locked.email_id = i.id left join known on known.email_id = i.id
      where locked.count is not distinct from known.count`,
    values: [rules.tenantId, emails.rows.map(({ id }) => id)],
  });
  return findRemovable(client, part, { rules, ids: rows.map(({ id }) => id) });
}

/**
 * How many of these emails are unsent, or owed to somebody: asked in other words than the removal's own, of other columns,
 * too. Anything but 0 is a fault of ours, and nothing may be removed.
 */
export async function countUnsent(
  db: Queryable,
  tenantId: string,
  ids: readonly string[],
): Promise<number> {
  const { rows } = await db.query<{ unsent: number }>({
    name: 'count-unsent',
    text: `with asked as materialized (
        select unnest($2::uuid[]) as id
      ), waiting as (
        select email_id from delivery d where tenant_id = $1 and email_id = any ($2::uuid[]) and (
          state in ('scheduled', 'preparing', 'ready', 'in_flight', 'deferred')
          or (state = 'unknown' and unknowns < ${UNKNOWNS_MAX}))
        union
        select id from email where tenant_id = $1 and id = any ($2::uuid[])
          and (last_event in ('queued', 'scheduled') or provider_next_retry_at is not null)
        union
        select email_id from attachment_fetch where tenant_id = $1 and email_id = any ($2::uuid[])
        union
        select email_id from forwarding_attempt
        where tenant_id = $1 and email_id = any ($2::uuid[]) and is_report_open
      )
      select count(*)::integer as unsent from asked where id in (select email_id from waiting)`,
    values: [tenantId, ids],
  });
  return rows[0]!.unsent;
}

const REMOVE: Readonly<Record<EmailPart, string>> = {
  bodies: `with gone as (
      update email e set content_removed_at = $3
      where e.tenant_id = $1 and e.id = any ($2::uuid[]) and ${IS_SETTLED} returning e.id
    ), content as (
      delete from email_content where tenant_id = $1 and email_id = any ($2::uuid[])
      returning blob_key
    ), files as (
      delete from attachment where tenant_id = $1 and email_id = any ($2::uuid[]) returning blob_key
    )`,
  records: `with gone as (
      delete from email e
      where e.tenant_id = $1 and e.id = any ($2::uuid[]) and ${IS_SETTLED}
        and $3::timestamptz is not null returning e.id
    ), content as (
      delete from email_content where tenant_id = $1 and email_id = any ($2::uuid[])
      returning blob_key
    ), files as (
      delete from attachment where tenant_id = $1 and email_id = any ($2::uuid[]) returning blob_key
    ), deliveries as (
      delete from delivery where tenant_id = $1 and email_id = any ($2::uuid[])
    ), attempts as (
      delete from attempt where tenant_id = $1 and email_id = any ($2::uuid[])
    ), facts as (
      delete from timeline where tenant_id = $1 and email_id = any ($2::uuid[])
    ), search as (
      delete from email_search where tenant_id = $1 and email_id = any ($2::uuid[])
    ), readers as (
      delete from engagement where tenant_id = $1 and email_id = any ($2::uuid[])
    )`,
};

/**
 * Removes what `lockRemovable` found, in its transaction: all or none. The keys of the blobs that no row of theirs names any
 * more, for removal after the commit. Throws when one of them is not settled, which cannot be while it is locked.
 */
export async function removeEmails(
  client: PoolClient,
  part: EmailPart,
  about: { readonly tenantId: string; readonly ids: readonly string[]; readonly now: Date },
): Promise<readonly string[]> {
  const { rows } = await client.query<{ count: number; blob_keys: string[] }>({
    name: `remove-${part}`,
    text: `${REMOVE[part]}
      select (select count(*)::integer from gone) as count,
        array(select blob_key from content where blob_key is not null
          union all select blob_key from files where blob_key is not null) as blob_keys`,
    values: [about.tenantId, about.ids, about.now],
  });
  const { count, blob_keys: blobKeys } = rows[0]!;
  if (count !== about.ids.length) {
    throw new Error(`${about.ids.length} emails were to be removed and ${count} may be`);
  }
  return blobKeys;
}
