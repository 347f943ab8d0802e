// Large messages from the blob store to the wire without being held: the same signatures and the same bytes as from
// memory, little memory, and no final dot for half a message.
import { once } from 'node:events';
import { mkdtemp, rm, truncate } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { SMTPServer } from 'smtp-server';
import type { MessageBody } from '../../src/delivery/message-source.ts';
import { openSession, type SendResult, type Target } from '../../src/delivery/session.ts';
import { createSigning, type Signing } from '../../src/delivery/signing.ts';
import { openMessage, WHOLE_MAX_BYTES } from '../../src/delivery/stored-bytes.ts';
import { generateKeyPair, hashSmallBody, signMessage, signPieces } from '../../src/mail/dkim.ts';
import { headerOctetsMax } from '../../src/mail/header.ts';
import { openDiskBlobs, type BlobStore } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { startRawPeer } from '../support/raw-peer.ts';

const test = suite('streaming');
const signedAt = new Date('2024-02-29T12:34:56Z');
const { privateKey } = await generateKeyPair('ed25519-sha256');
const keys = [
  { domain: 'sender.example', selector: 'test', algorithm: 'ed25519-sha256', privateKey },
] as const;
let folder: string;
let blobs: BlobStore;
let signing: Signing;

test.before(async () => {
  folder = await mkdtemp(join(tmpdir(), 'mailstead-streaming-'));
  blobs = openDiskBlobs(folder);
  signing = createSigning();
});
test.after(async () => {
  await signing.close();
  await rm(folder, { recursive: true });
});

async function collect(pieces: AsyncIterable<Uint8Array>): Promise<Uint8Array[]> {
  const all: Uint8Array[] = [];
  for await (const piece of pieces) all.push(piece);
  return all;
}

/** In slices of this size; nothing behind the last one. */
async function* sliced(message: Buffer, size: number): AsyncGenerator<Buffer> {
  for (let at = 0; at < message.length; at += size) yield message.subarray(at, at + size);
}

const store = async (
  message: Buffer,
): Promise<{ raw: null; blobKey: string; rawSizeBytes: number }> => {
  const blobKey = newId();
  await blobs.put(blobKey, message);
  return { raw: null, blobKey, rawSizeBytes: message.length };
};

/** Lines that begin with dots, line ends of every kind, in no rhythm with any slice. */
const oddMessage = (sizeBytes: number): Buffer =>
  messageOf(sizeBytes, '.odd \t\r\n..\r\n text\n.\r.x\r\n\r\n');

function messageOf(sizeBytes: number, text: string): Buffer {
  const body = Buffer.alloc(sizeBytes, text);
  return Buffer.concat([Buffer.from('From: a@sender.example\r\nSubject: x\r\n\r\n'), body]);
}

const targetAt = (port: number): Target => ({
  host: 'localhost',
  address: '127.0.0.1',
  port,
  tls: 'never',
  verify: false,
  login: null,
  helloName: 'sender.example',
  source: null,
  trusted: true,
});

async function sendTo(
  port: number,
  body: MessageBody,
  about: { readonly sizeBytes: number; readonly onDot?: () => void },
): Promise<SendResult> {
  const session = await openSession(targetAt(port), () => ({ ok: true }));
  if ('cause' in session) throw new Error(session.message);
  const result = await session.send({
    mailFrom: 'a@sender.example',
    recipients: ['b@recipient.test'],
    body,
    sizeBytes: about.sizeBytes,
    onDot: about.onDot ?? (() => undefined),
  });
  session.close();
  return result;
}

test('pieces are signed like the whole, wherever they are cut', async () => {
  const messages = [
    'From: a@b.test\r\nSubject: x\r\n\r\nbody\r\n',
    'From: a@b.test\nSubject: x\n\nbody \n\n',
    'From: a@b.test\rSubject: x\r\rbody\r',
    'From: a@b.test\r\n\r\n',
    'From: a@b.test\r\n',
    'From: a@b.test',
    '\r\nonly a body',
  ].map((text) => Buffer.from(text));
  messages.push(Buffer.from(oddMessage(3_000)));
  for (const message of messages) {
    const wanted = await signMessage({ message, keys, signedAt });
    for (const size of [1, 2, 3, 17, 100_000]) {
      const hashBody = async (body: AsyncIterable<Uint8Array>): Promise<string> =>
        hashSmallBody(Buffer.concat(await collect(body)));
      const pieces = sliced(message, size);
      assert.equal(await signPieces({ pieces, keys, signedAt, hashBody }), wanted, `${size}`);
    }
  }
});

test('a large one is signed by the thread, many at once, and like the whole', async () => {
  const messages = [100, 262_144, 1_500_001].map(oddMessage);
  const wanted = await Promise.all(
    messages.map((message) => signMessage({ message, keys, signedAt })),
  );
  const all = [...messages, ...messages];
  const signed = await Promise.all(
    all.map((message) => signing.signPieces({ pieces: sliced(message, 65_536), keys, signedAt })),
  );
  for (const [at, one] of signed.entries()) assert.equal(one, wanted[at % messages.length]);
});

test('pieces that fail, and a header without end, are told, and the thread goes on', async () => {
  const failing = async function* (): AsyncGenerator<Buffer> {
    yield oddMessage(300_000);
    throw new Error('the disk is gone');
  };
  const failure = (pieces: AsyncIterable<Buffer>): Promise<string> =>
    signing.signPieces({ pieces, keys, signedAt }).then(
      () => 'nothing',
      (error: Error) => error.message,
    );
  assert.is(await failure(failing()), 'the disk is gone');
  const endless = Buffer.alloc(headerOctetsMax + 70_000, 'X: y\r\n');
  assert.match(await failure(sliced(endless, 65_536)), 'a header of more than');
  const message = oddMessage(500_000);
  const signed = await signing.signPieces({ pieces: sliced(message, 65_536), keys, signedAt });
  assert.equal(signed, await signMessage({ message, keys, signedAt }));
});

test('small ones are read whole, large ones in pieces, missing ones are null', async () => {
  const small = await openMessage(blobs, await store(oddMessage(WHOLE_MAX_BYTES - 100)));
  assert.ok(small?.whole !== null);
  const message = oddMessage(WHOLE_MAX_BYTES + 1);
  const large = await openMessage(blobs, await store(message));
  assert.is(large?.whole, null);
  for (let time = 0; time < 2; time += 1) {
    assert.ok(Buffer.concat(await collect(large!.pieces())).equals(message));
  }
  const gone = { raw: null, blobKey: newId(), rawSizeBytes: WHOLE_MAX_BYTES * 2 };
  assert.is(await openMessage(blobs, gone), null);
  assert.is(await openMessage(blobs, { ...gone, rawSizeBytes: 10 }), null);
});

test('the wire has the same bytes as from memory, and the dot is told of before it leaves', async () => {
  const peer = await startRawPeer();
  const message = oddMessage(3_000_000);
  const opened = await openMessage(blobs, await store(message));
  const moments: string[] = [];
  const about = { sizeBytes: message.length };
  assert.is((await sendTo(peer.port, [message], about)).kind, 'accepted');
  const onDot = (): void => {
    moments.push(`dot after ${peer.messages.length}`);
  };
  const result = await sendTo(peer.port, opened!.pieces(), { ...about, onDot });
  assert.is(result.kind, 'accepted');
  assert.is(opened?.fault, null);
  assert.equal(moments, ['dot after 1']);
  assert.ok(peer.messages[1]?.wire.equals(peer.messages[0]?.wire ?? Buffer.alloc(0)));
  // Slices of one byte: every place where a dot or a line end can be cut.
  const odd = oddMessage(2_000);
  await sendTo(peer.port, [odd], { sizeBytes: odd.length });
  await sendTo(peer.port, sliced(odd, 1), { sizeBytes: odd.length });
  assert.ok(peer.messages[3]?.wire.equals(peer.messages[2]?.wire ?? Buffer.alloc(0)));
  await peer.stop();
});

test('half a message gets no final dot', async () => {
  const peer = await startRawPeer();
  const stored = await store(oddMessage(2_500_000));
  const opened = await openMessage(blobs, stored);
  await truncate(join(folder, stored.blobKey.slice(-2), stored.blobKey), 2_000_000);
  let dots = 0;
  const result = await sendTo(peer.port, opened!.pieces(), {
    sizeBytes: stored.rawSizeBytes,
    onDot: () => {
      dots += 1;
    },
  });
  assert.is(result.kind, 'lost');
  assert.not.ok(result.kind === 'lost' && result.dotSent);
  assert.match(opened?.fault?.message ?? '', /has 2000000 bytes, not/);
  await peer.connections[0]?.closed;
  assert.equal([dots, peer.messages.length], [0, 0]);
  await peer.stop();
});

test('a dot that must not leave does not, and a connection lost in the middle closes the file', async () => {
  const refusing = await startRawPeer();
  const stored = await store(oddMessage(2_500_000));
  const opened = await openMessage(blobs, stored);
  const refused = await sendTo(refusing.port, opened!.pieces(), {
    sizeBytes: stored.rawSizeBytes,
    onDot: () => {
      throw new Error('the lease is gone');
    },
  });
  assert.is(refused.kind, 'lost');
  assert.is(refusing.messages.length, 0);
  await refusing.stop();

  const peer = await startRawPeer({ on: { body: { reset: true } } });
  let isClosed = false;
  const pieces = async function* (): AsyncGenerator<Buffer> {
    try {
      yield* opened!.pieces();
    } finally {
      isClosed = true;
    }
  };
  const lost = await sendTo(peer.port, pieces(), { sizeBytes: stored.rawSizeBytes });
  assert.is(lost.kind, 'lost');
  while (!isClosed) await new Promise((resolve) => setImmediate(resolve));
  await peer.stop();
});

test('an answer in the middle of a message ends the connection, and a 250 there is no delivery', async () => {
  const bytes = 20_000_000;
  const halves = { bodyBytes: 100_000 };
  const early = async (reply: string): Promise<SendResult> => {
    // Goes on reading after its answer, as a peer that is only impatient does.
    const peer = await startRawPeer({ ...halves, on: { body: { reply } } });
    const session = await openSession(targetAt(peer.port), () => ({ ok: true }));
    if ('cause' in session) throw new Error(session.message);
    const result = await session.send({
      mailFrom: 'a@sender.example',
      recipients: ['b@recipient.test'],
      body: sliced(oddMessage(bytes), 65_536),
      sizeBytes: bytes,
      onDot: () => undefined,
    });
    assert.not.ok(session.isOpen());
    await peer.connections[0]?.closed;
    assert.is(peer.messages.length, 0);
    await peer.stop();
    return result;
  };
  const refused = await early('552 5.3.4 too big');
  assert.is(refused.kind, 'refused');
  assert.is(refused.kind === 'refused' && refused.reply, '552 5.3.4 too big');
  const taken = await early('250 2.0.0 taken');
  assert.is(taken.kind, 'lost');
  assert.not.ok(taken.kind === 'lost' && taken.dotSent);
});

test('an answer to the dot that is neither yes nor no leaves it unknown, and ends the connection', async () => {
  const peer = await startRawPeer({ on: { dot: { reply: '354 go ahead' } } });
  const message = messageOf(100, 'text\r\n');
  const result = await sendTo(peer.port, [message], { sizeBytes: message.length });
  assert.is(result.kind, 'lost');
  assert.ok(result.kind === 'lost' && result.dotSent);
  await peer.stop();
});

test('a refusal is told soon, also by a peer that does not answer RSET', async () => {
  const peer = await startRawPeer({
    on: { RCPT: { reply: '550 5.1.1 nobody' }, RSET: { hang: true } },
  });
  const beganAt = performance.now();
  const message = messageOf(100, 'text\r\n');
  const result = await sendTo(peer.port, [message], { sizeBytes: message.length });
  assert.is(result.kind === 'refused' && result.reply, '550 5.1.1 nobody');
  assert.ok(performance.now() - beganAt < 15_000);
  await peer.stop();
});

test('40 MB to sign and to send take little memory', async () => {
  let received = 0;
  const server = new SMTPServer({
    authOptional: true,
    disabledCommands: ['STARTTLS'],
    onData(stream, _session, done) {
      stream.on('data', (chunk: Buffer) => (received += chunk.length));
      stream.on('end', () => done());
    },
  });
  server.listen(0, '127.0.0.1');
  await once(server.server, 'listening');
  const at = server.server.address();
  assert.ok(at !== null && typeof at === 'object');
  const stored = await store(messageOf(40_000_000, `${'A'.repeat(76)}\r\n`));
  const opened = await openMessage(blobs, stored);
  const before = process.memoryUsage().arrayBuffers;
  let peak = before;
  const watch = setInterval(() => {
    peak = Math.max(peak, process.memoryUsage().arrayBuffers);
  }, 1);
  const fields = await signing.signPieces({ pieces: opened!.pieces(), keys, signedAt });
  const body = async function* (): AsyncGenerator<Buffer> {
    yield fields;
    yield* opened!.pieces();
  };
  const result = await sendTo(at.port, body(), { sizeBytes: fields.length + stored.rawSizeBytes });
  clearInterval(watch);
  assert.is(result.kind, 'accepted');
  assert.ok(received > 40_000_000);
  // What waits to be collected counts as well; the message alone is 40 MB.
  assert.ok(peak - before < 35_000_000, `${peak - before} bytes more`);
  await new Promise<void>((resolve) => {
    server.close(() => resolve());
  });
});

test.run();
