// The doctor of a running appliance: looks by the clock and when an operator asks, keeps what it finds, and tells of changes.
// Part of the composition root.
import { Refusal } from './access/refusal.ts';
import type { Config } from './config.ts';
import { look, type DoctorParts } from './doctor/doctor.ts';
import { keepFindings, readFindings, takeTurn, type Change } from './doctor/kept.ts';
import type { DoctorVerbs } from './http/verbs.ts';
import type { Logger } from './log.ts';
import type { MarkedBlobStore } from './store/blob.ts';
import type { Store } from './store/orm.ts';

/** The clock comes by every ten minutes; of several processes one looks. */
const EVERY_MS = 9 * 60_000;
/** Longer than a look takes. */
const ASKED_EVERY_MS = 75_000;
/** What has just started has no worker and no lane yet. */
const FIRST_LOOK_MS = 60_000;

export interface ComposedDoctor {
  readonly verbs: DoctorVerbs;
  /** Looks when it is this process's turn. */
  readonly run: () => Promise<void>;
  /** Ends a look that is under way. */
  stop(): Promise<void>;
}

export function composeDoctor(
  config: Config,
  d: {
    readonly store: Store;
    readonly log: Logger;
    /** Absolute. */
    readonly dataDir: string;
    readonly firstTenantId: string;
    readonly blobs: Pick<MarkedBlobStore, 'readMark'>;
  },
): ComposedDoctor {
  const { store, log } = d;
  const parts: DoctorParts = {
    config,
    log,
    dataDir: d.dataDir,
    now: () => new Date(),
    readBlobMark: () => d.blobs.readMark(),
  };
  const stopping = new AbortController();
  const looking = new Set<Promise<void>>();

  const lookNow = async (isActive: boolean): Promise<void> => {
    const { signal } = stopping;
    const at = { database: store.pool, isActive, domain: null, signal };
    const checked = await look(parts, at);
    if (signal.aborted) return;
    const about = { checked, at: parts.now(), tenantId: d.firstTenantId };
    for (const change of await keepFindings(store, about)) say(log, change);
  };
  const tracked = async (isActive: boolean): Promise<void> => {
    const one = lookNow(isActive);
    looking.add(one);
    try {
      await one;
    } finally {
      looking.delete(one);
    }
  };

  const run = async (): Promise<void> => {
    if (stopping.signal.aborted || performance.now() - startedAt < FIRST_LOOK_MS) return;
    if ((await takeTurn(store, EVERY_MS)) === null) await tracked(false);
  };
  const startedAt = performance.now();
  const first = config.roles.has('jobs')
    ? setTimeout(
        () =>
          void run().catch((error: unknown) =>
            log.warn({ err: error }, 'the doctor could not look'),
          ),
        FIRST_LOOK_MS + 1_000,
      ).unref()
    : undefined;

  return {
    verbs: {
      read: () => readFindings(store),
      async look({ isActive }) {
        const waitMs = await takeTurn(store, ASKED_EVERY_MS);
        if (waitMs !== null) {
          const seconds = Math.ceil(waitMs / 1_000);
          throw new Refusal(
            'rate_limit_exceeded',
            `The doctor has just looked, or is looking; ask again in ${seconds} s, or read what it found with GET /doctor.`,
            { retryAfterSeconds: seconds },
          );
        }
        await tracked(isActive);
        return readFindings(store);
      },
    },
    run,
    async stop() {
      clearTimeout(first);
      stopping.abort();
      await Promise.allSettled(looking);
    },
  };
}

function say(log: Logger, { finding, before, after }: Change): void {
  const { code, subject, message, advice } = finding;
  const about = { code, subject, before, after, finding: message, advice };
  if (after === 'error') log.error(about, 'the doctor found something');
  else if (after === 'warning' || after === 'unknown')
    log.warn(about, 'the doctor found something');
  else log.info(about, 'what the doctor found is over');
}
