// Recipients of one transaction against peers whose replies do not fit: one too many, one too few, half of one, of two
// minds, out of their turn. Nobody is given another recipient's answer, and no answer means no verdict.
import { randomUUID } from 'node:crypto';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { PHASE_LIMITS, type PhaseLimits } from '../../src/delivery/phases.ts';
import { openSession, type Session } from '../../src/delivery/session.ts';
import { carry, type Carried } from '../../src/delivery/transaction.ts';
import type { ClaimedDelivery } from '../../src/queue/claim.ts';
import {
  startRawPeer,
  type PeerAction,
  type PeerActions,
  type PeerScript,
  type RawPeer,
} from '../support/raw-peer.ts';

const test = suite('transaction');
const peers: RawPeer[] = [];
const sessions: Session[] = [];
test.after(async () => {
  for (const session of sessions) session.close();
  for (const peer of peers) await peer.stop();
});

/** No more waiting for a reply that never comes than it takes a slow machine to do everything else. */
const HASTY: PhaseLimits = { ...PHASE_LIMITS, commandMs: 700, dataMs: 700, dotMs: 700 };
const ONE_BY_ONE = ['SIZE 1000', '8BITMIME', 'SMTPUTF8'];
const PIPELINED = ['PIPELINING', ...ONE_BY_ONE];
const OK = { reply: '250 2.1.5 ok' };
const GONE = { reply: '550 5.1.1 no such user' };
const CLOSE = { close: true } as const;

async function sessionWith(script: PeerScript): Promise<{ session: Session; peer: RawPeer }> {
  const peer = await startRawPeer(script);
  peers.push(peer);
  const target = {
    host: 'peer.test',
    address: '127.0.0.1',
    port: peer.port,
    tls: 'never',
    verify: false,
    login: null,
    helloName: 'sender.example',
    source: null,
    trusted: true,
  } as const;
  const session = await openSession(target, () => ({ ok: true }), HASTY);
  if ('cause' in session) throw new Error(session.message);
  sessions.push(session);
  return { session, peer };
}

const deliveriesTo = (
  recipients: readonly string[],
  about: Partial<ClaimedDelivery> = {},
): readonly ClaimedDelivery[] => {
  const emailId = randomUUID();
  return recipients.map((recipient, position) => ({
    tenantId: 'tenant',
    emailId,
    position,
    recipient,
    lane: 'mx:peer.test',
    attempt: 1,
    isBulk: false,
    laneFaults: 0,
    unknowns: 0,
    createdAt: new Date('2026-01-02T03:04:05Z'),
    recipientCount: recipients.length,
    raw: null,
    rawSizeBytes: 0,
    blobKey: null,
    needsSmtpUtf8: false,
    signingTenantId: null,
    signingDomainId: null,
    fromDomain: 'sender.example',
    ignoresTlsPolicy: false,
    envelopeFrom: null,
    mayGoUnsigned: false,
    ...about,
  }));
};

/** `a: bounced 5.1.1`, in the order of the recipients; `tried`: another host may take it; `left`: not tried. */
async function fates(
  session: Session,
  names: readonly string[],
  about: {
    sizeBytes?: number;
    delivery?: Partial<ClaimedDelivery>;
    onSent?: (delivery: ClaimedDelivery) => void;
  } = {},
): Promise<readonly string[]> {
  const bytes = Buffer.from('Subject: x\r\n\r\nwords\r\n');
  const { sizeBytes = bytes.length } = about;
  const deliveries = deliveriesTo(
    names.map((name) => `${name}@peer.test`),
    about.delivery,
  );
  const carried: Carried = await carry(session, deliveries, {
    message: {
      body: () => [bytes],
      bytes: { whole: bytes, sizeBytes, fault: null, pieces: async function* () {} },
      sizeBytes,
      mailFrom: () => 'b@sender.example',
      hasOtherKeys: false,
      needsTls: false,
    },
    rules: [],
    tlsPolicy: null,
    messagesMax: 100,
    onDot: () => undefined,
    onSent: about.onSent,
  });
  return deliveries.map((delivery, index) => {
    const done = carried.decided.get(delivery);
    const open = carried.open.get(delivery);
    const { verdict, evidence } = done ?? open ?? { verdict: 'left', evidence: null };
    const about = evidence?.enhanced ?? evidence?.cause ?? '';
    return `${names[index]}: ${done === undefined && open !== undefined ? 'tried' : verdict} ${about}`.trim();
  });
}

/** For each recipient, in their order. */
const rcpts =
  (...answers: readonly PeerActions[]) =>
  (_line: string, connection: { readonly rcpts: readonly string[] }): PeerActions =>
    answers[connection.rcpts.length - 1] ?? OK;

const raw = (text: string): PeerAction => ({ raw: text });

for (const keywords of [PIPELINED, ONE_BY_ONE]) {
  const how = keywords === PIPELINED ? 'pipelined' : 'one by one';
  const cases: readonly (readonly [string, PeerScript['on'], readonly string[]])[] = [
    [
      'MAIL is put off and each RCPT is out of turn',
      {
        MAIL: { reply: '451 4.7.1 come back later' },
        RCPT: { reply: '503 5.5.1 need MAIL' },
        DATA: { reply: '503 5.5.1 need RCPT' },
      },
      ['a: deferred 4.7.1', 'b: deferred 4.7.1', 'c: deferred 4.7.1'],
    ],
    [
      'closed within the refusal of the second',
      { RCPT: rcpts(OK, [raw('550 5.1.1 no such us'), CLOSE]) },
      ['a: tried connection_lost', 'b: tried connection_lost', 'c: tried connection_lost'],
    ],
    [
      'closed behind some of the replies',
      { RCPT: rcpts(OK, GONE, CLOSE) },
      ['a: tried connection_lost', 'b: bounced 5.1.1', 'c: tried connection_lost'],
    ],
    [
      '421 in the middle',
      { RCPT: rcpts(OK, GONE, [{ reply: '421 4.3.2 bye' }, CLOSE]) },
      ['a: tried 4.3.2', 'b: bounced 5.1.1', 'c: tried 4.3.2'],
    ],
    [
      'one reply too many, then a refusal',
      { RCPT: rcpts(raw('250 ok\r\n250 ok\r\n'), GONE, OK) },
      ['a: tried protocol_error', 'b: tried protocol_error', 'c: tried protocol_error'],
    ],
    [
      'one reply too many, and the last is refused',
      { RCPT: rcpts(raw('250 ok\r\n250 ok\r\n'), OK, GONE) },
      ['a: tried protocol_error', 'b: tried protocol_error', 'c: tried protocol_error'],
    ],
    [
      'one reply too many',
      { RCPT: rcpts(raw('250 ok\r\n250 ok\r\n')) },
      ['a: tried protocol_error', 'b: tried protocol_error', 'c: tried protocol_error'],
    ],
    [
      'text that is wrapped without a code',
      { RCPT: rcpts(raw('550-5.1.1 no\r\nsuch user\r\n550 5.1.1 bye\r\n')) },
      ['a: tried protocol_error', 'b: tried protocol_error', 'c: tried protocol_error'],
    ],
    [
      'all refused, with one reply too many',
      {
        RCPT: rcpts(raw('450 4.2.0 busy\r\n450 4.2.0 busy\r\n'), GONE, GONE),
        DATA: { reply: '554 5.5.1 nobody' },
      },
      ['a: tried protocol_error', 'b: tried protocol_error', 'c: tried protocol_error'],
    ],
    [
      'the first is refused twice, and only the last is taken',
      { RCPT: rcpts(raw('550 5.1.1 no\r\n550 5.1.1 no\r\n'), GONE, OK) },
      ['a: tried protocol_error', 'b: tried protocol_error', 'c: tried protocol_error'],
    ],
    [
      'one reply too few, and all are refused',
      { RCPT: rcpts([], { reply: '450 4.2.0 busy' }, GONE), DATA: { reply: '554 5.5.1 nobody' } },
      ['a: tried timeout', 'b: tried timeout', 'c: tried timeout'],
    ],
    [
      '421 behind a refusal',
      {
        RCPT: rcpts(OK, OK, raw('550 5.1.1 no\r\n')),
        DATA: raw('554 5.7.1 no\r\n421 4.3.2 bye\r\n'),
      },
      ['a: bounced 5.7.1', 'b: bounced 5.7.1', 'c: bounced 5.1.1'],
    ],
    [
      'a reply of two minds at RCPT',
      { RCPT: rcpts(OK, raw('250-fine\r\n550 5.1.1 no such user\r\n')) },
      ['a: tried protocol_error', 'b: tried protocol_error', 'c: tried protocol_error'],
    ],
    [
      'a reply of two minds at the dot',
      { dot: raw('250-fine\r\n554 5.6.0 not at all\r\n') },
      [
        'a: unknown unknown_after_dot',
        'b: unknown unknown_after_dot',
        'c: unknown unknown_after_dot',
      ],
    ],
    [
      'DATA is answered as if it were another RCPT',
      { DATA: OK },
      ['a: tried protocol_error', 'b: tried protocol_error', 'c: tried protocol_error'],
    ],
    [
      'all refused, and 354 all the same',
      { RCPT: GONE, dot: { reply: '554 5.5.1 nobody' } },
      ['a: bounced 5.1.1', 'b: bounced 5.1.1', 'c: bounced 5.1.1'],
    ],
    [
      'RSET is not known to the host',
      { RCPT: GONE, DATA: { reply: '503 5.5.1 need RCPT' }, RSET: { reply: '502 5.5.1 what' } },
      ['a: bounced 5.1.1', 'b: bounced 5.1.1', 'c: bounced 5.1.1'],
    ],
    [
      'a duplicate is refused',
      { RCPT: rcpts(OK, { reply: '550 5.5.3 duplicate recipient' }) },
      ['a: delivered 2.0.0', 'b: bounced 5.5.3', 'c: delivered 2.0.0'],
    ],
    [
      'a reply of 100 KB with octets of all kinds',
      {
        RCPT: rcpts(
          OK,
          raw(`${`550-5.1.1 \0\xe9${'x'.repeat(1_000)}\r\n`.repeat(100)}550 5.1.1 no\r\n`),
        ),
      },
      ['a: delivered 2.0.0', 'b: bounced 5.1.1', 'c: delivered 2.0.0'],
    ],
    [
      'one byte at a time',
      { RCPT: rcpts(OK, { drip: '550-5.1.1 no\r\n550 5.1.1 such\r\n', everyMs: 1 }) },
      ['a: delivered 2.0.0', 'b: bounced 5.1.1', 'c: delivered 2.0.0'],
    ],
    [
      'refused while the message is on its way',
      { body: { reply: '552 5.3.4 too big' }, dot: [] },
      ['a: bounced 5.3.4', 'b: bounced 5.3.4', 'c: bounced 5.3.4'],
    ],
    [
      '452 at the first, and the message is refused',
      { RCPT: rcpts({ reply: '452 4.5.3 too many' }), dot: { reply: '451 4.3.0 later' } },
      ['a: deferred 4.5.3', 'b: deferred 4.3.0', 'c: deferred 4.3.0'],
    ],
  ];
  for (const [name, on, expected] of cases) {
    test(`${name}, ${how}`, async () => {
      const { session } = await sessionWith({ keywords, on: on ?? {} });
      assert.equal(await fates(session, ['a', 'b', 'c']), expected);
    });
  }

  // With PIPELINING the peer waits for the message, and we for what DATA is answered.
  test(`one reply too few, ${how}`, async () => {
    const { session, peer } = await sessionWith({ keywords, on: { RCPT: rcpts([], GONE, OK) } });
    assert.equal(
      await fates(session, ['a', 'b', 'c']),
      keywords === PIPELINED
        ? ['a: tried protocol_error', 'b: tried protocol_error', 'c: tried protocol_error']
        : ['a: tried timeout', 'b: tried timeout', 'c: tried timeout'],
    );
    assert.is(peer.messages.length, 0);
  });

  if (keywords === PIPELINED) {
    test('all refused, and DATA is answered with 250', async () => {
      const { session } = await sessionWith({ keywords, on: { RCPT: GONE, DATA: OK } });
      assert.equal(await fates(session, ['a']), ['a: tried protocol_error']);
    });

    test('refused and closed at once: the replies that came are heard', async () => {
      const all = '250 ok\r\n550 5.7.1 no\r\n550 5.7.1 no\r\n550 5.7.1 no\r\n';
      for (const end of [CLOSE, { reset: true } as const]) {
        const { session } = await sessionWith({
          keywords,
          on: { MAIL: [], RCPT: rcpts([], [], [raw(all), end]) },
        });
        const expected = ['a: bounced 5.7.1', 'b: bounced 5.7.1', 'c: bounced 5.7.1'];
        assert.equal(await fates(session, ['a', 'b', 'c']), expected);
      }
    });
  }

  test(`a reply that nobody asked for, behind that to the dot: no answer to the next, ${how}`, async () => {
    const { session, peer } = await sessionWith({
      keywords,
      on: { dot: raw('250 2.0.0 taken\r\n550 5.1.1 no such user\r\n') },
    });
    assert.equal(await fates(session, ['a', 'b']), ['a: delivered 2.0.0', 'b: delivered 2.0.0']);
    assert.equal(await fates(session, ['c']), ['c: left']);
    assert.is(peer.messages.length, 1);
  });

  test(`refused at MAIL by a host that then leaves: perhaps its word about the connection, ${how}`, async () => {
    const { session } = await sessionWith({
      keywords,
      on: {
        MAIL: (_line, { counts }) =>
          counts['MAIL'] === 2 ? [{ reply: '550 5.4.0 idle for too long' }, CLOSE] : OK,
      },
    });
    assert.equal(await fates(session, ['a']), ['a: delivered 2.0.0']);
    assert.equal(await fates(session, ['b', 'c']), ['b: left', 'c: left']);
  });

  test(`what has left is told before the next transaction ends, ${how}`, async () => {
    const told: string[] = [];
    const toldAtEnd: string[][] = [];
    const { session } = await sessionWith({
      keywords,
      on: {
        RCPT: (_line, { rcpts: { length } }) =>
          length > 1 ? { reply: '452 4.5.3 too many recipients' } : OK,
        dot() {
          toldAtEnd.push([...told]);
          return { reply: '250 2.0.0 taken' };
        },
      },
    });
    const ends = await fates(session, ['a', 'b'], {
      onSent: ({ recipient }) => told.push(recipient),
    });
    assert.equal(ends, ['a: delivered 2.0.0', 'b: delivered 2.0.0']);
    assert.equal(toldAtEnd, [[], ['a@peer.test']]);
  });

  test(`what was said of the last message is not said of the next, ${how}`, async () => {
    const { session } = await sessionWith({ keywords, on: { RCPT: rcpts(OK, GONE) } });
    assert.equal(await fates(session, ['a', 'b']), ['a: delivered 2.0.0', 'b: bounced 5.1.1']);
    const tooLarge = await fates(session, ['b'], { sizeBytes: 2_000 });
    assert.equal(tooLarge, ['b: bounced message_refused']);
  });

  test(`SMTPUTF8 is said for a message that needs it, also between plain addresses, ${how}`, async () => {
    const { session, peer } = await sessionWith({ keywords });
    await fates(session, ['a'], { delivery: { needsSmtpUtf8: true } });
    await fates(session, ['a']);
    await fates(session, ['jürgen']);
    assert.equal(
      peer.messages.map(({ mail }) => mail.split(' ').includes('SMTPUTF8')),
      [true, false, true],
    );
    assert.ok(peer.messages.every(({ mail }) => mail.split('SMTPUTF8').length <= 2));
  });
}

test.run();
