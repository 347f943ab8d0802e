// Mail that was under way at several crashes: tried in groups that grow smaller, so that only what crashes workers is set
// aside, and the others get through soon.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { ClaimedDelivery } from '../../src/queue/claim.ts';
import { recover, release } from '../../src/queue/lease.ts';
import { settle } from '../../src/queue/settle.ts';
import { wake } from '../../src/queue/wake.ts';
import { openQueue, result, type Bench } from '../support/queue.ts';

const test = suite<{ q: Bench }>('suspects');
test.before.each(async (context) => {
  context.q = await openQueue();
});
test.after.each(({ q }) => q.stop());

/** A worker that takes all it can and dies with all of it before any final dot. */
async function crash(q: Bench): Promise<readonly ClaimedDelivery[]> {
  const epoch = await q.run();
  const claimed = await q.claim(epoch, 1_000);
  await recover(q.store, epoch, () => ({ phase: 'before_dot' }));
  return claimed;
}
const dueNow = async (q: Bench): Promise<number> => {
  await q.store.pool.query("update delivery set due_at = now() where state = 'deferred'");
  return wake(q.store.pool, null);
};

const aMinutePasses = (q: Bench) =>
  q.store.pool.query("update delivery set let_in_at = let_in_at - interval '61 seconds'");

test('one crash is an accident: all are tried again at once', async ({ q }) => {
  await q.enqueue(10);
  assert.is((await crash(q)).length, 10);
  assert.equal(await q.states(), { ready: 10 });
});

test('after two they are let in by groups: what crashes workers is set aside at the fifth, all others get through', async ({
  q,
}) => {
  const poison = (await q.enqueue(100))[40]!;
  await crash(q);
  await crash(q);
  assert.equal(await q.states(), { deferred: 36, ready: 64 });
  const sizes: number[] = [];
  let deaths = 2;
  const isOver = (states: Record<string, number>): boolean =>
    Object.keys(states).every((state) => state === 'delivered' || state === 'failed');
  for (let turn = 0; turn < 80; turn++) {
    if (deaths < 5) await q.enqueue(1); // new mail goes on beside them
    const epoch = await q.run();
    const claimed = await q.claim(epoch, 200);
    const { rows } = await q.store.pool.query<{ interruptions: number }>(
      "select interruptions from delivery where state = 'in_flight' and interruptions >= 2",
    );
    assert.ok(new Set(rows.map(({ interruptions }) => interruptions)).size <= 1, 'mixed');
    if (claimed.some(({ emailId }) => emailId === poison)) {
      sizes.push(rows.length);
      deaths += 1;
      await recover(q.store, epoch, () => ({ phase: 'before_dot' }));
    } else {
      await settle(
        q.store,
        claimed.map((one) => result(one, epoch, { verdict: 'delivered' })),
      );
    }
    if (deaths === 5 && isOver(await q.states())) break;
    await dueNow(q);
  }
  // Which of the two groups it was in does not matter.
  assert.ok(sizes[0] === 64 || sizes[0] === 36, String(sizes[0]));
  assert.equal(sizes.slice(1), [8, 1]);
  const { rows } = await q.store.pool.query<{ email_id: string; last_cause: string }>(
    "select email_id, last_cause from delivery where state <> 'delivered'",
  );
  assert.equal(rows, [{ email_id: poison, last_cause: 'worker_lost' }]);
});

test('a group that settles lets the next one in, at once', async ({ q }) => {
  await q.enqueue(5 * 64);
  await crash(q);
  await crash(q);
  await crash(q); // 64 of them a third time: by eights
  await q.store.pool.query("update delivery set due_at = now() where state = 'deferred'");
  const epoch = await q.run();
  const sizes: number[] = [];
  for (let turn = 1; turn <= 12; turn++) {
    const claimed = await q.claim(epoch, 500);
    sizes.push(claimed.length);
    await settle(
      q.store,
      claimed.map((one) => result(one, epoch, { verdict: 'delivered' })),
    );
  }
  assert.equal(await q.states(), { delivered: 5 * 64 });
  assert.equal(
    sizes.toSorted((x, y) => x - y),
    [...Array<number>(8).fill(8), 64, 64, 64, 64],
  );
});

test('who went down more often is not let in with a larger group', async ({ q }) => {
  const [often] = await q.enqueue(6);
  await q.store.pool.query(
    `update delivery set state = 'deferred', due_at = now() - interval '1 hour',
       interruptions = case when email_id = $1 then 4 else 2 end`,
    [often],
  );
  await q.store.pool.query(
    "update delivery set due_at = now() - interval '1 minute' where email_id = $1",
    [often],
  );
  assert.is(await wake(q.store.pool, null), 5);
  const epoch = await q.run();
  const group = await q.claim(epoch, 10);
  await settle(
    q.store,
    group.map((one) => result(one, epoch, { verdict: 'delivered' })),
  );
  assert.equal(
    (await q.claim(epoch, 10)).map(({ emailId }) => emailId),
    [often],
  );
});

test('who is slow beside a guilty one is not set aside with it', async ({ q }) => {
  const [slow, guilty] = await q.enqueue(2);
  const worker = await q.run();
  await q.store.pool.query(
    `update delivery set interruptions = 4, state = 'deferred', let_in_at = null,
       due_at = now() - case when email_id = $1 then interval '2 seconds' else interval '1 second' end`,
    [slow],
  );
  await wake(q.store.pool, null);
  assert.is((await q.claim(worker, 10))[0]?.emailId, slow);
  await aMinutePasses(q);
  await wake(q.store.pool, null);
  assert.is((await q.claim(worker, 10))[0]?.emailId, guilty);
  await recover(q.store, worker, () => ({ phase: 'before_dot' }));
  const { rows } = await q.store.pool.query(
    'select email_id, state from delivery order by state desc',
  );
  assert.equal(rows, [
    { email_id: guilty, state: 'failed' },
    { email_id: slow, state: 'deferred' },
  ]);
});

test('an attempt that ends in order clears the suspicion', async ({ q }) => {
  await q.enqueue(1);
  await crash(q);
  await crash(q);
  const epoch = await q.run();
  const [one] = await q.claim(epoch, 1);
  await settle(q.store, [result(one!, epoch, { verdict: 'deferred', delayMs: 1 })]);
  for (let death = 1; death <= 4; death++) {
    await dueNow(q);
    assert.is((await crash(q)).length, 1);
  }
  assert.equal(await q.states(), { deferred: 1 }, 'four crashes again, not six');
});

test('suspects whose lane is closed, or whose host is slow, do not hold up the others', async ({
  q,
}) => {
  await q.enqueue(3);
  await q.store.pool.query('update delivery set interruptions = 3');
  await crash(q); // from now on each is alone
  await q.store.pool.query("update delivery set due_at = now() where state = 'deferred'");
  assert.is(await wake(q.store.pool, null), 1);
  await aMinutePasses(q);
  assert.is(await wake(q.store.pool, null), 1, 'another one');
  assert.equal(await q.states(), { deferred: 2, ready: 1 });
  const [slow] = await q.claim(await q.run(), 10);
  assert.is(await wake(q.store.pool, null), 0, 'one at a time');
  await aMinutePasses(q);
  assert.is(await wake(q.store.pool, null), 1);
  const [next] = await q.claim(await q.run(), 10);
  assert.ok(slow && next && slow.emailId !== next.emailId);
});

test('claimed and given back again and again, it holds up the others no longer', async ({ q }) => {
  await q.enqueue(2);
  await q.store.pool.query('update delivery set interruptions = 3');
  await crash(q);
  await q.store.pool.query("update delivery set due_at = now() where state = 'deferred'");
  const epoch = await q.run();
  await wake(q.store.pool, null);
  const [first] = await q.claim(epoch, 10);
  await aMinutePasses(q);
  await release(q.store, epoch, { held: [first!], begun: false });
  assert.is(await wake(q.store.pool, null), 1);
  const [second, ...more] = await q.claim(epoch, 10);
  assert.ok(second && second.emailId !== first!.emailId);
  assert.equal(more, []);
});

test('let in, it keeps its place before what came later to its destination', async ({ q }) => {
  const [id] = await q.enqueue(1);
  await crash(q);
  await crash(q);
  await q.store.pool.query("update delivery set let_in_at = null, state = 'deferred'");
  await q.enqueue(20);
  await wake(q.store.pool, null);
  assert.is((await q.claim(await q.run(), 1))[0]?.emailId, id);
});

test.run();
