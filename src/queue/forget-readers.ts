// Takes from what readers did who they were: their address and the program they read with, in the row and in the fact of
// the timeline that says the same. That an email was opened or a link followed, and when, stays, so counts do not change.
import type { Pool, PoolClient } from 'pg';

// By the microsecond, since that is what the index has.
const find = (isLocking: boolean): string => `
  select tenant_id, email_id, id, at,
    coalesce(length(remote_address), 0) + coalesce(length(user_agent), 0) as bytes
  from engagement
  where tenant_id = $1 and at < $2 and (at, id) > ($3::timestamptz, $4::uuid)
    and (remote_address is not null or user_agent is not null)
  order by at, id limit $5 ${isLocking ? 'for update skip locked' : ''}`;

const SUM = `
  select count(*)::integer as count, (extract(epoch from min(at)) * 1000)::float8 as oldest_ms,
    (extract(epoch from max(at)) * 1000)::float8 as newest_ms, coalesce(sum(bytes), 0)::float8 as bytes,
    (select at::text from old order by old.at desc, old.id desc limit 1) as last_at,
    (select id from old order by old.at desc, old.id desc limit 1) as last_id
  from old`;

const LOOK = `with old as materialized (${find(false)}) ${SUM}`;
const FORGET = `
  with old as materialized (${find(true)}), rows as (
    update engagement g set remote_address = null, user_agent = null from old o
    where g.tenant_id = o.tenant_id and g.email_id = o.email_id and g.id = o.id
  ), facts as (
    update timeline t set detail = t.detail || '{"ip_address": null, "user_agent": null}'::jsonb
    from old o
    where t.tenant_id = o.tenant_id and t.email_id = o.email_id and t.id = o.id
  ) ${SUM}`;

/** Of what happened before `before`, at most `max`, the oldest first. With `isDry` nothing is changed. */
export async function forgetReaders(
  db: Pick<Pool | PoolClient, 'query'>,
  at: {
    readonly tenantId: string;
    readonly before: Date;
    /** Where the last look ended, as it says. */
    readonly after: readonly [at: string, id: string];
    readonly max: number;
    readonly isDry: boolean;
  },
): Promise<{
  readonly count: number;
  readonly oldest: Date | null;
  readonly newest: Date | null;
  readonly bytes: number;
  readonly next: readonly [at: string, id: string] | null;
}> {
  const { rows } = await db.query<{
    count: number;
    oldest_ms: number | null;
    newest_ms: number | null;
    bytes: number;
    last_at: string | null;
    last_id: string | null;
  }>({
    name: at.isDry ? 'look-for-readers' : 'forget-readers',
    text: at.isDry ? LOOK : FORGET,
    values: [at.tenantId, at.before, ...at.after, at.max],
  });
  const row = rows[0]!;
  return {
    count: row.count,
    oldest: row.oldest_ms === null ? null : new Date(row.oldest_ms),
    newest: row.newest_ms === null ? null : new Date(row.newest_ms),
    bytes: row.bytes,
    next:
      row.count < at.max || row.last_at === null || row.last_id === null
        ? null
        : [row.last_at, row.last_id],
  };
}
