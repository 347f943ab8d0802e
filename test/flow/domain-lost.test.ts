// The author's domain between acceptance and delivery: gone, switched off, not verified any more. And a database that
// does not answer for a moment, which must cost no mail.
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';

interface Timeline {
  events: { type: string; detail: Record<string, unknown> }[];
  recipients: { state: string; attempts: number; last_reply: string | null }[];
}

const test = suite('domain-lost');
let app: App;
let database: Client;

test.before(async () => {
  app = await startApp({ MAILSTEAD_RETRY_SCHEDULE: '100ms' });
  database = new Client({ connectionString: app.databaseUrl });
  await database.connect();
});
test.after(async () => {
  await database.end();
  await app.stop();
});

const settled = (id: string, state: string): Promise<Timeline> =>
  until(
    async () => (await app.call<Timeline>('GET', `/emails/${id}/timeline`)).body,
    ({ recipients }) => recipients[0]?.state === state,
  );
/** Longer than a worker remembers a domain. */
const forget = (): Promise<void> => new Promise((resolve) => setTimeout(resolve, 1_100));

/** Accepted, and put off by the sink once, so that it is attempted again after `change`. */
async function sendThen(change: string, undo: string): Promise<Timeline> {
  const id = await app.send({ to: 'tempfail@recipient.test' });
  await settled(id, 'deferred');
  await database.query(change);
  try {
    return await settled(id, 'failed');
  } finally {
    await database.query(undo);
    await forget();
  }
}

for (const [what, change, undo, words] of [
  [
    'sending was switched off',
    'update sending_domain set sending = false',
    'update sending_domain set sending = true',
    /mailstead\.test may not send any more.*[Vv]erify/,
  ],
  [
    'its records are not verified any more',
    'update sending_domain set sending_verified = false',
    'update sending_domain set sending_verified = true',
    /mailstead\.test may not send any more.*[Vv]erify/,
  ],
] as const) {
  test(`${what}: the email fails and says so`, async () => {
    const { recipients, events } = await sendThen(change, undo);
    assert.match(recipients[0]?.last_reply ?? '', words);
    assert.is(
      events.findLast(({ type }) => type === 'failed')?.detail['cause'],
      'domain_not_verified',
    );
  });
}

test('mail of an unknown author goes on as long as the stand-in may send', async () => {
  const id = await app.send({ from: 'ann@stranger.example' });
  await settled(id, 'delivered');
});

test('a lookup that fails is not the fault of the domain', async () => {
  const id = await app.send({ to: 'tempfail@recipient.test' });
  await settled(id, 'deferred');
  const timeline = async (): Promise<Timeline['events']> =>
    (await app.call<Timeline>('GET', `/emails/${id}/timeline`)).body.events;
  await database.query('alter table sending_domain rename column tls to away');
  await until(timeline, (events) => events.some(({ detail }) => detail['cause'] === 'internal'));
  await database.query('alter table sending_domain rename column away to tls');
  // It goes on: the sink is asked again.
  const events = await until(timeline, (all) => {
    const at = all.findLastIndex(({ detail }) => detail['cause'] === 'internal');
    return all.slice(at).some(({ detail }) => typeof detail['code'] === 'number');
  });
  assert.not.ok(events.some(({ type }) => type === 'failed' || type === 'bounced'));
});

test('the domain is removed and added again: what waited is signed by it, bounces come to it', async () => {
  const waiting = await app.send({ to: 'tempfail@recipient.test' });
  await settled(waiting, 'deferred');
  const scheduled = await app.send({
    subject: 'Added again',
    scheduled_at: new Date(Date.now() + 3_600_000).toISOString(),
  });
  const { rows } = await database.query<{ id: string }>('select id from sending_domain');
  const removed = await app.call('DELETE', `/domains/${rows[0]!.id}`);
  assert.is(removed.status, 200, JSON.stringify(removed.body));
  const added = await app.call<{ id: string }>('POST', '/domains', {
    body: { name: 'mailstead.test', custom_return_path: 'back' },
  });
  assert.is(added.status, 201, JSON.stringify(added.body));
  await app.call('POST', `/domains/${added.body.id}/verify`);
  const { rows: keys } = await database.query<{ can_send: boolean }>(
    'select sending and sending_verified as can_send from sending_domain',
  );
  assert.equal(keys, [{ can_send: true }]);
  await forget();
  const at = new Date(Date.now() + 200).toISOString();
  await app.call('PATCH', `/emails/${scheduled}`, { body: { scheduled_at: at } });
  await app.untilEvent(scheduled, 'delivered');
  const sunk = await database.query<{ raw: Buffer; mail_from: string }>(
    `select raw, mail_from from sink_message order by received_at desc`,
  );
  const message = sunk.rows.find(({ raw }) => raw.includes('Subject: Added again\r\n'));
  assert.match(message?.raw.toString() ?? '', /^DKIM-Signature:[^]*?\bd=mailstead\.test;/);
  assert.match(message?.mail_from ?? '', /@back\.mailstead\.test$/);
  const again = (await app.call<Timeline>('GET', `/emails/${waiting}/timeline`)).body;
  assert.not.ok(again.events.some(({ type }) => type === 'failed'));
});

test('the domain is gone: the email fails and names it', async () => {
  const id = await app.send({ to: 'tempfail@recipient.test' });
  await settled(id, 'deferred');
  await database.query('delete from dkim_key');
  await database.query('delete from sending_domain');
  const { recipients, events } = await settled(id, 'failed');
  assert.match(
    recipients[0]?.last_reply ?? '',
    /mailstead\.test, no longer exists.*Add and verify/,
  );
  assert.is(
    events.findLast(({ type }) => type === 'failed')?.detail['cause'],
    'domain_not_verified',
  );
});

test.run();
