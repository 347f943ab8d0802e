// What worker runs share of the limits of lanes, in Postgres: table `lane_share`, and until when what a run holds there
// counts, `worker.shares_until`. No leader and no lock that outlives a statement: a run replaces the row of a lane that it
// has read last, and nothing where somebody else was faster. How much a run takes is decided by delivery/shares.ts.
//
// Clocks: Postgres decides when a run's time is over. A run counts from before its question was sent, and believes no
// answer that took longer than ANSWER_PART of its life; a run with less time left than that is not renewed but begins
// anew. So whoever sees a run as gone sees it after the run itself has stopped to count on what it held.
import type { Queryable } from './enqueue.ts';

/** By epoch: connections that it may have, connections that it has work for. */
export type Parts = Readonly<Record<string, readonly [held: number, wanted: number]>>;

/** A circuit that a run opened for all. */
export interface SharedCircuit {
  /** Another at each opening. */
  readonly id: string;
  readonly by: string;
  /** From when it was read, or is to be stored; below 0: it is over. */
  readonly forMs: number;
  readonly opens: number;
  readonly reason: string;
}

export interface LaneShare {
  readonly lane: string;
  readonly etag: string;
  readonly parts: Parts;
  /** Null: closed. */
  readonly circuit: SharedCircuit | null;
}

export interface ShareProposal extends LaneShare {
  /** The etag of the row that it is made from; null: there was none. */
  readonly replaces: string | null;
}

export interface ShareLook {
  /** False: its time was over, and nothing that it held counts any more. */
  readonly isRenewed: boolean;
  /** Other runs whose time is not over. */
  readonly others: readonly string[];
  /** Of those that were named, the rows that are not as they were known. */
  readonly changed: readonly LaneShare[];
}

/** What a run holds counts for so long after it was last renewed. */
export const SHARES_LIFE_MS = 20_000;
/** Of that life; an answer that took longer is not believed. */
export const ANSWER_PART = 0.25;
/** Of one statement. */
export const SHARES_MAX = 1_000;
const REASON_MAX = 500;
const RUNS_MAX = 10_000;
const FORGET_AFTER = `interval '7 days'`;
const FORGET_MAX = 50_000;

const ROW = `jsonb_build_object('lane', s.lane, 'etag', s.etag, 'parts', s.shares, 'circuit',
  case when s.open_id is not null then jsonb_build_object('id', s.open_id, 'by', s.open_by,
    'forMs', extract(epoch from s.open_until - now()) * 1000, 'opens', s.opens, 'reason', s.reason) end)`;
const OTHERS = `array(select epoch::text from worker where shares_until > now() and epoch <> $1 limit ${RUNS_MAX})`;

const LOOK = `
  with renewed as (
    update worker set shares_until = now() + $2 * interval '1 millisecond'
    where epoch = $1 and ($3 or shares_until > now() + ${ANSWER_PART} * $2 * interval '1 millisecond')
    returning epoch
  )
  select exists (select 1 from renewed) as renewed, ${OTHERS} as others,
    array(select ${ROW} from unnest($4::text[], $5::uuid[]) as k (lane, etag)
      join lane_share s on s.lane = k.lane where s.etag is distinct from k.etag) as rows`;

/**
 * Renews the run's time and says what has changed of these lanes, by name with the etag that is known, null for none. At
 * most SHARES_MAX of them. `isAnew`: also where its time is over, or never began.
 */
export async function lookAtShares(
  db: Queryable,
  about: {
    readonly epoch: string;
    readonly isAnew: boolean;
    readonly known: readonly (readonly [lane: string, etag: string | null])[];
    readonly lifeMs?: number;
  },
): Promise<ShareLook> {
  const known = about.known.slice(0, SHARES_MAX);
  const { rows } = await db.query<{
    renewed: boolean;
    others: readonly string[];
    rows: readonly LaneShare[];
  }>({
    name: 'look-at-shares',
    text: LOOK,
    values: [
      about.epoch,
      about.lifeMs ?? SHARES_LIFE_MS,
      about.isAnew,
      known.map(([lane]) => lane),
      known.map(([, etag]) => etag),
    ],
  });
  const [found] = rows;
  if (found === undefined) throw new Error('no answer about the shares of lanes');
  return { isRenewed: found.renewed, others: found.others, changed: found.rows };
}

// In the order of the key: runs that propose for the same lanes at the same time must not wait for each other in a circle.
// What did not change of a circuit keeps its time.
const PROPOSE = `
  with k as materialized (
    select * from unnest($2::text[], $3::uuid[], $4::uuid[], $5::text[], $6::uuid[], $7::uuid[], $8::float8[], $9::integer[],
      $10::text[]) as k (lane, etag, replaces, shares, open_id, open_by, for_ms, opens, reason)
  ), written as (
    insert into lane_share as l (lane, etag, replaces, shares, open_id, open_by, open_until, opens, reason, changed_at)
    select lane, etag, replaces, shares::jsonb, open_id, open_by, now() + for_ms * interval '1 millisecond', opens, reason, now()
    from k order by lane
    on conflict (lane) do update set etag = excluded.etag, replaces = excluded.replaces, shares = excluded.shares,
      open_until = case when l.open_id = excluded.open_id then l.open_until else excluded.open_until end,
      open_id = excluded.open_id, open_by = excluded.open_by, opens = excluded.opens, reason = excluded.reason,
      changed_at = excluded.changed_at
      where l.etag = excluded.replaces
    returning lane
  )
  select array(select lane from written) as written, ${OTHERS} as others,
    array(select ${ROW} from k join lane_share s on s.lane = k.lane
      where k.lane not in (select lane from written)) as rows`;

/**
 * Stores rows in place of those that they were made from, each only where that is still the one. At most SHARES_MAX,
 * every lane once. What was not stored is said as it is now, or is not said where it was made this instant.
 */
export async function proposeShares(
  db: Queryable,
  epoch: string,
  proposals: readonly ShareProposal[],
): Promise<{
  readonly written: ReadonlySet<string>;
  readonly others: readonly string[];
  readonly current: readonly LaneShare[];
}> {
  const some = proposals.slice(0, SHARES_MAX);
  const of = <T>(pick: (one: ShareProposal) => T): T[] => some.map(pick);
  const { rows } = await db.query<{
    written: readonly string[];
    others: readonly string[];
    rows: readonly LaneShare[];
  }>({
    name: 'propose-shares',
    text: PROPOSE,
    values: [
      epoch,
      of(({ lane }) => lane),
      of(({ etag }) => etag),
      of(({ replaces }) => replaces),
      of(({ parts }) => JSON.stringify(parts)),
      of(({ circuit }) => circuit?.id ?? null),
      of(({ circuit }) => circuit?.by ?? null),
      of(({ circuit }) => circuit?.forMs ?? null),
      of(({ circuit }) => circuit?.opens ?? 0),
      of(
        ({ circuit }) =>
          circuit?.reason.replaceAll('\0', '').slice(0, REASON_MAX).toWellFormed() ?? null,
      ),
    ],
  });
  const [found] = rows;
  if (found === undefined) throw new Error('no answer to what was proposed of lanes');
  return { written: new Set(found.written), others: found.others, current: found.rows };
}

/** For upkeep: lanes that nobody has shared anew for seven days and of which no run holds a part. How many rows went. */
export async function forgetOldShares(db: Queryable): Promise<number> {
  // The time is asked again when the row is locked: it may have been shared anew meanwhile.
  const { rowCount } = await db.query(
    `delete from lane_share where changed_at < now() - ${FORGET_AFTER} and lane in (
       select s.lane from lane_share s where s.changed_at < now() - ${FORGET_AFTER}
         and not exists (select 1 from worker w where s.shares ? w.epoch::text)
       order by s.lane limit ${FORGET_MAX} for update skip locked)`,
  );
  return rowCount ?? 0;
}
