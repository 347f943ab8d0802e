// Delivery straight to MX hosts, with a real resolver asking a fake zone and peers that say exactly what a
// test wants: who is dialled, in what order, what is tried next, and what a refusal means at each stage.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';

interface Timeline {
  events: { type: string; detail: Record<string, unknown> }[];
  recipients: {
    state: string;
    attempts: number;
    last_code: string | null;
    last_reply: string | null;
  }[];
}

const test = suite('direct');
let app: App;
let dns: DnsServer;
let first: RawPeer;
let second: RawPeer;
let rude: RawPeer;
const peers: RawPeer[] = [];

test.before(async () => {
  first = await startRawPeer();
  const { port } = first;
  second = await startRawPeer({}, { host: '127.0.0.2', port });
  rude = await startRawPeer(
    {
      keywords: ['SIZE 1000', 'STARTTLS'],
      on: {
        connect: (_line, { number }) =>
          number === 1 ? { reply: '554 5.7.1 go away' } : { reply: '220 rude.test' },
        STARTTLS: [{ reply: '220 go ahead' }, { raw: 'this is not TLS' }, { close: true }],
      },
    },
    { host: '127.0.0.3', port },
  );
  peers.push(first, second, rude);
  dns = await startDns({
    'one.test': { MX: ['10 mx1.one.test'] },
    'mx1.one.test': { A: ['127.0.0.1'] },
    'two.test': { MX: ['10 dead.two.test', '20 mx2.two.test'] },
    'dead.two.test': { A: ['127.0.0.9'] },
    'mx2.two.test': { A: ['127.0.0.2'] },
    'implicit.test': { A: ['127.0.0.1'] },
    'null.test': { MX: ['0 .'] },
    'broken.test': 'SERVFAIL',
    'rude.test': { MX: ['10 mx.rude.test'] },
    'mx.rude.test': { A: ['127.0.0.3'] },
    'private.test': { MX: ['10 mx.private.test'] },
    'mx.private.test': { A: ['10.0.0.1'] },
  });
  app = await startApp({
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
    MAILSTEAD_RETRY_SCHEDULE: '100ms,1h',
    MAILSTEAD_HOSTNAME: 'appliance.example',
  });
});
test.after(async () => {
  // Those that say nothing would be waited for.
  for (const peer of peers) await peer.stop();
  await app.stop();
  await dns.stop();
});

const timelineOf = async (id: string): Promise<Timeline> =>
  (await app.call<Timeline>('GET', `/emails/${id}/timeline`)).body;
const untilState = (id: string, ...states: string[]): Promise<Timeline> =>
  until(
    () => timelineOf(id),
    ({ recipients }) => recipients.every(({ state }) => states.includes(state)),
  );

test('the MX host is dialled, greeted by our name, and given one return path', async () => {
  const id = await app.send({ to: 'a@one.test' });
  await app.untilEvent(id, 'delivered');
  const message = first.messages.at(-1);
  assert.match(message?.mail ?? '', /^FROM:<b\+[a-z0-9]+@send\.mailstead\.test> SIZE=\d+$/);
  assert.equal(message?.rcpts, ['TO:<a@one.test>']);
  assert.ok(first.connections[0]?.transcript.includes('C: EHLO appliance.example'));
  const { events } = await timelineOf(id);
  assert.is(events.at(-1)?.detail['host'], 'mx1.one.test');
  assert.is(events.at(-1)?.detail['address'], '127.0.0.1');
});

test('a connection is used again for the next message', async () => {
  const before = first.connections.length;
  for (let number = 0; number < 5; number++) {
    await app.untilEvent(await app.send({ to: 'again@one.test' }), 'delivered');
  }
  assert.ok(first.connections.length - before <= 1, 'kept open');
});

test('a dead host is passed over for the next one', async () => {
  const id = await app.send({ to: 'a@two.test' });
  await app.untilEvent(id, 'delivered');
  assert.is(second.messages.length, 1);
  assert.is((await timelineOf(id)).recipients[0]?.attempts, 1);
});

test('no MX: the domain itself', async () => {
  const id = await app.send({ to: 'a@implicit.test' });
  await app.untilEvent(id, 'delivered');
  assert.is((await timelineOf(id)).events.at(-1)?.detail['host'], 'implicit.test');
});

for (const [domain, code, cause] of [
  ['null.test', '5.1.10', 'null_mx'],
  ['nowhere.test', '5.1.2', 'no_domain'],
  ['private.test', '5.4.4', 'address_refused'],
] as const) {
  test(`${domain} bounces with ${code}`, async () => {
    const id = await app.send({ to: `a@${domain}` });
    const { recipients, events } = await untilState(id, 'bounced');
    assert.is(recipients[0]?.last_code, code);
    assert.is(events.at(-1)?.detail['cause'], cause);
  });
}

test('DNS that does not answer defers', async () => {
  const id = await app.send({ to: 'a@broken.test' });
  const { recipients } = await untilState(id, 'deferred');
  assert.is(recipients[0]?.last_code, '4.4.3');
});

test('a 5xx greeting defers, broken STARTTLS falls back to plaintext, too large bounces', async () => {
  const id = await app.send({ to: 'a@rude.test', text: 'x'.repeat(2_000) });
  const { events, recipients } = await untilState(id, 'bounced');
  const outcomes = events.filter(({ type }) => type === 'deferred' || type === 'bounced');
  assert.equal(
    outcomes.map(({ type, detail }) => [type, detail['stage'], detail['cause']]),
    [
      ['deferred', 'greeting', 'greeting_refused'],
      ['bounced', 'mail', 'message_refused'],
    ],
  );
  assert.is(recipients[0]?.attempts, 2);
  assert.is(rude.messages.length, 0);
});

// What a peer does at each stage, and what becomes of the delivery.
const replies: readonly [string, Parameters<typeof startRawPeer>[0], string, string][] = [
  ['MAIL 550', { on: { MAIL: { reply: '550 5.1.8 bad sender' } } }, 'bounced', '5.1.8'],
  ['MAIL 451', { on: { MAIL: { reply: '451 4.3.0 later' } } }, 'deferred', '4.3.0'],
  [
    'RCPT 550',
    { on: { RCPT: { reply: '550-5.1.1 no such\n550 5.1.1 user' } } },
    'bounced',
    '5.1.1',
  ],
  ['RCPT 450 greylist', { on: { RCPT: { reply: '450 4.7.1 Greylisted' } } }, 'deferred', '4.7.1'],
  ['RCPT 550 without a code', { on: { RCPT: { reply: '550 no' } } }, 'bounced', 'peer_permanent'],
  ['DATA 554', { on: { DATA: { reply: '554 5.6.0 no data' } } }, 'bounced', '5.6.0'],
  ['dot 552 full', { on: { dot: { reply: '552 5.2.2 mailbox full' } } }, 'deferred', '5.2.2'],
  ['dot 554', { on: { dot: { reply: '554 5.7.1 spam' } } }, 'bounced', '5.7.1'],
  [
    'dot 421',
    { on: { dot: [{ reply: '421 4.3.2 closing' }, { close: true }] } },
    'deferred',
    '4.3.2',
  ],
  ['reset at RCPT', { on: { RCPT: { reset: true } } }, 'deferred', 'connection_lost'],
  ['close at EHLO', { on: { EHLO: { close: true } } }, 'deferred', 'connection_lost'],
  ['close after the dot', { on: { dot: { close: true } } }, 'unknown', 'unknown_after_dot'],
  ['reset after the dot', { on: { dot: { reset: true } } }, 'unknown', 'unknown_after_dot'],
  [
    'garbage greeting',
    { on: { connect: { raw: 'HTTP/1.1 400 Bad Request\r\n' } } },
    'deferred',
    '',
  ],
];

for (const [index, [name, script, state, code]] of replies.entries()) {
  test(`${name}: ${state}`, async () => {
    const peer = await startRawPeer(script, { host: `127.0.1.${index + 1}`, port: first.port });
    peers.push(peer);
    dns.zones[`case${index}.test`] = { A: [`127.0.1.${index + 1}`] };
    const id = await app.send({ to: `a@case${index}.test` });
    const { recipients } = await until(
      () => timelineOf(id),
      (timeline) => timeline.recipients[0]?.state === state,
    );
    if (code !== '') assert.is(recipients[0]?.last_code, code, JSON.stringify(recipients));
    // Unknown is not tried again at once; a bounce never.
    if (state !== 'deferred') assert.is(recipients[0]?.attempts, 1);
  });
}

test('a connection lost in the body of a large message is safe to try again', async () => {
  const host = '127.0.2.2';
  const peer = await startRawPeer({ on: { body: { reset: true } } }, { host, port: first.port });
  peers.push(peer);
  dns.zones['halfway.test'] = { A: [host] };
  const id = await app.send({
    to: 'a@halfway.test',
    text: 'x'.repeat(70).concat('\n').repeat(60_000),
  });
  const { recipients } = await untilState(id, 'deferred');
  assert.is(recipients[0]?.last_code, 'connection_lost');
  assert.is(peer.messages.length, 0);
});

test('a kept connection that the peer closed is replaced within the same attempt', async () => {
  const host = '127.0.2.1';
  const peer = await startRawPeer(
    {
      on: {
        dot: (_line, { number }) =>
          number === 1 ? [{ reply: '250 2.0.0 ok' }, { close: true }] : { reply: '250 2.0.0 ok' },
      },
    },
    { host, port: first.port },
  );
  peers.push(peer);
  dns.zones['closing.test'] = { A: [host] };
  for (let number = 0; number < 2; number++) {
    const id = await app.send({ to: 'a@closing.test' });
    await app.untilEvent(id, 'delivered');
    assert.is((await timelineOf(id)).recipients[0]?.attempts, 1);
  }
  assert.is(peer.messages.length, 2);
});

test('a reply with bytes that no text can hold decides all the same', async () => {
  const host = '127.0.2.3';
  const peer = await startRawPeer(
    { on: { RCPT: { raw: Buffer.from('550 5.1.1 no \0 such \xff user\r\n', 'latin1') } } },
    { host, port: first.port },
  );
  peers.push(peer);
  dns.zones['odd.test'] = { A: [host] };
  const { recipients } = await untilState(await app.send({ to: 'a@odd.test' }), 'bounced');
  assert.is(recipients[0]?.last_code, '5.1.1');
  assert.not.match(recipients[0]?.last_reply ?? '', '\0');
  await app.untilEvent(await app.send({ to: 'after@one.test' }), 'delivered');
});

test('peers that say nothing hold up their own mail only', async () => {
  for (const [index, name] of ['silent1.test', 'silent2.test'].entries()) {
    const host = `127.0.3.${index + 1}`;
    peers.push(await startRawPeer({ on: { connect: { hang: true } } }, { host, port: first.port }));
    dns.zones[name] = { A: [host] };
  }
  await Promise.all(
    Array.from({ length: 400 }, (_, number) =>
      app.send({ to: `a${number}@silent${(number % 2) + 1}.test` }),
    ),
  );
  await app.untilEvent(await app.send({ to: 'healthy@one.test' }), 'delivered');
});

test('a 421 on a kept connection is answered with a new one', async () => {
  const host = '127.0.2.4';
  const peer = await startRawPeer(
    {
      on: {
        MAIL: (_line, { counts }) =>
          counts['MAIL'] === 2
            ? [{ reply: '421 4.7.0 enough for one connection' }, { close: true }]
            : { reply: '250 2.1.0 ok' },
      },
    },
    { host, port: first.port },
  );
  peers.push(peer);
  dns.zones['enough.test'] = { A: [host] };
  for (let number = 0; number < 2; number++) {
    const id = await app.send({ to: 'a@enough.test' });
    await app.untilEvent(id, 'delivered');
    assert.is((await timelineOf(id)).recipients[0]?.attempts, 1);
  }
});

test('a from-domain that is not verified is refused where mail can leave', async () => {
  const { status, body } = await app.call('POST', '/emails', {
    body: { from: 'a@stranger.example', to: 'b@one.test', subject: 's', text: 't' },
  });
  assert.is(status, 422);
  assert.is(body['code'], 'domain_not_verified');
  assert.is(body['name'], 'validation_error');
});

test('nothing broke inside', () => {
  assert.equal(
    app.complaints.filter((line) => line.includes('error') || line.includes('broke')),
    [],
  );
});

test.run();
