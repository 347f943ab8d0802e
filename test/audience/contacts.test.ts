// Contacts as the database holds them: whoever writes one at the same time, what is told of it, and what is kept of
// segments and topics that go.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  addToSegment,
  changeContact,
  removeContact,
  removeFromSegment,
  setSubscriptions,
  upsertContact,
  upsertContacts,
  UPSERTS_MAX,
} from '../../src/audience/contact-changes.ts';
import { createContactVerbs, findContact } from '../../src/audience/contacts.ts';
import { createSegmentVerbs } from '../../src/audience/segments.ts';
import { createTopicVerbs } from '../../src/audience/topics.ts';
import { newId } from '../../src/store/id.ts';
import type { Store } from '../../src/store/orm.ts';
import { eventTypes } from '../../src/timeline/outbox.ts';
import { until } from '../support/app.ts';
import { at, openAudience, type Audience, type Told } from '../support/audience.ts';

const test = suite('contacts');
const later = new Date('2026-05-06T13:00:00.000Z');
let audience: Audience;
let store: Store;
let tenantId: string;
let other: string;
let segments: ReturnType<typeof createSegmentVerbs>;
let topics: ReturnType<typeof createTopicVerbs>;
let contacts: ReturnType<typeof createContactVerbs>;
let upsert: Audience['upsert'];
let told: Audience['told'];

test.before(async () => {
  audience = await openAudience();
  ({ store, tenantId, other, upsert, told } = audience);
  segments = createSegmentVerbs(store, () => at);
  topics = createTopicVerbs(store, () => at);
  contacts = createContactVerbs(store, () => at);
});
test.after(() => audience.stop());

/** So many connections wait for another one. */
const untilWaiting = (count: number): Promise<unknown> =>
  until(
    () =>
      store.pool.query(
        `select 1 from pg_stat_activity
         where datname = current_database() and wait_event_type = 'Lock'`,
      ),
    ({ rowCount }) => rowCount === count,
  );

const types = (list: readonly Told[]): readonly string[] => list.map(({ type }) => type);

test('one address is one contact, however it is spelled, and its values add up', async () => {
  const first = await upsert({
    email: ' Ada+News@Example.ORG ',
    firstName: 'Ada',
    properties: { company: 'Engines', seats: 7, active: true },
  });
  assert.is(first.isNew, true);
  const second = await upsert({
    email: 'ada+news@example.org',
    lastName: 'Lovelace',
    properties: { seats: 8, company: null },
  });
  assert.equal(second, { id: first.id, isNew: false, isChanged: true });
  for (const name of ['ADA+NEWS@EXAMPLE.ORG', first.id, first.id.toUpperCase()]) {
    const found = await findContact(store.pool, tenantId, name);
    assert.is(found?.email, 'Ada+News@Example.ORG', name);
    assert.is(found?.firstName, 'Ada');
    assert.is(found?.lastName, 'Lovelace');
    assert.equal(found?.properties, { seats: 8, active: true });
    assert.equal(found?.createdAt, at);
  }
  for (const name of ['ada news@example.org', 'ada@example.org', '', 'a\0b', newId()]) {
    assert.is(await findContact(store.pool, tenantId, name), null, name);
  }
  assert.is(await findContact(store.pool, other, first.id), null);
  assert.is(await findContact(store.pool, other, 'ada+news@example.org'), null);

  await upsert({ email: 'o@müller.example' });
  assert.is(
    (await findContact(store.pool, tenantId, 'O@xn--mller-kva.example'))?.email,
    'o@müller.example',
  );
  await told();
});

test('makers of the same contact at the same time make one, and nobody fails', async () => {
  const made = await Promise.all(
    Array.from({ length: 24 }, (_, index) =>
      upsert({ email: 'race@example.org', properties: { [`raced_${index % 3}`]: index } }),
    ),
  );
  assert.is(new Set(made.map(({ id }) => id)).size, 1);
  assert.is(made.filter(({ isNew }) => isNew).length, 1);
  const list = await told();
  assert.is(list.filter(({ type }) => type === 'contact.created').length, 1);
  assert.is(list.filter(({ type }) => type === 'contact.updated').length, 23);
});

test('two files with the same people in another order do not wait for each other in a circle', async () => {
  const people = Array.from({ length: 200 }, (_, index) => ({ email: `both${index}@example.org` }));
  const orders = [people, people.toReversed(), people.toSorted(() => 1), people.slice(50)];
  const outcomes = await Promise.all(
    orders.map((order, index) =>
      store.transact((client) =>
        upsertContacts(
          client,
          tenantId,
          order.map((one) => ({ ...one, firstName: `File ${index}` })),
          { at, tells: false },
        ),
      ),
    ),
  );
  assert.is(outcomes.flat().filter(({ isNew }) => isNew).length, 200);
  assert.equal(await told(), []);
});

test('makers and removers of one contact at the same time end with it there or not', async () => {
  await Promise.all(
    Array.from({ length: 30 }, async (_, index) => {
      if (index % 2 === 0) return upsert({ email: 'flicker@example.org' });
      const found = await findContact(store.pool, tenantId, 'flicker@example.org');
      if (found === null) return null;
      return store.transact((client) => removeContact(client, tenantId, found.id, at));
    }),
  );
  const list = await told();
  const count = (type: string): number => list.filter((one) => one.type === type).length;
  const isThere = (await findContact(store.pool, tenantId, 'flicker@example.org')) !== null;
  assert.is(count('contact.created') - count('contact.deleted'), Number(isThere));
});

test('a list in one call: its order is kept, an address that comes twice is changed twice', async () => {
  await upsert({ email: 'old@example.org', firstName: 'Old' }, false);
  const list = [
    { email: 'z@example.org', firstName: 'Z' },
    { email: 'old@example.org', firstName: 'Renamed' },
    { email: 'Z@example.org', lastName: 'Last' },
    { email: 'a@example.org' },
  ];
  const run = (onConflict: 'upsert' | 'skip') =>
    store.transact((client) =>
      upsertContacts(client, tenantId, list, { at, tells: true, onConflict }),
    );
  const skipped = await run('skip');
  assert.equal(
    skipped.map(({ isNew, isChanged }) => [isNew, isChanged]),
    [
      [true, false],
      [false, false],
      [false, false],
      [true, false],
    ],
  );
  assert.is((await findContact(store.pool, tenantId, 'old@example.org'))?.firstName, 'Old');
  assert.equal(types(await told()), ['contact.created', 'contact.created']);
  const upserted = await run('upsert');
  assert.equal(
    upserted.map(({ isNew, isChanged }) => [isNew, isChanged]),
    [
      [false, false],
      [false, true],
      [false, true],
      [false, false],
    ],
  );
  assert.is(upserted[0]?.id, upserted[2]?.id);
  assert.equal(types(await told()), ['contact.updated', 'contact.updated']);
  const z = await findContact(store.pool, tenantId, 'z@example.org');
  assert.equal([z?.firstName, z?.lastName], ['Z', 'Last']);
  const tooMany = Array.from({ length: UPSERTS_MAX + 1 }, (_, i) => ({ email: `m${i}@x.test` }));
  let message = '';
  await store
    .transact((client) => upsertContacts(client, tenantId, tooMany, { at, tells: false }))
    .catch((error: Error) => (message = error.message));
  assert.match(message, String(UPSERTS_MAX));
});

test('webhooks hear the whole contact, once for each change, and nothing of a change that changes nothing', async () => {
  const [one, two] = [
    await segments.create(tenantId, { name: 'One' }),
    await segments.create(tenantId, { name: 'Two' }),
  ];
  const topic = await topics.create(tenantId, { name: 'News', default_subscription: 'opt_out' });
  assert.equal(types(await told()), ['topic.created']);
  const { id } = await upsert({
    email: 'told@example.org',
    firstName: 'Told',
    segmentIds: [one],
    topics: [{ id: topic, subscription: 'opt_in' }],
  });
  assert.equal(await told(), [
    {
      type: 'contact.created',
      detail: {
        id,
        audience_id: one,
        segment_ids: [one],
        created_at: at.toISOString(),
        updated_at: at.toISOString(),
        email: 'told@example.org',
        first_name: 'Told',
        last_name: null,
        unsubscribed: false,
      },
    },
    {
      type: 'contact.topics.updated',
      detail: { email: 'told@example.org', topics: [{ id: topic, subscription: 'opt_in' }] },
    },
  ]);

  await store.transact(async (client) => {
    assert.is(await changeContact(client, tenantId, id, { firstName: 'Told' }, later), true);
    assert.is(
      await setSubscriptions(client, tenantId, id, [{ id: topic, subscription: 'opt_in' }], later),
      false,
    );
    const there = { contactId: id, segmentId: one };
    assert.is(await addToSegment(client, tenantId, there, later), 'present');
  });
  await upsert({ email: 'TOLD@example.org', firstName: 'Told', segmentIds: [one] });
  assert.equal(await told(), []);
  assert.equal((await findContact(store.pool, tenantId, id))?.updatedAt, at);

  await store.transact(async (client) => {
    const member = { contactId: id, segmentId: two };
    assert.is(await addToSegment(client, tenantId, member, later), 'added');
    assert.is(
      await changeContact(client, tenantId, id, { unsubscribed: true, firstName: null }, later),
      true,
    );
    assert.is(
      await setSubscriptions(client, tenantId, id, [{ id: topic, subscription: 'opt_out' }], later),
      true,
    );
    assert.is(
      await removeFromSegment(client, tenantId, { contactId: id, segmentId: one }, later),
      true,
    );
    assert.is(await removeContact(client, tenantId, id, later), true);
  });
  const list = await told();
  assert.equal(types(list), [
    'contact.updated',
    'contact.updated',
    'contact.topics.updated',
    'contact.updated',
    'contact.deleted',
  ]);
  assert.equal(list[0]?.detail['segment_ids'], [one, two]);
  assert.is(list[0]?.detail['audience_id'], one);
  assert.equal(list[1]?.detail['first_name'], null);
  assert.is(list[1]?.detail['unsubscribed'], true);
  assert.is(list[1]?.detail['updated_at'], later.toISOString());
  assert.equal(list[3]?.detail['segment_ids'], [two]);
  assert.is(list[4]?.detail['email'], 'told@example.org');
  assert.equal(list[4]?.detail['segment_ids'], [two]);

  await topics.update(tenantId, topic, { description: null });
  assert.equal(await told(), [], 'a topic that stays as it was');
  await topics.update(tenantId, topic, { name: 'Newer', description: 'x' });
  await topics.remove(tenantId, topic);
  const about = await told();
  assert.equal(types(about), ['topic.updated', 'topic.deleted']);
  assert.is(about[0]?.detail['description'], 'x');
  assert.is(about[0]?.detail['deleted'], false);
  assert.equal(about[1]?.detail, {
    id: topic,
    name: 'Newer',
    description: 'x',
    default_subscription: 'opt_out',
    deleted: true,
    created_at: at.toISOString(),
    updated_at: at.toISOString(),
  });
  assert.equal(await told(other), [], 'what the other tenant heard');
});

test('what is rolled back is not told, and without an endpoint nothing is', async () => {
  await store
    .transact(async (client) => {
      await upsertContact(client, tenantId, { email: 'undone@example.org' }, { at, tells: true });
      throw new Error('undone');
    })
    .catch(() => undefined);
  assert.is(await findContact(store.pool, tenantId, 'undone@example.org'), null);
  assert.equal(await told(), []);
  await store.pool.query(`update webhook set events = '{contact.deleted}' where tenant_id = $1`, [
    tenantId,
  ]);
  const { id } = await upsert({ email: 'quiet@example.org' });
  assert.equal(await told(), []);
  await store.transact((client) => removeContact(client, tenantId, id, at));
  assert.equal(types(await told()), ['contact.deleted']);
  await store.pool.query(`update webhook set events = $2 where tenant_id = $1`, [
    tenantId,
    eventTypes,
  ]);
});

test('foreign and missing segments and topics are passed over, and members go with their segment', async () => {
  const foreign = await segments.create(other, { name: 'Foreign' });
  const mine = await segments.create(tenantId, { name: 'Mine' });
  const foreignTopic = await topics.create(other, { name: 'T', default_subscription: 'opt_in' });
  const { id } = await upsert({
    email: 'member@example.org',
    segmentIds: [foreign, mine, newId()],
    topics: [{ id: foreignTopic, subscription: 'opt_out' }],
  });
  const held = async (): Promise<readonly string[]> => {
    const { rows } = await store.pool.query<{ id: string }>(
      `select segment_id as id from segment_contact where contact_id = $1
       union all select topic_id from contact_topic where contact_id = $1`,
      [id],
    );
    return rows.map((row) => row.id);
  };
  assert.equal(await held(), [mine]);
  await store.transact(async (client) => {
    const wrong = { contactId: id, segmentId: foreign };
    assert.is(await addToSegment(client, tenantId, wrong, at), 'missing');
    assert.is(await addToSegment(client, other, wrong, at), 'missing');
    assert.is(await changeContact(client, other, id, { firstName: 'x' }, at), false);
    assert.is(await removeContact(client, other, id, at), false);
    assert.is(
      await setSubscriptions(
        client,
        other,
        id,
        [{ id: foreignTopic, subscription: 'opt_out' }],
        at,
      ),
      false,
    );
    assert.is(
      await removeFromSegment(client, other, { contactId: id, segmentId: mine }, at),
      false,
    );
  });
  assert.is(await segments.remove(other, mine), false);
  assert.equal(await held(), [mine]);
  assert.is(await segments.remove(tenantId, mine), true);
  assert.is(await segments.remove(tenantId, mine), false);
  assert.equal(await held(), []);
  assert.ok(await findContact(store.pool, tenantId, id));
});

test('two bulk upserts and a removal in between never wait in a circle', async () => {
  const emails = ['circle-1@example.org', 'circle-9@example.org'];
  const { id } = await upsert({ email: emails[0]! });
  const bulk = (): Promise<unknown> =>
    store.transact((client) =>
      upsertContacts(
        client,
        tenantId,
        emails.map((email) => ({ email })),
        { at, tells: false },
      ),
    );
  const { both } = await store.transact(async (client) => {
    await client.query('select 1 from contact where id = $1 for update', [id]);
    const first = bulk();
    await untilWaiting(1);
    await removeContact(client, tenantId, id, at);
    const second = bulk();
    await untilWaiting(2);
    return { both: Promise.all([first, second]) };
  });
  await both;
  const found = await Promise.all(emails.map((email) => findContact(store.pool, tenantId, email)));
  assert.ok(found.every((contact) => contact !== null));
});

test('a segment goes at once: until then nobody is missing who is in it', async () => {
  const segmentId = await segments.create(tenantId, { name: 'Large' });
  const count = 10_050;
  await store.transact(async (client) => {
    // The plan of a foreign key's check was made when there were few contacts, and would read them all each time.
    await client.query('discard plans');
    await client.query(
      `with made as (
       insert into contact (tenant_id, id, email, address, created_at, updated_at)
       select $1, gen_random_uuid(), 'g' || n || '@x.test', 'g' || n || '@x.test', now(), now()
       from generate_series(1, ${count}) n returning id
     )
     insert into segment_contact (tenant_id, segment_id, contact_id, created_at)
     select $1, $2, id, now() from made`,
      [tenantId, segmentId],
    );
  });
  const left = async (): Promise<number> => {
    const text = 'select 1 from segment_contact where tenant_id = $1 and segment_id = $2';
    return (await store.pool.query(text, [tenantId, segmentId])).rowCount!;
  };
  const { removal } = await store.transact(async (client) => {
    await client.query(
      `select 1 from segment_contact where tenant_id = $1 and segment_id = $2
       order by contact_id desc limit 1 for update`,
      [tenantId, segmentId],
    );
    const going = segments.remove(tenantId, segmentId);
    await untilWaiting(1);
    assert.is(await left(), count);
    return { removal: going };
  });
  assert.is(await removal, true);
  assert.is(await left(), 0);
});

test('a page of a large audience is read by its index, at any depth', async () => {
  const large = newId();
  await store.pool.query(`insert into tenant (id, name) values ($1, 'large')`, [large]);
  const segment = await segments.create(large, { name: 'Large' });
  await store.pool.query(
    `with made as (
       insert into contact (tenant_id, id, email, address, created_at, updated_at)
       select $1, ('0190' || lpad(to_hex(n), 4, '0') || '-0000-7000-8000-000000000000')::uuid,
         'l' || n || '@x.test', 'l' || n || '@x.test', now(), now()
       from generate_series(1, 20000) n returning id)
     insert into segment_contact (tenant_id, segment_id, contact_id, created_at)
     select $1, $2, id, now() from made`,
    [large, segment],
  );
  await store.pool.query('analyze contact, segment_contact');
  for (const within of [null, segment]) {
    let after: string | undefined;
    const seen: string[] = [];
    for (let page = 0; page < 3; page += 1) {
      const { items, hasMore } = await contacts.list(
        large,
        { limit: 50, after, before: undefined },
        within,
      );
      assert.is(hasMore, true);
      seen.push(...items.map(({ email }) => email));
      after = items.at(-1)?.id;
    }
    assert.equal(
      seen,
      Array.from({ length: 150 }, (_, index) => `l${20_000 - index}@x.test`),
    );
    const back = await contacts.list(large, { limit: 2, after: undefined, before: after }, within);
    assert.equal(
      back.items.map(({ email }) => email),
      ['l19853@x.test', 'l19852@x.test'],
    );
  }
});

test.run();
