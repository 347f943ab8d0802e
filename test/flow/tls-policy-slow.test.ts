// Domains whose policy cannot be had for a long time, at a mail host that others use too: their mail waits for an answer
// outside of the lane, so that nobody else's waits behind it.
import { suite } from 'uvu';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

const test = suite('tls policy slow');
/** More than the lane has connections. */
const SLOW = 45;
let app: App;
let dns: DnsServer;
let peer: RawPeer;

test.before(async () => {
  peer = await startRawPeer();
  dns = await startDns({
    'mx.shared.test': { A: ['127.0.0.1'] },
    'quick.test': { MX: ['10 mx.shared.test'] },
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

test('mail to the same host goes on beside them; theirs goes when it is known that there is no policy', async () => {
  await app.untilEvent(await app.send({ to: 'a@quick.test' }), 'delivered');
  // The resolver waits for a few seconds only: a machine that is busy for that long has proven nothing, and tries again.
  let round = 0;
  await until(
    async () => {
      const names = Array.from({ length: SLOW }, (_, number) => `slow${number}-${round}.test`);
      round += 1;
      for (const name of names) {
        dns.zones[name] = { MX: ['10 mx.shared.test'] };
        dns.zones[`_mta-sts.${name}`] = { TXT: ['v=STSv1; id=1'] };
        dns.zones[`mta-sts.${name}`] = 'TIMEOUT';
      }
      const slow = await Promise.all(names.map((name) => app.send({ to: `a@${name}` })));
      while (!dns.questions.some(({ name }) => name === `mta-sts.${names[0]}`)) {
        await new Promise((resolve) => setTimeout(resolve, 20));
      }
      for (const name of ['b', 'c', 'd']) {
        await app.untilEvent(await app.send({ to: `${name}@quick.test` }), 'delivered');
      }
      const shown = await Promise.all(slow.map((id) => app.call('GET', `/emails/${id}`)));
      for (const id of slow) await app.untilEvent(id, 'delivered');
      return shown.map(({ body }) => body['last_event']);
    },
    (events) => !events.includes('delivered'),
  );
});

test.run();
