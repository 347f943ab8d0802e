// Builds what the API can do from plain parts: part of the composition root.
import type { Config } from './config.ts';
import { laneFor } from './delivery/next-hop.ts';
import { createDomainLookup } from './domains/lookup.ts';
import type { Verbs } from './http/verbs.ts';
import type { Logger } from './log.ts';
import { createGroupCommit } from './queue/group-commit.ts';
import type { Waiting } from './queue/settle.ts';
import { emptySink, listSinkMessages } from './receiving/sink-messages.ts';
import { acceptEmail } from './sending/accept.ts';
import { findEmail, listEmails } from './sending/read.ts';
import { openDiskBlobs } from './store/blob.ts';
import type { Store } from './store/orm.ts';
import { readTrace } from './timeline/trace.ts';

/** The verified domain that development mode sends and receives with. */
export const HOME_DOMAIN = 'mailstead.test';

export interface VerbParts {
  readonly config: Config;
  readonly log: Logger;
  readonly store: Store;
  readonly blobFolder: string;
  /** The master secret; keys are derived from it (store/seal.ts). */
  readonly secret: string;
  readonly sealingKey: Buffer;
  readonly firstTenantId: string;
  /** Without a trailing slash. */
  readonly publicUrl: string;
  /** Deliveries became ready. */
  readonly nudge: () => void;
  /** Deliveries now wait for a time. */
  readonly onWaiting: (waiting: readonly Waiting[]) => void;
  readonly hasSink: boolean;
}

export function composeVerbs(d: VerbParts): Verbs {
  const { config, store } = d;
  const commit = createGroupCommit(store.pool);
  const accepting = {
    store,
    commit,
    blobs: openDiskBlobs(d.blobFolder),
    domains: createDomainLookup(store.pool, d.sealingKey),
    now: () => new Date(),
    laneOf: laneFor(config.delivery),
    lifetimeMs: config.messageLifetimeMs,
    // Only where nothing leaves the machine may an unknown author send.
    standIn:
      config.mode === 'development' && config.delivery === 'sink'
        ? { tenantId: d.firstTenantId, domain: HOME_DOMAIN }
        : null,
  };
  return {
    async acceptEmail(caller, send) {
      const accepted = await acceptEmail(accepting, caller, send);
      d.nudge();
      return accepted;
    },
    listEmails: (caller, page) => listEmails(store, caller.tenantId, page),
    findEmail: (caller, id) => findEmail(store, caller.tenantId, id),
    readTrace: (caller, id) => readTrace(store, caller.tenantId, id),
    sink: d.hasSink
      ? { list: (page) => listSinkMessages(store, page), empty: () => emptySink(store) }
      : null,
  };
}
