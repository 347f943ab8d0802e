// How much a tenant used. There are no quotas here, so every limit is null but that of requests. Emails are counted by
// ranges of their ids, which sort by time, with those that retention has removed since, and what was counted once is remembered in this process: a request pays for the
// emails since the one before, the first after a start for those of the month.
import type { Store } from '../store/orm.ts';
import { firstIdAt } from './request-log.ts';

/** Emails that were accepted, and messages that were received, in a period that ends at `resetsAt` (UTC). */
export interface EmailUsage {
  readonly sent: number;
  readonly received: number;
  readonly resetsAt: Date;
}

export interface Usage {
  readonly daily: EmailUsage;
  readonly monthly: EmailUsage;
  readonly contacts: number;
  readonly segments: number;
  readonly broadcasts: number;
  /** Begun this month. */
  readonly automationRuns: number;
  readonly domains: number;
  /** Requests in a window. */
  readonly rateLimit: { readonly requests: number; readonly windowMs: number };
}

export interface UsageVerbs {
  read(tenantId: string): Promise<Usage>;
}

const DAY_MS = 86_400_000;
/** An id is older than its row is visible; what is younger than this is counted anew every time. */
const UNSETTLED_MS = 10 * 60_000;
/** What was removed is known by quarters of an hour, so ranges end with one. */
const QUARTER_MS = 900_000;
/** Whose counts are remembered; beyond it the one that was asked for longest ago is forgotten. */
const TENANTS_MAX = 10_000;
/** What is more than this may be a minute old: to count it takes a while. */
const LIVE_MAX = 100_000;
const STALE_MS = 60_000;

interface Count {
  readonly sent: number;
  readonly received: number;
}

/** What was counted, from the beginning of the month to `untilMs`. */
interface Counted {
  readonly monthMs: number;
  readonly untilMs: number;
  readonly month: Count;
  /** Of the day in which `untilMs` lies. */
  readonly day: Count;
}

type Totals = Pick<Usage, 'contacts' | 'segments' | 'broadcasts' | 'automationRuns' | 'domains'>;

interface Memory {
  counted: Counted | null;
  totals: { readonly at: number; readonly value: Totals } | null;
  /** Requests that come together share an answer. */
  reading: Promise<Usage> | null;
}

const NONE: Count = { sent: 0, received: 0 };
const plus = (one: Count, other: Count): Count => ({
  sent: one.sent + other.sent,
  received: one.received + other.received,
});

const dayOf = (ms: number): number => Math.floor(ms / DAY_MS) * DAY_MS;

function monthOf(ms: number, monthsLater = 0): number {
  const at = new Date(ms);
  return Date.UTC(at.getUTCFullYear(), at.getUTCMonth() + monthsLater, 1);
}

export function createUsageVerbs(
  store: Store,
  now: () => Date,
  rateLimit: Usage['rateLimit'],
): UsageVerbs {
  const memories = new Map<string, Memory>();

  const memoryOf = (tenantId: string): Memory => {
    const memory = memories.get(tenantId) ?? { counted: null, totals: null, reading: null };
    memories.delete(tenantId);
    memories.set(tenantId, memory);
    const [oldest] = memories.keys();
    if (memories.size > TENANTS_MAX && oldest !== undefined) memories.delete(oldest);
    return memory;
  };

  const read = async (tenantId: string, memory: Memory): Promise<Usage> => {
    const nowMs = now().getTime();
    const settled = await countSettled(store, tenantId, memory.counted, nowMs);
    memory.counted = settled;
    const isFresh = settled.untilMs >= dayOf(nowMs);
    const recent = await countEmails(store, tenantId, settled.untilMs, null);
    // Around midnight some of the unsettled are of the day before.
    const today = isFresh
      ? plus(settled.day, recent)
      : await countEmails(store, tenantId, dayOf(nowMs), null);
    if (memory.totals === null || isOutdated(memory.totals, nowMs)) {
      memory.totals = { at: nowMs, value: await countTotals(store, tenantId, nowMs) };
    }
    return {
      daily: { ...today, resetsAt: new Date(dayOf(nowMs) + DAY_MS) },
      monthly: { ...plus(settled.month, recent), resetsAt: new Date(monthOf(nowMs, 1)) },
      ...memory.totals.value,
      rateLimit,
    };
  };

  return {
    read(tenantId) {
      const memory = memoryOf(tenantId);
      memory.reading ??= read(tenantId, memory).finally(() => {
        memory.reading = null;
      });
      return memory.reading;
    },
  };
}

const isOutdated = ({ at, value }: { at: number; value: Totals }, nowMs: number): boolean =>
  Math.max(...Object.values(value)) <= LIVE_MAX ||
  nowMs - at > STALE_MS ||
  monthOf(at) !== monthOf(nowMs);

/** Goes on from what is known, a day at a time, so that no statement takes long. */
async function countSettled(
  store: Store,
  tenantId: string,
  known: Counted | null,
  nowMs: number,
): Promise<Counted> {
  const monthMs = monthOf(nowMs);
  const untilMs = Math.max(monthMs, Math.floor((nowMs - UNSETTLED_MS) / QUARTER_MS) * QUARTER_MS);
  let counted: Counted =
    known?.monthMs === monthMs ? known : { monthMs, untilMs: monthMs, month: NONE, day: NONE };
  while (counted.untilMs < untilMs) {
    const startMs = counted.untilMs;
    const endMs = Math.min(dayOf(startMs) + DAY_MS, untilMs);
    const count = await countEmails(store, tenantId, startMs, endMs);
    const isDayOver = endMs === dayOf(endMs);
    counted = {
      monthMs,
      untilMs: endMs,
      month: plus(counted.month, count),
      day: isDayOver ? NONE : plus(counted.day, count),
    };
  }
  return counted;
}

/** Of ids from then until before then; null: no end. */
async function countEmails(
  { pool }: Store,
  tenantId: string,
  startMs: number,
  endMs: number | null,
): Promise<Count> {
  const { rows } = await pool.query<Count>({
    name: 'count-emails',
    text: `select
        (select count(*)::integer from email where tenant_id = $1 and id >= $2 and id < $3)
          + gone.accepted as sent,
        (select count(*)::integer from received_email
          where tenant_id = $1 and id >= $2 and id < $3) + gone.received as received
      from (
        select coalesce(sum(accepted), 0)::integer as accepted,
          coalesce(sum(received), 0)::integer as received
        from metric_removed where tenant_id = $1 and quarter >= $4 and ($5::timestamptz is null or quarter < $5)
      ) gone`,
    values: [
      tenantId,
      firstIdAt(startMs),
      endMs === null ? LAST_ID : firstIdAt(endMs),
      new Date(startMs),
      endMs === null ? null : new Date(endMs),
    ],
  });
  return rows[0] ?? NONE;
}

const LAST_ID = 'ffffffff-ffff-ffff-ffff-ffffffffffff';

async function countTotals({ pool }: Store, tenantId: string, nowMs: number): Promise<Totals> {
  const { rows } = await pool.query<Totals>({
    name: 'count-totals',
    text: `select
        (select count(*)::integer from contact where tenant_id = $1) as contacts,
        (select count(*)::integer from segment where tenant_id = $1) as segments,
        (select count(*)::integer from broadcast where tenant_id = $1) as broadcasts,
        (select count(*)::integer from automation_run
          where tenant_id = $1 and id >= $2) as "automationRuns",
        (select count(*)::integer from sending_domain where tenant_id = $1) as domains`,
    values: [tenantId, firstIdAt(monthOf(nowMs))],
  });
  return rows[0]!;
}
