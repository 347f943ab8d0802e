// API keys over HTTP: what each endpoint answers, what a key may do, and that a key that is revoked, or whose
// domain is gone, is refused at once in every process.
import { randomUUID } from 'node:crypto';
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createAuthenticator } from '../../src/access/keys.ts';
import { newId } from '../../src/store/id.ts';
import { startApp, until, type App } from '../support/app.ts';
import { secondTenant } from '../support/second-tenant.ts';
import { assertHeaders, assertInstant, assertRefused } from './envelope.ts';

interface Key {
  id: string;
  name: string;
  token: string;
  permission: string;
  domain_id: string | null;
  created_at: string;
  createdAt: string;
  last_used_at: string | null;
  prefix: string;
}
interface Page {
  object: string;
  data: Key[];
  has_more: boolean;
}

const TOKEN = /^re_[A-Za-z0-9]{8}_[A-Za-z0-9]{24}$/;
const RECORD = [
  'created_at',
  'createdAt',
  'domain_id',
  'id',
  'last_used_at',
  'name',
  'permission',
  'prefix',
].toSorted();

const test = suite('API keys');
let app: App;
let pool: Pool;
let other: { tenantId: string; key: string };
let tenantId = '';

test.before(async () => {
  app = await startApp();
  pool = new Pool({ connectionString: app.databaseUrl, max: 2 });
  other = await secondTenant(app);
  const { rows } = await pool.query<{ id: string }>('select id from tenant order by id limit 1');
  tenantId = rows[0]!.id;
});
test.after(async () => {
  await pool.end();
  await app.stop();
});

async function make(body: Record<string, unknown> = {}, key = app.key): Promise<Key> {
  const answer = await app.call<Key>('POST', '/api-keys', { body: { name: 'test', ...body }, key });
  assert.is(answer.status, 201, JSON.stringify(answer.body));
  return answer.body;
}
async function list(query = '', key = app.key): Promise<Page> {
  const { status, body } = await app.call<Page>('GET', `/api-keys?limit=100${query}`, { key });
  assert.is(status, 200);
  return body;
}
async function addDomain(owner: string): Promise<string> {
  const id = newId();
  await pool.query(
    `insert into sending_domain (tenant_id, id, name, status) values ($1, $2, $3, 'verified')`,
    [owner, id, `${id}.test`],
  );
  return id;
}

test('a new key is answered with its token, works at once, and is listed without it', async () => {
  for (const mount of ['', '/api']) {
    const answer = await app.call<Key>('POST', `${mount}/api-keys`, { body: { name: 'Ünï 1' } });
    assert.is(answer.status, 201);
    assertHeaders(answer);
    const { object, token, ...key } = answer.body as Key & { object: string };
    assert.is(object, 'api_key');
    assert.match(token, TOKEN);
    assert.equal(Object.keys(key).toSorted(), RECORD);
    assertInstant(key.created_at);
    assert.is(key.createdAt, key.created_at);
    assert.is(key.prefix, token.slice(0, 11));
    assert.equal(
      [key.name, key.permission, key.domain_id, key.last_used_at],
      ['Ünï 1', 'full_access', null, null],
    );
    const page = await app.call<Page>('GET', `${mount}/api-keys`, { key: token });
    assert.is(page.status, 200);
    assert.equal(Object.keys(page.body).toSorted(), ['data', 'has_more', 'object']);
    assert.is(page.body.object, 'list');
    assert.equal(
      page.body.data.find(({ id }) => id === key.id),
      key,
    );
    assert.not.ok(JSON.stringify(page.body).includes(token));
  }
});

test('the token is nowhere in the database', async () => {
  const { token } = await make({ name: 'secret' });
  const secret = token.slice(12);
  const { rows } = await pool.query<{ name: string }>(
    `select relname as name from pg_class where relkind = 'r' and relnamespace = 'public'::regnamespace`,
  );
  assert.ok(rows.length > 10);
  for (const { name } of rows) {
    const found = await pool.query(
      `select 1 from "${name}" t where t::text like '%' || $1 || '%' limit 1`,
      [secret],
    );
    assert.is(found.rowCount, 0, name);
  }
});

test('what is wrong with a new key is said', async () => {
  const refused: readonly (readonly [unknown, string, readonly string[]])[] = [
    [{}, 'missing_required_field', ['name']],
    [undefined, 'missing_required_field', ['name']],
    [[], 'validation_error', ['body']],
    ['"text"', 'validation_error', ['body']],
    [{ name: '' }, 'validation_error', ['name']],
    [{ name: '  ' }, 'validation_error', ['name']],
    [{ name: 'x'.repeat(51) }, 'validation_error', ['name']],
    [{ name: 'a\u0000b' }, 'validation_error', ['name']],
    [{ name: 'a\nb' }, 'validation_error', ['name']],
    [{ name: 5 }, 'validation_error', ['name']],
    [{ name: null }, 'validation_error', ['name']],
    [{ name: 'x', permission: 'admin' }, 'validation_error', ['permission']],
    [{ name: 'x', permission: null }, 'validation_error', ['permission']],
    [{ name: 'x', domain_id: randomUUID() }, 'validation_error', ['domain_id']],
    [
      { name: '', permission: 'sending_access', domain_id: 'no' },
      'validation_error',
      ['name', 'domain_id'],
    ],
    [
      { name: 'x', permission: 'sending_access', domain_id: randomUUID() },
      'validation_error',
      ['domain_id'],
    ],
  ];
  const before = (await list()).data.length;
  for (const [body, code, paths] of refused) {
    const answer = await app.call('POST', '/api-keys', { body });
    assertRefused(answer, { status: 422, code, paths });
  }
  assertRefused(await app.call('POST', '/api-keys', { body: '{' }), {
    status: 400,
    code: 'invalid_json',
  });
  assert.is((await list()).data.length, before);
  assert.is([...(await make({ name: '😀'.repeat(50) })).name].length, 50);
});

test("another tenant's domain is as good as none", async () => {
  const foreign = await addDomain(other.tenantId);
  const say = async (domainId: string): Promise<unknown> =>
    (
      await app.call('POST', '/api-keys', {
        body: { name: 'x', permission: 'sending_access', domain_id: domainId },
      })
    ).body;
  assert.equal(await say(foreign), await say(randomUUID()));
});

test('a sending key sends and does nothing else', async () => {
  const domain = await addDomain(tenantId);
  const key = await make({ permission: 'sending_access' });
  const bound = await make({ permission: 'sending_access', domain_id: domain.toUpperCase() });
  assert.equal([key.permission, key.domain_id], ['sending_access', null]);
  assert.equal([bound.permission, bound.domain_id], ['sending_access', domain]);
  const { token } = key;
  const email = { from: 'a@mailstead.test', to: 'ok@recipient.test', subject: '', text: 'x' };
  assert.is((await app.call('POST', '/emails', { body: email, key: token })).status, 200);
  for (const [method, path] of [
    ['GET', '/emails'],
    ['GET', '/api/emails'],
    ['GET', '/api-keys'],
    ['POST', '/api-keys'],
    ['DELETE', `/api-keys/${key.id}`],
    ['PATCH', `/api-keys/${key.id}`],
    ['GET', '/logs'],
    ['GET', `/logs/${key.id}`],
  ] as const) {
    const answer = await app.call(method, path, {
      key: token,
      ...(method === 'GET' ? {} : { body: { name: 'mine' } }),
    });
    assertRefused(answer, { status: 401, code: 'restricted_api_key' });
  }
  const elsewhere = await app.call('POST', '/emails', { body: email, key: bound.token });
  assert.ok(elsewhere.status >= 400, 'bound to another domain');
});

test('a key is renamed', async () => {
  const { id } = await make();
  for (const [name, shown] of [
    ['first', id],
    ['second', id.toUpperCase()],
  ] as const) {
    const answer = await app.call('PATCH', `/api-keys/${shown}`, { body: { name } });
    assert.is(answer.status, 200);
    assertHeaders(answer);
    assert.equal(answer.body, { object: 'api_key', id });
    assert.is((await list()).data.find((key) => key.id === id)?.name, name);
  }
  for (const [body, code] of [
    [{}, 'missing_required_field'],
    [{ name: '' }, 'validation_error'],
    [{ name: 'x'.repeat(51) }, 'validation_error'],
  ] as const) {
    const answer = await app.call('PATCH', `/api-keys/${id}`, { body });
    assertRefused(answer, { status: 422, code, paths: ['name'] });
  }
});

test('a revoked key is refused at once, in this process and in others, and is gone', async () => {
  const elsewhere = createAuthenticator(pool);
  const { id, token } = await make();
  assert.is((await elsewhere(token))?.keyId, id);
  const answer = await app.call('DELETE', `/api/api-keys/${id}`, { key: token });
  assert.is(answer.status, 200, 'a key may revoke itself');
  assertHeaders(answer);
  assert.equal(answer.body, { object: 'api_key', id, deleted: true });
  assert.is(await elsewhere(token), null);
  assertRefused(await app.call('GET', '/emails', { key: token }), {
    status: 401,
    code: 'invalid_api_key',
  });
  assert.not.ok((await list()).data.some((key) => key.id === id));
  for (const [method, body] of [
    ['DELETE', undefined],
    ['PATCH', { name: 'x' }],
  ] as const) {
    const again = await app.call(method, `/api-keys/${id}`, { body });
    assert.is(again.status, 404);
    assert.is(again.body['code'], 'not_found');
  }
});

test('a key bound to a domain ends with it', async () => {
  const elsewhere = createAuthenticator(pool);
  const domain = await addDomain(tenantId);
  const { token } = await make({ permission: 'sending_access', domain_id: domain });
  assert.is((await elsewhere(token))?.domainId, domain);
  await pool.query('delete from sending_domain where tenant_id = $1 and id = $2', [
    tenantId,
    domain,
  ]);
  assert.is(await elsewhere(token), null);
  const answer = await app.call('POST', '/emails', { body: {}, key: token });
  assertRefused(answer, { status: 401, code: 'invalid_api_key' });
});

test("another tenant's keys cannot be seen, renamed or revoked", async () => {
  const mine = await make({ name: 'mine' });
  const theirs = await list('', other.key);
  assert.is(theirs.data.length, 1);
  for (const [method, body] of [
    ['PATCH', { name: 'taken' }],
    ['DELETE', undefined],
  ] as const) {
    const foreign = await app.call(method, `/api-keys/${mine.id}`, { body, key: other.key });
    const missing = await app.call(method, `/api-keys/${randomUUID()}`, { body, key: other.key });
    assert.is(foreign.status, 404);
    assert.equal(foreign.body, missing.body);
    const malformed = await app.call(method, '/api-keys/nonsense', { body });
    assertRefused(malformed, { status: 422, code: 'invalid_parameter', paths: ['id'] });
  }
  assert.is((await list()).data.find(({ id }) => id === mine.id)?.name, 'mine');
  const cursor = await app.call('GET', `/api-keys?after=${mine.id}`, { key: other.key });
  assertRefused(cursor, { status: 422, code: 'validation_error', paths: ['after'] });
});

test('pages neither repeat nor skip, also when the key at the cursor is revoked', async () => {
  const { key } = await secondTenant(app);
  for (let count = 0; count < 5; count += 1) await make({ name: `p${count}` }, key);
  const all = (await list('', key)).data.map(({ id }) => id);
  assert.is(all.length, 6);
  assert.equal(all, all.toSorted().toReversed(), 'newest first');
  const page = async (query: string): Promise<[string[], boolean]> => {
    const { body } = await app.call<Page>('GET', `/api-keys?limit=2&${query}`, { key });
    return [body.data.map(({ id }) => id), body.has_more];
  };
  assert.equal(await page(''), [all.slice(0, 2), true]);
  assert.is((await app.call('DELETE', `/api-keys/${all[1]!}`, { key })).status, 200);
  assert.equal(await page(`after=${all[1]!}`), [all.slice(2, 4), true]);
  assert.equal(await page(`after=${all[3]!}`), [all.slice(4), false]);
  assert.equal(await page(`before=${all[3]!}`), [[all[0], all[2]], false]);
  for (const query of ['limit=0', 'limit=101', 'after=x', `after=${all[0]!}&before=${all[2]!}`]) {
    const answer = await app.call('GET', `/api-keys?${query}`, { key });
    assert.is(answer.status, 422, query);
  }
});

test('when a key was last used shows up', async () => {
  const { id, token } = await make();
  const read = async (): Promise<string | null | undefined> =>
    (await list()).data.find((key) => key.id === id)?.last_used_at;
  assert.is(await read(), null);
  await app.call('GET', '/emails', { key: token });
  assertInstant(await until(read, (at) => typeof at === 'string'));
});

test('nothing was complained about', () => {
  assert.equal(app.complaints, []);
});

test.run();
