// What delivery workers say of their lanes, for operators, for explanations and for the next start: table `lane`, and
// `lane_destination` for which lane serves what a delivery's row says. A worker's memory decides, these rows are
// its report: losing them loses nothing but the view.
import type { Queryable } from './enqueue.ts';

export type Circuit = 'closed' | 'open' | 'half_open';
/** The rule that keeps a lane from taking more right now. */
export type LaneLimit = 'connections' | 'rate' | 'concurrency' | 'circuit' | 'paused' | 'blocked';

export interface LaneReport {
  /** `<egress>/<site>`; `sink`, `smarthost` and `home` for these. */
  readonly name: string;
  readonly egress: string;
  readonly site: string;
  readonly provider: string | null;
  readonly circuit: Circuit;
  readonly openedAt: Date | null;
  readonly openUntil: Date | null;
  /** How often it opened in a row; the pauses grow by it. */
  readonly opens: number;
  /** Why it is open, in the words of the last failure. */
  readonly reason: string | null;
  /** Null: nothing keeps it from taking more. */
  readonly limitedBy: LaneLimit | null;
  readonly connections: number;
  readonly connectionsMax: number;
  /** How many connections it trusts itself to use now. */
  readonly concurrency: number;
  /** Claimed and not begun. */
  readonly queued: number;
  /** Begun and not decided. */
  readonly inFlight: number;
  readonly lastSuccessAt: Date | null;
  readonly lastFailureAt: Date | null;
  /** What it serves, in the words of store/destination.ts. */
  readonly destinations: readonly string[];
}

/** Of one call; lanes whose circuit is not closed come first, what is above waits for the next report. */
const REPORTS_MAX = 2_000;
const DESTINATIONS_MAX = 20_000;
const REASON_MAX = 500;
/** Open circuits that a start reads. */
const READ_MAX = 5_000;
const READ_DESTINATIONS_MAX = 1_000;
const FORGET_AFTER = `interval '7 days'`;
const FORGET_MAX = 50_000;

// In order of the keys: workers report the same lanes at the same time and must not wait for each other in a circle.
// That a destination is still served is noted once an hour, not with every report.
const REPORT = `
  with destinations as (
    insert into lane_destination as l (destination, lane, seen_at)
    select destination, lane, now() from unnest($18::text[], $19::text[]) as d (destination, lane)
    order by destination, lane
    on conflict (destination, lane) do update set seen_at = excluded.seen_at
      where l.seen_at < now() - interval '1 hour'
  )
  insert into lane (name, egress, site, provider, circuit, opened_at, open_until, opens, reason, limited_by,
    connections, connections_max, concurrency, queued, in_flight, last_success_at, last_failure_at, reported_at)
  select r.*, now() from unnest($1::text[], $2::text[], $3::text[], $4::text[], $5::text[],
    $6::timestamptz[], $7::timestamptz[], $8::integer[], $9::text[], $10::text[], $11::integer[], $12::integer[],
    $13::real[], $14::integer[], $15::integer[], $16::timestamptz[], $17::timestamptz[])
    as r (name, egress, site, provider, circuit, opened_at, open_until, opens, reason, limited_by, connections,
      connections_max, concurrency, queued, in_flight, last_success_at, last_failure_at)
  order by r.name
  on conflict (name) do update set egress = excluded.egress, site = excluded.site, provider = excluded.provider,
    circuit = excluded.circuit, opened_at = excluded.opened_at, open_until = excluded.open_until,
    opens = excluded.opens, reason = excluded.reason, limited_by = excluded.limited_by,
    connections = excluded.connections, connections_max = excluded.connections_max,
    concurrency = excluded.concurrency, queued = excluded.queued, in_flight = excluded.in_flight,
    last_success_at = excluded.last_success_at, last_failure_at = excluded.last_failure_at,
    reported_at = excluded.reported_at`;

/**
 * Stores what a worker says of its lanes now, in one statement. A lane that two workers serve shows what was said last.
 * At most REPORTS_MAX lanes and DESTINATIONS_MAX destinations a call: report those that changed.
 */
export async function reportLanes(db: Queryable, reports: readonly LaneReport[]): Promise<void> {
  const distinct = [...new Map(reports.map((lane) => [lane.name, lane])).values()];
  const lanes = distinct
    .toSorted((a, b) => Number(a.circuit === 'closed') - Number(b.circuit === 'closed'))
    .slice(0, REPORTS_MAX);
  if (lanes.length === 0) return;
  const served = lanes
    .flatMap(({ name, destinations }) =>
      [...new Set(destinations)].map((destination) => ({ name, destination })),
    )
    .slice(0, DESTINATIONS_MAX);
  const of = <T>(pick: (lane: LaneReport) => T): T[] => lanes.map(pick);
  await db.query({
    name: 'report-lanes',
    text: REPORT,
    values: [
      of((lane) => lane.name),
      of((lane) => lane.egress),
      of((lane) => lane.site),
      of((lane) => lane.provider),
      of((lane) => lane.circuit),
      of((lane) => lane.openedAt),
      of((lane) => lane.openUntil),
      of((lane) => lane.opens),
      of((lane) => lane.reason?.replaceAll('\0', '').slice(0, REASON_MAX).toWellFormed() ?? null),
      of((lane) => lane.limitedBy),
      of((lane) => lane.connections),
      of((lane) => lane.connectionsMax),
      of((lane) => lane.concurrency),
      of((lane) => lane.queued),
      of((lane) => lane.inFlight),
      of((lane) => lane.lastSuccessAt),
      of((lane) => lane.lastFailureAt),
      served.map(({ destination }) => destination),
      served.map(({ name }) => name),
    ],
  });
}

/** `lane` as SQL reads it: times as milliseconds, so that no driver setting decides about them. */
export const LANE_COLUMNS = `l.name, l.egress, l.site, l.provider, l.circuit, l.opens, l.reason, l.limited_by,
  l.connections, l.connections_max, l.concurrency, l.queued, l.in_flight,
  ${['opened_at', 'open_until', 'last_success_at', 'last_failure_at']
    .map((name) => `(extract(epoch from l.${name}) * 1000)::float8 as ${name}`)
    .join(', ')}`;

export interface LaneRow {
  readonly name: string;
  readonly egress: string;
  readonly site: string;
  readonly provider: string | null;
  readonly circuit: Circuit;
  readonly opens: number;
  readonly reason: string | null;
  readonly limited_by: LaneLimit | null;
  readonly connections: number;
  readonly connections_max: number;
  readonly concurrency: number;
  readonly queued: number;
  readonly in_flight: number;
  readonly opened_at: number | null;
  readonly open_until: number | null;
  readonly last_success_at: number | null;
  readonly last_failure_at: number | null;
}

const dateOf = (ms: number | null): Date | null => (ms === null ? null : new Date(ms));

export const readLaneRow = (row: LaneRow, destinations: readonly string[]): LaneReport => ({
  name: row.name,
  egress: row.egress,
  site: row.site,
  provider: row.provider,
  circuit: row.circuit,
  openedAt: dateOf(row.opened_at),
  openUntil: dateOf(row.open_until),
  opens: row.opens,
  reason: row.reason,
  limitedBy: row.limited_by,
  connections: row.connections,
  connectionsMax: row.connections_max,
  concurrency: row.concurrency,
  queued: row.queued,
  inFlight: row.in_flight,
  lastSuccessAt: dateOf(row.last_success_at),
  lastFailureAt: dateOf(row.last_failure_at),
  destinations,
});

/** The lanes whose circuit was not closed when last reported: a start goes on from there. */
export async function readLanes(db: Queryable): Promise<readonly LaneReport[]> {
  const { rows } = await db.query<LaneRow & { destinations: string[] }>(
    `select ${LANE_COLUMNS}, array(select d.destination from lane_destination d where d.lane = l.name
       order by d.seen_at desc limit ${READ_DESTINATIONS_MAX}) as destinations
     from lane l where l.circuit <> 'closed' order by l.open_until desc nulls last limit ${READ_MAX}`,
  );
  return rows.map((row) => readLaneRow(row, row.destinations));
}

/** For upkeep: lanes and destinations that no worker has spoken of for seven days. How many rows went. */
export async function forgetOldLanes(db: Queryable): Promise<number> {
  const { rowCount: destinations } = await db.query(
    `delete from lane_destination where ctid in (
       select ctid from lane_destination where seen_at < now() - ${FORGET_AFTER} limit ${FORGET_MAX})`,
  );
  const { rowCount: lanes } = await db.query(
    `delete from lane where name in (
       select name from lane where reported_at < now() - ${FORGET_AFTER} limit ${FORGET_MAX})`,
  );
  return (destinations ?? 0) + (lanes ?? 0);
}
