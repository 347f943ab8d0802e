// Which appliance a process belongs to: its blob store and its secret are those of the database's rows, or it does not start;
// and the rows that tell which processes there are.
import { mkdirSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startAppliance } from '../../src/appliance.ts';
import { loadConfig } from '../../src/config.ts';
import { checkSecret, NotThisAppliance } from '../../src/store/appliance-facts.ts';
import { listProcesses, startPresence } from '../../src/store/appliance-process.ts';
import { checkBlobStore } from '../../src/store/blob-identity.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { openStore, type Store } from '../../src/store/orm.ts';
import { until } from '../support/app.ts';
import { migratedDatabase, type FreshDatabase } from '../support/postgres.ts';
import { silent } from '../support/queue.ts';

const test = suite<{ database: FreshDatabase; store: Store; folder: string }>('identity');
test.before.each(async (context) => {
  context.database = await migratedDatabase();
  const about = { url: context.database.url, log: silent, connectionsMax: 8, migrate: false };
  context.store = await openStore(about);
  context.folder = mkdtempSync(join(tmpdir(), 'mailstead-identity-'));
});
test.after.each(async ({ database, store, folder }) => {
  await store.close();
  await database.drop();
  rmSync(folder, { recursive: true, force: true });
});

const markOf = (folder: string): string =>
  readFileSync(join(folder, 'blob-store-id'), 'utf8').trim();

const check = (pool: Pool, folder: string): Promise<void> => {
  mkdirSync(folder, { recursive: true });
  return checkBlobStore({ pool, blobs: openDiskBlobs(folder), where: `the folder ${folder}` });
};

async function refused(work: Promise<unknown>): Promise<string> {
  const error = await work.then(
    () => assert.unreachable('it was let in') as never,
    (failed: Error) => failed,
  );
  assert.instance(error, NotThisAppliance, error.stack);
  return error.message;
}

/** A row that names a blob, as an upgrade finds it. */
async function nameBlob(pool: Pool, key: string): Promise<void> {
  const tenantId = newId();
  await pool.query(
    `insert into received_content (tenant_id, email_id, blob_key, raw_size_bytes, trace_size_bytes)
     values ($1, $2, $3, 1, 0)`,
    [tenantId, newId(), key],
  );
}

test('processes that start together agree, also with those that come later', async ({
  store: { pool },
  folder,
}) => {
  await Promise.all(Array.from({ length: 5 }, () => check(pool, folder)));
  const mark = markOf(folder);
  await check(pool, folder);
  assert.is(markOf(folder), mark);
  const { rows } = await pool.query<{ value: string }>(
    "select value from appliance_fact where name = 'blob_store'",
  );
  assert.is(rows[0]?.value, mark.split(' ')[0]);
});

test('of two first starts with folders of their own, one is refused', async ({
  store: { pool },
  folder,
}) => {
  const both = await Promise.allSettled(['a', 'b'].map((name) => check(pool, join(folder, name))));
  assert.equal(both.map(({ status }) => status).toSorted(), ['fulfilled', 'rejected']);
});

test('another folder is refused: an empty one, and one of another appliance', async ({
  store: { pool },
  folder,
}) => {
  await check(pool, join(folder, 'ours'));
  const empty = join(folder, 'empty');
  assert.match(await refused(check(pool, empty)), 'is not where this database');
  const foreign = join(folder, 'foreign');
  mkdirSync(foreign);
  writeFileSync(join(foreign, 'blob-store-id'), `${newId()} ${newId()}\n`);
  assert.match(await refused(check(pool, foreign)), 'all processes of an appliance need the same');
  // What it says to do, for a folder that is empty for a good reason.
  const id = /write (\S+) into blob-store-id/.exec(await refused(check(pool, empty)))![1]!;
  writeFileSync(join(empty, 'blob-store-id'), id);
  await check(pool, empty);
});

test('a fresh database does not take over the folder of another appliance', async ({
  store: { pool },
  folder,
}) => {
  writeFileSync(join(folder, 'blob-store-id'), `${newId()} ${newId()}\n`);
  assert.match(await refused(check(pool, folder)), 'holds the messages of another appliance');
  rmSync(join(folder, 'blob-store-id'));
  await check(pool, folder);
});

test('a folder from before marks is known by what is in it', async ({
  store: { pool },
  folder,
}) => {
  const key = newId();
  await nameBlob(pool, newId()); // lost long ago
  await nameBlob(pool, key);
  assert.match(await refused(check(pool, join(folder, 'not-mounted'))), 'is not mounted');
  const ours = join(folder, 'ours');
  mkdirSync(ours);
  await openDiskBlobs(ours).put(key, Buffer.from('x'));
  await check(pool, ours);
  // Copied without its mark, too.
  rmSync(join(ours, 'blob-store-id'));
  await check(pool, ours);
  const id = /write (\S+) into/.exec(await refused(check(pool, join(folder, 'not-mounted'))))![1];
  assert.is(markOf(ours).split(' ')[0], id);
});

test('a crash between the two marks of a first start does no harm', async ({
  store: { pool },
  folder,
}) => {
  await check(pool, folder);
  const mark = markOf(folder);
  await pool.query("delete from appliance_fact where name = 'blob_store'");
  await check(pool, folder);
  assert.is(markOf(folder), mark);
});

test('another secret is refused', async ({ store: { pool } }) => {
  await checkSecret(pool, 'one');
  await checkSecret(pool, 'one');
  const said = await refused(checkSecret(pool, 'other'));
  assert.match(said, 'set MAILSTEAD_SECRET to that one');
  const { rows } = await pool.query<{ value: string }>('select value from appliance_fact');
  for (const { value } of rows) assert.not.match(value, 'one');
});

test('of an upgrade, the secret that opens nothing is refused, and does not become the right one', async ({
  database,
  store: { pool },
  folder,
}) => {
  const start = (secret: string) =>
    startAppliance(
      loadConfig({
        MAILSTEAD_MODE: 'development',
        MAILSTEAD_DATA_DIR: join(folder, 'data'),
        MAILSTEAD_DATABASE_URL: database.url,
        MAILSTEAD_HTTP_PORT: '0',
        MAILSTEAD_METRICS_PORT: '0',
        MAILSTEAD_HTTP_HOST: '127.0.0.1',
        MAILSTEAD_ROLES: 'api',
        MAILSTEAD_SECRET: secret,
      }),
      silent,
    );
  await (await start('x'.repeat(40))).stop();
  await pool.query("delete from appliance_fact where name = 'secret_check'");
  assert.match(await refused(start('y'.repeat(40))), 'set MAILSTEAD_SECRET to that one');
  await (await start('x'.repeat(40))).stop();
});

test('a process of another appliance does not start, and holds nothing then', async ({
  database,
  store: { pool },
  folder,
}) => {
  await checkSecret(pool, 'x'.repeat(40));
  const config = loadConfig({
    MAILSTEAD_MODE: 'development',
    MAILSTEAD_DATA_DIR: join(folder, 'data'),
    MAILSTEAD_DATABASE_URL: database.url,
    MAILSTEAD_HTTP_PORT: '0',
    MAILSTEAD_HTTP_HOST: '127.0.0.1',
    MAILSTEAD_ROLES: 'delivery',
    MAILSTEAD_SECRET: 'y'.repeat(40),
  });
  await refused(startAppliance(config, silent));
  const { rows } = await pool.query('select 1 from tenant');
  assert.equal(rows, []);
});

test('a process is listed while it is there', async ({ store: { pool } }) => {
  const about = { pool, log: silent, version: '1.2.3', everyMs: 20 };
  const one = await startPresence({ ...about, roles: new Set(['api', 'jobs']) });
  const other = await startPresence({ ...about, roles: new Set(['delivery']) });
  const [first, second] = await listProcesses(pool);
  assert.equal([first?.roles, second?.roles], [['api', 'jobs'], ['delivery']]);
  assert.equal([first?.pid, first?.version], [process.pid, '1.2.3']);
  assert.ok(first!.startedAt < first!.seenAt);
  await until(
    async () => (await listProcesses(pool))[0]!.seenAt > first!.seenAt,
    (isFresh) => isFresh,
  );
  await one.stop();
  // Killed, it is not listed any more, and after a day it is forgotten.
  await other.stop();
  await pool.query(
    `insert into appliance_process (id, host, pid, roles, version, started_at, seen_at)
     select gen_random_uuid(), 'gone', 1, '{jobs}', '1', now() - age, now() - age
     from unnest(array['1 minute', '2 days']::interval[]) as past (age)`,
  );
  assert.equal(await listProcesses(pool), []);
  const third = await startPresence({ ...about, roles: new Set(['mx']) });
  const { rows } = await pool.query('select host from appliance_process order by started_at');
  assert.is(rows.length, 2);
  await third.stop();
});

test.run();
