// The rate of things: how many in how long, whatever the rhythm of who asks. With a clock of our own.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createPace } from '../../src/delivery/pace.ts';

const test = suite('pace');

/** When each of `count` events happens, if every one is taken as soon as it may. */
const times = (pace: ReturnType<typeof createPace>, count: number, fromMs = 0): number[] => {
  let nowMs = fromMs;
  return Array.from({ length: count }, () => {
    nowMs += pace.waitMs(nowMs);
    pace.take(nowMs);
    return nowMs;
  });
};

test('without a burst, one per interval', () => {
  const pace = createPace({ perPeriod: 4, periodMs: 1_000, burst: 1 });
  assert.equal(times(pace, 4), [0, 250, 500, 750]);
});

test('a burst comes at once, then the rate holds', () => {
  const pace = createPace({ perPeriod: 4, periodMs: 1_000, burst: 3 });
  assert.equal(times(pace, 6), [0, 0, 0, 250, 500, 750]);
});

test('a quiet time gives back one burst and no more', () => {
  const pace = createPace({ perPeriod: 4, periodMs: 1_000, burst: 2 });
  times(pace, 10);
  assert.equal(times(pace, 4, 100_000), [100_000, 100_000, 100_250, 100_500]);
});

test('in any second there are at most the rate and one burst', () => {
  const pace = createPace({ perPeriod: 20, periodMs: 1_000, burst: 5 });
  const all = times(pace, 200);
  for (const start of all) {
    assert.ok(all.filter((at) => at >= start && at < start + 1_000).length <= 25);
  }
  assert.is(all.at(-1), (200 - 5) * 50);
});

test('fractions: one in ten seconds', () => {
  assert.equal(
    times(createPace({ perPeriod: 0.1, periodMs: 1_000, burst: 0.1 }), 3),
    [0, 10_000, 20_000],
  );
});

test('a clock that is set back holds nobody up for longer than after a full burst', () => {
  const pace = createPace({ perPeriod: 1, periodMs: 1_000, burst: 1 });
  pace.take(3_600_000);
  assert.ok(pace.waitMs(0) <= 1_000);
});

test.run();
