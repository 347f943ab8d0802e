// What an email can have beside its words: a template, a topic, files, and recipients who are suppressed.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, type Answer, type App } from '../support/app.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { assertRefused } from './envelope.ts';

interface Timeline {
  events: { type: string; detail: Record<string, unknown> }[];
  recipients: { recipient: string; state: string }[];
}

const test = suite('send options');
let app: App;
let stranger: string;
test.before(async () => {
  app = await startApp();
  stranger = (await secondTenant(app)).key;
});
test.after(() => app.stop());

const made = async (path: string, body: unknown): Promise<string> => {
  const answer = await app.call<{ id: string }>('POST', path, { body });
  assert.is(answer.status, 201, JSON.stringify(answer.body));
  return answer.body.id;
};
const published = async (change: Record<string, unknown>): Promise<string> => {
  const id = await made('/templates', { name: 'T', html: '<p>Hello {{{NAME}}}</p>', ...change });
  assert.is((await app.call('POST', `/templates/${id}/publish`)).status, 200);
  return id;
};
const send = (body: Record<string, unknown>, key: string = app.key): Promise<Answer> =>
  app.call('POST', '/emails', { body: { to: 'ok@recipient.test', ...body }, key });
const sent = async (body: Record<string, unknown>): Promise<Record<string, unknown>> => {
  const answer = await send(body);
  assert.is(answer.status, 200, JSON.stringify(answer.body));
  return (await app.call('GET', `/emails/${String(answer.body['id'])}`)).body;
};
const timelineOf = async (id: unknown): Promise<Timeline> =>
  (await app.call<Timeline>('GET', `/emails/${String(id)}/timeline`)).body;

const NAME = { key: 'NAME', type: 'string' };
const from = 'Ada <ada@mailstead.test>';

// ---- templates -----------------------------------------------------------------------------------

test('a template brings author, subject, reply address and content; the request wins', async () => {
  const id = await published({
    alias: 'full',
    from: 'Tess <tess@mailstead.test>',
    subject: 'Hello {{{NAME}}}',
    reply_to: ['answers@mailstead.test'],
    text: 'Hi {{{NAME}}}',
    variables: [NAME],
  });
  const template = { id, variables: { NAME: 'Ada' } };
  const whole = await sent({ template });
  assert.is(whole['from'], 'Tess <tess@mailstead.test>');
  assert.is(whole['subject'], 'Hello Ada');
  assert.equal(whole['reply_to'], ['answers@mailstead.test']);
  assert.is(whole['html'], '<p>Hello Ada</p>');
  assert.is(whole['text'], 'Hi Ada');
  assert.is((await timelineOf(whole['id'])).events[0]?.detail['template_id'], id);
  const own = await sent({
    template: { id: 'full', variables: { NAME: 'Eve' } },
    from,
    subject: 'Mine',
    reply_to: 'me@mailstead.test',
  });
  assert.is(own['from'], from);
  assert.is(own['subject'], 'Mine');
  assert.equal(own['reply_to'], ['me@mailstead.test']);
  assert.is(own['text'], 'Hi Eve');
});

test('text is made of the html of a template without one', async () => {
  const id = await published({ from, subject: 'S', variables: [NAME] });
  assert.is((await sent({ template: { id, variables: { NAME: 'Ada' } } }))['text'], 'Hello Ada');
});

test('what neither request nor template has is missing', async () => {
  const id = await published({ variables: [NAME] });
  const template = { id, variables: { NAME: 'Ada' } };
  assertRefused(await send({ template }), {
    status: 422,
    code: 'missing_required_field',
    paths: ['from', 'subject'],
  });
  assertRefused(await send({ template, from }), {
    status: 422,
    code: 'missing_required_field',
    paths: ['subject'],
  });
  assert.is((await send({ template, from, subject: 'S' })).status, 200);
});

test('a value cannot break out of the subject, nor make it too long', async () => {
  const id = await published({ from, subject: '{{{NAME}}}', variables: [NAME] });
  for (const value of ['a\r\nBcc: victim@recipient.test', 'a\nb', 'a\0b', 'a'.repeat(2_001)]) {
    const answer = await send({ template: { id, variables: { NAME: value } } });
    assert.is(answer.status, 422, JSON.stringify(answer.body));
    assert.is(answer.body['name'], 'validation_error');
  }
});

test('drafts, missing values, and templates that are not there', async () => {
  const draft = await made('/templates', { name: 'D', html: '<p>x</p>', from, subject: 'S' });
  assertRefused(await send({ template: { id: draft } }), {
    status: 422,
    code: 'template_not_published',
    paths: ['template.id'],
  });
  const id = await published({ alias: 'mine', from, subject: 'S', variables: [NAME] });
  assertRefused(await send({ template: { id } }), {
    status: 422,
    code: 'validation_error',
    paths: ['template.variables.NAME'],
  });
  const template = (name: string) => ({ template: { id: name, variables: { NAME: 'x' } } });
  const unknown = await send(template('019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70'));
  assert.is(unknown.status, 404);
  assert.is(unknown.body['name'], 'not_found');
  for (const answer of [
    await send(template('no-such-alias')),
    await send(template('')),
    await send(template(id), stranger),
    await send(template('mine'), stranger),
  ]) {
    assert.is(answer.status, 404);
    assert.equal(answer.body, unknown.body);
  }
});

// ---- topics --------------------------------------------------------------------------------------

test('a topic is one of the tenant', async () => {
  const id = await made('/topics', { name: 'News', default_subscription: 'opt_in' });
  const words = { from, subject: 'S', text: 'T' };
  assert.is((await sent({ ...words, topic_id: id.toUpperCase() }))['topic_id'], id);
  assert.is((await sent({ ...words, topic_id: null }))['topic_id'], null);
  assertRefused(await send({ ...words, topic_id: id }, stranger), {
    status: 422,
    code: 'validation_error',
    paths: ['topic_id'],
  });
});

// ---- suppressed recipients -----------------------------------------------------------------------

test('who is suppressed gets nothing, the others do', async () => {
  await made('/suppressions', { email: 'Gone@recipient.test' });
  const words = { from, subject: 'Suppressed', text: 'T' };
  const some = await sent({
    ...words,
    to: ['ok@recipient.test', 'GONE@Recipient.test'],
    cc: 'gone@recipient.test',
  });
  await app.untilEvent(String(some['id']), 'delivered', 'suppressed');
  const timeline = await timelineOf(some['id']);
  assert.equal(timeline.events[0]?.detail['suppressed'], ['GONE@recipient.test']);
  assert.equal(
    timeline.recipients.map(({ recipient, state }) => [recipient, state]),
    [
      ['ok@recipient.test', 'delivered'],
      ['GONE@recipient.test', 'suppressed'],
    ],
  );
  for (const change of [{}, { scheduled_at: 'in 1 hour' }]) {
    const none = await sent({ ...words, to: 'gone@recipient.test', ...change });
    assert.is(none['last_event'], 'suppressed');
  }
  const rows = await onDatabase(app, async (pool) => {
    const found = await pool.query<{ rcpt_to: string[] }>('select rcpt_to from sink_message');
    return found.rows.flatMap(({ rcpt_to }) => rcpt_to.map((address) => address.toLowerCase()));
  });
  assert.ok(!rows.includes('gone@recipient.test'));
  const foreign = await send({ ...words, to: 'gone@recipient.test' }, stranger);
  assert.is(foreign.status, 200);
  const { body } = await app.call('GET', `/emails/${String(foreign.body['id'])}`, {
    key: stranger,
  });
  assert.is.not(body['last_event'], 'suppressed', 'of one tenant is not of another');
});

// ---- files ---------------------------------------------------------------------------------------

test('files travel with the email and are told in its timeline', async () => {
  const email = await sent({
    from,
    subject: 'Files',
    html: '<img src="cid:pixel">',
    attachments: [
      { filename: 'note.txt', content: Buffer.from('A note').toString('base64') },
      { content: 'AAAA', content_type: 'image/png', content_id: 'pixel' },
    ],
  });
  await app.untilEvent(String(email['id']), 'delivered');
  assert.is((await timelineOf(email['id'])).events[0]?.detail['attachments'], 2);
  const raws = await onDatabase(app, async (pool) => {
    const found = await pool.query<{ raw: Buffer }>('select raw from sink_message');
    return found.rows.map(({ raw }) => raw.toString('latin1'));
  });
  const raw = raws.find((text) => text.includes('Subject: Files\r\n')) ?? '';
  assert.match(raw, /filename="?note\.txt/);
  assert.match(raw, Buffer.from('A note').toString('base64'));
  assert.match(raw, /Content-ID: <pixel>/);
});

test('nothing was logged', () => assert.equal(app.complaints, []));

test.run();
