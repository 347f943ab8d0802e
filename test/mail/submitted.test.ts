// Messages from SMTP clients: what goes out of what came in, and what is refused. mailparser is the oracle: whatever
// is encoded anew must read as it did before.
import { simpleParser } from 'mailparser';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { UnfitMessage } from '../../src/mail/mime-tree.ts';
import { decodeShownFile, fingerprintParts, readShownParts } from '../../src/mail/shown-parts.ts';
import { decodeBody } from '../../src/mail/seven-bit.ts';
import { prepareSubmitted, type Outgoing } from '../../src/mail/submitted.ts';
import { surveyWire, WireSurvey } from '../../src/mail/wire-survey.ts';

const bytesOf = (text: string | Buffer): Buffer =>
  typeof text === 'string' ? Buffer.from(text.replace(/\r?\n/g, '\r\n')) : text;

function prepare(text: string | Buffer, allowsUtf8 = false): Outgoing {
  const message = bytesOf(text);
  return prepareSubmitted({
    message,
    survey: surveyWire(message),
    allowsUtf8,
    newMessageId: 'new-id',
    now: new Date('2026-02-03T04:05:06Z'),
    trace: { hostname: 'mail.example.com', id: 'session.1', isTls: true },
  });
}

/** `code text`, or `no refusal`. */
function refusalOf(text: string | Buffer, allowsUtf8 = false): string {
  try {
    prepare(text, allowsUtf8);
    return 'no refusal';
  } catch (error) {
    if (!(error instanceof UnfitMessage)) throw error;
    return `${error.enhancedCode} ${error.message}`;
  }
}

const FULL = `From: Ada <ada@a.test>
To: b@b.test
Subject: Hello
Message-ID: <1@a.test>
Date: Tue, 3 Feb 2026 04:05:06 +0000
MIME-Version: 1.0
`;

const header = suite('submitted: header');

header('what is complete keeps its octets; a trace line without the client stands on top', () => {
  const { raw } = prepare(`${FULL}\nbody\n`);
  const [trace, rest] = [raw.indexOf('From: '), raw.toString()];
  assert.is(
    rest.slice(0, trace),
    'Received: from submission.invalid (authenticated)\r\n by mail.example.com (Mailstead) with ESMTPSA id session.1;\r\n Tue, 03 Feb 2026 04:05:06 +0000\r\n',
  );
  assert.is(rest.slice(trace), bytesOf(`${FULL}\nbody\n`).toString());
});

header('what is missing is added', () => {
  const { raw, messageId } = prepare('From: ada@a.test\nSubject: x\n\nbody\n');
  const text = raw.toString();
  assert.is(messageId, '<new-id@a.test>');
  for (const line of [
    'To: undisclosed-recipients:;',
    'Message-ID: <new-id@a.test>',
    'Date: Tue, 03 Feb 2026 04:05:06 +0000',
    'MIME-Version: 1.0',
  ]) {
    assert.ok(text.includes(`\r\n${line}\r\n`), line);
  }
  assert.ok(text.endsWith('\r\n\r\nbody\r\n'));
});

header('a Message-ID or a Date that nobody can read is replaced', () => {
  const { raw, messageId } = prepare(
    'From: ada@a.test\nTo: b@b.test\nMessage-ID: no brackets\nDate: yesterday\n\nx\n',
  );
  assert.is(messageId, '<new-id@a.test>');
  assert.not.match(raw.toString(), /no brackets|yesterday/);
});

header('what belongs to the envelope or to us does not go out', () => {
  const { raw, header: read } = prepare(
    `${FULL}Bcc: secret@c.test,
 second@c.test
Return-Path: <x@y.test>
Resend-Idempotency-Key: key-1
Feedback-ID: a:b:c:d
DKIM-Signature: v=1; d=a.test; s=x; b=abc
DKIM-Signature: v=1; d=elsewhere.test; s=x; b=def
X-Kept: 1

body
`,
  );
  const text = raw.toString();
  assert.not.match(text, /secret|second|Return-Path|Idempotency|Feedback|d=a\.test/);
  assert.match(text, /d=elsewhere\.test/);
  assert.is(read.idempotencyKey, 'key-1');
  assert.equal(read.custom, { 'X-Kept': '1' });
});

header('white space before a colon goes: half of all readers take such a line for text', () => {
  const { raw } = prepare('From : ada@a.test\nX-Old \t: 1\nBcc : secret@c.test\n\nx\n');
  assert.match(raw.toString(), /\r\nFrom: ada@a\.test\r\nX-Old: 1\r\n/);
  assert.not.match(raw.toString(), /secret/);
});

header('an address field without an address is left out', () => {
  for (const to of ['', ' ', 'Jörg Müller', 'Empfänger:;']) {
    const text = prepare(`From: ada@a.test\nTo: ${to}\nCc: ${to}\nReply-To: ${to}\n\nx\n`).raw;
    assert.match(text.toString(), /\r\nTo: undisclosed-recipients:;\r\n/, to);
    assert.not.match(text.toString(), /Cc:|Reply-To:/, to);
  }
});

header('octets that are not UTF-8 become no other name and no other key', () => {
  const latin = (text: string): Buffer => Buffer.from(text, 'latin1');
  assert.match(refusalOf(latin('From: J\xf6rg <j@a.test>\r\n\r\nx\r\n')), /^5\.6\.7 .*From/);
  assert.match(
    refusalOf(latin('From: a@a.test\r\nResend-Idempotency-Key: \xe4\r\n\r\nx\r\n')),
    /^5\.6\.7 .*Resend-Idempotency-Key/,
  );
});

header('encoded words beside raw UTF-8 read as before', async () => {
  const { raw } = prepare('From: a@a.test\nSubject: =?utf-8?q?=C3=A4?= plain ö\n\nx\n');
  assert.is((await simpleParser(raw, {})).subject, 'ä plain ö');
});

header('the author is one, and written so that everybody reads the same', () => {
  const author = (from: string): string =>
    /From: (.*)\r\n/.exec(prepare(`From: ${from}\nTo: b@b.test\n\nx\n`).raw.toString())?.[1] ?? '';
  assert.is(author('Ada <ada@A.test>'), 'Ada <ada@a.test>');
  assert.is(author('ada@a.test (Ada Lovelace)'), 'Ada Lovelace <ada@a.test>');
  assert.is(author('=?utf-8?Q?J=C3=B6rg?= <j@a.test>'), '=?UTF-8?Q?J=C3=B6rg?= <j@a.test>');
  assert.is(author('Jörg <j@a.test>'), '=?UTF-8?Q?J=C3=B6rg?= <j@a.test>');
  assert.is(prepare('From: Jörg <j@a.test>\n\nx\n').header.from.given, 'Jörg <j@a.test>');
});

const REFUSED: readonly (readonly [title: string, text: string | Buffer, says: RegExp])[] = [
  ['no author', 'Subject: x\n\nx\n', /^5\.6\.0 .*no From/],
  ['two From fields', 'From: a@a.test\nFrom: b@b.test\n\nx\n', /^5\.6\.0 .*From occurs 2 times/],
  [
    'two authors',
    'From: a@a.test, b@b.test\n\nx\n',
    /^5\.6\.0 .*one address.*several|more than one/,
  ],
  ['an author behind a comment', 'From: (<a@a.test>) b@b.test\n\nx\n', /^5\.6\.0/],
  ['two subjects', `${FULL}Subject: y\n\nx\n`, /^5\.6\.0 .*Subject occurs 2 times/],
  ['a line that is no field', 'From: a@a.test\nhello\n\nx\n', /^5\.6\.0 .*no field: "hello"/],
  ['an mbox line', 'From a@a.test Mon\nFrom: a@a.test\n\nx\n', /^5\.6\.0 .*no field/],
  ['a loop', `${'Received: x\n'.repeat(51)}${FULL}\nx\n`, /^5\.4\.6 /],
  ['a header of 300 KiB', `${FULL}X: ${'word '.repeat(60_000)}\n\nx\n`, /^5\.3\.4 /],
  ['NUL', `${FULL}\na\0b\n`, /^5\.6\.0 .*NUL/],
  ['a bare LF', Buffer.from('From: a@a.test\r\n\r\na\nb\r\n'), /^5\.6\.11 .*bare CR or LF/],
  ['a bare CR', Buffer.from('From: a@a.test\r\n\r\na\rb\r\n'), /^5\.6\.11 /],
  ['a bare LF before a dot', Buffer.from('From: a@a.test\r\n\r\na\n.\r\nb\r\n'), /^5\.6\.11 /],
  [
    'Latin-1 in the header',
    Buffer.from('From: a@a.test\r\nSubject: \xe4\r\n\r\nx\r\n', 'latin1'),
    /^5\.6\.7 /,
  ],
  [
    'a UTF-8 address without SMTPUTF8',
    'From: j@a.test\nTo: jörg@a.test\n\nx\n',
    /^5\.6\.7 .*SMTPUTF8/,
  ],
  ['a word that cannot be folded', `${FULL}X: ${'x'.repeat(1_100)}\n\nx\n`, /^5\.6\.0 .*folded/],
];

for (const [title, text, says] of REFUSED) {
  header(`refused: ${title}`, () => assert.match(refusalOf(text), says));
}

header('raw UTF-8 in names and texts is encoded; addresses stay, with SMTPUTF8', async () => {
  const { raw, header: read } = prepare(
    'From: a@a.test\nTo: Jörg <jörg@b.test>, "Müller, K" <k@b.test>\nSubject: Grüße\nX-Note: ä\n\nx\n',
    true,
  );
  assert.ok(read.needsSmtpUtf8);
  assert.equal(read.to, ['Jörg <jörg@b.test>', '"Müller, K" <k@b.test>']);
  assert.is(read.subject, 'Grüße');
  assert.equal(read.custom, { 'X-Note': 'ä' });
  const parsed = await simpleParser(raw, {});
  assert.is(parsed.subject, 'Grüße');
  const ascii = prepare('From: a@a.test\nTo: Jörg <j@b.test>\nSubject: ä\n\nx\n');
  assert.not.ok(ascii.header.needsSmtpUtf8);
  assert.ok(ascii.raw.every((octet) => octet < 0x80));
});

header('a long list of recipients on one line is folded', () => {
  const list = Array.from({ length: 100 }, (_, i) => `recipient${i}@example.test`).join(', ');
  const { raw, header: read } = prepare(`From: a@a.test\nTo: ${list}\n\nx\n`);
  assert.ok(surveyWire(raw).isPlain);
  assert.is(read.to.length, 100);
});

header.run();

const body = suite('submitted: body');

const ALL_OCTETS = Buffer.from(Array.from({ length: 3_000 }, (_, i) => (i * 7) % 256));

/** 8-bit text in three charsets, an 8-bit file, base64 and quoted-printable that break their rules. */
const MIXED = Buffer.concat([
  Buffer.from(
    `${FULL.replaceAll('\n', '\r\n')}Content-Type: multipart/mixed; boundary="b 1"\r\nContent-Transfer-Encoding: 8bit\r\n\r\npréambule\r\n--b 1\r\nContent-Type: multipart/alternative; boundary=b2\r\n\r\n--b2\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Transfer-Encoding: 8bit\r\n\r\nGrüße, line one\r\n.dot and From\r\nFrom here\r\n--b2\r\nContent-Type: text/html; charset=iso-8859-1\r\nContent-Transfer-Encoding: 8bit\r\n\r\n`,
  ),
  Buffer.from('<p>Gr\xfc\xdfe</p>\r\n--b2--\r\n--b 1\r\n', 'latin1'),
  Buffer.from(
    `Content-Type: text/plain; name="größe.txt"\r\nContent-Disposition: attachment; filename="größe.txt"\r\n\r\n${'x'.repeat(3_000)}\r\n--b 1\r\nContent-Type: application/pdf; name=long.pdf\r\nContent-Transfer-Encoding: base64\r\n\r\n${ALL_OCTETS.toString('base64')}\r\n--b 1\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\nend=\r\n=C3=A4 ${'y'.repeat(2_000)} =\r\ntail\r\n--b 1--\r\népilogue\r\n`,
  ),
]);

body('8-bit and long lines are encoded anew, and read as before', async () => {
  assert.not.ok(surveyWire(MIXED).isPlain);
  const { raw } = prepare(MIXED);
  assert.ok(surveyWire(raw).isPlain);
  assert.not.ok(surveyWire(raw).hasBareLineEnd);
  const options = { skipTextToHtml: true, skipHtmlToText: true, skipTextLinks: true };
  const [before, after] = [await simpleParser(MIXED, options), await simpleParser(raw, options)];
  assert.match(before.text ?? '', /Grüße, line one\n\.dot/);
  assert.is(after.text, before.text);
  assert.is(after.html, before.html);
  assert.is(after.attachments.length, 2);
  for (const [at, one] of after.attachments.entries()) {
    assert.is(one.filename, before.attachments[at]?.filename);
    assert.ok(one.content.equals(before.attachments[at]?.content ?? Buffer.alloc(0)), `${at}`);
  }
  assert.ok(after.attachments[1]?.content.equals(ALL_OCTETS));
});

body('a plain body keeps every octet, also what no MIME reader understands', () => {
  const strange = `${FULL}Content-Type: multipart/mixed\n\n--nothing\n\n  two  spaces \t\n\n\n`;
  const { raw } = prepare(strange);
  assert.ok(raw.toString().endsWith(bytesOf('\n\n--nothing\n\n  two  spaces \t\n\n\n').toString()));
});

body('8-bit text without a charset gets one', async () => {
  const { raw } = prepare(`${FULL}\nGrüße\n`);
  assert.match(raw.toString(), /Content-Type: text\/plain; charset=utf-8\r\n/);
  assert.is((await simpleParser(raw, {})).text?.trim(), 'Grüße');
  const latin = prepare(
    Buffer.from(`${FULL.replaceAll('\n', '\r\n')}\r\nGr\xfc\xdfe\r\n`, 'latin1'),
  );
  assert.match(latin.raw.toString(), /charset=unknown-8bit\r\nContent-Transfer-Encoding: base64/);
});

const signed = (text: string): string => `${FULL}Content-Type: multipart/signed; boundary=s

--s
Content-Type: text/plain; charset=utf-8

${text}
--s
Content-Type: application/pgp-signature

sig
--s--
`;

body('what is signed or attached as a message is never changed', () => {
  assert.match(refusalOf(signed('Grüße')), /^5\.6\.3 .*signed/);
  const { raw } = prepare(signed('plain'));
  assert.ok(
    raw.toString().endsWith(
      bytesOf(signed('plain'))
        .toString()
        .slice(FULL.length + 6),
    ),
  );
  const attached = `${FULL}Content-Type: message/rfc822\n\nSubject: x\n\n${'x'.repeat(1_200)}\n`;
  assert.match(refusalOf(attached), /^5\.6\.3 .*attached message/);
});

body('quoted-printable that breaks its rules is read as far as it goes', () => {
  const decode = (text: string): string =>
    decodeBody(Buffer.from(text, 'latin1'), 'quoted-printable')?.toString('latin1') ?? '';
  for (const [text, wanted] of [
    ['a=3D=e4=E4', 'a=\xe4\xe4'],
    ['soft=\r\nbreak', 'softbreak'],
    ['soft= \t\r\nbreak', 'softbreak'],
    ['end=', 'end'],
    ['a  \t\r\nb \t', 'a\r\nb'],
    ['a=20 \r\nb', 'a \r\nb'],
    ['=ZZ=4', '=ZZ=4'],
    ['\xe4 =\r\n\r\n', '\xe4 \r\n'],
  ] as const) {
    assert.is(decode(text), wanted, JSON.stringify(text));
  }
});

body('converting has a limit; what needs none has that of the message', () => {
  const text = (word: string): Buffer =>
    Buffer.from(`${FULL.replaceAll('\n', '\r\n')}\r\n${`${word}\r\n`.repeat(3_000_000)}`);
  assert.match(refusalOf(text('wörter')), /^5\.6\.3 More than 16777216 bytes/);
  assert.is(refusalOf(text('woerter')), 'no refusal');
});

body('a tree without end is refused when it would have to be changed, and else let through', () => {
  const deep = (word: string): string =>
    `${FULL}${Array.from({ length: 40 }, (_, i) => `Content-Type: multipart/mixed; boundary=x${i}\n\n--x${i}\n`).join('')}\n${word}\n`;
  assert.match(refusalOf(deep('ä')), /^5\.6\.0 .*levels/);
  assert.is(refusalOf(deep('a')), 'no refusal');
  const wide = (word: string): string =>
    `${FULL}Content-Type: multipart/mixed; boundary=x\n\n${'--x\n\n'.repeat(1_500)}${word}\n`;
  assert.match(refusalOf(wide('ä')), /^5\.6\.0 .*parts/);
  assert.is(refusalOf(wide('a')), 'no refusal');
});

body('what people read: texts and files, with the place of base64 lines', async () => {
  const { raw } = prepare(MIXED);
  const shown = await readShownParts(raw);
  assert.match(shown.text ?? '', /^Grüße, line one\n\.dot and From\nFrom here\nendä y+ tail$/);
  assert.match(shown.html ?? '', /^<p>Grüße<\/p>$/);
  assert.equal(
    shown.files.map(({ filename, contentType, sizeBytes, disposition }) => ({
      filename,
      contentType,
      sizeBytes,
      disposition,
    })),
    [
      {
        filename: 'größe.txt',
        contentType: 'text/plain',
        sizeBytes: 3_000,
        disposition: 'attachment',
      },
      {
        filename: 'long.pdf',
        contentType: 'application/pdf',
        sizeBytes: 3_000,
        disposition: 'attachment',
      },
    ],
  );
  const { offset, length } = shown.files[1]!.place!;
  const lines = raw.toString('latin1', offset, offset + length);
  assert.ok(Buffer.from(lines, 'base64').equals(ALL_OCTETS));
  assert.is(shown.files[0]!.place, null);
  assert.is(decodeShownFile(raw, 0)?.toString(), 'x'.repeat(3_000));
  assert.is(decodeShownFile(raw, 2), null);
});

body(
  'a part without the blank line before its text still shows, and so do the others',
  async () => {
    const { raw } = prepare(
      `${FULL}Content-Type: multipart/mixed; boundary=x\n\n--x\nno blank line\n--x\n\nöther\n--x--\n`,
    );
    assert.ok(surveyWire(raw).isPlain);
    assert.is((await readShownParts(raw)).text, 'no blank line\nöther');
  },
);

body('new boundaries leave the fingerprint as it is, new text does not', () => {
  const message = (boundary: string, text: string): Buffer =>
    bytesOf(
      `${FULL}Content-Type: multipart/mixed; boundary=${boundary}\n\n--${boundary}\n\n${text}\n--${boundary}--\n`,
    );
  assert.is(fingerprintParts(message('a', 'x')), fingerprintParts(message('b', 'x')));
  assert.is.not(fingerprintParts(message('a', 'x')), fingerprintParts(message('a', 'y')));
});

body('messages whose parts cannot be told apart have fingerprints of their own', () => {
  const message = (trace: string, text: string): Buffer =>
    bytesOf(
      `Received: ${trace}\n${FULL}Content-Type: multipart/mixed; boundary=b\n\n${'--b\n\n\n'.repeat(1_001)}${text}\n`,
    );
  assert.is(fingerprintParts(message('1', 'x')), fingerprintParts(message('2', 'x')));
  assert.is.not(fingerprintParts(message('1', 'x')), fingerprintParts(message('1', 'y')));
});

body('a part that ends within its header keeps its fields apart', () => {
  const { raw } = prepare(
    `${FULL}Content-Type: multipart/mixed; boundary=b\n\n--b\nContent-Type: text/plain\nX-Last: 1\n--b\n\nä\n--b--\n`,
  );
  assert.match(raw.toString(), /\r\nX-Last: 1\r\nContent-Type: text\/plain\r\n\r\n/);
});

body('a content type outside ASCII is refused, its parameters are encoded', () => {
  const typed = (type: string): string => `${FULL}Content-Type: ${type}\n\nx\n`;
  assert.match(refusalOf(typed('täxt/plain')), /^5\.6\.7 The header Content-Type /);
  assert.match(refusalOf(typed('text/plain; nä=1')), /^5\.6\.7 The header Content-Type /);
  assert.ok(surveyWire(prepare(typed('text/plain; name="ä"')).raw).isPlain);
});

body('the parts of a digest are messages, which are not changed', () => {
  const digest = `${FULL}Content-Type: multipart/digest; boundary=b\n\n--b\n\nSubject: in\n\nä\n--b--\n`;
  assert.match(refusalOf(digest), /^5\.6\.3 An attached message/);
});

body('headers of parts and lines like delimiters have a measure', () => {
  const start = `${FULL}Content-Type: multipart/mixed; boundary=b\n\n`;
  const parts = `--b\nX-A: ${'a'.repeat(990)}\nX-B: ${'b'.repeat(990)}\n\nä\n`;
  assert.match(refusalOf(start + parts.repeat(600)), /^5\.3\.4 The headers of all parts/);
  const dashes = `--b\n\nä\n${'--c\n'.repeat(600_000)}`;
  assert.match(refusalOf(start + dashes), /^5\.6\.0 Too many lines begin with "--"/);
});

body('of a text in a rare charset the first half megabyte is shown', async () => {
  const text = (charset: string): Buffer =>
    bytesOf(`${FULL}Content-Type: text/plain; charset=${charset}\n\n${'a'.repeat(600 * 1024)}\n`);
  assert.is((await readShownParts(text('utf-7'))).text?.length, 512 * 1024);
  assert.is((await readShownParts(text('us-ascii'))).text?.length, 600 * 1024 + 1);
});

body('the survey says the same however the bytes are cut', () => {
  const samples = [
    'a\r\nb\r\n',
    'a\rb',
    'a\nb',
    'a\r',
    '\n',
    `${'x'.repeat(999)}\r\n`,
    'ä',
    'a\0',
    '',
  ];
  for (const sample of samples) {
    const bytes = Buffer.from(sample);
    const whole = surveyWire(bytes);
    const cut = new WireSurvey();
    for (const octet of bytes) cut.push(Uint8Array.of(octet));
    for (const key of ['hasBareLineEnd', 'hasNul', 'isPlain'] as const) {
      assert.is(cut[key], whole[key], `${JSON.stringify(sample.slice(0, 10))} ${key}`);
    }
  }
  assert.ok(surveyWire(Buffer.from(`${'x'.repeat(998)}\r\n`)).isPlain);
});

body.run();
