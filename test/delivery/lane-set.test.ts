// What a worker knows of its lanes and destinations: what it reads back at its start, what it offers to the next claim,
// and what it does when a way out is blocked. On a real table.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { NO_PAUSES } from '../../src/queue/pauses.ts';
import { SYSTEM_EGRESS } from '../../src/delivery/egress.ts';
import { createLaneSet, type LaneSet } from '../../src/delivery/lane-set.ts';
import type { NextHops } from '../../src/delivery/next-hop.ts';
import type { PortWatch } from '../../src/delivery/port25.ts';
import { readProviders, type Providers } from '../../src/delivery/providers.ts';
import { createRooms, type Offer, type Rooms } from '../../src/delivery/rooms.ts';
import type { ClaimedDelivery } from '../../src/queue/claim.ts';
import { reportLanes, type LaneReport } from '../../src/queue/lanes.ts';
import { openQueue, type Bench } from '../support/queue.ts';

interface Rig {
  readonly rooms: Rooms;
  readonly lanes: LaneSet;
  nowMs: number;
  providers: Providers;
  blocked: boolean;
  mayProbe: boolean;
  maySpill: boolean;
  egresses: string[];
  mayTry: boolean;
  mayLinger: boolean;
  /** Other workers have all connections. */
  isTaken: boolean;
  /** How long a transaction takes; null: none is to begin. */
  workMs: number | null;
  offer(): Offer;
}

const test = suite('lane set');
let q: Bench;
test.before(async () => {
  q = await openQueue();
});
test.after(() => q?.stop());

function rig(): Rig {
  const rooms = createRooms();
  const state = {
    nowMs: 0,
    providers: readProviders({ providers: [{ name: 'big', mx: ['big.test'], connections: 8 }] }),
    blocked: false,
    mayProbe: false,
    maySpill: false,
    egresses: ['default'],
    mayTry: true,
    mayLinger: true,
    isTaken: false,
    workMs: null as number | null,
  };
  const watch: PortWatch = {
    isBlocked: () => (state.blocked ? { since: new Date(0), reason: 'silence' } : null),
    note: () => undefined,
    mayProbe: () => state.mayProbe,
  };
  const lanes = createLaneSet({
    providers: () => state.providers,
    shares: {
      partOf: () => ({
        connections: () => (state.isTaken ? 0 : 5),
        isTaken: () => state.isTaken,
        mayBurst: () => true,
        tell: () => undefined,
      }),
      take: () => undefined,
      drop: () => undefined,
    },
    rooms,
    watch,
    now: () => state.nowMs,
    random: () => 0.5,
    egresses: () => new Set(state.egresses),
    maySpill: () => state.maySpill,
    work: () => {
      if (state.workMs === null) return Promise.reject(new Error('nothing is begun here'));
      state.nowMs += state.workMs;
      return Promise.resolve({ signal: { kind: 'talked' }, pause: null, isBlocked: false });
    },
    onChange: () => undefined,
  });
  return Object.assign(state, {
    rooms,
    lanes,
    offer: () =>
      rooms.offer({
        lanes: lanes.byName,
        isOut: () => false,
        hasOtherWay: (_, known) => state.egresses.some((name) => !known.has(name)),
        mayTry: state.mayTry,
        mayLinger: state.mayLinger,
        mayAsk: lanes.mayAsk(),
      }),
  });
}

const hopsTo = (...hosts: string[]): NextHops => ({
  kind: 'targets',
  mxNames: hosts,
  targets: hosts.map((host) => ({
    host,
    address: '192.0.2.1',
    port: 25,
    tls: 'opportunistic',
    verify: false,
    login: null,
    helloName: 'us.test',
    source: null,
    trusted: false,
  })),
});
const meet = ({ lanes }: Rig, destination: string, ...hosts: string[]) =>
  lanes.laneOf(destination, { egress: SYSTEM_EGRESS, hops: hopsTo(...hosts) }).lane;
const delivery = (lane: string): ClaimedDelivery =>
  ({
    tenantId: 't',
    emailId: 'e',
    position: 0,
    lane,
    isBulk: false,
    recipientCount: 1,
  }) as ClaimedDelivery;
const open = (about: Partial<LaneReport>): LaneReport => ({
  name: 'default/mx.shut.test',
  egress: 'default',
  site: 'mx.shut.test',
  provider: null,
  circuit: 'open',
  openedAt: new Date(),
  openUntil: new Date(Date.now() + 120_000),
  opens: 3,
  reason: 'connect: refused',
  limitedBy: 'circuit',
  connections: 0,
  connectionsMax: 5,
  concurrency: 1,
  queued: 0,
  inFlight: 0,
  lastSuccessAt: null,
  lastFailureAt: new Date(),
  destinations: ['mx:shut.test', 'mx:shut2.test'],
  ...about,
});

test('a start goes on with the circuits that were open: their mail is not claimed', async () => {
  await reportLanes(q.store.pool, [
    open({}),
    open({ name: 'default/mx.fine.test', circuit: 'closed', destinations: ['mx:fine.test'] }),
  ]);
  const it = rig();
  await it.lanes.restore(q.store.pool);
  assert.equal(it.offer().exceptLanes.toSorted(), ['mx:shut.test', 'mx:shut2.test']);
  const { circuit } = it.lanes.byName.get('default/mx.shut.test')!.view();
  assert.equal([circuit.opens, circuit.reason], [3, 'connect: refused']);
  it.nowMs = 121_000;
  const offer = it.offer();
  assert.equal(offer.exceptLanes, []);
  assert.is(offer.rooms.get('mx:shut.test'), 1, 'one probe');
});

test('mail that comes home has a lane of its own, whatever leaves from where, and a restart goes on with it', async () => {
  const it = rig();
  const hops = { ...hopsTo('us.test'), isHome: true } as NextHops;
  const { lane } = it.lanes.laneOf('mx:ours.test', { egress: SYSTEM_EGRESS, hops });
  assert.equal([lane.name, lane.egress, lane.view().connectionsMax], ['home', null, 10]);
  it.blocked = true;
  it.lanes.look(NO_PAUSES);
  assert.is(lane.closedBy(), null, 'it needs no port 25');

  const destinations = ['mx:ours.test'];
  await reportLanes(q.store.pool, [open({ name: 'home', site: 'home', destinations })]);
  const later = rig();
  await later.lanes.restore(q.store.pool);
  assert.ok(later.offer().exceptLanes.includes('mx:ours.test'));
  assert.is(later.lanes.byName.get('home')?.egress, null);
});

test('limits that change while they run', () => {
  const it = rig();
  const lane = meet(it, 'mx:a.big.test', 'mx1.big.test');
  assert.is(lane.name, 'default/big');
  assert.is(lane.view().connectionsMax, 8);
  it.providers = readProviders({ providers: [{ name: 'big', mx: ['big.test'], connections: 2 }] });
  it.lanes.look(NO_PAUSES);
  assert.is(lane.view().connectionsMax, 2);
});

test('a lane whose connections other workers have: nothing is claimed for it, what waits can be taken back', () => {
  const it = rig();
  const lane = meet(it, 'mx:theirs.test', 'mx.theirs.test');
  it.isTaken = true;
  lane.add({ delivery: delivery('mx:theirs.test'), hops: hopsTo('mx.theirs.test') });
  assert.is(lane.active(), 0);
  assert.equal([lane.isStalled(), lane.room(), lane.spare()], [true, 0, 0]);
  assert.ok(it.offer().exceptLanes.includes('mx:theirs.test'));
  assert.is(lane.view().limitedBy, 'connections');
  assert.is(lane.takeQueued().length, 1);
  it.isTaken = false;
  assert.not(it.offer().exceptLanes.includes('mx:theirs.test'));
});

test('a lane that many destinations share is not offered many times over', () => {
  const it = rig();
  const names = Array.from({ length: 400 }, (_, index) => `mx:d${index}.test`);
  for (const name of names) meet(it, name, 'mx.shared.test');
  const claim = (): number => {
    const { exceptLanes, rooms, roomOfOthers } = it.offer();
    const out = new Set(exceptLanes);
    const claimed = new Map<string, number>();
    let left = 200;
    for (const name of names) {
      const count = out.has(name) ? 0 : Math.min(left, rooms.get(name) ?? roomOfOthers);
      if (count > 0) claimed.set(name, count);
      left -= count;
    }
    it.rooms.note(claimed);
    it.nowMs += 1_000;
    return 200 - left;
  };
  const brought = Array.from({ length: 12 }, claim);
  assert.ok(brought[0]! > 100, 'nobody knew');
  assert.ok(
    brought.slice(3).every((count) => count > 0 && count <= 40),
    brought.join(' '),
  );
});

test('a blocked way out: nothing is claimed for it, one probe when the watch says so', () => {
  const it = rig();
  const lane = meet(it, 'mx:a.test', 'mx.a.test');
  it.blocked = true;
  it.lanes.look(NO_PAUSES);
  assert.is(lane.closedBy(), 'blocked');
  assert.equal(it.offer().exceptLanes, ['mx:a.test']);
  assert.is(it.offer().roomOfOthers, 0, 'nor for strangers');
  it.mayProbe = true;
  it.lanes.look(NO_PAUSES);
  assert.is(it.offer().rooms.get('mx:a.test'), 1);
  it.blocked = false;
  it.lanes.look(NO_PAUSES);
  assert.is(lane.closedBy(), null);
});

test('a blocked way out with a smarthost to spill to: what was known is asked about anew', () => {
  const it = rig();
  meet(it, 'mx:a.test', 'mx.a.test');
  Object.assign(it, { blocked: true, maySpill: true });
  it.lanes.look(NO_PAUSES);
  assert.not.ok(it.rooms.isKnown('mx:a.test'));
  assert.ok(it.offer().roomOfOthers > 0);
  const hops = hopsTo('relay.test');
  if (hops.kind === 'none') throw new Error('no hops');
  const spilled = { ...hops, targets: hops.targets.map((one) => ({ ...one, trusted: true })) };
  const { lane } = it.lanes.laneOf('mx:a.test', { egress: SYSTEM_EGRESS, hops: spilled });
  assert.is(lane.name, 'smarthost');
});

test('reports: what changed, once', async () => {
  const it = rig();
  meet(it, 'mx:told.test', 'mx.told.test');
  const stamp = async (): Promise<unknown> =>
    (await q.store.pool.query("select reported_at from lane where name = 'default/mx.told.test'"))
      .rows[0];
  await it.lanes.report(q.store.pool);
  const first = await stamp();
  assert.ok(first);
  await it.lanes.report(q.store.pool);
  assert.equal(await stamp(), first, 'nothing new');
  it.lanes.look({ ...NO_PAUSES, lanes: new Set(['default/mx.told.test']) });
  await it.lanes.report(q.store.pool);
  assert.not.equal(await stamp(), first);
});

test('an address that is paused, or gone from its pool, does not keep mail from the others', () => {
  const it = rig();
  meet(it, 'mx:a.test', 'mx.a.test');
  it.lanes.look({ ...NO_PAUSES, lanes: new Set(['default/mx.a.test']) });
  assert.equal(it.offer().exceptLanes, ['mx:a.test'], 'there is no other');
  it.egresses = ['default', 'second'];
  assert.equal(it.offer().exceptLanes, []);
  it.egresses = ['second'];
  assert.equal(it.offer().exceptLanes, []);
});

test('a worker with very many lanes reports them all, and forgets those that have nothing', async () => {
  const it = rig();
  for (let index = 0; index < 2_100; index++) {
    meet(it, `mx:many${index}.test`, `mx.many${index}.test`);
  }
  await it.lanes.report(q.store.pool);
  const count = async (table: string, column: string): Promise<number> => {
    const { rows } = await q.store.pool.query<{ count: number }>(
      `select count(*)::int as count from ${table} where ${column} like '%many%'`,
    );
    return rows[0]!.count;
  };
  assert.equal(
    [await count('lane', 'name'), await count('lane_destination', 'lane')],
    [2_100, 2_100],
  );

  // More than are remembered as news: those that were forgotten unreported must not use that up.
  for (let index = 0; index < 21_000; index++) {
    meet(it, `mx:more${index}.test`, `mx.more${index}.test`);
  }
  assert.ok(it.lanes.byName.size <= 5_001, `${it.lanes.byName.size} lanes`);
  meet(it, 'mx:last.test', 'mx.last.test');
  await it.lanes.report(q.store.pool);
  const { rows } = await q.store.pool.query(
    "select 1 from lane_destination where destination = 'mx:last.test'",
  );
  assert.is(rows.length, 1);
});

test('where hosts that hang have taken their part, only lanes that are known to move are offered', () => {
  const it = rig();
  meet(it, 'mx:unproven.test', 'mx.unproven.test');
  it.rooms.learn('sink', '', 'sink');
  it.lanes.laneOf('sink', { egress: SYSTEM_EGRESS, hops: { kind: 'targets', targets: [] } });
  it.mayTry = false;
  assert.equal(it.offer().exceptLanes, ['mx:unproven.test']);
  assert.ok((it.offer().rooms.get('sink') ?? 0) > 0);
  it.mayTry = true;
  assert.equal(it.offer().exceptLanes, []);
});

test('where slow hosts have taken their part, no more is offered of them', async () => {
  const it = rig();
  it.workMs = 20_000;
  const slow = meet(it, 'mx:slow.test', 'mx.slow.test');
  meet(it, 'mx:other.test', 'mx.other.test');
  slow.add({ delivery: delivery('mx:slow.test'), hops: hopsTo('mx.slow.test') });
  await slow.stop();
  assert.ok(slow.isSlow());
  it.mayLinger = false;
  assert.equal(it.offer().exceptLanes, ['mx:slow.test']);
  it.mayLinger = true;
  assert.equal(it.offer().exceptLanes, []);
});

test('lanes with open circuits are bounded too', () => {
  const it = rig();
  let looks = 0;
  for (let index = 0; index < 10_500; index++) {
    const { size } = it.lanes.byName;
    const lane = meet(it, `mx:dead${index}.test`, `mx.dead${index}.test`);
    lane.reopen({ forMs: 60_000, opens: 1, reason: 'connect: refused' });
    if (it.lanes.byName.size <= size) looks += 1;
  }
  assert.ok(it.lanes.byName.size <= 10_001, `${it.lanes.byName.size} lanes`);
  assert.ok(
    looks > 0 && looks < 10,
    `some were forgotten ${looks} times, each after a look at all`,
  );
});

test.run();
