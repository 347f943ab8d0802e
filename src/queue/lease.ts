// Worker runs and what they hold. A run has an epoch (a UUID made at its start), one heartbeat row,
// and the deliveries it claimed. When a run is gone, what it held is given back, settled from its
// journal, or declared unknown: never silently sent again.
import { hostname } from 'node:os';
import type { Store } from '../store/orm.ts';
import type { Queryable } from './enqueue.ts';
import { NO_EVIDENCE, settle, showEmails, type Settlement } from './settle.ts';

export interface Held {
  readonly tenantId: string;
  readonly emailId: string;
  readonly position: number;
  readonly attempt: number;
  readonly recipientCount: number;
  /** How many of its attempts ended with the worker; absent where nobody asked. */
  readonly interruptions?: number;
}

/** What the journal of a lost run knows about one attempt. */
export type Trace =
  | { readonly phase: 'before_dot' }
  | { readonly phase: 'dot' }
  | { readonly phase: 'settled'; readonly settlement: Settlement };

/** Long enough that a receiver that did accept has the message in its queue or mailbox. */
const UNKNOWN_DELAY_MS = 20 * 60_000;
const CHUNK = 500;

/** The pause before what was interrupted is tried again grows by this with every interruption. */
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

/** What a run holds according to the database, in no particular order, at most `max`. */
export async function heldBy(db: Queryable, epoch: string, max: number): Promise<readonly Held[]> {
  const { rows } = await db.query<{
    tenant_id: string;
    email_id: string;
    position: number;
    attempts: number;
    recipient_count: number;
    interruptions: number;
  }>({
    text: `select d.tenant_id, d.email_id, d.position, d.attempts, e.recipient_count,
        (select count(*)::int from attempt a where a.tenant_id = d.tenant_id
          and a.email_id = d.email_id and a.position = d.position
          and a.outcome = 'interrupted') as interruptions
      from delivery d join email e on e.tenant_id = d.tenant_id and e.id = d.email_id
      where d.state = 'in_flight' and d.lease_epoch = $1 limit $2`,
    values: [epoch, max],
  });
  return rows.map((row) => ({
    tenantId: row.tenant_id,
    emailId: row.email_id,
    position: row.position,
    attempt: row.attempts,
    recipientCount: row.recipient_count,
    interruptions: row.interruptions,
  }));
}

/**
 * Gives claimed deliveries back, to be claimed again. `begun` says whether the attempt may have reached a peer
 * (before the final dot): then it stays in the history as interrupted, and what was interrupted before waits
 * a little. How many were still held.
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
    held.map(({ interruptions = 0 }) => (begun ? interruptions * INTERRUPTED_DELAY_MS : 0)),
    epoch,
  ];
  return store.transact(async (client) => {
    const attempts = begun
      ? `update attempt a set finished_at = now(), outcome = '${orderly ? 'released' : 'interrupted'}', cause = 'worker_lost',
           reply = 'The worker stopped before the message was complete; it is tried again.' from`
      : 'delete from attempt a using';
    const { rowCount } = await client.query(
      `with back as (
         update delivery d
         set state = 'ready', lease_epoch = null,
           due_at = now() + k.delay_ms * interval '1 millisecond'
           ${begun ? '' : ', attempts = d.attempts - 1'}
         from unnest($1::uuid[], $2::uuid[], $3::smallint[], $4::integer[], $5::bigint[])
           as k (tenant_id, email_id, position, number, delay_ms)
         where d.tenant_id = k.tenant_id and d.email_id = k.email_id and d.position = k.position
           and d.state = 'in_flight' and d.lease_epoch = $6 and d.attempts = k.number
         returning d.tenant_id, d.email_id, d.position, k.number
       )
       ${attempts} back
       where a.tenant_id = back.tenant_id and a.email_id = back.email_id
         and a.position = back.position and a.number = back.number`,
      keys,
    );
    await showEmails(client, held);
    return rowCount ?? 0;
  });
}

/**
 * Decides everything that a lost run held. `traceOf` reads its journal; null means that there is no
 * journal to read, and then every attempt counts as lost after the final dot. How many were which.
 */
export async function recover(
  store: Store,
  epoch: string,
  traceOf: ((held: Held) => Trace) | null,
): Promise<{ released: number; settled: number; unknown: number }> {
  const counts = { released: 0, settled: 0, unknown: 0 };
  for (;;) {
    const held = await heldBy(store.pool, epoch, CHUNK);
    if (held.length === 0) break;
    const back: Held[] = [];
    const results: Settlement[] = [];
    for (const one of held) {
      const trace: Trace = traceOf === null ? { phase: 'dot' } : traceOf(one);
      if (trace.phase === 'before_dot' && (one.interruptions ?? 0) >= INTERRUPTIONS_MAX) {
        // It may be what ends the workers: the queue moves on without it.
        counts.settled += 1;
        results.push({
          ...one,
          epoch,
          verdict: 'failed',
          delayMs: 0,
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
    const { count } = await settle(store, results);
    counts.released += released;
    if (released + count === 0) throw new Error('what a lost run held cannot be decided');
  }
  await retire(store.pool, epoch);
  return counts;
}

export { UNKNOWN_DELAY_MS };
