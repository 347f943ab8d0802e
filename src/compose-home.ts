// Starts what tells authors of failed forwards, and replays: part of the composition root.
import type { Config } from './config.ts';
import { laneFor } from './delivery/next-hop.ts';
import { startTurns } from './jobs/turns.ts';
import type { Logger } from './log.ts';
import { reportFailedForwards, type ReportsPlace } from './receiving/forward-reports.ts';
import { runReplays } from './receiving/replay-turns.ts';
import { FORWARD_POOL } from './sending/forward.ts';
import type { BlobStore } from './store/blob.ts';
import type { Store } from './store/orm.ts';

/** Between two looks at forwards whose authors may have to be told. */
const REPORTS_MS = 2_000;
/** Replays of other processes are found within this time. */
const REPLAYS_MS = 5_000;

export interface HomeLoops {
  /** A replay was asked for. */
  nudgeReplays(): void;
  stop(): Promise<void>;
}

/** Null where no jobs run. */
export function startHomeLoops(
  config: Config,
  d: {
    readonly store: Store;
    readonly log: Logger;
    readonly blobs: BlobStore;
    /** Deliveries became ready. */
    readonly onReady: () => void;
    /** Forwards were put in line. */
    readonly onForwards: () => void;
  },
): HomeLoops | null {
  if (!config.roles.has('jobs')) return null;
  const parts = {
    store: d.store,
    log: d.log,
    blobs: d.blobs,
    now: () => new Date(),
    laneOf: laneFor(config.delivery, () => FORWARD_POOL),
    lifetimeMs: config.messageLifetimeMs,
    hostname: config.hostname,
    onReady: d.onReady,
  };
  let place: ReportsPlace | null = null;
  const reports = startTurns({
    name: 'reports about failed forwards',
    log: d.log,
    async turn() {
      place = await reportFailedForwards(parts, place);
      return place === null ? REPORTS_MS : 0;
    },
  });
  const replays = startTurns({
    name: 'replays',
    log: d.log,
    async turn() {
      const { nextInMs } = await runReplays(d.store, d.onForwards);
      return Math.min(nextInMs ?? REPLAYS_MS, REPLAYS_MS);
    },
  });
  return {
    nudgeReplays: replays.nudge,
    async stop() {
      await Promise.all([reports.stop(), replays.stop()]);
    },
  };
}
