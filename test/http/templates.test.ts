// Templates over the API: the shape of every answer, the life from draft to deletion, and every refusal.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createKey, newToken } from '../../src/access/keys.ts';
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

const test = suite('templates');
let app: App;
let stranger: string;
test.before(async () => {
  app = await startApp();
  ({ key: stranger } = await secondTenant(app));
});
test.after(() => app.stop());

async function create(about: Fields = {}, key = app.key): Promise<string> {
  const answer = await app.call('POST', '/templates', {
    body: { name: 'Welcome', html: '<p>Hi</p>', ...about },
    key,
  });
  assert.is(answer.status, 201, JSON.stringify(answer.body));
  return String(answer.body['id']);
}

async function change(method: string, path: string, body?: Fields): Promise<Fields> {
  const answer = await app.call(method, path, body === undefined ? {} : { body });
  assert.is(answer.status, 200, JSON.stringify(answer.body));
  return answer.body;
}

const read = (id: string): Promise<Fields> => change('GET', `/templates/${id}`);
const idsOf = (page: Page): string[] => page.data.map(({ id }) => String(id));

test('a template shows every field, by id and by alias, at both mounts', async () => {
  const given = {
    name: 'Every field',
    alias: 'every_field-1',
    from: 'Ada <ada@mailstead.test>',
    subject: 'Hi {{{NAME}}}',
    preview_text: 'A greeting',
    html: '<p>{{{NAME}}} {{{COUNT}}}</p>',
    text: '{{{NAME}}}',
  };
  const created = await app.call('POST', '/api/templates', {
    body: {
      ...given,
      reply_to: 'b@mailstead.test',
      variables: [
        { key: 'NAME', type: 'string', fallback_value: 'friend' },
        { key: 'COUNT', type: 'number', name: 'How many' },
        { key: 'NOTE', required: false },
      ],
    },
  });
  assert.is(created.status, 201);
  assertHeaders(created);
  const id = String(created.body['id']);
  assert.match(id, UUID_V7);
  assert.equal(created.body, { object: 'template', id });
  const answers = await Promise.all(
    [`/templates/${id}`, `/api/templates/${id.toUpperCase()}`, `/templates/${given.alias}`].map(
      (path) => app.call('GET', path),
    ),
  );
  for (const answer of answers) {
    assert.is(answer.status, 200);
    assertHeaders(answer);
    assert.equal(answer.body, answers[0]?.body);
  }
  const { variables, created_at, updated_at, current_version_id, ...rest } = answers[0]!.body;
  assert.equal(rest, {
    object: 'template',
    id,
    ...given,
    reply_to: ['b@mailstead.test'],
    status: 'draft',
    published_at: null,
    has_unpublished_versions: true,
  });
  assertInstant(created_at);
  assert.is(updated_at, created_at);
  assert.match(String(current_version_id), UUID_V7);
  const shown = (variables as Fields[]).map((variable) => {
    const { id: variableId, created_at: at, updated_at: changed, ...fields } = variable;
    assert.match(String(variableId), UUID_V7);
    assertInstant(at);
    assertInstant(changed);
    return fields;
  });
  assert.equal(shown, [
    { key: 'NAME', name: 'NAME', type: 'string', required: false, fallback_value: 'friend' },
    { key: 'COUNT', name: 'How many', type: 'number', required: true, fallback_value: null },
    { key: 'NOTE', name: 'NOTE', type: 'string', required: false, fallback_value: null },
  ]);
});

test('what was not given is null or empty', async () => {
  const template = await read(await create());
  for (const field of ['alias', 'from', 'subject', 'preview_text', 'text', 'published_at']) {
    assert.is(template[field], null, field);
  }
  assert.equal([template['reply_to'], template['variables']], [[], []]);
});

test('what was read can be written again and changes nothing', async () => {
  const id = await create({
    reply_to: ['b@mailstead.test'],
    html: '{{{A}}}{{{B}}}',
    variables: [{ key: 'A', type: 'number', fallback_value: 1 }, { key: 'B' }],
  });
  const template = await read(id);
  const { updated_at: _, ...before } = template;
  await change('PATCH', `/templates/${id}`, template);
  const { updated_at: __, variables, ...after } = await read(id);
  const { variables: variablesBefore, ...restBefore } = before;
  assert.equal({ ...after, current_version_id: 0 }, { ...restBefore, current_version_id: 0 });
  const plain = (list: unknown): unknown =>
    (list as Fields[]).map(({ updated_at: ___, ...variable }) => variable);
  assert.equal(plain(variables), plain(variablesBefore));
});

test('from draft to published, edited, published again, draft, gone', async () => {
  const id = await create({ alias: 'life' });
  const { current_version_id: first } = await read(id);
  const published = await app.call('POST', `/templates/${id}/publish`);
  assert.is(published.status, 200);
  assertHeaders(published);
  assert.equal(published.body, { object: 'template', id });
  const live = await read(id);
  assert.equal(
    [live['status'], live['has_unpublished_versions'], live['current_version_id']],
    ['published', false, first],
  );
  assertInstant(live['published_at']);

  assert.equal(await change('PATCH', '/templates/life', { name: 'Renamed' }), {
    object: 'template',
    id,
  });
  assert.is((await read(id))['has_unpublished_versions'], false, 'a name is no content');
  await change('PATCH', '/templates/life', { html: '<p>New</p>', subject: 'S' });
  const edited = await read(id);
  assert.equal(
    [edited['status'], edited['has_unpublished_versions'], edited['name'], edited['html']],
    ['published', true, 'Renamed', '<p>New</p>'],
  );
  assert.is.not(edited['current_version_id'], first);
  assert.is(edited['published_at'], live['published_at']);
  await change('PATCH', `/templates/${id}`, {});
  assert.is((await read(id))['current_version_id'], edited['current_version_id']);

  await change('PATCH', `/templates/${id}`, { status: 'published', subject: null });
  const again = await read(id);
  assert.equal(
    [again['status'], again['has_unpublished_versions'], again['subject']],
    ['published', false, null],
  );
  await change('PATCH', `/templates/${id}`, { status: 'draft', alias: null });
  const draft = await read(id);
  assert.equal(
    [draft['status'], draft['published_at'], draft['has_unpublished_versions'], draft['alias']],
    ['draft', null, true, null],
  );
  const removed = await app.call('DELETE', `/templates/${id}`);
  assert.is(removed.status, 200);
  assertHeaders(removed);
  assert.equal(removed.body, { object: 'template', id, deleted: true });
  const answer = await app.call('DELETE', `/templates/${id}`);
  assertRefused(answer, { status: 404, code: 'not_found', says: /^Template not found$/ });
});

test('a duplicate is a draft with the newest content and no alias', async () => {
  const id = await create({
    name: '𝒩'.repeat(127),
    alias: 'original',
    html: '{{{A}}}',
    variables: [{ key: 'A' }],
  });
  await change('POST', '/templates/original/publish');
  await change('PATCH', `/templates/${id}`, { html: 'newer {{{A}}}' });
  const answer = await app.call('POST', '/templates/original/duplicate');
  assert.is(answer.status, 200);
  assertHeaders(answer);
  assert.equal(Object.keys(answer.body), ['object', 'id']);
  const copy = await read(String(answer.body['id']));
  assert.is.not(copy['id'], id);
  assert.equal(
    [copy['name'], copy['alias'], copy['status'], copy['html']],
    [`${'𝒩'.repeat(124)} (Copy)`, null, 'draft', 'newer {{{A}}}'],
  );
  assert.is((copy['variables'] as Fields[])[0]?.['key'], 'A');
  await change('PATCH', `/templates/${String(copy['id'])}`, { html: 'mine {{{A}}}' });
  assert.is((await read(id))['html'], 'newer {{{A}}}');
});

test('a list goes both ways without repeats, whole templates, newest first', async () => {
  const { key } = await secondTenant(app);
  const made: string[] = [];
  for (let n = 0; n < 5; n += 1) made.unshift(await create({ name: `T${n}` }, key));
  const list = async (query: string): Promise<Page> => {
    const answer = await app.call<Page>('GET', `/templates?${query}`, { key });
    assert.is(answer.status, 200, JSON.stringify(answer.body));
    assertHeaders(answer);
    return answer.body;
  };
  const all = await list('');
  assert.equal([all.object, all.has_more, idsOf(all)], ['list', false, made]);
  assert.equal(all.data[0], (await app.call('GET', `/templates/${made[0]!}`, { key })).body);
  const first = await list('limit=2');
  assert.equal([idsOf(first), first.has_more], [made.slice(0, 2), true]);
  const next = await list(`limit=3&after=${made[1]!}`);
  assert.equal([idsOf(next), next.has_more], [made.slice(2), false]);
  const back = await list(`limit=2&before=${made[4]!}`);
  assert.equal([idsOf(back), back.has_more], [made.slice(2, 4), true]);
  for (const query of ['limit=0', 'limit=101', 'limit=x', 'after=x', `after=${UNKNOWN_ID}`]) {
    const answer = await app.call('GET', `/templates?${query}`, { key });
    assertRefused(answer, {
      status: 422,
      code: 'validation_error',
      paths: [query.split('=')[0]!],
    });
  }
  const foreign = await app.call('GET', `/templates?after=${made[0]!}`);
  assertRefused(foreign, { status: 422, code: 'validation_error', paths: ['after'] });
});

test('a page of large templates ends before it is too much', async () => {
  const { key } = await secondTenant(app);
  const html = 'x'.repeat(5 * 1024 * 1024);
  const made = [];
  for (let n = 0; n < 3; n += 1) made.unshift(await create({ html }, key));
  const walk: string[] = [];
  for (let query = ''; ; query = `?after=${walk.at(-1)!}`) {
    const { body } = await app.call<Page>('GET', `/templates${query}`, { key });
    assert.ok(body.data.length >= 1 && body.data.length <= 2);
    walk.push(...idsOf(body));
    if (!body.has_more) break;
  }
  assert.equal(walk, made);
});

test('an alias is one of a kind in a tenant, and free again', async () => {
  const id = await create({ alias: 'taken' });
  const other = await create();
  const expected = { status: 422, code: 'alias_taken', paths: ['alias'] };
  const body = { name: 'T', html: 'x', alias: 'taken' };
  assertRefused(await app.call('POST', '/templates', { body }), expected);
  assertRefused(
    await app.call('PATCH', `/templates/${other}`, { body: { alias: 'taken', name: 'No' } }),
    expected,
  );
  assert.is((await read(other))['name'], 'Welcome', 'nothing of it was stored');
  await create({ alias: 'taken' }, stranger);
  await change('PATCH', '/templates/taken', { alias: 'taken' });
  await change('DELETE', `/templates/${id}`);
  await change('PATCH', `/templates/${other}`, { alias: 'taken' });
  assert.is((await read('taken'))['id'], other);
});

test('a wrong field is refused by name', async () => {
  const good = { name: 'T', html: 'x' };
  const wrong: readonly (readonly [Fields, string, string])[] = [
    [{ name: undefined }, 'missing_required_field', 'name'],
    [{ html: undefined }, 'missing_required_field', 'html'],
    [{ html: null }, 'validation_error', 'html'],
    [{ name: 5 }, 'validation_error', 'name'],
    [{ name: '' }, 'validation_error', 'name'],
    [{ alias: 'a b' }, 'validation_error', 'alias'],
    [{ alias: UNKNOWN_ID }, 'validation_error', 'alias'],
    [{ from: 'nobody' }, 'validation_error', 'from'],
    [{ reply_to: 7 }, 'validation_error', 'reply_to'],
    [{ reply_to: ['nobody'] }, 'validation_error', 'reply_to.0'],
    [{ subject: 'a\nb' }, 'validation_error', 'subject'],
    [{ html: '\0' }, 'validation_error', 'html'],
    [{ html: '{{{A}}}' }, 'validation_error', 'html'],
    [{ subject: '{{{A}}}' }, 'validation_error', 'subject'],
    [{ variables: 'A' }, 'validation_error', 'variables'],
    [{ variables: [{ type: 'string' }] }, 'missing_required_field', 'variables.0.key'],
    [{ variables: [{ key: 'A', type: 'date' }] }, 'validation_error', 'variables.0.type'],
    [{ variables: [{ key: 'EMAIL' }] }, 'validation_error', 'variables.0.key'],
    [
      { variables: [{ key: 'A', fallback_value: 1 }] },
      'validation_error',
      'variables.0.fallback_value',
    ],
  ];
  for (const [about, code, path] of wrong) {
    const answer = await app.call('POST', '/templates', { body: { ...good, ...about } });
    assertRefused(answer, { status: 422, code, paths: [path] });
  }
  const id = await create();
  for (const [about, code, path] of wrong.slice(2)) {
    const answer = await app.call('PATCH', `/templates/${id}`, { body: about });
    assertRefused(answer, { status: 422, code, paths: [path] });
  }
  const answer = await app.call('PATCH', `/templates/${id}`, { body: { status: 'live' } });
  assertRefused(answer, { status: 422, code: 'validation_error', paths: ['status'] });
  assert.is((await read(id))['html'], '<p>Hi</p>');
});

test('a template without html cannot be published', async () => {
  const id = await create({ html: ' ' });
  const expected = { status: 422, code: 'validation_error', paths: ['html'] };
  assertRefused(await app.call('POST', `/templates/${id}/publish`), expected);
  const body = { status: 'published', name: 'No' };
  assertRefused(await app.call('PATCH', `/templates/${id}`, { body }), expected);
  const { name, status } = await read(id);
  assert.equal([name, status], ['Welcome', 'draft']);
});

test('unknown, foreign and malformed names are one and the same 404 on every route', async () => {
  const id = await create({ alias: 'private' });
  const routes = [
    ['GET', ''],
    ['PATCH', ''],
    ['DELETE', ''],
    ['POST', '/publish'],
    ['POST', '/duplicate'],
  ] as const;
  for (const [method, end] of routes) {
    for (const name of [id, 'private', UNKNOWN_ID, 'nobody', 'a%00b', 'a.b', 'x'.repeat(500)]) {
      const answer = await app.call(method, `/templates/${name}${end}`, {
        key: stranger,
        ...(method === 'PATCH' ? { body: { name: 'Stolen' } } : {}),
      });
      assertRefused(answer, { status: 404, code: 'not_found', says: /^Template not found$/ });
    }
  }
  const { name, status } = await read(id);
  assert.equal([name, status], ['Welcome', 'draft']);
  const { body } = await app.call<Page>('GET', '/templates?limit=100', { key: stranger });
  assert.not.ok(idsOf(body).includes(id));
});

test('every route needs a full-access key and JSON', async () => {
  const { tenantId } = await secondTenant(app);
  const sending = newToken();
  await onDatabase(app, (pool) =>
    createKey(pool, {
      tenantId,
      name: 'k',
      token: sending,
      permission: 'sending_access',
      domainId: null,
    }),
  );
  const routes = [
    ['POST', '/templates'],
    ['GET', '/templates'],
    ['GET', '/templates/a'],
    ['PATCH', '/templates/a'],
    ['DELETE', '/templates/a'],
    ['POST', '/templates/a/publish'],
    ['POST', '/templates/a/duplicate'],
  ] as const;
  for (const [method, path] of routes) {
    const strangers = [null, `re_${'x'.repeat(8)}_${'x'.repeat(24)}`];
    for (const [index, key] of strangers.entries()) {
      const answer = await app.call(method, path, { key });
      const code = index === 0 ? 'missing_api_key' : 'invalid_api_key';
      assertRefused(answer, { status: 401, code });
    }
    assertRefused(await app.call(method, path, { key: sending }), {
      status: 401,
      code: 'restricted_api_key',
    });
    if (method === 'POST' || method === 'PATCH') {
      const answer = await app.call(method, path, { body: '{"name":' });
      assertRefused(answer, { status: 400, code: 'invalid_json' });
    }
  }
});

test.run();
