// What settling decides beyond the verdict: the end of a lifetime and what is told of it, the last try before it, and
// the one fact about a recipient that waits for hours. On a real Postgres; time passes by moving the rows.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { expireUntried } from '../../src/queue/expire.ts';
import { release } from '../../src/queue/lease.ts';
import { settle, type Evidence } from '../../src/queue/settle.ts';
import { DEFAULT_OUTCOMES } from '../../src/queue/outcome-policy.ts';
import { createPause, removePause } from '../../src/queue/pauses.ts';
import { wake } from '../../src/queue/wake.ts';
import { findEmail } from '../../src/sending/read.ts';
import { readTrace } from '../../src/timeline/trace.ts';
import { until } from '../support/app.ts';
import { openQueue, result, type Bench } from '../support/queue.ts';

const HOUR = 3_600_000;
const test = suite<{ q: Bench }>('settle');
test.before.each(async (context) => {
  context.q = await openQueue();
});
test.after.each(({ q }) => q.stop());

const ofPeer = (reply: string): Partial<Evidence> => ({
  cause: 'peer_transient',
  stage: 'rcpt',
  code: Number(reply.slice(0, 3)),
  enhanced: reply.slice(4, 9),
  reply,
});
const unreachable: Partial<Evidence> = {
  cause: 'connect_timeout',
  stage: 'connect',
  code: null,
  enhanced: null,
  reply: 'no answer within 30 s',
};

/** One more attempt that is put off for `delayMs`. */
async function deferOnce(q: Bench, delayMs: number, evidence: Partial<Evidence>): Promise<void> {
  await q.store.pool.query(
    "update delivery set due_at = now() where state in ('deferred', 'ready')",
  );
  await wake(q.store.pool, null);
  const epoch = await q.run();
  const claimed = await q.claim(epoch, 10);
  assert.ok(claimed.length > 0);
  await settle(
    q.store,
    claimed.map((one) => result(one, epoch, { verdict: 'deferred', delayMs, evidence })),
  );
}
/** As if `ms` had passed. */
const pass = async (q: Bench, ms: number): Promise<void> => {
  await q.store.pool.query(
    `update delivery set due_at = due_at - $1 * interval '1 millisecond',
       expires_at = expires_at - $1 * interval '1 millisecond',
       deferred_at = deferred_at - $1 * interval '1 millisecond'`,
    [ms],
  );
};
const facts = async (q: Bench, id: string, kind: string) =>
  ((await readTrace(q.store, q.tenantId, id))?.events ?? []).filter(({ type }) => type === kind);
const dueInMs = async (q: Bench): Promise<number> => {
  const { rows } = await q.store.pool.query<{ ms: number }>(
    'select extract(epoch from expires_at - due_at)::float8 * 1000 as ms from delivery',
  );
  return rows[0]!.ms;
};

test('expired: bounced with the last words of a peer, not with our own about a connection', async ({
  q,
}) => {
  const [id] = await q.enqueue(1, { lifetimeMs: 10 * HOUR });
  await deferOnce(q, HOUR, ofPeer('451 4.3.0 first words'));
  await deferOnce(q, HOUR, ofPeer('452 4.2.2 mailbox full'));
  await deferOnce(q, HOUR, unreachable);
  await pass(q, 9.9 * HOUR);
  await deferOnce(q, 4 * HOUR, unreachable);
  const email = await findEmail(q.store, q.tenantId, id!);
  assert.is(email?.lastEvent, 'bounced');
  assert.equal(email?.providerLastError, { code: 'expired', message: '452 4.2.2 mailbox full' });
  assert.ok(email?.providerDeadLetteredAt);
  const [expired, ...more] = await facts(q, id!, 'expired');
  assert.equal(more, []);
  assert.is(expired?.recipient, 'b@recipient.test');
  assert.equal(expired?.detail, {
    attempts: 4,
    cause: 'connect_timeout',
    reply: '452 4.2.2 mailbox full',
  });
});

test('expired without a peer that ever spoke: our own words are better than none', async ({
  q,
}) => {
  const [id] = await q.enqueue(1, { lifetimeMs: HOUR });
  await deferOnce(q, 3 * HOUR, unreachable);
  assert.equal((await findEmail(q.store, q.tenantId, id!))?.providerLastError, {
    code: 'expired',
    message: 'no answer within 30 s',
  });
});

test('a lifetime is used: where half of the pause is left, there is one last try shortly before its end', async ({
  q,
}) => {
  await q.enqueue(1, { lifetimeMs: 3 * HOUR });
  await deferOnce(q, 4 * HOUR, ofPeer('451 4.3.0 later'));
  assert.equal(await q.states(), { deferred: 1 });
  const early = await dueInMs(q);
  assert.ok(early > 50_000 && early <= 60_000, `${early} ms before its end`);
  await pass(q, 3 * HOUR - 55_000);
  await deferOnce(q, 4 * HOUR, ofPeer('451 4.3.0 later'));
  assert.equal(await q.states(), { bounced: 1 }, 'and only one');
});

test('a short lifetime has its last try inside of it, too', async ({ q }) => {
  await q.enqueue(1, { lifetimeMs: 10 * 60_000 });
  await deferOnce(q, 15 * 60_000, ofPeer('451 4.3.0 later'));
  const early = await dueInMs(q);
  assert.ok(early > 0 && early <= 30_001, `${early} ms before its end`);
});

test('late: told once for each recipient, when it has been put off for longer than the policy says', async ({
  q,
}) => {
  const [id] = await q.enqueue(1, {
    deliveries: [
      { recipient: 'a@recipient.test', lane: 'sink' },
      { recipient: 'b@recipient.test', lane: 'sink' },
    ],
  });
  await deferOnce(q, HOUR, ofPeer('451 4.3.0 later'));
  await pass(q, 3 * HOUR);
  await deferOnce(q, HOUR, ofPeer('451 4.3.0 later'));
  assert.equal(await facts(q, id!, 'delivery_delayed'), []);
  await pass(q, 1.1 * HOUR);
  await deferOnce(q, HOUR, ofPeer('450 4.2.1 busy'));
  await pass(q, HOUR);
  await deferOnce(q, HOUR, ofPeer('451 4.3.0 later'));
  const told = await facts(q, id!, 'delivery_delayed');
  assert.equal(
    told.map(({ recipient }) => String(recipient)).toSorted((a, b) => a.localeCompare(b)),
    ['a@recipient.test', 'b@recipient.test'],
  );
  const { detail } = told[0]!;
  assert.equal(
    [detail['attempts'], detail['reply'], typeof detail['next_attempt_at']],
    [3, '450 4.2.1 busy', 'string'],
  );
});

test('another policy tells sooner, and a delivery that succeeds is not late', async ({ q }) => {
  const [id] = await q.enqueue(1);
  await deferOnce(q, HOUR, ofPeer('451 4.3.0 later'));
  await pass(q, 10 * 60_000);
  await q.store.pool.query('update delivery set due_at = now()');
  await wake(q.store.pool, null);
  const epoch = await q.run();
  const [one] = await q.claim(epoch, 1);
  const policy = { ...DEFAULT_OUTCOMES, delayedAfterMs: 5 * 60_000 };
  await settle(q.store, [result(one!, epoch, { verdict: 'delivered' })], policy);
  assert.equal(await facts(q, id!, 'delivery_delayed'), []);
  const [late] = await q.enqueue(1);
  await deferOnce(q, HOUR, ofPeer('451 4.3.0 later'));
  await pass(q, 10 * 60_000);
  await q.store.pool.query("update delivery set due_at = now() where state = 'deferred'");
  await wake(q.store.pool, null);
  const [again] = await q.claim(epoch, 1);
  await settle(q.store, [result(again!, epoch, { verdict: 'deferred' })], policy);
  assert.is((await facts(q, late!, 'delivery_delayed')).length, 1);
});

test('past its lifetime behind an open circuit: bounced without an attempt; behind anything else it is tried first', async ({
  q,
}) => {
  const to = (name: string) => ({
    lifetimeMs: 1_000,
    deliveries: [{ recipient: `x@${name}.test`, lane: `mx:${name}.test` }],
  });
  const names = ['shut', 'probed', 'half', 'open', 'unknown', 'late', 'paused'];
  const ids: Record<string, string> = {};
  for (const name of names) ids[name] = (await q.enqueue(1, to(name)))[0]!;
  await deferOnce(q, 500, ofPeer('451 4.3.0 we are closing'));
  await q.store.pool.query("update delivery set state = 'ready', expires_at = now()");
  await q.store.pool.query(
    "update delivery set expires_at = now() + interval '1 hour' where email_id = $1",
    [ids['late']],
  );
  const lanes: readonly (readonly [string, string, number, string])[] = [
    ['shut', 'open', 3, '10 minutes'],
    ['late', 'open', 3, '10 minutes'],
    ['paused', 'open', 3, '10 minutes'],
    ['probed', 'open', 3, '-1 minutes'],
    ['half', 'open', 3, '10 minutes'],
    ['open', 'closed', 0, '0'],
  ];
  for (const [name, circuit, opens, left] of lanes) {
    await q.store.pool.query(
      `insert into lane (name, egress, site, circuit, opens, open_until, reason, reported_at)
       values ($1, 'default', $1, $2, $3, now() + $4::interval, 'refused', now())`,
      [`default/${name}`, circuit, opens, left],
    );
    await q.store.pool.query(
      'insert into lane_destination (destination, lane, seen_at) values ($1, $2, now())',
      [`mx:${name}.test`, `default/${name}`],
    );
  }
  // Another address of ours still gets through to this one.
  await q.store.pool.query(
    "insert into lane_destination (destination, lane, seen_at) values ('mx:half.test', 'default/open', now())",
  );
  const pause = { reason: null, until: null };
  await createPause(q.store.pool, { ...pause, kind: 'destination', name: 'mx:paused.test' });
  for (const [kind, name] of [
    ['all', ''],
    ['tenant', q.tenantId],
    ['lane', 'default/shut'],
  ] as const) {
    const paused = await createPause(q.store.pool, { ...pause, kind, name });
    assert.is(await expireUntried(q.store), 0, kind);
    await removePause(q.store.pool, paused!.id);
  }
  assert.is(await expireUntried(q.store), 1);
  assert.is(await expireUntried(q.store), 0);
  const email = await findEmail(q.store, q.tenantId, ids['shut']!);
  assert.equal(
    [email?.lastEvent, email?.providerLastError],
    ['bounced', { code: 'expired', message: '451 4.3.0 we are closing' }],
  );
  assert.is((await facts(q, ids['shut']!, 'expired')).length, 1);
  assert.equal(await q.states(), { bounced: 1, ready: names.length - 1 });
});

test('a result that is fenced off leaves the email to whoever settles it at the same time', async ({
  q,
}) => {
  const [id] = await q.enqueue(1);
  const owner = await q.run();
  const [one] = await q.claim(owner, 1);
  const client = await q.store.pool.connect();
  try {
    // The owner's own settlement, stopped right before its commit.
    await client.query('begin');
    await client.query("update delivery set state = 'delivered', lease_epoch = null");
    await client.query("update email set last_event = 'delivered'");
    let over = 0;
    const fenced = settle(q.store, [result(one!, await q.run(), { verdict: 'deferred' })]);
    const back = release(q.store, await q.run(), { held: [one!], begun: true });
    for (const each of [fenced, back]) void Promise.resolve(each).finally(() => (over += 1));
    await until(async () => {
      const { rows } = await q.store.pool.query<{ waiting: number }>(
        `select count(*)::int as waiting from pg_stat_activity
         where datname = current_database() and wait_event_type = 'Lock'`,
      );
      return over + rows[0]!.waiting === 2;
    }, Boolean);
    await client.query('commit');
    assert.equal(await fenced, { count: 0, fenced: 1, waiting: [] });
    assert.is(await back, 0);
  } finally {
    client.release();
  }
  assert.is((await findEmail(q.store, q.tenantId, id!))?.lastEvent, 'delivered');
});

test.run();
