// A backup that is taken under load, read back into a second appliance after the first was killed: every email that was
// accepted before the backup began is there, what was pending is delivered once, keys and secrets work.
import { readdir, mkdtemp, rm } from 'node:fs/promises';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Pool } from 'pg';
import { SMTPServer } from 'smtp-server';
import { Webhook } from 'standardwebhooks';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { backUp, type BackupReport } from '../../src/backup/backup.ts';
import { restore, type RestoreReport } from '../../src/backup/restore.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { readGeneratedSecret } from '../../src/store/data-dir.ts';
import { until } from '../support/app.ts';
import { insertPeople } from '../support/broadcast-people.ts';
import { inboundMessage, startInboundLoad } from '../support/inbound-load.ts';
import { freshDatabase, migratedDatabase, type FreshDatabase } from '../support/postgres.ts';
import { createProgram, freePort, type Program } from '../support/program.ts';
import { silent } from '../support/queue.ts';
import { startVerifying } from '../support/verifier.ts';
import { startReceiver, type Receiver } from '../support/webhooks.ts';

const BEFORE = 20;
/** Longer than all of this takes: it is made due in the second database. */
const SCHEDULED_MS = 3_600_000;
/** Of an attempt that is put off; and how far from its next one an email is not under way while the snapshot is taken. */
const RETRY = '5s';
const APART_MS = 3_000;
const LARGE_BYTES = 700_000;
const PEOPLE = 40;

/** Everything that was accepted with a 250, by the recipient and the Message-ID; what `later` says is put off. */
async function startPeer(): Promise<{
  readonly port: number;
  readonly taken: Map<string, string[]>;
  isAway: boolean;
  stop(): Promise<void>;
}> {
  const taken = new Map<string, string[]>();
  const peer = { isAway: true };
  const server = new SMTPServer({
    disabledCommands: ['AUTH', 'STARTTLS'],
    disableReverseLookup: true,
    logger: false,
    size: 10_000_000,
    onRcptTo({ address }, _session, done) {
      const isLater = /^(?:later|wants)/.test(address) && peer.isAway;
      done(isLater ? Object.assign(new Error('come again'), { responseCode: 451 }) : null);
    },
    onData(stream, { envelope }, done) {
      const chunks: Buffer[] = [];
      stream.on('data', (chunk: Buffer) => chunks.push(chunk));
      stream.on('end', () => {
        const raw = Buffer.concat(chunks).toString('latin1');
        for (const { address } of envelope.rcptTo) {
          taken.set(address, [...(taken.get(address) ?? []), raw]);
        }
        done();
      });
    },
  });
  server.on('error', () => undefined);
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  return Object.assign(peer, {
    port: (server.server.address() as AddressInfo).port,
    taken,
    stop: () => new Promise<void>((resolve) => server.close(resolve)),
  });
}

const test = suite('backup under load');
let peer: Awaited<ReturnType<typeof startPeer>>;
let receiver: Receiver;
let database: FreshDatabase;
let empty: FreshDatabase;
let first: Program;
let second: Program;
let folder: string;
let pool: Pool;

test.before(async () => {
  peer = await startPeer();
  receiver = await startReceiver(() => (peer.isAway ? 500 : 200));
  database = await migratedDatabase();
  empty = await freshDatabase();
  pool = new Pool({ connectionString: database.url, max: 2 });
  pool.on('error', () => undefined);
  folder = await mkdtemp(join(tmpdir(), 'mailstead-backup-'));
  const settings = {
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${peer.port}`,
    MAILSTEAD_RETRY_SCHEDULE: RETRY,
    MAILSTEAD_LOG_LEVEL: 'warn',
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    MAILSTEAD_WORKERS: '0',
  };
  const mxPort = await freePort();
  first = await createProgram({
    ...settings,
    MAILSTEAD_DATABASE_URL: database.url,
    MAILSTEAD_MX_PORT: String(mxPort),
  });
  Object.assign(first, { mxPort });
  second = await createProgram(
    { ...settings, MAILSTEAD_DATABASE_URL: empty.url },
    { dataDir: join(folder, 'second') },
  );
  await first.start();
});
test.after(async () => {
  await first.remove();
  await second.remove();
  await pool.end();
  await Promise.all([database.drop(), empty.drop()]);
  await receiver.stop();
  await peer.stop();
  await rm(folder, { recursive: true, force: true });
});

const post = async (path: string, body: unknown): Promise<Record<string, unknown>> => {
  const answer = await first.call('POST', path, body);
  assert.ok(answer.status < 300, `${path}: ${answer.status} ${JSON.stringify(answer.body)}`);
  return answer.body;
};
const send = async (to: string, about: Record<string, unknown> = {}): Promise<string> =>
  String(
    (
      await post('/emails', {
        from: 'Ada <ada@company.test>',
        to,
        subject: 'Hello',
        text: 'Words.',
        ...about,
      })
    )['id'],
  );
const states = async (db: Pool, ids: readonly string[]): Promise<Map<string, string>> => {
  const { rows } = await db.query<{ id: string; state: string }>(
    'select email_id::text as id, state from delivery where email_id = any($1::uuid[])',
    [ids],
  );
  return new Map(rows.map(({ id, state }) => [id, state]));
};

/** Sends on and on until it is stopped; what was accepted. */
function startLoad(): { readonly accepted: string[]; stop(): Promise<void> } {
  const accepted: string[] = [];
  let isStopped = false;
  const running = (async () => {
    for (let number = 0; !isStopped; number += 1) {
      const large = number % 10 === 0;
      const id = await send(
        `load-${number}@people.test`,
        large ? { text: 'x'.repeat(LARGE_BYTES / 2) } : {},
      ).catch(() => null);
      if (id !== null) accepted.push(id);
    }
  })();
  return {
    accepted,
    async stop() {
      isStopped = true;
      await running;
    },
  };
}

const signature = (raw: string): string => raw.slice(0, raw.indexOf('\r\n\r\n'));

test('all that was accepted before is there; what waited is delivered once', async () => {
  const domain = await post('/domains', { name: 'company.test' });
  await post(`/domains/${String(domain['id'])}/verify`, {});
  const hook = await post('/webhooks', { endpoint: receiver.url, events: ['email.delivered'] });
  const [tenant] = (await pool.query<{ id: string }>('select id from tenant')).rows;
  const ask = async <T extends object>(sql: string, values: readonly unknown[] = []) =>
    (await pool.query<T>(sql, [...values])).rows;
  const people = await insertPeople(ask, {
    tenantId: tenant!.id,
    contacts: PEOPLE,
    domain: 'people.test',
  });
  const arriving = startInboundLoad(
    (first as unknown as { mxPort: number }).mxPort,
    Array.from({ length: 12 }, (_, number) => inboundMessage(`inbound ${number}`, number)),
    3,
  );
  const done = await Promise.all(
    Array.from({ length: BEFORE }, (_, number) => send(`before-${number}@people.test`)),
  );
  const deferred = await send('later-deferred@people.test');
  const large = await send('later-large@people.test', {
    attachments: [
      { filename: 'large.bin', content: Buffer.alloc(LARGE_BYTES, 7).toString('base64') },
    ],
  });
  const dueAt = new Date(Date.now() + SCHEDULED_MS).toISOString();
  const scheduled = await send('later-scheduled@people.test', { scheduled_at: dueAt });
  const broadcast = await post('/broadcasts', {
    segment_id: people.segmentId,
    topic_id: people.topicId,
    from: 'News <news@company.test>',
    subject: 'News',
    html: '<p>Hello</p>',
    send: true,
  });
  await arriving.ended;
  await until(
    () => states(pool, [...done, deferred]),
    (found) =>
      [...found].every(([id, state]) => state === (id === deferred ? 'deferred' : 'delivered')),
  );
  await until(
    async () => receiver.calls.length,
    (count) => count > 0,
  );
  const load = startLoad();
  await until(
    async () => load.accepted.length,
    (count) => count > 5,
  );
  await until(
    () =>
      pool.query(
        `select from delivery where email_id = any($1::uuid[]) and state = 'deferred'
         and due_at > now() + $2 * interval '1 millisecond'`,
        [[deferred, large], APART_MS],
      ),
    ({ rowCount }) => rowCount === 2,
  );

  const acceptedBefore = [...load.accepted];
  const file = join(folder, 'backup');
  const taken: BackupReport = await backUp({
    file,
    databaseUrl: database.url,
    blobs: openDiskBlobs(join(first.dataDir, 'blobs')),
    secret: (await readGeneratedSecret(first.dataDir, 'master', 32))!,
    isSecretGenerated: true,
    dataDir: first.dataDir,
  });
  assert.equal(taken.missingBlobs, []);
  assert.ok(taken.blobs >= 2);
  const during = load.accepted.length - acceptedBefore.length;
  await load.stop();
  assert.ok(during > 0, 'nothing was accepted meanwhile');
  await first.kill();

  let restored: RestoreReport;
  let underWay: readonly string[];
  const db = new Pool({ connectionString: empty.url, max: 1 });
  db.on('error', () => undefined);
  try {
    restored = await restore({
      file,
      databaseUrl: empty.url,
      blobs: openDiskBlobs(join(second.dataDir, 'blobs')),
      secret: null,
      dataDir: second.dataDir,
      log: silent,
    });
    assert.equal(restored.leftOut, []);
    assert.is(restored.rows, taken.rows);
    assert.is(restored.blobs, taken.blobs);
    const found = await states(db, [...done, ...acceptedBefore, deferred, large, scheduled]);
    assert.is(found.size, done.length + acceptedBefore.length + 3, 'an email is missing');
    assert.ok(done.every((id) => found.get(id) === 'delivered'));
    assert.is(found.get(deferred) === 'delivered', false);
    assert.is(found.get(scheduled), 'scheduled');
    const held = await db.query<{ recipient: string }>(
      `select recipient from delivery where state = 'in_flight'`,
    );
    underWay = held.rows.map(({ recipient }) => recipient);
    assert.is(restored.underWay, underWay.length);
    await db.query('update delivery set due_at = now() where email_id = $1', [scheduled]);
    const { rows } = await db.query('select from received_email');
    assert.is(rows.length, 12);
    const folders = await readdir(join(second.dataDir, 'blobs'));
    assert.ok(folders.length > 0);
  } finally {
    await db.end();
  }

  const before = new Set(peer.taken.keys());
  const calledBefore = receiver.calls.length;
  peer.isAway = false;
  await second.start();
  for (const id of [deferred, large, scheduled]) {
    await until(
      () => second.call('GET', `/emails/${id}`),
      ({ body }) => body['last_event'] === 'delivered',
    );
  }
  // Their fate is unknown: later, and not at once.
  const heldBack = underWay.filter((one) => one.startsWith('wants-')).length;
  await until(
    async () => [...peer.taken.keys()].filter((one) => one.startsWith('wants-')).length,
    (count) => count === people.wanted - heldBack,
  );
  const wanted = [...peer.taken.keys()].filter((one) => one.startsWith('wants-'));
  assert.ok(wanted.every((one) => !before.has(one)));
  for (const address of [
    'later-deferred@people.test',
    'later-large@people.test',
    'later-scheduled@people.test',
    ...wanted,
  ]) {
    assert.is(peer.taken.get(address)?.length, 1, `${address} got it more than once`);
  }
  assert.is((await second.call('GET', `/broadcasts/${String(broadcast['id'])}`)).status, 200);
  for (const address of done.map((_, number) => `before-${number}@people.test`)) {
    assert.is(peer.taken.get(address)?.length, 1, `${address} was sent to again`);
  }

  // The attachment came from the blob that was restored, signed with the key that was restored.
  const raw = peer.taken.get('later-large@people.test')![0]!;
  assert.ok(raw.length > LARGE_BYTES);
  const records = domain['records'] as { record: string; name: string; value: string }[];
  const zones = Object.fromEntries(
    records
      .filter(({ name }) => name.includes('_domainkey'))
      .map(({ name, value }) => [
        `${name.replace(/\.company\.test$/, '')}.company.test`,
        { TXT: [value] },
      ]),
  );
  const verifying = await startVerifying(zones);
  try {
    const verified = await verifying.verify(Buffer.from(raw, 'latin1'));
    assert.match(JSON.stringify(verified), /dkim=pass/, signature(raw));
  } finally {
    await verifying.stop();
  }

  // The endpoint is called for what it refused before, with the secret that it knows.
  const call = await until(
    async () => receiver.calls.slice(calledBefore).find(({ status }) => status === 200),
    (found) => found !== undefined,
  );
  new Webhook(String(hook['signing_secret'])).verify(
    call!.body,
    call!.headers as Record<string, string>,
  );
});

test.run();
