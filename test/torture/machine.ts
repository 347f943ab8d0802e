// The program under torture: the built one, with its own embedded Postgres or with one that we can stop, and what can be
// asked of it from outside: its processes, its rows, its API.
import { mkdtemp, rm } from 'node:fs/promises';
import { readdirSync, readFileSync, readlinkSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { Pool } from 'pg';
import {
  runningPostgresUrl,
  startEmbeddedPostgres,
  type EmbeddedPostgres,
} from '../../src/store/embedded.ts';
import { cpuOf, readTree, type ProcessFacts } from '../bench/processes.ts';
import { API_KEY, createProgram, type Launch, type Program } from '../support/program.ts';
import { silent } from '../support/queue.ts';
import { sleep, untilSo, type Torture } from './row.ts';

const PROGRAM = resolve(import.meta.dirname, '../../dist/main.js');
/** Long enough for a lost worker to be noticed, watched and decided about. */
const DRAIN_MAX_MS = 180_000;
const SENDS_MAX = 10_000_000;
const REFUSED_PAUSE_MS = 50;
const OPEN = `('ready', 'in_flight', 'deferred', 'preparing', 'scheduled')`;

export interface Sent {
  /** Email ids that were answered with a 200. */
  readonly accepted: Set<string>;
  /** How often each other status came; 0 = no answer. */
  readonly refused: Map<number, number>;
}

export interface Load {
  readonly sent: Sent;
  /** Resolves when `max` requests have been made. */
  readonly ended: Promise<unknown>;
  /** No more; resolves when every open request has its answer. */
  stop(): Promise<Sent>;
}

export interface Machine {
  readonly program: Program;
  readonly databaseUrl: () => Promise<string>;
  /** Of the delivery worker processes. */
  workers(): readonly number[];
  /** CPU seconds so far of the program, without Postgres. */
  cpuS(): number;
  /** Open sockets and resident bytes of the program, without Postgres. */
  weight(): { readonly sockets: number; readonly rssMb: number };
  query<T extends object>(sql: string, values?: readonly unknown[]): Promise<readonly T[]>;
  /** Starts to send, `connections` at a time, `max` in all. */
  load(options: {
    readonly connections: number;
    readonly max?: number;
    readonly email: (number: number) => Record<string, unknown>;
    /** Pause of one connection after a 200. */
    readonly everyMs?: number;
    readonly key?: string;
  }): Load;
  /** Rows by state. */
  states(): Promise<Record<string, number>>;
  /** Waits until nothing is open any more; the states then. Throws when that takes too long. */
  drained(maxMs?: number): Promise<Record<string, number>>;
  /** Ends the pool of `query`, for whoever is about to take the database away. */
  forget(): Promise<void>;
}

export const simpleEmail = (
  number: number,
  domain = 'recipient.test',
): Record<string, unknown> => ({
  from: 'Ada <ada@mailstead.test>',
  to: `r${number}@${domain}`,
  subject: `Number ${number}`,
  text: 'x'.repeat(1_500),
});

/** Starts it; what was started is undone with the row. */
export async function startMachine(
  torture: Torture,
  settings: Record<string, string>,
  launch: Launch = {},
): Promise<Machine> {
  const program = await createProgram(
    { MAILSTEAD_LOG_LEVEL: 'warn', MAILSTEAD_RETRY_SCHEDULE: '1s', ...settings },
    { args: ['--enable-source-maps', PROGRAM], ...launch },
  );
  torture.undo.add(() => program.remove());
  let pool: Pool | null = null;
  const forget = async (): Promise<void> => {
    const ended = pool;
    pool = null;
    await ended?.end();
  };
  torture.undo.add(forget);
  await program.start();

  const databaseUrl = async (): Promise<string> =>
    settings['MAILSTEAD_DATABASE_URL'] ??
    untilSo('the embedded Postgres', 30_000, () =>
      runningPostgresUrl(join(program.dataDir, 'postgres')),
    );
  const processes = (): readonly ProcessFacts[] => {
    const pid = program.pid();
    return pid === null ? [] : readTree(pid).filter(({ name }) => name !== 'postgres');
  };
  const machine: Machine = {
    program,
    databaseUrl,
    workers: () =>
      processes()
        .filter(({ pid }) => commandOf(pid).includes('delivery-process'))
        .map(({ pid }) => pid),
    cpuS: () => cpuOf(processes()),
    weight: () => {
      const all = processes().map(({ pid }) => ({ sockets: socketsOf(pid), rssMb: rssMbOf(pid) }));
      return {
        sockets: all.reduce((sum, { sockets }) => sum + sockets, 0),
        rssMb: Math.round(all.reduce((sum, { rssMb }) => sum + rssMb, 0)),
      };
    },
    async query<T extends object>(sql: string, values: readonly unknown[] = []) {
      if (pool === null) {
        pool = new Pool({ connectionString: await databaseUrl(), max: 2 });
        pool.on('error', () => undefined); // the row knows what it did to the database
      }
      return (await pool.query<T>(sql, [...values])).rows;
    },
    load({ connections, email, max = SENDS_MAX, everyMs = 0, key = API_KEY }) {
      const sent: Sent = { accepted: new Set(), refused: new Map() };
      let next = 0;
      let stopped = false;
      const connection = async (): Promise<void> => {
        while (!stopped && next < max) {
          const { status, id } = await post(program.base, { email: email(next++), key });
          if (id !== null) {
            sent.accepted.add(id);
            if (everyMs > 0) await sleep(everyMs);
          } else {
            sent.refused.set(status, (sent.refused.get(status) ?? 0) + 1);
            await sleep(REFUSED_PAUSE_MS);
          }
        }
      };
      const ended = Promise.all(Array.from({ length: connections }, connection));
      return {
        sent,
        ended,
        async stop() {
          stopped = true;
          await ended;
          return sent;
        },
      };
    },
    async states() {
      const rows = await machine.query<{ state: string; count: string }>(
        'select state, count(*) from delivery group by state order by state',
      );
      return Object.fromEntries(rows.map(({ state, count }) => [state, Number(count)]));
    },
    async drained(maxMs = DRAIN_MAX_MS) {
      await untilSo('nothing open any more', maxMs, async () => {
        const rows = await machine
          .query(`select 1 from delivery where state in ${OPEN} limit 1`)
          .catch(() => null);
        return rows?.length === 0 ? true : null;
      }).catch(async (error: unknown) => {
        throw new Error(`${String(error)}: ${JSON.stringify(await machine.states())}`);
      });
      return machine.states();
    },
    forget,
  };
  return machine;
}

async function post(
  base: string,
  { email, key }: { readonly email: Record<string, unknown>; readonly key: string },
): Promise<{ readonly status: number; readonly id: string | null }> {
  try {
    const response = await fetch(`${base}/emails`, {
      method: 'POST',
      headers: { authorization: `Bearer ${key}`, 'content-type': 'application/json' },
      body: JSON.stringify(email),
    });
    const body = (await response.json()) as { id?: string };
    return { status: response.status, id: response.status === 200 ? (body.id ?? '') : null };
  } catch {
    return { status: 0, id: null };
  }
}

/** A Postgres of our own, durable, that can be stopped while the program runs. */
export interface OwnPostgres {
  readonly url: string;
  /** SIGSTOP or SIGCONT to all of its processes. */
  signal(name: 'SIGSTOP' | 'SIGCONT'): void;
  restart(whileAway: () => Promise<void>): Promise<void>;
}

export async function startOwnPostgres(torture: Torture): Promise<OwnPostgres> {
  const folder = await mkdtemp(join(tmpdir(), 'mailstead-torture-'));
  torture.undo.add(() => rm(folder, { recursive: true, force: true }));
  const start = (): Promise<EmbeddedPostgres> =>
    startEmbeddedPostgres({ dir: join(folder, 'postgres'), log: silent });
  let running = await start();
  const signal = (name: 'SIGSTOP' | 'SIGCONT'): void => {
    const tree = readTree(running.pid);
    // The postmaster first: it must not start what we are about to stop.
    for (const { pid } of tree) signalTo(pid, name);
  };
  torture.undo.add(async () => {
    signal('SIGCONT');
    await running.stop();
  });
  return {
    url: running.url,
    signal,
    async restart(whileAway) {
      await running.stop();
      await whileAway();
      running = await start();
    },
  };
}

/** False: it is gone. */
export function signalTo(pid: number, name: NodeJS.Signals): boolean {
  try {
    return process.kill(pid, name);
  } catch {
    return false;
  }
}

function commandOf(pid: number): string {
  try {
    return readFileSync(`/proc/${pid}/cmdline`, 'utf8');
  } catch {
    return ''; // it ended in between
  }
}

function socketsOf(pid: number): number {
  try {
    return readdirSync(`/proc/${pid}/fd`).filter((fd) => {
      try {
        return readlinkSync(`/proc/${pid}/fd/${fd}`).startsWith('socket:');
      } catch {
        return false; // closed in between
      }
    }).length;
  } catch {
    return 0;
  }
}

export function rssMbOf(pid: number): number {
  try {
    const kib = /^VmRSS:\s+(\d+) kB$/m.exec(readFileSync(`/proc/${pid}/status`, 'latin1'))?.[1];
    return (Number(kib ?? 0) * 1_024) / 1e6;
  } catch {
    return 0;
  }
}
