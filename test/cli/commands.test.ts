// The operator's commands beside an appliance that runs, on a database of the setting: what they do, as text and as one
// JSON document, what they say when something is wrong, and with which exit code.
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { startApp, type App } from '../support/app.ts';
import { command, commandJson } from '../support/command-line.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { zonesOf } from '../support/domains.ts';
import { closeClients } from '../support/smtp-client.ts';
import { dialSubmission } from '../support/submission-session.ts';

interface List<T> {
  readonly object: string;
  readonly data: readonly T[];
  readonly has_more: boolean;
}
interface Named {
  readonly id: string;
  readonly name: string;
}

const test = suite('command line');
let app: App;
let dns: DnsServer;
let settings: Record<string, string>;
let acme: Named;

const run = (...words: readonly string[]) => command(settings, words);
const json = <T = Record<string, unknown>>(...words: readonly string[]) =>
  commandJson<T>(settings, words);

test.before(async () => {
  dns = await startDns({});
  const own = {
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_HOSTNAME: 'mail.host.test',
    MAILSTEAD_RETRY_SCHEDULE: '200ms',
    MAILSTEAD_MESSAGE_LIFETIME: '2s',
  };
  app = await startApp(own);
  settings = {
    ...own,
    // What a command releases does not expire while it is looked at.
    MAILSTEAD_MESSAGE_LIFETIME: '1h',
    MAILSTEAD_DATABASE_URL: app.databaseUrl,
    MAILSTEAD_DATA_DIR: app.dataDir,
  };
  acme = await json('tenant', 'create', 'Acme Inc.');
});

test.after(async () => {
  closeClients();
  await app.stop();
  await dns.stop();
});

test('tenants: made once by name, listed page by page', async () => {
  const again = await run('tenant', 'create', ' Acme Inc. ');
  assert.is(again.code, 1);
  assert.match(again.err, /there is a tenant "Acme Inc\."/);
  assert.is((await run('tenant', 'create', 'two\nlines')).code, 1);

  const first = await json<List<Named & { is_operator: boolean }>>(
    'tenant',
    'list',
    '--limit',
    '1',
  );
  assert.equal(
    first.data.map(({ name }) => name),
    ['Acme Inc.'],
  );
  assert.ok(first.has_more);
  const [last] = first.data;
  const second = await json<typeof first>('tenant', 'list', '--after', last!.id);
  assert.equal(
    second.data.map(({ name, is_operator }) => ({ name, is_operator })),
    [{ name: 'first', is_operator: true }],
  );
  const { out } = await run('tenant', 'list', '--limit', '1');
  assert.match(out, /^ID +NAME +OPERATOR +CREATED\n[0-9a-f-]{36} +Acme Inc\. +no +20/);
  assert.match(out, new RegExp(`--after ${last!.id}\n$`));
});

test('keys: the token is shown once and works until it is revoked', async () => {
  const made = await json<{ id: string; token: string; permission: string }>(
    'key',
    'create',
    'Acme Inc.',
    '--name',
    'the shop',
  );
  assert.is(made.permission, 'full_access');
  const ask = async () => (await app.call('GET', '/domains', { key: made.token })).status;
  assert.is(await ask(), 200);

  const listed = await run('key', 'list', '--tenant', acme.id);
  assert.match(listed.out, /the shop/);
  assert.not.match(listed.out, new RegExp(made.token));
  const all = await json<List<{ tenant_id: string }>>('key', 'list');
  assert.is(new Set(all.data.map((key) => key.tenant_id)).size, 2);

  assert.match((await run('key', 'revoke', made.id)).out, /^Revoked re_/);
  assert.is(await ask(), 401);
  const again = await run('key', 'revoke', made.id);
  assert.is(again.code, 1);
  assert.match(again.err, /revoked already.*`key list` shows/);
  assert.match((await run('key', 'revoke', 'nonsense')).err, /`key list` shows/);
  assert.match((await run('key', 'create', 'nobody')).err, /`tenant list` shows/);
});

test('domains: a real look at the DNS, record by record', async () => {
  const { token } = await json<{ token: string }>('key', 'create', acme.id);
  const made = await app.call<{ id: string }>('POST', '/domains', {
    body: { name: 'shop.host.test' },
    key: token,
  });
  const before = await run('domain', 'verify', 'shop.host.test');
  assert.is(before.code, 1);
  assert.match(
    before.out,
    /^-- {2}SPF MX send\.shop\.host\.test: \w+\n +expected {2}10 mail\.host\.test\n +found {5}\S/m,
  );
  assert.match(before.out, /^-- {2}DKIM TXT /m);

  const { body } = await app.call<Parameters<typeof zonesOf>[0]>(
    ...(['GET', `/domains/${made.body.id}`, { key: token }] as const),
  );
  Object.assign(dns.zones, zonesOf(body));
  const after = await json<{ status: string; records: { status: string; found: string | null }[] }>(
    'domain',
    'verify',
    made.body.id,
  );
  assert.is(after.status, 'verified');
  assert.ok(after.records.length >= 4);
  assert.ok(after.records.every(({ status, found }) => status === 'verified' && found === null));

  const list = await json<List<Named>>('domain', 'list', '--tenant', 'Acme Inc.');
  assert.equal(
    list.data.map(({ name }) => name),
    ['shop.host.test'],
  );
  assert.match((await run('domain', 'list')).out, /mailstead\.test/);
  const missing = await run('domain', 'verify', 'missing.host.test');
  assert.is(missing.code, 1);
  assert.match(missing.err, /`domain list` shows/);

  const bound = await json<{ permission: string; domain_id: string }>(
    'key',
    'create',
    acme.id,
    '--domain',
    'shop.host.test',
  );
  assert.equal([bound.permission, bound.domain_id], ['sending_access', made.body.id]);
});

test('domains: that many other tenants have the name hides nobody', async () => {
  const pool = new Pool({ connectionString: app.databaseUrl, max: 1 });
  try {
    const others = Array.from({ length: 30 }, () => [newId(), newId()] as const);
    for (const [tenant, domain] of others) {
      await pool.query('insert into tenant (id, name) values ($1, $2)', [tenant, tenant.slice(-9)]);
      await pool.query(
        `insert into sending_domain (tenant_id, id, name, status) values ($1, $2, 'all.host.test', 'not_started')`,
        [tenant, domain],
      );
    }
    const [tenant, domain] = others.at(-1)!;
    const key = await json('key', 'create', tenant, '--domain', 'all.host.test');
    assert.is(key['domain_id'], domain);
    const looked = await run('domain', 'verify', 'all.host.test', '--tenant', tenant);
    assert.match(looked.out, new RegExp(`^id +${domain}$`, 'm'));
    // Other tests name tenants by what is shown first.
    await pool.query(`delete from api_key where tenant_id = $1`, [tenant]);
    for (const table of ['sending_domain', 'tenant']) {
      const column = table === 'tenant' ? 'id' : 'tenant_id';
      await pool.query(`delete from ${table} where ${column} = any ($1)`, [
        others.map(([id]) => id),
      ]);
    }
  } finally {
    await pool.end();
  }
});

test('explain: every attempt with its host and reply, by id and by Message-ID', async () => {
  const id = await app.send({ subject: 'Olá \u202e', to: 'ok@recipient.test' });
  await app.untilEvent(id, 'delivered');
  const { out, code } = await run('explain', id);
  assert.is(code, 0);
  assert.match(out, /^last event +delivered$/m);
  assert.match(out, /attempt_started {2}ok@recipient\.test\n/);
  assert.match(out, /delivered {2}ok@recipient\.test\n +to +sink \[127\.0\.0\.1\] port \d+\n/);
  assert.match(out, /reply +250 /);
  assert.match(out, /Nothing is left to wait for\.\n$/);
  assert.match(out, /Olá \\u\{202e\}/);
  const plain = await command(settings, ['explain', id], true);
  assert.match(plain.out, /Ol\\u\{e1\}/);
  assert.ok(/^[\n -~]*$/.test(plain.out));

  const told = await json<{ email_id: string; message_id: string; events: unknown[] }>(
    'explain',
    id,
  );
  const same = await app.call<{ events: unknown[] }>('GET', `/emails/${id}/timeline`);
  assert.equal(told.events, same.body.events);
  const byName = await json<{ email_id: string }>('explain', told.message_id);
  assert.is(byName.email_id, id);

  const missing = await run('explain', acme.id);
  assert.is(missing.code, 1);
  assert.match(missing.err, /No sent email has the id.*GET \/emails/);
  assert.match((await run('explain', 'order 4711')).err, /neither the id of an email/);
});

test("explain: a Message-ID of a client's own", async () => {
  const client = await dialSubmission(app.appliance.submissionPort!);
  await client.secure();
  await client.logIn('resend', app.key);
  await client.say('MAIL FROM:<ada@mailstead.test>');
  await client.say('RCPT TO:<ok@recipient.test>');
  await client.say('DATA');
  const taken = await client.say(
    'From: ada@mailstead.test\r\nTo: ok@recipient.test\r\nSubject: hi\r\n' +
      'Message-ID: <order-4711@shop.example>\r\n\r\nwords\r\n.',
  );
  assert.match(taken, /^250/);
  const found = await json<{ message_id: string }>('explain', 'order-4711@shop.example');
  assert.is(found.message_id, '<order-4711@shop.example>');
});

test('queue: paused, looked at, released, resumed', async () => {
  const id = await app.send({ to: 'tempfail@recipient.test' });
  await app.untilEvent(id, 'bounced');
  const pause = await json<{ id: string; kind: string }>(
    'queue',
    'pause',
    'all',
    '--reason',
    'moving house',
  );
  assert.is(pause.kind, 'all');
  assert.match(
    (await run('queue', 'pauses')).out,
    new RegExp(`^${pause.id} +all +- +moving house`, 'm'),
  );

  const released = await run('queue', 'release', id);
  assert.match(released.out, /^On its way again to tempfail@recipient\.test/);
  const waiting = await run('explain', id);
  assert.match(
    waiting.out,
    /Why it waits \(paused\)\n {2}All delivery is paused by the operator: moving house\./,
  );
  const not = await run('queue', 'release', id);
  assert.is(not.code, 1);
  assert.match(not.err, /No recipient of this email was given up/);

  const queue = await json<{ object: string; totals: { ready: number } }>('queue');
  const same = await app.call<{ totals: { ready: number } }>('GET', '/queue');
  assert.equal([queue.object, queue.totals.ready], ['queue', same.body.totals.ready]);
  assert.match((await run('queue')).out, /^ready +1\n[^]*^LANE +READY[^]*^ID +KIND/m);

  assert.match((await run('queue', 'resume', pause.id)).out, /^Resumed/);
  assert.match((await run('queue', 'resume', pause.id)).err, /`queue pauses` shows/);
  assert.is((await run('queue', 'pauses')).out, 'Nothing is paused.\n');
  const wrong = await run('queue', 'pause', 'lane', 'no lane', '--until', 'tomorrow');
  assert.is(wrong.code, 1);
  assert.match(wrong.err, /must be the name of a lane[^]*`--until` must be a time/);
});

test('suppressions: whose they are has to be said where there are several tenants', async () => {
  await app.call('POST', '/suppressions', { body: { email: 'reject@recipient.test' } });
  const several = await run('suppression', 'list');
  assert.is(several.code, 1);
  assert.match(several.err, /--tenant/);
  const listed = await json<List<{ email: string }>>('suppression', 'list', '--tenant', 'first');
  assert.equal(
    listed.data.map(({ email }) => email),
    ['reject@recipient.test'],
  );
  const removed = await run('suppression', 'remove', 'Reject@recipient.test', '--tenant', 'first');
  assert.is(removed.code, 0);
  const again = await run('suppression', 'remove', 'reject@recipient.test', '--tenant', 'first');
  assert.is(again.code, 1);
  assert.match(again.err, /does not suppress/);
});

test('what is used wrongly says how to use it, with exit code 64; wrong settings with 78', async () => {
  const unknown = await run('tenent');
  assert.equal([unknown.code, unknown.out], [64, '']);
  assert.match(unknown.err, /unknown command 'tenent'\n\(Did you mean tenant\?\)/);
  assert.match((await run('key', 'lst')).err, /Did you mean list/);
  assert.match((await run('queue', 'paus')).err, /unknown command 'paus'\n\(Known are: pause, /);
  assert.is((await run()).code, 64);
  const none = await run('tenant', '--json');
  assert.is((JSON.parse(none.out) as { message: string }).message, 'a command is missing');
  assert.is((await run('tenant')).code, 64);
  assert.is((await run('tenant', 'list', '--limit', '101')).code, 64);
  assert.is((await run('tenant', 'list', '--bogus')).code, 64);
  assert.is((await run('key', 'create', 'first', '--permission', 'root')).code, 64);
  const bad = await command({ ...settings, MAILSTEAD_WORKERS: 'many' }, [
    'tenant',
    'list',
    '--json',
  ]);
  assert.is(bad.code, 78);
  const { object, message, exit_code: code } = JSON.parse(bad.out) as Record<string, unknown>;
  assert.equal([object, code], ['error', 78]);
  assert.match(String(message), /MAILSTEAD_WORKERS/);
  const away = await command(
    { ...settings, MAILSTEAD_DATABASE_URL: 'postgres://u:verysecret@127.0.0.1:1/x' },
    ['tenant', 'list'],
  );
  assert.is(away.code, 1);
  assert.match(away.err, /^mailstead: the database at 127\.0\.0\.1:1 does not answer/);
  assert.not.match(away.err, /verysecret/);
});

test('every command has help with an example, and an answer to --json', async () => {
  const paths = ['', ...(await subcommands([]))];
  assert.ok(paths.length > 15);
  for (const path of paths) {
    const { code, out } = await run(...path.split(' ').filter(Boolean), '--help');
    assert.is(code, 0, path);
    const isLeaf = !/^Commands:$/m.test(out);
    assert.ok(!isLeaf || /^Example:\n {2}mailstead /m.test(out), `${path} has no example`);
    assert.match(out, /--json/);
  }
});

async function subcommands(above: readonly string[]): Promise<string[]> {
  const { out } = await run(...above, '--help');
  const listed = /\nCommands:\n([^]*?)(?:\n\n|\n$)/.exec(out)?.[1] ?? '';
  const names = [...listed.matchAll(/^ {2}([a-z][a-z-]*)/gm)].map(([, name]) => name!);
  const paths: string[] = [];
  for (const name of names.filter((one) => one !== 'help')) {
    const path = [...above, name];
    paths.push(path.join(' '), ...(await subcommands(path)));
  }
  return paths;
}

test.run();
