// What accepting asks about the topic of an email, and what is left of a topic that was deleted.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { setSubscriptions } from '../../src/audience/contact-changes.ts';
import { createContactVerbs, findContact } from '../../src/audience/contacts.ts';
import { createTopicVerbs, forgetDeletedTopics, topicExists } from '../../src/audience/topics.ts';
import { unwantedAmong } from '../../src/audience/wanting.ts';
import { newId } from '../../src/store/id.ts';
import type { Store } from '../../src/store/orm.ts';
import { at, openAudience, type Audience } from '../support/audience.ts';

const DAY_MS = 86_400_000;
const everything = { limit: undefined, after: undefined, before: undefined };
const test = suite('topics');
let audience: Audience;
let store: Store;
let tenantId: string;
let topics: ReturnType<typeof createTopicVerbs>;
let contacts: ReturnType<typeof createContactVerbs>;
let upsert: Audience['upsert'];

test.before(async () => {
  audience = await openAudience();
  ({ store, tenantId, upsert } = audience);
  topics = createTopicVerbs(store, () => at);
  contacts = createContactVerbs(store, () => at);
});
test.after(() => audience.stop());

test('choices about a deleted topic are kept for 65 days and shown to nobody', async () => {
  const forget = (days: number): Promise<number> =>
    forgetDeletedTopics(store.pool, 2, new Date(at.getTime() + days * DAY_MS));
  const topicOf = (owner: string): Promise<string> =>
    topics.create(owner, { name: 'T', default_subscription: 'opt_in' });
  const old = await topicOf(tenantId);
  const young = await topicOf(tenantId);
  const live = await topicOf(tenantId);
  const ids = [old, young, live];
  const choices = ids.map((id) => ({ id, subscription: 'opt_out' as const }));
  const people = ['k1@x.test', 'k2@x.test', 'k3@x.test'];
  for (const email of people) await upsert({ email, topics: choices });
  const [removedBy] = people;
  const { id } = (await findContact(store.pool, tenantId, removedBy!))!;
  await topics.remove(tenantId, old);
  await createTopicVerbs(store, () => new Date(at.getTime() + 10 * DAY_MS)).remove(tenantId, young);
  const kept = async (): Promise<readonly unknown[]> =>
    (
      await store.pool.query<{ choices: number; tombstone: boolean }>(
        `select (select count(*)::integer from contact_topic where topic_id = i.id) as choices,
           exists (select 1 from deleted_topic where tenant_id = $1 and deleted_topic.id = i.id) as tombstone
         from unnest($2::uuid[]) with ordinality as i (id, position) order by position`,
        [tenantId, ids],
      )
    ).rows.map(({ choices: count, tombstone }) => [count, tombstone]);
  assert.equal(await kept(), [
    [3, true],
    [3, true],
    [3, false],
  ]);

  const page = await contacts.listTopics(tenantId, id, everything);
  const shown = page.items.map((topic) => topic.id);
  assert.ok(shown.includes(live) && !shown.includes(old) && !shown.includes(young));
  await store.transact((client) =>
    setSubscriptions(client, tenantId, id, [{ id: old, subscription: 'opt_in' }], at),
  );
  const asked = { addresses: people, topicId: old, isBroadcast: false };
  assert.equal([...(await unwantedAmong(store.pool, tenantId, asked))], people);

  assert.is(await forget(65), 0);
  assert.is(await forget(66), 2);
  assert.equal(
    await kept(),
    [
      [1, true],
      [3, true],
      [3, false],
    ],
    'at most two, and the topic last',
  );
  assert.is(await forget(66), 2);
  assert.is(await forget(66), 0);
  assert.equal(await kept(), [
    [0, false],
    [3, true],
    [3, false],
  ]);
  assert.is(await contacts.remove(tenantId, id), id);
  assert.equal(
    await kept(),
    [
      [0, false],
      [2, true],
      [2, false],
    ],
    'a contact takes its choices',
  );
});

test('a topic is there only for the tenant that has it, and until it is removed', async () => {
  const id = await topics.create(tenantId, { name: 'News', default_subscription: 'opt_in' });
  assert.is(await topicExists(store, tenantId, id), true);
  assert.is(await topicExists(store, tenantId, id.toUpperCase()), true);
  for (const other of [newId(), 'no-uuid', '', 'a\0b']) {
    assert.is(await topicExists(store, tenantId, other), false, other);
  }
  assert.is(await topicExists(store, newId(), id), false);
  assert.is(await topics.remove(newId(), id), false);
  assert.is(await topics.remove(tenantId, id), true);
  assert.is(await topicExists(store, tenantId, id), false);
});

test.run();
