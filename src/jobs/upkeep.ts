// What happens by the clock, and the sweep behind it. The sweep runs on a plain timer, because it is what
// repairs everything else: it wakes overdue deliveries and schedules, sets missing alarms, decides what lost workers
// held, and starts Agenda again when its store was lost.
import { readdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { forgetOldWindows } from '../access/rate-limit.ts';
import { forgetDeletedTopics } from '../audience/topics.ts';
import { isJournal, readJournal, rewrittenAs, type LostRun } from '../delivery/journal.ts';
import type { Logger } from '../log.ts';
import { expireUntried } from '../queue/expire.ts';
import { recover, silentRuns } from '../queue/lease.ts';
import type { OutcomePolicy } from '../queue/outcome-policy.ts';
import { forgetOldShares } from '../queue/lane-shares.ts';
import { forgetOldLanes } from '../queue/lanes.ts';
import { scheduledTimes, SCHEDULE_LANE, wakeScheduled } from '../queue/schedule.ts';
import { wake, waitingLanes } from '../queue/wake.ts';
import { forgetOldDigests } from '../receiving/digest.ts';
import { forgetGreylisted } from '../receiving/greylist.ts';
import { forgetOldKeys } from '../sending/idempotency.ts';
import { rollUpMetrics } from '../sending/metric-rollup.ts';
import { forgetTlsResults } from '../sending/tls-report.ts';
import type { Store } from '../store/orm.ts';
import { endProcess } from '../store/process.ts';
import { expireSuppressions } from '../suppressions/suppressions.ts';
import { forgetRemovedEndpoints } from '../webhooks/forget.ts';
import { runJob } from '../telemetry/counted.ts';
import { jobInterval } from '../telemetry/instruments.ts';
import { BUCKET_MS, createClock, type Clock } from './clock.ts';

/** A worker run that has not been heard of for this long is suspected to be lost. */
const SILENCE_MAX_MS = 60_000;
/** And lost when it stays silent this much longer; it ought to be heard every 5 s. */
const WATCH_MS = 20_000;
const SWEEP_MS = 30_000;
/** Retries wait for the sweep until the clock has started. */
const CLOCK_START_MAX_MS = 5_000;
/** Alarms are set this far ahead, so they stay few; what is due later is found by a later sweep. */
const HORIZON_MS = 10 * 60_000;
const ALARMS_MAX = 2_000;
const KEYS_PER_RUN = 10_000;
const SUPPRESSIONS_PER_RUN = 50_000;
const TLS_RESULTS_PER_RUN = 50_000;
const CHOICES_PER_RUN = 50_000;
const GREYLISTED_PER_RUN = 100_000;
const DIGESTS_PER_RUN = 1_000_000;
const WEBHOOK_EVENTS_PER_RUN = 100_000;

export interface Upkeep {
  /** Sets the alarm for deliveries that now wait. */
  alarm(lane: string, dueAt: Date): void;
  stop(): Promise<void>;
}

export interface UpkeepOptions {
  readonly store: Store;
  readonly log: Logger;
  readonly databaseUrl: string;
  readonly mongodbUrl: string | null;
  readonly journalFolder: string;
  /** What the operator decides about outcomes, as it is now. */
  readonly outcomes: () => OutcomePolicy;
  /** Deliveries became ready. */
  readonly onReady: () => void;
  /** Removes the oldest messages of the sink above its limit. */
  readonly pruneSink: () => Promise<void>;
  /** Asks the DNS about the domains that are due for it. */
  readonly recheckDomains: () => Promise<void>;
  /** Removes stored bytes that no row names. */
  readonly collectBlobs: () => Promise<void>;
  /** Looks at the surroundings when it is time. */
  readonly examine: () => Promise<void>;
  /** Sends the TLS reports that are due. */
  readonly sendTlsReports: () => Promise<void>;
  /** Fetches the MTA-STS policies that are due for it. */
  readonly refreshStsPolicies: () => Promise<void>;
  /** How long a client that came again stays known. */
  readonly greylistForgetAfterMs: () => number;
  /** Between two sweeps; 30 s unless a test is in a hurry. */
  readonly sweepMs?: number;
  /** After how much silence a worker is suspected; 60 s unless a test is in a hurry. */
  readonly silenceMs?: number;
  /** How long a silent worker is watched; 20 s unless a test is in a hurry. */
  readonly watchMs?: number;
}

export async function startUpkeep(options: UpkeepOptions): Promise<Upkeep> {
  const { store, log } = options;
  const wakeLane = async (lane: string | null): Promise<void> => {
    if (lane === null || lane === SCHEDULE_LANE) {
      if ((await wakeScheduled(store)) > 0) options.onReady();
    }
    if (lane === SCHEDULE_LANE) return;
    if ((await wake(store.pool, lane)) > 0) options.onReady();
  };
  // Who was silent when we looked before, and since when. After an outage of the database everybody looks
  // silent for a moment: only who stays so while we watch is lost.
  let suspects = new Map<string, number>();
  const reap = async (): Promise<void> => {
    // Not the time of day: a clock that is set forward would end the watch at once.
    const now = performance.now();
    const silent = await silentRuns(store.pool, options.silenceMs ?? SILENCE_MAX_MS);
    suspects = new Map(silent.map((epoch) => [epoch, suspects.get(epoch) ?? now]));
    for (const [epoch, since] of suspects) {
      if (now - since < (options.watchMs ?? WATCH_MS)) continue;
      await recoverRun(options, epoch).catch((error: unknown) => {
        log.error({ err: error, epoch }, 'what a lost worker held cannot be decided now');
      });
    }
  };
  const clock: Clock = createClock({
    databaseUrl: options.databaseUrl,
    mongodbUrl: options.mongodbUrl,
    log,
    onAlarm: wakeLane,
    recurring: [
      { name: 'reap-lost-workers', everyMs: 15_000, run: reap },
      {
        name: 'forget-idempotency-keys',
        everyMs: 600_000,
        run: async () => void (await forgetOldKeys(store.pool, KEYS_PER_RUN)),
      },
      {
        name: 'forget-received-digests',
        everyMs: 600_000,
        run: async () => void (await forgetOldDigests(store.pool, DIGESTS_PER_RUN)),
      },
      {
        name: 'forget-old-lanes',
        everyMs: 3_600_000,
        run: async () => {
          await forgetOldLanes(store.pool);
          await forgetOldShares(store.pool);
        },
      },
      {
        name: 'forget-rate-windows',
        everyMs: 600_000,
        run: async () => void (await forgetOldWindows(store.pool)),
      },
      {
        name: 'expire-suppressions',
        everyMs: 3_600_000,
        run: async () => void (await expireSuppressions(store.pool, SUPPRESSIONS_PER_RUN)),
      },
      {
        name: 'expire-untried',
        everyMs: 600_000,
        run: async () => void (await expireUntried(store)),
      },
      {
        name: 'forget-deleted-topics',
        everyMs: 600_000,
        run: async () => void (await forgetDeletedTopics(store.pool, CHOICES_PER_RUN, new Date())),
      },
      {
        name: 'forget-removed-endpoints',
        everyMs: 600_000,
        run: async () => void (await forgetRemovedEndpoints(store.pool, WEBHOOK_EVENTS_PER_RUN)),
      },
      {
        name: 'roll-up-metrics',
        everyMs: 600_000,
        run: async () => void (await rollUpMetrics(store, { now: new Date() })),
      },
      { name: 'prune-sink', everyMs: 300_000, run: options.pruneSink },
      { name: 'recheck-domains', everyMs: 60_000, run: options.recheckDomains },
      { name: 'collect-blobs', everyMs: 86_400_000, run: options.collectBlobs },
      { name: 'examine', everyMs: 600_000, run: options.examine },
      { name: 'send-tls-reports', everyMs: 300_000, run: options.sendTlsReports },
      { name: 'refresh-sts-policies', everyMs: 600_000, run: options.refreshStsPolicies },
      {
        name: 'forget-greylisted',
        everyMs: 600_000,
        async run() {
          const forgetAfterMs = options.greylistForgetAfterMs();
          const about = { now: new Date(), forgetAfterMs, max: GREYLISTED_PER_RUN };
          await forgetGreylisted(store.pool, about);
        },
      },
      {
        name: 'forget-tls-results',
        everyMs: 600_000,
        run: () => forgetTlsResults(store.pool, TLS_RESULTS_PER_RUN),
      },
    ],
  });

  const sweep = async (): Promise<void> => {
    await runJob('sweep', sweepOnce).catch((error: unknown) => {
      log.warn({ err: error }, 'the sweep could not finish; the next one goes on');
    });
  };
  const sweepOnce = async (): Promise<void> => {
    await wakeLane(null);
    await reap();
    const range = { horizonMs: HORIZON_MS, bucketMs: BUCKET_MS, max: ALARMS_MAX };
    for (const { lane, dueAt } of await waitingLanes(store.pool, range)) {
      clock.alarm(lane, dueAt);
    }
    for (const dueAt of await scheduledTimes(store.pool, range)) {
      clock.alarm(SCHEDULE_LANE, dueAt);
    }
  };

  // Beside the sweep and not in its way: the clock's store may be silent for as long as it likes.
  let running: Promise<void> | null = null;
  const tick = (): void => {
    void clock.ensure();
    running ??= sweep().finally(() => {
      running = null;
    });
  };
  const startedIn = new Promise<void>((resolve) => {
    setTimeout(resolve, CLOCK_START_MAX_MS).unref();
  });
  await Promise.race([clock.ensure(), startedIn]);
  jobInterval.set({ task: 'sweep' }, (options.sweepMs ?? SWEEP_MS) / 1_000);
  tick();
  const timer = setInterval(tick, options.sweepMs ?? SWEEP_MS);
  return {
    alarm(lane, dueAt) {
      if (dueAt.getTime() <= Date.now() + HORIZON_MS) clock.alarm(lane, dueAt);
    },
    async stop() {
      clearInterval(timer);
      await running;
      await clock.stop();
    },
  };
}

type RecoverOptions = Pick<UpkeepOptions, 'store' | 'log' | 'journalFolder' | 'outcomes'>;

/** Decides what one lost run held, from its journal when it lies here. */
async function recoverRun(options: RecoverOptions, epoch: string): Promise<void> {
  const find = () => journals(options.journalFolder).find(({ run }) => run.epoch === epoch);
  const seen = find();
  if (seen?.run.pid === process.pid) return; // we are here
  // Stalled rather than gone: it must not wake up in the middle of what is tried again. What it wrote is
  // read after its end.
  if (seen !== undefined) await endProcess(seen.run);
  const lost = seen === undefined ? undefined : find();
  const counts = await recover(options.store, epoch, lost?.run.traceOf ?? null, options.outcomes());
  if (lost !== undefined) {
    rmSync(lost.path, { force: true });
    rmSync(rewrittenAs(lost.path), { force: true }); // it may have ended in the middle of that
  }
  options.log.warn({ epoch, ...counts }, 'a lost delivery worker was recovered');
}

/**
 * At the start, before any worker of this data directory runs: every journal here is of an earlier run. One
 * whose process still lives is ended first.
 */
export async function recoverLocalRuns(options: RecoverOptions): Promise<void> {
  for (const { run } of journals(options.journalFolder)) {
    await endProcess(run);
  }
  for (const { path, run } of journals(options.journalFolder)) {
    const counts = await recover(options.store, run.epoch, run.traceOf, options.outcomes());
    rmSync(path, { force: true });
    options.log.info({ epoch: run.epoch, ...counts }, 'recovered an earlier delivery worker');
  }
  // What is left has no whole header: its run ended before it could claim anything, or a power cut took the header, and
  // then what it held is found by its silence.
  for (const name of readdirSync(options.journalFolder)) {
    rmSync(join(options.journalFolder, name), { force: true });
  }
}

/** After a worker process of ours died: decides at once what it held. */
export async function recoverProcess(options: RecoverOptions, pid: number): Promise<void> {
  for (const { run } of journals(options.journalFolder)) {
    if (run.pid === pid) await recoverRun(options, run.epoch);
  }
}

function journals(folder: string): readonly { path: string; run: LostRun }[] {
  return readdirSync(folder)
    .filter(isJournal)
    .flatMap((name) => {
      const path = join(folder, name);
      const run = readJournal(path);
      return run === null ? [] : [{ path, run }];
    });
}
