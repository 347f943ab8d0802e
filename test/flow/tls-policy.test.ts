// Mail to domains that publish what encryption they ask for, through the whole appliance: MTA-STS, DANE, both, neither;
// what each attempt leaves behind, and that nothing bounces over it while the message lives.
import { mkdtemp, mkdir, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { rootCertificates, setDefaultCACertificates } from 'node:tls';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { chainOf, issue, sha256 } from '../support/certificates.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startTlsHost, type TlsHost } from '../support/tls-host.ts';

interface Timeline {
  events: { type: string; detail: Record<string, unknown> }[];
  recipients: { state: string; last_code: string | null; last_reply: string | null }[];
}

const test = suite('tls-policy');
const root = issue({ commonName: 'root', isAuthority: true });
const of = (names: readonly string[]) => issue({ names, issuer: root });
const dane = issue({ names: ['mx.dane.test'] });
let app: App;
let dns: DnsServer;
let db: Client;
let dataDir: string;
let port: number;
const hosts: TlsHost[] = [];
const at = (number: number): TlsHost => hosts[number]!;

test.before(async () => {
  setDefaultCACertificates([...rootCertificates, root.cert]);
  const goodNames = ['mx.good.test', 'mx.second.test', 'shared.test'];
  hosts.push(await startTlsHost({ ...chainOf(of(goodNames)), host: '127.0.0.1' }));
  port = at(0).port;
  const more = [
    { ...chainOf(issue({ names: ['mx.self.test', 'mx.testing.test'] })), host: '127.0.0.2' },
    { starttls: 'none', host: '127.0.0.3' },
    { ...chainOf(dane), host: '127.0.0.4' },
    { starttls: 'garbage', host: '127.0.0.5' },
  ] as const;
  for (const one of more) hosts.push(await startTlsHost({ ...one, port }));
  const sts = { TXT: ['v=STSv1; id=1'] };
  dns = await startDns({
    'good.test': { MX: ['10 mx.good.test'] },
    'mx.good.test': { A: ['127.0.0.1'] },
    '_mta-sts.good.test': sts,
    'self.test': { MX: ['10 mx.self.test'] },
    'mx.self.test': { A: ['127.0.0.2'] },
    '_mta-sts.self.test': sts,
    'plain.test': { MX: ['10 mx.plain.test'] },
    'mx.plain.test': { A: ['127.0.0.3'] },
    '_mta-sts.plain.test': sts,
    'testing.test': { MX: ['10 mx.testing.test', '20 mx.plain.test'] },
    'mx.testing.test': { A: ['127.0.0.2'] },
    '_mta-sts.testing.test': sts,
    'second.test': { MX: ['5 mx.stranger.test', '10 mx.self.test', '20 mx.second.test'] },
    'mx.stranger.test': { A: ['127.0.0.3'] },
    'mx.second.test': { A: ['127.0.0.1'] },
    '_mta-sts.second.test': sts,
    'dane.test': { MX: ['10 mx.dane.test'] },
    'mx.dane.test': { A: ['127.0.0.4'] },
    '_25._tcp.mx.dane.test': { TLSA: [`3 1 1 ${sha256(dane.spki)}`] },
    'wrong.dane.test': { MX: ['10 mx.wrong.dane.test'] },
    'mx.wrong.dane.test': { A: ['127.0.0.4'] },
    '_25._tcp.mx.wrong.dane.test': { TLSA: [`3 1 1 ${'00'.repeat(32)}`] },
    'bogus.dane.test': { MX: ['10 mx.bogus.dane.test'] },
    'mx.bogus.dane.test': { A: ['127.0.0.4'] },
    '_25._tcp.mx.bogus.dane.test': 'SERVFAIL',
    // The same host for two domains, one of which asks for more.
    'loose.test': { MX: ['10 mx.self.test'] },
    'broken.test': { A: ['127.0.0.5'] },
  });
  dns.secure.add('dane.test');
  dataDir = await mkdtemp(join(tmpdir(), 'mailstead-test-'));
  await mkdir(join(dataDir, 'config'));
  await writeFile(
    join(dataDir, 'config', 'delivery.json'),
    JSON.stringify({ dane: { resolver: dns.server } }),
  );
  app = await startApp({
    MAILSTEAD_DATA_DIR: dataDir,
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    MAILSTEAD_RETRY_SCHEDULE: '1h',
  });
  db = new Client({ connectionString: app.databaseUrl });
  await db.connect();
  for (const [domain, mode, mx] of [
    ['good.test', 'enforce', 'mx.good.test'],
    ['self.test', 'enforce', 'mx.self.test'],
    ['plain.test', 'enforce', '*.plain.test'],
    ['testing.test', 'testing', 'mx.elsewhere.test'],
    ['second.test', 'enforce', 'mx.second.test,mx.self.test'],
  ] as const) {
    await db.query(
      `insert into sts_policy (domain, policy_id, mode, mx, raw, max_age_seconds, fetched_at, checked_at,
         expires_at, last_used_at)
       values ($1, '1', $2, $3::jsonb, 'version: STSv1', 86400, now(), now(), now() + interval '1 day', now())`,
      [domain, mode, JSON.stringify(mx.split(','))],
    );
  }
});
test.after(async () => {
  await db.end();
  await app.stop();
  await dns.stop();
  for (const host of hosts) await host.stop();
  await rm(dataDir, { recursive: true, force: true });
  setDefaultCACertificates([...rootCertificates]);
});

const settled = async (id: string, state: string): Promise<Timeline> =>
  until(
    async () => (await app.call<Timeline>('GET', `/emails/${id}/timeline`)).body,
    ({ recipients }) => recipients[0]?.state === state,
  );
const send = async (to: string, state: string): Promise<Record<string, unknown>> => {
  const { recipients, events } = await settled(await app.send({ to }), state);
  const [recipient] = recipients;
  const { detail } = events.findLast(({ type }) => type === state) ?? { detail: {} };
  return { ...detail, last_code: recipient?.last_code, last_reply: recipient?.last_reply };
};
const took = (rcpt: string): readonly boolean[] =>
  hosts.flatMap(({ taken }) =>
    taken.filter((one) => one.rcpt === rcpt).map(({ isSecure }) => isSecure),
  );

test('MTA-STS enforce: a valid host gets the mail, verified', async () => {
  const { tls, tls_policy: policy } = await send('a@good.test', 'delivered');
  assert.match(String(tls), /^TLSv1\.3 \w+ verified$/);
  assert.is(policy, 'sts');
  assert.equal(took('a@good.test'), [true]);
});

test('MTA-STS enforce: no host is good enough, so the mail waits and nothing of it leaves', async () => {
  const self = await send('a@self.test', 'deferred');
  assert.is(self['cause'], 'tls_policy_failed');
  assert.is(self['last_code'], 'tls_policy_failed');
  assert.match(
    String(self['last_reply']),
    /^mx\.self\.test: its MTA-STS policy asks for verified encryption, and nobody whom we trust/,
  );
  assert.is(self['tls_policy'], 'sts');
  const plain = await send('a@plain.test', 'deferred');
  assert.is(plain['cause'], 'tls_policy_failed');
  for (const host of [at(1), at(2)]) {
    const lines = host.sessions.flatMap(({ transcript }) => transcript);
    assert.not.ok(lines.some((line) => line.startsWith('C: MAIL')));
  }
  assert.is(at(2).sessions.length, 1, 'no second session in plaintext');
});

test('MTA-STS testing: nothing is enforced', async () => {
  const { tls, tls_policy: policy, host } = await send('a@testing.test', 'delivered');
  assert.equal([policy, host], ['opportunistic', 'mx.testing.test']);
  assert.match(String(tls), /unverified$/);
});

test('a host that the policy does not name, and one that fails it, are passed over', async () => {
  const { host, tls_policy: policy } = await send('a@second.test', 'delivered');
  assert.equal([host, policy], ['mx.second.test', 'sts']);
  assert.equal(took('a@second.test'), [true]);
});

test('a session that was good enough for one domain is not for another that asks for more', async () => {
  assert.is((await send('a@loose.test', 'delivered'))['tls_policy'], 'opportunistic');
  assert.is((await send('b@self.test', 'deferred'))['cause'], 'tls_policy_failed');
  assert.equal(took('b@self.test'), []);
});

test('DANE: the certificate that is named, no other; what is bogus is not known', async () => {
  const good = await send('a@dane.test', 'delivered');
  assert.is(good['tls_policy'], 'dane');
  assert.match(String(good['tls']), / verified$/);
  const wrong = await send('a@wrong.dane.test', 'deferred');
  assert.is(wrong['cause'], 'tls_policy_failed');
  assert.match(String(wrong['last_reply']), /^mx\.wrong\.dane\.test: its TLSA records ask/);
  const bogus = await send('a@bogus.dane.test', 'deferred');
  assert.is(bogus['cause'], 'tls_policy_unknown');
  assert.match(
    String(bogus['last_reply']),
    /TLSA records of mx\.bogus\.dane\.test cannot be valid/,
  );
  assert.equal(at(3).taken.length, 1);
});

test('TLS-Required: No goes where the policy would not let it', async () => {
  const id = await app.send({ to: 'free@self.test', headers: { 'TLS-Required': 'No' } });
  await settled(id, 'delivered');
  assert.equal(took('free@self.test'), [true]);
});

test('broken STARTTLS: in plaintext, asked for once however many mails go', async () => {
  for (let number = 0; number < 3; number += 1) await send(`n${number}@broken.test`, 'delivered');
  const lines = at(4).sessions.flatMap(({ transcript }) => transcript);
  assert.is(lines.filter((line) => line === 'C: STARTTLS').length, 1);
});

test('a policy store that is away defers, and is no reason to do without', async () => {
  await db.query('alter table sts_policy rename to sts_policy_away');
  dns.zones['late.test'] = { MX: ['10 mx.good.test'] };
  const { cause } = await send('a@late.test', 'deferred');
  await db.query('alter table sts_policy_away rename to sts_policy');
  assert.is(cause, 'tls_policy_unknown');
  assert.equal(took('a@late.test'), []);
});

test('attempts keep policy, protocol and verdict; the results are counted for the reports', async () => {
  const { rows } = await db.query<{ tls_policy: string; count: string }>(
    'select tls_policy, count(*) from attempt where outcome is not null group by 1 order by 1',
  );
  assert.equal(
    rows.map(({ tls_policy: policy }) => policy),
    ['dane', 'opportunistic', 'required', 'sts'],
  );
  const counted = await until(
    async () =>
      (
        await db.query<{ domain: string; type: string; result: string }>(
          `select domain, policy->>'type' as type, result from tls_result order by domain, type, result`,
        )
      ).rows.map(({ domain, type, result }) => `${domain} ${type} ${result}`),
    (all) => all.includes('mx.wrong.dane.test tlsa validation-failure'),
  );
  for (const expected of [
    'good.test sts success',
    'self.test sts certificate-not-trusted',
    'plain.test sts starttls-not-supported',
    'testing.test sts validation-failure',
    'mx.dane.test tlsa success',
    'bogus.dane.test tlsa dnssec-invalid',
    'broken.test no-policy-found validation-failure',
  ]) {
    assert.ok(counted.includes(expected), `${expected} in ${counted.join(', ')}`);
  }
});

test('nothing broke inside', () => {
  assert.equal(
    app.complaints.filter((line) => /error|broke/i.test(line) && !line.includes('sts_policy')),
    [],
  );
});

test.run();
