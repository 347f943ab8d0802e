// What the operator's file may say; received mail that somebody still wants; what readers were; rows of other kinds; and a
// job process that is killed in the middle. On a real Postgres.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { fileURLToPath } from 'node:url';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { recordEngagements } from '../../src/queue/engagement.ts';
import { createReplayVerbs } from '../../src/receiving/replay.ts';
import { findReceived, readReceivedRaw } from '../../src/receiving/read-received.ts';
import { runReplays } from '../../src/receiving/replay-turns.ts';
import { readRetentionPolicy, retentionKinds } from '../../src/retention/policy.ts';
import { createRetention, earlierNow, type RetentionOptions } from '../../src/retention/retain.ts';
import { withBackupLock } from '../../src/backup/backup.ts';
import { newId } from '../../src/store/id.ts';
import { readTrace } from '../../src/timeline/trace.ts';
import { addForward, addReceived } from '../support/forwarded.ts';
import { LOADER } from '../support/loader.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';
import { DAY_MS, memoryBlobs, runRetention, shippedRetention } from '../support/retention.ts';

const test = suite<{ q: Bench }>('retention');
test.before(async (context) => {
  context.q = await openQueue();
});
test.before.each(async ({ q }) => {
  await q.store.pool.query(
    `truncate email, email_content, delivery, attempt, timeline, engagement, forwarding_attempt, forwarding_task,
       received_email, received_content, receiving_replay, metric_removed`,
  );
});
test.after(({ q }) => q.stop());

const LIFETIME = { messageLifetimeMs: 4 * DAY_MS };
const read = (file: unknown) => readRetentionPolicy(file, LIFETIME);
const TENANT = '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70';

test('the shipped file keeps all mail, and what it says holds where nobody says otherwise', () => {
  const [shipped, empty] = [read(shippedRetention()), read({})];
  for (const kind of [...retentionKinds, 'dead_letters'] as const) {
    assert.is(shipped.keptMs(TENANT, kind), empty.keptMs(TENANT, kind), kind);
  }
  for (const kind of ['emails', 'email_bodies', 'received', 'received_bodies'] as const) {
    assert.is(shipped.keptMs(TENANT, kind), null, kind);
  }
  assert.is(shipped.keptMs(TENANT, 'request_logs'), 30 * DAY_MS);
});

test('a tenant has its own durations, and for the rest those of all', () => {
  const policy = read({
    default: { emails: '365d', request_logs: '7d' },
    tenants: { [TENANT.toUpperCase()]: { emails: null, received: '720h' } },
  });
  assert.is(policy.keptMs(TENANT, 'emails'), null);
  assert.is(policy.keptMs(TENANT, 'received'), 30 * DAY_MS);
  assert.is(policy.keptMs(TENANT, 'request_logs'), 7 * DAY_MS);
  assert.is(policy.keptMs(newId(), 'emails'), 365 * DAY_MS);
  assert.equal(policy.tenants, [TENANT]);
});

const BAD: readonly (readonly [unknown, RegExp])[] = [
  [[], /^the file: must be an object$/],
  [{ defaults: {} }, /^the file: "defaults" is not known; it may hold default, tenants$/],
  [
    { default: { mails: '30d' } },
    /^default: "mails" is not known; it may hold email_bodies, emails/,
  ],
  [{ default: { received: '23h' } }, /^default\.received: must be at least 1d/],
  [{ default: { received: '30 days' } }, /^default\.received: must be a duration/],
  [{ default: { received: 30 } }, /^default\.received: must be a duration/],
  [{ default: { emails: '10d' } }, /^default\.emails: must be at least 11d: the lifetime/],
  [{ default: { automation_runs: '31d' } }, /^default\.automation_runs: must be at least 32d/],
  [{ tenants: [] }, /^tenants: must be an object$/],
  [{ tenants: { acme: {} } }, /^tenants\["acme"\]: a tenant is named by its id/],
  [
    { tenants: { [TENANT]: { emails: '1d' } } },
    /^tenants\["019e.*"\]\.emails: must be at least 11d/,
  ],
  [{ tenants: { [TENANT]: { all: '1d' } } }, /^tenants\["019e.*"\]: "all" is not known/],
  [{ tenants: { [TENANT]: {}, [TENANT.toUpperCase()]: {} } }, /: the tenant is there twice$/],
];
for (const [file, expected] of BAD) {
  test(`refused: ${JSON.stringify(file)}`, () => {
    assert.throws(
      () => read(file),
      (error: Error) => expected.test(error.message),
    );
  });
}

test('a lifetime that is longer keeps emails for longer', () => {
  const policy = { messageLifetimeMs: 10 * DAY_MS };
  assert.throws(() => readRetentionPolicy({ default: { emails: '16d' } }, policy), /at least 17d/);
  assert.ok(readRetentionPolicy({ default: { emails: '17d' } }, policy));
});

const countOf = (rows: readonly { readonly count: number }[]): number =>
  rows.reduce((sum, { count }) => sum + count, 0);

/** Removes received mail, records or bodies, that is a day old; how much. */
async function removeReceived(q: Bench, kind: 'received' | 'received_bodies'): Promise<number> {
  const about = { keep: { [kind]: '1d' }, inDays: 2 };
  const dry = await runRetention(q.store, { ...about, isDry: true });
  const done = await runRetention(q.store, about);
  assert.is(countOf(dry.rows), countOf(done.rows));
  return countOf(done.rows);
}

const replays = (q: Bench) =>
  createReplayVerbs({ store: q.store, now: () => new Date(), onReplay: () => undefined });

const WANTED: Readonly<Record<string, (q: Bench, id: string) => Promise<() => Promise<unknown>>>> =
  {
    async 'not read yet'(q, id) {
      await q.store.pool.query('update received_email set is_read = false where id = $1', [id]);
      return () => q.store.pool.query('update received_email set is_read = true');
    },
    async 'to be forwarded'(q, id) {
      await q.store.pool.query(
        `insert into forwarding_task (tenant_id, id, received_email_id, rule_id, recipient, created_at, due_at)
       values ($1, $2, $3, $2, 'a@b.test', now(), now())`,
        [q.tenantId, newId(), id],
      );
      return () => q.store.pool.query('truncate forwarding_task');
    },
    async 'its author is still to hear of a failure'(q, id) {
      const destinations = [{ recipient: 'x@dest.test', state: 'deferred' }];
      await addForward(q, { receivedId: id, ruleId: newId(), destinations });
      return () => q.store.pool.query('update forwarding_attempt set is_report_open = false');
    },
    async 'named by a replay'(q, id) {
      const verbs = replays(q);
      await verbs.create({ tenantId: q.tenantId } as never, { ids: [id] });
      return () => runReplays(q.store, () => undefined);
    },
    async 'in the range of a replay'(q) {
      const verbs = replays(q);
      const day = (ms: number) => new Date(Date.now() + ms).toISOString();
      const range = { start_date: day(-DAY_MS), end_date: day(DAY_MS) };
      await verbs.create({ tenantId: q.tenantId } as never, range);
      return () => runReplays(q.store, () => undefined);
    },
  };
for (const [name, make] of Object.entries(WANTED)) {
  test(`received mail is kept while it is wanted: ${name}`, async ({ q }) => {
    const id = await addReceived(q, { createdAt: new Date(Date.now() - 1_000) });
    const done = await make(q, id);
    assert.is(await removeReceived(q, 'received_bodies'), 0);
    assert.is(await removeReceived(q, 'received'), 0);
    await done();
    assert.is(await removeReceived(q, 'received_bodies'), 1);
    const found = (await findReceived(q.store, q.tenantId, id))!;
    assert.equal([found.content.html, found.content.text], [null, null]);
    assert.ok(found.contentRemovedAt instanceof Date);
    const reading = { store: q.store, blobs: memoryBlobs() };
    assert.is(await readReceivedRaw(reading, q.tenantId, id), null);
    assert.is(await removeReceived(q, 'received'), 1);
    assert.is(await findReceived(q.store, q.tenantId, id), null);
  });
}

test('a large received message takes its blob along, and leaves that of another', async ({ q }) => {
  const blobs = memoryBlobs();
  const [own, shared] = [newId(), newId()];
  const ids = [await addReceived(q), await addReceived(q)];
  for (const key of [own, shared]) await blobs.put(key, Buffer.from('x'));
  await q.store.pool.query(
    `update received_content set raw = null, blob_key = $2 where email_id = $1`,
    [ids[0], own],
  );
  // Whoever still has a row for it keeps it.
  const [sent] = await q.enqueue(1, { raw: null, blobKey: shared });
  await q.store.pool.query(
    `update received_content set raw = null, blob_key = $2 where email_id = $1`,
    [ids[1], shared],
  );
  await runRetention(q.store, { keep: { received: '1d' }, inDays: 2, blobs });
  assert.equal([...blobs.kept.keys()], [shared]);
  assert.ok(sent);
});

test('of readers it is forgotten who they were, not that they read', async ({ q }) => {
  const [emailId] = await q.enqueue(1);
  await q.store.pool.query(`update email set last_event = 'delivered'`);
  const done = (ms: number, link: string | null) => ({
    id: newId(),
    tenantId: q.tenantId,
    emailId: emailId!,
    kind: link === null ? ('opened' as const) : ('clicked' as const),
    at: new Date(Date.now() - ms),
    link,
    remoteAddress: '192.0.2.1',
    userAgent: 'Reader/1.0',
    suspect: null,
    isOfCrowd: false,
  });
  await recordEngagements(q.store, [
    done(40 * DAY_MS, null),
    done(39 * DAY_MS, 'https://a.test/'),
    done(0, null),
  ]);
  const about = { keep: { engagement: '30d' }, inDays: 0 };
  const dry = await runRetention(q.store, { ...about, isDry: true });
  const run = await runRetention(q.store, about);
  assert.equal([countOf(dry.rows), countOf(run.rows)], [2, 2]);
  assert.is(countOf((await runRetention(q.store, about)).rows), 0);
  const { rows } = await q.store.pool.query(
    `select kind, link, remote_address as address, user_agent as agent from engagement order by at`,
  );
  assert.equal(rows, [
    { kind: 'opened', link: null, address: null, agent: null },
    { kind: 'clicked', link: 'https://a.test/', address: null, agent: null },
    { kind: 'opened', link: null, address: '192.0.2.1', agent: 'Reader/1.0' },
  ]);
  const trace = (await readTrace(q.store, q.tenantId, emailId!))!;
  const told = trace.events.filter(({ type }) => type === 'opened' || type === 'clicked');
  assert.equal(
    told.map(({ detail }) => [detail['ip_address'], detail['user_agent'], detail['link'] ?? null]),
    [
      [null, null, null],
      [null, null, 'https://a.test/'],
      ['192.0.2.1', 'Reader/1.0', null],
    ],
  );
});

test('recipients of a broadcast go when it is over, imports when they have ended, forwards when nobody waits', async ({
  q,
}) => {
  const { pool } = q.store;
  const broadcast = async (status: string, cursor: string | null): Promise<string> => {
    const id = newId();
    await pool.query(
      `insert into broadcast (tenant_id, id, name, status, cursor_id, sent_at, created_at, updated_at)
       values ($1, $2, 'b', $3, $4, now(), now(), now())`,
      [q.tenantId, id, status, cursor],
    );
    await pool.query(
      `insert into broadcast_recipient (tenant_id, broadcast_id, contact_id, address)
       select $1, $2, gen_random_uuid(), 'a' || n from generate_series(1, 2100) n`,
      [q.tenantId, id],
    );
    return id;
  };
  await broadcast('sent', newId());
  await broadcast('canceled', null);
  const kept = [await broadcast('queued', newId()), await broadcast('canceled', newId())];
  for (const status of ['completed', 'failed', 'in_progress']) {
    await pool.query(
      `insert into contact_import (tenant_id, id, status, on_conflict, size_bytes, created_at, completed_at)
       values ($1, $2, $3, 'skip', 1, now(), case when $3 <> 'in_progress' then now() end)`,
      [q.tenantId, newId(), status],
    );
  }
  const receivedId = await addReceived(q);
  const destinations = [{ recipient: 'x@dest.test', state: 'deferred' }];
  for (let index = 0; index < 2; index += 1) {
    await addForward(q, { receivedId, ruleId: newId(), destinations });
  }
  await pool.query(
    `update forwarding_attempt set is_report_open = false
     where id = (select id from forwarding_attempt limit 1)`,
  );
  const keep = { broadcast_recipients: '30d', imports: '30d', forwarding: '30d' };
  assert.equal((await runRetention(q.store, { keep, inDays: 29 })).rows, []);
  const dry = await runRetention(q.store, { keep, inDays: 31, isDry: true });
  const run = await runRetention(q.store, { keep, inDays: 31 });
  const shown = run.rows.map(({ kind, count }) => [kind, count]);
  assert.equal(shown, [
    ['broadcast_recipients', 4_200],
    ['imports', 2],
    ['forwarding', 1],
  ]);
  assert.equal(
    dry.rows.map(({ kind, count }) => [kind, count]),
    shown,
  );
  const { rows } = await pool.query<{ id: string }>(
    'select distinct broadcast_id as id from broadcast_recipient order by 1',
  );
  assert.equal(
    rows.map(({ id }) => id),
    kept.toSorted(),
  );
});

test('a replay that is asked for between the two questions leaves the emails for later', async ({
  q,
}) => {
  const id = await addReceived(q, { createdAt: new Date(Date.now() - 1_000) });
  const ask = () =>
    replays(q).create({ tenantId: q.tenantId } as never, { ids: [id], kinds: ['forward'] });
  const store: Bench['store'] = {
    ...q.store,
    transact: (work) =>
      q.store.transact((client) =>
        work(
          new Proxy(client, {
            get: (at, name) =>
              name !== 'query'
                ? (Reflect.get(at, name) as unknown)
                : async (query: { readonly name?: string }, values?: unknown[]) => {
                    if (query.name === 'count-wanted-received') await ask();
                    return at.query(query as never, values);
                  },
          }),
        ),
      ),
  };
  const { rows } = await runRetention(store, { keep: { received: '1d' }, inDays: 2 });
  assert.equal(rows, []);
  await runReplays(q.store, () => undefined);
  assert.is(await removeReceived(q, 'received'), 1);
});

test('a tenant that always has something old, or whose step fails, keeps no other from its turn', async ({
  q,
}) => {
  const tenants = Array.from({ length: 6 }, () => newId()).toSorted();
  for (const id of tenants) {
    await q.store.pool.query(`insert into tenant (id, name) values ($1, $2)`, [id, `t${id}`]);
    await q.enqueue(1, { tenantId: id });
  }
  await q.store.pool.query(`update email set last_event = 'failed'`);
  await q.store.pool.query(`update delivery set state = 'failed'`);
  const last = tenants.at(-1)!;
  const settled = async (tenantId: string) =>
    q.store.pool.query(`update delivery set state = 'delivered' where tenant_id = $1`, [tenantId]);
  await settled(last);
  const about = { keep: { emails: '30d' }, inDays: 31 };
  const places: NonNullable<RetentionOptions['places']> = new Map();
  let removed = 0;
  for (let run = 0; run < 40 && removed === 0; run += 1) {
    removed = countOf((await runRetention(q.store, { ...about, places, kindMaxMs: 1 })).rows);
  }
  assert.is(removed, 1);

  await settled(tenants[4]!);
  let tries = 0;
  const store: Bench['store'] = {
    ...q.store,
    transact: (work) => {
      tries += 1;
      if (tries <= 3) throw new Error('it takes too long');
      return q.store.transact(work);
    },
  };
  const failure = await runRetention(store, { ...about, tenantId: tenants[4]! }).then(
    () => null,
    (error: Error) => error.message,
  );
  assert.is(failure, 'it takes too long');
  tries = 1;
  const { rows } = await runRetention(store, { ...about, tenantId: tenants[4]! });
  assert.is(countOf(rows), 1, 'smaller it works');
});

test('the permanent work waits: after the start, an edit, a clock set forward, during a backup', async ({
  q,
}) => {
  await q.enqueue(1);
  await q.store.pool.query(`update delivery set state = 'delivered'`);
  await q.store.pool.query(`update email set last_event = 'delivered'`);
  let policy = read({ default: { emails: '300d' } });
  let elapsedMs = 0;
  let aheadMs = 0;
  const retention = createRetention({
    store: q.store,
    blobs: memoryBlobs(),
    log: silent,
    policy: () => policy,
    now: () => new Date(Date.now() + elapsedMs + aheadMs),
    elapsedMs: () => elapsedMs,
  });
  const run = async (): Promise<number> => {
    await retention.run(new AbortController().signal);
    const { rows } = await q.store.pool.query('select 1 from email');
    return rows.length;
  };
  assert.is(await run(), 1);
  elapsedMs = 31 * DAY_MS;
  assert.is(await run(), 1);
  policy = read({ default: { emails: '30d' } });
  assert.is(await run(), 1, 'edited');
  elapsedMs += 3_599_000;
  assert.is(await run(), 1, 'nearly an hour after');
  aheadMs = 300 * DAY_MS;
  assert.is(await run(), 1, 'set forward');
  elapsedMs += DAY_MS - 1_000;
  assert.is(await run(), 1, 'nearly a day after');
  elapsedMs += 2_000;
  await withBackupLock(q.url, async () => assert.is(await run(), 1, 'backed up'));
  assert.is(await run(), 0);
});

test('a clock that is ahead of the database is not believed', async ({ q }) => {
  const real = Date.now;
  Date.now = () => real() + 400 * DAY_MS;
  try {
    assert.ok((await earlierNow(q.store.pool)()).getTime() < real() + DAY_MS);
  } finally {
    Date.now = real;
  }
});

test('killed in the middle it has removed whole emails or nothing of them, and the next run ends it', async ({
  q,
}) => {
  for (let index = 0; index < 3; index += 1) await q.enqueue(1_000);
  await q.store.pool.query(`update delivery set state = 'delivered'`);
  await q.store.pool.query(`update email set last_event = 'delivered'`);
  const [waiting] = await q.enqueue(1);
  const entry = fileURLToPath(new URL('../support/retention-process.ts', import.meta.url));
  const child = spawn(process.execPath, [...LOADER, entry, q.url, '31'], {
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  await once(child.stdout, 'data');
  // Somewhere in the steps that follow.
  await new Promise((resolve) => setTimeout(resolve, 60));
  child.kill('SIGKILL');
  await once(child, 'exit');
  const count = async (): Promise<readonly number[]> => {
    const { rows } = await q.store.pool.query<Record<string, number>>(
      `select (select count(*)::int from email) as emails, (select count(*)::int from email_content) as contents,
         (select count(*)::int from delivery) as deliveries, (select count(distinct email_id)::int from timeline) as told,
         3001 - (select sum(accepted)::int from metric_removed) as counted`,
    );
    return Object.values(rows[0]!);
  };
  // What the dead one had begun is rolled back by the server when it sees that it is gone.
  for (let tries = 0; tries < 100; tries += 1) {
    const { rows } = await q.store.pool.query(
      `select 1 from pg_stat_activity where datname = current_database() and state like '%transaction%'`,
    );
    if (rows.length === 0) break;
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  const left = await count();
  assert.ok(left[0]! > 1 && left[0]! < 3_001, `${left[0]} left`);
  assert.is(new Set(left).size, 1, `all or nothing of each: ${left.join(' ')}`);
  await runRetention(q.store, { keep: { emails: '30d' }, inDays: 31 });
  assert.equal(await count(), [1, 1, 1, 1, 1]);
  assert.equal(await q.states(), { ready: 1 });
  assert.ok(waiting);
});

test.run();
