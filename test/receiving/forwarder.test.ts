// Every forward is carried out once: with several forwarders, after crashes, while the database is away, and beside a task
// that always fails.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createHash } from 'node:crypto';
import { runForward, type ForwardTask } from '../../src/receiving/forward-task.ts';
import { TRIES_MAX } from '../../src/receiving/forwarder.ts';
import { openDiskBlobs, type BlobStore } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import type { Store } from '../../src/store/orm.ts';
import { until } from '../support/app.ts';
import { message, openForwarding, type Forwarding, type RouteOf } from '../support/forwarding.ts';

const test = suite('forwarder');
let f: Forwarding;
let route: RouteOf;

test.before(async () => {
  f = await openForwarding();
  route = await f.route('acme.test');
});
test.after(() => f.stop());

let serial = 0;
const arrive = (body?: string): Promise<string> =>
  f.arrive(
    route,
    message({ headers: [`X-Serial: ${(serial += 1)}`], ...(body === undefined ? {} : { body }) }),
  );
const count = async (what: string, values: readonly unknown[] = []): Promise<number> => {
  const { rows } = await f.store.pool.query<{ count: string }>(`select count(*) from ${what}`, [
    ...values,
  ]);
  return Number(rows[0]?.count);
};
const untilNone = (): Promise<number> =>
  until(
    () => count('forwarding_task'),
    (tasks) => tasks === 0,
  );
const taskOf = async (id: string): Promise<ForwardTask> => {
  const { rows } = await f.store.pool.query<{ received_email_id: string; tries: number }>(
    'select received_email_id, tries from forwarding_task where id = $1',
    [id],
  );
  return {
    tenantId: f.tenantId,
    id,
    receivedEmailId: rows[0]!.received_email_id,
    ruleId: route.ruleId,
    recipient: route.target,
    replayId: null,
    tries: rows[0]!.tries,
  };
};

test('several forwarders share the work, and each task has one attempt and one email', async () => {
  const [attempts, emails] = [await count('forwarding_attempt'), await count('email')];
  const tasks = await Promise.all(Array.from({ length: 60 }, () => arrive()));
  const did = [0, 0, 0];
  const running = did.map((_, index) => f.start({ onReady: () => (did[index]! += 1) }));
  await untilNone();
  await Promise.all(running.map((one) => one.stop()));
  assert.is((await count('forwarding_attempt')) - attempts, tasks.length);
  assert.is((await count('email')) - emails, tasks.length);
  assert.is(did[0]! + did[1]! + did[2]!, tasks.length);
});

test('two that carry out the same task at once: one of them did', async () => {
  const task = await taskOf(await arrive('y'.repeat(200_000)));
  const before = await count('email');
  const d = f.dependencies();
  const made = await Promise.all(Array.from({ length: 4 }, () => runForward(d, task)));
  assert.is(made.filter((one) => one !== null).length, 1);
  assert.is(await count('email'), before + 1);
  const won = made.find((one) => one !== null);
  assert.ok(won?.blobKey !== null && won?.blobKey !== undefined);
  // The received message's, and one of ours: what the others wrote is removed.
  let blobs = 0;
  for await (const _ of f.blobs.list(new Date(Date.now() + 60_000))) blobs += 1;
  assert.is(blobs, 2);
});

test('what a crash left is due again, and what was not begun is not held against it', async () => {
  const id = await arrive();
  // As a process leaves it that ends behind the taking.
  await f.store.pool.query(
    `update forwarding_task set tries = 1, due_at = now() + interval '1 second' where id = $1`,
    [id],
  );
  const running = f.start();
  try {
    assert.is((await f.attempt(id)).status, 'queued');
  } finally {
    await running.stop();
  }
});

test('a task that fails again and again is given up, and holds nobody up', async () => {
  const broken: BlobStore = {
    ...f.blobs,
    write: () => Promise.reject(new Error('the disk is broken')),
  };
  const bad = await arrive('y'.repeat(200_000));
  const good = await arrive();
  const running = f.start({ blobs: broken });
  try {
    assert.is((await f.attempt(good)).status, 'queued');
    // Its pauses are not waited for.
    const hurry = setInterval(() => {
      f.store.pool
        .query('update forwarding_task set due_at = now()')
        .then(() => running.nudge())
        .catch(() => undefined);
    }, 20);
    const attempt = await f.attempt(bad).finally(() => clearInterval(hurry));
    assert.equal([attempt.status, attempt.reason], ['failed', 'internal']);
    assert.match(attempt.explanation, new RegExp(`${TRIES_MAX} times in a row`));
    assert.equal(attempt.destinations, ['out@far.test']);
  } finally {
    await running.stop();
  }
});

test('while the database is away nothing is lost and nothing counts against a task', async () => {
  let isAway = true;
  const away = Object.assign(new Error('connection refused'), { code: 'ECONNREFUSED' });
  const store: Store = {
    ...f.store,
    transact: (work) => (isAway ? Promise.reject(away) : f.store.transact(work)),
  };
  const id = await arrive();
  const running = f.start({ store });
  try {
    await until(
      async () => {
        running.nudge();
        return count('forwarding_task where id = $1 and tries = 0', [id]);
      },
      (found) => found === 1,
    );
    for (let i = 0; i < 10; i += 1) {
      running.nudge();
      await new Promise((resolve) => setTimeout(resolve, 10));
    }
    isAway = false;
    running.nudge();
    assert.is((await f.attempt(id)).status, 'queued');
  } finally {
    await running.stop();
  }
});

test('stopped in the middle, the rest waits for the next start', async () => {
  const before = await count('forwarding_attempt');
  await Promise.all(Array.from({ length: 40 }, () => arrive()));
  const first = f.start();
  await until(
    () => count('forwarding_attempt'),
    (attempts) => attempts > before,
  );
  await first.stop();
  const second = f.start();
  await untilNone();
  await second.stop();
  assert.is(await count('forwarding_attempt'), before + 40);
});

test('tenants take turns, and mail that arrives goes before a replay', async () => {
  const others = Array.from({ length: 40 }, () => newId());
  const add = (tenantId: string, tasks: number, about: { replayId?: string; sinceMs: number }) =>
    f.store.pool.query(
      `insert into forwarding_task (tenant_id, id, received_email_id, rule_id, recipient, replay_id,
         created_at, due_at)
       select $1, gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 'x@acme.test', $3, now(),
         now() - $4 * interval '1 millisecond' from generate_series(1, $2)`,
      [tenantId, tasks, about.replayId ?? null, about.sinceMs],
    );
  await add(f.tenantId, 600, { sinceMs: 60_000, replayId: newId() });
  await add(f.tenantId, 20, { sinceMs: 1_000 });
  for (const tenantId of others) await add(tenantId, 2, { sinceMs: 500 });
  const running = [f.start(), f.start()];
  await untilNone();
  await Promise.all(running.map((one) => one.stop()));
  const { rows } = await f.store.pool.query<{ tenant_id: string; is_replay: boolean }>(
    `select tenant_id, replay_id is not null as is_replay from forwarding_attempt
     where recipient = 'x@acme.test' order by created_at`,
  );
  assert.is(rows.length, 700, 'each once');
  const lastOf = (is: (row: (typeof rows)[0]) => boolean): number => rows.findLastIndex(is);
  assert.ok(lastOf(({ tenant_id: id }) => id !== f.tenantId) < 300, 'the others wait for a turn');
  assert.ok(lastOf((row) => row.tenant_id === f.tenantId && !row.is_replay) < 300, 'what arrived');
});

test('a task of later waits for its time', async () => {
  const id = await arrive();
  await f.store.pool.query(
    `update forwarding_task set due_at = now() + interval '700 milliseconds' where id = $1`,
    [id],
  );
  const running = f.start();
  try {
    const { id: done } = await f.attempt(id);
    assert.is(done, id);
    const { rows } = await f.store.pool.query<{ early: boolean }>(
      `select a.created_at < r.created_at + interval '500 milliseconds' as early
       from forwarding_attempt a join received_email r on r.id = a.received_email_id where a.id = $1`,
      [id],
    );
    assert.is(rows[0]?.early, false);
  } finally {
    await running.stop();
  }
});

test('a large message is written in pieces and stays as it was', async () => {
  const body = `${'Zeilen 0123456789 '.repeat(4)}\r\n`.repeat(200_000).slice(0, 12_000_000);
  const text = message({ headers: ['X-Serial: large'], body });
  const id = await f.arrive(route, text);
  let largest = 0;
  const blobs: BlobStore = {
    ...openDiskBlobs('/nonexistent'),
    ...f.blobs,
    write: (key, chunks) =>
      f.blobs.write(
        key,
        (async function* () {
          for await (const chunk of chunks) {
            largest = Math.max(largest, chunk.length);
            yield chunk;
          }
        })(),
      ),
  };
  const running = f.start({ blobs });
  try {
    const { email_id: emailId, status } = await f.attempt(id);
    assert.is(status, 'queued');
    const { raw } = await f.outbound(emailId);
    const hash = (bytes: Buffer | string): string =>
      createHash('sha256').update(bytes).digest('hex');
    assert.is(hash(raw.subarray(raw.length - Buffer.byteLength(text))), hash(text));
    assert.ok(largest > 0 && largest <= 256 * 1024, `${largest} bytes at a time`);
  } finally {
    await running.stop();
  }
});

test('25 destinations leave as one email', async () => {
  const destinations = Array.from({ length: 25 }, (_, index) => `d${index}@far${index % 3}.test`);
  const many = await f.route('many.test', { destinations });
  const id = await f.arrive(many, message({ headers: ['X-Serial: many'] }));
  const running = f.start();
  try {
    const { email_id: emailId, destinations: recorded } = await f.attempt(id);
    assert.equal(recorded, destinations);
    const { states, lanes, to_given: to } = await f.outbound(emailId);
    assert.equal(to, destinations);
    assert.is(states.length, 25);
    assert.is(new Set(lanes).size, 3);
  } finally {
    await running.stop();
  }
});

test.run();
