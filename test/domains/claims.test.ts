// Whose a name is: two tenants, one DNS. A name is never verified for both, whoever is first; a claim moves it to who
// controls its DNS, with time for a holder who still uses it.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { ClaimView } from '../../src/domains/claims.ts';
import type { DomainView } from '../../src/domains/domains.ts';
import { Refusal } from '../../src/access/refusal.ts';
import { lockName } from '../../src/domains/rows.ts';
import { enqueue } from '../../src/queue/enqueue.ts';
import { newId } from '../../src/store/id.ts';
import { until } from '../support/app.ts';
import type { DnsRecords } from '../support/dns.ts';
import { HOUR_MS, openDomains, publish, statuses, type Domains } from '../support/domains.ts';
import { newEmail } from '../support/queue.ts';

const test = suite('domain claims');
let d: Domains;
test.before(async () => {
  d = await openDomains();
});
test.after(() => d.stop());

const codeOf = async (work: Promise<unknown>): Promise<string> => {
  try {
    await work;
    return 'none';
  } catch (error) {
    if (error instanceof Refusal) return error.code;
    throw error;
  }
};

/** Both sets of records at once: every name has the keys of both tenants. */
function publishBoth(one: DomainView, two: DomainView): void {
  publish(d.dns, one);
  for (const { record, name, value } of two.records) {
    if (record !== 'DKIM') continue;
    const zone = d.dns.zones[name] as DnsRecords;
    d.dns.zones[name] = { TXT: [...(zone.TXT as string[]), value] };
  }
}

/** A domain that tenant one holds, and tenant two's open claim of it. */
async function claimed(name: string): Promise<{ held: DomainView; claim: ClaimView }> {
  const held = await d.verbs.create(d.one, { name });
  publish(d.dns, held);
  assert.is((await d.verbs.verify(d.one, held.id))?.status, 'verified');
  const { claim, isNew } = await d.verbs.claims.create(d.two, { name });
  assert.ok(isNew);
  return { held, claim };
}
const prove = ({ record }: ClaimView): void => {
  d.dns.zones[record.name] = { TXT: ['something else', record.value] };
};
const check = async ({ domainId }: ClaimView): Promise<ClaimView> =>
  (await d.verbs.claims.verify(d.two, domainId))!;

test('a name is free until somebody has it verified, and taken from then on', async () => {
  const one = await d.verbs.create(d.one, { name: 'free.test' });
  assert.is(await codeOf(d.verbs.create(d.one, { name: 'FREE.test' })), 'domain_exists');
  const two = await d.verbs.create(d.two, { name: 'free.test' });
  publish(d.dns, one);
  assert.is((await d.verbs.verify(d.one, one.id))?.status, 'verified');
  publish(d.dns, two);
  assert.is(await codeOf(d.verbs.verify(d.two, two.id)), 'domain_taken');
  assert.is((await d.verbs.find(d.two, two.id))?.status, 'not_started');
  await d.verbs.remove(d.two, two.id);
  assert.is(await codeOf(d.verbs.create(d.two, { name: 'free.test' })), 'domain_taken');
  await d.verbs.remove(d.one, one.id);
  const again = await d.verbs.create(d.two, { name: 'free.test' });
  publish(d.dns, again);
  assert.is((await d.verbs.verify(d.two, again.id))?.status, 'verified');
});

test('two tenants who verify one name at the same time: never both', async () => {
  for (let round = 0; round < 8; round += 1) {
    const name = `race${round}.test`;
    const one = await d.verbs.create(d.one, { name });
    const two = await d.verbs.create(d.two, { name });
    // Which key the resolver sees changes between the questions: the worst that a DNS can do.
    publish(d.dns, one);
    const first = d.verbs.verify(d.one, one.id);
    const second = d.verbs.verify(d.two, two.id);
    const third = d.verbs.verify(d.one, one.id);
    publish(d.dns, two);
    const fourth = d.verbs.verify(d.two, two.id);
    await Promise.allSettled([first, second, third, fourth]);
    const { rows } = await d.store.pool.query(
      `select 1 from sending_domain where name = $1 and status = 'verified'`,
      [name],
    );
    assert.ok(rows.length <= 1, `${name} is verified ${rows.length} times`);
  }
});

test('both have looked before either has written: one is verified, the other refused', async () => {
  const name = 'close.test';
  const one = await d.verbs.create(d.one, { name });
  const two = await d.verbs.create(d.two, { name });
  d.assumed.add(name); // every look is right, at once
  const holder = await d.store.pool.connect();
  await holder.query('begin');
  await lockName(holder, name);
  const deciding = Promise.all([
    codeOf(d.verbs.verify(d.one, one.id)),
    codeOf(d.verbs.verify(d.two, two.id)),
  ]);
  const bothWait = until(
    async () => {
      const { rows } = await d.store.pool.query(
        `select 1 from pg_locks where locktype = 'advisory' and not granted
           and database = (select oid from pg_database where datname = current_database())`,
      );
      return rows.length;
    },
    (decisions) => decisions === 2,
    10_000,
  );
  try {
    await bothWait;
  } finally {
    await holder.query('rollback');
    holder.release();
  }
  const outcomes = await deciding;
  d.assumed.delete(name);
  assert.equal(outcomes.toSorted(), ['domain_taken', 'none']);
  const { rows } = await d.store.pool.query<{ status: string }>(
    'select status from sending_domain where name = $1',
    [name],
  );
  assert.is(rows.filter(({ status }) => status === 'verified').length, 1);
});

test('two keys at one name verify for nobody', async () => {
  const one = await d.verbs.create(d.one, { name: 'both.test' });
  const two = await d.verbs.create(d.two, { name: 'both.test' });
  publishBoth(one, two);
  for (const [caller, { id }] of [
    [d.one, one],
    [d.two, two],
  ] as const) {
    const after = await d.verbs.verify(caller, id);
    assert.is(after?.status, 'pending');
    assert.is(statuses(after)['DKIM TXT'], 'failed');
  }
});

test('a claim is open once, with a record of its own, and stays pending until that is published', async () => {
  const { held, claim } = await claimed('pending.test');
  assert.is(claim.status, 'pending');
  assert.is(claim.record.name, '_mailstead-claim.pending.test');
  assert.match(claim.record.value, /^mailstead-claim=[A-Za-z0-9]{32}$/);
  assert.is(claim.expiresAt.getTime() - claim.createdAt.getTime(), 7 * 24 * HOUR_MS);
  const again = await d.verbs.claims.create(d.two, { name: 'pending.test' });
  assert.equal(again, { claim, isNew: false });
  const other = { name: 'pending.test', region: 'eu-west-1' };
  assert.is(await codeOf(d.verbs.claims.create(d.two, other)), 'domain_exists');
  assert.is(await codeOf(d.verbs.claims.create(d.one, { name: 'pending.test' })), 'domain_exists');
  assert.equal(await check(claim), claim);
  d.dns.zones[claim.record.name] = { TXT: ['mailstead-claim=guess'] };
  assert.is((await check(claim)).status, 'pending');
  d.dns.zones[claim.record.name] = 'SERVFAIL';
  assert.is((await check(claim)).status, 'pending');
  assert.equal(await d.verbs.claims.find(d.two, claim.domainId), claim);
  assert.is(await d.verbs.claims.find(d.one, claim.domainId), null);
  assert.is(await d.verbs.claims.find(d.one, held.id), null);
  assert.is((await d.verbs.find(d.one, held.id))?.status, 'verified');
});

test('a proven claim of a name that nobody uses completes: the holder loses it, for good', async () => {
  const { held, claim } = await claimed('moved.test');
  prove(claim);
  assert.is((await check(claim)).status, 'completed');
  const lost = (await d.verbs.find(d.one, held.id))!;
  assert.is(lost.status, 'failed');
  assert.equal([...new Set(Object.values(statuses(lost)))], ['failed']);
  assert.match(lost.records[0]?.detail ?? '', 'Another account');
  assert.is(await d.recheckWhenDue(held.id), null);
  // The old keys are still in the DNS: they must not bring it back.
  assert.is(await codeOf(d.verbs.verify(d.one, held.id)), 'domain_taken');
  await d.verbs.update(d.one, held.id, { click_tracking: true });
  await d.recheckWhenDue(held.id);
  assert.is((await d.verbs.find(d.one, held.id))?.status, 'failed');
  // The claimer's own records are theirs to publish.
  const own = (await d.verbs.find(d.two, claim.domainId))!;
  assert.is(own.status, 'not_started');
  publish(d.dns, own);
  assert.is((await d.verbs.verify(d.two, own.id))?.status, 'verified');
  assert.is((await check(claim)).status, 'completed');
});

test('a holder who sends or has emails scheduled keeps the name for 72 hours more', async () => {
  const { held, claim } = await claimed('busy.test');
  const email = { tenantId: d.one.tenantId, fromDomain: 'busy.test' };
  const id = newId();
  await enqueue(d.store.pool, [
    newEmail({
      ...email,
      id,
      lastEvent: 'scheduled',
      scheduledAt: new Date(Date.now() + 86_400_000),
    }),
  ]);
  d.clock.now = new Date(); // the emails have real times
  const { claim: fresh } = await d.verbs.claims.create(d.two, { name: 'busy.test' });
  prove(fresh);
  const blocked = await check(claim);
  assert.is(blocked.status, 'blocked');
  assert.is(blocked.blockedReason, 'pending_scheduled_emails');
  assert.is((await d.verbs.find(d.one, held.id))?.status, 'verified');

  await d.store.pool.query(`update email set last_event = 'canceled' where id = $1`, [id]);
  assert.is((await check(claim)).blockedReason, 'recent_owner_activity');

  // Taken away again, it is as if it had never been there.
  const { [claim.record.name]: proof } = d.dns.zones;
  delete d.dns.zones[claim.record.name];
  const pending = await check(claim);
  assert.is(pending.status, 'pending');
  assert.is(pending.blockedReason, null);
  d.dns.zones[claim.record.name] = proof!;
  assert.is((await check(claim)).status, 'blocked');

  d.clock.now = new Date(d.clock.now.getTime() + 71 * HOUR_MS);
  assert.is((await check(claim)).status, 'blocked');
  // A DNS that does not answer does not make the 72 hours begin anew.
  d.dns.zones[claim.record.name] = 'SERVFAIL';
  assert.is((await check(claim)).status, 'blocked');
  d.dns.zones[claim.record.name] = proof!;
  d.clock.now = new Date(d.clock.now.getTime() + HOUR_MS);
  assert.is((await check(claim)).status, 'completed');
  assert.is((await d.verbs.find(d.one, held.id))?.status, 'failed');
});

test('a claim ends after seven days, or with its domain; it can be made anew', async () => {
  const { claim } = await claimed('late.test');
  d.clock.now = new Date(d.clock.now.getTime() + 7 * 24 * HOUR_MS);
  prove(claim);
  assert.is((await check(claim)).status, 'expired');
  const { claim: anew, isNew } = await d.verbs.claims.create(d.two, { name: 'late.test' });
  assert.ok(isNew);
  assert.is(anew.domainId, claim.domainId);
  assert.is.not(anew.record.value, claim.record.value);
  assert.is((await check(anew)).status, 'pending', 'the old proof is of another claim');
  await d.verbs.remove(d.two, anew.domainId);
  assert.is(await d.verbs.claims.find(d.two, anew.domainId), null);
  assert.is(await d.verbs.claims.verify(d.two, anew.domainId), null);
});

test('a name that counts as published cannot be claimed away', async () => {
  const { held, claim } = await claimed('reserved.test');
  d.assumed.add('reserved.test');
  prove(claim);
  assert.is((await check(claim)).status, 'pending');
  assert.is((await d.verbs.find(d.one, held.id))?.status, 'verified');
});

test.run();
