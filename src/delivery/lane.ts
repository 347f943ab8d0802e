// One lane in one worker: the deliveries that were claimed and planned for it, and the tracks that work them off. A track
// is one connection's worth of work. What may begin is limited by the provider's numbers, by what the lane has learned
// about its far end (concurrency.ts, circuit.ts, pace.ts), and by who waits: one-recipient mail goes first, and bulk never
// takes all connections.
import type { ClaimedDelivery } from '../queue/claim.ts';
import type { LaneLimit } from '../queue/lanes.ts';
import type { LaneSignal, Line } from './attempt.ts';
import { createCircuit, type CircuitView } from './circuit.ts';
import { createConcurrency } from './concurrency.ts';
import { createFairQueue, type FairQueue } from './fair-queue.ts';
import { createLanePaces } from './lane-paces.ts';
import type { NextHops } from './next-hop.ts';
import type { Limits } from './providers.ts';
import type { Session } from './session.ts';
import type { Part } from './shares.ts';

/** A delivery whose way is known. */
export interface Planned {
  readonly delivery: ClaimedDelivery;
  readonly hops: NextHops;
}

/** What one transaction taught. */
export interface Learned {
  readonly signal: LaneSignal;
  /** A reply asked for quiet. */
  readonly pause: { readonly forMs: number; readonly reason: string } | null;
  /** The way out is blocked: nothing was learned about the far end. */
  readonly isBlocked: boolean;
}

/** Somebody else's word: an operator's pause, or a port that is blocked. */
export type Hold = 'paused' | 'blocked';

export interface LaneIdentity {
  readonly name: string;
  /** Where mail leaves; null: no address of ours has a part in it. */
  readonly egress: string | null;
  readonly site: string;
  readonly provider: string | null;
  /** The sink, the smarthost, answers made up here: they take everything, so they may fill a worker. */
  readonly isTrusted: boolean;
}

export interface LaneView {
  readonly circuit: CircuitView;
  readonly limitedBy: LaneLimit | null;
  readonly connections: number;
  readonly connectionsMax: number;
  readonly concurrency: number;
  readonly queued: number;
  readonly inFlight: number;
  readonly lastSuccessAt: Date | null;
  readonly lastFailureAt: Date | null;
}

export interface Lane extends LaneIdentity {
  /** Claimed and not begun. */
  queued(): number;
  /** Transactions begun and not decided. */
  active(): number;
  /** What all workers together may use. */
  connectionsMax(): number;
  /** Connections that are open, being opened or being closed. */
  used(): number;
  /** Connections that there is work for. */
  wanted(): number;
  /** The part of this worker has changed. */
  share(): void;
  /** How many more the next claim may bring. */
  room(): number;
  /** How many more are taken of what has been claimed already. */
  spare(): number;
  /** Together, so that recipients of one email find each other. */
  add(...planned: readonly Planned[]): void;
  /** Why nothing may begin here now, and what waits must go back; null: it may, if only one. */
  closedBy(): LaneLimit | null;
  isProbing(): boolean;
  /** Something has gone well here. */
  isProven(): boolean;
  /** For a while nothing has begun or ended, and something is under way: its far end hangs. */
  isHanging(): boolean;
  /** It hangs, or a transaction takes long here as a rule: a place that it takes comes free late. */
  isSlow(): boolean;
  /** It hangs, and nothing more can be tried beside that; or other workers have all of its connections. */
  isStalled(): boolean;
  /** Takes back what was not begun, so that it can be released. */
  takeQueued(which?: (delivery: ClaimedDelivery) => boolean): readonly ClaimedDelivery[];
  hold(hold: Hold | null): void;
  /** While it is held as blocked: whether one transaction may go through. */
  allowProbe(may: boolean): void;
  limit(limits: Limits): void;
  /** Begins what may begin by now, also where it is time alone that has changed; call about once a second. */
  wake(): void;
  /** What is known from before the start, or from another worker. */
  reopen(about: { readonly forMs: number; readonly opens: number; readonly reason: string }): void;
  /** The circuit opened over something that is mended, or another worker's probe went well. */
  forgive(): void;
  circuit(): CircuitView;
  view(): LaneView;
  /** Closes idle connections at once; resolves when no connection is left. */
  stop(): Promise<void>;
}

/** Longer than a healthy peer takes for a message; what waits behind is given back then. */
const STALLED_MS = 10_000;
/** A lane whose transactions take longer is slow; of which each counts for so much. */
const SLOW_MS = 1_000;
const NEWEST_PART = 0.2;
/** Claimed for a lane ahead of its connections: as much as it gets done in two seconds, within these. */
const AHEAD_MS = 2_000;
const QUEUED = { unproven: 10, min: 50, max: 150 };
/** What many destinations of one lane may bring at once; the rest is given back. */
const SPARE_MAX = 200;
/** What a trusted lane takes of one claim; and whatever more was claimed before the last one had arrived here. */
const TRUSTED_ROOM = 100;
const TRUSTED_SPARE = 500;
/** Of a rate limit, what may wait in a worker's memory. */
const PACED_MS = 5_000;
/** So many claims are worth it for a few deliveries. */
const REFILL_MS = 500;
/** One in so many connections is kept for one-recipient mail. */
const RESERVED_PART = 5;

interface Track {
  readonly line: Line;
  timer: NodeJS.Timeout | undefined;
}

/** Attempts a group over the line, and says what that taught. */
export type LaneWork = (
  lane: Lane,
  line: Line,
  group: readonly [Planned, ...Planned[]],
) => Promise<Learned>;

/** `work` decides all of what it is given, and never rejects. `now` is monotonic. */
export function createLane(
  options: LaneIdentity & {
    readonly limits: Limits;
    /** Absent: no other worker has a part in it. */
    readonly part?: Part;
    /** Connections that are used at once from the beginning; absent: few, until it is known that more go well. */
    readonly firstConnections?: number;
    readonly now: () => number;
    readonly random: () => number;
    readonly work: LaneWork;
    /** It closed or opened: what waits must go back, or may come. */
    readonly onChange: () => void;
  },
): Lane {
  const { now, isTrusted, part } = options;
  let { limits } = options;
  const tenantOf = ({ delivery }: Planned): string => delivery.tenantId;
  const singles = createFairQueue(tenantOf);
  const bulk = createFairQueue(tenantOf);
  const idle: Track[] = [];
  const running = new Set<Promise<void>>();
  const circuit = createCircuit({ rules: limits.circuit, random: options.random });
  const concurrency = createConcurrency({
    max: limits.connectionsMax,
    ...(options.firstConnections === undefined ? {} : { first: options.firstConnections }),
  });
  const paces = createLanePaces(now, part?.mayBurst ?? (() => true));
  let tracks = 0;
  /** Whose connection is not closed yet. */
  const closing = new Set<Promise<void>>();
  let active = 0;
  let activeBulk = 0;
  let inFlight = 0;
  let hold: Hold | null = null;
  let probesLeft = 0;
  let isWaitingForPace = false;
  let paceTimer: NodeJS.Timeout | undefined;
  let stopped = false;
  let hasProgressed = false;
  let tookMs = 0;
  let lastProgressAt = now();
  let lastOfferAt = -Infinity;
  let perSecond = 0;
  let lastSuccessAt: Date | null = null;
  let lastFailureAt: Date | null = null;

  const queued = (): number => singles.size + bulk.size;
  const most = (): number => Math.min(limits.connectionsMax, part?.connections() ?? Infinity);
  const capacity = (): number => Math.min(most(), concurrency.value());
  const bulkMax = (): number => {
    const all = capacity();
    return all < 2 ? all : all - Math.max(1, Math.floor(all / RESERVED_PART));
  };
  const isHalfOpen = (): boolean => circuit.state(now()) === 'half_open';

  const closedBy = (): LaneLimit | null => {
    if (hold === 'paused') return 'paused';
    if (hold === 'blocked' && probesLeft === 0) return 'blocked';
    return circuit.state(now()) === 'open' ? 'circuit' : null;
  };

  paces.use(limits, most());

  /** It is open, and may carry more: as many as we allow, and as many as the host has said. */
  const hasMore = (session: Session | null): session is Session =>
    session !== null &&
    session.isOpen() &&
    session.sent < Math.min(limits.messagesPerConnection, session.limits.messages);

  const isUsable = ({ line: { session } }: Track, { hops }: Planned): boolean => {
    if (!hasMore(session)) return false;
    if (hops.kind === 'none') return true; // it dials nobody
    return hops.targets.some(({ host }) => host === session.target.host);
  };

  /** Where the mail waits that may begin now. */
  const whoseTurn = (): FairQueue<Planned> | null => {
    if (singles.size > 0) return singles;
    return bulk.size > 0 && activeBulk < bulkMax() ? bulk : null;
  };

  const pump = (): void => {
    clearTimeout(paceTimer);
    isWaitingForPace = false;
    while (!stopped && hasPlace() && closedBy() === null && circuit.admits(now())) {
      const queue = whoseTurn();
      const first = queue?.peek();
      if (queue === null || first === undefined) return;
      const found = idle.findIndex((track) => isUsable(track, first));
      const needsNew = found === -1 && first.hops.kind === 'targets';
      const waitMs = paces.waitMs(needsNew);
      if (waitMs > 0) {
        isWaitingForPace = true;
        if (most() < limits.connectionsMax) part?.tell();
        paceTimer = setTimeout(pump, Math.ceil(waitMs));
        return;
      }
      paces.take(needsNew);
      const track = takeTrack(found);
      const task = run(track, takeGroup(queue)).finally(() => running.delete(task));
      running.add(task);
    }
  };

  const hasPlace = (): boolean => {
    if (active + closing.size < capacity()) return true;
    if (most() < wanted()) part?.tell();
    return false;
  };

  const wanted = (): number => {
    if (stopped || closedBy() !== null) return 0;
    if (isWaitingForPace) return limits.connectionsMax;
    return Math.min(limits.connectionsMax, concurrency.value(), active + queued());
  };

  const takeTrack = (found: number): Track => {
    const isFull = tracks >= capacity();
    const [track] = found !== -1 ? idle.splice(found, 1) : isFull ? idle.splice(0, 1) : [];
    if (track !== undefined) {
      clearTimeout(track.timer);
      return track;
    }
    tracks += 1;
    return { line: { session: null }, timer: undefined };
  };

  /** Who is next in the queue, and with it what goes to the same place with the same message. */
  const takeGroup = (queue: FairQueue<Planned>): readonly [Planned, ...Planned[]] => {
    const first = queue.peek()?.delivery;
    const max = first?.recipientCount === 1 ? 1 : limits.recipientsPerTransaction;
    return queue.take(
      max,
      ({ delivery }) => delivery.emailId === first?.emailId && delivery.lane === first.lane,
    );
  };

  const run = async (track: Track, group: readonly [Planned, ...Planned[]]): Promise<void> => {
    const isBulk = Number(group[0].delivery.isBulk);
    progress(0);
    const beganAt = now();
    const trial = circuit.begin(beganAt);
    if (hold === 'blocked') probesLeft = Math.max(0, probesLeft - 1);
    active += 1;
    activeBulk += isBulk;
    inFlight += group.length;
    track.line.messagesMax = limits.messagesPerConnection;
    const learned = await options.work(lane, track.line, group);
    const isFull = active >= capacity() || (bulk.size > 0 && activeBulk >= bulkMax());
    const isOwnLimit = concurrency.value() <= most();
    active -= 1;
    activeBulk -= isBulk;
    inFlight -= group.length;
    progress(group.length);
    tookMs += (Math.min(now() - beganAt, STALLED_MS) - tookMs) * NEWEST_PART;
    learn(learned, trial, isFull && isOwnLimit);
    rest(track);
  };

  const progress = (count: number): void => {
    const at = now();
    perSecond = perSecond * Math.exp((lastProgressAt - at) / AHEAD_MS) + (count * 1_000) / AHEAD_MS;
    lastProgressAt = at;
  };

  const learn = (
    { signal, pause, isBlocked }: Learned,
    trial: { readonly isProbe: boolean },
    isFull: boolean,
  ): void => {
    const before = circuit.state(now());
    const contact =
      isBlocked || signal.kind === 'nothing'
        ? 'nothing'
        : signal.kind === 'unreachable'
          ? 'unreachable'
          : 'talked';
    const why = signal.kind === 'unreachable' ? `${signal.stage}: ${signal.why}` : '';
    circuit.end(trial, { contact, why, nowMs: now() });
    if (contact === 'talked' && trial.isProbe) concurrency.restart();
    if (signal.kind === 'talked') {
      hasProgressed = true;
      lastSuccessAt = new Date();
      concurrency.good(isFull);
    } else if (contact !== 'nothing') {
      lastFailureAt = new Date();
      concurrency.bad();
    }
    if (pause !== null) circuit.open({ ...pause, nowMs: now() });
    if (circuit.state(now()) === before) return;
    part?.tell();
    options.onChange();
  };

  const rest = (track: Track): void => {
    if (stopped || !hasMore(track.line.session) || tracks > capacity()) {
      end(track);
      pump();
      return;
    }
    idle.push(track);
    pump();
    if (!idle.includes(track)) return;
    track.timer = setTimeout(() => {
      const at = idle.indexOf(track);
      if (at !== -1) idle.splice(at, 1);
      end(track);
    }, limits.idleMs);
  };

  const end = (track: Track): void => {
    clearTimeout(track.timer);
    const { session, leaving } = track.line;
    track.line.session = null;
    session?.close();
    const closed = session?.closed ?? leaving;
    if (closed === undefined) {
      tracks -= 1;
      return;
    }
    const gone = closed.then(() => {
      closing.delete(gone);
      tracks -= 1;
      pump();
      part?.tell();
    });
    closing.add(gone);
  };

  const queuedMax = (): number => {
    if (isTrusted) return QUEUED.max;
    const min = isSlow() ? capacity() : hasProgressed ? QUEUED.min : QUEUED.unproven;
    const wanted = Math.floor(Math.min(Math.max((perSecond * AHEAD_MS) / 1_000, min), QUEUED.max));
    const { messagesPerSecond, connectionsMax } = limits;
    if (messagesPerSecond === null) return wanted;
    const own = messagesPerSecond * Math.min(1, Math.max(1, most()) / connectionsMax);
    return Math.min(wanted, Math.max(1, Math.ceil((own * PACED_MS) / 1_000)));
  };

  /** Null: as many as there is place for. */
  const oneOnly = (): number | null => {
    if (hold === 'blocked') return Math.max(0, probesLeft - queued());
    if (!isHalfOpen()) return null;
    return circuit.admits(now()) ? Math.max(0, 1 - queued()) : 0;
  };

  const isHanging = (): boolean => active > 0 && now() - lastProgressAt > STALLED_MS;
  const isSlow = (): boolean => isHanging() || (!isTrusted && tookMs > SLOW_MS);
  /** Also where only bulk hangs: what is claimed next may be bulk. */
  const isTaken = (): boolean => part?.isTaken() === true && active === 0;
  const isStalled = (): boolean =>
    isTaken() || (isHanging() && (active >= capacity() || activeBulk >= bulkMax()));

  const limitedBy = (): LaneLimit | null => {
    if (hold !== null) return hold;
    if (circuit.state(now()) !== 'closed') return 'circuit';
    // Nothing is claimed for what hangs, so nothing waits here.
    if (queued() === 0 && !isStalled()) return null;
    if (isWaitingForPace) return 'rate';
    if (active >= most()) return 'connections';
    return active >= capacity() || singles.size === 0 ? 'concurrency' : null;
  };

  const lane: Lane = {
    name: options.name,
    egress: options.egress,
    site: options.site,
    provider: options.provider,
    isTrusted,
    queued,
    active: () => active,
    connectionsMax: () => limits.connectionsMax,
    used: () => tracks,
    wanted,
    share() {
      paces.use(limits, most());
      while (tracks - closing.size > most() && idle.length > 0) end(idle.shift()!);
      pump();
    },
    room() {
      if (closedBy() !== null || isTaken()) return 0;
      const one = oneOnly();
      if (one !== null) return one;
      const max = queuedMax();
      if (isTrusted) return queued() >= max ? 0 : TRUSTED_ROOM;
      const free = Math.max(0, max - queued());
      // A claim for a few is worth it only where things go slowly.
      if (free * 4 < max && now() - lastOfferAt < REFILL_MS) return 0;
      if (free > 0) lastOfferAt = now();
      return free;
    },
    spare() {
      if (closedBy() !== null || isTaken()) return 0;
      return oneOnly() ?? Math.max(0, (isTrusted ? TRUSTED_SPARE : SPARE_MAX) - queued());
    },
    add(...planned) {
      for (const one of planned) (one.delivery.isBulk ? bulk : singles).add(one);
      pump();
    },
    closedBy,
    isProbing: () => isHalfOpen() || hold === 'blocked',
    isProven: () => isTrusted || hasProgressed,
    isHanging,
    isSlow,
    isStalled,
    takeQueued(which = () => true) {
      return [singles, bulk].flatMap((queue) =>
        queue.remove(({ delivery }) => which(delivery)).map(({ delivery }) => delivery),
      );
    },
    hold(next) {
      if (next === hold) return;
      hold = next;
      probesLeft = 0;
      pump();
      options.onChange();
    },
    allowProbe(may) {
      probesLeft = Number(may);
      if (may) options.onChange();
    },
    limit(next) {
      limits = next;
      concurrency.limit(next.connectionsMax);
      circuit.use(next.circuit);
      part?.tell();
      lane.share();
    },
    wake() {
      if (queued() > 0) pump();
    },
    reopen(about) {
      circuit.open({ ...about, nowMs: now() });
      options.onChange();
    },
    forgive() {
      circuit.close();
      part?.tell();
      options.onChange();
    },
    circuit: () => circuit.view(now()),
    view: () => ({
      circuit: circuit.view(now()),
      limitedBy: limitedBy(),
      connections: tracks,
      connectionsMax: limits.connectionsMax,
      concurrency: concurrency.value(),
      queued: queued(),
      inFlight,
      lastSuccessAt,
      lastFailureAt,
    }),
    async stop() {
      stopped = true;
      clearTimeout(paceTimer);
      for (const track of idle.splice(0)) end(track);
      await Promise.all(running);
      await Promise.all(closing);
    },
  };
  return lane;
}
