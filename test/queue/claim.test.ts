// How a claim shares: tenants, destinations, one-recipient mail and bulk; and that what it looks at does not follow
// the length of the queue, whatever the planner knows about the tables.
import type { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { claim, type ClaimCursors, type ClaimOptions } from '../../src/queue/claim.ts';
import { CLAIM } from '../../src/queue/claim-statement.ts';
import { newId } from '../../src/store/id.ts';
import { listen } from '../support/outbox.ts';
import { openQueue, recipients, type Bench } from '../support/queue.ts';

const claims = suite<{ q: Bench }>('claim');
claims.before.each(async (context) => {
  context.q = await openQueue();
});
claims.after.each(({ q }) => q.stop());

interface Filling {
  readonly count: number;
  readonly tenantId?: string;
  /** SQL over `n`, the number of the row from 0. */
  readonly lane?: string;
  readonly isBulk?: string;
}

/** Ready deliveries, each of an email of its own. */
async function fill(q: Bench, { count, tenantId = q.tenantId, ...about }: Filling): Promise<void> {
  const { lane = `'mx:big.test'`, isBulk = 'false' } = about;
  await q.store.pool.query(
    `with e as (
       insert into email (tenant_id, id, created_at, message_id, from_given, from_domain, to_given, subject,
         last_event, recipient_count)
       select $1::uuid, gen_random_uuid(), now(), '<x@y>', 'a@sender.test', 'sender.test', '["b@c.test"]',
         'x', 'queued', 1 from generate_series(1, $2::integer) returning id
     ), c as (
       insert into email_content (tenant_id, email_id, raw, raw_size_bytes, needs_smtp_utf8)
       select $1::uuid, id, '\\x41', 1, false from e
     )
     insert into delivery (tenant_id, email_id, position, recipient, lane, is_bulk, state, due_at, expires_at)
     select $1::uuid, id, 0, 'b@c.test', ${lane}, ${isBulk}, 'ready', now(), now() + interval '4 days'
     from (select id, row_number() over () - 1 as n from e) e`,
    [tenantId, count],
  );
}

const moreTenants = async (q: Bench, count: number): Promise<readonly string[]> => {
  const ids = Array.from({ length: count }, () => newId());
  await q.store.pool.query(`insert into tenant (id, name) select unnest($1::uuid[]), 'other'`, [
    ids,
  ]);
  return ids;
};

const ask = (about: Partial<ClaimOptions> & { readonly epoch: string }): ClaimOptions => ({
  max: 200,
  perTenant: 100,
  exceptLanes: [],
  exceptTenants: [],
  rooms: new Map(),
  roomOfOthers: 100,
  cursors: {},
  ...about,
});

function countBy<T>(items: readonly T[], keyOf: (item: T) => string): Record<string, number> {
  const counts: Record<string, number> = {};
  for (const item of items) counts[keyOf(item)] = (counts[keyOf(item)] ?? 0) + 1;
  return counts;
}

claims('an email with several recipients is bulk, one with one is not', async ({ q }) => {
  await q.enqueue(1);
  await q.enqueue(1, { deliveries: recipients(3) });
  await q.enqueue(1, { isBulk: true, scheduledAt: new Date(Date.now() + 60_000) });
  const { rows } = await q.store.pool.query(
    'select state, is_bulk, count(*)::int from delivery group by 1, 2 order by 3, 1',
  );
  assert.equal(rows, [
    { state: 'ready', is_bulk: false, count: 1 },
    { state: 'scheduled', is_bulk: true, count: 1 },
    { state: 'ready', is_bulk: true, count: 3 },
  ]);
  const claimed = await q.claim(await q.run(), 10);
  assert.equal(
    countBy(claimed, ({ isBulk }) => String(isBulk)),
    { true: 3, false: 1 },
  );
});

claims('one-recipient mail goes first, and bulk that waits gets one in four', async ({ q }) => {
  const epoch = await q.run();
  await fill(q, { count: 400, isBulk: 'n >= 200' });
  const room = new Map([['mx:big.test', 40]]);
  const both = await claim(q.store, ask({ epoch, rooms: room }));
  assert.equal(
    countBy(both.deliveries, ({ isBulk }) => (isBulk ? 'bulk' : 'single')),
    { single: 30, bulk: 10 },
  );
  // A tenant's share is divided like the room of a destination.
  const share = await claim(q.store, ask({ epoch, max: 100 }));
  assert.equal(
    countBy(share.deliveries, ({ isBulk }) => (isBulk ? 'bulk' : 'single')),
    { single: 75, bulk: 25 },
  );
});

claims('one-recipient mail does not wait behind the destinations of bulk', async ({ q }) => {
  await fill(q, { count: 2_000, lane: `'mx:d' || n || '.test'`, isBulk: 'true' });
  await fill(q, { count: 1, lane: `'mx:zz.test'` });
  const { deliveries } = await claim(q.store, ask({ epoch: await q.run(), max: 20 }));
  assert.ok(deliveries.some(({ lane }) => lane === 'mx:zz.test'));
  assert.is(deliveries.length, 20);
});

claims('alone, each of the two gets everything', async ({ q }) => {
  const epoch = await q.run();
  await fill(q, { count: 50, isBulk: 'true' });
  assert.is((await claim(q.store, ask({ epoch, max: 20 }))).deliveries.length, 20);
  await fill(q, { count: 50 });
  assert.is((await claim(q.store, ask({ epoch, max: 80 }))).deliveries.length, 80);
});

claims('bulk gets one in four, too, where a tenant gets one at a time', async ({ q }) => {
  const epoch = await q.run();
  await fill(q, { count: 400, isBulk: 'n < 200' });
  let bulk = 0;
  for (let turn = 0; turn < 200; turn++) {
    const { deliveries } = await claim(q.store, ask({ epoch, max: 1 }));
    bulk += deliveries.filter(({ isBulk }) => isBulk).length;
  }
  assert.ok(bulk > 22 && bulk < 85, `50 of 200 are expected: ${bulk}`); // beyond four times the deviation
});

claims('the room of a destination holds for all tenants together', async ({ q }) => {
  const others = await moreTenants(q, 9);
  for (const tenantId of [q.tenantId, ...others]) await fill(q, { tenantId, count: 20 });
  const rooms = new Map([['mx:big.test', 10]]);
  const { deliveries } = await claim(q.store, ask({ epoch: await q.run(), rooms }));
  assert.is(deliveries.length, 10);
  const tenants = countBy(deliveries, ({ tenantId }) => tenantId);
  assert.is(Object.keys(tenants).length, 10, 'each tenant got one of it');
});

claims('where others have no room only the named destinations are claimed for', async ({ q }) => {
  await fill(q, { count: 1_000, lane: `'mx:d' || n || '.test'` });
  const rooms = new Map([
    ['mx:d700.test', 5],
    ['mx:d701.test', 0],
    ['mx:nothing.test', 5],
  ]);
  const options = ask({ epoch: await q.run(), rooms, roomOfOthers: 0 });
  const first = await claim(q.store, options);
  assert.equal(
    first.deliveries.map(({ lane }) => lane),
    ['mx:d700.test'],
  );
  const second = await claim(q.store, { ...options, cursors: first.cursors });
  assert.equal(second.deliveries, []);
});

claims(
  'many destinations with room do not hide the few that a tenant has mail for',
  async ({ q }) => {
    const tenants = [q.tenantId, ...(await moreTenants(q, 30))];
    for (const tenantId of tenants) await fill(q, { tenantId, count: 1, lane: `'mx:d2500.test'` });
    const rooms = new Map(Array.from({ length: 5_000 }, (_, n) => [`mx:d${n}.test`, 50] as const));
    const { deliveries } = await claim(
      q.store,
      ask({ epoch: await q.run(), rooms, roomOfOthers: 0 }),
    );
    assert.is(deliveries.length, tenants.length);
  },
);

claims('what small tenants leave goes to the large one, in the same claim', async ({ q }) => {
  const others = await moreTenants(q, 20);
  await fill(q, { count: 500 });
  for (const tenantId of others) await fill(q, { tenantId, count: 1, lane: `'mx:s.test'` });
  const { deliveries } = await claim(q.store, ask({ epoch: await q.run() }));
  const counts = countBy(deliveries, ({ tenantId }) => tenantId);
  for (const tenantId of others) assert.is(counts[tenantId], 1);
  assert.is(counts[q.tenantId], 100);
});

claims('no tenant is left out, however many there are', async ({ q }) => {
  const others = await moreTenants(q, 150);
  for (const tenantId of others) await fill(q, { tenantId, count: 30 });
  const epoch = await q.run();
  let cursors: ClaimCursors = {};
  const seen = new Set<string>();
  // 64 tenants a claim: three rounds go once round.
  for (let turn = 0; turn < 3; turn++) {
    const claimed = await claim(q.store, ask({ epoch, cursors, roomOfOthers: 1_000 }));
    assert.ok(claimed.hasMore);
    ({ cursors } = claimed);
    for (const { tenantId } of claimed.deliveries) seen.add(tenantId);
    const counts = Object.values(countBy(claimed.deliveries, ({ tenantId }) => tenantId));
    assert.ok(Math.max(...counts) <= 2 * Math.min(...counts), 'the shares are the same');
  }
  assert.is(seen.size, 150);
});

claims('tenants that are passed over do not hide the one behind them', async ({ q }) => {
  const others = await moreTenants(q, 150);
  for (const tenantId of others) await fill(q, { tenantId, count: 1 });
  const free = others.toSorted()[149]!;
  const exceptTenants = others.filter((id) => id !== free);
  const { deliveries } = await claim(q.store, ask({ epoch: await q.run(), exceptTenants }));
  assert.equal(
    deliveries.map(({ tenantId }) => tenantId),
    [free],
  );
});

claims('destinations take turns, and one behind many closed ones is found', async ({ q }) => {
  await fill(q, { count: 3_000, lane: `'mx:d' || lpad((n / 3)::text, 4, '0') || '.test'` });
  const epoch = await q.run();
  let cursors: ClaimCursors = {};
  const seen = new Set<string>();
  for (let turn = 0; turn < 10; turn++) {
    const claimed = await claim(q.store, ask({ epoch, cursors, roomOfOthers: 1 }));
    ({ cursors } = claimed);
    for (const { lane } of claimed.deliveries) seen.add(lane);
  }
  assert.is(seen.size, 1_000, 'one of each, before the second of any');

  const exceptLanes = [...seen].filter((lane) => lane !== 'mx:d0500.test');
  const { deliveries } = await claim(q.store, ask({ epoch, exceptLanes }));
  assert.equal(
    deliveries.map(({ lane }) => lane),
    ['mx:d0500.test', 'mx:d0500.test'],
  );
});

claims('it says when it stopped before it had looked everywhere', async ({ q }) => {
  await fill(q, { count: 4_000, lane: `'mx:d' || n || '.test'` });
  const exceptLanes = Array.from({ length: 4_000 }, (_, n) => `mx:d${n}.test`);
  const epoch = await q.run();
  const nothing = await claim(q.store, ask({ epoch, exceptLanes }));
  assert.equal(nothing.deliveries, []);
  assert.ok(nothing.hasMore);
  const few = await claim(q.store, ask({ epoch, exceptLanes, cursors: nothing.cursors }));
  assert.ok(few.hasMore);
  await q.store.pool.query(`update delivery set state = 'delivered' where lane <> 'mx:d7.test'`);
  assert.not((await claim(q.store, ask({ epoch, exceptLanes }))).hasMore);
});

claims('workers that claim at the same time share without overlap', async ({ q }) => {
  const others = await moreTenants(q, 3);
  for (const tenantId of others) await fill(q, { tenantId, count: 200, isBulk: 'n % 2 = 0' });
  const runs = await Promise.all([q.run(), q.run(), q.run()]);
  const seen: string[] = [];
  for (let round = 0; round < 20; round++) {
    const all = await Promise.all(
      runs.map((epoch) => claim(q.store, ask({ epoch, max: 50, roomOfOthers: 50 }))),
    );
    seen.push(...all.flatMap(({ deliveries }) => deliveries.map(({ emailId }) => emailId)));
  }
  assert.is(new Set(seen).size, seen.length);
  assert.is(seen.length, 600);
});

claims('each email is told once, in every claim, where somebody listens', async ({ q }) => {
  const [deaf] = await moreTenants(q, 1);
  await listen(q.store, q.tenantId, ['email.sent']);
  await fill(q, { count: 1_000 });
  await fill(q, { tenantId: deaf!, count: 100 });
  const epoch = await q.run();
  const claimed: string[] = [];
  for (let turn = 0; turn < 10 && claimed.length < 1_100; turn++) {
    const { deliveries } = await claim(
      q.store,
      ask({ epoch, max: 1_000, perTenant: 1_000, roomOfOthers: 1_000 }),
    );
    claimed.push(...deliveries.map(({ emailId }) => emailId));
  }
  assert.is(claimed.length, 1_100);
  const { rows } = await q.store.pool.query(
    `select tenant_id, type, count(*)::int, count(distinct subject_id)::int as emails
     from outbox group by 1, 2`,
  );
  assert.equal(rows, [{ tenant_id: q.tenantId, type: 'email.sent', count: 1_000, emails: 1_000 }]);
});

/** The plan that is kept for a prepared statement, run once and taken back. */
async function explain(pool: Pool, values: readonly string[]): Promise<PlanNode> {
  const client = await pool.connect();
  try {
    await client.query('begin');
    await client.query('set local plan_cache_mode = force_generic_plan');
    const types = 'uuid, integer, integer, jsonb, integer, uuid[], uuid[], uuid, jsonb, text[]';
    await client.query(`prepare claim_plan (${types}) as ${CLAIM}`);
    const { rows } = await client.query<{ 'QUERY PLAN': [{ Plan: PlanNode }] }>(
      `explain (analyze, buffers, format json) execute claim_plan (${values.join(', ')})`,
    );
    return rows[0]!['QUERY PLAN'][0].Plan;
  } finally {
    await client.query('rollback');
    await client.query('deallocate all');
    client.release();
  }
}

interface PlanNode {
  readonly 'Node Type': string;
  readonly 'Relation Name'?: string;
  readonly 'Shared Hit Blocks': number;
  readonly 'Shared Read Blocks': number;
  readonly Plans?: readonly PlanNode[];
}

const nodesOf = (plan: PlanNode): readonly PlanNode[] => [
  plan,
  ...(plan.Plans ?? []).flatMap(nodesOf),
];
const blocksOf = (plan: PlanNode): number => plan['Shared Hit Blocks'] + plan['Shared Read Blocks'];

const ROWS = 30_000;
const NOBODY = `'00000000-0000-0000-0000-000000000000'`;

for (const isAnalyzed of [false, true]) {
  const known = isAnalyzed ? 'analyzed' : 'never analyzed';
  claims(`the cost does not follow the length of the queue: tables ${known}`, async ({ q }) => {
    const { pool } = q.store;
    for (const table of ['delivery', 'email', 'email_content', 'attempt']) {
      await pool.query(`alter table ${table} set (autovacuum_enabled = false)`);
    }
    const [one] = await moreTenants(q, 1);
    await fill(q, { count: ROWS, isBulk: 'n % 2 = 0' });
    await fill(q, { count: ROWS / 10, lane: `'mx:d' || n || '.test'` });
    await fill(q, { tenantId: one!, count: 5, lane: `'mx:s.test'` });
    for (const tenantId of [q.tenantId, one!]) {
      await listen(q.store, tenantId, ['email.sent'], { count: 1_000 });
    }
    if (isAnalyzed) await pool.query('analyze');
    const epoch = `'${await q.run()}'`;
    const blocks = async (max: number, rooms: string, others: number): Promise<number> => {
      const rest = [`'{}'`, 'null', NOBODY, `'{"${q.tenantId}": ["mx:a", "mx:a"]}'`, 'null'];
      const plan = await explain(pool, [epoch, String(max), '100', rooms, String(others), ...rest]);
      const scans = nodesOf(plan).filter((node) => node['Node Type'] === 'Seq Scan');
      assert.equal(
        scans.map((node) => node['Relation Name']),
        [],
      );
      return blocksOf(plan);
    };
    // The table has some hundred pages; a look at one place of the index costs three or four.
    assert.ok((await blocks(10, `'{"mx:big.test": 0}'`, 10)) < 1_000);
    assert.ok((await blocks(10, `'{}'`, 10)) < 1_000);
    // At worst 600 destinations are looked at, in each class.
    assert.ok((await blocks(200, `'{"mx:big.test": 0}'`, 0)) < 3_000);
  });
}

claims('what was sent since the tables were analyzed is not read through', async ({ q }) => {
  const { pool } = q.store;
  await pool.query('alter table delivery set (autovacuum_enabled = false)');
  // Long names make a high tree of the claim's index, and then that of the primary key looks cheaper.
  const lane = `mx:${'a'.repeat(200)}.test`;
  await fill(q, { count: ROWS, lane: `'${lane}'` });
  await pool.query('analyze');
  await pool.query(
    `update delivery set state = 'delivered' where tenant_id = $1 and email_id in (
      select email_id from delivery where tenant_id = $1 order by email_id limit ${(ROWS * 2) / 3})`,
    [q.tenantId],
  );
  await pool.query('vacuum delivery');
  const epoch = `'${await q.run()}'`;
  const values = [epoch, '10', '100', `'{}'`, '10', `'{}'`, 'null', NOBODY, `'{}'`, 'null'];
  const plan = await explain(pool, values);
  assert.ok(blocksOf(plan) < 1_000, `${blocksOf(plan)} blocks`);
});

claims.run();
