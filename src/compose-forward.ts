// Builds what forwards received mail: part of the composition root.
import { laneFor } from './delivery/next-hop.ts';
import { createDomainLookup } from './domains/lookup.ts';
import type { Config } from './config.ts';
import type { Logger } from './log.ts';
import { createSealer } from './receiving/forward-seal.ts';
import { startForwarder, type Forwarder } from './receiving/forwarder.ts';
import type { ReceivingPolicy } from './receiving/policy.ts';
import { FORWARD_POOL } from './sending/forward.ts';
import type { BlobStore } from './store/blob.ts';
import type { Store } from './store/orm.ts';
import { deriveKey } from './store/seal.ts';

/** The keys that rewritten senders are made and read with; the first makes. */
export const srsKeys = (secret: string): readonly Buffer[] => [deriveKey(secret, 'srs')];

/** The same for the tokens of forwarded messages (mail/loop-token.ts). */
export const loopKeys = (secret: string): readonly Buffer[] => [deriveKey(secret, 'loop token')];

/** Null where nothing arrives and nothing is replayed. */
export function composeForwarder(
  config: Config,
  d: {
    readonly store: Store;
    readonly log: Logger;
    readonly blobs: BlobStore;
    readonly policy: () => ReceivingPolicy;
    readonly secret: string;
    readonly sealingKey: Buffer;
    /** Deliveries became ready. */
    readonly onReady: () => void;
  },
): Forwarder | null {
  if (!config.roles.has('mx') && !config.roles.has('jobs')) return null;
  const { store, log } = d;
  const domains = createDomainLookup(store.pool, d.sealingKey);
  return startForwarder({
    store,
    log,
    blobs: d.blobs,
    domains,
    laneOf: laneFor(config.delivery, () => FORWARD_POOL),
    lifetimeMs: config.messageLifetimeMs,
    hostname: config.hostname,
    srsKeys: srsKeys(d.secret),
    loopKeys: loopKeys(d.secret),
    sealer: createSealer({ domains, isWanted: () => d.policy().sealForwards }),
    now: () => new Date(),
    onReady: d.onReady,
  });
}
