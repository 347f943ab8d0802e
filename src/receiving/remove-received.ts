// Takes away received emails that are old, or what they say. Never what is still to be read, to be forwarded or replayed,
// or what its author is still to hear of. What somebody holds is left for the next time.
import type { Pool, PoolClient } from 'pg';

type Queryable = Pick<Pool | PoolClient, 'query'>;

/** What they say, with their records left; or all of them. */
export type ReceivedPart = 'bodies' | 'records';

/** Which received emails are looked at, and from when on they are too young. */
export interface ReceivedAsked {
  readonly tenantId: string;
  readonly before: Date;
  readonly ids: readonly string[];
}

export interface RemovableReceived {
  readonly id: string;
  readonly at: Date;
  /** What is stored of it, about. */
  readonly bytes: number;
}

/** The next ids in order behind `after` that such a removal has to look at, at most `max`; all of them below `below`. */
export async function nextReceived(
  db: Queryable,
  part: ReceivedPart,
  at: {
    readonly tenantId: string;
    readonly after: string;
    readonly below: string;
    readonly max: number;
  },
): Promise<readonly string[]> {
  const [table, id] =
    part === 'bodies' ? ['received_content', 'email_id'] : ['received_email', 'id'];
  const { rows } = await db.query<{ id: string }>({
    name: `next-received-to-remove-${part}`,
    text: `select ${id} as id from ${table} where tenant_id = $1 and ${id} > $2 and ${id} < $3
      order by ${id} limit $4`,
    values: [at.tenantId, at.after, at.below, at.max],
  });
  return rows.map((row) => row.id);
}

const OF_RECEIVED = `tenant_id = r.tenant_id and received_email_id = r.id`;

/** Of a received email as `r`: nobody wants it any more. With the offsets it is asked email by email, and no table read whole. */
const IS_DONE = `r.is_read
  and not exists (select 1 from forwarding_task where ${OF_RECEIVED} offset 0)
  and not exists (select 1 from forwarding_attempt where ${OF_RECEIVED} and is_report_open offset 0)
  and not exists (select 1 from receiving_replay p
    where p.tenant_id = r.tenant_id and p.status = 'running' and (p.ids ? r.id::text
      or (r.created_at >= p.starts_at and r.created_at < p.ends_at)) offset 0)`;

/** Over $1: tenant, $2: ids, $3: before. */
const isRemovable = (part: ReceivedPart): string => `r.tenant_id = $1 and r.id = any ($2::uuid[])
  and r.created_at < $3::timestamptz and ${IS_DONE}
  ${part === 'bodies' ? 'and exists (select 1 from received_content where tenant_id = r.tenant_id and email_id = r.id offset 0)' : ''}`;

/** Which of them may go, in order. */
export async function findRemovableReceived(
  db: Queryable,
  part: ReceivedPart,
  { tenantId, ids, before }: ReceivedAsked,
): Promise<readonly RemovableReceived[]> {
  const { rows } = await db.query<{ id: string; ms: number; bytes: number }>({
    name: `find-removable-received-${part}`,
    text: `select r.id, (extract(epoch from r.created_at) * 1000)::float8 as ms,
        coalesce(k.raw_size_bytes + coalesce(pg_column_size(k.html), 0)
          + coalesce(pg_column_size(k.text), 0), 0)::float8 as bytes
      from received_email r
      left join received_content k on k.tenant_id = r.tenant_id and k.email_id = r.id
      where ${isRemovable(part)} order by r.id`,
    values: [tenantId, ids, before],
  });
  return rows.map(({ id, ms, bytes }) => ({ id, at: new Date(ms), bytes }));
}

/** Locks those that may go until the transaction ends, and looks at them again; what somebody else holds is left out. */
export async function lockRemovableReceived(
  client: PoolClient,
  part: ReceivedPart,
  asked: ReceivedAsked,
): Promise<readonly RemovableReceived[]> {
  const { rows } = await client.query<{ id: string }>({
    name: `lock-removable-received-${part}`,
    text: `select r.id from received_email r where ${isRemovable(part)} order by r.id
      for update skip locked`,
    values: [asked.tenantId, asked.ids, asked.before],
  });
  if (rows.length === 0) return [];
  return findRemovableReceived(client, part, { ...asked, ids: rows.map(({ id }) => id) });
}

/** How many of these are still to be forwarded or told of; anything but 0 is a fault of ours. */
export async function countWanted(
  db: Queryable,
  tenantId: string,
  ids: readonly string[],
): Promise<number> {
  const { rows } = await db.query<{ wanted: number }>({
    name: 'count-wanted-received',
    text: `with wanted as (
        select received_email_id as id from forwarding_task
        where tenant_id = $1 and received_email_id = any ($2::uuid[])
        union
        select received_email_id from forwarding_attempt
        where tenant_id = $1 and received_email_id = any ($2::uuid[]) and is_report_open
        union
        select id from received_email where tenant_id = $1 and id = any ($2::uuid[]) and not is_read
        union
        select i.id::uuid from receiving_replay p
          cross join lateral jsonb_array_elements_text(p.ids) as i (id)
        where p.tenant_id = $1 and p.status = 'running' and i.id = any ($2::uuid[]::text[])
      )
      select count(*)::integer as wanted from wanted`,
    values: [tenantId, ids],
  });
  return rows[0]!.wanted;
}

const GONE: Readonly<Record<ReceivedPart, string>> = {
  bodies: `update received_email r set content_removed_at = $3
    where r.tenant_id = $1 and r.id = any ($2::uuid[]) and ${IS_DONE} returning r.id`,
  records: `delete from received_email r
    where r.tenant_id = $1 and r.id = any ($2::uuid[]) and ${IS_DONE}
      and $3::timestamptz is not null returning r.id`,
};

/**
 * Removes what `lockRemovableReceived` found, in its transaction: all or none. The keys of the blobs that no row of theirs
 * names any more, for removal after the commit.
 */
export async function removeReceived(
  client: PoolClient,
  part: ReceivedPart,
  about: { readonly tenantId: string; readonly ids: readonly string[]; readonly now: Date },
): Promise<readonly string[]> {
  const { rows } = await client.query<{ count: number; blob_keys: string[] }>({
    name: `remove-received-${part}`,
    text: `with gone as (${GONE[part]}), content as (
        delete from received_content where tenant_id = $1 and email_id = any ($2::uuid[])
        returning blob_key
      )
      select (select count(*)::integer from gone) as count,
        array(select blob_key from content where blob_key is not null) as blob_keys`,
    values: [about.tenantId, about.ids, about.now],
  });
  const { count, blob_keys: blobKeys } = rows[0]!;
  if (count !== about.ids.length) {
    throw new Error(`${about.ids.length} received emails were to be removed and ${count} may be`);
  }
  return blobKeys;
}
