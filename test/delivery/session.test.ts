// A session against peers that break off, reset, hang, drip and stop reading at each phase: what it was doing is told by
// its phase, before the final dot nobody has the message, and no socket is left behind.
import { once } from 'node:events';
import { createServer, type AddressInfo, type Server, type Socket } from 'node:net';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { PHASE_LIMITS, type PhaseLimits } from '../../src/delivery/phases.ts';
import {
  openSession,
  type Failure,
  type SendResult,
  type Session,
  type Target,
} from '../../src/delivery/session.ts';
import { startRawPeer, type PeerScript, type RawPeer } from '../support/raw-peer.ts';

const test = suite('session');
const peers: RawPeer[] = [];
test.after(async () => {
  for (const peer of peers) await peer.stop();
});

const targetAt = (port: number, about: Partial<Target> = {}): Target => ({
  host: 'peer.test',
  address: '127.0.0.1',
  port,
  tls: 'never',
  verify: false,
  login: null,
  helloName: 'sender.example',
  source: null,
  trusted: true,
  ...about,
});

/** Short enough to be waited for, long enough for a slow machine to do everything else. */
const HASTY: PhaseLimits = {
  ...PHASE_LIMITS,
  greetingMs: 400,
  commandMs: 400,
  dataMs: 400,
  blockMs: 400,
  dotMs: 400,
};
const anyPeer = (): { ok: true } => ({ ok: true });
const isFailure = (opened: Session | Failure): opened is Failure => 'cause' in opened;

async function peerWith(script: PeerScript): Promise<RawPeer> {
  const peer = await startRawPeer(script);
  peers.push(peer);
  return peer;
}

async function opened(target: Target, limits: PhaseLimits = PHASE_LIMITS): Promise<Session> {
  const session = await openSession(target, anyPeer, limits);
  if (isFailure(session)) throw new Error(`${session.stage}: ${session.message}`);
  return session;
}

const send = (
  session: Session,
  recipients: readonly string[] = ['a@peer.test'],
  onDot: (accepted: ReadonlySet<string>) => void = () => undefined,
): Promise<SendResult> =>
  session.send({
    mailFrom: 'b@sender.example',
    recipients,
    body: [Buffer.from('Subject: x\r\n\r\nwords\r\n')],
    sizeBytes: 23,
    onDot,
  });

/** `lost at rcpt: connection_lost`, or `refused at dot: 554 no`. */
function said(result: SendResult): string {
  if (result.kind === 'accepted') return 'accepted';
  const sent = result.kind === 'lost' && result.dotSent ? ' after the dot' : '';
  return `${result.kind}${sent} at ${result.stage}: ${result.reply ?? result.cause}`;
}

const PIPELINING = undefined;
const ONE_BY_ONE = ['8BITMIME', 'ENHANCEDSTATUSCODES'];

for (const how of ['close', 'reset', 'hang'] as const) {
  const action = { [how]: true } as { close: true } | { reset: true } | { hang: true };
  const cause = how === 'hang' ? 'timeout' : 'connection_lost';

  for (const [moment, stage] of [
    ['connect', 'greeting'],
    ['EHLO', 'ehlo'],
  ] as const) {
    test(`${how} at ${stage}`, async () => {
      const peer = await peerWith({ on: { [moment]: action } });
      const failure = await openSession(targetAt(peer.port), anyPeer, HASTY);
      if (!isFailure(failure)) throw new Error('it opened');
      // A reset at once may be heard before the connection stands.
      const isEarly = how === 'reset' && failure.stage === 'connect';
      const expected = isEarly ? ['connect', 'connect_failed', null] : [stage, cause, null];
      assert.equal([failure.stage, failure.cause, failure.reply], expected);
      await peer.connections[0]?.closed;
    });
  }

  for (const keywords of [PIPELINING, ONE_BY_ONE]) {
    const name = keywords === PIPELINING ? 'pipelined' : 'one by one';
    for (const [moment, stage] of [
      ['MAIL', 'mail'],
      ['RCPT', 'rcpt'],
      ['DATA', 'data'],
    ] as const) {
      test(`${how} at ${stage}, ${name}`, async () => {
        const peer = await peerWith({
          ...(keywords === PIPELINING ? {} : { keywords }),
          on: { [moment]: action },
        });
        const session = await opened(targetAt(peer.port), HASTY);
        const result = await send(session);
        // A reset may overtake the replies before it, and then they were never heard.
        const stages =
          how === 'reset' && keywords === PIPELINING ? ['mail', 'rcpt', stage] : [stage];
        assert.ok(
          stages.some((one) => said(result) === `lost at ${one}: ${cause}`),
          said(result),
        );
        assert.is(session.isOpen(), false);
        await peer.connections[0]?.closed;
      });
    }
  }

  test(`${how} in the body`, async () => {
    const peer = await peerWith({ bodyBytes: 1_000, on: { body: action } });
    const session = await opened(targetAt(peer.port), HASTY);
    let hasDot = false;
    const endless = async function* (): AsyncGenerator<Buffer> {
      yield Buffer.from('Subject: x\r\n\r\n');
      // Beyond what the sockets of both sides hold, so that the end is never near.
      for (let count = 0; count < 40; count++) yield Buffer.alloc(1_048_576, 'words\r\n');
      if (how === 'hang') await new Promise(() => undefined);
    };
    const result = await session.send({
      mailFrom: 'b@sender.example',
      recipients: ['a@peer.test'],
      body: endless(),
      sizeBytes: 42_000_000,
      onDot: () => (hasDot = true),
    });
    assert.is(said(result), `lost at dot: ${cause}`);
    assert.is(hasDot, false);
  });

  test(`${how} after the dot`, async () => {
    const peer = await peerWith({ on: { dot: action } });
    const session = await opened(targetAt(peer.port), { ...PHASE_LIMITS, dotMs: HASTY.dotMs });
    assert.is(said(await send(session)), `lost after the dot at dot: ${cause}`);
    assert.is(peer.messages.length, 1);
    await peer.connections[0]?.closed;
  });
}

test('a peer that drips its replies gains no time', async () => {
  const drip = { drip: '250-still\r\n250 here\r\n', everyMs: 100 };
  const greeting = await peerWith({ on: { connect: { drip: '220 slow.test\r\n', everyMs: 100 } } });
  const failure = await openSession(targetAt(greeting.port), anyPeer, HASTY);
  assert.ok(isFailure(failure) && failure.cause === 'timeout' && failure.stage === 'greeting');
  const peer = await peerWith({ keywords: ONE_BY_ONE, on: { RCPT: drip } });
  const session = await opened(targetAt(peer.port), HASTY);
  assert.is(said(await send(session)), 'lost at rcpt: timeout');
});

test('many quick replies are as slow as one, for the whole of a transaction', async () => {
  const peer = await peerWith({
    keywords: ONE_BY_ONE,
    on: { RCPT: { drip: '250 ok\r\n', everyMs: 20 } },
  });
  const session = await opened(targetAt(peer.port), { ...PHASE_LIMITS, transactionMs: 500 });
  const names = Array.from({ length: 100 }, (_, index) => `r${index}@peer.test`);
  assert.is(said(await send(session, names)), 'lost at rcpt: timeout');
});

/** A peer that says 354 and reads no more: its window closes. */
async function startDeaf(): Promise<{ server: Server; port: number; sockets: Socket[] }> {
  const sockets: Socket[] = [];
  const server = createServer({ noDelay: true }, (socket) => {
    sockets.push(socket);
    socket.on('error', () => undefined);
    socket.write('220 deaf.test\r\n');
    socket.on('data', (chunk: Buffer) => {
      for (const line of chunk.toString().split('\r\n')) {
        if (line === 'DATA') socket.pause();
        if (line !== '') socket.write(line === 'DATA' ? '354 go ahead\r\n' : '250 ok\r\n');
      }
    });
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  return { server, port: (server.address() as AddressInfo).port, sockets };
}

test('a peer that stops reading: told as late with the message, and the socket is gone', async () => {
  const { server, port, sockets } = await startDeaf();
  const session = await opened(targetAt(port), HASTY);
  const result = await session.send({
    mailFrom: 'b@sender.example',
    recipients: ['a@peer.test'],
    body: [Buffer.alloc(32 * 1_048_576, 'words\r\n')],
    sizeBytes: 33_000_000,
    onDot: () => assert.unreachable('the dot cannot have left'),
  });
  assert.is(said(result), 'lost at dot: timeout');
  assert.is(session.isOpen(), false);
  for (const socket of sockets) socket.destroy();
  server.close();
  await once(server, 'close');
});

for (const keywords of [PIPELINING, ONE_BY_ONE]) {
  const name = keywords === PIPELINING ? 'pipelined' : 'one by one';
  const by = keywords === PIPELINING ? {} : { keywords };

  for (const [moment, reply, expected] of [
    ['MAIL', '550 5.1.8 bad sender', 'refused at mail: 550 5.1.8 bad sender'],
    ['MAIL', '421 4.3.2 bye', 'refused at mail: 421 4.3.2 bye'],
    ['RCPT', '550 5.1.1 nobody', 'refused at rcpt: 550 5.1.1 nobody'],
    ['RCPT', '421 4.3.2 bye', 'refused at rcpt: 421 4.3.2 bye'],
    ['DATA', '554 5.6.0 no', 'refused at data: 554 5.6.0 no'],
    ['DATA', '421 4.3.2 bye', 'refused at data: 421 4.3.2 bye'],
    ['dot', '554 5.7.1 spam', 'refused at dot: 554 5.7.1 spam'],
    ['dot', '421 4.3.2 bye', 'refused at dot: 421 4.3.2 bye'],
  ] as const) {
    test(`${moment} ${reply}, ${name}`, async () => {
      const closes = reply.startsWith('421') ? ([{ close: true }] as const) : [];
      const peer = await peerWith({ ...by, on: { [moment]: [{ reply }, ...closes] } });
      const session = await opened(targetAt(peer.port));
      const result = await send(session);
      assert.is(said(result), expected);
      const isOfRecipient = moment === 'RCPT' && !reply.startsWith('421');
      assert.equal(result.refusals, [isOfRecipient ? reply : null]);
      session.close();
    });
  }

  test(`who was accepted, and who was not, ${name}`, async () => {
    const peer = await peerWith({
      ...by,
      on: {
        RCPT: (line) =>
          line.includes('<b@') ? { reply: '550 5.1.1 nobody' } : { reply: '250 2.1.5 ok' },
      },
    });
    const session = await opened(targetAt(peer.port));
    const told: string[][] = [];
    const names = ['a@peer.test', 'b@peer.test', 'c@peer.test'];
    const result = await send(session, names, (accepted) => told.push([...accepted]));
    assert.is(said(result), 'accepted');
    assert.equal(result.refusals, [null, '550 5.1.1 nobody', null]);
    assert.equal(told, [['a@peer.test', 'c@peer.test']]);
    session.close();
    assert.equal(peer.messages[0]?.rcpts.length, 3);
  });
}

test('a dot that must not leave does not', async () => {
  const peer = await peerWith({});
  const session = await opened(targetAt(peer.port));
  const result = await send(session, ['a@peer.test'], () => {
    throw new Error('the lease is gone');
  });
  assert.is(said(result), 'lost at dot: internal');
  await peer.connections[0]?.closed;
  assert.is(peer.messages.length, 0);
});

test('what the host announces of its limits is known (RFC 9422)', async () => {
  const peer = await peerWith({ keywords: ['LIMITS RCPTMAX=20 MAILMAX=5 RCPTDOMAINMAX=1'] });
  const session = await opened(targetAt(peer.port));
  assert.equal(session.limits, { messages: 5, recipients: 20, recipientDomains: 1 });
  session.takesAtMost(30);
  assert.is(session.limits.recipients, 20);
  session.takesAtMost(3);
  assert.is(session.limits.recipients, 3);
  session.close();
  const silent = await peerWith({ keywords: ['LIMITS', 'SIZE'] });
  const other = await opened(targetAt(silent.port));
  assert.is(other.limits.recipients, Infinity);
  other.close();
});

test('dials from the address it is told, and says so', async () => {
  const seen: (string | undefined)[] = [];
  const server = createServer((socket) => {
    seen.push(socket.remoteAddress);
    socket.on('error', () => undefined);
    socket.end('220 x\r\n');
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  await openSession(targetAt(port, { source: '127.0.0.77' }), anyPeer);
  assert.equal(seen, ['127.0.0.77']);
  server.close();
  const peer = await peerWith({});
  const session = await opened(targetAt(peer.port, { source: '127.0.0.78' }));
  assert.is(session.source, '127.0.0.78');
  session.close();
  const chosen = await opened(targetAt(peer.port));
  assert.is(chosen.source, '127.0.0.1');
  chosen.close();
});

test('an address that is none of this machine: said so, and nobody is dialled', async () => {
  const peer = await peerWith({});
  const failure = await openSession(targetAt(peer.port, { source: '192.0.2.1' }), anyPeer);
  assert.ok(isFailure(failure));
  assert.equal([failure.stage, failure.cause], ['connect', 'egress_unusable']);
  assert.match(failure.message, '192.0.2.1');
  assert.is(peer.connections.length, 0);
});

test('a port where nobody listens', async () => {
  const server = createServer();
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  server.close();
  await once(server, 'close');
  const failure = await openSession(targetAt(port), anyPeer);
  assert.ok(isFailure(failure));
  assert.equal([failure.stage, failure.cause], ['connect', 'connect_refused']);
});

test.run();
