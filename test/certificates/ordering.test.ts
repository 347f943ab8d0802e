// Ordering without an authority that issues: when things are due, who has the lease, what a failure costs, what is stored and
// how it is read again; against a real database, real sockets, and an authority that only refuses.
import { createServer as createPlain, type RequestListener, type Server } from 'node:http';
import { createServer } from 'node:https';
import { once } from 'node:events';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { connect } from 'node:tls';
import type { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createOrdering, type OrderingOptions } from '../../src/certificates/ordering.ts';
import { findObstacle } from '../../src/certificates/reach.ts';
import * as kept from '../../src/certificates/rows.ts';
import { readTlsSettings } from '../../src/certificates/settings.ts';
import { openShelf } from '../../src/certificates/shelf.ts';
import { nextTryAt, renewalAt, type FailureKind } from '../../src/certificates/timing.ts';
import { chainFault } from '../../src/certificates/trust.ts';
import { isCertifiable, wantedNames } from '../../src/certificates/wanted.ts';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import { createResolver, type Resolver } from '../../src/dns/resolver.ts';
import { openFrontDoor } from '../../src/http/front-door.ts';
import { openStore } from '../../src/store/orm.ts';
import { openCertificate } from '../../src/tls-certificate.ts';
import { until } from '../support/app.ts';
import { chainOf, issue } from '../support/certificates.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';

const HOUR_MS = 3_600_000;
const DAY_MS = 24 * HOUR_MS;
const sealingKey = Buffer.alloc(32, 3);
const test = suite('ordering certificates');
let bench: Bench;
let dns: DnsServer;
let resolver: Resolver;
let folder = '';
const clock = { now: new Date('2026-05-06T12:00:00.000Z') };
const now = (): Date => clock.now;
const servers: Server[] = [];

test.before(async () => {
  bench = await openQueue();
  dns = await startDns({});
  resolver = createResolver({
    servers: [dns.server],
    keepsAnswers: false,
    timeoutMs: 300,
    tries: 1,
  });
  folder = await mkdtemp(join(tmpdir(), 'mailstead-ordering-'));
});
test.before.each(async () => {
  clock.now = new Date('2026-05-06T12:00:00.000Z');
  await bench.store.pool.query(
    'truncate certificate, acme_account, acme_order, acme_challenge, sending_domain cascade',
  );
});
test.after(async () => {
  for (const server of servers) server.close();
  resolver.close();
  await dns.stop();
  await bench.stop();
  await rm(folder, { recursive: true, force: true });
});

test('a third of the lifetime before its end, a short-lived one too', () => {
  const notBefore = new Date('2026-01-01T00:00:00.000Z');
  for (const days of [90, 6, 0.5]) {
    const notAfter = new Date(notBefore.getTime() + days * DAY_MS);
    const leftDays = (random: number): number =>
      (notAfter.getTime() - renewalAt({ notBefore, notAfter }, random).getTime()) / DAY_MS;
    assert.ok(Math.abs(leftDays(0) - days / 3) < 1e-6);
    assert.ok(leftDays(0.999) > days / 3 && leftDays(0.999) < days * 0.39);
  }
});

test('failures: growing pauses, what the authority asks for, never past the end', () => {
  const at = (
    kind: FailureKind,
    count: number,
    about: { askedMs?: number; leftMs?: number } = {},
  ) =>
    nextTryAt(
      { kind, count, askedMs: about.askedMs ?? null },
      {
        now: clock.now,
        notAfter: about.leftMs === undefined ? null : new Date(clock.now.getTime() + about.leftMs),
        random: 0.5,
      },
    ).getTime() - clock.now.getTime();
  const minutes = [1, 2, 3, 10].map((count) => at('refused', count) / 60_000);
  assert.equal(minutes, [15, 30, 60, 720]);
  assert.equal(
    [1, 2, 9].map((count) => at('not_ready', count) / 60_000),
    [2, 4, 60],
  );
  assert.is(at('rate_limited', 1), 3 * HOUR_MS);
  assert.is(at('rate_limited', 1, { askedMs: 40 * HOUR_MS }), 40 * HOUR_MS);
  assert.is(at('refused', 10, { leftMs: 6 * HOUR_MS }), HOUR_MS, 'sooner where it would end');
  assert.is(at('refused', 10, { leftMs: -1 }), 12 * HOUR_MS);
  const spread = [0, 0.999].map((random) =>
    nextTryAt(
      { kind: 'refused', count: 1, askedMs: null },
      { now: clock.now, notAfter: null, random },
    ),
  );
  assert.ok(spread[1]!.getTime() - spread[0]!.getTime() > 7 * 60_000);
});

test('config/tls.json', () => {
  assert.equal(readTlsSettings({}), { acme: null, httpsPort: null, challengePort: null });
  const acme = { directory: 'https://ca.test/dir', agree_to_terms: true };
  assert.is(readTlsSettings({ acme }).acme?.directory, 'https://ca.test/dir');
  for (const [file, said] of [
    [{ htps_port: 443 }, /"htps_port" is not known/],
    [{ https_port: 70_000 }, /https_port: must be a port/],
    [{ acme: { ...acme, agree_to_terms: false } }, /agree_to_terms: must be true/],
    [{ acme: { ...acme, directory: 'http://ca.test' } }, /acme.directory: must be an https/],
    [{ acme: { ...acme, email: 'a@b,c@d' } }, /acme.email: must be one address/],
    [{ acme: { ...acme, ca_file: 'ca.pem' } }, /acme.ca_file: must be the absolute path/],
    [{ acme: { ...acme, eab: { kid: 'k', hmac_key: '%' } } }, /hmac_key: must be a key/],
  ] as const) {
    assert.throws(() => readTlsSettings(file), said);
  }
});

test('of two processes one has a name, and only its result counts', async () => {
  const second = await openStore({
    url: bench.url,
    log: silent,
    connectionsMax: 2,
    migrate: false,
  });
  try {
    const { pool } = bench.store;
    const names = ['a.test', 'b.test'];
    await kept.noteWanted(pool, [...names, 'later.test'], now());
    const taken = await Promise.all(
      [pool, second.pool, pool, second.pool].map((one) => kept.takeDue(one, names, now())),
    );
    assert.equal(taken.flatMap((due) => due?.name ?? []).sort(), names);
    const lost = taken.find((due) => due?.name === 'a.test')!;
    clock.now = new Date(clock.now.getTime() + kept.LEASE_MS);
    const next = (await kept.takeDue(second.pool, ['a.test'], now()))!;
    assert.is(next.name, 'a.test', 'who died lets go');
    await kept.putOff(pool, lost, { at: now(), error: 'too late', counts: true });
    assert.is(await keep(lost), false);
    assert.is(await keep(next), true);
    const { rows } = await pool.query<{ failures: number; error: string | null; sealed: Buffer }>(
      `select failures, last_error as error, sealed_key as sealed from certificate where name = 'a.test'`,
    );
    assert.equal([rows[0]!.failures, rows[0]!.error], [0, null]);
    assert.not.ok(rows[0]!.sealed.includes('PRIVATE KEY'));
    assert.is(await kept.takeDue(pool, ['a.test'], now()), null, 'not due before its renewal');
  } finally {
    await second.close();
  }
});

test('the name that mail needs goes first, however many others are due', async () => {
  const { pool } = bench.store;
  await kept.noteWanted(pool, ['a.test'], new Date(now().getTime() - HOUR_MS));
  await kept.noteWanted(pool, ['z.test'], now());
  const next = () => kept.takeDue(pool, ['z.test', 'a.test'], now());
  assert.equal([(await next())?.name, (await next())?.name], ['z.test', 'a.test']);
});

test('at most twenty orders in an hour, whoever asks', async () => {
  const ask = (): Promise<Date | null> => kept.takeOrder(bench.store, 'a.test', now());
  const first = await Promise.all(Array.from({ length: 25 }, ask));
  assert.is(first.filter((at) => at === null).length, 20);
  assert.is(first.find((at) => at !== null)?.getTime(), now().getTime() + HOUR_MS);
  clock.now = new Date(now().getTime() + HOUR_MS);
  assert.is(await ask(), null);
});

test('what is stored is shown by name at once: SNI over HTTPS, and in place of a self-signed one', async () => {
  const { pool } = bench.store;
  const shelf = await openShelf({ pool, sealingKey, log: silent, lookMs: 20 });
  const source = await openCertificate({
    files: null,
    ordered: () => shelf.find('a.test'),
    folder,
    hostname: 'a.test',
    log: silent,
    now: () => new Date(),
  });
  shelf.onChange(() => void source.refresh());
  const door = await openFrontDoor({
    port: 0,
    host: '127.0.0.1',
    tls: { current: source.current, onChange: source.onChange, contextOf: shelf.context },
  });
  try {
    assert.is(source.kind(), 'self_signed');
    await kept.noteWanted(pool, ['a.test', 'b.test'], now());
    const [a, b] = [await take('a.test'), await take('b.test')];
    await keep(a);
    await keep(b);
    await until(
      () => Promise.resolve(source.kind()),
      (kind) => kind === 'ordered',
    );
    assert.is(await namesAt(door.port, 'a.test'), 'DNS:a.test');
    assert.is(await namesAt(door.port, 'B.test'), 'DNS:b.test');
    assert.is(await namesAt(door.port, 'stranger.test'), 'DNS:a.test');
    const before = shelf.find('b.test')!.cert;
    await pool.query('update certificate set next_try_at = $1', [now()]);
    await keep(await take('b.test'));
    await until(
      () => Promise.resolve(shelf.find('b.test')?.cert),
      (cert) => cert !== before,
    );
    // Another secret opens nothing, and nothing breaks.
    const stranger = await openShelf({ pool, sealingKey: Buffer.alloc(32, 4), log: silent });
    assert.is(stranger.find('a.test'), null);
    stranger.stop();
    // A connection that breaks in the middle of a look, which pg says without a code, hides nothing for good.
    let breaks = 1;
    const query = (sql: string, values: unknown[]) =>
      /select chain/.test(sql) && breaks-- > 0
        ? Promise.reject(new Error('Connection terminated unexpectedly'))
        : pool.query(sql, values);
    const breaking = await openShelf({ pool: { query } as Pool, sealingKey, log: silent });
    assert.is(breaking.find('a.test'), null);
    await breaking.refresh();
    assert.ok(breaking.find('a.test') !== null);
    breaking.stop();
    // Not wanted for a month: forgotten.
    clock.now = new Date(now().getTime() + 31 * DAY_MS);
    await kept.noteWanted(pool, ['a.test'], now());
    await until(
      () => Promise.resolve(shelf.find('b.test')),
      (pair) => pair === null,
    );
    assert.ok(shelf.find('a.test') !== null);
    // A connection that says nothing does not hold the stop.
    const silentPeer = connect({
      host: '127.0.0.1',
      port: door.port,
      servername: 'a.test',
      ca: '',
    });
    silentPeer.on('error', () => undefined);
    await once(silentPeer, 'connect');
  } finally {
    await door.close();
    source.stop();
    shelf.stop();
  }
});

test('names: our own, tracking hosts that lead here, policies that are served; nothing that nobody certifies', async () => {
  const insert = (name: string, more: string, values: string): Promise<unknown> =>
    bench.store.pool.query(
      `insert into sending_domain (tenant_id, id, name, status, region, return_path_label, sending, receiving,
         receiving_verified, mta_sts, click_tracking, record_checks ${more})
       values ($1, gen_random_uuid(), $2, 'verified', 'us-east-1', 'send', true, ${values})`,
      [bench.tenantId, name],
    );
  const tracked = `'{"tracking_cname":{"status":"verified"}}'`;
  await insert('one.test', '', `true, true, 'testing', true, ${tracked}`);
  await insert('two.test', ', tracking_subdomain', `true, false, 'enforce', true, ${tracked}, 't'`);
  await insert(
    'three.test',
    '',
    `true, true, 'off', true, '{"tracking_cname":{"status":"failed"}}'`,
  );
  const own = ['Mail.host.test', 'localhost', '192.0.2.1', 'app.localhost'];
  assert.equal(await wantedNames(bench.store.pool, { own, servesDomains: true }), [
    'mail.host.test',
    'links.one.test',
    'mta-sts.one.test',
    't.two.test',
  ]);
  assert.equal(await wantedNames(bench.store.pool, { own, servesDomains: false }), [
    'mail.host.test',
  ]);
  assert.equal(
    ['xn--bcher-kva.example', 'a_b.test', `${'a'.repeat(64)}.test`, '*.a.test', '[::1]'].map(
      isCertifiable,
    ),
    [true, false, false, false, false],
  );
});

test('before anything is asked of an authority: the DNS, and who answers', async () => {
  let answer = 'right';
  const port = await serve((_request, response) => {
    response.statusCode = answer === 'right' ? 200 : 404;
    response.end(answer);
  });
  const probe = { token: 'x'.repeat(43), answer: 'right' };
  const look = (name: string, allow: readonly string[], at = port): Promise<string | null> =>
    findObstacle({ resolver, guard: createAddressGuard({ allow }), port: at }, name, probe);
  dns.zones['here.test'] = { A: ['127.0.0.1'] };
  assert.is(await look('here.test', ['127.0.0.0/8']), null);
  answer = 'somebody else';
  assert.match(
    (await look('here.test', ['127.0.0.0/8'])) ?? '',
    /^Port 80 of here\.test \(127\.0\.0\.1\) is answered by another program, with status 404; lead it to/,
  );
  assert.is(await look('here.test', []), null, 'no packet to a private address');
  assert.match(
    (await look('nowhere.test', [])) ?? '',
    /^nowhere\.test has no address in the DNS; publish/,
  );
  dns.zones['broken.test'] = 'SERVFAIL';
  assert.match(
    (await look('broken.test', [])) ?? '',
    /^The DNS does not say which address broken\.test has/,
  );
  const closed = await serve(() => undefined);
  await new Promise<void>((resolve) => servers.pop()!.close(() => resolve()));
  assert.is(await look('here.test', ['127.0.0.0/8'], closed), null, 'silence proves nothing');
});

test('an authority that says "too many" is left alone; one that cannot be reached costs no order', async () => {
  const authority = issue({ commonName: 'authority', isAuthority: true });
  const own = issue({ names: ['acme.test'], issuer: authority });
  const asked: string[] = [];
  const server = createServer({ cert: own.cert, key: own.key }, (request, response) => {
    const base = `https://acme.test:${(server.address() as AddressInfo).port}`;
    asked.push(`${request.method} ${request.url}`);
    response.setHeader('replay-nonce', 'bm9uY2U');
    response.setHeader('content-type', 'application/json');
    const paths = ['newNonce', 'newAccount', 'newOrder'];
    if (request.url === '/dir') {
      response.end(JSON.stringify(Object.fromEntries(paths.map((one) => [one, `${base}/${one}`]))));
    } else if (request.url === '/newAccount') {
      response.statusCode = 201;
      response.setHeader('location', `${base}/account/1`);
      response.end('{"status":"valid"}');
    } else if (request.url === '/newOrder') {
      response.statusCode = 429;
      response.setHeader('retry-after', '86400');
      response.setHeader('content-type', 'application/problem+json');
      const type = 'urn:ietf:params:acme:error:rateLimited';
      response.end(JSON.stringify({ type, detail: 'too many certificates already issued' }));
    } else response.end();
  });
  servers.push(server);
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  dns.zones['acme.test'] = { A: ['127.0.0.1'] };
  dns.zones['a.test'] = { A: ['127.0.0.1'] };
  dns.zones['b.test'] = { A: ['127.0.0.1'] };
  const caFile = join(folder, 'ca.pem');
  await writeFile(caFile, authority.cert);
  const options = (directory: string, ca: string | null): OrderingOptions => ({
    store: bench.store,
    log: silent,
    sealingKey,
    settings: () => ({ directory, email: null, eab: null, caFile: ca }),
    names: () => ({ own: ['a.test', 'b.test'], servesDomains: false }),
    isCovered: () => false,
    resolver,
    guard: createAddressGuard({ allow: [] }),
    onIssued: () => Promise.resolve(),
    now,
    random: () => 0.5,
    pollMs: 10,
  });
  const directory = `https://acme.test:${port}/dir`;
  const ordersSent = async (): Promise<number> =>
    (await bench.store.pool.query('select 1 from acme_order')).rows.length;
  const states = async () =>
    (
      await bench.store.pool.query<{ failures: number; error: string; hours: number }>(
        `select failures, last_error as error, extract(epoch from next_try_at - $1)::float8 / 3600 as hours
         from certificate order by name`,
        [now()],
      )
    ).rows;

  // Nobody vouches for it without the file.
  await createOrdering(options(directory, null)).run();
  for (const { error, failures } of await states()) {
    assert.match(
      error,
      /^The authority at acme\.test:\d+ cannot be reached \([A-Z_]+\); acme\.directory and/,
    );
    assert.is(failures, 1);
  }
  assert.is(await ordersSent(), 0);
  assert.equal(asked, []);

  clock.now = new Date(now().getTime() + HOUR_MS);
  const ordering = createOrdering(options(directory, caFile));
  await ordering.run();
  assert.is(
    asked.filter((one) => one === 'POST /newOrder').length,
    1,
    'the other name is not tried',
  );
  assert.is(await ordersSent(), 1);
  const limited = (await states()).find(({ failures }) => failures === 2)!;
  assert.is(
    limited.error,
    'The authority refuses: too many certificates already issued. It is tried again in some hours.',
  );
  assert.is(limited.hours, 24, 'as long as it asked for');
  await ordering.run();
  assert.is(await ordersSent(), 1);
  clock.now = new Date(now().getTime() + HOUR_MS);
  await ordering.run();
  assert.is(await ordersSent(), 2, 'the other name, an hour later');
  assert.is(asked.filter((one) => one === 'POST /newAccount').length, 1, 'one account for good');
  await ordering.stop();
});

test('switched off, it asks nobody and stores nothing', async () => {
  const ordering = createOrdering({
    store: bench.store,
    log: silent,
    sealingKey,
    settings: () => null,
    names: () => ({ own: ['a.test'], servesDomains: true }),
    isCovered: () => false,
    resolver,
    guard: createAddressGuard({ allow: [] }),
    onIssued: () => Promise.resolve(),
    now,
    random: () => 0,
  });
  dns.questions.length = 0;
  await ordering.run();
  assert.equal(dns.questions, []);
  assert.equal((await bench.store.pool.query('select 1 from certificate')).rows, []);
});

test('challenges are answered while they last', async () => {
  const { pool } = bench.store;
  const challenge = { token: 'T'.repeat(43), keyAuthorization: 'an answer' };
  await kept.putChallenge(pool, challenge, now());
  assert.is(await kept.findChallenge(pool, challenge.token, now()), 'an answer');
  for (const token of ['T', `${challenge.token}/..`, 'U'.repeat(43)]) {
    assert.is(await kept.findChallenge(pool, token, now()), null);
  }
  clock.now = new Date(now().getTime() + HOUR_MS);
  assert.is(await kept.findChallenge(pool, challenge.token, now()), null);
});

test('what senders would say of a chain', () => {
  const root = issue({ commonName: 'root', isAuthority: true });
  const middle = issue({ commonName: 'middle', isAuthority: true, issuer: root });
  const fault = (chain: string, authorities: readonly string[] = [root.cert], host = 'a.test') =>
    chainFault(chain, { host, at: new Date(), authorities });
  const own = issue({ names: ['a.test'], issuer: middle });
  assert.is(fault(chainOf(own, middle).cert), null);
  assert.is(fault(chainOf(own).cert), 'is vouched for by nobody that senders know');
  assert.is(fault(chainOf(own, middle).cert, []), 'is vouched for by nobody that senders know');
  assert.is(fault(chainOf(own, middle).cert, [root.cert], 'b.test'), 'is not for b.test');
  const ended = issue({ names: ['a.test'], issuer: root, from: -3, to: -1 });
  assert.match(fault(ended.cert) ?? '', /^ended at 20/);
  const early = issue({ names: ['a.test'], issuer: root, from: 1, to: 3 });
  assert.is(fault(early.cert), 'is not valid yet');
  assert.is(fault(''), 'is missing');
});

async function take(name: string): Promise<kept.Due> {
  const due = await kept.takeDue(bench.store.pool, [name], now());
  if (due === null) throw new Error(`${name} is not due`);
  return due;
}

/** Stores a certificate of a test for what was taken. */
function keep(due: kept.Due): Promise<boolean> {
  const { cert, key } = issue({ names: [due.name] });
  const notAfter = new Date(now().getTime() + 30 * DAY_MS);
  return kept.keepIssued(bench.store.pool, due, {
    pair: { cert, key },
    notBefore: now(),
    notAfter,
    renewAt: new Date(now().getTime() + 20 * DAY_MS),
    sealingKey,
  });
}

async function namesAt(port: number, servername: string): Promise<string | undefined> {
  const socket = connect({ host: '127.0.0.1', port, servername, rejectUnauthorized: false });
  await once(socket, 'secureConnect');
  const { subjectaltname } = socket.getPeerCertificate();
  socket.destroy();
  return subjectaltname;
}

async function serve(answer: RequestListener): Promise<number> {
  const server = createPlain(answer);
  servers.push(server);
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  return (server.address() as AddressInfo).port;
}

test.run();
