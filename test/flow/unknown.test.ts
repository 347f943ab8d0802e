// The connection breaks after the final dot: by the tenant's policy the same bytes go out once more, flagged, or never.
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { wake } from '../../src/queue/wake.ts';
import { startApp, until, type App } from '../support/app.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

const test = suite('unknown outcomes');
let app: App;
let peer: RawPeer;
let database: Client;

test.before(async () => {
  peer = await startRawPeer({
    on: {
      // The first copy of every message is lost, and everything to `lost@`.
      dot: () => {
        const { raw, rcpts } = peer.messages.at(-1)!;
        const copies = peer.messages.filter((one) => idOf(one.raw) === idOf(raw)).length;
        const isLost = copies === 1 || rcpts.join().includes('lost@');
        return isLost ? { reset: true } : { reply: '250 2.0.0 taken' };
      },
    },
  });
  app = await startApp({
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${peer.port}`,
  });
  database = new Client(app.databaseUrl);
  await database.connect();
});
test.after(async () => {
  await database.end();
  await app.stop();
  await peer.stop();
});

const idOf = (raw: Buffer): string => /^Message-ID: .*$/im.exec(raw.toString('latin1'))?.[0] ?? '';
const isUnknown = async (id: string): Promise<boolean> => {
  const { rows } = await database.query<{ state: string }>(
    'select state from delivery where email_id = $1',
    [id],
  );
  return rows[0]?.state === 'unknown';
};
const twentyMinutesLater = async (): Promise<void> => {
  await database.query("update delivery set due_at = due_at - interval '20 minutes'");
  await wake(database as unknown as Parameters<typeof wake>[0], null);
};
const timeline = async (id: string): Promise<readonly string[]> => {
  const { body } = await app.call('GET', `/emails/${id}/timeline`);
  return (body['events'] as { type: string }[]).map(({ type }) => type);
};

test('retry_once: after twenty minutes, byte for byte the same, and flagged', async () => {
  const id = await app.send({
    to: 'once@x.test',
    html: '<p>Grüße</p>',
    attachments: [{ filename: 'a.txt', content: Buffer.from('a note').toString('base64') }],
  });
  await until(() => isUnknown(id), Boolean);
  const { body } = await app.call('GET', `/emails/${id}`);
  const waitMs = Date.parse(String(body['provider_next_retry_at'])) - Date.now();
  assert.ok(waitMs > 19 * 60_000 && waitMs <= 20 * 60_000, `${waitMs} ms`);
  await twentyMinutesLater();
  await app.untilEvent(id, 'delivered');
  const [first, second, ...more] = peer.messages.filter(({ rcpts }) =>
    rcpts.join().includes('once@'),
  );
  assert.is(more.length, 0);
  assert.ok(first?.wire.equals(second!.wire), 'the same bytes, signatures included');
  assert.equal([first?.mail, first?.rcpts], [second?.mail, second?.rcpts]);
  const events = await timeline(id);
  assert.equal(
    events.filter((type) => ['unknown', 'possible_duplicate', 'delivered'].includes(type)),
    ['unknown', 'possible_duplicate', 'delivered'],
  );
  assert.ok(events.indexOf('possible_duplicate') < events.indexOf('delivered'));
});

test('lost twice: final, and only the owner may send it a third time', async () => {
  const id = await app.send({ to: 'lost@x.test' });
  await until(() => isUnknown(id), Boolean);
  await twentyMinutesLater();
  await until(
    async () => (await timeline(id)).filter((type) => type === 'unknown').length,
    (n) => n === 2,
  );
  const { body } = await app.untilEvent(id, 'sent').then(() => app.call('GET', `/emails/${id}`));
  assert.is(body['provider_next_retry_at'], null);
  assert.ok(body['provider_dead_lettered_at']);
  const refused = await app.call('POST', `/emails/${id}/release`);
  assert.equal([refused.status, refused.body['code']], [422, 'nothing_to_release']);
  assert.match(String(refused.body['message']), /include_unknown/);
  const released = await app.call('POST', `/emails/${id}/release`, {
    body: { include_unknown: true },
  });
  assert.equal(
    [released.status, released.body],
    [200, { object: 'email', id, released: ['lost@x.test'] }],
  );
  await until(
    async () => (await timeline(id)).filter((type) => type === 'unknown').length,
    (n) => n === 3,
  );
});

test('at_most_once, as the operator writes it while all runs: never again', async () => {
  const { rows } = await database.query<{ id: string }>('select id from tenant');
  writeFileSync(
    join(app.dataDir, 'config', 'delivery.json'),
    JSON.stringify({ unknown: { tenants: { [rows[0]!.id]: 'at_most_once' } } }),
  );
  // Until the file is looked at again, the answer is the old one.
  const last = await until(
    async () => {
      const id = await app.send({ to: 'code@x.test' });
      await until(() => isUnknown(id), Boolean);
      await new Promise((resolve) => setTimeout(resolve, 500));
      return (await app.call('GET', `/emails/${id}`)).body;
    },
    (body) => body['provider_next_retry_at'] === null,
  );
  assert.is(last['last_event'], 'sent');
  assert.match(JSON.stringify(last['provider_last_error']), /at_most_once/);
  const copies = (): number =>
    peer.messages.filter(({ raw }) => idOf(raw).includes(String(last['message_id']))).length;
  assert.is(copies(), 1);
  await twentyMinutesLater();
  await until(
    async () => database.query("select 1 from delivery where state in ('ready', 'in_flight')"),
    ({ rows: open }) => open.length === 0,
  );
  assert.is(copies(), 1);
});

test.run();
