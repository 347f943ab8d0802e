// The doctor of a running appliance, through the API and the command line: who may ask, how often, and what is said when the
// database is away.
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createKey, newToken } from '../../src/access/keys.ts';
import { runCommandLine } from '../../src/compose-cli.ts';
import { loadConfig } from '../../src/config.ts';
import { startApp, type Answer, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { told } from '../support/outbox.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';

interface Found {
  readonly code: string;
  readonly subject: string;
  readonly severity: string;
  readonly message: string;
  readonly advice: string | null;
}
interface State {
  readonly object: string;
  readonly looked_at: string | null;
  readonly status: string;
  readonly counts: Readonly<Record<string, number>>;
  readonly findings: { readonly data: readonly Found[]; readonly has_more: boolean };
}

const test = suite('doctor routes');
let app: App;
let dns: DnsServer;
let other: { tenantId: string; key: string };

test.before(async () => {
  dns = await startDns({ 'mail.host.test': { A: ['192.0.2.7'] } });
  app = await startApp({
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_HOSTNAME: 'mail.host.test',
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_PRIVATE_HOSTS: '192.0.2.0/24',
  });
  other = await secondTenant(app);
});
test.after(async () => {
  await app.stop();
  await dns.stop();
});

const find = (data: readonly Found[], code: string): Found | undefined =>
  data.find((finding) => finding.code === code);

test('before the first look there is nothing', async () => {
  const { status, body } = await app.call<State>('GET', '/doctor');
  assert.is(status, 200);
  assert.equal([body.looked_at, body.status, body.findings.data], [null, 'ok', []]);
});

test('for every other key the routes do not exist', async () => {
  const sending = newToken();
  await onDatabase(app, async (pool) => {
    const { rows } = await pool.query<{ tenant_id: string }>(
      'select tenant_id from api_key where tenant_id <> $1 limit 1',
      [other.tenantId],
    );
    await createKey(pool, {
      tenantId: rows[0]!.tenant_id,
      name: 'sending',
      token: sending,
      permission: 'sending_access',
      domainId: null,
    });
  });
  const volatile = ['date', 'x-request-id', 'ratelimit-remaining', 'ratelimit-reset'];
  const seen = ({ status, headers, body }: Answer, path: string): unknown => [
    status,
    JSON.stringify(body).replaceAll(path, 'PATH'),
    [...headers].filter(([name]) => !volatile.includes(name)).map(([name]) => name),
  ];
  for (const key of [other.key, sending]) {
    for (const [method, rest] of [
      ['GET', ''],
      ['POST', '/run'],
      ['PUT', '/run'],
    ] as const) {
      const here = await app.call(method, `/doctor${rest}`, { key });
      assert.is(here.status, 404);
      assert.equal(
        seen(here, '/doctor'),
        seen(await app.call(method, `/dockers${rest}`, { key }), '/dockers'),
      );
    }
  }
  assert.is((await app.call('GET', '/doctor', { key: null })).status, 401);
  assert.is((await app.call('DELETE', '/doctor')).status, 405);
  assert.is((await app.call('POST', '/doctor/run?active=maybe')).status, 422);
});

test('looking now finds, keeps and tells; not twice in a row', async () => {
  const endpoint = 'http://127.0.0.1:1024/';
  const hook = { endpoint, events: ['doctor.finding_changed'] };
  assert.is((await app.call('POST', '/webhooks', { body: hook })).status, 201);
  const { status, body } = await app.call<State>('POST', '/doctor/run?active=true');
  assert.is(status, 200);
  assert.is(body.status, 'error');
  const { data } = body.findings;
  assert.is(find(data, 'reverse_dns')?.severity, 'error');
  assert.is(find(data, 'helo_name')?.severity, 'ok');
  assert.is(find(data, 'resolver')?.severity, 'ok');
  assert.match(find(data, 'domain')?.message ?? '', 'development mode only');
  assert.ok(
    data.every(({ severity, advice }) => ['ok', 'info'].includes(severity) || advice !== null),
  );
  const severities = data.map(({ severity }) => severity);
  assert.ok(severities.lastIndexOf('error') < severities.indexOf('ok'), 'the worst first');
  assert.is(body.counts['ok'], severities.filter((severity) => severity === 'ok').length);
  // What others run was not asked about: no MX of a big provider, no block list but of our own address.
  const asked = dns.questions.map(({ name }) => name);
  assert.not.ok(asked.some((name) => /gmail|outlook|yahoo/.test(name)));

  const again = await app.call<{ name: string; message: string }>('POST', '/doctor/run');
  assert.is(again.status, 429);
  assert.ok(Number(again.headers.get('retry-after')) > 0);
  assert.match(again.body.message, 'GET /doctor');
  assert.equal((await app.call<State>('GET', '/doctor')).body.findings, body.findings);

  const events = await onDatabase(app, async (pool) => {
    const { rows } = await pool.query<{ payload: string }>(
      `select payload from webhook_event where type = 'doctor.finding_changed'`,
    );
    return [
      ...rows.map(({ payload }) => (JSON.parse(payload) as { data: Found }).data),
      ...(await told({ pool })).map(({ detail }) => detail as unknown as Found),
    ];
  });
  assert.ok(events.some(({ code, severity }) => code === 'reverse_dns' && severity === 'error'));
  assert.not.ok(events.some(({ severity }) => severity === 'ok'));
  assert.ok(app.complaints.some((line) => /doctor.*reverse_dns/s.test(line)));
});

async function command(
  words: readonly string[],
  settings: Readonly<Record<string, string>>,
): Promise<{ code: number; out: string; err: string }> {
  const texts = { out: '', err: '' };
  const code = await runCommandLine(words, {
    readConfig: () => loadConfig({ MAILSTEAD_MODE: 'development', ...settings }),
    stdout: { write: (text: string) => ((texts.out += text), true) },
    stderr: { write: (text: string) => ((texts.err += text), true) },
    signal: new AbortController().signal,
    isAscii: false,
  });
  return { code, ...texts };
}

test('the command says what to do, beside the appliance and without a database', async () => {
  const dataDir = await mkdtemp(join(tmpdir(), 'mailstead-doctor-'));
  const settings = {
    MAILSTEAD_DATA_DIR: dataDir,
    MAILSTEAD_DATABASE_URL: app.databaseUrl,
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_HOSTNAME: 'mail.host.test',
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_PRIVATE_HOSTS: '192.0.2.0/24',
  };
  const beside = await command(['--json', 'doctor'], settings);
  assert.is(beside.code, 1, beside.err);
  const json = JSON.parse(beside.out) as { status: string; findings: readonly Found[] };
  assert.is(json.status, 'error');
  assert.is(find(json.findings, 'reverse_dns')?.severity, 'error');
  assert.ok(
    json.findings.some(({ code, subject }) => code === 'database' && subject === 'latency'),
  );

  const away = { ...settings, MAILSTEAD_DATABASE_URL: 'postgres://nobody@127.0.0.1:1/none' };
  const without = await command(['doctor'], away);
  assert.is(without.code, 1);
  assert.match(without.out, /ERROR \(\d+\)\n/);
  assert.match(without.out, /database connection\n {4}The database cannot be used/);
  assert.match(without.out, /reverse_dns 192\.0\.2\.7\n.*\n {4}-> Have the owner/);
  assert.not.match(without.out, 'nobody@');
  assert.match(without.out, /findings: .*error/);

  const unknown = await command(['doctor', '--domain', 'none.test'], settings);
  assert.is(unknown.code, 1);
  assert.match(unknown.err, 'There is no domain none.test here');
  await rm(dataDir, { recursive: true });
});

test('what is well ends with 0', async () => {
  const dataDir = await mkdtemp(join(tmpdir(), 'mailstead-doctor-'));
  dns.zones['well.test'] = { TXT: ['x'] };
  const { body } = await app.call<{ id: string; records: readonly Published[] }>(
    'POST',
    '/domains',
    {
      body: { name: 'well.test' },
    },
  );
  for (const { name, type, value, priority } of body.records) {
    const full = name.endsWith('well.test') ? name : `${name}.well.test`;
    const zone = (dns.zones[full] ?? {}) as { TXT?: string[]; MX?: string[] };
    if (type === 'TXT') dns.zones[full] = { ...zone, TXT: [...(zone.TXT ?? []), value] };
    else if (type === 'MX') dns.zones[full] = { ...zone, MX: [`${priority} ${value}`] };
  }
  dns.zones['7.2.0.192.in-addr.arpa'] = { PTR: ['mail.host.test'] };
  await app.call('POST', `/domains/${body.id}/verify`);
  const settings = {
    MAILSTEAD_DATA_DIR: dataDir,
    MAILSTEAD_DATABASE_URL: app.databaseUrl,
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_HOSTNAME: 'mail.host.test',
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_PRIVATE_HOSTS: '192.0.2.0/24',
    MAILSTEAD_PUBLIC_URL: 'https://mail.host.test',
  };
  const well = await command(['doctor', '--domain', 'Well.test', '--all'], settings);
  assert.is(well.code, 0, well.out + well.err);
  assert.match(well.out, /OK \(\d+\)/);
  assert.match(well.out, 'sender_rules_google well.test');
  await rm(dataDir, { recursive: true });
});

interface Published {
  readonly name: string;
  readonly type: string;
  readonly value: string;
  readonly priority?: number;
}

test.run();
