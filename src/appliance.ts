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
import { composeDomains } from './compose-domains.ts';
import { composeForwarder } from './compose-forward.ts';
import { startHomeLoops } from './compose-home.ts';
import { composeMx, openReceivingPolicy } from './compose-mx.ts';
import { composeTlsReporter } from './compose-reports.ts';
import { composeCertificate, composeSubmission } from './compose-submission.ts';
import { composeStsRefresh } from './compose-tls.ts';
import { prepareFirstTenant, type FirstKey } from './compose-tenant.ts';
import { composeVerbs } from './compose-verbs.ts';
import type { Config } from './config.ts';
import { keepPostgres, openWhenReady } from './database.ts';
import type { HomeListener } from './delivery/next-hop.ts';
import { createApp } from './http/app.ts';
import { openFrontDoor } from './http/front-door.ts';
import { recoverLocalRuns, recoverProcess, startUpkeep, type Upkeep } from './jobs/upkeep.ts';
import type { Logger } from './log.ts';
import { readBlockedEgresses } from './queue/egress-state.ts';
import type { OutcomePolicy } from './queue/outcome-policy.ts';
import type { Waiting } from './queue/settle.ts';
import { createSinkStore, pruneSink } from './receiving/sink-messages.ts';
import { collectBlobs } from './sending/collect-blobs.ts';
import { startSink } from './smtp/sink.ts';
import { openDiskBlobs } from './store/blob.ts';
import { openDataDir } from './store/data-dir.ts';
import type { Store } from './store/orm.ts';
import { deriveKey } from './store/seal.ts';
import { startWorkers } from './workers.ts';

export interface Appliance {
  /** Null when this process does not run the API. */
  readonly httpPort: number | null;
  /** Where a program on this machine reaches the API; null as above. */
  readonly localUrl: string | null;
  readonly publicUrl: string;
  /** Where inbound mail arrives; null when this process does not run the listener. */
  readonly mxPort: number | null;
  /** SMTP submission with STARTTLS and with implicit TLS; null when this process does not run it. */
  readonly submissionPort: number | null;
  readonly submissionsPort: number | null;
  /** The first tenant's key where it is known: made now, or remembered in development mode. */
  readonly firstKey: FirstKey | null;
  readonly databaseUrl: string;
  stop(): Promise<void>;
}

const MESSAGE_MAX_BYTES = 64 * 1024 * 1024;
/** Of a stop, all parts together; what is still busy then is left to the end of the process. */
const STOP_MAX_MS = 25_000;
/** What even the last part gets: the lock of the data directory should be released. */
const STOP_STEP_MIN_MS = 500;
const READY_TIMEOUT_MS = 2_000;
const SECRET_BYTES = 32;

/** What the program wants to hear of, and how it ends a start that is under way. */
export interface ApplianceHooks {
  /** The generated key of the first tenant, right after it was stored: nobody can read it later. */
  readonly onFirstKey?: (token: string) => void;
  /** This process must end at once: what it holds belongs to somebody else, or is gone for good. */
  readonly onFatal?: (reason: string) => void;
  /** Aborts the start: startAppliance rejects when what was started is stopped. */
  readonly signal?: AbortSignal;
}

/** Undoes, newest first, whatever was started. */
class Closers {
  readonly #steps: (() => Promise<void>)[] = [];

  add(step: () => Promise<void>): void {
    this.#steps.push(step);
  }

  async run(log: Logger): Promise<void> {
    const deadline = Date.now() + STOP_MAX_MS;
    for (const step of this.#steps.splice(0).toReversed()) {
      const leftMs = Math.max(STOP_STEP_MIN_MS, deadline - Date.now());
      let timer: NodeJS.Timeout | undefined;
      const late = new Promise<never>((_, reject) => {
        timer = setTimeout(() => reject(new Error('it takes too long')), leftMs);
      });
      await Promise.race([step(), late]).catch((error: unknown) =>
        log.error({ err: error }, 'a part did not stop well'),
      );
      clearTimeout(timer);
    }
  }
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
  const door = config.roles.has('api')
    ? await openFrontDoor({ port: config.httpPort, host: config.httpHost })
    : null;
  const closeDoor = (): Promise<void> => door?.close() ?? Promise.resolve();
  closers.add(closeDoor);

  const dataDir = await openDataDir(config.dataDir, { now: () => new Date() });
  closers.add(() => dataDir.release());
  void dataDir.lost.then(() =>
    onFatal(`another appliance has taken over the data directory ${dataDir.path}`),
  );
  const secret = config.secret ?? (await dataDir.secret('master', SECRET_BYTES));
  const folders = {
    journalFolder: join(dataDir.path, 'journal'),
    blobFolder: join(dataDir.path, 'blobs'),
    configFolder: join(dataDir.path, 'config'),
  };
  for (const folder of Object.values(folders)) mkdirSync(folder, { recursive: true, mode: 0o700 });
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
  const keyUsage = createKeyUsage({ pool: store.pool, log });
  closers.add(() => keyUsage.stop());
  const requestLog = createRequestLogWriter({ pool: store.pool, log });
  closers.add(() => requestLog.stop());
  const authenticate = createAuthenticator(store.pool, keyUsage.note);
  const limiter = createRateLimiter({ ...config.rateLimit, shared: { pool: store.pool, log } });
  const sealingKey = deriveKey(secret, 'dkim keys at rest');
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

  const domains = composeDomains({ config, store, sealingKey, firstTenantId });
  closers.add(() => Promise.resolve(domains.close()));
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
      journalFolder: folders.journalFolder,
      outcomes,
      onReady: nudge,
      pruneSink: () => pruneSink(store),
      recheckDomains: domains.recheck,
      sendTlsReports: () => late.sendTlsReports(),
      refreshStsPolicies: stsRefresh.run,
      greylistForgetAfterMs: () => receivingPolicy.current().greylisting.forgetAfterMs,
      async collectBlobs() {
        const removed = await collectBlobs(store, openDiskBlobs(folders.blobFolder), new Date());
        if (removed > 0) log.info({ blobs: removed }, 'removed stored bytes that no row names');
      },
    });
    late.upkeep = upkeep;
    closers.add(() => upkeep.stop());
  }

  signal.throwIfAborted();
  const certificate = await composeCertificate(config, { dataDir: dataDir.path, log });
  closers.add(async () => certificate.stop());
  const forwarder = composeForwarder(config, {
    store,
    log,
    blobFolder: folders.blobFolder,
    policy: receivingPolicy.current,
    secret,
    sealingKey,
    onReady: nudge,
  });
  closers.add(async () => forwarder?.stop());
  const homeLoops = startHomeLoops(config, {
    store,
    log,
    blobFolder: folders.blobFolder,
    onReady: nudge,
    onForwards: () => forwarder?.nudge(),
  });
  closers.add(async () => homeLoops?.stop());
  // Before the workers and after them: what they send to this machine itself arrives here.
  const mx = await composeMx(config, {
    store,
    log,
    dataDir: dataDir.path,
    blobFolder: folders.blobFolder,
    policy: receivingPolicy.current,
    onForwards: () => forwarder?.nudge(),
    onReady: nudge,
    firstTenantId,
    secret,
    bounceRules,
    certificate,
  });
  closers.add(async () => mx.listener?.stop());
  let isDelivering = (): boolean => true;
  if (config.roles.has('delivery')) {
    const setup = {
      ...describeDelivery(config),
      ...folders,
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

  const publicUrl = config.publicUrl.replace(/:0$/, `:${door?.port ?? 0}`);
  const verbs = composeVerbs({
    requestLog,
    config,
    log,
    store,
    ...folders,
    policy: policy.current,
    secret,
    sealingKey,
    firstTenantId,
    domains: domains.verbs,
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
    blobFolder: folders.blobFolder,
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
  const submission = await composeSubmission(config, {
    authenticate,
    limiter,
    submit: verbs.submitMessage,
    log,
    dataDir: dataDir.path,
    certificate,
  });
  closers.add(async () => submission.listener?.stop());
  if (door !== null) {
    const closed = [submission.missing, mx.missing].filter((missing) => missing !== null);
    const answer = createApp({
      verbs,
      log,
      spoolFolder: join(dataDir.path, 'spool'),
      authenticate,
      limiter,
      requestLog,
      missing: async () => [...closed, ...(await findMissing(store, isDelivering))],
      degraded: () => findDegraded(store),
    });
    door.open(answer);
  }
  return {
    httpPort: door?.port ?? null,
    mxPort: mx.listener?.port ?? null,
    submissionPort: submission.listener?.port ?? null,
    submissionsPort: submission.listener?.tlsPort ?? null,
    localUrl: door?.localUrl ?? null,
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

/** Mail is accepted all the same; it waits. Anybody may ask for health, so whose hosts were tried is not said. */
async function findDegraded(store: Store): Promise<readonly { what: string; why: string }[]> {
  const blocked = await withinReadyTime(readBlockedEgresses(store.pool)).catch(() => []);
  return blocked.map(({ since }) => ({
    what: 'port 25',
    why: `No connection to port 25 of a mail host succeeds since ${since.toISOString()}; the log says what to do.`,
  }));
}

/** Rejects when it takes too long for an answer about health. */
async function withinReadyTime<T>(work: Promise<T>): Promise<T> {
  const late = new Promise<never>((_, reject) => {
    setTimeout(() => reject(new Error('no answer')), READY_TIMEOUT_MS).unref();
  });
  return Promise.race([work, late]);
}

async function findMissing(
  store: Store,
  isDelivering: () => boolean,
): Promise<readonly { what: string; why: string }[]> {
  const missing: { what: string; why: string }[] = [];
  const timeout = new Promise<boolean>((resolve) => {
    setTimeout(() => resolve(false), READY_TIMEOUT_MS).unref();
  });
  const answered = store.pool.query('select 1').then(
    () => true,
    () => false,
  );
  if (!(await Promise.race([answered, timeout]))) {
    missing.push({ what: 'database', why: 'Postgres does not answer.' });
  }
  if (!isDelivering()) missing.push({ what: 'delivery', why: 'A delivery worker is starting.' });
  return missing;
}
