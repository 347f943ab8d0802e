// MTA-STS policies in the database: how long they hold by its clock, the daily refresh that is spread over hours, and
// what is forgotten.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createStsStore, refreshStsPolicies } from '../../src/delivery/sts-store.ts';
import type { FetchedSts, StsPolicy } from '../../src/dns/mta-sts.ts';
import { createResolver, type Resolver } from '../../src/dns/resolver.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';

const test = suite('sts-store');
let q: Bench;
let dns: DnsServer;
let resolver: Resolver;
const policy: StsPolicy = {
  mode: 'enforce',
  mx: ['mx.a.test', '*.b.test'],
  maxAgeSeconds: 86_400,
  raw: 'version: STSv1\r\nmode: enforce\r\n',
};

test.before(async () => {
  q = await openQueue();
  dns = await startDns({});
  resolver = createResolver({ servers: [dns.server], keepsAnswers: false });
});
test.before.each(async () => void (await q.store.pool.query('delete from sts_policy')));
test.after(async () => {
  resolver.close();
  await dns.stop();
  await q.stop();
});

const age = async (column: string, by: string, domain = 'a.test'): Promise<void> => {
  await q.store.pool.query(
    `update sts_policy set ${column} = ${column} - $2::interval where domain = $1`,
    [domain, by],
  );
};
const rows = async (): Promise<Record<string, unknown>[]> =>
  (await q.store.pool.query<Record<string, unknown>>('select * from sts_policy order by domain'))
    .rows;

async function refresh(
  answer: (domain: string) => FetchedSts,
): Promise<{ fetched: string[]; counts: Awaited<ReturnType<typeof refreshStsPolicies>> }> {
  const fetched: string[] = [];
  const counts = await refreshStsPolicies({
    db: q.store.pool,
    resolver,
    log: silent,
    fetch(domain) {
      fetched.push(domain);
      return Promise.resolve(answer(domain));
    },
  });
  return { fetched, counts };
}
const good = (): FetchedSts => ({ kind: 'policy', policy });

test('a policy is found until it expires, and replaced by its successor', async () => {
  const store = createStsStore(q.store.pool);
  assert.is(await store.find('a.test'), null);
  await store.keep('a.test', { ...policy, id: '1' });
  const found = await store.find('a.test');
  const { leftMs = 0, unusedMs = -1, ...rest } = found ?? {};
  assert.equal(rest, { ...policy, id: '1' });
  assert.ok(leftMs > 86_000_000 && leftMs <= 86_400_000 && unusedMs >= 0 && unusedMs < 60_000);
  await age('expires_at', '23 hours 59 minutes');
  assert.ok((await store.find('a.test')) !== null);
  await age('expires_at', '2 minutes');
  assert.is(await store.find('a.test'), null);
  await store.keep('a.test', { ...policy, id: '2', mode: 'testing', raw: 'with \0 NUL' });
  const next = await store.find('a.test');
  assert.equal([next?.id, next?.mode, next?.raw], ['2', 'testing', 'with  NUL']);
});

test('use and failures are noted beside it', async () => {
  const store = createStsStore(q.store.pool);
  await store.keep('a.test', { ...policy, id: '1' });
  await age('last_used_at', '3 days');
  assert.ok(((await store.find('a.test'))?.unusedMs ?? 0) > 2 * 86_400_000);
  await store.touch('a.test');
  assert.ok(((await store.find('a.test'))?.unusedMs ?? 0) < 60_000);
  await store.noteFailure('a.test', 'x'.repeat(10_000));
  assert.is(String((await rows())[0]?.['last_error']).length, 500);
});

test('what was looked at less than 20 hours ago is left alone; after 28 hours all are due', async () => {
  const store = createStsStore(q.store.pool);
  for (let i = 0; i < 50; i += 1) {
    await store.keep(`d${i}.test`, { ...policy, id: '1' });
    dns.zones[`_mta-sts.d${i}.test`] = { TXT: ['v=STSv1; id=1'] };
  }
  await q.store.pool.query(
    `update sts_policy set checked_at = now() - interval '19 hours 59 minutes'`,
  );
  assert.equal((await refresh(good)).fetched, []);
  await q.store.pool.query(`update sts_policy set checked_at = now() - interval '24 hours'`);
  const some = (await refresh(good)).fetched.length;
  assert.ok(some > 5 && some < 45, `${some} of 50: they are spread`);
  await q.store.pool.query(
    `update sts_policy set checked_at = now() - interval '28 hours' where checked_at < now() - interval '1 hour'`,
  );
  assert.is((await refresh(good)).fetched.length, 50 - some);
  assert.equal((await refresh(good)).fetched, [], 'each once');
});

test('a refresh makes the policy hold longer, takes what changed, and is no use', async () => {
  const store = createStsStore(q.store.pool);
  await store.keep('a.test', { ...policy, id: '1' });
  dns.zones['_mta-sts.a.test'] = { TXT: ['v=STSv1; id=2'] };
  await age('expires_at', '20 hours');
  await age('checked_at', '29 hours');
  await age('last_used_at', '10 days');
  const { counts } = await refresh(() => ({
    kind: 'policy',
    policy: { ...policy, mode: 'testing' },
  }));
  assert.equal(counts, { fetched: 1, failed: 0, dropped: 0 });
  const found = await store.find('a.test');
  assert.equal([found?.id, found?.mode], ['2', 'testing']);
  assert.ok((found?.leftMs ?? 0) > 86_000_000);
  assert.ok((found?.unusedMs ?? 0) > 9 * 86_400_000);
});

test('a refresh that fails leaves the policy, and says why', async () => {
  const store = createStsStore(q.store.pool);
  const away = (): FetchedSts => ({
    kind: 'failed',
    failure: 'sts-policy-fetch-error',
    reason: 'the server is away',
  });
  for (const record of [null, { TXT: ['v=STSv1; id=1'] }, 'SERVFAIL'] as const) {
    await store.keep('a.test', { ...policy, id: '1' });
    await age('checked_at', '29 hours');
    if (record === null) delete dns.zones['_mta-sts.a.test'];
    else dns.zones['_mta-sts.a.test'] = record;
    const { fetched, counts } = await refresh(away);
    assert.equal(counts, { fetched: 0, failed: 1, dropped: 0 });
    assert.is(fetched.length, record !== null && record !== 'SERVFAIL' ? 1 : 0);
    assert.is((await store.find('a.test'))?.id, '1');
    assert.ok(String((await rows())[0]?.['last_error']).length > 5);
  }
});

test('what nobody used for half a year is forgotten', async () => {
  const store = createStsStore(q.store.pool);
  await store.keep('a.test', { ...policy, id: '1' });
  await store.keep('b.test', { ...policy, id: '1' });
  await age('last_used_at', '181 days');
  await age('last_used_at', '179 days', 'b.test');
  const { counts } = await refresh(good);
  assert.is(counts.dropped, 1);
  assert.equal(
    (await rows()).map(({ domain }) => domain),
    ['b.test'],
  );
});

test('two that refresh at one time do not fetch the same', async () => {
  const store = createStsStore(q.store.pool);
  for (let i = 0; i < 30; i += 1) {
    await store.keep(`d${i}.test`, { ...policy, id: '1' });
    dns.zones[`_mta-sts.d${i}.test`] = { TXT: ['v=STSv1; id=1'] };
  }
  await q.store.pool.query(`update sts_policy set checked_at = now() - interval '30 hours'`);
  const both = await Promise.all([refresh(good), refresh(good)]);
  const fetched = both.flatMap((one) => one.fetched);
  assert.is(fetched.length, 30);
  assert.is(new Set(fetched).size, 30);
});

test.run();
