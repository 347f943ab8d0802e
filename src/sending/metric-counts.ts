// What metrics count, as SQL over rows. An email counts at the time in its id, which is that of its creation, so that what
// became of it stands beside it whenever it happened, and rates make sense.
import { QUARTER_MS } from '../timeline/late-changes.ts';

const IS_DELIVERED = `e.last_event in ('delivered', 'opened', 'clicked', 'complained')`;
const BOUNCE_CODE = `e.provider_last_error ->> 'code'`;
const IS_PERMANENT = `e.last_event = 'bounced' and ${BOUNCE_CODE} like '5.%'`;
/** Its lifetime ended while it was put off. */
const IS_TRANSIENT = `e.last_event = 'bounced'
  and (${BOUNCE_CODE} = 'expired' or ${BOUNCE_CODE} like '4.%')`;

/** Once for an email, however many recipients it has: what it must show. */
const SHOWN: Readonly<Record<string, string>> = {
  delivered: IS_DELIVERED,
  complained: `e.last_event = 'complained'`,
  suppressed: `e.last_event = 'suppressed'`,
  bounced: `e.last_event = 'bounced'`,
  bounced_transient: IS_TRANSIENT,
  bounced_permanent: IS_PERMANENT,
  bounced_undetermined: `e.last_event = 'bounced'
    and not coalesce((${IS_PERMANENT}) or (${IS_TRANSIENT}), false)`,
  delivery_delayed: `e.last_event = 'delivery_delayed' or e.provider_retry_count > 0`,
  failed: `e.last_event = 'failed'`,
  sent: 'e.provider_last_attempted_at is not null',
  // The answer to the final dot was lost: one more try is to come, or nobody will ever know.
  unknown: `e.last_event in ('sent', 'delivery_delayed') and ${BOUNCE_CODE} = 'unknown_after_dot'`,
};
/** What its readers did (`g`), every time or once for an email. */
const DONE: Readonly<Record<string, string>> = {
  opened: 'coalesce(sum(g.opened), 0)',
  clicked: 'coalesce(sum(g.clicked), 0)',
  unsubscribed: 'count(*) filter (where g.unsubscribed > 0)',
  unique_opened: 'count(*) filter (where g.opened > 0)',
  unique_clicked: 'count(*) filter (where g.clicked > 0)',
};

/** Columns of metric_quarter. */
export const COUNTS: readonly string[] = ['received', ...Object.keys(SHOWN), ...Object.keys(DONE)];

/** Of mail that is of no broadcast. */
export const NO_BROADCAST = `'00000000-0000-0000-0000-000000000000'::uuid`;

/** Machines that look at mail before its reader do not count; the proxy of a reader's mail program stands for him. */
const BY_PERSON = `coalesce(suspect, 'proxy') = 'proxy'`;

/** Of who received it: of the first recipient here, as the sender wrote it. */
export const RECEIVED_DOMAIN = `lower(split_part(coalesce(r.received_for ->> 0, ''), '@', -1))`;

/** The quarters since 1970 of the time in a UUIDv7; one that runs ahead of the clock is where its id is. */
export const quarterOf = (id: string): string =>
  `(('x' || translate(left(${id}::text, 13), '-', ''))::bit(48)::bigint / ${QUARTER_MS})`;

/** What counts are made for, each if asked; the columns are `quarter` (since 1970), `domain`, `broadcast_id`, `email_id`. */
export interface Keys {
  readonly quarter: boolean;
  readonly domain: boolean;
  readonly broadcast: boolean;
  readonly email: boolean;
}

/** SQL of the first id and of the first id after it. */
export interface IdRange {
  readonly first: string;
  readonly past: string;
}

/** SQL of two arrays of those: many short ranges. */
export interface IdRanges {
  readonly firsts: string;
  readonly pasts: string;
}

export interface RowsAsked {
  /** SQL. */
  readonly tenant: string;
  readonly ids: IdRange | IdRanges;
  readonly keys: Keys;
  readonly counts: readonly string[];
  /** SQL: further conditions on a sent email, as `e`, and on a received one, as `r`. */
  readonly sentWhere: readonly string[];
  readonly receivedWhere: readonly string[];
  /** Only so many emails are looked at, the earliest; null: all that there are. */
  readonly emailsMax: number | null;
}

const keyColumns = (keys: Keys, of: Readonly<Record<string, string>>): readonly string[] => [
  ...(keys.quarter ? [`${of['quarter']} as quarter`] : []),
  ...(keys.domain ? [`${of['domain']} as domain`] : []),
  ...(keys.broadcast ? [`${of['broadcast']} as broadcast_id`] : []),
  ...(keys.email ? [`${of['email']} as email_id`] : []),
];

const groupBy = (keys: Keys): string => {
  const count = Object.values(keys).filter(Boolean).length;
  return count === 0 ? '' : `group by ${Array.from({ length: count }, (_, i) => i + 1).join(', ')}`;
};

/** SQL of selects over email and received_email; one row or more for each key that has mail. */
export function countRowsSql(asked: RowsAsked): readonly string[] {
  const { tenant, ids, keys, counts } = asked;
  const limit = asked.emailsMax === null ? '' : `order by id limit ${asked.emailsMax}`;
  const isEngaged = counts.some((name) => Object.hasOwn(DONE, name));
  const isAlone = asked.sentWhere.length === 0 && !keys.domain && !keys.broadcast && !keys.email;
  const sent = `
    select ${[
      ...keyColumns(keys, {
        quarter: quarterOf('e.id'),
        domain: 'e.from_domain',
        broadcast: `coalesce(e.broadcast_id, ${NO_BROADCAST})`,
        email: 'e.id',
      }),
      ...counts.map((name) => {
        const shown = SHOWN[name];
        const count =
          shown === undefined
            ? isAlone
              ? undefined
              : DONE[name]
            : `count(*) filter (where ${shown})`;
        return `(${count ?? '0'})::bigint as ${name}`;
      }),
    ].join(', ')}
    from (
      select e.id, e.from_domain, e.broadcast_id, e.last_event, e.provider_last_error,
        e.provider_retry_count, e.provider_last_attempted_at
      from ${rowsOf('email', tenant, { ids })} e
      ${asked.sentWhere.length === 0 ? '' : `where ${asked.sentWhere.join(' and ')}`} ${limit}
    ) e
    ${isEngaged && !isAlone ? engagedSql(tenant) : ''}
    ${groupBy(keys)}`;
  const selects = isEngaged && isAlone ? [sent, engagedAloneSql(asked)] : [sent];
  if (!counts.includes('received')) return selects;
  const received = `
    select ${[
      ...keyColumns(keys, {
        quarter: quarterOf('r.id'),
        domain: 'r.domain',
        broadcast: NO_BROADCAST,
        email: 'r.id',
      }),
      ...counts.map((name) => `${name === 'received' ? 'count(*)' : '0::bigint'} as ${name}`),
    ].join(', ')}
    from (
      select r.id, ${RECEIVED_DOMAIN} as domain
      from ${rowsOf('received_email', tenant, { ids })} r
      ${asked.receivedWhere.length === 0 ? '' : `where ${asked.receivedWhere.join(' and ')}`} ${limit}
    ) r
    ${groupBy(keys)}`;
  return [...selects, received];
}

/** A scan of the primary key for each range: without the offset the planner reads all of the tenant's and compares. */
const rowsOf = (
  table: string,
  tenant: string,
  { ids, column = 'id' }: { readonly ids: IdRange | IdRanges; readonly column?: string },
): string =>
  'first' in ids
    ? `(select * from ${table} where tenant_id = ${tenant} and ${column} >= ${ids.first} and ${column} < ${ids.past})`
    : `unnest(${ids.firsts}, ${ids.pasts}) as k (first, past) cross join lateral (
        select * from ${table} where tenant_id = ${tenant} and ${column} >= k.first and ${column} < k.past offset 0)`;

const ENGAGED = `
  count(*) filter (where kind = 'opened' and ${BY_PERSON}) as opened,
  count(*) filter (where kind = 'clicked' and ${BY_PERSON}) as clicked,
  count(*) filter (where kind = 'unsubscribed') as unsubscribed`;

/**
 * Email by email, along the primary key. Joined as a whole it is faster, until the planner has not heard of the mail of the
 * last minutes, takes it for a row or two, and reads all of it for each.
 */
const engagedSql = (tenant: string): string => `
  cross join lateral (
    select ${ENGAGED} from engagement g where g.tenant_id = ${tenant} and g.email_id = e.id
  ) g`;

/** Where nothing of the emails themselves is asked, they need not be joined. */
const engagedAloneSql = ({ tenant, ids, keys, counts }: RowsAsked): string => `
  select ${[
    ...keyColumns(keys, { quarter: quarterOf('g.email_id') }),
    ...counts.map((name) => `(${DONE[name] ?? '0'})::bigint as ${name}`),
  ].join(', ')}
  from (
    select email_id, ${ENGAGED}
    from ${rowsOf('engagement', tenant, { ids, column: 'email_id' })} e group by email_id
  ) g
  ${groupBy(keys)}`;

/** SQL of a select over metric_quarter, as `q`, with the same columns. */
export function countQuartersSql(asked: {
  /** What was counted, or what was counted of emails that are not there any more; as `q`. */
  readonly table: 'metric_quarter' | 'metric_removed';
  readonly keys: Keys;
  readonly counts: readonly string[];
  readonly where: readonly string[];
}): string {
  const { keys, counts } = asked;
  return `
    select ${[
      ...keyColumns(keys, {
        quarter: `(extract(epoch from q.quarter)::bigint / ${QUARTER_MS / 1_000})`,
        domain: 'q.domain',
        broadcast: 'q.broadcast_id',
        email: 'null::uuid',
      }),
      ...counts.map((name) => `sum(q.${name})::bigint as ${name}`),
    ].join(', ')}
    from ${asked.table} q where ${asked.where.join(' and ')}
    ${groupBy(keys)}`;
}

/**
 * SQL of a select over what was counted of emails that are not there any more, of spans and single quarters. Of a quarter that
 * is asked for in part, it counts where it begins.
 */
export function countRemovedSql(asked: {
  /** SQL. */
  readonly tenant: string;
  readonly keys: Keys;
  readonly counts: readonly string[];
  /** In milliseconds; ends are exclusive. */
  readonly spans: readonly (readonly [from: number, to: number])[];
  readonly quarters: readonly number[];
  readonly where: readonly string[];
  readonly value: (given: unknown) => string;
}): string {
  const { tenant, keys, counts, spans, quarters, where, value } = asked;
  const at = (ms: number): string => `${value(new Date(ms))}::timestamptz`;
  const ranges = [
    ...spans.map(([from, to]) => `(q.quarter >= ${at(from)} and q.quarter < ${at(to)})`),
    `q.quarter = any (${value(quarters.map((ms) => new Date(ms)))}::timestamptz[])`,
  ];
  return countQuartersSql({
    table: 'metric_removed',
    keys,
    counts,
    where: [`q.tenant_id = ${tenant}`, `(${ranges.join(' or ')})`, ...where],
  });
}
