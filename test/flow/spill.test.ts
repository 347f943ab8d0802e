// With the operator's leave, mail goes through the smarthost while port 25 is blocked, and straight again when it opens.
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { freePort } from '../support/program.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

const test = suite('spill');
const NAMES = ['one', 'two', 'three'];
let app: App;
let dns: DnsServer;
let database: Client;
let relay: RawPeer;
let port: number;
const peers: RawPeer[] = [];

test.before(async () => {
  port = await freePort();
  relay = await startRawPeer({
    keywords: ['AUTH PLAIN', 'SIZE 1000000'],
    on: { AUTH: { reply: '235 2.7.0 ok' } },
  });
  dns = await startDns(
    Object.fromEntries(
      NAMES.flatMap((name, index) => [
        [`${name}.test`, { MX: [`10 mx.${name}.test`] }],
        [`mx.${name}.test`, { A: [`127.0.8.${index + 1}`] }],
      ]),
    ),
  );
  app = await startApp(
    {
      MAILSTEAD_DELIVERY: 'direct',
      MAILSTEAD_SMARTHOST_URL: `smtp://user:word@127.0.0.1:${relay.port}`,
      MAILSTEAD_DNS_SERVERS: dns.server,
      MAILSTEAD_MX_DESTINATION_PORT: String(port),
      MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
      MAILSTEAD_RETRY_SCHEDULE: '1h',
    },
    { delivery: { spill: { smarthost: true } } },
  );
  database = new Client(app.databaseUrl);
  await database.connect();
});
test.after(async () => {
  await database.end();
  await app.stop();
  await dns.stop();
  await relay.stop();
  for (const peer of peers) await peer.stop();
});

interface Timeline {
  readonly events: readonly { readonly type: string; readonly detail: Record<string, unknown> }[];
  readonly recipients: readonly { readonly attempts: number }[];
}
const deliveredBy = async (id: string): Promise<Record<string, unknown>> => {
  const { body } = await app.call<Timeline>('GET', `/emails/${id}/timeline`);
  assert.is(body.recipients[0]?.attempts, 1);
  return body.events.find(({ type }) => type === 'delivered')?.detail ?? {};
};

test('what found the port closed goes through the smarthost, and what comes after it, too', async () => {
  const ids = await Promise.all(NAMES.map((name) => app.send({ to: `a@${name}.test` })));
  for (const id of ids) await app.untilEvent(id, 'delivered');
  ids.push(await app.send({ to: 'later@one.test' }));
  await app.untilEvent(ids.at(-1)!, 'delivered');
  for (const id of ids) {
    const detail = await deliveredBy(id);
    assert.is(detail['host'], '127.0.0.1');
    assert.is(detail['port'], relay.port);
  }
  assert.is(relay.messages.length, 4);
  assert.ok(relay.connections[0]?.transcript.some((line) => line.startsWith('C: AUTH')));
  assert.not.match(app.complaints.join('\n'), /set and not used/);
});

test('the port opens: straight again', async () => {
  for (const index of NAMES.keys()) {
    peers.push(await startRawPeer({}, { host: `127.0.8.${index + 1}`, port }));
  }
  await database.query(`update egress set probed_at = now() - interval '61 s'`);
  await until(
    async () =>
      (await database.query('select 1 from egress where blocked_since is not null')).rowCount,
    (count) => count === 0,
  );
  const id = await app.send({ to: 'again@two.test' });
  await app.untilEvent(id, 'delivered');
  assert.is((await deliveredBy(id))['host'], 'mx.two.test');
  assert.is(relay.messages.length, 4);
});

test.run();

const unused = suite('spill: not asked for');
unused('a smarthost URL beside direct delivery, unused: the log says so', async () => {
  const quiet = await startApp({
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_SMARTHOST_URL: 'smtp://127.0.0.1:1',
  });
  try {
    assert.match(quiet.complaints.join('\n'), /MAILSTEAD_SMARTHOST_URL is set and not used/);
  } finally {
    await quiet.stop();
  }
});
unused.run();
