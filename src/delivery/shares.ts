// This worker's parts of the lanes that all workers share: asks for what there is work for, gives up what others need
// more, and tells and hears whose circuit is open. What workers may use together never exceeds a lane's limit: a
// connection is closed before its place is given up in the table (queue/lane-shares.ts), and taken by another only after.
//
// A worker that is alone takes whatever it needs with the first statement about a lane, and from then on asks nothing but
// once a second whether it is still alone.
import { randomUUID } from 'node:crypto';
import type { Logger } from '../log.ts';
import type { Queryable } from '../queue/enqueue.ts';
import {
  ANSWER_PART,
  lookAtShares,
  proposeShares,
  SHARES_LIFE_MS,
  SHARES_MAX,
  type LaneShare,
  type Parts,
  type ShareProposal,
  type SharedCircuit,
} from '../queue/lane-shares.ts';
import { shareOut, type ShareClaim } from './fair-share.ts';
import type { Lane } from './lane.ts';

/** What this worker may use of a lane that all workers share. */
export interface Part {
  /** At a time; 0: none yet, or none any more. */
  connections(): number;
  /** Others use all there are: what waits here must go back, for them. */
  isTaken(): boolean;
  /** Nobody else has used the lane's rates just now. */
  mayBurst(): boolean;
  /** More is needed, or less is used, or its circuit changed: worth a question now. */
  tell(): void;
}

export interface Shares {
  /** For a lane that is about to be made, and then given to `take`. */
  partOf(lane: string): Part;
  take(lane: SharedLane): void;
  /** The lane is not used any more; its part goes back when its connections are closed. */
  drop(lane: string): void;
  /** The time of this worker's parts is over, so nothing more is to be opened in that lane. */
  isOver(lane: string): boolean;
  /** Resolves when others can see this worker; from then on it asks by itself. */
  start(): Promise<void>;
  /** Asks nothing more. What it holds counts until its run is taken off the list, or its time is over. */
  stop(): Promise<void>;
}

export type SharedLane = Pick<
  Lane,
  'name' | 'connectionsMax' | 'used' | 'wanted' | 'share' | 'circuit' | 'reopen' | 'forgive'
>;

/** Of the run's time, kept back for clocks that do not run alike. */
const MARGIN_MS = 1_000;
const LOOK_MS = 1_000;
/** While something waits for others to give up a place. */
const HUNGRY_LOOK_MS = 200;
/** What was wanted counts for so long, so that places do not move with every message. */
const WANTED_MS = 3_000;
/** Mail waits this long for a place that others must give up; then it goes back, for those that have one. */
const HUNGRY_MAX_MS = 3_000;
/** So long nothing is claimed for a lane of which others have all places. */
const TAKEN_MS = 4_000;
/** Who opened a circuit probes first. */
const FOLLOW_MS = 3_000;
/** Somebody else was faster: again so often at once. */
const ROUNDS_MAX = 10;
const AGAIN_MS = 20;

interface Holding {
  lane: SharedLane | null;
  /** Forgotten, with connections that are not closed yet. */
  former: readonly SharedLane[];
  /** The row as it was when last read or written; null: none is known. */
  row: LaneShare | null;
  readAt: number;
  /** What the row grants for certain, less what is being given up. */
  held: number;
  mayBurst: boolean;
  peak: { readonly wanted: number; readonly at: number };
  hungrySince: number | null;
  takenUntil: number;
  /** The circuit that the row and the lane had in common last. */
  synced: { readonly id: string | null; readonly untilMs: number | null };
}

interface Planned {
  readonly proposal: ShareProposal;
  readonly held: number;
  readonly untilMs: number | null;
}

/** `now` is monotonic. `onChange`: there is a place, or what waits must go back. */
export function createShares(d: {
  readonly db: Queryable;
  readonly epoch: string;
  readonly now: () => number;
  readonly log: Logger;
  readonly onChange: () => void;
  readonly lifeMs?: number;
}): Shares {
  const { now, epoch } = d;
  const lifeMs = d.lifeMs ?? SHARES_LIFE_MS;
  const holdings = new Map<string, Holding>();
  const told = new Set<string>();
  const hungry = new Set<string>();
  let others: readonly string[] = [];
  let validUntil = -Infinity;
  let isAnew = true;
  let isCounting = false;
  let lookedAt = -Infinity;
  /** At all lanes, or so many as may be looked at at once. */
  let allLookedAt = -Infinity;
  let turns = 0;
  let stopped = false;
  let running: Promise<void> | null = null;
  let soon: NodeJS.Immediate | null = null;
  let later: NodeJS.Timeout | undefined;

  const isValid = (): boolean => now() < validUntil;
  const formerlyUsed = ({ former }: Holding): number =>
    former.reduce((sum, one) => sum + one.used(), 0);
  const usedOf = (holding: Holding): number => formerlyUsed(holding) + (holding.lane?.used() ?? 0);

  const holdingOf = (name: string): Holding => {
    const known = holdings.get(name);
    if (known !== undefined) return known;
    const holding: Holding = {
      lane: null,
      former: [],
      row: null,
      readAt: 0,
      held: 0,
      mayBurst: true,
      peak: { wanted: 0, at: -Infinity },
      hungrySince: null,
      takenUntil: -Infinity,
      synced: { id: null, untilMs: null },
    };
    holdings.set(name, holding);
    return holding;
  };

  const wantedOf = (holding: Holding): number => {
    const wanted = holding.lane?.wanted() ?? 0;
    if (wanted >= holding.peak.wanted || now() - holding.peak.at > WANTED_MS) {
      holding.peak = { wanted, at: now() };
    }
    return holding.lane === null ? 0 : holding.peak.wanted;
  };

  /** What of the row still counts, without this worker's own. */
  const claimsIn = (row: LaneShare | null): readonly ShareClaim[] =>
    others.flatMap((other) => {
      const [held, wanted] = row?.parts[other] ?? [0, 0];
      return held + wanted === 0 ? [] : [{ epoch: other, held, wanted }];
    });

  /** What to store about a lane, if anything; what is given up is closed here and now. */
  const decide = (name: string, holding: Holding): Planned | null => {
    const { lane, row } = holding;
    const limit = lane?.connectionsMax() ?? 0;
    const wanted = wantedOf(holding);
    const claims = claimsIn(row);
    const isContended = claims.some((one) => one.wanted > one.held);
    const mine = { epoch, held: holding.held, wanted };
    const fair = shareOut(limit, [...claims, mine], others.length + 1).get(epoch) ?? 0;
    const free = Math.max(0, limit - claims.reduce((sum, { held }) => sum + held, 0));
    const stored = row?.parts[epoch];

    let { held } = holding;
    if (lane === null) held = 0;
    else if (held > limit || (isContended && held > fair)) held = Math.min(held, fair);
    else if (wanted > held) held = Math.max(held, Math.min(fair, free));
    if (held < holding.held) {
      holding.held = held;
      lane?.share();
    }
    // A connection that is not closed yet has its place still.
    const stated = Math.max(held, Math.min(usedOf(holding), Math.max(free, stored?.[0] ?? 0)));
    noteHunger(holding, { name, wanted, held, fair });

    const [storedHeld, storedWanted] = stored ?? [0, 0];
    const isToTell =
      isContended || wanted > stated || storedWanted > stated || stored === undefined;
    const statedWanted = isToTell ? wanted : storedWanted;
    const circuit = circuitOf(holding);
    const isNews = (circuit?.id ?? null) !== (row?.circuit?.id ?? null);
    // More is counted on only once the row was written anew: a proposal whose answer was lost may be stored still.
    const isSame = held === holding.held && stated === storedHeld;
    if (isSame && statedWanted === storedWanted && !isNews) {
      if (lane === null && stated === 0 && holding.former.length === 0) holdings.delete(name);
      return null;
    }
    const parts: Record<string, Parts[string]> = {};
    for (const claim of claims) parts[claim.epoch] = [claim.held, claim.wanted];
    if (stated + statedWanted > 0) parts[epoch] = [stated, statedWanted];
    const etag = randomUUID();
    const proposal = { lane: name, etag, replaces: row?.etag ?? null, parts, circuit };
    return { proposal, held, untilMs: lane?.circuit().openUntilMs ?? null };
  };

  const noteHunger = (
    holding: Holding,
    about: {
      readonly name: string;
      readonly wanted: number;
      readonly held: number;
      readonly fair: number;
    },
  ): void => {
    const { name, wanted, held, fair } = about;
    if (wanted > held && fair > held) hungry.add(name);
    else hungry.delete(name);
    if (wanted === 0 || held > 0) {
      holding.hungrySince = null;
      if (held > 0) holding.takenUntil = -Infinity;
      return;
    }
    holding.hungrySince ??= now();
    if (fair > 0 && now() - holding.hungrySince < HUNGRY_MAX_MS) return;
    holding.hungrySince = null;
    holding.takenUntil = now() + TAKEN_MS;
    d.onChange();
  };

  /** As it is to be stored: what this worker's lane has come to know, or what the row says. */
  const circuitOf = ({ lane, row, synced }: Holding): SharedCircuit | null => {
    const own = lane?.circuit();
    if (own === undefined || own.openUntilMs === synced.untilMs) return row?.circuit ?? null;
    if (own.openUntilMs === null) return null;
    const forMs = own.openUntilMs - now();
    return { id: randomUUID(), by: epoch, forMs, opens: own.opens, reason: own.reason ?? '' };
  };

  /** Another worker has opened or closed the lane's circuit. */
  const adopt = (holding: Holding): void => {
    const { lane, row, synced } = holding;
    const shared = row?.circuit ?? null;
    if (lane === null || (shared?.id ?? null) === synced.id) return;
    const { openUntilMs } = lane.circuit();
    const hasOwnNews = openUntilMs !== synced.untilMs;
    const isSooner = (untilMs: number): boolean => openUntilMs === null || openUntilMs < untilMs;
    if (shared === null) {
      holding.synced = { id: null, untilMs: hasOwnNews ? synced.untilMs : null };
      if (!hasOwnNews && openUntilMs !== null) lane.forgive();
      return;
    }
    const laterMs = (shared.by === epoch ? 0 : FOLLOW_MS) - (now() - holding.readAt);
    const forMs = Math.max(0, shared.forMs + laterMs);
    if (hasOwnNews && !isSooner(now() + forMs)) {
      holding.synced = { id: shared.id, untilMs: synced.untilMs };
      return;
    }
    lane.reopen({ forMs, opens: shared.opens, reason: shared.reason });
    holding.synced = { id: shared.id, untilMs: lane.circuit().openUntilMs };
  };

  const learn = (rows: readonly LaneShare[]): void => {
    for (const row of rows) {
      const holding = holdings.get(row.lane);
      if (holding === undefined) continue;
      holding.row = row;
      holding.readAt = now();
      adopt(holding);
      told.add(row.lane);
    }
  };

  const lose = (): void => {
    validUntil = -Infinity;
    isAnew = true;
    allLookedAt = -Infinity;
    for (const [name, holding] of holdings) {
      holding.held = 0;
      holding.row = null;
      holding.lane?.share();
      told.add(name);
    }
  };

  /** Those that were looked at the longest ago. */
  const someHoldings = (): readonly string[] => {
    const names = [...holdings.keys()];
    if (names.length <= SHARES_MAX) return names;
    const from = (turns++ * SHARES_MAX) % names.length;
    return [...names.slice(from), ...names.slice(0, from)].slice(0, SHARES_MAX);
  };

  const look = async (names: readonly string[]): Promise<void> => {
    const before = others;
    const sentAt = now();
    const known = names.map((name) => [name, holdings.get(name)?.row?.etag ?? null] as const);
    const found = await lookAtShares(d.db, { epoch, isAnew, known, lifeMs });
    lookedAt = sentAt;
    others = found.others;
    if (!found.isRenewed) {
      if (isAnew) throw new Error('this worker run is not on the list');
      d.log.warn('what this worker had of the limits of lanes ran out; it asks anew');
      return lose();
    }
    if (now() - sentAt > lifeMs * ANSWER_PART) return; // it may have been taken for gone
    isAnew = false;
    validUntil = sentAt + lifeMs - Math.min(MARGIN_MS, lifeMs / 4);
    isCounting = true;
    learn(found.changed);
    const isSame = before.length === others.length && before.every((one) => others.includes(one));
    for (const [name, { row }] of holdings) {
      if (!isSame || Object.keys(row?.parts ?? {}).length > 1) told.add(name);
    }
    for (const name of hungry) told.add(name);
    if (before.length === 0 && others.length > 0) allLookedAt = -Infinity; // what they want is not known yet
  };

  const propose = async (): Promise<void> => {
    const planned = new Map<string, Planned>();
    for (const name of told) {
      if (planned.size >= SHARES_MAX) break;
      told.delete(name);
      const holding = holdings.get(name);
      if (holding === undefined) continue;
      holding.former = holding.former.filter((one) => one.used() > 0);
      const plan = decide(name, holding);
      if (plan !== null) planned.set(name, plan);
    }
    if (planned.size === 0) return;
    const proposals = [...planned.values()].map(({ proposal }) => proposal);
    try {
      const answer = await proposeShares(d.db, epoch, proposals);
      others = answer.others;
      for (const name of answer.written) settle(name, planned.get(name)!);
      learn(answer.current);
      for (const name of planned.keys()) if (!answer.written.has(name)) told.add(name);
    } catch (error) {
      // It may be stored or not, and even be stored later: the etag tells.
      for (const name of planned.keys()) {
        const holding = holdings.get(name);
        if (holding !== undefined) holding.row = null;
        told.add(name);
      }
      throw error;
    }
  };

  const settle = (name: string, { proposal, held, untilMs }: Planned): void => {
    const holding = holdings.get(name);
    if (holding === undefined) return;
    const isKept = holding.row?.circuit?.id === proposal.circuit?.id;
    holding.row = proposal;
    holding.readAt = now();
    if (!isKept) holding.synced = { id: proposal.circuit?.id ?? null, untilMs };
    if (holding.lane === null) {
      told.add(name); // until nothing of it is left
      return;
    }
    if (held === holding.held) return;
    holding.mayBurst = Object.keys(proposal.parts).every((one) => one === epoch);
    holding.held = held;
    holding.lane.share();
    d.onChange();
  };

  const turn = async (): Promise<void> => {
    if (now() - allLookedAt >= LOOK_MS) {
      const at = now();
      const isAlone = others.length === 0 && !isAnew;
      allLookedAt = at;
      await look(isAlone ? [] : someHoldings());
    } else if (hungry.size > 0 && now() - lookedAt >= HUNGRY_LOOK_MS) {
      await look([...hungry].slice(0, SHARES_MAX));
    }
    for (let round = 0; round < ROUNDS_MAX && told.size > 0 && isValid(); round++) await propose();
  };

  const run = (): void => {
    if (running !== null || stopped) return;
    clearTimeout(later);
    const done = turn()
      .then(
        () => (told.size > 0 && isValid() ? AGAIN_MS : untilLook()),
        (error: unknown) => {
          allLookedAt = -Infinity;
          d.log.debug({ err: error }, 'the shares of lanes cannot be asked for now');
          return HUNGRY_LOOK_MS;
        },
      )
      .then((waitMs) => {
        running = null;
        if (!stopped) later = setTimeout(run, waitMs);
      });
    running = done;
  };
  const untilLook = (): number => {
    const hungryAt = hungry.size > 0 ? lookedAt + HUNGRY_LOOK_MS : Infinity;
    return Math.max(1, Math.min(allLookedAt + LOOK_MS, hungryAt) - now());
  };

  const tell = (name: string): void => {
    told.add(name);
    if (stopped || !isValid() || running !== null) return;
    soon ??= setImmediate(() => {
      soon = null;
      run();
    });
  };

  /** While the database says nothing: what had been granted is over by our own clock, and idle connections go. */
  const watch = setInterval(() => {
    if (!isCounting || isValid()) return;
    isCounting = false;
    for (const { lane } of holdings.values()) lane?.share();
  }, LOOK_MS);

  return {
    partOf(name) {
      const holding = holdingOf(name);
      return {
        connections: () => (isValid() ? Math.max(0, holding.held - formerlyUsed(holding)) : 0),
        isTaken: () => holding.held === 0 && now() < holding.takenUntil,
        mayBurst: () => holding.mayBurst,
        tell: () => {
          if (holdings.get(name) === holding) tell(name);
        },
      };
    },
    take(lane) {
      const holding = holdingOf(lane.name);
      holding.lane = lane;
      holding.synced = { id: null, untilMs: null };
      if (holding.row !== null) adopt(holding);
    },
    drop(name) {
      const holding = holdings.get(name);
      if (holding === undefined || holding.lane === null) return;
      holding.former = [...holding.former, holding.lane];
      holding.lane = null;
      holding.held = 0;
      tell(name);
    },
    isOver: (name) => holdings.has(name) && !isValid(),
    async start() {
      await look([]);
      run();
    },
    async stop() {
      stopped = true;
      clearInterval(watch);
      clearTimeout(later);
      if (soon !== null) clearImmediate(soon);
      await running;
    },
  };
}
