// Our side: the built program on a fresh data directory with its own Postgres, everything durable, delivering
// to the sink as to a smarthost. Development mode only because it has a verified domain from the start.
import { existsSync, mkdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { runningPostgresUrl } from '../../src/store/embedded-server.ts';
import { BenchFailed, findFreePort, startProgram, until, type Cleanup } from './children.ts';
import { cpuOf, peakRssMb, readTree, type ProcessFacts } from './processes.ts';

export type Settings = Readonly<Record<string, string | null>>;

/** The most memory that a process held. */
export interface Peak {
  readonly part: string;
  readonly pid: number;
  readonly peakMb: number;
}

export interface Product {
  readonly httpPort: number;
  readonly key: string;
  /** CPU seconds so far by part: main, delivery, postgres, other. */
  cpu(): ReadonlyMap<string, number>;
  /** Of every process of ours that is not Postgres, with its part. */
  processes(): readonly Peak[];
  /** The same, and Postgres: its largest process, shared buffers that it has touched among it. */
  memory(): readonly Peak[];
  /** Of its embedded Postgres. */
  databaseUrl(): Promise<string>;
  tail(): string;
  stop(): Promise<void>;
}

const KEY = 're_aaaaaaaa_aaaaaaaaaaaaaaaaaaaaaaaa';
const READY_MAX_MS = 60_000;
const root = join(import.meta.dirname, '..', '..');
const PROGRAM = join(root, 'dist', 'main.js');

/** Resolves when it is ready to accept and to deliver. `roles`: null = all of this release. */
export async function startProduct(options: {
  readonly folder: string;
  readonly sinkPort: number;
  readonly workers: number;
  readonly roles: string | null;
  /** Where to write V8's CPU profiles; null: none. */
  readonly profileFolder: string | null;
  /** MAILSTEAD_*, above what follows from the others; null: not set. */
  readonly settings?: Settings;
  readonly cleanup: Cleanup;
}): Promise<Product> {
  if (!existsSync(PROGRAM)) throw new BenchFailed('dist/main.js is not there: npm run build');
  const { folder, cleanup, profileFolder } = options;
  mkdirSync(folder, { recursive: true });
  const httpPort = await findFreePort();
  const running = await startProgram({
    command: process.execPath,
    args: ['--enable-source-maps', PROGRAM],
    cwd: root,
    log: join(folder, 'program.log'),
    cleanup,
    env: {
      ...withoutSettings(process.env),
      ...(profileFolder === null
        ? {}
        : { NODE_OPTIONS: `--cpu-prof --cpu-prof-dir=${profileFolder}` }),
      ...(options.roles === null ? {} : { MAILSTEAD_ROLES: options.roles }),
      MAILSTEAD_MODE: 'development',
      MAILSTEAD_DATA_DIR: join(folder, 'data'),
      MAILSTEAD_HTTP_PORT: String(httpPort),
      MAILSTEAD_MX_PORT: '0',
      MAILSTEAD_SUBMISSION_PORT: '0',
      MAILSTEAD_SUBMISSIONS_PORT: '0',
      MAILSTEAD_METRICS_PORT: '0',
      MAILSTEAD_HTTP_HOST: '127.0.0.1',
      MAILSTEAD_API_KEY: KEY,
      MAILSTEAD_RATE_LIMIT: '1000000/1s',
      MAILSTEAD_DELIVERY: 'smarthost',
      MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${options.sinkPort}`,
      MAILSTEAD_WORKERS: String(options.workers),
      ...Object.fromEntries(
        Object.entries(options.settings ?? {}).map(([name, value]) => [name, value ?? undefined]),
      ),
    },
  });
  await until(`ready\n${running.tail()}`, { maxMs: READY_MAX_MS }, async () => {
    if (running.hasEnded()) throw new BenchFailed(`the product ended:\n${running.tail()}`);
    const response = await fetch(`http://127.0.0.1:${httpPort}/health/ready`).catch(() => null);
    await response?.arrayBuffer();
    return response?.status === 200 ? true : null;
  });
  const peaks = (): readonly Peak[] =>
    readTree(running.pid).map((one) => ({
      part: partOf(one, running.pid),
      pid: one.pid,
      peakMb: peakRssMb(one.pid) ?? 0,
    }));
  return {
    httpPort,
    key: KEY,
    tail: running.tail,
    stop: running.stop,
    cpu() {
      const byPart = new Map<string, ProcessFacts[]>();
      for (const one of readTree(running.pid)) {
        const part = partOf(one, running.pid);
        byPart.set(part, [...(byPart.get(part) ?? []), one]);
      }
      return new Map([...byPart].map(([part, processes]) => [part, cpuOf(processes)]));
    },
    processes: () => peaks().filter(({ part }) => part !== 'postgres'),
    memory() {
      const all = peaks();
      const [largest] = all
        .filter(({ part }) => part === 'postgres')
        .toSorted((a, b) => b.peakMb - a.peakMb);
      const others = all.filter(({ part }) => part !== 'postgres');
      return largest === undefined ? others : [...others, largest];
    },
    async databaseUrl() {
      const url = await runningPostgresUrl(join(folder, 'data', 'postgres'));
      if (url === null) throw new BenchFailed('the embedded Postgres is not running');
      return url;
    },
  };
}

function withoutSettings(env: NodeJS.ProcessEnv): NodeJS.ProcessEnv {
  return Object.fromEntries(Object.entries(env).filter(([name]) => !name.startsWith('MAILSTEAD_')));
}

function partOf({ pid, name }: ProcessFacts, mainPid: number): string {
  if (pid === mainPid) return 'main';
  if (name === 'postgres') return 'postgres';
  try {
    const line = readFileSync(`/proc/${pid}/cmdline`, 'utf8');
    return line.includes('delivery-process') ? 'delivery' : 'other';
  } catch {
    return 'other'; // It ended in between.
  }
}
