// Sharing an email: a page for whoever has the link, for as long as was asked.
import { randomUUID } from 'node:crypto';
import { Resend } from 'resend';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, type App } from '../support/app.ts';
import { secondTenant } from '../support/second-tenant.ts';
import { assertRefused } from './envelope.ts';

const test = suite('share');
let app: App;
test.before(async () => {
  app = await startApp();
});
test.after(() => app.stop());

const share = (id: string, body?: unknown, key?: string) =>
  app.call<{ object: string; id: string; url: string }>('POST', `/emails/${id}/share`, {
    ...(body === undefined ? {} : { body }),
    ...(key === undefined ? {} : { key }),
  });
const open = (url: string): Promise<Response> => fetch(app.base + new URL(url).pathname);
/** In seconds. */
const lifetimeOf = (url: string): number => {
  const [payload = ''] = new URL(url).pathname.slice('/links/'.length).split('.');
  return (
    Number(Buffer.from(payload, 'base64url').toString().split(' ').at(-1)) - Date.now() / 1_000
  );
};

test('a link shows the email without a key', async () => {
  const id = await app.send({
    subject: 'For <everybody>',
    html: '<p>Read & share</p>',
    cc: 'cc@recipient.test',
    bcc: 'hidden@recipient.test',
  });
  const answer = await share(id, { expires_in: '10m' });
  assert.is(answer.status, 200);
  assert.equal(Object.keys(answer.body), ['object', 'id', 'url']);
  assert.equal([answer.body.object, answer.body.id], ['email', id]);
  const page = await open(answer.body.url);
  assert.is(page.status, 200);
  const html = await page.text();
  assert.match(html, /<h1>For &lt;everybody&gt;<\/h1>/);
  assert.match(html, /srcdoc="&lt;p&gt;Read &amp; share&lt;\/p&gt;"/);
  assert.match(html, /cc@recipient\.test/);
  assert.not.match(html, /hidden@/);
  assert.is((await app.call('GET', `/api${new URL(answer.body.url).pathname}`)).status, 404);
});

test('as long as asked, at most and by default 48 hours', async () => {
  const id = await app.send();
  for (const [body, seconds] of [
    [undefined, 172_800],
    [{}, 172_800],
    [{ expires_in: null }, 172_800],
    [{ expires_in: '30s' }, 30],
    [{ expires_in: '10m' }, 600],
    [{ expires_in: '1 hour' }, 3_600],
    [{ expires_in: '48h' }, 172_800],
    [{ expires_in: '2 days' }, 172_800],
  ] as const) {
    const { body: link } = await share(id, body);
    const leftS = lifetimeOf(link.url);
    assert.ok(leftS > seconds - 20 && leftS <= seconds + 1, `${JSON.stringify(body)}: ${leftS}`);
  }
});

test('what is no duration up to 48 hours is refused', async () => {
  const id = await app.send();
  for (const given of [
    '',
    '0m',
    '49h',
    '3 days',
    '-1h',
    '1',
    'h',
    '1.5h',
    '1h 30m',
    'forever',
    '1e3s',
    '9'.repeat(400) + 's',
  ]) {
    assertRefused(await share(id, { expires_in: given }), {
      status: 422,
      code: 'validation_error',
      paths: ['expires_in'],
    });
  }
  assertRefused(await share(id, { expires_in: 600 }), {
    status: 422,
    code: 'validation_error',
    paths: ['expires_in'],
  });
});

test('a foreign email is a missing one', async () => {
  const id = await app.send();
  const { key } = await secondTenant(app);
  const [foreign, missing] = [await share(id, {}, key), await share(randomUUID(), {})];
  assertRefused(foreign, { status: 404, code: 'not_found' });
  assert.equal(foreign.body, missing.body);
  assertRefused(await share('x', {}), { status: 422, code: 'invalid_parameter', paths: ['id'] });
});

test('the official SDK, without a body too', async () => {
  const resend = new Resend(app.key, { baseUrl: app.base });
  const id = await app.send({ text: 'Shared <words>.' });
  const { data } = await resend.emails.share(id, { expiresIn: '1h' });
  assert.match(await (await open(data?.url ?? '')).text(), /<pre>Shared &lt;words&gt;\.<\/pre>/);
  assert.is((await resend.emails.share(id)).data?.id, id);
});

test.run();
