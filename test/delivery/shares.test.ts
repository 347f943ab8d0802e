// Workers that share lanes, on a real table: whatever they want and whatever breaks, together they never count on more
// than a lane's limit; who needs a place gets one; a circuit that one opens is open for all.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createCircuit } from '../../src/delivery/circuit.ts';
import { createShares, type Part, type Shares } from '../../src/delivery/shares.ts';
import type { Queryable } from '../../src/queue/enqueue.ts';
import { forgetOldShares } from '../../src/queue/lane-shares.ts';
import { retire } from '../../src/queue/lease.ts';
import { until } from '../support/app.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';

const test = suite('shares');
const RULES = { failuresMax: 1, openMs: 60_000, openMaxMs: 600_000 };

/** The far end of one lane, which counts connections of all workers. */
interface Host {
  readonly name: string;
  limit: number;
  open: number;
  openMax: number;
}

/** A lane that opens as many connections as it wants and may, and closes a busy one only when it is done. */
interface TestLane {
  readonly part: Part;
  readonly circuit: ReturnType<typeof createCircuit>;
  want(count: number): void;
  used(): number;
  /** Connections that end late. */
  isBusy: boolean;
  finish(): void;
  die(): void;
}

interface TestWorker {
  readonly epoch: string;
  readonly shares: Shares;
  readonly lanes: Map<string, TestLane>;
  statements: number;
  /** Null: all well; `lost`: it happens and nobody hears of it; `mute`: it hears, and what it proposes fails. */
  trouble: 'away' | 'lost' | 'mute' | null;
  lane(host: Host): TestLane;
  kill(): Promise<void>;
}

let q: Bench;
const workers = new Set<TestWorker>();
test.before(async () => {
  q = await openQueue();
});
test.after.each(async () => {
  for (const worker of workers) await worker.kill();
});
test.after(() => q.stop());

let number = 0;
const hostOf = (limit: number): Host => ({
  name: `default/mx${(number += 1)}.test`,
  limit,
  open: 0,
  openMax: 0,
});

async function startWorker(lifeMs?: number): Promise<TestWorker> {
  const epoch = await q.run();
  const pool: Pick<typeof q.store.pool, 'query'> = q.store.pool;
  const db = {
    async query(...given: Parameters<typeof pool.query>) {
      worker.statements += 1;
      const { name } = given[0] as unknown as { readonly name: string };
      const isAway = worker.trouble === 'mute' && name === 'propose-shares';
      if (isAway || worker.trouble === 'away') throw new Error('the database is away');
      // oxlint-disable-next-line typescript/await-thenable -- one of its overloads takes a callback
      const answer: unknown = await pool.query(...given);
      if (worker.trouble === 'lost') throw new Error('the answer was lost');
      return answer;
    },
  } as unknown as Queryable;
  const lanes = new Map<string, TestLane>();
  const shares = createShares({
    db,
    epoch,
    now: () => performance.now(),
    log: silent,
    onChange: () => undefined,
    ...(lifeMs === undefined ? {} : { lifeMs }),
  });
  const worker: TestWorker = {
    epoch,
    shares,
    lanes,
    statements: 0,
    trouble: null,
    lane(host) {
      const known = lanes.get(host.name);
      if (known !== undefined) return known;
      const part = shares.partOf(host.name);
      const circuit = createCircuit({ rules: RULES, random: () => 0.5 });
      let wanted = 0;
      let used = 0;
      const move = (): void => {
        const allowed = Math.min(wanted, part.connections());
        for (; used < allowed; used += 1) {
          host.open += 1;
          host.openMax = Math.max(host.openMax, host.open);
        }
        if (!lane.isBusy) lane.finish();
        if (part.connections() < wanted) part.tell();
      };
      const lane: TestLane = {
        part,
        circuit,
        isBusy: false,
        used: () => used,
        want(count) {
          wanted = count;
          move();
        },
        finish() {
          const kept = Math.min(used, wanted, part.connections());
          if (kept === used) return;
          host.open -= used - kept;
          used = kept;
          part.tell();
        },
        die() {
          host.open -= used;
          used = 0;
          wanted = 0;
        },
      };
      lanes.set(host.name, lane);
      shares.take({
        name: host.name,
        connectionsMax: () => host.limit,
        used: () => used,
        wanted: () => wanted,
        share: move,
        circuit: () => circuit.view(performance.now()),
        reopen: (about) => circuit.open({ ...about, nowMs: performance.now() }),
        forgive: () => circuit.close(),
      });
      return lane;
    },
    async kill() {
      workers.delete(worker);
      await shares.stop();
      for (const lane of lanes.values()) lane.die();
      await retire(q.store.pool, epoch); // as recovery does
    },
  };
  workers.add(worker);
  await shares.start();
  return worker;
}

const counted = (host: Host): number =>
  [...workers].reduce((sum, { lanes }) => sum + (lanes.get(host.name)?.part.connections() ?? 0), 0);
const holds = (count: number) => (lane: TestLane) =>
  until(
    async () => lane.part.connections(),
    (now) => now === count,
  );

test('who is alone has everything with one statement, and asks no more', async () => {
  const host = hostOf(10);
  const worker = await startWorker();
  await until(
    async () => worker.statements,
    (count) => count >= 1,
  );
  const before = worker.statements;
  const lane = worker.lane(host);
  lane.want(1);
  await holds(10)(lane);
  assert.ok(worker.statements - before <= 2, 'one, and perhaps the look of that second');
  lane.want(10);
  assert.is(lane.used(), 10, 'at once');
});

test('a second worker gets half of what both want, connections are closed first', async () => {
  const host = hostOf(10);
  const [a, b] = [await startWorker(), await startWorker()];
  const [first, second] = [a.lane(host), b.lane(host)];
  first.want(10);
  await holds(10)(first);
  first.isBusy = true;
  second.want(10);
  await until(
    async () => first.part.connections(),
    (now) => now === 5,
  );
  assert.is(first.used(), 10, 'they are busy');
  assert.is(
    second.part.connections(),
    0,
    "and until they are closed they are not the other worker's",
  );
  first.finish();
  await holds(5)(second);
  assert.is(host.openMax, 10);
  // Who wants little leaves the rest.
  first.isBusy = false;
  first.want(0);
  await until(
    async () => second.used(),
    (now) => now === 10,
  );
  assert.is(host.openMax, 10);
});

test('one place and three workers: one has it, the others know at once that it is taken, and get it when it is free', async () => {
  const host = hostOf(1);
  const all = [await startWorker(), await startWorker(), await startWorker()].map((one) =>
    one.lane(host),
  );
  for (const lane of all) lane.want(1);
  await until(
    async () => all.filter(({ part }) => part.connections() === 1).length,
    (now) => now === 1,
  );
  const holder = all.find(({ part }) => part.connections() === 1)!;
  const waiting = all.filter((lane) => lane !== holder);
  for (const { part } of waiting)
    await until(
      async () => part.isTaken(),
      (is) => is,
    );
  holder.want(0);
  await until(
    async () => waiting.some((lane) => lane.used() === 1),
    (is) => is,
  );
  assert.is(host.openMax, 1);
});

test('a worker that died: what it held is free as soon as it is recovered', async () => {
  const host = hostOf(4);
  const [a, b] = [await startWorker(), await startWorker()];
  const lane = b.lane(host);
  a.lane(host).want(4);
  await holds(4)(a.lane(host));
  a.lane(host).isBusy = true;
  lane.want(4);
  await a.kill();
  await until(
    async () => lane.used(),
    (now) => now === 4,
  );
});

test('a worker that the database does not hear: it stops to count on its part before others may', async () => {
  const host = hostOf(3);
  const [a, b] = [await startWorker(2_000), await startWorker(2_000)];
  const [lost, other] = [a.lane(host), b.lane(host)];
  lost.want(3);
  await holds(3)(lost);
  a.trouble = 'away';
  other.want(3);
  let isBoth = false;
  await until(
    async () => {
      isBoth ||= lost.part.connections() + other.part.connections() > host.limit;
      return other.used();
    },
    (now) => now === 3,
  );
  assert.not(isBoth);
  assert.is(lost.used(), 0);
  // Back again it is one of two.
  a.trouble = null;
  await until(
    async () => lost.used(),
    (now) => now >= 1,
  );
  assert.is(host.openMax, 3);
});

test('who could not give up what the other does not need any more uses it again', async () => {
  const host = hostOf(4);
  const [a, b] = [await startWorker(), await startWorker()];
  const [first, second] = [a.lane(host), b.lane(host)];
  first.want(4);
  await holds(4)(first);
  a.trouble = 'mute';
  second.want(4);
  await holds(2)(first);
  assert.is(second.part.connections(), 0, 'nobody has told it');
  second.want(0);
  const asked = async () =>
    (
      await q.store.pool.query<{ shares: Record<string, number[]> }>(
        'select shares from lane_share where lane = $1',
        [host.name],
      )
    ).rows[0]?.shares[b.epoch];
  await until(asked, (mine) => mine === undefined);
  a.trouble = null;
  await until(
    async () => first.used(),
    (now) => now === 4,
  );
});

test('what nobody can have any more leaves the row, and old rows go', async () => {
  const host = hostOf(2);
  const a = await startWorker();
  const lane = a.lane(host);
  lane.want(2);
  await holds(2)(lane);
  const rows = async () =>
    (
      await q.store.pool.query<{ shares: Record<string, number[]> }>(
        'select shares from lane_share where lane = $1',
        [host.name],
      )
    ).rows;
  assert.equal(await rows(), [{ shares: { [a.epoch]: [2, 2] } }]);
  await q.store.pool.query("update lane_share set changed_at = now() - interval '8 days'");
  await forgetOldShares(q.store.pool);
  assert.is((await rows()).length, 1, 'it is held');
  lane.die();
  a.shares.drop(host.name);
  await until(rows, ([row]) => Object.keys(row?.shares ?? {}).length === 0);
  await q.store.pool.query("update lane_share set changed_at = now() - interval '8 days'");
  await forgetOldShares(q.store.pool);
  assert.is((await rows()).length, 0);
  // A worker that knew the row makes another.
  const again = (await startWorker()).lane(host);
  again.want(1);
  await until(
    async () => again.used(),
    (now) => now === 1,
  );
});

test('a lane that was forgotten and is made again counts what is not closed yet', async () => {
  const host = hostOf(2);
  const worker = await startWorker();
  const former = worker.lane(host);
  former.want(2);
  await until(
    async () => former.used(),
    (now) => now === 2,
  );
  former.isBusy = true;
  worker.shares.drop(host.name);
  worker.lanes.delete(host.name);
  const lane = worker.lane(host);
  const before = worker.statements;
  await until(
    async () => {
      lane.want(2);
      return worker.statements;
    },
    (now) => now > before + 2,
  );
  assert.is(host.openMax, 2);
  former.isBusy = false;
  former.want(0);
  await until(
    async () => {
      lane.want(2);
      return lane.used();
    },
    (now) => now === 2,
  );
  assert.is(host.openMax, 2);
});

test('a circuit that one opens is open for the other, and success of one closes it for both', async () => {
  const host = hostOf(4);
  const [a, b] = [await startWorker(), await startWorker()];
  const [first, second] = [a.lane(host), b.lane(host)];
  first.want(2);
  second.want(2);
  await until(
    async () => counted(host),
    (now) => now === 4,
  );
  const state = (lane: TestLane) => async () => lane.circuit.state(performance.now());
  first.circuit.open({ forMs: 60_000, reason: '421 go away', nowMs: performance.now(), opens: 3 });
  first.part.tell();
  await until(state(second), (now) => now === 'open');
  const view = second.circuit.view(performance.now());
  assert.equal([view.opens, view.reason], [3, '421 go away']);
  assert.ok(view.openUntilMs! > first.circuit.view(0).openUntilMs!, 'who opened it probes first');
  // One that comes now learns of it with its first question.
  const third = (await startWorker()).lane(host);
  third.want(1);
  await until(state(third), (now) => now === 'open');
  second.circuit.close();
  second.part.tell();
  await until(state(first), (now) => now === 'closed');
  await until(state(third), (now) => now === 'closed');
});

test('whatever they want, and whatever is lost on the way: never more than the limit', async () => {
  const hosts = [hostOf(1), hostOf(2), hostOf(5), hostOf(10)];
  let seed = Math.floor(Math.random() * 2 ** 32);
  const first = seed;
  const roll = (below: number): number => {
    seed = (Math.imul(seed, 1_664_525) + 1_013_904_223) >>> 0;
    return Math.floor((seed / 2 ** 32) * below);
  };
  const some = <T>(items: Iterable<T>): T => {
    const all = [...items];
    return all[roll(all.length)]!;
  };
  const check = (): void => {
    for (const host of hosts) {
      const label = `seed ${first}: ${host.name} of ${host.limit}`;
      assert.ok(counted(host) <= host.limit, `${label}: ${counted(host)} are counted on`);
      assert.ok(host.openMax <= host.limit, `${label}: ${host.openMax} were open`);
    }
  };
  for (let count = 0; count < 4; count++) await startWorker(2_000);
  for (let step = 0; step < 2_500; step++) {
    const worker = some(workers);
    const lane = worker.lane(some(hosts));
    const what = roll(100);
    if (what < 70) lane.want(roll(12));
    else if (what < 80) lane.isBusy = roll(3) === 0 && worker.trouble === null;
    else if (what < 90) lane.finish();
    else if (what < 98) {
      worker.trouble = ([null, null, null, 'lost', 'mute', 'away'] as const)[roll(6)]!;
      // Busy connections outlive the part of a worker that is cut off; here they end in time.
      if (worker.trouble !== null) {
        for (const one of worker.lanes.values()) {
          one.isBusy = false;
          one.finish();
        }
      }
    } else if (step % 5 === 0) {
      await worker.kill();
      await startWorker(2_000);
    }
    check();
    if (step % 3 === 0) await new Promise((resolve) => setTimeout(resolve, roll(4)));
    check();
  }
  // When all is well again, everybody who wants something gets it where there is enough.
  for (const worker of workers) {
    worker.trouble = null;
    for (const host of hosts) worker.lane(host).isBusy = false;
  }
  const roomy = hosts.filter(({ limit }) => limit >= workers.size);
  for (let round = 0; round < 3; round++) {
    for (const worker of workers) for (const host of hosts) worker.lane(host).want(0);
    await new Promise((resolve) => setTimeout(resolve, roll(300)));
    for (const worker of workers) for (const host of roomy) worker.lane(host).want(1 + roll(4));
    for (const worker of workers) {
      for (const host of roomy) {
        const { used } = worker.lane(host);
        await until(
          async () => used(),
          (now) => now >= 1,
        );
        check();
      }
    }
  }
  check();
});

test.run();
