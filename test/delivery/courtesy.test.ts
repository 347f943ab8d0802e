// Who has a backlog leaves room while others send as well, and gets everything when they do not.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createBusyMeter, createCourtesy, type Courtesy } from '../../src/delivery/courtesy.ts';

const test = suite('courtesy');

interface Clocked {
  readonly courtesy: Courtesy;
  time: number;
  busy: number;
}
function open(): Clocked {
  const state = { time: 0, busy: 1 };
  const courtesy = createCourtesy({ now: () => state.time, busy: () => state.busy });
  return Object.assign(state, { courtesy });
}

const claimed = (tenantId: string, count: number): readonly { tenantId: string }[] =>
  Array.from({ length: count }, () => ({ tenantId }));

/** Claims every 10 ms what is allowed, out of a backlog without end; how many of `heavy` a second. */
function run(clocked: Clocked, seconds: number, others: { everyMs: number } | null): number {
  let sum = 0;
  const from = clocked.time;
  while (clocked.time - from < seconds * 1_000) {
    clocked.time += 10;
    const { except, perTenant } = clocked.courtesy.next();
    if (!except.includes('heavy')) {
      const count = Math.min(perTenant ?? 100, 20);
      clocked.courtesy.note(claimed('heavy', count));
      sum += count;
    }
    if (others !== null && clocked.time % others.everyMs === 0)
      clocked.courtesy.note(claimed('other', 1));
  }
  return sum / seconds;
}

test('alone, a backlog gets everything, however busy the machine is', () => {
  const clocked = open();
  assert.is(run(clocked, 20, null), 2_000);
  assert.is(clocked.courtesy.next().waitMs, null);
});

test('beside somebody else it gets less and less while the machine is too busy, and never nothing', () => {
  const clocked = open();
  run(clocked, 5, null);
  const first = run(clocked, 1, { everyMs: 50 });
  assert.ok(first < 1_400 && first > 500, `${first}/s`);
  run(clocked, 10, { everyMs: 50 });
  const last = run(clocked, 10, { everyMs: 50 });
  assert.ok(last >= 40 && last <= 70, `${last}/s`);
});

test('where the machine has room it gets more again', () => {
  const clocked = open();
  run(clocked, 5, null);
  run(clocked, 10, { everyMs: 50 });
  clocked.busy = 0.3;
  run(clocked, 20, { everyMs: 50 });
  assert.ok(run(clocked, 5, { everyMs: 50 }) > 1_500);
});

test('when the others have gone it gets everything again', () => {
  const clocked = open();
  run(clocked, 5, null);
  run(clocked, 5, { everyMs: 50 });
  run(clocked, 6, null);
  assert.is(run(clocked, 5, null), 2_000);
});

test('only while somebody is held back there is a time to look again', () => {
  const clocked = open();
  run(clocked, 5, null);
  clocked.courtesy.note(claimed('other', 1));
  const held = clocked.courtesy.next();
  assert.equal(held.except, ['heavy']);
  assert.ok(held.waitMs !== null && held.waitMs > 0 && held.waitMs < 1_000, `${held.waitMs} ms`);
  clocked.time += held.waitMs;
  const { except, perTenant, waitMs } = clocked.courtesy.next();
  assert.equal(except, []);
  assert.ok(perTenant !== null && perTenant >= 20, `${perTenant}`);
  assert.is(waitMs, null, 'who finds nothing now would ask again and again');
});

test('where all have much, nobody is held back', () => {
  const clocked = open();
  for (let turn = 0; turn < 100; turn++) {
    clocked.time += 10;
    clocked.courtesy.note(claimed('a', 20));
    clocked.courtesy.note(claimed('b', 20));
  }
  assert.equal(clocked.courtesy.next(), { except: [], perTenant: null, waitMs: null });
});

test('many tenants that come and go are forgotten', () => {
  const clocked = open();
  for (let number = 0; number < 50_000; number++) clocked.courtesy.note(claimed(`t${number}`, 1));
  clocked.time += 60_000;
  run(clocked, 5, null);
  assert.is(clocked.courtesy.next().waitMs, null, 'none of them is there any more');
});

test('the meter reads a part of the machine', () => {
  const busy = createBusyMeter();
  const until = performance.now() + 30;
  while (performance.now() < until);
  const read = busy();
  assert.ok(read > 0 && read <= 1, `${read}`);
});

test.run();
