// Tenants take turns in a lane, and nothing is lost or repeated by it.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createFairQueue, type FairQueue } from '../../src/delivery/fair-queue.ts';

interface Item {
  readonly tenant: string;
  readonly number: number;
  readonly email: number;
}

const test = suite('fair queue');
const never = (): boolean => false;
const open = (...items: readonly Item[]): FairQueue<Item> => {
  const queue = createFairQueue<Item>(({ tenant }) => tenant);
  for (const item of items) queue.add(item);
  return queue;
};
const item = (tenant: string, number: number, email = number): Item => ({ tenant, number, email });
const drain = (queue: FairQueue<Item>): string[] => {
  const order: string[] = [];
  while (queue.size > 0) {
    const [{ tenant, number }] = queue.take(1, never);
    order.push(`${tenant}${number}`);
  }
  return order;
};

test('who brings one does not wait behind thousands', () => {
  const queue = open(...Array.from({ length: 5_000 }, (_, number) => item('a', number)));
  queue.take(1, never);
  queue.add(item('b', 0));
  assert.equal(drain(queue).slice(0, 3), ['a1', 'b0', 'a2']);
});

test('tenants take turns, each in its own order', () => {
  const queue = open(item('a', 1), item('a', 2), item('a', 3), item('b', 1), item('b', 2));
  queue.add(item('c', 1));
  assert.equal(drain(queue), ['a1', 'b1', 'c1', 'a2', 'b2', 'a3']);
});

test('what peek shows is what take gives', () => {
  const queue = open(item('a', 1), item('b', 1));
  const shown = queue.peek();
  assert.is(queue.take(1, never)[0], shown);
  assert.is(open().peek(), undefined);
  assert.throws(() => open().take(1, never));
});

test('a group is of one tenant, at most as large as asked, and leaves the others in order', () => {
  const queue = open(item('a', 1, 7), item('b', 1, 7), item('a', 2, 8), item('a', 3, 7));
  queue.add(item('a', 4, 7));
  queue.add(item('a', 5, 7));
  const group = queue.take(3, ({ email }) => email === 7);
  assert.equal(
    group.map(({ tenant, number }) => `${tenant}${number}`),
    ['a1', 'a3', 'a4'],
  );
  assert.is(queue.size, 3);
  assert.equal(drain(queue), ['b1', 'a2', 'a5']);
});

test('what is removed is gone, and the rest keeps its order', () => {
  const queue = open(item('a', 1), item('a', 2), item('b', 1), item('c', 2));
  const removed = queue.remove(({ number }) => number === 1);
  assert.equal(
    removed.map(({ tenant }) => tenant),
    ['a', 'b'],
  );
  assert.is(queue.size, 2);
  assert.equal(drain(queue), ['a2', 'c2']);
});

test.run();
