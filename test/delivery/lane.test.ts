// What a lane lets begin, in which order, over how many connections: with work that ends when the test says so, and a
// clock of our own where time matters.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { Line } from '../../src/delivery/attempt.ts';
import { createLane, type Lane, type Learned, type Planned } from '../../src/delivery/lane.ts';
import { readProviders, type Limits } from '../../src/delivery/providers.ts';
import type { Session, Target } from '../../src/delivery/session.ts';
import type { ClaimedDelivery } from '../../src/queue/claim.ts';
import { until } from '../support/app.ts';

interface Begun {
  readonly line: Line;
  readonly group: readonly Planned[];
  readonly names: readonly string[];
  end(learned?: Partial<Learned>): Promise<void>;
}

interface Rig {
  readonly lane: Lane;
  readonly begun: Begun[];
  /** Changes of the lane that its worker was told of. */
  readonly changes: number;
  readonly clock: { nowMs: number };
  open(): readonly Begun[];
}

const { default: defaults } = readProviders({});
const target: Target = {
  host: 'mx.a.test',
  address: '192.0.2.1',
  port: 25,
  tls: 'opportunistic',
  verify: false,
  login: null,
  helloName: 'us.test',
  source: null,
  trusted: false,
};

const rigs: Rig[] = [];

function rig(limits: Partial<Limits> = {}, about: { readonly isTrusted?: boolean } = {}): Rig {
  const begun: Begun[] = [];
  const ended = new Set<Begun>();
  const clock = { nowMs: 0 };
  const told = { changes: 0 };
  const it: Rig = {
    begun,
    get changes() {
      return told.changes;
    },
    clock,
    open: () => begun.filter((one) => !ended.has(one)),
    lane: createLane({
      name: 'default/mx.a.test',
      egress: 'default',
      site: 'mx.a.test',
      provider: null,
      isTrusted: about.isTrusted ?? false,
      limits: { ...defaults, newConnectionsPerMinute: null, ...limits },
      now: () => clock.nowMs,
      random: () => 0.5,
      onChange: () => (told.changes += 1),
      work: (_lane, line, group) =>
        new Promise((resolve) => {
          const one: Begun = {
            line,
            group,
            names: group.map(({ delivery }) => delivery.recipient),
            async end(learned = {}) {
              ended.add(one);
              resolve({ signal: { kind: 'talked' }, pause: null, isBlocked: false, ...learned });
              await new Promise((turn) => setImmediate(turn));
            },
          };
          begun.push(one);
        }),
    }),
  };
  rigs.push(it);
  return it;
}

let number = 0;
function mail(recipient: string, about: Partial<ClaimedDelivery> = {}): Planned {
  number += 1;
  return {
    hops: { kind: 'targets', targets: [target] },
    delivery: {
      tenantId: 't',
      emailId: `email-${number}`,
      position: 0,
      recipient,
      lane: 'mx:a.test',
      attempt: 1,
      isBulk: false,
      laneFaults: 0,
      unknowns: 0,
      createdAt: new Date(0),
      recipientCount: 1,
      raw: Buffer.from('x'),
      rawSizeBytes: 1,
      blobKey: null,
      needsSmtpUtf8: false,
      signingTenantId: null,
      signingDomainId: null,
      fromDomain: 'us.test',
      ignoresTlsPolicy: false,
      envelopeFrom: null,
      mayGoUnsigned: false,
      ...about,
    },
  };
}

/** A connection that stays open; what the lane looks at. */
const session = (about: Partial<Session> = {}): Session =>
  ({
    target,
    sent: 1,
    limits: { messages: Infinity, recipients: Infinity, recipientDomains: Infinity },
    isOpen: () => true,
    close: () => undefined,
    ...about,
  }) as unknown as Session;

const test = suite('lane');
test.after.each(async () => {
  for (const { lane, open } of rigs.splice(0)) {
    await Promise.all([lane.stop(), ...open().map((one) => one.end())]);
  }
});

test('begins with five connections and grows by what goes well, up to the limit', async () => {
  const { lane, open } = rig({ connectionsMax: 7 });
  for (let index = 0; index < 100; index++) lane.add(mail(`${index}`));
  assert.is(open().length, 5);
  for (let index = 0; index < 40; index++) await open()[0]!.end();
  assert.is(open().length, 7);
});

test('one-recipient mail goes first, and bulk leaves a connection for it', async () => {
  const { lane, begun, open } = rig();
  for (let index = 0; index < 20; index++) lane.add(mail(`bulk ${index}`, { isBulk: true }));
  assert.is(open().length, 4, 'four of five');
  assert.is(lane.view().limitedBy, 'concurrency');
  lane.add(mail('single'));
  assert.is(begun.at(-1)?.names[0], 'single', 'at once, past sixteen others');
  lane.add(mail('next single'));
  await open()[0]!.end();
  assert.is(begun.at(-1)?.names[0], 'next single');
});

test('a lane of one connection carries bulk too', async () => {
  const { lane, open } = rig({ connectionsMax: 1 });
  lane.add(mail('bulk', { isBulk: true }));
  assert.is(open().length, 1);
  lane.add(mail('more bulk', { isBulk: true }));
  lane.add(mail('single'));
  await open()[0]!.end();
  assert.equal(open()[0]?.names, ['single']);
});

test('recipients of one message go together, up to the limit, and nobody else with them', async () => {
  const { lane, begun, open } = rig({ connectionsMax: 1, recipientsPerTransaction: 3 });
  lane.add(mail('first'));
  const shared = { emailId: 'shared', recipientCount: 5, isBulk: true };
  for (const name of ['a', 'b', 'c', 'd']) lane.add(mail(name, shared));
  lane.add(mail('other', { isBulk: true, recipientCount: 2 }));
  lane.add(mail('elsewhere', { ...shared, lane: 'mx:b.test' }));
  for (let count = 0; count < 5; count++) await open()[0]!.end();
  assert.equal(
    begun.map(({ names }) => names),
    [['first'], ['a', 'b', 'c'], ['d'], ['other'], ['elsewhere']],
  );
});

test('a kept connection is used again until it has carried its share', async () => {
  const { lane, begun, open } = rig({ messagesPerConnection: 2 });
  lane.add(mail('one'));
  const carried = { sent: 1 };
  const kept = Object.defineProperty(session(), 'sent', { get: () => carried.sent });
  open()[0]!.line.session = kept;
  await open()[0]!.end();
  assert.is(lane.view().connections, 1);
  lane.add(mail('two'));
  assert.is(begun.at(-1)?.line.session, kept);
  assert.is(begun.at(-1)?.line.messagesMax, 2);
  carried.sent = 2;
  await open()[0]!.end();
  lane.add(mail('three'));
  assert.is.not(begun.at(-1)?.line, begun[0]!.line, 'over a new one');
});

test('an idle connection is closed when its time is over', async () => {
  const { lane, open } = rig({ idleMs: 5 });
  lane.add(mail('one'));
  let closed = 0;
  open()[0]!.line.session = session({ close: () => void (closed += 1) });
  await open()[0]!.end();
  await until(
    async () => closed,
    (count) => count === 1,
  );
  assert.is(lane.view().connections, 0);
});

test('five handshakes in a row that fail close the lane; one probe opens it', async () => {
  const it = rig();
  const failed = { signal: { kind: 'unreachable', stage: 'greeting', why: '554 no' } } as const;
  for (let index = 0; index < 8; index++) it.lane.add(mail(`${index}`));
  for (let index = 0; index < 5; index++) await it.open()[0]!.end(failed);
  assert.is(it.lane.closedBy(), 'circuit');
  assert.is(it.changes, 1);
  assert.is(it.lane.view().circuit.reason, 'greeting: 554 no');
  const begunBefore = it.begun.length;
  assert.is(it.lane.room(), 0);
  assert.is(it.lane.takeQueued().length, 8 - begunBefore);
  for (const one of it.open()) await one.end(failed);

  it.clock.nowMs += 6 * 60_000;
  assert.is(it.lane.closedBy(), null);
  assert.is(it.lane.room(), 1);
  it.lane.add(mail('probe'));
  assert.is(it.lane.room(), 0);
  assert.is(it.lane.spare(), 0);
  it.lane.add(mail('behind it'));
  assert.is(it.open().length, 1);
  await it.open()[0]!.end();
  assert.is(it.lane.view().circuit.state, 'closed');
  assert.equal(it.open()[0]?.names, ['behind it']);
});

test('a reply that asks for quiet closes the lane for as long', async () => {
  const it = rig();
  it.lane.add(mail('one'));
  const pause = { forMs: 120_000, reason: '421 4.7.0 [TSS04] later' };
  await it.open()[0]!.end({ signal: { kind: 'throttled', why: pause.reason }, pause });
  assert.is(it.lane.closedBy(), 'circuit');
  assert.is(it.lane.view().circuit.reason, pause.reason);
  it.clock.nowMs = 119_999;
  assert.is(it.lane.closedBy(), 'circuit');
  it.clock.nowMs = 120_000;
  assert.is(it.lane.room(), 1);
});

test('a blocked way out teaches nothing about the hosts, and lets a probe through when told', async () => {
  const it = rig();
  const blocked = {
    signal: { kind: 'unreachable', stage: 'connect', why: 'timeout' },
    isBlocked: true,
  } as const;
  for (let index = 0; index < 10; index++) {
    it.lane.add(mail(`${index}`));
    await it.open()[0]!.end(blocked);
  }
  assert.is(it.lane.view().circuit.state, 'closed');
  it.lane.hold('blocked');
  assert.is(it.lane.closedBy(), 'blocked');
  assert.is(it.lane.view().limitedBy, 'blocked');
  it.lane.add(mail('waits'));
  assert.is(it.open().length, 0);
  it.lane.takeQueued();
  it.lane.allowProbe(true);
  assert.is(it.lane.room(), 1);
  it.lane.add(mail('probe'));
  assert.equal(it.open()[0]?.names, ['probe']);
  assert.is(it.lane.closedBy(), 'blocked');
});

test('a paused lane begins nothing, ends what is under way, and goes on where it was', async () => {
  const it = rig({ connectionsMax: 1 });
  for (const name of ['a', 'b']) it.lane.add(mail(name));
  it.lane.hold('paused');
  await it.open()[0]!.end();
  assert.is(it.open().length, 0);
  assert.is(it.lane.view().limitedBy, 'paused');
  it.lane.hold(null);
  assert.equal(it.open()[0]?.names, ['b']);
});

test('new connections have a rate of their own, kept ones do not wait', async () => {
  const it = rig({ newConnectionsPerMinute: 60, connectionsMax: 2 });
  for (const name of ['a', 'b', 'c', 'd']) it.lane.add(mail(name));
  assert.is(it.open().length, 2, 'as many as there may be at once');
  it.open()[0]!.line.session = session();
  await it.open()[0]!.end();
  assert.is(it.begun.at(-1)?.names[0], 'c', 'over the kept one');
  await it.open()[0]!.end();
  assert.is(it.open().length, 1, 'its connection is gone, and a new one has to wait');
  assert.is(it.lane.view().limitedBy, 'rate');
});

test('a rate of messages keeps order and total', async () => {
  const it = rig({ messagesPerSecond: 200, connectionsMax: 3 });
  const clock = performance.now();
  const timer = setInterval(() => {
    it.clock.nowMs = performance.now() - clock;
    for (const one of it.open()) void one.end();
  }, 1);
  const names = Array.from({ length: 250 }, (_, index) => `${index}`);
  for (const name of names) it.lane.add(mail(name));
  await until(
    async () => it.begun.length,
    (count) => count === 250,
  );
  clearInterval(timer);
  assert.equal(
    it.begun.flatMap((one) => one.names),
    names,
  );
});

test('what hangs is seen, what waits behind it is given back, and a stop waits for what is under way', async () => {
  const it = rig();
  for (let index = 0; index < 7; index++) it.lane.add(mail(`${index}`));
  assert.not.ok(it.lane.isStalled());
  it.clock.nowMs = 10_001;
  assert.ok(it.lane.isStalled());
  assert.is(it.lane.takeQueued().length, 2);
  let stopped = false;
  const stopping = it.lane.stop().then(() => (stopped = true));
  for (const one of it.open().slice(1)) await one.end();
  assert.not.ok(stopped);
  await it.open()[0]!.end();
  await stopping;
  assert.is(it.lane.view().connections, 0);
});

test('where transactions take long a lane is slow, and asks for no more than it has connections for', async () => {
  const it = rig();
  const carry = async (count: number, ms: number): Promise<void> => {
    for (let index = 0; index < count; index++) {
      it.lane.add(mail(`${index}`));
      it.clock.nowMs += ms;
      await it.open()[0]!.end();
    }
  };
  await carry(3, 50);
  assert.equal([it.lane.isSlow(), it.lane.room()], [false, 50]);
  await carry(1, 4_000);
  assert.not.ok(it.lane.isSlow(), 'once is no rule');
  await carry(1, 4_000);
  assert.ok(it.lane.isSlow());
  it.clock.nowMs += 1_000;
  assert.is(it.lane.room(), 5);
  await carry(20, 50);
  assert.not.ok(it.lane.isSlow());
});

test('one connection that hangs leaves the others to all that comes later', async () => {
  const it = rig();
  it.lane.add(mail('hangs'));
  it.clock.nowMs = 60_000;
  assert.ok(it.lane.isHanging());
  assert.not.ok(it.lane.isStalled());
  assert.ok(it.lane.room() > 0);
  for (let index = 0; index < 4; index++) it.lane.add(mail(`${index}`));
  assert.is(it.open().length, 5);
  assert.not.ok(it.lane.isStalled(), 'these have only begun');
  it.clock.nowMs += 10_001;
  assert.ok(it.lane.isStalled());
  assert.is(
    it.lane.view().limitedBy,
    'concurrency',
    'nothing waits here, since nothing is claimed',
  );
  await it.open()[4]!.end();
  assert.not.ok(it.lane.isStalled());
});

test('mail that waited in memory for longer than the circuit was open goes on by itself', async () => {
  const it = rig();
  const failed = { signal: { kind: 'unreachable', stage: 'connect', why: 'refused' } } as const;
  for (let index = 0; index < 12; index++) it.lane.add(mail(`${index}`));
  while (it.open().length > 0) await it.open()[0]!.end(failed);
  assert.is(it.lane.closedBy(), 'circuit');
  const waiting = it.lane.queued();
  assert.ok(waiting > 0);
  // The database was away meanwhile: nobody took it back.
  it.clock.nowMs += 6 * 60_000;
  it.lane.wake();
  assert.is(it.open().length, 1, 'the probe');
  while (it.open().length > 0) await it.open()[0]!.end();
  assert.is(it.lane.queued(), 0);
});

test('a host that takes one message per connection: each new connection is paced, none is kept', async () => {
  const it = rig({ newConnectionsPerMinute: 2, connectionsMax: 2 });
  const limits = { messages: 1, recipients: Infinity, recipientDomains: Infinity };
  for (const name of ['a', 'b', 'c']) {
    it.lane.add(mail(name));
    const [one] = it.open();
    if (one === undefined) continue;
    one.line.session = session({ limits });
    await one.end();
    assert.is(it.lane.view().connections, 0);
  }
  assert.is(it.begun.length, 2);
  assert.is(it.lane.view().limitedBy, 'rate');
});

test('a trusted lane takes all of what two claims in a row bring', () => {
  const { lane } = rig({}, { isTrusted: true });
  while (lane.room() > 0) lane.add(...Array.from({ length: 20 }, () => mail('x')));
  assert.ok(lane.spare() >= 200, 'the second was made before the first had arrived');
});

test('limits that change while it runs hold from the next mail on', async () => {
  const it = rig();
  for (let index = 0; index < 20; index++) it.lane.add(mail(`${index}`));
  assert.is(it.open().length, 5);
  it.lane.limit({ ...defaults, newConnectionsPerMinute: null, connectionsMax: 2 });
  for (let index = 0; index < 3; index++) await it.open()[0]!.end();
  assert.is(it.open().length, 2);
  assert.is(it.lane.view().connectionsMax, 2);
});

test.run();
