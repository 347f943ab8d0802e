// Removes what is older than the operator wants to keep, in bounded steps with pauses between them, tenant by tenant in
// turn, kind after kind. Everything is in the rows: a stop or a crash loses nothing, and several processes may do it at
// the same time, since what one holds the others leave out.
import { setTimeout as sleep } from 'node:timers/promises';
import type { Logger } from '../log.ts';
import { forgetReaders } from '../queue/forget-readers.ts';
import { firstIdAt } from '../access/request-log.ts';
import { isBackedUp } from '../store/backup-lock.ts';
import { LOWEST_ID } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';
import {
  EXISTS_MAIL,
  stepMail,
  StillWanted,
  type MailDependencies,
  type MailKind,
} from './mail.ts';
import { retentionKinds, type RetentionKind, type RetentionPolicy } from './policy.ts';
import { existsRows, stepRows, type RowKind } from './rows.ts';
import type { Batch, Place, Step } from './step.ts';

export interface RetentionDependencies extends MailDependencies {
  readonly log: Logger;
  readonly now: () => Date | Promise<Date>;
}

/** By the clock of this machine or of the database's, whichever is behind: one that is fast alone makes nothing old. */
export const earlierNow = (pool: Store['pool']) => async (): Promise<Date> => {
  const { rows } = await pool.query<{ ms: number }>(
    'select (extract(epoch from clock_timestamp()) * 1000)::float8 as ms',
  );
  return new Date(Math.min(Date.now(), rows[0]!.ms));
};

/** What one tenant has of one kind that was removed, or would be. */
export interface RetentionRow {
  readonly tenantId: string;
  readonly kind: RetentionKind;
  /** What is older than this goes. */
  readonly before: Date;
  readonly count: number;
  readonly bytes: number;
  readonly oldest: Date;
  readonly newest: Date;
  /** Of sent and received emails: how many of exactly these are unsent or still wanted. It ends with an error otherwise. */
  readonly unsent: 0;
}

export interface RetentionRun {
  /** In the order of kinds, then of tenants. */
  readonly rows: readonly RetentionRow[];
  /** Whether it was ended before everything was looked at. */
  readonly isCut: boolean;
}

export interface RetentionOptions {
  /** Only look. */
  readonly isDry: boolean;
  readonly signal: AbortSignal;
  /** Null: all. */
  readonly tenantId?: string | null;
  readonly kind?: RetentionKind | null;
  /** Told after each step: how many were removed, or found, so far. */
  readonly onStep?: (count: number) => void;
  /** How long it goes on with one kind before the next. */
  readonly kindMaxMs?: number;
  /** Where earlier runs ended, by kind and tenant: emails that they left out are not looked at again. */
  readonly places?: Map<string, Place>;
}

/** Emails that one transaction looks at, and so removes at most. */
const EMAILS_PER_STEP = 500;
const ROWS_PER_STEP = 2_000;
/** Where a step took longer, or failed, the tenant's next one is smaller, down to this: emails may have much hanging on them. */
const STEP_MAX_MS = 1_000;
const PER_STEP_MIN = 10;
/** Of one run: one tenant's must not hold up the others, but where nothing works it ends. */
const FAILURES_MAX = 20;
const PAUSE_MIN_MS = 20;
/** A step is followed by a pause of so many times its own length: other work is slowed by less than its share. */
const PAUSE_SHARE = 1;
const PAUSE_MAX_MS = 5_000;
/** Of one run; those with the lowest ids. */
const TENANTS_MAX = 100_000;
/** Places that are remembered. */
const PLACES_MAX = 100_000;
const EPOCH = '1970-01-01 00:00:00+00';

/**
 * Removes what is old, or says what it would remove. Throws a StillWanted before it removes what anybody waits for. A tenant
 * whose step fails however small it is waits for the next run; the first such error is thrown when all else is done.
 */
export async function retain(
  d: RetentionDependencies,
  options: RetentionOptions,
): Promise<RetentionRun> {
  const rows: RetentionRow[] = [];
  let isCut = false;
  let total = 0;
  const errors: unknown[] = [];
  for (const kind of retentionKinds) {
    if (options.kind !== undefined && options.kind !== null && options.kind !== kind) continue;
    const found = new Map<string, RetentionRow>();
    const since = performance.now();
    const now = await d.now();
    const tenants = await tenantsWithOld(d, kind, { now, only: options.tenantId ?? null });
    const isMail = kind in EXISTS_MAIL;
    // Behind the one that was last when time was up.
    const last = options.places?.get(kind)?.[0] ?? '';
    const turns = [
      ...tenants.filter(({ tenantId }) => tenantId > last),
      ...tenants.filter(({ tenantId }) => tenantId <= last),
    ].map((tenant) => ({
      ...tenant,
      after: options.places?.get(`${kind} ${tenant.tenantId}`) ?? null,
      max: isMail ? EMAILS_PER_STEP : ROWS_PER_STEP,
    }));
    for (let turn = turns.shift(); turn !== undefined; turn = turns.shift()) {
      const isLate = performance.now() - since > (options.kindMaxMs ?? Infinity);
      if (options.signal.aborted || isLate) {
        isCut = true;
        break;
      }
      // The blobs would stay behind.
      if (isMail && !options.isDry && (await isBackedUp(d.store.pool))) {
        d.log.warn({ kind }, 'a backup is being taken: no mail is removed before its end');
        isCut = true;
        break;
      }
      const began = performance.now();
      const { isDry, signal } = options;
      let batch: Batch;
      try {
        batch = await takeStep(d, kind, { ...turn, isDry, signal, now });
      } catch (error) {
        if (error instanceof StillWanted || isDatabaseUnavailable(error)) throw error;
        if (turn.max > PER_STEP_MIN) turns.push({ ...turn, max: smaller(turn.max, 10) });
        else if (errors.push(error) >= FAILURES_MAX) throw errors[0];
        continue;
      }
      add(found, { kind, ...turn }, batch);
      total += batch.count;
      options.onStep?.(total);
      remember(options.places, kind, [turn.tenantId, '']);
      const tookMs = performance.now() - began;
      if (batch.next !== null) {
        const max = tookMs > STEP_MAX_MS ? smaller(turn.max, 2) : turn.max;
        turns.push({ ...turn, max, after: batch.next });
        if (isMail) remember(options.places, `${kind} ${turn.tenantId}`, batch.next);
      }
      await pause(isDry ? 0 : Math.max(PAUSE_MIN_MS, tookMs * PAUSE_SHARE), signal);
    }
    rows.push(...[...found.values()].toSorted((a, b) => (a.tenantId < b.tenantId ? -1 : 1)));
    if (options.signal.aborted) break;
  }
  if (errors.length > 0) throw errors[0];
  return { rows, isCut };
}

const smaller = (max: number, by: number): number => Math.max(PER_STEP_MIN, Math.floor(max / by));

function remember(places: Map<string, Place> | undefined, key: string, place: Place): void {
  if (places === undefined) return;
  if (places.size >= PLACES_MAX) places.clear();
  places.set(key, place);
}

async function pause(ms: number, signal: AbortSignal): Promise<void> {
  if (ms <= 0 || signal.aborted) return;
  await sleep(Math.min(ms, PAUSE_MAX_MS), undefined, { signal, ref: false }).catch(() => undefined);
}

interface Tenant {
  readonly tenantId: string;
  readonly before: Date;
}

async function takeStep(
  d: RetentionDependencies,
  kind: RetentionKind,
  about: Tenant & Pick<Step, 'after' | 'max' | 'isDry' | 'now' | 'signal'>,
): Promise<Batch> {
  const step: Step = { ...about, below: firstIdAt(about.before.getTime()) };
  if (kind in EXISTS_MAIL) return stepMail(d, kind as MailKind, step);
  if (kind !== 'engagement') return stepRows(d.store.pool, kind as RowKind, step);
  return forgetReaders(d.store.pool, { ...step, after: step.after ?? [EPOCH, LOWEST_ID] });
}

function add(
  found: Map<string, RetentionRow>,
  { tenantId, kind, before }: Tenant & { readonly kind: RetentionKind },
  { count, bytes, oldest, newest }: Batch,
): void {
  if (count === 0 || oldest === null || newest === null) return;
  const known = found.get(tenantId);
  found.set(tenantId, {
    tenantId,
    kind,
    before,
    count: (known?.count ?? 0) + count,
    bytes: (known?.bytes ?? 0) + bytes,
    oldest: known === undefined || oldest < known.oldest ? oldest : known.oldest,
    newest: known === undefined || newest > known.newest ? newest : known.newest,
    unsent: 0,
  });
}

/** SQL: whether the tenant `t` may have something of the kind, over `c.before` and `c.below`. */
const existsOf = (kind: RetentionKind): string =>
  kind === 'engagement'
    ? `select 1 from engagement where tenant_id = t.id and at < c.before
        and (remote_address is not null or user_agent is not null)`
    : kind in EXISTS_MAIL
      ? EXISTS_MAIL[kind as MailKind]
      : existsRows(kind as RowKind);

/** Nobody has this id. */
const NOBODY = '';

async function tenantsWithOld(
  d: RetentionDependencies,
  kind: RetentionKind,
  { now, only }: { readonly now: Date; readonly only: string | null },
): Promise<readonly Tenant[]> {
  const policy = d.policy();
  const cutOf = (tenantId: string): Date | null => {
    const ms = policy.keptMs(tenantId, kind);
    return ms === null ? null : new Date(now.getTime() - ms);
  };
  const standard = cutOf(NOBODY);
  const own = policy.tenants.map((tenantId) => ({ tenantId, before: cutOf(tenantId) }));
  if (standard === null && own.every(({ before }) => before === null)) return [];
  const belowOf = (before: Date | null): string | null =>
    before === null ? null : firstIdAt(before.getTime());
  const { rows } = await d.store.pool.query<{ id: string; ms: number }>({
    name: `tenants-with-old-${kind}`,
    text: `select t.id, (extract(epoch from c.before) * 1000)::float8 as ms
      from tenant t
      left join unnest($1::uuid[], $2::timestamptz[], $3::uuid[]) as o (id, before, below) on o.id = t.id
      cross join lateral (
        select case when o.id is null then $4::timestamptz else o.before end as before,
          case when o.id is null then $5::uuid else o.below end as below) c
      where c.before is not null and ($6::uuid is null or t.id = $6) and exists (${existsOf(kind)})
      order by t.id limit ${TENANTS_MAX}`,
    values: [
      own.map(({ tenantId }) => tenantId),
      own.map(({ before }) => before),
      own.map(({ before }) => belowOf(before)),
      standard,
      belowOf(standard),
      only,
    ],
  });
  return rows.map(({ id, ms }) => ({ tenantId: id, before: new Date(ms) }));
}

/** A whole look, in which what was left out before has its turn again. */
const WHOLE_LOOK_MS = 86_400_000;
const KIND_MAX_MS = 60_000;
const IDLE_MS = 600_000;
/** There is more to do. */
const SOON_MS = 1_000;

const BACKUP_WAIT_MS = 60_000;
/** After the start: a clock that is wrong then is mostly put right soon. */
const START_WAIT_MS = 600_000;
/** After an edit of the file: time to see what it would remove, and to take it back. */
const EDIT_WAIT_MS = 3_600_000;
/** After the clock was set forward by more than a day; or a machine slept for as long. */
const CLOCK_WAIT_MS = 86_400_000;
const CLOCK_JUMP_MS = 86_400_000;

/** The permanent work: one run at a time, in how many milliseconds the next is due. */
export function createRetention(
  d: RetentionDependencies & {
    /** In milliseconds, by a clock that nobody sets. */
    readonly elapsedMs: () => number;
  },
): {
  run(signal: AbortSignal): Promise<number>;
} {
  let places = new Map<string, Place>();
  let lookedAt = -Infinity;
  let isBroken = false;
  let known: { readonly policy: RetentionPolicy; readonly offsetMs: number } | null = null;
  let heldUntil = d.elapsedMs() + START_WAIT_MS;

  /** For how long nothing is to be removed; 0: it may be. */
  const holdMs = async (policy: RetentionPolicy): Promise<number> => {
    const elapsedMs = d.elapsedMs();
    const next = { policy, offsetMs: (await d.now()).getTime() - elapsedMs };
    if (known !== null && next.policy !== known.policy) {
      heldUntil = Math.max(heldUntil, elapsedMs + EDIT_WAIT_MS);
      d.log.warn(
        { hours: EDIT_WAIT_MS / 3_600_000 },
        'config/retention.json was changed: it is followed later, `mailstead retention` shows what would go',
      );
    }
    if (known !== null && next.offsetMs - known.offsetMs > CLOCK_JUMP_MS) {
      heldUntil = Math.max(heldUntil, elapsedMs + CLOCK_WAIT_MS);
      d.log.error('the clock was set forward by more than a day: nothing is removed for a day');
    }
    known = next;
    return Math.max(0, heldUntil - elapsedMs);
  };

  return {
    async run(signal) {
      if (isBroken) return IDLE_MS;
      // An edit while it runs counts for the next run.
      const policy = d.policy();
      const waitMs = await holdMs(policy);
      if (waitMs > 0) return Math.min(waitMs, IDLE_MS);
      if (await isBackedUp(d.store.pool)) return BACKUP_WAIT_MS;
      if (performance.now() - lookedAt > WHOLE_LOOK_MS) {
        places = new Map();
        lookedAt = performance.now();
      }
      const began = performance.now();
      try {
        const { rows, isCut } = await retain(
          { ...d, policy: () => policy },
          { isDry: false, signal, places, kindMaxMs: KIND_MAX_MS },
        );
        if (rows.length > 0) {
          d.log.info(
            { removed: sumByKind(rows), ms: Math.round(performance.now() - began), isCut },
            'removed what was older than it is to be kept',
          );
        }
        return isCut ? SOON_MS : IDLE_MS;
      } catch (error) {
        if (!(error instanceof StillWanted)) throw error;
        isBroken = true;
        d.log.error(
          { err: error },
          'retention would have removed unsent mail; it has stopped until the next start, please report this',
        );
        return IDLE_MS;
      }
    },
  };
}

/** How many, of all tenants together. */
function sumByKind(rows: readonly RetentionRow[]): Partial<Record<RetentionKind, number>> {
  const sums: Partial<Record<RetentionKind, number>> = {};
  for (const { kind, count } of rows) sums[kind] = (sums[kind] ?? 0) + count;
  return sums;
}
