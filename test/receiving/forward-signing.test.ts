// How forwarded mail leaves: with the envelope sender that was decided, signed where there are keys, and without a signature
// where there are none; while mail of our own never leaves unsigned.
import { randomUUID } from 'node:crypto';
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { signMessageOf, type SignedMessage } from '../../src/delivery/signed-message.ts';
import { createSigning } from '../../src/delivery/signing.ts';
import type { Signer } from '../../src/domains/lookup.ts';
import { generateKeyPair } from '../../src/mail/dkim.ts';
import { readReturnPathLocal } from '../../src/mail/return-path.ts';
import type { ClaimedDelivery } from '../../src/queue/claim.ts';
import { openDiskBlobs, type BlobStore } from '../../src/store/blob.ts';

const test = suite('forward signing');
const signing = createSigning();
const key = Buffer.alloc(32, 7);
const RAW = Buffer.from('From: a@author.test\r\nSubject: x\r\n\r\nwords\r\n');
let folder: string;
let blobs: BlobStore;
let signer: Signer;

test.before(async () => {
  folder = await mkdtemp(join(tmpdir(), 'mailstead-forward-'));
  blobs = openDiskBlobs(folder);
  const { privateKey } = await generateKeyPair('ed25519-sha256');
  signer = {
    domain: 'route.test',
    returnPathLabel: 'send',
    keys: [{ domain: 'route.test', selector: 's', algorithm: 'ed25519-sha256', privateKey }],
    canSend: true,
    tls: 'opportunistic',
  };
});
test.after(async () => {
  await signing.close();
  await rm(folder, { recursive: true, force: true });
});

async function sign(
  about: Partial<ClaimedDelivery> = {},
  found: Signer | null = signer,
  named: Signer | null = null,
): Promise<{ message: SignedMessage; sent: Buffer; deliveries: readonly ClaimedDelivery[] }> {
  const delivery = deliveryOf(about);
  const message = await signMessageOf(dependencies(found, named), delivery);
  if ('verdict' in message) throw new Error(message.evidence.reply ?? 'refused');
  const pieces: Buffer[] = [];
  for await (const piece of message.body()) pieces.push(piece);
  return { message, sent: Buffer.concat(pieces), deliveries: [delivery] };
}

const dependencies = (
  found: Signer | null,
  named: Signer | null,
): Parameters<typeof signMessageOf>[0] => ({
  blobs,
  signerOf: async () => found,
  signerByName: async () => named,
  sign: (message, { keys }, signedAt) =>
    Buffer.isBuffer(message)
      ? signing.sign({ message, keys, signedAt })
      : signing.signPieces({ pieces: message, keys, signedAt }),
  returnPath: { key, keyId: 'a', hostname: 'appliance.example' },
});

const deliveryOf = (about: Partial<ClaimedDelivery>): ClaimedDelivery => ({
  tenantId: randomUUID(),
  emailId: randomUUID(),
  position: 0,
  recipient: 'r@far.test',
  lane: 'mx:far.test@forward',
  attempt: 1,
  isBulk: true,
  laneFaults: 0,
  unknowns: 0,
  createdAt: new Date('2026-01-02T03:04:05Z'),
  recipientCount: 1,
  raw: RAW,
  rawSizeBytes: (about.raw ?? RAW).length,
  blobKey: null,
  needsSmtpUtf8: false,
  signingTenantId: 'tenant',
  signingDomainId: 'domain',
  fromDomain: 'route.test',
  ignoresTlsPolicy: false,
  envelopeFrom: null,
  mayGoUnsigned: true,
  ...about,
});

async function inBlob(bytes: Buffer): Promise<Partial<ClaimedDelivery>> {
  const blobKey = randomUUID();
  await blobs.put(blobKey, bytes);
  return { raw: null, blobKey, rawSizeBytes: bytes.length };
}

test('a domain that only receives signs too, and its bounces come to the host', async () => {
  for (const canSend of [true, false]) {
    const { message, sent, deliveries } = await sign({}, { ...signer, canSend });
    assert.match(sent.toString(), /^DKIM-Signature: [^]*d=route\.test/);
    assert.ok(sent.subarray(-RAW.length).equals(RAW));
    assert.is(message.sizeBytes, sent.length);
    const [local = '', host] = message.mailFrom(deliveries).split('@');
    assert.is(host, canSend ? 'send.route.test' : 'appliance.example');
    assert.is(readReturnPathLocal(local, { a: key })?.emailId, deliveries[0]?.emailId);
    assert.not(message.hasOtherKeys);
  }
});

test('the envelope sender that was decided is that of every transaction', async () => {
  for (const envelopeFrom of ['', 'SRS0=AAAAAAAA=BB=author.test=a@send.route.test']) {
    const { message, deliveries } = await sign({ envelopeFrom });
    assert.is(message.mailFrom(deliveries), envelopeFrom);
    assert.is(message.mailFrom([...deliveries, ...deliveries]), envelopeFrom);
  }
});

test('without a domain or keys it leaves as it is', async () => {
  for (const found of [null, { ...signer, keys: [] }]) {
    const { message, sent, deliveries } = await sign({}, found);
    assert.ok(sent.equals(RAW));
    assert.match(message.mailFrom(deliveries), /@(?:appliance\.example|send\.route\.test)$/);
    // A host that has the signed one could not tell this one from it.
    assert.is(message.hasOtherKeys, found === null);
  }
});

test('what others wrote is not signed for a name that they chose', async () => {
  // As it comes to a rewritten sender: without a domain that signs, and with a From field of anybody's.
  const about = { signingTenantId: null, signingDomainId: null, envelopeFrom: '' };
  const { sent, message } = await sign(about, null, signer);
  assert.ok(sent.equals(RAW));
  assert.not(message.hasOtherKeys);
  await sign({ ...about, mayGoUnsigned: false }, null, signer).then(({ sent: own }) =>
    assert.match(own.toString(), /^DKIM-Signature: /),
  );
});

test('a header that cannot be signed is no reason to keep it', async () => {
  const raw = Buffer.from(`${'From: a@author.test\r\n'.repeat(2_100)}\r\nwords\r\n`);
  assert.ok((await sign({ raw })).sent.equals(raw));
  const large = Buffer.concat([raw, Buffer.alloc(2 * 1024 * 1024, 'x')]);
  assert.ok((await sign(await inBlob(large))).sent.equals(large));
});

test('8-bit text is seen wherever it stands, in memory and in the blob store, signed or not', async () => {
  const ascii = Buffer.concat([RAW, Buffer.alloc(2 * 1024 * 1024, 'x')]);
  const late = Buffer.concat([ascii, Buffer.from('ü')]);
  for (const found of [signer, null]) {
    assert.is((await sign({}, found)).message.is8Bit, false);
    assert.is(
      (await sign({ raw: Buffer.concat([RAW, Buffer.from('ü')]) }, found)).message.is8Bit,
      true,
    );
    assert.is((await sign(await inBlob(ascii), found)).message.is8Bit, false);
    const { message, sent } = await sign(await inBlob(late), found);
    assert.is(message.is8Bit, true);
    assert.ok(sent.subarray(-late.length).equals(late));
  }
});

test('mail of our own never leaves unsigned', async () => {
  for (const found of [null, { ...signer, keys: [] }, { ...signer, canSend: false }]) {
    const made = await signMessageOf(
      dependencies(found, null),
      deliveryOf({ mayGoUnsigned: false }),
    );
    assert.ok('verdict' in made);
    assert.equal([made.verdict, made.evidence.cause], ['failed', 'domain_not_verified']);
  }
});

test.run();
