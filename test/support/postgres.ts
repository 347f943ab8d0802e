/**
 * Postgres for tests: one cluster a run, one database a test.
 *
 * test/run.ts boots a cluster with `startCluster` and names it to the test files in
 * MAILSTEAD_TEST_DATABASE_ADMIN_URL; a test file that is run by itself boots its own at the first use
 * and takes it along when it exits. Nothing is fsynced. The schema is made once a cluster: `migratedDatabase` copies it.
 */
import { randomBytes } from 'node:crypto';
import { existsSync, rmSync } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Client } from 'pg';
import { createLogger } from '../../src/log.ts';
import { startEmbeddedPostgres } from '../../src/store/embedded.ts';
import { openStore } from '../../src/store/orm.ts';

/** Several test files at once, each with pools of its own. */
const CONNECTIONS_MAX = 200;
const TEMPLATE = 'schema_template';
/** Any constant: who makes the template. */
const TEMPLATE_LOCK = 7_245_178_399;
const REMOVE_TURNS_MAX = 100;
const REMOVE_PAUSE_MS = 20;

export interface Cluster {
  /** Of the database `postgres`, as superuser. */
  readonly adminUrl: string;
  /** Stops the server and removes its files. */
  stop(): Promise<void>;
}

export interface FreshDatabase {
  readonly url: string;
  /** Closes its connections, too. */
  drop(): Promise<void>;
}

/** A new cluster in a temporary directory. */
export async function startCluster(): Promise<Cluster> {
  return boot();
}

/** The cluster of this run: that of test/run.ts, else one of this process, started once. */
export async function adminUrl(): Promise<string> {
  const given = process.env['MAILSTEAD_TEST_DATABASE_ADMIN_URL'];
  if (given !== undefined && given !== '') return given;
  own ??= bootUntilExit();
  return (await own).adminUrl;
}

/** A new empty database, or a copy of the database `template`, which nobody may be connected to. */
export async function freshDatabase(template?: string): Promise<FreshDatabase> {
  const admin = await adminUrl();
  const name = `test_${randomBytes(6).toString('hex')}`;
  // file_copy is 28 to 48 ms for a template of ours, wal_log several times that.
  const of = template === undefined ? '' : ` template "${template}"`;
  await execute(admin, `create database "${name}"${of} strategy file_copy`);
  return {
    url: withDatabase(admin, name),
    drop: () => execute(admin, `drop database if exists "${name}" with (force)`),
  };
}

/** A new database with today's schema: a copy, several times cheaper than all migrations. */
export async function migratedDatabase(): Promise<FreshDatabase> {
  const admin = await adminUrl();
  await (template ??= prepareTemplate(admin));
  return freshDatabase(TEMPLATE);
}

/** For the whole cluster, by the first who comes; complete once it bears its name. */
async function prepareTemplate(admin: string): Promise<void> {
  const client = new Client({ connectionString: admin });
  await client.connect();
  try {
    await client.query('select pg_advisory_lock($1)', [TEMPLATE_LOCK]);
    const { rowCount } = await client.query('select from pg_database where datname = $1', [
      TEMPLATE,
    ]);
    if (rowCount === 1) return;
    const made = await freshDatabase();
    const log = createLogger({ level: 'silent', name: 'test' });
    const store = await openStore({ url: made.url, log, connectionsMax: 2, migrate: true });
    await store.close();
    const name = new URL(made.url).pathname.slice(1);
    await client.query(`alter database "${name}" rename to ${TEMPLATE}`);
  } finally {
    await client.end();
  }
}

interface BootedCluster extends Cluster {
  /** For an exit that cannot wait. */
  abandon(): void;
}

let own: Promise<BootedCluster> | undefined;
let template: Promise<void> | undefined;

async function bootUntilExit(): Promise<BootedCluster> {
  const cluster = await boot();
  process.once('beforeExit', () => void cluster.stop());
  process.once('exit', () => cluster.abandon());
  return cluster;
}

async function boot(): Promise<BootedCluster> {
  const home = await mkdtemp(join(tmpdir(), 'mailstead-test-'));
  try {
    const postgres = await startEmbeddedPostgres({
      dir: join(home, 'postgres'),
      log: createLogger({
        level: 'warn',
        name: 'postgres',
        mode: 'development',
        write: (line) => void process.stderr.write(line),
      }),
      durable: false,
      settings: { max_connections: String(CONNECTIONS_MAX) },
    });
    let isStopped = false;
    return {
      adminUrl: withDatabase(postgres.url, 'postgres'),
      async stop() {
        await postgres.stop();
        await rm(home, { recursive: true, force: true });
        isStopped = true;
      },
      abandon() {
        if (isStopped) return;
        process.kill(postgres.pid, 'SIGQUIT');
        for (const path of [home, postgres.socketDir]) removeNow(path);
      },
    };
  } catch (error) {
    await rm(home, { recursive: true, force: true });
    throw error;
  }
}

/** The server may still be writing for a few milliseconds; rmSync's own retries give up silently. */
function removeNow(path: string): void {
  const sleeper = new Int32Array(new SharedArrayBuffer(4));
  for (let turn = 0; turn < REMOVE_TURNS_MAX && existsSync(path); turn++) {
    if (turn > 0) Atomics.wait(sleeper, 0, 0, REMOVE_PAUSE_MS);
    try {
      rmSync(path, { recursive: true, force: true });
    } catch {
      // Not empty after all: the next turn.
    }
  }
}

async function execute(url: string, statement: string): Promise<void> {
  const client = new Client({ connectionString: url });
  await client.connect();
  try {
    await client.query(statement);
  } finally {
    await client.end();
  }
}

function withDatabase(url: string, database: string): string {
  const changed = new URL(url);
  changed.pathname = `/${database}`;
  return changed.href;
}
