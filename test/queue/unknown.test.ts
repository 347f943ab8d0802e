// Lost after the final dot: who is sent to once more and who is not, by the policy of the tenant, whoever decides, the
// worker or the recovery of a lost one.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { OutcomePolicy } from '../../src/queue/outcome-policy.ts';
import { recover, release } from '../../src/queue/lease.ts';
import { settle } from '../../src/queue/settle.ts';
import { wake } from '../../src/queue/wake.ts';
import { findEmail } from '../../src/sending/read.ts';
import { newId } from '../../src/store/id.ts';
import { suppress } from '../../src/suppressions/suppressions.ts';
import { readTrace } from '../../src/timeline/trace.ts';
import { openQueue, result, type Bench } from '../support/queue.ts';

const test = suite<{ q: Bench }>('unknown');
test.before.each(async (context) => {
  context.q = await openQueue();
});
test.after.each(({ q }) => q.stop());

const UNKNOWN = {
  verdict: 'unknown',
  evidence: {
    cause: 'unknown_after_dot',
    code: null,
    enhanced: null,
    reply: 'The connection broke after the final dot.',
  },
} as const;
const dueNow = async (q: Bench): Promise<number> => {
  await q.store.pool.query('update delivery set due_at = now()');
  return wake(q.store.pool, null);
};
const kinds = async (q: Bench, id: string): Promise<readonly string[]> =>
  ((await readTrace(q.store, q.tenantId, id))?.events ?? []).map(({ type }) => type);

test('retry_once: once more, flagged at its start, with the same bytes; then for good', async ({
  q,
}) => {
  const [id] = await q.enqueue(1);
  const epoch = await q.run();
  const [first] = await q.claim(epoch, 1);
  assert.is(first?.unknowns, 0);
  const { waiting } = await settle(q.store, [result(first!, epoch, { ...UNKNOWN, delayMs: 1 })]);
  assert.is(waiting.length, 1);
  assert.not((await kinds(q, id!)).includes('possible_duplicate'), 'not before it begins');
  assert.is(await dueNow(q), 1);
  const [second] = await q.claim(epoch, 1);
  assert.is(second?.unknowns, 1);
  assert.equal(second?.raw, first?.raw);
  assert.equal(second?.createdAt, first?.createdAt);
  const trace = await readTrace(q.store, q.tenantId, id!);
  const flag = trace?.events.find(({ type }) => type === 'possible_duplicate');
  assert.equal([flag?.recipient, flag?.detail], ['b@recipient.test', { attempt: 2 }]);
  const again = await settle(q.store, [result(second!, epoch, UNKNOWN)]);
  assert.is(again.waiting.length, 0);
  assert.is(await dueNow(q), 0);
  const email = await findEmail(q.store, q.tenantId, id!);
  assert.is(email?.lastEvent, 'sent');
  assert.ok(email?.providerDeadLetteredAt);
  assert.match(email?.providerLastError?.message ?? '', /broke .* It is not sent a third time\.$/);
});

test('at_most_once: never again, and the email says so', async ({ q }) => {
  const other = newId();
  await q.store.pool.query('insert into tenant (id, name) values ($1, $2)', [other, 'codes']);
  const policy: OutcomePolicy = {
    delayedAfterMs: 1_000_000,
    unknownOf: (tenantId) => (tenantId === other ? 'at_most_once' : 'retry_once'),
  };
  const [once] = await q.enqueue(1, { tenantId: other });
  await q.enqueue(1);
  const epoch = await q.run();
  const claimed = await q.claim(epoch, 10);
  const { waiting } = await settle(
    q.store,
    claimed.map((one) => result(one, epoch, UNKNOWN)),
    policy,
  );
  assert.is(waiting.length, 1);
  assert.is(await dueNow(q), 1);
  const [again, ...more] = await q.claim(epoch, 10);
  assert.equal([again?.tenantId, more.length], [q.tenantId, 0]);
  const email = await findEmail(q.store, other, once!);
  assert.equal(
    [email?.lastEvent, email?.providerNextRetryAt, email?.providerLastError?.code],
    ['sent', null, 'unknown_after_dot'],
  );
  assert.match(email?.providerLastError?.message ?? '', /at_most_once/);
  assert.ok(email?.providerDeadLetteredAt);
});

test('the recovery of a lost worker decides the same way, also about what its journal says', async ({
  q,
}) => {
  const policy: OutcomePolicy = { delayedAfterMs: 1_000_000, unknownOf: () => 'at_most_once' };
  await q.enqueue(2);
  const epoch = await q.run();
  const [answered] = await q.claim(epoch, 2);
  await recover(
    q.store,
    epoch,
    ({ emailId }) =>
      emailId === answered?.emailId
        ? { phase: 'settled', settlement: result(answered, epoch, UNKNOWN) }
        : { phase: 'dot' },
    policy,
  );
  assert.equal(await q.states(), { unknown: 2 });
  assert.is(await dueNow(q), 0);
});

test('given back and claimed again: announced once', async ({ q }) => {
  const [id] = await q.enqueue(1);
  const epoch = await q.run();
  const [first] = await q.claim(epoch, 1);
  await settle(q.store, [result(first!, epoch, { ...UNKNOWN, delayMs: 1 })]);
  await dueNow(q);
  for (let turn = 1; turn <= 3; turn++) {
    const held = await q.claim(epoch, 1);
    assert.is(held[0]?.attempt, 2);
    await release(q.store, epoch, { held, begun: false });
  }
  assert.is((await kinds(q, id!)).filter((kind) => kind === 'possible_duplicate').length, 1);
});

test('suppressed while it waited: no second copy, and none is announced', async ({ q }) => {
  const [id] = await q.enqueue(1);
  const epoch = await q.run();
  const [first] = await q.claim(epoch, 1);
  await settle(q.store, [result(first!, epoch, { ...UNKNOWN, delayMs: 1 })]);
  await q.store.transact((client) =>
    suppress(client, [
      { tenantId: q.tenantId, address: 'b@recipient.test', origin: 'bounce', sourceId: newId() },
    ]),
  );
  assert.is(await dueNow(q), 1);
  assert.equal(await q.claim(epoch, 1), []);
  assert.not((await kinds(q, id!)).includes('possible_duplicate'));
  assert.equal(await q.states(), { suppressed: 1 });
});

test.run();
