// The queue in numbers: what is counted for which lane and tenant, and that counting ends.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { reportLanes, type LaneReport } from '../../src/queue/lanes.ts';
import { readQueue } from '../../src/queue/overview.ts';
import { createPause } from '../../src/queue/pauses.ts';
import { newId } from '../../src/store/id.ts';
import { openQueue, type Bench } from '../support/queue.ts';

const overview = suite<{ q: Bench }>('overview');
overview.before.each(async (context) => {
  context.q = await openQueue();
});
overview.after.each(({ q }) => q.stop());

/** Deliveries without emails: nobody opens them here. */
async function fill(
  q: Bench,
  about: { count: number; state: string; lane?: string; tenantId?: string; more?: string },
): Promise<void> {
  const { count, state, lane = `'mx:a.test'`, tenantId = q.tenantId, more = '' } = about;
  await q.store.pool.query(
    `insert into delivery (tenant_id, email_id, position, recipient, lane, state, due_at, expires_at)
     select $1::uuid, gen_random_uuid(), 0, 'b@c.test', ${lane}, $2,
       timestamptz '2026-01-01' + n * interval '1 second', now() from generate_series(0, $3::integer - 1) n`,
    [tenantId, state, count],
  );
  if (more !== '') {
    await q.store.pool.query(`update delivery set ${more} where state = $1`, [state]);
  }
}

const lane = (name: string, about: Partial<LaneReport> = {}): LaneReport => ({
  name,
  egress: 'default',
  site: name.split('/')[1] ?? name,
  provider: null,
  circuit: 'closed',
  openedAt: null,
  openUntil: null,
  opens: 0,
  reason: null,
  limitedBy: null,
  connections: 1,
  connectionsMax: 10,
  concurrency: 3,
  queued: 0,
  inFlight: 0,
  lastSuccessAt: null,
  lastFailureAt: null,
  destinations: [],
  ...about,
});

overview('an empty queue is zeros', async ({ q }) => {
  const queue = await readQueue(q.store.pool);
  assert.equal(queue.totals, {
    ready: 0,
    in_flight: 0,
    deferred: 0,
    unknown: 0,
    scheduled: 0,
    preparing: 0,
    dead_lettered: 0,
    capped: [],
  });
  assert.is(queue.workers, 0);
  assert.is(queue.oldestDueAt, null);
  assert.equal([queue.lanes, queue.tenants, queue.pauses, queue.blocked], [[], [], [], []]);
  assert.is(queue.unassigned.destinations, 0);
  assert.ok(Math.abs(queue.at.getTime() - Date.now()) < 60_000);
});

overview('every state is counted, and what is over is not', async ({ q }) => {
  await fill(q, { count: 3, state: 'ready' });
  await fill(q, { count: 2, state: 'in_flight' });
  await fill(q, { count: 4, state: 'deferred' });
  await fill(q, { count: 1, state: 'unknown', more: 'unknowns = 2' });
  await q.store.pool.query(
    `insert into delivery (tenant_id, email_id, position, recipient, lane, state, due_at, expires_at, unknowns)
     select $1::uuid, gen_random_uuid(), 0, 'b@c.test', 'mx:a.test', 'unknown', now(), now(), 1`,
    [q.tenantId],
  );
  await fill(q, { count: 5, state: 'scheduled' });
  await fill(q, { count: 6, state: 'failed' });
  await fill(q, { count: 7, state: 'bounced', more: `last_cause = '5.1.1'` });
  await fill(q, { count: 9, state: 'delivered' });
  await q.run();
  const { totals, workers } = await readQueue(q.store.pool);
  assert.equal(totals, {
    ready: 3,
    in_flight: 2,
    deferred: 4,
    unknown: 1,
    scheduled: 5,
    preparing: 0,
    dead_lettered: 7,
    capped: [],
  });
  assert.is(workers, 1);
});

overview('mail is counted for the lanes that serve its destination', async ({ q }) => {
  const { pool } = q.store;
  const second = newId();
  await pool.query('insert into tenant (id, name) values ($1, $2)', [second, 'second']);
  await fill(q, { count: 3, state: 'ready' });
  await fill(q, { count: 5, state: 'ready', tenantId: second });
  await fill(q, { count: 2, state: 'ready', lane: `'mx:b.test'` });
  await fill(q, { count: 4, state: 'deferred', lane: `'mx:b.test'` });
  await fill(q, { count: 6, state: 'ready', lane: `'mx:new' || n % 2 || '.test'` });
  const circuit = {
    circuit: 'open' as const,
    openedAt: new Date('2026-01-02'),
    openUntil: new Date('2026-01-03'),
    reason: 'refused',
    limitedBy: 'circuit' as const,
  };
  await reportLanes(pool, [
    lane('default/mx.shared.test', { destinations: ['mx:a.test', 'mx:b.test'], ...circuit }),
    lane('other/mx.shared.test', { destinations: ['mx:a.test'], egress: 'other', inFlight: 2 }),
    lane('default/quiet.test', { destinations: ['mx:quiet.test'] }),
  ]);
  await createPause(pool, {
    kind: 'lane',
    name: 'other/mx.shared.test',
    reason: null,
    until: null,
  });
  await createPause(pool, { kind: 'tenant', name: second, reason: 'asked', until: null });
  const queue = await readQueue(pool);
  assert.equal(
    queue.lanes.map((one) => [one.name, one.ready, one.deferred, one.isPaused, one.circuit]),
    [
      ['default/mx.shared.test', 10, 4, false, 'open'],
      ['other/mx.shared.test', 8, 0, true, 'closed'],
      ['default/quiet.test', 0, 0, false, 'closed'],
    ],
  );
  assert.is(queue.lanes[0]!.reason, 'refused');
  assert.is(queue.lanes[0]!.openUntil?.toISOString(), '2026-01-03T00:00:00.000Z');
  assert.is(queue.lanes[0]!.oldestDueAt?.toISOString(), '2026-01-01T00:00:00.000Z');
  assert.is(queue.oldestDueAt?.toISOString(), '2026-01-01T00:00:00.000Z');
  assert.equal(
    queue.tenants.map((one) => [one.name, one.ready, one.deferred, one.isPaused]),
    [
      ['first', 11, 4, false],
      ['second', 5, 0, true],
    ],
  );
  assert.equal([queue.unassigned.destinations, queue.unassigned.ready], [2, 6]);
  assert.is(queue.pauses.length, 2);
  assert.not(queue.hasMoreLanes);
  assert.not(queue.hasMoreTenants);
});

overview('counting ends, and says so', async ({ q }) => {
  const { pool } = q.store;
  await fill(q, { count: 10_500, state: 'ready' });
  await fill(q, { count: 5, state: 'ready', lane: `'mx:b.test'` });
  await fill(q, { count: 50_001, state: 'deferred', lane: `'mx:d.test'` });
  await reportLanes(pool, [
    lane('default/a', { destinations: ['mx:a.test'] }),
    lane('default/b', { destinations: ['mx:b.test'] }),
  ]);
  const queue = await readQueue(pool);
  assert.equal(
    queue.lanes.map((one) => [one.name, one.ready, one.isReadyCapped, one.isDeferredCapped]),
    [
      ['default/a', 10_000, true, true],
      ['default/b', 5, false, true],
    ],
  );
  assert.is(queue.totals.ready, 10_505);
  assert.is(queue.totals.deferred, 50_000);
  assert.equal(queue.totals.capped, ['deferred', 'unknown']);
  assert.ok(queue.tenants[0]!.isReadyCapped);
});

overview('more destinations than are looked at are said to be more', async ({ q }) => {
  await fill(q, { count: 2_500, state: 'ready', lane: `'mx:d' || n || '.test'` });
  const queue = await readQueue(q.store.pool);
  assert.is(queue.unassigned.destinations, 2_000);
  assert.ok(queue.unassigned.isReadyCapped);
  assert.ok(queue.tenants[0]!.isReadyCapped);
  assert.is(queue.totals.ready, 2_500);
  assert.equal(queue.totals.capped, []);
});

overview('a lane that has been closed for long is not lost among many others', async ({ q }) => {
  const { pool } = q.store;
  await fill(q, { count: 3, state: 'ready' });
  await reportLanes(pool, [
    lane('default/a', { destinations: ['mx:a.test'], limitedBy: 'circuit' }),
  ]);
  await pool.query(
    `insert into lane (name, egress, site, reported_at)
     select 'default/' || n, 'default', n, now() + interval '1 second' from generate_series(1, 5000) n`,
  );
  const { lanes } = await readQueue(pool);
  assert.equal([lanes[0]?.name, lanes[0]?.ready], ['default/a', 3]);
});

overview('lists end at a hundred', async ({ q }) => {
  const { pool } = q.store;
  const ids = Array.from({ length: 120 }, () => newId());
  await pool.query(`insert into tenant (id, name) select unnest($1::uuid[]), 'n'`, [ids]);
  for (const tenantId of ids) await fill(q, { count: 1, state: 'ready', tenantId });
  await fill(q, { count: 2, state: 'ready' });
  await reportLanes(
    pool,
    Array.from({ length: 120 }, (_, n) => lane(`default/${n}`)),
  );
  const queue = await readQueue(pool);
  assert.equal([queue.lanes.length, queue.hasMoreLanes], [100, true]);
  assert.equal([queue.tenants.length, queue.hasMoreTenants], [100, true]);
  assert.is(queue.tenants[0]!.name, 'first', 'who has most comes first');
});

overview.run();
