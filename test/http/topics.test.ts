// Topics over the API: made, found, searched, changed where they may be, deleted.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, type App } from '../support/app.ts';
import { secondTenant } from '../support/second-tenant.ts';
import { assertHeaders, assertInstant, assertRefused } from './envelope.ts';

type Fields = Record<string, unknown>;
interface Page {
  object: string;
  data: Fields[];
  has_more: boolean;
}

const UUID_V7 = /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
const UNKNOWN_ID = '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70';
const notFound = { status: 404, code: 'not_found', says: /^Topic not found$/ };

const test = suite('topics');
let app: App;
let stranger: string;
test.before(async () => {
  app = await startApp();
  ({ key: stranger } = await secondTenant(app));
});
test.after(() => app.stop());

async function create(about: Fields = {}, key = app.key): Promise<string> {
  const answer = await app.call('POST', '/topics', {
    body: { name: 'News', default_subscription: 'opt_in', ...about },
    key,
  });
  assert.is(answer.status, 201, JSON.stringify(answer.body));
  assertHeaders(answer);
  const id = String(answer.body['id']);
  assert.equal(answer.body, { object: 'topic', id });
  return id;
}

const idsOf = (page: Page): string[] => page.data.map(({ id }) => String(id));

test('a topic shows every field, at both mounts', async () => {
  const given = {
    name: 'ü'.repeat(50),
    description: 'd'.repeat(200),
    default_subscription: 'opt_out',
    visibility: 'public',
  };
  const id = await create(given);
  assert.match(id, UUID_V7);
  for (const path of [`/topics/${id}`, `/api/topics/${id.toUpperCase()}`]) {
    const answer = await app.call('GET', path);
    assert.is(answer.status, 200);
    assertHeaders(answer);
    const { created_at, ...rest } = answer.body;
    assertInstant(created_at);
    assert.equal(rest, { object: 'topic', id, ...given });
  }
  const { body } = await app.call('GET', `/topics/${await create({ description: null })}`);
  assert.equal([body['description'], body['visibility']], [null, 'private']);
});

test('a change keeps what it does not name, and the default subscription stays', async () => {
  const id = await create({ description: 'Old', visibility: 'public' });
  const changes: readonly (readonly [Fields, Fields])[] = [
    [
      { id: 'whatever', name: 'New' },
      { name: 'New', description: 'Old' },
    ],
    [{}, { name: 'New', description: 'Old' }],
    [
      { description: null, default_subscription: 'opt_in' },
      { name: 'New', description: null },
    ],
    [{ visibility: 'private' }, { visibility: 'private', default_subscription: 'opt_in' }],
  ];
  for (const [body, expected] of changes) {
    const answer = await app.call('PATCH', `/topics/${id}`, { body });
    assert.is(answer.status, 200, JSON.stringify(answer.body));
    assertHeaders(answer);
    assert.equal(answer.body, { object: 'topic', id });
    const { body: topic } = await app.call('GET', `/topics/${id}`);
    for (const [field, value] of Object.entries(expected)) assert.is(topic[field], value, field);
  }
  const body = { name: 'No', default_subscription: 'opt_out' };
  assertRefused(await app.call('PATCH', `/topics/${id}`, { body }), {
    status: 422,
    code: 'validation_error',
    paths: ['default_subscription'],
  });
  assert.is((await app.call('GET', `/topics/${id}`)).body['name'], 'New');
});

test('deleted is gone', async () => {
  const id = await create();
  const answer = await app.call('DELETE', `/topics/${id.toUpperCase()}`);
  assert.is(answer.status, 200);
  assertHeaders(answer);
  assert.equal(answer.body, { object: 'topic', id, deleted: true });
  for (const method of ['GET', 'DELETE']) {
    assertRefused(await app.call(method, `/topics/${id}`), notFound);
  }
});

test('a list is newest first, goes both ways, and without a limit has up to 100', async () => {
  const { key } = await secondTenant(app);
  const made: string[] = [];
  for (let n = 0; n < 101; n += 1) made.unshift(await create({ name: `T${n}` }, key));
  const list = async (query: string): Promise<Page> => {
    const answer = await app.call<Page>('GET', `/topics?${query}`, { key });
    assert.is(answer.status, 200, JSON.stringify(answer.body));
    assertHeaders(answer);
    return answer.body;
  };
  const all = await list('');
  assert.equal([all.object, all.has_more, idsOf(all)], ['list', true, made.slice(0, 100)]);
  assert.equal(all.data[0], (await app.call('GET', `/topics/${made[0]!}`, { key })).body);
  const last = await list(`after=${made[99]!}`);
  assert.equal([idsOf(last), last.has_more], [made.slice(100), false]);
  const back = await list(`limit=2&before=${made[5]!}`);
  assert.equal([idsOf(back), back.has_more], [made.slice(3, 5), true]);
  for (const query of ['limit=0', 'limit=101', 'after=x', `before=${UNKNOWN_ID}`]) {
    const answer = await app.call('GET', `/topics?${query}`, { key });
    assertRefused(answer, {
      status: 422,
      code: 'validation_error',
      paths: [query.split('=')[0]!],
    });
  }
});

test('a search finds parts of name and description in any case, and nothing is a pattern', async () => {
  const { key } = await secondTenant(app);
  const percent = await create({ name: '50% Ünion' }, key);
  const described = await create({ name: 'Plain', description: 'a_b c\\d' }, key);
  const search = async (text: string, more = ''): Promise<string[]> => {
    const path = `/topics?search=${encodeURIComponent(text)}${more}`;
    const { status, body } = await app.call<Page>('GET', path, { key });
    assert.is(status, 200, JSON.stringify(body));
    return idsOf(body);
  };
  for (const text of ['% ', 'üNI', '50% ünion']) assert.equal(await search(text), [percent], text);
  for (const text of ['A_B', 'c\\d', 'PLAIN']) assert.equal(await search(text), [described], text);
  for (const text of ['%%', 'a%b', 'axb', "';--"]) assert.equal(await search(text), [], text);
  assert.equal(await search(''), [described, percent]);
  assert.equal(await search('n', '&limit=1'), [described]);
  assert.equal(await search('n', `&after=${described}`), [percent]);
  for (const text of ['x'.repeat(201), 'a\0b']) {
    const answer = await app.call('GET', `/topics?search=${encodeURIComponent(text)}`, { key });
    assertRefused(answer, { status: 422, code: 'validation_error', paths: ['search'] });
  }
});

test('a wrong field is refused by name', async () => {
  const good = { name: 'T', default_subscription: 'opt_in' };
  const wrong: readonly (readonly [Fields, string, string])[] = [
    [{ name: undefined }, 'missing_required_field', 'name'],
    [{ default_subscription: undefined }, 'missing_required_field', 'default_subscription'],
    [{ default_subscription: 'maybe' }, 'validation_error', 'default_subscription'],
    [{ name: ' ' }, 'validation_error', 'name'],
    [{ name: 'n'.repeat(51) }, 'validation_error', 'name'],
    [{ name: 'a\0b' }, 'validation_error', 'name'],
    [{ name: 'a\nb' }, 'validation_error', 'name'],
    [{ description: 'd'.repeat(201) }, 'validation_error', 'description'],
    [{ description: '\ud800' }, 'validation_error', 'description'],
    [{ visibility: 'hidden' }, 'validation_error', 'visibility'],
  ];
  const id = await create();
  for (const [about, code, path] of wrong) {
    const answer = await app.call('POST', '/topics', { body: { ...good, ...about } });
    assertRefused(answer, { status: 422, code, paths: [path] });
    if (code === 'missing_required_field') continue;
    const patched = await app.call('PATCH', `/topics/${id}`, { body: about });
    assertRefused(patched, { status: 422, code, paths: [path] });
  }
});

test('unknown and foreign are the same 404, a malformed id is told', async () => {
  const id = await create();
  for (const method of ['GET', 'PATCH', 'DELETE']) {
    const body = method === 'PATCH' ? { body: { name: 'Stolen' } } : {};
    for (const name of [id, UNKNOWN_ID]) {
      const answer = await app.call(method, `/topics/${name}`, { ...body, key: stranger });
      assertRefused(answer, notFound);
    }
    assertRefused(await app.call(method, '/topics/nobody', body), {
      status: 422,
      code: 'invalid_parameter',
      paths: ['id'],
    });
  }
  assert.is((await app.call('GET', `/topics/${id}`)).body['name'], 'News');
  const { body } = await app.call<Page>('GET', '/topics', { key: stranger });
  assert.equal(body.data, []);
});

test('every route needs a key and JSON', async () => {
  const routes = [
    ['POST', '/topics'],
    ['GET', '/topics'],
    ['GET', `/topics/${UNKNOWN_ID}`],
    ['PATCH', `/topics/${UNKNOWN_ID}`],
    ['DELETE', `/topics/${UNKNOWN_ID}`],
  ] as const;
  for (const [method, path] of routes) {
    assertRefused(await app.call(method, path, { key: null }), {
      status: 401,
      code: 'missing_api_key',
    });
    if (method === 'POST' || method === 'PATCH') {
      const answer = await app.call(method, path, { body: '{' });
      assertRefused(answer, { status: 400, code: 'invalid_json' });
    }
  }
});

test.run();
