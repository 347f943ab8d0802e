// One attempt from host to host: which hosts are tried and how many, what is heard first, what the lane learns of it, and
// that the same delivery is always sent as the same bytes. Real sockets on loopback addresses, real signatures.
import { randomUUID } from 'node:crypto';
import { rmSync } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  attempt,
  type AttemptDependencies,
  type Attempted,
  type Line,
} from '../../src/delivery/attempt.ts';
import type { NextHops } from '../../src/delivery/next-hop.ts';
import type { Target } from '../../src/delivery/session.ts';
import { createSigning } from '../../src/delivery/signing.ts';
import type { HostPolicy } from '../../src/dns/tls-policy.ts';
import type { Signer } from '../../src/domains/lookup.ts';
import { generateKeyPair } from '../../src/mail/dkim.ts';
import { readReturnPathLocal, sharedPosition } from '../../src/mail/return-path.ts';
import type { BounceRule } from '../../src/mail/bounce-rules.ts';
import type { ClaimedDelivery } from '../../src/queue/claim.ts';
import { openDiskBlobs, type BlobStore } from '../../src/store/blob.ts';
import { startRawPeer, type PeerScript, type RawPeer } from '../support/raw-peer.ts';

const test = suite('attempt');
const signing = createSigning();
const returnPathKey = Buffer.alloc(32, 7);
let folder: string;
let blobs: BlobStore;
let port: number;
let hosts = 0;
const peers: RawPeer[] = [];
const lines: Line[] = [];
/** By domain id. */
const signers = new Map<string, Signer>();
let named: Signer;

async function makeSigner(): Promise<Signer> {
  const { privateKey } = await generateKeyPair('ed25519-sha256');
  const keys = [
    { domain: 'sender.test', selector: 's1', algorithm: 'ed25519-sha256', privateKey } as const,
  ];
  return {
    domain: 'sender.test',
    returnPathLabel: 'send',
    keys,
    canSend: true,
    tls: 'opportunistic',
  };
}

test.before(async () => {
  folder = await mkdtemp(join(tmpdir(), 'mailstead-attempt-'));
  blobs = openDiskBlobs(folder);
  signers.set('first', await makeSigner());
  named = await makeSigner();
  const peer = await startRawPeer();
  peers.push(peer);
  ({ port } = peer);
});
test.after(async () => {
  for (const line of lines) line.session?.close();
  for (const peer of peers) await peer.stop();
  await signing.close();
  await rm(folder, { recursive: true, force: true });
});

const dependencies = (about: Partial<AttemptDependencies> = {}): AttemptDependencies => ({
  blobs,
  signerOf: async (_tenant, domainId) => signers.get(domainId) ?? null,
  signerByName: async () => named,
  sign: (message, { keys }, signedAt) =>
    Buffer.isBuffer(message)
      ? signing.sign({ message, keys, signedAt })
      : signing.signPieces({ pieces: message, keys, signedAt }),
  returnPath: { key: returnPathKey, keyId: 'a', hostname: 'appliance.example' },
  checkPeer: () => ({ ok: true }),
  bounceRules: [],
  noteTls: () => undefined,
  log: { error: () => undefined },
  onDot: () => undefined,
  ...about,
});

const RAW = Buffer.from('From: a@sender.test\r\nSubject: x\r\n\r\nwords\r\n');

function deliveriesTo(
  count: number,
  about: Partial<ClaimedDelivery> = {},
): readonly ClaimedDelivery[] {
  const emailId = randomUUID();
  return Array.from({ length: count }, (_, position) => ({
    tenantId: randomUUID(),
    emailId,
    position,
    recipient: `r${position}@recipient.test`,
    lane: 'mx:recipient.test',
    attempt: 1,
    isBulk: false,
    laneFaults: 0,
    unknowns: 0,
    createdAt: new Date('2026-01-02T03:04:05Z'),
    recipientCount: count,
    raw: RAW,
    rawSizeBytes: RAW.length,
    blobKey: null,
    needsSmtpUtf8: false,
    signingTenantId: 'tenant',
    signingDomainId: 'first',
    fromDomain: 'sender.test',
    ignoresTlsPolicy: false,
    envelopeFrom: null,
    mayGoUnsigned: false,
    ...about,
  }));
}

/** A host of this name, on an address of its own; without a script nobody listens there. */
async function hostWith(
  script: PeerScript | null,
  about: Partial<Target> = {},
): Promise<{ target: Target; peer: RawPeer | null }> {
  hosts += 1;
  const address = about.address ?? `127.0.8.${hosts}`;
  const peer = script === null ? null : await startRawPeer(script, { host: address, port });
  if (peer !== null) peers.push(peer);
  const target: Target = {
    host: `mx${hosts}.recipient.test`,
    address,
    port,
    tls: 'opportunistic',
    verify: false,
    login: null,
    helloName: 'sender.test',
    source: null,
    trusted: false,
    ...about,
  };
  return { target, peer };
}

const hopsTo = (...found: readonly { target: Target }[]): NextHops => ({
  kind: 'targets',
  targets: found.map(({ target }) => target),
});

function newLine(): Line {
  const line: Line = { session: null };
  lines.push(line);
  return line;
}

const tell = ({ decided, signal }: Attempted): string =>
  `${decided
    .map(({ verdict, evidence: { enhanced, cause } }) => `${verdict} ${enhanced ?? cause ?? ''}`)
    .join(', ')}; ${signal.kind}${signal.kind === 'unreachable' ? ` at ${signal.stage}` : ''}`;

const one = async (
  hops: NextHops,
  about: Partial<ClaimedDelivery> = {},
  d: Partial<AttemptDependencies> = {},
): Promise<Attempted> =>
  attempt(dependencies(d), newLine(), { deliveries: deliveriesTo(1, about), hops });

// What the first host does, and what the attempt comes to when the second takes everything.
const closing = { close: true } as const;
const firsts: readonly (readonly [string, PeerScript | null, string])[] = [
  ['nobody listens', null, 'talked'],
  ['554 at the greeting', { on: { connect: { reply: '554 5.7.1 go away' } } }, 'talked'],
  ['450 at the greeting', { on: { connect: { reply: '450 4.3.2 not now' } } }, 'talked'],
  ['421 at the greeting', { on: { connect: { reply: '421 4.7.0 too many' } } }, 'throttled'],
  ['421 at EHLO', { on: { EHLO: [{ reply: '421 4.3.2 bye' }, closing] } }, 'throttled'],
  ['421 at MAIL', { on: { MAIL: [{ reply: '421 4.3.2 bye' }, closing] } }, 'throttled'],
  ['421 at RCPT', { on: { RCPT: [{ reply: '421 4.3.2 bye' }, closing] } }, 'throttled'],
  ['421 at DATA', { on: { DATA: [{ reply: '421 4.3.2 bye' }, closing] } }, 'throttled'],
  ['421 at the dot', { on: { dot: [{ reply: '421 4.3.2 bye' }, closing] } }, 'throttled'],
  ['closed at the greeting', { on: { connect: closing } }, 'talked'],
  ['closed at EHLO', { on: { EHLO: closing } }, 'talked'],
  ['closed at MAIL', { on: { MAIL: closing } }, 'talked'],
  ['closed at RCPT', { on: { RCPT: closing } }, 'talked'],
  ['reset at DATA', { on: { DATA: { reset: true } } }, 'talked'],
];
for (const [name, script, signal] of firsts) {
  test(`${name}: the next host gets it`, async () => {
    const first = await hostWith(script);
    const second = await hostWith({});
    const attempted = await one(hopsTo(first, second));
    assert.is(tell(attempted), `delivered 2.0.0; ${signal}`);
    assert.is(attempted.decided[0]?.evidence.host, second.target.host);
    assert.is(second.peer?.messages.length, 1);
    assert.ok((first.peer?.connections.length ?? 1) === 1);
  });
}

// With one host, what the lane learns.
const alone: readonly (readonly [string, PeerScript | null, string])[] = [
  ['nobody listens', null, 'deferred connect_refused; unreachable at connect'],
  [
    '554 at the greeting',
    { on: { connect: { reply: '554 5.7.1 go away' } } },
    'deferred 5.7.1; unreachable at greeting',
  ],
  ['closed at EHLO', { on: { EHLO: closing } }, 'deferred connection_lost; unreachable at ehlo'],
  ['550 at RCPT', { on: { RCPT: { reply: '550 5.1.1 nobody' } } }, 'bounced 5.1.1; talked'],
  ['450 at RCPT', { on: { RCPT: { reply: '450 4.2.0 busy' } } }, 'deferred 4.2.0; talked'],
  [
    'too many connections',
    { on: { connect: { reply: '451 4.7.0 too many connections from your address' } } },
    'deferred 4.7.0; throttled',
  ],
  ['421', { on: { MAIL: [{ reply: '421 4.3.2 bye' }, closing] } }, 'deferred 4.3.2; throttled'],
  ['closed at MAIL', { on: { MAIL: closing } }, 'deferred connection_lost; talked'],
  ['lost after the dot', { on: { dot: closing } }, 'unknown unknown_after_dot; talked'],
];
for (const [name, script, expected] of alone) {
  test(`one host, ${name}: ${expected}`, async () => {
    assert.is(tell(await one(hopsTo(await hostWith(script)))), expected);
  });
}

test('no hosts: what the DNS said, and nothing about the lane', async () => {
  const attempted = await one({
    kind: 'none',
    permanent: true,
    cause: 'null_mx',
    enhanced: '5.1.10',
    message: 'takes no mail',
  });
  assert.is(tell(attempted), 'bounced 5.1.10; nothing');
});

test('two hosts that answered and took nothing are enough', async () => {
  const script: PeerScript = { on: { connect: { reply: '451 4.3.2 later' } } };
  const [a, b, c] = [await hostWith(script), await hostWith(script), await hostWith({})];
  assert.is(tell(await one(hopsTo(a, b, c))), 'deferred 4.3.2; unreachable at greeting');
  assert.is(c.peer?.connections.length, 0);
});

test('hosts where nobody listens do not count', async () => {
  const dead = [await hostWith(null), await hostWith(null), await hostWith(null)];
  const attempted = await one(hopsTo(...dead, await hostWith({})));
  assert.is(tell(attempted), 'delivered 2.0.0; talked');
});

test('what a host said is told rather than that another could not be reached', async () => {
  const first = await hostWith({ on: { MAIL: [{ reply: '421 4.3.2 bye' }, closing] } });
  const { decided } = await one(hopsTo(first, await hostWith(null)));
  assert.is(decided[0]?.evidence.reply, '421 4.3.2 bye');
  assert.is(decided[0]?.evidence.host, first.target.host);
});

/** One host with an address of each family. */
async function dualHost(four: PeerScript, six: PeerScript | null): Promise<readonly Target[]> {
  const { target } = await hostWith(four);
  const other = { ...target, address: '::1' };
  if (six !== null) {
    const peer = await startRawPeer(six, { host: '::1', port });
    peers.push(peer);
    lastSix = peer;
  }
  return [target, other];
}
let lastSix: RawPeer | null = null;
const stopSix = async (): Promise<void> => {
  await lastSix?.stop();
  lastSix = null;
};

for (const [name, script] of [
  ['MAIL', { on: { MAIL: { reply: '550 5.7.1 no PTR' } } }],
  ['RCPT', { on: { RCPT: { reply: '550 5.7.25 no PTR' } } }],
  ['the dot', { on: { dot: { reply: '550 5.7.26 not authenticated' } } }],
] as const) {
  test(`refused by policy over one family at ${name}: the other is heard first`, async () => {
    const targets = await dualHost(script, {});
    const attempted = await one({ kind: 'targets', targets });
    assert.is(tell(attempted), 'delivered 2.0.0; talked');
    assert.is(attempted.decided[0]?.evidence.address, '::1');
    await stopSix();
  });
}

test('refused by policy over both families: final', async () => {
  const script: PeerScript = { on: { RCPT: { reply: '550 5.7.1 no' } } };
  const attempted = await one({ kind: 'targets', targets: await dualHost(script, script) });
  assert.is(tell(attempted), 'bounced 5.7.1; talked');
  await stopSix();
});

test('refused by policy over one family, and the other cannot be reached: later', async () => {
  const script: PeerScript = { on: { RCPT: { reply: '550 5.7.1 no' } } };
  const targets = await dualHost(script, null);
  assert.is(tell(await one({ kind: 'targets', targets })), 'deferred 5.7.1; talked');
  const again = await one({ kind: 'targets', targets }, { attempt: 2 });
  assert.is(tell(again), 'bounced 5.7.1; talked', 'from the second attempt on it is final');
});

test('refused by policy, and another host in the same family: final', async () => {
  const first = await hostWith({ on: { RCPT: { reply: '550 5.7.1 no' } } });
  const second = await hostWith({});
  assert.is(tell(await one(hopsTo(first, second))), 'bounced 5.7.1; talked');
  assert.is(second.peer?.connections.length, 0);
});

test('only the refused recipients go over the other family', async () => {
  const script: PeerScript = {
    on: {
      RCPT: (line) =>
        line.includes('<r1@') ? { reply: '550 5.7.1 no' } : { reply: '250 2.1.5 ok' },
    },
  };
  const targets = await dualHost(script, {});
  const { decided } = await attempt(dependencies(), newLine(), {
    deliveries: deliveriesTo(3),
    hops: { kind: 'targets', targets },
  });
  assert.equal(
    decided.map(({ verdict, evidence }) => `${verdict} ${evidence.address ?? ''}`),
    [`delivered ${targets[0]!.address}`, 'delivered ::1', `delivered ${targets[0]!.address}`],
  );
  assert.equal(
    lastSix?.messages.map(({ rcpts }) => rcpts),
    [['TO:<r1@recipient.test>']],
  );
  await stopSix();
});

test('hosts that a policy rules out are not dialled, and the lane learns nothing of them', async () => {
  const first = await hostWith({});
  const second = await hostWith({});
  const cause = 'tls_policy_unknown';
  const refused: HostPolicy = {
    demand: { kind: 'required' },
    refusal: { cause, failure: 'dnssec-invalid', reason: 'its records cannot be validated' },
    watched: [],
  };
  const policies = new Map([
    [first.target.host, refused],
    [second.target.host, refused],
  ]);
  const targets = [first.target, second.target];
  const none = await one({ kind: 'targets', targets, policies });
  assert.is(tell(none), `deferred ${cause}; nothing`);
  assert.equal([first.peer?.connections.length, second.peer?.connections.length], [0, 0]);
  policies.set(second.target.host, { ...refused, refusal: null });
  const dialled = await one({ kind: 'targets', targets, policies });
  assert.match(tell(dialled), /^deferred tls_policy_failed; talked$/);
  assert.equal([first.peer?.connections.length, second.peer?.connections.length], [0, 1]);
});

test('a kept connection is used again, and only for a host of the destination', async () => {
  const first = await hostWith({});
  const line = newLine();
  const go = (hops: NextHops): Promise<Attempted> =>
    attempt(dependencies(), line, { deliveries: deliveriesTo(1), hops });
  await go(hopsTo(first));
  await go(hopsTo(first));
  assert.is(first.peer?.connections.length, 1);
  const second = await hostWith({});
  await go(hopsTo(second));
  assert.is(second.peer?.messages.length, 1);
  line.messagesMax = 1;
  await go(hopsTo(second));
  assert.is(second.peer?.connections.length, 2, 'it had carried what it may');
});

test('a kept connection that refuses with 421 at RCPT: another host, not the same', async () => {
  const first = await hostWith({
    on: {
      RCPT: (_line, { counts }) =>
        counts['RCPT'] === 2 ? [{ reply: '421 4.3.2 bye' }, closing] : { reply: '250 2.1.5 ok' },
    },
  });
  const second = await hostWith({});
  const line = newLine();
  const work = { deliveries: deliveriesTo(1), hops: hopsTo(first, second) };
  await attempt(dependencies(), line, work);
  assert.is(tell(await attempt(dependencies(), line, work)), 'delivered 2.0.0; throttled');
  assert.equal([first.peer?.connections.length, second.peer?.messages.length], [1, 1]);
});

test('what has left stays so when a fault of ours ends the attempt, and what may have is unknown', async () => {
  const host = await hostWith({
    keywords: ['LIMITS RCPTMAX=2'],
    on: { RCPT: (line) => ({ reply: line.includes('<r2@') ? '550 no' : '250 2.1.5 ok' }) },
  });
  const broken = {
    get tenants(): never {
      throw new Error('a rule that cannot be read');
    },
  } as unknown as BounceRule;
  const { decided } = await attempt(dependencies({ bounceRules: [broken] }), newLine(), {
    deliveries: deliveriesTo(4),
    hops: hopsTo(host),
  });
  assert.equal(
    decided.map(({ verdict, evidence: { cause } }) => [verdict, cause]),
    [
      ['delivered', null],
      ['delivered', null],
      ['deferred', 'internal'],
      ['unknown', 'unknown_after_dot'],
    ],
  );
});

test('before the dot leaves, every delivery that was accepted is told', async () => {
  const host = await hostWith({
    on: {
      RCPT: (line) =>
        line.includes('<r1@') ? { reply: '550 5.1.1 nobody' } : { reply: '250 2.1.5 ok' },
    },
  });
  const told: number[] = [];
  await attempt(dependencies({ onDot: ({ position }) => told.push(position) }), newLine(), {
    deliveries: deliveriesTo(3),
    hops: hopsTo(host),
  });
  assert.equal(told, [0, 2]);
});

test('the return path is of the delivery, or of the email and the destination where several share it', async () => {
  const host = await hostWith({});
  const line = newLine();
  for (const count of [1, 2]) {
    const deliveries = deliveriesTo(count);
    const { emailId, lane } = deliveries[0]!;
    const position = count === 1 ? 0 : sharedPosition(emailId, lane);
    await attempt(dependencies(), line, { deliveries, hops: hopsTo(host) });
    const local = /^FROM:<([^@]+)@send\.sender\.test>/.exec(
      host.peer?.messages.at(-1)?.mail ?? '',
    )?.[1];
    assert.equal(readReturnPathLocal(local ?? '', { a: returnPathKey }), {
      emailId: deliveries[0]!.emailId,
      position,
    });
  }
});

test('every attempt sends the same bytes', async () => {
  const host = await hostWith({ on: { dot: { reply: '451 4.3.0 later' } } });
  const deliveries = deliveriesTo(1);
  for (const unknowns of [0, 1]) {
    const again = deliveries.map((delivery) => ({ ...delivery, unknowns }));
    await attempt(dependencies(), newLine(), { deliveries: again, hops: hopsTo(host) });
  }
  const [first, second] = host.peer?.messages ?? [];
  assert.ok(first !== undefined && second !== undefined && first.wire.equals(second.wire));
  assert.match(first.raw.toString(), /^DKIM-Signature: [^]*s=s1/);
});

test('with other keys it is another message: not sent where the first one may have arrived', async () => {
  const host = await hostWith({});
  const deliveries = deliveriesTo(2, { signingDomainId: 'removed' }).map((delivery, index) => ({
    ...delivery,
    unknowns: index,
  }));
  const attempted = await attempt(dependencies(), newLine(), { deliveries, hops: hopsTo(host) });
  assert.is(tell(attempted), 'delivered 2.0.0, unknown domain_not_verified; talked');
  assert.match(attempted.decided[1]?.evidence.reply ?? '', 'removed and added again');
  assert.equal(host.peer?.messages[0]?.rcpts, ['TO:<r0@recipient.test>']);
});

test('bytes that are gone: the dead letter; where an answer was lost, still unknown', async () => {
  const host = await hostWith({});
  const gone = { raw: null, blobKey: randomUUID(), rawSizeBytes: 200_000 };
  assert.is(tell(await one(hopsTo(host), gone)), 'failed message_missing; nothing');
  const again = await one(hopsTo(host), { ...gone, unknowns: 1 });
  assert.is(tell(again), 'unknown message_missing; nothing');
  assert.is(host.peer?.connections.length, 0);
});

test('a fault of ours in the middle undoes nothing that was decided', async () => {
  const host = await hostWith({ keywords: ['LIMITS RCPTMAX=1'] });
  const blobKey = randomUUID();
  const raw = Buffer.concat([RAW, Buffer.alloc(2 * 1_048_576, 'words\r\n')]);
  await blobs.put(blobKey, raw);
  const errors: unknown[] = [];
  const attempted = await attempt(
    dependencies({
      log: { error: (...words: unknown[]) => void errors.push(words) },
      // After the first message nothing is left to send.
      onDot: () => rmSync(join(folder, blobKey.slice(-2), blobKey), { force: true }),
    }),
    newLine(),
    {
      deliveries: deliveriesTo(2, { raw: null, blobKey, rawSizeBytes: raw.length }),
      hops: hopsTo(host),
    },
  );
  assert.is(tell(attempted), 'delivered 2.0.0, deferred internal; talked');
  assert.is(host.peer?.messages.length, 1);
});

test.run();
