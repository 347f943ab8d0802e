// Replays, as the API sees them: orders to forward received mail again, or to tell webhooks of it, by id or by time, at a rate. What carries them
// out is in replay-turns.ts.
import type { Caller } from '../access/keys.ts';
import { parseTime } from '../access/filters.ts';
import {
  checkPage,
  orderOf,
  rangeOf,
  refuseCursor,
  toPage,
  type PageRequest,
} from '../access/page.ts';
import { refuseFields, type Issue } from '../access/refusal.ts';
import { isUuid, newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { ReceivingReplay, replayKinds, type ReplayKind } from '../store/receiving-replay.ts';

/** What to replay: `ids`, or `start_date` with `end_date`. */
export interface CreateReplayRequest {
  /**
   * What happens again: `forward` (what is given when this is absent), and `webhook`, which tells `email.received` anew to
   * the endpoints that want to hear of it.
   */
  kinds?: string[] | null;
  /** Received emails, 1 to 1,000. */
  ids?: string[] | null;
  /** A date like `2026-05-06`, from its beginning, or an ISO 8601 time; inside. */
  start_date?: string | null;
  /** The same; a date until its end. What arrives after the request is not part of it. */
  end_date?: string | null;
  /** Messages a minute, 1 to 6,000; absent: 600. */
  per_minute?: number | null;
  /** Only messages that this forwarding rule is for. */
  rule_id?: string | null;
}

export type ReplayRecord = InstanceType<typeof ReceivingReplay.class>;

/** What became of its forwards. */
export interface ReplayForwards {
  /** Put in line and not carried out yet. */
  readonly waiting: number;
  readonly queued: number;
  readonly skipped: number;
  readonly failed: number;
}

export interface ReplayVerbs {
  /** Throws a Refusal when a field is wrong, or when too many are running. */
  create(caller: Caller, request: CreateReplayRequest): Promise<ReplayRecord>;
  list(
    caller: Caller,
    page: PageRequest,
  ): Promise<{ readonly items: readonly ReplayRecord[]; readonly hasMore: boolean }>;
  find(
    caller: Caller,
    id: string,
  ): Promise<{ readonly replay: ReplayRecord; readonly forwards: ReplayForwards } | null>;
  /** What is in line and not carried out goes with it; one that has finished stays as it is. False: there is none. */
  cancel(caller: Caller, id: string): Promise<boolean>;
}

const IDS_MAX = 1_000;
const PER_MINUTE_MAX = 6_000;
const PER_MINUTE_DEFAULT = 600;
/** Of a tenant, at a time. */
const RUNNING_MAX = 10;
/** Of the ids that are not there, so many are named. */
const NAMED_MAX = 5;
const DAY_MS = 86_400_000;

export function createReplayVerbs(d: {
  readonly store: Store;
  readonly now: () => Date;
  /** There is something to do. */
  readonly onReplay: () => void;
}): ReplayVerbs {
  const { store } = d;
  return {
    async create({ tenantId }, request) {
      const wanted = checkRequest(request, d.now());
      await checkKnown(store, tenantId, wanted);
      const id = newId();
      const isStored = await store.transact(async (client) => {
        // So that two requests do not count the same.
        await client.query(
          `select pg_advisory_xact_lock(hashtextextended('receiving replays ' || $1, 0))`,
          [tenantId],
        );
        const { rowCount } = await client.query(
          `insert into receiving_replay (tenant_id, id, status, per_minute, rule_id, ids, starts_at,
             ends_at, paced_at, created_at, updated_at, kinds)
           select $1, $2, 'running', $3, $4, $5, $6, $7, now(), $8, $8, $9::jsonb
           where (select count(*) from receiving_replay
             where tenant_id = $1 and status = 'running') < ${RUNNING_MAX}`,
          [
            tenantId,
            id,
            wanted.perMinute,
            wanted.ruleId,
            wanted.ids === null ? null : JSON.stringify(wanted.ids),
            wanted.startsAt,
            wanted.endsAt,
            d.now(),
            JSON.stringify(wanted.kinds),
          ],
        );
        return rowCount === 1;
      });
      if (!isStored) {
        const message = `${RUNNING_MAX} replays are running; wait until one has finished, or cancel one.`;
        throw refuseFields([{ path: 'body', message }]);
      }
      d.onReplay();
      return store.em().findOneOrFail(ReceivingReplay, { tenantId, id });
    },
    async list({ tenantId }, page) {
      const cursor = checkPage(page);
      const at = cursor.after ?? cursor.before;
      const em = store.em();
      if (at !== null && (await em.count(ReceivingReplay, { tenantId, id: at })) === 0) {
        refuseCursor(cursor);
      }
      const rows = await em.find(
        ReceivingReplay,
        { tenantId, ...rangeOf(cursor) },
        orderOf(cursor),
      );
      return toPage(rows, cursor);
    },
    async find({ tenantId }, id) {
      const replay = await store.em().findOne(ReceivingReplay, { tenantId, id });
      return replay === null
        ? null
        : { replay, forwards: await countForwards(store, tenantId, id) };
    },
    cancel: ({ tenantId }, id) => cancelReplay(d, tenantId, id),
  };
}

async function cancelReplay(
  d: { readonly store: Store; readonly now: () => Date },
  tenantId: string,
  id: string,
): Promise<boolean> {
  return d.store.transact(async (client) => {
    const { rows } = await client.query<{ status: string }>(
      `select status from receiving_replay where tenant_id = $1 and id = $2 for update`,
      [tenantId, id],
    );
    const [row] = rows;
    if (row?.status !== 'running') return row !== undefined;
    await client.query(
      `update receiving_replay set status = 'canceled', updated_at = $3
       where tenant_id = $1 and id = $2`,
      [tenantId, id, d.now()],
    );
    await client.query(`delete from forwarding_task where tenant_id = $1 and replay_id = $2`, [
      tenantId,
      id,
    ]);
    return true;
  });
}

async function countForwards(
  { pool }: Store,
  tenantId: string,
  id: string,
): Promise<ReplayForwards> {
  const { rows } = await pool.query<{ status: keyof ReplayForwards; count: number }>({
    name: 'replay-forwards',
    text: `select status, count(*)::integer as count from forwarding_attempt
      where tenant_id = $1 and replay_id = $2 group by status
      union all
      select 'waiting', count(*)::integer from forwarding_task
      where tenant_id = $1 and replay_id = $2`,
    values: [tenantId, id],
  });
  const counts = { waiting: 0, queued: 0, skipped: 0, failed: 0 };
  for (const { status, count } of rows) counts[status] = count;
  return counts;
}

interface Wanted {
  readonly kinds: readonly ReplayKind[];
  readonly perMinute: number;
  readonly ruleId: string | null;
  readonly ids: readonly string[] | null;
  readonly startsAt: Date | null;
  readonly endsAt: Date | null;
}

/** Throws a Refusal with all that is wrong. */
function checkRequest(request: CreateReplayRequest, now: Date): Wanted {
  const issues: Issue[] = [];
  const refuse = (path: string, message: string): null => {
    issues.push({ path, message });
    return null;
  };
  const kinds = readKinds(request.kinds ?? ['forward'], refuse);
  const perMinute = request.per_minute ?? PER_MINUTE_DEFAULT;
  if (!Number.isInteger(perMinute) || perMinute < 1 || perMinute > PER_MINUTE_MAX) {
    refuse('per_minute', `\`per_minute\` must be a whole number from 1 to ${PER_MINUTE_MAX}.`);
  }
  const ruleId = request.rule_id ?? null;
  if (ruleId !== null && !isUuid(ruleId)) refuse('rule_id', '`rule_id` must be a valid UUID.');
  const given = request.ids ?? null;
  const hasDates = (request.start_date ?? request.end_date ?? null) !== null;
  if ((given === null) !== hasDates) {
    refuse('ids', 'Give either `ids`, or `start_date` and `end_date`.');
  }
  const ids = given === null ? null : checkIds(given, refuse);
  const range = given === null && hasDates ? checkRange(request, now, refuse) : null;
  if (issues.length > 0) throw refuseFields(issues);
  return {
    kinds,
    perMinute,
    ruleId: ruleId?.toLowerCase() ?? null,
    ids,
    startsAt: range?.startsAt ?? null,
    endsAt: range?.endsAt ?? null,
  };
}

type Refuse = (path: string, message: string) => null;

function readKinds(kinds: readonly string[], refuse: Refuse): readonly ReplayKind[] {
  const known: readonly string[] = replayKinds;
  const unknown = kinds.findIndex((kind) => !known.includes(kind));
  const names = known.map((kind) => `\`${kind}\``).join(', ');
  if (kinds.length === 0) refuse('kinds', `\`kinds\` must name what to replay: ${names}.`);
  if (unknown !== -1) {
    refuse(`kinds.${unknown}`, `\`kinds\` can hold ${names}; there is nothing else to replay.`);
  }
  return replayKinds.filter((kind) => kinds.includes(kind));
}

function checkIds(given: readonly string[], refuse: Refuse): readonly string[] | null {
  if (given.length === 0 || given.length > IDS_MAX) {
    return refuse('ids', `\`ids\` must hold 1 to ${IDS_MAX} ids of received emails.`);
  }
  const bad = given.findIndex((id) => !isUuid(id));
  if (bad !== -1) return refuse(`ids.${bad}`, `\`ids.${bad}\` must be a valid UUID.`);
  return [...new Set(given.map((id) => id.toLowerCase()))].toSorted();
}

function checkRange(
  request: CreateReplayRequest,
  now: Date,
  refuse: Refuse,
): { readonly startsAt: Date; readonly endsAt: Date } | null {
  const when = 'must be a date like `2026-05-06` or an ISO 8601 time.';
  const read = (path: 'start_date' | 'end_date'): ReturnType<typeof parseTime> => {
    const text = request[path] ?? null;
    if (text === null) {
      return refuse(path, 'Give both `start_date` and `end_date`.');
    }
    return parseTime(text) ?? refuse(path, `\`${path}\` ${when}`);
  };
  const start = read('start_date');
  const end = read('end_date');
  if (start === null || end === null) return null;
  const endMs = end.ms + (end.isDay ? DAY_MS : 1);
  if (start.ms >= endMs) return refuse('end_date', '`end_date` must not be before `start_date`.');
  if (start.ms >= now.getTime()) {
    return refuse('start_date', '`start_date` must not be in the future.');
  }
  return { startsAt: new Date(start.ms), endsAt: new Date(Math.min(endMs, now.getTime())) };
}

/** Whether the rule and the messages are the tenant's. Throws a Refusal. */
async function checkKnown({ pool }: Store, tenantId: string, wanted: Wanted): Promise<void> {
  const issues: Issue[] = [];
  if (wanted.ruleId !== null) {
    const { rowCount } = await pool.query(
      'select 1 from forwarding_rule where tenant_id = $1 and id = $2',
      [tenantId, wanted.ruleId],
    );
    if (rowCount === 0) {
      issues.push({ path: 'rule_id', message: '`rule_id` is the id of no forwarding rule.' });
    }
  }
  if (wanted.ids !== null) {
    const { rows } = await pool.query<{ id: string }>(
      `select i.id from unnest($2::uuid[]) as i (id)
       where not exists (select 1 from received_email e where e.tenant_id = $1 and e.id = i.id)
       order by i.id limit ${NAMED_MAX}`,
      [tenantId, wanted.ids],
    );
    if (rows.length > 0) {
      const names = rows.map(({ id }) => id).join(', ');
      issues.push({ path: 'ids', message: `\`ids\` has what is no received email: ${names}.` });
    }
  }
  if (issues.length > 0) throw refuseFields(issues);
}
