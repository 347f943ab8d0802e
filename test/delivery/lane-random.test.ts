// A lane under whatever may happen to it, in any order: limits that change, pauses, blocks, circuits, clocks that jump, a
// worker that takes back what waits or cannot for a while. Nothing is begun twice or beyond a limit, and when the world is
// well again everything ends. What failed is said with its seed.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createLane, type Lane, type Learned, type Planned } from '../../src/delivery/lane.ts';
import { readProviders } from '../../src/delivery/providers.ts';
import type { Session } from '../../src/delivery/session.ts';
import type { ClaimedDelivery } from '../../src/queue/claim.ts';

const test = suite('lane at random');
const SEEDS = 500;
const STEPS = 200;
const { default: defaults } = readProviders({});
const target = { host: 'mx.a.test' };

/** A linear congruential generator (Numerical Recipes): the same story for the same seed. */
function dice(seed: number): (below: number) => number {
  let state = seed >>> 0;
  return (below) => {
    state = (Math.imul(state, 1_664_525) + 1_013_904_223) >>> 0;
    return Math.floor((state / 2 ** 32) * below);
  };
}

interface Begun {
  readonly names: readonly string[];
  end(learned: Learned): void;
}

const talked: Learned = { signal: { kind: 'talked' }, pause: null, isBlocked: false };
const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

async function live(seed: number): Promise<void> {
  const roll = dice(seed);
  const pick = <T>(...ones: readonly T[]): T => ones[roll(ones.length)]!;
  let nowMs = 0;
  let number = 0;
  let limits = defaults;
  const open = new Set<Begun>();
  const begun = new Map<string, number>();
  const back = new Set<string>();
  let reduced = false;

  const lane: Lane = createLane({
    name: 'default/mx.a.test',
    egress: 'default',
    site: 'mx.a.test',
    provider: null,
    isTrusted: false,
    limits,
    now: () => nowMs,
    random: () => roll(1_000) / 1_000,
    onChange: () => undefined,
    work: (_, line, group) =>
      new Promise((resolve) => {
        if (!reduced) assert.ok(lane.active() <= limits.connectionsMax, 'more than the limit');
        assert.ok(group.length <= limits.recipientsPerTransaction);
        for (const { delivery } of group) {
          begun.set(delivery.emailId, (begun.get(delivery.emailId) ?? 0) + 1);
        }
        const one: Begun = {
          names: group.map(({ delivery }) => delivery.emailId),
          end(learned) {
            open.delete(one);
            line.session = roll(2) === 0 ? null : sessionOf(roll(4));
            resolve(learned);
          },
        };
        open.add(one);
      }),
  });
  const sessionOf = (sent: number): Session =>
    ({
      target,
      sent,
      limits: { messages: pick(1, 3, Infinity), recipients: Infinity, recipientDomains: Infinity },
      isOpen: () => true,
      close: () => undefined,
    }) as unknown as Session;
  const mail = (): Planned => {
    number += 1;
    const delivery = {
      emailId: `${number}`,
      lane: 'mx:a.test',
      recipientCount: 1,
      isBulk: roll(2) === 0,
    } as unknown as ClaimedDelivery;
    return { delivery, hops: { kind: 'targets', targets: [target as never] } };
  };
  const takeBack = (): void => {
    for (const { emailId } of lane.takeQueued()) {
      assert.not.ok(back.has(emailId) || begun.has(emailId), `${emailId} given back too late`);
      back.add(emailId);
    }
  };
  const endOne = (learned: Learned): void => [...open][roll(open.size)]?.end(learned);
  const steps: readonly (() => void)[] = [
    () => lane.add(...Array.from({ length: Math.min(lane.spare(), 1 + roll(20)) }, mail)),
    () => {
      const room = lane.room();
      assert.ok(Number.isInteger(room), `a claim takes whole numbers, not ${room}`);
      lane.add(...Array.from({ length: Math.min(room, 1 + roll(5)) }, mail));
    },
    () => endOne(talked),
    () => endOne(talked),
    () => endOne({ ...talked, signal: { kind: 'unreachable', stage: 'connect', why: 'x' } }),
    () => endOne({ ...talked, signal: { kind: 'throttled', why: '421' } }),
    () => endOne({ ...talked, signal: { kind: 'nothing' } }),
    () => endOne({ ...talked, pause: { forMs: 1_000 * roll(100), reason: 'quiet' } }),
    () =>
      endOne({
        ...talked,
        signal: { kind: 'unreachable', stage: 'connect', why: 'x' },
        isBlocked: true,
      }),
    () => lane.hold(pick(null, null, 'paused', 'blocked')),
    () => lane.allowProbe(roll(2) === 0),
    () => {
      limits = {
        ...defaults,
        connectionsMax: 1 + roll(12),
        newConnectionsPerMinute: pick(null, 1, 60),
        messagesPerSecond: pick(null, 2, 20, 200),
        messagesPerConnection: 1 + roll(3),
        recipientsPerTransaction: 1 + roll(3),
      };
      reduced = true; // what was begun under other limits ends first
      lane.limit(limits);
    },
    () => (nowMs += pick(1, 500, 20_000, 400_000)),
    () => lane.wake(),
    () => {
      if (lane.closedBy() !== null || lane.isStalled()) takeBack();
    },
  ];
  for (let step = 0; step < STEPS; step++) {
    pick(...steps)();
    await turn();
    if (lane.active() <= limits.connectionsMax) reduced = false;
    assert.is(lane.active(), open.size);
  }
  // The world is well again, and all that ever happens is that time passes and what is under way ends.
  lane.hold(null);
  limits = { ...defaults, newConnectionsPerMinute: null };
  lane.limit(limits);
  for (let rounds = 0; lane.queued() + open.size > 0 && rounds < 2_000; rounds++) {
    nowMs += 60_000;
    lane.wake();
    for (const one of open) one.end(talked);
    await turn();
  }
  assert.is(
    lane.queued() + open.size,
    0,
    `${lane.queued()} wait for ever: ${JSON.stringify(lane.view())}`,
  );
  assert.is(begun.size + back.size, number, 'each began or went back');
  assert.ok([...begun.values()].every((times) => times === 1));
  nowMs += 60 * 60_000;
  assert.ok(lane.room() > 0, 'and more may come');
  for (let more = 0; more < 2_000 && lane.view().concurrency < 10; more++) {
    while (lane.spare() > 0 && lane.queued() < 20) lane.add(mail());
    for (const one of open) one.end(talked);
    await turn();
    nowMs += 10;
  }
  assert.is(lane.view().concurrency, 10, 'it finds back to all of its connections');
  while (open.size > 0) {
    for (const one of open) one.end(talked);
    await turn();
  }
  await lane.stop();
  assert.is(lane.view().connections, 0);
}

test('whatever happens to a lane, nothing is lost, doubled or stuck', async () => {
  for (let seed = 1; seed <= SEEDS; seed++) {
    await live(seed).catch((error: unknown) => {
      throw new Error(`seed ${seed}: ${(error as Error).message}`, { cause: error });
    });
  }
});

test.run();
