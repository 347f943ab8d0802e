// What is remembered of answers: for how long, how many, and how much.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createAnswerCache } from '../../src/dns/answer-cache.ts';

const test = suite('answer-cache');

function setUp(bounds: { readonly entriesMax?: number; readonly weightMax?: number } = {}) {
  const clock = { now: 1_000_000 };
  const cache = createAnswerCache<string>({
    now: () => new Date(clock.now),
    entriesMax: 3,
    weightMax: 100,
    ...bounds,
  });
  const set = (key: string, weight = 1): void => cache.set(key, key, { lifeMs: 1_000, weight });
  const kept = (): string => [...'abcdef'].map((key) => cache.get(key) ?? '').join('');
  return { clock, cache, set, kept };
}

test('an answer lives for as long as was said, also where the clock is set back', () => {
  const { clock, cache, set } = setUp();
  set('a');
  clock.now += 999;
  assert.is(cache.get('a'), 'a');
  clock.now += 1;
  assert.is(cache.get('a'), null);
  set('a');
  clock.now -= 1;
  assert.is(cache.get('a'), null);
  cache.set('a', 'a', { lifeMs: 0, weight: 1 });
  assert.is(cache.get('a'), null);
});

test('the oldest go first, by number and by weight', () => {
  const { set, kept } = setUp();
  for (const key of 'abcd') set(key);
  assert.is(kept(), 'bcd');
  set('b');
  set('e');
  assert.is(kept(), 'bde', 'what is set again is new again');
  set('f', 99);
  assert.is(kept(), 'ef');
});

test('what is too heavy alone is not kept, and pushes nothing out', () => {
  const { set, kept } = setUp();
  set('a', 50);
  set('b', 101);
  assert.is(kept(), 'a');
  set('a', 101);
  assert.is(kept(), '', 'and what it was to replace is gone');
  set('c', 100);
  assert.is(kept(), 'c', 'its weight too');
});

test.run();
