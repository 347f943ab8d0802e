// Daily TLS reports over a real DNS, a real HTTPS server and the real queue: who gets one, what it says, that nobody
// gets it twice whatever dies in between, and that a record cannot lead it into the operator's network.
import { once } from 'node:events';
import { mkdtemp, rm } from 'node:fs/promises';
import type { IncomingHttpHeaders } from 'node:http';
import { createServer as createHttps, type Server } from 'node:https';
import { createServer as createTcp, type AddressInfo, type Server as TcpServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gunzipSync } from 'node:zlib';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import { createResolver, type Resolver } from '../../src/dns/resolver.ts';
import { createDomainLookup } from '../../src/domains/lookup.ts';
import { createGroupCommit } from '../../src/queue/group-commit.ts';
import { makeSelfSigned } from '../../src/self-signed.ts';
import { acceptMessage } from '../../src/sending/accept.ts';
import {
  createTlsReporter,
  forgetTlsResults,
  type TlsReporter,
  type TlsReporterDependencies,
} from '../../src/sending/tls-report.ts';
import type { TlsReport } from '../../src/sending/tls-report-document.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { until } from '../support/app.ts';
import { header, read } from '../support/composed.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';

/** Plays the public internet; the rest of loopback is inside. */
const PUBLIC = '127.0.0.2';
const test = suite('tls report');
let bench: Bench;
let folder: string;
let dns: DnsServer;
let resolver: Resolver;
let web: Server;
let trap: TcpServer;
let port = 0;
let knocks = 0;
let posts: { path: string; method: string; headers: IncomingHttpHeaders; body: Buffer }[] = [];
/** By path; a gate holds the answer back. */
let statuses: Record<string, number | Promise<number>> = {};
let authority = '';
const reporters: TlsReporter[] = [];

test.before(async () => {
  bench = await openQueue();
  folder = await mkdtemp(join(tmpdir(), 'mailstead-tls-report-'));
  const { cert, key } = makeSelfSigned('reports.test', new Date());
  authority = cert;
  web = createHttps({ cert, key }, (request, response) => {
    const chunks: Buffer[] = [];
    request.on('data', (chunk: Buffer) => chunks.push(chunk));
    request.on('end', () => {
      const path = request.url ?? '';
      posts.push({
        path,
        method: request.method ?? '',
        headers: request.headers,
        body: Buffer.concat(chunks),
      });
      void Promise.resolve(statuses[path] ?? 200).then((status) =>
        response.writeHead(status, { location: '/elsewhere' }).end('thanks'),
      );
    });
  });
  web.listen(0, PUBLIC);
  await once(web, 'listening');
  port = (web.address() as AddressInfo).port;
  trap = createTcp((socket) => {
    knocks += 1;
    socket.destroy();
  });
  trap.listen(port, '127.0.0.1');
  await once(trap, 'listening');
  dns = await startDns({});
  resolver = createResolver({
    servers: [dns.server],
    timeoutMs: 150,
    tries: 1,
    keepsAnswers: false,
  });
});
test.after(async () => {
  // Some of them are meant to be dead: not waited for.
  for (const one of reporters) void one.stop();
  resolver.close();
  await dns.stop();
  web.closeAllConnections();
  web.close();
  trap.close();
  await bench.stop();
  await rm(folder, { recursive: true, force: true });
});
test.before.each(async () => {
  const { pool } = bench.store;
  posts = [];
  statuses = {};
  knocks = 0;
  for (const name of Object.keys(dns.zones)) delete dns.zones[name];
  dns.zones['reports.test'] = { A: [PUBLIC] };
  dns.zones['other.reports.test'] = { A: [PUBLIC] };
  dns.zones['inside.test'] = { A: ['127.0.0.1'] };
  for (const table of [
    'tls_result',
    'tls_report',
    'delivery',
    'email',
    'email_content',
    'idempotency_key',
    'sending_domain',
  ]) {
    await pool.query(`delete from ${table}`);
  }
  await addDomain('sender.test');
});

const addDomain = async (name: string): Promise<void> => {
  await bench.store.pool.query(
    `insert into sending_domain (tenant_id, id, name, status, sending_verified)
      values ($1, $2, $3, 'verified', true)`,
    [bench.tenantId, newId(), name],
  );
};
const publish = (domain: string, rua: string): void => {
  dns.zones[`_smtp._tls.${domain}`] = { TXT: [`v=TLSRPTv1; rua=${rua}`] };
};
const url = (path: string, host = 'reports.test'): string => `https://${host}:${port}${path}`;

/** `daysAgo` of UTC. */
async function count(domain: string, daysAgo = 2): Promise<void> {
  const insert = `insert into tls_result (day, domain, policy, policy_hash, mx_host, receiving_ip, sending_ip,
      result, reason, sessions)
    values ((now() at time zone 'utc')::date - $1::integer, $2,
      '{"type": "sts", "strings": ["version: STSv1"], "mxHosts": ["*.mail.test"]}', 'hash', $3, '', '', $4, null, $5)`;
  await bench.store.pool.query(insert, [daysAgo, domain, '', 'success', 40]);
  await bench.store.pool.query(insert, [daysAgo, domain, 'mx.test', 'certificate-expired', 2]);
}

async function accept(
  message: Parameters<TlsReporterDependencies['accept']>[0],
  key: string,
): Promise<unknown> {
  return acceptMessage(
    {
      store: bench.store,
      blobs: openDiskBlobs(folder),
      commit: createGroupCommit(bench.store.pool),
      domains: createDomainLookup(bench.store.pool, Buffer.alloc(32)),
      now: () => new Date(),
      laneOf: (domain) => `mx:${domain}`,
      lifetimeMs: 60_000,
      standIn: null,
      onStored: () => undefined,
    },
    { tenantId: bench.tenantId, keyId: '', permission: 'full_access', domainId: null },
    {
      message,
      idempotencyKey: key,
      origin: { via: 'tls_report', requestId: 'r', userAgent: null, address: null },
    },
  );
}

function open(about: Partial<TlsReporterDependencies> = {}): TlsReporter {
  const reporter = createTlsReporter({
    pool: bench.store.pool,
    log: silent,
    now: () => new Date(),
    hostname: 'appliance.test',
    tenantId: bench.tenantId,
    resolver,
    web: {
      resolver,
      guard: createAddressGuard({ allow: [`${PUBLIC}/32`] }),
      authorities: [authority],
    },
    accept,
    ...about,
  });
  reporters.push(reporter);
  return reporter;
}

interface ReportRow {
  readonly state: string;
  readonly detail: string | null;
  readonly attempts: number;
}
async function stateOf(domain: string): Promise<ReportRow> {
  const { rows } = await bench.store.pool.query<ReportRow>(
    'select state, detail, attempts from tls_report where domain = $1',
    [domain],
  );
  assert.is(rows.length, 1);
  return rows[0]!;
}
const makeDue = async (): Promise<void> =>
  void (await bench.store.pool.query(
    `update tls_report set due_at = now() - interval '1 minute' where state = 'pending'`,
  ));
async function emails(): Promise<readonly { raw: Buffer; recipient: string; ignores: boolean }[]> {
  const { rows } = await bench.store.pool.query<{
    raw: Buffer;
    recipient: string;
    ignores: boolean;
  }>(
    `select c.raw, d.recipient, c.ignores_tls_policy as ignores from email e
     join email_content c on c.tenant_id = e.tenant_id and c.email_id = e.id
     join delivery d on d.tenant_id = e.tenant_id and d.email_id = e.id order by d.recipient`,
  );
  return rows;
}
const untilPosted = (): Promise<number> =>
  until(
    () => Promise.resolve(posts.length),
    (times) => times === 1,
  );
const documentIn = (gzipped: Buffer | undefined): TlsReport =>
  JSON.parse(gunzipSync(gzipped ?? Buffer.alloc(0)).toString()) as TlsReport;
const recipients = async (): Promise<readonly string[]> =>
  (await emails()).map(({ recipient }) => recipient);

test('a report by email and by HTTPS, once, and then its counts are forgotten', async () => {
  await count('one.test');
  publish('one.test', `mailto:tls@one.test,${url('/v1/report?a=b')}`);
  await open().run();
  await open().run();
  await makeDue();
  await open().run();

  const sent = await emails();
  assert.equal(
    sent.map(({ recipient, ignores }) => [recipient, ignores]),
    [['tls@one.test', true]],
  );
  const raw = sent[0]?.raw ?? Buffer.alloc(0);
  assert.is(header(raw, 'From'), 'tls-reports@sender.test');
  assert.is(header(raw, 'TLS-Required'), 'No');
  assert.is(header(raw, 'TLS-Report-Domain'), 'one.test');
  assert.is(header(raw, 'TLS-Report-Submitter'), 'sender.test');
  assert.is(posts.length, 1);
  const [post] = posts;
  assert.is(`${post?.method} ${post?.path}`, 'POST /v1/report?a=b');
  assert.is(post?.headers['content-type'], 'application/tlsrpt+gzip');
  assert.is(post?.headers['content-length'], String(post?.body.length));
  const document = documentIn(post?.body);
  const [attached] = (await read(raw)).attachments;
  assert.equal(documentIn(attached?.content), document);
  assert.is(document.policies.length, 1);
  assert.equal(document.policies[0]?.summary, {
    'total-successful-session-count': 40,
    'total-failure-session-count': 2,
  });
  assert.is((await stateOf('one.test')).state, 'sent');

  await count('fresh.test', 0);
  await forgetTlsResults(bench.store.pool, 1_000);
  const { rows } = await bench.store.pool.query('select distinct domain from tls_result');
  assert.equal(rows, [{ domain: 'fresh.test' }]);
});

test('reports of a day go out over four hours after it, and never of the running day', async () => {
  for (let number = 0; number < 40; number++) await count(`d${number}.test`, 2);
  await count('today.test', 0);
  await count('ancient.test', 30);
  await bench.store.pool.query(
    `insert into tls_report (day, domain, state, due_at)
     values ((now() at time zone 'utc')::date - 2, 'd0.test', 'sent', now())`,
  );
  await open().run();
  const { rows } = await bench.store.pool.query(
    `select from tls_report where domain in ('today.test', 'ancient.test')`,
  );
  assert.equal(rows, [], 'neither today nor long ago');
  const asked = dns.questions.map(({ name }) => name);
  assert.ok(asked.includes('_smtp._tls.d1.test') && !asked.includes('_smtp._tls.d0.test'));

  // Those of a later day, before any is due.
  await bench.store.pool.query('delete from tls_report');
  await bench.store.pool.query(
    `update tls_result set day = (now() at time zone 'utc')::date - 1 where domain <> 'today.test'`,
  );
  const planner = open({ resolver: { txt: () => new Promise(() => undefined) } });
  void planner.run();
  const { rows: planned } = await until(
    () =>
      bench.store.pool.query<{ after: string; attempts: number }>(
        `select extract(epoch from coalesce(started_at, due_at)
           - (day + 1)::timestamp at time zone 'utc')::int as after, attempts
         from tls_report where domain like 'd%'`,
      ),
    (result) => result.rows.length === 40,
  );
  const delays = planned.filter(({ attempts }) => attempts === 0).map(({ after }) => Number(after));
  for (const delay of delays) assert.ok(delay >= 600 && delay < 600 + 4 * 3_600, `${delay} s`);
  assert.ok(delays.length >= 32 && new Set(delays).size > 16, 'spread');
});

test('a DNS that does not answer is asked again later', async () => {
  await count('one.test');
  dns.zones['_smtp._tls.one.test'] = 'SERVFAIL';
  const reporter = open();
  await reporter.run();
  assert.equal(await stateOf('one.test'), {
    state: 'pending',
    detail: 'DNS: SERVFAIL',
    attempts: 1,
  });
  publish('one.test', 'mailto:tls@one.test');
  await reporter.run();
  assert.equal(await recipients(), [], 'not due yet');
  await makeDue();
  await reporter.run();
  assert.equal(await recipients(), ['tls@one.test']);
  assert.equal(await stateOf('one.test'), { state: 'sent', detail: '', attempts: 2 });
});

test('it is given up within the life of its idempotency key', async () => {
  await count('one.test');
  dns.zones['_smtp._tls.one.test'] = 'SERVFAIL';
  await open().run();
  publish('one.test', 'mailto:tls@one.test');
  await bench.store.pool.query(
    `update tls_report set started_at = now() - interval '21 hours', due_at = now()`,
  );
  await open().run();
  assert.equal(await recipients(), []);
  const { state, detail } = await stateOf('one.test');
  assert.equal([state, detail], ['failed', 'it could not be sent within 20 hours']);
});

test('who asks for none gets none and is not asked again', async () => {
  for (const domain of ['no-name.test', 'two.test', 'odd.test']) await count(domain);
  dns.zones['_smtp._tls.two.test'] = {
    TXT: ['v=TLSRPTv1; rua=mailto:a@two.test', 'v=TLSRPTv1; rua=mailto:b@two.test'],
  };
  publish('odd.test', 'ftp://odd.test/');
  await open().run();
  for (const domain of ['no-name.test', 'two.test', 'odd.test']) {
    assert.is((await stateOf(domain)).state, 'nobody', domain);
  }
  dns.questions.length = 0;
  await makeDue();
  await open().run();
  assert.equal(dns.questions, []);
  assert.equal(await recipients(), []);
});

test('a record does not lead into the operator’s network, nor to other schemes', async () => {
  const refused = {
    'address.test': `https://127.0.0.1:${port}/`,
    'name.test': `https://inside.test:${port}/`,
    'short.test': `https://127.1:${port}/`,
    'local.test': `https://localhost:${port}/`,
    'port.test': 'https://reports.test:25/',
    'user.test': `https://a:b@reports.test:${port}/`,
    'wrong-name.test': url('/', 'other.reports.test'),
  };
  for (const [domain, rua] of Object.entries(refused)) {
    await count(domain);
    publish(domain, rua);
  }
  await open().run();
  for (const domain of Object.keys(refused)) {
    const { state, detail } = await stateOf(domain);
    assert.is(state, 'failed', `${domain}: ${detail}`);
    assert.not.match(detail ?? '', /stack|at file:/);
  }
  assert.is(knocks, 0, 'nobody knocked inside');
  assert.is(posts.length, 0);
});

test('a server that is busy is tried again, one that refuses or redirects is not', async () => {
  const refusing = { gone: 410, moved: 308 };
  statuses = { '/busy': 503, '/gone': refusing.gone, '/moved': refusing.moved };
  for (const name of ['busy', 'gone', 'moved']) {
    await count(`${name}.test`);
    publish(`${name}.test`, `${url('/fine')},${url(`/${name}`)},mailto:tls@${name}.test`);
  }
  const reporter = open();
  await reporter.run();
  assert.is((await stateOf('busy.test')).state, 'pending');
  for (const [name, status] of Object.entries(refusing)) {
    const { state, detail } = await stateOf(`${name}.test`);
    assert.equal(
      [state, detail],
      ['sent', `${url(`/${name}`)}: the server answered with status ${status}`],
    );
  }
  statuses['/busy'] = 202;
  await makeDue();
  await reporter.run();
  assert.is((await stateOf('busy.test')).state, 'sent');
  const paths = posts.map(({ path }) => path).toSorted();
  assert.equal(paths, ['/busy', '/busy', '/fine', '/fine', '/fine', '/gone', '/moved']);
  const busy = posts.filter(({ path }) => path === '/busy');
  assert.is(new Set(busy.map(({ body }) => documentIn(body)['report-id'])).size, 1);
  assert.is((await recipients()).length, 3, 'the emails went out once');
});

test('without a domain to send from: by HTTPS only, and the row says why', async () => {
  await bench.store.pool.query('delete from sending_domain');
  for (const domain of ['mail.test', 'both.test']) await count(domain);
  publish('mail.test', 'mailto:tls@mail.test');
  publish('both.test', `mailto:tls@both.test,${url('/both')}`);
  await open().run();
  assert.equal(await recipients(), []);
  const why = 'the first tenant has no verified domain to send it from';
  const { state, detail } = await stateOf('mail.test');
  assert.equal([state, detail], ['nobody', `mailto:tls@mail.test: ${why}`]);
  assert.is((await stateOf('both.test')).state, 'sent');
  assert.is(documentIn(posts[0]?.body)['organization-name'], 'appliance.test');
});

test('the author is of the domain nearest to the host name, else of the first', async () => {
  await addDomain('host.test');
  await count('one.test');
  publish('one.test', 'mailto:tls@one.test');
  await open({ hostname: 'mail.host.test' }).run();
  await count('two.test');
  publish('two.test', 'mailto:tls@two.test');
  await bench.store.pool.query(
    `update sending_domain set sending_verified = false where name = 'host.test'`,
  );
  await open({ hostname: 'mail.host.test' }).run();
  assert.equal(
    (await emails()).map(({ raw }) => header(raw, 'From')),
    ['tls-reports@host.test', 'tls-reports@sender.test'],
  );
});

test('a crash after the email was stored, or while a request is under way, sends nothing twice', async () => {
  await count('mail.test');
  publish('mail.test', 'mailto:tls@mail.test');
  let stored = 0;
  const dies: TlsReporterDependencies['accept'] = async (message, key) => {
    await accept(message, key);
    stored += 1;
    return new Promise(() => undefined); // the process is gone
  };
  void open({ accept: dies }).run();
  await until(
    () => Promise.resolve(stored),
    (times) => times === 1,
  );
  await makeDue();
  // What came late changes the report, not whose it is.
  await bench.store.pool.query('update tls_result set sessions = sessions + 1');
  await open().run();
  assert.equal(await recipients(), ['tls@mail.test']);
  assert.is((await stateOf('mail.test')).state, 'sent');

  await count('web.test');
  publish('web.test', url('/slow'));
  const gate = Promise.withResolvers<number>();
  statuses['/slow'] = gate.promise;
  void open().run();
  await untilPosted();
  await makeDue();
  await open().run();
  assert.is(posts.length, 1);
  assert.is((await stateOf('web.test')).state, 'sent');
  gate.resolve(200);
});

test('reporters that run at the same time share the work', async () => {
  const domains = Array.from({ length: 30 }, (_, index) => `d${index}.test`);
  for (const domain of domains) {
    await count(domain);
    publish(domain, `mailto:tls@${domain},${url(`/${domain}`)}`);
  }
  const both = [open(), open()];
  await Promise.all([...both, ...both].map((one) => one.run()));
  assert.equal(await recipients(), domains.map((domain) => `tls@${domain}`).toSorted());
  assert.equal(
    posts.map(({ path }) => path).toSorted(),
    domains.map((domain) => `/${domain}`).toSorted(),
  );
});

test('a reporter that stops waits for nobody', async () => {
  await count('one.test');
  publish('one.test', url('/never'));
  statuses['/never'] = new Promise(() => undefined);
  const reporter = open();
  const running = reporter.run();
  await untilPosted();
  await reporter.stop();
  await running;
  await reporter.run();
  assert.is((await stateOf('one.test')).state, 'pending');
});

test.run();
