// What is sent again: the same bytes, by another process too; nothing where the keys have changed and the first copy may
// have arrived; and the dead letter where the bytes are gone.
import { mkdtemp, readdir, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { migratedDatabase } from '../support/postgres.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

const test = suite('sent again');
let peer: RawPeer;
let folder: string;
let database: Awaited<ReturnType<typeof migratedDatabase>>;
let client: Client;
let app: App;
let key: string;
/** What is said to the dot. */
let mode: 'lost' | 'later' | 'taken' = 'lost';

/** On the same data each time. */
async function start(): Promise<void> {
  app = await startApp({
    MAILSTEAD_DATABASE_URL: database.url,
    MAILSTEAD_DATA_DIR: folder,
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${peer.port}`,
    MAILSTEAD_RETRY_SCHEDULE: '1h',
  });
  key = app.key;
}

test.before(async () => {
  peer = await startRawPeer({
    on: {
      dot: () =>
        mode === 'lost'
          ? { reset: true }
          : { reply: mode === 'later' ? '451 4.3.0 later' : '250 2.0.0 taken' },
    },
  });
  folder = await mkdtemp(join(tmpdir(), 'mailstead-again-'));
  database = await migratedDatabase();
  client = new Client({ connectionString: database.url });
  await client.connect();
  await start();
});
test.after(async () => {
  await app.stop();
  await client.end();
  await peer.stop();
  await database.drop();
  await rm(folder, { recursive: true, force: true });
});

interface Row {
  readonly state: string;
  readonly attempts: number;
  readonly unknowns: number;
  readonly last_cause: string | null;
  readonly last_reply: string | null;
}
const untilRow = async (id: string, isSo: (row: Row) => boolean): Promise<Row> => {
  const row = await until(
    async () => {
      const { rows } = await client.query<Row>(
        'select state, attempts, unknowns, last_cause, last_reply from delivery where email_id = $1',
        [id],
      );
      return rows[0];
    },
    (found) => found !== undefined && isSo(found),
  );
  return row!;
};
const makeDue = (id: string): Promise<unknown> =>
  client.query(`update delivery set state = 'ready', due_at = now() where email_id = $1`, [id]);
const copiesOf = (subject: string): readonly RawPeer['messages'][number][] =>
  peer.messages.filter(({ raw }) => raw.toString('latin1').includes(`Subject: ${subject}\r\n`));
const wordOf = (raw: Buffer): string =>
  [...raw.toString('latin1').matchAll(/\bb=([A-Za-z0-9+/=\s]+)/g)].map(([, b]) => b).join();

test('an answer was lost, and the process is another one: byte for byte the same', async () => {
  mode = 'lost';
  const large = 'words and words\n'.repeat(20_000);
  const ids = [
    await app.send({ subject: 'Small' }),
    await app.send({ subject: 'Large', text: large }),
  ];
  for (const id of ids) await untilRow(id, ({ state }) => state === 'unknown');
  await app.appliance.stop();
  await start();
  mode = 'taken';
  for (const id of ids) {
    await makeDue(id);
    await untilRow(id, ({ state }) => state === 'delivered');
  }
  for (const subject of ['Small', 'Large']) {
    const [first, second, ...more] = copiesOf(subject);
    assert.ok(first !== undefined && second !== undefined && more.length === 0);
    assert.ok(first.wire.equals(second.wire), subject);
    assert.is(first.mail, second.mail, 'and the same return path');
  }
});

test('the domain was removed and added again: no second copy of what may have arrived', async () => {
  mode = 'lost';
  const lost = await app.send({ subject: 'Lost' });
  await untilRow(lost, ({ state }) => state === 'unknown');
  mode = 'later';
  const put = await app.send({ subject: 'Put off' });
  await untilRow(put, ({ state }) => state === 'deferred');
  const domains = await app.call<{ data: { id: string }[] }>('GET', '/domains', { key });
  const removed = await app.call('DELETE', `/domains/${domains.body.data[0]?.id}`, { key });
  assert.is(removed.status, 200, JSON.stringify(removed.body));
  await app.appliance.stop();
  await start(); // development mode makes its domain anew, with new keys
  mode = 'taken';
  for (const id of [lost, put]) await makeDue(id);
  await untilRow(put, ({ state }) => state === 'delivered');
  const row = await untilRow(lost, ({ attempts, state }) => attempts === 2 && state === 'unknown');
  assert.match(row.last_reply ?? '', 'removed and added again');
  assert.is(row.unknowns, 2, 'and it is not tried any more');
  assert.is(copiesOf('Lost').length, 1);
  const [refused, taken] = copiesOf('Put off');
  assert.is.not(wordOf(refused!.raw), wordOf(taken!.raw), 'nobody has the refused one');
});

test('the bytes are gone from the blob store: the dead letter, and the next mail goes on', async () => {
  mode = 'later';
  const id = await app.send({ subject: 'Gone', text: 'words and words\n'.repeat(20_000) });
  await untilRow(id, ({ state }) => state === 'deferred');
  const blobs = join(folder, 'blobs');
  for (const name of await readdir(blobs)) await rm(join(blobs, name), { recursive: true });
  mode = 'taken';
  await makeDue(id);
  const row = await untilRow(id, ({ state }) => state === 'failed');
  assert.is(row.last_cause, 'message_missing');
  const next = await app.send({ subject: 'Next' });
  await untilRow(next, ({ state }) => state === 'delivered');
});

test.run();
