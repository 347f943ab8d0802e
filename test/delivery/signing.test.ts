// Signing off the event loop: large bodies through a real thread, threads that die or hang, and whether what is
// signed is what a real SMTP session sends.
import { once } from 'node:events';
import { Worker } from 'node:worker_threads';
import { dkimVerify } from 'mailauth/lib/dkim/verify.js';
import { SMTPServer } from 'smtp-server';
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { openSession } from '../../src/delivery/session.ts';
import { createSigning } from '../../src/delivery/signing.ts';
import type { Signing } from '../../src/delivery/signing.ts';
import { hashBodyOctets } from '../../src/mail/dkim-body.ts';
import { generateKeyPair, publicKeyRecord, signMessage } from '../../src/mail/dkim.ts';
import type { DkimKey } from '../../src/mail/dkim.ts';

const signedAt = new Date('2024-02-29T12:34:56Z');
const { privateKey } = await generateKeyPair('ed25519-sha256');
const keys: readonly DkimKey[] = [
  { domain: 'sender.example', selector: 'test', algorithm: 'ed25519-sha256', privateKey },
];

const header = 'From: ann@sender.example\r\nSubject: Hello\r\n\r\n';
const withBody = (body: Buffer): Buffer => Buffer.concat([Buffer.from(header), body]);
/** No two pieces of it are alike, and runs of white space and line ends lie across their borders. */
function body(sizeBytes: number): Buffer {
  const line = 'The quick  brown fox. \t\r\n\r\n';
  const octets = Buffer.alloc(sizeBytes, line);
  for (let at = 0; at + 8 < sizeBytes; at += 50_000) octets.write(`${at}`, at, 'latin1');
  return octets;
}

const failure = (promise: Promise<unknown>): Promise<string> =>
  promise.then(
    () => 'nothing',
    (error: Error) => error.message,
  );

async function withSigning(signing: Signing, use: () => Promise<void>): Promise<void> {
  try {
    await use();
  } finally {
    await signing.close();
  }
}

test('every size has the signature that the event loop would make, one after another and at once', async () => {
  const sizes = [0, 1, 8_193, 65_536, 65_537, 262_143, 262_144, 262_145, 524_288, 1_500_001];
  const all = sizes.map((sizeBytes) => withBody(body(sizeBytes)));
  // A message may lie anywhere in its memory.
  all.push(withBody(body(300_000)).subarray(0, 290_000), Buffer.from(withBody(body(70_000))));
  const wanted = await Promise.all(all.map((message) => signMessage({ message, keys, signedAt })));
  for (const threadsMax of [1, 2]) {
    const signing = createSigning({ threadsMax });
    await withSigning(signing, async () => {
      const sign = (message: Buffer): Promise<Buffer> => signing.sign({ message, keys, signedAt });
      for (const [at, message] of all.entries()) assert.equal(await sign(message), wanted[at]);
      const together = [...all, ...all];
      const signatures = await Promise.all(together.map(sign));
      for (const [at, one] of signatures.entries()) assert.equal(one, wanted[at % all.length]);
    });
  }
});

test('40 MB are neither copied nor taken away', async () => {
  const message = withBody(body(40_000_000));
  const signing = createSigning();
  await withSigning(signing, async () => {
    const before = process.memoryUsage().arrayBuffers;
    let peak = before;
    let isDone = false;
    const watch = (): void => {
      peak = Math.max(peak, process.memoryUsage().arrayBuffers);
      if (!isDone) setImmediate(watch);
    };
    watch();
    const fields = (await signing.sign({ message, keys, signedAt })).toString('latin1');
    isDone = true;
    assert.ok(peak - before < 4_000_000, `${peak - before} octets more`);
    const bodyHash = hashBodyOctets(message.subarray(header.length));
    assert.match(fields.replace(/\s/g, ''), `;bh=${bodyHash};`);
    assert.is(message.length, 40_000_000 + header.length);
  });
});

test('a refusal of mail/dkim is a rejection', async () => {
  const signing = createSigning();
  await withSigning(signing, async () => {
    const message = withBody(body(100_000));
    assert.match(await failure(signing.sign({ message, keys: [], signedAt })), 'unsigned');
  });
});

const thread = (code: string): Worker =>
  new Worker(`const { parentPort } = require('node:worker_threads'); ${code}`, { eval: true });
const breakings = {
  'throws at a message': "parentPort.on('message', () => { throw new Error('broken'); });",
  'exits at a message': "parentPort.on('message', () => process.exit(3));",
  'throws at its start': "throw new Error('broken');",
  'exits at its start': 'process.exit(0);',
};

for (const [what, code] of Object.entries(breakings)) {
  test(`a thread that ${what} fails its body only`, async () => {
    let started = 0;
    const signing = createSigning({
      startThread() {
        started += 1;
        return thread(started === 1 ? code : echoing);
      },
    });
    await withSigning(signing, async () => {
      const message = withBody(body(1_000_000));
      const request = { message, keys, signedAt };
      const [broken, next] = await Promise.all([
        failure(signing.sign(request)),
        signing.sign(request),
      ]);
      assert.match(broken, /^signing: the thread (?:broke|ended with \d)$/);
      assert.match(next.toString('latin1'), 'bh=ok;');
      assert.is(started, 2);
      assert.equal(await signing.sign(request), next);
      assert.is(started, 2);
    });
  });
}

/** Speaks like signing-thread.ts and has one answer. */
const echoing = `parentPort.on('message', ({ memory, isLast }) =>
  parentPort.postMessage({ memory, bodyHash: isLast ? 'ok' : null }, [memory]));`;
const hanging = "parentPort.on('message', () => {});";

test('a thread that cannot be started fails its body only', async () => {
  let started = 0;
  const signing = createSigning({
    startThread() {
      started += 1;
      if (started === 1) throw new Error('no memory');
      return thread(echoing);
    },
  });
  await withSigning(signing, async () => {
    const request = { message: withBody(body(1_000_000)), keys, signedAt };
    assert.is(await failure(signing.sign(request)), 'signing: no thread can be started');
    assert.match((await signing.sign(request)).toString('latin1'), 'bh=ok;');
  });
});

test('waiting bodies have a limit, small ones pass by, and close rejects what is left', async () => {
  const signing = createSigning({ waitingMax: 2, startThread: () => thread(hanging) });
  const request = { message: withBody(body(1_000_000)), keys, signedAt };
  const left = [1, 2, 3].map(() => failure(signing.sign(request)));
  assert.is(await failure(signing.sign(request)), 'signing: 2 bodies are waiting');
  const small = await signing.sign({ message: withBody(body(65_536)), keys, signedAt });
  assert.match(small.toString('latin1'), 'DKIM-Signature: ');
  await signing.close();
  assert.equal(await Promise.all(left), Array(3).fill('signing: closed'));
  assert.is(await failure(signing.sign(request)), 'signing: closed');
  await signing.close();
});

test('an idle thread does not keep the process alive', async () => {
  // Not closed: this file would not end if the thread held it.
  const signing = createSigning();
  await signing.sign({ message: withBody(body(100_000)), keys, signedAt });
});

test('what is signed is what a session sends', async () => {
  const received: Buffer[] = [];
  const server = new SMTPServer({
    authOptional: true,
    disabledCommands: ['STARTTLS'],
    onData(stream, _session, done) {
      const chunks: Buffer[] = [];
      stream.on('data', (chunk: Buffer) => chunks.push(chunk));
      stream.on('end', () => {
        received.push(Buffer.concat(chunks));
        done();
      });
    },
  });
  server.listen(0, '127.0.0.1');
  await once(server.server, 'listening');
  const at = server.server.address();
  assert.ok(at !== null && typeof at === 'object');
  const signing = createSigning();
  try {
    const session = await openSession(
      {
        host: 'localhost',
        address: '127.0.0.1',
        port: at.port,
        tls: 'never',
        verify: false,
        login: null,
        helloName: 'sender.example',
        source: null,
        trusted: true,
      },
      () => ({ ok: true }),
    );
    assert.ok(!('cause' in session));
    const bodies = [
      '',
      'a',
      'a ',
      'a\r',
      'a\n',
      'a\rb\r\r\nc\n\nd \r e\r\n',
      '.\r\n..\r.\n.x',
      '\r',
    ];
    bodies.push('\r\n\n\r', ' \t', 'Gr\xfc\xdfe\xa0\f\v\0\x7f', `${'a \r'.repeat(40_000)}b`);
    const messages = bodies.map((text) => withBody(Buffer.from(text, 'latin1')));
    messages.push(
      Buffer.from(header.trimEnd()),
      Buffer.from('From: a@b.test\nTo: c@d.test\n\nx\n'),
    );
    messages.push(Buffer.from('From: a@b.test\rTo: c@d.test\r\rx\r'));
    for (const message of messages) {
      const fields = await signing.sign({ message, keys, signedAt });
      const result = await session.send({
        mailFrom: 'ann@sender.example',
        recipients: ['bob@receiver.example'],
        body: [fields, message],
        sizeBytes: fields.length + message.length,
        onDot: () => undefined,
      });
      assert.is(result.kind, 'accepted');
      // test/mail/dkim.test.ts relies on this: every line end is CRLF, and there is one at the end.
      const sent = Buffer.concat([fields, message]).toString('latin1');
      const wire = sent.replace(/\r\n|\r|\n/g, '\r\n').replace(/(?<!\r\n)$/, '\r\n');
      assert.is(received.at(-1)?.toString('latin1'), wire);
    }
    session.close();
  } finally {
    await signing.close();
    await new Promise<void>((resolve) => {
      server.close(() => resolve());
    });
  }
  const record = publicKeyRecord(privateKey);
  for (const message of received) {
    const { results } = await dkimVerify(message, { resolver: () => Promise.resolve([[record]]) });
    assert.equal(
      results.map(({ status }) => status.result),
      ['pass'],
      JSON.stringify(message.toString('latin1').slice(0, 900)),
    );
  }
});

test.run();
