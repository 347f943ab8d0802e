// The composition root: settings -> store -> verbs -> edges. Starts what the roles of this process need, in
// the order in which things depend on each other, and stops it in the opposite order.
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { createKeyUsage } from './access/key-usage.ts';
import { createAuthenticator } from './access/keys.ts';
import { createRateLimiter } from './access/rate-limit.ts';
import { createRequestLogWriter } from './access/request-log.ts';
import { startAudienceLoops, type AudienceNudges } from './compose-audience.ts';
import {
  composeDelivery,
  composeFetcher,
  describeDelivery,
  loadBounceRules,
  openDeliveryPolicy,
  outcomesOf,
  type RunningWorker,
} from './compose-delivery.ts';
import { composeCertificates, type ComposedCertificates } from './compose-certificates.ts';
import { composeDoctor } from './compose-doctor.ts';
import { composeDomains } from './compose-domains.ts';
import { blobPlaceOf, openOwnBlobs } from './compose-blobs.ts';
import { Closers } from './closers.ts';
import { composeForwarder } from './compose-forward.ts';
import { findDegraded, findMissing } from './compose-health.ts';
import { startHomeLoops } from './compose-home.ts';
import { composeMx, openReceivingPolicy } from './compose-mx.ts';
import { composeTlsReporter } from './compose-reports.ts';
import { composeSubmission } from './compose-submission.ts';
import { startRetention } from './compose-retention.ts';
import { composeStsRefresh } from './compose-tls.ts';
import { composeTelemetry, readVersion, startTraces } from './compose-telemetry.ts';
import { prepareFirstTenant, type FirstKey } from './compose-tenant.ts';
import { composeVerbs } from './compose-verbs.ts';
import { isWhole, type Config } from './config.ts';
import { keepPostgres, openWhenReady } from './database.ts';
import type { HomeListener } from './delivery/next-hop.ts';
import { opensKeys } from './domains/lookup.ts';
import { createApp } from './http/app.ts';
import { openFrontDoor, type Answerer } from './http/front-door.ts';
import { createHealthApp } from './http/health.ts';
import { recoverLocalRuns, recoverProcess, startUpkeep, type Upkeep } from './jobs/upkeep.ts';
import type { Logger } from './log.ts';
import type { OutcomePolicy } from './queue/outcome-policy.ts';
import type { Waiting } from './queue/settle.ts';
import { createSinkStore, pruneSink } from './receiving/sink-messages.ts';
import { collectBlobs } from './sending/collect-blobs.ts';
import { startSink } from './smtp/sink.ts';
import { keepWhileBackedUp } from './store/backup-lock.ts';
import { checkSecret } from './store/appliance-facts.ts';
import { startPresence } from './store/appliance-process.ts';
import { openDataDir } from './store/data-dir.ts';
import { deriveKey } from './store/seal.ts';
import { startWorkers } from './workers.ts';

export interface Appliance {
  /** Of the API; of the probes alone when this process does not run it. */
  readonly httpPort: number;
  /** Where a program on this machine reaches the API; null when this process does not run it. */
  readonly localUrl: string | null;
  readonly publicUrl: string;
  /** HTTPS, and challenges of certificate authorities (config/tls.json); null: off. */
  readonly httpsPort: number | null;
  readonly challengePort: number | null;
  /** Where inbound mail arrives; null when this process does not run the listener. */
  readonly mxPort: number | null;
  /** SMTP submission with STARTTLS and with implicit TLS; null when this process does not run it. */
  readonly submissionPort: number | null;
  readonly submissionsPort: number | null;
  /** Where Prometheus asks; null: that port is off. */
  readonly metricsPort: number | null;
  /** The first tenant's key where it is known: made now, or remembered in development mode. */
  readonly firstKey: FirstKey | null;
  readonly databaseUrl: string;
  stop(): Promise<void>;
}

const MESSAGE_MAX_BYTES = 64 * 1024 * 1024;
const SECRET_BYTES = 32;
/** What other processes put off or schedule has no alarm before the next sweep. */
const SWEEP_APART_MS = 5_000;

/** What the program wants to hear of, and how it ends a start that is under way. */
export interface ApplianceHooks {
  /** The generated key of the first tenant, right after it was stored: nobody can read it later. */
  readonly onFirstKey?: (token: string) => void;
  /** This process must end at once: what it holds belongs to somebody else, or is gone for good. */
  readonly onFatal?: (reason: string) => void;
  /** Aborts the start: startAppliance rejects when what was started is stopped. */
  readonly signal?: AbortSignal;
}

/** Resolves when every role of this process works. Stops what it started when one cannot. */
export async function startAppliance(
  config: Config,
  log: Logger,
  hooks: ApplianceHooks = {},
): Promise<Appliance> {
  const closers = new Closers();
  try {
    return await start({ config, log, closers, hooks });
  } catch (error) {
    await closers.run(log);
    throw error;
  }
}

async function start(d: {
  readonly config: Config;
  readonly log: Logger;
  readonly closers: Closers;
  readonly hooks: ApplianceHooks;
}): Promise<Appliance> {
  const { config, log, closers, hooks } = d;
  const signal = hooks.signal ?? new AbortController().signal;
  const onFatal = (reason: string): void => {
    if (hooks.onFatal === undefined) log.fatal(reason);
    else hooks.onFatal(reason);
  };
  const bounceRules = loadBounceRules();
  // First of all: a port in use must not leave a database behind, nor a key that nobody has seen.
  const door = await openFrontDoor({ port: config.httpPort, host: config.httpHost });
  let certificates: ComposedCertificates | null = null;
  const closeDoor = async (): Promise<void> =>
    void (await Promise.all([door.close(), certificates?.closeDoors()]));
  closers.add(closeDoor);
  const telemetry = await composeTelemetry(config, log);
  closers.add(() => telemetry.stop());

  const dataDir = await openDataDir(config.dataDir, { now: () => new Date() });
  closers.add(() => dataDir.release());
  void dataDir.lost.then(() =>
    onFatal(`another appliance has taken over the data directory ${dataDir.path}`),
  );
  const secret = config.secret ?? (await dataDir.secret('master', SECRET_BYTES));
  const folders = {
    journalFolder: join(dataDir.path, 'journal'),
    configFolder: join(dataDir.path, 'config'),
  };
  for (const folder of Object.values(folders)) mkdirSync(folder, { recursive: true, mode: 0o700 });
  const blobPlace = blobPlaceOf(config, dataDir.path);
  const { configFolder } = folders;
  const traces = await startTraces({ configFolder, hostname: config.hostname, name: 'main', log });
  closers.add(() => traces.stop());
  const policy = openDeliveryPolicy(folders.configFolder, log);
  warnOfUnusedSmarthost(config, { spills: policy.current().spill.smarthost, log });
  closers.add(async () => policy.stop());
  const receivingPolicy = openReceivingPolicy(folders.configFolder, log);
  closers.add(async () => receivingPolicy.stop());

  signal.throwIfAborted();
  let { databaseUrl } = config;
  if (databaseUrl === null) {
    const postgres = await keepPostgres({
      dataDir: dataDir.path,
      log,
      onMoved: () => onFatal('the embedded Postgres has moved to another socket'),
    });
    closers.add(() => postgres.stop());
    databaseUrl = postgres.url;
  }
  const isOurs = config.databaseUrl === null;
  const store = await openWhenReady({ url: databaseUrl, isOurs, log, signal });
  closers.add(() => store.close());
  const sealingKey = deriveKey(secret, 'dkim keys at rest');
  await checkSecret(store.pool, secret, () => opensKeys(store.pool, sealingKey));
  const ownBlobs = await openOwnBlobs(blobPlace, { pool: store.pool, log, signal });
  const blobs = keepWhileBackedUp(ownBlobs, () => store.pool);
  const keyUsage = createKeyUsage({ pool: store.pool, log });
  closers.add(() => keyUsage.stop());
  const requestLog = createRequestLogWriter({ pool: store.pool, log });
  closers.add(() => requestLog.stop());
  const authenticate = createAuthenticator(store.pool, keyUsage.note);
  const limiter = createRateLimiter({ ...config.rateLimit, shared: { pool: store.pool, log } });
  const { firstKey, firstTenantId } = await prepareFirstTenant({
    config,
    store,
    dataDir,
    sealingKey,
  });
  if (firstKey?.isNew === true) hooks.onFirstKey?.(firstKey.token);
  signal.throwIfAborted();
  const outcomes = (): OutcomePolicy => outcomesOf(policy.current());
  await recoverLocalRuns({ store, log, journalFolder: folders.journalFolder, outcomes });

  const tls = await composeCertificates(config, {
    store,
    log,
    dataDir: dataDir.path,
    configFolder: folders.configFolder,
    secret,
  });
  certificates = tls;
  closers.add(() => tls.stop());
  const domains = composeDomains({
    config,
    store,
    sealingKey,
    firstTenantId,
    certificateFault: tls.fault,
  });
  closers.add(() => Promise.resolve(domains.close()));
  const doctor = composeDoctor(config, {
    store,
    log,
    blobs: ownBlobs,
    dataDir: dataDir.path,
    firstTenantId,
  });
  closers.add(() => doctor.stop());
  const hasSink = config.mode === 'development' || config.delivery === 'sink';
  const sink = hasSink
    ? await startSink({
        host: '127.0.0.1',
        port: 0,
        hostname: config.hostname,
        store: createSinkStore(store),
        maxMessageBytes: MESSAGE_MAX_BYTES,
        tls: null,
        log,
      })
    : null;
  if (sink !== null) closers.add(() => sink.stop());

  const late: {
    upkeep: Upkeep | null;
    nudge: () => void;
    sendTlsReports: () => Promise<void>;
    audience: AudienceNudges | null;
  } = {
    upkeep: null,
    nudge: () => undefined,
    sendTlsReports: () => Promise.resolve(),
    audience: null,
  };
  const nudge = (): void => late.nudge();
  const onWaiting = (waiting: readonly Waiting[]): void => {
    for (const { lane, dueAt } of waiting) late.upkeep?.alarm(lane, dueAt);
  };
  if (config.roles.has('jobs')) {
    const stsRefresh = composeStsRefresh(config, { store, log });
    closers.add(async () => stsRefresh.close());
    const upkeep = await startUpkeep({
      store,
      log,
      databaseUrl,
      mongodbUrl: config.mongodbUrl,
      ...(isWhole(config.roles) ? {} : { sweepMs: SWEEP_APART_MS }),
      journalFolder: folders.journalFolder,
      outcomes,
      onReady: nudge,
      pruneSink: () => pruneSink(store),
      recheckDomains: domains.recheck,
      examine: doctor.run,
      sendTlsReports: () => late.sendTlsReports(),
      refreshStsPolicies: stsRefresh.run,
      greylistForgetAfterMs: () => receivingPolicy.current().greylisting.forgetAfterMs,
      async collectBlobs() {
        const removed = await collectBlobs(store, blobs, new Date());
        if (removed > 0) log.info({ blobs: removed }, 'removed stored bytes that no row names');
      },
    });
    late.upkeep = upkeep;
    closers.add(() => upkeep.stop());
  }

  signal.throwIfAborted();
  const forwarder = composeForwarder(config, {
    store,
    log,
    blobs,
    policy: receivingPolicy.current,
    secret,
    sealingKey,
    onReady: nudge,
  });
  closers.add(async () => forwarder?.stop());
  const homeLoops = startHomeLoops(config, {
    store,
    log,
    blobs,
    onReady: nudge,
    onForwards: () => forwarder?.nudge(),
  });
  closers.add(async () => homeLoops?.stop());
  // Before the workers and after them: what they send to this machine itself arrives here.
  const mx = await composeMx(config, {
    store,
    log,
    dataDir: dataDir.path,
    blobs,
    policy: receivingPolicy.current,
    onForwards: () => forwarder?.nudge(),
    onReady: nudge,
    firstTenantId,
    secret,
    bounceRules,
    certificate: tls.source,
  });
  closers.add(async () => mx.listener?.stop());
  let isDelivering = (): boolean => true;
  if (config.roles.has('delivery')) {
    const setup = {
      ...describeDelivery(config),
      ...folders,
      blobs: blobPlace,
      databaseUrl,
      secret,
      sinkPort: sink?.port ?? null,
      home: homeOf(config, mx.listener),
    };
    if (config.workers === 0) {
      const worker: RunningWorker = await composeDelivery(setup, {
        log,
        onWaiting,
        onLost: () => onFatal('what this process was delivering has been given to another one'),
      });
      late.nudge = () => worker.nudge();
      // Together: neither needs the other, and no one may come in while mail goes out.
      closers.add(async () => void (await Promise.all([closeDoor(), worker.stop()])));
    } else {
      const workers = startWorkers({
        count: config.workers,
        setup,
        log,
        gathering: telemetry.gathering,
        onWaiting,
        onLost: (pid) =>
          recoverProcess({ store, log, journalFolder: folders.journalFolder, outcomes }, pid),
      });
      late.nudge = () => workers.nudge();
      isDelivering = workers.isReady;
      closers.add(async () => void (await Promise.all([closeDoor(), workers.stop()])));
      await Promise.race([workers.started, untilAborted(signal)]);
    }
    const fetcher = await composeFetcher(setup, {
      store,
      log,
      blobs,
      spoolFolder: join(dataDir.path, 'fetching'),
      onReady: nudge,
    });
    closers.add(() => fetcher.stop());
    const nudgeWorkers = late.nudge;
    late.nudge = () => {
      nudgeWorkers();
      fetcher.nudge();
    };
  } else closers.add(closeDoor);
  signal.throwIfAborted();

  const publicUrl = config.publicUrl.replace(/:0$/, `:${door.port}`);
  const verbs = composeVerbs({
    requestLog,
    config,
    log,
    store,
    ...folders,
    blobs,
    policy: policy.current,
    secret,
    sealingKey,
    firstTenantId,
    domains: domains.verbs,
    doctor: doctor.verbs,
    publicUrl,
    nudge,
    onReplay: () => homeLoops?.nudgeReplays(),
    onWaiting,
    audience: {
      imports: () => late.audience?.imports(),
      broadcasts: () => late.audience?.broadcasts(),
      automations: () => late.audience?.automations(),
      webhooks: () => late.audience?.webhooks(),
    },
    hasSink,
  });
  const audience = startAudienceLoops(config, {
    store,
    log,
    blobs,
    secret,
    verbs,
  });
  late.audience = audience?.nudges ?? null;
  closers.add(async () => void (await Promise.all([audience?.stop(), verbs.stopVerbs()])));
  const reporter = config.roles.has('jobs')
    ? composeTlsReporter(config, { store, log, firstTenantId, verbs })
    : null;
  if (reporter !== null) late.sendTlsReports = () => reporter.run();
  closers.add(async () => reporter?.stop());
  const retention = startRetention(config, { store, blobs, log, ...folders });
  closers.add(async () => retention?.stop());
  const submission = await composeSubmission(config, {
    authenticate,
    limiter,
    submit: verbs.submitMessage,
    log,
    dataDir: dataDir.path,
    certificates: tls,
  });
  closers.add(() => submission.stop());
  let answer: Answerer | null = null;
  const missing = async () => [
    ...[submission.missing, mx.missing].filter((one) => one !== null),
    ...(await findMissing(store, isDelivering)),
  ];
  telemetry.watch({ store, dataDir: dataDir.path, certificate: tls.source.current, missing });
  const degraded = async () => [
    ...(submission.waiting === null ? [] : [submission.waiting]),
    ...(await findDegraded(store)),
  ];
  const hasApi = config.roles.has('api');
  if (hasApi) {
    answer = createApp({
      verbs,
      wellKnown: tls.wellKnown,
      log,
      spoolFolder: join(dataDir.path, 'spool'),
      authenticate,
      limiter,
      requestLog,
      missing,
      degraded,
    });
  }
  door.open(answer ?? createHealthApp({ missing, degraded, log }));
  const presence = await startPresence({
    pool: store.pool,
    log,
    roles: config.roles,
    version: readVersion(),
  });
  closers.add(() => presence.stop());
  tls.open(answer);
  return {
    httpPort: door.port,
    mxPort: mx.listener?.port ?? null,
    metricsPort: telemetry.port,
    httpsPort: tls.httpsPort,
    challengePort: tls.challengePort,
    get submissionPort() {
      return submission.listener?.port ?? null;
    },
    get submissionsPort() {
      return submission.listener?.tlsPort ?? null;
    },
    localUrl: hasApi ? door.localUrl : null,
    publicUrl,
    firstKey,
    databaseUrl,
    stop: () => closers.run(log),
  };
}

function homeOf({ roles }: Config, listener: { readonly port: number } | null): HomeListener {
  if (listener !== null) return { kind: 'here', port: listener.port };
  return { kind: roles.has('mx') ? 'closed' : 'elsewhere' };
}

async function untilAborted(signal: AbortSignal): Promise<void> {
  if (signal.aborted) return;
  await new Promise<void>((resolve) => {
    signal.addEventListener('abort', () => resolve(), { once: true });
  });
}

function warnOfUnusedSmarthost(
  config: Config,
  { spills, log }: { readonly spills: boolean; readonly log: Logger },
): void {
  if (config.delivery !== 'direct' || config.smarthostUrl === null || spills) return;
  log.warn(
    'MAILSTEAD_SMARTHOST_URL is set and not used: with MAILSTEAD_DELIVERY=direct it takes mail only while port 25 is ' +
      'blocked, and only with "spill": { "smarthost": true } in config/delivery.json of the data folder',
  );
}
