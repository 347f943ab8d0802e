// What accepting asks about the topic of an email.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { ensureFirstTenant } from '../../src/access/first-tenant.ts';
import { createTopicVerbs, topicExists } from '../../src/audience/topics.ts';
import { newId } from '../../src/store/id.ts';
import { openStore } from '../../src/store/orm.ts';
import { freshDatabase } from '../support/postgres.ts';
import { silent } from '../support/queue.ts';

const test = suite('topic exists');

test('only for the tenant that has it, and until it is removed', async () => {
  const database = await freshDatabase();
  const store = await openStore({
    url: database.url,
    log: silent,
    connectionsMax: 2,
    migrate: true,
  });
  const { tenantId } = await ensureFirstTenant(store, null);
  const verbs = createTopicVerbs(store, () => new Date());
  const id = await verbs.create(tenantId, { name: 'News', default_subscription: 'opt_in' });
  assert.is(await topicExists(store, tenantId, id), true);
  assert.is(await topicExists(store, tenantId, id.toUpperCase()), true);
  for (const other of [newId(), 'no-uuid', '', 'a\0b']) {
    assert.is(await topicExists(store, tenantId, other), false, other);
  }
  assert.is(await topicExists(store, newId(), id), false);
  assert.is(await verbs.remove(newId(), id), false);
  assert.is(await verbs.remove(tenantId, id), true);
  assert.is(await topicExists(store, tenantId, id), false);
  await store.close();
  await database.drop();
});

test.run();
