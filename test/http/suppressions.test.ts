// Suppressions over the API: one for each mailbox however it is spelled, one by one and in batches.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, type App } from '../support/app.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { assertHeaders, assertInstant, assertRefused } from './envelope.ts';

type Fields = Record<string, unknown>;
interface Page {
  object: string;
  data: Fields[];
  has_more: boolean;
}

const UUID_V7 = /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/;
const UNKNOWN_ID = '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70';
const notFound = { status: 404, code: 'not_found', says: /^Suppression not found$/ };

const test = suite('suppressions');
let app: App;
let stranger: string;
test.before(async () => {
  app = await startApp();
  ({ key: stranger } = await secondTenant(app));
});
test.after(() => app.stop());

async function add(email: string, key = app.key): Promise<string> {
  const answer = await app.call('POST', '/suppressions', { body: { email }, key });
  assert.is(answer.status, 201, JSON.stringify(answer.body));
  return String(answer.body['id']);
}

async function batch(what: 'add' | 'remove', body: Fields): Promise<Fields[]> {
  const answer = await app.call<{ data: Fields[] }>('POST', `/suppressions/batch/${what}`, {
    body,
  });
  assert.is(answer.status, what === 'add' ? 201 : 200, JSON.stringify(answer.body));
  assertHeaders(answer);
  assert.equal(Object.keys(answer.body), ['data']);
  return answer.body.data;
}

const idsOf = (page: Page): string[] => page.data.map(({ id }) => String(id));

test('every spelling of a mailbox is one suppression, found by each of them', async () => {
  const created = await app.call('POST', '/api/suppressions', {
    body: { email: ' Ünï+A@MÜNCHEN.test ' },
  });
  assert.is(created.status, 201);
  assertHeaders(created);
  const id = String(created.body['id']);
  assert.match(id, UUID_V7);
  assert.equal(created.body, { object: 'suppression', id });
  for (const email of ['ünï+a@xn--mnchen-3ya.test', '"ÜNÏ+a"@münchen.TEST']) {
    assert.is(await add(email), id);
  }
  for (const name of [id, id.toUpperCase(), 'ünï+a@xn--mnchen-3ya.test', 'ÜNÏ+A@münchen.test']) {
    for (const path of [encodeURIComponent(name), encodeURI(name)]) {
      const answer = await app.call('GET', `/suppressions/${path}`);
      assert.is(answer.status, 200, path);
      assertHeaders(answer);
      const { created_at, ...rest } = answer.body;
      assertInstant(created_at);
      assert.equal(rest, {
        object: 'suppression',
        id,
        email: 'ünï+a@xn--mnchen-3ya.test',
        origin: 'manual',
        source_id: null,
      });
    }
  }
});

test('removed by id or address, and a new one afterwards', async () => {
  const first = await add('back@recipient.test');
  const removed = await app.call('DELETE', '/suppressions/BACK%40recipient.test');
  assert.is(removed.status, 200);
  assertHeaders(removed);
  assert.equal(removed.body, { object: 'suppression', id: first, deleted: true });
  const second = await add('back@recipient.test');
  assert.is.not(second, first);
  assert.is((await app.call('DELETE', `/suppressions/${second}`)).status, 200);
  for (const name of [second, 'back@recipient.test']) {
    assertRefused(await app.call('DELETE', `/suppressions/${name}`), notFound);
  }
});

test('a bounce or complaint is shown as it is and not made manual', async () => {
  const { key, tenantId } = await secondTenant(app);
  const ids = [await add('m@recipient.test', key)];
  for (const [n, origin] of ['bounce', 'complaint'].entries()) {
    const id = `019e6f0a-5a1c-7000-8f3e-00000000000${n}`;
    ids.push(id);
    await onDatabase(app, (pool) =>
      pool.query(
        `insert into suppression (tenant_id, id, address, origin, source_id) values ($1, $2, $3, $4, $5)`,
        [tenantId, id, `${origin}@recipient.test`, origin, UNKNOWN_ID],
      ),
    );
    assert.is(await add(`${origin}@recipient.test`, key), id);
    const { body } = await app.call('GET', `/suppressions/${id}`, { key });
    assert.equal([body['origin'], body['source_id']], [origin, UNKNOWN_ID]);
  }
  for (const [n, origin] of ['manual', 'bounce', 'complaint'].entries()) {
    const { body } = await app.call<Page>('GET', `/suppressions?origin=${origin}`, { key });
    assert.equal(idsOf(body), [ids[n]]);
  }
  const answer = await app.call('GET', '/suppressions?origin=other', { key });
  assertRefused(answer, { status: 422, code: 'validation_error', paths: ['origin'] });
});

test('a list goes both ways, newest first', async () => {
  const { key } = await secondTenant(app);
  const made: string[] = [];
  for (let n = 0; n < 5; n += 1) made.unshift(await add(`r${n}@recipient.test`, key));
  const list = async (query: string): Promise<Page> => {
    const answer = await app.call<Page>('GET', `/suppressions?${query}`, { key });
    assert.is(answer.status, 200, JSON.stringify(answer.body));
    assertHeaders(answer);
    return answer.body;
  };
  const all = await list('');
  assert.equal([all.object, all.has_more, idsOf(all)], ['list', false, made]);
  assert.equal(all.data[0], (await app.call('GET', `/suppressions/${made[0]!}`, { key })).body);
  const next = await list(`limit=2&after=${made[0]!}&origin=manual`);
  assert.equal([idsOf(next), next.has_more], [made.slice(1, 3), true]);
  const back = await list(`limit=4&before=${made[3]!}`);
  assert.equal([idsOf(back), back.has_more], [made.slice(0, 3), false]);
  for (const query of ['limit=0', 'limit=101', 'after=x', `after=${UNKNOWN_ID}`]) {
    const answer = await app.call('GET', `/suppressions?${query}`, { key });
    assertRefused(answer, {
      status: 422,
      code: 'validation_error',
      paths: [query.split('=')[0]!],
    });
  }
});

test('a batch answers in its order, also for what was there and what is named twice', async () => {
  const known = await add('known@recipient.test');
  const emails = [
    'z@recipient.test',
    'KNOWN@recipient.test',
    'a@recipient.test',
    'Z@recipient.test',
  ];
  const added = await batch('add', { emails });
  assert.is(added.length, 4);
  for (const one of added) assert.equal(Object.keys(one), ['object', 'id']);
  const [z, again, a, zAgain] = added.map(({ id }) => String(id));
  assert.equal([again, zAgain], [known, z]);
  const gone = (id: string | undefined): Fields => ({ object: 'suppression', id, deleted: true });
  assert.equal(
    await batch('remove', {
      emails: ['nobody@recipient.test', 'Z@recipient.test', 'z@recipient.test'],
    }),
    [gone(z)],
  );
  assert.equal(await batch('remove', { ids: [a, UNKNOWN_ID, known.toUpperCase(), a] }), [
    gone(a),
    gone(known),
  ]);
  assert.equal(await batch('remove', { ids: [a], emails: null }), []);
});

test('batches that overlap at the same time wait for each other and all come through', async () => {
  const emails = Array.from({ length: 100 }, (_, n) => `many${n}@recipient.test`);
  const runs = await Promise.all(
    Array.from({ length: 8 }, (_, n) =>
      batch('add', { emails: n % 2 === 0 ? emails : emails.toReversed() }),
    ),
  );
  assert.is(new Set(runs.flat().map(({ id }) => id)).size, 100);
  const removed = await Promise.all(
    Array.from({ length: 8 }, (_, n) =>
      batch('remove', { emails: n % 2 === 0 ? emails : emails.toReversed() }),
    ),
  );
  assert.is(removed.flat().length, 100);
});

test('a wrong item is refused by name and nothing is changed', async () => {
  const tooMany = Array.from({ length: 101 }, (_, n) => `r${n}@recipient.test`);
  const posts: readonly (readonly [string, Fields, string, string])[] = [
    ['', {}, 'missing_required_field', 'email'],
    ['', { email: 7 }, 'validation_error', 'email'],
    ['', { email: 'nobody' }, 'validation_error', 'email'],
    ['', { email: 'N <n@recipient.test>' }, 'validation_error', 'email'],
    ['/batch/add', {}, 'missing_required_field', 'emails'],
    ['/batch/add', { emails: [] }, 'validation_error', 'emails'],
    ['/batch/add', { emails: tooMany }, 'validation_error', 'emails'],
    ['/batch/add', { emails: ['first@recipient.test', 'x'] }, 'validation_error', 'emails.1'],
    ['/batch/remove', {}, 'validation_error', 'emails'],
    ['/batch/remove', { emails: ['a@x.test'], ids: [UNKNOWN_ID] }, 'validation_error', 'ids'],
    ['/batch/remove', { emails: [] }, 'validation_error', 'emails'],
    ['/batch/remove', { ids: [] }, 'validation_error', 'ids'],
    ['/batch/remove', { ids: tooMany }, 'validation_error', 'ids'],
    ['/batch/remove', { ids: [UNKNOWN_ID, 'x'] }, 'validation_error', 'ids.1'],
    ['/batch/remove', { emails: ['x'] }, 'validation_error', 'emails.0'],
  ];
  for (const [path, body, code, at] of posts) {
    const answer = await app.call('POST', `/suppressions${path}`, { body });
    assertRefused(answer, { status: 422, code, paths: [at] });
  }
  assertRefused(await app.call('GET', '/suppressions/first@recipient.test'), notFound);
});

test('unknown, foreign and malformed names are one and the same 404', async () => {
  const id = await add('mine@recipient.test');
  for (const name of [
    id,
    'mine@recipient.test',
    UNKNOWN_ID,
    'nobody@x.test',
    'x',
    'a%00b',
    'a@b',
  ]) {
    for (const method of ['GET', 'DELETE']) {
      const answer = await app.call(method, `/suppressions/${name}`, { key: stranger });
      assertRefused(answer, notFound);
    }
  }
  const body = { ids: [id] };
  const answer = await app.call('POST', '/suppressions/batch/remove', { body, key: stranger });
  assert.equal(answer.body, { data: [] });
  assert.is((await app.call('GET', `/suppressions/${id}`)).status, 200);
  assert.is.not(await add('mine@recipient.test', stranger), id);
});

test('every route needs a key and JSON', async () => {
  const routes = [
    ['POST', '/suppressions'],
    ['GET', '/suppressions'],
    ['POST', '/suppressions/batch/add'],
    ['POST', '/suppressions/batch/remove'],
    ['GET', '/suppressions/a@b.test'],
    ['DELETE', '/suppressions/a@b.test'],
  ] as const;
  for (const [method, path] of routes) {
    assertRefused(await app.call(method, path, { key: null }), {
      status: 401,
      code: 'missing_api_key',
    });
    if (method === 'POST') {
      const answer = await app.call(method, path, { body: '{' });
      assertRefused(answer, { status: 400, code: 'invalid_json' });
    }
  }
});

test.run();
