// A delivery worker: claims due deliveries in batches, spreads them over lanes, attempts them, settles
// what came of them. One run has one epoch, one heartbeat row and one journal. It begins nothing while
// the database does not take results, and nothing once its own heartbeat is old: somebody may have
// taken over what it held.
import { randomUUID } from 'node:crypto';
import type { Logger } from '../log.ts';
import { nextDelayMs } from '../queue/backoff.ts';
import { claim, type ClaimedDelivery } from '../queue/claim.ts';
import { beat, heldBy, release, retire, UNKNOWN_DELAY_MS } from '../queue/lease.ts';
import { NO_EVIDENCE, type Settlement, type Waiting } from '../queue/settle.ts';
import type { Store } from '../store/orm.ts';
import { attempt, type AttemptDependencies, type Line } from './attempt.ts';
import { openJournal, type Journal } from './journal.ts';
import { createLane, type Lane } from './lane.ts';
import { createSettler } from './settler.ts';
import { WHOLE_MAX_BYTES } from './stored-bytes.ts';

export interface WorkerOptions {
  readonly store: Store;
  readonly log: Logger;
  readonly attempts: Omit<AttemptDependencies, 'onDot'>;
  readonly journalFolder: string;
  readonly processStartTime: string | null;
  readonly retryScheduleMs: readonly number[];
  readonly random: () => number;
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

/** Claimed at a time; a batch is worked off in a fraction of a second. */
const CLAIM_MAX = 200;
/** Claimed and not begun: no more is claimed above this. */
const QUEUED_MAX = 200;
/** Begun at a time, in all lanes. */
const ACTIVE_MAX = 600;
/** One tenant's share of a claim, so that a bulk sender leaves room. */
const PER_TENANT_MAX = 100;
/** The sink and the smarthost take everything, so they may fill a worker; a domain may not. */
const TRUSTED_LANE = { connectionsMax: 20, queuedMax: 150 };
const MX_LANE = { connectionsMax: 10, queuedMax: 10 };
const POLL_MS = 1_000;
const BEAT_MS = 5_000;
/** Below the silence after which a run counts as lost (jobs/), with room for a slow clock. */
const BEAT_AGE_MAX_MS = 40_000;
const STOP_MAX_MS = 18_000;
/** How often what the database says we hold is compared with what we know. */
const STRAYS_MS = 60_000;
const STRAYS_MAX = 5_000;
/** Lanes that have nothing left are forgotten above this number. */
const LANES_MAX = 5_000;
/** What messages from the blob store may take of memory at once; one in pieces counts as WHOLE_MAX_BYTES. */
const LARGE_BYTES_MAX = 96 * 1024 * 1024;

const limitsOf = (lane: string): typeof MX_LANE =>
  lane.startsWith('mx:') ? MX_LANE : TRUSTED_LANE;
const keyOf = (at: { readonly emailId: string; readonly position: number }): string =>
  `${at.emailId}/${at.position}`;

export async function startWorker(options: WorkerOptions): Promise<Worker> {
  const { store, log } = options;
  const epoch = randomUUID();
  const journal: Journal = openJournal(options.journalFolder, {
    epoch,
    pid: process.pid,
    startTime: options.processStartTime,
  });
  await beat(store.pool, epoch);
  const lanes = new Map<string, Lane>();
  /** Claimed and not yet settled in the database. */
  const held = new Set<string>();
  /** Begun, and the final dot may have left. */
  const dotted = new Set<string>();
  let largeBytes = 0;
  let lastBeatAt = performance.now();
  let stopping = false;
  let wakeUp: (() => void) | null = null;
  let nudged = false;

  const settler = createSettler({
    store,
    journal,
    log,
    onSettled(batch, waiting) {
      for (const settlement of batch) {
        held.delete(keyOf(settlement));
        dotted.delete(keyOf(settlement));
      }
      nudge();
      if (waiting.length > 0) options.onWaiting(waiting);
    },
  });

  const d: AttemptDependencies = {
    ...options.attempts,
    onDot(delivery) {
      // Somebody else may have it by now; before the dot it is safe to leave it to them.
      if (sealed || isLeaseOld()) throw new Error('the lease is gone');
      journal.dot(delivery);
      dotted.add(keyOf(delivery));
    },
  };
  /** No final dot leaves any more. */
  let sealed = false;
  const isLeaseOld = (): boolean => performance.now() - lastBeatAt > BEAT_AGE_MAX_MS;

  const work = async (line: Line, delivery: ClaimedDelivery): Promise<void> => {
    while (settler.isBehind() && !stopping) await sleep(100);
    const isLarge = delivery.raw === null;
    const memoryBytes = Math.min(delivery.rawSizeBytes, WHOLE_MAX_BYTES);
    while (isLarge && !stopping && largeBytes > 0 && largeBytes + memoryBytes > LARGE_BYTES_MAX) {
      await sleep(20);
    }
    if (stopping || isLeaseOld()) {
      await giveBack([delivery]);
      return;
    }
    if (isLarge) largeBytes += memoryBytes;
    const settlement = await decide(line, delivery);
    if (isLarge) largeBytes -= memoryBytes;
    try {
      journal.result(settlement);
    } catch (error) {
      log.warn(
        { err: error },
        'the journal cannot be written; the result goes to the database only',
      );
    }
    settler.add(settlement);
  };

  const decide = async (line: Line, delivery: ClaimedDelivery): Promise<Settlement> => {
    const about = {
      tenantId: delivery.tenantId,
      emailId: delivery.emailId,
      position: delivery.position,
      attempt: delivery.attempt,
      recipientCount: delivery.recipientCount,
      epoch,
    };
    try {
      const { verdict, evidence } = await attempt(d, line, delivery);
      const delayMs =
        verdict === 'unknown'
          ? UNKNOWN_DELAY_MS
          : nextDelayMs(options.retryScheduleMs, delivery.attempt, options.random());
      return { ...about, verdict, evidence, delayMs };
    } catch (error) {
      // A fault of ours: the peer is not to blame and the mail must not be lost over it.
      log.error(
        { err: error, email: delivery.emailId, attempt: delivery.attempt },
        'attempt broke',
      );
      line.session?.close();
      line.session = null;
      return {
        ...about,
        verdict: 'deferred',
        delayMs: nextDelayMs(options.retryScheduleMs, delivery.attempt, options.random()),
        evidence: {
          ...NO_EVIDENCE,
          cause: 'internal',
          enhanced: '4.3.0',
          reply: 'An internal fault interrupted the attempt; it is tried again.',
        },
      };
    }
  };

  const laneOf = (name: string): Lane => {
    const known = lanes.get(name);
    if (known !== undefined) return known;
    if (lanes.size >= LANES_MAX) {
      for (const [other, lane] of lanes) {
        if (lane.queued() + lane.active() === 0) lanes.delete(other);
      }
    }
    const lane = createLane({ name, connectionsMax: limitsOf(name).connectionsMax, work });
    lanes.set(name, lane);
    return lane;
  };

  const giveBack = async (deliveries: readonly ClaimedDelivery[]): Promise<void> => {
    if (deliveries.length === 0) return;
    for (const delivery of deliveries) held.delete(keyOf(delivery));
    try {
      await release(store, epoch, { held: deliveries, begun: false });
    } catch (error) {
      log.warn({ err: error }, 'claimed deliveries could not be given back now');
      straysCheckedAt = -Infinity;
    }
  };

  const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));
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

  const claimLoop = async (): Promise<void> => {
    while (!stopping) {
      if (settler.isBehind()) {
        await pause(250);
        continue;
      }
      if (performance.now() - straysCheckedAt > STRAYS_MS && !(await releaseStrays())) {
        await sleep(500);
        continue;
      }
      const stalled = [...lanes.values()].filter((lane) => lane.isStalled());
      await giveBack(stalled.flatMap((lane) => lane.takeQueued()));
      const room = findRoom();
      if (room === 0) {
        await pause(POLL_MS);
        continue;
      }
      try {
        const busy = [...lanes.values()].filter(
          (lane) => lane.isStalled() || lane.queued() >= limitsOf(lane.name).queuedMax,
        );
        const claimed = await claim(store, {
          epoch,
          max: room,
          perTenant: Math.min(room, PER_TENANT_MAX),
          exceptLanes: busy.map(({ name }) => name),
        });
        for (const delivery of claimed) {
          held.add(keyOf(delivery));
          laneOf(delivery.lane).add(delivery);
        }
        if (claimed.length === 0) await pause(POLL_MS);
      } catch (error) {
        log.warn({ err: error }, 'nothing can be claimed now; trying again');
        straysCheckedAt = -Infinity; // it may have happened all the same
        await sleep(500);
      }
    }
  };

  /** How much may be claimed; 0 rather than a few, so that claims stay worth their cost. */
  const findRoom = (): number => {
    const all = [...lanes.values()];
    const queued = all.reduce((sum, lane) => sum + lane.queued(), 0);
    const active = all.reduce((sum, lane) => sum + lane.active(), 0);
    const room = Math.min(CLAIM_MAX, QUEUED_MAX - queued, ACTIVE_MAX - active);
    return room < CLAIM_MAX / 4 ? 0 : room;
  };

  /** A claim whose answer was lost may have happened: what the database says we hold and we do not know, we give back. */
  let straysCheckedAt = performance.now();
  const releaseStrays = async (): Promise<boolean> => {
    try {
      const strays = (await heldBy(store.pool, epoch, STRAYS_MAX)).filter(
        (one) => !held.has(keyOf(one)),
      );
      await release(store, epoch, { held: strays, begun: false });
      if (strays.length > 0)
        log.warn({ strays: strays.length }, 'gave back what was claimed unseen');
      straysCheckedAt = performance.now();
      return true;
    } catch (error) {
      log.debug({ err: error }, 'the database is still away');
      return false;
    }
  };

  const beatLoop = setInterval(() => {
    const beganAt = performance.now();
    beat(store.pool, epoch).then(
      () => {
        lastBeatAt = beganAt;
      },
      (error: unknown) => log.warn({ err: error }, 'heartbeat not stored'),
    );
  }, BEAT_MS);

  const claiming = claimLoop();
  return {
    epoch,
    nudge,
    async stop() {
      stopping = true;
      nudge();
      const notBegun = [...lanes.values()].flatMap((lane) => lane.takeQueued());
      const isDone = Promise.all([
        claiming.then(() => giveBack([...lanes.values()].flatMap((lane) => lane.takeQueued()))),
        giveBack(notBegun),
        ...[...lanes.values()].map((lane) => lane.stop()),
      ]).then(() => settler.drain());
      const late = new Promise<false>((resolve) => {
        setTimeout(() => resolve(false), STOP_MAX_MS).unref();
      });
      if (await Promise.race([isDone.then(() => true), late])) {
        clearInterval(beatLoop);
        settler.end();
        await retire(store.pool, epoch).catch(() => undefined);
        journal.end();
        return;
      }
      // Whoever still waits for a peer: before the dot it goes back; after it the journal decides at the next start.
      sealed = true;
      clearInterval(beatLoop);
      settler.end();
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
