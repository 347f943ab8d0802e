// Stored messages: small ones as bytes, large ones streamed into the blob store, the same bytes either way, and every
// attachment where its row says.
import { mkdtempSync, readdirSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Refusal } from '../../src/access/refusal.ts';
import { compose } from '../../src/mail/compose.ts';
import type { CheckedAttachment } from '../../src/sending/attachments.ts';
import { storeMessage, type MessageInput, type StoredMessage } from '../../src/sending/message.ts';
import { INLINE_MAX_BYTES, openDiskBlobs } from '../../src/store/blob.ts';
import { assertWellFormed, base, mailbox, read } from '../support/composed.ts';

const folder = mkdtempSync(join(tmpdir(), 'mailstead-message-'));
const blobFolder = join(folder, 'blobs');
const blobs = openDiskBlobs(blobFolder);

const input = (parts: Partial<MessageInput> = {}): MessageInput => ({
  emailId: '019b0c1e-8f00-7abc-9def-0123456789ab',
  from: base.from,
  to: base.to,
  cc: [],
  replyTo: [],
  subject: 'Files',
  text: 'see below',
  html: null,
  headers: [],
  messageId: base.messageId,
  date: base.date,
  attachments: [],
  ...parts,
});
const file = (part: Partial<CheckedAttachment> = {}): CheckedAttachment => ({
  filename: 'a.bin',
  contentType: 'application/octet-stream',
  contentId: null,
  disposition: 'attachment',
  content: Buffer.from('content'),
  url: null,
  ...part,
});
const octets = (size: number): Buffer => Buffer.alloc(size, 'abc\u0000\u00ff\r\n.', 'latin1');
let files = 0;
const spooled = (content: Buffer): CheckedAttachment['content'] => {
  const path = join(folder, `spooled-${(files += 1)}`);
  writeFileSync(path, content);
  return { path, sizeBytes: content.length };
};
const bytesOf = async (stored: StoredMessage): Promise<Buffer> =>
  stored.raw ?? (await blobs.get(stored.blobKey!)) ?? Buffer.alloc(0);
const stored = async (): Promise<number> => {
  let count = 0;
  for await (const key of blobs.list(new Date(8e15))) count += key === '' ? 0 : 1;
  return count;
};
const contentAt = (raw: Buffer, place: StoredMessage['attachments'][number]): Buffer => {
  const start = place.rawOffset!;
  return Buffer.from(raw.toString('latin1', start, start + place.rawLength!), 'base64');
};

const test = suite('stored message');
test.before.each(() => rmSync(blobFolder, { recursive: true, force: true }));
test.after(() => rmSync(folder, { recursive: true, force: true }));

test('a small message is its bytes, a large one a blob', async () => {
  const small = await storeMessage(blobs, input({ attachments: [file()] }));
  assert.ok(small.raw !== null && small.raw.length <= INLINE_MAX_BYTES);
  assert.is(small.blobKey, null);
  assert.is(small.rawSizeBytes, small.raw.length);

  const large = await storeMessage(
    blobs,
    input({ attachments: [file({ content: octets(200_000) })] }),
  );
  assert.is(large.raw, null);
  assert.is((await bytesOf(large)).length, large.rawSizeBytes);
  assert.ok(large.rawSizeBytes > INLINE_MAX_BYTES);
});

test('from memory, from disk, from a blob: the bytes that compose makes', async () => {
  const html = '<img src="cid:logo">';
  for (const size of [
    0,
    1,
    56,
    57,
    58,
    1_000,
    57 * 1_024,
    57 * 1_024 + 1,
    57 * 1_024 * 3 - 1,
    300_001,
  ]) {
    const content = octets(size);
    const key = '019b0c1e-8f00-7abc-9def-0123456789ff';
    await blobs.put(key, content);
    const places = [content, spooled(content), { blobKey: key, sizeBytes: size }];
    const raws = await Promise.all(
      places.map(async (place) => {
        const attachments = [
          file({ content: place }),
          file({
            contentId: 'logo',
            disposition: 'inline',
            contentType: 'image/png',
            content: place,
          }),
          file({ filename: 'z.txt', contentType: 'text/plain' }),
        ];
        const message = await storeMessage(blobs, input({ html, attachments }));
        const raw = await bytesOf(message);
        assert.is(raw.length, message.rawSizeBytes);
        for (const [index, one] of message.attachments.entries()) {
          const wanted = index < 2 ? content : Buffer.from('content');
          assert.ok(contentAt(raw, one).equals(wanted), `${size} bytes, attachment ${index}`);
          assert.is(one.sizeBytes, wanted.length);
        }
        return raw;
      }),
    );
    const expected = compose({
      ...input({ html }),
      boundarySeed: input().emailId,
      attachments: [
        { filename: 'a.bin', contentType: 'application/octet-stream', contentId: null, content },
        { filename: 'a.bin', contentType: 'image/png', contentId: 'logo', content },
        {
          filename: 'z.txt',
          contentType: 'text/plain',
          contentId: null,
          content: Buffer.from('content'),
        },
      ],
    }).raw;
    for (const raw of raws) assert.ok(raw.equals(expected), `${size} bytes`);
    assertWellFormed(expected);
  }
});

test('what is stored about each attachment', async () => {
  const message = await storeMessage(
    blobs,
    input({
      attachments: [
        file({ filename: 'mail.eml', contentType: 'message/rfc822' }),
        file({ filename: null, contentId: 'logo', disposition: 'inline', content: octets(9) }),
      ],
    }),
  );
  const [eml, logo] = message.attachments;
  assert.match(eml?.id ?? '', /^[0-9a-f-]{36}$/);
  assert.is(eml?.contentType, 'message/rfc822', 'as given, although it travels as a plain file');
  assert.is(eml?.url, null);
  assert.is(eml?.blobKey, null);
  assert.is(logo?.disposition, 'inline');
  assert.is(logo?.filename, null);
  const parsed = await read(await bytesOf(message));
  assert.is(parsed.attachments.length, 2);
  assert.is(parsed.attachments[1]?.cid, 'logo');
});

test('with a file still to be fetched nothing is composed and the rest is staged', async () => {
  const content = octets(70_000);
  const message = await storeMessage(
    blobs,
    input({
      to: [mailbox('jürgen@y.example')],
      attachments: [
        file({ content: spooled(content) }),
        file({ content: null, url: 'https://files.example/a.pdf' }),
        file(),
      ],
    }),
  );
  assert.equal([message.raw, message.blobKey, message.rawSizeBytes], [null, null, 0]);
  assert.is(message.needsSmtpUtf8, true);
  const [first, fetched, last] = message.attachments;
  assert.ok((await blobs.get(first?.blobKey ?? ''))?.equals(content));
  assert.equal([first?.sizeBytes, first?.rawOffset, first?.rawLength], [70_000, null, null]);
  assert.equal([fetched?.blobKey, fetched?.sizeBytes], [null, null]);
  assert.is(fetched?.url, 'https://files.example/a.pdf');
  assert.equal(await blobs.get(last?.blobKey ?? ''), Buffer.from('content'));
});

test('what fails leaves nothing behind', async () => {
  const gone = file({ content: { path: join(folder, 'never-there'), sizeBytes: 400_000 } });
  const short = file({ content: spooled(octets(300_000)) });
  const lied = file({ content: { ...(short.content as { path: string }), sizeBytes: 300_001 } });
  const fetched = file({ content: null, url: 'https://files.example/a' });
  for (const attachments of [[gone], [lied], [file(), gone, fetched]]) {
    let failed = false;
    await storeMessage(blobs, input({ attachments })).catch(() => (failed = true));
    assert.ok(failed);
    const left = readdirSync(blobFolder, { recursive: true, withFileTypes: true });
    assert.equal(
      left.filter((entry) => entry.isFile()).map(({ name }) => name),
      [],
    );
  }
});

test('a message above 60 MiB is refused before anything is written', async () => {
  const part = { path: '/nowhere', sizeBytes: 30 * 1024 * 1024 };
  try {
    await storeMessage(
      blobs,
      input({ attachments: [file({ content: part }), file({ content: part })] }),
    );
    assert.unreachable();
  } catch (error) {
    assert.ok(error instanceof Refusal);
    assert.is(error.code, 'request_too_large');
  }
});

test('a hundred large files go through one after the other', async () => {
  const content = spooled(octets(100_000));
  const attachments = Array.from({ length: 100 }, (_, index) =>
    file({ filename: `${index}.bin`, content }),
  );
  const message = await storeMessage(blobs, input({ attachments }));
  const raw = await bytesOf(message);
  assert.is(message.attachments.length, 100);
  assert.ok(contentAt(raw, message.attachments[99]!).equals(octets(100_000)));
  assert.is(await stored(), 1);
});

test.run();
