// Zones that mean harm, on a real database: what they say must not stop a check, and what they do not say must not hold
// one up, nor the checks of others.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Refusal } from '../../src/access/refusal.ts';
import { oneLook } from '../../src/dns/one-look.ts';
import type { RecordResolver } from '../../src/dns/records.ts';
import { createResolver } from '../../src/dns/resolver.ts';
import { createDomainVerbs } from '../../src/domains/domains.ts';
import { endRules } from '../../src/receiving/rule-status.ts';
import { openDomains, HOSTNAME, publish, statuses, type Domains } from '../support/domains.ts';

const test = suite('hostile zones');
let d: Domains;
test.before(async () => {
  d = await openDomains();
});
test.after(() => d.stop());

test('NUL and long texts in every record are shown, stored and checked again', async () => {
  const name = 'nul.test';
  const domain = await d.verbs.create(d.one, {
    name,
    click_tracking: true,
    capabilities: { receiving: 'enabled' },
  });
  const junk = `\u0000\ud800${'x'.repeat(4_000)}`;
  for (const record of domain.records) {
    d.dns.zones[record.name] = { TXT: [junk, `v=spf1 -a:${HOSTNAME}/${junk} ~all`] };
  }
  for (const term of ['-all/\u0000', `include:${junk}`, `-a:${HOSTNAME}/${junk}`]) {
    d.dns.zones[`send.${name}`] = { TXT: [`v=spf1 ${term} ~all`], MX: ['10 other.test'] };
    const after = (await d.verbs.verify(d.one, domain.id))!;
    assert.is(after.status, 'pending');
    assert.is(statuses(after)['SPF TXT'], 'failed');
    for (const { detail } of after.records) assert.ok((detail ?? '').length < 1_000);
  }
  assert.is.not(await d.recheckWhenDue(domain.id), null);
});

/** A zone that answers everything with another include, each after a while. */
function slowly(ms: number): RecordResolver {
  const wait = () => new Promise((resolve) => setTimeout(resolve, ms));
  let count = 0;
  const none = async () => {
    await wait();
    return { kind: 'no_data' } as const;
  };
  return {
    mx: none,
    cname: none,
    a: none,
    aaaa: none,
    async txt() {
      await wait();
      count += 1;
      const records = [`v=spf1 include:n${count}.test include:m${count}.test ~all`];
      return { kind: 'found', records };
    },
  };
}

const deps = (resolver: RecordResolver, lookMs: number) => ({
  store: d.store,
  resolver,
  lookMs,
  sealingKey: Buffer.alloc(32, 7),
  place: { hostname: HOSTNAME, trackingHost: HOSTNAME },
  now: () => d.clock.now,
  onReceivingEnd: endRules,
  isAssumed: () => false,
});

test('a zone that leads on and on, slowly, is looked at for so long and no longer', async () => {
  const { id } = await d.verbs.create(d.one, { name: 'slow.test' });
  const startedAt = Date.now();
  const after = await createDomainVerbs(deps(slowly(150), 400)).verify(d.one, id);
  const tookMs = Date.now() - startedAt;
  assert.ok(tookMs < 1_200, `${tookMs} ms`);
  const spf = after?.records.find(({ record, type }) => record === 'SPF' && type === 'TXT');
  assert.is(spf?.status, 'pending');
  assert.match(spf?.detail ?? '', 'timeout');
});

test('one look asks each question once, and nothing any more when its time is over', async () => {
  const resolver = createResolver({ servers: [d.dns.server], keepsAnswers: false });
  d.dns.zones['silent.test'] = 'TIMEOUT';
  d.dns.questions.length = 0;
  try {
    await oneLook(resolver, 300, async (look) => {
      const answers = await Promise.all([look.txt('silent.test'), look.txt('silent.test')]);
      for (const answer of answers) assert.equal(answer, { kind: 'failed', cause: 'timeout' });
      assert.is((await look.mx('later.test')).kind, 'failed');
    });
    assert.equal(
      d.dns.questions.map(({ name }) => name),
      ['silent.test'],
    );
  } finally {
    resolver.close();
  }
});

test('a tenant has so many verifications open; another is not held up by them', async () => {
  const verbs = createDomainVerbs(deps(slowly(1_000), 700));
  const { id } = await verbs.create(d.one, { name: 'many.test' });
  const other = await verbs.create(d.two, { name: 'other.test' });
  const asked = Array.from({ length: 60 }, () => verbs.verify(d.one, id));
  const theirs = verbs.verify(d.two, other.id);
  const outcomes = await Promise.allSettled(asked);
  const refused = outcomes.flatMap((one) => (one.status === 'rejected' ? [one.reason] : []));
  assert.is(refused.length, 10);
  for (const reason of refused) {
    assert.ok(reason instanceof Refusal);
    assert.is(reason.code, 'rate_limit_exceeded');
    assert.ok((reason.retryAfterSeconds ?? 0) > 0);
  }
  assert.is((await theirs)?.status, 'pending');
  assert.is((await verbs.verify(d.one, id))?.status, 'pending', 'they end');
});

test('a look that ends late does not undo what a later one has found', async () => {
  const domain = await d.verbs.create(d.one, { name: 'late.test' });
  const { mx, ...others } = slowly(400);
  const none = async () => ({ kind: 'no_data' }) as const;
  const late = createDomainVerbs(deps({ ...others, mx, txt: none }, 5_000));
  const first = late.verify(d.one, domain.id);
  await new Promise((resolve) => setTimeout(resolve, 100));
  d.clock.now = new Date(d.clock.now.getTime() + 1_000);
  publish(d.dns, domain);
  assert.is((await d.verbs.verify(d.one, domain.id))?.status, 'verified');
  assert.is((await first)?.status, 'verified');
  const after = await d.verbs.find(d.one, domain.id);
  assert.equal([...new Set(Object.values(statuses(after)))], ['verified']);
});

test('records of a removed domain do not verify the one that is made anew', async () => {
  const first = await d.verbs.create(d.one, { name: 'anew.test' });
  publish(d.dns, first);
  assert.is((await d.verbs.verify(d.one, first.id))?.status, 'verified');
  await d.verbs.remove(d.one, first.id);
  const second = await d.verbs.create(d.one, { name: 'anew.test' });
  const after = await d.verbs.verify(d.one, second.id);
  assert.is(after?.status, 'pending');
  assert.is(statuses(after)['DKIM TXT'], 'failed');
  assert.is(statuses(after)['SPF MX'], 'verified');
});

test.run();
