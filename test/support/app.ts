// The real appliance, in this process, on a fresh database, a temporary data directory and free ports.
import { mkdir, mkdtemp, readFile, rm, symlink, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { startAppliance, type Appliance } from '../../src/appliance.ts';
import { loadConfig } from '../../src/config.ts';
import { createLogger } from '../../src/log.ts';
import { migratedDatabase } from './postgres.ts';

export interface Answer<T = Record<string, unknown>> {
  readonly status: number;
  readonly headers: Headers;
  readonly body: T;
}

export interface App {
  readonly base: string;
  readonly key: string;
  readonly databaseUrl: string;
  readonly dataDir: string;
  readonly appliance: Appliance;
  /** What the log said at warn and above. */
  readonly complaints: readonly string[];
  call<T = Record<string, unknown>>(
    method: string,
    path: string,
    options?: { body?: unknown; headers?: Record<string, string>; key?: string | null },
  ): Promise<Answer<T>>;
  /** Sends one email and returns its id; fails when it is refused. */
  send(email?: Record<string, unknown>, headers?: Record<string, string>): Promise<string>;
  /** Waits until the email's last_event is one of these. */
  untilEvent(id: string, ...events: readonly string[]): Promise<Record<string, unknown>>;
  stop(): Promise<void>;
}

/** The longer it takes, the seldomer it is asked: asking costs the time that the asked one needs. */
const POLL_MIN_MS = 10;
const POLL_MAX_MS = 150;
const WAIT_MAX_MS = 30_000;

/** Repeats `read` until `done` says so; fails with what was last seen. */
export async function until<T>(
  read: () => Promise<T>,
  done: (value: T) => boolean,
  waitMaxMs: number = WAIT_MAX_MS,
): Promise<T> {
  const begunAt = Date.now();
  for (;;) {
    const value = await read();
    if (done(value)) return value;
    const waitedMs = Date.now() - begunAt;
    if (waitedMs > waitMaxMs) {
      throw new Error(
        `still not so after ${waitMaxMs} ms: ${JSON.stringify(value)?.slice(0, 2_000)}`,
      );
    }
    const pauseMs = Math.min(POLL_MAX_MS, Math.max(POLL_MIN_MS, waitedMs / 10));
    await new Promise((resolve) => setTimeout(resolve, pauseMs));
  }
}

/** By database: who starts later on it shares blobs and secret, as processes of one appliance do. */
const firstDataDirs = new Map<string, string>();

export const simpleEmail = {
  from: 'Ada <ada@mailstead.test>',
  to: 'ok@recipient.test',
  subject: 'Hello',
  text: 'Plain words.',
};

/** `settings` are MAILSTEAD_* variables beyond the defaults of a test, `files` the operator's own by name (`delivery`). */
export async function startApp(
  settings: Record<string, string> = {},
  files: Readonly<Record<string, unknown>> = {},
): Promise<App> {
  const database = await migratedDatabase();
  const dataDir = await mkdtemp(join(tmpdir(), 'mailstead-test-'));
  await mkdir(join(dataDir, 'config'));
  for (const [name, file] of Object.entries(files)) {
    await writeFile(join(dataDir, 'config', `${name}.json`), JSON.stringify(file));
  }
  const first = firstDataDirs.get(settings['MAILSTEAD_DATABASE_URL'] ?? '');
  if (first !== undefined) await symlink(join(first, 'blobs'), join(dataDir, 'blobs'));
  const secretFile = join(first ?? dataDir, 'secrets/master');
  const complaints: string[] = [];
  const config = loadConfig({
    MAILSTEAD_MODE: 'development',
    MAILSTEAD_DATA_DIR: dataDir,
    MAILSTEAD_DATABASE_URL: database.url,
    MAILSTEAD_HTTP_PORT: '0',
    MAILSTEAD_HTTP_HOST: '127.0.0.1',
    MAILSTEAD_MX_PORT: '0',
    MAILSTEAD_SUBMISSION_PORT: '0',
    MAILSTEAD_SUBMISSIONS_PORT: '0',
    MAILSTEAD_METRICS_PORT: '0',
    MAILSTEAD_WORKERS: '0',
    MAILSTEAD_RATE_LIMIT: '100000/1s',
    ...(first === undefined || 'MAILSTEAD_SECRET' in settings
      ? {}
      : { MAILSTEAD_SECRET: (await readFile(secretFile, 'utf8')).trim() }),
    ...settings,
  });
  const log = createLogger({
    level: 'warn',
    name: 'test',
    mode: 'development',
    write: (line) => complaints.push(line),
  });
  const appliance = await startAppliance(config, log);
  if (first === undefined) firstDataDirs.set(database.url, dataDir);
  const base = `http://127.0.0.1:${appliance.httpPort}`;
  const key = appliance.firstKey?.token ?? '';

  // oxlint-disable-next-line typescript/no-unnecessary-type-parameters -- the caller knows the form
  const call: App['call'] = async <T>(
    method: string,
    path: string,
    options: Parameters<App['call']>[2] = {},
  ) => {
    const bearer = options.key === undefined ? key : options.key;
    const body = options.body;
    const isRaw = typeof body === 'string' || body instanceof Uint8Array;
    const response = await fetch(base + path, {
      method,
      redirect: 'manual',
      headers: {
        'content-type': 'application/json',
        ...(bearer === null ? {} : { authorization: `Bearer ${bearer}` }),
        ...options.headers,
      },
      ...(body === undefined
        ? {}
        : { body: isRaw ? (body as NonNullable<RequestInit['body']>) : JSON.stringify(body) }),
    });
    const text = await response.text();
    let parsed: unknown = text;
    try {
      parsed = JSON.parse(text);
    } catch {
      // not JSON: the test sees the text
    }
    return { status: response.status, headers: response.headers, body: parsed as T };
  };

  return {
    base,
    key,
    databaseUrl: database.url,
    dataDir,
    appliance,
    complaints,
    call,
    async send(email = {}, headers = {}) {
      const { status, body } = await call<{ id: string }>('POST', '/emails', {
        body: { ...simpleEmail, ...email },
        headers,
      });
      if (status !== 200) throw new Error(`refused with ${status}: ${JSON.stringify(body)}`);
      return body.id;
    },
    async untilEvent(id, ...events) {
      const { body } = await until(
        () => call('GET', `/emails/${id}`),
        (answer) => events.includes(String(answer.body['last_event'])),
      );
      return body;
    },
    async stop() {
      await appliance.stop();
      await database.drop();
      await rm(dataDir, { recursive: true, force: true });
    },
  };
}
