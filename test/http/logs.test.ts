// The log of API requests over HTTP: which requests are in it, what it keeps of them, its filters, and that no
// secret, no content and no other tenant gets into it.
import { randomUUID } from 'node:crypto';
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { assertHeaders, assertInstant, assertRefused } from './envelope.ts';

interface Log {
  id: string;
  created_at: string;
  endpoint: string;
  method: string;
  response_status: number;
  user_agent: string | null;
  api_key_id: string;
  request_id: string;
  duration_ms: number;
}
interface Entry extends Log {
  object: string;
  request_body: Record<string, unknown> | null;
  response_body: Record<string, unknown> | null;
  metadata: { emailId?: string; emailIds?: string[] };
}
interface Page {
  object: string;
  data: Log[];
  has_more: boolean;
}

const SUMMARY = [
  'api_key_id',
  'created_at',
  'duration_ms',
  'endpoint',
  'id',
  'method',
  'request_id',
  'response_status',
  'user_agent',
];

const test = suite('logs');
let app: App;
let pool: Pool;

test.before(async () => {
  app = await startApp();
  pool = new Pool({ connectionString: app.databaseUrl, max: 2 });
});
test.after(async () => {
  await pool.end();
  await app.stop();
});

/** Calls with a request id of its own and reads the entry that it left. */
async function logged(
  method: string,
  path: string,
  options: { body?: unknown; key?: string; headers?: Record<string, string> } = {},
): Promise<Entry> {
  const requestId = randomUUID();
  const headers = { 'x-request-id': requestId, ...options.headers };
  await app.call(method, path, { ...options, headers });
  return entryOf(requestId, options.key);
}
async function entryOf(requestId: string, key = app.key): Promise<Entry> {
  const { id } = (await until(
    async () => (await list('', key)).data.find((log) => log.request_id === requestId),
    (log) => log !== undefined,
  ))!;
  return (await app.call<Entry>('GET', `/logs/${id}`, { key })).body;
}
async function list(query = '', key = app.key): Promise<Page> {
  const answer = await app.call<Page>('GET', `/logs?limit=100${query}`, { key });
  assert.is(answer.status, 200, JSON.stringify(answer.body));
  return answer.body;
}
const send = (more: Record<string, unknown> = {}): Record<string, unknown> => ({
  from: 'a@mailstead.test',
  to: 'ok@recipient.test',
  subject: 'logged',
  text: 'x',
  ...more,
});

test('a request is logged with what was said, at both mounts', async () => {
  for (const path of ['/emails', '/api/emails', '/api/emails/']) {
    const headers = { 'user-agent': 'resend-node:9.9.9' };
    const log = await logged('POST', path, { body: send({ tags: [] }), headers });
    const { request_body, response_body, metadata, object, ...summary } = log;
    assert.equal(Object.keys(summary).toSorted(), SUMMARY);
    assert.is(object, 'log');
    assert.equal(
      [log.method, log.endpoint, log.response_status, log.user_agent],
      ['POST', '/emails', 200, 'resend-node:9.9.9'],
    );
    assert.ok(log.duration_ms >= 0);
    assertInstant(log.created_at);
    assert.equal(request_body, send({ tags: [] }));
    assert.is(response_body?.['object'], 'email');
    assert.equal(metadata, { emailId: response_body?.['id'] });
    const answer = await app.call<Page>('GET', '/api/logs?limit=100');
    assertHeaders(answer);
    assert.equal(Object.keys(answer.body).toSorted(), ['data', 'has_more', 'object']);
    assert.equal(
      answer.body.data.find(({ id }) => id === log.id),
      summary,
    );
  }
});

test('refusals after the key are logged, whoever wrote them', async () => {
  const cases: readonly (readonly [string, string, unknown, number, string])[] = [
    ['POST', '/emails', {}, 422, '/emails'],
    ['POST', '/emails', '{', 400, '/emails'],
    ['GET', `/emails/${randomUUID()}`, undefined, 404, '/emails/'],
    ['PUT', '/emails', {}, 405, '/emails'],
    ['GET', '/emails?limit=0', undefined, 422, '/emails'],
  ];
  for (const [method, path, body, status, endpoint] of cases) {
    const log = await logged(method, path, { body });
    assert.equal([log.method, log.response_status], [method, status]);
    assert.ok(log.endpoint.startsWith(endpoint) && !log.endpoint.includes('?'), log.endpoint);
    assert.is(log.response_body?.['statusCode'], status);
    assert.equal(log.metadata, {});
  }
});

test('who is not known, probes and pages are not logged', async () => {
  const before = await countAll();
  const requestId = randomUUID();
  const headers = { 'x-request-id': requestId };
  for (const [path, key] of [
    ['/emails', null],
    ['/emails', 're_wrong'],
    ['/health/live', app.key],
    ['/docs', app.key],
    ['/openapi.json', app.key],
    ['/nowhere', app.key],
  ] as const) {
    await app.call('GET', path, { key, headers });
  }
  await logged('GET', '/api-keys'); // what came before it is written by now
  const { rows } = await pool.query('select 1 from request_log where request_id = $1', [requestId]);
  assert.is(rows.length, 0);
  assert.ok((await countAll()) > before);
});
async function countAll(): Promise<number> {
  const { rows } = await pool.query<{ count: number }>(
    'select count(*)::int as count from request_log',
  );
  return rows[0]!.count;
}

test('no token, no secret and no content gets into the log', async () => {
  const made = await app.call<{ id: string; token: string }>('POST', '/api-keys', {
    body: { name: 'to be hidden' },
  });
  const small = Buffer.from('a private matter of mine').toString('base64');
  const large = Buffer.alloc(300_000, 'confidential ').toString('base64');
  const key = made.body.token;
  const log = await logged('POST', '/emails', {
    key,
    body: send({
      text: `my key is ${app.key}`,
      headers: { 'X-Token': 'hunter2hunter2' },
      attachments: [
        { filename: 'small.txt', content: small },
        { filename: 'large.txt', content: large },
      ],
    }),
  });
  assert.is(log.response_status, 200);
  const attachments = log.request_body?.['attachments'] as Record<string, unknown>[];
  assert.equal(attachments, [
    { filename: 'small.txt', content: '[content, about 24 bytes]' },
    { filename: 'large.txt', content: '[content, about 300000 bytes]' },
  ]);
  await logged('DELETE', `/api-keys/${made.body.id}`, { body: { password: 'swordfish' } });
  const creation = (await list('&search=api-keys&method=POST')).data[0]!;
  const { body } = await app.call<Entry>('GET', `/logs/${creation.id}`);
  assert.is(body.response_body?.['token'], '[redacted]');
  assert.is(body.response_body?.['id'], made.body.id);
  const secrets = [
    key,
    key.slice(12),
    app.key.slice(12),
    small,
    large.slice(0, 60),
    large.slice(-60),
    'hunter2',
    'swordfish',
    'Bearer',
    'spooled ',
  ];
  for (const table of ['request_log', 'request_log_body', 'request_log_tag']) {
    for (const secret of secrets) {
      const found = await pool.query(`select 1 from ${table} t where strpos(t::text, $1) > 0`, [
        secret,
      ]);
      assert.is(found.rowCount, 0, `${table} holds ${secret}`);
    }
  }
});

test('a large body is shortened', async () => {
  const log = await logged('POST', '/emails', { body: send({ html: 'x'.repeat(200_000) }) });
  assert.is(log.request_body?.['subject'], 'logged');
  assert.match(String(log.request_body?.['html']), /^x{1000}… \[200000 characters\]$/);
});

test('filters', async () => {
  const { key } = await secondTenant(app);
  const made = await app.call<{ id: string; token: string }>('POST', '/api-keys', {
    body: { name: 'second' },
    key,
  });
  const agent = (name: string): Record<string, string> => ({ 'user-agent': name });
  const a = await logged('GET', '/emails', { key, headers: agent('Agent_One/1') });
  const b = await logged('POST', '/emails', { key, body: {}, headers: agent('agent-two') });
  const c = await logged('GET', `/emails/${randomUUID()}`, { key: made.body.token });
  const ids = async (query: string): Promise<string[]> => {
    const found = (await list(`&${query}`, key)).data.map(({ id }) => id);
    return [a.id, b.id, c.id].filter((id) => found.includes(id));
  };
  const all = [a.id, b.id, c.id];
  const day = a.created_at.slice(0, 10);
  const cases: readonly (readonly [string, readonly string[]])[] = [
    ['status=422', [b.id]],
    ['status=200,404', [a.id, c.id]],
    ['status=4xx', [b.id, c.id]],
    ['status=2XX,%20422', [a.id, b.id]],
    ['status=500', []],
    ['method=POST', [b.id]],
    ['method=get', [a.id, c.id]],
    [`api_key_id=${c.api_key_id}`, [c.id]],
    [`api_key_id=${c.api_key_id.toUpperCase()}`, [c.id]],
    [`api_key_id=${randomUUID()}`, []],
    ['search=AGENT', [a.id, b.id]],
    ['search=agent_', [a.id]],
    ['search=%25', []],
    ['search=emails%2F', [c.id]],
    [`start_date=${day}&end_date=2099-01-01`, all],
    [`start_date=${b.created_at}`, [b.id, c.id]],
    [`end_date=${b.created_at}`, [a.id, b.id]],
    [`start_date=${b.created_at}&end_date=${b.created_at}`, [b.id]],
    [`start_date=${b.created_at.slice(0, -1)}`, [b.id, c.id]],
    [`start_date=${b.created_at.slice(0, -1)}+00:00`, [b.id, c.id]],
    ['start_date=2099-01-01', []],
    ['end_date=2001-01-01', []],
    [`status=4xx&method=GET&search=emails&api_key_id=${c.api_key_id}`, [c.id]],
  ];
  for (const [query, expected] of cases) assert.equal(await ids(query), expected, query);
});

test('tags: only requests about own emails that carry them', async () => {
  const tagged = await logged('POST', '/emails', {
    body: send({
      tags: [
        { name: 'kind', value: 'invoice' },
        { name: 'empty', value: '' },
      ],
    }),
  });
  const emailId = tagged.metadata.emailId!;
  const read = await logged('GET', `/emails/${emailId}`);
  const other = await logged('POST', '/emails', {
    body: send({ tags: [{ name: 'kind', value: 'reminder' }] }),
  });
  const { key } = await secondTenant(app);
  const foreign = await logged('GET', `/emails/${emailId}`, { key });
  assert.equal(foreign.metadata, {});
  assert.equal(read.metadata, { emailId });
  const cases: readonly (readonly [string, readonly string[]])[] = [
    ['tag_name=kind', [tagged.id, read.id, other.id]],
    ['tagName=kind', [tagged.id, read.id, other.id]],
    ['tag_name=kind&tag_value=invoice', [tagged.id, read.id]],
    ['tagName=kind&tagValue=reminder', [other.id]],
    ['tag_name=kind&tagName=kind&tag_value=invoice&tagValue=invoice', [tagged.id, read.id]],
    ['tag_name=kind&tag_value=', []],
    ['tag_name=empty&tag_value=', [tagged.id, read.id]],
    ['tag_name=KIND', []],
    ['tag_name=kin', []],
    ['tag_name=kind&method=GET', [read.id]],
  ];
  for (const [query, expected] of cases) {
    const found = (await list(`&${query}`)).data.map(({ id }) => id);
    assert.equal(found.toReversed(), expected, query);
    assert.equal((await list(`&${query}`, key)).data, [], 'nobody else sees them');
  }
});

test('a batch is linked to all its emails', async () => {
  const tags = [{ name: 'batch', value: 'b1' }];
  const log = await logged('POST', '/emails/batch', { body: [send({ tags }), send()] });
  assert.is(log.response_status, 200);
  assert.is(log.metadata.emailIds?.length, 2);
  const found = (await list('&tag_name=batch')).data.map(({ id }) => id);
  assert.equal(found, [log.id]);
});

test('what is wrong with a query is said', async () => {
  const long = 'x'.repeat(257);
  const cases: readonly (readonly [string, readonly string[]])[] = [
    ['status=abc', ['status']],
    ['status=', ['status']],
    ['status=600', ['status']],
    ['status=200,', ['status']],
    [`status=${'200,'.repeat(30)}200`, ['status']],
    ['method=FETCH', ['method']],
    ['method=', ['method']],
    ['api_key_id=1', ['api_key_id']],
    ['start_date=yesterday', ['start_date']],
    ['start_date=2026-02-31', ['start_date']],
    ['end_date=2026-13-01', ['end_date']],
    ['end_date=1700000000', ['end_date']],
    ['start_date=2026-05-07&end_date=2026-05-06', ['end_date']],
    ['search=', ['search']],
    ['search=%00', ['search']],
    [`search=${'x'.repeat(201)}`, ['search']],
    ['tag_name=', ['tag_name']],
    ['tagName=a%20b', ['tagName']],
    ['tag_name=%C3%A4', ['tag_name']],
    [`tag_name=${long}`, ['tag_name']],
    [`tag_name=a&tag_value=${long}`, ['tag_value']],
    ['tag_name=a&tagValue=%20', ['tagValue']],
    ['tag_value=x', ['tag_name']],
    ['tagValue=', ['tag_name']],
    ['tag_name=a&tagName=b', ['tagName']],
    ['tag_name=a&tag_value=b&tagValue=c', ['tagValue']],
    ['status=x&method=y', ['status', 'method']],
    ['limit=0', ['limit']],
    ['after=x', ['after']],
    [`after=${randomUUID()}`, ['after']],
    ['method=GET&method=POST', ['method']],
  ];
  for (const [query, paths] of cases) {
    const answer = await app.call('GET', `/logs?${query}`);
    assertRefused(answer, { status: 422, code: 'validation_error', paths });
  }
});

test('another tenant sees nothing of it', async () => {
  const mine = await logged('GET', '/api-keys');
  const { key } = await secondTenant(app);
  assert.equal((await list('', key)).data.length, 0);
  const foreign = await app.call('GET', `/logs/${mine.id}`, { key });
  const missing = await app.call('GET', `/logs/${randomUUID()}`, { key });
  assert.equal([foreign.status, missing.status], [404, 404]);
  assert.equal(foreign.body, missing.body);
  assertRefused(await app.call('GET', `/logs?after=${mine.id}`, { key }), {
    status: 422,
    code: 'validation_error',
    paths: ['after'],
  });
  assertRefused(await app.call('GET', '/logs/nonsense'), {
    status: 422,
    code: 'invalid_parameter',
    paths: ['id'],
  });
  assert.equal((await list(`&api_key_id=${mine.api_key_id}`, key)).data, []);
  assert.is((await app.call('GET', `/api/logs/${mine.id.toUpperCase()}`)).status, 200);
});

test('a list holds every request of this process that was answered before', async () => {
  const { key } = await secondTenant(app);
  for (let turn = 1; turn <= 20; turn += 1) {
    await app.call('GET', '/emails', { key });
    assert.is((await list('&search=emails', key)).data.length, turn);
  }
});

test('pages neither repeat nor skip while requests go on', async () => {
  const { key } = await secondTenant(app);
  for (let count = 0; count < 9; count += 1) await app.call('GET', '/api-keys', { key });
  const last = await logged('GET', '/emails', { key });
  const old = (await list('&search=api-keys', key)).data.map(({ id }) => id);
  assert.is(old.length, 9);
  const walk = async (direction: 'after' | 'before', from: string): Promise<string[]> => {
    const seen: string[] = [];
    let cursor = from;
    for (let turn = 0; turn < 10; turn += 1) {
      const query = `limit=2&search=api-keys&${direction}=${cursor}`;
      const { body } = await app.call<Page>('GET', `/logs?${query}`, { key });
      const ids = body.data.map(({ id }) => id);
      if (direction === 'after') seen.push(...ids);
      else seen.unshift(...ids);
      if (!body.has_more) return seen;
      cursor = direction === 'after' ? ids.at(-1)! : ids[0]!;
    }
    throw new Error('no end');
  };
  assert.equal(await walk('after', last.id), old);
  assert.equal(await walk('before', old.at(-1)!), old.slice(0, -1));
});

test('a stop writes what was just asked', async () => {
  const short = await startApp();
  const requestId = randomUUID();
  await short.call('GET', '/emails', { headers: { 'x-request-id': requestId } });
  await short.appliance.stop();
  const rows = await onDatabase(short, async (db) => {
    const found = await db.query(
      `select l.request_id, k.last_used_at is not null as is_used
       from request_log l join api_key k on k.tenant_id = l.tenant_id and k.id = l.api_key_id`,
    );
    return found.rows as unknown[];
  });
  await short.stop();
  assert.equal(rows, [{ request_id: requestId, is_used: true }]);
});

test('nothing was complained about', () => {
  assert.equal(app.complaints, []);
});

test.run();
