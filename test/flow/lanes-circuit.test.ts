// A host that refuses everybody at the door: its lane closes after five handshakes, what waits for it is not touched,
// nobody else notices, one probe at a time is sent, and the first that is let in opens the lane again.
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

const test = suite('lanes circuit');
/** 2.4 s; the second pause is as long as the first. */
const MINUTES = 0.04;
const LANE = 'default/mx.closed.test';
let app: App;
let dns: DnsServer;
let db: Client;
let closed: RawPeer;
let other: RawPeer;
let isClosed = true;

test.before(async () => {
  other = await startRawPeer();
  const { port } = other;
  closed = await startRawPeer(
    {
      on: {
        connect: () =>
          isClosed ? [{ reply: '554 5.7.1 no' }, { close: true }] : { reply: '220 welcome' },
      },
    },
    { host: '127.0.8.1', port },
  );
  dns = await startDns({
    'closed.test': { MX: ['10 mx.closed.test'] },
    'closed2.test': { MX: ['10 mx.closed.test'] },
    'mx.closed.test': { A: ['127.0.8.1'] },
    'other.test': { A: ['127.0.0.1'] },
  });
  app = await startApp(
    {
      MAILSTEAD_DELIVERY: 'direct',
      MAILSTEAD_DNS_SERVERS: dns.server,
      MAILSTEAD_MX_DESTINATION_PORT: String(port),
      MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
      MAILSTEAD_RETRY_SCHEDULE: '100ms',
    },
    {
      providers: {
        default: {
          new_connections_per_minute: null,
          circuit_minutes: MINUTES,
          circuit_minutes_max: MINUTES,
        },
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
  for (const peer of [closed, other]) await peer.stop();
});

interface LaneRow {
  readonly circuit: string;
  readonly opens: number;
  readonly reason: string | null;
  readonly limited_by: string | null;
  /** By its report, and by the clock. */
  readonly is_open: boolean;
}
const lane = async (): Promise<LaneRow | undefined> =>
  (
    await db.query<LaneRow>(
      "select *, circuit = 'open' and open_until > now() as is_open from lane where name = $1",
      [LANE],
    )
  ).rows[0];
const rows = async (): Promise<readonly Record<string, unknown>[]> =>
  (
    await db.query<Record<string, unknown>>(
      `select xmin::text as version, ctid::text as place, * from delivery
       where lane like 'mx:closed%' order by email_id`,
    )
  ).rows;

test('five handshakes that fail close the lane; what waits is not touched, others go on', async () => {
  const ids = await Promise.all(
    Array.from({ length: 20 }, (_, index) => app.send({ to: `r${index}@closed.test` })),
  );
  const open = await until(lane, (row) => row?.circuit === 'open');
  assert.match(open?.reason ?? '', 'greeting: 554 5.7.1 no');
  assert.is(open?.limited_by, 'circuit');
  const tried = closed.connections.length;
  assert.ok(tried >= 5 && tried < 20, `${tried} were begun before it was known`);

  // What failed is woken once, and then all of it waits: looked at within one of the times while it is open.
  const waiting = await until(rows, (all) => all.every(({ state }) => state === 'ready'));
  assert.is(waiting.length, ids.length);
  const look = async (): Promise<readonly unknown[]> => [await rows(), closed.connections.length];
  const seen = await until(
    async () => {
      const start = await lane();
      const before = await look();
      await app.untilEvent(await app.send({ to: 'a@other.test' }), 'delivered');
      const after = await look();
      const end = await lane();
      const isOne = start?.is_open === true && end?.is_open === true && start.opens === end.opens;
      return { isOne, before, after };
    },
    ({ isOne }) => isOne,
  );
  assert.equal(seen.after, seen.before, 'not a column, nor a version, and nobody was dialled');
  // The host was at fault: the pauses of what was tried have not grown.
  for (const { attempts, lane_faults: faults } of waiting) {
    assert.is(attempts, faults);
  }
});

test('one probe at a time while it stays closed', async () => {
  const first = (await lane())?.opens ?? 0;
  const before = closed.connections.length;
  const later = await until(lane, (row) => (row?.opens ?? 0) >= first + 2);
  const probes = closed.connections.length - before;
  assert.ok(probes <= (later?.opens ?? 0) - first + 1, `${probes} probes`);
});

test('a new domain of the same host is not tried on its own', async () => {
  const before = closed.connections.length;
  const { opens } = (await lane())!;
  await app.send({ to: 'new@closed2.test' });
  await until(
    () => db.query("select 1 from lane_destination where destination = 'mx:closed2.test'"),
    (answer) => answer.rows.length === 1,
  );
  const probed = ((await lane())?.opens ?? 0) - opens;
  assert.ok(closed.connections.length - before <= probed + 1);
});

test('the probe that is let in opens the lane, and everything is delivered', async () => {
  isClosed = false;
  await until(lane, (row) => row?.circuit === 'closed');
  await until(rows, (all) => all.every(({ state }) => state === 'delivered'));
  assert.is(closed.messages.length, 21);
  const after = await until(lane, (row) => row?.limited_by === null);
  assert.is(after?.opens, 0);
  assert.is(after?.reason, null);
});

test.run();
