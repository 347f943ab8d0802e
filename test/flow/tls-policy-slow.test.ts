// Domains whose policy cannot be had for a long time, at a mail host that others use too: their mail waits for an answer
// outside of the lane, so that nobody else's waits behind it.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, type App } from '../support/app.ts';
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
  for (let number = 0; number < SLOW; number += 1) {
    dns.zones[`slow${number}.test`] = { MX: ['10 mx.shared.test'] };
    dns.zones[`_mta-sts.slow${number}.test`] = { TXT: ['v=STSv1; id=1'] };
    dns.zones[`mta-sts.slow${number}.test`] = 'TIMEOUT';
  }
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
  const slow = await Promise.all(
    Array.from({ length: SLOW }, (_, number) => app.send({ to: `a@slow${number}.test` })),
  );
  while (!dns.questions.some(({ name }) => name.startsWith('mta-sts.slow'))) {
    await new Promise((resolve) => setTimeout(resolve, 20));
  }
  for (const name of ['b', 'c', 'd']) {
    await app.untilEvent(await app.send({ to: `${name}@quick.test` }), 'delivered');
  }
  for (const id of slow) {
    const { body } = await app.call('GET', `/emails/${id}`);
    assert.is.not(body['last_event'], 'delivered', 'no answer was there yet');
  }
  for (const id of slow) await app.untilEvent(id, 'delivered');
});

test.run();
