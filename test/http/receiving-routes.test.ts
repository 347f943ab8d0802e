// Receiving routes over the API: made, read, changed where they may be, deleted.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { ROUTES_PER_DOMAIN_MAX } from '../../src/receiving/routes.ts';
import { startApp, type App } from '../support/app.ts';
import { assertPages, postNew, ROUTES_PATH, type Page } from '../support/forwarding-rules.ts';
import { receivingDomain } from '../support/receiving-domain.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { assertHeaders, assertInstant, assertRefused } from './envelope.ts';

type Fields = Record<string, unknown>;

const PATH = ROUTES_PATH;
const UUID_V7 = /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
const UNKNOWN_ID = '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70';
const notFound = { status: 404, code: 'not_found', says: /^Receiving route not found$/ };
const noDomain = { status: 404, code: 'not_found', says: /^Domain not found$/ };

const test = suite<{ domain: string; domainId: string }>('receiving routes');
let app: App;
let stranger: string;
let count = 0;
test.before(async () => {
  app = await startApp();
  ({ key: stranger } = await secondTenant(app));
});
test.before.each(async (context) => {
  context.domain = `d${(count += 1)}.test`;
  context.domainId = await receivingDomain(app, context.domain);
});
test.after(() => app.stop());

const create = (body: Fields, key = app.key): Promise<Fields> => postNew(app, PATH, { body, key });

test('each type of route is made and read back whole, at both mounts', async (context) => {
  const { domain, domainId } = context;
  const given: readonly (readonly [Fields, Fields])[] = [
    [
      { type: 'exact', local_part: 'Ada+News' },
      { local_part: 'Ada+News', target_local_part: 'Ada+News' },
    ],
    [{ type: 'exact', local_part: 'b', target_local_part: 'Team' }, {}],
    [{ type: 'alias', local_part: 'jürgen', target_local_part: 'j' }, {}],
    [
      { type: 'catch_all', target_local_part: 'rest' },
      { local_part: null, target_local_part: 'rest' },
    ],
  ];
  for (const [fields, expected] of given) {
    const route = await create({ domain_id: domainId.toUpperCase(), ...fields });
    const { id, created_at, updated_at, ...rest } = route;
    assert.match(String(id), UUID_V7);
    assertInstant(created_at);
    assert.is(updated_at, created_at);
    const target = String({ ...fields, ...expected }['target_local_part']);
    assert.equal(rest, {
      object: 'receiving_route',
      domain_id: domainId,
      domain,
      ...fields,
      ...expected,
      target_address: `${target}@${domain}`,
    });
    for (const path of [`${PATH}/${String(id)}`, `/api${PATH}/${String(id).toUpperCase()}`]) {
      const answer = await app.call('GET', path);
      assert.is(answer.status, 200);
      assertHeaders(answer);
      assert.equal(answer.body, route);
    }
  }
  const nulls = { domain_id: domainId, local_part: null, target_local_part: null };
  assertRefused(await app.call('POST', PATH, { body: { ...nulls, type: 'exact' } }), {
    status: 422,
    code: 'missing_required_field',
    paths: ['local_part'],
  });
});

test('a wrong field is refused by name', async ({ domainId }) => {
  const ok = { domain_id: domainId, type: 'alias', local_part: 'a', target_local_part: 'b' };
  const cases: readonly (readonly [Fields, string, readonly string[]])[] = [
    [{ domain_id: undefined }, 'missing_required_field', ['domain_id']],
    [{ type: undefined }, 'missing_required_field', ['type']],
    [{ type: 'regex' }, 'validation_error', ['type']],
    [{ domain_id: 'x' }, 'validation_error', ['domain_id']],
    [{ domain_id: 5 }, 'validation_error', ['domain_id']],
    [{ local_part: undefined }, 'missing_required_field', ['local_part']],
    [{ target_local_part: undefined }, 'missing_required_field', ['target_local_part']],
    [{ target_local_part: null }, 'missing_required_field', ['target_local_part']],
    [{ type: 'catch_all', local_part: 'a' }, 'validation_error', ['local_part']],
    [
      { type: 'catch_all', local_part: undefined, target_local_part: undefined },
      'missing_required_field',
      ['target_local_part'],
    ],
    [{ local_part: '' }, 'validation_error', ['local_part']],
    [{ local_part: ' a' }, 'validation_error', ['local_part']],
    [{ local_part: 'a b' }, 'validation_error', ['local_part']],
    [{ local_part: 'a..b' }, 'validation_error', ['local_part']],
    [{ local_part: '.a' }, 'validation_error', ['local_part']],
    [{ local_part: 'a\r\nb' }, 'validation_error', ['local_part']],
    [{ local_part: 'a\0b' }, 'validation_error', ['local_part']],
    [{ local_part: '\ud800' }, 'validation_error', ['local_part']],
    [{ local_part: 'a@b.test' }, 'validation_error', ['local_part']],
    [{ local_part: 'Ada <a' }, 'validation_error', ['local_part']],
    [{ local_part: 'a@b.test>, <c' }, 'validation_error', ['local_part']],
    [{ local_part: 'l'.repeat(65) }, 'validation_error', ['local_part']],
    [{ target_local_part: 'x'.repeat(65) }, 'validation_error', ['target_local_part']],
    [
      { local_part: 'a,', target_local_part: '@' },
      'validation_error',
      ['local_part', 'target_local_part'],
    ],
  ];
  for (const [about, code, paths] of cases) {
    const answer = await app.call('POST', PATH, { body: { ...ok, ...about } });
    assertRefused(answer, { status: 422, code, paths });
  }
  const { body } = await app.call<Page>('GET', `${PATH}?domain_id=${domainId}`);
  assert.equal(body.data, []);
  const quoted = await create({ ...ok, local_part: '"two words"' });
  assert.is(quoted['local_part'], '"two words"');
});

test('a domain that does not receive has no routes', async () => {
  const made = async (name: string, capabilities: Fields): Promise<string> =>
    String((await app.call('POST', '/domains', { body: { name, capabilities } })).body['id']);
  const off = await made('off.test', { receiving: 'disabled' });
  await app.call('POST', `/domains/${off}/verify`);
  const unverified = await made('unverified.test', { receiving: 'enabled' });
  const route = { type: 'exact', local_part: 'a' };
  assertRefused(await app.call('POST', PATH, { body: { ...route, domain_id: off } }), {
    status: 422,
    code: 'receiving_disabled',
    paths: ['domain_id'],
    says: /off\.test does not receive mail\. Enable/,
  });
  assertRefused(await app.call('POST', PATH, { body: { ...route, domain_id: unverified } }), {
    status: 422,
    code: 'domain_not_verified',
    paths: ['domain_id'],
    says: /unverified\.test is not verified for receiving\. Publish/,
  });
  assertRefused(
    await app.call('POST', PATH, { body: { ...route, domain_id: UNKNOWN_ID } }),
    noDomain,
  );
});

test('what a domain has already is a conflict, in any case of the letters', async ({
  domainId,
}) => {
  const exact = { domain_id: domainId, type: 'exact', local_part: 'Ada' };
  const { id } = await create(exact);
  const alias = { ...exact, type: 'alias', target_local_part: 'x' };
  const { id: aliasId } = await create({ ...alias, local_part: 'ada' });
  await create({ domain_id: domainId, type: 'catch_all', target_local_part: 'x' });
  const conflict = (path: string) => ({ status: 409, code: 'route_exists', paths: [path] });
  for (const local of ['Ada', 'aDA', '"ada"']) {
    for (const body of [exact, alias]) {
      const answer = await app.call('POST', PATH, { body: { ...body, local_part: local } });
      assertRefused(answer, conflict('local_part'));
    }
  }
  const second = { domain_id: domainId, type: 'catch_all', target_local_part: 'y' };
  assertRefused(await app.call('POST', PATH, { body: second }), conflict('type'));
  const { id: otherId } = await create({ ...exact, local_part: 'bea' });
  const renamed = await app.call('PATCH', `${PATH}/${String(otherId)}`, {
    body: { local_part: 'ADA' },
  });
  assertRefused(renamed, conflict('local_part'));
  const kept = await app.call('GET', `${PATH}/${String(otherId)}`);
  assert.is(kept.body['local_part'], 'bea');
  const same = await app.call('PATCH', `${PATH}/${String(id)}`, { body: { local_part: 'ADA' } });
  assert.is(same.status, 200, 'its own name in other letters');
  assert.is(same.body['target_local_part'], 'ADA');
  await app.call('DELETE', `${PATH}/${String(aliasId)}`);
  await create({ ...alias, local_part: 'ADA' });
});

test('of the same requests at the same time one is stored', async ({ domainId }) => {
  const body = { domain_id: domainId, type: 'exact', local_part: 'a' };
  const answers = await Promise.all(
    Array.from({ length: 8 }, () => app.call('POST', PATH, { body })),
  );
  const statuses = answers.map(({ status }) => status).toSorted((a, b) => a - b);
  assert.equal(statuses, [201, 409, 409, 409, 409, 409, 409, 409]);
});

test('a change keeps what it does not name', async ({ domain, domainId }) => {
  const change = async (id: unknown, body: Fields): Promise<Fields> => {
    const answer = await app.call('PATCH', `${PATH}/${String(id)}`, { body });
    assert.is(answer.status, 200, JSON.stringify(answer.body));
    assertHeaders(answer);
    assert.equal((await app.call('GET', `${PATH}/${String(id)}`)).body, answer.body);
    return answer.body;
  };
  const exact = await create({ domain_id: domainId, type: 'exact', local_part: 'a' });
  const renamed = await change(exact['id'], { local_part: 'b', id: UNKNOWN_ID });
  assert.equal(
    { ...renamed, updated_at: '' },
    {
      ...exact,
      local_part: 'b',
      target_local_part: 'b',
      target_address: `b@${domain}`,
      updated_at: '',
    },
  );
  const aimed = await change(exact['id'], { target_local_part: 'team' });
  assert.equal([aimed['local_part'], aimed['target_address']], ['b', `team@${domain}`]);
  const moved = await change(exact['id'], { local_part: 'c' });
  assert.equal([moved['local_part'], moved['target_local_part']], ['c', 'team']);
  const back = await change(exact['id'], { target_local_part: null });
  assert.is(back['target_local_part'], 'c');
  assert.equal({ ...(await change(exact['id'], {})), updated_at: '' }, { ...back, updated_at: '' });
  const all = await create({ domain_id: domainId, type: 'catch_all', target_local_part: 'x' });
  const kept = await change(all['id'], { local_part: null, target_local_part: 'y' });
  assert.equal([kept['local_part'], kept['target_local_part']], [null, 'y']);
});

test('type and domain never change, and wrong fields are refused by name', async ({ domainId }) => {
  const exact = await create({ domain_id: domainId, type: 'exact', local_part: 'a' });
  const all = await create({ domain_id: domainId, type: 'catch_all', target_local_part: 'x' });
  const other = await receivingDomain(app, `other${count}.test`);
  const cases: readonly (readonly [Fields, Fields, string, readonly string[]])[] = [
    [exact, { type: 'alias', target_local_part: 'b' }, 'validation_error', ['type']],
    [exact, { type: 'exact' }, 'validation_error', ['type']],
    [exact, { domain_id: other }, 'validation_error', ['domain_id']],
    [
      exact,
      { type: 'alias', domain_id: other, local_part: '@' },
      'validation_error',
      ['type', 'domain_id', 'local_part'],
    ],
    [exact, { local_part: null }, 'missing_required_field', ['local_part']],
    [exact, { local_part: 7 }, 'validation_error', ['local_part']],
    [exact, { target_local_part: 'a b' }, 'validation_error', ['target_local_part']],
    [all, { local_part: 'a' }, 'validation_error', ['local_part']],
    [all, { target_local_part: null }, 'missing_required_field', ['target_local_part']],
  ];
  for (const [route, body, code, paths] of cases) {
    const path = `${PATH}/${String(route['id'])}`;
    assertRefused(await app.call('PATCH', path, { body }), { status: 422, code, paths });
    assert.equal((await app.call('GET', path)).body, route);
  }
});

test('deleted is gone, and its place is free', async ({ domainId }) => {
  const body = { domain_id: domainId, type: 'catch_all', target_local_part: 'a' };
  const id = String((await create(body))['id']);
  const answer = await app.call('DELETE', `/api${PATH}/${id.toUpperCase()}`);
  assert.is(answer.status, 200);
  assertHeaders(answer);
  assert.equal(answer.body, { object: 'receiving_route', id, deleted: true });
  for (const method of ['GET', 'PATCH', 'DELETE']) {
    const again = await app.call(method, `${PATH}/${id}`, method === 'PATCH' ? { body: {} } : {});
    assertRefused(again, notFound);
  }
  await create(body);
});

test('missing, foreign and malformed ids are one 404', async ({ domainId }) => {
  const id = String((await create({ domain_id: domainId, type: 'exact', local_part: 'a' }))['id']);
  for (const method of ['GET', 'PATCH', 'DELETE']) {
    const body = method === 'PATCH' ? { body: { local_part: 'stolen' } } : {};
    for (const [name, key] of [
      [id, stranger],
      [UNKNOWN_ID, app.key],
      ['test', app.key],
      [`${id}x`, app.key],
      ["a'b", app.key],
    ]) {
      assertRefused(await app.call(method, `${PATH}/${name!}`, { ...body, key: key! }), notFound);
    }
  }
  assert.is((await app.call('GET', `${PATH}/${id}`)).body['local_part'], 'a');
  const body = { domain_id: domainId, type: 'exact', local_part: 'b' };
  assertRefused(await app.call('POST', PATH, { body, key: stranger }), noDomain);
  const foreign = await app.call('GET', `${PATH}?domain_id=${domainId}`, { key: stranger });
  assertRefused(foreign, noDomain);
});

test('a list is newest first, of one domain or all, and goes both ways', async ({ domainId }) => {
  const { key, domains, items } = await assertPages(app, PATH, (id, n, owner) =>
    create({ domain_id: id, type: 'exact', local_part: `u${n}` }, owner),
  );
  const foreignCursor = `domain_id=${domains[0]}&after=${String(items[0]!['id'])}`;
  const isOfOne = items[0]!['domain_id'] === domains[0];
  const cases: readonly (readonly [string, string, string])[] = [
    ['limit=0', 'limit', 'validation_error'],
    ['limit=101', 'limit', 'validation_error'],
    ['after=x', 'after', 'validation_error'],
    [`before=${UNKNOWN_ID}`, 'before', 'validation_error'],
    [`domain_id=${domainId.slice(1)}`, 'domain_id', 'invalid_parameter'],
    ['domain_id=', 'domain_id', 'invalid_parameter'],
    [
      isOfOne ? foreignCursor.replace(domains[0], domains[1]) : foreignCursor,
      'after',
      'validation_error',
    ],
  ];
  for (const [query, path, code] of cases) {
    assertRefused(await app.call('GET', `${PATH}?${query}`, { key }), {
      status: 422,
      code,
      paths: [path],
    });
  }
  assertRefused(await app.call('GET', `${PATH}?domain_id=${UNKNOWN_ID}`, { key }), noDomain);
});

test('a domain takes so many routes and no more', async ({ domainId }) => {
  await onDatabase(app, (pool) =>
    pool.query(
      `insert into receiving_route (tenant_id, id, domain_id, type, local_part, local_key,
         target_local_part, created_at, updated_at)
       select tenant_id, gen_random_uuid(), id, 'exact', 'n' || n, 'n' || n, 'n', now(), now()
       from sending_domain, generate_series(2, $2::integer) n where id = $1`,
      [domainId, ROUTES_PER_DOMAIN_MAX],
    ),
  );
  const body = { domain_id: domainId, type: 'exact', local_part: 'last' };
  await create(body);
  assertRefused(await app.call('POST', PATH, { body: { ...body, local_part: 'more' } }), {
    status: 422,
    code: 'validation_error',
    paths: ['domain_id'],
    says: /10000 routes/,
  });
});

test('every route needs a key that may do more than send, and JSON', async ({ domainId }) => {
  const { body: key } = await app.call('POST', '/api-keys', {
    body: { name: 'sender', permission: 'sending_access' },
  });
  const paths = [
    ['POST', PATH],
    ['POST', `${PATH}/test`],
    ['GET', PATH],
    ['GET', `${PATH}?domain_id=${domainId}`],
    ['GET', `${PATH}/${UNKNOWN_ID}`],
    ['PATCH', `${PATH}/${UNKNOWN_ID}`],
    ['DELETE', `${PATH}/${UNKNOWN_ID}`],
  ] as const;
  for (const [method, path] of paths) {
    const nobody = await app.call(method, path, { key: null });
    assertRefused(nobody, { status: 401, code: 'missing_api_key' });
    const sender = await app.call(method, path, { key: String(key['token']) });
    assertRefused(sender, { status: 401, code: 'restricted_api_key' });
    if (method === 'POST' || method === 'PATCH') {
      const answer = await app.call(method, path, { body: '{' });
      assertRefused(answer, { status: 400, code: 'invalid_json' });
    }
  }
  const wrongMethod = await app.call('PUT', PATH, { body: {} });
  assertRefused(wrongMethod, { status: 405, code: 'method_not_allowed' });
});

test.run();
