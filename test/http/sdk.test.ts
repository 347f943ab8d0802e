// The unmodified Node SDK of Resend drives the appliance: what it sends arrives, what it lists and gets has the shape it
// expects, and every refusal comes back as data with the finer code.
import { execFile } from 'node:child_process';
import { resolve } from 'node:path';
import { promisify } from 'node:util';
import { Resend } from 'resend';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newToken } from '../../src/access/keys.ts';
import { startApp, type App } from '../support/app.ts';

interface SinkList {
  data: { rcpt_to: string[]; raw: string }[];
}

const test = suite('sdk');
let app: App;
let resend: Resend;
test.before(async () => {
  app = await startApp();
  resend = new Resend(app.key, { baseUrl: app.base });
});
test.after(() => app.stop());

/** What the SDK gave when it must have worked. */
function dataOf<T>(result: { data: T | null; error: unknown }): T {
  assert.is(result.error, null, JSON.stringify(result.error));
  assert.ok(result.data);
  return result.data;
}

/** The envelope, as the SDK hands it through. */
function errorOf(result: { data: unknown; error: unknown }): Record<string, unknown> {
  assert.is(result.data, null);
  assert.ok(result.error);
  return result.error as Record<string, unknown>;
}

const simple = (subject: string) => ({
  from: 'Ada <ada@mailstead.test>',
  to: 'ok@recipient.test',
  subject,
  text: 'Plain words.',
});

test('an email with everything is sent, arrives and is read back', async () => {
  const sent = await resend.emails.send({
    from: 'Ada <ada@mailstead.test>',
    to: ['ok@recipient.test', 'Second <second@recipient.test>'],
    cc: 'cc@recipient.test',
    bcc: ['bcc@recipient.test'],
    replyTo: ['answers@mailstead.test', 'Others <others@mailstead.test>'],
    subject: 'From the SDK',
    html: '<p>Hello</p>',
    text: 'Hello',
    headers: { 'X-Entity-Ref-ID': 'ref-1' },
    tags: [{ name: 'source', value: 'sdk' }],
  });
  const { id } = dataOf(sent);
  assert.is(sent.headers?.['mailstead-version'], '2026-05-06');
  await app.untilEvent(id, 'delivered');

  const { body: sink } = await app.call<SinkList>('GET', '/sink/messages?limit=100');
  const messages = sink.data.filter(({ raw }) => raw.includes('Subject: From the SDK\r\n'));
  assert.equal(messages.flatMap(({ rcpt_to }) => rcpt_to).toSorted(), [
    'bcc@recipient.test',
    'cc@recipient.test',
    'ok@recipient.test',
    'second@recipient.test',
  ]);
  const raw = messages[0]?.raw ?? '';
  assert.match(raw, 'Reply-To: answers@mailstead.test, Others <others@mailstead.test>\r\n');
  assert.match(raw, 'X-Entity-Ref-ID: ref-1\r\n');
  assert.match(raw, 'Cc: cc@recipient.test\r\n');

  const email = dataOf(await resend.emails.get(id));
  assert.is(email.object, 'email');
  assert.is(email.id, id);
  assert.equal(email.to, ['ok@recipient.test', 'Second <second@recipient.test>']);
  assert.equal(email.reply_to, ['answers@mailstead.test', 'Others <others@mailstead.test>']);
  assert.is(email.html, '<p>Hello</p>');
  assert.is(email.last_event, 'delivered');
  assert.equal(email.tags, [{ name: 'source', value: 'sdk' }]);
  assert.is(email.scheduled_at, null);
});

test('an idempotency key sends once', async () => {
  const options = { idempotencyKey: 'sdk/1' };
  const first = dataOf(await resend.emails.send(simple('Once'), options));
  const again = await resend.emails.create(simple('Once'), options);
  assert.is(dataOf(again).id, first.id);
  assert.is(again.headers?.['idempotent-replayed'], 'true');
  const other = errorOf(await resend.emails.send(simple('Other'), options));
  assert.is(other['name'], 'invalid_idempotent_request');
  assert.is(other['statusCode'], 409);
});

test('lists are walked page by page, in both directions', async () => {
  const sent: string[] = [];
  for (let i = 0; i < 5; i += 1) {
    sent.push(dataOf(await resend.emails.send(simple(`Listed ${i}`))).id);
  }
  const newest = sent.toReversed();
  const first = dataOf(await resend.emails.list({ limit: 2 }));
  assert.is(first.object, 'list');
  assert.is(first.has_more, true);
  const idsOf = ({ data }: typeof first): string[] => data.map(({ id }) => id);
  assert.equal(idsOf(first), newest.slice(0, 2));
  const second = dataOf(await resend.emails.list({ limit: 2, after: newest[1] ?? '' }));
  assert.equal(idsOf(second), newest.slice(2, 4));
  const back = dataOf(await resend.emails.list({ limit: 2, before: newest[2] ?? '' }));
  assert.equal(idsOf(back), newest.slice(0, 2));
  assert.is(back.has_more, false);
  assert.ok(dataOf(await resend.emails.list()).data.length >= 5);
});

test('refusals are data, with code and details', async () => {
  const invalid = errorOf(await resend.emails.send({ ...simple('Bad'), to: 'nobody' }));
  assert.equal(Object.keys(invalid).toSorted(), [
    'code',
    'details',
    'message',
    'name',
    'statusCode',
  ]);
  assert.is(invalid['name'], 'validation_error');
  assert.is(invalid['code'], 'validation_error');
  assert.is(invalid['statusCode'], 422);
  assert.match(String(invalid['message']), '`to`');

  const past = errorOf(await resend.emails.send({ ...simple('Past'), scheduledAt: '2020-01-01' }));
  assert.is(past['name'], 'validation_error');
  const unknown = '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70';
  assert.is(errorOf(await resend.emails.get(unknown))['name'], 'not_found');
  assert.is(errorOf(await resend.emails.get('x'))['name'], 'invalid_parameter');
  assert.is(errorOf(await resend.emails.list({ limit: 101 }))['statusCode'], 422);

  const stranger = new Resend(newToken(), { baseUrl: app.base });
  const refused = errorOf(await stranger.emails.send(simple('Stranger')));
  assert.is(refused['name'], 'invalid_api_key');
  assert.is(refused['statusCode'], 401);
});

test('a base with /api works, too', async () => {
  const api = new Resend(app.key, { baseUrl: `${app.base}/api` });
  const { id } = dataOf(await api.emails.send(simple('Under /api')));
  assert.is(dataOf(await api.emails.get(id)).id, id);
});

test('the base may come from RESEND_BASE_URL, the key from RESEND_API_KEY', async () => {
  const program = `
    import { Resend } from 'resend';
    const result = await new Resend().emails.send(${JSON.stringify(simple('From the environment'))});
    console.log(JSON.stringify(result));`;
  const { stdout } = await promisify(execFile)(
    process.execPath,
    ['--input-type=module', '-e', program],
    {
      cwd: resolve(import.meta.dirname, '../..'),
      env: { ...process.env, RESEND_BASE_URL: app.base, RESEND_API_KEY: app.key },
    },
  );
  const result = JSON.parse(stdout) as { data: { id: string } | null; error: unknown };
  await app.untilEvent(dataOf(result).id, 'delivered');
});

test('nothing was logged', () => {
  assert.equal(app.complaints, []);
});

test.run();
