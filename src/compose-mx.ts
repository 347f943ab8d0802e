// The inbound listener from plain parts: part of the composition root.
import { returnPathKeys } from './compose-delivery.ts';
import { HOME_DOMAIN } from './compose-verbs.ts';
import type { Config } from './config.ts';
import { listenOrExplain, type Listening } from './listening.ts';
import type { Logger } from './log.ts';
import type { BounceRule } from './mail/bounce-rules.ts';
import { createParser } from './mail/parse-aside.ts';
import { startLateReader } from './receiving/late-reader.ts';
import { findPostmaster, findReceiver, receive } from './receiving/receive.ts';
import { isReturnPathDomain, readReturnPath, takeReport } from './receiving/returned.ts';
import { startMx, type MxListener } from './smtp/mx.ts';
import { openDiskBlobs } from './store/blob.ts';
import type { Store } from './store/orm.ts';
import type { CertificateSource } from './tls-certificate.ts';

/** What a message may wait for a thread, and what reading it may take, before it is acknowledged unread. */
const READ_AT_ONCE_MS = 1_000;

export async function composeMx(
  config: Config,
  d: {
    readonly store: Store;
    readonly log: Logger;
    readonly blobFolder: string;
    readonly secret: string;
    readonly bounceRules: readonly BounceRule[];
    readonly certificate: CertificateSource;
  },
): Promise<Listening<MxListener>> {
  if (!config.roles.has('mx')) return { listener: null, missing: null };
  const { store, log, bounceRules } = d;
  const blobs = openDiskBlobs(d.blobFolder);
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
      const receiving = { store, blobs, parse, onUnread: reader.nudge };
      const listener = await startMx({
        host: null,
        port: config.mxPort,
        hostname: config.hostname,
        tls: d.certificate.current(),
        findReceiver: (address) => findReceiver(store.pool, address),
        findPostmaster: () => findPostmaster(store.pool, host),
        readReturnPath: (address) => readReturnPath(returnPaths, address),
        isReturnPathDomain: (address) => isReturnPathDomain(store.pool, returnPaths, address),
        takeReport: (message) => takeReport({ store, log, returnPaths, bounceRules }, message),
        receive: (message) => receive(receiving, message),
        log,
        now: () => new Date(),
      }).catch(async (error: unknown) => {
        await reader.stop();
        throw error;
      });
      const stop = async (): Promise<void> => {
        await listener.stop();
        await reader.stop();
      };
      return { ...listener, stop };
    },
  });
  d.certificate.onChange((tls) => listening.listener?.updateCertificate(tls));
  return listening;
}
