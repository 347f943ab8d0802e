// A sending domain with `tls: enforced`: its mail leaves encrypted or not at all. MX hosts with, without and with
// broken TLS, a kept plaintext connection that must not be used, the smarthost, and the sink, which is exempt.
import { once } from 'node:events';
import { Client } from 'pg';
import { SMTPServer } from 'smtp-server';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { makeSelfSigned } from '../../src/self-signed.ts';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

interface Timeline {
  events: { type: string; detail: Record<string, unknown> }[];
  recipients: { state: string; last_code: string | null; last_reply: string | null }[];
}

const test = suite('tls-enforced');
let app: App;
let dns: DnsServer;
let plain: RawPeer;
let broken: RawPeer;
let secure: SMTPServer;
let port: number;
const takenOverTls: string[] = [];

test.before(async () => {
  plain = await startRawPeer();
  ({ port } = plain);
  broken = await startRawPeer(
    {
      keywords: ['STARTTLS'],
      on: { STARTTLS: [{ reply: '220 go ahead' }, { raw: 'not TLS' }, { close: true }] },
    },
    { host: '127.0.0.2', port },
  );
  secure = new SMTPServer({
    ...makeSelfSigned('mx.secure.test', new Date()),
    authOptional: true,
    onData(stream, session, done) {
      stream.on('end', () => {
        if (session.secure) takenOverTls.push(session.envelope.rcptTo[0]?.address ?? '');
        done();
      });
      stream.resume();
    },
  });
  secure.listen(port, '127.0.0.3');
  await once(secure.server, 'listening');
  dns = await startDns({
    'plain.test': { A: ['127.0.0.1'] },
    'broken.test': { A: ['127.0.0.2'] },
    'secure.test': { A: ['127.0.0.3'] },
    'mixed.test': { MX: ['10 plain.test', '20 secure.test'] },
  });
  app = await startApp({
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    MAILSTEAD_RETRY_SCHEDULE: '1h',
  });
});
test.after(async () => {
  await app.stop();
  await dns.stop();
  await plain.stop();
  await broken.stop();
  await new Promise<void>((resolve) => {
    secure.close(() => resolve());
  });
});

async function setTls(to: App, mode: 'opportunistic' | 'enforced'): Promise<void> {
  const client = new Client({ connectionString: to.databaseUrl });
  await client.connect();
  await client.query('update sending_domain set tls = $1', [mode]);
  await client.end();
  // Workers remember a domain for a second.
  await new Promise((resolve) => setTimeout(resolve, 1_100));
}

const settled = async (from: App, id: string, state: string): Promise<Timeline> =>
  until(
    async () => (await from.call<Timeline>('GET', `/emails/${id}/timeline`)).body,
    ({ recipients }) => recipients[0]?.state === state,
  );

test('opportunistic: plaintext where there is nothing better', async () => {
  await app.untilEvent(await app.send({ to: 'a@plain.test' }), 'delivered');
  await app.untilEvent(await app.send({ to: 'a@broken.test' }), 'delivered');
  assert.is(plain.messages.length, 1);
  assert.is(broken.messages.length, 1);
});

test('enforced: a host without TLS, and one with broken TLS, get nothing', async () => {
  await setTls(app, 'enforced');
  for (const domain of ['plain.test', 'broken.test']) {
    const id = await app.send({ to: `a@${domain}` });
    const { recipients, events } = await settled(app, id, 'deferred');
    assert.is(recipients[0]?.last_code, 'tls_required', domain);
    assert.match(recipients[0]?.last_reply ?? '', /mailstead\.test.*tls: enforced.*could be made/);
    const last = events.findLast(({ type }) => type === 'deferred');
    assert.is(last?.detail['cause'], 'tls_required');
    assert.is(last?.detail['stage'], 'tls');
    assert.is(last?.detail['tls'], undefined);
  }
  assert.is(plain.messages.length, 1);
  assert.is(broken.messages.length, 1);
  for (const peer of [plain, broken]) {
    const { transcript } = peer.connections.at(-1) ?? { transcript: ['C: MAIL none'] };
    assert.not.ok(
      transcript.some((line) => line.startsWith('C: MAIL')),
      transcript.join('\n'),
    );
  }
});

test('enforced: a kept plaintext connection is not used', async () => {
  await setTls(app, 'opportunistic');
  await app.untilEvent(await app.send({ to: 'kept@plain.test' }), 'delivered');
  const connections = plain.connections.length;
  await setTls(app, 'enforced');
  const id = await app.send({ to: 'kept@plain.test' });
  await settled(app, id, 'deferred');
  assert.is(plain.messages.length, 2);
  assert.ok(plain.connections.length > connections);
});

test('enforced: a host with TLS gets it, also when the host before it has none', async () => {
  for (const to of ['a@secure.test', 'a@mixed.test']) {
    const { events } = await settled(app, await app.send({ to }), 'delivered');
    assert.match(
      String(events.findLast(({ type }) => type === 'delivered')?.detail['tls']),
      'TLSv1',
    );
  }
  assert.equal(takenOverTls, ['a@secure.test', 'a@mixed.test']);
  assert.is(plain.messages.length, 2);
});

test('enforced: the smarthost too, on loopback too', async () => {
  const relayed = await startApp({
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${port}`,
    MAILSTEAD_RETRY_SCHEDULE: '1h',
  });
  await setTls(relayed, 'enforced');
  const { recipients } = await settled(relayed, await relayed.send(), 'deferred');
  assert.is(recipients[0]?.last_code, 'tls_required');
  assert.is(plain.messages.length, 2);
  await relayed.stop();
});

test('enforced: a smarthost that is named by its address', async () => {
  const relayed = await startApp({
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.3:${port}`,
    MAILSTEAD_RETRY_SCHEDULE: '1h',
  });
  await setTls(relayed, 'enforced');
  await relayed.untilEvent(await relayed.send({ to: 'by@address.test' }), 'delivered');
  assert.ok(takenOverTls.includes('by@address.test'));
  await relayed.stop();
});

test('enforced: the built-in sink is this machine, so it takes all', async () => {
  const sunk = await startApp();
  await setTls(sunk, 'enforced');
  await sunk.untilEvent(await sunk.send(), 'delivered');
  await sunk.stop();
});

test.run();
