// A delivery worker: claims due deliveries in batches, spreads them over lanes, attempts them, settles
// what came of them. One run has one epoch, one heartbeat row and one journal. It begins nothing while
// the database does not take results, and nothing once its own heartbeat is old: somebody may have
// taken over what it held.
import { randomUUID } from 'node:crypto';
import type { Logger } from '../log.ts';
import { nextDelayMs } from '../queue/backoff.ts';
import { claim, type ClaimedDelivery } from '../queue/claim.ts';
import { beat, heldBy, release, retire, UNKNOWN_DELAY_MS } from '../queue/lease.ts';
import type { Settlement, Waiting } from '../queue/settle.ts';
import type { Store } from '../store/orm.ts';
import { attempt, type AttemptDependencies, type Line } from './attempt.ts';
import { openJournal, type Journal } from './journal.ts';
import { createLane, type Lane } from './lane.ts';
import { createSettler } from './settler.ts';

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
const HELD_MAX = 300;
/** One tenant's share of a claim, so that a bulk sender leaves room. */
const PER_TENANT_MAX = 100;
/** A lane with this much waiting in this worker is not claimed for. */
const LANE_QUEUED_MAX = 150;
const TRUSTED_LANE_CONNECTIONS = 20;
const MX_LANE_CONNECTIONS = 10;
const POLL_MS = 1_000;
const BEAT_MS = 5_000;
/** Below the silence after which a run counts as lost (jobs/), with room for a slow clock. */
const BEAT_AGE_MAX_MS = 40_000;
const STOP_MAX_MS = 25_000;
/** Lanes that have nothing left are forgotten above this number. */
const LANES_MAX = 5_000;
/** Large messages under way at once, in bytes: bounds the memory of parallel attachments. */
const LARGE_BYTES_MAX = 96 * 1024 * 1024;

const keyOf = (at: { readonly emailId: string; readonly position: number }): string =>
  `${at.emailId}/${at.position}`;

export async function startWorker(options: WorkerOptions): Promise<Worker> {
  const { store, log } = options;
  const epoch = randomUUID();
  await beat(store.pool, epoch);
  const journal: Journal = openJournal(options.journalFolder, {
    epoch,
    pid: process.pid,
    startTime: options.processStartTime,
  });
  const lanes = new Map<string, Lane>();
  /** Claimed and not yet settled in the database. */
  const held = new Set<string>();
  let largeBytes = 0;
  let lastBeatAt = Date.now();
  let stopping = false;
  let wakeUp: (() => void) | null = null;
  let nudged = false;

  const settler = createSettler({
    store,
    journal,
    log,
    onSettled(batch, waiting) {
      for (const settlement of batch) held.delete(keyOf(settlement));
      if (held.size <= HELD_MAX - CLAIM_MAX / 2) nudge();
      if (waiting.length > 0) options.onWaiting(waiting);
    },
  });

  const d: AttemptDependencies = {
    ...options.attempts,
    onDot: (delivery) => journal.dot(delivery),
  };

  const work = async (line: Line, delivery: ClaimedDelivery): Promise<void> => {
    while (settler.isBehind() && !stopping) await sleep(100);
    const isLarge = delivery.raw === null;
    while (isLarge && largeBytes > 0 && largeBytes + delivery.rawSizeBytes > LARGE_BYTES_MAX) {
      await sleep(20);
    }
    if (stopping || Date.now() - lastBeatAt > BEAT_AGE_MAX_MS) {
      await giveBack([delivery]);
      return;
    }
    if (isLarge) largeBytes += delivery.rawSizeBytes;
    const settlement = await decide(line, delivery);
    if (isLarge) largeBytes -= delivery.rawSizeBytes;
    journal.result(settlement);
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
          cause: 'internal',
          stage: null,
          host: null,
          address: null,
          port: null,
          tls: null,
          code: null,
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
    const isMx = name.startsWith('mx:');
    const lane = createLane({
      name,
      connectionsMax: isMx ? MX_LANE_CONNECTIONS : TRUSTED_LANE_CONNECTIONS,
      work,
    });
    lanes.set(name, lane);
    return lane;
  };

  const giveBack = async (deliveries: readonly ClaimedDelivery[]): Promise<void> => {
    for (const delivery of deliveries) held.delete(keyOf(delivery));
    try {
      await release(store, epoch, { held: deliveries, begun: false });
    } catch (error) {
      log.warn({ err: error }, 'claimed deliveries could not be given back; the next run does it');
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
      const room = Math.min(CLAIM_MAX, HELD_MAX - held.size);
      if (room < CLAIM_MAX / 4 || settler.isBehind()) {
        await pause(settler.isBehind() ? 250 : POLL_MS);
        continue;
      }
      try {
        const busy = [...lanes.values()].filter((lane) => lane.queued() >= LANE_QUEUED_MAX);
        const claimed = await claim(store.pool, {
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
        await sleep(500);
        await releaseStrays();
      }
    }
  };

  /** A claim whose answer was lost may have happened all the same: what we do not know, we give back. */
  const releaseStrays = async (): Promise<void> => {
    try {
      const strays = (await heldBy(store.pool, epoch, 10 * HELD_MAX)).filter(
        (one) => !held.has(keyOf(one)),
      );
      await release(store, epoch, { held: strays, begun: false });
    } catch (error) {
      log.debug({ err: error }, 'the database is still away');
    }
  };

  const beatLoop = setInterval(() => {
    beat(store.pool, epoch).then(
      () => {
        lastBeatAt = Date.now();
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
      await claiming;
      const notBegun = [...lanes.values()].flatMap((lane) => lane.takeQueued());
      const allStopped = Promise.all([...lanes.values()].map((lane) => lane.stop()));
      await giveBack(notBegun);
      const finished = await Promise.race([
        allStopped.then(() => settler.drain()).then(() => true),
        new Promise<false>((resolve) => {
          setTimeout(() => resolve(false), STOP_MAX_MS).unref();
        }),
      ]);
      clearInterval(beatLoop);
      // What is still under way is left to the journal: the next run settles or declares it.
      if (!finished) return;
      await retire(store.pool, epoch).catch(() => undefined);
      journal.end();
    },
  };
}
