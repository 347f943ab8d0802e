// The composition root: settings -> store -> verbs -> edges. Starts what the roles of this process need, in
// the order in which things depend on each other, and stops it in the opposite order.
import { createServer, type Server } from 'node:http';
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import type { AddressInfo } from 'node:net';
import { join } from 'node:path';
import { ensureFirstTenant } from './access/first-tenant.ts';
import { createAuthenticator } from './access/keys.ts';
import { createRateLimiter } from './access/rate-limit.ts';
import { composeDelivery, describeDelivery, type RunningWorker } from './compose-delivery.ts';
import type { Config } from './config.ts';
import { laneFor } from './delivery/next-hop.ts';
import { createDomain, generateDkimKeys } from './domains/create.ts';
import { createDomainLookup } from './domains/lookup.ts';
import { createApp } from './http/app.ts';
import type { Verbs } from './http/verbs.ts';
import { recoverLocalRuns, recoverProcess, startUpkeep, type Upkeep } from './jobs/upkeep.ts';
import type { Logger } from './log.ts';
import { createGroupCommit } from './queue/group-commit.ts';
import type { Waiting } from './queue/settle.ts';
import {
  createSinkStore,
  emptySink,
  listSinkMessages,
  pruneSink,
} from './receiving/sink-messages.ts';
import { acceptEmail } from './sending/accept.ts';
import { findEmail, listEmails } from './sending/read.ts';
import { startSink } from './smtp/sink.ts';
import { openDiskBlobs } from './store/blob.ts';
import { openDataDir, type DataDir } from './store/data-dir.ts';
import { startEmbeddedPostgres } from './store/embedded.ts';
import { openStore, type Store } from './store/orm.ts';
import { deriveKey } from './store/seal.ts';
import { isDatabaseUnavailable } from './store/unavailable.ts';
import { readTrace } from './timeline/trace.ts';
import { startWorkers } from './workers.ts';

export interface Appliance {
  /** Null when this process does not run the API. */
  readonly httpPort: number | null;
  readonly publicUrl: string;
  /** The first tenant's key where it is known: made now, or remembered in development mode. */
  readonly firstKey: { readonly token: string; readonly isNew: boolean } | null;
  readonly databaseUrl: string;
  stop(): Promise<void>;
}

/** The verified domain that development mode sends and receives with. */
export const HOME_DOMAIN = 'mailstead.test';
const API_CONNECTIONS_MAX = 12;
const DATABASE_WAIT_MS = 60_000;
const DATABASE_RESTART_MS = 1_000;
const MESSAGE_MAX_BYTES = 64 * 1024 * 1024;
const HTTP_STOP_MAX_MS = 5_000;
const READY_TIMEOUT_MS = 2_000;
const SECRET_BYTES = 32;

/** Undoes, newest first, whatever was started. */
class Closers {
  readonly #steps: (() => Promise<void>)[] = [];

  add(step: () => Promise<void>): void {
    this.#steps.push(step);
  }

  async run(log: Logger): Promise<void> {
    for (const step of this.#steps.splice(0).toReversed()) {
      await step().catch((error: unknown) => log.error({ err: error }, 'a part did not stop well'));
    }
  }
}

/** Resolves when every role of this process works. Stops what it started when one cannot. */
export async function startAppliance(config: Config, log: Logger): Promise<Appliance> {
  const closers = new Closers();
  try {
    return await start(config, log, closers);
  } catch (error) {
    await closers.run(log);
    throw error;
  }
}

async function start(config: Config, log: Logger, closers: Closers): Promise<Appliance> {
  const dataDir = await openDataDir(config.dataDir, { now: () => new Date() });
  closers.add(() => dataDir.release());
  const secret = config.secret ?? (await dataDir.secret('master', SECRET_BYTES));
  const folders = {
    journalFolder: join(dataDir.path, 'journal'),
    blobFolder: join(dataDir.path, 'blobs'),
  };
  for (const folder of Object.values(folders)) mkdirSync(folder, { recursive: true, mode: 0o700 });

  const databaseUrl = config.databaseUrl ?? (await startDatabase(dataDir, log, closers));
  const store = await openWhenReady(databaseUrl, log);
  closers.add(() => store.close());
  const sealingKey = deriveKey(secret, 'dkim keys at rest');
  const { firstKey, firstTenantId } = await prepareFirstTenant({
    config,
    store,
    dataDir,
    sealingKey,
  });
  await recoverLocalRuns({ store, log, journalFolder: folders.journalFolder });

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

  const late: { upkeep: Upkeep | null; nudge: () => void } = {
    upkeep: null,
    nudge: () => undefined,
  };
  const nudge = (): void => late.nudge();
  const onWaiting = (waiting: readonly Waiting[]): void => {
    for (const { lane, dueAt } of waiting) late.upkeep?.alarm(lane, dueAt);
  };
  if (config.roles.has('jobs')) {
    const upkeep = await startUpkeep({
      store,
      log,
      databaseUrl,
      mongodbUrl: config.mongodbUrl,
      journalFolder: folders.journalFolder,
      onReady: nudge,
      pruneSink: () => pruneSink(store),
    });
    late.upkeep = upkeep;
    closers.add(() => upkeep.stop());
  }

  let isDelivering = (): boolean => true;
  if (config.roles.has('delivery')) {
    const setup = {
      ...describeDelivery(config),
      ...folders,
      databaseUrl,
      secret,
      sinkPort: sink?.port ?? null,
    };
    if (config.workers === 0) {
      const worker: RunningWorker = await composeDelivery(setup, { log, onWaiting });
      late.nudge = () => worker.nudge();
      closers.add(() => worker.stop());
    } else {
      const workers = startWorkers({
        count: config.workers,
        setup,
        log,
        onWaiting,
        onLost: (pid) => recoverProcess({ store, log, journalFolder: folders.journalFolder }, pid),
      });
      late.nudge = () => workers.nudge();
      isDelivering = workers.isReady;
      closers.add(() => workers.stop());
      await workers.started;
    }
  }

  const http = config.roles.has('api')
    ? await startHttp({
        config,
        log,
        store,
        blobFolder: folders.blobFolder,
        sealingKey,
        firstTenantId,
        nudge,
        isDelivering,
        closers,
      })
    : null;
  return {
    ...(http ?? { httpPort: null, publicUrl: config.publicUrl }),
    firstKey,
    databaseUrl,
    stop: () => closers.run(log),
  };
}

/** Starts the embedded Postgres and starts it again whenever it ends without being asked to. */
async function startDatabase(dataDir: DataDir, log: Logger, closers: Closers): Promise<string> {
  const options = { dir: join(dataDir.path, 'postgres'), log };
  let stopped = false;
  let running = await startEmbeddedPostgres(options);
  const { url } = running;

  const watch = async (): Promise<void> => {
    while (!stopped) {
      const { expected, code, signal } = await running.exited;
      if (expected || stopped) return;
      log.error({ code, signal }, 'Postgres ended; starting it again');
      try {
        running = await startEmbeddedPostgres(options);
        if (running.url !== url) throw new Error('Postgres moved'); // everyone holds the first URL
      } catch (error) {
        log.error({ err: error }, 'Postgres cannot be started; trying again');
        await new Promise((resolve) => setTimeout(resolve, DATABASE_RESTART_MS));
      }
    }
  };
  const watching = watch();
  closers.add(async () => {
    stopped = true;
    await running.stop();
    await watching;
  });
  return url;
}

/** A database that starts beside us may need a while; one that answers "no" needs no wait. */
async function openWhenReady(url: string, log: Logger): Promise<Store> {
  const deadline = Date.now() + DATABASE_WAIT_MS;
  for (;;) {
    try {
      return await openStore({ url, log, connectionsMax: API_CONNECTIONS_MAX, migrate: true });
    } catch (error) {
      if (!isDatabaseUnavailable(error) || Date.now() > deadline) throw error;
      log.info({ reason: (error as Error).message }, 'waiting for the database');
      await new Promise((resolve) => setTimeout(resolve, 1_000));
    }
  }
}

async function prepareFirstTenant(d: {
  config: Config;
  store: Store;
  dataDir: DataDir;
  sealingKey: Buffer;
}): Promise<{ firstKey: Appliance['firstKey']; firstTenantId: string }> {
  const { config, store, dataDir } = d;
  const isDevelopment = config.mode === 'development';
  const keyFile = join(dataDir.path, 'first-api-key');
  const first = await ensureFirstTenant(store, config.apiKey);
  if (isDevelopment) await ensureHomeDomain(store, first.tenantId, d.sealingKey);
  // In development the key stays readable on disk, so that every start can show a curl that works.
  if (isDevelopment && first.token !== null) {
    writeFileSync(keyFile, first.token, { mode: 0o600 });
  }
  const remembered =
    isDevelopment && existsSync(keyFile) ? readFileSync(keyFile, 'utf8').trim() : null;
  const token = first.token ?? remembered;
  return {
    firstTenantId: first.tenantId,
    firstKey: token === null ? null : { token, isNew: first.token !== null && first.generated },
  };
}

async function ensureHomeDomain(store: Store, tenantId: string, sealingKey: Buffer): Promise<void> {
  const { rows } = await store.pool.query(
    'select 1 from sending_domain where tenant_id = $1 and name = $2',
    [tenantId, HOME_DOMAIN],
  );
  if (rows.length > 0) return;
  const keys = await generateDkimKeys();
  await store.transact((client) =>
    createDomain(
      client,
      { tenantId, name: HOME_DOMAIN, status: 'verified', receiving: true },
      { sealingKey, keys },
    ),
  );
}

async function startHttp(d: {
  config: Config;
  log: Logger;
  store: Store;
  blobFolder: string;
  sealingKey: Buffer;
  firstTenantId: string;
  nudge: () => void;
  isDelivering: () => boolean;
  closers: Closers;
}): Promise<{ httpPort: number; publicUrl: string }> {
  const { config, log, store } = d;
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
  const hasSink = config.mode === 'development' || config.delivery === 'sink';
  const verbs: Verbs = {
    async acceptEmail(caller, send) {
      const accepted = await acceptEmail(accepting, caller, send);
      d.nudge();
      return accepted;
    },
    listEmails: (caller, page) => listEmails(store, caller.tenantId, page),
    findEmail: (caller, id) => findEmail(store, caller.tenantId, id),
    readTrace: (caller, id) => readTrace(store, caller.tenantId, id),
    sink: hasSink
      ? { list: (page) => listSinkMessages(store, page), empty: () => emptySink(store) }
      : null,
  };
  const server = createServer();
  await listen(server, config.httpPort, config.httpHost);
  d.closers.add(() => closeServer(server));
  const httpPort = (server.address() as AddressInfo).port;
  const publicUrl = config.publicUrl.replace(/:0$/, `:${httpPort}`);
  const app = createApp({
    verbs,
    log,
    authenticate: createAuthenticator(store.pool),
    limiter: createRateLimiter(config.rateLimit),
    missing: () => findMissing(store, d.isDelivering),
  });
  server.on('request', app);
  return { httpPort, publicUrl };
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

function listen(server: Server, port: number, host: string | null): Promise<void> {
  return new Promise((resolve, reject) => {
    server.once('error', (error: NodeJS.ErrnoException) => {
      reject(
        error.code === 'EADDRINUSE'
          ? new Error(
              `port ${port} is in use by another program; stop it or set MAILSTEAD_HTTP_PORT`,
            )
          : error,
      );
    });
    server.listen(host === null ? { port } : { port, host }, () => resolve());
  });
}

/** Lets requests that are being answered finish; idle connections close at once. */
async function closeServer(server: Server): Promise<void> {
  const closed = new Promise<void>((resolve) => server.close(() => resolve()));
  const timer = setTimeout(() => server.closeAllConnections(), HTTP_STOP_MAX_MS);
  await closed;
  clearTimeout(timer);
}
