// All lanes of one worker: makes the lane that a way leads to, keeps its limits as the operator's file has them, closes
// lanes over what others decide (a pause, a blocked port), and says how they are to the table `lane`.
import { readLanes, reportLanes, type LaneReport as Report } from '../queue/lanes.ts';
import type { Queryable } from '../queue/enqueue.ts';
import type { Pauses } from '../queue/pauses.ts';
import {
  DEFAULT_POOL,
  HOME_LANE,
  readDestination,
  SANDBOX_LANE,
  SINK_LANE,
  SMARTHOST_LANE,
} from '../store/destination.ts';
import { createLane, type Lane, type LaneIdentity, type LaneWork } from './lane.ts';
import type { NextHops } from './next-hop.ts';
import type { Way } from './planner.ts';
import type { PortWatch } from './port25.ts';
import type { Limits, Providers } from './providers.ts';
import type { Rooms } from './rooms.ts';
import type { Shares } from './shares.ts';
import { laneName, siteOf } from './site.ts';

export interface LaneSet {
  readonly byName: ReadonlyMap<string, Lane>;
  /** The lane for a destination whose way was found, and the hops as its provider wants them. */
  laneOf(destination: string, way: Way): { readonly lane: Lane; readonly hops: NextHops };
  limitsOf(lane: Pick<Lane, 'name' | 'provider'>): Limits;
  /** Looks at what the operator and the watch say now; call about once a second. */
  look(pauses: Pauses): void;
  /** Whether mail for destinations that are not known could leave: not all ways out are blocked, or one may be tried. */
  mayAsk(): boolean;
  /** Stores what changed since the last report; writes nothing where nothing did. */
  report(db: Queryable): Promise<void>;
  /** Goes on with the circuits that were open when a worker last said so. */
  restore(db: Queryable): Promise<void>;
}

/** Lanes that have nothing left are forgotten above this number; those that are closed above twice as many. */
const LANES_MAX = 5_000;
/** Where all are closed, so many more may come until they are looked at again. */
const FORGET_STEP = 100;
/** Of one statement. */
const REPORTS_MAX = 1_000;
/** What goes nowhere needs no connection, only a bound. */
const NOWHERE = 'nowhere';
const NOWHERE_MAX = 50;
const TRUSTED_MAX = 20;
/** Connections to our own listener, which takes 20 from one address (smtp/mx.ts). */
const HOME_MAX = 10;
/** Lanes of a blocked egress of which one may probe. */
const PROBED_MAX = 8;
/** An idle connection to the sink is kept this long. */
const TRUSTED_IDLE_MS = 2_000;
const NEVER = { failuresMax: Infinity, openMs: 1_000, openMaxMs: 1_000 };

/** The sink and what is made up here ask for nothing; they are bounded so that they do not fill the worker. */
const unlimited = (connectionsMax: number): Limits => ({
  connectionsMax,
  newConnectionsPerMinute: null,
  messagesPerConnection: 100,
  messagesPerSecond: null,
  recipientsPerTransaction: 50,
  idleMs: TRUSTED_IDLE_MS,
  needsTls: false,
  circuit: NEVER,
  pauses: [],
});

export function createLaneSet(options: {
  readonly providers: () => Providers;
  /** With the other workers. */
  readonly shares: Pick<Shares, 'partOf' | 'take' | 'drop'>;
  readonly rooms: Rooms;
  readonly watch: PortWatch | null;
  readonly now: () => number;
  readonly random: () => number;
  /** The names of all that the operator's file has now. */
  readonly egresses: () => ReadonlySet<string>;
  /** What cannot leave by port 25 goes through the smarthost. */
  readonly maySpill: () => boolean;
  readonly work: LaneWork;
  readonly onChange: () => void;
}): LaneSet {
  const { rooms, watch, now, shares } = options;
  const byName = new Map<string, Lane>();
  const reported = new Map<string, { readonly key: string; readonly report: Report }>();
  const sandbox = unlimited(TRUSTED_MAX);
  const nowhere = unlimited(NOWHERE_MAX);
  let providers = options.providers();
  let pausedLanes: ReadonlySet<string> = new Set();
  const blocked = new Set<string>();
  /** Egresses that may be tried by whoever comes first. */
  const untried = new Set<string>();
  let turn = 0;

  const limitsOf: LaneSet['limitsOf'] = ({ name, provider }) => {
    if (name === SINK_LANE || name === SANDBOX_LANE) return sandbox;
    if (name === NOWHERE) return nowhere;
    if (name === HOME_LANE) {
      return { ...unlimited(HOME_MAX), circuit: providers.default.circuit };
    }
    if (name === SMARTHOST_LANE) return providers.smarthost;
    return providers.list.find((one) => one.name === provider)?.limits ?? providers.default;
  };

  const open = (identity: LaneIdentity): Lane => {
    const known = byName.get(identity.name);
    if (known !== undefined) return known;
    if (byName.size >= forgetAt) forgetIdle();
    const lane = createLane({
      ...identity,
      limits: limitsOf(identity),
      ...(isOurs(identity)
        ? { firstConnections: limitsOf(identity).connectionsMax }
        : { part: shares.partOf(identity.name) }),
      now,
      random: options.random,
      onChange: options.onChange,
      work(self, line, group) {
        if (self.egress !== null && blocked.has(self.egress)) withdrawProbes(self.egress);
        return options.work(self, line, group);
      },
    });
    byName.set(identity.name, lane);
    if (!isOurs(identity)) shares.take(lane);
    hold(lane);
    return lane;
  };

  let forgetAt = LANES_MAX;
  /** All that are idle, since each costs a look at all of them. */
  const forgetIdle = (): void => {
    const keptMax = byName.size < 2 * LANES_MAX ? Infinity : 2 * LANES_MAX - FORGET_STEP;
    for (const [name, lane] of byName) {
      const isKept = lane.closedBy() !== null && byName.size <= keptMax;
      if (isKept || lane.isTrusted || lane.queued() + lane.active() > 0) continue;
      byName.delete(name);
      reported.delete(name);
      rooms.drop(name);
      void lane.stop(); // its kept connections
      shares.drop(name);
    }
    forgetAt = Math.min(2 * LANES_MAX, Math.max(LANES_MAX, byName.size + FORGET_STEP));
  };

  const trusted = (name: string): LaneIdentity => ({
    name,
    egress: null,
    site: name,
    provider: null,
    isTrusted: true,
  });

  const hold = (lane: Lane): void => {
    const isBlocked = lane.egress !== null && blocked.has(lane.egress);
    lane.hold(pausedLanes.has(lane.name) ? 'paused' : isBlocked ? 'blocked' : null);
  };

  const ofEgress = (egress: string): readonly Lane[] =>
    [...byName.values()].filter((lane) => lane.egress === egress);

  const withdrawProbes = (egress: string): void => {
    untried.delete(egress);
    for (const lane of ofEgress(egress)) lane.allowProbe(false);
  };

  const lookAtPorts = (): void => {
    if (watch === null) return;
    for (const egress of new Set([...options.egresses(), ...blocked])) {
      const isBlocked = watch.isBlocked(egress) !== null;
      if (!isBlocked && blocked.delete(egress)) {
        untried.delete(egress);
        rooms.forget(new Set([SMARTHOST_LANE])); // what was spilled goes its own way again
        // Failures to connect were not the hosts' fault.
        for (const lane of ofEgress(egress)) {
          if (lane.view().circuit.reason?.startsWith('connect:') === true) lane.forgive();
        }
      }
      if (!isBlocked) continue;
      blocked.add(egress);
      if (!watch.mayProbe(egress)) continue;
      untried.add(egress);
      const lanes = ofEgress(egress).filter(({ name }) => !pausedLanes.has(name));
      for (let count = 0; count < Math.min(PROBED_MAX, lanes.length); count++) {
        const lane = lanes[turn++ % lanes.length]!;
        hold(lane);
        lane.allowProbe(true);
      }
    }
    if (blocked.size > 0 && options.maySpill()) {
      const isBlocked = ({ egress }: Lane): boolean => egress !== null && blocked.has(egress);
      rooms.forget(new Set([...byName.values()].filter(isBlocked).map(({ name }) => name)));
    }
  };

  const describe = (lane: Lane): Report => {
    const { circuit, ...view } = lane.view();
    const before = reported.get(lane.name)?.report;
    // The same moment in every report, although two clocks are read.
    const dateOf = (ms: number | null, last: Date | null | undefined): Date | null => {
      if (ms === null) return null;
      const date = new Date(Date.now() + ms - now());
      const isSame =
        last !== null && last !== undefined && Math.abs(last.getTime() - date.getTime()) < 1_000;
      return isSame ? last : date;
    };
    return {
      name: lane.name,
      egress: lane.egress ?? DEFAULT_POOL,
      site: lane.site,
      provider: lane.provider,
      circuit: circuit.state,
      openedAt: dateOf(circuit.openedAtMs, before?.openedAt),
      openUntil: dateOf(circuit.openUntilMs, before?.openUntil),
      opens: circuit.opens,
      reason: circuit.reason,
      ...view,
      destinations: [],
    };
  };

  return {
    byName,
    limitsOf,
    laneOf(destination, { egress, hops }) {
      if (hops.kind === 'none') return { lane: open({ ...trusted(NOWHERE) }), hops };
      const { kind } = readDestination(destination);
      if (kind !== 'mx') {
        rooms.learn(destination, '', kind);
        return { lane: open(trusted(kind)), hops };
      }
      if (hops.isHome === true) {
        rooms.learn(destination, egress.name, HOME_LANE);
        return { lane: open(trusted(HOME_LANE)), hops };
      }
      // Spilled: the operator's smarthost takes what cannot leave by port 25.
      if (hops.targets.length > 0 && hops.targets.every((target) => target.trusted)) {
        rooms.learn(destination, egress.name, SMARTHOST_LANE);
        return { lane: open(trusted(SMARTHOST_LANE)), hops };
      }
      const site = siteOf(providers, hops.mxNames ?? hops.targets.map(({ host }) => host));
      const name = laneName(egress.name, site.name);
      rooms.learn(destination, egress.name, name);
      const lane = open({
        name,
        egress: egress.name,
        site: site.name,
        provider: site.provider,
        isTrusted: false,
      });
      if (untried.has(egress.name) && blocked.has(egress.name)) lane.allowProbe(true);
      return { lane, hops: site.limits.needsTls ? withTls(hops) : hops };
    },
    look(pauses) {
      if (providers !== options.providers()) {
        providers = options.providers();
        for (const lane of byName.values()) lane.limit(limitsOf(lane));
      }
      pausedLanes = pauses.lanes;
      lookAtPorts();
      for (const lane of byName.values()) {
        hold(lane);
        lane.wake();
      }
    },
    mayAsk: () =>
      blocked.size === 0 ||
      options.maySpill() ||
      [...options.egresses()].some((egress) => !blocked.has(egress)) ||
      [...untried].some((egress) => ofEgress(egress).length === 0),
    async report(db) {
      const changed: Report[] = [];
      for (const lane of byName.values()) {
        if (lane.name === NOWHERE) continue;
        const report = describe(lane);
        const key = JSON.stringify(report);
        const destinations = rooms.takeNews(lane.name);
        if (reported.get(lane.name)?.key === key && destinations.length === 0) continue;
        reported.set(lane.name, { key, report });
        changed.push({ ...report, destinations });
      }
      let at = 0;
      try {
        for (; at < changed.length; at += REPORTS_MAX) {
          await reportLanes(db, changed.slice(at, at + REPORTS_MAX));
        }
      } catch (error) {
        for (const { name, destinations } of changed.slice(at)) {
          reported.delete(name);
          for (const destination of destinations) rooms.tell(name, destination);
        }
        throw error;
      }
    },
    async restore(db) {
      for (const name of [SINK_LANE, SANDBOX_LANE, SMARTHOST_LANE]) {
        rooms.learn(name, '', name);
        open(trusted(name));
      }
      for (const report of await readLanes(db)) {
        const { name, egress, site, provider, openUntil, opens, reason } = report;
        const isTrusted = name === SMARTHOST_LANE || name === HOME_LANE;
        const lane = open(
          isTrusted ? trusted(name) : { name, egress, site, provider, isTrusted: false },
        );
        const forMs = Math.max(0, (openUntil?.getTime() ?? 0) - Date.now());
        const { openMaxMs } = limitsOf(lane).circuit;
        lane.reopen({ forMs: Math.min(forMs, 2 * openMaxMs), opens, reason: reason ?? '' });
        for (const destination of report.destinations) {
          rooms.learn(destination, name === SMARTHOST_LANE ? '' : egress, name);
        }
      }
    },
  };
}

/** It ends on this machine, so nothing has to be learned about a far end. */
const isOurs = ({ name }: LaneIdentity): boolean =>
  name === SINK_LANE || name === SANDBOX_LANE || name === NOWHERE;

const withTls = (hops: NextHops & { readonly kind: 'targets' }): NextHops => ({
  ...hops,
  targets: hops.targets.map((target) =>
    target.tls === 'opportunistic' ? { ...target, tls: 'required' as const } : target,
  ),
});
