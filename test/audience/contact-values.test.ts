// What a contact may be given: values with the type of their property, names of one line, addresses; and properties that
// come and go.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createContactVerbs, findContact } from '../../src/audience/contacts.ts';
import { createPropertyVerbs, PROPERTIES_MAX } from '../../src/audience/properties.ts';
import { newId } from '../../src/store/id.ts';
import type { Store } from '../../src/store/orm.ts';
import { at, openAudience, refusal, type Audience } from '../support/audience.ts';

const test = suite('contact values');
let audience: Audience;
let store: Store;
let tenantId: string;
let other: string;
let properties: ReturnType<typeof createPropertyVerbs>;
let upsert: Audience['upsert'];

test.before(async () => {
  audience = await openAudience();
  ({ store, tenantId, other, upsert } = audience);
  properties = createPropertyVerbs(store, () => at);
});
test.after(() => audience.stop());

const everything = { limit: undefined, after: undefined, before: undefined };

test('a property that is removed takes its values along; one of the same key begins empty', async () => {
  const { id } = await upsert({
    email: 'prop@example.org',
    properties: { plan: 'gold', kept: 'yes' },
  });
  const plan = [...(await properties.list(tenantId, everything)).items].find(
    ({ key }) => key === 'plan',
  )!;
  assert.is(plan.type, 'string');
  assert.is(await properties.remove(other, plan.id), false);
  assert.is(await properties.remove(tenantId, plan.id), true);
  assert.equal((await findContact(store.pool, tenantId, id))?.properties, { kept: 'yes' });
  await properties.create(tenantId, { key: 'plan', type: 'number', fallback_value: '3' });
  assert.equal((await findContact(store.pool, tenantId, id))?.properties, { kept: 'yes' });
  await upsert({ email: 'prop@example.org', properties: { plan: '12' } });
  assert.equal((await findContact(store.pool, tenantId, id))?.properties, {
    kept: 'yes',
    plan: 12,
  });
  const { rows } = await store.pool.query<{ count: number }>(
    `select count(*)::integer as count from contact c, jsonb_each(c.properties) where c.id = $1`,
    [id],
  );
  assert.is(rows[0]?.count, 2, 'the value of the removed property is swept');
});

test('values have the type of their property; fallbacks are stored as what they are', async () => {
  for (const [type, fallback, stored] of [
    ['string', '5', '5'],
    ['string', 'null', 'null'],
    ['string', '', ''],
    ['number', -1.5, -1.5],
    ['number', '1e3', 1000],
    ['boolean', false, false],
    ['boolean', 'TRUE', true],
    ['number', null, null],
  ] as const) {
    const key = `f_${newId().replaceAll('-', '')}`;
    const id = await properties.create(tenantId, { key, type, fallback_value: fallback });
    assert.is((await properties.find(tenantId, id))?.fallbackValue, stored, `${type} ${fallback}`);
    assert.is((await properties.list(tenantId, everything)).items[0]?.fallbackValue, stored);
    for (const bad of [[], {}, 'x\0', '\ud800', 'y'.repeat(2_001), Infinity, Number.NaN]) {
      const { issues } = await refusal(properties.update(tenantId, id, { fallback_value: bad }));
      assert.is(issues[0]?.path, 'fallback_value');
    }
    const wrong = type === 'string' ? 5 : 'words';
    await refusal(upsert({ email: 'typed@example.org', properties: { [key]: wrong } }));
  }
  assert.is(await findContact(store.pool, tenantId, 'typed@example.org'), null);
  for (const key of ['', 'a b', 'a-b', 'é', 'k'.repeat(51), 'a\0', '__proto__', 'Email']) {
    await refusal(properties.create(tenantId, { key, type: 'string' }));
    await refusal(upsert({ email: 'k@example.org', properties: Object.fromEntries([[key, 'v']]) }));
  }
});

test('hostile names and values: stored as they are, or refused with the field that is wrong', async () => {
  const hostile = [
    `'; drop table contact; --`,
    '<script>alert(1)</script>',
    '{{{FIRST_NAME}}}',
    '$1 %s \\x00',
    '田中さんにあげて下さい',
    '👩‍👩‍👧‍👦 ﷽ Ṱ̺̺̕o',
    'undefined',
    'null',
    '{"a":1}',
    'n'.repeat(255),
  ];
  for (const [index, text] of hostile.entries()) {
    const email = `hostile${index}@example.org`;
    await upsert({ email, firstName: text, properties: { note: text } });
    const found = await findContact(store.pool, tenantId, email);
    assert.is(found?.firstName, text);
    assert.is(found?.properties['note'], text);
  }
  for (const text of ['a\0b', '\ud800', 'a\nb', 'a\u0085b', 'a\u2028b', 'n'.repeat(256)]) {
    const { issues } = await refusal(upsert({ email: 'h@example.org', lastName: text }));
    assert.is(issues[0]?.path, 'last_name', JSON.stringify(text));
  }
  for (const email of [
    '',
    'a',
    'A <a@b.example>',
    'a@b.example, c@d.example',
    'a\0@b.example',
    'a@b',
  ]) {
    const { issues } = await refusal(upsert({ email }));
    assert.is(issues[0]?.path, 'email', email);
  }
  await upsert({ email: 'blank@example.org', firstName: '  ' });
  assert.is((await findContact(store.pool, tenantId, 'blank@example.org'))?.firstName, null);
});

test('there are never more properties than allowed', async () => {
  const made = (await properties.list(tenantId, everything)).items.length;
  assert.ok(made > 0);
  const many = Object.fromEntries(
    Array.from({ length: PROPERTIES_MAX }, (_, index) => [`many_${index}`, index]),
  );
  const { issues } = await refusal(upsert({ email: 'many@example.org', properties: many }));
  assert.match(issues[0]?.message ?? '', String(PROPERTIES_MAX));
  assert.is((await properties.list(tenantId, everything)).items.length, made);
});

test('24 at once who need the same new property make one, and all of them are served', async () => {
  const contacts = createContactVerbs(store, () => at);
  const keys = ['zeta', 'alpha', 'mid'].map((key) => `${key}_at_once`);
  const people = Array.from({ length: 24 }, (_, n) => `once${n}@example.org`);
  await Promise.all(
    people.map((email, n) => {
      const order = n % 2 === 0 ? keys : keys.toReversed();
      const given = Object.fromEntries(order.map((key) => [key, 'v']));
      return contacts.create(tenantId, { email, properties: given });
    }),
  );
  const { items } = await properties.list(tenantId, everything);
  const made = items.map(({ key }) => key).filter((key) => key.endsWith('_at_once'));
  assert.equal(made.toSorted(), keys.toSorted());
  for (const email of people) {
    const held = (await findContact(store.pool, tenantId, email))?.properties;
    assert.equal(held, Object.fromEntries(keys.map((key) => [key, 'v'])), email);
  }
  const outcomes = await Promise.allSettled(
    people.map(() => properties.create(tenantId, { key: 'declared_at_once', type: 'number' })),
  );
  assert.is(outcomes.filter(({ status }) => status === 'fulfilled').length, 1);
  for (const outcome of outcomes) {
    if (outcome.status === 'fulfilled') continue;
    const { issues } = await refusal(Promise.reject(outcome.reason as Error));
    assert.match(issues[0]!.message, /already/);
  }
});

test.run();
