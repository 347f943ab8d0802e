// What the doctor sees of the machine, the database and the appliance itself, and what it keeps and tells of it: on a real
// Postgres.
import { randomUUID } from 'node:crypto';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { checkDatabase, judgeDatabase, type DatabaseFacts } from '../../src/doctor/database.ts';
import { bad, info, ok, unknown, type Finding } from '../../src/doctor/finding.ts';
import { keepFindings, readFindings, takeTurn, type Change } from '../../src/doctor/kept.ts';
import { checkClock, checkDisk, judgeSpace } from '../../src/doctor/machine.ts';
import {
  checkBlobStore,
  checkDeadLetters,
  checkOutbox,
  checkQueue,
} from '../../src/doctor/own-state.ts';
import { checkPort25Out } from '../../src/doctor/port25.ts';
import { checkCertificates } from '../../src/doctor/certificates.ts';
import { reportBlocked, reportOpen } from '../../src/queue/egress-state.ts';
import { newId } from '../../src/store/id.ts';
import { issue } from '../support/certificates.ts';
import { openWorld, severitiesOf, HOST, type World } from '../support/doctor.ts';
import { listen, told } from '../support/outbox.ts';
import { openQueue, type Bench } from '../support/queue.ts';

const test = suite('doctor inside');
let q: Bench;
let world: World;
test.before(async () => {
  q = await openQueue();
  world = await openWorld();
});
test.before.each(async () => {
  await q.store.pool.query(
    'truncate outbox, finding, appliance_fact, webhook, worker, delivery, egress, certificate, appliance_process',
  );
});
test.after(async () => {
  await world.stop();
  await q.stop();
});

test('the database that tests use is quick, and not durable', async () => {
  const found = severitiesOf(await checkDatabase(world.at(), q.store.pool));
  assert.is(found['database version'], 'ok');
  assert.is(found['database connections'], 'ok');
  assert.is(found['database vacuum'], 'ok');
  assert.is(found['database durability'], 'error', 'fsync is off in tests');
  assert.is(found['database_table delivery'], 'ok');
});

test('facts of the database: good and bad ones', () => {
  const good: DatabaseFacts = {
    latencyMs: 0.4,
    version: '18.1',
    major: 18,
    used: 10,
    max: 100,
    settings: {
      fsync: 'on',
      full_page_writes: 'on',
      synchronous_commit: 'on',
      autovacuum: 'on',
    },
    age: 150_000_000,
    oldestSnapshotS: 3,
    tables: [{ name: 'delivery', live: 1_000_000, dead: 100_000, vacuumedAt: null }],
  };
  assert.ok(judgeDatabase(good).every(({ severity }) => severity === 'ok'));
  const severity = (change: Partial<DatabaseFacts>): readonly string[] =>
    judgeDatabase({ ...good, ...change }).flatMap((finding) =>
      finding.severity === 'ok' ? [] : [`${finding.subject} ${finding.severity}`],
    );
  assert.equal(severity({ latencyMs: 30 }), ['latency warning']);
  assert.equal(severity({ latencyMs: 300 }), ['latency error']);
  assert.equal(severity({ used: 85 }), ['connections warning']);
  assert.equal(severity({ used: 96 }), ['connections error']);
  assert.equal(severity({ major: 13 }), ['version warning']);
  assert.equal(severity({ age: 1_200_000_000 }), ['vacuum warning']);
  assert.equal(severity({ age: 1_900_000_000 }), ['vacuum error']);
  assert.equal(severity({ oldestSnapshotS: 7_200 }), ['vacuum warning']);
  for (const name of ['fsync', 'full_page_writes', 'synchronous_commit']) {
    const settings = { ...good.settings, [name]: 'off' };
    assert.equal(severity({ settings }), ['durability error'], name);
  }
  assert.equal(severity({ settings: { ...good.settings, autovacuum: 'off' } }), ['vacuum error']);
  const table = { name: 'delivery', live: 1_000_000, dead: 600_000, vacuumedAt: null };
  assert.equal(severity({ tables: [table] }), ['delivery warning']);
  assert.equal(severity({ tables: [{ ...table, dead: 3_000_000 }] }), ['delivery error']);
  const drained = { name: 'outbox', live: 0, dead: 100_000, vacuumedAt: null };
  assert.equal(severity({ tables: [drained] }), [], 'a queue that has just run empty');
  assert.equal(severity({ tables: [{ ...drained, dead: 2_000_000 }] }), ['outbox error']);
});

test('the clock is compared with that of the database, and of processes', async () => {
  const at = (offsetMs: number) =>
    checkClock(world.at({ pool: q.store.pool, now: () => new Date(Date.now() + offsetMs) }));
  assert.equal(severitiesOf(await at(0)), { 'clock database': 'ok' });
  assert.equal(severitiesOf(await at(10_000)), { 'clock database': 'warning' });
  const [behind] = await at(-100_000);
  assert.is(behind?.severity, 'error');
  assert.match(behind!.message, 'behind');
  assert.is((await checkClock(world.at()))[0]?.severity, 'info', 'no database, nothing to compare');
  await q.store.pool.query(
    `insert into appliance_process (id, host, pid, roles, version, started_at, seen_at)
     values ($1, 'fast', 1, '{api}', 'x', now() + interval '1 minute', now()),
       ($2, 'right', 2, '{api}', 'x', now() - interval '1 minute', now())`,
    [newId(), newId()],
  );
  assert.equal(severitiesOf(await at(0)), { 'clock database': 'ok', 'clock fast 1': 'warning' });
});

test('the disk: real, small, without inodes, gone', async () => {
  const [real] = await checkDisk(world.at());
  assert.ok(Number(real?.detail['size_bytes']) > 0);
  const gb = 1_000_000_000;
  const space = { bytes: 100 * gb, freeBytes: 60 * gb, files: 1_000, freeFiles: 900 };
  const severity = (change: object) => judgeSpace('/data', { ...space, ...change }).severity;
  assert.is(severity({}), 'ok');
  assert.is(severity({ freeBytes: 8 * gb }), 'warning');
  assert.is(severity({ bytes: 10 * gb, freeBytes: 1.5 * gb }), 'warning');
  assert.is(severity({ freeBytes: 3 * gb }), 'error');
  assert.is(severity({ freeFiles: 90 }), 'warning');
  assert.is(severity({ freeFiles: 20 }), 'error');
  assert.is(severity({ files: 0, freeFiles: 0 }), 'ok', 'a file system that does not count them');
  const [gone] = await checkDisk(world.at({ dataDir: '/nowhere/at/all' }));
  assert.equal([gone?.severity, gone?.whenLasting], ['unknown', 'error']);
});

test('the queue: workers, what waits, what nobody woke', async () => {
  const look = async () => severitiesOf(await checkQueue(q.store.pool));
  assert.is((await look())['appliance workers'], 'error');
  await q.run();
  await q.enqueue(2);
  assert.equal(await look(), {
    'appliance workers': 'ok',
    'appliance oldest_ready': 'ok',
    'appliance sweep': 'ok',
  });
  await q.store.pool.query(`update worker set heartbeat_at = now() - interval '2 minutes'`);
  await q.run();
  await q.store.pool.query(`update delivery set due_at = now() - interval '20 minutes'`);
  const late = await look();
  assert.is(late['appliance workers'], 'warning', 'one of two is silent');
  assert.is(late['appliance oldest_ready'], 'warning');
  await q.store.pool.query(
    `update delivery set state = 'deferred', due_at = now() - interval '20 minutes'`,
  );
  assert.is((await look())['appliance sweep'], 'error');
});

test('dead letters of the last day, and the outbox', async () => {
  const now = new Date();
  const dead = async () =>
    (await checkDeadLetters(q.store.pool, { now, lifetimeMs: 86_400_000 }))[0]!;
  assert.is((await dead()).severity, 'ok');
  const [id] = await q.enqueue(1);
  await q.store.pool.query(
    `update delivery set state = 'failed', last_cause = 'x', expires_at = now() - interval '1 hour'`,
  );
  const found = await dead();
  assert.is(found.severity, 'warning');
  assert.equal(found.detail, { count: 1, emails: [id] });
  await q.store.pool.query(`update delivery set expires_at = now() - interval '2 days'`);
  assert.is((await dead()).severity, 'ok', 'long ago');

  const outbox = async () => (await checkOutbox(q.store.pool))[0]!.severity;
  assert.is(await outbox(), 'ok');
  const insert = `insert into outbox (tenant_id, id, type, subject_id, detail, at)
    values ($1, $2, 'email.sent', $2, '{}', now() - $3 * interval '1 minute')`;
  await q.store.pool.query(insert, [q.tenantId, newId(), 10]);
  assert.is(await outbox(), 'warning');
  await q.store.pool.query(insert, [q.tenantId, newId(), 100]);
  assert.is(await outbox(), 'error');
});

test('port 25 as the workers know it', async () => {
  const look = async () => (await checkPort25Out(world.at({ pool: q.store.pool })))[0]!;
  assert.is((await look()).severity, 'info', 'no mail has left yet');
  await reportOpen(q.store.pool, 'default');
  assert.is((await look()).severity, 'ok');
  await q.store.pool.query('truncate egress');
  const about = { name: 'default', reason: 'timeouts', silent: [], windowMs: 1 };
  await reportBlocked(q.store.pool, about);
  const blocked = await look();
  assert.is(blocked.severity, 'error');
  assert.match(blocked.message, 'timeouts');
});

test('orders of certificates that fail', async () => {
  const insert = `insert into certificate (name, failures, last_error, not_after)
    values ($1, $2, $3, now() + $4 * interval '1 day')`;
  await q.store.pool.query(insert, ['good.test', 0, null, 60]);
  await q.store.pool.query(insert, ['soon.test', 2, 'no such name', 3]);
  await q.store.pool.query(insert, ['later.test', 2, 'no such name', 40]);
  await q.store.pool.query(insert, ['new.test', 3, 'no such name', null]);
  await q.store.pool.query(insert, ['begun.test', 1, 'no such name', null]);
  const found = severitiesOf(
    await checkCertificates(world.at({ pool: q.store.pool, dataDir: '/nowhere' })),
  );
  assert.equal(found, {
    [`certificate ${HOST}`]: 'info',
    'acme good.test': 'ok',
    'acme soon.test': 'error',
    'acme later.test': 'warning',
    'acme new.test': 'error',
    'acme begun.test': 'warning',
  });
});

test('many names that fail hide no certificate of the host, and one that nobody wants is not heard of', async () => {
  const authority = issue({ isAuthority: true });
  const { cert } = issue({ names: [HOST], issuer: authority, to: 60 });
  await q.store.pool.query(
    `insert into certificate (name, failures, last_error)
     select 'f' || n || '.test', 9, 'no such name' from generate_series(1, 150) n`,
  );
  await q.store.pool.query(
    `insert into certificate (name, failures, last_error, wanted_at, chain)
     values ('gone.test', 99, 'no such name', now() - interval '1 day', null), ($1, 0, null, now() - interval '1 day', $2)`,
    [HOST, cert],
  );
  const ownAuthorities = [authority.cert];
  const found = severitiesOf(
    await checkCertificates(world.at({ pool: q.store.pool, dataDir: '/nowhere', ownAuthorities })),
  );
  assert.is(found[`certificate ${HOST}`], 'ok');
  assert.is(found['acme gone.test'], undefined);
  assert.is(found['acme f1.test'], 'error');
});

test('the blob store that the rows point into', async () => {
  const look = async (mark: string | null) =>
    (await checkBlobStore({ readBlobMark: async () => mark }, q.store.pool))[0]?.severity;
  assert.is(await look('mine'), undefined, 'nothing was stored yet');
  await q.store.pool.query(
    `insert into appliance_fact (name, value) values ('blob_store', 'mine')`,
  );
  assert.is(await look('mine appliance'), 'ok');
  assert.is(await look('other appliance'), 'error');
  assert.is(await look(null), 'error');
});

const about = ['thing', 'one'] as const;
const fine = ok(about, 'It is well.');
const broken = bad('error', about, { message: 'It is broken.', advice: 'Mend it.' });
const lost = unknown(about, { message: 'It says nothing.', advice: 'Wait.' });

async function keep(
  findings: readonly Finding[],
  how: { readonly isMissed?: boolean; readonly name?: string; readonly domainId?: string } = {},
): Promise<readonly string[]> {
  const checked = [
    {
      name: how.name ?? 'check',
      domainId: how.domainId ?? null,
      isMissed: how.isMissed ?? false,
      findings,
    },
  ];
  const changes = await keepFindings(q.store, { checked, at: new Date(), tenantId: q.tenantId });
  return changes.map(words);
}
const words = ({ finding, before, after }: Change): string =>
  `${finding.code} ${finding.subject}: ${before} > ${after}`;

test('a change of severity is told once, in the transaction of the change', async () => {
  await listen(q.store, q.tenantId, ['doctor.finding_changed']);
  assert.equal(await keep([fine]), [], 'a first look at what is well says nothing');
  assert.equal(await keep([broken]), ['thing one: ok > error']);
  const since = (await readFindings(q.store)).findings[0]!.since;
  assert.equal(await keep([{ ...broken, message: 'It is still broken.' }]), []);
  const { findings, counts } = await readFindings(q.store);
  assert.equal(findings[0]!.since, since, 'since then, whatever it says now');
  assert.is(findings[0]!.message, 'It is still broken.');
  assert.is(counts.error, 1);
  assert.equal(await keep([info(about, 'Better.')]), ['thing one: error > info']);
  assert.equal(await keep([broken]), ['thing one: info > error']);
  assert.equal(await keep([]), ['thing one: error > null'], 'it is gone');
  const events = await told(q.store);
  assert.equal(
    events.map(({ detail }) => [detail['previous_severity'], detail['severity']]),
    [
      ['ok', 'error'],
      ['error', 'info'],
      ['info', 'error'],
      ['error', null],
    ],
  );
  assert.is(events[0]!.type, 'doctor.finding_changed');
  assert.equal(
    [events[0]!.tenant_id, events[0]!.detail['code'], events[0]!.detail['advice']],
    [q.tenantId, 'thing', 'Mend it.'],
  );
});

test('nobody else is told', async () => {
  const otherId = newId();
  await q.store.pool.query('insert into tenant (id, name) values ($1, $2)', [otherId, 'second']);
  await listen(q.store, otherId, ['doctor.finding_changed']);
  assert.equal(await keep([broken]), ['thing one: null > error']);
  assert.equal(await told(q.store), []);
});

test('what brings no answer once changes nothing, twice it does', async () => {
  await keep([fine]);
  assert.equal(await keep([lost]), []);
  assert.is((await readFindings(q.store)).findings[0]!.severity, 'ok');
  assert.equal(await keep([fine]), [], 'and it was nothing');
  assert.equal(await keep([lost]), []);
  assert.equal(await keep([lost]), ['thing one: ok > unknown']);
  assert.equal(await keep([lost]), []);
  assert.equal(await keep([{ ...lost, whenLasting: 'error' }]), ['thing one: unknown > error']);
  assert.equal(await keep([fine]), ['thing one: error > ok']);
  await q.store.pool.query('truncate finding');
  assert.equal(await keep([lost]), []);
  assert.equal(await keep([fine]), [], 'never told, so not over either');
  await q.store.pool.query('truncate finding');
  await keep([lost]);
  assert.equal(await keep([lost]), ['thing one: null > unknown']);
});

test('a check that could not be made leaves what it found before', async () => {
  await keep([broken, ok(['thing', 'two'], 'Well.')]);
  const missed = { ...lost, code: 'check', subject: 'check', whenLasting: 'warning' as const };
  assert.equal(await keep([missed], { isMissed: true }), []);
  assert.equal(severitiesOf((await readFindings(q.store)).findings), {
    'thing one': 'error',
    'check check': 'unknown',
    'thing two': 'ok',
  });
  assert.equal(await keep([missed], { isMissed: true }), ['check check: null > warning']);
  assert.equal(await keep([broken]), ['check check: warning > null'], 'and `two` was well');
});

test('findings of a domain go with it', async () => {
  const domainId = newId();
  await q.store.pool.query(
    `insert into sending_domain (tenant_id, id, name, status, region, return_path_label, sending_verified)
     values ($1, $2, 'gone.test', 'verified', 'us-east-1', 'send', true)`,
    [q.tenantId, domainId],
  );
  const about = { name: `domain ${domainId}`, domainId };
  assert.equal(await keep([broken], about), ['thing one: null > error']);
  assert.equal(await keep([], { name: 'another' }), []);
  await q.store.pool.query('delete from sending_domain where id = $1', [domainId]);
  assert.equal(await keep([], { name: 'another' }), ['thing one: error > null']);
});

test('of several processes one gets the turn', async () => {
  const turns = await Promise.all(Array.from({ length: 8 }, () => takeTurn(q.store, 60_000)));
  assert.is(turns.filter((turn) => turn === null).length, 1);
  assert.ok(turns.every((turn) => turn === null || (turn > 0 && turn <= 60_000)));
  await q.store.pool.query(
    `update appliance_fact set value = (now() - interval '2 minutes')::text`,
  );
  assert.is(await takeTurn(q.store, 60_000), null);
  await q.store.pool.query(`update appliance_fact set value = (now() + interval '1 day')::text`);
  assert.is(await takeTurn(q.store, 60_000), null, 'a clock that was set back does not stop it');
});

test('two that keep at the same time tell a change once', async () => {
  await listen(q.store, q.tenantId, ['doctor.finding_changed']);
  const changes = await Promise.all([keep([broken]), keep([broken]), keep([broken])]);
  assert.is(changes.flat().length, 1);
  assert.is((await told(q.store)).length, 1);
});

test('more than can be shown says so', async () => {
  const many = Array.from({ length: 600 }, () => ok(['many', randomUUID()], 'Well.'));
  await keep([...many, broken]);
  const { findings, hasMore, counts } = await readFindings(q.store);
  assert.equal([findings.length, hasMore, counts.ok], [500, true, 600]);
  assert.is(findings[0]!.severity, 'error');
});

test.run();
