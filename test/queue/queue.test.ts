// The queue on a real Postgres: what is claimed by whom, what a result changes, what a lost worker leaves.
import { randomUUID } from 'node:crypto';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createGroupCommit } from '../../src/queue/group-commit.ts';
import { recover, release, silentRuns } from '../../src/queue/lease.ts';
import { settle } from '../../src/queue/settle.ts';
import { wake, waitingLanes } from '../../src/queue/wake.ts';
import { findEmail } from '../../src/sending/read.ts';
import { newId } from '../../src/store/id.ts';
import { newEmail, openQueue, recipients, result, type Bench } from '../support/queue.ts';

const test = suite<{ q: Bench }>('queue');
test.before.each(async (context) => {
  context.q = await openQueue();
});
test.after.each(({ q }) => q.stop());

const secondTenant = async (q: Bench): Promise<string> => {
  const id = newId();
  await q.store.pool.query('insert into tenant (id, name) values ($1, $2)', [id, 'second']);
  return id;
};
const emailOf = async (q: Bench, id: string) => {
  const email = await findEmail(q.store, q.tenantId, id);
  assert.ok(email);
  return email;
};

test('a row is claimed once, whoever asks at the same time', async ({ q }) => {
  await q.enqueue(200);
  const runs = await Promise.all([q.run(), q.run(), q.run(), q.run()]);
  const rounds = await Promise.all(
    runs.flatMap((epoch) => Array.from({ length: 5 }, () => q.claim(epoch, 20))),
  );
  const claimed = rounds.flat().map(({ emailId }) => emailId);
  assert.is(new Set(claimed).size, claimed.length);
  // SKIP LOCKED may pass rows over while others hold them; the rest is there for the next claim.
  for (;;) {
    const more = await q.claim(runs[0], 50);
    if (more.length === 0) break;
    claimed.push(...more.map(({ emailId }) => emailId));
  }
  assert.is(claimed.length, 200);
  assert.is(new Set(claimed).size, 200);
});

test('a claim stores the attempt and shows the email as sent', async ({ q }) => {
  const [id] = await q.enqueue(1);
  const [claimed] = await q.claim(await q.run(), 1);
  assert.is(claimed?.attempt, 1);
  assert.is((await emailOf(q, id!)).lastEvent, 'sent');
  const { rows } = await q.store.pool.query('select number, finished_at from attempt');
  assert.equal(rows, [{ number: 1, finished_at: null }]);
});

test('a noisy tenant leaves room: every tenant gets its share of a claim', async ({ q }) => {
  const other = await secondTenant(q);
  await q.enqueue(500);
  await q.enqueue(5, { tenantId: other });
  const claimed = await q.claim(await q.run(), 20, { perTenant: 10 });
  assert.is(claimed.filter(({ tenantId }) => tenantId === other).length, 5);
  assert.is(claimed.filter(({ tenantId }) => tenantId === q.tenantId).length, 10);
});

test('busy lanes are not claimed for, others are', async ({ q }) => {
  await q.enqueue(3, { deliveries: [{ recipient: 'a@busy.test', lane: 'mx:busy.test' }] });
  await q.enqueue(2);
  const claimed = await q.claim(await q.run(), 10, { exceptLanes: ['mx:busy.test'] });
  assert.equal(
    claimed.map(({ lane }) => lane),
    ['sink', 'sink'],
  );
});

test('verdicts become states, and emails show them', async ({ q }) => {
  const table = [
    ['delivered', 'delivered', null],
    ['bounced', 'bounced', '5.1.1'],
    ['failed', 'failed', 'message_missing'],
    ['deferred', 'delivery_delayed', '4.2.2'],
    ['unknown', 'delivery_delayed', 'unknown_after_dot'],
  ] as const;
  const ids = await q.enqueue(table.length);
  const epoch = await q.run();
  const claimed = new Map((await q.claim(epoch, 10)).map((one) => [one.emailId, one]));
  const { waiting } = await settle(
    q.store,
    table.map(([verdict, , code], index) =>
      result(claimed.get(ids[index]!)!, epoch, {
        verdict,
        evidence: {
          cause: code,
          enhanced: code?.includes('.') ? code : null,
          reply: `about ${verdict}`,
        },
      }),
    ),
  );
  assert.is(waiting.length, 2);
  for (const [index, [verdict, event, code]] of table.entries()) {
    const email = await emailOf(q, ids[index]!);
    assert.is(email.lastEvent, event, verdict);
    assert.equal(
      email.providerLastError,
      code === null ? null : { code, message: `about ${verdict}` },
    );
    assert.is(email.providerDeadLetteredAt !== null, verdict === 'failed');
    assert.is(email.providerNextRetryAt !== null, event === 'delivery_delayed');
  }
});

test('the worst recipient decides: undecided before final, failed before bounced', async ({
  q,
}) => {
  const epoch = await q.run();
  const shown = async (verdicts: readonly Parameters<typeof result>[2]['verdict'][]) => {
    const [id] = await q.enqueue(1, { deliveries: recipients(verdicts.length) });
    const claimed = await q.claim(epoch, 10);
    await settle(
      q.store,
      claimed.map((one) => result(one, epoch, { verdict: verdicts[one.position]! })),
    );
    return (await emailOf(q, id!)).lastEvent;
  };
  assert.is(await shown(['delivered', 'delivered']), 'delivered');
  assert.is(await shown(['delivered', 'bounced']), 'bounced');
  assert.is(await shown(['failed', 'bounced']), 'failed');
  assert.is(await shown(['delivered', 'bounced', 'deferred']), 'delivery_delayed');
});

test('two workers settle recipients of one email at the same time: nothing is lost', async ({
  q,
}) => {
  const ids = await q.enqueue(20, { deliveries: recipients(4) });
  const [one, two] = [await q.run(), await q.run()];
  const first = await q.claim(one, 40);
  const second = await q.claim(two, 40);
  assert.is(first.length + second.length, 80);
  await Promise.all(
    [
      [one, first],
      [two, second],
    ].flatMap(([epoch, claimed]) =>
      (claimed as typeof first).map((delivery) =>
        settle(q.store, [result(delivery, epoch as string, { verdict: 'delivered' })]),
      ),
    ),
  );
  for (const id of ids) assert.is((await emailOf(q, id)).lastEvent, 'delivered');
});

test('a result of a lost lease is dropped', async ({ q }) => {
  const [id] = await q.enqueue(1);
  const epoch = await q.run();
  const [delivery] = await q.claim(epoch, 1);
  await recover(q.store, epoch, () => ({ phase: 'before_dot' }));
  const late = await settle(q.store, [result(delivery!, epoch, { verdict: 'bounced' })]);
  assert.is(late.fenced, 1);
  const again = await q.run();
  const [second] = await q.claim(again, 1);
  assert.is(second?.attempt, 2);
  const good = await settle(q.store, [result(second!, again, { verdict: 'delivered' })]);
  assert.is(good.count, 1);
  assert.is((await settle(q.store, [result(second!, again, { verdict: 'bounced' })])).fenced, 1);
  assert.is((await emailOf(q, id!)).lastEvent, 'delivered');
});

test('a deferral past the lifetime bounces as expired, with the last real reply', async ({ q }) => {
  const [id] = await q.enqueue(1, { lifetimeMs: 1_000 });
  const epoch = await q.run();
  const [delivery] = await q.claim(epoch, 1);
  await settle(q.store, [
    result(delivery!, epoch, {
      verdict: 'deferred',
      delayMs: 5_000,
      evidence: { enhanced: '4.2.2', reply: '452 4.2.2 full' },
    }),
  ]);
  const email = await emailOf(q, id!);
  assert.is(email.lastEvent, 'bounced');
  assert.equal(email.providerLastError, { code: 'expired', message: '452 4.2.2 full' });
  assert.ok(email.providerDeadLetteredAt);
});

test('a result of an earlier attempt does not decide a later one of the same run', async ({
  q,
}) => {
  await q.enqueue(1);
  const epoch = await q.run();
  const [early] = await q.claim(epoch, 1);
  await release(q.store, epoch, { held: [early!], begun: true });
  const [later] = await q.claim(epoch, 1);
  assert.is(later?.attempt, 2);
  const late = await settle(q.store, [result(early!, epoch, { verdict: 'bounced' })]);
  assert.is(late.fenced, 1);
  assert.equal(await q.states(), { in_flight: 1 });
});

test('evidence that cannot be stored holds up neither its own verdict nor the others', async ({
  q,
}) => {
  await q.enqueue(3);
  const epoch = await q.run();
  const claimed = await q.claim(epoch, 3);
  const settled = await settle(
    q.store,
    claimed.map((one, index) =>
      result(one, epoch, {
        verdict: 'bounced',
        evidence: { reply: index === 1 ? '550 no \0 such user' : '550 no such user' },
      }),
    ),
  );
  assert.is(settled.count, 3);
  assert.equal(await q.states(), { bounced: 3 });
});

test('what is due wakes, by lane or all, and what is not due does not', async ({ q }) => {
  const epoch = await q.run();
  await q.enqueue(2);
  await q.enqueue(1, { deliveries: [{ recipient: 'a@b.test', lane: 'mx:b.test' }] });
  const claimed = await q.claim(epoch, 10);
  await settle(
    q.store,
    claimed.map((one) => result(one, epoch, { verdict: 'deferred', delayMs: 3_600_000 })),
  );
  assert.is(await wake(q.store.pool, null), 0);
  const alarms = await waitingLanes(q.store.pool, {
    horizonMs: 7_200_000,
    bucketMs: 5_000,
    max: 10,
  });
  assert.equal(alarms.map(({ lane }) => lane).toSorted(), ['mx:b.test', 'sink']);
  await q.store.pool.query("update delivery set due_at = now() - interval '1 second'");
  assert.is(await wake(q.store.pool, 'mx:b.test'), 1);
  assert.equal(await q.states(), { deferred: 2, ready: 1 });
  assert.is(await wake(q.store.pool, null), 2);
  assert.is(
    (await q.claim(epoch, 10)).every(({ attempt }) => attempt === 2),
    true,
  );
});

test('an unknown outcome is tried once more and then stays unknown', async ({ q }) => {
  const [id] = await q.enqueue(1);
  const epoch = await q.run();
  for (const attempt of [1, 2]) {
    const [delivery] = await q.claim(epoch, 1);
    assert.is(delivery?.attempt, attempt);
    await settle(q.store, [result(delivery!, epoch, { verdict: 'unknown', delayMs: 0 })]);
    await wake(q.store.pool, null);
  }
  assert.equal(await q.states(), { unknown: 1 });
  assert.is((await emailOf(q, id!)).lastEvent, 'sent');
  assert.is(await wake(q.store.pool, null), 0);
});

test('a lost run: what its journal says decides', async ({ q }) => {
  await q.enqueue(3);
  const epoch = await q.run();
  const [a, b, c] = await q.claim(epoch, 3);
  const counts = await recover(q.store, epoch, ({ emailId }) =>
    emailId === a!.emailId
      ? { phase: 'before_dot' }
      : emailId === b!.emailId
        ? { phase: 'dot' }
        : { phase: 'settled', settlement: result(c!, epoch, { verdict: 'delivered' }) },
  );
  assert.equal(counts, { released: 1, unknown: 1, settled: 1 });
  assert.equal(await q.states(), { delivered: 1, ready: 1, unknown: 1 });
  const { rows } = await q.store.pool.query<{ outcome: string }>(
    'select outcome from attempt order by outcome',
  );
  assert.equal(
    rows.map(({ outcome }) => outcome),
    ['delivered', 'interrupted', 'unknown'],
  );
});

test('a lost run without a journal: everything it held is unknown, never sent again at once', async ({
  q,
}) => {
  await q.enqueue(5);
  const epoch = await q.run();
  await q.claim(epoch, 5);
  assert.equal(await silentRuns(q.store.pool, 60_000), []);
  await q.store.pool.query("update worker set heartbeat_at = now() - interval '2 minutes'");
  assert.equal(await silentRuns(q.store.pool, 60_000), [epoch]);
  await recover(q.store, epoch, null);
  assert.equal(await q.states(), { unknown: 5 });
  assert.equal(await silentRuns(q.store.pool, 60_000), []);
});

test('rows of a run that is not even listed are found', async ({ q }) => {
  await q.enqueue(1);
  const epoch = randomUUID();
  await q.claim(epoch, 1);
  assert.equal(await silentRuns(q.store.pool, 60_000), [epoch]);
});

test('released before it began, an attempt leaves no trace', async ({ q }) => {
  const [id] = await q.enqueue(1);
  const epoch = await q.run();
  const held = await q.claim(epoch, 1);
  await release(q.store, epoch, { held, begun: false });
  assert.equal((await q.store.pool.query('select * from attempt')).rows, []);
  assert.is((await emailOf(q, id!)).lastEvent, 'queued');
  const [again] = await q.claim(epoch, 1);
  assert.is(again?.attempt, 1);
});

test('group commit: one email that the database refuses does not take others with it', async ({
  q,
}) => {
  const commit = createGroupCommit(q.store.pool);
  const good = Array.from({ length: 10 }, () => newEmail({ tenantId: q.tenantId }));
  const bad = newEmail({ tenantId: q.tenantId, subject: 'NUL \0 cannot be stored' });
  const outcomes = await Promise.allSettled(
    [...good.slice(0, 5), bad, ...good.slice(5)].map(commit),
  );
  assert.equal(
    outcomes.map(({ status }) => status === 'fulfilled'),
    [true, true, true, true, true, false, true, true, true, true, true],
  );
  assert.equal(await q.states(), { ready: 10 });
});

test.run();
