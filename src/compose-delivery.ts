// Builds a delivery worker from plain values: part of the composition root, shared by the main process
// (MAILSTEAD_WORKERS=0) and the worker processes, which get the values over IPC.
import { readFileSync } from 'node:fs';
import { openBlobs, type BlobPlace } from './compose-blobs.ts';
import { composeTlsPolicies } from './compose-tls.ts';
import { trackingTokens } from './compose-tracking.ts';
import { isWhole, type Config } from './config.ts';
import { readDeliveryPolicy, type DeliveryPolicy } from './delivery/egress.ts';
import type { HomeListener, Smarthost } from './delivery/next-hop.ts';
import { readProviders } from './delivery/providers.ts';
import { watchPort25 } from './delivery/port25-watch.ts';
import { createSigning } from './delivery/signing.ts';
import { createTlsResults } from './delivery/tls-results.ts';
import { startWorker } from './delivery/worker.ts';
import { createAddressGuard } from './dns/address-guard.ts';
import { createMxFinder } from './dns/mx.ts';
import { createResolver } from './dns/resolver.ts';
import { createDomainLookup } from './domains/lookup.ts';
import type { Logger } from './log.ts';
import { readBounceRules, type BounceRule } from './mail/bounce-rules.ts';
import { openOperatorFile, type OperatorFile } from './operator-files.ts';
import { ownAddresses } from './own-addresses.ts';
import type { OutcomePolicy } from './queue/outcome-policy.ts';
import type { Waiting } from './queue/settle.ts';
import { startFetcher, type Fetcher, type FetcherOptions } from './sending/fetcher.ts';
import { openStore } from './store/orm.ts';
import { processStartTime } from './store/process.ts';
import { deriveKey } from './store/seal.ts';

/** Everything a worker needs to know; survives JSON. */
export interface DeliverySetup {
  readonly databaseUrl: string;
  readonly secret: string;
  readonly sinkPort: number | null;
  readonly home: HomeListener;
  readonly journalFolder: string;
  readonly blobs: BlobPlace;
  /** Where an operator's own files lie (operator-files.ts). */
  readonly configFolder: string;
  readonly hostname: string;
  readonly smarthost: Smarthost | null;
  readonly dnsServers: readonly string[] | null;
  readonly privateHosts: readonly string[];
  readonly mxPort: number;
  readonly retryScheduleMs: readonly number[];
  readonly logLevel: string;
  readonly mode: 'development' | 'production';
  /** Every role that makes mail ready runs in this appliance process, and nudges. */
  readonly isTold: boolean;
}

const CONNECTIONS_MAX = 6;
/** The one key of this release; a rotation adds the next letter. */
const RETURN_PATH_KEY_ID = 'a';
const SUBMISSION_PORT = 587;
const SUBMISSIONS_PORT = 465;

/** What the settings say about delivery. */
export function describeDelivery(
  config: Config,
): Omit<
  DeliverySetup,
  'databaseUrl' | 'secret' | 'sinkPort' | 'home' | 'journalFolder' | 'blobs' | 'configFolder'
> {
  return {
    hostname: config.hostname,
    smarthost: config.smarthostUrl === null ? null : readSmarthost(config.smarthostUrl),
    dnsServers: config.dnsServers,
    privateHosts: config.privateHosts,
    mxPort: config.mxDestinationPort,
    retryScheduleMs: config.retryScheduleMs,
    logLevel: config.logLevel,
    mode: config.mode,
    isTold: isWhole(config.roles),
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

/** What the policy says, in the words of the queue. */
export const outcomesOf = ({ delayedAfterMs, unknown }: DeliveryPolicy): OutcomePolicy => ({
  delayedAfterMs,
  unknownOf: (tenantId) => unknown.tenants[tenantId] ?? unknown.default,
});

/** config/delivery.json, or the operator's own. Throws an Error that says what is wrong with it. */
export const openDeliveryPolicy = (folder: string, log: Logger): OperatorFile<DeliveryPolicy> =>
  openOperatorFile('delivery', { folder, read: readDeliveryPolicy, log });

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
  setup: Pick<DeliverySetup, 'dnsServers' | 'privateHosts' | 'secret'>,
  d: Pick<FetcherOptions, 'store' | 'log' | 'blobs' | 'spoolFolder' | 'onReady'>,
): Promise<Fetcher> {
  const resolver = createResolver({ servers: setup.dnsServers });
  const fetcher = await startFetcher({
    ...d,
    resolver,
    guard: createAddressGuard({ allow: setup.privateHosts, ownAddresses }),
    trackingTokens: trackingTokens(setup.secret),
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
  d: {
    readonly log: Logger;
    readonly onWaiting: (waiting: readonly Waiting[]) => void;
    /** What this process held was given to others: it must end at once. */
    readonly onLost: () => void;
  },
): Promise<RunningWorker> {
  const policy = openDeliveryPolicy(setup.configFolder, d.log);
  const providers = openOperatorFile('providers', {
    folder: setup.configFolder,
    read: readProviders,
    log: d.log,
  });
  const store = await openStore({
    url: setup.databaseUrl,
    log: d.log,
    connectionsMax: CONNECTIONS_MAX,
    migrate: false,
  });
  const resolver = createResolver({ servers: setup.dnsServers });
  const guard = createAddressGuard({ allow: setup.privateHosts, ownAddresses });
  const domains = createDomainLookup(store.pool, deriveKey(setup.secret, 'dkim keys at rest'));
  const signing = createSigning();
  const tlsResults = createTlsResults({ pool: store.pool, log: d.log, now: () => new Date() });
  let nudge = (): void => undefined;
  const watch = watchPort25({
    store,
    log: d.log,
    policy: policy.current,
    resolver,
    guard,
    port: setup.mxPort,
    maySpill: () => setup.smarthost !== null && policy.current().spill.smarthost,
    onChange: () => nudge(),
  });
  const worker = await startWorker({
    store,
    log: d.log,
    journalFolder: setup.journalFolder,
    processStartTime: processStartTime(process.pid),
    isTold: setup.isTold,
    retryScheduleMs: setup.retryScheduleMs,
    random: Math.random,
    providers: providers.current,
    watch,
    outcomes: () => outcomesOf(policy.current()),
    onLost: d.onLost,
    onWaiting: d.onWaiting,
    attempts: {
      blobs: openBlobs(setup.blobs),
      signerOf: domains.signer,
      signerByName: domains.signerByName,
      sign: (message, { keys }, signedAt) =>
        Buffer.isBuffer(message)
          ? signing.sign({ message, keys, signedAt })
          : signing.signPieces({ pieces: message, keys, signedAt }),
      checkPeer: guard.check,
      bounceRules: loadBounceRules(),
      log: d.log,
      noteTls: tlsResults.note,
      returnPath: {
        key: returnPathKeys(setup.secret)[RETURN_PATH_KEY_ID]!,
        keyId: RETURN_PATH_KEY_ID,
        hostname: setup.hostname,
      },
    },
    nextHops: {
      policy: policy.current,
      helloName: setup.hostname,
      sinkPort: setup.sinkPort,
      smarthost: setup.smarthost,
      mx: createMxFinder({ resolver, guard, ownHostname: setup.hostname, random: Math.random }),
      home: {
        listener: setup.home,
        takesMail: domains.takesMail,
        async addresses() {
          const answers = await Promise.all([
            resolver.a(setup.hostname),
            resolver.aaaa(setup.hostname),
          ]);
          return answers.flatMap((one) => (one.kind === 'found' ? one.records : []));
        },
      },
      tlsPolicies: composeTlsPolicies({
        store,
        resolver,
        guard,
        daneResolver: () => policy.current().dane.resolver,
        log: d.log,
      }),
      mxPort: setup.mxPort,
    },
  });
  nudge = () => worker.nudge();
  return {
    nudge: () => worker.nudge(),
    async stop() {
      await worker.stop();
      await watch.stop();
      policy.stop();
      providers.stop();
      await tlsResults.stop();
      resolver.close();
      await signing.close();
      await store.close();
    },
  };
}
