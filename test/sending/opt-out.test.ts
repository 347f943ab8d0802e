// Topics where email is accepted: who opted out gets nothing, and who is written to alone gets a link to do so.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createPreferenceLinks } from '../../src/audience/preference-links.ts';
import { deriveKey } from '../../src/store/seal.ts';
import { startApp, type App } from '../support/app.ts';
import { onDatabase } from '../support/second-tenant.ts';

const SECRET = 'preferences'.repeat(6);
const test = suite('topics of emails');
let app: App;
let tenantId: string;
let links: ReturnType<typeof createPreferenceLinks>;
test.before(async () => {
  app = await startApp({ MAILSTEAD_SECRET: SECRET });
  const key = deriveKey(SECRET, 'preference links');
  links = createPreferenceLinks({ key, publicUrl: app.appliance.publicUrl });
  const { rows } = await onDatabase(app, (pool) =>
    pool.query<{ id: string }>('select id from tenant'),
  );
  tenantId = rows[0]!.id;
});
test.after(() => app.stop());

let count = 0;
async function contact(body: Record<string, unknown> = {}): Promise<{ id: string; email: string }> {
  const email = `reader${++count}@recipient.test`;
  const answer = await app.call<{ id: string }>('POST', '/contacts', { body: { email, ...body } });
  assert.is(answer.status, 201, JSON.stringify(answer.body));
  return { id: answer.body.id, email };
}
async function topic(): Promise<string> {
  const body = { name: 'News', default_subscription: 'opt_in', visibility: 'public' };
  return (await app.call<{ id: string }>('POST', '/topics', { body })).body.id;
}

test('POST /emails with a topic: who opted out gets nothing, and the email says so', async () => {
  const topicId = await topic();
  const [out, into] = [
    await contact({ topics: [{ id: topicId, subscription: 'opt_out' }] }),
    await contact(),
  ];
  const alone = await app.send({ to: out.email, topic_id: topicId });
  const { body: email } = await app.call('GET', `/emails/${alone}`);
  assert.is(email['last_event'], 'failed');
  assert.equal(email['provider_last_error'], {
    code: 'unsubscribed',
    message: 'The recipient has opted out of this topic.',
  });
  assert.is(email['provider_dead_lettered_at'], null);
  const trace = await app.call<{
    events: { type: string; recipient: string }[];
    recipients: { state: string; last_code: string }[];
    waiting: unknown;
  }>('GET', `/emails/${alone}/timeline`);
  assert.ok(
    trace.body.events.some(
      ({ type, recipient }) => type === 'unsubscribed' && recipient === out.email,
    ),
    JSON.stringify(trace.body),
  );
  assert.is(trace.body.recipients[0]?.state, 'failed');
  assert.is(trace.body.recipients[0]?.last_code, 'unsubscribed');
  assert.is(trace.body.waiting, null);
  const released = await app.call('POST', `/emails/${alone}/release`, { body: {} });
  assert.equal([released.status, released.body['code']], [422, 'nothing_to_release']);
  assert.match(String(released.body['message']), /opted out/);

  const both = await app.send({ to: into.email, bcc: [out.email], topic_id: topicId });
  await app.untilEvent(both, 'delivered');
  const untouched = await app.send({ to: out.email });
  await app.untilEvent(untouched, 'delivered');

  const at = new Date(Date.now() + 3_600_000).toISOString();
  const later = await app.send({ to: out.email, topic_id: topicId, scheduled_at: at });
  await app.untilEvent(later, 'failed');
  const batch = await app.call<{ data: { id: string }[] }>('POST', '/emails/batch', {
    body: [out, into].map(({ email: to }) => ({
      from: 'ada@mailstead.test',
      to,
      subject: 's',
      text: 't',
      topic_id: topicId,
    })),
  });
  assert.is(batch.status, 200, JSON.stringify(batch.body));
  await app.untilEvent(batch.body.data[0]!.id, 'failed');
  await app.untilEvent(batch.body.data[1]!.id, 'delivered');
});

test('an email about a topic to one contact has its link and its headers, unless the caller set them', async () => {
  const topicId = await topic();
  const { id, email } = await contact();
  const html = '<a href="{{{RESEND_UNSUBSCRIBE_URL}}}">stop</a>';
  const text = 'Stop: {{{ UNSUBSCRIBE_URL }}}';
  const read = async (about: Record<string, unknown>) => {
    const emailId = await app.send({ to: email, html, text, topic_id: topicId, ...about });
    const { body } = await app.call<{
      html: string;
      text: string;
      headers: Record<string, string> | null;
    }>('GET', `/emails/${emailId}`);
    return { emailId, ...body };
  };
  const sent = await read({});
  const url = links.url({
    tenantId,
    contactId: id,
    topicId,
    broadcastId: null,
    emailId: sent.emailId,
  });
  assert.is(sent.html, `<a href="${url}">stop</a>`);
  assert.is(sent.text, `Stop: ${url}`);
  assert.equal(sent.headers, {
    'List-Unsubscribe': `<${url}>`,
    'List-Unsubscribe-Post': 'List-Unsubscribe=One-Click',
  });
  const own = await read({ headers: { 'list-unsubscribe': '<mailto:stop@mailstead.test>' } });
  assert.equal(own.headers, { 'list-unsubscribe': '<mailto:stop@mailstead.test>' });
  for (const about of [{ to: [email, 'b@recipient.test'] }, { to: 'stranger@recipient.test' }]) {
    const many = await read(about);
    assert.equal([many.html, many.text, many.headers ?? {}], [html, text, {}]);
  }
  const plain = await read({ topic_id: null });
  assert.equal([plain.html, plain.headers ?? {}], [html, {}]);
});

test('an opt-out while the email waits holds it back when it is claimed', async () => {
  const topicId = await topic();
  const { id, email } = await contact();
  const at = new Date(Date.now() + 3_600_000).toISOString();
  const waiting = await app.send({ to: email, topic_id: topicId, scheduled_at: at });
  const url = links.url({ tenantId, contactId: id, topicId, broadcastId: null, emailId: null });
  const left = await fetch(url, {
    method: 'POST',
    body: new URLSearchParams({ 'List-Unsubscribe': 'One-Click' }),
  });
  assert.is(left.status, 200);
  await app.call('PATCH', `/emails/${waiting}`, {
    body: { scheduled_at: new Date(Date.now() + 500).toISOString() },
  });
  const body = await app.untilEvent(waiting, 'failed', 'delivered');
  assert.is(body['last_event'], 'failed');
  assert.is((body['provider_last_error'] as { code: string }).code, 'unsubscribed');
  assert.is(body['provider_dead_lettered_at'], null);
});

test('choices and the default hold after the topic was deleted', async () => {
  const at = new Date(Date.now() + 3_600_000).toISOString();
  const waiting: string[] = [];
  for (const kind of ['opt_in', 'opt_out'] as const) {
    const body = { name: 'News', default_subscription: kind, visibility: 'public' };
    const topicId = (await app.call<{ id: string }>('POST', '/topics', { body })).body.id;
    const into = { topics: [{ id: topicId, subscription: 'opt_in' }] };
    const [stays, goes] = [await contact(into), await contact(into)];
    for (const { email } of [stays, goes]) {
      waiting.push(await app.send({ to: email, topic_id: topicId, scheduled_at: at }));
    }
    if (kind === 'opt_in') {
      await app.call('PATCH', `/contacts/${goes.id}/topics`, {
        body: { topics: [{ id: topicId, subscription: 'opt_out' }] },
      });
    } else await app.call('DELETE', `/contacts/${goes.id}`);
    assert.is((await app.call('DELETE', `/topics/${topicId}`)).status, 200);
    assert.is((await app.call('GET', `/topics/${topicId}`)).status, 404);
  }
  const due = new Date(Date.now() + 500).toISOString();
  for (const id of waiting) {
    await app.call('PATCH', `/emails/${id}`, { body: { scheduled_at: due } });
  }
  const fates = waiting.map((id) => app.untilEvent(id, 'failed', 'delivered'));
  const events = (await Promise.all(fates)).map((email) => email['last_event']);
  assert.equal(events, ['delivered', 'failed', 'delivered', 'failed']);
});

async function template(html: string, text?: string): Promise<string> {
  const made = await app.call<{ id: string }>('POST', '/templates', {
    body: { name: 'T', html, text, variables: [{ key: 'NAME', fallback_value: 'you' }] },
  });
  assert.is(made.status, 201, JSON.stringify(made.body));
  await app.call('POST', `/templates/${made.body.id}/publish`);
  return made.body.id;
}

test('a template has the link as html has it, alone and in a batch; its values are verbatim', async () => {
  const topicId = await topic();
  const { id: contactId, email } = await contact();
  const id = await template(
    '{{{NAME}}}: {{{RESEND_UNSUBSCRIBE_URL}}}',
    '{{{ UNSUBSCRIBE_URL | none }}}',
  );
  const base = { from: 'a@mailstead.test', subject: 's', to: email, topic_id: topicId };
  const literal = '{{{UNSUBSCRIBE_URL}}}';
  const requests = [
    { ...base, template: { id } },
    { ...base, template: { id, variables: { NAME: literal } } },
    { ...base, template: { id, variables: { RESEND_UNSUBSCRIBE_URL: 'https://own.test' } } },
  ];
  const sentAlone: string[] = [];
  for (const body of requests) {
    const sent = await app.call<{ id: string }>('POST', '/emails', { body });
    assert.is(sent.status, 200, JSON.stringify(sent.body));
    sentAlone.push(sent.body.id);
  }
  const batch = await app.call<{ data: readonly { id: string }[] }>('POST', '/emails/batch', {
    body: requests,
  });
  assert.is(batch.status, 200, JSON.stringify(batch.body));
  for (const ids of [sentAlone, batch.body.data.map((one) => one.id)]) {
    const urls = ids.map((emailId) =>
      links.url({ tenantId, contactId, topicId, broadcastId: null, emailId }),
    );
    const wanted = [`you: ${urls[0]}`, `${literal}: ${urls[1]}`, 'you: https://own.test'];
    for (const [index, emailId] of ids.entries()) {
      const { body } = await app.call<{
        html: string;
        text: string;
        headers: Record<string, string>;
      }>('GET', `/emails/${emailId}`);
      assert.equal([body.html, body.text], [wanted[index], urls[index]]);
      assert.is(body.headers['List-Unsubscribe'], `<${urls[index]}>`);
    }
  }
});

test('a template whose link cannot be made is refused with the reason', async () => {
  const topicId = await topic();
  const { email } = await contact();
  const id = await template('{{{RESEND_UNSUBSCRIBE_URL}}}');
  const base = { from: 'a@mailstead.test', subject: 's', to: email, template: { id } };
  const cases = [
    [{}, 'the email has no `topic_id`'],
    [{ topic_id: topicId, cc: 'b@recipient.test' }, 'the email has several recipients'],
    [{ topic_id: topicId, to: 'stranger@recipient.test' }, 'its recipient is not a contact'],
  ] as const;
  const path = 'template.variables.RESEND_UNSUBSCRIBE_URL';
  for (const [about, why] of cases) {
    const body = { ...base, ...about };
    const alone = await app.call<{ name: string; message: string }>('POST', '/emails', { body });
    assert.is(alone.status, 422);
    const message = `Missing \`${path}\`: ${why}. Send it with a \`topic_id\` to one contact alone, or give the value.`;
    assert.is(alone.body.message, message);
    const batch = await app.call<{ message: string }>('POST', '/emails/batch', { body: [body] });
    assert.is(batch.status, 422);
    assert.is(batch.body.message, message.replace(path, `0.${path}`));
  }
  const fallback = await template('{{{RESEND_UNSUBSCRIBE_URL|https://x.test}}}');
  const body = { ...base, template: { id: fallback } };
  const sent = await app.call<{ id: string }>('POST', '/emails', { body });
  assert.is(sent.status, 200, JSON.stringify(sent.body));
  const { body: read } = await app.call('GET', `/emails/${sent.body.id}`);
  assert.is(read['html'], 'https://x.test');
});

test.run();
