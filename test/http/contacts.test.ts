// Contacts, segments, contact properties and audiences over HTTP: by the unmodified SDK, by the paths and spellings that
// it does not use, and by callers who want something else.
import { Resend } from 'resend';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { startApp, type Answer, type App } from '../support/app.ts';
import { secondTenant } from '../support/second-tenant.ts';

interface Item {
  readonly id: string;
  readonly [key: string]: unknown;
}
interface List {
  readonly object: string;
  readonly has_more: boolean;
  readonly data: readonly Item[];
}
interface Refused {
  readonly name: string;
  readonly details?: { readonly issues: readonly { readonly path: string }[] };
}

const test = suite('contacts over http');
let app: App;
let resend: Resend;
let foreignKey: string;
test.before(async () => {
  app = await startApp();
  resend = new Resend(app.key, { baseUrl: app.base });
  foreignKey = (await secondTenant(app)).key;
});
test.after(() => app.stop());

/** What the SDK gave when it must have worked. */
function dataOf<T>(result: { data: T | null; error: unknown }): T {
  assert.is(result.error, null, JSON.stringify(result.error));
  assert.ok(result.data);
  return result.data;
}

const statusOf = (result: {
  error: { statusCode: number | null } | null;
}): number | null | undefined => result.error?.statusCode;

/** The answer of a call that must be refused with this status; the paths of its issues. */
function issuesOf(answer: Answer<unknown>, status = 422): readonly string[] {
  assert.is(answer.status, status, JSON.stringify(answer.body));
  return ((answer.body as Refused).details?.issues ?? []).map(({ path }) => path);
}

const made = async (path: string, body: unknown): Promise<Item> => {
  const answer = await app.call<Item>('POST', path, { body });
  assert.is(answer.status, 201, `${path}: ${JSON.stringify(answer.body)}`);
  return answer.body;
};
const read = async (path: string): Promise<List> => {
  const answer = await app.call<List>('GET', path);
  assert.is(answer.status, 200, `${path}: ${JSON.stringify(answer.body)}`);
  return answer.body;
};

test('the SDK makes, reads, changes and removes a contact by id and by address', async () => {
  const { id } = dataOf(
    await resend.contacts.create({ email: 'c+d@sdk.example', firstName: 'C', unsubscribed: false }),
  );
  const again = await resend.contacts.create({ email: 'C+D@sdk.example', lastName: 'D' });
  assert.is(dataOf(again).id, id);
  for (const name of [{ id }, { email: 'c+d@sdk.example' }, { email: 'C+D@SDK.example' }]) {
    const contact = dataOf(await resend.contacts.get(name));
    assert.is(contact.object, 'contact');
    assert.is(contact.id, id);
    assert.is(contact.email, 'c+d@sdk.example');
    assert.is(contact.first_name, 'C');
    assert.is(contact.last_name, 'D');
    assert.is(contact.unsubscribed, false);
    assert.equal(contact.properties, {});
  }
  const update = { email: 'c+d@sdk.example', firstName: null, unsubscribed: true };
  assert.is(dataOf(await resend.contacts.update(update)).id, id);
  const changed = dataOf(await resend.contacts.get({ id }));
  assert.equal([changed.first_name, changed.last_name, changed.unsubscribed], [null, 'D', true]);
  const removed = dataOf(await resend.contacts.remove({ email: 'c+d@sdk.example' }));
  assert.equal(removed, { object: 'contact', id, contact: id, deleted: true });
  assert.is(statusOf(await resend.contacts.get({ id })), 404);
  assert.is(statusOf(await resend.contacts.remove({ id })), 404);
  assert.is(statusOf(await resend.contacts.update({ id, firstName: 'x' })), 404);
});

test('properties: typed at the root, plain under /api and in lists', async () => {
  const property = dataOf(
    await resend.contactProperties.create({ key: 'tier', type: 'string', fallbackValue: 'free' }),
  );
  const { id } = dataOf(
    await resend.contacts.create({
      email: 'p@sdk.example',
      properties: { tier: 'gold', seats: 7 },
    }),
  );
  const typed = { tier: { type: 'string', value: 'gold' }, seats: { type: 'number', value: 7 } };
  const plain = { tier: 'gold', seats: 7 };
  assert.equal(dataOf(await resend.contacts.get({ id })).properties, typed);
  assert.equal((await app.call('GET', '/contacts/p@sdk.example')).body['properties'], typed);
  assert.equal((await app.call('GET', `/api/contacts/${id}`)).body['properties'], plain);
  for (const path of ['/contacts', '/api/contacts']) {
    assert.equal((await read(path)).data.find((one) => one.id === id)?.['properties'], plain);
  }
  // What the key was never made for, the first value did.
  const listed = dataOf(await resend.contactProperties.list()).data;
  assert.equal(
    listed.map(({ key, type, fallbackValue }) => [key, type, fallbackValue]),
    [
      ['seats', 'number', null],
      ['tier', 'string', 'free'],
    ],
  );
  const change = { id: property.id, fallbackValue: 'basic' };
  dataOf(await resend.contactProperties.update(change));
  assert.is(dataOf(await resend.contactProperties.get(property.id)).fallbackValue, 'basic');
  dataOf(await resend.contacts.update({ id, properties: { tier: null, seats: 8 } }));
  assert.equal((await app.call('GET', `/api/contacts/${id}`)).body['properties'], { seats: 8 });
  assert.is(dataOf(await resend.contactProperties.remove(property.id)).deleted, true);
  assert.is(statusOf(await resend.contactProperties.get(property.id)), 404);

  // The older name of the same resource.
  const older = await made('/api/properties', { key: 'older', type: 'boolean' });
  assert.equal((await read('/api/properties?limit=1')).data[0]?.['key'], 'older');
  assert.equal((await app.call('GET', `/api/properties/${older.id}`)).body['key'], 'older');
  assert.is((await app.call('DELETE', `/api/properties/${older.id}`)).status, 200);
  assert.is((await app.call('GET', '/properties')).status, 404);

  for (const [body, paths] of [
    [{ key: 'seats', type: 'string' }, ['key']],
    [{ key: 'a b', type: 'string', fallback_value: 5 }, ['key', 'fallback_value']],
    [{ key: 'x', type: 'list' }, ['type']],
    [{ key: 'x', type: 'number', fallback_value: 'many' }, ['fallback_value']],
  ] as const) {
    assert.equal(issuesOf(await app.call('POST', '/contact-properties', { body })), paths);
  }
  const { id: seats } = listed[0]!;
  for (const [body, path] of [
    [{ key: 'other' }, 'key'],
    [{ type: 'string' }, 'type'],
    [{ fallback_value: [] }, 'fallback_value'],
  ] as const) {
    const answer = await app.call('PATCH', `/contact-properties/${seats}`, { body });
    assert.equal(issuesOf(answer), [path]);
  }
  assert.equal(issuesOf(await app.call('GET', '/contact-properties/seats')), ['id']);
});

test('segments: ids as texts or in objects, members by id and by address', async () => {
  const { id: segmentId, name } = dataOf(await resend.segments.create({ name: 'Customers' }));
  assert.is(name, 'Customers');
  const second = dataOf(await resend.segments.create({ name: 'Second' })).id;
  const { id } = dataOf(
    await resend.contacts.create({ email: 'm@sdk.example', segments: [{ id: segmentId }] }),
  );
  const segments = [segmentId.toUpperCase(), second];
  const body = { email: 'M@sdk.example', segments };
  const same = await app.call('POST', '/contacts', { body });
  assert.is(same.body['id'], id);
  const inBoth = dataOf(await resend.contacts.segments.list({ email: 'm@sdk.example' }));
  assert.equal(
    inBoth.data.map((one) => one.id),
    [second, segmentId],
  );
  const page = await read(`/contacts/${id}/segments?limit=1`);
  assert.equal([page.data[0]?.id, page.has_more], [second, true]);
  const rest = await read(`/contacts/${id}/segments?limit=1&after=${second}`);
  assert.equal([rest.data[0]?.id, rest.has_more], [segmentId, false]);

  for (const path of [
    `/segments/${segmentId}/contacts`,
    `/contacts?segment_id=${segmentId}`,
    `/audiences/${segmentId}/contacts`,
  ]) {
    assert.equal(
      (await read(path)).data.map((one) => one.id),
      [id],
      path,
    );
  }
  const member = { email: 'm@sdk.example', segmentId };
  const removed = dataOf(await resend.contacts.segments.remove(member));
  assert.equal(removed, {
    object: 'contact_segment',
    id: segmentId,
    contact_id: id,
    segment_id: segmentId,
    audienceId: segmentId,
    deleted: true,
  });
  assert.is(statusOf(await resend.contacts.segments.remove(member)), 404);
  for (let turn = 0; turn < 2; turn += 1) {
    const added = dataOf(await resend.contacts.segments.add({ contactId: id, segmentId }));
    assert.is(added.id, segmentId);
  }
  dataOf(await resend.segments.update(second, { name: 'Renamed' }));
  assert.is(dataOf(await resend.segments.get(second)).name, 'Renamed');
  assert.is(dataOf(await resend.segments.remove(second)).deleted, true);
  assert.is(statusOf(await resend.segments.get(second)), 404);
  assert.is(statusOf(await resend.contacts.list({ segmentId: second })), 404);
  assert.is((await read(`/contacts/${id}/segments`)).data.length, 1);

  for (const [wrong, path] of [
    [{ name: ' ' }, 'name'],
    [{ name: 'a\nb' }, 'name'],
    [{ name: 'a\0b' }, 'name'],
    [{ name: 'n'.repeat(256) }, 'name'],
    [{ name: 'Dynamic', filter: { and: [] } }, 'filter'],
  ] as const) {
    assert.equal(issuesOf(await app.call('POST', '/segments', { body: wrong })), [path]);
  }
  for (const [given, path] of [
    [['x'], 'segments.0'],
    [[segmentId, newId()], 'segments.1'],
    [[{ id: second }], 'segments.0'],
    [Array.from({ length: 101 }, newId), 'segments'],
  ] as const) {
    const answer = await app.call('POST', '/contacts', {
      body: { email: 'never@sdk.example', segments: given },
    });
    assert.equal(issuesOf(answer), [path]);
  }
  assert.is((await app.call('GET', '/contacts/never@sdk.example')).status, 404);
  assert.equal(issuesOf(await app.call('POST', `/contacts/${id}/segments/x`)), ['segment_id']);
});

test('topics of a contact: the bare array of the SDK and the object of others, and what holds without a choice', async () => {
  const topic = async (name: string, defaultSubscription: 'opt_in' | 'opt_out') =>
    dataOf(await resend.topics.create({ name, defaultSubscription })).id;
  const news = await topic('News', 'opt_in');
  const offers = await topic('Offers', 'opt_out');
  const email = 'topics@sdk.example';
  const { id } = dataOf(await resend.contacts.create({ email }));
  const subscriptions = async (): Promise<unknown> =>
    (await read(`/contacts/${email}/topics`)).data.map((one) => [one.id, one['subscription']]);
  const standing = (a: string, b: string) => [
    [offers, a],
    [news, b],
  ];
  assert.equal(await subscriptions(), standing('opt_out', 'opt_in'));
  const choice = { id: news, subscription: 'opt_out' as const };
  assert.is(dataOf(await resend.contacts.topics.update({ email, topics: [choice] })).id, id);
  assert.equal(await subscriptions(), standing('opt_out', 'opt_out'));
  const topics = [{ id: offers.toUpperCase(), subscription: 'opt_in' }];
  const answer = await app.call('PATCH', `/api/contacts/${id}/topics`, { body: { topics } });
  assert.equal(answer.body, { object: 'contact_topics', id, contact_id: id, topics });
  assert.equal(await subscriptions(), standing('opt_in', 'opt_out'));
  const one = await read(`/contacts/${id}/topics?limit=1&after=${offers}`);
  assert.equal([one.data[0]?.id, one.has_more], [news, false]);

  for (const [body, path] of [
    [[{ id: newId(), subscription: 'opt_in' }], 'topics.0.id'],
    [[choice, { id: 'x', subscription: 'opt_in' }], 'topics.1.id'],
    [{ topics: Array.from({ length: 101 }, () => choice) }, 'topics'],
    [{}, 'topics'],
    ['x', 'body'],
  ] as const) {
    const wrong = await app.call('PATCH', `/contacts/${id}/topics`, { body: JSON.stringify(body) });
    assert.equal(issuesOf(wrong), [path]);
  }
  dataOf(await resend.topics.remove(news));
  assert.equal(await subscriptions(), [[offers, 'opt_in']]);
});

test('audiences are segments, and what leaves its last one is gone', async () => {
  const first = await made('/audiences', { name: 'First' });
  assert.equal([first['object'], first['name']], ['audience', 'First']);
  const second = dataOf(await resend.segments.create({ name: 'Second' })).id;
  const email = 'a+b@audience.example';
  const { id } = dataOf(await resend.contacts.create({ audienceId: first.id, email }));
  assert.is((await made(`/audiences/${second}/contacts`, { email, first_name: 'A' })).id, id);
  for (const audienceId of [first.id, second]) {
    assert.is(dataOf(await resend.contacts.get({ audienceId, email })).first_name, 'A');
    assert.is(dataOf(await resend.contacts.get({ audienceId, id })).email, email);
  }
  dataOf(await resend.contacts.update({ audienceId: second, email, lastName: 'B' }));
  assert.is((await app.call('GET', `/contacts/${id}`)).body['last_name'], 'B');

  dataOf(await resend.contacts.remove({ audienceId: first.id, email }));
  assert.is(statusOf(await resend.contacts.get({ audienceId: first.id, email })), 404);
  assert.is(statusOf(await resend.contacts.update({ audienceId: first.id, id })), 404);
  assert.is(statusOf(await resend.contacts.remove({ audienceId: first.id, id })), 404);
  assert.is((await app.call('GET', `/contacts/${id}`)).status, 200);
  const removed = dataOf(await resend.contacts.remove({ audienceId: second, id }));
  assert.equal(removed, { object: 'contact', id, contact: id, deleted: true });
  assert.is((await app.call('GET', `/contacts/${id}`)).status, 404);

  const listed = await read('/audiences');
  assert.ok(listed.data.every((one) => one['object'] === 'audience'));
  const patch = await app.call('PATCH', `/audiences/${first.id}`, { body: { name: 'Renamed' } });
  assert.equal(patch.body, { object: 'audience', id: first.id });
  assert.is((await app.call('GET', `/audiences/${first.id}`)).body['name'], 'Renamed');
  const gone = await app.call('DELETE', `/audiences/${first.id}`);
  assert.equal(gone.body, { object: 'audience', id: first.id, deleted: true });
  const into = { body: { email } };
  assert.is((await app.call('POST', `/audiences/${first.id}/contacts`, into)).status, 404);
  assert.is((await app.call('GET', `/audiences/${first.id}/contacts`)).status, 404);
  assert.equal(issuesOf(await app.call('POST', '/audiences/x/contacts', into)), ['id']);
});

test('a walk through all contacts sees each once, with its own cursor only', async () => {
  const { id: segmentId } = await made('/segments', { name: 'Walk' });
  const emails = Array.from({ length: 7 }, (_, index) => `walk${index}@sdk.example`);
  for (const email of emails) await made('/contacts', { email, segments: [segmentId] });
  const outside = await made('/contacts', { email: 'outside@sdk.example' });
  const walk = async (path: string): Promise<readonly unknown[]> => {
    const seen: unknown[] = [];
    let after = '';
    for (;;) {
      const page = await read(`${path}limit=3${after}`);
      seen.push(...page.data.map((one) => one['email']));
      if (!page.has_more) return seen;
      after = `&after=${page.data.at(-1)!.id}`;
    }
  };
  assert.equal(await walk(`/segments/${segmentId}/contacts?`), emails.toReversed());
  const all = await walk('/contacts?');
  assert.equal(all.slice(0, 8), ['outside@sdk.example', ...emails.toReversed()]);
  assert.is(new Set(all).size, all.length);
  for (const [path, issue] of [
    [`/segments/${segmentId}/contacts?after=${outside.id}`, 'after'],
    [`/contacts?before=${newId()}`, 'before'],
    ['/contacts?limit=101', 'limit'],
    ['/contacts?limit=1e1', 'limit'],
    ['/contacts?segment_id=x', 'segment_id'],
  ] as const) {
    assert.equal(issuesOf(await app.call('GET', path)), [issue], path);
  }
});

test('addresses in the path as people write them', async () => {
  const { id } = await made('/contacts', { email: 'Jörg+x/y@Bücher.example' });
  for (const name of [
    'Jörg+x%2Fy@Bücher.example',
    'j%C3%B6rg%2Bx%2Fy%40b%C3%BCcher.example',
    'JÖRG+x%2fy@xn--bcher-kva.example',
    '%20jörg+x%2Fy@bücher.example%20',
  ]) {
    const { status, body } = await app.call('GET', `/contacts/${name}`);
    assert.equal([status, body['id']], [200, id], name);
  }
  for (const name of [
    'nobody',
    'x%00y@z.example',
    '%F0%9F%92%A9',
    "';--",
    newId(),
    'j%C3%B6rg@b',
  ]) {
    for (const method of ['GET', 'DELETE', 'PATCH']) {
      const options = method === 'PATCH' ? { body: { first_name: 'x' } } : {};
      const { status, body } = await app.call(method, `/contacts/${name}`, options);
      assert.equal([status, body['message']], [404, 'Contact not found'], `${method} ${name}`);
    }
  }
  const answer = await app.call('GET', '/contacts/imports');
  assert.is(answer.body['object'], 'list', 'a path of its own wins over the id');
});

test('wrong fields are named, and nothing is made of them', async () => {
  const email = 'wrong@sdk.example';
  for (const [body, paths] of [
    [{}, ['email']],
    [{ email: 5 }, ['email']],
    [{ email: 'Name <wrong@sdk.example>' }, ['email']],
    [{ email: `${'a'.repeat(65)}@sdk.example` }, ['email']],
    [
      { email, first_name: 'x\r\nBcc: y@z.example', last_name: '\ud800' },
      ['first_name', 'last_name'],
    ],
    [{ email, first_name: 5 }, ['first_name']],
    [{ email, unsubscribed: 'yes' }, ['unsubscribed']],
    [{ email, properties: { 'a b': 'x' } }, ['properties.a b']],
    [{ email, properties: { deep: { x: 1 } } }, ['properties.deep']],
    [{ email, properties: { long: 'x'.repeat(2_001) } }, ['properties.long']],
    [{ email, properties: { nul: 'a\0' } }, ['properties.nul']],
    [{ email, topics: [{ id: newId(), subscription: 'opt_in' }] }, ['topics.0.id']],
    [{ email, topics: [{ id: newId(), subscription: 'maybe' }] }, ['topics.0.subscription']],
  ] as const) {
    assert.equal(issuesOf(await app.call('POST', '/contacts', { body })), paths);
  }
  const many = Object.fromEntries(Array.from({ length: 10_000 }, (_, i) => [`k${i}`, 'v']));
  issuesOf(await app.call('POST', '/contacts', { body: { email, properties: many } }));
  // JSON.stringify has no word for these.
  for (const [properties, path] of [
    ['{"big":1e999}', 'properties.big'],
    ['{"__proto__":"x"}', 'properties.__proto__'],
  ] as const) {
    const body = `{"email":"${email}","properties":${properties}}`;
    assert.equal(issuesOf(await app.call('POST', '/contacts', { body })), [path]);
  }
  assert.is((await app.call('GET', `/contacts/${email}`)).status, 404);
  const left = await read('/contact-properties');
  assert.not.ok(left.data.some(({ key }) => /^(long|nul|big|deep|k\d+)$/.test(String(key))));
});

test('no tenant sees or moves what another has; a key that only sends comes nowhere near', async () => {
  const { id: segmentId } = await made('/segments', { name: 'Mine' });
  const { id } = await made('/contacts', { email: 'mine@sdk.example', segments: [segmentId] });
  const foreign = await app.call<Item>('POST', '/contacts', {
    key: foreignKey,
    body: { email: 'mine@sdk.example', first_name: 'Theirs' },
  });
  assert.is(foreign.status, 201);
  assert.is.not(foreign.body.id, id);
  assert.is((await app.call('GET', `/contacts/${id}`)).body['first_name'], null);
  const theirs = await app.call<List>('GET', '/contacts', { key: foreignKey });
  assert.equal(
    theirs.body.data.map((one) => one.id),
    [foreign.body.id],
  );
  for (const path of [
    `/contacts/${foreign.body.id}/segments/${segmentId}`,
    `/contacts/${id}/segments/${segmentId}`,
  ]) {
    assert.is((await app.call('POST', path, { key: foreignKey })).status, 404, path);
  }
  const stolen = { email: 'mine@sdk.example', segments: [segmentId] };
  const refused = await app.call('POST', '/contacts', { key: foreignKey, body: stolen });
  assert.equal(issuesOf(refused), ['segments.0']);
  const cursor = await app.call('GET', `/contacts?after=${id}`, { key: foreignKey });
  assert.equal(issuesOf(cursor), ['after']);

  const { token } = dataOf(
    await resend.apiKeys.create({ name: 'sends', permission: 'sending_access' }),
  );
  for (const path of [
    '/contacts',
    '/segments',
    '/audiences',
    '/api/properties',
    '/contacts/x@y.z',
  ]) {
    const { status, body } = await app.call('GET', path, { key: token });
    assert.equal([status, body['name']], [401, 'restricted_api_key'], path);
  }
});

test.run();
