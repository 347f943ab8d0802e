// A domain from its creation to verified and back, against a real DNS server and a real database, the clock in hand.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { DomainView } from '../../src/domains/domains.ts';
import {
  HOSTNAME,
  HOUR_MS,
  openDomains,
  publish,
  statuses,
  type Domains,
} from '../support/domains.ts';

const test = suite('domain checks');
let d: Domains;
test.before(async () => {
  d = await openDomains();
});
test.after(() => d.stop());

let count = 0;
/** A domain with a name of its own. */
async function create(about: Record<string, unknown> = {}): Promise<DomainView> {
  count += 1;
  return d.verbs.create(d.one, { name: `d${count}.test`, ...about });
}
const verify = async (id: string): Promise<DomainView> => (await d.verbs.verify(d.one, id))!;
const find = async (id: string): Promise<DomainView> => (await d.verbs.find(d.one, id))!;
const later = (ms: number): void => {
  d.clock.now = new Date(d.clock.now.getTime() + ms);
};
const canSend = async ({ id }: DomainView): Promise<boolean> => {
  const { rows } = await d.store.pool.query<{ can: boolean }>(
    'select sending and sending_verified as can from sending_domain where id = $1',
    [id],
  );
  return rows[0]!.can;
};
const detailOf = (domain: DomainView, record: string, type: string): string =>
  domain.records.find((one) => one.record === record && one.type === type)?.detail ?? '';

test('a new domain was not started; with everything published it is verified', async () => {
  const domain = await create({
    open_tracking: true,
    capabilities: { receiving: 'enabled' },
  });
  assert.is(domain.status, 'not_started');
  assert.equal([...new Set(Object.values(statuses(domain)))], ['not_started']);
  publish(d.dns, domain);
  const after = await verify(domain.id);
  assert.is(after.status, 'verified');
  assert.equal(statuses(after), {
    'SPF MX': 'verified',
    'SPF TXT': 'verified',
    'DKIM TXT': 'verified',
    Ed25519: 'verified',
    'Receiving MX': 'verified',
    'Tracking CNAME': 'verified',
    'DMARC TXT': 'verified',
  });
  assert.ok(after.records.every(({ detail }) => detail === null));
  assert.equal((await find(domain.id)).records, after.records);
  assert.ok(await canSend(after));
});

test('the records are those of the appliance and of the keys', async () => {
  const domain = await create({
    custom_return_path: 'Bounce',
    tracking_subdomain: 'go',
    click_tracking: true,
    capabilities: [{ name: 'receiving', enabled: true }],
  });
  const { name } = domain;
  const { rows } = await d.store.pool.query<{ public_record: string }>(
    'select public_record from dkim_key where domain_id = $1 order by algorithm desc',
    [domain.id],
  );
  const [rsa, ed25519] = rows.map((row) => row.public_record);
  assert.match(rsa!, /^v=DKIM1; k=rsa; p=[A-Za-z0-9+/]{300,}=*$/);
  assert.match(ed25519!, /^v=DKIM1; k=ed25519; p=[A-Za-z0-9+/]{43}=$/);
  const expected = [
    ['SPF', `bounce.${name}`, 'MX', HOSTNAME, 10],
    ['SPF', `bounce.${name}`, 'TXT', `v=spf1 a:${HOSTNAME} ~all`, null],
    ['DKIM', `mailstead._domainkey.${name}`, 'TXT', rsa, null],
    ['DKIM', `mailstead-ed25519._domainkey.${name}`, 'TXT', ed25519, null],
    ['Receiving', name, 'MX', HOSTNAME, 10],
    ['Tracking', `go.${name}`, 'CNAME', 'track.host.test', null],
    ['DMARC', `_dmarc.${name}`, 'TXT', 'v=DMARC1; p=none;', null],
  ];
  assert.equal(
    domain.records.map((one) => [one.record, one.name, one.type, one.value, one.priority]),
    expected,
  );
});

test('Ed25519 and DMARC are shown and hold nothing up', async () => {
  const domain = await create();
  publish(d.dns, domain);
  delete d.dns.zones[`mailstead-ed25519._domainkey.${domain.name}`];
  delete d.dns.zones[`_dmarc.${domain.name}`];
  const after = await verify(domain.id);
  assert.is(after.status, 'verified');
  assert.is(statuses(after)['Ed25519'], 'pending');
  assert.is(statuses(after)['DMARC TXT'], 'pending');
  assert.ok(await canSend(after));
});

test('one record that is wrong is failed with a detail, and nothing is verified by it', async () => {
  const domain = await create();
  publish(d.dns, domain);
  d.dns.zones[`send.${domain.name}`] = {
    MX: [`10 ${HOSTNAME}`],
    TXT: [`v=spf1 a:${HOSTNAME} ~all`, 'v=spf1 -all'],
  };
  const after = await verify(domain.id);
  assert.is(after.status, 'pending');
  assert.is(statuses(after)['SPF TXT'], 'failed');
  assert.is(statuses(after)['SPF MX'], 'verified');
  assert.match(detailOf(after, 'SPF', 'TXT'), '2 SPF records');
  assert.not(await canSend(after));
});

test('what is verified beside what is missing or wrong shows in the status', async () => {
  const domain = await create({ capabilities: { receiving: 'enabled' } });
  publish(d.dns, domain);
  delete d.dns.zones[domain.name];
  assert.is((await verify(domain.id)).status, 'partially_verified');
  d.dns.zones[domain.name] = { MX: ['1 other.test', `10 ${HOSTNAME}`] };
  const after = await verify(domain.id);
  assert.is(after.status, 'partially_failed');
  assert.match(detailOf(after, 'Receiving', 'MX'), 'lowest preference');
  assert.ok(await canSend(after));
});

test('nothing counts without the DKIM key, which alone proves whose the name is', async () => {
  const domain = await create({ click_tracking: true, capabilities: { receiving: 'enabled' } });
  publish(d.dns, domain);
  delete d.dns.zones[`mailstead._domainkey.${domain.name}`];
  const after = await verify(domain.id);
  assert.is(after.status, 'pending');
  assert.is(statuses(after)['Receiving MX'], 'verified');
  const { rows } = await d.store.pool.query(
    'select 1 from sending_domain where id = $1 and (receiving_verified or sending_verified)',
    [domain.id],
  );
  assert.is(rows.length, 0);
});

test('a domain with nothing published is asked for with growing pauses, 72 hours long', async () => {
  const domain = await create();
  assert.is(await d.recheckWhenDue(domain.id), null, 'never asked for: not checked');
  assert.is((await verify(domain.id)).status, 'pending');
  const startedAt = d.clock.now.getTime();
  const pauses: number[] = [];
  for (;;) {
    const pause = await d.recheckWhenDue(domain.id);
    if (pause === null) break;
    pauses.push(pause);
    const isOver = d.clock.now.getTime() - startedAt >= 72 * HOUR_MS;
    assert.is((await find(domain.id)).status, isOver ? 'failed' : 'pending');
  }
  assert.equal(pauses.slice(0, 7), [1, 5, 15, 30, 60, 60, 60]);
  const hours = (d.clock.now.getTime() - startedAt) / HOUR_MS;
  assert.ok(hours >= 72 && hours < 73, `${hours} h`);
  assert.is(statuses(await find(domain.id))['DKIM TXT'], 'failed');

  // Asking again opens another 72 hours.
  assert.is((await verify(domain.id)).status, 'pending');
  publish(d.dns, domain);
  assert.is(await d.recheckWhenDue(domain.id), 1);
  assert.is((await find(domain.id)).status, 'verified');
});

test('a verified domain is checked daily; a record that vanishes is forgiven for 72 hours', async () => {
  const domain = await create();
  publish(d.dns, domain);
  await verify(domain.id);
  assert.is(await d.recheckWhenDue(domain.id), 24 * 60);
  const dkim = `mailstead._domainkey.${domain.name}`;
  const { [dkim]: kept } = d.dns.zones;
  delete d.dns.zones[dkim];
  assert.is(await d.recheckWhenDue(domain.id), 24 * 60);
  const vanished = await find(domain.id);
  assert.is(statuses(vanished)['DKIM TXT'], 'temporary_failure');
  assert.is(vanished.status, 'verified');
  assert.ok(await canSend(vanished));
  assert.match(detailOf(vanished, 'DKIM', 'TXT'), 'There is no TXT record');

  // It comes back.
  d.dns.zones[dkim] = kept!;
  assert.is(await d.recheckWhenDue(domain.id), 60);
  assert.is(statuses(await find(domain.id))['DKIM TXT'], 'verified');

  // It goes for good.
  delete d.dns.zones[dkim];
  await d.recheckWhenDue(domain.id);
  const goneAt = d.clock.now.getTime();
  while ((await find(domain.id)).status === 'verified') {
    assert.ok(await canSend(domain));
    assert.ok(d.clock.now.getTime() - goneAt < 72 * HOUR_MS);
    assert.is(await d.recheckWhenDue(domain.id), 60);
  }
  assert.is(d.clock.now.getTime() - goneAt, 72 * HOUR_MS);
  const gone = await find(domain.id);
  assert.is(gone.status, 'failed');
  assert.is(statuses(gone)['DKIM TXT'], 'failed');
  assert.not(await canSend(gone));
  assert.is(await d.recheckWhenDue(domain.id), null);
});

test('a DNS that fails or is silent takes nothing away and gives nothing', async () => {
  const fresh = await create();
  const verified = await create();
  publish(d.dns, verified);
  await verify(verified.id);
  for (const fault of ['SERVFAIL', 'TIMEOUT'] as const) {
    for (const { name, records } of [fresh, verified]) {
      for (const one of [name, ...records.map((record) => record.name)]) d.dns.zones[one] = fault;
    }
    const pending = await verify(fresh.id);
    assert.is(pending.status, 'pending');
    assert.is(statuses(pending)['DKIM TXT'], 'pending');
    assert.match(detailOf(pending, 'DKIM', 'TXT'), 'did not answer');
    const kept = await verify(verified.id);
    assert.is(kept.status, 'verified');
    assert.is(statuses(kept)['SPF MX'], 'verified');
    assert.match(detailOf(kept, 'SPF', 'MX'), 'did not answer');
  }
  later(100 * HOUR_MS);
  assert.is((await verify(fresh.id)).status, 'pending', 'nothing is known, even now');
  assert.is((await verify(verified.id)).status, 'verified');
});

test('a change of settings keeps what is known of the other records', async () => {
  const domain = await create({ capabilities: { receiving: 'enabled' } });
  publish(d.dns, domain);
  await verify(domain.id);
  assert.ok(await d.verbs.update(d.one, domain.id, { click_tracking: true }));
  const changed = await find(domain.id);
  assert.is(changed.status, 'partially_verified');
  assert.is(statuses(changed)['Tracking CNAME'], 'not_started');
  assert.is(statuses(changed)['DKIM TXT'], 'verified');
  assert.ok(await canSend(changed));
  publish(d.dns, changed);
  assert.is(await d.recheckWhenDue(domain.id), 1, 'what is new is looked for soon');
  assert.is((await find(domain.id)).status, 'verified');
  await d.verbs.update(d.one, domain.id, { tracking_subdomain: 'other' });
  assert.is(statuses(await find(domain.id))['Tracking CNAME'], 'not_started');
  await d.verbs.update(d.one, domain.id, {
    click_tracking: false,
    capabilities: { sending: 'disabled' },
  });
  const receiving = await find(domain.id);
  assert.is(receiving.status, 'verified');
  assert.equal(Object.keys(statuses(receiving)), ['DKIM TXT', 'Ed25519', 'Receiving MX']);
  assert.not(await canSend(receiving));
});

test('a domain is checked once, however many processes look for what is due', async () => {
  const domains = await Promise.all(Array.from({ length: 6 }, () => create()));
  for (const { id } of domains) await verify(id);
  d.dns.questions.length = 0;
  later(60_000);
  const counts = await Promise.all(Array.from({ length: 4 }, () => d.recheck()));
  assert.ok(counts.reduce((sum, one) => sum + one, 0) >= domains.length);
  for (const { name } of domains) {
    const asked = d.dns.questions.filter(
      (one) => one.name === `mailstead._domainkey.${name}` && one.type === 'TXT',
    );
    assert.is(asked.length, 1, name);
  }
});

test('names that count as published are verified without a question, tracking apart', async () => {
  const domain = await create({ capabilities: { receiving: 'enabled' } });
  d.assumed.add(domain.name);
  d.dns.questions.length = 0;
  assert.is((await verify(domain.id)).status, 'verified');
  await d.verbs.update(d.one, domain.id, { click_tracking: true, tracking_subdomain: 'go' });
  const after = await verify(domain.id);
  assert.is(after.status, 'partially_failed');
  assert.match(detailOf(after, 'Tracking', 'CNAME'), 'no browser can reach');
  assert.ok(await canSend(after));
  assert.is(d.dns.questions.length, 0);
  await d.recheckWhenDue(domain.id);
  assert.is(d.dns.questions.filter(({ name }) => name.endsWith(domain.name)).length, 0);
  assert.is((await find(domain.id)).status, 'partially_failed');
});

test('lookups know who can send and how, soon after it changed', async () => {
  const domain = await create({ tls: 'enforced', click_tracking: true });
  const { tenantId } = d.one;
  assert.equal(await d.lookup.sendingDomain(tenantId, domain.name), {
    id: domain.id,
    name: domain.name,
    status: 'not_started',
    sending: true,
    canSend: false,
    tls: 'enforced',
    openTracking: false,
    clickTracking: true,
    trackingHost: null,
  });
  assert.is(await d.lookup.signer(d.two.tenantId, domain.id), null);
  const signer = await d.lookup.signer(tenantId, domain.id);
  assert.ok(signer);
  assert.equal([signer.tls, signer.canSend, signer.returnPathLabel], ['enforced', false, 'send']);
  assert.equal(
    signer.keys.map(({ algorithm }) => algorithm),
    ['rsa-sha256', 'ed25519-sha256'],
  );
  publish(d.dns, domain);
  await verify(domain.id);
  await d.verbs.update(d.one, domain.id, { tls: 'opportunistic' });
  const until = Date.now() + 10_000;
  for (;;) {
    const now = await d.lookup.signer(tenantId, domain.id);
    const host = (await d.lookup.sendingDomain(tenantId, domain.name))?.trackingHost;
    const isSeen = now?.canSend === true && now.tls === 'opportunistic';
    if (isSeen && host === `links.${domain.name}`) break;
    assert.ok(Date.now() < until, 'the lookup never saw the change');
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
  await d.verbs.remove(d.one, domain.id);
  while ((await d.lookup.signer(tenantId, domain.id)) !== null) {
    assert.ok(Date.now() < until, 'the lookup never saw the removal');
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
});

test.run();
