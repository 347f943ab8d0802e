// Keeps a tenant with a backlog from filling the machine while others send as well. Turns alone do not: where every
// processor is busy, whatever comes next waits for all that is under way. So while somebody else has mail, those who
// have most are claimed for at a rate that leaves room; alone, they get everything.
import { cpus } from 'node:os';
import { performance } from 'node:perf_hooks';

export interface Courtesy {
  /** What was claimed. */
  note(claimed: readonly { readonly tenantId: string }[]): void;
  /** What the next claim may bring of those who have most. */
  next(): {
    /** Not now. */
    readonly except: readonly string[];
    /** At most so many of each of the others; null: as ever. */
    readonly perTenant: number | null;
    /** When to look again; null: nothing is held back. */
    readonly waitMs: number | null;
  };
}

/** Counts fade with this time. */
const MEMORY_MS = 3_000;
/** Who was claimed for more than this within that time has much. */
const MUCH = 150;
/** Somebody who sends now and then counts as present for so long. */
const PRESENT_MS = 5_000;
const TENANTS_MAX = 10_000;
const LOOK_MS = 250;
/** Of the processors: above the first it gets less, below the second more. */
const BUSY = { tooMuch: 0.7, little: 0.55 };
const SLOWER = 0.8;
const FASTER = 1.1;
/** Of what was done a second before others came. */
const FIRST_PART = 0.6;
const PER_SECOND = { min: 50, max: 20_000 };
/** Claimed at a time, so that a claim stays worth its cost; and saved up at most. */
const CHUNK = 20;
const SAVED_MS = 200;

interface Known {
  count: number;
  at: number;
}

/** `busy` says what part of the machine has worked since it was asked last, 0 to 1. `now` is monotonic. */
export function createCourtesy(d: {
  readonly now: () => number;
  readonly busy: () => number;
}): Courtesy {
  const tenants = new Map<string, Known>();
  /** Null: nobody is held back. */
  let pace: { perSecond: number; tokens: number; at: number; lookedAt: number } | null = null;

  const countOf = ({ count, at }: Known): number => count * Math.exp((at - d.now()) / MEMORY_MS);

  const findHeavy = (): readonly string[] => {
    const heavy: string[] = [];
    let isSomebodyElse = false;
    for (const [tenantId, known] of tenants) {
      const age = d.now() - known.at;
      const count = countOf(known);
      if (count > MUCH) heavy.push(tenantId);
      else if (age < PRESENT_MS) isSomebodyElse = true;
      else if (count < 1) tenants.delete(tenantId);
    }
    return isSomebodyElse ? heavy : [];
  };

  const ratePerSecond = (heavy: readonly string[]): number =>
    heavy.reduce((sum, id) => sum + countOf(tenants.get(id)!), 0) / (MEMORY_MS / 1_000);

  const paceFor = (heavy: readonly string[]): NonNullable<typeof pace> => {
    const now = d.now();
    if (pace === null) {
      d.busy(); // from here on
      pace = { perSecond: ratePerSecond(heavy) * FIRST_PART, tokens: 0, at: now, lookedAt: now };
    }
    const { perSecond, tokens, at, lookedAt } = pace;
    const saved = tokens + ((now - at) * perSecond) / 1_000;
    const most = Math.max(CHUNK, (perSecond * SAVED_MS) / 1_000);
    pace = { perSecond, tokens: Math.min(saved, most), at: now, lookedAt };
    if (now - lookedAt < LOOK_MS) return pace;
    const busy = d.busy();
    const change = busy > BUSY.tooMuch ? SLOWER : busy < BUSY.little ? FASTER : 1;
    pace.perSecond = Math.min(PER_SECOND.max, Math.max(PER_SECOND.min, perSecond * change));
    pace.lookedAt = now;
    return pace;
  };

  return {
    note(claimed) {
      const counts = new Map<string, number>();
      for (const { tenantId } of claimed) counts.set(tenantId, (counts.get(tenantId) ?? 0) + 1);
      for (const [tenantId, count] of counts) {
        const known = tenants.get(tenantId);
        if (known === undefined && tenants.size >= TENANTS_MAX) tenants.clear();
        const before = known === undefined ? 0 : countOf(known);
        tenants.set(tenantId, { count: before + count, at: d.now() });
        if (pace !== null && before > MUCH) pace.tokens -= count;
      }
    },
    next() {
      const heavy = findHeavy();
      if (heavy.length === 0) {
        pace = null;
        return { except: [], perTenant: null, waitMs: null };
      }
      const { tokens, perSecond } = paceFor(heavy);
      if (tokens >= CHUNK) {
        // A claim that finds nothing then finds nothing later either: it waits for news, as ever.
        return { except: [], perTenant: Math.ceil(tokens / heavy.length), waitMs: null };
      }
      const waitMs = Math.max(1, Math.ceil(((CHUNK - tokens) / perSecond) * 1_000));
      return { except: heavy, perTenant: null, waitMs };
    },
  };
}

/** What part of the machine, or of this thread where that is more, has worked since the last call. */
export function createBusyMeter(): () => number {
  const read = (): { busy: number; all: number } => {
    let busy = 0;
    let all = 0;
    for (const { times } of cpus()) {
      const worked = times.user + times.nice + times.sys + times.irq;
      busy += worked;
      all += worked + times.idle;
    }
    return { busy, all };
  };
  let machine = read();
  let loop = performance.eventLoopUtilization();
  return () => {
    const machineNow = read();
    const loopNow = performance.eventLoopUtilization();
    const passed = machineNow.all - machine.all;
    const ofMachine = passed > 0 ? (machineNow.busy - machine.busy) / passed : 0;
    const ofLoop = performance.eventLoopUtilization(loopNow, loop).utilization;
    machine = machineNow;
    loop = loopNow;
    return Math.max(ofMachine, ofLoop);
  };
}
