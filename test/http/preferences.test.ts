// /unsubscribe/{token} as mail programs, scanners and people use it, and topics where email is accepted.
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import type { AddressInfo } from 'node:net';
import express from 'express';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  createPreferenceLinks,
  type PreferenceTarget,
} from '../../src/audience/preference-links.ts';
import { Refusal } from '../../src/access/refusal.ts';
import { createErrorHandler } from '../../src/http/envelope.ts';
import { addPreferences } from '../../src/http/preferences.ts';
import { readShippedPreferences } from '../../src/http/preference-policy.ts';
import { createLogger } from '../../src/log.ts';
import { newId } from '../../src/store/id.ts';
import { deriveKey } from '../../src/store/seal.ts';
import { startApp, until, type App } from '../support/app.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { ask, type WireAnswer } from './wire.ts';

const SECRET = 'preferences'.repeat(6);
const test = suite('preferences');
let app: App;
let tenantId: string;
let links: ReturnType<typeof createPreferenceLinks>;
test.before(async () => {
  const own = {
    brand: { name: 'Acme & Sons', support_url: 'https://acme.example/help?a=1&b=2' },
    colours: { accent: '#0f766e' },
    texts: { en: { title: 'Your <mail>' } },
  };
  app = await startApp({ MAILSTEAD_SECRET: SECRET }, { preferences: own });
  links = createPreferenceLinks({
    key: deriveKey(SECRET, 'preference links'),
    publicUrl: app.appliance.publicUrl,
  });
  [{ id: tenantId }] = await rows<{ id: string }>('select id from tenant');
});
test.after(() => app.stop());

const rows = <T>(text: string, values: readonly unknown[] = []): Promise<[T, ...T[]]> =>
  onDatabase(app, async (pool) => (await pool.query(text, [...values])).rows as [T, ...T[]]);

let count = 0;
async function contact(body: Record<string, unknown> = {}): Promise<{ id: string; email: string }> {
  const email = `reader${++count}@recipient.test`;
  const answer = await app.call<{ id: string }>('POST', '/contacts', { body: { email, ...body } });
  assert.is(answer.status, 201, JSON.stringify(answer.body));
  return { id: answer.body.id, email };
}
async function topic(about: Record<string, unknown> = {}): Promise<string> {
  const body = { name: 'News', default_subscription: 'opt_in', visibility: 'public', ...about };
  const answer = await app.call<{ id: string }>('POST', '/topics', { body });
  assert.is(answer.status, 201, JSON.stringify(answer.body));
  return answer.body.id;
}
const tokenFor = (contactId: string, about: Partial<PreferenceTarget> = {}): string =>
  links
    .url({ tenantId, contactId, topicId: null, broadcastId: null, emailId: null, ...about })
    .slice(`${app.appliance.publicUrl}/unsubscribe/`.length);

/** As a mail program would: no cookie, no credential, nothing that it got before. */
const post = (
  token: string,
  body: string,
  type = 'application/x-www-form-urlencoded',
  headers: readonly string[] = [],
): Promise<WireAnswer> =>
  ask(app.base, {
    line: `POST /unsubscribe/${token} HTTP/1.1`,
    headers: [`Content-Type: ${type}`, `Content-Length: ${Buffer.byteLength(body)}`, ...headers],
    body: [body],
  });
const ONE_CLICK = 'List-Unsubscribe=One-Click';
const get = (token: string, headers: Record<string, string> = {}, method = 'GET') =>
  fetch(`${app.base}/unsubscribe/${token}`, {
    method,
    headers: { accept: 'text/html', ...headers },
    redirect: 'manual',
  });
const pageOf = async (token: string, headers: Record<string, string> = {}): Promise<string> =>
  (await get(token, headers)).text();

/** All that a reader's decision may change. */
const stateOf = async (contactId: string): Promise<unknown> => ({
  contact: (await rows('select * from contact where id = $1', [contactId]))[0],
  topics: await rows(
    'select topic_id, subscription from contact_topic where contact_id = $1 order by topic_id',
    [contactId],
  ),
  engagement: await rows('select kind, email_id, broadcast_id from engagement order by id'),
});
const isUnsubscribed = async (email: string): Promise<unknown> =>
  (await app.call('GET', `/contacts/${email}`)).body['unsubscribed'];
async function subscriptionOf(email: string, topicId: string): Promise<string | undefined> {
  const { body } = await app.call<{ data: { id: string; subscription: string }[] }>(
    'GET',
    `/contacts/${email}/topics?limit=100`,
  );
  return body.data.find(({ id }) => id === topicId)?.subscription;
}

/** The fields that a browser would send for the `index`th form of a page, as they stand. */
function formOf(html: string, index = 0): URLSearchParams {
  const form = html.split('<form').slice(1)[index]!.split('</form>')[0]!;
  const fields = new URLSearchParams();
  for (const [input] of form.matchAll(/<input [^>]*>/g)) {
    const name = /name="([^"]*)"/.exec(input)![1]!;
    const isOff = input.includes('type="checkbox"') && !input.includes(' checked');
    if (!isOff) fields.append(name, /value="([^"]*)"/.exec(input)![1]!);
  }
  return fields;
}

test('GET and HEAD change nothing, whoever follows the link', async () => {
  const { id } = await contact();
  const token = tokenFor(id, { topicId: await topic() });
  const before = await stateOf(id);
  for (const method of ['GET', 'HEAD', 'GET']) {
    const answer = await get(token, {}, method);
    assert.is(answer.status, 200);
    assert.is(answer.headers.get('cache-control'), 'no-store');
    assert.is(answer.headers.get('referrer-policy'), 'no-referrer');
    assert.match(answer.headers.get('x-robots-tag') ?? '', /noindex/);
    assert.is(answer.headers.get('set-cookie'), null);
    const policy = answer.headers.get('content-security-policy') ?? '';
    assert.match(
      policy,
      /^default-src 'none'; style-src 'sha256-[^']+'; base-uri 'none'; form-action 'self'/,
    );
    assert.not.match(policy, /unsafe/);
    assert.is((await answer.text()) === '', method === 'HEAD');
  }
  await get(`${token}?List-Unsubscribe=One-Click`);
  assert.equal(await stateOf(id), before);
});

test('other methods are refused', async () => {
  const { id } = await contact();
  for (const method of ['PUT', 'DELETE', 'PATCH', 'OPTIONS']) {
    const answer = await get(tokenFor(id), {}, method);
    assert.is(answer.status, 405);
    assert.is(answer.headers.get('allow'), 'GET, HEAD, POST');
  }
});

test('one click: out of all broadcasts, at once, as often as it is asked', async () => {
  const { id, email } = await contact();
  const emailId = await app.send({ to: email });
  const token = tokenFor(id, { emailId });
  for (const turn of [1, 2]) {
    const answer = await post(token, ONE_CLICK, undefined, ['User-Agent: Mail/1']);
    assert.is(answer.status, 200, `turn ${turn}`);
    assert.is(answer.text, 'Unsubscribed.\n');
    assert.is(answer.headers.get('location'), null);
    assert.is(await isUnsubscribed(email), true);
  }
  const noted = await rows('select kind, user_agent from engagement where email_id = $1', [
    emailId,
  ]);
  assert.equal(noted, [{ kind: 'unsubscribed', user_agent: 'Mail/1' }]);
});

test('one click as multipart, and with a topic: out of that topic only', async () => {
  const { id, email } = await contact();
  const [topicId, other] = [await topic(), await topic()];
  const body = `--b\r\nContent-Disposition: form-data; name="List-Unsubscribe"\r\n\r\nOne-Click\r\n--b--\r\n`;
  const answer = await post(tokenFor(id, { topicId }), body, 'multipart/form-data; boundary=b');
  assert.is(answer.status, 200);
  assert.is(await isUnsubscribed(email), false);
  assert.is(await subscriptionOf(email, topicId), 'opt_out');
  assert.is(await subscriptionOf(email, other), 'opt_in');
});

test('one click of a topic that is gone: out of everything', async () => {
  const { id, email } = await contact();
  const topicId = await topic();
  const token = tokenFor(id, { topicId });
  await app.call('DELETE', `/topics/${topicId}`);
  assert.is((await post(token, ONE_CLICK)).status, 200);
  assert.is(await isUnsubscribed(email), true);
});

test('a broadcast notes once who unsubscribed by its link, and webhooks hear of it', async () => {
  const { id, email } = await contact();
  const [broadcastId, emailId] = [newId(), await app.send({ to: email })];
  await rows(
    `insert into broadcast_recipient (tenant_id, broadcast_id, contact_id, address, email_id)
      values ($1, $2, $3, $4, $5)`,
    [tenantId, broadcastId, id, email, emailId],
  );
  await rows(
    `insert into webhook (tenant_id, id, endpoint, events, status, secret_sealed, created_at, updated_at)
      values ($1, $2, 'https://192.0.2.1/', '{contact.updated}', 'enabled', '', now(), now())`,
    [tenantId, newId()],
  );
  const heard = `select type from outbox where subject_id = $1 union all select type from webhook_event`;
  const token = tokenFor(id, { broadcastId, emailId });
  await post(token, ONE_CLICK);
  const noted = 'select unsubscribed_at from broadcast_recipient where broadcast_id = $1';
  const [first] = await rows<{ unsubscribed_at: Date }>(noted, [broadcastId]);
  assert.instance(first.unsubscribed_at, Date);
  assert.equal(await rows(heard, [id]), [{ type: 'contact.updated' }]);
  await post(token, ONE_CLICK);
  await app.call('PATCH', `/contacts/${id}`, { body: { unsubscribed: false } });
  await post(token, ONE_CLICK);
  assert.equal(await rows(noted, [broadcastId]), [first]);
  assert.equal(await rows('select broadcast_id from engagement where email_id = $1', [emailId]), [
    { broadcast_id: broadcastId },
  ]);
  await rows('delete from webhook');
});

test('the form: choices are stored, shown again, and undone', async () => {
  const [wanted, unwanted] = [await topic(), await topic({ default_subscription: 'opt_out' })];
  const { id, email } = await contact();
  const token = tokenFor(id);
  const fields = formOf(await pageOf(token));
  assert.ok(fields.getAll('topic').includes(wanted) && !fields.getAll('topic').includes(unwanted));
  assert.ok(fields.getAll('shown').includes(unwanted));
  fields.delete('topic', wanted);
  fields.append('topic', unwanted);
  const saved = await post(token, fields.toString(), undefined, ['Accept: text/html']);
  assert.is(saved.status, 200);
  assert.match(saved.text, /role="status">Your choice has been saved\./);
  assert.is(await subscriptionOf(email, wanted), 'opt_out');
  assert.is(await subscriptionOf(email, unwanted), 'opt_in');
  assert.equal(
    formOf(await pageOf(token))
      .getAll('topic')
      .includes(unwanted),
    true,
  );
  await post(token, formOf(saved.text, 0).toString());
  assert.is(await subscriptionOf(email, wanted), 'opt_in');
  assert.is(await subscriptionOf(email, unwanted), 'opt_out');
});

test('unsubscribing from all leaves no topic, and undo brings back what was', async () => {
  const hidden = await topic({ name: 'Private', visibility: 'private' });
  const [open, chosen] = [await topic(), await topic({ default_subscription: 'opt_out' })];
  const { id, email } = await contact({ topics: [{ id: chosen, subscription: 'opt_in' }] });
  const token = tokenFor(id);
  const fields = formOf(await pageOf(token));
  fields.append('all', '1');
  const saved = await post(token, fields.toString());
  assert.match(saved.text, /You have been unsubscribed from all\./);
  assert.is(await isUnsubscribed(email), true);
  for (const one of [hidden, open, chosen]) assert.is(await subscriptionOf(email, one), 'opt_out');
  assert.not.match(await pageOf(token), />Private</);
  await post(token, formOf(saved.text, 0).toString());
  assert.is(await isUnsubscribed(email), false);
  for (const one of [hidden, open, chosen]) assert.is(await subscriptionOf(email, one), 'opt_in');
});

test('private topics are shown to who gets them only, and nobody opts in to what they cannot see', async () => {
  const hidden = await topic({ visibility: 'private', default_subscription: 'opt_out' });
  const [out, into] = [
    await contact(),
    await contact({ topics: [{ id: hidden, subscription: 'opt_in' }] }),
  ];
  assert.ok((await pageOf(tokenFor(into.id))).includes(hidden));
  assert.not.ok((await pageOf(tokenFor(out.id))).includes(hidden));
  await post(tokenFor(out.id), `preferences=1&shown=${hidden}&topic=${hidden}`);
  assert.is(await subscriptionOf(out.email, hidden), 'opt_out');
});

test('what tenants write is text, the address is masked', async () => {
  const name = `"><script>alert(1)</script>`;
  await topic({ name, description: `' onmouseover='x & <b>` });
  const { id, email } = await contact();
  const page = await pageOf(tokenFor(id));
  assert.not.match(page, /<script|<b>|' onmouseover/);
  assert.match(page, /&quot;&gt;&lt;script&gt;alert\(1\)&lt;\/script&gt;/);
  assert.match(page, /r\*\*\*@recipient\.test/);
  assert.not.ok(page.includes(email));
  assert.not.match(page, /src=|srcset=|url\(|@import|<link|<iframe|<object/, 'loads nothing');
  const labels = [...page.matchAll(/<input type="checkbox" id="([^"]+)"/g)].map(([, one]) => one!);
  assert.ok(labels.length > 1);
  for (const one of labels) assert.ok(page.includes(`<label for="${one}">`), one);
  assert.is(new Set(labels).size, labels.length);
});

test('languages as the browser asks, with the language on the page', async () => {
  const { id } = await contact();
  const cases: readonly (readonly [accept: string, language: string])[] = [
    ['de-AT,de;q=0.9,en;q=0.8', 'de'],
    ['en;q=0.3, fr-CH;q=0.7', 'fr'],
    ['es;q=0, pt', 'en'],
    ['*', 'en'],
    ['tlh, ES', 'es'],
    [';;q=9,,é', 'en'],
  ];
  for (const [accept, language] of cases) {
    const answer = await ask(app.base, {
      line: `GET /unsubscribe/${tokenFor(id)} HTTP/1.1`,
      headers: [`Accept-Language: ${accept}`, 'Accept: text/html'],
    });
    assert.match(answer.text, `<html lang="${language}">`);
    assert.is(answer.headers.get('content-language'), language);
    assert.match(answer.headers.get('vary') ?? '', /Accept-Language/);
  }
});

test('tokens that we did not make: 404, as a page or as an envelope', async () => {
  const { id, email } = await contact();
  const token = tokenFor(id);
  const second = await secondTenant(app);
  const spliced = Buffer.from(token, 'base64url');
  spliced.set(Buffer.from(second.tenantId.replaceAll('-', ''), 'hex'), 1);
  const foreign = createPreferenceLinks({ key: Buffer.alloc(32), publicUrl: '' })
    .url({ tenantId, contactId: id, topicId: null, broadcastId: null, emailId: null })
    .split('/')
    .at(-1)!;
  const wrong = [spliced.toString('base64url'), foreign, `${token}A`, token.slice(0, -3), 'x'];
  for (const one of wrong) {
    const page = await get(one, { 'accept-language': 'de' });
    assert.is(page.status, 404);
    assert.match(await page.text(), /<html lang="de">[^]*Dieser Link ist nicht gültig/);
    const answer = await get(one, { accept: '*/*' });
    assert.equal(
      [answer.status, ((await answer.json()) as { name: string }).name],
      [404, 'not_found'],
    );
    assert.is((await post(one, ONE_CLICK)).status, 404);
  }
  assert.is(await isUnsubscribed(email), false);
});

test('a token of another tenant reaches nothing of this one', async () => {
  const { id, email } = await contact();
  const { tenantId: stranger } = await secondTenant(app);
  const token = tokenFor(id, { tenantId: stranger, topicId: await topic() });
  const page = await get(token);
  assert.is(page.status, 200);
  assert.match(await page.text(), /This address is not on any list/);
  assert.is((await post(token, ONE_CLICK)).status, 200);
  assert.is(await isUnsubscribed(email), false);
});

test('a contact that was removed: 200, and the address stays unsubscribed when it comes back', async () => {
  const { id, email } = await contact();
  const emailId = await app.send({ to: email });
  await app.call('DELETE', `/contacts/${id}`);
  // Nothing says whom this link was made for.
  assert.is((await post(tokenFor(id), ONE_CLICK)).status, 200);
  assert.is((await app.call('GET', `/contacts/${email}`)).status, 404);
  const token = tokenFor(id, { emailId });
  assert.match(await pageOf(token), /r\*\*\*@recipient\.test is not on any list/);
  assert.is((await app.call('GET', `/contacts/${email}`)).status, 404);
  assert.is((await post(token, ONE_CLICK)).status, 200);
  assert.is(await isUnsubscribed(email), true);
  await app.call('POST', '/contacts', { body: { email } });
  assert.is(await isUnsubscribed(email), true);
  assert.match(await pageOf(token), /name="all" value="1" checked/);
});

test('what is no form changes nothing and is told so', async () => {
  const { id, email } = await contact();
  const token = tokenFor(id);
  const cases: readonly (readonly [status: number, body: string, type?: string])[] = [
    [400, ''],
    [400, ONE_CLICK, 'text/plain'],
    [400, JSON.stringify({ 'List-Unsubscribe': 'One-Click' }), 'application/json'],
    [400, ONE_CLICK, 'multipart/form-data'],
    [400, '--b--', 'multipart/form-data; boundary=b'],
    [400, 'List-Unsubscribe=Two-Clicks'],
    [400, 'shown=x'],
    [413, `x=${'y'.repeat(110_000)}`],
    [413, 'x=y&'.repeat(5_000)],
  ];
  for (const [status, body, type] of cases) {
    assert.is((await post(token, body, type)).status, status, `${type} ${body.slice(0, 20)}`);
  }
  assert.is(await isUnsubscribed(email), false);
  // Nor does it bring back who wanted no more.
  await post(token, ONE_CLICK);
  for (const [, body, type] of cases) await post(token, body, type);
  assert.is(await isUnsubscribed(email), true);
});

test("the page is the operator's", async () => {
  const page = await pageOf(tokenFor((await contact()).id));
  assert.match(page, '<h1>Your &lt;mail&gt;</h1>');
  assert.match(page, 'href="https://acme.example/help?a=1&amp;b=2"');
  assert.match(page, 'Acme &amp; Sons');
  assert.match(page, '#0f766e');
  assert.match(page, '>Save<');
});

test('who has a good link is counted apart from all others; without the database a person gets a page', async () => {
  const counted: string[] = [];
  const web = express();
  const isAway = (): Promise<never> =>
    Promise.reject(Object.assign(new Error('connect'), { code: 'ECONNREFUSED' }));
  addPreferences(web, {
    preferences: {
      nameOf: (token) => (token === 'good' ? 'tenant contact' : null),
      read: isAway,
      save: isAway,
      unsubscribe: isAway,
    },
    policy: () =>
      readShippedPreferences(
        JSON.parse(readFileSync(new URL('../../config/preferences.json', import.meta.url), 'utf8')),
      ),
    limiter: {
      takeStranger: (key) => {
        counted.push(key);
        const refusal =
          counted.length > 3 ? new Refusal('rate_limit_exceeded', 'Too many requests.') : null;
        return Promise.resolve({ headers: {}, refusal });
      },
    },
  });
  const log = createLogger({ level: 'silent', name: 'test' });
  web.use(createErrorHandler(log));
  const server = web.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const base = `http://127.0.0.1:${(server.address() as AddressInfo).port}/unsubscribe`;
  const body = new URLSearchParams({ 'List-Unsubscribe': 'One-Click' });
  try {
    const page = await fetch(`${base}/good`, { headers: { accept: 'text/html' } });
    assert.is(page.status, 503);
    assert.match(await page.text(), 'Nothing has been changed.');
    const program = await fetch(`${base}/good`, { method: 'POST', body });
    assert.is(program.status, 503);
    assert.is(((await program.json()) as { name: string }).name, 'service_unavailable');
    await fetch(`${base}/bad`);
    assert.is((await fetch(`${base}/bad`)).status, 429);
    assert.equal(counted.slice(0, 2), Array(2).fill('preferences tenant contact'));
    assert.match(counted[2]!, /127\.0\.0\.1$/);
  } finally {
    server.closeAllConnections();
    server.close();
  }
});

test('no link stands in a log', async () => {
  const { id } = await contact();
  const token = tokenFor(id);
  await app.call('POST', '/emails', {
    body: {
      from: 'a@mailstead.test',
      to: 'b@recipient.test',
      subject: 's',
      text: links.url(links.open(token)!),
    },
  });
  const logged = await until(
    () =>
      app
        .call<{ data: { id: string }[] }>('GET', '/logs?limit=1&method=POST')
        .then(async ({ body }) => {
          const [last] = body.data;
          return JSON.stringify((await app.call('GET', `/logs/${last?.id}`)).body);
        }),
    (text) => text.includes('/unsubscribe/'),
  );
  assert.match(logged, '/unsubscribe/[redacted]');
  assert.not.ok(logged.includes(token));
  assert.not.ok(app.complaints.join('').includes(token));
});

test.run();
