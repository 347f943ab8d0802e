// The rates of a lane in several workers that pass connections to each other: together never above what the provider's
// numbers let one worker do. With a clock of our own.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createLanePaces } from '../../src/delivery/lane-paces.ts';
import { readProviders } from '../../src/delivery/providers.ts';

const test = suite('lane paces');
const { default: defaults } = readProviders({});
const limits = {
  ...defaults,
  connectionsMax: 10,
  messagesPerSecond: 20,
  newConnectionsPerMinute: 600,
};

test('alone: the burst at once, then the rate', () => {
  let nowMs = 0;
  const paces = createLanePaces(
    () => nowMs,
    () => true,
  );
  paces.use(limits, 10);
  let count = 0;
  for (; nowMs < 10_000; nowMs += 5) {
    for (; paces.waitMs(false) === 0; count += 1) paces.take(false);
  }
  assert.is(count, 20 + 20 * 10 - 1);
});

test('a part of the connections has that part of the rates', () => {
  const paces = createLanePaces(
    () => 0,
    () => true,
  );
  paces.use(limits, 5);
  for (let taken = 0; taken < 10; taken++) {
    assert.is(paces.waitMs(false), 0);
    paces.take(false);
  }
  assert.is(paces.waitMs(false), 100, 'ten in a second');
  paces.use(limits, 10);
  assert.is(paces.waitMs(false), 50, 'more connections, more of the rate, and nothing saved up');
});

test('new connections are paced in the same way, kept ones are not', () => {
  const paces = createLanePaces(
    () => 0,
    () => true,
  );
  paces.use({ ...limits, messagesPerSecond: null }, 5);
  for (let taken = 0; taken < 5; taken++) paces.take(true);
  assert.equal([paces.waitMs(false), paces.waitMs(true)], [0, 200], 'five in a second');
  paces.use({ ...limits, messagesPerSecond: null }, 10);
  assert.is(paces.waitMs(true), 100);
});

test('whoever the connections are passed to: together no more than one burst and the rate', () => {
  let state = 11;
  const roll = (below: number): number => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
  let nowMs = 0;
  const workers = Array.from({ length: 3 }, (_, at) => ({
    held: 0,
    paces: createLanePaces(
      () => nowMs,
      () => at === 0 && nowMs === 0,
    ),
  }));
  const give = (worker: (typeof workers)[number], held: number): void => {
    worker.held = held;
    worker.paces.use(limits, held);
  };
  give(workers[0]!, 10);
  const taken: number[] = [];
  for (; nowMs < 60_000; nowMs += 5) {
    if (roll(40) === 0) {
      const [from, to] = [workers[roll(3)]!, workers[roll(3)]!];
      const count = roll(from.held + 1);
      give(from, from.held - count);
      give(to, to.held + count);
    }
    for (const { held, paces } of workers) {
      for (; held > 0 && paces.waitMs(false) === 0; taken.push(nowMs)) paces.take(false);
    }
  }
  assert.ok(taken.length > 300, `${taken.length}: it moves`);
  // Each of three may send one message early.
  for (const from of taken) {
    const count = taken.filter((at) => at >= from && at < from + 1_000).length;
    assert.ok(count <= 2 * 20 + 3, `${count} from ${from}`);
  }
  assert.ok(taken.length <= 20 + 60 * 20 + 3);
});

test.run();
