// Why an email waits and what would change that: every rule, from the rows that workers and operators really write.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { reportLanes, type LaneReport } from '../../src/queue/lanes.ts';
import { createPause } from '../../src/queue/pauses.ts';
import { reportBlocked } from '../../src/queue/egress-state.ts';
import { settle } from '../../src/queue/settle.ts';
import { readTrace } from '../../src/timeline/trace.ts';
import type { Waiting } from '../../src/timeline/waiting.ts';
import { file, openQueue, result, type Bench } from '../support/queue.ts';

const explain = suite<{ q: Bench; epoch: string }>('explain');
explain.before(async (context) => {
  context.q = await openQueue();
});
explain.before.each(async (context) => {
  await context.q.store.pool.query(
    'truncate email, email_content, delivery, attempt, timeline, attachment_fetch, lane, lane_destination, pause, egress, worker',
  );
  context.epoch = await context.q.run();
});
explain.after(({ q }) => q.stop());

const TO = [{ recipient: 'b@a.test', lane: 'mx:a.test' }];
const why = async (q: Bench, id: string, isOperator = false): Promise<Waiting> => {
  const waiting = (await readTrace(q.store, q.tenantId, id, { isOperator }))?.waiting ?? null;
  assert.ok(waiting);
  assert.match(waiting.reason, /^[A-Z]/);
  assert.match(waiting.remedy, /^[A-Z].*\.$/);
  return waiting;
};
const code = async (q: Bench, id: string): Promise<string> => (await why(q, id)).code;

const lane = (about: Partial<LaneReport> = {}): LaneReport => ({
  name: 'default/mx.a.test',
  egress: 'default',
  site: 'mx.a.test',
  provider: null,
  circuit: 'closed',
  openedAt: null,
  openUntil: null,
  opens: 0,
  reason: null,
  limitedBy: null,
  connections: 10,
  connectionsMax: 10,
  concurrency: 4.7,
  queued: 25,
  inFlight: 10,
  lastSuccessAt: null,
  lastFailureAt: null,
  destinations: ['mx:a.test'],
  ...about,
});

explain('due, with a worker and no rule in its way: queued', async ({ q }) => {
  const [id] = await q.enqueue(1, { deliveries: TO });
  const waiting = await why(q, id!);
  assert.is(waiting.code, 'queued');
  assert.is(waiting.next_attempt_at, null);
  assert.equal(waiting.recipients, ['b@a.test']);
  await reportLanes(q.store.pool, [lane()]);
  assert.is(await code(q, id!), 'queued');
});

explain('due, and no worker runs', async ({ q }) => {
  const [id] = await q.enqueue(1, { deliveries: TO });
  await q.store.pool.query(`update worker set heartbeat_at = now() - interval '61 seconds'`);
  await reportLanes(q.store.pool, [lane({ limitedBy: 'connections' })]);
  assert.is(await code(q, id!), 'no_worker');
  await q.store.pool.query('delete from worker');
  assert.is(await code(q, id!), 'no_worker');
});

explain('the lane is busy: the limit and its numbers', async ({ q }) => {
  const { pool } = q.store;
  const [id] = await q.enqueue(1, { deliveries: TO });
  const said = async (about: Partial<LaneReport>): Promise<string> => {
    await reportLanes(pool, [lane(about)]);
    const waiting = await why(q, id!);
    assert.is(waiting.code, 'lane_busy');
    return waiting.reason;
  };
  assert.match(
    await said({ limitedBy: 'connections' }),
    /default\/mx\.a\.test .*10 of at most 10 connections .*25 deliveries/,
  );
  assert.match(await said({ limitedBy: 'concurrency' }), /4 connections at a time .*at most 10/);
  assert.match(await said({ limitedBy: 'rate' }), /this minute are used up/);
  await pool.query(`update lane set reported_at = now() - interval '11 minutes'`);
  assert.is(await code(q, id!), 'queued', 'an old report says nothing of now');
  // Another way to the same place is free.
  await reportLanes(pool, [
    lane({ limitedBy: 'connections' }),
    lane({ name: 'other/mx.a.test', egress: 'other' }),
  ]);
  assert.is(await code(q, id!), 'queued');
});

explain('the circuit is open: since when, until when; why, for the operator', async ({ q }) => {
  const [id] = await q.enqueue(1, { deliveries: TO });
  const openedAt = new Date('2026-08-01T10:00:00.000Z');
  const openUntil = new Date('2026-08-01T10:05:00.000Z');
  const reason = '421 too much mail from someone@other-tenant.test';
  const open = { circuit: 'open' as const, openedAt, openUntil, reason };
  await reportLanes(q.store.pool, [lane({ ...open, limitedBy: 'circuit' })]);
  const waiting = await why(q, id!);
  assert.is(waiting.code, 'circuit_open');
  assert.match(waiting.reason, /since 2026-08-01T10:00:00.000Z until 2026-08-01T10:05:00.000Z/);
  assert.not.match(JSON.stringify(waiting), /other-tenant/);
  assert.is(waiting.next_attempt_at?.getTime(), openUntil.getTime());
  assert.match((await why(q, id!, true)).reason, /someone@other-tenant\.test\.$/);
  await reportLanes(q.store.pool, [lane({ ...open, circuit: 'half_open' })]);
  assert.match((await why(q, id!)).reason, /one delivery tries them now/);
});

explain('port 25 is blocked, from every address it may leave from', async ({ q }) => {
  const { pool } = q.store;
  const [id] = await q.enqueue(1, { deliveries: TO });
  const [sink] = await q.enqueue(1);
  await reportBlocked(pool, {
    name: 'default',
    reason: 'timeouts at mx.x.test',
    silent: [],
    windowMs: 1,
  });
  const waiting = await why(q, id!);
  assert.is(waiting.code, 'port_25_blocked', 'also where its lane is not known yet');
  assert.not.match(JSON.stringify(waiting), /mx\.x\.test/);
  await reportLanes(pool, [lane({ limitedBy: 'blocked' })]);
  assert.is(await code(q, id!), 'port_25_blocked');
  assert.is(await code(q, sink!), 'queued', 'the sink needs no port 25');
  await reportLanes(pool, [lane({ name: 'other/mx.a.test', egress: 'other' })]);
  assert.is(await code(q, id!), 'queued');
  await pool.query(`update egress set reported_at = now() - interval '11 minutes'`);
  await pool.query(`delete from lane_destination where lane like 'other/%'`);
  assert.is(await code(q, id!), 'queued', 'nobody has said so for a while');
});

explain('paused: what, why and until when; other pauses do not concern it', async ({ q }) => {
  const { pool } = q.store;
  const [id] = await q.enqueue(1, { deliveries: TO });
  await reportLanes(pool, [lane()]);
  const pause = async (kind: 'all' | 'tenant' | 'destination' | 'lane', name: string) => {
    await pool.query('delete from pause');
    await createPause(pool, { kind, name, reason: null, until: null });
    return why(q, id!);
  };
  assert.match((await pause('all', '')).reason, /^All delivery is paused by the operator\.$/);
  assert.match((await pause('tenant', q.tenantId)).reason, /^Delivery for this tenant/);
  assert.match((await pause('destination', 'mx:a.test')).reason, /^Delivery to a\.test/);
  assert.match((await pause('lane', 'default/mx.a.test')).reason, /^The lane default\/mx\.a\.test/);
  assert.is((await pause('tenant', '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70')).code, 'queued');
  assert.is((await pause('destination', 'mx:b.test')).code, 'queued');
  assert.is((await pause('lane', 'default/mx.b.test')).code, 'queued');

  await pool.query('delete from pause');
  const until = new Date(Date.now() + 3_600_000);
  await createPause(pool, { kind: 'lane', name: 'default/mx.a.test', reason: 'Too hot!', until });
  const waiting = await why(q, id!);
  assert.match(waiting.reason, /until \d{4}-.*Z: Too hot!?\.$/);
  assert.is(waiting.next_attempt_at?.getTime(), until.getTime());
  await reportLanes(pool, [lane({ name: 'other/mx.a.test', egress: 'other' })]);
  assert.is(await code(q, id!), 'queued', 'another lane serves it');
});

explain('of several recipients the one that waits longest decides', async ({ q, epoch }) => {
  const { pool } = q.store;
  const to = (name: string) => ({ recipient: `b@${name}.test`, lane: `mx:${name}.test` });
  const [id] = await q.enqueue(1, { deliveries: ['a', 'b', 'c', 'd'].map(to) });
  const [first, second] = await q.claim(epoch, 2, {
    exceptLanes: ['mx:c.test', 'mx:d.test'],
  });
  assert.is(await code(q, id!), 'queued', 'two are under way, two are not');
  await reportLanes(pool, [
    lane({ name: 'default/c', destinations: ['mx:c.test'], limitedBy: 'rate' }),
  ]);
  assert.is(await code(q, id!), 'lane_busy');
  const openUntil = new Date(Date.now() + 600_000);
  await reportLanes(pool, [
    lane({ name: 'default/d', destinations: ['mx:d.test'], circuit: 'open', openUntil }),
  ]);
  const circuit = await why(q, id!);
  assert.is(circuit.code, 'circuit_open');
  assert.match(circuit.reason, 'default/d');
  assert.is(circuit.recipients.length, 4);
  const evidence = { cause: 'mailbox_full' as const, reply: '452 full', code: 452, enhanced: null };
  await settle(q.store, [
    result(first!, epoch, { verdict: 'deferred', delayMs: 60_000, evidence }),
  ]);
  assert.is(await code(q, id!), 'circuit_open', 'the retry comes before');
  await settle(q.store, [
    result(second!, epoch, { verdict: 'deferred', delayMs: 3_600_000, evidence }),
  ]);
  const deferred = await why(q, id!);
  assert.is(deferred.code, 'deferred');
  assert.match(deferred.reason, second!.recipient);
  await createPause(pool, { kind: 'destination', name: 'mx:c.test', reason: null, until: null });
  assert.match((await why(q, id!)).reason, /^Delivery to c\.test is paused/);
});

explain('a lane that served it once does not count', async ({ q }) => {
  const { pool } = q.store;
  const [id] = await q.enqueue(1, { deliveries: TO });
  const inAMinute = new Date(Date.now() + 60_000);
  const open = { circuit: 'open', openUntil: inAMinute, limitedBy: 'circuit' } as const;
  const age = (name: string, days: number) =>
    pool.query(
      `update lane_destination set seen_at = now() - $2 * interval '1 day' where lane = $1`,
      [name, days],
    );
  // Its hosts have moved.
  await reportLanes(pool, [lane({ name: 'default/old.a.test' })]);
  await age('default/old.a.test', 2);
  await reportLanes(pool, [lane(open)]);
  assert.is(await code(q, id!), 'circuit_open');
  await reportLanes(pool, [lane()]);
  const pause = (name: string) =>
    createPause(pool, { kind: 'lane', name, reason: null, until: null });
  await pause('default/old.a.test');
  assert.is(await code(q, id!), 'queued');
  await pause('default/mx.a.test');
  assert.is(await code(q, id!), 'paused');

  // It goes through the smarthost while the port is blocked, and straight again after.
  await pool.query('delete from pause');
  await reportBlocked(pool, { name: 'default', reason: 'x', silent: [], windowMs: 1 });
  await age('default/mx.a.test', 1);
  await reportLanes(pool, [lane({ name: 'smarthost', limitedBy: 'connections' })]);
  assert.is(await code(q, id!), 'lane_busy');
  await reportLanes(pool, [lane({ name: 'smarthost' })]);
  assert.is(await code(q, id!), 'queued');
  await age('smarthost', 2);
  assert.is(await code(q, id!), 'port_25_blocked');
});

explain('a circuit that nobody has spoken of since it ended is not open', async ({ q }) => {
  const { pool } = q.store;
  const [id] = await q.enqueue(1, { deliveries: TO });
  const report = (minutes: number) =>
    reportLanes(pool, [
      lane({ circuit: 'open', openUntil: new Date(Date.now() + minutes * 60_000) }),
    ]);
  const isOld = `update lane set reported_at = now() - interval '1 day'`;
  await report(1);
  await pool.query(isOld);
  assert.is(await code(q, id!), 'circuit_open', 'an open one is reported once');
  await report(-11);
  assert.is(await code(q, id!), 'circuit_open');
  await pool.query(isOld);
  assert.is(await code(q, id!), 'queued');
});

explain('put off: by whom, and what to do', async ({ q, epoch }) => {
  const { pool } = q.store;
  const table = [
    ['greylisted', '451 come back later', 'greylisted', /lets in who comes again/],
    ['dns_failed', null, 'policy_lookup_failed', /name servers .* of a\.test/],
    ['tls_policy_unknown', null, 'policy_lookup_failed', /policy host of a\.test/],
    ['tls_required', null, 'tls_required', /tls: enforced/],
    ['tls_policy_failed', null, 'tls_required', /a\.test have to offer the encryption/],
    ['mailbox_full', '452 full', 'deferred', /tried again at .* given up after/],
  ] as const;
  for (const [cause, reply, expected, remedy] of table) {
    const [id] = await q.enqueue(1, { deliveries: TO });
    const [claimed] = await q.claim(epoch, 1);
    assert.is(claimed?.emailId, id);
    assert.is(await code(q, id!), 'in_flight');
    const evidence = { cause, reply: reply ?? 'our words', code: null, enhanced: null };
    await settle(q.store, [
      result(claimed!, epoch, { verdict: 'deferred', delayMs: 60_000, evidence }),
    ]);
    const waiting = await why(q, id!);
    assert.is(waiting.code, expected, cause);
    assert.match(waiting.reason, reply ?? 'our words');
    assert.match(waiting.remedy, remedy);
    assert.ok(waiting.next_attempt_at);
    assert.match(waiting.remedy, waiting.next_attempt_at.toISOString());
  }
  // A pause that outlasts the next try decides, a shorter one does not.
  const { rows } = await pool.query<{ email_id: string }>('select email_id from delivery limit 1');
  const id = rows[0]!.email_id;
  const inMs = (ms: number): Date => new Date(Date.now() + ms);
  await createPause(pool, { kind: 'all', name: '', reason: null, until: inMs(10_000) });
  assert.is.not(await code(q, id), 'paused');
  await createPause(pool, { kind: 'all', name: '', reason: null, until: inMs(3_600_000) });
  assert.is(await code(q, id), 'paused');
});

explain('unknown, scheduled, preparing', async ({ q, epoch }) => {
  const [lost] = await q.enqueue(1, { deliveries: TO });
  const [claimed] = await q.claim(epoch, 1);
  await settle(q.store, [result(claimed!, epoch, { verdict: 'unknown' })]);
  const unknown = await why(q, lost!);
  assert.is(unknown.code, 'unknown');
  assert.match(unknown.remedy, /Ask the recipient/);

  const scheduledAt = new Date(Date.now() + 3_600_000);
  const [later] = await q.enqueue(1, { scheduledAt });
  const scheduled = await why(q, later!);
  assert.is(scheduled.code, 'scheduled');
  assert.is(scheduled.next_attempt_at?.getTime(), scheduledAt.getTime());

  const [fetched] = await q.enqueue(1, {
    raw: null,
    attachments: [file({ url: 'https://files.test/a.pdf' })],
  });
  assert.is(await code(q, fetched!), 'preparing');
});

explain('nothing is left to wait for', async ({ q, epoch }) => {
  const [id] = await q.enqueue(1, { deliveries: TO });
  const [claimed] = await q.claim(epoch, 1);
  await settle(q.store, [result(claimed!, epoch, { verdict: 'delivered' })]);
  assert.is((await readTrace(q.store, q.tenantId, id!))?.waiting, null);
});

explain.run();
