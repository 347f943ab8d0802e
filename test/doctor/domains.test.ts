// What the doctor says of a domain's records and of the rules of Gmail, Yahoo and Microsoft: a real database, real DNS
// packets, the records as a tenant would publish them.
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { loadConfig } from '../../src/config.ts';
import { readDeliveryPolicy } from '../../src/delivery/egress.ts';
import { findOwnAddresses } from '../../src/doctor/addresses.ts';
import { look as lookAt } from '../../src/doctor/doctor.ts';
import { checkDomain, nextDomains } from '../../src/doctor/domains.ts';
import type { Finding } from '../../src/doctor/finding.ts';
import { keepFindings, readFindings } from '../../src/doctor/kept.ts';
import type { Surroundings } from '../../src/doctor/surroundings.ts';
import { readDomain } from '../../src/domains/rows.ts';
import { openWorld, severitiesOf, HOST, type World } from '../support/doctor.ts';
import { HOSTNAME, openDomains, publish, type Domains } from '../support/domains.ts';
import { silent } from '../support/queue.ts';

const test = suite('doctor of domains');
const NAME = 'shop.test';
const ADDRESS = '192.0.2.7';
const PROVIDERS = ['google', 'yahoo', 'microsoft'].map((name) => `sender_rules_${name} ${NAME}`);
let d: Domains;
let world: World;
let id = '';

test.before(async () => {
  assert.is(HOSTNAME, HOST);
  d = await openDomains();
  world = await openWorld();
  const created = await d.verbs.create(d.one, {
    name: NAME,
    capabilities: { sending: 'enabled', receiving: 'enabled' },
  });
  id = created.id;
  publish(d.dns, created);
  await d.verbs.verify(d.one, id);
});
test.before.each(async () => {
  for (const name of Object.keys(world.dns.zones)) delete world.dns.zones[name];
  Object.assign(world.dns.zones, d.dns.zones, {
    [HOST]: { A: [ADDRESS] },
    '7.2.0.192.in-addr.arpa': { PTR: [HOST] },
  });
});
test.after(async () => {
  await world.stop();
  await d.stop();
});

async function look(
  about: Partial<Surroundings> = {},
  config: Partial<Surroundings['config']> = {},
): Promise<readonly Finding[]> {
  const delivery = readDeliveryPolicy({
    egresses: { out: { ipv4: ADDRESS } },
    pools: { default: ['out'] },
  });
  const s = world.at({ pool: d.store.pool, delivery, ...about }, config);
  const domain = (await readDomain(d.store.pool, d.one.tenantId, id))!;
  return checkDomain(s, domain, (await findOwnAddresses(s)).list);
}
const only = (findings: readonly Finding[], code: string): Finding =>
  findings.find((finding) => finding.code === code)!;

test('what is published as it should be is well', async () => {
  assert.equal(severitiesOf(await look()), {
    [`spf ${NAME}`]: 'ok',
    [`dkim ${NAME}`]: 'ok',
    [`dkim_ed25519 ${NAME}`]: 'ok',
    [`return_path ${NAME}`]: 'ok',
    [`dmarc ${NAME}`]: 'ok',
    [`receiving_mx ${NAME}`]: 'ok',
    [`mta_sts ${NAME}`]: 'info',
    [`tls_rpt ${NAME}`]: 'info',
    ...Object.fromEntries(PROVIDERS.map((key) => [key, 'ok'])),
  });
});

test('SPF counts the addresses that mail leaves from, and lookups', async () => {
  const spf = async (record: string | null, about = {}): Promise<string> => {
    if (record !== null) world.dns.zones[`send.${NAME}`] = { TXT: [record] };
    return only(await look(about), 'spf').severity;
  };
  // The name of the host is authorised, and mail leaves from another address.
  const delivery = readDeliveryPolicy({
    egresses: { out: { ipv4: ADDRESS }, second: { ipv4: '192.0.2.8' } },
    pools: { default: ['out', 'second'] },
  });
  assert.is(await spf(null, { delivery }), 'error');
  assert.is(await spf('v=spf1 ip4:192.0.2.0/28 ~all', { delivery }), 'ok');
  world.dns.zones['relay.test'] = { MX: ['10 mx1.relay.test'] };
  world.dns.zones['mx1.relay.test'] = { A: [ADDRESS] };
  assert.is(await spf('v=spf1 mx:relay.test ~all'), 'ok');
  assert.is(await spf('v=spf1 include:relay.test ~all'), 'error', 'it has no SPF record');
  world.dns.zones['relay.test'] = { TXT: [`v=spf1 ip4:${ADDRESS} -all`] };
  assert.is(await spf('v=spf1 include:relay.test ~all'), 'ok');
  const many = Array.from({ length: 11 }, (_, at) => `a:n${at}.test`).join(' ');
  const found = only(
    await (async () => {
      world.dns.zones[`send.${NAME}`] = { TXT: [`v=spf1 ${many} a:${HOST} ~all`] };
      return look();
    })(),
    'spf',
  );
  assert.is(found.severity, 'error');
  assert.match(found.message, 'more than 10 lookups');
  // A pool of its own: only that counts for the domain.
  const assigned = readDeliveryPolicy({
    egresses: { out: { ipv4: ADDRESS }, second: { ipv4: '192.0.2.8' } },
    pools: { default: ['out'], own: ['second'] },
    assign: [{ domain: NAME, pool: 'own' }],
  });
  assert.is(await spf('v=spf1 ip4:192.0.2.8 ~all', { delivery: assigned }), 'ok');
});

test('each record that is wrong or silent is told', async () => {
  const { zones } = world.dns;
  const [rsa] = Object.keys(zones).filter((name) => /^(?!.*ed25519).*_domainkey/.test(name));
  zones[rsa!] = { TXT: ['v=DKIM1; k=rsa; p=AAAA'] };
  zones[`_dmarc.${NAME}`] = { TXT: ['v=DMARC1; p=none', 'v=DMARC1; p=reject'] };
  zones[NAME] = { MX: ['5 mx.else.test', `10 ${HOST}`] };
  zones[`_mta-sts.${NAME}`] = { TXT: ['v=STSv1; id=not-a-good-id!'] };
  zones[`_smtp._tls.${NAME}`] = { TXT: ['v=TLSRPTv1; '] };
  const found = severitiesOf(await look());
  for (const code of ['dkim', 'dmarc', 'receiving_mx', 'mta_sts']) {
    assert.is(found[`${code} ${NAME}`], 'error', code);
  }
  assert.is(found[`tls_rpt ${NAME}`], 'warning');
  delete zones[`_dmarc.${NAME}`];
  assert.is(only(await look(), 'dmarc').severity, 'warning');
  zones[`_dmarc.${NAME}`] = { TXT: ['v=DMARC1; p=none; aspf=s'] };
  assert.is(only(await look(), 'dmarc').severity, 'info');
  for (const name of [rsa!, `_dmarc.${NAME}`, `send.${NAME}`, NAME, `_smtp._tls.${NAME}`]) {
    zones[name] = 'SERVFAIL';
  }
  const silent = severitiesOf(await look());
  for (const code of ['spf', 'dkim', 'dmarc', 'return_path', 'receiving_mx', 'tls_rpt']) {
    assert.is(silent[`${code} ${NAME}`], 'unknown', code);
  }
  assert.equal(
    PROVIDERS.map((key) => silent[key]),
    ['unknown', 'unknown', 'unknown'],
  );
});

test('MTA-STS that is on and not published is told', async () => {
  const { pool } = d.store;
  await pool.query(`update sending_domain set mta_sts = 'testing' where id = $1`, [id]);
  assert.is(only(await look(), 'mta_sts').severity, 'warning');
  await pool.query(`update sending_domain set mta_sts = 'off' where id = $1`, [id]);
  assert.is(only(await look(), 'mta_sts').severity, 'info');
});

test('a policy of MTA-STS that cannot be fetched is told, and not tried in development mode', async () => {
  world.dns.zones[`_mta-sts.${NAME}`] = { TXT: ['v=STSv1; id=20260101;'] };
  world.dns.zones[`mta-sts.${NAME}`] = { A: ['127.0.0.1'] };
  assert.is(only(await look(), 'mta_sts').severity, 'warning');
  assert.is(only(await look({}, { mode: 'development' }), 'mta_sts').severity, 'info');
});

test('each provider names what of its rules is not met', async () => {
  const notMet = async (config = {}): Promise<readonly unknown[]> =>
    (await look({}, config))
      .filter(({ code }) => code.startsWith('sender_rules_'))
      .map(({ severity, detail }) => [severity, detail['not_met']]);
  delete world.dns.zones['7.2.0.192.in-addr.arpa'];
  assert.equal(await notMet(), [
    ['error', ['fcrdns']],
    ['error', ['fcrdns']],
    ['error', ['fcrdns']],
  ]);
  world.dns.zones['7.2.0.192.in-addr.arpa'] = { PTR: [HOST] };
  assert.equal(await notMet({ publicUrl: `http://${HOST}` }), [
    ['warning', ['one_click']],
    ['warning', ['one_click']],
    ['ok', []],
  ]);
  world.dns.zones[`send.${NAME}`] = { TXT: ['v=spf1 -all'], MX: [`10 ${HOST}`] };
  delete world.dns.zones[`_dmarc.${NAME}`];
  assert.equal(await notMet(), [
    ['warning', ['authentication', 'dmarc']],
    ['warning', ['authentication', 'dmarc']],
    ['warning', ['authentication', 'dmarc']],
  ]);
});

test('complaints count from our own counters', async () => {
  const count = async (delivered: number, complained: number): Promise<void> => {
    await d.store.pool.query(
      `insert into metric_quarter select $1, date_trunc('hour', now()) - interval '6 days', $2, $1,
         0, $3, $4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
       on conflict (tenant_id, quarter, domain, broadcast_id) do update set delivered = $3, complained = $4`,
      [d.one.tenantId, NAME, delivered, complained],
    );
  };
  await count(10_000, 29);
  assert.is(only(await look(), 'sender_rules_google').severity, 'ok');
  await count(10_000, 30);
  const google = only(await look(), 'sender_rules_google');
  assert.is(google.severity, 'error');
  assert.equal(google.detail['not_met'], ['complaint_rate']);
  assert.is(only(await look(), 'sender_rules_microsoft').severity, 'ok');
  await count(100, 1);
  assert.is(only(await look(), 'sender_rules_google').severity, 'ok', 'one reader is no rate');
});

test('verified domains take turns, and one can be asked for by name', async () => {
  const other = await d.verbs.create(d.two, { name: 'other.test' });
  const names = async (name: string | null = null): Promise<readonly string[]> =>
    (await nextDomains(d.store.pool, { name })).map((domain) => domain.name);
  assert.equal(await names(), [NAME], 'the other is not verified');
  assert.equal(await names('other.test'), ['other.test']);
  publish(d.dns, other);
  await d.verbs.verify(d.two, other.id);
  await d.store.pool.query(
    `insert into finding (id, check_name, domain_id, looked_at, code, subject, severity, message, since, seen_at)
     values (gen_random_uuid(), 'domain', $1, now(), 'spf', $2, 'ok', '', now(), now())`,
    [id, NAME],
  );
  assert.equal(await names(), ['other.test', NAME]);
  assert.equal(await names('none.test'), []);
});

test('while the DNS says nothing, what is known of addresses and domains stands, and one thing is told', async () => {
  const dataDir = await mkdtemp(join(tmpdir(), 'mailstead-doctor-'));
  const config = loadConfig({
    MAILSTEAD_MODE: 'development',
    MAILSTEAD_DATA_DIR: dataDir,
    MAILSTEAD_HOSTNAME: HOST,
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: world.dns.server,
    MAILSTEAD_PRIVATE_HOSTS: '192.0.2.0/24',
  });
  const parts = { config, log: silent, dataDir, now: () => new Date(), readBlobMark: null };
  const changes = async (): Promise<readonly string[]> => {
    const checked = await lookAt(parts, { database: d.store.pool, isActive: false, domain: null });
    const { tenantId } = d.one;
    const told = await keepFindings(d.store, { checked, at: new Date(), tenantId });
    return told.map(({ finding, before, after }) => `${finding.code}: ${before} > ${after}`);
  };
  delete world.dns.zones['7.2.0.192.in-addr.arpa'];
  assert.ok((await changes()).includes('reverse_dns: null > error'));
  for (const name of Object.keys(world.dns.zones)) world.dns.zones[name] = 'SERVFAIL';
  assert.equal(await changes(), []);
  const lasting = (await changes()).filter((one) => !one.startsWith('database'));
  assert.equal(lasting.sort(), ['egress_address: info > unknown', 'resolver: ok > error']);
  const { findings } = await readFindings(d.store);
  assert.is(findings.find(({ code }) => code === 'reverse_dns')?.severity, 'error');
  assert.is(findings.find(({ code }) => code === 'dkim')?.severity, 'ok');
  await rm(dataDir, { recursive: true });
});

test.run();
