// What the API promises when all is well: both mounts, the shape of every answer, pages that neither repeat nor skip, the
// reference page and its document, probes, and the rate limit.
import { randomUUID } from 'node:crypto';
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { createKey, newToken } from '../../src/access/keys.ts';
import { createRateLimiter } from '../../src/access/rate-limit.ts';
import { RegisterRoutes } from '../../src/http/routes.gen.ts';
import { startApp, until, type Answer, type App } from '../support/app.ts';
import { assertHeaders, assertInstant, assertRefused } from './envelope.ts';

interface Page {
  object: string;
  data: Record<string, unknown>[];
  has_more: boolean;
}
interface Operation {
  operationId: string;
  security: Record<string, unknown>[];
  parameters?: { name: string; in: string; required: boolean }[];
  responses: Record<string, { content?: Record<string, { schema: { $ref?: string } }> }>;
}
interface OpenApi {
  openapi: string;
  info: { title: string; version: string };
  servers: { url: string }[];
  paths: Record<string, Record<string, Operation>>;
  components: { schemas: Record<string, unknown> };
}

const UUID_V7 = /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
const SUMMARY_KEYS = (
  'id message_id from to cc bcc reply_to subject ' +
  'status last_event scheduled_at created_at provider_retry_count provider_last_attempted_at provider_next_retry_at provider_last_error provider_dead_lettered_at'
).split(' ');
const EMAIL_KEYS = [
  ...SUMMARY_KEYS,
  'content_removed_at',
  'object',
  'html',
  'text',
  'headers',
  'tags',
  'topic_id',
];

const test = suite('contract');
let app: App;
let pool: Pool;
test.before(async () => {
  app = await startApp();
  pool = new Pool({ connectionString: app.databaseUrl, max: 1 });
});
test.after(async () => {
  await pool.end();
  await app.stop();
});

/** A tenant of its own, whose list is empty; its key. */
async function addTenant(db: Pool): Promise<string> {
  const tenantId = randomUUID();
  const token = newToken();
  await db.query('insert into tenant (id, name) values ($1, $2)', [tenantId, 'test']);
  await createKey(db, {
    tenantId,
    name: 'test',
    token,
    permission: 'full_access',
    domainId: null,
  });
  return token;
}

const keysOf = (value: unknown): string[] => Object.keys(value as object).toSorted();
const idsOf = (page: Page): string[] => page.data.map(({ id }) => String(id));

async function send(key: string, subject: string): Promise<string> {
  const { status, body } = await app.call<{ id: string }>('POST', '/emails', {
    body: { from: 'a@mailstead.test', to: 'ok@recipient.test', subject, text: '' },
    key,
  });
  assert.is(status, 200);
  return body.id;
}

async function listPage(key: string, query: string): Promise<Page> {
  const { status, body } = await app.call<Page>('GET', `/emails?${query}`, { key });
  assert.is(status, 200, JSON.stringify(body));
  assert.equal(keysOf(body), ['data', 'has_more', 'object']);
  return body;
}

// ---- sending and reading ---------------------------------------------------------------------

test('an accepted email is answered with its kind and id, at both mounts', async () => {
  for (const path of ['/emails', '/api/emails', '/emails/', '/api/emails/']) {
    const answer = await app.call('POST', path, {
      body: { from: 'a@mailstead.test', to: 'ok@recipient.test', subject: '', text: 'x' },
    });
    assert.is(answer.status, 200);
    assertHeaders(answer);
    assert.equal(keysOf(answer.body), ['id', 'object']);
    assert.is(answer.body['object'], 'email');
    assert.match(String(answer.body['id']), UUID_V7);
    assert.is(answer.headers.get('idempotent-replayed'), null);
  }
});

test('an email shows every field, as it was given', async () => {
  const given = {
    from: 'Ada Lovelace <Ada@MAILSTEAD.test>',
    to: ['ok@recipient.test', '"Doe, J" <j@recipient.test>'],
    cc: 'Ünï <c@münchen.test>',
    bcc: ['hidden@recipient.test'],
    reply_to: 'answers@mailstead.test',
    subject: 'Every field — ✓',
    html: '<p>Hello</p>',
    text: 'Hello',
    headers: { 'X-Entity-Ref-ID': '42', 'List-Unsubscribe': '<https://mailstead.test/u>' },
    tags: [
      { name: 'kind', value: 'test' },
      { name: 'empty', value: '' },
    ],
  };
  const id = await app.send(given);
  await app.untilEvent(id, 'delivered');
  const [root, api] = await Promise.all([
    app.call('GET', `/emails/${id}`),
    app.call('GET', `/api/emails/${id.toUpperCase()}`),
  ]);
  assert.equal(root.body, api.body);
  assertHeaders(root);
  const email = root.body;
  assert.equal(keysOf(email), EMAIL_KEYS.toSorted());
  const { message_id, created_at, provider_last_attempted_at, ...rest } = email;
  assert.equal(rest, {
    ...given,
    object: 'email',
    id,
    cc: [given.cc],
    reply_to: [given.reply_to],
    status: 'delivered',
    last_event: 'delivered',
    scheduled_at: null,
    topic_id: null,
    provider_retry_count: 0,
    provider_next_retry_at: null,
    provider_last_error: null,
    content_removed_at: null,
    provider_dead_lettered_at: null,
  });
  assert.is(message_id, `<${id}@mailstead.test>`);
  assertInstant(created_at);
  assertInstant(provider_last_attempted_at);
});

test('what was not given is null, and text is made from html', async () => {
  const id = await app.send({ text: undefined, html: '<p>Only html</p>' });
  const { body } = await app.call('GET', `/emails/${id}`);
  for (const key of ['cc', 'bcc', 'reply_to', 'headers', 'scheduled_at', 'topic_id']) {
    assert.is(body[key], null, key);
  }
  assert.equal(body['tags'], []);
  assert.is(body['text'], 'Only html');
});

test('a refusal by the peer shows in the fields of the provider', async () => {
  const id = await app.send({ to: 'reject@recipient.test' });
  const email = await app.untilEvent(id, 'bounced');
  assert.equal(keysOf(email['provider_last_error']), ['code', 'message']);
  assertInstant(email['provider_last_attempted_at']);
  assert.is(email['provider_next_retry_at'], null);
});

test('a timeline has events, recipients and what is waited for', async () => {
  const done = await app.send();
  await app.untilEvent(done, 'delivered');
  const delivered = await app.call('GET', `/emails/${done}/timeline`);
  assert.equal(delivered.body, (await app.call('GET', `/api/emails/${done}/timeline`)).body);
  assertHeaders(delivered);
  assert.equal(keysOf(delivered.body), ['email_id', 'events', 'object', 'recipients', 'waiting']);
  assert.is(delivered.body['object'], 'timeline');
  assert.is(delivered.body['email_id'], done);
  assert.is(delivered.body['waiting'], null);
  const events = delivered.body['events'] as Record<string, unknown>[];
  const times = events.map(({ at }) => String(at));
  assert.equal(times, times.toSorted(), 'in order of time');
  for (const event of events) {
    assert.equal(keysOf(event), ['at', 'detail', 'recipient', 'type']);
    assertInstant(event['at']);
  }
  const late = await app.send({ to: 'full@recipient.test' });
  await app.untilEvent(late, 'delivery_delayed');
  const { body } = await app.call('GET', `/emails/${late}/timeline`);
  const waiting = body['waiting'] as Record<string, unknown>;
  assert.equal(keysOf(waiting), ['code', 'next_attempt_at', 'reason', 'recipients', 'remedy']);
  assertInstant(waiting['next_attempt_at']);
  const [recipient] = body['recipients'] as Record<string, unknown>[];
  assert.equal(keysOf(recipient), [
    'attempts',
    'last_code',
    'last_reply',
    'next_attempt_at',
    'recipient',
    'state',
  ]);
  const email = (await app.call('GET', `/emails/${late}`)).body;
  assertInstant(email['provider_next_retry_at']);
});

// ---- lists -----------------------------------------------------------------------------------

test('a list is an envelope of summaries, newest first, 20 by default', async () => {
  const key = await addTenant(pool);
  const empty = await app.call<Page>('GET', '/emails', { key });
  assertHeaders(empty);
  assert.equal(empty.body, { object: 'list', data: [], has_more: false });
  const sent: string[] = [];
  for (let i = 0; i < 21; i += 1) sent.push(await send(key, String(i)));
  await until(
    () => listPage(key, 'limit=21'),
    ({ data }) => data.every((email) => email['last_event'] === 'delivered'),
  );
  const page = await listPage(key, '');
  assert.is(page.object, 'list');
  assert.equal(idsOf(page), sent.toReversed().slice(0, 20));
  assert.is(page.has_more, true);
  assert.equal(keysOf(page.data[0]), SUMMARY_KEYS.toSorted());
  const times = page.data.map((email) => String(email['created_at']));
  assert.equal(times, times.toSorted().toReversed());
  for (const time of times) assertInstant(time);
  assert.is((await listPage(key, 'limit=21')).has_more, false);
  assert.equal(idsOf(await listPage(key, 'limit=1')), sent.slice(-1));
  assert.equal(await listPage(key, ''), (await app.call('GET', '/api/emails', { key })).body);
});

test('a walk by after, and one back by before, repeat and skip nothing while rows are added', async () => {
  const key = await addTenant(pool);
  const first = await Promise.all(Array.from({ length: 30 }, (_, i) => send(key, String(i))));
  const before = first.toSorted();

  const down: string[] = [];
  let query = 'limit=7';
  for (;;) {
    const page = await listPage(key, query);
    assert.equal(idsOf(page), idsOf(page).toSorted().toReversed());
    down.push(...idsOf(page));
    assert.is(page.has_more, down.length < before.length);
    await Promise.all([send(key, 'late'), send(key, 'late')]);
    if (!page.has_more) break;
    query = `limit=7&after=${String(down.at(-1))}`;
  }
  assert.equal(down, before.toReversed());

  const existing = idsOf(await listPage(key, 'limit=100')).toReversed();
  assert.is(existing.length, 40);
  const up: string[] = [String(existing[0])];
  for (let added = 0, more = true; more; added += 1) {
    const page = await listPage(key, `limit=9&before=${String(up.at(-1))}`);
    assert.equal(idsOf(page), idsOf(page).toSorted().toReversed(), 'newest first here, too');
    up.push(...idsOf(page).toReversed());
    more = page.has_more;
    if (added < 3) await send(key, 'later still');
  }
  assert.equal(up.slice(0, existing.length), existing);
  assert.equal(up, up.toSorted());
  assert.is(new Set(up).size, existing.length + 3, 'and the new ones come last, once');
  assert.equal(await listPage(key, `before=${String(up.at(-1))}`), {
    object: 'list',
    data: [],
    has_more: false,
  });
  assert.is((await listPage(key, `limit=5&after=${String(up[5])}`)).has_more, false, 'exactly 5');
});

test('the sink lists and is emptied', async () => {
  await app.untilEvent(await app.send({ subject: 'In the sink' }), 'delivered');
  const list = await app.call<Page>('GET', '/api/sink/messages?limit=1');
  assertHeaders(list);
  assert.equal(keysOf(list.body), ['data', 'has_more', 'object']);
  const [message] = list.body.data;
  assert.equal(keysOf(message), ['id', 'mail_from', 'raw', 'rcpt_to', 'received_at', 'tls']);
  assertInstant(message?.['received_at']);
  const emptied = await app.call('DELETE', '/sink/messages');
  assert.equal(emptied.body, { object: 'list', deleted: true });
  assertHeaders(emptied);
});

// ---- headers ---------------------------------------------------------------------------------

test('every answer names its request and is safe in a browser', async () => {
  for (const path of ['/emails', '/nothing', '/health/live', '/openapi.json', '/docs', '/']) {
    const { headers } = await app.call('GET', path, { headers: { 'x-request-id': 'My-id_1.2' } });
    assert.is(headers.get('x-request-id'), 'My-id_1.2', path);
    assert.is(headers.get('mailstead-version'), '2026-05-06');
    assert.is(headers.get('x-content-type-options'), 'nosniff');
    assert.match(headers.get('content-security-policy') ?? '', /default-src 'none'/);
    assert.match(headers.get('content-security-policy') ?? '', /frame-ancestors 'none'/);
    assert.is(headers.get('referrer-policy'), 'no-referrer');
    assert.is(headers.get('x-powered-by'), null);
  }
  const ids = await Promise.all(
    Array.from({ length: 5 }, async () => {
      const { headers } = await app.call('GET', '/emails');
      return headers.get('x-request-id') ?? '';
    }),
  );
  assert.is(new Set(ids).size, 5);
});

test('the id of a request is in the timeline of the email it brought', async () => {
  const id = await app.send({}, { 'x-request-id': 'trace-me', 'user-agent': 'tester/1' });
  const { body } = await app.call('GET', `/emails/${id}/timeline`);
  const [accepted] = body['events'] as { detail: Record<string, unknown> }[];
  assert.is(accepted?.detail['request_id'], 'trace-me');
  assert.is(accepted?.detail['user_agent'], 'tester/1');
});

// ---- reference, probes -----------------------------------------------------------------------

const openApi = async (): Promise<OpenApi> => {
  const { status, headers, body } = await app.call<OpenApi>('GET', '/openapi.json', { key: null });
  assert.is(status, 200);
  assert.is(headers.get('content-type'), 'application/json; charset=utf-8');
  return body;
};

test('the OpenAPI document holds together and lists every route', async () => {
  const document = await openApi();
  assert.match(document.openapi, /^3\.\d\.\d$/);
  assert.is(document.info.version, '2026-05-06');
  assert.equal(document.servers, [{ url: '/' }], 'wherever the page came from');

  const operations = Object.entries(document.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })),
  );
  const registered: string[] = [];
  const recorder = new Proxy(
    {},
    {
      get: (_, method: string) => (path: string) =>
        registered.push(`${method} ${path.replace(/:(\w+)/g, '{$1}')}`),
    },
  );
  RegisterRoutes(recorder as Parameters<typeof RegisterRoutes>[0]);
  assert.equal(
    operations.map(({ method, path }) => `${method} ${path}`).toSorted(),
    registered.toSorted(),
  );
  const ids = operations.map(({ operation }) => operation.operationId);
  assert.is(new Set(ids).size, ids.length, 'operation ids are unique');
  for (const { path, operation } of operations) {
    assert.equal(operation.security, [{ api_key: [] }], path);
    const named = [...path.matchAll(/\{(\w+)\}/g)].map(([, name]) => name);
    const declared = (operation.parameters ?? []).filter((parameter) => parameter.in === 'path');
    assert.equal(
      declared.map(({ name }) => name),
      named,
    );
    for (const [status, { content }] of Object.entries(operation.responses)) {
      const schema = content?.['application/json']?.schema.$ref ?? `nothing at ${path} ${status}`;
      assert.is(schema.endsWith('/ErrorEnvelope'), Number(status) >= 400, schema);
    }
    const isGood = ['200', '201', '202'].some((status) => operation.responses[status]);
    assert.ok(isGood, path);
    assert.ok(operation.responses['401'], path);
  }
  const references = [
    ...JSON.stringify(document).matchAll(/"\$ref":"#\/components\/schemas\/(\w+)"/g),
  ];
  assert.ok(references.length > 10);
  for (const [, name = ''] of references) assert.ok(document.components.schemas[name], name);
});

test('every path of the document answers at both mounts alike', async () => {
  const id = await app.send();
  await app.untilEvent(id, 'delivered');
  const { paths } = await openApi();
  for (const [path, methods] of Object.entries(paths)) {
    const at = path.replace('{id}', id).replace(/\{\w+\}/g, newId());
    // What is not an email has no such id: the same 404 at both.
    const isThere =
      !path.includes('{') || /^\/emails\/\{id\}(\/(timeline|attachments))?$/.test(path);
    for (const method of Object.keys(methods)) {
      if (method === 'get') {
        const root = await app.call('GET', at);
        const second = await app.call('GET', `/api${at}`);
        assert.is(root.status, isThere ? 200 : 404, path);
        assert.is(second.status, root.status, path);
        assert.equal(Object.keys(second.body), Object.keys(root.body), path);
      }
      for (const mount of [at, `/api${at}`]) {
        const answer = await app.call(method.toUpperCase(), mount, { key: null });
        assertRefused(answer, { status: 401, code: 'missing_api_key' });
      }
    }
  }
});

test('the reference page needs nothing from anybody else', async () => {
  const page = await app.call<string>('GET', '/docs', { key: null });
  assert.is(page.status, 200);
  assert.match(page.headers.get('content-type') ?? '', /^text\/html/);
  const policy = page.headers.get('content-security-policy') ?? '';
  assert.match(policy, /script-src 'self'(;|$)/);
  assert.match(policy, /connect-src 'self'(;|$)/);
  assert.not.match(policy, /https?:|\*|unsafe-eval|script-src[^;]*unsafe/);
  assert.not.match(page.body, /(https?:)?\/\/[a-z]/i, 'no address but our own');
  const scripts = [...page.body.matchAll(/<script[^>]*>/g)];
  assert.ok(scripts.length > 0);
  for (const [script] of scripts) {
    const source = / src="(\/[^"]+)"/.exec(script)?.[1] ?? '';
    const { status, headers } = await app.call('GET', source, { key: null });
    assert.is(status, 200, script);
    assert.match(headers.get('content-type') ?? '', /^text\/javascript/);
  }
  assert.match(page.body, /spec-url="\/openapi\.json"/);
  const start = await app.call('GET', '/', { key: null });
  assert.is(start.status, 302);
  assert.is(start.headers.get('location'), '/docs');
});

test('probes answer without a key', async () => {
  const live = await app.call('GET', '/health/live', { key: null });
  assert.is(live.status, 200);
  assert.equal(live.body, { status: 'live' });
  const ready = await app.call('GET', '/health/ready', { key: null });
  assert.is(ready.status, 200);
  assert.equal(ready.body, { status: 'ready', missing: [], degraded: [] });
});

// ---- rate ------------------------------------------------------------------------------------

test('requests above the limit are refused, both mounts together, each tenant by itself', async () => {
  const slow = await startApp({ MAILSTEAD_RATE_LIMIT: '5/1m' });
  const db = new Pool({ connectionString: slow.databaseUrl, max: 1 });
  const otherKey = await addTenant(db);
  await db.end();
  const left = (answer: Answer): string | null => answer.headers.get('ratelimit-remaining');
  for (const [index, path] of ['', '/api', '', '/api', ''].entries()) {
    const answer = await slow.call('GET', `${path}/emails`);
    assert.is(answer.status, 200);
    assertHeaders(answer);
    assert.is(answer.headers.get('ratelimit-limit'), '5');
    assert.is(answer.headers.get('ratelimit-policy'), '5;w=60');
    assert.is(left(answer), String(4 - index));
    assert.is(answer.headers.get('retry-after'), null);
  }
  for (const [method, path] of [
    ['GET', '/emails'],
    ['GET', '/api/emails'],
    ['POST', '/emails'],
  ] as const) {
    const answer = await slow.call(method, path);
    assertRefused(answer, { status: 429, code: 'rate_limit_exceeded', says: /5/ });
    assert.is(left(answer), '0');
    const seconds = Number(answer.headers.get('retry-after'));
    assert.ok(seconds >= 1 && seconds <= 60, `${seconds} s`);
    assert.is(Number(answer.headers.get('ratelimit-reset')), seconds);
  }
  const other = await slow.call('GET', '/emails', { key: otherKey });
  assert.is(other.status, 200);
  assert.is(left(other), '4');
  for (const key of ['re_wrong', null]) {
    const answers = [];
    for (let count = 0; count < 3; count += 1)
      answers.push(await slow.call('GET', '/emails', { key }));
    assert.equal(
      answers.map(({ status }) => status),
      key === null ? [401, 401, 429] : [401, 401, 401],
      'strangers of one address share a budget',
    );
  }
  assert.is((await slow.call('GET', '/health/live')).status, 200, 'probes are not counted');
  await slow.stop();
});

test('the budget comes back after its window', async () => {
  const limiter = createRateLimiter({ requests: 2, windowMs: 500 });
  const take = () => limiter.take('tenant');
  const refusals = [await take(), await take(), await take()].map(({ refusal }) => refusal?.code);
  assert.equal(refusals, [undefined, undefined, 'rate_limit_exceeded']);
  await until(take, ({ refusal }) => refusal === null);
});

test('nothing was logged', () => {
  assert.equal(app.complaints, []);
});

test.run();
