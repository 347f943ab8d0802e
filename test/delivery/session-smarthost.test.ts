// The password of a smarthost: said only over a connection that has proved whose it is, and where it is not said, the
// mail waits and the reason says what to mend. Real TLS, with certificates of an authority that this process trusts.
import { createServer } from 'node:net';
import { once } from 'node:events';
import { rootCertificates, setDefaultCACertificates } from 'node:tls';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { toSmarthost, type Smarthost } from '../../src/delivery/next-hop.ts';
import type { Target } from '../../src/delivery/session.ts';
import { attempt, type Attempted } from '../../src/delivery/attempt.ts';
import { createSigning } from '../../src/delivery/signing.ts';
import { generateKeyPair, type DkimKey } from '../../src/mail/dkim.ts';
import type { ClaimedDelivery } from '../../src/queue/claim.ts';
import { newId } from '../../src/store/id.ts';
import { chainOf, issue } from '../support/certificates.ts';
import { startRawPeer } from '../support/raw-peer.ts';
import { startTlsHost, type TlsHost, type TlsHostOptions } from '../support/tls-host.ts';

const test = suite('session-smarthost');
const authority = issue({ commonName: 'authority of a test', isAuthority: true });
const certificate = (about: Parameters<typeof issue>[0]): { cert: string; key: string } =>
  chainOf(issue({ issuer: authority, ...about }), authority);
const good = certificate({ names: ['relay.test'] });

const login = { user: 'appliance', pass: 'open sesame' };
const SECRETS = [
  'sesame',
  Buffer.from(`\0${login.user}\0${login.pass}`).toString('base64'),
  Buffer.from(login.pass).toString('base64'),
];
const signing = createSigning();
let keys: readonly DkimKey[];
const stops: (() => Promise<void>)[] = [];

test.before(async () => {
  setDefaultCACertificates([...rootCertificates, authority.cert]);
  const { privateKey } = await generateKeyPair('ed25519-sha256');
  keys = [{ domain: 'sender.test', selector: 's1', algorithm: 'ed25519-sha256', privateKey }];
});
test.after(async () => {
  setDefaultCACertificates([...rootCertificates]);
  for (const stop of stops) await stop();
  await signing.close();
});

/** What the settings make of a smarthost that is reached at this port of this machine. */
async function targetsAt(port: number, about: Partial<Smarthost> = {}): Promise<readonly Target[]> {
  // An address of nobody: what counts is that it is none of this machine's.
  const smarthost = { host: '192.0.2.7', port, implicitTls: false, login, ...about };
  const hops = await toSmarthost({ smarthost, helloName: 'sender.test' });
  assert.is(hops.kind, 'targets');
  const targets = hops.kind === 'targets' ? hops.targets : [];
  return targets.map((target) => ({ ...target, host: 'relay.test', address: '127.0.0.1' }));
}

const delivery = (): ClaimedDelivery => ({
  tenantId: newId(),
  emailId: newId(),
  position: 0,
  recipient: 'a@recipient.test',
  lane: 'smarthost',
  attempt: 1,
  isBulk: false,
  laneFaults: 0,
  unknowns: 0,
  createdAt: new Date(),
  recipientCount: 1,
  raw: Buffer.from('Subject: x\r\n\r\nwords\r\n'),
  rawSizeBytes: 21,
  blobKey: null,
  needsSmtpUtf8: false,
  signingTenantId: 'tenant',
  signingDomainId: 'domain',
  fromDomain: 'sender.test',
  ignoresTlsPolicy: false,
  envelopeFrom: null,
  mayGoUnsigned: false,
});

async function attemptAt(targets: readonly Target[]): Promise<Attempted> {
  const line: Parameters<typeof attempt>[1] = { session: null };
  const signer = {
    domain: 'sender.test',
    returnPathLabel: 'send',
    keys,
    canSend: true,
    tls: 'opportunistic',
  } as const;
  const attempted = await attempt(
    {
      blobs: null as never, // the message is in the row
      signerOf: async () => signer,
      signerByName: async () => null,
      sign: (message, { keys: own }, signedAt) =>
        signing.sign({ message: message as Buffer, keys: own, signedAt }),
      returnPath: { key: Buffer.alloc(32), keyId: 'a', hostname: 'sender.test' },
      checkPeer: () => ({ ok: false, reason: 'the operator named it, so nobody asks' }),
      bounceRules: [],
      noteTls: () => undefined,
      log: { error: () => undefined },
      onDot: () => undefined,
    },
    line,
    { deliveries: [delivery()], hops: { kind: 'targets', targets } },
  );
  line.session?.close();
  return attempted;
}

async function hostWith(options: TlsHostOptions): Promise<TlsHost> {
  const host = await startTlsHost(options);
  stops.push(() => host.stop());
  return host;
}

const heard = (host: TlsHost): string =>
  host.sessions.flatMap(({ transcript }) => transcript).join('\n');

test('a certificate for its name: the password goes over TLS, and the mail with it', async () => {
  const host = await hostWith(good);
  const { decided, signal } = await attemptAt(await targetsAt(host.port));
  assert.equal([decided[0]?.verdict, signal.kind], ['delivered', 'talked']);
  assert.is(decided[0]?.evidence.tlsPolicy, 'smarthost');
  assert.match(decided[0]?.evidence.tls ?? '', / verified$/);
  const lines = heard(host).split('\n');
  const auth = lines.findIndex((line) => line.startsWith('C: AUTH'));
  assert.ok(auth > lines.indexOf('TLS'), lines.join('\n'));
});

for (const [name, options, why] of [
  ['a certificate for another name', certificate({ names: ['other.test'] }), /relay\.test/],
  ['an expired certificate', certificate({ names: ['relay.test'], from: -30, to: -1 }), /expired/],
  ['a certificate of nobody known', chainOf(issue({ names: ['relay.test'] })), /self.signed/],
  ['no STARTTLS', { ...good, starttls: 'none' }, /502 5\.5\.1/],
  ['STARTTLS refused', { ...good, starttls: 'refuse' }, /454 4\.7\.0/],
  [
    'STARTTLS that is no TLS',
    { ...good, starttls: 'garbage' },
    /disconnected|wrong version|packet/,
  ],
] as const) {
  test(`${name}: the mail waits, and no byte of the password was sent`, async () => {
    const host = await hostWith(options);
    const { decided, signal } = await attemptAt(await targetsAt(host.port));
    const { verdict, evidence } = decided[0]!;
    assert.equal([verdict, evidence.stage, evidence.cause], ['deferred', 'tls', 'tls_failed']);
    assert.equal([signal.kind, host.taken.length], ['unreachable', 0]);
    assert.match((evidence.reply ?? '').split('certificate must')[0]!, why);
    assert.match(evidence.reply ?? '', /^No password was sent to the smarthost relay\.test/);
    assert.match(evidence.reply ?? '', /MAILSTEAD_SMARTHOST_URL/);
    assert.not.match(heard(host), /AUTH|MAIL/);
  });
}

test('smtps to a port that speaks no TLS: nothing is said at all', async () => {
  const chunks: Buffer[] = [];
  const server = createServer((socket) => {
    socket.on('error', () => undefined).on('data', (chunk: Buffer) => chunks.push(chunk));
    socket.end('220 plain.test\r\n');
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const address = server.address();
  const port = typeof address === 'object' ? (address?.port ?? 0) : 0;
  const { decided } = await attemptAt(await targetsAt(port, { implicitTls: true }));
  server.close();
  assert.equal([decided[0]?.verdict, decided[0]?.evidence.stage], ['deferred', 'tls']);
  const sent = Buffer.concat(chunks).toString('latin1');
  for (const secret of SECRETS) assert.not.ok(sent.includes(secret));
});

test('a login that is not taken: the mail waits, and the reason names the setting', async () => {
  // To this machine itself a password may be said in plaintext.
  const peer = await startRawPeer({
    keywords: ['AUTH PLAIN'],
    on: { AUTH: { reply: '535 5.7.8 authentication failed' } },
  });
  stops.push(() => peer.stop());
  const smarthost = { host: '127.0.0.1', port: peer.port, implicitTls: false, login };
  const hops = await toSmarthost({ smarthost, helloName: 'sender.test' });
  const { decided, signal } = await attemptAt(hops.kind === 'targets' ? hops.targets : []);
  const { verdict, evidence } = decided[0]!;
  assert.equal([verdict, evidence.stage, evidence.code], ['deferred', 'auth', 535]);
  assert.match(evidence.reply ?? '', /MAILSTEAD_SMARTHOST_URL: 535 5\.7\.8/);
  assert.is(signal.kind, 'unreachable');
});

test('a smarthost that is not set, or not found: the mail waits', async () => {
  const unset = await toSmarthost({ smarthost: null, helloName: 'sender.test' });
  assert.ok(unset.kind === 'none' && !unset.permanent && unset.cause === 'no_smarthost');
  const smarthost = { host: 'no.such.host.invalid', port: 587, implicitTls: false, login };
  const missing = await toSmarthost({ smarthost, helloName: 'sender.test' });
  assert.ok(missing.kind === 'none' && !missing.permanent && missing.cause === 'dns_failed');
});

test.run();
