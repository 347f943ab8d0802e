// How much is used: what is counted once is remembered, and the sums stay right over days, months and late commits.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { firstIdAt } from '../../src/access/request-log.ts';
import { createUsageVerbs } from '../../src/access/usage.ts';
import { openQueue, type Bench } from '../support/queue.ts';

const HOUR_MS = 3_600_000;
const LIMIT = { requests: 10, windowMs: 1_000 };

const test = suite('usage');
let bench: Bench;
test.before(async () => {
  bench = await openQueue();
});
test.after(async () => {
  await bench.stop();
});

test('days and months end in UTC, and nothing is counted twice', async () => {
  let nowMs = Date.parse('2026-01-30T22:00:00Z');
  const fresh = () => createUsageVerbs(bench.store, () => new Date(nowMs), LIMIT);
  const usage = fresh();
  let ranges = 0;
  const counting = createUsageVerbs(
    {
      ...bench.store,
      pool: Object.assign(Object.create(bench.store.pool) as typeof bench.store.pool, {
        query: (query: { readonly name: string }) => {
          if (query.name === 'count-emails') ranges += 1;
          return bench.store.pool.query(query as never);
        },
      }),
    },
    () => new Date(nowMs),
    LIMIT,
  );
  let number = 0;
  const sendAt = async (at: string): Promise<void> => {
    const suffix = (number += 1).toString(16).padStart(12, '0');
    const id = firstIdAt(Date.parse(at)).replace(/[0-9a-f]{12}$/, suffix);
    await bench.enqueue(1, { id, messageId: `<${id}@sender.test>` });
  };
  const counts = async () => {
    const all = [await usage.read(bench.tenantId), await fresh().read(bench.tenantId)];
    const [remembered, anew] = all.map(({ daily, monthly }) => [daily.sent, monthly.sent]);
    assert.equal(remembered, anew);
    return remembered;
  };

  await sendAt('2025-12-31T23:59:59.999Z');
  await sendAt('2026-01-01T00:00:00Z');
  await sendAt('2026-01-29T23:59:59.999Z');
  await sendAt('2026-01-30T21:59:59Z');
  assert.equal(await counts(), [1, 3]);
  nowMs += HOUR_MS;
  await sendAt('2026-01-30T22:30:00Z');
  await sendAt('2026-01-30T22:59:00Z');
  assert.equal(await counts(), [3, 5]);
  // A commit that came after the last look, with an id from before it.
  await sendAt('2026-01-30T22:58:00Z');
  assert.equal(await counts(), [4, 6]);
  nowMs = Date.parse('2026-01-31T00:05:00Z');
  await sendAt('2026-01-31T00:01:00Z');
  assert.equal(await counts(), [1, 7]);
  nowMs = Date.parse('2026-01-31T00:30:00Z');
  assert.equal(await counts(), [1, 7]);
  nowMs = Date.parse('2026-02-01T00:00:30Z');
  await sendAt('2026-02-01T00:00:10Z');
  assert.equal(await counts(), [1, 1]);
  nowMs = Date.parse('2026-02-10T12:00:00Z');
  assert.equal(await counts(), [0, 1]);

  await counting.read(bench.tenantId);
  assert.is(ranges, 11); // a statement for each day, and one for what is young
  await counting.read(bench.tenantId);
  assert.is(ranges, 12);
  const { daily, monthly, rateLimit } = await usage.read(bench.tenantId);
  assert.equal(
    [daily.resetsAt.toISOString(), monthly.resetsAt.toISOString()],
    ['2026-02-11T00:00:00.000Z', '2026-03-01T00:00:00.000Z'],
  );
  assert.equal(rateLimit, LIMIT);
});

test('requests that come together share an answer', async () => {
  const usage = createUsageVerbs(bench.store, () => new Date(), LIMIT);
  const [one, other] = await Promise.all([usage.read(bench.tenantId), usage.read(bench.tenantId)]);
  assert.is(one, other);
});

test.run();
