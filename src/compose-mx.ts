// The inbound listener from plain parts: part of the composition root.
import { rm } from 'node:fs/promises';
import { join } from 'node:path';
import { loopKeys, srsKeys } from './compose-forward.ts';
import { returnPathKeys } from './compose-delivery.ts';
import { HOME_DOMAIN } from './compose-verbs.ts';
import type { Config } from './config.ts';
import { laneFor } from './delivery/next-hop.ts';
import { createAddressGuard } from './dns/address-guard.ts';
import { createResolver } from './dns/resolver.ts';
import { listenOrExplain, type Listening } from './listening.ts';
import type { Logger } from './log.ts';
import type { BounceRule } from './mail/bounce-rules.ts';
import { createParser } from './mail/parse-aside.ts';
import { openOperatorFile, type OperatorFile } from './operator-files.ts';
import { ownAddresses } from './own-addresses.ts';
import { createDnsbl } from './receiving/dnsbl.ts';
import { passesGreylist } from './receiving/greylist.ts';
import { readForwardReturn, takeForwardReturn } from './receiving/home.ts';
import { startLateReader } from './receiving/late-reader.ts';
import { readReceivingPolicy, type ReceivingPolicy } from './receiving/policy.ts';
import { receive } from './receiving/receive.ts';
import { createRecipientResolver, findPostmaster } from './receiving/resolve.ts';
import { withoutNames } from './receiving/verdicts-questions.ts';
import { createVerifier, dmarcRefusal } from './receiving/verdicts.ts';
import { FORWARD_POOL } from './sending/forward.ts';
import { createCopyWriter } from './receiving/store-copies.ts';
import { isReturnPathDomain, readReturnPath, takeReport } from './receiving/returned.ts';
import { startMx, type MxListener } from './smtp/mx.ts';
import type { BlobStore } from './store/blob.ts';
import type { Store } from './store/orm.ts';
import type { CertificateSource } from './tls-certificate.ts';

/** What a message may wait for a thread, and what reading it may take, before it is acknowledged unread. */
const READ_AT_ONCE_MS = 1_000;

/** config/receiving.json, or the operator's own. */
export const openReceivingPolicy = (folder: string, log: Logger): OperatorFile<ReceivingPolicy> =>
  openOperatorFile('receiving', { folder, read: readReceivingPolicy, log });

export async function composeMx(
  config: Config,
  d: {
    readonly store: Store;
    readonly log: Logger;
    readonly dataDir: string;
    readonly blobs: BlobStore;
    readonly policy: () => ReceivingPolicy;
    /** A message was stored that is to be forwarded. */
    readonly onForwards: () => void;
    /** Deliveries became ready. */
    readonly onReady: () => void;
    readonly firstTenantId: string;
    readonly secret: string;
    readonly bounceRules: readonly BounceRule[];
    readonly certificate: CertificateSource;
  },
): Promise<Listening<MxListener>> {
  if (!config.roles.has('mx')) return { listener: null, missing: null };
  const { store, log, bounceRules, policy, blobs } = d;
  const spoolFolder = join(d.dataDir, 'mx-spool');
  // What a crash left: none of it was accepted.
  await rm(spoolFolder, { recursive: true, force: true });
  const resolver = createResolver({ servers: config.dnsServers, asksOddNames: true });
  const guard = createAddressGuard({ allow: [], ownAddresses });
  const parse = createParser({ readingMaxMs: READ_AT_ONCE_MS, waitingMaxMs: READ_AT_ONCE_MS });
  const returnPaths = { keys: returnPathKeys(d.secret), hostname: config.hostname };
  const homeDomain = config.mode === 'development' ? HOME_DOMAIN : null;
  const host = { hostname: config.hostname, homeDomain };
  const listening = await listenOrExplain({
    what: 'inbound mail',
    mode: config.mode,
    ports: [{ port: config.mxPort, setting: 'MAILSTEAD_MX_PORT' }],
    log,
    start: async () => {
      const reader = startLateReader({ store, blobs, log, parse: createParser({ threadsMax: 1 }) });
      const receiving = {
        store,
        blobs,
        parse,
        write: createCopyWriter(store.pool),
        onUnread: reader.nudge,
        onForwards: d.onForwards,
      };
      const returning = {
        store,
        blobs,
        log,
        bounceRules,
        srsKeys: srsKeys(d.secret),
        loopKeys: loopKeys(d.secret),
        hostname: config.hostname,
        firstTenantId: d.firstTenantId,
        laneOf: laneFor(config.delivery, () => FORWARD_POOL),
        lifetimeMs: config.messageLifetimeMs,
        now: () => new Date(),
        onReady: d.onReady,
      };
      // A development machine asks nobody about senders unless it is told whom to ask.
      const asksAll = config.mode !== 'development' || config.dnsServers !== null;
      const verifier = createVerifier({
        resolver: asksAll ? resolver : withoutNames(resolver, () => true),
        hostname: config.hostname,
        trustedSealers: () => policy().trustedArcSealers,
        log,
      });
      const listener = await startMx({
        host: null,
        port: config.mxPort,
        hostname: config.hostname,
        tls: d.certificate.current(),
        policy,
        spoolFolder,
        findListing: createDnsbl({
          resolver,
          zones: () => policy().dnsbl,
          isPublic: (address) => guard.check(address).ok,
        }),
        async verify(message) {
          const verified = await verifier.verify(message);
          // All receivers of a transaction want the same.
          const wanted = message.receivers[0]?.inboundDmarc ?? 'tag';
          return { ...verified, refused: dmarcRefusal(verified.authentication, wanted) };
        },
        isKnown: (question) => passesGreylist(store.pool, question, policy().greylisting),
        resolve: createRecipientResolver(store.pool),
        findPostmaster: () => findPostmaster(store.pool, host),
        readReturnPath: (address) => readReturnPath(returnPaths, address),
        isReturnPathDomain: (address) => isReturnPathDomain(store.pool, returnPaths, address),
        readForwardReturn: (address) =>
          readForwardReturn({ ...returning, pool: store.pool }, address, new Date()),
        takeForwardReturn: (message) => takeForwardReturn(returning, message),
        takeReport: (message) => takeReport({ store, log, returnPaths, bounceRules }, message),
        receive: (arrival) => receive(receiving, arrival),
        log,
        now: () => new Date(),
      }).catch(async (error: unknown) => {
        await verifier.close();
        resolver.close();
        await reader.stop();
        throw error;
      });
      const stop = async (): Promise<void> => {
        await listener.stop();
        await verifier.close();
        resolver.close();
        await reader.stop();
      };
      return { ...listener, stop };
    },
  });
  d.certificate.onChange((tls) => listening.listener?.updateCertificate(tls));
  return listening;
}
