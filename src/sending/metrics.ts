// Counts what became of a tenant's emails: an email counts in the period of its creation, once however many recipients it
// has, by what it shows now; opens and clicks count there, too, every time that a person did it, and received mail when it
// came. So an email moves between counts, and the sum over the periods is the total. What is old was counted before
// (metric-rollup.ts), the rest is read from the rows.
import { parseTime, type Refuse } from '../access/filters.ts';
import { refuseFields, type Issue } from '../access/refusal.ts';
import { firstIdAt } from '../access/request-log.ts';
import { isUuid } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { QUARTER_MS } from '../timeline/late-changes.ts';
import {
  countQuartersSql,
  countRemovedSql,
  countRowsSql,
  COUNTS,
  NO_BROADCAST,
  RECEIVED_DOMAIN,
  type Keys,
} from './metric-counts.ts';

/** As the query has it; lists may be repeated or have commas. */
export interface MetricsQuery {
  readonly startDate: string | undefined;
  readonly endDate: string | undefined;
  readonly timezone: string | undefined;
  readonly granularity: string | undefined;
  readonly metrics: readonly string[] | undefined;
  readonly dimensions: readonly string[] | undefined;
  readonly domainIds: readonly string[] | undefined;
  readonly emailIds: readonly string[] | undefined;
  readonly broadcastIds: readonly string[] | undefined;
}

export type MetricValues = Readonly<Record<string, number>>;
export type MetricRow = Readonly<Record<string, number | string | null>>;

export interface EmailMetrics {
  readonly startDate: Date;
  readonly endDate: Date;
  readonly metrics: readonly string[];
  readonly dimensions: readonly string[];
  readonly granularity: string;
  readonly totals: MetricValues;
  /** Null without dimensions. */
  readonly data: readonly MetricRow[] | null;
}

/** Percentages with one decimal; 0 where there is nothing to divide by. */
const RATES: Readonly<Record<string, readonly [part: string, whole: string]>> = {
  delivery_rate: ['delivered', 'sent'],
  open_rate: ['unique_opened', 'delivered'],
  click_rate: ['unique_clicked', 'delivered'],
  bounce_rate: ['bounced', 'sent'],
  complaint_rate: ['complained', 'delivered'],
  unsubscribe_rate: ['unsubscribed', 'delivered'],
};
const METRICS = [...COUNTS, ...Object.keys(RATES)];
/** Ours and not Resend's: counted for whoever asks by name. */
const ASKED_FOR_ONLY = new Set(['unknown']);
const DIMENSIONS = ['period', 'domain', 'email', 'broadcast'];
const HOUR_MS = 3_600_000;
const DAY_MS = 24 * HOUR_MS;
/** By granularity: the unit of date_trunc, and the shortest that a period can be. */
const PERIODS: Readonly<Record<string, { readonly unit: string; readonly ms: number }>> = {
  hourly: { unit: 'hour', ms: HOUR_MS },
  daily: { unit: 'day', ms: DAY_MS - HOUR_MS },
  weekly: { unit: 'week', ms: 7 * DAY_MS - HOUR_MS },
  monthly: { unit: 'month', ms: 28 * DAY_MS - HOUR_MS },
};

const RANGE_DEFAULT_MS = 6 * DAY_MS;
const RANGE_MAX_DAYS = 400;
const PERIODS_MAX = 10_000;
/** Rows of `data`. */
const ROWS_MAX = 10_000;
const IDS_MAX = 100;
/** A name of the IANA database; offsets mean the opposite to Postgres. */
const TIMEZONE = /^[A-Za-z][A-Za-z0-9_+/-]{0,63}$/;

interface Checked {
  readonly start: Date;
  /** Exclusive. */
  readonly end: Date;
  readonly timezone: string;
  readonly granularity: string;
  readonly metrics: readonly string[];
  readonly dimensions: readonly string[];
  readonly domainIds: readonly string[] | null;
  readonly emailIds: readonly string[] | null;
  readonly broadcastIds: readonly string[] | null;
}

/** Counts over a range of creation times. Throws a Refusal that lists what is wrong with the query. */
export async function readMetrics(
  store: Store,
  tenantId: string,
  about: { readonly query: MetricsQuery; readonly now: Date },
): Promise<EmailMetrics> {
  const checked = checkQuery(about.query, about.now);
  const rows = await countRows(store, tenantId, checked);
  if (rows.length > ROWS_MAX) {
    const message = `The answer would have more than ${ROWS_MAX} rows; ask for a shorter range or fewer dimensions.`;
    throw refuseFields([{ path: 'dimensions', message }]);
  }
  const pick = (counts: CountRow['counts']): Record<string, number> =>
    Object.fromEntries(checked.metrics.map((metric) => [metric, valueOf(metric, counts)]));
  const { start, end, metrics, dimensions, granularity } = checked;
  return {
    startDate: start,
    endDate: end,
    metrics,
    dimensions,
    granularity,
    totals: pick(sum(rows)),
    data: dimensions.length === 0 ? null : rows.map((row) => ({ ...row.of, ...pick(row.counts) })),
  };
}

function valueOf(metric: string, counts: Readonly<Record<string, number>>): number {
  const rate = RATES[metric];
  if (rate === undefined) return counts[metric] ?? 0;
  const [part, whole] = [counts[rate[0]] ?? 0, counts[rate[1]] ?? 0];
  return whole === 0 ? 0 : Math.round((part / whole) * 1_000) / 10;
}

function sum(rows: readonly CountRow[]): Record<string, number> {
  const total: Record<string, number> = {};
  for (const { counts } of rows) {
    for (const [name, count] of Object.entries(counts)) total[name] = (total[name] ?? 0) + count;
  }
  return total;
}

interface CountRow {
  /** What the row is about, in the words of the answer. */
  readonly of: Readonly<Record<string, string | null>>;
  readonly counts: Readonly<Record<string, number>>;
}

/** One row for each combination of the dimensions, at most ROWS_MAX and one more. */
async function countRows(
  store: Store,
  tenantId: string,
  checked: Checked,
): Promise<readonly CountRow[]> {
  const { dimensions, start, end } = checked;
  const counts = COUNTS.filter((name) =>
    checked.metrics.some((metric) => metric === name || RATES[metric]?.includes(name)),
  );
  const isByEmail = checked.emailIds !== null || dimensions.includes('email');
  const before = isByEmail
    ? { from: 0, until: 0, stale: [] }
    : await readRolled(store, tenantId, checked);

  const values: unknown[] = [];
  const value = (given: unknown): string => `$${values.push(given)}`;
  const tenant = `${value(tenantId)}::uuid`;
  const period = dimensions.includes('period') ? periodsOf(checked, value) : null;
  const keys: Keys = {
    quarter: period !== null,
    domain: dimensions.includes('domain'),
    broadcast: dimensions.includes('broadcast'),
    email: dimensions.includes('email'),
  };
  const where = filtersOf(checked, { tenant, value });
  const ids = (ms: readonly number[]): string => `${value(ms.map(firstIdAt))}::uuid[]`;
  const { spans, quarters } = leftOf(start.getTime(), end.getTime(), before);
  const sources = [
    ...spans.map(([from, to]) => ({
      first: `${value(firstIdAt(from))}::uuid`,
      past: `${value(firstIdAt(to))}::uuid`,
    })),
    ...(quarters.length === 0
      ? []
      : [{ firsts: ids(quarters), pasts: ids(quarters.map((ms) => ms + QUARTER_MS)) }]),
  ]
    .flatMap((range) =>
      countRowsSql({
        tenant,
        ids: range,
        keys,
        counts,
        sentWhere: where.sent,
        receivedWhere: where.received,
        emailsMax: isByEmail ? ROWS_MAX + 1 : null,
      }),
    )
    .concat(
      isByEmail
        ? []
        : countRemovedSql({ tenant, keys, counts, spans, quarters, where: where.counted, value }),
    )
    .concat(
      before.until <= before.from
        ? []
        : countQuartersSql({
            table: 'metric_quarter',
            keys,
            counts,
            where: [
              `q.tenant_id = ${tenant}`,
              `q.quarter >= ${value(new Date(before.from))}::timestamptz`,
              `q.quarter < ${value(new Date(before.until))}::timestamptz`,
              `q.quarter <> all (${value(before.stale.map((ms) => new Date(ms)))}::timestamptz[])`,
              ...where.counted,
            ],
          }),
    );
  const columns = [
    ...(period === null
      ? []
      : [
          {
            key: `${period.of} as period`,
            names: [`${period.name('e.period')} as period`],
            order: 'e.period',
          },
        ]),
    ...(keys.domain
      ? [
          {
            key: 's.domain as domain_name',
            names: ['d.id as domain_id', 'e.domain_name'],
            order: 'e.domain_name',
          },
        ]
      : []),
    ...(keys.broadcast
      ? [
          {
            key: 's.broadcast_id',
            names: ['e.broadcast_id', 'b.name as broadcast_name'],
            order: 'e.broadcast_id',
          },
        ]
      : []),
    ...(keys.email ? [{ key: 's.email_id', names: ['e.email_id'], order: 'e.email_id' }] : []),
  ];
  // Periods without an email have their row, too.
  const everyPeriod = dimensions.length === 1 ? (period?.all() ?? null) : null;
  const text = `
    with counted as (
      select ${[
        ...columns.map(({ key }) => key),
        ...counts.map((name) => `sum(s.${name}) as ${name}`),
      ].join(', ')}
      from (${sources.join(' union all ')}) s
      ${columns.length === 0 ? '' : `group by ${columns.map((_, index) => index + 1).join(', ')}`}
    ), e as (
      select * from counted
      ${everyPeriod === null ? '' : `right join (${everyPeriod}) as every (period) using (period)`}
    )
    select ${[
      ...columns.flatMap(({ names }) => names),
      ...counts.map((name) => `coalesce(e.${name}, 0) as ${name}`),
    ].join(', ')}
    from e
    ${keys.domain ? `left join sending_domain d on d.tenant_id = ${tenant} and d.name = e.domain_name` : ''}
    ${keys.broadcast ? `left join broadcast b on b.tenant_id = ${tenant} and b.id = e.broadcast_id` : ''}
    ${columns.length === 0 ? '' : `order by ${columns.map(({ order }) => order).join(', ')}`}
    limit ${ROWS_MAX + 1}`;
  const { rows } = await store.pool.query<Record<string, string | number | null>>(text, values);
  return rows.map((row) => ({
    of: Object.fromEntries(
      NAMES.filter((name) => name in row).map((name) => [
        name,
        row[name] === null ? null : String(row[name]),
      ]),
    ),
    counts: Object.fromEntries(counts.map((name) => [name, Number(row[name])])),
  }));
}

/** Of dimensions, in the answer. */
const NAMES = ['period', 'domain_id', 'domain_name', 'email_id', 'broadcast_id', 'broadcast_name'];

/** Milliseconds since 1970. */
interface Rolled {
  /** Quarters of an hour from then on, and before that, were counted. */
  readonly from: number;
  readonly until: number;
  /** These excepted, in order. */
  readonly stale: readonly number[];
}

/**
 * What of the range was counted. A quarter that is noted as stale after this was read still counts as what it was at this
 * moment.
 */
async function readRolled(
  store: Store,
  tenantId: string,
  { start, end }: Pick<Checked, 'start' | 'end'>,
): Promise<Rolled> {
  const from = Math.ceil(start.getTime() / QUARTER_MS) * QUARTER_MS;
  const last = Math.floor(end.getTime() / QUARTER_MS) * QUARTER_MS;
  const { rows } = await store.pool.query<{ until: string | null; stale: string[] | null }>({
    name: 'read-rolled',
    text: `select (extract(epoch from r.counted_until) * 1000)::bigint::text as until,
        (select array_agg((extract(epoch from s.quarter) * 1000)::bigint::text order by s.quarter)
         from metric_stale s where s.tenant_id = $1 and s.quarter >= $2
           and s.quarter < least($3, r.counted_until)) as stale
      from metric_rolled r where r.tenant_id = $1`,
    values: [tenantId, new Date(from), new Date(last)],
  });
  const until = Math.min(last, Number(rows[0]?.until ?? 0));
  return { from, until, stale: (rows[0]?.stale ?? []).map(Number) };
}

/** What has to be read of its rows: at least one span, which may be empty, and single quarters. Ends are exclusive. */
function leftOf(
  start: number,
  end: number,
  { from, until, stale }: Rolled,
): {
  readonly spans: readonly (readonly [from: number, to: number])[];
  readonly quarters: readonly number[];
} {
  if (until <= from) return { spans: [[start, end]], quarters: [] };
  const head = start < from ? [[start, from] as const] : [];
  return { spans: [...head, [until, end]], quarters: stale };
}

/** SQL: conditions on sent mail, received mail and what was counted of both. */
function filtersOf(
  { domainIds, emailIds, broadcastIds, dimensions }: Checked,
  sql: { readonly tenant: string; readonly value: (given: unknown) => string },
): Record<'sent' | 'received' | 'counted', readonly string[]> {
  // Each is one value, and sent mail is always read: a value that no text names is refused.
  const [domains, emails, broadcasts] = [domainIds, emailIds, broadcastIds].map((given) =>
    given === null ? '' : `any (${sql.value(given)}::uuid[])`,
  );
  const isOf = (column: string): string =>
    `${column} in (select name from sending_domain where tenant_id = ${sql.tenant} and id = ${domains})`;
  // By broadcast is of broadcasts only.
  const isBroadcast = dimensions.includes('broadcast');
  return {
    sent: [
      ...(domainIds === null ? [] : [isOf('e.from_domain')]),
      ...(emailIds === null ? [] : [`e.id = ${emails}`]),
      ...(broadcastIds === null ? [] : [`e.broadcast_id = ${broadcasts}`]),
      ...(isBroadcast ? ['e.broadcast_id is not null'] : []),
    ],
    // Those of no broadcast.
    received: [
      ...(domainIds === null ? [] : [isOf(RECEIVED_DOMAIN)]),
      ...(emailIds === null ? [] : [`r.id = ${emails}`]),
      ...(broadcastIds !== null || isBroadcast ? ['false'] : []),
    ],
    counted: [
      ...(domainIds === null ? [] : [isOf('q.domain')]),
      ...(broadcastIds === null ? [] : [`q.broadcast_id = ${broadcasts}`]),
      ...(isBroadcast ? [`q.broadcast_id <> ${NO_BROADCAST}`] : []),
    ],
  };
}

/** SQL: the period of a quarter of an hour, all periods of the range, and what a period is called. */
function periodsOf(
  { start, end, granularity, timezone }: Checked,
  value: (given: unknown) => string,
): { readonly of: string; readonly all: () => string; readonly name: (column: string) => string } {
  const { unit } = PERIODS[granularity]!;
  const zone = `${value(timezone)}::text`;
  const first = (): string => `${value(start)}::timestamptz`;
  const last = (): string => `${value(new Date(end.getTime() - 1))}::timestamptz`;
  const quarter = `to_timestamp(s.quarter * ${QUARTER_MS / 1_000})`;
  if (granularity === 'hourly') {
    // Instants, since a local hour may come twice.
    return {
      of: `date_trunc('hour', ${quarter}, ${zone})`,
      all: () =>
        // By half hours: where the clock is changed by one, hours begin at other minutes from then on.
        `select distinct date_trunc('hour', half, ${zone})
         from generate_series(date_trunc('hour', ${first()}, ${zone}), ${last()}, interval '30 minutes') half`,
      name: (column) => `to_char(${column} at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS".000Z"')`,
    };
  }
  const local = (instant: string): string =>
    `date_trunc('${unit}', ${instant} at time zone ${zone})`;
  return {
    of: local(quarter),
    all: () =>
      `select generate_series(${local(first())}, ${last()} at time zone ${zone}, interval '1 ${unit}')`,
    name: (column) => `to_char(${column}, 'YYYY-MM-DD')`,
  };
}

function checkQuery(given: MetricsQuery, now: Date): Checked {
  const issues: Issue[] = [];
  const refuse: Refuse = (path, message) => {
    issues.push({ path, message });
    return null;
  };
  const { start, end } = checkRange(given, now, refuse);
  const granularity = given.granularity ?? 'daily';
  const period = Object.hasOwn(PERIODS, granularity) ? PERIODS[granularity] : undefined;
  if (period === undefined) {
    refuse('granularity', `\`granularity\` must be one of ${Object.keys(PERIODS).join(', ')}.`);
  }
  const dimensions =
    checkNames('dimensions', given.dimensions, { known: DIMENSIONS, refuse }) ?? [];
  const checked: Checked = {
    start,
    end,
    timezone: checkTimezone(given.timezone ?? 'UTC', refuse),
    granularity,
    metrics:
      checkNames('metrics', given.metrics, { known: METRICS, refuse }) ??
      METRICS.filter((name) => !ASKED_FOR_ONLY.has(name)),
    dimensions,
    domainIds: checkIds('domain_id', given.domainIds, refuse),
    emailIds: checkIds('email_id', given.emailIds, refuse),
    broadcastIds: checkIds('broadcast_id', given.broadcastIds, refuse),
  };
  const periods = (end.getTime() - start.getTime()) / (period?.ms ?? DAY_MS);
  if (dimensions.includes('period') && periods > PERIODS_MAX) {
    const message = `The range has more than ${PERIODS_MAX} periods; choose a coarser \`granularity\`.`;
    refuse('granularity', message);
  }
  const isByEmail = checked.emailIds !== null || dimensions.includes('email');
  const isByBroadcast = checked.broadcastIds !== null || dimensions.includes('broadcast');
  if (isByEmail && isByBroadcast) {
    refuse('dimensions', 'Ask by email or by broadcast, not by both.');
  }
  if (issues.length > 0) throw refuseFields(issues);
  return checked;
}

function checkRange(
  given: Pick<MetricsQuery, 'startDate' | 'endDate'>,
  now: Date,
  refuse: Refuse,
): { start: Date; end: Date } {
  const parse = (path: string, text: string | undefined): number | null => {
    if (text === undefined) return null;
    const time = parseTime(text);
    if (time !== null) return time.ms;
    return refuse(path, `\`${path}\` must be a date like \`2026-05-06\` or an ISO 8601 time.`);
  };
  const last = now.getTime() + 1; // exclusive, and what was created in this very millisecond counts
  const asked = parse('end_date', given.endDate);
  const endMs = asked === null ? last : Math.min(asked, last);
  const startMs = parse('start_date', given.startDate) ?? endMs - RANGE_DEFAULT_MS;
  if (startMs > endMs) refuse('start_date', '`start_date` must not be after `end_date` or now.');
  if (endMs - startMs > RANGE_MAX_DAYS * DAY_MS) {
    refuse('start_date', `The range must not be longer than ${RANGE_MAX_DAYS} days.`);
  }
  return { start: new Date(startMs), end: new Date(endMs) };
}

function checkTimezone(given: string, refuse: Refuse): string {
  try {
    if (TIMEZONE.test(given)) {
      new Intl.DateTimeFormat('en', { timeZone: given }).format();
      return given;
    }
  } catch {
    // not one
  }
  refuse('timezone', '`timezone` must be a name of the IANA database, such as `Europe/Berlin`.');
  return 'UTC';
}

/** More than any list here can need, so that what was given is not searched without end. */
const PARTS_MAX = 200;
const split = (given: readonly string[]): readonly string[] => [
  ...new Set(
    given
      .slice(0, PARTS_MAX)
      .flatMap((one) => one.split(',', PARTS_MAX).map((part) => part.trim())),
  ),
];

function checkNames(
  path: string,
  given: readonly string[] | undefined,
  { known, refuse }: { readonly known: readonly string[]; readonly refuse: Refuse },
): readonly string[] | null {
  if (given === undefined) return null;
  const names = split(given);
  if (names.every((name) => known.includes(name))) return names;
  return refuse(path, `\`${path}\` may have ${known.join(', ')}.`);
}

function checkIds(
  path: string,
  given: readonly string[] | undefined,
  refuse: Refuse,
): readonly string[] | null {
  if (given === undefined) return null;
  const ids = split(given);
  if (ids.length <= IDS_MAX && ids.every(isUuid)) return ids.map((id) => id.toLowerCase());
  return refuse(path, `\`${path}\` must be a UUID, or up to ${IDS_MAX} with commas.`);
}
