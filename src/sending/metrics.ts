// Counts what became of a tenant's emails, from the rows themselves: an email counts in the period of its creation,
// once however many recipients it has, by what it shows now. So an email moves between counts, and
// the sum over the periods is the total.
import { parseTime, type Refuse } from '../access/filters.ts';
import { refuseFields, type Issue } from '../access/refusal.ts';
import { firstIdAt } from '../access/request-log.ts';
import { isUuid } from '../store/id.ts';
import type { Store } from '../store/orm.ts';

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

const IS_DELIVERED = `e.last_event in ('delivered', 'opened', 'clicked', 'complained')`;
const BOUNCE_CODE = `e.provider_last_error ->> 'code'`;
const IS_PERMANENT = `e.last_event = 'bounced' and ${BOUNCE_CODE} like '5.%'`;
/** Its lifetime ended while it was put off. */
const IS_TRANSIENT = `e.last_event = 'bounced'
  and (${BOUNCE_CODE} = 'expired' or ${BOUNCE_CODE} like '4.%')`;

/** What an email must be to count. Opens and clicks are not told apart yet from first ones. */
const COUNTS: Readonly<Record<string, string>> = {
  received: 'false',
  delivered: IS_DELIVERED,
  complained: `e.last_event = 'complained'`,
  suppressed: `e.last_event = 'suppressed'`,
  bounced: `e.last_event = 'bounced'`,
  bounced_transient: IS_TRANSIENT,
  bounced_permanent: IS_PERMANENT,
  bounced_undetermined: `e.last_event = 'bounced'
    and not coalesce((${IS_PERMANENT}) or (${IS_TRANSIENT}), false)`,
  opened: `e.last_event in ('opened', 'clicked')`,
  clicked: `e.last_event = 'clicked'`,
  unsubscribed: 'false',
  delivery_delayed: `e.last_event = 'delivery_delayed' or e.provider_retry_count > 0`,
  failed: `e.last_event = 'failed'`,
  sent: 'e.provider_last_attempted_at is not null',
  // The answer to the final dot was lost: one more try is to come, or nobody will ever know.
  unknown: `e.last_event in ('sent', 'delivery_delayed') and ${BOUNCE_CODE} = 'unknown_after_dot'`,
  unique_opened: `e.last_event in ('opened', 'clicked')`,
  unique_clicked: `e.last_event = 'clicked'`,
};
/** Percentages with one decimal; 0 where there is nothing to divide by. */
const RATES: Readonly<Record<string, readonly [part: string, whole: string]>> = {
  delivery_rate: ['delivered', 'sent'],
  open_rate: ['unique_opened', 'delivered'],
  click_rate: ['unique_clicked', 'delivered'],
  bounce_rate: ['bounced', 'sent'],
  complaint_rate: ['complained', 'delivered'],
  unsubscribe_rate: ['unsubscribed', 'delivered'],
};
const METRICS = [...Object.keys(COUNTS), ...Object.keys(RATES)];
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
/** All its rows are read. */
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
  const { dimensions } = checked;
  // No email is of a broadcast yet.
  if (checked.broadcastIds !== null || dimensions.includes('broadcast')) return [];
  const values: unknown[] = [];
  const value = (given: unknown): string => `$${values.push(given)}`;
  const tenant = `${value(tenantId)}::uuid`;
  const period = dimensions.includes('period') ? periodsOf(checked, value) : null;
  const keys = [
    ...(period === null ? [] : [[`${period.of} as period`, 'e.period']]),
    ...(dimensions.includes('domain') ? [['e.from_domain as domain_name', 'e.domain_name']] : []),
    ...(dimensions.includes('email') ? [['e.id as email_id', 'e.email_id']] : []),
  ].map(([inner, outer]) => ({ inner: inner!, outer: outer! }));
  const counts = Object.entries(COUNTS);
  // Periods without an email have their row, too.
  const everyPeriod = dimensions.length === 1 ? (period?.all ?? null) : null;
  const where = [
    `e.tenant_id = ${tenant}`,
    `e.id >= ${value(firstIdAt(checked.start.getTime()))}`,
    `e.id < ${value(firstIdAt(checked.end.getTime()))}`,
    ...(checked.emailIds === null ? [] : [`e.id = any (${value(checked.emailIds)}::uuid[])`]),
    ...(checked.domainIds === null
      ? []
      : [
          `e.from_domain in (select name from sending_domain
            where tenant_id = ${tenant} and id = any (${value(checked.domainIds)}::uuid[]))`,
        ]),
  ];
  const names = [
    ...(period === null ? [] : [`${period.name('e.period')} as period`]),
    ...(dimensions.includes('domain') ? ['s.id as domain_id', 'e.domain_name'] : []),
    ...(dimensions.includes('email') ? ['e.email_id'] : []),
  ];
  const text = `
    with counted as (
      select ${[
        ...keys.map(({ inner }) => inner),
        ...counts.map(([, is], index) => `count(*) filter (where ${is})::int as c${index}`),
      ].join(', ')}
      from email e where ${where.join(' and ')}
      ${keys.length === 0 ? '' : `group by ${keys.map((_, index) => index + 1).join(', ')}`}
    ), e as (
      select * from counted
      ${everyPeriod === null ? '' : `right join (${everyPeriod}) as every (period) using (period)`}
    )
    select ${[...names, ...counts.map((_, index) => `coalesce(e.c${index}, 0) as c${index}`)].join(', ')}
    from e
    ${
      dimensions.includes('domain')
        ? `left join sending_domain s on s.tenant_id = ${tenant} and s.name = e.domain_name`
        : ''
    }
    ${keys.length === 0 ? '' : `order by ${keys.map(({ outer }) => outer).join(', ')}`}
    limit ${ROWS_MAX + 1}`;
  const { rows } = await store.pool.query<Record<string, string | number | null>>(text, values);
  return rows.map((row) => ({
    of: Object.fromEntries(
      ['period', 'domain_id', 'domain_name', 'email_id']
        .filter((name) => name in row)
        .map((name) => [name, row[name] === null ? null : String(row[name])]),
    ),
    counts: Object.fromEntries(counts.map(([name], index) => [name, Number(row[`c${index}`])])),
  }));
}

/** SQL: the period of an email, all periods of the range, and what a period is called. */
function periodsOf(
  { start, end, granularity, timezone }: Checked,
  value: (given: unknown) => string,
): { readonly of: string; readonly all: string; readonly name: (column: string) => string } {
  const { unit } = PERIODS[granularity]!;
  const [from, last, zone] = [
    `${value(start)}::timestamptz`,
    `${value(new Date(end.getTime() - 1))}::timestamptz`,
    `${value(timezone)}::text`,
  ];
  // An id may run a moment ahead of the clock: its email is kept inside the range that its id is in.
  const created = `least(greatest(e.created_at, ${from}), ${last})`;
  if (granularity === 'hourly') {
    // Instants, since a local hour may come twice.
    return {
      of: `date_trunc('hour', ${created}, ${zone})`,
      all: `select generate_series(date_trunc('hour', ${from}, ${zone}), ${last}, interval '1 hour')`,
      name: (column) => `to_char(${column} at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS".000Z"')`,
    };
  }
  const local = (instant: string): string =>
    `date_trunc('${unit}', ${instant} at time zone ${zone})`;
  return {
    of: local(created),
    all: `select generate_series(${local(from)}, ${last} at time zone ${zone}, interval '1 ${unit}')`,
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
