// An email goes all the way: HTTP, Postgres, queue, DKIM, SMTP, sink; and what peers say comes back as
// the state of the email and its timeline.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';

interface SinkList {
  data: {
    id: string;
    mail_from: string;
    rcpt_to: string[];
    raw: string;
    received_at: string;
    tls: boolean;
  }[];
  has_more: boolean;
}
interface Timeline {
  events: { at: string; type: string; recipient: string | null; detail: Record<string, unknown> }[];
  recipients: { recipient: string; state: string; attempts: number; last_code: string | null }[];
  waiting: {
    code: string;
    reason: string;
    next_attempt_at: string | null;
    recipients: string[];
  } | null;
}

const test = suite('send');
let app: App;
test.before(async () => {
  // Retries at once: what waits for a clock in production waits for nothing here.
  app = await startApp({ MAILSTEAD_RETRY_SCHEDULE: '100ms' });
});
test.after(() => app.stop());

const timelineOf = async (id: string): Promise<Timeline> =>
  (await app.call<Timeline>('GET', `/emails/${id}/timeline`)).body;
const inSink = async (subject: string): Promise<SinkList['data']> =>
  (await app.call<SinkList>('GET', '/sink/messages?limit=100')).body.data.filter(({ raw }) =>
    raw.includes(`Subject: ${subject}\r\n`),
  );

test('one recipient: delivered, with the whole story in the timeline', async () => {
  const id = await app.send({ subject: 'One recipient', tags: [{ name: 'kind', value: 'test' }] });
  const email = await app.untilEvent(id, 'delivered');
  assert.is(email['status'], 'delivered');
  assert.is(email['provider_retry_count'], 0);
  assert.is(email['provider_last_error'], null);
  assert.is(email['provider_dead_lettered_at'], null);
  assert.match(String(email['provider_last_attempted_at']), /^\d{4}-\d\d-\d\dT[\d:.]+Z$/);
  assert.equal(email['tags'], [{ name: 'kind', value: 'test' }]);
  const timeline = await timelineOf(id);
  assert.equal(
    timeline.events.map(({ type }) => type),
    ['accepted', 'attempt_started', 'delivered'],
  );
  assert.is(timeline.events[0]?.detail['via'], 'http');
  assert.is(timeline.events[2]?.detail['code'], 250);
  assert.is(timeline.waiting, null);
  const [message, ...more] = await inSink('One recipient');
  assert.is(more.length, 0);
  assert.equal(message?.rcpt_to, ['ok@recipient.test']);
  assert.match(message?.mail_from ?? '', /^b\+[a-z0-9]+@send\.mailstead\.test$/);
  assert.match(message?.raw ?? '', /^DKIM-Signature: /);
  assert.match(message?.raw ?? '', `Message-ID: ${String(email['message_id'])}\r\n`);
});

test('several recipients, one copy each; bcc stays hidden', async () => {
  const id = await app.send({
    subject: 'Several',
    to: ['a@recipient.test', 'A <a@RECIPIENT.test>', 'b@other.test'],
    cc: 'c@recipient.test',
    bcc: ['hidden@recipient.test'],
  });
  await app.untilEvent(id, 'delivered');
  const messages = await inSink('Several');
  assert.equal(messages.flatMap(({ rcpt_to }) => rcpt_to).toSorted(), [
    'a@recipient.test',
    'b@other.test',
    'c@recipient.test',
    'hidden@recipient.test',
  ]);
  for (const { raw } of messages) assert.not.match(raw, /hidden@/);
  assert.is(messages.length, 1, 'all in one transaction');
  const bodies = new Set(messages.map(({ raw }) => raw));
  assert.is(bodies.size, 1, 'the bytes are the same for everyone');
});

for (const [local, code] of [
  ['reject', '5.1.1'],
  ['blocked', '5.7.1'],
] as const) {
  test(`${local}@ bounces at once with the peer's words`, async () => {
    const id = await app.send({ to: `${local}@recipient.test` });
    const email = await app.untilEvent(id, 'bounced');
    assert.is((email['provider_last_error'] as { code: string }).code, code);
    assert.is(email['provider_retry_count'], 0);
    const timeline = await timelineOf(id);
    assert.is(timeline.recipients[0]?.state, 'bounced');
    assert.is(timeline.waiting, null);
    assert.is(timeline.events.at(-1)?.detail['stage'], 'rcpt');
  });
}

test('tempfail-2@ is delivered at the third attempt', async () => {
  const id = await app.send({ to: 'tempfail-2@third.test', subject: 'Third time' });
  const email = await app.untilEvent(id, 'delivered');
  assert.is(email['provider_retry_count'], 2);
  const { events } = await timelineOf(id);
  assert.equal(
    events.map(({ type }) => type).filter((type) => type !== 'attempt_started'),
    ['accepted', 'deferred', 'deferred', 'delivered'],
  );
  assert.is((await inSink('Third time')).length, 1);
});

test('full@ is deferred, and the timeline says why it waits and until when', async () => {
  const id = await app.send({ to: 'full@recipient.test' });
  await app.untilEvent(id, 'delivery_delayed');
  const { waiting } = await until(
    () => timelineOf(id),
    (timeline) => timeline.waiting?.code === 'deferred',
  );
  assert.match(waiting?.reason ?? '', /452/);
  assert.ok(waiting?.next_attempt_at);
  assert.equal(waiting?.recipients, ['full@recipient.test']);
});

test('a reply lost after the final dot is unknown: said, and not sent again at once', async () => {
  const id = await app.send({ to: 'drop-after-dot@recipient.test' });
  const timeline = await until(
    () => timelineOf(id),
    ({ waiting }) => waiting?.code === 'unknown',
  );
  assert.is(timeline.recipients[0]?.attempts, 1);
  assert.is(timeline.events.at(-1)?.type, 'unknown');
  const inMinutes = (Date.parse(timeline.waiting?.next_attempt_at ?? '') - Date.now()) / 60_000;
  assert.ok(inMinutes > 10, 'much later');
});

test('the email shows its worst recipient: undecided before final', async () => {
  const id = await app.send({
    to: ['ok@recipient.test', 'reject@recipient.test', 'full@recipient.test'],
  });
  const decided = ({ recipients }: Timeline): boolean =>
    recipients.filter(({ state }) => state === 'delivered' || state === 'bounced').length === 2;
  await until(() => timelineOf(id), decided);
  await app.untilEvent(id, 'delivery_delayed');
  const other = await app.send({ to: ['ok@recipient.test', 'reject@recipient.test'] });
  await until(
    () => timelineOf(other),
    ({ waiting }) => waiting === null,
  );
  assert.is((await app.untilEvent(other, 'bounced'))['last_event'], 'bounced');
});

test('html alone gets a text part; empty text suppresses it', async () => {
  const both = await app.send({ subject: 'Both', text: undefined, html: '<p>Hi <b>there</b></p>' });
  const email = await app.untilEvent(both, 'delivered');
  assert.match(String(email['text']), /Hi there/);
  const [withText] = await inSink('Both');
  assert.match(withText?.raw ?? '', /multipart\/alternative/);
  const alone = await app.send({ subject: 'Alone', text: '', html: '<p>Hi</p>' });
  await app.untilEvent(alone, 'delivered');
  const [htmlOnly] = await inSink('Alone');
  assert.not.match(htmlOnly?.raw ?? '', /multipart|text\/plain/);
});

test('a large message goes through the blob store', async () => {
  const id = await app.send({ subject: 'Large', text: 'x'.repeat(60).concat('\n').repeat(8_000) });
  await app.untilEvent(id, 'delivered');
  const [message] = await inSink('Large');
  assert.ok((message?.raw.length ?? 0) > 480_000);
});

test.run();
