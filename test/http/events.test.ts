// Custom events over the API and through the SDK: definitions by id and by name, sending with and without a schema, and what
// another tenant sees of it.
import { Resend } from 'resend';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { startApp, type App } from '../support/app.ts';
import { secondTenant } from '../support/second-tenant.ts';
import { assertHeaders, assertRefused } from './envelope.ts';

const test = suite('events');
let app: App;
let resend: Resend;
let stranger: string;
test.before(async () => {
  app = await startApp();
  resend = new Resend(app.key, { baseUrl: app.base });
  ({ key: stranger } = await secondTenant(app));
});
test.after(() => app.stop());

function dataOf<T>(result: { data: T | null; error: unknown }): T {
  assert.is(result.error, null, JSON.stringify(result.error));
  return result.data!;
}
const notFound = { status: 404, code: 'not_found', says: /^Event not found$/ };

test('a definition is made, read by id and name, changed and removed', async () => {
  const name = 'Ein Ereignis/é 100 %';
  const created = await app.call('POST', '/api/events', {
    body: { name, schema: { plan: 'string', since: 'date' } },
  });
  assert.is(created.status, 201);
  assertHeaders(created);
  const id = String(created.body['id']);
  assert.equal(created.body, { object: 'event', id });
  for (const identifier of [id, id.toUpperCase(), name]) {
    const event = dataOf(await resend.events.get(identifier));
    assert.equal(event, {
      object: 'event',
      id,
      name,
      schema: { plan: 'string', since: 'date' },
      created_at: event.created_at,
      updated_at: event.created_at,
    });
  }
  assert.equal(dataOf(await resend.events.update(name, { schema: null })), { object: 'event', id });
  const changed = dataOf(await resend.events.get(id));
  assert.is(changed.schema, null);
  assert.not.equal(changed.updated_at, changed.created_at);
  assert.equal(dataOf(await resend.events.remove(name)), { object: 'event', id, deleted: true });
  assertRefused(await app.call('GET', `/events/${id}`), notFound);
  assertRefused(await app.call('DELETE', `/events/${encodeURIComponent(name)}`), notFound);
});

test('what looks like an id is first taken for one, then for a name', async () => {
  const first = dataOf(await resend.events.create({ name: 'plain' }));
  const named = dataOf(await resend.events.create({ name: first.id }));
  assert.is(dataOf(await resend.events.get(first.id)).name, 'plain');
  dataOf(await resend.events.remove(first.id));
  assert.is(dataOf(await resend.events.get(first.id)).id, named.id);
});

test('another tenant sees nothing of it and may use the same name', async () => {
  const { id } = dataOf(await resend.events.create({ name: 'shared' }));
  for (const path of [`/events/${id}`, '/events/shared', `/events/${newId()}`, '/events/none']) {
    assertRefused(await app.call('GET', path, { key: stranger }), notFound);
    assertRefused(await app.call('DELETE', path, { key: stranger }), notFound);
    const patch = { key: stranger, body: { schema: null } };
    assertRefused(await app.call('PATCH', path, patch), notFound);
  }
  const own = await app.call('POST', '/events', { key: stranger, body: { name: 'shared' } });
  assert.is(own.status, 201);
  const list = await app.call<{ data: unknown[] }>('GET', '/events', { key: stranger });
  assert.is(list.body.data.length, 1);
});

test('pages', async () => {
  const made: string[] = [];
  for (let index = 0; index < 3; index += 1) {
    made.unshift(dataOf(await resend.events.create({ name: `page.${index}` })).id);
  }
  const [third, second, first] = made;
  const page = dataOf(await resend.events.list({ limit: 2 }));
  assert.equal([page.data.map(({ id }) => id), page.has_more], [[third, second], true]);
  const next = dataOf(await resend.events.list({ limit: 1, after: second! }));
  assert.is(next.data[0]!.id, first);
  const back = dataOf(await resend.events.list({ limit: 2, before: first! }));
  assert.equal(
    back.data.map(({ id }) => id),
    [third, second],
  );
  for (const query of ['limit=0', 'limit=101', 'after=x', `after=${newId()}`]) {
    const paths = [query.split('=')[0]!];
    const refused = { status: 422, code: 'validation_error', paths };
    assertRefused(await app.call('GET', `/events?${query}`), refused);
  }
});

test('bad definitions', async () => {
  dataOf(await resend.events.create({ name: 'taken' }));
  const table: readonly (readonly [unknown, string])[] = [
    [{}, 'name'],
    [{ name: '' }, 'name'],
    [{ name: 'resend:mine' }, 'name'],
    [{ name: 'a\nb' }, 'name'],
    [{ name: 'x'.repeat(101) }, 'name'],
    [{ name: 'taken' }, 'name'],
    [{ name: 'a', schema: { plan: 'text' } }, 'schema.plan'],
    [{ name: 'a', schema: { '': 'string' } }, 'schema'],
    [
      {
        name: 'a',
        schema: Object.fromEntries(Array.from({ length: 101 }, (_, n) => [`f${n}`, 'string'])),
      },
      'schema',
    ],
  ];
  for (const [body, path] of table) {
    const answer = await app.call<{ details: { issues: { path: string }[] } }>('POST', '/events', {
      body,
    });
    assert.is(answer.status, 422, JSON.stringify(answer.body));
    assert.match(answer.body.details.issues[0]!.path, path, JSON.stringify(answer.body));
  }
  assert.is((await app.call('PATCH', '/events/taken', { body: {} })).status, 422);
});

test('sending: who it is about, what it holds, and that it needs no definition', async () => {
  dataOf(await resend.events.create({ name: 'typed', schema: { seats: 'number' } }));
  const contact = dataOf(await resend.contacts.create({ email: 'ann@recipient.test' }));
  const sent = await app.call('POST', '/events/send', {
    body: { event: 'typed', contact_id: contact.id, payload: { seats: 5, more: [1] } },
  });
  assert.equal([sent.status, sent.body], [202, { object: 'event', event: 'typed' }]);
  assertHeaders(sent);
  const email = 'not.a.contact@recipient.test';
  dataOf(await resend.events.send({ event: 'never defined', email }));
  const table: readonly (readonly [Record<string, unknown>, string])[] = [
    [{}, 'event'],
    [{ event: 'typed' }, 'contact_id'],
    [{ event: 'typed', email, contact_id: contact.id }, 'email'],
    [{ event: 'typed', email: 'nobody' }, 'email'],
    [{ event: 'typed', email: 'Ann <ann@recipient.test>' }, 'email'],
    [{ event: 'typed', contact_id: 'x' }, 'contact_id'],
    [{ event: 'typed', contact_id: newId() }, 'contact_id'],
    [{ event: 'resend:typed', email }, 'event'],
    [{ event: 'typed', email, payload: { seats: 'five' } }, 'payload.seats'],
    [{ event: 'typed', email, payload: [1] }, 'payload'],
    [{ event: 'typed', email, payload: { a: 'x'.repeat(70_000) } }, 'payload'],
    [{ event: 'typed', email, payload: { a: 'x\0' } }, 'payload'],
  ];
  for (const [body, path] of table) {
    const answer = await app.call<{ details: { issues: { path: string }[] } }>(
      'POST',
      '/events/send',
      { body },
    );
    assert.is(answer.status, 422, JSON.stringify([body, answer.body]).slice(0, 300));
    assert.match(answer.body.details.issues[0]!.path, path);
  }
  // A contact of somebody else is none.
  const foreign = await app.call('POST', '/events/send', {
    key: stranger,
    body: { event: 'typed', contact_id: contact.id },
  });
  const missing = await app.call('POST', '/events/send', {
    key: stranger,
    body: { event: 'typed', contact_id: newId() },
  });
  assert.equal([foreign.status, foreign.body], [422, missing.body]);
});

test.run();
