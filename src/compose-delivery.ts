// Builds a delivery worker from plain values: part of the composition root, shared by the main process
// (MAILSTEAD_WORKERS=0) and the worker processes, which get the values over IPC.
import { readFileSync } from 'node:fs';
import { networkInterfaces } from 'node:os';
import type { Config } from './config.ts';
import type { Smarthost } from './delivery/next-hop.ts';
import { createSigning } from './delivery/signing.ts';
import { startWorker } from './delivery/worker.ts';
import { createAddressGuard } from './dns/address-guard.ts';
import { createMxFinder } from './dns/mx.ts';
import { createResolver } from './dns/resolver.ts';
import { createDomainLookup } from './domains/lookup.ts';
import type { Logger } from './log.ts';
import { readBounceRules, type BounceRule } from './mail/bounce-rules.ts';
import type { Waiting } from './queue/settle.ts';
import { startFetcher, type Fetcher, type FetcherOptions } from './sending/fetcher.ts';
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

const BOUNCE_RULES = new URL('../config/bounces.json', import.meta.url);

/** The rules of config/bounces.json. Throws an Error that says what is wrong with which. */
export function loadBounceRules(): readonly BounceRule[] {
  return readBounceRules(JSON.parse(readFileSync(BOUNCE_RULES, 'utf8')));
}

/** The keys that return paths are made and read with, by key id. */
export const returnPathKeys = (secret: string): Readonly<Record<string, Buffer>> => ({
  [RETURN_PATH_KEY_ID]: deriveKey(secret, 'return path'),
});

export interface RunningWorker {
  nudge(): void;
  stop(): Promise<void>;
}

/** The fetcher of attachments, for the main process: one is enough, however many workers deliver. */
export async function composeFetcher(
  setup: Pick<DeliverySetup, 'dnsServers' | 'privateHosts' | 'blobFolder'>,
  d: Pick<FetcherOptions, 'store' | 'log' | 'spoolFolder' | 'onReady'>,
): Promise<Fetcher> {
  const ownAddresses = (): readonly string[] =>
    Object.values(networkInterfaces()).flatMap((list) =>
      (list ?? []).map(({ address }) => address),
    );
  const resolver = createResolver({ servers: setup.dnsServers });
  const fetcher = await startFetcher({
    ...d,
    blobs: openDiskBlobs(setup.blobFolder),
    resolver,
    guard: createAddressGuard({ allow: setup.privateHosts, ownAddresses }),
  });
  return {
    nudge: fetcher.nudge,
    async stop() {
      await fetcher.stop();
      resolver.close();
    },
  };
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
      signerByName: domains.signerByName,
      sign: (message, { keys }, signedAt) =>
        Buffer.isBuffer(message)
          ? signing.sign({ message, keys, signedAt })
          : signing.signPieces({ pieces: message, keys, signedAt }),
      checkPeer: guard.check,
      bounceRules: loadBounceRules(),
      returnPath: {
        key: returnPathKeys(setup.secret)[RETURN_PATH_KEY_ID]!,
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
