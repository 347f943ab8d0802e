// What is recorded of readers, on a real database: what an email shows, what its timeline and webhooks are told, what a
// flood leaves behind, and what becomes of it while the database is away.
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createLogger } from '../../src/log.ts';
import {
  ENGAGEMENT_FACTS_MAX,
  ENGAGEMENTS_MAX,
  recordEngagements,
  type Engagement,
} from '../../src/queue/engagement.ts';
import { newId } from '../../src/store/id.ts';
import {
  createEngagementRecorder,
  type EngagementRecorder,
  type Sighting,
} from '../../src/tracking/recorder.ts';
import { until } from '../support/app.ts';
import { adminUrl } from '../support/postgres.ts';
import { openQueue, recipients, type Bench } from '../support/queue.ts';

const test = suite('recorder');
let bench: Bench;
let recorder: EngagementRecorder;
let clock = Date.parse('2026-05-06T12:00:00Z');
let told = 0;
const said: string[] = [];

const start = (): EngagementRecorder =>
  createEngagementRecorder({
    store: bench.store,
    log: createLogger({ level: 'warn', name: 'test', write: (line) => said.push(line) }),
    onTold: () => {
      told += 1;
    },
    now: () => clock,
  });

test.before(async () => {
  bench = await openQueue();
  await bench.store.pool.query(
    `insert into webhook (tenant_id, id, endpoint, events, status, secret_sealed, created_at, updated_at)
     values ($1, $2, 'https://x.test', '{email.opened,email.clicked}', 'enabled', '', now(), now())`,
    [bench.tenantId, newId()],
  );
});
test.before.each(() => {
  recorder = start();
  said.splice(0);
});
test.after.each(() => recorder.stop());
test.after(() => bench.stop());

const all = async <T extends object>(text: string, ...values: unknown[]): Promise<T[]> =>
  (await bench.store.pool.query<T>(text, values)).rows;

async function makeEmail(shown = 'delivered', count = 1): Promise<string> {
  const [id] = await bench.enqueue(1, { deliveries: recipients(count) });
  await all(`update email set last_event = $2 where id = $1`, id, shown);
  return id!;
}

const engagement = (emailId: string, about: Partial<Engagement> = {}): Engagement => ({
  id: newId(),
  tenantId: bench.tenantId,
  emailId,
  kind: 'opened',
  at: new Date('2026-05-06T12:00:00Z'),
  link: null,
  remoteAddress: '192.0.2.1',
  userAgent: 'Firefox',
  suspect: null,
  isOfCrowd: false,
  ...about,
});
const click = (emailId: string, about: Partial<Engagement> = {}): Engagement =>
  engagement(emailId, { kind: 'clicked', link: 'https://x.example/', ...about });
const sighting = (emailId: string, about: Partial<Sighting> = {}): Sighting => ({
  tenantId: bench.tenantId,
  emailId,
  kind: 'clicked',
  link: 'https://x.example/',
  address: '192.0.2.1',
  userAgent: 'Firefox',
  suspect: null,
  ...about,
});
const rowsOf = (id: string) =>
  all<{ kind: string; link: string | null; suspect: string | null }>(
    'select kind, link, suspect from engagement where email_id = $1 order by id',
    id,
  );
const shownOf = async (id: string): Promise<string> =>
  (await all<{ shown: string }>('select last_event as shown from email where id = $1', id))[0]!
    .shown;

test('what an email shows goes from sent and delivered to opened to clicked, and never back', async () => {
  for (const [before, opened, clicked] of [
    ['sent', 'opened', 'clicked'],
    ['delivered', 'opened', 'clicked'],
    ['opened', 'opened', 'clicked'],
    ['clicked', 'clicked', 'clicked'],
    ['complained', 'complained', 'complained'],
    ['bounced', 'bounced', 'bounced'],
    ['delivery_delayed', 'delivery_delayed', 'delivery_delayed'],
    ['failed', 'failed', 'failed'],
    ['suppressed', 'suppressed', 'suppressed'],
    ['canceled', 'canceled', 'canceled'],
  ] as const) {
    const ids = [
      await makeEmail(before),
      await makeEmail(before),
      await makeEmail(before),
    ] as const;
    await recordEngagements(bench.store, [
      engagement(ids[0]),
      click(ids[1]),
      click(ids[2]),
      engagement(ids[2]),
    ]);
    assert.equal(await Promise.all(ids.map(shownOf)), [opened, clicked, clicked], before);
  }
});

test('machines change nothing that is shown and are told to nobody', async () => {
  const id = await makeEmail();
  await all('delete from outbox');
  for (const suspect of ['scanner', 'prefetch', 'head', 'burst'] as const) {
    assert.equal(
      await recordEngagements(bench.store, [engagement(id, { suspect }), click(id, { suspect })]),
      { told: 0 },
    );
  }
  assert.is(await shownOf(id), 'delivered');
  assert.equal(await all('select id from outbox'), []);
  assert.is((await rowsOf(id)).length, 8);
  assert.equal(await recordEngagements(bench.store, [engagement(id, { suspect: 'proxy' })]), {
    told: 1,
  });
  assert.is(await shownOf(id), 'opened');
});

test('webhooks are told once, however often it is written', async () => {
  const id = await makeEmail();
  await all('delete from outbox');
  const both = [engagement(id), click(id)];
  assert.equal(await recordEngagements(bench.store, both), { told: 2 });
  assert.equal(await recordEngagements(bench.store, both), { told: 0 });
  const who = {
    ipAddress: '192.0.2.1',
    timestamp: '2026-05-06T12:00:00.000Z',
    userAgent: 'Firefox',
  };
  assert.equal(await all('select type, subject_id, detail from outbox order by type'), [
    {
      type: 'email.clicked',
      subject_id: id,
      detail: { click: { link: 'https://x.example/', ...who } },
    },
    { type: 'email.opened', subject_id: id, detail: { open: who } },
  ]);
  const facts = await all(
    `select kind, at = '2026-05-06T12:00:00Z' as "isThen", detail from timeline
     where email_id = $1 and kind <> 'accepted' order by kind`,
    id,
  );
  assert.equal(facts, [
    {
      kind: 'clicked',
      isThen: true,
      detail: { link: 'https://x.example/', ip_address: '192.0.2.1', user_agent: 'Firefox' },
    },
    { kind: 'opened', isThen: true, detail: { ip_address: '192.0.2.1', user_agent: 'Firefox' } },
  ]);
});

test('an email that is gone, or of another tenant, is left out', async () => {
  const id = await makeEmail();
  const foreign = click(id, { tenantId: newId() });
  assert.equal(await recordEngagements(bench.store, [click(newId()), foreign]), { told: 0 });
  assert.equal(await rowsOf(id), []);
  assert.equal(await recordEngagements(bench.store, []), { told: 0 });
});

test('an email keeps so many of a kind, and machines take nobody s place', async () => {
  const id = await makeEmail();
  const many = (about: Partial<Engagement>, count: number): Engagement[] =>
    Array.from({ length: count }, () => click(id, about));
  await recordEngagements(bench.store, many({ suspect: 'scanner' }, ENGAGEMENTS_MAX + 200));
  await recordEngagements(bench.store, many({ suspect: 'scanner' }, 10));
  assert.is((await rowsOf(id)).length, ENGAGEMENTS_MAX);
  assert.equal(await recordEngagements(bench.store, [click(id), engagement(id)]), { told: 2 });
  assert.is((await rowsOf(id)).length, ENGAGEMENTS_MAX + 2);
  const [facts] = await all<{ count: number }>(
    `select count(*)::int as count from timeline where email_id = $1 and kind = 'clicked'`,
    id,
  );
  assert.is(facts?.count, ENGAGEMENT_FACTS_MAX + 1);
});

test('a client that repeats itself is noted once in five seconds', async () => {
  const id = await makeEmail();
  for (let round = 0; round < 100_000; round++) recorder.note(sighting(id));
  recorder.note(sighting(id, { address: '192.0.2.2' }));
  clock += 5_000;
  recorder.note(sighting(id));
  await recorder.stop();
  assert.is((await rowsOf(id)).length, 3);
  assert.is(told > 0, true);
});

test('three links within a second are a machine s: one client s, or anybody s where there is one recipient', async () => {
  const links = [1, 2, 3].map((number) => `https://x.example/${number}`);
  const follow = async (
    count: number,
    {
      addresses,
      pauseMs = 0,
    }: { readonly addresses: readonly string[]; readonly pauseMs?: number },
  ): Promise<(string | null)[]> => {
    const id = await makeEmail('delivered', count);
    for (const [index, link] of links.entries()) {
      recorder.note(sighting(id, { link, address: addresses[index % addresses.length]! }));
      clock += pauseMs;
    }
    await recorder.stop();
    recorder = start();
    return (await rowsOf(id)).map(({ suspect }) => suspect);
  };
  const one = ['192.0.2.1'];
  const several = ['192.0.2.1', '192.0.2.2', '192.0.2.3'];
  const burst = ['burst', 'burst', 'burst'];
  const nobody = [null, null, null];
  assert.equal(await follow(1, { addresses: one }), burst);
  assert.equal(await follow(2, { addresses: one }), burst);
  assert.equal(await follow(1, { addresses: several }), burst);
  assert.equal(await follow(2, { addresses: several }), nobody);
  assert.equal(await follow(1, { addresses: one, pauseMs: 600 }), nobody);
  // The same link three times is a person who is in a hurry.
  const id = await makeEmail();
  for (const userAgent of ['a', 'b', 'c']) recorder.note(sighting(id, { userAgent }));
  await recorder.stop();
  assert.equal(
    (await rowsOf(id)).map(({ suspect }) => suspect),
    nobody,
  );
});

test('while the database is away entries wait; when it is back they are written, and none twice', async () => {
  const ids = [await makeEmail(), await makeEmail()] as const;
  const name = new URL(bench.url).pathname.slice(1);
  const admin = new Client({ connectionString: await adminUrl() });
  await admin.connect();
  try {
    await admin.query(`alter database "${name}" allow_connections false`);
    await admin.query('select pg_terminate_backend(pid) from pg_stat_activity where datname = $1', [
      name,
    ]);
    recorder.note(sighting(ids[0], { kind: 'opened', link: null }));
    await until(
      () =>
        bench.store.pool.query('select 1').then(
          () => false,
          () => true,
        ),
      (isAway) => isAway,
    );
    recorder.note(sighting(ids[1], { kind: 'opened', link: null }));
  } finally {
    await admin.query(`alter database "${name}" allow_connections true`);
    await admin.end();
  }
  await until(
    async () => {
      clock += 1_000;
      return (await Promise.all(ids.map(rowsOf))).flat().length;
    },
    (count) => count === 2,
  );
  assert.equal(
    said.filter((line) => line.includes('lost')),
    [],
  );
});

test('what is too much is lost, and the log says how much', async () => {
  for (let number = 0; number < 11_000; number++) {
    recorder.note(sighting(newId(), { kind: 'opened', link: null }));
  }
  await recorder.stop();
  assert.match(said.join(''), /"engagements":1000,.*lost/);
});

test('who floods one email takes no room from the others', async () => {
  const [flooded, other] = [await makeEmail(), await makeEmail()];
  const open = { kind: 'opened', link: null } as const;
  recorder.note(sighting(other, open));
  for (let number = 0; number < 11_000; number++) {
    recorder.note(sighting(flooded, { ...open, userAgent: `agent ${number}` }));
  }
  recorder.note(sighting(flooded, { ...open, suspect: 'scanner' }));
  await recorder.stop();
  assert.equal(said, []);
  assert.equal(
    [(await rowsOf(other)).length, (await rowsOf(flooded)).length],
    [1, ENGAGEMENTS_MAX + 1],
  );
});

test('a clock that is set back holds nothing up', async () => {
  const id = await makeEmail();
  const { now } = Date;
  let backMs = 0;
  Date.now = () => now() - backMs;
  const own = createEngagementRecorder({
    store: bench.store,
    log: createLogger({ level: 'warn', name: 'test', write: (line) => said.push(line) }),
    onTold: () => undefined,
  });
  try {
    own.note(sighting(id));
    backMs = 3_600_000;
    await until(
      () => rowsOf(id),
      (rows) => rows.length === 1,
    );
  } finally {
    Date.now = now;
    await own.stop();
  }
});

test('a lock that is held too long costs a wait, and nothing is lost', async () => {
  const id = await makeEmail();
  const name = new URL(bench.url).pathname.slice(1);
  await all(`alter database "${name}" set lock_timeout = '100ms'`);
  const holder = new Client({ connectionString: bench.url });
  await holder.connect();
  const isHeldUp = async (): Promise<boolean> => {
    const text = `select 1 from pg_stat_activity where datname = $1 and wait_event_type = 'Lock'`;
    return (await all(text, name).catch(() => [])).length > 0; // its connection may be gone as well
  };
  try {
    await holder.query('begin');
    await holder.query('select 1 from email where id = $1 for update', [id]);
    // Those of before have no such limit.
    await holder.query(
      `select pg_terminate_backend(pid) from pg_stat_activity
       where datname = $1 and pid <> pg_backend_pid()`,
      [name],
    );
    recorder.note(sighting(id, { kind: 'opened', link: null }));
    await until(
      () => {
        clock += 1_000; // the first may have met a connection that is gone
        return isHeldUp();
      },
      (isSo) => isSo,
    );
    await until(isHeldUp, (isSo) => !isSo);
    await holder.query('rollback');
  } finally {
    await holder.end();
    await all(`alter database "${name}" reset lock_timeout`);
  }
  await until(
    async () => {
      clock += 1_000;
      return (await rowsOf(id)).length;
    },
    (count) => count === 1,
  );
  assert.equal(said, []);
});

test('what was noted is forgotten, whatever it was', async () => {
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc') as () => void;
  const heldMb = (): number => {
    collect();
    return process.memoryUsage().heapUsed / 1_000_000;
  };
  const before = heldMb();
  for (let number = 0; number < 12_000; number++) {
    const link = `https://x.example/${`${number} `.repeat(300)}`;
    recorder.note(sighting(newId(), { link, address: `192.0.2.${number % 250}` }));
  }
  clock += 60_000;
  recorder.note(sighting(newId()));
  await recorder.stop();
  assert.ok(heldMb() - before < 10, 'more than 10 MB are held');
});

test.run();
