// Carries out replays: puts forwards of received mail in line, or what webhooks are told of it, at the rate of each. All that are running take turns; a turn
// is one transaction that moves on behind the messages whose tasks it wrote, so after a crash none is missing and none
// comes twice. Which rule a message is for says the route that took it, as its rule is now.
import type { PoolClient } from 'pg';
import { firstIdAt } from '../access/request-log.ts';
import { LOWEST_ID, newId } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import type { Store } from '../store/orm.ts';
import type { RouteDecision } from '../store/received-email.ts';
import { isHooked, tellWebhooks } from '../timeline/outbox.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';

/** Messages of one turn. */
const TURN_MAX = 100;
/** Messages that one turn looks at: no rule may be for most of them. */
const LOOK_MAX = 500;
/** Replays in a round; those whose turn is due for longest first. */
const RUNNING_MAX = 200;
/** What was not done in time, since nobody was there to do it, is not made up for beyond this. */
const BEHIND_MAX_MS = 5_000;
/** An id is made when the message is stored, which is after it arrived. */
const ID_SLACK_MS = 3_600_000;

interface ReplayRow {
  readonly tenant_id: string;
  readonly id: string;
  readonly per_minute: number;
  readonly rule_id: string | null;
  readonly forwards: boolean;
  /** Webhooks are to be told, and one listens. */
  readonly tells: boolean;
  readonly is_by_id: boolean;
  readonly cursor_id: string | null;
  readonly starts_ms: string | null;
  readonly ends_ms: string | null;
  /** How far the time is beyond the next message's; below 0: it is not due. */
  readonly behind_ms: string;
}

/**
 * One turn for each replay that is running; in how many milliseconds the next is due, null: none is left. One that
 * fails holds up no other; then it rejects.
 */
export async function runReplays(
  store: Store,
  onTasks: () => void,
): Promise<{ readonly nextInMs: number | null }> {
  const { rows } = await store.pool.query<{ tenant_id: string; id: string }>({
    name: 'running-replays',
    text: `select tenant_id, id from receiving_replay where status = 'running'
      order by paced_at limit ${RUNNING_MAX}`,
  });
  let nextInMs: number | null = null;
  const failed: unknown[] = [];
  for (const row of rows) {
    const turn = await store
      .transact((client) => takeTurn(client, row))
      .catch((error: unknown) => {
        if (isDatabaseUnavailable(error)) throw error;
        failed.push(error);
        return NO_TURN;
      });
    if (turn.planned > 0) onTasks();
    if (turn.nextInMs !== null) nextInMs = Math.min(nextInMs ?? Infinity, turn.nextInMs);
  }
  if (failed.length > 0) throw failed[0];
  return { nextInMs };
}

interface Turn {
  readonly planned: number;
  /** Null: it is over, or another process has it. */
  readonly nextInMs: number | null;
}

const NO_TURN: Turn = { planned: 0, nextInMs: null };

async function takeTurn(
  client: PoolClient,
  key: { readonly tenant_id: string; readonly id: string },
): Promise<Turn> {
  const { rows } = await client.query<ReplayRow>({
    name: 'take-replay',
    text: `select tenant_id, id, per_minute, rule_id, ids is not null as is_by_id, cursor_id,
        kinds ? 'forward' as forwards,
        kinds ? 'webhook' and ${isHooked('receiving_replay.tenant_id', `'email.received'`)} as tells,
        (extract(epoch from starts_at) * 1000)::bigint::text as starts_ms,
        (extract(epoch from ends_at) * 1000)::bigint::text as ends_ms,
        floor(extract(epoch from clock_timestamp() - paced_at) * 1000)::bigint::text as behind_ms
      from receiving_replay where tenant_id = $1 and id = $2 and status = 'running'
      for update skip locked`,
    values: [key.tenant_id, key.id],
  });
  const [replay] = rows;
  if (replay === undefined) return NO_TURN;
  const pauseMs = 60_000 / replay.per_minute;
  const behindMs = Math.min(Number(replay.behind_ms), Math.max(BEHIND_MAX_MS, pauseMs));
  if (behindMs < 0) return { planned: 0, nextInMs: -behindMs };
  const due = Math.min(TURN_MAX, 1 + Math.floor(behindMs / pauseMs));
  const messages = await readNext(client, replay);
  const rules = await readRules(client, replay, messages);

  const tasks: Task[] = [];
  const told: Message[] = [];
  let [taken, skipped, looked] = [0, 0, 0];
  let cursor = replay.cursor_id;
  for (const message of messages) {
    const own = tasksOf(message, replay, rules);
    const isTold = replay.tells && message.isRead && (replay.rule_id === null || own.length > 0);
    const isForwarded = replay.forwards && own.length > 0;
    const isTaken = isForwarded || isTold;
    if (isTaken && taken === due) break;
    if (isTaken) taken += 1;
    else skipped += 1;
    if (isForwarded) tasks.push(...own);
    if (isTold) told.push(message);
    looked += 1;
    cursor = message.id;
  }
  await insertTasks(client, replay, tasks);
  await tellWebhooks(
    client,
    told.map(({ id: subjectId }) => ({
      tenantId: replay.tenant_id,
      type: 'email.received',
      subjectId,
      detail: {},
    })),
  );
  const planned = tasks.length + told.length;
  const isOver = looked === messages.length && messages.length < LOOK_MAX;
  // What is left of the time that was not used for messages counts for the next turn.
  const leftMs = behindMs - taken * pauseMs;
  await client.query({
    name: 'move-replay',
    text: `update receiving_replay set cursor_id = $3, planned = planned + $4, skipped = skipped + $5,
        status = case when $6 then 'finished' else status end, updated_at = now(),
        paced_at = clock_timestamp() - $7 * interval '1 millisecond'
      where tenant_id = $1 and id = $2`,
    values: [replay.tenant_id, replay.id, cursor, planned, skipped, isOver, leftMs],
  });
  return { planned: tasks.length, nextInMs: isOver ? null : Math.max(0, -leftMs) };
}

interface Message {
  readonly id: string;
  /** Else it tells of itself when it is. */
  readonly isRead: boolean;
  readonly decisions: readonly RouteDecision[];
}

/** Held, so that none is removed for its age (remove-received.ts) before its tasks are there. */
async function readNext(client: PoolClient, replay: ReplayRow): Promise<readonly Message[]> {
  const { rows } = await client.query<{
    id: string;
    is_read: boolean;
    route_decisions: readonly RouteDecision[] | string;
  }>(
    replay.is_by_id
      ? {
          name: 'replay-by-id',
          text: `select e.id, e.is_read, e.route_decisions from receiving_replay r
            cross join lateral jsonb_array_elements_text(r.ids) as i (id)
            join received_email e on e.tenant_id = r.tenant_id and e.id = i.id::uuid
            where r.tenant_id = $1 and r.id = $2 and e.id > $3
            order by e.id limit ${LOOK_MAX} for key share of e`,
          values: [replay.tenant_id, replay.id, replay.cursor_id ?? LOWEST_ID],
        }
      : {
          name: 'replay-by-time',
          text: `select e.id, e.is_read, e.route_decisions from receiving_replay r
            join received_email e on e.tenant_id = r.tenant_id
            where r.tenant_id = $1 and r.id = $2 and e.id > $3 and e.id < $4
              and e.created_at >= r.starts_at and e.created_at < r.ends_at
            order by e.id limit ${LOOK_MAX} for key share of e`,
          values: [
            replay.tenant_id,
            replay.id,
            replay.cursor_id ?? firstIdAt(Number(replay.starts_ms) - ID_SLACK_MS),
            firstIdAt(Number(replay.ends_ms) + ID_SLACK_MS),
          ],
        },
  );
  return rows.map(({ id, is_read: isRead, route_decisions: decisions }) => ({
    id,
    isRead,
    decisions: fromJson(decisions),
  }));
}

interface Rules {
  /** By route. */
  readonly of: ReadonlyMap<string, string>;
  /** All that are still there. */
  readonly ids: ReadonlySet<string>;
}

async function readRules(
  client: PoolClient,
  replay: ReplayRow,
  messages: readonly Message[],
): Promise<Rules> {
  const decisions = messages.flatMap((message) => message.decisions);
  const { rows } = await client.query<{ id: string; route_id: string }>({
    name: 'replay-rules',
    text: `select id, route_id from forwarding_rule
      where tenant_id = $1 and (route_id = any ($2::uuid[]) or id = any ($3::uuid[]))`,
    values: [
      replay.tenant_id,
      [...new Set(decisions.flatMap(({ route_id: id }) => id ?? []))],
      [...new Set(decisions.flatMap(({ forwarding_rule_id: id }) => id ?? []))],
    ],
  });
  return {
    of: new Map(rows.map(({ id, route_id: route }) => [route, id])),
    ids: new Set(rows.map(({ id }) => id)),
  };
}

interface Task {
  readonly receivedEmailId: string;
  readonly ruleId: string;
  readonly recipient: string;
}

/** One for each rule, as when the message arrived. */
function tasksOf(message: Message, replay: ReplayRow, rules: Rules): readonly Task[] {
  const tasks = new Map<string, Task>();
  for (const { route_id: route, forwarding_rule_id: stored, recipient } of message.decisions) {
    const ruleId = rules.of.get(route ?? '') ?? stored;
    if (ruleId === null || !rules.ids.has(ruleId) || tasks.has(ruleId)) continue;
    if (replay.rule_id !== null && replay.rule_id !== ruleId) continue;
    tasks.set(ruleId, { receivedEmailId: message.id, ruleId, recipient });
  }
  return [...tasks.values()];
}

async function insertTasks(
  client: PoolClient,
  replay: ReplayRow,
  tasks: readonly Task[],
): Promise<void> {
  if (tasks.length === 0) return;
  await client.query({
    name: 'insert-replay-tasks',
    text: `insert into forwarding_task (tenant_id, id, received_email_id, rule_id, recipient,
        replay_id, created_at, due_at)
      select $1, t.id, t.received_email_id, t.rule_id, t.recipient, $2, now(), now()
      from unnest($3::uuid[], $4::uuid[], $5::uuid[], $6::text[])
        as t (id, received_email_id, rule_id, recipient)`,
    values: [
      replay.tenant_id,
      replay.id,
      tasks.map(() => newId()),
      tasks.map(({ receivedEmailId }) => receivedEmailId),
      tasks.map(({ ruleId }) => ruleId),
      tasks.map(({ recipient }) => recipient),
    ],
  });
}
