// What an endpoint is told of real mail: accepted over HTTP or come in over SMTP, carried out by the real appliance, called
// on loopback; which events, with which data, and each exactly once by its id.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { eventTypes } from '../../src/timeline/outbox.ts';
import { startApp, until, type App } from '../support/app.ts';
import { closeAll, send } from '../support/sink-session.ts';
import { startReceiver, type Receiver } from '../support/webhooks.ts';

interface Event {
  readonly type: string;
  readonly created_at: string;
  readonly data: Readonly<Record<string, unknown>>;
}

const test = suite('webhook facts');
let app: App;
let endpoint: Receiver;
test.before(async () => {
  endpoint = await startReceiver();
  app = await startApp({ MAILSTEAD_RETRY_SCHEDULE: '1s,1s' });
  const { status } = await app.call('POST', '/webhooks', {
    body: { endpoint: endpoint.url, events: eventTypes },
  });
  assert.is(status, 201);
});
test.after.each(closeAll);
test.after(async () => {
  await app.stop();
  await endpoint.stop();
});

/** Of each event once; an id that comes again has the same body. */
function events(): readonly Event[] {
  const byId = new Map<string, string>();
  for (const { id, body } of endpoint.calls) {
    assert.ok([undefined, body].includes(byId.get(id)), 'an id stands for one event');
    byId.set(id, body);
  }
  assert.is(byId.size, endpoint.calls.length, 'acknowledged events are not called again');
  // Calls overtake each other.
  return [...byId.values()]
    .map((body) => JSON.parse(body) as Event)
    .toSorted((a, b) => Date.parse(a.created_at) - Date.parse(b.created_at));
}
const about = (key: string, id: string): readonly Event[] =>
  events().filter(({ data }) => data[key] === id);
/** The events of an email, when these have come; more would be too many. */
async function untilTold(id: string, ...types: readonly string[]): Promise<readonly Event[]> {
  const wanted = types.toSorted();
  const found = await until(
    () => Promise.resolve(about('email_id', id)),
    (list) => list.length >= wanted.length,
  );
  assert.equal(found.map(({ type }) => type).toSorted(), wanted);
  return found;
}
const dataOf = (list: readonly Event[], type: string): Event['data'] =>
  list.find((one) => one.type === type)!.data;

let planned = '';
test('scheduled: once, however often it is moved', async () => {
  planned = await app.send({ scheduled_at: new Date(Date.now() + 60_000).toISOString() });
  await untilTold(planned, 'email.scheduled');
  const soon = new Date(Date.now() + 1_500).toISOString();
  await app.call('PATCH', `/emails/${planned}`, { body: { scheduled_at: soon } });
});

test('sent and delivered: with what is known of the email', async () => {
  const id = await app.send({
    to: ['Ok <ok@recipient.test>'],
    cc: ['second@recipient.test'],
    tags: [{ name: 'kind', value: 'tour' }],
    headers: { 'X-Own': 'yes' },
  });
  const told = await untilTold(id, 'email.sent', 'email.delivered', 'email.delivered');
  const { created_at: at, message_id: messageId, ...sent } = dataOf(told, 'email.sent');
  assert.equal(sent, {
    email_id: id,
    from: 'Ada <ada@mailstead.test>',
    to: ['Ok <ok@recipient.test>'],
    subject: 'Hello',
    tags: { kind: 'tour' },
    headers: [{ name: 'X-Own', value: 'yes' }],
  });
  assert.match(String(messageId), /^<.+@.+>$/);
  assert.match(String(at), /^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$/);
  const recipients = told.flatMap(({ type, data }) =>
    type === 'email.delivered' ? [String(data['recipient'])] : [],
  );
  assert.equal(recipients.toSorted(), ['ok@recipient.test', 'second@recipient.test']);
});

test('bounced: who, why and of which kind; the address is suppressed for the next', async () => {
  const id = await app.send({ to: ['bounced@resend.dev', 'reject@recipient.test'] });
  const told = await untilTold(id, 'email.sent', 'email.bounced', 'email.bounced');
  for (const { data } of told.filter(({ type }) => type === 'email.bounced')) {
    const { type, subType, message, diagnosticCode } = data['bounce'] as Record<string, unknown>;
    assert.equal([type, subType], ['Permanent', 'NoEmail']);
    assert.is(message, 'The mailbox does not exist, or is closed.');
    assert.match((diagnosticCode as string[])[0]!, /^smtp; 550 5\.1\.1 /);
  }
});

test('put off once and delivered then: nothing but sent and delivered', async () => {
  const id = await app.send({ to: 'tempfail-1@recipient.test' });
  await untilTold(id, 'email.sent', 'email.delivered');
  const timeline = await app.call<{ recipients: { attempts: number }[] }>(
    'GET',
    `/emails/${id}/timeline`,
  );
  assert.is(timeline.body.recipients[0]?.attempts, 2);
});

test('complained, and suppressed', async () => {
  const complained = await app.send({ to: 'complained@resend.dev' });
  const told = await untilTold(complained, 'email.sent', 'email.delivered', 'email.complained');
  assert.equal(dataOf(told, 'email.complained')['complaint'], { type: 'abuse' });

  const { body } = await app.call<{ id: string }>('POST', '/suppressions', {
    body: { email: 'Out@recipient.test' },
  });
  const id = await app.send({ to: ['out@recipient.test', 'suppressed@resend.dev', 'ok@x.test'] });
  const types = ['email.sent', 'email.suppressed', 'email.suppressed', 'email.delivered'];
  const suppressed = dataOf(await untilTold(id, ...types), 'email.suppressed')['suppressed'];
  assert.is((suppressed as { type: string }).type, 'OnAccountSuppressionList');

  await app.call('DELETE', `/suppressions/${body.id}`);
  const [added, removed, ...more] = await until(
    () => Promise.resolve(about('id', body.id)),
    (list) => list.length >= 2,
  );
  assert.equal([added?.type, removed?.type], ['suppression.added', 'suppression.removed']);
  assert.equal(added?.data, removed?.data);
  assert.is(added?.data['email'], 'out@recipient.test');
  assert.equal(more, []);
});

test('received: what came in, without its words', async () => {
  const raw = [
    'From: Someone <a@outside.test>',
    'To: in@mailstead.test',
    'Subject: Good day',
    'Message-ID: <one@outside.test>',
    '',
    'Words',
    '',
  ].join('\r\n');
  const message = { from: 'a@outside.test', to: ['in@mailstead.test'], raw };
  for (const _ of [1, 2]) await send(app.appliance.mxPort!, message);
  const [received, ...more] = await until(
    () => Promise.resolve(events().filter(({ type }) => type === 'email.received')),
    (list) => list.length > 0,
  );
  assert.equal(more, [], 'the same message twice is one');
  const { email_id: id, created_at: _at, ...data } = received!.data;
  assert.equal(data, {
    from: 'Someone <a@outside.test>',
    to: ['in@mailstead.test'],
    cc: [],
    bcc: [],
    received_for: ['in@mailstead.test'],
    message_id: '<one@outside.test>',
    subject: 'Good day',
    attachments: [],
  });
  assert.is((await app.call('GET', `/emails/receiving/${String(id)}`)).status, 200);
});

test('a domain that comes and goes', async () => {
  const { body } = await app.call<{ id: string }>('POST', '/domains', {
    body: { name: 'told.test' },
  });
  await app.call('PATCH', `/domains/${body.id}`, { body: { click_tracking: true } });
  await app.call('DELETE', `/domains/${body.id}`);
  const told = await until(
    () => Promise.resolve(about('id', body.id)),
    (list) => list.length >= 3,
  );
  assert.equal(
    told.map(({ type }) => type),
    ['domain.created', 'domain.updated', 'domain.deleted'],
  );
  assert.is(told[1]?.data['click_tracking'], true);
});

test('what was scheduled is sent at its time', async () => {
  await untilTold(planned, 'email.scheduled', 'email.sent', 'email.delivered');
});

test('nothing was told twice, and nobody complained', async () => {
  const keys = events().map(({ type, data }) =>
    [type, data['email_id'] ?? data['id'], data['recipient']].join(' '),
  );
  assert.is(new Set(keys).size, keys.length);
  assert.equal(app.complaints, []);
});

test.run();
