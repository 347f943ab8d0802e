// How much more a worker claims, beside lanes that move, that are new, and that hang.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { lookAtCrowd } from '../../src/delivery/crowd.ts';

const test = suite('crowd');
const lane = (about: {
  readonly queued?: number;
  readonly active?: number;
  readonly isHanging?: boolean;
  readonly isSlow?: boolean;
  readonly isProven?: boolean;
}) => ({
  queued: () => about.queued ?? 0,
  active: () => about.active ?? 0,
  isHanging: () => about.isHanging ?? false,
  isSlow: () => about.isSlow ?? about.isHanging ?? false,
  isProven: () => about.isProven ?? false,
});
const many = (count: number, about: Parameters<typeof lane>[0]) =>
  Array.from({ length: count }, () => lane(about));
const nothing = { waiting: 0, queuedBytes: 0, openBytes: 0 };

test('an idle worker claims a whole batch, for everybody', () => {
  assert.equal(lookAtCrowd([], nothing), { room: 200, mayTry: true, mayLinger: true });
});

test('new hosts take a part of the places; the rest is for hosts that are known', () => {
  const crowd = lookAtCrowd(many(80, { active: 5 }), nothing);
  assert.equal(crowd, { room: 200, mayTry: false, mayLinger: true });
  assert.ok(lookAtCrowd(many(80, { active: 5, isProven: true }), nothing).mayTry);
});

test('hosts that hang take no place of those that move, however many they are', () => {
  const crowd = lookAtCrowd(many(2_000, { active: 5, isHanging: true }), nothing);
  assert.equal(crowd, { room: 200, mayTry: false, mayLinger: true });
  assert.ok(lookAtCrowd(many(200, { active: 5, isHanging: true }), nothing).mayTry);
});

test('hosts that are slow take no place of those that move, in numbers nor in the queue', () => {
  const slow = { isSlow: true, isProven: true };
  const all = { room: 200, mayTry: true, mayLinger: true };
  assert.equal(lookAtCrowd(many(60, { ...slow, active: 10, queued: 10 }), nothing), all);
  assert.not.ok(lookAtCrowd(many(100, { ...slow, queued: 10 }), nothing).mayLinger);
  const crowd = lookAtCrowd(many(80, { ...slow, active: 10 }), nothing);
  assert.equal(crowd, { room: 200, mayTry: true, mayLinger: false });
});

test('the bounds of what moves, of what waits, and of memory', () => {
  assert.is(lookAtCrowd(many(60, { active: 10, isProven: true }), nothing).room, 0);
  assert.is(lookAtCrowd(many(46, { active: 10, isProven: true }), nothing).room, 140);
  assert.is(lookAtCrowd(many(10, { queued: 96, isProven: true }), nothing).room, 0);
  assert.is(lookAtCrowd([], { ...nothing, waiting: 990 }).room, 0);
  assert.is(lookAtCrowd([], { ...nothing, queuedBytes: 33 * 1024 * 1024 }).room, 0);
  assert.not.ok(lookAtCrowd([], { ...nothing, openBytes: 64 * 1024 * 1024 }).mayTry);
});

test.run();
