// One appliance in four processes, on one database and one bucket: API and jobs, both SMTP doors, and two that deliver;
// and those who use it: programs at the API and at submission, and mail servers from outside whose mail is forwarded.
// All of them come again when they hear nothing, as they should.
import { mkdir, mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createTransport } from 'nodemailer';
import { inboundMessage, startInboundLoad, type InboundMessage } from './inbound-load.ts';
import { API_KEY, createProgram, freePort, type Program } from './program.ts';

export interface Fleet {
  /** By role: `front` has the API and the jobs, `door` listens for mail, `one` and `other` deliver. */
  readonly programs: Readonly<Record<'front' | 'door' | 'one' | 'other', Program>>;
  readonly mxPort: number;
  readonly submissionsPort: number;
  stop(): Promise<void>;
}

export interface FleetOptions {
  readonly databaseUrl: string;
  readonly blobStore: string;
  /** Where all mail goes. */
  readonly smarthostPort: number;
  /** The program, for node; absent: our sources. */
  readonly args?: readonly string[];
  /** 1 as ever, or 0: whoever delivers does it without a worker process. */
  readonly workers?: 0 | 1;
}

const ROLES = { front: 'api,jobs', door: 'mx,submission', one: 'delivery', other: 'delivery' };

/** All are started at the same time, on a database that knows nothing yet. */
export async function startFleet(options: FleetOptions): Promise<Fleet> {
  const folder = await mkdtemp(join(tmpdir(), 'mailstead-fleet-'));
  const [mxPort, submissionsPort] = [await freePort(), await freePort()];
  const shared = {
    MAILSTEAD_DATABASE_URL: options.databaseUrl,
    MAILSTEAD_BLOB_STORE: options.blobStore,
    MAILSTEAD_SECRET: 'what all processes of one fleet have in common',
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${options.smarthostPort}`,
    MAILSTEAD_RETRY_SCHEDULE: '1s',
    MAILSTEAD_LOG_LEVEL: 'warn',
    MAILSTEAD_WORKERS: String(options.workers ?? 1),
    MAILSTEAD_MX_PORT: String(mxPort),
    MAILSTEAD_SUBMISSIONS_PORT: String(submissionsPort),
  };
  const programs: Record<string, Program> = {};
  for (const [name, roles] of Object.entries(ROLES)) {
    const dataDir = join(folder, name);
    await mkdir(join(dataDir, 'config'), { recursive: true });
    // All who bring mail are one client here.
    const connections = { per_client: 100, new_per_minute: 1_000_000 };
    await writeFile(join(dataDir, 'config', 'receiving.json'), JSON.stringify({ connections }));
    programs[name] = await createProgram(
      { ...shared, MAILSTEAD_ROLES: roles, MAILSTEAD_METRICS_PORT: String(await freePort()) },
      { dataDir, ...(options.args === undefined ? {} : { args: options.args }) },
    );
  }
  const all = Object.values(programs);
  const stop = async (): Promise<void> => {
    // No embedded Postgres to take along: ended is ended.
    await Promise.all(all.map((program) => program.terminate()));
    await rm(folder, { recursive: true, force: true });
  };
  const started = await Promise.allSettled(all.map((program) => program.start()));
  const failed = started.find((one) => one.status === 'rejected');
  if (failed !== undefined) {
    await stop();
    throw failed.reason;
  }
  return { programs: programs as Fleet['programs'], mxPort, submissionsPort, stop };
}

/** Mail for `crowd@mailstead.test` goes on to `destination`. */
export async function forwardTheCrowd({ programs }: Fleet, destination: string): Promise<void> {
  const { front } = programs;
  const post = async (path: string, body: unknown): Promise<string> => {
    const answer = await front.call('POST', path, body);
    if (answer.status !== 201) throw new Error(`${path}: ${JSON.stringify(answer.body)}`);
    return String(answer.body['id']);
  };
  const { body } = await front.call('GET', '/domains');
  const domains = body['data'] as readonly { readonly id: string; readonly name: string }[];
  const home = domains.find(({ name }) => name === 'mailstead.test');
  const exact = { domain_id: home?.id, type: 'exact', local_part: 'crowd' };
  const route = await post('/receiving/routes', exact);
  const rule = { route_id: route, destinations: [destination], status: 'active' };
  await post('/receiving/forwarding-rules', rule);
}

export interface FleetLoad {
  /** Ids of emails that were acknowledged. */
  readonly accepted: ReadonlySet<string>;
  /** The same by where they were handed in. */
  readonly counts: () => { readonly api: number; readonly submission: number };
  readonly inbound: { readonly acknowledged: ReadonlyMap<string, string> };
  readonly messages: readonly InboundMessage[];
  /** Answers that were no 200, and connections that were refused or lost; each came again. */
  readonly refused: () => number;
  /** Hand-overs of which nobody knows whether they happened; they did not come again. */
  readonly ambiguous: () => number;
  /** Whether every API request ends up as one email: the numbers that were sent. */
  readonly numbers: () => number;
  /** No more; resolves when everything under way has its answer. */
  stop(): Promise<void>;
}

const AGAIN_MS = 100;
/** Too much for a row. */
const LARGE_CHARS = 300_000;
const pause = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

export function startFleetLoad(
  fleet: Fleet,
  about: {
    /** Unlike that of any other load; begins every subject. */
    readonly name: string;
    /** Connections at the API. */
    readonly api: number;
    readonly submission: number;
    /** Every so many-th email is too large for a row. */
    readonly largeEvery: number;
    readonly inboundMessages: number;
    readonly inboundConnections: number;
    /** Between two emails of one connection. */
    readonly everyMs: number;
  },
): FleetLoad {
  const accepted = new Set<string>();
  const counts = { api: 0, submission: 0 };
  let number = 0;
  let refused = 0;
  let ambiguous = 0;
  let isStopped = false;
  const textOf = (n: number): string =>
    n % about.largeEvery === 0 ? 'large '.repeat(LARGE_CHARS / 6) : 'x'.repeat(1_000);

  const atApi = async (): Promise<void> => {
    while (!isStopped) {
      const n = (number += 1);
      const email = {
        from: 'Ada <ada@mailstead.test>',
        to: `r${n}@recipient.test`,
        subject: `${about.name} ${n}`,
        text: textOf(n),
      };
      // Until it is answered, also after the end: what was asked for must not stay in doubt.
      for (;;) {
        const id = await post(fleet.programs.front.base, { email, key: `${about.name}-${n}` });
        if (id !== null) {
          accepted.add(id);
          counts.api += 1;
          break;
        }
        refused += 1;
        await pause(AGAIN_MS);
      }
      await pause(about.everyMs);
    }
  };

  const atSubmission = async (who: number): Promise<void> => {
    const transport = createTransport({
      pool: true,
      maxConnections: 1,
      maxMessages: 50,
      host: '127.0.0.1',
      port: fleet.submissionsPort,
      secure: true,
      tls: { rejectUnauthorized: false },
      auth: { user: 'mailstead', pass: API_KEY },
    });
    try {
      for (let n = 1; !isStopped; n++) {
        const mail = {
          from: 'ada@mailstead.test',
          to: `s${who}-${n}@recipient.test`,
          subject: `Submitted ${about.name} ${who}-${n}`,
          text: textOf(n),
        };
        for (;;) {
          try {
            const { response } = await transport.sendMail(mail);
            accepted.add(/queued as (\S+)/.exec(response)?.[1] ?? '');
            counts.submission += 1;
            break;
          } catch (error) {
            const { command, responseCode } = error as { command?: string; responseCode?: number };
            refused += 1;
            if (responseCode === undefined && command !== 'CONN' && command !== 'AUTH') {
              ambiguous += 1;
              break;
            }
            await pause(AGAIN_MS);
          }
        }
        await pause(about.everyMs);
      }
    } finally {
      transport.close();
    }
  };

  const messages = Array.from({ length: about.inboundMessages }, (_, n) =>
    inboundMessage(`Inbound ${about.name} ${n}`, n),
  );
  const inbound = startInboundLoad(fleet.mxPort, messages, about.inboundConnections);
  const ended = Promise.all([
    ...Array.from({ length: about.api }, atApi),
    ...Array.from({ length: about.submission }, (_, who) => atSubmission(who)),
  ]);
  return {
    accepted,
    counts: () => ({ ...counts }),
    inbound,
    messages,
    refused: () => refused,
    ambiguous: () => ambiguous,
    numbers: () => number,
    async stop() {
      isStopped = true;
      await ended;
      await inbound.ended;
    },
  };
}

/** The id, or null: not now, come again. */
async function post(
  base: string,
  about: { readonly email: object; readonly key: string },
): Promise<string | null> {
  let answer: Response;
  try {
    answer = await fetch(`${base}/emails`, {
      method: 'POST',
      headers: {
        authorization: `Bearer ${API_KEY}`,
        'content-type': 'application/json',
        'idempotency-key': about.key,
      },
      body: JSON.stringify(about.email),
    });
    const body = (await answer.json()) as { id?: string };
    if (answer.status === 200) return body.id ?? '';
    // 409: the same is under way, from before the connection was lost.
    if (answer.status === 503 || answer.status === 409) return null;
    throw new Error(`refused for good with ${answer.status}: ${JSON.stringify(body)}`);
  } catch (error) {
    if (error instanceof TypeError || error instanceof SyntaxError) return null; // refused, or lost
    throw error;
  }
}
