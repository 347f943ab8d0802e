// The whole way against a real ACME authority (pebble): the appliance in production mode without a certificate orders one, opens
// SMTP submission and HTTPS with it, serves an MTA-STS policy, renews without a restart. Skipped where there is no pebble.
import { X509Certificate } from 'node:crypto';
import { once } from 'node:events';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { request } from 'node:https';
import { connect as connectPlain } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { connect, type PeerCertificate } from 'node:tls';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createOrdering, type Ordering } from '../../src/certificates/ordering.ts';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import { fetchStsPolicy } from '../../src/dns/mta-sts-fetch.ts';
import { readStsId } from '../../src/dns/mta-sts.ts';
import { createResolver, type Resolver } from '../../src/dns/resolver.ts';
import { openStore, type Store } from '../../src/store/orm.ts';
import { deriveKey } from '../../src/store/seal.ts';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { ACME_HOST, findPebble, startPebble, type Pebble } from '../support/pebble.ts';
import { freePort } from '../support/program.ts';
import { silent } from '../support/queue.ts';

const program = await findPebble();

const HOST = 'mail.host.test';
const PUBLIC = 'app.host.test';
const SECRET = 'a secret of a test that is long enough to be one';
const test = suite('certificates by ACME');
let dns: DnsServer;
let pebble: Pebble;
let folder = '';
let app: App;
let store: Store;
let resolver: Resolver;
let other: Ordering;

const here = { A: ['127.0.0.1'] };

if (program !== null) {
  test.before(async () => {
    dns = await startDns({ [ACME_HOST]: here, [HOST]: here, [PUBLIC]: here });
    const challengePort = await freePort();
    pebble = await startPebble({ program, dns: dns.server, httpPort: challengePort });
    folder = await mkdtemp(join(tmpdir(), 'mailstead-acme-'));
    const caFile = join(folder, 'ca.pem');
    await writeFile(caFile, pebble.authority + pebble.root);
    const acme = { directory: pebble.directory, agree_to_terms: true, ca_file: caFile };
    app = await startApp(
      {
        MAILSTEAD_MODE: 'production',
        MAILSTEAD_HOSTNAME: HOST,
        MAILSTEAD_PUBLIC_URL: `https://${PUBLIC}`,
        MAILSTEAD_SECRET: SECRET,
        MAILSTEAD_DELIVERY: 'sink',
        MAILSTEAD_DNS_SERVERS: dns.server,
      },
      { tls: { acme, https_port: 0, http_challenge_port: challengePort } },
    );
    store = await openStore({
      url: app.databaseUrl,
      log: silent,
      connectionsMax: 4,
      migrate: false,
    });
    resolver = createResolver({ servers: [dns.server], keepsAnswers: false });
    // What another process with the jobs does, without waiting for its turn.
    other = createOrdering({
      store,
      log: silent,
      sealingKey: deriveKey(SECRET, 'certificate keys at rest'),
      settings: () => ({ directory: pebble.directory, email: 'ops@host.test', eab: null, caFile }),
      names: () => ({ own: [HOST, PUBLIC], servesDomains: true }),
      isCovered: () => false,
      resolver,
      guard: createAddressGuard({ allow: [] }),
      onIssued: () => Promise.resolve(),
      now: () => new Date(),
      random: Math.random,
      pollMs: 50,
    });
  });
  test.after(async () => {
    await other?.stop();
    resolver?.close();
    await store?.close();
    await app?.stop();
    await pebble?.stop();
    await dns?.stop();
    await rm(folder, { recursive: true, force: true });
  });

  test('submission waits for a certificate and opens with it; several processes order each name once', async () => {
    assert.ok(
      app.appliance.submissionPort === null,
      'nothing listens before there is a certificate',
    );
    await Promise.all([
      other.run(),
      until(rows, (all) => all.every(({ chain }) => chain !== null) && all.length === 2),
    ]);
    const { rows: orders } = await store.pool.query('select name from acme_order');
    assert.is(orders.length, 2, 'one order for each name');
    const { rows: left } = await store.pool.query('select token from acme_challenge');
    assert.equal(left, []);
    const [row] = await rows();
    assert.not.ok(row!.sealed.toString('latin1').includes('PRIVATE KEY'), 'keys are sealed');
    assert.is(row!.lastError, null);
    const lifeMs = row!.notAfter - row!.notBefore;
    const leftPart = (row!.notAfter - row!.nextTry) / lifeMs;
    assert.ok(leftPart >= 1 / 3 - 0.001 && leftPart <= 1 / 3 + 0.051, `renewed at ${leftPart}`);

    await until(
      () => Promise.resolve(app.appliance.submissionsPort),
      (port) => port !== null,
    );
    const peer = await peerOf({ port: app.appliance.submissionsPort!, servername: HOST });
    assert.equal(peer.subjectaltname, `DNS:${HOST}`);
    assert.equal((await starttls(app.appliance.submissionPort!)).subjectaltname, `DNS:${HOST}`);
  });

  test('HTTPS shows the certificate of the name that is asked for', async () => {
    const port = app.appliance.httpsPort!;
    await until(
      () => peerOf({ port, servername: PUBLIC }).catch(() => null),
      (peer) => peer?.subjectaltname === `DNS:${PUBLIC}`,
    );
    assert.is((await peerOf({ port, servername: HOST })).subjectaltname, `DNS:${HOST}`);
    const stranger = await peerOf({ port, servername: 'other.test', isAnyName: true });
    assert.is(stranger.subjectaltname, `DNS:${HOST}`, 'the host name stands in');
    const answer = await get({ port, host: PUBLIC, path: '/health/live' });
    assert.equal([answer.status, answer.body], [200, '{"status":"live"}']);
    await assertRejects(() =>
      get({ port, host: PUBLIC, path: '/health/live', maxVersion: 'TLSv1.1' }),
    );
    const plain = await fetch(`http://127.0.0.1:${app.appliance.challengePort}/emails?a=b`, {
      redirect: 'manual',
      headers: { host: PUBLIC },
    });
    // fetch sets a Host of its own, which is none of ours.
    assert.is(plain.status, 404);
    const [status, location] = await redirectOf(app.appliance.challengePort!, PUBLIC);
    assert.equal([status, location], [308, `https://${PUBLIC}/emails?a=b`]);
    assert.equal(await redirectOf(app.appliance.challengePort!, 'evil.test'), [404, undefined]);
  });

  test('a receiving domain: policy, certificate, records; a name that fails spoils no other', async () => {
    const name = 'received.test';
    const { body: made } = await app.call<DomainBody>('POST', '/domains', {
      body: {
        name,
        mta_sts: 'testing',
        click_tracking: true,
        capabilities: { sending: 'disabled', receiving: 'enabled' },
      },
    });
    for (const { name: at, type, value, priority } of made.records) {
      const text = type === 'MX' ? `${priority} ${value}` : value;
      dns.zones[at] = type === 'CNAME' ? { CNAME: value } : { [type]: [text] };
    }
    const { body: verified } = await app.call<DomainBody>('POST', `/domains/${made.id}/verify`);
    assert.is(verified.status, 'verified');
    const advice = verified.records.filter(({ record }) => /^(MTA-STS|TLS-RPT)$/.test(record));
    assert.equal(
      advice.map(({ status }) => status),
      ['verified', 'verified', 'verified'],
    );
    // Its tracking host leads nowhere by now.
    dns.zones[`links.${name}`] = 'NXDOMAIN';
    await other.run();
    const lost = (await rows()).find((row) => row.name === `links.${name}`);
    assert.match(
      lost?.lastError ?? '',
      /^links\.received\.test has no address in the DNS; publish/,
    );
    assert.is(lost?.failures, 1);

    const d = {
      resolver,
      guard: createAddressGuard({ allow: ['127.0.0.0/8'] }),
      authorities: [pebble.root],
      port: app.appliance.httpsPort!,
    };
    const fetched = await until(
      () => fetchStsPolicy(d, name),
      (got) => got.kind === 'policy',
    );
    assert.ok(fetched.kind === 'policy');
    assert.equal([fetched.policy.mode, fetched.policy.mx], ['testing', [HOST]]);
    const id = await readStsId(resolver, name);
    const changed = await app.call('PATCH', `/domains/${made.id}`, {
      body: { mta_sts: 'enforce' },
    });
    assert.is(changed.status, 200, JSON.stringify(changed.body));
    const after = await fetchStsPolicy(d, name);
    assert.ok(after.kind === 'policy' && after.policy.mode === 'enforce');
    const { body: now } = await app.call<DomainBody>('GET', `/domains/${made.id}`);
    const record = now.records.find(({ name: at }) => at === `_mta-sts.${name}`)!;
    assert.not.ok(record.value.includes(String(id)), 'another policy, another id');
    assert.is(record.status, 'not_started');
    const { body: looked } = await app.call<DomainBody>('POST', `/domains/${made.id}/verify`);
    const stale = looked.records.find(({ name: at }) => at === `_mta-sts.${name}`)!;
    assert.match(stale.detail ?? '', /the id of another policy/);
    assert.is(looked.status, 'verified', 'advice holds nothing up');
  });

  test('renewed: open listeners show the new one without a restart', async () => {
    const before = await starttls(app.appliance.mxPort!);
    await store.pool.query(`update certificate set next_try_at = now() where name = $1`, [HOST]);
    await other.run();
    await until(
      () => starttls(app.appliance.mxPort!),
      (peer) => peer.serialNumber !== before.serialNumber,
    );
    const [secure, https] = [app.appliance.submissionsPort!, app.appliance.httpsPort!];
    const [row] = await rows();
    const { serialNumber } = new X509Certificate(row!.chain!);
    for (const port of [secure, https]) {
      assert.is((await peerOf({ port, servername: HOST })).serialNumber, serialNumber);
    }
  });

  test('an authority that finds another answer says so; the certificate in use stays', async () => {
    // Its DNS leads it to an address where nobody answers.
    dns.zones[PUBLIC] = { A: ['127.0.0.9'] };
    await store.pool.query(`update certificate set next_try_at = now() where name = $1`, [PUBLIC]);
    await other.run();
    const row = (await rows()).find(({ name }) => name === PUBLIC)!;
    assert.match(row.lastError!, /^The authority found: .*127\.0\.0\.9.*\.$/);
    assert.ok(row.nextTry > Date.now() + 60_000);
    assert.ok(row.chain !== null);
    const peer = await peerOf({ port: app.appliance.httpsPort!, servername: PUBLIC });
    assert.is(peer.subjectaltname, `DNS:${PUBLIC}`);
  });
} else {
  console.log('skipped: certificates by ACME: pebble is not installed');
  test.skip('the whole way against an authority', () => undefined);
}

interface DomainBody {
  readonly id: string;
  readonly status: string;
  readonly records: readonly {
    readonly record: string;
    readonly name: string;
    readonly type: 'MX' | 'TXT' | 'CNAME';
    readonly value: string;
    readonly priority?: number;
    readonly status: string;
    readonly detail: string | null;
  }[];
}

interface Row {
  readonly name: string;
  readonly chain: string | null;
  readonly sealed: Buffer;
  readonly lastError: string | null;
  readonly failures: number;
  readonly notBefore: number;
  readonly notAfter: number;
  readonly nextTry: number;
}

/** The host name's first. */
async function rows(): Promise<readonly Row[]> {
  const { rows: found } = await store.pool.query<Row>(
    `select name, chain, sealed_key as sealed, last_error as "lastError", failures,
       extract(epoch from not_before)::float8 * 1000 as "notBefore",
       extract(epoch from not_after)::float8 * 1000 as "notAfter",
       extract(epoch from next_try_at)::float8 * 1000 as "nextTry"
     from certificate order by name = $1 desc, name`,
    [HOST],
  );
  return found;
}

async function peerOf(at: {
  readonly port: number;
  readonly servername: string;
  readonly isAnyName?: boolean;
}): Promise<PeerCertificate> {
  const { port, servername } = at;
  const socket = connect({
    host: '127.0.0.1',
    port,
    servername,
    ca: pebble.root,
    ...(at.isAnyName === true ? { checkServerIdentity: () => undefined } : {}),
  });
  await once(socket, 'secureConnect');
  const peer = socket.getPeerCertificate();
  socket.destroy();
  return peer;
}

async function starttls(port: number): Promise<PeerCertificate> {
  const plain = connectPlain(port, '127.0.0.1');
  const reply = async (): Promise<void> => {
    let text = '';
    while (!/^\d{3} .*\r\n$/m.test(text)) {
      const [piece] = (await once(plain, 'data')) as [Buffer];
      text += piece.toString();
    }
  };
  await reply();
  plain.write('EHLO client.test\r\n');
  await reply();
  plain.write('STARTTLS\r\n');
  await reply();
  const socket = connect({ socket: plain, servername: HOST, ca: pebble.root });
  await once(socket, 'secureConnect');
  const peer = socket.getPeerCertificate();
  socket.destroy();
  return peer;
}

function get(at: {
  readonly port: number;
  readonly host: string;
  readonly path: string;
  readonly maxVersion?: 'TLSv1.1';
}): Promise<{ status: number; body: string }> {
  return new Promise((resolve, reject) => {
    const asked = request(
      {
        host: '127.0.0.1',
        port: at.port,
        path: at.path,
        servername: at.host,
        headers: { host: at.host },
        ca: pebble.root,
        agent: false,
        ...(at.maxVersion === undefined
          ? {}
          : { maxVersion: at.maxVersion, minVersion: 'TLSv1' as const }),
      },
      (response) => {
        let body = '';
        response.setEncoding('utf8').on('data', (text: string) => (body += text));
        response.on('end', () => resolve({ status: response.statusCode ?? 0, body }));
      },
    );
    asked.on('error', reject);
    asked.end();
  });
}

async function redirectOf(
  port: number,
  host: string,
): Promise<readonly [number, string | undefined]> {
  const socket = connectPlain(port, '127.0.0.1');
  socket.write(`GET /emails?a=b HTTP/1.1\r\nhost: ${host}\r\nconnection: close\r\n\r\n`);
  let text = '';
  socket.on('data', (piece: Buffer) => (text += piece.toString()));
  await once(socket, 'close');
  return [Number(text.slice(9, 12)), /^location: (.*)$/im.exec(text)?.[1]?.trim()];
}

async function assertRejects(work: () => Promise<unknown>): Promise<void> {
  assert.ok(
    await work().then(
      () => false,
      () => true,
    ),
  );
}

test.run();
