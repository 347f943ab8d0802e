// Mail that comes in and goes on: over real sockets, with real DNS packets, and at the far end a second verifier.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { generateKeyPairSync } from 'node:crypto';
import { authenticate } from 'mailauth';
import { publicKeyRecord, signMessage } from '../../src/mail/dkim.ts';
import { findHeaders, splitHeader } from '../../src/mail/header.ts';
import { createResolver, type Resolver } from '../../src/dns/resolver.ts';
import { startApp, until, type App } from '../support/app.ts';
import { read } from '../support/composed.ts';
import { startDns, type DnsServer } from '../support/dns.ts';
import { rulesOf } from '../support/forwarding-rules.ts';
import { handIn } from '../support/hand-in.ts';
import { startRawPeer, type PeerMessage, type RawPeer } from '../support/raw-peer.ts';
import { publishedDomain } from '../support/receiving-domain.ts';

type Fields = Record<string, unknown>;
interface Attempt {
  readonly status: string;
  readonly reason: string | null;
  readonly explanation: string;
  readonly method: string | null;
  readonly email_id: string | null;
}
interface Received {
  readonly id: string;
  readonly subject: string;
  readonly forwarding_attempts: readonly Attempt[];
}

const HOSTNAME = 'appliance.example';
const FAR = '127.0.0.2';

const test = suite('forward');
let app: App;
let dns: DnsServer;
let far: RawPeer;
let plain: RawPeer;
let resolver: Resolver;
const author = generateKeyPairSync('rsa', { modulusLength: 2_048 });

test.before(async () => {
  far = await startRawPeer({}, { host: FAR });
  // Of the last century.
  plain = await startRawPeer(
    { keywords: ['SIZE 52428800'] },
    { host: '127.0.0.3', port: far.port },
  );
  dns = await startDns({
    [HOSTNAME]: { A: ['127.0.0.1'] },
    'far.test': { MX: ['10 mx.far.test'] },
    'mx.far.test': { A: [FAR] },
    'old.test': { MX: ['10 mx.old.test'] },
    'mx.old.test': { A: ['127.0.0.3'] },
    'author.test': { TXT: ['v=spf1 ip4:127.0.0.1 -all'] },
    'key._domainkey.author.test': { TXT: [publicKeyRecord(author.publicKey)] },
    '_dmarc.author.test': { TXT: ['v=DMARC1; p=reject'] },
    'free.test': { TXT: ['v=spf1 -all'] },
  });
  resolver = createResolver({ servers: [dns.server] });
  app = await startApp(
    {
      MAILSTEAD_DELIVERY: 'direct',
      MAILSTEAD_DNS_SERVERS: dns.server,
      MAILSTEAD_MX_DESTINATION_PORT: String(far.port),
      MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
      MAILSTEAD_RETRY_SCHEDULE: '200ms,1h',
      MAILSTEAD_HOSTNAME: HOSTNAME,
    },
    { receiving: { seal_forwards: true } },
  );
});
test.after(async () => {
  for (const peer of [far, plain]) await peer.stop();
  await app.stop();
  resolver.close();
  await dns.stop();
});

/** A domain that receives and sends, with a route for `info` and a rule. */
async function forwardFrom(name: string, destinations: readonly string[]): Promise<string> {
  const domainId = await publishedDomain(app, dns, { name, sending: 'enabled' });
  return rulesOf(app).forward(domainId, 'info', destinations);
}

const letter = (subject: string, about: { from?: string; body?: string } = {}): string =>
  [
    `From: Ada Author <${about.from ?? 'ada@author.test'}>`,
    'To: info@acme.test',
    `Subject: ${subject}`,
    `Message-ID: <${subject.replaceAll(' ', '.')}@author.test>`,
    'Date: Sat, 21 Nov 2026 11:59:00 +0000',
    'MIME-Version: 1.0',
    'Content-Type: text/plain; charset=utf-8',
    'Content-Transfer-Encoding: 8bit',
    '',
    about.body ?? 'Words.',
    '',
  ].join('\r\n');

async function signed(text: string): Promise<string> {
  const key = { domain: 'author.test', selector: 'key', algorithm: 'rsa-sha256' } as const;
  const message = Buffer.from(text);
  const signatures = await signMessage({
    message,
    keys: [{ ...key, privateKey: author.privateKey }],
    signedAt: new Date(),
  });
  return signatures.toString('latin1') + text;
}

async function arrive(message: string, to: string, mailFrom = 'ada@author.test'): Promise<void> {
  const { code, reply } = await handIn(app.appliance.mxPort!, {
    recipient: to,
    message: message.trimEnd(),
    mailFrom,
  });
  assert.is(code, 250, reply);
}
const receivedAs = async (subject: string): Promise<readonly Received[]> => {
  const { body } = await app.call<{ data: { id: string; subject: string }[] }>(
    'GET',
    '/emails/receiving?limit=100',
  );
  const found = body.data.filter((one) => one.subject === subject);
  return Promise.all(
    found.map(async ({ id }) => (await app.call<Received>('GET', `/emails/receiving/${id}`)).body),
  );
};
const attemptsOf = (subject: string, count = 1): Promise<readonly Attempt[]> =>
  until(
    async () => (await receivedAs(subject)).flatMap((one) => one.forwarding_attempts),
    (attempts) => attempts.length >= count,
  );
const atPeer = (peer: RawPeer, subject: string): readonly PeerMessage[] =>
  peer.messages.filter(({ raw }) =>
    findHeaders(splitHeader(raw).fields, 'Subject').includes(subject),
  );
const untilAt = async (
  peer: RawPeer,
  subject: string,
  count = 1,
): Promise<readonly PeerMessage[]> =>
  until(
    () => Promise.resolve(atPeer(peer, subject)),
    (messages) => messages.length >= count,
  );
const pathOf = ({ mail }: PeerMessage): string => /<([^>]*)>/.exec(mail)?.[1] ?? '?';

/** As the far end would look at it. */
async function verify(message: PeerMessage) {
  const ask = async (name: string, type: string): Promise<unknown[]> => {
    const kind = type.toLowerCase() as 'txt' | 'a' | 'aaaa' | 'mx';
    const answer = await resolver[kind](name);
    if (answer.kind !== 'found') throw Object.assign(new Error(name), { code: 'ENOTFOUND' });
    return kind === 'txt' ? answer.records.map((one) => [one]) : [...answer.records];
  };
  return authenticate(message.raw, {
    ip: '127.0.0.1',
    helo: HOSTNAME,
    sender: pathOf(message),
    mta: 'mx.far.test',
    resolver: ask as never,
  });
}

test('at the far end the author’s signature passes, and SPF for the rewritten sender', async () => {
  await forwardFrom('acme.test', ['out@far.test']);
  const original = await signed(letter('a signed letter', { body: 'Grüße aus Wien.' }));
  await arrive(original, 'info@acme.test');
  const [message] = await untilAt(far, 'a signed letter');
  assert.match(
    pathOf(message!),
    /^SRS0=[A-Z2-7]{8}=[A-Z2-7]{2}=author\.test=ada@send\.acme\.test$/,
  );
  assert.match(message!.mail, /BODY=8BITMIME/);
  assert.equal(message!.rcpts, ['TO:<out@far.test>']);
  assert.ok(message!.raw.toString().includes(original.trimEnd()), 'its bytes are as they came');
  const { dkim, spf, dmarc, arc } = await verify(message!);
  const passed = dkim.results.flatMap(({ status, signingDomain }) =>
    status.result === 'pass' ? [signingDomain] : [],
  );
  assert.ok(passed.includes('author.test'), JSON.stringify(dkim.results));
  assert.ok(passed.includes('acme.test'), 'the domain of the route signs too');
  assert.is(spf && spf.status.result, 'pass');
  assert.is(dmarc && dmarc.status.result, 'pass');
  assert.is(arc && arc.status.result, 'pass', 'the seal of the route’s domain');
  const [attempt] = await attemptsOf('a signed letter');
  assert.equal([attempt?.status, attempt?.method], ['queued', 'relayed']);
  const { body } = await app.call('GET', `/emails/${attempt!.email_id}`);
  assert.equal(
    [body['from'], body['to'], body['subject'], body['message_id']],
    [
      'Ada Author <ada@author.test>',
      ['out@far.test'],
      'a signed letter',
      '<a.signed.letter@author.test>',
    ],
  );
  await app.untilEvent(attempt!.email_id!, 'delivered');
  const { body: timeline } = await app.call<{ events: { type: string; detail: Fields }[] }>(
    'GET',
    `/emails/${attempt!.email_id}/timeline`,
  );
  const { detail } = timeline.events.find(({ type }) => type === 'accepted')!;
  const [{ id }] = (await receivedAs('a signed letter')) as [Received];
  assert.equal([detail['via'], detail['received_email_id']], ['forward', id]);
});

test('what DMARC would have refused arrives as the route’s own, and passes', async () => {
  await arrive(letter('not signed'), 'info@acme.test');
  const [message] = await untilAt(far, 'not signed');
  const { dmarc, dkim } = await verify(message!);
  assert.is(dmarc && dmarc.status.result, 'pass');
  assert.is(dkim.results[0]?.signingDomain, 'acme.test');
  assert.match(pathOf(message!), /^b\+[a-z0-9]+@send\.acme\.test$/);
  const { from, attachments } = await read(message!.raw);
  assert.equal(from?.value[0], { name: 'Ada Author via acme.test', address: 'info@acme.test' });
  assert.ok(attachments[0]?.content.toString().includes('Subject: not signed'));
  const [attempt] = await attemptsOf('not signed');
  assert.is(attempt?.method, 'rebuilt');
  assert.match(attempt?.explanation ?? '', /whose DMARC policy is reject/);
});

test('a sender that SPF disowns hears nothing: bounces come to us', async () => {
  await arrive(letter('forged', { from: 'a@free.test' }), 'info@acme.test', 'victim@free.test');
  const [message] = await untilAt(far, 'forged');
  assert.match(pathOf(message!), /^b\+[a-z0-9]+@send\.acme\.test$/);
});

test('the null sender stays null', async () => {
  await arrive(await signed(letter('a bounce')), 'info@acme.test', '');
  const [message] = await untilAt(far, 'a bounce');
  assert.is(pathOf(message!), '');
});

test('two routes that forward at each other stop after one cycle', async () => {
  await forwardFrom('left.test', ['info@right.test']);
  await forwardFrom('right.test', ['info@left.test']);
  await arrive(await signed(letter('round')), 'info@left.test');
  const attempts = await attemptsOf('round', 3);
  assert.equal(attempts.map(({ status, reason }) => `${status} ${reason}`).toSorted(), [
    'queued null',
    'queued null',
    'skipped loop',
  ]);
  assert.is((await receivedAs('round')).length, 3);
});

test('25 destinations get it, each once', async () => {
  const destinations = Array.from({ length: 25 }, (_, index) => `d${index}@far.test`);
  await forwardFrom('many.test', destinations);
  await arrive(await signed(letter('to many')), 'info@many.test');
  const [attempt] = await attemptsOf('to many');
  await app.untilEvent(attempt!.email_id!, 'delivered');
  const rcpts = atPeer(far, 'to many').flatMap((one) => one.rcpts);
  assert.equal(
    rcpts.map((one) => /<([^>]*)>/.exec(one)?.[1] ?? '').toSorted(),
    destinations.toSorted(),
  );
});

test('a host that takes no 8-bit text gets none of it', async () => {
  await forwardFrom('classic.test', ['out@old.test']);
  await arrive(await signed(letter('in seven')), 'info@classic.test');
  await untilAt(plain, 'in seven');
  await arrive(await signed(letter('in eight', { body: 'Grüße' })), 'info@classic.test');
  const [attempt] = await attemptsOf('in eight');
  await app.untilEvent(attempt!.email_id!, 'bounced');
  assert.equal(atPeer(plain, 'in eight'), []);
  const { body } = await app.call<{ recipients: { last_code: string }[] }>(
    'GET',
    `/emails/${attempt!.email_id}/timeline`,
  );
  assert.is(body.recipients[0]?.last_code, '5.6.3');
});

test('nothing broke inside', () => {
  assert.equal(
    app.complaints.filter((line) => line.includes('error') || line.includes('broke')),
    [],
  );
});

test.run();
