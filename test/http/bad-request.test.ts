// Requests that go wrong before a body matters: keys that may not, paths and methods that are not there, cursors of
// nobody, lines that are no HTTP. Each gets the whole envelope, and one tenant learns nothing about another.
import { randomUUID } from 'node:crypto';
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createKey, newToken } from '../../src/access/keys.ts';
import { startApp, type Answer, type App } from '../support/app.ts';
import { assertCommonHeaders, assertRefused, type Refused } from './envelope.ts';
import { ask, exchange } from './wire.ts';

const email = {
  from: 'Ada <ada@mailstead.test>',
  to: 'ok@recipient.test',
  subject: 'Bad request',
  text: 'Plain words.',
};

const test = suite('bad request');
let app: App;
let pool: Pool;
let tenantId = '';
let homeDomainId = '';
const other = { tenantId: randomUUID(), token: newToken() };

async function addKey(
  options: {
    tenantId?: string;
    token?: string;
    permission?: 'full_access' | 'sending_access';
    domainId?: string;
  } = {},
): Promise<string> {
  const token = options.token ?? newToken();
  await createKey(pool, {
    tenantId: options.tenantId ?? tenantId,
    name: 'test',
    token,
    permission: options.permission ?? 'full_access',
    domainId: options.domainId ?? null,
  });
  return token;
}

test.before(async () => {
  app = await startApp();
  pool = new Pool({ connectionString: app.databaseUrl, max: 1 });
  const { rows } = await pool.query<{ tenant_id: string; id: string }>(
    'select tenant_id, id from sending_domain',
  );
  tenantId = rows[0]?.tenant_id ?? '';
  homeDomainId = rows[0]?.id ?? '';
  await pool.query('insert into tenant (id, name) values ($1, $2)', [other.tenantId, 'other']);
  await addKey(other);
});
test.after(async () => {
  await pool.end();
  await app.stop();
});

const authorized = (): string => `Authorization: Bearer ${app.key}`;

// ---- keys ------------------------------------------------------------------------------------

const none: Refused = { status: 401, code: 'missing_api_key' };
const invalid: Refused = { status: 401, code: 'invalid_api_key' };
const restricted: Refused = { status: 401, code: 'restricted_api_key' };

const credentials: Readonly<Record<string, readonly [string, Refused]>> = {
  'another scheme': ['Basic YTpi', none],
  'a scheme alone': ['Bearer', none],
  'a scheme and a space': ['Bearer ', none],
  'two tokens': ['Bearer re_a re_b', none],
  'a token without a scheme': [newToken(), none],
  'an unknown key': [`Bearer ${newToken()}`, invalid],
  'a malformed key': ['Bearer sk_live_123', invalid],
  'a long key': [`Bearer re_${'a'.repeat(10_000)}`, invalid],
  'a key that would be SQL': ["Bearer re_12345678_'or'1'='1", invalid],
};
for (const [title, [authorization, expected]] of Object.entries(credentials)) {
  test(`authorization: ${title}`, async () => {
    assertRefused(
      await app.call('POST', '/emails', { body: email, key: null, headers: { authorization } }),
      expected,
    );
  });
}

test('authorization: none', async () => {
  assertRefused(await app.call('POST', '/emails', { body: email, key: null }), none);
  assertRefused(await app.call('GET', '/emails', { key: null }), none);
});

test('the scheme may be written in any case', async () => {
  const headers = { authorization: `bEARER  ${app.key}` };
  assert.is((await app.call('GET', '/emails', { key: null, headers })).status, 200);
});

test('a key works until it is revoked', async () => {
  const key = await addKey();
  assert.is((await app.call('GET', '/emails', { key })).status, 200);
  await pool.query('update api_key set revoked_at = now() where prefix = $1', [key.slice(0, 11)]);
  assertRefused(await app.call('GET', '/emails', { key }), invalid);
  assertRefused(await app.call('POST', '/emails', { body: email, key }), invalid);
});

test('a sending key sends and does nothing else', async () => {
  const key = await addKey({ permission: 'sending_access' });
  const { body, status } = await app.call('POST', '/emails', { body: email, key });
  assert.is(status, 200);
  assert.is((await app.call('POST', '/api/emails/', { body: email, key })).status, 200);
  for (const [method, path] of [
    ['GET', '/emails'],
    ['GET', '/api/emails'],
    ['GET', `/emails/${String(body['id'])}`],
    ['GET', `/emails/${String(body['id'])}/timeline`],
    ['GET', '/emails/x'],
    ['GET', '/sink/messages'],
    ['DELETE', '/sink/messages'],
  ] as const) {
    assertRefused(await app.call(method, path, { key }), restricted);
  }
  assert.is((await app.call('HEAD', '/emails', { key })).status, 401);
});

test('a key of one domain sends from that domain only', async () => {
  const unverified: Refused = {
    status: 422,
    code: 'domain_not_verified',
    paths: ['from'],
    says: /own domain.*elsewhere\.test/,
  };
  const send = (key: string, from: string): Promise<Answer> =>
    app.call('POST', '/emails', { body: { ...email, from }, key });
  const key = await addKey({ permission: 'sending_access', domainId: homeDomainId });
  assert.is((await send(key, 'a@MAILSTEAD.test')).status, 200);
  assertRefused(await send(key, 'a@elsewhere.test'), unverified);
  assertRefused(await send(key, 'a@sub.mailstead.test'), { ...unverified, says: /own domain/ });
  const orphan = await addKey({ permission: 'sending_access', domainId: randomUUID() });
  assertRefused(await send(orphan, 'a@mailstead.test'), { status: 401, code: 'invalid_api_key' });
});

// ---- paths and methods -----------------------------------------------------------------------

const absent: Refused = { status: 404, code: 'not_found' };
const noUuid: Refused = { status: 422, code: 'invalid_parameter', paths: ['id'] };
const unknownId = '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70';

const paths: Readonly<Record<string, Refused>> = {
  '/nothing': absent,
  '//emails': absent,
  '/api': absent,
  '/api/': absent,
  '/api/api/emails': absent,
  '/api//emails': absent,
  '/EMAILS': absent,
  '/%65mails': absent,
  '/%': absent,
  '/%00': absent,
  '/emails/../emails': absent,
  '/emails/a/b/c': absent,
  '/docs/../../package': absent,
  '/docs/nothing': absent,
  [`/${'a'.repeat(10_000)}`]: absent,
  [`/emails/${unknownId}`]: absent,
  [`/emails/${unknownId.toUpperCase()}`]: absent,
  [`/emails/${unknownId}/timeline`]: absent,
  [`/emails/${unknownId}/nothing`]: absent,
  '/emails/x': noUuid,
  '/emails/x/timeline': noUuid,
  '/emails/..': noUuid,
  '/emails/__proto__': noUuid,
  '/emails/%00': noUuid,
  '/emails/%2F': noUuid,
  '/emails/%252e': noUuid,
  [`/emails/${unknownId}%00`]: noUuid,
  [`/emails/${unknownId.slice(1)}`]: noUuid,
  [`/emails/{${unknownId}}`]: noUuid,
  [`/emails/${'a'.repeat(10_000)}`]: noUuid,
  '/emails/%': { status: 400, code: 'invalid_request', says: /percent/ },
  '/emails/%zz/timeline': { status: 400, code: 'invalid_request', says: /percent/ },
  '/api/emails/%E0%A4%A': { status: 400, code: 'invalid_request', says: /percent/ },
};
for (const [path, expected] of Object.entries(paths)) {
  test(`path: ${path.slice(0, 60)}`, async () => {
    const line = `GET ${path} HTTP/1.1`;
    assertRefused((await ask(app.base, { line, headers: [authorized()] })).answer(), expected);
  });
}

test('another tenant learns nothing: foreign and missing are the same answer', async () => {
  const id = await app.send();
  const { key } = { key: other.token };
  for (const rest of ['', '/timeline']) {
    const foreign = await app.call('GET', `/emails/${id}${rest}`, { key });
    const missing = await app.call('GET', `/emails/${unknownId}${rest}`, { key });
    assertRefused(foreign, absent);
    assert.equal(foreign.body, missing.body);
  }
  assert.equal((await app.call('GET', '/emails', { key })).body['data'], []);
  for (const cursor of ['after', 'before']) {
    const foreign = await app.call('GET', `/emails?${cursor}=${id}`, { key });
    const missing = await app.call('GET', `/emails?${cursor}=${unknownId}`, { key });
    assertRefused(foreign, { status: 422, code: 'validation_error', paths: [cursor] });
    assert.equal(foreign.body, missing.body);
  }
});

test('a wrong method is told the right ones, with or without a key', async () => {
  for (const [path, allow] of [
    ['/emails', 'GET, POST'],
    ['/api/emails', 'GET, POST'],
    [`/emails/${unknownId}`, 'GET, PATCH'],
    [`/emails/${unknownId}/cancel`, 'POST'],
    ['/emails/x/timeline', 'GET'],
    ['/sink/messages', 'GET, DELETE'],
  ] as const) {
    for (const method of ['PUT', 'DELETE', 'OPTIONS', 'PROPFIND']) {
      if (allow.includes(method)) continue;
      for (const key of [app.key, null]) {
        const answer = await app.call(method, path, { key });
        assertRefused(answer, { status: 405, code: 'method_not_allowed' });
        assert.is(answer.headers.get('allow'), allow);
      }
    }
  }
});

test('what needs no key has methods, too, and every path its case', async () => {
  for (const path of ['/health/live', '/health/ready', '/docs', '/openapi.json', '/']) {
    for (const method of ['POST', 'DELETE', 'OPTIONS']) {
      const answer = await app.call(method, path, { key: null });
      assert.is(answer.status, 405, path);
      assertCommonHeaders(answer);
      assert.is(answer.body['code'], 'method_not_allowed');
      assert.is(answer.headers.get('allow'), 'GET, HEAD');
    }
    assert.is((await app.call('HEAD', path, { key: null })).status, path === '/' ? 302 : 200);
  }
  for (const path of ['/Emails', '/API/emails', '/api/EMAILS', '/Health/live', '/DOCS']) {
    assert.is((await app.call('GET', path)).status, 404, path);
  }
});

test('HEAD answers as GET does, without a body', async () => {
  const answer = await app.call('HEAD', '/emails');
  assert.is(answer.status, 200);
  assert.is(answer.body, '');
  assert.is((await app.call('HEAD', '/nothing')).status, 404);
});

// ---- queries ---------------------------------------------------------------------------------

const queries: Readonly<Record<string, string>> = {
  'limit=0': 'limit',
  'limit=-1': 'limit',
  'limit=101': 'limit',
  'limit=1.5': 'limit',
  'limit=abc': 'limit',
  'limit=': 'limit',
  'limit=NaN': 'limit',
  'limit=Infinity': 'limit',
  'limit=1e999': 'limit',
  'limit=0x10': 'limit',
  'limit=1e1': 'limit',
  'limit=%2B5': 'limit',
  'limit=5.0': 'limit',
  'limit=00005': 'limit',
  'limit=%205': 'limit',
  'limit=1&limit=2': 'limit',
  'after=': 'after',
  'after=x': 'after',
  'after=%00': 'after',
  "after=' or 1=1 --": 'after',
  'after=%': 'after',
  [`after=${unknownId}`]: 'after',
  [`after=${unknownId}&after=${unknownId}`]: 'after',
  'before=x': 'before',
  [`before=${unknownId}`]: 'before',
  [`after=${unknownId}&before=${unknownId}`]: 'before',
};
for (const [query, path] of Object.entries(queries)) {
  test(`query: ${query}`, async () => {
    for (const route of ['/emails', '/api/emails', '/sink/messages']) {
      const answer = await app.call('GET', `${route}?${query.replaceAll(' ', '%20')}`);
      assertRefused(answer, { status: 422, code: 'validation_error', paths: [path] });
    }
  });
}

test('a query nobody asked for is passed over', async () => {
  for (const query of [
    '',
    'x=1',
    '__proto__=1',
    'after[]=x',
    '%',
    '=',
    `x=${'a'.repeat(10_000)}`,
  ]) {
    assert.is((await app.call('GET', `/emails?${query}`)).status, 200, query);
  }
});

// ---- headers ---------------------------------------------------------------------------------

test('an idempotency key has 1 to 256 characters', async () => {
  const refused: Refused = { status: 400, code: 'invalid_idempotency_key', says: /1 to 256/ };
  for (const key of ['', ' ', 'k'.repeat(257), 'k'.repeat(5_000)]) {
    assertRefused(
      await app.call('POST', '/emails', { body: email, headers: { 'idempotency-key': key } }),
      refused,
    );
  }
  assert.is(
    (
      await app.call('POST', '/emails', {
        body: email,
        headers: { 'idempotency-key': 'k'.repeat(256) },
      })
    ).status,
    200,
  );
  // UTF-8 as programs send it: two bytes a character.
  const umlauts = (count: number): string => Buffer.from('ü'.repeat(count)).toString('latin1');
  for (const [count, status] of [
    [256, 200],
    [257, 400],
  ] as const) {
    const headers = { 'idempotency-key': umlauts(count) };
    assert.is((await app.call('POST', '/emails', { body: email, headers })).status, status);
  }
});

test('a request id that could do harm is not repeated', async () => {
  for (const id of ['a b', '<b>', 'x'.repeat(65), 'é']) {
    const { headers } = await app.call('GET', '/emails', { headers: { 'x-request-id': id } });
    assert.match(headers.get('x-request-id') ?? '', /^[0-9a-f-]{36}$/);
  }
});

// ---- the wire --------------------------------------------------------------------------------

test('what is no HTTP gets the envelope', async () => {
  for (const [line, status, ...headers] of [
    ['get /emails HTTP/1.1', 400],
    ['NOTHING /emails HTTP/1.1', 400],
    ['GET /emails HTTP/9.9', 400],
    ['GET http:// HTTP/1.1', 400],
    [`GET /${'a'.repeat(20_000)} HTTP/1.1`, 431],
    ['GET /emails HTTP/1.1', 431, `X-A: ${'a'.repeat(20_000)}`],
    ['GET /emails HTTP/1.1', 400, 'X-A\x01: a'],
    ['GET /emails HTTP/1.1', 417, 'Expect: a miracle'],
    ['POST /emails HTTP/1.1', 400, 'Content-Length: 2', 'Transfer-Encoding: chunked'],
    ['POST /emails HTTP/1.1', 400, 'Content-Length: -1'],
  ] as const) {
    const answer = await ask(app.base, { line, headers: [...headers, authorized()] });
    assert.is(answer.status, status, line.slice(0, 60));
    assertCommonHeaders(answer);
    const { body } = answer.answer();
    assert.equal(Object.keys(body), ['name', 'code', 'message', 'statusCode']);
    assert.is(body['statusCode'], status);
  }
  const [hostless] = await exchange(app.base, ['GET /emails HTTP/1.1\r\n\r\n']);
  assert.is(hostless?.status, 400);
  assert.match(String(hostless?.answer().body['message']), /Host/);
});

// ---- where mail leaves the machine -----------------------------------------------------------

test('an author without a verified domain is refused when mail can leave', async () => {
  const strict = await startApp({
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: 'smtp://127.0.0.1:1',
  });
  const tenant = `(select id from tenant where name = 'first')`;
  const database = new Pool({ connectionString: strict.databaseUrl, max: 1 });
  await database.query('insert into tenant (id, name) values ($1, $2)', [other.tenantId, 'other']);
  await database.query(
    `insert into sending_domain (tenant_id, id, name, status, sending) values
       (${tenant}, $1, 'pending.test', 'pending', true),
       (${tenant}, $2, 'silent.test', 'verified', false),
       ($4, $3, 'foreign.test', 'verified', true)`,
    [randomUUID(), randomUUID(), randomUUID(), other.tenantId],
  );
  await database.end();
  for (const domain of [
    'unknown.test',
    'pending.test',
    'silent.test',
    'foreign.test',
    'sub.mailstead.test',
  ]) {
    const answer = await strict.call('POST', '/emails', {
      body: { ...email, from: `a@${domain}` },
    });
    assertRefused(answer, {
      status: 422,
      code: 'domain_not_verified',
      paths: ['from'],
      says: new RegExp(`The domain ${domain} is not verified`),
    });
  }
  assert.is((await strict.call('POST', '/emails', { body: email })).status, 200);
  await strict.stop();
});

test('afterwards a good email is delivered, and nothing was logged', async () => {
  await app.untilEvent(await app.send(email), 'delivered');
  assert.equal(app.complaints, []);
});

test.run();
