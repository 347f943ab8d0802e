// Worker runs and what they hold. A run has an epoch (a UUID made at its start), one heartbeat row,
// and the deliveries it claimed. When a run is gone, what it held is given back, settled from its
// journal, or declared unknown: never silently sent again. What was under way at several such ends is tried apart
// (suspect.ts), and at the fifth set aside.
import { hostname } from 'node:os';
import { SUSPECT_INTERRUPTIONS } from '../store/delivery.ts';
import type { Store } from '../store/orm.ts';
import { UNKNOWN_DELAY_MS } from './backoff.ts';
import type { Queryable } from './enqueue.ts';
import { DEFAULT_OUTCOMES, type OutcomePolicy } from './outcome-policy.ts';
import { NO_EVIDENCE, settle, showEmails, type Settlement } from './settle.ts';
import { admitSuspects } from './suspect.ts';

export interface Held {
  readonly tenantId: string;
  readonly emailId: string;
  readonly position: number;
  readonly attempt: number;
  readonly recipientCount: number;
  /** How many of its attempts in a row ended with the worker; absent where nobody asked. */
  readonly interruptions?: number;
  /** When it was let in as a suspect (suspect.ts); null: never. */
  readonly letInMs?: number | null;
}

/** What the journal of a lost run knows about one attempt. */
export type Trace =
  | { readonly phase: 'before_dot' }
  | { readonly phase: 'dot' }
  | { readonly phase: 'settled'; readonly settlement: Settlement };

const CHUNK = 500;
/** Looks in a row at which nothing could be decided. */
const IDLE_MAX = 3;
/** SQL: not an orderly end, and not the first. */
const IS_SUSPECTED = `($6::boolean and d.interruptions + 1 >= ${SUSPECT_INTERRUPTIONS})`;
/** SQL text: without quotes. */
const TRIED_APART =
  'The delivery worker stopped more than once while this was under way; it is tried apart from other mail.';

/** The pause before a suspect is tried again grows by this with every interruption, so that others come first. */
const INTERRUPTED_DELAY_MS = 10_000;
/** A message that was under way at this many ends of a worker is set aside at the next one. */
const INTERRUPTIONS_MAX = 4;

/** Registers a worker run, or says that it is still there. */
export async function beat(db: Queryable, epoch: string): Promise<void> {
  await db.query({
    name: 'beat',
    text: `insert into worker (epoch, host, pid, started_at, heartbeat_at)
      values ($1, $2, $3, now(), now())
      on conflict (epoch) do update set heartbeat_at = now()`,
    values: [epoch, hostname(), process.pid],
  });
}

/**
 * Says that a registered run is still there. False: it was taken for lost meanwhile, and what it held belongs to others;
 * it must neither claim nor send anything more.
 */
export async function renew(db: Queryable, epoch: string): Promise<boolean> {
  const { rowCount } = await db.query({
    name: 'renew',
    text: 'update worker set heartbeat_at = now() where epoch = $1',
    values: [epoch],
  });
  return rowCount === 1;
}

/** Takes a worker run off the list; call when it holds nothing any more. */
export async function retire(db: Queryable, epoch: string): Promise<void> {
  await db.query({ text: 'delete from worker where epoch = $1', values: [epoch] });
}

/** The runs that hold deliveries but have been silent for longer than `silenceMs`. */
export async function silentRuns(db: Queryable, silenceMs: number): Promise<readonly string[]> {
  const { rows } = await db.query<{ epoch: string }>({
    text: `
      select epoch::text from worker where heartbeat_at < now() - $1 * interval '1 millisecond'
      union
      select distinct d.lease_epoch::text from delivery d
      where d.state = 'in_flight' and not exists (select 1 from worker w where w.epoch = d.lease_epoch)`,
    values: [silenceMs],
  });
  return rows.map(({ epoch }) => epoch);
}

/** What a run holds according to the database, suspects first, at most `max`. */
export async function heldBy(db: Queryable, epoch: string, max: number): Promise<readonly Held[]> {
  const { rows } = await db.query<{
    tenant_id: string;
    email_id: string;
    position: number;
    attempts: number;
    recipient_count: number;
    interruptions: number;
    let_in_ms: number | null;
  }>({
    text: `select d.tenant_id, d.email_id, d.position, d.attempts, e.recipient_count, d.interruptions,
        (extract(epoch from d.let_in_at) * 1000)::float8 as let_in_ms
      from delivery d join email e on e.tenant_id = d.tenant_id and e.id = d.email_id
      where d.state = 'in_flight' and d.lease_epoch = $1
      order by d.interruptions desc limit $2`,
    values: [epoch, max],
  });
  return rows.map((row) => ({
    tenantId: row.tenant_id,
    emailId: row.email_id,
    position: row.position,
    attempt: row.attempts,
    recipientCount: row.recipient_count,
    interruptions: row.interruptions,
    letInMs: row.let_in_ms,
  }));
}

/**
 * Gives claimed deliveries back, to be claimed again. `begun` says whether the attempt may have reached a peer
 * (before the final dot): then it stays in the history as interrupted, and what was interrupted before is tried
 * apart. How many were still held.
 */
export async function release(
  store: Store,
  epoch: string,
  options: {
    readonly held: readonly Held[];
    readonly begun: boolean;
    /** The worker was asked to stop: nothing that speaks against the message. */
    readonly orderly?: boolean;
  },
): Promise<number> {
  const { held, begun, orderly = false } = options;
  if (held.length === 0) return 0;
  const keys = [
    held.map(({ tenantId }) => tenantId),
    held.map(({ emailId }) => emailId),
    held.map(({ position }) => position),
    held.map(({ attempt }) => attempt),
    epoch,
    begun && !orderly,
  ];
  return store.transact(async (client) => {
    const attempts = begun
      ? `update attempt a set finished_at = now(), outcome = '${orderly ? 'released' : 'interrupted'}', cause = 'worker_lost',
           reply = 'The worker stopped before the message was complete; it is tried again.' from`
      : 'delete from attempt a using';
    const { rows } = await client.query<{ email_id: string }>(
      `with back as (
         update delivery d
         set state = case when ${IS_SUSPECTED} then 'deferred' else 'ready' end,
           lease_epoch = null,
           due_at = now() + case when ${IS_SUSPECTED}
             then (d.interruptions + 1 - ${SUSPECT_INTERRUPTIONS}) * interval '${INTERRUPTED_DELAY_MS} milliseconds'
             else interval '0' end,
           interruptions = d.interruptions + $6::boolean::int,
           let_in_at = case when ${IS_SUSPECTED} then null else d.let_in_at end,
           last_cause = case when ${IS_SUSPECTED} then 'worker_lost' else d.last_cause end,
           last_reply = case when ${IS_SUSPECTED} then '${TRIED_APART}' else d.last_reply end
           ${begun ? '' : ', attempts = d.attempts - 1'}
         from unnest($1::uuid[], $2::uuid[], $3::smallint[], $4::integer[])
           as k (tenant_id, email_id, position, number)
         where d.tenant_id = k.tenant_id and d.email_id = k.email_id and d.position = k.position
           and d.state = 'in_flight' and d.lease_epoch = $5 and d.attempts = k.number
         returning d.tenant_id, d.email_id, d.position, k.number
       )
       ${attempts} back
       where a.tenant_id = back.tenant_id and a.email_id = back.email_id
         and a.position = back.position and a.number = back.number
       returning a.email_id`,
      keys,
    );
    const changed = new Set(rows.map((row) => row.email_id));
    await showEmails(
      client,
      held.filter(({ emailId }) => changed.has(emailId)),
    );
    return rows.length;
  });
}

const isSuspect = ({ interruptions = 0 }: Held): boolean => interruptions >= SUSPECT_INTERRUPTIONS;

/**
 * Decides everything that a lost run held. `traceOf` reads its journal; null means that there is no
 * journal to read, and then every attempt counts as lost after the final dot. How many were which.
 */
export async function recover(
  store: Store,
  epoch: string,
  traceOf: ((held: Held) => Trace) | null,
  policy: OutcomePolicy = DEFAULT_OUTCOMES,
): Promise<{ released: number; settled: number; unknown: number }> {
  const counts = { released: 0, settled: 0, unknown: 0 };
  let idle = 0;
  for (;;) {
    const held = await heldBy(store.pool, epoch, CHUNK);
    if (held.length === 0) break;
    const back: Held[] = [];
    const results: Settlement[] = [];
    // Crashes come soon after what causes them: a slow one that was let in before is not to blame.
    const lastMs = Math.max(...held.filter(isSuspect).map(({ letInMs }) => letInMs ?? 0));
    for (const one of held) {
      const trace: Trace = traceOf === null ? { phase: 'dot' } : traceOf(one);
      const isGuilty =
        (one.interruptions ?? 0) >= INTERRUPTIONS_MAX && (one.letInMs ?? 0) >= lastMs;
      if (trace.phase === 'before_dot' && isGuilty) {
        // It may be what ends the workers: the queue moves on without it.
        counts.settled += 1;
        results.push({
          ...one,
          epoch,
          verdict: 'failed',
          delayMs: 0,
          isLaneFault: false,
          evidence: {
            ...NO_EVIDENCE,
            cause: 'worker_lost',
            reply: 'The worker stopped again and again while it worked on this message.',
          },
        });
      } else if (trace.phase === 'before_dot') {
        back.push(one);
      } else if (trace.phase === 'settled') {
        counts.settled += 1;
        results.push({ ...trace.settlement, ...one, epoch });
      } else {
        counts.unknown += 1;
        results.push({
          ...one,
          epoch,
          verdict: 'unknown',
          delayMs: UNKNOWN_DELAY_MS,
          isLaneFault: false,
          evidence: {
            ...NO_EVIDENCE,
            cause: 'unknown_after_dot',
            stage: 'dot',
            reply:
              'The worker stopped after the message was complete and before the answer was read.',
          },
        });
      }
    }
    const released = await release(store, epoch, { held: back, begun: true });
    const { count } = await settle(store, results, policy);
    counts.released += released;
    // Somebody else may be deciding the same: then the next look finds less.
    idle = released + count === 0 ? idle + 1 : 0;
    if (idle === IDLE_MAX) throw new Error('what a lost run held cannot be decided');
  }
  await retire(store.pool, epoch);
  await admitSuspects(store.pool);
  return counts;
}
