// The clock and the sweep behind it: alarms wake lanes at their time, and losing Agenda's store, before or
// in mid-run, loses nothing. The tests run on Postgres, and on MongoDB when MAILSTEAD_TEST_MONGODB_URL
// names one.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { MongoClient } from 'mongodb';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { openJournal } from '../../src/delivery/journal.ts';
import { startUpkeep, type Upkeep } from '../../src/jobs/upkeep.ts';
import type { NewEmail } from '../../src/queue/enqueue.ts';
import { recover } from '../../src/queue/lease.ts';
import { DEFAULT_OUTCOMES } from '../../src/queue/outcome-policy.ts';
import { SCHEDULE_LANE } from '../../src/queue/schedule.ts';
import { settle } from '../../src/queue/settle.ts';
import { wake } from '../../src/queue/wake.ts';
import { processStartTime } from '../../src/store/process.ts';
import { until } from '../support/app.ts';
import { openQueue, result, silent, type Bench } from '../support/queue.ts';

const MONGODB_URL = process.env['MAILSTEAD_TEST_MONGODB_URL'];
if (MONGODB_URL === undefined) {
  console.log('skipped: MongoDB as the clock: MAILSTEAD_TEST_MONGODB_URL is not set');
}

interface Context {
  q: Bench;
  folder: string;
  upkeep: Upkeep | null;
}

/** A database of its own for every test, so that they cannot meet. */
const ownMongoUrl = (): string => {
  const url = new URL(MONGODB_URL ?? 'mongodb://127.0.0.1');
  url.pathname = `/mailstead_${Date.now().toString(36)}${Math.random().toString(36).slice(2)}`;
  return url.href;
};

for (const backend of ['Postgres', 'MongoDB'] as const) {
  const test = suite<Context>(`clock on ${backend}`);
  const run = backend === 'MongoDB' && MONGODB_URL === undefined ? test.skip : test;
  let mongodbUrl: string | null = null;

  const start = async (context: Context, about: { sweepMs: number }): Promise<void> => {
    context.upkeep = await startUpkeep({
      store: context.q.store,
      log: silent,
      databaseUrl: context.q.url,
      mongodbUrl,
      journalFolder: context.folder,
      outcomes: () => DEFAULT_OUTCOMES,
      onReady: () => undefined,
      pruneSink: () => Promise.resolve(),
      recheckDomains: () => Promise.resolve(),
      examine: () => Promise.resolve(),
      sendTlsReports: () => Promise.resolve(),
      refreshStsPolicies: () => Promise.resolve(),
      greylistForgetAfterMs: () => 86_400_000,
      collectBlobs: () => Promise.resolve(),
      sweepMs: about.sweepMs,
      watchMs: 500,
    });
  };
  const wipe = async ({ q }: Context): Promise<void> => {
    if (mongodbUrl === null) {
      await q.store.pool.query('drop table if exists agenda_jobs');
    } else {
      const client = await MongoClient.connect(mongodbUrl);
      await client.db().dropDatabase();
      await client.close();
    }
  };
  /** Deferred, due after `delayMs`; the alarms are set as the settlement asks. */
  const defer = async (
    { q, upkeep }: Context,
    count: number,
    delayMs: number,
    deliveries?: NewEmail['deliveries'],
  ): Promise<void> => {
    const epoch = await q.run();
    await q.enqueue(count, deliveries === undefined ? {} : { deliveries });
    const claimed = await q.claim(epoch, count);
    const { waiting } = await settle(
      q.store,
      claimed.map((one) => result(one, epoch, { verdict: 'deferred', delayMs })),
    );
    for (const { lane, dueAt } of waiting) upkeep?.alarm(lane, dueAt);
  };
  const jobs = async ({ q }: Context): Promise<number> => {
    const { rows } = await q.store.pool.query<{ count: string }>(
      "select count(*) from agenda_jobs where name = 'wake-lane'",
    );
    return Number(rows[0]?.count);
  };
  const allReady = (count: number) => (states: Record<string, number>) => states['ready'] === count;

  test.before.each(async (context) => {
    mongodbUrl = backend === 'MongoDB' ? ownMongoUrl() : null;
    context.q = await openQueue();
    context.folder = await mkdtemp(join(tmpdir(), 'mailstead-upkeep-'));
    context.upkeep = null;
  });
  test.after.each(async (context) => {
    await context.upkeep?.stop();
    if (mongodbUrl !== null) await wipe(context);
    await context.q.stop();
    await rm(context.folder, { recursive: true, force: true });
  });

  run('an alarm wakes its lane without any sweep', async (context) => {
    await start(context, { sweepMs: 3_600_000 });
    await defer(context, 5, 200);
    await until(() => context.q.states(), allReady(5));
  });

  run('deferrals of one lane and bucket are one job', async (context) => {
    await start(context, { sweepMs: 3_600_000 });
    await defer(context, 50, 300_000);
    if (mongodbUrl !== null) return;
    const read = () => jobs(context);
    await until(read, (count) => count >= 1);
    assert.ok((await read()) <= 2, 'a bucket, or two when its border fell between');
  });

  run('an alarm wakes what is scheduled, without any sweep', async (context) => {
    await start(context, { sweepMs: 3_600_000 });
    const scheduledAt = new Date(Date.now() + 500);
    await context.q.enqueue(5, { scheduledAt });
    context.upkeep?.alarm(SCHEDULE_LANE, scheduledAt);
    await until(() => context.q.states(), allReady(5));
  });

  run('a schedule without an alarm is found by the sweep', async (context) => {
    await context.q.enqueue(5, { scheduledAt: new Date(Date.now() + 500) });
    await start(context, { sweepMs: 200 });
    await until(() => context.q.states(), allReady(5));
  });

  run(
    'a minute of schedules is a handful of jobs; those of next week are none',
    async (context) => {
      await start(context, { sweepMs: 3_600_000 });
      const base = Date.now() + 120_000;
      for (let index = 0; index < 1_000; index++) {
        context.upkeep?.alarm(SCHEDULE_LANE, new Date(base + index * 60));
        context.upkeep?.alarm(SCHEDULE_LANE, new Date(base + 7 * 86_400_000 + index * 60));
      }
      if (mongodbUrl !== null) return;
      const count = await until(
        () => jobs(context),
        (found) => found >= 30,
      );
      assert.ok(count <= 31, `${count} jobs`);
    },
  );

  run(
    'the store wiped in mid-run: the sweep wakes what is due, of every destination, and starts the clock again',
    async (context) => {
      await start(context, { sweepMs: 300 });
      const lanes = ['sink', 'smarthost', 'mx:a.test', 'mx:b.test', 'mx:b.test@bulk'];
      for (const lane of lanes) {
        await defer(context, 2, 1_500, [{ recipient: 'x@b.test', lane }]);
      }
      const scheduledAt = new Date(Date.now() + 1_500);
      await context.q.enqueue(3, { scheduledAt });
      context.upkeep?.alarm(SCHEDULE_LANE, scheduledAt);
      await wipe(context);
      await until(() => context.q.states(), allReady(2 * lanes.length + 3));
      // And the clock itself is back: its recurring jobs exist again.
      if (mongodbUrl === null) {
        await until(
          async () =>
            (
              await context.q.store.pool
                .query<{ name: string }>('select name from agenda_jobs order by name')
                .catch(() => ({ rows: [] }))
            ).rows.map(({ name }) => name),
          (names) => names.includes('reap-lost-workers'),
        );
      }
    },
  );

  run('alarms that were never set are found by the sweep of the next start', async (context) => {
    await defer(context, 3, 300);
    await start(context, { sweepMs: 3_600_000 });
    await until(() => context.q.states(), allReady(3));
  });

  run('a lost worker is recovered', async (context) => {
    const epoch = await context.q.run();
    await context.q.enqueue(2);
    await context.q.claim(epoch, 2);
    await context.q.store.pool.query(
      "update worker set heartbeat_at = now() - interval '5 minutes'",
    );
    await start(context, { sweepMs: 300 });
    await until(
      () => context.q.states(),
      (states) => states['unknown'] === 2,
    );
  });

  run(
    'a stalled worker is ended before its work is taken, and its journal decides',
    async (context) => {
      const { q, folder } = context;
      const stalled = spawn('sleep', ['1000']);
      const ended = once(stalled, 'exit');
      const epoch = await q.run();
      await q.enqueue(2);
      const [first, second] = await q.claim(epoch, 2);
      const journal = openJournal(folder, {
        epoch,
        pid: stalled.pid!,
        startTime: processStartTime(stalled.pid!),
      });
      journal.dot(first!);
      await q.store.pool.query("update worker set heartbeat_at = now() - interval '5 minutes'");
      await start(context, { sweepMs: 300 });
      assert.equal(await ended, [null, 'SIGKILL']);
      await until(
        () => q.states(),
        (states) => states['unknown'] === 1 && states['ready'] === 1,
      );
      const { rows } = await q.store.pool.query<{ email_id: string }>(
        "select email_id from delivery where state = 'ready'",
      );
      assert.is(rows[0]?.email_id, second?.emailId);
    },
  );

  run('a message at which workers die is set aside after the fifth time', async (context) => {
    const { q } = context;
    await q.enqueue(1);
    for (let death = 1; death <= 5; death++) {
      await q.store.pool.query('update delivery set due_at = now()');
      await wake(q.store.pool, null); // from the third on it waits apart
      const epoch = await q.run();
      assert.is((await q.claim(epoch, 1)).length, 1, `attempt ${death}`);
      await recover(q.store, epoch, () => ({ phase: 'before_dot' }));
    }
    assert.equal(await q.states(), { failed: 1 });
  });

  test.run();
}
