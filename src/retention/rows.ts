// The kinds whose rows hang on nothing that is sent: which of them are old, and one statement that removes them with what
// belongs to them. What is still under way is none of them.
import type { Pool } from 'pg';
import { firstIdAt } from '../access/request-log.ts';
import type { Batch, Step } from './step.ts';
import type { RetentionKind } from './policy.ts';

export type RowKind = Extract<
  RetentionKind,
  | 'request_logs'
  | 'webhook_events'
  | 'broadcast_recipients'
  | 'imports'
  | 'automation_runs'
  | 'replays'
  | 'forwarding'
>;

const LOWEST = '00000000-0000-0000-0000-000000000000';

interface Rows {
  readonly table: string;
  /** What follows the tenant in its key: one or two columns. */
  readonly key: readonly [string] | readonly [string, string];
  /** Another table that leads to its rows. */
  readonly through?: string;
  /**
   * Of a row as `r`, over $2: before, $3: the first id of that time, $6: that of 30 days ago. What it is led to by its key has
   * to be in the order of the key.
   */
  readonly isOld: string;
  readonly at: string;
  readonly bytes: string;
  /** What belongs to the rows of `old`, as `o`. */
  readonly belongings?: Readonly<Record<string, string>>;
  readonly columns?: string;
  /** Whether the tenant `t` has any, over `c.before` and `c.below`. */
  readonly exists: string;
}

/**
 * The rows `r` of a table by those of another, `l`, that their key begins with. Found along the key, one of the other's after
 * the other until there are enough: where the planner joins the two as a whole, it may read all that the tenant has.
 */
const alongKey = (
  table: string,
  of: { readonly from: string; readonly key: readonly [string, string]; readonly isOld: string },
): string => `(
    select n.* from (select * from ${of.from} where tenant_id = $1 and id >= $4::uuid order by id) l
    cross join lateral (
      select r.tenant_id, ${of.key.map((name) => `r.${name}`).join(', ')} from ${table} r
      where r.tenant_id = l.tenant_id and r.${of.key[0]} = l.id
        and r.${of.key[1]} > case when l.id = $4 then $5::uuid else '${LOWEST}' end and ${of.isOld}
      order by r.tenant_id, r.${of.key[0]}, r.${of.key[1]} limit $7) n
    limit $7) k
  join ${of.from} l on l.tenant_id = k.tenant_id and l.id = k.${of.key[0]}
  join ${table} r on r.tenant_id = k.tenant_id
    and ${of.key.map((name) => `r.${name} = k.${name}`).join(' and ')}`;

const IS_OLD_EVENT = `r.id < $3 and (r.type <> 'email.sent' or r.created_at < $2)
  and (r.next_attempt_at is null or r.id < $6)`;
const IS_OVER = `l.status in ('sent', 'failed', 'canceled')
  and (l.status <> 'canceled' or l.cursor_id is null)
  and greatest(l.sent_at, l.queued_at, l.updated_at) < $2`;

const ROWS: Readonly<Record<RowKind, Rows>> = {
  request_logs: {
    table: 'request_log',
    key: ['id'],
    isOld: 'r.id < $3',
    at: 'r.created_at',
    bytes: `pg_column_size(r.*) + coalesce((select pg_column_size(b.*) from request_log_body b
      where b.tenant_id = r.tenant_id and b.log_id = r.id), 0)`,
    columns: ', r.tags',
    belongings: {
      request_log_tag: `using (select tenant_id, id, unnest(tags) as tag from old) o
        where x.tenant_id = o.tenant_id and x.tag = o.tag and x.log_id = o.id`,
      request_log_body: `using old o where x.tenant_id = o.tenant_id and x.log_id = o.id`,
    },
    exists: `select 1 from request_log where tenant_id = t.id and id < c.below`,
  },
  // The id of email.sent is as old as its email, which may have waited for long. One that is still to be called for waits
  // for its endpoint, at most as long as events are kept where nobody says otherwise.
  webhook_events: {
    table: 'webhook_event',
    key: ['webhook_id', 'id'],
    through: alongKey('webhook_event', {
      from: 'webhook',
      key: ['webhook_id', 'id'],
      isOld: IS_OLD_EVENT,
    }),
    isOld: IS_OLD_EVENT,
    at: 'r.created_at',
    bytes: 'pg_column_size(r.*)',
    belongings: {
      webhook_attempt: `using old o where x.tenant_id = o.tenant_id and x.webhook_id = o.webhook_id
        and x.event_id = o.id`,
    },
    exists: `select 1 from webhook w cross join lateral (select 1 from webhook_event e
      where e.tenant_id = w.tenant_id and e.webhook_id = w.id and e.id < c.below limit 1) e
      where w.tenant_id = t.id`,
  },
  // Of broadcasts that are over: not one that is taken back.
  broadcast_recipients: {
    table: 'broadcast_recipient',
    key: ['broadcast_id', 'contact_id'],
    through: alongKey('broadcast_recipient', {
      from: 'broadcast',
      key: ['broadcast_id', 'contact_id'],
      isOld: IS_OVER,
    }),
    isOld: IS_OVER,
    at: 'greatest(l.sent_at, l.queued_at, l.updated_at)',
    bytes: 'pg_column_size(r.*)',
    exists: `select 1 from broadcast where tenant_id = t.id and id < c.below`,
  },
  imports: {
    table: 'contact_import',
    key: ['id'],
    isOld: `r.status in ('completed', 'failed') and r.completed_at < $2`,
    at: 'r.completed_at',
    bytes: `pg_column_size(r.*) + coalesce((select sum(pg_column_size(x.*)) from contact_import_error x
      where x.tenant_id = r.tenant_id and x.import_id = r.id), 0)`,
    exists: `select 1 from contact_import where tenant_id = t.id and id < c.below`,
  },
  automation_runs: {
    table: 'automation_run',
    key: ['id'],
    isOld: 'r.id < $3 and r.completed_at < $2',
    at: 'r.completed_at',
    bytes: `pg_column_size(r.*)`,
    exists: `select 1 from automation_run where tenant_id = t.id and id < c.below`,
  },
  // Their attempts stay with the messages.
  replays: {
    table: 'receiving_replay',
    key: ['id'],
    isOld: `r.status <> 'running' and r.updated_at < $2`,
    at: 'r.updated_at',
    bytes: 'pg_column_size(r.*)',
    exists: `select 1 from receiving_replay where tenant_id = t.id and updated_at < c.before`,
  },
  forwarding: {
    table: 'forwarding_attempt',
    key: ['id'],
    isOld: 'r.id < $3 and r.created_at < $2 and not r.is_report_open',
    at: 'r.created_at',
    bytes: 'pg_column_size(r.*)',
    exists: `select 1 from forwarding_attempt where tenant_id = t.id and id < c.below`,
  },
};

/** SQL: whether the tenant `t` may have something old, over `c.before` and `c.below`. */
export const existsRows = (kind: RowKind): string => ROWS[kind].exists;

const LONGEST_MS = 30 * 86_400_000;

function statement(kind: RowKind, isDry: boolean): string {
  const { table, key, through, isOld, at, bytes, belongings = {}, columns = '' } = ROWS[kind];
  const names = key.map((name) => `r.${name}`).join(', ');
  const removals = isDry
    ? []
    : [
        ...Object.entries(belongings).map(
          ([name, how], index) => `, also${index} as (delete from ${name} x ${how})`,
        ),
        `, gone as (delete from ${table} r using old o where r.tenant_id = o.tenant_id
          and ${key.map((name) => `r.${name} = o.${name}`).join(' and ')})`,
      ];
  const last = (name: string): string =>
    `(select ${name} from old order by ${key.map((one) => `${one} desc`).join(', ')} limit 1)`;
  return `
    with types as (
      select $1::uuid, $2::timestamptz, $3::uuid, $4::uuid, $5::uuid, $6::uuid, $7::integer
    ), old as materialized (
      select r.tenant_id, ${names}, ${at} as at, ${bytes} as bytes ${columns}
      from ${through ?? `${table} r`}
      where r.tenant_id = $1 and ${isOld}${through === undefined ? ` and r.${key[0]} > $5::uuid` : ''}
      order by ${names} limit $7 ${isDry ? '' : 'for update of r skip locked'}
    )${removals.join('')}
    select count(*)::integer as count, (extract(epoch from min(at)) * 1000)::float8 as oldest_ms,
      (extract(epoch from max(at)) * 1000)::float8 as newest_ms,
      coalesce(sum(bytes), 0)::float8 as bytes,
      ${key.length === 1 ? 'null::uuid' : last(key[0])} as last_first, ${last(key.at(-1)!)} as last
    from old`;
}

/** Removes the next old rows, or only looks at them. */
export async function stepRows(
  pool: Pick<Pool, 'query'>,
  kind: RowKind,
  step: Step,
): Promise<Batch> {
  const { tenantId, before, below, after, max, isDry, now } = step;
  const { rows } = await pool.query<{
    count: number;
    oldest_ms: number | null;
    newest_ms: number | null;
    bytes: number;
    last_first: string | null;
    last: string | null;
  }>({
    name: `${isDry ? 'look-at' : 'remove'}-${kind}`,
    text: statement(kind, isDry),
    values: [
      tenantId,
      before,
      below,
      after?.[0] ?? LOWEST,
      after?.[1] ?? LOWEST,
      firstIdAt(Math.min(now.getTime() - LONGEST_MS, before.getTime())),
      max,
    ],
  });
  const row = rows[0]!;
  return {
    count: row.count,
    bytes: row.bytes,
    oldest: row.oldest_ms === null ? null : new Date(row.oldest_ms),
    newest: row.newest_ms === null ? null : new Date(row.newest_ms),
    next: row.count < max || row.last === null ? null : [row.last_first ?? LOWEST, row.last],
  };
}
