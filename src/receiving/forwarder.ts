// Carries out the forwards that are due: tasks that were stored with received messages, and those of replays. Several
// processes may do so at once: a task that one of them took is not due for the others for a while, and after a crash it
// is due again; that it is carried out once is decided by who removes it (forward-task.ts). Tenants take turns, and of a
// tenant's tasks those of replays come last.
import { AsyncLocalStorage } from 'node:async_hooks';
import type { Logger } from '../log.ts';
import type { NewEmail } from '../queue/enqueue.ts';
import { LOWEST_ID } from '../store/id.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';
import {
  failForward,
  runForward,
  type ForwardDependencies,
  type ForwardTask,
} from './forward-task.ts';

export interface ForwarderDependencies extends ForwardDependencies {
  readonly log: Logger;
  /** Deliveries became ready. */
  readonly onReady: () => void;
  /** How long a task that was taken is not due for others. Default LEASE_MS. */
  readonly leaseMs?: number;
}

export interface Forwarder {
  /** A task was stored. */
  nudge(): void;
  /** Resolves when what was under way has ended; the rest stays for the next start. */
  stop(): Promise<void>;
}

/** Renewed while the task is in hand, so that even a large message on a slow disk is not made twice. */
export const LEASE_MS = 10_000;
/** Taken at a time, and carried out at a time: each holds a header, and writes its message in pieces. */
const BATCH = 16;
const PARALLEL = 4;
/** A task that failed so often is given up. */
export const TRIES_MAX = 12;
/** Doubles: a disk that is full for an hour costs no forward. */
const BACKOFF_MS = 2_000;
/** Tasks of other processes that ended, and of replays, are found within this time. */
const SWEEP_MS = 5_000;
/** After the database was away. */
const RETRY_MS = 2_000;

export function startForwarder(d: ForwarderDependencies): Forwarder {
  let isWanted = false;
  let isStopped = false;
  let running: Promise<void> | null = null;
  let timer: NodeJS.Timeout | undefined;
  /** The next look begins behind this tenant. */
  let behind = LOWEST_ID;

  const later = (ms: number): void => {
    clearTimeout(timer);
    if (!isStopped) timer = setTimeout(nudge, ms).unref();
  };

  const carryOut = async (task: ForwardTask): Promise<NewEmail | null> => {
    if (isStopped) {
      await giveBack(d, [task]);
      return null;
    }
    try {
      if (task.tries > TRIES_MAX) await failForward(d, task);
      else return await runForward(d, task);
    } catch (error) {
      if (isDatabaseUnavailable(error)) throw error;
      d.log.error(
        {
          err: error,
          task_id: task.id,
          tenant_id: task.tenantId,
          received_email_id: task.receivedEmailId,
          tries: task.tries,
        },
        'a message was not forwarded',
      );
      await putOff(d, task);
    }
    return null;
  };

  /** Empty: nothing was due with any tenant. */
  const takeNext = async (leaseMs: number): Promise<readonly ForwardTask[]> => {
    for (let isRound = false; ;) {
      const isFromStart = behind === LOWEST_ID;
      const { tasks, last } = await take(d, { leaseMs, behind });
      behind = last ?? LOWEST_ID;
      isRound ||= isFromStart;
      if (tasks.length > 0 || isStopped || (isRound && last === null)) return tasks;
    }
  };

  /** False: nothing was due. */
  const turn = async (): Promise<boolean> => {
    const leaseMs = d.leaseMs ?? LEASE_MS;
    const tasks = await takeNext(leaseMs);
    const waiting = [...tasks];
    const inHand = new Set(tasks);
    const renewal = setInterval(() => {
      renew(d, [...inHand], leaseMs).catch(() => undefined); // who is told of a lost lease: whoever ends the task second
    }, leaseMs / 3).unref();
    const away: Error[] = [];
    const one = async (): Promise<void> => {
      for (let task = waiting.shift(); task !== undefined; task = waiting.shift()) {
        try {
          if ((await carryOut(task)) !== null) d.onReady();
        } catch (error) {
          away.push(error as Error);
          waiting.push(task);
          return;
        } finally {
          inHand.delete(task);
        }
      }
    };
    await Promise.all(Array.from({ length: Math.min(PARALLEL, tasks.length) }, one));
    clearInterval(renewal);
    if (away[0] !== undefined) {
      // Nothing is held against a task that the database is away; where this does not arrive either, one try is.
      await giveBack(d, waiting).catch(() => undefined);
      throw away[0];
    }
    return tasks.length > 0;
  };

  // In the context of the start, as in jobs/turns.ts.
  const run = AsyncLocalStorage.bind(async (): Promise<void> => {
    while (isWanted && !isStopped) {
      isWanted = false;
      try {
        while (!isStopped && (await turn())) isWanted = false;
        if (!isWanted) later(Math.min(SWEEP_MS, await untilDue(d)));
      } catch (error) {
        if (isStopped) break;
        d.log.warn({ err: error }, 'forwards wait');
        later(RETRY_MS);
      }
    }
  });

  const nudge = (): void => {
    isWanted = true;
    if (isStopped) return;
    running ??= run().finally(() => {
      running = null;
      // Nudged while it ended.
      if (isWanted && !isStopped) nudge();
    });
  };

  nudge();
  return {
    nudge,
    async stop() {
      isStopped = true;
      clearTimeout(timer);
      await running;
    },
  };
}

interface TaskRow {
  tenant_id: string;
  id: string;
  received_email_id: string;
  rule_id: string;
  recipient: string;
  replay_id: string | null;
  tries: number;
}

/**
 * Tasks that are due, past those that others are taking: of each of the next tenants the first, then of each the second.
 * `last`: where the look ended, null: there is no tenant behind it.
 */
async function take(
  { store }: Pick<ForwarderDependencies, 'store'>,
  { leaseMs, behind }: { readonly leaseMs: number; readonly behind: string },
): Promise<{ readonly tasks: readonly ForwardTask[]; readonly last: string | null }> {
  const { rows } = await store.pool.query<
    { readonly last: string | null } & (TaskRow | { readonly id: null })
  >({
    name: 'take-forwarding-tasks',
    // What others take at the same time is passed over, so more are chosen than are taken.
    text: `with recursive tenants as (
        (select tenant_id, 1 as number from forwarding_task
          where tenant_id > $3 order by tenant_id limit 1)
        union all
        select n.tenant_id, t.number + 1 from tenants t cross join lateral (
          select tenant_id from forwarding_task
          where tenant_id > t.tenant_id order by tenant_id limit 1) n
        where t.number < $1
      ), chosen as (
        select t.tenant_id, q.id, q.due_at, row_number() over (
          partition by t.tenant_id order by q.is_replay, q.due_at) as place
        from tenants t cross join lateral (
          select id, due_at, replay_id is not null as is_replay from forwarding_task
          where tenant_id = t.tenant_id and due_at <= now()
          order by replay_id is not null, due_at limit 2 * $1) q
      ), locked as (
        select f.tenant_id, f.id from chosen c
        join forwarding_task f on f.tenant_id = c.tenant_id and f.id = c.id and f.due_at <= now()
        order by c.place, c.due_at limit $1 for update of f skip locked
      ), taken as (
        update forwarding_task t
        set tries = t.tries + 1, due_at = now() + $2 * interval '1 millisecond'
        from locked d where t.tenant_id = d.tenant_id and t.id = d.id
        returning t.tenant_id, t.id, t.received_email_id, t.rule_id, t.recipient, t.replay_id, t.tries
      )
      select l.last, taken.*
      from (select (select tenant_id from tenants where number = $1) as last) l
      left join taken on true`,
    values: [BATCH, leaseMs, behind],
  });
  const last = rows[0]?.last ?? null;
  return { last, tasks: rows.flatMap((row) => (row.id === null ? [] : [taskOf(row)])) };
}

const taskOf = (row: TaskRow): ForwardTask => ({
  tenantId: row.tenant_id,
  id: row.id,
  receivedEmailId: row.received_email_id,
  ruleId: row.rule_id,
  recipient: row.recipient,
  replayId: row.replay_id,
  tries: row.tries,
});

/** For as long again. */
async function renew(
  { store }: Pick<ForwarderDependencies, 'store'>,
  tasks: readonly ForwardTask[],
  leaseMs: number,
): Promise<void> {
  if (tasks.length === 0) return;
  await store.pool.query({
    name: 'renew-forwarding-tasks',
    text: `update forwarding_task t set due_at = now() + $4 * interval '1 millisecond'
      from unnest($1::uuid[], $2::uuid[], $3::smallint[]) as g (tenant_id, id, tries)
      where t.tenant_id = g.tenant_id and t.id = g.id and t.tries = g.tries`,
    values: [...columnsOf(tasks), leaseMs],
  });
}

const columnsOf = (tasks: readonly ForwardTask[]): readonly (readonly unknown[])[] => [
  tasks.map(({ tenantId }) => tenantId),
  tasks.map(({ id }) => id),
  tasks.map(({ tries }) => tries),
];

/** As if they had not been taken. */
async function giveBack(
  { store }: Pick<ForwarderDependencies, 'store'>,
  tasks: readonly ForwardTask[],
): Promise<void> {
  if (tasks.length === 0) return;
  await store.pool.query({
    name: 'give-back-forwarding-tasks',
    text: `update forwarding_task t set tries = greatest(t.tries - 1, 0), due_at = now()
      from unnest($1::uuid[], $2::uuid[], $3::smallint[]) as g (tenant_id, id, tries)
      where t.tenant_id = g.tenant_id and t.id = g.id and t.tries = g.tries`,
    values: [...columnsOf(tasks)],
  });
}

/** Tried again after a pause that doubles. */
async function putOff(
  { store }: Pick<ForwarderDependencies, 'store'>,
  task: ForwardTask,
): Promise<void> {
  await store.pool.query({
    name: 'put-off-forwarding-task',
    text: `update forwarding_task set due_at = now() + $4 * interval '1 millisecond'
      where tenant_id = $1 and id = $2 and tries = $3`,
    values: [task.tenantId, task.id, task.tries, BACKOFF_MS * 2 ** (task.tries - 1)],
  });
}

/** In milliseconds, at least 50; Infinity: none waits. */
async function untilDue({ store }: Pick<ForwarderDependencies, 'store'>): Promise<number> {
  const { rows } = await store.pool.query<{ ms: number | null }>({
    name: 'next-forwarding-task',
    text: `select greatest(50, extract(epoch from min(due_at) - now()) * 1000)::float8 as ms
      from forwarding_task`,
  });
  return rows[0]?.ms ?? Infinity;
}
