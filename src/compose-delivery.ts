// Builds a delivery worker from plain values: part of the composition root, shared by the main process
// (MAILSTEAD_WORKERS=0) and the worker processes, which get the values over IPC.
import type { Config } from './config.ts';
import type { Smarthost } from './delivery/next-hop.ts';
import { createSigning } from './delivery/signing.ts';
import { startWorker } from './delivery/worker.ts';
import { createAddressGuard } from './dns/address-guard.ts';
import { createMxFinder } from './dns/mx.ts';
import { createResolver } from './dns/resolver.ts';
import { createDomainLookup } from './domains/lookup.ts';
import type { Logger } from './log.ts';
import type { Waiting } from './queue/settle.ts';
import { openDiskBlobs } from './store/blob.ts';
import { openStore } from './store/orm.ts';
import { processStartTime } from './store/process.ts';
import { deriveKey } from './store/seal.ts';

/** Everything a worker needs to know; survives JSON. */
export interface DeliverySetup {
  readonly databaseUrl: string;
  readonly secret: string;
  readonly sinkPort: number | null;
  readonly journalFolder: string;
  readonly blobFolder: string;
  readonly hostname: string;
  readonly smarthost: Smarthost | null;
  readonly dnsServers: readonly string[] | null;
  readonly privateHosts: readonly string[];
  readonly mxPort: number;
  readonly retryScheduleMs: readonly number[];
  readonly logLevel: string;
  readonly mode: 'development' | 'production';
}

const CONNECTIONS_MAX = 6;
/** The one key of this release; a rotation adds the next letter. */
const RETURN_PATH_KEY_ID = 'a';
const SUBMISSION_PORT = 587;
const SUBMISSIONS_PORT = 465;

/** What the settings say about delivery. */
export function describeDelivery(
  config: Config,
): Omit<DeliverySetup, 'databaseUrl' | 'secret' | 'sinkPort' | 'journalFolder' | 'blobFolder'> {
  return {
    hostname: config.hostname,
    smarthost: config.smarthostUrl === null ? null : readSmarthost(config.smarthostUrl),
    dnsServers: config.dnsServers,
    privateHosts: config.privateHosts,
    mxPort: config.mxDestinationPort,
    retryScheduleMs: config.retryScheduleMs,
    logLevel: config.logLevel,
    mode: config.mode,
  };
}

function readSmarthost(url: URL): Smarthost {
  const implicitTls = url.protocol === 'smtps:';
  return {
    host: url.hostname.replace(/^\[|\]$/g, ''),
    port: Number(url.port || (implicitTls ? SUBMISSIONS_PORT : SUBMISSION_PORT)),
    implicitTls,
    login:
      url.username === ''
        ? null
        : { user: decodeURIComponent(url.username), pass: decodeURIComponent(url.password) },
  };
}

export interface RunningWorker {
  nudge(): void;
  stop(): Promise<void>;
}

export async function composeDelivery(
  setup: DeliverySetup,
  d: { readonly log: Logger; readonly onWaiting: (waiting: readonly Waiting[]) => void },
): Promise<RunningWorker> {
  const store = await openStore({
    url: setup.databaseUrl,
    log: d.log,
    connectionsMax: CONNECTIONS_MAX,
    migrate: false,
  });
  const resolver = createResolver({ servers: setup.dnsServers });
  const guard = createAddressGuard({ allow: setup.privateHosts });
  const domains = createDomainLookup(store.pool, deriveKey(setup.secret, 'dkim keys at rest'));
  const signing = createSigning();
  const worker = await startWorker({
    store,
    log: d.log,
    journalFolder: setup.journalFolder,
    processStartTime: processStartTime(process.pid),
    retryScheduleMs: setup.retryScheduleMs,
    random: Math.random,
    onWaiting: d.onWaiting,
    attempts: {
      blobs: openDiskBlobs(setup.blobFolder),
      signerOf: domains.signer,
      sign: (message, signer, signedAt) => signing.sign({ message, keys: signer.keys, signedAt }),
      checkPeer: guard.check,
      returnPath: {
        key: deriveKey(setup.secret, 'return path'),
        keyId: RETURN_PATH_KEY_ID,
        hostname: setup.hostname,
      },
      nextHops: {
        helloName: setup.hostname,
        sinkPort: setup.sinkPort,
        smarthost: setup.smarthost,
        mx: createMxFinder({ resolver, guard, ownHostname: setup.hostname, random: Math.random }),
        mxPort: setup.mxPort,
      },
    },
  });
  return {
    nudge: () => worker.nudge(),
    async stop() {
      await worker.stop();
      resolver.close();
      await signing.close();
      await store.close();
    },
  };
}
