// Emails that wait for their time, on a real Postgres: what is stored, what wakes, and who comes first when canceling,
// moving and waking meet.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { settle } from '../../src/queue/settle.ts';
import {
  cancelEmail,
  rescheduleEmail,
  scheduledTimes,
  wakeScheduled,
} from '../../src/queue/schedule.ts';
import { findEmail } from '../../src/sending/read.ts';
import { newId } from '../../src/store/id.ts';
import { readTrace } from '../../src/timeline/trace.ts';
import { file, openQueue, recipients, result, type Bench } from '../support/queue.ts';

const test = suite<{ q: Bench }>('schedule');
test.before.each(async (context) => {
  context.q = await openQueue();
});
test.after.each(({ q }) => q.stop());

const HOUR_MS = 3_600_000;
const soon = (): Date => new Date(Date.now() + HOUR_MS);
const past = (): Date => new Date(Date.now() - 1_000);
const eventOf = async (q: Bench, id: string): Promise<string | undefined> =>
  (await findEmail(q.store, q.tenantId, id))?.lastEvent;
const suppress = (q: Bench, address: string, tenantId = q.tenantId) =>
  q.store.pool.query(
    `insert into suppression (tenant_id, id, address, origin) values ($1, $2, $3, 'manual')`,
    [tenantId, newId(), address],
  );
const move = (q: Bench, id: string, scheduledAt: Date, tenantId = q.tenantId) =>
  rescheduleEmail(q.store, tenantId, id, { scheduledAt, blobKey: null });
/** The time comes, without waiting for it. */
const comes = (q: Bench, id: string) => move(q, id, new Date(Date.now() - 1));

test('a scheduled email is not claimed before its time, and is after', async ({ q }) => {
  const at = soon();
  const [id] = await q.enqueue(1, { scheduledAt: at, deliveries: recipients(2) });
  assert.is(await eventOf(q, id!), 'scheduled');
  assert.is((await findEmail(q.store, q.tenantId, id!))?.scheduledAt?.getTime(), at.getTime());
  assert.is(await wakeScheduled(q.store), 0);
  const epoch = await q.run();
  assert.equal(await q.claim(epoch, 10), []);
  const before = await readTrace(q.store, q.tenantId, id!);
  assert.is(before?.waiting?.code, 'scheduled');
  assert.match(before?.waiting?.reason ?? '', at.toISOString());
  assert.is(before?.waiting?.next_attempt_at?.getTime(), at.getTime());

  await comes(q, id!);
  assert.is(await wakeScheduled(q.store), 1);
  assert.is(await eventOf(q, id!), 'queued');
  assert.is((await q.claim(epoch, 10)).length, 2);
  assert.is(await eventOf(q, id!), 'sent');
  assert.is(await wakeScheduled(q.store), 0);
});

test('the lifetime of a scheduled email begins at its time, also when it is moved', async ({
  q,
}) => {
  const lifetimeMs = 5 * HOUR_MS;
  const [id] = await q.enqueue(1, { scheduledAt: soon(), lifetimeMs });
  const expiry = async (): Promise<number> => {
    const { rows } = await q.store.pool.query<{ ms: string }>(
      'select (extract(epoch from expires_at) * 1000)::bigint::text as ms from delivery',
    );
    return Number(rows[0]?.ms);
  };
  const first = (await findEmail(q.store, q.tenantId, id!))!.scheduledAt!.getTime();
  assert.is(await expiry(), first + lifetimeMs);
  const later = new Date(first + HOUR_MS);
  assert.is((await move(q, id!, later)).outcome, 'rescheduled');
  assert.is(await expiry(), later.getTime() + lifetimeMs);
  const trace = await readTrace(q.store, q.tenantId, id!);
  assert.equal(trace?.events.at(-1)?.detail, {
    scheduled_at: later.toISOString(),
    before: new Date(first).toISOString(),
  });
});

test('who is suppressed when the time comes gets nothing; the others do', async ({ q }) => {
  const deliveries = [
    { recipient: 'Kept@recipient.test', lane: 'sink' },
    { recipient: 'GÖNE@recipient.test', lane: 'sink' },
  ];
  const [id] = await q.enqueue(1, { scheduledAt: past(), deliveries });
  const [nobody] = await q.enqueue(1, { scheduledAt: past(), deliveries: deliveries.slice(1) });
  await suppress(q, 'göne@recipient.test');
  assert.is(await wakeScheduled(q.store), 2);
  assert.equal(await q.states(), { ready: 1, suppressed: 2 });
  assert.is(await eventOf(q, id!), 'queued');
  const email = await findEmail(q.store, q.tenantId, nobody!);
  assert.is(email?.lastEvent, 'suppressed');
  assert.is(email?.providerLastError?.code, 'suppressed');
  const trace = await readTrace(q.store, q.tenantId, nobody!);
  assert.is(trace?.waiting, null);
  assert.is(trace?.events.at(-1)?.type, 'suppressed');
  assert.is(trace?.events.at(-1)?.recipient, 'GÖNE@recipient.test');
  assert.is(trace?.recipients[0]?.last_code, 'suppressed');

  // The worst final recipient shows, and the others' delivery does not hide it.
  const epoch = await q.run();
  const [claimed] = await q.claim(epoch, 10);
  await settle(q.store, [result(claimed!, epoch, { verdict: 'delivered' })]);
  assert.is(await eventOf(q, id!), 'suppressed');
});

test("another tenant's suppressions do not count", async ({ q }) => {
  const other = newId();
  await q.store.pool.query('insert into tenant (id, name) values ($1, $2)', [other, 'second']);
  await suppress(q, 'b@recipient.test', other);
  const [id] = await q.enqueue(1, { scheduledAt: past() });
  await wakeScheduled(q.store);
  assert.is(await eventOf(q, id!), 'queued');
});

test('suppressed at acceptance: no attempt, whatever the email waits for', async ({ q }) => {
  const gone = { recipient: 'gone@recipient.test', lane: 'sink', isSuppressed: true };
  const other = { recipient: 'kept@recipient.test', lane: 'sink' };
  const [all] = await q.enqueue(1, { deliveries: [gone], scheduledAt: soon() });
  const [some] = await q.enqueue(1, { deliveries: [gone, other] });
  assert.is(await eventOf(q, all!), 'suppressed');
  assert.is(await eventOf(q, some!), 'queued');
  assert.equal(await q.states(), { ready: 1, suppressed: 2 });
  const trace = await readTrace(q.store, q.tenantId, some!);
  assert.equal(
    trace?.events.map(({ type, recipient }) => [type, recipient]),
    [
      ['accepted', null],
      ['suppressed', 'gone@recipient.test'],
    ],
  );
  assert.equal(trace?.waiting?.recipients, ['kept@recipient.test']);
  assert.equal(await cancelEmail(q.store, q.tenantId, all!), { outcome: 'not_scheduled' });
});

test('canceling is final, and only for what is scheduled', async ({ q }) => {
  const staged = newId();
  const attachments = [file({ blobKey: staged, sizeBytes: 3 }), file({ url: 'http://x.test/a' })];
  const [id] = await q.enqueue(1, { scheduledAt: soon(), attachments, raw: null });
  const [sent] = await q.enqueue(1);
  assert.equal(await cancelEmail(q.store, q.tenantId, id!), {
    outcome: 'canceled',
    blobKeys: [staged],
  });
  assert.is(await eventOf(q, id!), 'canceled');
  assert.equal(await q.states(), { canceled: 1, ready: 1 });
  const { rows } = await q.store.pool.query('select 1 from attachment_fetch');
  assert.equal(rows, []);
  const trace = await readTrace(q.store, q.tenantId, id!);
  assert.is(trace?.events.at(-1)?.type, 'canceled');
  assert.is(trace?.waiting, null);
  for (const [key, outcome] of [
    [id!, 'not_scheduled'],
    [sent!, 'not_scheduled'],
    [newId(), 'not_found'],
  ] as const) {
    assert.equal(await cancelEmail(q.store, q.tenantId, key), { outcome });
    assert.equal(await move(q, key, soon()), { outcome });
  }
  // A foreign email and a missing one are the same.
  const [own] = await q.enqueue(1, { scheduledAt: soon() });
  assert.equal(await cancelEmail(q.store, newId(), own!), { outcome: 'not_found' });
  assert.equal(await move(q, own!, soon(), newId()), { outcome: 'not_found' });
  assert.is(await eventOf(q, own!), 'scheduled');
});

test('canceling and waking at the same time: never both, never neither', async ({ q }) => {
  const epoch = await q.run();
  const seen = { canceled: 0, sent: 0 };
  for (let round = 0; round < 12; round++) {
    const ids = await q.enqueue(40, { scheduledAt: past(), deliveries: recipients(2) });
    const canceling = ids.map(async (id, index) => {
      // Spread over the time that the wake takes.
      for (let turn = 0; turn < index % 8; turn++) await q.store.pool.query('select 1');
      return { id, ...(await cancelEmail(q.store, q.tenantId, id)) };
    });
    const waking = [wakeScheduled(q.store), wakeScheduled(q.store)];
    const canceled = new Set(
      (await Promise.all(canceling)).flatMap((one) => (one.outcome === 'canceled' ? [one.id] : [])),
    );
    const woken = await Promise.all(waking);
    const late = await wakeScheduled(q.store);
    const claimed = new Set((await q.claim(epoch, 1_000)).map(({ emailId }) => emailId));
    assert.is(woken[0]! + woken[1]! + late, claimed.size);
    for (const id of ids) {
      assert.is(Number(canceled.has(id)) + Number(claimed.has(id)), 1, 'canceled or sent');
    }
    seen.canceled += canceled.size;
    seen.sent += claimed.size;
  }
  assert.ok(seen.canceled > 0 && seen.sent > 0, `the two did not meet: ${JSON.stringify(seen)}`);
  const { rows } = await q.store.pool.query(
    `select 1 from delivery d join email e on e.tenant_id = d.tenant_id and e.id = d.email_id
     where (e.last_event = 'canceled') <> (d.state = 'canceled')`,
  );
  assert.equal(rows, []);
});

test('moving and waking at the same time: moved away it waits, else it is sent', async ({ q }) => {
  for (let round = 0; round < 8; round++) {
    const ids = await q.enqueue(30, { scheduledAt: past() });
    const moving = ids.map((id) => move(q, id, soon()));
    const waking = wakeScheduled(q.store);
    const moved = await Promise.all(moving);
    await waking;
    await wakeScheduled(q.store);
    for (const [index, { outcome }] of moved.entries()) {
      const event = await eventOf(q, ids[index]!);
      assert.is(event, outcome === 'rescheduled' ? 'scheduled' : 'queued');
    }
  }
});

test('several wake at once: every email once', async ({ q }) => {
  for (let batch = 0; batch < 13; batch++) await q.enqueue(100, { scheduledAt: past() });
  const woken = await Promise.all(Array.from({ length: 4 }, () => wakeScheduled(q.store)));
  const late = await wakeScheduled(q.store);
  assert.is(
    woken.reduce((sum, count) => sum + count, late),
    1_300,
  );
  assert.equal(await q.states(), { ready: 1_300 });
});

test('the alarms that ought to be set are one a bucket, within the horizon', async ({ q }) => {
  const bucketMs = 2_000;
  const base = Math.ceil((Date.now() + 60_000) / bucketMs) * bucketMs;
  await q.enqueue(50, { scheduledAt: new Date(base - 500) });
  await q.enqueue(50, { scheduledAt: new Date(base + 500) });
  await q.enqueue(1, { scheduledAt: soon() });
  const times = await scheduledTimes(q.store.pool, { horizonMs: 600_000, bucketMs, max: 10 });
  assert.equal(
    times.map((at) => at.getTime()),
    [base, base + bucketMs],
  );
  const one = await scheduledTimes(q.store.pool, { horizonMs: 600_000, bucketMs, max: 1 });
  assert.is(one.length, 1);
});

test.run();
