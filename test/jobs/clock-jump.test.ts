// The clock of the process jumps by an hour and back while mail waits: what is due, expired or lost is for the database's
// clock to say. The time of day of this process is changed for real, under Agenda, the sweep and the queue.
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startUpkeep, type Upkeep } from '../../src/jobs/upkeep.ts';
import { DEFAULT_OUTCOMES } from '../../src/queue/outcome-policy.ts';
import { settle } from '../../src/queue/settle.ts';
import { openQueue, result, silent, type Bench } from '../support/queue.ts';

const HOUR = 3_600_000;
const RealDate = Date;
let offset = 0;
class JumpingDate extends RealDate {
  constructor(...given: readonly unknown[]) {
    if (given.length === 0) super(RealDate.now() + offset);
    // The constructor takes what Date takes.
    else super(...(given as [number]));
  }
  static override now(): number {
    return RealDate.now() + offset;
  }
}

const test = suite<{ q: Bench; folder: string; upkeep: Upkeep | null }>('clock jumps');
test.before.each(async (context) => {
  globalThis.Date = JumpingDate as DateConstructor;
  context.q = await openQueue();
  context.folder = await mkdtemp(join(tmpdir(), 'mailstead-clock-jump-'));
  context.upkeep = null;
});
test.after.each(async ({ q, folder, upkeep }) => {
  offset = 0;
  await upkeep?.stop();
  await q.stop();
  await rm(folder, { recursive: true, force: true });
  globalThis.Date = RealDate;
});

const start = (q: Bench, folder: string, watchMs: number): Promise<Upkeep> =>
  startUpkeep({
    store: q.store,
    log: silent,
    databaseUrl: q.url,
    mongodbUrl: null,
    journalFolder: folder,
    outcomes: () => DEFAULT_OUTCOMES,
    onReady: () => undefined,
    pruneSink: () => Promise.resolve(),
    recheckDomains: () => Promise.resolve(),
    examine: () => Promise.resolve(),
    sendTlsReports: () => Promise.resolve(),
    refreshStsPolicies: () => Promise.resolve(),
    greylistForgetAfterMs: () => 86_400_000,
    collectBlobs: () => Promise.resolve(),
    sweepMs: 200,
    watchMs,
  });
/** By the clock that does not jump. */
async function until(done: () => Promise<boolean>): Promise<void> {
  const begun = performance.now();
  while (!(await done())) {
    if (performance.now() - begun > 15_000) throw new Error('still not so');
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}
const sleep = (ms: number): Promise<void> => new Promise((resolve) => setTimeout(resolve, ms));

for (const [name, jump] of [
  ['an hour ahead', HOUR],
  ['an hour back', -HOUR],
] as const) {
  test(`${name}: nothing is tried early, nothing expires, and what is due wakes in time`, async (context) => {
    const { q, folder } = context;
    const upkeep = (context.upkeep = await start(q, folder, 20_000));
    // Half an hour of lifetime: a clock that is believed ends all of it.
    await q.enqueue(6, { lifetimeMs: HOUR / 2 });
    const epoch = await q.run();
    const [soon, ...later] = await q.claim(epoch, 6);
    offset = jump;
    const { waiting } = await settle(q.store, [
      result(soon!, epoch, { verdict: 'deferred', delayMs: 1_800 }),
      ...later.map((one) => result(one, epoch, { verdict: 'deferred', delayMs: 10 * 60_000 })),
    ]);
    for (const { lane, dueAt } of waiting) upkeep.alarm(lane, dueAt);
    await sleep(900); // some sweeps, and Agenda's polls
    assert.equal(await q.states(), { deferred: 6 }, 'not early');
    await until(async () => (await q.states())['ready'] === 1);
    const [again] = await q.claim(epoch, 10);
    assert.is(again?.attempt, 2);
    await settle(q.store, [result(again!, epoch, { verdict: 'deferred', delayMs: 10 * 60_000 })]);
    offset = 0; // and back
    await sleep(900);
    assert.equal(await q.states(), { deferred: 6 }, 'no storm');
    const { rows } = await q.store.pool.query('select count(*)::int as attempts from attempt');
    assert.equal(rows, [{ attempts: 7 }]);
  });
}

test('a silent worker is watched for as long as it should be, whatever the time of day', async (context) => {
  const { q, folder } = context;
  await q.enqueue(1);
  const epoch = await q.run();
  await q.claim(epoch, 1);
  await q.store.pool.query("update worker set heartbeat_at = now() - interval '2 minutes'");
  context.upkeep = await start(q, folder, 4_000);
  await sleep(700); // it is suspected by now
  offset = HOUR;
  await sleep(1_300);
  assert.equal(await q.states(), { in_flight: 1 }, 'still watched');
  // It speaks again: it was never lost.
  await q.store.pool.query('update worker set heartbeat_at = now()');
  await sleep(2_500);
  assert.equal(await q.states(), { in_flight: 1 });
});

test.run();
