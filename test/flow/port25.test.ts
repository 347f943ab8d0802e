// A network that lets no connection to port 25 leave: found out from real dialling of closed ports, told to the
// operator, and mail waits without using up attempts until the port opens.
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { freePort } from '../support/program.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

const test = suite('port 25');
const NAMES = ['one', 'two', 'three', 'four'];
let app: App;
let dns: DnsServer;
let database: Client;
let port: number;
const peers: RawPeer[] = [];

interface Health {
  readonly status: string;
  readonly degraded: readonly { readonly what: string; readonly why: string }[];
}
interface Row {
  readonly state: string;
  readonly attempts: number;
  readonly events: number;
}

test.before(async () => {
  port = await freePort();
  dns = await startDns(
    Object.fromEntries(
      NAMES.flatMap((name, index) => [
        [`${name}.test`, { MX: [`10 mx.${name}.test`] }],
        [`mx.${name}.test`, { A: [`127.0.7.${index + 1}`] }],
      ]),
    ),
  );
  app = await startApp({
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    MAILSTEAD_RETRY_SCHEDULE: '1h',
  });
  database = new Client(app.databaseUrl);
  await database.connect();
});
test.after(async () => {
  await database.end();
  await app.stop();
  await dns.stop();
  for (const peer of peers) await peer.stop();
});

const health = async (): Promise<{ status: number; body: Health }> =>
  app.call('GET', '/health/ready');
const rows = async (): Promise<readonly Row[]> =>
  (
    await database.query<Row>(
      `select d.state, d.attempts, (select count(*)::int from attempt a
         where a.email_id = d.email_id and a.outcome is not null) as events from delivery d`,
    )
  ).rows;
/** Half a minute is a long time for a test: the next probe is due now. */
const hurry = async (): Promise<void> =>
  void (await database.query(`update egress set probed_at = now() - interval '61 s'`));
const saidBlocked = (): number =>
  app.complaints.filter((line) => line.includes('port 25 is blocked')).length;

test('three operators refuse at once: said once, and no attempt counts', async () => {
  assert.equal((await health()).body.degraded, []);
  for (const name of NAMES.slice(0, 3)) await app.send({ to: `a@${name}.test` });
  const { status, body } = await until(health, (answer) => answer.body.degraded.length > 0);
  assert.is(status, 200, 'mail is accepted all the same');
  assert.is(body.status, 'ready');
  assert.is(body.degraded[0]?.what, 'port 25');
  assert.not.match(body.degraded[0]?.why ?? '', /mx\./, 'anybody may ask');
  await until(rows, (all) =>
    all.every(({ state, attempts }) => state === 'ready' && attempts === 0),
  );
  assert.ok((await rows()).every(({ events }) => events === 0));
  assert.is(saidBlocked(), 1);
  assert.match(app.complaints.join('\n'), /MAILSTEAD_DELIVERY=smarthost.*mx\.one\.test/s);
});

test('what comes now waits without an attempt, also for hosts that were never asked', async () => {
  const id = await app.send({ to: 'a@four.test' });
  await new Promise((resolve) => setTimeout(resolve, 2_500)); // two looks of the worker
  assert.equal(
    (await rows()).map(({ state, attempts }) => [state, attempts]),
    Array.from({ length: 4 }, () => ['ready', 0]),
  );
  const { body } = await app.call<{ waiting: { code: string } }>('GET', `/emails/${id}/timeline`);
  assert.is(body.waiting.code, 'port_25_blocked');
});

test('a probe that fails leaves no trace', async () => {
  await hurry();
  await until(
    async () =>
      (
        await database.query<{ due: boolean }>(
          `select probed_at > now() - interval '5 s' as due from egress`,
        )
      ).rows[0]?.due,
    (isTaken) => isTaken === true,
  );
  await until(rows, (all) =>
    all.every(({ state, attempts }) => state === 'ready' && attempts === 0),
  );
  assert.is(saidBlocked(), 1);
  assert.is((await health()).body.degraded.length, 1);
});

test('the port opens: everything leaves, with its first attempt', async () => {
  for (const index of NAMES.keys()) {
    peers.push(await startRawPeer({}, { host: `127.0.7.${index + 1}`, port }));
  }
  await hurry();
  await until(rows, (all) => all.every(({ state }) => state === 'delivered'));
  assert.ok((await rows()).every(({ attempts }) => attempts === 1));
  await until(health, (answer) => answer.body.degraded.length === 0);
});

test.run();
