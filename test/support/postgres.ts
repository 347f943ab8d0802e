/**
 * Postgres for tests: one cluster a run, one database a test.
 *
 * test/run.ts boots a cluster with `startCluster` and names it to the test files in
 * MAILSTEAD_TEST_DATABASE_ADMIN_URL; a test file that is run by itself boots its own at the first use
 * and takes it along when it exits. Nothing is fsynced. The schema is made once a cluster: `migratedDatabase` copies it. A
 * copy costs a third of a second of a processor, so one whose test is over is emptied and used again by the next.
 */
import { randomBytes } from 'node:crypto';
import { existsSync, rmSync } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { PostgresBackend } from '@agendajs/postgres-backend';
import { Client } from 'pg';
import { createLogger } from '../../src/log.ts';
import { startEmbeddedPostgres } from '../../src/store/embedded.ts';
import { openStore } from '../../src/store/orm.ts';

/** Several test files at once, each with pools of its own. */
const CONNECTIONS_MAX = 200;
const TEMPLATE = 'schema_template';
/** How the name of a database begins that waits for its next test. */
const EMPTIED = 'emptied_';
/** Any constant: who makes the template. */
const TEMPLATE_LOCK = 7_245_178_399;
const CREATE_TURNS_MAX = 5;
/** object_in_use */
const IN_USE = '55006';
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
  const statement = `create database "${name}"${of} strategy file_copy`;
  for (let turn = 1; ; turn += 1) {
    try {
      await execute(admin, statement);
      break;
    } catch (error) {
      // A vacuum by the server itself looks at the template now and then.
      if (turn === CREATE_TURNS_MAX || (error as { code?: string }).code !== IN_USE) throw error;
    }
  }
  return {
    url: withDatabase(admin, name),
    drop: () => execute(admin, `drop database if exists "${name}" with (force)`),
  };
}

/** A database with today's schema and nothing in it: one that was given back, else a copy of the template. */
export async function migratedDatabase(): Promise<FreshDatabase> {
  const admin = await adminUrl();
  await (template ??= prepareTemplate(admin));
  const url = (await takeEmptied(admin)) ?? (await freshDatabase(TEMPLATE)).url;
  return { url, drop: () => giveBack(admin, url) };
}

/** Renaming decides: of several processes that want the same one, one gets it. */
async function takeEmptied(admin: string): Promise<string | null> {
  return withClient(admin, async (client) => {
    const { rows } = await client.query<{ name: string }>(
      `select datname as name from pg_database where starts_with(datname, '${EMPTIED}')
       order by random() limit 3`,
    );
    for (const { name } of rows) {
      const taken = `test_${randomBytes(6).toString('hex')}`;
      try {
        await client.query(`alter database "${name}" rename to "${taken}"`);
        return withDatabase(admin, taken);
      } catch {
        // Somebody else has it.
      }
    }
    return null;
  });
}

/** Closes its connections and empties it; one whose schema the test has changed is dropped. */
async function giveBack(admin: string, url: string): Promise<void> {
  const name = new URL(url).pathname.slice(1);
  const isAsNew = await withClient(url, async (client) => {
    // One that has just gone by itself is no news.
    await client.query('set log_min_messages = error');
    await client.query(
      'select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = $1 and pid <> pg_backend_pid()',
      [name],
    );
    if ((await fingerprint(client)) !== (await templatePrint(admin))) return false;
    // As if nothing had ever been in them: a plan depends on what the planner remembers of a table.
    await client.query(`
      set session_replication_role = replica;
      do $$ declare used regclass; begin
        for used in select oid from pg_class
          where relkind = 'r' and relnamespace = 'public'::regnamespace and relname <> 'migration'
            and pg_relation_size(oid) > 0
        loop
          -- Truncating is dear; but what is large would leave pages behind that a test may count.
          if pg_total_relation_size(used) > 262144 then execute 'truncate ' || used || ' cascade';
          else execute 'delete from ' || used; end if;
        end loop;
        delete from pg_statistic where starelid >= 16384;
        -- To the planner a table that was vacuumed is empty, one that never was may hold anything.
        update pg_class set reltuples = -1, relpages = 0, relallvisible = 0, relallfrozen = 0
          where relkind = 'r' and relnamespace = 'public'::regnamespace and reltuples <> -1;
      end $$`);
    return true;
  }).catch(() => false);
  const statement = isAsNew
    ? `alter database "${name}" rename to "${EMPTIED}${randomBytes(6).toString('hex')}"`
    : `drop database if exists "${name}" with (force)`;
  await execute(admin, statement).catch(() =>
    execute(admin, `drop database if exists "${name}" with (force)`),
  );
}

/** Changes with every table, column, index, constraint, function, trigger and schema. */
async function fingerprint(client: Client): Promise<string> {
  const { rows } = await client.query<{ print: string }>(`
    select concat_ws(' ',
      (select concat(count(*), ':', max(oid::bigint)) from pg_class where relkind <> 't'),
      (select concat(count(*), ':', max(xmin::text::bigint)) from pg_attribute where attrelid >= 16384),
      (select concat(count(*), ':', max(xmin::text::bigint)) from pg_index where indexrelid >= 16384),
      (select concat(count(*), ':', max(oid::bigint)) from pg_constraint),
      (select concat(count(*), ':', max(oid::bigint)) from pg_proc),
      (select concat(count(*), ':', max(oid::bigint)) from pg_trigger),
      (select concat(count(*), ':', max(oid::bigint)) from pg_namespace),
      (select string_agg(name, ',' order by name) from migration),
      (select string_agg(concat(relname, reloptions, relpersistence), ',' order by oid) from pg_class
        where relkind = 'r' and relnamespace = 'public'::regnamespace)) as print`);
  return rows[0]?.print ?? '';
}

let printed: Promise<string> | undefined;

/** Kept as a comment, since nobody may be connected to the template while it is copied. */
async function templatePrint(admin: string): Promise<string> {
  return (printed ??= withClient(admin, async (client) => {
    const { rows } = await client.query<{ print: string }>(
      `select shobj_description(oid, 'pg_database') as print from pg_database where datname = $1`,
      [TEMPLATE],
    );
    return rows[0]?.print ?? '';
  }));
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
    // Its tables, too: else the first start of an appliance would change the schema.
    const pool = store.pool;
    const agenda = new PostgresBackend({ pool, disableNotifications: true });
    await agenda.connect();
    await agenda.disconnect();
    await store.close();
    const print = await withClient(made.url, fingerprint);
    const name = new URL(made.url).pathname.slice(1);
    await client.query(`comment on database "${name}" is '${print.replaceAll("'", "''")}'`);
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
  await withClient(url, (client) => client.query(statement));
}

async function withClient<T>(url: string, work: (client: Client) => Promise<T>): Promise<T> {
  const client = new Client({ connectionString: url });
  await client.connect();
  try {
    return await work(client);
  } finally {
    await client.end();
  }
}

function withDatabase(url: string, database: string): string {
  const changed = new URL(url);
  changed.pathname = `/${database}`;
  return changed.href;
}
