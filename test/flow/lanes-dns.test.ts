// Name servers that say nothing: their mail waits for an answer, is given back and put off, and nobody else's waits
// behind it, however many such domains there are.
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

const test = suite('lanes dns');
const SILENT = 120;
let app: App;
let dns: DnsServer;
let peer: RawPeer;

test.before(async () => {
  peer = await startRawPeer();
  dns = await startDns({
    'known.test': { A: ['127.0.0.1'] },
    'stranger.test': { A: ['127.0.0.1'] },
  });
  app = await startApp({
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(peer.port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    MAILSTEAD_RETRY_SCHEDULE: '1h',
  });
});
test.after(async () => {
  await app.stop();
  await dns.stop();
  await peer.stop();
});

test('known and new domains go on beside 120 silent ones, and those are put off', async () => {
  await app.untilEvent(await app.send({ to: 'a@known.test' }), 'delivered');
  const silent = await Promise.all(
    Array.from({ length: SILENT }, (_, index) => {
      dns.zones[`silent${index}.test`] = 'TIMEOUT';
      return app.send({ to: `a@silent${index}.test` });
    }),
  );
  await until(
    async () => dns.questions.filter(({ name }) => name.startsWith('silent')).length,
    (count) => count > 0,
  );
  const known = await app.send({ to: 'b@known.test' });
  await app.untilEvent(known, 'delivered');
  // They are asked about 50 at a time, so the last ones are far from an answer.
  const { body } = await app.call('GET', `/emails/${silent.at(-1)}`);
  assert.is.not(body['last_event'], 'delivery_delayed', 'no answer was there yet');
  await app.untilEvent(await app.send({ to: 'a@stranger.test' }), 'delivered');
  for (const id of silent) await app.untilEvent(id, 'delivery_delayed');
});

test('a worker that has nothing to do writes nothing', async () => {
  const db = new Pool({ connectionString: app.databaseUrl, max: 1 });
  const idle = async (): Promise<unknown> =>
    (await db.query('select name, reported_at from lane order by name')).rows;
  const before = await until(
    async () => [await idle(), await new Promise((done) => setTimeout(done, 2_500)), await idle()],
    ([one, , other]) => JSON.stringify(one) === JSON.stringify(other),
  );
  await db.end();
  assert.ok((before[0] as unknown[]).length > 0);
});

test.run();
