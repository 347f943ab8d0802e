// What accepting asks on every email: which of these addresses does this tenant not send to.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { ensureFirstTenant } from '../../src/access/first-tenant.ts';
import { normalizedAddress } from '../../src/mail/address.ts';
import { newId } from '../../src/store/id.ts';
import { openStore, type Store } from '../../src/store/orm.ts';
import { createSuppressionVerbs, suppressedAmong } from '../../src/suppressions/suppressions.ts';
import { migratedDatabase, type FreshDatabase } from '../support/postgres.ts';
import { silent } from '../support/queue.ts';

const test = suite('suppressed among');
let database: FreshDatabase;
let store: Store;
let tenantId: string;

test.before(async () => {
  database = await migratedDatabase();
  store = await openStore({ url: database.url, log: silent, connectionsMax: 2, migrate: true });
  ({ tenantId } = await ensureFirstTenant(store, null));
});
test.after(async () => {
  await store.close();
  await database.drop();
});

test('the suppressed ones of the tenant, and no others', async () => {
  const verbs = createSuppressionVerbs(store);
  await verbs.addAll(tenantId, ['A@Recipient.test', 'ü@münchen.test']);
  const asked = ['a@RECIPIENT.test', 'b@recipient.test', 'Ü@xn--mnchen-3ya.test'].map(
    normalizedAddress,
  );
  assert.equal(
    await suppressedAmong(store.pool, tenantId, asked),
    new Set(['a@recipient.test', 'ü@xn--mnchen-3ya.test']),
  );
  assert.is((await suppressedAmong(store.pool, newId(), asked)).size, 0);
  assert.is((await suppressedAmong(store.pool, tenantId, [])).size, 0);
  await verbs.remove(tenantId, 'a@recipient.test');
  assert.equal(
    await store.transact((client) => suppressedAmong(client, tenantId, asked)),
    new Set(['ü@xn--mnchen-3ya.test']),
  );
});

test('all recipients of a full batch are asked for at once', async () => {
  const many = Array.from({ length: 15_000 }, (_, n) => `r${n}@recipient.test`);
  await createSuppressionVerbs(store).add(tenantId, 'R14999@recipient.test');
  assert.equal(
    await suppressedAmong(store.pool, tenantId, many),
    new Set(['r14999@recipient.test']),
  );
});

test('who asks at the same time is told of his own', async () => {
  const verbs = createSuppressionVerbs(store);
  await verbs.addAll(tenantId, ['mine@recipient.test', 'both@recipient.test']);
  const asked = ['mine@recipient.test', 'both@recipient.test'];
  const [all, one, none, foreign] = await Promise.all([
    suppressedAmong(store.pool, tenantId, asked),
    suppressedAmong(store.pool, tenantId, ['both@recipient.test', 'both@recipient.test']),
    suppressedAmong(store.pool, tenantId, ['other@recipient.test']),
    suppressedAmong(store.pool, newId(), asked),
  ]);
  assert.equal([...(all ?? [])].toSorted(), asked.toSorted());
  assert.equal(one, new Set(['both@recipient.test']));
  assert.is(none?.size, 0);
  assert.is(foreign?.size, 0);
});

test.run();
