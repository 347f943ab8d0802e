// The appliance without a worker of its own, and delivery workers as the processes they are in production, started, killed
// and stopped by the test: what the main process would do after a death, the test does when it is ready to.
import { fork, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { describeDelivery, type DeliverySetup } from '../../src/compose-delivery.ts';
import { loadConfig } from '../../src/config.ts';
import type { FromWorker, ToWorker } from '../../src/delivery-process.ts';
import { recoverProcess } from '../../src/jobs/upkeep.ts';
import { DEFAULT_OUTCOMES } from '../../src/queue/outcome-policy.ts';
import { wake } from '../../src/queue/wake.ts';
import { openStore, type Store } from '../../src/store/orm.ts';
import { startApp, type App } from './app.ts';
import { silent } from './queue.ts';
import { LOADER } from './loader.ts';

const ENTRY = fileURLToPath(new URL('../../src/delivery-process.ts', import.meta.url));
const SECRET = 'a-secret-that-only-tests-know-0123456789';

export interface WorkerProcess {
  readonly child: ChildProcess;
  readonly pid: number;
  /** Resolves with the signal or code that it ended with. */
  readonly ended: Promise<number | string | null>;
  kill(): Promise<void>;
}

export interface WorkerBench {
  readonly app: App;
  readonly store: Store;
  readonly journalFolder: string;
  /** A worker that is ready; `journalFolder` is another where it stands for one on another machine. */
  spawn(about?: { readonly journalFolder?: string }): Promise<WorkerProcess>;
  /** What the main process does when a worker has died. */
  recover(worker: WorkerProcess): Promise<void>;
  /** As if its time had come for all that waits. */
  dueNow(): Promise<void>;
  /** What the journals say, all of them together. */
  journal(): string;
  states(): Promise<Record<string, number>>;
  stop(): Promise<void>;
}

/** Mail leaves for a host on `port` of this machine. */
export async function openWorkerBench(
  port: number,
  settings: Record<string, string> = {},
): Promise<WorkerBench> {
  const own = {
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${port}`,
    MAILSTEAD_SECRET: SECRET,
    MAILSTEAD_ROLES: 'api',
    ...settings,
  };
  const app = await startApp(own);
  const store = await openStore({
    url: app.databaseUrl,
    log: silent,
    connectionsMax: 4,
    migrate: false,
  });
  const journalFolder = join(app.dataDir, 'journal');
  const workers = new Set<WorkerProcess>();
  return {
    app,
    store,
    journalFolder,
    async spawn(about = {}) {
      const folder = about.journalFolder ?? journalFolder;
      mkdirSync(folder, { recursive: true });
      const setup: DeliverySetup = {
        ...describeDelivery(
          loadConfig({
            ...own,
            MAILSTEAD_MODE: 'development',
            MAILSTEAD_DATA_DIR: app.dataDir,
            MAILSTEAD_DATABASE_URL: app.databaseUrl,
          }),
        ),
        databaseUrl: app.databaseUrl,
        secret: SECRET,
        sinkPort: null,
        home: { kind: 'elsewhere' },
        journalFolder: folder,
        blobs: { kind: 'disk', folder: join(app.dataDir, 'blobs') },
        configFolder: join(app.dataDir, 'config'),
        logLevel: 'silent',
      };
      const child = fork(ENTRY, [], { stdio: 'inherit', execArgv: [...LOADER] });
      const ended = once(child, 'exit').then(
        ([code, signal]) => (signal ?? code) as number | string | null,
      );
      const worker: WorkerProcess = {
        child,
        pid: child.pid!,
        ended,
        async kill() {
          child.kill('SIGKILL');
          await ended;
        },
      };
      workers.add(worker);
      void ended.then(() => workers.delete(worker));
      child.send({ type: 'setup', setup } satisfies ToWorker);
      const [message] = (await once(child, 'message')) as [FromWorker];
      if (message.type !== 'ready') throw new Error('a worker speaks before it is ready');
      return worker;
    },
    recover: ({ pid }) =>
      recoverProcess({ store, log: silent, journalFolder, outcomes: () => DEFAULT_OUTCOMES }, pid),
    async dueNow() {
      await store.pool.query(
        "update delivery set due_at = now() where state in ('deferred', 'unknown')",
      );
      await wake(store.pool, null);
    },
    journal: () =>
      readdirSync(journalFolder)
        .filter((name) => name.endsWith('.journal'))
        .map((name) => readFileSync(join(journalFolder, name), 'utf8'))
        .join(''),
    async states() {
      const { rows } = await store.pool.query<{ state: string; count: string }>(
        'select state, count(*) from delivery group by state order by state',
      );
      return Object.fromEntries(rows.map(({ state, count }) => [state, Number(count)]));
    },
    async stop() {
      for (const worker of workers) {
        worker.child.kill('SIGCONT');
        await worker.kill();
      }
      await store.close();
      await app.stop();
    },
  };
}
