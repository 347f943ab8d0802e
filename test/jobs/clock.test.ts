// The clock on Agenda by itself: recurring jobs come as often as they say, alarms when they are due.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createClock, type Clock, type Recurring } from '../../src/jobs/clock.ts';
import { until } from '../support/app.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';

const test = suite<{ q: Bench }>('clock');
test.before.each(async (context) => {
  context.q = await openQueue();
});
test.after.each(({ q }) => q.stop());

const open = (q: Bench, recurring: readonly Recurring[], alarms: string[] = []): Clock =>
  createClock({
    databaseUrl: q.url,
    mongodbUrl: null,
    log: silent,
    onAlarm: async (lane) => void alarms.push(lane),
    recurring,
  });

test('a recurring job runs at once and again after its interval, however often it is made sure of', async ({
  q,
}) => {
  const runs: Record<string, number> = { often: 0, daily: 0 };
  const count = (name: string, everyMs: number): Recurring => ({
    name,
    everyMs,
    run: async () => void (runs[name]! += 1),
  });
  const clock = open(q, [count('often', 1_000), count('daily', 86_400_000)]);
  await clock.ensure();
  for (let time = 0; time < 20 && runs['often']! < 2; time += 1) {
    await new Promise((resolve) => setTimeout(resolve, 500));
    await clock.ensure();
  }
  assert.ok(runs['often']! >= 2, `${runs['often']} runs`);
  assert.is(runs['daily'], 1);
  const { rows } = await q.store.pool.query<{ hours: number }>(
    `select extract(epoch from next_run_at - now())::float8 / 3600 as hours from agenda_jobs
     where name = 'daily'`,
  );
  assert.ok(rows[0]!.hours > 23.9 && rows[0]!.hours <= 24, `in ${rows[0]!.hours} hours`);
  await clock.stop();
});

test('a recurring job that waits for a time further away than its interval is set right', async ({
  q,
}) => {
  let runs = 0;
  const daily = [{ name: 'daily', everyMs: 86_400_000, run: async () => void (runs += 1) }];
  const first = open(q, daily);
  await first.ensure();
  await until(
    () => Promise.resolve(runs),
    (count) => count === 1,
  );
  await first.stop();
  await q.store.pool.query("update agenda_jobs set next_run_at = now() + interval '2 years'");
  const second = open(q, daily);
  await second.ensure();
  await until(
    () => Promise.resolve(runs),
    (count) => count === 2,
  );
  await second.stop();
});

test('an alarm for what is due already rings, also when an earlier one of its time has rung', async ({
  q,
}) => {
  const alarms: string[] = [];
  const clock = open(q, [], alarms);
  await clock.ensure();
  const dueAt = new Date();
  clock.alarm('a', dueAt);
  await until(
    () => Promise.resolve(alarms.length),
    (count) => count === 1,
  );
  clock.alarm('a', dueAt);
  await until(
    () => Promise.resolve(alarms.length),
    (count) => count === 2,
  );
  await clock.stop();
});

test('a store that is away at the start ends nothing, and is used when it is there', async ({
  q,
}) => {
  const nowhere = new URL(q.url);
  const name = `later_${process.pid}`;
  nowhere.pathname = `/${name}`;
  let runs = 0;
  const clock = createClock({
    databaseUrl: nowhere.href,
    mongodbUrl: null,
    log: silent,
    onAlarm: async () => undefined,
    recurring: [{ name: 'often', everyMs: 60_000, run: async () => void (runs += 1) }],
  });
  await clock.ensure();
  await clock.ensure();
  // A rejection that nobody handles would have ended this process by now.
  await new Promise((resolve) => setTimeout(resolve, 100));
  assert.is(runs, 0);
  await q.store.pool.query(`create database ${name}`);
  await clock.ensure();
  await until(
    () => Promise.resolve(runs),
    (count) => count === 1,
  );
  await clock.stop();
  await q.store.pool.query(`drop database ${name} with (force)`);
});

test.run();
