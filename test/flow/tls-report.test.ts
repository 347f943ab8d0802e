// A TLS report on its whole way: the failure happens, is counted, and the next day's report reaches the domain in
// plaintext, past the very policy that held the mail back; signed, with a return path of ours, and not counted itself.
import { gunzipSync } from 'node:zlib';
import { dkimVerify } from 'mailauth/lib/dkim/verify.js';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { header, read } from '../support/composed.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

const test = suite('tls-report');
let app: App;
let dns: DnsServer;
let peer: RawPeer;
let db: Client;

test.before(async () => {
  peer = await startRawPeer();
  dns = await startDns({
    'one.test': { MX: ['10 mx.one.test'] },
    'mx.one.test': { A: ['127.0.0.1'] },
    '_mta-sts.one.test': { TXT: ['v=STSv1; id=1'] },
    '_smtp._tls.one.test': { TXT: ['v=TLSRPTv1; rua=mailto:tls@one.test'] },
  });
  app = await startApp({
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(peer.port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    MAILSTEAD_RETRY_SCHEDULE: '1h',
    MAILSTEAD_HOSTNAME: 'mx7.mailstead.test',
  });
  db = new Client({ connectionString: app.databaseUrl });
  await db.connect();
  await db.query(
    `insert into sts_policy (domain, policy_id, mode, mx, raw, max_age_seconds, fetched_at, checked_at,
       expires_at, last_used_at)
     values ('one.test', '1', 'enforce', '["mx.one.test"]', $1, 86400, now(), now(),
       now() + interval '1 day', now())`,
    ['version: STSv1\nmode: enforce\nmx: mx.one.test\nmax_age: 86400\n'],
  );
});
test.after(async () => {
  await db.end();
  await app.stop();
  await dns.stop();
  await peer.stop();
});

const counted = async (): Promise<
  readonly { domain: string; result: string; sessions: number }[]
> =>
  (
    await db.query<{ domain: string; result: string; sessions: number }>(
      'select domain, result, sessions::int from tls_result order by domain, result',
    )
  ).rows;

test('a failure is counted and reported', async () => {
  const id = await app.send({ to: 'a@one.test', from: 'Ada <ada@mailstead.test>' });
  const lost = { domain: 'one.test', result: 'starttls-not-supported', sessions: 1 };
  assert.equal(await until(counted, (rows) => rows.length > 0), [lost]);
  assert.is(peer.messages.length, 0, 'the policy held the mail back');

  // Two days later.
  await db.query('update tls_result set day = day - 2');
  const { rows: days } = await db.query<{ day: string }>(
    `select to_char(day, 'YYYY-MM-DD') as day from tls_result`,
  );
  await until(
    () =>
      db.query(
        `update agenda_jobs set next_run_at = now() where name = 'send-tls-reports' returning id`,
      ),
    ({ rows }) => rows.length === 1,
  );
  await until(
    () => Promise.resolve(peer.messages.length),
    (count) => count > 0,
  );
  const [message] = peer.messages;
  assert.match(message?.mail ?? '', /^FROM:<b\+[a-z0-9]+@send\.mailstead\.test>/);
  assert.equal(message?.rcpts, ['TO:<tls@one.test>']);
  const raw = message?.raw ?? Buffer.alloc(0);
  assert.is(header(raw, 'From'), 'tls-reports@mailstead.test');
  assert.is(header(raw, 'TLS-Required'), 'No');
  const [file] = (await read(raw)).attachments;
  assert.is(file?.contentType, 'application/tlsrpt+gzip');
  const day = days[0]?.day ?? '';
  const document = JSON.parse(gunzipSync(file?.content ?? Buffer.alloc(0)).toString()) as Record<
    string,
    unknown
  >;
  assert.is(
    file?.filename,
    `mailstead.test!one.test!${Date.parse(day) / 1_000}!${Date.parse(day) / 1_000 + 86_399}!${String(document['report-id'])}.json.gz`,
  );
  assert.equal(document['date-range'], {
    'start-datetime': `${day}T00:00:00Z`,
    'end-datetime': `${day}T23:59:59Z`,
  });
  const policies = document['policies'] as Record<string, unknown>[];
  assert.is(policies.length, 1);
  const policy = policies[0]!;
  assert.equal(policy['policy'], {
    'policy-type': 'sts',
    'policy-string': ['version: STSv1', 'mode: enforce', 'mx: mx.one.test', 'max_age: 86400'],
    'policy-domain': 'one.test',
    'mx-host': ['mx.one.test'],
  });
  assert.equal(policy['summary'], {
    'total-successful-session-count': 0,
    'total-failure-session-count': 1,
  });
  const [details] = policy['failure-details'] as Record<string, unknown>[];
  assert.is(details?.['result-type'], 'starttls-not-supported');
  assert.is(details?.['receiving-mx-hostname'], 'mx.one.test');
  assert.is(details?.['receiving-ip'], '127.0.0.1');
  assert.is(details?.['failed-session-count'], 1);

  // Signed by the author's domain.
  const { rows: keys } = await db.query<{ selector: string; public_record: string }>(
    'select selector, public_record from dkim_key',
  );
  const records = new Map(
    keys.map((key) => [`${key.selector}._domainkey.mailstead.test`, key.public_record]),
  );
  const { results } = await dkimVerify(raw, {
    resolver: (name: string) => {
      const record = records.get(name);
      if (record === undefined) throw Object.assign(new Error(name), { code: 'ENOTFOUND' });
      return Promise.resolve([[record]]);
    },
  });
  assert.ok(results.length > 0);
  for (const { status, signingDomain } of results) {
    assert.equal([status.result, signingDomain], ['pass', 'mailstead.test']);
  }
  const { body: waiting } = await app.call('GET', `/emails/${id}`);
  assert.is(waiting['last_event'], 'delivery_delayed', 'the mail still waits for TLS');
});

test('the report is an email like any other, and no session to count', async () => {
  const { body } = await app.call<{ data: { id: string; to: string[]; subject: string }[] }>(
    'GET',
    '/emails',
  );
  const report = body.data.find(({ to }) => to.includes('tls@one.test'));
  assert.match(report?.subject ?? '', /^Report Domain: one\.test Submitter: mailstead\.test /);
  await app.untilEvent(report?.id ?? '', 'delivered');
  const { body: trace } = await app.call<{ events: { type: string; detail: { via?: string } }[] }>(
    'GET',
    `/emails/${report?.id}/timeline`,
  );
  const accepted = trace.events.find(({ type }) => type === 'accepted');
  assert.is(accepted?.detail.via, 'tls_report');
  const { rows } = await db.query('select state, detail from tls_report');
  assert.equal(rows, [{ state: 'sent', detail: '' }]);
  // What is counted is stored at the latest when it stops.
  await app.appliance.stop();
  const { rows: today } = await db.query(
    `select from tls_result where day >= (now() at time zone 'utc')::date - 1`,
  );
  assert.is(today.length, 0);
});

test.run();
