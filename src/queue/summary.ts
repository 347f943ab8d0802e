// The queue as metrics tell it: the overview without anybody's name in it. Lanes of providers and of this machine are
// named, the hosts of single domains are not.
import type { Queryable } from './enqueue.ts';
import { readQueue, type CountedState, type LaneLoad, type QueueOverview } from './overview.ts';

export interface QueueSummary {
  readonly states: readonly {
    readonly state: CountedState;
    readonly count: number;
    readonly isCapped: boolean;
  }[];
  readonly lanes: readonly LaneSummary[];
  /** Seconds; 0: nothing is ready. */
  readonly oldestReadyS: number;
  readonly pauses: number;
  readonly workers: number;
  /** Names of egresses. */
  readonly blocked: readonly string[];
}

interface LaneSummary {
  readonly lane: string;
  readonly ready: number;
  readonly deferred: number;
}

const LANES_NAMED_MAX = 20;
const OTHER = 'other';

/** As bounded as readQueue. */
export async function readQueueSummary(db: Queryable): Promise<QueueSummary> {
  return summarize(await readQueue(db));
}

function summarize(overview: QueueOverview): QueueSummary {
  const { at, totals, oldestDueAt, pauses, workers, blocked } = overview;
  const { capped, ...counts } = totals;
  return {
    states: (Object.entries(counts) as [CountedState, number][]).map(([state, count]) => ({
      state,
      count,
      isCapped: capped.includes(state),
    })),
    lanes: lanesOf(overview),
    oldestReadyS:
      oldestDueAt === null ? 0 : Math.max(0, (at.getTime() - oldestDueAt.getTime()) / 1_000),
    pauses: pauses.length,
    workers,
    blocked: blocked.map(({ name }) => name),
  };
}

/** What stands in a lane's name may be the one domain that it leads to. */
const isNameless = ({ name, site, provider }: LaneLoad): boolean =>
  provider === null && site !== name;

function lanesOf({ lanes, unassigned }: QueueOverview): readonly LaneSummary[] {
  const named = lanes.filter((lane) => !isNameless(lane)).slice(0, LANES_NAMED_MAX);
  const others = [...lanes.filter((lane) => !named.includes(lane)), unassigned];
  const sum = (pick: (load: LaneSummary | LaneLoad | typeof unassigned) => number): number =>
    others.reduce((total, one) => total + pick(one), 0);
  return [
    ...named.map(({ name, ready, deferred }) => ({ lane: name, ready, deferred })),
    { lane: OTHER, ready: sum(({ ready }) => ready), deferred: sum(({ deferred }) => deferred) },
  ];
}
