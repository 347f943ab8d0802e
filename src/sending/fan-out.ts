// Makes the emails of broadcasts, in batches: starts those whose time has come, lets tenants take turns, takes back what is
// queued of those that were canceled. Every process that runs jobs runs it; the row of the broadcast decides who is at it.
// All that remains to be done is in the database, so a stop or a crash loses nothing.
import type { Pool } from 'pg';
import { Refusal } from '../access/refusal.ts';
import type { Logger } from '../log.ts';
import type { NewEmail } from '../queue/enqueue.ts';
import { withdrawEmails } from '../queue/withdraw.ts';
import { acceptedEmails } from '../telemetry/instruments.ts';
import { findAuthorDomain, type AuthorDomain, type CompletionDependencies } from './complete.ts';
import {
  BroadcastBroken,
  isLocked,
  isRefused,
  removeBatchBlobs,
  runBatch,
  Uncomposable,
  type BatchDependencies,
} from './fan-out-batch.ts';
import { createFanOutPlans, type Queued } from './fan-out-plan.ts';

export interface FanOutDependencies
  extends BatchDependencies, Pick<CompletionDependencies, 'domains' | 'standIn'> {
  readonly log: Logger;
  /** Deliveries became ready. */
  readonly onReady: () => void;
}

export interface FanOut {
  /** One batch for each tenant whose turn it is; resolves with the milliseconds until the next turn. */
  turn(): Promise<number>;
  /** Takes back what is queued of a broadcast that was canceled, as far as that goes at once; the turns go on with it. */
  withdraw(tenantId: string, id: string): Promise<void>;
}

/** Tenants in a turn; those that have waited longest. */
const TENANTS_MAX = 50;
/** Broadcasts that start in a turn. */
const STARTS_MAX = 100;
/** Between two looks when nothing is to be done: another process may have planned or queued one. */
const IDLE_MS = 5_000;
/** After a batch that failed for a reason that is not its data. */
const PUT_OFF_MS = 10_000;
/** After a turn, as a part of its time. */
const REST = 0.25;
/** Contacts of one step back. */
const STEP = 500;
/** Steps that a call which cancels waits for. */
const STEPS_AT_ONCE = 4;

export function createFanOut(d: FanOutDependencies): FanOut {
  const { pool } = d.store;
  const plans = createFanOutPlans(pool);

  /** True: there is more to do. */
  const runOne = async (queued: Queued): Promise<boolean> => {
    try {
      const plan = await plans.get(queued);
      if (plan === null) return false;
      const caller = {
        tenantId: queued.tenantId,
        keyId: '',
        permission: 'full_access',
        domainId: null,
      } as const;
      const author = await findAuthorDomain(d, caller, plan.from.domain);
      const about = { queued, plan, author };
      const done = await batch(about, false).catch((error: unknown) => {
        // Something that cannot be made or stored: once more, each email alone, so that it fails for nobody else.
        if (!isRefused(error) && !(error instanceof Uncomposable)) throw error;
        d.log.warn(
          { err: error, broadcast_id: queued.id, tenant_id: queued.tenantId },
          'an email of a broadcast is left out',
        );
        return batch(about, true);
      });
      if (done === null) return false;
      acceptedEmails.inc({ channel: 'broadcast' }, done.emails);
      if (done.emails > 0) d.onReady();
      return !done.isOver;
    } catch (error) {
      if (error instanceof Refusal || error instanceof BroadcastBroken) {
        await fail(pool, queued, error.message);
        return false;
      }
      // First of all, and not only for other errors: a batch that takes too long looks like a database that is away, and
      // must not keep the others from their turn. Where it is away, this says so.
      await putOff(pool, queued);
      if (!isLocked(error)) {
        d.log.error(
          { err: error, broadcast_id: queued.id, tenant_id: queued.tenantId },
          'a batch of a broadcast failed',
        );
      }
      return false;
    }
  };

  const batch = async (
    about: {
      readonly queued: Queued;
      readonly plan: NonNullable<Awaited<ReturnType<typeof plans.get>>>;
      readonly author: AuthorDomain;
    },
    isCareful: boolean,
  ): ReturnType<typeof runBatch> => {
    const withBlobs: NewEmail[] = [];
    let isMade = false;
    try {
      return await d.store.transact(async (client) => {
        const done = await runBatch(d, { ...about, client, isCareful, withBlobs });
        isMade = true;
        return done;
      });
    } catch (error) {
      // Not when the commit failed: nobody knows then whether the rows are there. Blobs without one are collected.
      if (!isMade) await removeBatchBlobs(d, withBlobs);
      throw error;
    }
  };

  const withdrawStep = async (tenantId: string, id: string): Promise<boolean> =>
    d.store.transact(async (client) => {
      const { rows } = await client.query<{ contact_id: string | null; email_id: string | null }>({
        name: 'withdrawn-recipients',
        text: `with b as (
            select cursor_id from broadcast
            where tenant_id = $1 and id = $2 and status = 'canceled' and cursor_id is not null
            for update skip locked
          )
          select r.contact_id, r.email_id from b
          left join broadcast_recipient r
            on r.tenant_id = $1 and r.broadcast_id = $2 and r.contact_id <= b.cursor_id
          order by r.contact_id desc limit ${STEP + 1}`,
        values: [tenantId, id],
      });
      await withdrawEmails(
        client,
        tenantId,
        rows.slice(0, STEP).flatMap((row) => row.email_id ?? []),
      );
      const next = rows[STEP]?.contact_id ?? null;
      // Where another process is at it, there are no rows, and the cursor is its own.
      if (rows.length > 0) {
        await client.query({
          name: 'move-withdrawal',
          text: 'update broadcast set cursor_id = $3 where tenant_id = $1 and id = $2',
          values: [tenantId, id, next],
        });
      }
      return next !== null;
    });

  /** True: there is more to take back. A fault is nobody else's: it is canceled, and the next turn goes on with it. */
  const withdraw = async (tenantId: string, id: string): Promise<boolean> => {
    try {
      for (let step = 0; step < STEPS_AT_ONCE; step++) {
        if (!(await withdrawStep(tenantId, id))) return false;
      }
      return true;
    } catch (err) {
      d.log.warn(
        { err, broadcast_id: id, tenant_id: tenantId },
        'taking back a broadcast stopped; it goes on later',
      );
      return false;
    }
  };

  return {
    async turn() {
      const startedAt = performance.now();
      await startDue(pool);
      let hasMore = false;
      for (const { tenant_id: tenantId, id } of await findWithdrawn(pool)) {
        hasMore = (await withdraw(tenantId, id)) || hasMore;
      }
      for (const queued of await findQueued(pool)) hasMore = (await runOne(queued)) || hasMore;
      // What is sent beside it wants the processors, too.
      return hasMore ? (performance.now() - startedAt) * REST : untilNext(pool);
    },
    async withdraw(tenantId, id) {
      await withdraw(tenantId, id);
    },
  };
}

/** By the database's clock, as everything that is due. */
async function startDue(pool: Pool): Promise<void> {
  await pool.query({
    name: 'start-broadcasts',
    text: `update broadcast b set status = 'queued', queued_at = now(), updated_at = now()
      from (select tenant_id, id from broadcast where status = 'scheduled' and scheduled_at <= now()
        order by scheduled_at limit ${STARTS_MAX} for update skip locked) due
      where b.tenant_id = due.tenant_id and b.id = due.id and b.status = 'scheduled'`,
  });
}

/** One of each tenant: the one that has waited longest. */
async function findQueued(pool: Pool): Promise<readonly Queued[]> {
  const { rows } = await pool.query<{ tenant_id: string; id: string; queued_ms: string }>({
    name: 'queued-broadcasts',
    text: `select * from (
        select distinct on (tenant_id) tenant_id, id, next_turn_at,
          (extract(epoch from queued_at) * 1000)::bigint::text as queued_ms
        from broadcast
        where status = 'queued' and (next_turn_at is null or next_turn_at <= now())
        order by tenant_id, next_turn_at nulls first, id) of_tenant
      order by next_turn_at nulls first limit ${TENANTS_MAX}`,
  });
  return rows.map((row) => ({
    tenantId: row.tenant_id,
    id: row.id,
    queuedMs: row.queued_ms,
  }));
}

/** One of each tenant. */
async function findWithdrawn(
  pool: Pool,
): Promise<readonly { readonly tenant_id: string; readonly id: string }[]> {
  const { rows } = await pool.query<{ tenant_id: string; id: string }>({
    name: 'withdrawn-broadcasts',
    text: `select distinct on (tenant_id) tenant_id, id from broadcast
      where status = 'canceled' and cursor_id is not null
      order by tenant_id, updated_at limit ${TENANTS_MAX}`,
  });
  return rows;
}

/** Until something is planned or put off, but not longer than IDLE_MS. */
async function untilNext(pool: Pool): Promise<number> {
  const { rows } = await pool.query<{ ms: string | null }>({
    name: 'next-broadcast',
    text: `select ceil(extract(epoch from least(
        (select min(scheduled_at) from broadcast where status = 'scheduled'),
        (select min(next_turn_at) from broadcast where status = 'queued')) - now()) * 1000)::bigint::text as ms`,
  });
  return Math.min(IDLE_MS, Math.max(0, Number(rows[0]?.ms ?? IDLE_MS)));
}

async function fail(pool: Pool, { tenantId, id }: Queued, failure: string): Promise<void> {
  await pool.query({
    text: `update broadcast set status = 'failed', failure = $3, updated_at = now()
      where tenant_id = $1 and id = $2 and status = 'queued'`,
    values: [tenantId, id, failure],
  });
}

async function putOff(pool: Pool, { tenantId, id }: Queued): Promise<void> {
  await pool.query({
    text: `update broadcast set next_turn_at = now() + $3 * interval '1 millisecond'
      where tenant_id = $1 and id = $2 and status = 'queued'`,
    values: [tenantId, id, PUT_OFF_MS],
  });
}
