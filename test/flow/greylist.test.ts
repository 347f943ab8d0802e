// A greylisting host: the same message comes back from the same place when the host asked for it, and is taken. And a
// lifetime that ends in deferrals: bounced with the host's words, then released by its owner.
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { wake } from '../../src/queue/wake.ts';
import { startApp, type App } from '../support/app.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

const test = suite('greylisting and expiry');
let app: App;
let peer: RawPeer;
let database: Client;
const seen = new Set<string>();
let isOpen = false;

test.before(async () => {
  peer = await startRawPeer({
    on: {
      RCPT(line, connection) {
        if (line.includes('grey')) {
          const triplet = `${connection.mail} ${line}`;
          if (seen.has(triplet)) return { reply: '250 2.1.5 ok' };
          seen.add(triplet);
          return line.includes('greyasks@')
            ? { reply: '450 4.2.0 Greylisted, please try again in 12 minutes' }
            : { reply: '451 4.7.1 Please try again later' };
        }
        return isOpen ? { reply: '250 2.1.5 ok' } : { reply: '451 4.3.2 we are closed' };
      },
    },
  });
  app = await startApp({
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${peer.port}`,
    MAILSTEAD_RETRY_SCHEDULE: '2h',
    MAILSTEAD_MESSAGE_LIFETIME: '3h',
  });
  database = new Client(app.databaseUrl);
  await database.connect();
});
test.after(async () => {
  await database.end();
  await app.stop();
  await peer.stop();
});

const later = async (id: string, ms: number): Promise<void> => {
  await database.query(
    `update delivery set due_at = due_at - $2 * interval '1 millisecond',
       expires_at = expires_at - $2 * interval '1 millisecond' where email_id = $1`,
    [id, ms],
  );
  await wake(database as unknown as Parameters<typeof wake>[0], null);
};
const pauseOf = async (id: string): Promise<number> => {
  const body = await app.untilEvent(id, 'delivery_delayed');
  return (Date.parse(String(body['provider_next_retry_at'])) - Date.now()) / 60_000;
};

for (const [to, from, most] of [
  ['greysilent@x.test', 5, 6],
  ['greyasks@x.test', 12, 13.2],
] as const) {
  test(`${to}: after ${from} to ${most} minutes, whatever the schedule says`, async () => {
    const id = await app.send({ to });
    const minutes = await pauseOf(id);
    assert.ok(minutes > from - 0.2 && minutes <= most, `${minutes} minutes`);
    const { body } = await app.call('GET', `/emails/${id}/timeline`);
    const put = (body['events'] as { type: string; detail: Record<string, unknown> }[]).find(
      ({ type }) => type === 'deferred',
    );
    assert.is(put?.detail['cause'], 'greylisted');
    await later(id, 14 * 60_000);
    await app.untilEvent(id, 'delivered');
    const mails = peer.connections
      .flatMap(({ transcript }) => transcript)
      .filter((line) => line.startsWith('C: MAIL'));
    assert.ok(mails.length >= 2);
  });
}

test('its lifetime ends: bounced as expired with the words of the host; released, it goes out', async () => {
  const id = await app.send({ to: 'closed@x.test' });
  assert.ok((await pauseOf(id)) > 90, 'by the schedule');
  await later(id, 3 * 3_600_000);
  const email = await app.untilEvent(id, 'bounced');
  assert.equal(email['provider_last_error'], {
    code: 'expired',
    message: '451 4.3.2 we are closed',
  });
  assert.ok(email['provider_dead_lettered_at']);
  isOpen = true;
  const released = await app.call('POST', `/emails/${id}/release`);
  assert.equal([released.status, released.body['released']], [200, ['closed@x.test']]);
  await app.untilEvent(id, 'delivered');
  const { body } = await app.call('GET', `/emails/${id}/timeline`);
  const kinds = (body['events'] as { type: string }[]).map(({ type }) => type);
  assert.equal(
    kinds.filter((kind) => !['accepted', 'attempt_started'].includes(kind)),
    ['deferred', 'deferred', 'expired', 'released', 'delivered'],
  );
  const again = await app.call('POST', `/emails/${id}/release`);
  assert.equal(
    [again.status, again.body['name'], again.body['code']],
    [422, 'validation_error', 'nothing_to_release'],
  );
});

test('a sending key may not release', async () => {
  const { body } = await app.call<{ token: string }>('POST', '/api-keys', {
    body: { name: 'sends', permission: 'sending_access' },
  });
  const answer = await app.call('POST', '/emails/019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70/release', {
    key: body.token,
  });
  assert.equal([answer.status, answer.body['name']], [401, 'restricted_api_key']);
});

test.run();
