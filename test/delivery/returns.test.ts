// What goes back to the queue unbegun: gathered, and braked where it would only come and go.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createBrake, createReturns } from '../../src/delivery/returns.ts';
import type { ClaimedDelivery } from '../../src/queue/claim.ts';

const test = suite('returns');
const delivery = (emailId: string): ClaimedDelivery => ({ emailId }) as unknown as ClaimedDelivery;

test('what goes back at the same time goes together, and a drain waits for all of it', async () => {
  const batches: string[][] = [];
  let finish = (): void => undefined;
  const returns = createReturns(async (deliveries) => {
    batches.push(deliveries.map(({ emailId }) => emailId));
    await new Promise<void>((resolve) => (finish = resolve));
  });
  const first = Promise.all([
    returns.add([delivery('a'), delivery('b')]),
    returns.add([delivery('c')]),
  ]);
  while (batches.length === 0) await new Promise((turn) => setImmediate(turn));
  const second = returns.add([delivery('d')]);
  let drained = false;
  const draining = returns.drain().then(() => (drained = true));
  finish();
  await first;
  assert.not.ok(drained, 'the second is still on its way');
  while (batches.length === 1) await new Promise((turn) => setImmediate(turn));
  finish();
  await Promise.all([second, draining]);
  assert.equal(batches, [['a', 'b', 'c'], ['d']]);
});

test('the brake holds for longer each time it is pulled again, and forgets that', () => {
  let nowMs = 0;
  const brake = createBrake(() => nowMs);
  brake.note(199);
  assert.not.ok(brake.isOn());
  nowMs = 1_001;
  brake.note(199);
  assert.not.ok(brake.isOn(), 'not within one second');
  const heldFor = (): number => {
    brake.note(200);
    const from = nowMs;
    brake.note(200); // on its way back all the same
    while (brake.isOn()) nowMs += 500;
    return nowMs - from;
  };
  assert.equal(
    [heldFor(), heldFor(), heldFor(), heldFor(), heldFor()],
    [1_000, 2_000, 4_000, 8_000, 8_000],
  );
  nowMs += 10_000;
  assert.is(heldFor(), 1_000);
});

test.run();
