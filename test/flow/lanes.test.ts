// Lanes in the running product, with peers that say exactly what a test wants behind a fake zone: what shares one, how
// many connections it learns to use, who goes first and how fast.
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { simpleEmail, startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type PeerScript, type RawPeer } from '../support/raw-peer.ts';

const test = suite('lanes');
const peers: RawPeer[] = [];
let app: App;
let dns: DnsServer;
let db: Client;
let port: number;
let number = 0;

test.before(async () => {
  const first = await startRawPeer();
  peers.push(first);
  ({ port } = first);
  dns = await startDns({});
  app = await startApp(
    {
      MAILSTEAD_DELIVERY: 'direct',
      MAILSTEAD_DNS_SERVERS: dns.server,
      MAILSTEAD_MX_DESTINATION_PORT: String(port),
      MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
      MAILSTEAD_RETRY_SCHEDULE: '300ms',
    },
    {
      providers: {
        default: { new_connections_per_minute: null, idle_seconds: 2 },
        providers: [
          { name: 'paced', mx: ['paced.test'], connections: 1, messages_per_second: 40 },
          {
            name: 'quiet',
            mx: ['quiet.test'],
            pauses: [{ text: '\\[TSS04\\]', minutes: 60 }],
          },
        ],
      },
    },
  );
  db = new Client({ connectionString: app.databaseUrl });
  await db.connect();
});
test.after(async () => {
  await db.end();
  await app.stop();
  await dns.stop();
  for (const peer of peers) await peer.stop();
});

/** A host of its own, and the domains that name it. */
async function hostFor(domains: readonly string[], script: PeerScript = {}): Promise<RawPeer> {
  number += 1;
  const host = `127.0.7.${number}`;
  const peer = await startRawPeer(script, { host, port });
  peers.push(peer);
  dns.zones[`mx.${domains[0]}`] = { A: [host] };
  for (const domain of domains) dns.zones[domain] = { MX: [`10 mx.${domains[0]}`] };
  return peer;
}

const takes =
  (ms: number): NonNullable<PeerScript['on']>[string] =>
  async () => {
    await new Promise((resolve) => setTimeout(resolve, ms));
    return { reply: '250 2.0.0 taken' };
  };
const batch = async (domain: string, count: number): Promise<void> => {
  const emails = Array.from({ length: count }, (_, index) => ({
    ...simpleEmail,
    to: `bulk${index}@${domain}`,
  }));
  const { status } = await app.call('POST', '/emails/batch', { body: emails });
  assert.is(status, 200);
};
const arrived = (peer: RawPeer, count: number): Promise<number> =>
  until(
    async () => peer.messages.filter(({ accepted }) => accepted).length,
    (now) => now >= count,
  );
const laneNamed = async (name: string): Promise<Record<string, unknown> | undefined> =>
  (await db.query<Record<string, unknown>>('select * from lane where name = $1', [name])).rows[0];
const rowsOf = async (domain: string): Promise<readonly Record<string, unknown>[]> =>
  (
    await db.query<Record<string, unknown>>(
      'select xmin::text as version, * from delivery where lane = $1 order by email_id, position',
      [`mx:${domain}`],
    )
  ).rows;

test('domains with the same hosts share a lane, and its report says so', async () => {
  const peer = await hostFor(['one.test', 'two.test']);
  await app.untilEvent(await app.send({ to: 'a@one.test' }), 'delivered');
  await app.untilEvent(await app.send({ to: 'a@two.test' }), 'delivered');
  assert.is(peer.connections.length, 1, 'over one connection');
  const { rows } = await until(
    () => db.query("select destination from lane_destination where lane = 'default/mx.one.test'"),
    (answer) => answer.rows.length === 2,
  );
  assert.equal(rows.map((row: { destination: string }) => row.destination).toSorted(), [
    'mx:one.test',
    'mx:two.test',
  ]);
  const lane = await laneNamed('default/mx.one.test');
  assert.is(lane?.['circuit'], 'closed');
  assert.is(lane?.['connections_max'], 10);
});

test('a host that takes five connections: everything arrives, and little is put off', async () => {
  const count = 300;
  const peer = await hostFor(['capped.test'], { connectionsMax: 5, on: { dot: takes(4) } });
  await Promise.all(
    Array.from({ length: count }, (_, index) => app.send({ to: `r${index}@capped.test` })),
  );
  await arrived(peer, count);
  assert.is(peer.messages.length, count, 'once each');
  assert.is(peer.openMax(), 5);
  const { rows } = await until(
    () =>
      db.query<{ all: number; deferred: number; open: number }>(
        `select count(*)::int as all, (count(*) filter (where a.outcome = 'deferred'))::int as deferred,
           (count(*) filter (where a.outcome is null))::int as open
         from attempt a join delivery d using (tenant_id, email_id, position)
         where d.lane = 'mx:capped.test'`,
      ),
    (answer) => answer.rows[0]?.open === 0,
  );
  const { all, deferred } = rows[0]!;
  const rate = deferred / all;
  console.log(
    `a cap of 5 connections: ${deferred} of ${all} attempts deferred, ${(100 * rate).toFixed(1)} %`,
  );
  assert.ok(rate < 1 / 6, 'at most what steps of 1/N cost; steps of one cost half');
  const [row] = await rowsOf('capped.test');
  assert.is(row?.['state'], 'delivered');
});

test('bulk of 200 and one mail to one recipient: the single one overtakes', async () => {
  const peer = await hostFor(['busy.test'], { on: { dot: takes(40) } });
  await batch('busy.test', 100);
  await batch('busy.test', 100);
  await arrived(peer, 10);
  await app.untilEvent(await app.send({ to: 'single@busy.test' }), 'delivered');
  const position = peer.messages.findIndex(({ rcpts }) => rcpts[0]?.includes('single'));
  assert.ok(position < 150, `${position + 1} of 201`);
  await arrived(peer, 201);
});

test('recipients of one email at one domain travel together', async () => {
  const peer = await hostFor(['many.test']);
  const to = Array.from({ length: 50 }, (_, index) => `r${index}@many.test`);
  await app.untilEvent(await app.send({ to }), 'delivered');
  assert.is(peer.messages.length, 1);
  assert.is(peer.messages[0]?.rcpts.length, 50);
});

test('a rate keeps order and total', async () => {
  const peer = await hostFor(['mail.paced.test']);
  const names = Array.from({ length: 60 }, (_, index) => `n${index}@mail.paced.test`);
  for (const to of names) await app.send({ to });
  await arrived(peer, 60);
  assert.equal(
    peer.messages.map(({ rcpts }) => /<(.*)>/.exec(rcpts[0] ?? '')?.[1]),
    names,
  );
});

test('a reply that asks for quiet closes the lane, with its words as the reason', async () => {
  const reply = '421 4.7.0 [TSS04] Messages from 192.0.2.1 temporarily deferred';
  const peer = await hostFor(['mail.quiet.test'], { on: { MAIL: [{ reply }, { close: true }] } });
  await app.send({ to: 'a@mail.quiet.test' });
  const lane = await until(
    () => laneNamed('default/quiet'),
    (row) => row?.['circuit'] === 'open',
  );
  assert.match(String(lane?.['reason']), '[TSS04]');
  assert.is(lane?.['provider'], 'quiet');
  assert.is(lane?.['limited_by'], 'circuit');
  const dialled = peer.connections.length;
  const waiting = await app.send({ to: 'b@mail.quiet.test' });
  await app.untilEvent(await app.send({ to: 'other@one.test' }), 'delivered');
  const { body } = await app.call('GET', `/emails/${waiting}`);
  assert.is(body['last_event'], 'queued');
  assert.is(peer.connections.length, dialled);
});

test('nothing broke inside', () => {
  assert.equal(
    app.complaints.filter((line) => line.includes('error') || line.includes('broke')),
    [],
  );
});

test.run();
