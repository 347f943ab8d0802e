// Requests that go wrong before the fields of an email matter: bytes that are no JSON, bodies too large or too deep,
// keys that may not, paths and methods that are not there, cursors of nobody. Each gets the whole envelope, the process
// stays up and the connection goes on.
import { randomUUID } from 'node:crypto';
import { gzipSync } from 'node:zlib';
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createKey, newToken } from '../../src/access/keys.ts';
import { startApp, type Answer, type App } from '../support/app.ts';
import { assertRefused, type Refused } from './envelope.ts';
import { ask, exchange, type WireAnswer } from './wire.ts';

const email = {
  from: 'Ada <ada@mailstead.test>',
  to: 'ok@recipient.test',
  subject: 'Bad request',
  text: 'Plain words.',
};
const json = JSON.stringify(email);
const MIB = 1024 * 1024;

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

const post = (body: string | Uint8Array, headers: Record<string, string> = {}): Promise<Answer> =>
  app.call('POST', '/emails', { body, headers });
const asAnswer = ({ status, headers, text }: WireAnswer): Answer => ({
  status,
  headers,
  body: JSON.parse(text) as Record<string, unknown>,
});
const authorized = (): string => `Authorization: Bearer ${app.key}`;

// ---- bodies ----------------------------------------------------------------------------------

const nest = (levels: number): string => '['.repeat(levels) + ']'.repeat(levels);
const nestKeys = (levels: number): string => '{"a":'.repeat(levels) + '1' + '}'.repeat(levels);
const withField = (field: string, value: string): string =>
  json.replace('{', `{"${field}":${value},`);
const notJson: Refused = { status: 400, code: 'invalid_json', says: /not valid JSON/ };
const notUtf8: Refused = { status: 400, code: 'invalid_json', says: /UTF-8/ };
const tooDeep: Refused = { status: 400, code: 'invalid_request', says: /deep.* 64 levels/ };
const noObject: Refused = { status: 422, code: 'validation_error', paths: ['body'] };
const nothingGiven: Refused = {
  status: 422,
  code: 'missing_required_field',
  paths: ['to', 'html', 'subject', 'from'],
};
const bytes = (...parts: readonly (string | number)[]): Uint8Array =>
  Buffer.concat(
    parts.map((part) => (typeof part === 'string' ? Buffer.from(part) : Buffer.of(part))),
  );

const bodies: Readonly<Record<string, readonly [string | Uint8Array, Refused]>> = {
  'a lone byte 0xff': [bytes('{"subject":"', 0xff, '"}'), notUtf8],
  'half of a UTF-8 character': [bytes('{"subject":"', 0xe2, 0x82, '"}'), notUtf8],
  'an overlong slash': [bytes('{"subject":"', 0xc0, 0xaf, '"}'), notUtf8],
  'a UTF-8 surrogate': [bytes('{"subject":"', 0xed, 0xa0, 0x80, '"}'), notUtf8],
  'UTF-16': [Buffer.from(`\ufeff${json}`, 'utf16le'), notUtf8],
  'truncated JSON': [json.slice(0, -5), notJson],
  'half a string': ['{"from":"a', notJson],
  'half an escape': ['{"from":"a\\', notJson],
  'text after the object': [`${json}}`, notJson],
  'two objects': [json + json, notJson],
  'a trailing comma': [json.replace('}', ',}'), notJson],
  'a comment': [json.replace('{', '{/* a */'), notJson],
  'single quotes': [json.replaceAll('"', "'"), notJson],
  NaN: ['{"from":NaN}', notJson],
  'a raw line break in a string': ['{"subject":"a\nb"}', notJson],
  'a raw NUL in a string': ['{"subject":"a\0b"}', notJson],
  'a form': ['from=a%40mailstead.test&to=b%40recipient.test', notJson],
  XML: ['<email/>', notJson],
  'white space': [' \n', notJson],
  'a text': ['"x"', noObject],
  'a number': ['1', noObject],
  null: ['null', noObject],
  true: ['true', noObject],
  'an empty list': ['[]', noObject],
  'a list of emails': [`[${json}]`, noObject],
  nothing: ['', nothingGiven],
  'an empty object': ['{}', nothingGiven],
  'an object with a prototype': [`{"__proto__":${json}}`, nothingGiven],
  'an object with a constructor': [`{"constructor":{"prototype":${json}}}`, nothingGiven],
  'lists nested 100,000 deep': [nest(100_000), tooDeep],
  'objects nested 100,000 deep': [nestKeys(100_000), tooDeep],
  'a never-ending list': ['['.repeat(1_000_000), tooDeep],
  '100,000 levels in to': [withField('to', nest(100_000)), tooDeep],
  '100,000 levels in headers': [withField('headers', nestKeys(100_000)), tooDeep],
  '100,000 levels in tags': [withField('tags', nest(100_000)), tooDeep],
  '100,000 levels in template': [withField('template', nestKeys(100_000)), tooDeep],
  '100,000 levels in an unknown key': [withField('zzz', nest(100_000)), tooDeep],
  'a million values': [
    withField('zzz', `[${'0,'.repeat(1_000_000)}0]`),
    { status: 400, code: 'invalid_request', says: /too many values/ },
  ],
};
for (const [title, [body, expected]] of Object.entries(bodies)) {
  test(`body: ${title}`, async () => assertRefused(await post(body), expected));
}

test('brackets and escaped quotes inside strings are no nesting', async () => {
  const text = '[{"'.repeat(10_000) + '\\'.repeat(9) + '"';
  assert.is((await post(JSON.stringify({ ...email, text }))).status, 200);
  assert.is((await post(withField('zzz', nest(60)))).status, 200);
});

test('a byte order mark is read over', async () => {
  assert.is((await post(bytes(0xef, 0xbb, 0xbf, json))).status, 200);
});

test('any content type, and none, means JSON in UTF-8', async () => {
  for (const type of [
    'application/json',
    'application/json; charset=utf-8',
    'application/json; charset=latin1',
    'application/json; charset="',
    'text/plain',
    'multipart/form-data; boundary=x',
    'application/x-www-form-urlencoded',
    ';',
    '"',
  ]) {
    assert.is((await post(json, { 'content-type': type })).status, 200, type);
  }
  const headers = [authorized(), `Content-Length: ${json.length}`];
  const bare = await ask(app.base, { line: 'POST /emails HTTP/1.1', headers, body: [json] });
  assert.is(bare.status, 200, 'no content type');
});

test('a compressed body is read; a lie about it is refused', async () => {
  assert.is((await post(gzipSync(json), { 'content-encoding': 'gzip' })).status, 200);
  for (const encoding of ['gzip', 'deflate', 'br']) {
    assertRefused(await post(json, { 'content-encoding': encoding }), {
      status: 400,
      code: 'invalid_request',
      says: /content encoding/,
    });
  }
  for (const encoding of ['compress', 'gzip, gzip', 'x']) {
    assertRefused(await post(json, { 'content-encoding': encoding }), {
      status: 400,
      code: 'invalid_request',
      says: /gzip, deflate or br/,
    });
  }
  assertRefused(await post(gzipSync(json).subarray(0, 40), { 'content-encoding': 'gzip' }), {
    status: 400,
    code: 'invalid_request',
  });
});

const tooLarge: Refused = { status: 413, code: 'request_too_large', says: /\d+ bytes/ };

test('a small body that unpacks to 100 MB is refused', async () => {
  const bomb = gzipSync(Buffer.alloc(100 * MIB, ' '));
  assertRefused(await post(bomb, { 'content-encoding': 'gzip' }), tooLarge);
});

function* repeated(count: number, chunk: string): Generator<string> {
  for (let i = 0; i < count; i += 1) yield chunk;
}

test('50 MB are refused, announced or not, without being kept', async () => {
  const piece = 'x'.repeat(MIB);
  const chunk = `${MIB.toString(16)}\r\n${piece}\r\n`;
  const before = process.memoryUsage().arrayBuffers;
  let peak = 0;
  const sampler = setInterval(() => {
    peak = Math.max(peak, process.memoryUsage().arrayBuffers - before);
  }, 5);
  const line = 'POST /emails HTTP/1.1';
  const announced = await ask(app.base, {
    line,
    headers: [authorized(), `Content-Length: ${50 * MIB}`],
    body: repeated(50, piece),
  });
  assertRefused(asAnswer(announced), tooLarge);
  const chunked = await ask(app.base, {
    line,
    headers: [authorized(), 'Transfer-Encoding: chunked'],
    body: [...repeated(50, chunk), '0\r\n\r\n'],
  });
  assertRefused(asAnswer(chunked), tooLarge);
  clearInterval(sampler);
  assert.ok(peak < 200 * MIB, `${Math.round(peak / MIB)} MB at the peak`);
});

test('an announced length that is not kept ends that connection only', async () => {
  const { hostname, port } = new URL(app.base);
  const { connect } = await import('node:net');
  const socket = connect(Number(port), hostname);
  socket.write(
    `POST /emails HTTP/1.1\r\nHost: t\r\n${authorized()}\r\nContent-Length: 999\r\n\r\n{`,
  );
  await new Promise<void>((resolve) => socket.end(() => resolve()));
  socket.destroy();
  assert.is((await post(json)).status, 200);
});

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
  'a key with a quote': ["Bearer re_12345678_' or 1=1 --".replaceAll(' or ', '_or_'), none],
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
  assertRefused(await send(orphan, 'a@mailstead.test'), { ...unverified, says: /own domain/ });
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
  '/docs/../../package.json': absent,
  '/docs/nothing.js': absent,
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
    const answer = asAnswer(await ask(app.base, { line, headers: [authorized()] }));
    assertRefused(answer, path.startsWith('/emails/0') ? { says: /./, ...expected } : expected);
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
    [`/emails/${unknownId}`, 'GET'],
    ['/emails/x/timeline', 'GET'],
    ['/sink/messages', 'GET, DELETE'],
  ] as const) {
    for (const method of ['PUT', 'PATCH', 'OPTIONS', 'PROPFIND']) {
      for (const key of [app.key, null]) {
        const answer = await app.call(method, path, { key });
        assertRefused(answer, { status: 405, code: 'method_not_allowed' });
        assert.is(answer.headers.get('allow'), allow);
      }
    }
  }
});

test('HEAD answers as GET does, without a body', async () => {
  const answer = await app.call('HEAD', '/emails');
  assert.is(answer.status, 200);
  assert.is(answer.body as unknown, '');
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
    assertRefused(await post(json, { 'idempotency-key': key }), refused);
  }
  assert.is((await post(json, { 'idempotency-key': 'k'.repeat(256) })).status, 200);
});

test('a request id that could do harm is not repeated', async () => {
  for (const id of ['a b', '<b>', 'x'.repeat(65), 'é']) {
    const { headers } = await app.call('GET', '/emails', { headers: { 'x-request-id': id } });
    assert.match(headers.get('x-request-id') ?? '', /^[0-9a-f-]{36}$/);
  }
});

// ---- the wire --------------------------------------------------------------------------------

test('what is no HTTP gets a status and no page', async () => {
  for (const [line, status, ...headers] of [
    ['get /emails HTTP/1.1', 400],
    ['NOTHING /emails HTTP/1.1', 400],
    ['GET  /emails HTTP/1.1', 400],
    ['GET /emails HTTP/9.9', 400],
    [`GET /${'a'.repeat(20_000)} HTTP/1.1`, 431],
    ['GET /emails HTTP/1.1', 431, `X-A: ${'a'.repeat(20_000)}`],
    ['GET /emails HTTP/1.1', 400, 'X-A\x01: a'],
    ['POST /emails HTTP/1.1', 400, 'Content-Length: 2', 'Transfer-Encoding: chunked'],
    ['POST /emails HTTP/1.1', 400, 'Content-Length: -1'],
  ] as const) {
    const answer = await ask(app.base, { line, headers: [...headers, authorized()] });
    assert.is(answer.status, status, line.slice(0, 60));
    // Node answers these before we see them: an empty body, or the envelope.
    if (answer.text !== '') assert.is(asAnswer(answer).body['statusCode'], status);
  }
});

test('the body of a refused request is not taken for the next one', async () => {
  const hidden = 'GET /emails HTTP/1.1\r\nHost: hidden\r\n\r\n';
  for (const [line, authorization, status] of [
    ['POST /emails', 'Authorization: Bearer wrong', 401],
    ['POST /nothing', authorized(), 404],
    ['PUT /emails', authorized(), 405],
    ['POST /emails', authorized(), 400],
  ] as const) {
    for (const body of [hidden, hidden.padEnd(5 * MIB, 'x')]) {
      const answers = await exchange(app.base, [
        `${line} HTTP/1.1\r\nHost: t\r\n${authorization}\r\nContent-Length: ${body.length}\r\n\r\n`,
        body,
        'GET /health/live HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n',
      ]);
      assert.equal(
        answers.map((answer) => answer.status),
        [status, 200],
      );
    }
  }
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
