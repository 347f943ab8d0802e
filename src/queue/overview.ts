// The queue as an operator sees it: how much waits, for which lane, of which tenant, and since when. Every number has a
// limit up to which it is counted, so that asking costs the same whether a thousand rows wait or ten million; what
// was counted to its limit says so.
import { UNSUBSCRIBED } from '../audience/wanting.ts';
import { UNKNOWNS_MAX } from '../store/delivery.ts';
import { readBlockedEgresses, type BlockedEgress } from './egress-state.ts';
import type { Queryable } from './enqueue.ts';
import { LANE_COLUMNS, readLaneRow, type LaneReport, type LaneRow } from './lanes.ts';
import { listPauses, type Pause } from './pauses.ts';

/** States are counted up to this; deferred and unknown up to WAITING_MAX together. */
const TOTALS_MAX = 100_000;
/** Of ready rows, in all groups together; each group (tenant, destination) gets its part of it. */
const READY_LOOKS_MAX = 200_000;
const GROUP_MAX = 10_000;
const TENANTS_MAX = 200;
const GROUPS_MAX = 2_000;
const GROUPS_PER_TENANT_MIN = 10;
/** Of deliveries that wait for a clock, the next to be due are looked at. */
const WAITING_MAX = 50_000;
const LANES_READ_MAX = 5_000;
const LANES_SHOWN = 100;
const TENANTS_SHOWN = 100;
const HEARTBEAT_MAX = `interval '60 seconds'`;

export interface QueueOverview {
  readonly at: Date;
  /** Delivery workers that were heard of within the last minute. */
  readonly workers: number;
  readonly totals: Totals;
  readonly oldestDueAt: Date | null;
  readonly blocked: readonly BlockedEgress[];
  readonly lanes: readonly LaneLoad[];
  readonly hasMoreLanes: boolean;
  readonly tenants: readonly TenantLoad[];
  readonly hasMoreTenants: boolean;
  /** What waits for destinations that no lane is known for. */
  readonly unassigned: Load & { readonly destinations: number };
  readonly pauses: readonly Pause[];
}

export type CountedState =
  'ready' | 'in_flight' | 'deferred' | 'unknown' | 'scheduled' | 'preparing' | 'dead_lettered';
export type Totals = Readonly<Record<CountedState, number>> & {
  /** Those of which there are more. */
  readonly capped: readonly CountedState[];
};

/** What waits; `isCapped`: there is more than these numbers say. */
export interface Load {
  readonly ready: number;
  readonly isReadyCapped: boolean;
  readonly deferred: number;
  readonly isDeferredCapped: boolean;
  readonly oldestDueAt: Date | null;
}

export interface LaneLoad extends LaneReport, Load {
  readonly isPaused: boolean;
}

export interface TenantLoad extends Load {
  readonly id: string;
  readonly name: string;
  readonly isPaused: boolean;
}

/** One tenant's mail for one destination. */
interface Group {
  readonly tenantId: string;
  readonly destination: string;
  readonly load: Load;
}

export const IS_DEAD = `((state = 'failed' and last_cause is distinct from '${UNSUBSCRIBED.cause}')
  or (state = 'bounced' and last_cause = 'expired')
  or (state = 'unknown' and unknowns >= ${UNKNOWNS_MAX}))`;
const IS_WAITING = `state in ('deferred', 'unknown')`;

// Each in the order of its index: a plan that reads the table until it has found enough would read all that was ever sent.
const COUNTED: Readonly<Record<Exclude<CountedState, 'deferred' | 'unknown'>, string>> = {
  ready: `delivery where state = 'ready' order by tenant_id, is_bulk, lane, due_at`,
  in_flight: `delivery where state = 'in_flight' order by lease_epoch`,
  scheduled: `delivery where state = 'scheduled' order by due_at`,
  preparing: 'attachment_fetch order by tenant_id, due_at',
  dead_lettered: `delivery where ${IS_DEAD} order by tenant_id, email_id`,
};

const TOTALS = `select ${Object.entries(COUNTED)
  .map(
    ([name, rows]) =>
      `(select count(*)::integer from (select 1 from ${rows} limit ${TOTALS_MAX + 1}) n) as ${name}`,
  )
  .join(', ')},
  (select count(*)::integer from worker where heartbeat_at > now() - ${HEARTBEAT_MAX}) as workers,
  (extract(epoch from now()) * 1000)::float8 as now_ms`;

type TotalsRow = Readonly<Record<keyof typeof COUNTED | 'workers' | 'now_ms', number>>;

function totalsOf(row: TotalsRow, waiting: readonly WaitingRow[]): Totals {
  const names = Object.keys(COUNTED) as (keyof typeof COUNTED)[];
  const counts = Object.fromEntries(
    names.map((name) => [name, Math.min(row[name], TOTALS_MAX)]),
  ) as Record<keyof typeof COUNTED, number>;
  const ofState = (wanted: string): number =>
    waiting.reduce((total, { state, count }) => total + (state === wanted ? count : 0), 0);
  return {
    ...counts,
    deferred: ofState('deferred'),
    unknown: ofState('unknown'),
    capped: [
      ...names.filter((name) => row[name] > TOTALS_MAX),
      ...(isCutShort(waiting) ? (['deferred', 'unknown'] as const) : []),
    ],
  };
}

// Jumps through the index of what may be claimed from tenant to tenant and from destination to destination, and counts
// each group up to its part of all looks.
const READY = `
  with recursive tenants as (
    (select tenant_id as id, 1 as number from delivery where state = 'ready' order by tenant_id limit 1)
    union all
    select n.id, t.number + 1 from tenants t cross join lateral (
      select d.tenant_id as id from delivery d where d.state = 'ready' and d.tenant_id > t.id
      order by d.tenant_id limit 1) n
    where t.number < ${TENANTS_MAX}
  ), shares as materialized (
    select id, greatest(${GROUPS_PER_TENANT_MIN}, ${GROUPS_MAX} / count(*) over ()) as groups from tenants
  ), groups as materialized (
    -- Whether there are tenants or destinations that were not jumped to.
    select s.id as tenant_id, g.is_bulk, g.lane,
      bool_or(g.number = s.groups) over (partition by s.id)
        or (select count(*) from shares) = ${TENANTS_MAX} as is_cut
    from shares s cross join lateral (
      with recursive jumps as (
        (select d.is_bulk, d.lane, 1 as number from delivery d
         where d.tenant_id = s.id and d.state = 'ready' order by d.is_bulk, d.lane limit 1)
        union all
        select n.is_bulk, n.lane, j.number + 1 from jumps j cross join lateral (
          select d.is_bulk, d.lane from delivery d
          where d.tenant_id = s.id and d.state = 'ready' and (d.is_bulk, d.lane) > (j.is_bulk, j.lane)
          order by d.is_bulk, d.lane limit 1) n
        where j.number < s.groups)
      select is_bulk, lane, number from jumps) g
  ), parts as materialized (
    select *, least(${GROUP_MAX}, ${READY_LOOKS_MAX} / count(*) over ())::integer as part from groups
  )
  select p.tenant_id, p.lane, sum(least(c.count, p.part))::integer as count,
    bool_or(c.count > p.part or p.is_cut) as is_capped, (extract(epoch from min(c.oldest)) * 1000)::float8 as oldest_ms
  from parts p cross join lateral (
    select count(*) as count, min(r.due_at) as oldest from (
      select d.due_at from delivery d
      where d.tenant_id = p.tenant_id and d.is_bulk = p.is_bulk and d.lane = p.lane and d.state = 'ready'
      order by d.due_at limit p.part + 1) r) c
  group by p.tenant_id, p.lane`;

const WAITING = `
  select tenant_id, lane, state, count(*)::integer as count, (sum(count(*)) over ())::integer as looked_at
  from (
    select tenant_id, lane, state from delivery where ${IS_WAITING} and unknowns < ${UNKNOWNS_MAX}
    order by due_at limit ${WAITING_MAX}) w
  group by tenant_id, lane, state`;

interface WaitingRow extends GroupRow {
  readonly state: string;
  readonly looked_at: number;
}

const isCutShort = (waiting: readonly WaitingRow[]): boolean =>
  (waiting[0]?.looked_at ?? 0) >= WAITING_MAX;

interface GroupRow {
  readonly tenant_id: string;
  readonly lane: string;
  readonly count: number;
}

interface ReadyRow extends GroupRow {
  readonly is_capped: boolean;
  readonly oldest_ms: number | null;
}

function groupsOf(ready: readonly ReadyRow[], waiting: readonly WaitingRow[]): readonly Group[] {
  const about = { ...NOTHING, isDeferredCapped: isCutShort(waiting) };
  return [
    ...ready.map((row) => ({
      tenantId: row.tenant_id,
      destination: row.lane,
      load: {
        ...about,
        ready: row.count,
        isReadyCapped: row.is_capped,
        oldestDueAt: row.oldest_ms === null ? null : new Date(row.oldest_ms),
      },
    })),
    ...waiting.map((row) => ({
      tenantId: row.tenant_id,
      destination: row.lane,
      load: { ...about, deferred: row.count },
    })),
  ];
}

const NOTHING: Load = {
  ready: 0,
  isReadyCapped: false,
  deferred: 0,
  isDeferredCapped: false,
  oldestDueAt: null,
};

const sum = (loads: readonly Load[]): Load => {
  const oldest = loads.flatMap(({ oldestDueAt }) => oldestDueAt?.getTime() ?? []);
  return {
    ready: loads.reduce((count, { ready }) => count + ready, 0),
    isReadyCapped: loads.some(({ isReadyCapped }) => isReadyCapped),
    deferred: loads.reduce((count, { deferred }) => count + deferred, 0),
    isDeferredCapped: loads.some(({ isDeferredCapped }) => isDeferredCapped),
    oldestDueAt: oldest.length === 0 ? null : new Date(oldest.reduce((a, b) => Math.min(a, b))),
  };
};

function groupBy<T>(items: readonly T[], keysOf: (item: T) => readonly string[]): Map<string, T[]> {
  const groups = new Map<string, T[]>();
  for (const item of items) {
    for (const key of keysOf(item)) {
      const group = groups.get(key);
      if (group === undefined) groups.set(key, [item]);
      else group.push(item);
    }
  }
  return groups;
}

const moreFirst = (a: Load, b: Load): number => b.ready - a.ready || b.deferred - a.deferred;

/** Everything at once; some hundred milliseconds at most. */
export async function readQueue(db: Queryable): Promise<QueueOverview> {
  const { rows: counted } = await db.query<TotalsRow>(TOTALS);
  const { rows: ready } = await db.query<ReadyRow>(READY);
  const { rows: waiting } = await db.query<WaitingRow>(WAITING);
  const totals = counted[0]!;
  const groups = groupsOf(ready, waiting);
  const pauses = await listPauses(db);
  const isPaused = (kind: Pause['kind'], name: string): boolean =>
    pauses.some((pause) => pause.kind === 'all' || (pause.kind === kind && pause.name === name));

  const destinations = [...new Set(groups.map(({ destination }) => destination))];
  const served = await lanesOf(db, destinations);
  const { rows: reports } = await db.query<LaneRow>(
    // One that is closed off is reported once, however long that lasts.
    `select ${LANE_COLUMNS} from lane l
     order by l.limited_by is null, l.reported_at desc limit ${LANES_READ_MAX}`,
  );
  // A destination with several lanes counts for each: which of them a row takes is decided when it is claimed.
  const ofLane = groupBy(groups, ({ destination }) => served.get(destination) ?? []);
  const lanes = reports
    .map((row): LaneLoad => {
      const own = ofLane.get(row.name) ?? [];
      return {
        ...readLaneRow(row, [...new Set(own.map(({ destination }) => destination))]),
        ...sum(own.map(({ load }) => load)),
        isPaused: isPaused('lane', row.name),
      };
    })
    .toSorted((a, b) => moreFirst(a, b) || b.inFlight - a.inFlight || (a.name < b.name ? -1 : 1));

  const ofTenant = groupBy(groups, ({ tenantId }) => [tenantId]);
  const busiest = [...ofTenant]
    .map(([id, own]) => ({ id, load: sum(own.map(({ load }) => load)) }))
    .toSorted((a, b) => moreFirst(a.load, b.load) || (a.id < b.id ? -1 : 1));
  const shown = busiest.slice(0, TENANTS_SHOWN);
  const names = await tenantNames(
    db,
    shown.map(({ id }) => id),
  );

  const strays = groups.filter(({ destination }) => !served.has(destination));
  const oldest = sum(groups.map(({ load }) => load)).oldestDueAt;
  return {
    at: new Date(totals.now_ms),
    workers: totals.workers,
    totals: totalsOf(totals, waiting),
    oldestDueAt: oldest,
    blocked: await readBlockedEgresses(db),
    lanes: lanes.slice(0, LANES_SHOWN),
    hasMoreLanes: lanes.length > LANES_SHOWN,
    tenants: shown.map(({ id, load }) => ({
      id,
      name: names.get(id) ?? '',
      ...load,
      isPaused: isPaused('tenant', id),
    })),
    hasMoreTenants: busiest.length > TENANTS_SHOWN || busiest.length >= TENANTS_MAX,
    unassigned: {
      ...sum(strays.map(({ load }) => load)),
      destinations: new Set(strays.map(({ destination }) => destination)).size,
    },
    pauses,
  };
}

async function lanesOf(
  db: Queryable,
  destinations: readonly string[],
): Promise<ReadonlyMap<string, readonly string[]>> {
  const { rows } = await db.query<{ destination: string; lanes: string[] }>(
    `select destination, array_agg(lane order by seen_at desc) as lanes from lane_destination
     where destination = any ($1::text[]) group by destination`,
    [destinations],
  );
  return new Map(rows.map(({ destination, lanes }) => [destination, lanes]));
}

async function tenantNames(
  db: Queryable,
  ids: readonly string[],
): Promise<ReadonlyMap<string, string>> {
  const { rows } = await db.query<{ id: string; name: string }>(
    'select id, name from tenant where id = any ($1::uuid[])',
    [ids],
  );
  return new Map(rows.map(({ id, name }) => [id, name]));
}
