// Mail whose best MX is this machine itself: what the inbound listener takes comes home over SMTP, what it does not take
// bounces as a loop, and where no listener can be reached it waits and says so. Nothing here opens a private range to
// the guard, so addresses of this machine are its own.
import { createServer } from 'node:net';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readDeliveryPolicy, SYSTEM_EGRESS } from '../../src/delivery/egress.ts';
import { findNextHops } from '../../src/delivery/next-hop.ts';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import { createMxFinder } from '../../src/dns/mx.ts';
import { createResolver } from '../../src/dns/resolver.ts';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { handIn } from '../support/hand-in.ts';
import { freePort } from '../support/program.ts';
import { publishedDomain } from '../support/receiving-domain.ts';
import { deliveryReport } from '../support/returned.ts';
import { secondTenant } from '../support/second-tenant.ts';

interface Timeline {
  readonly events: readonly { readonly type: string; readonly detail: Record<string, unknown> }[];
  readonly recipients: readonly {
    readonly state: string;
    readonly attempts: number;
    readonly last_code: string | null;
    readonly last_reply: string | null;
  }[];
  readonly waiting: { readonly code: string; readonly reason: string } | null;
}
interface Received {
  readonly id: string;
  readonly subject: string;
  readonly received_for: readonly string[];
}

const test = suite('home');
const HOSTNAME = 'appliance.example';
const TO_US = { MX: [`10 ${HOSTNAME}`] };
const SECRET = 'a-secret-that-only-tests-know-0123456789';
let app: App;
let dns: DnsServer;
let database: Client;
/** Where MX hosts are dialled; nobody listens there, unless a test does. */
let port: number;
let other: { readonly tenantId: string; readonly key: string };

const settings = (): Record<string, string> => ({
  MAILSTEAD_DELIVERY: 'direct',
  MAILSTEAD_DNS_SERVERS: dns.server,
  MAILSTEAD_MX_DESTINATION_PORT: String(port),
  MAILSTEAD_HOSTNAME: HOSTNAME,
  MAILSTEAD_SECRET: SECRET,
  MAILSTEAD_RETRY_SCHEDULE: '200ms,1h',
});

test.before(async () => {
  port = await freePort();
  dns = await startDns({
    [HOSTNAME]: { A: ['127.0.0.1'] },
    'foreign.test': TO_US,
    'foreign-address.test': { A: ['127.0.0.1'] },
    'mx.alias.test': { A: ['127.0.0.1'] },
  });
  app = await startApp({ ...settings(), MAILSTEAD_WORKERS: '1' });
  database = new Client(app.databaseUrl);
  await database.connect();
  other = await secondTenant(app);
  await receiveAt(app, 'b.test', other.key);
});
test.after(async () => {
  await database.end();
  await app.stop();
  await dns.stop();
});

const receiveAt = (on: App, name: string, key: string): Promise<string> =>
  publishedDomain(on, dns, { name, key });

const timelineOf = async (id: string, on = app): Promise<Timeline> =>
  (await on.call<Timeline>('GET', `/emails/${id}/timeline`)).body;
const untilState = (id: string, state: string, on = app): Promise<Timeline> =>
  until(
    () => timelineOf(id, on),
    ({ recipients }) => recipients.every((one) => one.state === state),
  );
const receivedBy = async (key: string): Promise<readonly Received[]> =>
  (await app.call<{ data: Received[] }>('GET', '/emails/receiving?limit=100', { key })).body.data;
const withSubject = async (subject: string, key = other.key): Promise<readonly Received[]> =>
  (await receivedBy(key)).filter((one) => one.subject === subject);

test('mail to a receiving domain of another tenant arrives there, once', async () => {
  const id = await app.send({ to: ['b@b.test', 'c@B.test'], subject: 'home' });
  await app.untilEvent(id, 'delivered');
  const [arrived, ...more] = await withSubject('home');
  assert.equal(arrived?.received_for.toSorted(), ['b@b.test', 'c@b.test']);
  assert.equal(more, []);
  assert.equal(await withSubject('home', app.key), [], 'not to who sent it');
  const { events, recipients } = await timelineOf(id);
  assert.ok(recipients.every(({ attempts }) => attempts === 1));
  const { detail } = events.find(({ type }) => type === 'delivered')!;
  assert.equal(
    [detail['host'], detail['address'], detail['port']],
    [HOSTNAME, '127.0.0.1', app.appliance.mxPort],
  );
  assert.match(String(detail['reply']), `stored as ${arrived?.id}`);
  assert.match(String(detail['tls']), /^TLSv1/);
});

test('it is delivered when it is stored, and no sooner', async () => {
  await database.query('begin');
  await database.query('lock table received_email in exclusive mode');
  const id = await app.send({ to: 'b@b.test', subject: 'held' });
  await until(
    async () =>
      (
        await database.query(
          `select 1 from pg_locks where not granted and relation = 'received_email'::regclass`,
        )
      ).rowCount,
    (count) => count === 1,
  );
  assert.is((await timelineOf(id)).recipients[0]?.state, 'in_flight');
  await database.query('commit');
  await app.untilEvent(id, 'delivered');
  assert.is((await withSubject('held')).length, 1);
});

for (const [what, to] of [
  ['its MX is our name', 'a@foreign.test'],
  ['its address is ours', 'a@foreign-address.test'],
] as const) {
  test(`a domain that nobody here receives for bounces: ${what}`, async () => {
    const id = await app.send({ to });
    const { events, recipients } = await untilState(id, 'bounced');
    assert.is(recipients[0]?.last_code, '5.4.6');
    assert.is(events.at(-1)?.detail['cause'], 'mail_loop');
  });
}

test('a mail host with an address of ours is this machine, whatever its name', async () => {
  await receiveAt(app, 'alias.test', other.key);
  dns.zones['alias.test'] = { MX: ['10 mx.alias.test'] };
  await app.untilEvent(await app.send({ to: 'b@alias.test', subject: 'alias' }), 'delivered');
  assert.is((await withSubject('alias')).length, 1);
});

test('where bounces come home nobody else lives: the listener says so', async () => {
  for (const to of ['nobody@send.b.test', `nobody@${HOSTNAME}`]) {
    const { events, recipients } = await untilState(await app.send({ to }), 'bounced');
    assert.is(recipients[0]?.last_code, '5.1.1');
    assert.is(events.at(-1)?.detail['host'], HOSTNAME);
  }
});

test('a bounce of such mail finds its way back', async () => {
  const id = await app.send({ to: 'leaves@b.test', subject: 'returned' });
  await app.untilEvent(id, 'delivered');
  const { rows } = await database.query<{ mail_from: string }>(
    `select mail_from from received_email where subject = 'returned'`,
  );
  const path = rows[0]!.mail_from;
  assert.match(path, /^b\+[a-z0-9]+@send\.mailstead\.test$/);
  const { reply } = await handIn(app.appliance.mxPort!, {
    recipient: path,
    message: deliveryReport({ recipient: 'leaves@b.test' }).trimEnd(),
  });
  assert.match(reply, /^250 /);
  await untilState(id, 'bounced');
  assert.is((await timelineOf(id)).recipients[0]?.last_code, '5.1.1');
});

test('the lane has a name, by which it can be paused', async () => {
  const pause = { kind: 'lane', name: 'home' };
  const { status, body } = await app.call('POST', '/queue/pauses', { body: pause });
  assert.is(status, 201, JSON.stringify(body));
  interface Lanes {
    readonly lanes: { readonly data: readonly { name: string; limited_by: string | null }[] };
  }
  await until(
    async () => (await app.call<Lanes>('GET', '/queue')).body,
    ({ lanes }) =>
      lanes.data.some(({ name, limited_by }) => name === 'home' && limited_by === 'paused'),
  );
  const id = await app.send({ to: 'b@b.test', subject: 'paused' });
  const { waiting } = await until(
    () => timelineOf(id),
    (timeline) => timeline.waiting?.code === 'paused',
  );
  assert.match(waiting?.reason ?? '', /The lane home is paused/);
  await app.call('DELETE', `/queue/pauses/${String(body['id'])}`);
  await app.untilEvent(id, 'delivered');
});

test('a blocked port 25 does not keep it, and it does not go through the smarthost', async () => {
  const spilling = await startApp(
    { ...settings(), MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${port}` },
    { delivery: { spill: { smarthost: true } } },
  );
  const pool = new Client(spilling.databaseUrl);
  await pool.connect();
  try {
    await receiveAt(spilling, 'spilled.test', spilling.key);
    await pool.query(
      `insert into egress (name, blocked_since, reason, silent, probed_at, reported_at)
       values ('default', now(), 'a test', '{}', now(), now() - interval '1 minute')`,
    );
    await until(
      async () =>
        (await pool.query(`select 1 from egress where reported_at > now() - interval '30 s'`))
          .rowCount,
      (count) => count === 1,
    );
    const foreign = await spilling.send({ to: 'a@foreign.test' });
    const { events } = await untilState(foreign, 'deferred', spilling);
    assert.is(events.at(-1)?.detail['port'], port, 'the smarthost, which is off');
    const id = await spilling.send({ to: 'b@spilled.test' });
    await spilling.untilEvent(id, 'delivered');
    const { events: home } = await timelineOf(id, spilling);
    assert.is(home.at(-1)?.detail['host'], HOSTNAME);
  } finally {
    await pool.end();
    await spilling.stop();
  }
});

test('a listener in another process is reached by our name', async () => {
  const sender = await startApp({ ...settings(), MAILSTEAD_ROLES: 'api,delivery,jobs' });
  const shared = { MAILSTEAD_DATABASE_URL: sender.databaseUrl, MAILSTEAD_MX_PORT: String(port) };
  let receiver: App | null = null;
  try {
    await receiveAt(sender, 'apart.test', sender.key);
    const id = await sender.send({ to: 'b@apart.test' });
    const { events } = await untilState(id, 'deferred', sender);
    const { detail } = events.findLast(({ type }) => type === 'deferred')!;
    assert.equal(
      [detail['cause'], detail['host'], detail['port']],
      ['connect_refused', HOSTNAME, port],
    );
    receiver = await startApp({ ...settings(), ...shared, MAILSTEAD_ROLES: 'mx' });
    await sender.untilEvent(await sender.send({ to: 'b@apart.test' }), 'delivered');
  } finally {
    await receiver?.stop();
    await sender.stop();
  }
});

test('a listener in another process without an address: it waits, and says why', async () => {
  const resolver = createResolver({ servers: [dns.server] });
  try {
    const hops = await findNextHops(
      {
        policy: () => readDeliveryPolicy({}),
        helloName: 'nowhere.example',
        sinkPort: null,
        smarthost: null,
        mx: createMxFinder({
          resolver,
          guard: createAddressGuard({ allow: [] }),
          ownHostname: HOSTNAME,
          random: Math.random,
        }),
        home: {
          listener: { kind: 'elsewhere' },
          takesMail: (domain) => Promise.resolve(domain === 'foreign.test'),
          addresses: () => Promise.resolve([]),
        },
        tlsPolicies: { of: () => Promise.reject(new Error('not asked')) },
        mxPort: port,
      },
      'mx:foreign.test',
      SYSTEM_EGRESS,
    );
    assert.is(hops.kind, 'none');
    if (hops.kind !== 'none') return;
    assert.equal([hops.cause, hops.permanent], ['home_closed', false]);
    assert.match(hops.message, /the DNS has no address for nowhere\.example/);
  } finally {
    resolver.close();
  }
});

test('no listener: it waits, and says why', async () => {
  // A port of development mode, in whoever's use: the appliance does without.
  const taken = createServer().on('error', () => undefined);
  await new Promise<void>((resolve) => {
    taken.once('error', () => resolve());
    taken.listen(2465, resolve);
  });
  const closed = await startApp({ ...settings(), MAILSTEAD_MX_PORT: '2465' });
  try {
    assert.is(closed.appliance.mxPort, null);
    await receiveAt(closed, 'closed.test', closed.key);
    const id = await closed.send({ to: 'b@closed.test' });
    const { events, recipients } = await untilState(id, 'deferred', closed);
    assert.is(events.findLast(({ type }) => type === 'deferred')?.detail['cause'], 'home_closed');
    assert.is(recipients[0]?.last_code, '4.3.2');
    assert.match(
      recipients[0]?.last_reply ?? '',
      /closed\.test is received by this server itself, and its inbound listener is off/,
    );
  } finally {
    await closed.stop();
    await new Promise<void>((resolve) => {
      if (taken.listening) taken.close(() => resolve());
      else resolve();
    });
  }
});

test('nothing broke inside', () => {
  assert.equal(
    app.complaints.filter((line) => line.includes('error') || line.includes('broke')),
    [],
  );
});

test.run();
