// A delivery worker: claims due deliveries in batches, finds their way, spreads them over lanes, attempts them, settles
// what came of them. One run has one epoch, one heartbeat row and one journal. It begins nothing while
// the database does not take results, and nothing once its own heartbeat is old: somebody may have
// taken over what it held. What is closed, paused or full is not claimed for, so no row changes over it.
import { randomUUID } from 'node:crypto';
import type { Logger } from '../log.ts';
import { claim, type ClaimCursors, type ClaimedDelivery } from '../queue/claim.ts';
import { beat, heldBy, release, renew, retire } from '../queue/lease.ts';
import type { OutcomePolicy } from '../queue/outcome-policy.ts';
import { NO_PAUSES, readPauses, type Pauses } from '../queue/pauses.ts';
import type { Settlement, Waiting } from '../queue/settle.ts';
import type { Store } from '../store/orm.ts';
import type { AttemptDependencies, Line } from './attempt.ts';
import { createBusyMeter, createCourtesy } from './courtesy.ts';
import { lookAtCrowd, type Crowd } from './crowd.ts';
import { decide } from './decide.ts';
import { idleMs } from './idle.ts';
import { openJournal, type Journal } from './journal.ts';
import { createLaneSet } from './lane-set.ts';
import type { Lane, Learned, Planned } from './lane.ts';
import { measureLanes } from './measured-lanes.ts';
import type { NextHopDependencies } from './next-hop.ts';
import { createPlanner } from './planner.ts';
import type { PortWatch } from './port25.ts';
import type { Providers } from './providers.ts';
import { createBrake, createReturns } from './returns.ts';
import { createRooms } from './rooms.ts';
import { createSettler } from './settler.ts';
import { createShares } from './shares.ts';
import { WHOLE_MAX_BYTES } from './stored-bytes.ts';
import { createWays, maySpill } from './ways.ts';

export interface WorkerOptions {
  readonly store: Store;
  readonly log: Logger;
  readonly attempts: Omit<AttemptDependencies, 'onDot'>;
  readonly nextHops: NextHopDependencies;
  /** As the operator's file has them now. */
  readonly providers: () => Providers;
  /** Null: nobody watches whether port 25 is open. */
  readonly watch: PortWatch | null;
  readonly journalFolder: string;
  readonly processStartTime: string | null;
  /** All that makes mail ready nudges this worker: nobody else runs the roles that do. */
  readonly isTold: boolean;
  readonly retryScheduleMs: readonly number[];
  readonly random: () => number;
  /** What the operator decides about outcomes, as it is now. */
  readonly outcomes: () => OutcomePolicy;
  /** This run was taken for lost and what it held belongs to others: the process must end. */
  readonly onLost: () => void;
  /** Told about deliveries that now wait for a clock. */
  readonly onWaiting: (waiting: readonly Waiting[]) => void;
}

export interface Worker {
  readonly epoch: string;
  /** Something may be due: look now rather than at the next poll. */
  nudge(): void;
  /** Begins nothing new, gives back what was not begun, waits for what was. */
  stop(): Promise<void>;
}

/** One tenant's share of a claim, so that a bulk sender leaves room. */
const PER_TENANT_MAX = 100;
const POLL_MS = 1_000;
/** After a claim that found nothing: under load nudges come faster than there is something to find. */
const EMPTY_MS = 10;
/** A claim that found fewer than FEW is not followed by another before this: half of what a claim costs is for each row. */
const CLAIM_EVERY_MS = 15;
const FEW = 50;
const BEAT_MS = 5_000;
/** How often pauses, limits and ports are looked at, and lanes reported. */
const LOOK_MS = 1_000;
/** Nudged from outside, it reads pauses this much later: one may have been made or ended. */
const NUDGED_LOOK_MS = 50;
/** Below the silence after which a run counts as lost (jobs/), with room for a slow clock. */
const BEAT_AGE_MAX_MS = 40_000;
const STOP_MAX_MS = 18_000;
/** A journal that refused a line is tried again after this. */
const UNWRITABLE_MS = 5_000;
/** How often what the database says we hold is compared with what we know. */
const STRAYS_MS = 60_000;
const STRAYS_MAX = 5_000;
/** What messages from the blob store may take of memory at once; one in pieces counts as WHOLE_MAX_BYTES. */
const LARGE_BYTES_MAX = 96 * 1024 * 1024;

const NOTHING_LEARNED: Learned = { signal: { kind: 'nothing' }, pause: null, isBlocked: false };

const keyOf = (at: { readonly emailId: string; readonly position: number }): string =>
  `${at.emailId}/${at.position}`;
const byTime = (a: ClaimedDelivery, b: ClaimedDelivery): number =>
  a.emailId === b.emailId ? a.position - b.position : a.emailId < b.emailId ? -1 : 1;
const sum = (numbers: readonly number[]): number => numbers.reduce((all, one) => all + one, 0);
const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

export async function startWorker(options: WorkerOptions): Promise<Worker> {
  const { store, log, nextHops, watch } = options;
  const now = (): number => performance.now();
  const epoch = randomUUID();
  const journal: Journal = openJournal(
    options.journalFolder,
    { epoch, pid: process.pid, startTime: options.processStartTime },
    (error) => log.warn({ err: error }, 'the journal cannot be synced or made smaller now'),
  );
  await beat(store.pool, epoch);
  /** Claimed and not yet settled in the database. */
  const held = new Set<string>();
  /** Begun, and the final dot may have left. */
  const dotted = new Set<string>();
  /** Bytes of messages that were claimed and not begun. */
  let queuedBytes = 0;
  let largeBytes = 0;
  /** Of messages that were begun and not decided. */
  let openBytes = 0;
  const brake = createBrake(now);
  let lastBeatAt = now();
  /** No final dot leaves any more. */
  let sealed = false;
  /** This run is taken off the list by itself. */
  let isRetired = false;
  /** Until then nothing is begun that could not be completed. */
  let unwritableUntil = -Infinity;
  let stopping = false;
  let wakeUp: (() => void) | null = null;
  let nudged = false;
  let pauses: Pauses = NO_PAUSES;

  const nudge = (): void => {
    nudged = true;
    wakeUp?.();
  };
  const pause = async (ms: number): Promise<void> => {
    if (!nudged) {
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, ms);
        wakeUp = () => {
          clearTimeout(timer);
          resolve();
        };
      });
      wakeUp = null;
    }
    nudged = false;
  };

  const settler = createSettler({
    store,
    journal,
    log,
    outcomes: options.outcomes,
    onSettled(batch, waiting) {
      for (const settlement of batch) {
        held.delete(keyOf(settlement));
        dotted.delete(keyOf(settlement));
      }
      nudge();
      if (waiting.length > 0) options.onWaiting(waiting);
    },
  });

  const isLeaseOld = (): boolean => now() - lastBeatAt > BEAT_AGE_MAX_MS;
  const attempts: AttemptDependencies = {
    ...options.attempts,
    onDot(delivery) {
      // Somebody else may have it by now; before the dot it is safe to leave it to them.
      if (sealed || isLeaseOld()) throw new Error('the lease is gone');
      try {
        journal.dot(delivery);
      } catch (error) {
        if (now() > unwritableUntil) {
          log.error({ err: error }, 'the journal cannot be written, so no message is completed');
        }
        unwritableUntil = now() + UNWRITABLE_MS;
        throw error;
      }
      dotted.add(keyOf(delivery));
    },
  };

  const record = (settlement: Settlement): void => {
    try {
      journal.result(settlement);
    } catch (error) {
      log.warn({ err: error }, 'the journal cannot be written; the result is in the database only');
    }
  };

  const work = async (
    lane: Lane,
    line: Line,
    group: readonly [Planned, ...Planned[]],
  ): Promise<Learned> => {
    const deliveries = group.map(({ delivery }) => delivery);
    const [{ delivery: first }] = group;
    const rawBytes = sum(deliveries.map(({ raw }) => raw?.length ?? 0));
    queuedBytes -= rawBytes;
    while (settler.isBehind() && !stopping) await sleep(100);
    const isLarge = first.raw === null;
    const memoryBytes = Math.min(first.rawSizeBytes, WHOLE_MAX_BYTES);
    while (isLarge && !stopping && largeBytes > 0 && largeBytes + memoryBytes > LARGE_BYTES_MAX) {
      await sleep(20);
    }
    if (stopping || isLeaseOld() || shares.isOver(lane.name)) {
      await giveBack(deliveries, { wasQueued: false });
      return NOTHING_LEARNED;
    }
    if (isLarge) largeBytes += memoryBytes;
    openBytes += rawBytes;
    const outcome = await decide({ ...options, attempts, epoch, onSent: record }, line, {
      lane,
      group,
      pauses: lanes.limitsOf(lane).pauses,
    });
    if (isLarge) largeBytes -= memoryBytes;
    openBytes -= rawBytes;
    for (const settlement of outcome.settlements) {
      record(settlement);
      settler.add(settlement);
    }
    await giveBack(outcome.unbegun, { wasQueued: false });
    return outcome.learned;
  };

  const returns = createReturns(async (deliveries) => {
    try {
      await release(store, epoch, { held: deliveries, begun: false });
    } catch (error) {
      log.warn({ err: error }, 'claimed deliveries could not be given back now');
      straysCheckedAt = -Infinity;
    }
  });
  const giveBack = async (
    deliveries: readonly ClaimedDelivery[],
    { wasQueued = true } = {},
  ): Promise<void> => {
    if (deliveries.length === 0) return;
    for (const delivery of deliveries) {
      held.delete(keyOf(delivery));
      if (wasQueued) queuedBytes -= delivery.raw?.length ?? 0;
    }
    await returns.add(deliveries);
  };

  const rooms = createRooms();
  const shares = createShares({ db: store.pool, epoch, now, log, onChange: nudge });
  await shares.start();
  const lanes = createLaneSet({
    providers: options.providers,
    shares,
    rooms,
    watch,
    now,
    random: options.random,
    egresses: () => new Set([...nextHops.policy().pools.values()].flat().map(({ name }) => name)),
    maySpill: () => maySpill(nextHops),
    work,
    onChange: nudge,
  });
  await lanes.restore(store.pool);

  const ways = createWays({
    nextHops,
    watch,
    log,
    laneOf: (destination, egress) => lanes.byName.get(rooms.laneOf(destination, egress) ?? ''),
  });
  const planner = createPlanner({
    now,
    egressFor: ways.egressFor,
    find: ways.find,
    isKnown: rooms.isKnown,
    onFound(deliveries, way) {
      const { lane, hops } = lanes.laneOf(deliveries[0]!.lane, way);
      const allowed = deliveries.filter((delivery) => !stopping && !isPaused(delivery));
      const taken = new Set(allowed.slice(0, lane.spare()));
      lane.add(...[...taken].map((delivery) => ({ delivery, hops })));
      if (lane.closedBy() !== null) brake.note(deliveries.length - taken.size);
      void giveBack(deliveries.filter((delivery) => !taken.has(delivery)));
    },
  });
  const isPaused = ({ tenantId, lane }: ClaimedDelivery): boolean =>
    pauses.all || pauses.tenants.has(tenantId) || pauses.destinations.has(lane);

  /** What was claimed and may not begin now, taken back from where it waits. */
  const takeHeldUp = (): readonly ClaimedDelivery[] => [
    ...planner.takeSlow(),
    ...planner.takeWaiting(isPaused),
    ...[...lanes.byName.values()].flatMap((lane) => {
      if (lane.queued() === 0) return [];
      const isClosed = lane.closedBy() !== null || lane.isStalled();
      return lane.takeQueued(isClosed ? undefined : isPaused);
    }),
  ];

  const courtesy = createCourtesy({ now, busy: createBusyMeter() });
  let cursors: ClaimCursors = {};
  const claimLoop = async (): Promise<void> => {
    while (!stopping) {
      if (settler.isBehind() || now() < unwritableUntil) {
        await pause(250);
        continue;
      }
      if (now() - straysCheckedAt > STRAYS_MS && !(await releaseStrays())) {
        await sleep(500);
        continue;
      }
      await giveBack(takeHeldUp());
      const bytes = { queuedBytes, openBytes };
      const crowd = lookAtCrowd(lanes.byName.values(), { waiting: planner.waiting(), ...bytes });
      if (crowd.room === 0 || pauses.all) {
        await pause(POLL_MS);
        continue;
      }
      try {
        const beganAt = now();
        const { count, waitMs, isPaced } = await claimSome(crowd);
        // Where somebody has less for the sake of others, those others must not wait.
        if (count > 0 && count < FEW && !isPaced) {
          await sleep(Math.max(0, CLAIM_EVERY_MS - (now() - beganAt)));
        }
        if (count > 0) continue;
        const tookMs = now() - beganAt;
        await sleep(EMPTY_MS);
        await pause(Math.min(idleMs(options.isTold, tookMs), waitMs ?? POLL_MS));
      } catch (error) {
        log.warn({ err: error }, 'nothing can be claimed now; trying again');
        straysCheckedAt = -Infinity; // it may have happened all the same
        await sleep(500);
      }
    }
  };

  /**
   * How many there were; `waitMs`: for whom more are held back until then, or null; `isPaced`: whoever has much gets less
   * than there is.
   */
  const claimSome = async ({
    room: max,
    mayTry,
    mayLinger,
  }: Crowd): Promise<{
    readonly count: number;
    readonly waitMs: number | null;
    readonly isPaced: boolean;
  }> => {
    const slow = planner.slow();
    const slowOnes = new Set(slow);
    const offer = rooms.offer({
      lanes: lanes.byName,
      isOut: (destination) => pauses.destinations.has(destination) || slowOnes.has(destination),
      hasOtherWay: ways.hasOther,
      mayTry,
      mayLinger,
      mayAsk: mayTry && !planner.isBusy() && lanes.mayAsk() && !brake.isOn(),
    });
    const { except, perTenant, waitMs } = courtesy.next();
    const { deliveries, cursors: next } = await claim(store, {
      epoch,
      max,
      perTenant: Math.min(max, PER_TENANT_MAX, perTenant ?? max),
      exceptLanes: [...offer.exceptLanes, ...pauses.destinations, ...slow],
      exceptTenants: [...pauses.tenants, ...except],
      rooms: offer.rooms,
      roomOfOthers: offer.roomOfOthers,
      cursors,
    });
    cursors = next;
    const counts = new Map<string, number>();
    for (const delivery of deliveries) {
      held.add(keyOf(delivery));
      queuedBytes += delivery.raw?.length ?? 0;
      counts.set(delivery.lane, (counts.get(delivery.lane) ?? 0) + 1);
    }
    rooms.note(counts);
    courtesy.note(deliveries);
    // Ids tell the time: first come first, and recipients of one email side by side.
    planner.add(deliveries.toSorted(byTime));
    return {
      count: deliveries.length,
      waitMs,
      isPaced: perTenant !== null || waitMs !== null,
    };
  };

  /** A claim whose answer was lost may have happened: what the database says we hold and we do not know, we give back. */
  let straysCheckedAt = now();
  const releaseStrays = async (): Promise<boolean> => {
    try {
      // What is given back twice might have been claimed again in between.
      await returns.drain();
      const strays = (await heldBy(store.pool, epoch, STRAYS_MAX)).filter(
        (one) => !held.has(keyOf(one)),
      );
      await release(store, epoch, { held: strays, begun: false });
      if (strays.length > 0)
        log.warn({ strays: strays.length }, 'gave back what was claimed unseen');
      straysCheckedAt = now();
      return true;
    } catch (error) {
      log.debug({ err: error }, 'the database is still away');
      return false;
    }
  };

  const beatLoop = setInterval(() => {
    const beganAt = now();
    renew(store.pool, epoch).then(
      (isOurs) => {
        if (isOurs) lastBeatAt = beganAt;
        if (isOurs || isRetired) return;
        // Neither a dot nor a claim by this run any more: whoever took over has decided.
        sealed = true;
        stopping = true;
        log.error('this worker was silent for so long that what it held was given to others');
        options.onLost();
      },
      (error: unknown) => log.warn({ err: error }, 'heartbeat not stored'),
    );
  }, BEAT_MS);

  let looking: Promise<void> | null = null;
  const applyPauses = async (): Promise<void> => {
    pauses = await readPauses(store.pool);
    lanes.look(pauses);
  };
  const look = async (): Promise<void> => {
    try {
      await applyPauses();
      await lanes.report(store.pool);
    } catch (error) {
      log.debug({ err: error }, 'pauses cannot be read, or lanes not be reported now');
      lanes.look(pauses);
    }
  };
  await look();
  const lookLoop = setInterval(() => {
    looking ??= look().finally(() => {
      looking = null;
    });
  }, LOOK_MS);
  let again: NodeJS.Timeout | null = null;
  const nudgeFromOutside = (): void => {
    nudge();
    again ??= setTimeout(() => {
      again = null;
      applyPauses().then(nudge, () => undefined); // the next look says why not
    }, NUDGED_LOOK_MS);
  };

  const takeAllQueued = (): readonly ClaimedDelivery[] => [
    ...planner.takeWaiting(() => true),
    ...[...lanes.byName.values()].flatMap((lane) => lane.takeQueued()),
  ];
  const claiming = claimLoop();
  const unmeasure = measureLanes(lanes.byName);
  return {
    epoch,
    nudge: nudgeFromOutside,
    async stop() {
      stopping = true;
      nudge();
      unmeasure();
      clearInterval(lookLoop);
      const isDone = Promise.all([
        giveBack(takeAllQueued()),
        claiming.then(() => giveBack(takeAllQueued())),
        ...[...lanes.byName.values()].map((lane) => lane.stop()),
      ])
        .then(() => settler.drain())
        .then(() => returns.drain());
      const late = new Promise<false>((resolve) => {
        setTimeout(() => resolve(false), STOP_MAX_MS).unref();
      });
      if (await Promise.race([isDone.then(() => true), late])) {
        clearInterval(beatLoop);
        settler.end();
        await looking;
        await shares.stop();
        await lanes.report(store.pool).catch(() => undefined);
        isRetired = true;
        await retire(store.pool, epoch).catch(() => undefined);
        journal.end();
        return;
      }
      // Whoever still waits for a peer: before the dot it goes back; after it the journal decides at the next start.
      sealed = true;
      clearInterval(beatLoop);
      settler.end();
      await shares.stop();
      const begun = await heldBy(store.pool, epoch, STRAYS_MAX).catch(() => []);
      const undotted = begun.filter((one) => !dotted.has(keyOf(one)));
      await release(store, epoch, { held: undotted, begun: true, orderly: true }).catch(
        (error: unknown) => {
          log.warn({ err: error }, 'what was under way is decided by the next start');
        },
      );
    },
  };
}
