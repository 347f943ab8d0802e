// The appliance itself: whether anybody delivers, whether the clock's sweep runs, what waits for too long, what was given up,
// and whether webhooks are told in time.
import type { Pool } from 'pg';
import { firstIdAt } from '../access/request-log.ts';
import { IS_DEAD, readQueue } from '../queue/overview.ts';
import { readFact } from '../store/appliance-facts.ts';
import { bad, info, ok, type Finding } from './finding.ts';
import type { Surroundings } from './surroundings.ts';

const MINUTE_MS = 60_000;
const DAY_MS = 86_400_000;
const OLDEST_WARN_MS = 10 * MINUTE_MS;
const OLDEST_ERROR_MS = 60 * MINUTE_MS;
/** The sweep runs every 30 s. */
const OVERDUE_WARN_MS = 3 * MINUTE_MS;
const OVERDUE_ERROR_MS = 15 * MINUTE_MS;
const OUTBOX_WARN_MS = 5 * MINUTE_MS;
const OUTBOX_ERROR_MS = 60 * MINUTE_MS;
const OUTBOX_LOOKED_AT = 10_000;
const DEAD_LOOKED_AT = 20_000;
const DEAD_SHOWN = 10;
/** A worker says every few seconds that it is there. */
const SILENT_S = 60;

export async function checkQueue(pool: Pool): Promise<readonly Finding[]> {
  const queue = await readQueue(pool);
  const { ready } = queue.totals;
  const { rows } = await pool.query<{ silent: number; overdue_ms: number | null }>(
    `select (select count(*)::integer from worker
        where heartbeat_at < now() - interval '${SILENT_S} seconds') as silent,
      (select (extract(epoch from now() - due_at) * 1000)::float8 from delivery
        where state in ('deferred', 'unknown') order by due_at limit 1) as overdue_ms`,
  );
  const { silent, overdue_ms: overdueMs } = rows[0]!;
  const oldestMs =
    queue.oldestDueAt === null ? null : queue.at.getTime() - queue.oldestDueAt.getTime();
  const isPaused = queue.pauses.some(({ kind }) => kind === 'all');
  return [
    judgeWorkers({ alive: queue.workers, silent, ready }),
    judgeOldest({ oldestMs, ready, isPaused, isBlocked: queue.blocked.length > 0 }),
    judgeSweep(overdueMs),
  ];
}

function judgeWorkers(d: { alive: number; silent: number; ready: number }): Finding {
  const about = ['appliance', 'workers'] as const;
  const detail = { alive: d.alive, silent: d.silent };
  if (d.alive === 0) {
    return bad('error', about, {
      message: 'No delivery worker has been heard of within the last minute, so no mail leaves.',
      advice: 'Start a process with the role `delivery`, and see in its log why it ended.',
      detail,
    });
  }
  if (d.silent > 0) {
    return bad('warning', about, {
      message: `${d.silent} delivery workers are silent and not yet taken for lost; what they hold waits.`,
      advice: 'See that a process with the role `jobs` runs: it decides what lost workers held.',
      detail,
    });
  }
  return ok(about, `${d.alive} delivery workers are at work.`, detail);
}

function judgeOldest(d: {
  readonly oldestMs: number | null;
  readonly ready: number;
  readonly isPaused: boolean;
  readonly isBlocked: boolean;
}): Finding {
  const about = ['appliance', 'oldest_ready'] as const;
  const detail = { ready: d.ready, oldest_ms: d.oldestMs };
  if (d.oldestMs === null || d.oldestMs < OLDEST_WARN_MS) {
    return ok(about, 'No mail that is ready has waited for long.', detail);
  }
  const message = `The oldest delivery that is ready has waited for ${Math.round(d.oldestMs / MINUTE_MS)} minutes.`;
  if (d.isPaused) {
    return info(about, `${message} Everything is paused.`, {
      advice: 'Resume it when the reason is gone: `DELETE /queue/pauses/{id}`.',
      detail,
    });
  }
  return bad(d.oldestMs < OLDEST_ERROR_MS ? 'warning' : 'error', about, {
    message,
    advice: d.isBlocked
      ? 'See what `port25_out` says.'
      : 'Look at `GET /queue` for the lane or tenant where it waits and what limits it.',
    detail,
  });
}

function judgeSweep(overdueMs: number | null): Finding {
  const about = ['appliance', 'sweep'] as const;
  const late = Math.round(overdueMs ?? 0);
  const detail = { overdue_ms: Math.max(late, 0) };
  if (late < OVERDUE_WARN_MS)
    return ok(about, 'What waits for a time is woken when it is due.', detail);
  return bad(late < OVERDUE_ERROR_MS ? 'warning' : 'error', about, {
    message: `A retry has been due for ${Math.round(late / MINUTE_MS)} minutes and nobody woke it: the sweep does not run.`,
    advice: 'Start a process with the role `jobs`, or see in its log why its sweep cannot finish.',
    detail,
  });
}

/** What was given up within the last day without an answer of the recipient's host that says why. */
export async function checkDeadLetters(
  pool: Pool,
  d: { readonly now: Date; readonly lifetimeMs: number },
): Promise<readonly Finding[]> {
  const about = ['appliance', 'dead_letters'] as const;
  const since = new Date(d.now.getTime() - DAY_MS);
  const { rows } = await pool.query<{ email_id: string; count: number }>(
    `with dead as (
      select tenant_id, email_id, position, attempts, expires_at from delivery
      where ${IS_DEAD} and email_id >= $1 order by tenant_id, email_id limit ${DEAD_LOOKED_AT}
    )
    select d.email_id, count(*) over ()::integer as count from dead d
    left join attempt a on a.tenant_id = d.tenant_id and a.email_id = d.email_id
      and a.position = d.position and a.number = d.attempts
    where coalesce(a.finished_at, d.expires_at) between $2 and now()
    order by d.email_id desc limit ${DEAD_SHOWN}`,
    [firstIdAt(since.getTime() - d.lifetimeMs - DAY_MS), since],
  );
  const count = rows[0]?.count ?? 0;
  if (count === 0) return [ok(about, 'Nothing was given up within the last day.', { count })];
  return [
    bad('warning', about, {
      message: `${count} deliveries were given up within the last day without an answer that says why.`,
      advice:
        'See why with `explain <email-id>`, mend it, and send them again with POST /emails/{id}/release.',
      detail: { count, emails: rows.map(({ email_id }) => email_id) },
    }),
  ];
}

export async function checkOutbox(pool: Pool): Promise<readonly Finding[]> {
  const about = ['appliance', 'outbox'] as const;
  const { rows } = await pool.query<{ count: number; age_ms: number | null }>(
    `select count(*)::integer as count, (extract(epoch from now() - min(at)) * 1000)::float8 as age_ms
     from (select at from outbox order by tenant_id, id limit ${OUTBOX_LOOKED_AT}) o`,
  );
  const { count, age_ms: ageMs } = rows[0]!;
  const lagMs = Math.max(0, Math.round(ageMs ?? 0));
  const detail = { waiting: count, lag_ms: lagMs };
  if (lagMs < OUTBOX_WARN_MS) return [ok(about, 'Webhooks are told in time.', detail)];
  return [
    bad(lagMs < OUTBOX_ERROR_MS ? 'warning' : 'error', about, {
      message: `An event has waited for ${Math.round(lagMs / MINUTE_MS)} minutes to be told to webhooks.`,
      advice: 'Start a process with the role `jobs`, or see in its log why it cannot make calls.',
      detail,
    }),
  ];
}

/** Whether the rows and this process mean the same store of large messages, and whether it answers. */
export async function checkBlobStore(
  s: Pick<Surroundings, 'readBlobMark'>,
  pool: Pool,
): Promise<readonly Finding[]> {
  const about = ['appliance', 'blob_store'] as const;
  const known = await readFact(pool, 'blob_store');
  if (known === null || s.readBlobMark === null) return [];
  const mark = (await s.readBlobMark())?.split(/\s+/)[0] ?? null;
  if (mark === known) return [ok(about, 'Large messages are where the database says they are.')];
  return [
    bad('error', about, {
      message:
        mark === null
          ? 'The store of large messages has no mark, so it is empty, not mounted or another one.'
          : 'The store of large messages is not the one that the rows of the database point into.',
      advice:
        'Set MAILSTEAD_BLOB_STORE and MAILSTEAD_DATA_DIR as the other processes have them, or mount the folder.',
    }),
  ];
}
