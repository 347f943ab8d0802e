// One tenant out of an appliance and into another one: what is finished, or everything; never what is another tenant's.
import { createHash, randomBytes } from 'node:crypto';
import { mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  createBackupFile,
  readEntries,
  type Sum,
  type Trailer,
} from '../../src/backup/container.ts';
import { SEALED } from '../../src/backup/sealed-columns.ts';
import { exportTenant } from '../../src/backup/tenant-export.ts';
import { importTenant } from '../../src/backup/tenant-import.ts';
import { findFirstTenant } from '../../src/access/tenants.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { openStore } from '../../src/store/orm.ts';
import { startApp, until, type App } from '../support/app.ts';
import { commandJson } from '../support/command-line.ts';
import { silent } from '../support/queue.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';

const PASSPHRASE = 'correct horse battery staple';
const LARGE_BYTES = 300_000;

const test = suite('one tenant, moved');
let from: App;
let to: App;
let pool: Pool;
let folder: string;
let tenant: { tenantId: string; key: string };
const ids: Record<string, string> = {};

test.before(async () => {
  from = await startApp();
  // Before the other appliance has its first: so its id is the smallest there.
  tenant = await secondTenant(from);
  to = await startApp();
  pool = new Pool({ connectionString: to.databaseUrl, max: 1 });
  pool.on('error', () => undefined);
  folder = await mkdtemp(join(tmpdir(), 'mailstead-tenant-'));
  const { key } = tenant;
  const made = async (path: string, body: unknown): Promise<Record<string, unknown>> => {
    const answer = await from.call('POST', path, { body, key });
    assert.ok(answer.status < 300, JSON.stringify(answer.body));
    return answer.body;
  };
  const domain = await made('/domains', { name: 'moved.test' });
  ids['domain'] = String(domain['id']);
  await made(`/domains/${ids['domain']}/verify`, {});
  ids['secret'] = String(
    (await made('/webhooks', { endpoint: 'http://127.0.0.1:9999/x', events: ['email.bounced'] }))[
      'signing_secret'
    ],
  );
  await made('/contacts', { email: 'somebody@people.test' });
  const send = async (about: Record<string, unknown>): Promise<string> =>
    String(
      (
        await made('/emails', {
          from: 'a@moved.test',
          to: 'ok@people.test',
          subject: 'S',
          text: 'T',
          ...about,
        })
      )['id'],
    );
  ids['done'] = await send({
    attachments: [{ filename: 'a.bin', content: randomBytes(LARGE_BYTES).toString('base64') }],
  });
  ids['later'] = await send({ scheduled_at: new Date(Date.now() + 3_600_000).toISOString() });
  await until(
    () => from.call('GET', `/emails/${ids['done']}`, { key }),
    ({ body }) => body['last_event'] === 'delivered',
  );
  await from.send();
});
test.after(async () => {
  await pool.end();
  await Promise.all([from.stop(), to.stop()]);
  await rm(folder, { recursive: true, force: true });
});

const secretOf = async (app: App): Promise<string> =>
  (await readFile(join(app.dataDir, 'secrets', 'master'), 'utf8')).trim();

const take = async (file: string, withQueue: boolean) =>
  exportTenant({
    file,
    databaseUrl: from.databaseUrl,
    blobs: openDiskBlobs(join(from.dataDir, 'blobs')),
    secret: await secretOf(from),
    tenantId: tenant.tenantId,
    passphrase: PASSPHRASE,
    withQueue,
  });
const bring = async (file: string, passphrase = PASSPHRASE) =>
  importTenant({
    file,
    databaseUrl: to.databaseUrl,
    blobs: openDiskBlobs(join(to.dataDir, 'blobs')),
    secret: await secretOf(to),
    passphrase,
  });

async function refusal(work: Promise<unknown>): Promise<string> {
  const error = await work.then(
    () => null,
    (thrown: Error) => thrown,
  );
  if (error === null) throw new Error('it was not refused');
  return error.message;
}

/** The run is one that is there, so that nobody takes it for lost. */
const setLater = (state: string): Promise<void> =>
  onDatabase(from, async (source) => {
    await source.query(
      `update delivery set state = $1, lease_epoch = (select epoch from worker limit 1) where email_id = $2`,
      [state, ids['later']],
    );
  });

const rowsOf = async (): Promise<number> =>
  (
    await pool.query<{ count: string }>(
      `select (select count(*) from email where tenant_id = $1) + (select count(*) from tenant where id = $1) +
         (select count(*) from sending_domain where tenant_id = $1) as count`,
      [tenant.tenantId],
    )
  ).rows.map(({ count }) => Number(count))[0]!;

/** The same file with other bytes in its entries, whole and with the right sums: as somebody may make one. */
async function forge(
  file: string,
  change: (name: string, bytes: Buffer) => Buffer,
): Promise<string> {
  const forged = `${file}-${randomBytes(4).toString('hex')}`;
  const writer = await createBackupFile(forged);
  let trailer: Trailer | null = null;
  const changed: Record<string, Sum> = {};
  for await (const { name, bytes } of readEntries(file, {
    onTrailer: (read) => (trailer = read),
  })) {
    const other = change(name, bytes);
    await writer.add({ name, bytes: other });
    if (other === bytes) continue;
    changed[name.split('/')[1]!] = {
      rows: other.toString('latin1').split(/[\r\n]+(?!\\\.|$)/).length,
      bytes: other.length,
      sha256: createHash('sha256').update(other).digest('hex'),
    };
  }
  await writer.finish({ tables: { ...trailer!.tables, ...changed }, blobs: trailer!.blobs });
  return forged;
}

test('every sealed column of a tenant is known', async () => {
  const { rows } = await pool.query<{ name: string }>(
    `select c.table_name || '.' || c.column_name as name from information_schema.columns c
     where c.table_schema = current_schema() and c.column_name like '%sealed%' and exists (
       select from information_schema.columns t where t.table_schema = c.table_schema
       and t.table_name = c.table_name and t.column_name = 'tenant_id') order by 1`,
  );
  assert.equal(
    rows.map(({ name }) => name),
    SEALED.map(({ table, column }) => `${table}.${column}`).toSorted(),
  );
});

test('what is wrong with a file, or with where it shall go', async () => {
  const file = join(folder, 'finished');
  const report = await take(file, false);
  assert.is(report.leftEmails, 1);
  assert.is(report.blobs, 1);
  assert.match(await refusal(bring(file, 'another passphrase')), /passphrase is not the one/);
  assert.match(await refusal(bring(file, 'short')), /at least 12 characters/);
  const own = Buffer.from(tenant.tenantId);
  const other = await secondTenant(to);
  const strange = await forge(file, (name, bytes) =>
    name.startsWith('tables/email/')
      ? Buffer.from(bytes.toString('latin1').replace(own.toString(), other.tenantId), 'latin1')
      : bytes,
  );
  assert.match(await refusal(bring(strange)), /rows of another tenant/);
  // To COPY a carriage return ends rows, too, when it ends the first one; and nothing is read behind its end mark.
  const hiding = await forge(file, (name, bytes) => {
    if (!name.startsWith('tables/api_key/')) return bytes;
    const row = bytes.toString('latin1').trimEnd();
    const planted = row
      .replaceAll(own.toString(), other.tenantId)
      .replace(/\t\\\\x../, '\t\\\\xff');
    return Buffer.from(`${row}\r${planted}\r\\.\r\n`, 'latin1');
  });
  assert.match(await refusal(bring(hiding)), /rows of another tenant/);
  const pointing = await forge(file, (name, bytes) =>
    name.startsWith('tables/email_content/')
      ? Buffer.from(
          bytes.toString('latin1').replace(/\t([0-9a-f-]{35})[0-9a-f]\tf/, '\t$1x\tf'),
          'latin1',
        )
      : bytes,
  );
  assert.match(await refusal(bring(pointing)), /is not in the file/);
  const taken = await to.call('POST', '/domains', { body: { name: 'moved.test' }, key: other.key });
  await to.call('POST', `/domains/${String(taken.body['id'])}/verify`, { key: other.key });
  assert.match(await refusal(bring(file)), /has verified moved\.test/);
  await to.call('DELETE', `/domains/${String(taken.body['id'])}`, { key: other.key });
  assert.is(await rowsOf(), 0, 'something stayed');
});

test('with its queue it arrives whole: keys, secrets, mail; its domains prove themselves anew', async () => {
  const file = join(folder, 'everything');
  // A worker that has not seen the pause yet would send it here, too.
  await setLater('in_flight');
  assert.match(await refusal(take(file, true)), /was being delivered here/);
  await setLater('scheduled');
  const passphrase = join(folder, 'passphrase');
  await writeFile(passphrase, `${PASSPHRASE}\n`);
  const at = (one: App) => ({
    MAILSTEAD_DATABASE_URL: one.databaseUrl,
    MAILSTEAD_DATA_DIR: one.dataDir,
  });
  const options = ['--passphrase-file', passphrase];
  await commandJson(at(from), [
    'tenant',
    'export',
    tenant.tenantId,
    file,
    '--with-queue',
    ...options,
  ]);
  const report = await commandJson<{ domains: string[]; pause_id: string }>(at(to), [
    'tenant',
    'import',
    file,
    ...options,
  ]);
  assert.equal(report.domains, ['moved.test']);
  const { key } = tenant;
  const done = await to.call('GET', `/emails/${ids['done']}`, { key });
  assert.is(done.body['last_event'], 'delivered');
  const later = await to.call('GET', `/emails/${ids['later']}`, { key });
  assert.is(later.body['last_event'], 'scheduled');
  // Due before its domain is verified here, it waits instead of failing.
  await pool.query(`update delivery set state = 'ready', due_at = now() where email_id = $1`, [
    ids['later'],
  ]);
  const domain = await to.call('GET', `/domains/${ids['domain']}`, { key });
  assert.is(domain.body['status'], 'not_started');
  const hooks = await to.call<{ data: { id: string }[] }>('GET', '/webhooks', { key });
  const hook = await to.call('GET', `/webhooks/${hooks.body.data[0]!.id}`, { key });
  assert.is(hook.body['signing_secret'], ids['secret']);
  // Its key signs here, too, once the domain is verified.
  const verified = await to.call('POST', `/domains/${ids['domain']}/verify`, { key });
  assert.ok(verified.status < 300, JSON.stringify(verified.body));
  await commandJson(at(to), ['queue', 'resume', report.pause_id]);
  await until(
    () => to.call('GET', `/emails/${ids['later']}`, { key }),
    ({ body }) => body['last_event'] === 'delivered',
  );
  const sent = await to.call('POST', '/emails', {
    key,
    body: { from: 'a@moved.test', to: 'ok@people.test', subject: 'From here', text: 'T' },
  });
  assert.is(sent.status, 200, JSON.stringify(sent.body));
  await until(
    () => to.call('GET', `/emails/${String(sent.body['id'])}`, { key }),
    ({ body }) => body['last_event'] === 'delivered',
  );
  const sink = await to.call<{ data: { raw: string }[] }>('GET', '/sink/messages', { key });
  assert.match(sink.body.data[0]!.raw, /DKIM-Signature:[^]*d=moved\.test/);
  const files = await to.call<{ data: unknown[] }>('GET', `/emails/${ids['done']}/attachments`, {
    key,
  });
  assert.is(files.body.data.length, 1);
  assert.match(await refusal(bring(file)), /is here already/);
  assert.equal(
    (await readdir(folder)).filter((name) => name.endsWith('.part')),
    [],
  );

  // However old its id is, it is not the operator of this appliance.
  const store = await openStore({
    url: to.databaseUrl,
    log: silent,
    connectionsMax: 1,
    migrate: false,
  });
  const all = await pool.query<{ id: string }>('select id from tenant order by id limit 1');
  assert.is(all.rows[0]!.id, tenant.tenantId);
  assert.is.not(await findFirstTenant(store), tenant.tenantId);
  await store.close();
});

test.run();
