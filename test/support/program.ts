// The program as people run it: a process of its own with embedded Postgres in a temporary data directory,
// started, killed and started again.
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdtemp, rm } from 'node:fs/promises';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { LOADER } from './loader.ts';

const ENTRY = resolve(import.meta.dirname, '../../src/main.ts');
const START_MAX_MS = 60_000;
const POLL_MS = 50;
export const API_KEY = 're_testtest_abcdefghijklmnopqrstuvwx';

export interface Program {
  readonly base: string;
  readonly dataDir: string;
  /** What it printed, all starts together. */
  output(): string;
  /** Of the main process; null while none runs. */
  pid(): number | null;
  start(): Promise<void>;
  /** kill -9 of the main process, as the kernel's out-of-memory killer would. */
  kill(): Promise<void>;
  /** Asks it to stop; its exit code. */
  terminate(): Promise<number | null>;
  call(
    method: string,
    path: string,
    body?: unknown,
  ): Promise<{ status: number; body: Record<string, unknown> }>;
  remove(): Promise<void>;
}

export async function freePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as { port: number };
  server.close();
  await once(server, 'close');
  return port;
}

/** `dataDir` is the caller's to remove; `args` are for node, the program among them; `env` is added as it is. */
export interface Launch {
  readonly dataDir?: string;
  readonly args?: readonly string[];
  readonly env?: Readonly<Record<string, string>>;
}

export async function createProgram(
  settings: Record<string, string> = {},
  launch: Launch = {},
): Promise<Program> {
  const dataDir = launch.dataDir ?? (await mkdtemp(join(tmpdir(), 'mailstead-program-')));
  const port = await freePort();
  const base = `http://127.0.0.1:${port}`;
  let child: ChildProcess | null = null;
  let isKilled = false;
  let output = '';

  const start = async (): Promise<void> => {
    const inherited = Object.entries(process.env).filter(
      ([name]) => !name.startsWith('MAILSTEAD_'),
    );
    const started = spawn(process.execPath, launch.args ?? [...LOADER, ENTRY], {
      env: {
        ...Object.fromEntries(inherited),
        MAILSTEAD_MODE: 'development',
        MAILSTEAD_DATA_DIR: dataDir,
        MAILSTEAD_HTTP_PORT: String(port),
        MAILSTEAD_MX_PORT: '0',
        MAILSTEAD_SUBMISSION_PORT: '0',
        MAILSTEAD_SUBMISSIONS_PORT: '0',
        MAILSTEAD_METRICS_PORT: '0',
        MAILSTEAD_HTTP_HOST: '127.0.0.1',
        MAILSTEAD_API_KEY: API_KEY,
        MAILSTEAD_RATE_LIMIT: '1000000/1s',
        ...settings,
        ...launch.env,
      },
      stdio: ['ignore', 'pipe', 'pipe'],
    });
    child = started;
    isKilled = false;
    for (const stream of [started.stdout, started.stderr]) {
      stream.on('data', (chunk: Buffer) => {
        output += chunk.toString();
      });
    }
    const deadline = Date.now() + START_MAX_MS;
    for (;;) {
      if (started.exitCode !== null) throw new Error(`it did not start:\n${output.slice(-4_000)}`);
      const ready = await fetch(`${base}/health/ready`).catch(() => null);
      if (ready?.status === 200) return;
      if (Date.now() > deadline) throw new Error(`it is not ready:\n${output.slice(-4_000)}`);
      await new Promise((done) => setTimeout(done, POLL_MS));
    }
  };

  const end = async (signal: NodeJS.Signals): Promise<number | null> => {
    const ending = child;
    child = null;
    if (ending === null || ending.exitCode !== null) return ending?.exitCode ?? null;
    ending.kill(signal);
    const [code] = (await once(ending, 'exit')) as [number | null];
    return code;
  };

  return {
    base,
    dataDir,
    output: () => output,
    pid: () => child?.pid ?? null,
    start,
    async kill() {
      isKilled = true;
      await end('SIGKILL');
    },
    terminate: () => end('SIGTERM'),
    async call(method, path, body) {
      const response = await fetch(base + path, {
        method,
        headers: { authorization: `Bearer ${API_KEY}`, 'content-type': 'application/json' },
        ...(body === undefined ? {} : { body: JSON.stringify(body) }),
      });
      return {
        status: response.status,
        body: (await response.json()) as Record<string, unknown>,
      };
    },
    async remove() {
      // A killed program leaves its Postgres; only a start and a proper stop takes it along.
      if (child === null && isKilled) await start().catch(() => undefined);
      await end('SIGTERM');
      if (launch.dataDir === undefined) await rm(dataDir, { recursive: true, force: true });
    },
  };
}

export interface Run {
  readonly child: ChildProcess;
  said(): string;
  /** Its exit code. */
  readonly ended: Promise<number | null>;
}

/** The program with these settings, production where they say so. */
export async function runProgram(settings: Record<string, string>): Promise<Run> {
  const child = spawn(process.execPath, [...LOADER, ENTRY], {
    env: {
      PATH: process.env['PATH'],
      HOME: process.env['HOME'],
      NODE_COMPILE_CACHE: process.env['NODE_COMPILE_CACHE'],
      MAILSTEAD_MODE: 'development',
      MAILSTEAD_HTTP_HOST: '127.0.0.1',
      MAILSTEAD_HTTP_PORT: String(await freePort()),
      MAILSTEAD_MX_PORT: '0',
      MAILSTEAD_SUBMISSION_PORT: '0',
      MAILSTEAD_SUBMISSIONS_PORT: '0',
      MAILSTEAD_METRICS_PORT: '0',
      ...settings,
    },
  });
  let text = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (chunk: Buffer) => {
      text += chunk.toString();
    });
  }
  const ended = once(child, 'close').then(([code]) => code as number | null);
  return { child, said: () => text, ended };
}
