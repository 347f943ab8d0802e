// A rolling restart, a short one (the long one is `npm run torture -- --only rolling`): an appliance in four processes on
// one database and one bucket, of which one of each kind is stopped in order and started again while mail comes in at all
// doors.
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { forwardTheCrowd, startFleet, startFleetLoad, type Fleet } from '../support/fleet.ts';
import { freshDatabase, type FreshDatabase } from '../support/postgres.ts';
import { startS3, type S3Bench } from '../support/s3.ts';
import { holdFleet, moreAccepted } from '../torture/rolling.ts';
import { startTally, type Tally } from '../torture/tally.ts';

const test = suite<{
  database: FreshDatabase;
  s3: S3Bench;
  tally: Tally;
  fleet: Fleet;
  pool: Pool;
}>('rolling restart');
test.before(async (context) => {
  context.s3 = await startS3();
  context.tally = await startTally();
  // Empty: four processes that start together make the schema, the first tenant and the mark of the bucket.
  context.database = await freshDatabase();
  try {
    context.fleet = await startFleet({
      databaseUrl: context.database.url,
      blobStore: context.s3.url,
      smarthostPort: context.tally.port,
      workers: 0,
    });
  } catch (error) {
    console.error(error); // uvu keeps to itself what a hook throws
    throw error;
  }
  context.pool = new Pool({ connectionString: context.database.url, max: 2 });
});
test.after(async ({ database, s3, tally, fleet, pool }) => {
  await fleet?.stop();
  await pool?.end();
  await tally.stop();
  await s3.stop();
  await database.drop();
});

test('processes are restarted under load: nothing is lost, nothing is doubled', async ({
  fleet,
  pool,
  tally,
}) => {
  await forwardTheCrowd(fleet, 'onward@far.test');
  const load = startFleetLoad(fleet, {
    name: 'rolled',
    api: 3,
    submission: 1,
    largeEvery: 10,
    inboundMessages: 30,
    inboundConnections: 2,
    everyMs: 20,
  });
  const some = { api: 10, submission: 3 };
  for (const name of ['one', 'front', 'door'] as const) {
    await moreAccepted(load, some);
    assert.is(await fleet.programs[name].terminate(), 0, fleet.programs[name].output());
    await fleet.programs[name].start();
  }
  await moreAccepted(load, some);
  await load.stop();
  const { ledger, forwards } = await holdFleet({ pool, load, tally });
  assert.equal([ledger.lost, ledger.imaginary, ledger.doubled], [[], [], []]);
  assert.equal(ledger.byState, { delivered: load.accepted.size });
  assert.is(ledger.admitted, 0);
  assert.equal(forwards, { doubled: 0, lost: 0 });
  assert.is(load.ambiguous(), 0);
  assert.ok(load.refused() > 0, 'nobody was refused while a process was away');
  const { rows } = await pool.query<{ count: string }>(
    "select count(*) from email where subject like 'rolled %'",
  );
  assert.is(Number(rows[0]?.count), load.numbers(), 'each API request is one email');
});

test('each process answers probes, and only the one with the API anything else', async ({
  fleet,
  pool,
}) => {
  const { front, ...others } = fleet.programs;
  for (const { base } of Object.values(others)) {
    const ready = await fetch(`${base}/health/ready`);
    assert.equal(
      [ready.status, await ready.json()],
      [200, { status: 'ready', missing: [], degraded: [] }],
    );
    assert.is((await fetch(`${base}/health/live`, { method: 'HEAD' })).status, 200);
    assert.is((await fetch(`${base}/health/live`, { method: 'POST' })).status, 405);
    const answer = await fetch(`${base}/emails`, { method: 'POST', body: '{}' });
    const { name, message } = (await answer.json()) as { name: string; message: string };
    assert.equal([answer.status, name], [404, 'not_found']);
    assert.match(message, 'does not run the API');
  }
  const { rows } = await pool.query<{ roles: string[]; pid: number }>(
    'select roles, pid from appliance_process order by roles',
  );
  assert.equal(
    rows.map(({ roles }) => roles.join(',')),
    ['api,jobs', 'delivery', 'delivery', 'mx,submission'],
  );
  assert.ok(rows.some(({ pid }) => pid === front.pid()));
});

test.run();
