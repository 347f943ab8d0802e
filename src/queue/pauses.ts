// What the operator has paused: a lane, a destination, a tenant, or everything. Workers read it and do not claim what
// is paused; no delivery is changed, so resuming is one row less. Attempts under way end as they would.
import { mxDestination, readDestination } from '../store/destination.ts';
import { newId } from '../store/id.ts';
import type { Queryable } from './enqueue.ts';

export type PauseKind = 'lane' | 'destination' | 'tenant' | 'all';

/** What is paused now. */
export interface Pauses {
  readonly all: boolean;
  readonly lanes: ReadonlySet<string>;
  /** In the words of store/destination.ts. */
  readonly destinations: ReadonlySet<string>;
  /** Ids. */
  readonly tenants: ReadonlySet<string>;
}

export const NO_PAUSES: Pauses = {
  all: false,
  lanes: new Set(),
  destinations: new Set(),
  tenants: new Set(),
};

export interface Pause {
  readonly id: string;
  readonly kind: PauseKind;
  /** Empty for `all`. */
  readonly name: string;
  readonly reason: string | null;
  readonly pausedAt: Date;
  /** Null: until it is resumed. */
  readonly until: Date | null;
}

/** At a time. */
export const PAUSES_MAX = 1_000;

interface PauseRow {
  id: string;
  kind: PauseKind;
  name: string;
  reason: string | null;
  paused_ms: number;
  until_ms: number | null;
}

const COLUMNS = `id, kind, name, reason, (extract(epoch from paused_at) * 1000)::float8 as paused_ms,
  (extract(epoch from until) * 1000)::float8 as until_ms`;
const HOLDS = `(until is null or until > now())`;

const readRow = (row: PauseRow): Pause => ({
  id: row.id,
  kind: row.kind,
  name: row.name,
  reason: row.reason,
  pausedAt: new Date(row.paused_ms),
  until: row.until_ms === null ? null : new Date(row.until_ms),
});

/** What is paused by now, by the database's clock. */
export async function readPauses(db: Queryable): Promise<Pauses> {
  const pauses = await listPauses(db);
  const named = (kind: PauseKind): ReadonlySet<string> =>
    new Set(pauses.filter((pause) => pause.kind === kind).map(({ name }) => name));
  return {
    all: pauses.some(({ kind }) => kind === 'all'),
    lanes: named('lane'),
    destinations: named('destination'),
    tenants: named('tenant'),
  };
}

/** All that hold now, the newest first; at most PAUSES_MAX. */
export async function listPauses(db: Queryable): Promise<readonly Pause[]> {
  const { rows } = await db.query<PauseRow>({
    name: 'pauses',
    text: `select ${COLUMNS} from pause where ${HOLDS} order by paused_at desc, id desc limit ${PAUSES_MAX}`,
  });
  return rows.map(readRow);
}

export interface NewPause {
  readonly kind: PauseKind;
  readonly name: string;
  readonly reason: string | null;
  readonly until: Date | null;
}

/**
 * Pauses it; what was paused before keeps its id and gets the new reason and end. Null: there are PAUSES_MAX others, and
 * nothing was written. Pauses whose time is over are removed on the way.
 */
export async function createPause(db: Queryable, pause: NewPause): Promise<Pause | null> {
  await db.query(`delete from pause where not ${HOLDS}`);
  const { rows } = await db.query<PauseRow>(
    `insert into pause (id, kind, name, reason, paused_at, until)
     select $1::uuid, $2, $3, $4, now(), $5::timestamptz
     where (select count(*) from pause where (kind, name) <> ($2, $3)) < ${PAUSES_MAX}
     on conflict (kind, name) do update
       set reason = excluded.reason, until = excluded.until, paused_at = excluded.paused_at
     returning ${COLUMNS}`,
    [newId(), pause.kind, storedName(pause), pause.reason, pause.until],
  );
  return rows[0] === undefined ? null : readRow(rows[0]);
}

/** As deliveries and workers spell it: the default pool has no name there. */
function storedName({ kind, name }: NewPause): string {
  if (kind === 'all') return '';
  const destination = readDestination(name);
  return kind === 'destination' && destination.kind === 'mx'
    ? mxDestination(destination.domain, destination.pool)
    : name;
}

/** Resumes; the pause that ended, or null when there is none. */
export async function removePause(db: Queryable, id: string): Promise<Pause | null> {
  const { rows } = await db.query<PauseRow>(
    `delete from pause where id = $1 returning ${COLUMNS}`,
    [id],
  );
  return rows[0] === undefined ? null : readRow(rows[0]);
}
