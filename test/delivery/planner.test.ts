// How many destinations are asked about at a time: those that nobody knows never take all places, and those whose answer
// takes long keep no place that others wait for.
import { randomUUID } from 'node:crypto';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { SYSTEM_EGRESS } from '../../src/delivery/egress.ts';
import type { NextHops } from '../../src/delivery/next-hop.ts';
import { createPlanner, type Planner } from '../../src/delivery/planner.ts';
import type { ClaimedDelivery } from '../../src/queue/claim.ts';

const test = suite('planner');

const to = (lane: string): ClaimedDelivery => ({
  tenantId: 'tenant',
  emailId: randomUUID(),
  position: 0,
  recipient: 'r@recipient.test',
  lane,
  attempt: 1,
  isBulk: false,
  laneFaults: 0,
  unknowns: 0,
  createdAt: new Date(),
  recipientCount: 1,
  raw: null,
  rawSizeBytes: 1,
  blobKey: null,
  needsSmtpUtf8: false,
  signingTenantId: null,
  signingDomainId: null,
  fromDomain: 'sender.test',
  ignoresTlsPolicy: false,
  envelopeFrom: null,
  mayGoUnsigned: false,
});
const lanes = (count: number, name = 'mx:d'): readonly ClaimedDelivery[] =>
  Array.from({ length: count }, (_, number) => to(`${name}${number}.test`));

interface Rig {
  readonly planner: Planner;
  readonly asked: string[];
  readonly found: string[];
  nowMs: number;
  answer(destination: string): Promise<void>;
}

function rig(): Rig {
  const answers = new Map<string, (hops: NextHops) => void>();
  const asked: string[] = [];
  const found: string[] = [];
  const self: Rig = {
    asked,
    found,
    nowMs: 0,
    async answer(destination) {
      answers.get(destination)!({ kind: 'targets', targets: [] });
      await new Promise((resolve) => setImmediate(resolve));
    },
    planner: createPlanner({
      now: () => self.nowMs,
      egressFor: () => SYSTEM_EGRESS,
      find(destination) {
        asked.push(destination);
        return new Promise((resolve) => answers.set(destination, resolve));
      },
      isKnown: (destination) => destination.startsWith('mx:known'),
      onFound: (deliveries) => found.push(...deliveries.map(({ lane }) => lane)),
    }),
  };
  return self;
}

test('50 strangers at a time, and known ones beside them', async () => {
  const r = rig();
  r.planner.add([...lanes(120), ...lanes(20, 'mx:known')]);
  assert.is(r.asked.length, 70);
  assert.is(r.asked.filter((one) => one.startsWith('mx:known')).length, 20);
  await r.answer('mx:d0.test');
  assert.is(r.asked.at(-1), 'mx:d50.test');
  assert.equal(r.found, ['mx:d0.test']);
});

test('strangers that take long are given back and make room for others, up to a limit', async () => {
  const r = rig();
  r.planner.add(lanes(480));
  assert.is(r.asked.length, 50);
  for (let round = 1; round <= 12; round += 1) {
    r.nowMs += 5_001;
    r.planner.takeSlow();
    assert.is(r.asked.length, Math.min(400, 50 * (round + 1)));
  }
  assert.is(r.planner.waiting(), 0, 'all went back');
  r.planner.add(lanes(90, 'mx:known'));
  assert.is(r.asked.length, 490, 'there is always room for those that are known');
  await r.answer('mx:d3.test');
  assert.is(r.asked.length, 491);
  assert.equal(r.found, [], 'nobody waits for it now');
  r.planner.add([to('mx:d3.test')]);
  assert.equal(r.found, ['mx:d3.test'], 'the late answer is remembered for a while');
});

test.run();
