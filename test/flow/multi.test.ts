// One transaction for several recipients of an email: each gets the fate that the host gave it, whatever became of the
// others; and nobody gets the message twice. Peers that say exactly what a test wants, behind a fake zone.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { startRawPeer, type PeerScript, type RawPeer } from '../support/raw-peer.ts';

interface Timeline {
  events: { type: string; recipient: string | null; detail: Record<string, unknown> }[];
  recipients: {
    recipient: string;
    state: string;
    attempts: number;
    last_code: string | null;
    last_reply: string | null;
  }[];
}

const test = suite('multi');
let app: App;
let dns: DnsServer;
let port: number;
let number = 0;
const peers: RawPeer[] = [];

test.before(async () => {
  const first = await startRawPeer();
  peers.push(first);
  ({ port } = first);
  dns = await startDns({});
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
  for (const peer of peers) await peer.stop();
});

/** A host of its own for a domain of its own. */
async function domainWith(script: PeerScript): Promise<{ domain: string; peer: RawPeer }> {
  number += 1;
  const host = `127.0.6.${number}`;
  const peer = await startRawPeer(script, { host, port });
  peers.push(peer);
  const domain = `multi${number}.test`;
  dns.zones[domain] = { A: [host] };
  return { domain, peer };
}

const OPEN = ['ready', 'in_flight', 'scheduled', 'preparing'];

async function settled(id: string): Promise<Timeline> {
  return until(
    async () => (await app.call<Timeline>('GET', `/emails/${id}/timeline`)).body,
    ({ recipients }) => recipients.every(({ state }) => !OPEN.includes(state)),
  );
}

/** `a: delivered`, in the order of the recipients. */
const fates = ({ recipients }: Timeline): readonly string[] =>
  recipients.map(({ recipient, state }) => `${recipient.split('@')[0]}: ${state}`);

const to = (domain: string, ...names: readonly string[]): readonly string[] =>
  names.map((name) => `${name}@${domain}`);

const rcptsOf = (peer: RawPeer): readonly string[] =>
  peer.messages.map(({ rcpts }) => rcpts.map((line) => line[4]).join(''));

const WITHOUT_PIPELINING = ['SIZE 52428800', '8BITMIME', 'ENHANCEDSTATUSCODES'];

test('one MAIL, a RCPT for each, one DATA, and a return path of the email', async () => {
  const { domain, peer } = await domainWith({});
  const id = await app.send({ to: to(domain, 'a', 'b'), cc: to(domain, 'c') });
  const timeline = await settled(id);
  assert.equal(fates(timeline), ['a: delivered', 'b: delivered', 'c: delivered']);
  assert.equal(rcptsOf(peer), ['abc']);
  const { counts } = peer.connections[0]!;
  assert.equal([counts['MAIL'], counts['RCPT'], counts['DATA']], [1, 3, 1]);
  assert.match(peer.messages[0]?.mail ?? '', /^FROM:<b\+[a-z0-9]+@send\.mailstead\.test>/);
  const alone = await app.send({ to: to(domain, 'd') });
  await settled(alone);
  const [shared, own] = peer.messages.map(({ mail }) => mail.split('@')[0]!.length);
  assert.is(shared, own, 'both are return paths of the same form');
});

for (const keywords of [undefined, WITHOUT_PIPELINING]) {
  const about = keywords === undefined ? 'pipelined' : 'one command at a time';
  const with_ = keywords === undefined ? {} : { keywords };

  test(`refused recipients bounce or wait alone, ${about}`, async () => {
    const { domain, peer } = await domainWith({
      ...with_,
      on: {
        RCPT: (line) =>
          line.includes('<no@')
            ? { reply: '550 5.1.1 no such user' }
            : line.includes('<later@')
              ? { reply: '450 4.2.0 mailbox busy' }
              : { reply: '250 2.1.5 ok' },
      },
    });
    const timeline = await settled(
      await app.send({ to: to(domain, 'no', 'yes', 'later', 'also') }),
    );
    assert.equal(fates(timeline), [
      'no: bounced',
      'yes: delivered',
      'later: deferred',
      'also: delivered',
    ]);
    assert.equal(
      timeline.recipients.map(({ last_code }) => last_code),
      ['5.1.1', null, '4.2.0', null],
    );
    assert.is(peer.messages.length, 1);
  });

  test(`all refused: no message, and the connection stays usable, ${about}`, async () => {
    const { domain, peer } = await domainWith({
      ...with_,
      on: {
        RCPT: (line) =>
          line.includes('<ok@') ? { reply: '250 2.1.5 ok' } : { reply: '550 5.1.1 no such user' },
        DATA: (_line, { rcpts }) =>
          rcpts.some((rcpt) => rcpt.includes('<ok@'))
            ? { reply: '354 go ahead' }
            : { reply: '554 5.5.1 no valid recipients' },
      },
    });
    assert.equal(fates(await settled(await app.send({ to: to(domain, 'a', 'b') }))), [
      'a: bounced',
      'b: bounced',
    ]);
    assert.is(peer.messages.length, 0);
    if (keywords !== undefined) assert.is(peer.connections[0]?.counts['DATA'], undefined);
    assert.equal(fates(await settled(await app.send({ to: to(domain, 'ok') }))), ['ok: delivered']);
  });

  test(`452 behind an accepted recipient: the rest follows at once, ${about}`, async () => {
    const { domain, peer } = await domainWith({
      ...with_,
      on: {
        RCPT: (_line, { rcpts }) =>
          rcpts.length > 2 ? { reply: '452 4.5.3 too many recipients' } : { reply: '250 2.1.5 ok' },
      },
    });
    const names = ['a', 'b', 'c', 'd', 'e'];
    const timeline = await settled(await app.send({ to: to(domain, ...names) }));
    assert.equal(
      fates(timeline),
      names.map((name) => `${name}: delivered`),
    );
    // Refused ones too: once the host has shown how many it takes, it is told no more.
    assert.equal(rcptsOf(peer), ['abcde', 'cd', 'e']);
    assert.ok(timeline.recipients.every(({ attempts }) => attempts === 1));
    assert.is(peer.connections.length, 1);
  });
}

test('a mailbox that is full behind an accepted recipient is not taken for a limit', async () => {
  const { domain, peer } = await domainWith({
    on: {
      RCPT: (line) =>
        line.includes('<full@') ? { reply: '452 4.2.2 mailbox full' } : { reply: '250 2.1.5 ok' },
    },
  });
  const timeline = await settled(await app.send({ to: to(domain, 'a', 'full') }));
  assert.equal(fates(timeline), ['a: delivered', 'full: deferred']);
  assert.is(peer.connections[0]?.counts['MAIL'], 1);
});

test('452 for the first recipient is about that recipient', async () => {
  const { domain } = await domainWith({
    on: {
      RCPT: (line) =>
        line.includes('<a@') ? { reply: '452 4.3.1 out of storage' } : { reply: '250 2.1.5 ok' },
    },
  });
  const timeline = await settled(await app.send({ to: to(domain, 'a', 'b') }));
  assert.equal(fates(timeline), ['a: deferred', 'b: delivered']);
});

test('LIMITS RCPTMAX and MAILMAX are kept (RFC 9422)', async () => {
  const { domain, peer } = await domainWith({
    keywords: ['PIPELINING', 'LIMITS MAILMAX=2 RCPTMAX=2'],
  });
  const names = ['a', 'b', 'c', 'd', 'e'];
  const timeline = await settled(await app.send({ to: to(domain, ...names) }));
  assert.equal(
    fates(timeline),
    names.map((name) => `${name}: delivered`),
  );
  assert.equal(rcptsOf(peer), ['ab', 'cd', 'e']);
  assert.equal(
    peer.connections.map(({ counts }) => counts['MAIL']),
    [2, 1],
  );
});

test('the reply to the dot speaks for all that were accepted', async () => {
  const { domain } = await domainWith({
    on: {
      RCPT: (line) =>
        line.includes('<no@') ? { reply: '550 5.1.1 no such user' } : { reply: '250 2.1.5 ok' },
      dot: { reply: '554 5.6.0 cannot be read' },
    },
  });
  const timeline = await settled(await app.send({ to: to(domain, 'a', 'no', 'b') }));
  assert.equal(fates(timeline), ['a: bounced', 'no: bounced', 'b: bounced']);
  assert.equal(
    timeline.recipients.map(({ last_code }) => last_code),
    ['5.6.0', '5.1.1', '5.6.0'],
  );
});

test('lost after the dot: unknown for all that were accepted, and for nobody else', async () => {
  const { domain, peer } = await domainWith({
    on: {
      RCPT: (line) =>
        line.includes('<no@') ? { reply: '550 5.1.1 no such user' } : { reply: '250 2.1.5 ok' },
      dot: { reset: true },
    },
  });
  const timeline = await settled(await app.send({ to: to(domain, 'a', 'no', 'b') }));
  assert.equal(fates(timeline), ['a: unknown', 'no: bounced', 'b: unknown']);
  assert.is(peer.messages.length, 1);
});

test('lost before the dot: who was refused stays refused, the others go to the next host', async () => {
  const { domain, peer } = await domainWith({
    on: {
      RCPT: (line) =>
        line.includes('<no@') ? { reply: '550 5.1.1 no such user' } : { reply: '250 2.1.5 ok' },
      DATA: { close: true },
    },
  });
  const second = await domainWith({});
  dns.zones['both.test'] = {
    MX: [`10 ${domain}`, `20 ${second.domain}`],
  };
  const timeline = await settled(await app.send({ to: to('both.test', 'a', 'no', 'b') }));
  assert.equal(fates(timeline), ['a: delivered', 'no: bounced', 'b: delivered']);
  assert.equal(rcptsOf(second.peer), ['ab']);
  assert.is(peer.messages.length, 0);
});

test('421 at a recipient: nobody is decided by it, all go to the next host', async () => {
  const { domain, peer } = await domainWith({
    on: { RCPT: [{ reply: '421 4.3.2 shutting down' }, { close: true }] },
  });
  const second = await domainWith({});
  dns.zones['leaving.test'] = { MX: [`10 ${domain}`, `20 ${second.domain}`] };
  const timeline = await settled(await app.send({ to: to('leaving.test', 'a', 'b') }));
  assert.equal(fates(timeline), ['a: delivered', 'b: delivered']);
  assert.equal(rcptsOf(second.peer), ['ab']);
  assert.is(peer.connections.length, 1);
});

test('an address that needs SMTPUTF8 is the only one that bounces where it is not offered', async () => {
  const { domain } = await domainWith({ keywords: ['PIPELINING'] });
  const timeline = await settled(
    await app.send({ to: to(domain, 'a', 'b'), bcc: to(domain, 'jürgen') }),
  );
  assert.equal(fates(timeline), ['a: delivered', 'b: delivered', 'jürgen: bounced']);
  assert.is(timeline.recipients[2]?.last_code, '5.6.7');
});

test('nothing broke inside', () => {
  assert.equal(
    app.complaints.filter((line) => line.includes('error') || line.includes('broke')),
    [],
  );
});

test.run();
