// What is paused, and what workers report of their lanes: stored, read, replaced, forgotten.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { forgetOldLanes, readLanes, reportLanes, type LaneReport } from '../../src/queue/lanes.ts';
import { createPause, listPauses, readPauses, removePause } from '../../src/queue/pauses.ts';
import { newId } from '../../src/store/id.ts';
import { openQueue, type Bench } from '../support/queue.ts';

const pauses = suite('pauses and lane reports');
let bench: Bench;

pauses.before(async () => {
  bench = await openQueue();
});
pauses.after(() => bench.stop());
pauses.before.each(async () => {
  await bench.store.pool.query('truncate pause, lane, lane_destination');
});

const reported = (about: Partial<LaneReport> = {}): LaneReport => ({
  name: 'default/mx.example.com',
  egress: 'default',
  site: 'mx.example.com',
  provider: null,
  circuit: 'closed',
  openedAt: null,
  openUntil: null,
  opens: 0,
  reason: null,
  limitedBy: null,
  connections: 2,
  connectionsMax: 10,
  concurrency: 3.5,
  queued: 4,
  inFlight: 2,
  lastSuccessAt: new Date('2026-08-01T10:00:00.123Z'),
  lastFailureAt: null,
  destinations: ['mx:example.com'],
  ...about,
});

pauses('a pause is there until it is removed', async () => {
  const { pool } = bench.store;
  const tenant = newId();
  assert.is((await readPauses(pool)).all, false);
  const made = await createPause(pool, {
    kind: 'tenant',
    name: tenant,
    reason: 'spam',
    until: null,
  });
  await createPause(pool, { kind: 'lane', name: 'a/b', reason: null, until: null });
  await createPause(pool, { kind: 'destination', name: 'mx:x.test', reason: null, until: null });
  const { all, tenants, lanes, destinations } = await readPauses(pool);
  assert.equal(
    [all, [...tenants], [...lanes], [...destinations]],
    [false, [tenant], ['a/b'], ['mx:x.test']],
  );
  assert.is(made?.reason, 'spam');
  assert.is(made?.until, null);
  assert.ok(Math.abs(made!.pausedAt.getTime() - Date.now()) < 60_000);

  assert.is((await removePause(pool, made!.id))?.name, tenant);
  assert.is(await removePause(pool, made!.id), null);
  assert.is((await readPauses(pool)).tenants.size, 0);
  assert.is((await listPauses(pool)).length, 2);
});

pauses('everything has one pause, whatever name it is given', async () => {
  const { pool } = bench.store;
  await createPause(pool, { kind: 'all', name: 'x', reason: null, until: null });
  await createPause(pool, { kind: 'all', name: 'y', reason: 'again', until: null });
  assert.ok((await readPauses(pool)).all);
  assert.equal(
    (await listPauses(pool)).map(({ name, reason }) => [name, reason]),
    [['', 'again']],
  );
});

pauses('a destination is stored as deliveries spell it', async () => {
  const { pool } = bench.store;
  const named = async (name: string): Promise<string | undefined> =>
    (await createPause(pool, { kind: 'destination', name, reason: null, until: null }))?.name;
  assert.is(await named('mx:x.test@default'), 'mx:x.test');
  assert.is(await named('mx:x.test@bulk'), 'mx:x.test@bulk');
  assert.is(await named('smarthost'), 'smarthost');
});

pauses('pausing the same again changes reason and end, and keeps the id', async () => {
  const { pool } = bench.store;
  const until = new Date(Date.now() + 3_600_000);
  const first = await createPause(pool, { kind: 'lane', name: 'a/b', reason: 'one', until: null });
  const second = await createPause(pool, { kind: 'lane', name: 'a/b', reason: 'two', until });
  assert.is(second?.id, first?.id);
  assert.is(second?.reason, 'two');
  assert.is(second?.until?.getTime(), until.getTime());
  assert.is((await listPauses(pool)).length, 1);
});

pauses('a pause whose time is over does not hold, and is removed by the next', async () => {
  const { pool } = bench.store;
  const over = new Date(Date.now() - 1_000);
  await createPause(pool, { kind: 'all', name: '', reason: null, until: over });
  assert.is((await readPauses(pool)).all, false);
  assert.is((await listPauses(pool)).length, 0);
  await createPause(pool, { kind: 'lane', name: 'a/b', reason: null, until: null });
  const { rows } = await pool.query('select kind from pause');
  assert.equal(rows, [{ kind: 'lane' }]);
});

pauses('there is a limit, and what is paused already can be changed at it', async () => {
  const { pool } = bench.store;
  await pool.query(
    `insert into pause (id, kind, name, paused_at)
     select gen_random_uuid(), 'lane', 'l' || n, now() from generate_series(1, 1000) n`,
  );
  assert.is(await createPause(pool, { kind: 'all', name: '', reason: null, until: null }), null);
  const changed = await createPause(pool, { kind: 'lane', name: 'l7', reason: 'x', until: null });
  assert.is(changed?.reason, 'x');
});

pauses('a report replaces the one before; open circuits are read back whole', async () => {
  const { pool } = bench.store;
  const openedAt = new Date('2026-08-01T11:00:00.500Z');
  const openUntil = new Date('2026-08-01T11:05:00.500Z');
  await reportLanes(pool, [
    reported(),
    reported({ name: 'default/a', site: 'a', destinations: [] }),
  ]);
  assert.equal(await readLanes(pool), []);
  const open = reported({
    circuit: 'open',
    openedAt,
    openUntil,
    opens: 2,
    reason: 'connection refused',
    limitedBy: 'circuit',
    provider: 'acme',
    destinations: ['mx:example.com', 'mx:example.net'],
  });
  await reportLanes(pool, [open]);
  const [read, ...others] = await readLanes(pool);
  assert.is(others.length, 0);
  assert.equal({ ...read, destinations: read!.destinations.toSorted() }, open);
  const { rows } = await pool.query('select count(*)::int as lanes from lane');
  assert.equal(rows, [{ lanes: 2 }]);
});

pauses('two workers that report the same lanes at once both get through', async () => {
  const { pool } = bench.store;
  const all = Array.from({ length: 300 }, (_, n) =>
    reported({ name: `default/${n}`, destinations: [`mx:${n}.test`, `mx:w${n}.test`] }),
  );
  for (let round = 0; round < 5; round++) {
    await Promise.all([reportLanes(pool, all), reportLanes(pool, all.toReversed())]);
  }
  const { rows } = await pool.query(
    'select (select count(*)::int from lane) as l, (select count(*)::int from lane_destination) as d',
  );
  assert.equal(rows, [{ l: 300, d: 600 }]);
});

pauses('a call stores a bounded number, those that are not closed first', async () => {
  const { pool } = bench.store;
  const many = Array.from({ length: 2_100 }, (_, n) =>
    reported({ name: `default/${n}`, destinations: [] }),
  );
  await reportLanes(pool, [...many, reported({ name: 'default/last', circuit: 'half_open' })]);
  const { rows } = await pool.query<{ count: number }>('select count(*)::int from lane');
  assert.is(rows[0]!.count, 2_000);
  assert.equal(
    (await readLanes(pool)).map(({ name }) => name),
    ['default/last'],
  );
});

pauses('a destination is noted again after an hour, and forgotten after seven days', async () => {
  const { pool } = bench.store;
  const age = `select destination, seen_at > now() - interval '1 minute' as fresh
    from lane_destination order by 1`;
  await reportLanes(pool, [reported({ destinations: ['mx:a.test', 'mx:b.test'] })]);
  await pool.query(
    `update lane_destination set seen_at = now() - case destination
       when 'mx:a.test' then interval '59 minutes' else interval '61 minutes' end`,
  );
  await reportLanes(pool, [reported({ destinations: ['mx:a.test', 'mx:b.test'] })]);
  assert.equal((await pool.query(age)).rows, [
    { destination: 'mx:a.test', fresh: false },
    { destination: 'mx:b.test', fresh: true },
  ]);
  assert.is(await forgetOldLanes(pool), 0);
  await pool.query(`update lane_destination set seen_at = now() - interval '8 days'
    where destination = 'mx:a.test'`);
  await pool.query(`update lane set reported_at = now() - interval '8 days'`);
  assert.is(await forgetOldLanes(pool), 2);
  assert.is((await pool.query('select * from lane_destination')).rows.length, 1);
});

pauses.run();
