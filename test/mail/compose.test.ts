// Composed messages: what every later step relies on, checked on hostile content, against mailparser as the reader
// and nodemailer's MailComposer as a second writer. And the text made from HTML.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { Buffer } from 'node:buffer';
import { existsSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { fileURLToPath } from 'node:url';
import MailComposer from 'nodemailer/lib/mail-composer';
import { parseMailbox } from '../../src/mail/address.ts';
import type { Mailbox } from '../../src/mail/address.ts';
import { compose } from '../../src/mail/compose.ts';
import type { Attachment, MessageParts } from '../../src/mail/compose.ts';
import { findHeaders, splitHeader } from '../../src/mail/header.ts';
import {
  htmlTagsMax,
  indentDepthMax,
  textCharsMax,
  textFromHtml,
} from '../../src/mail/html-text.ts';

interface ParsedAddress {
  readonly name: string;
  readonly address?: string;
}
interface Parsed {
  readonly text?: string;
  readonly html?: string | false;
  readonly subject?: string;
  readonly from?: { value: readonly ParsedAddress[] };
  readonly to?: { value: readonly ParsedAddress[] };
  readonly attachments: readonly {
    filename?: string;
    contentType: string;
    cid?: string;
    content: Buffer;
  }[];
}
// The package has no types; this is what the tests use of it.
const { simpleParser } = createRequire(import.meta.url)('mailparser') as {
  simpleParser: (source: Buffer, options: object) => Promise<Parsed>;
};
const read = (raw: Buffer): Promise<Parsed> =>
  simpleParser(raw, {
    skipTextToHtml: true,
    skipHtmlToText: true,
    skipTextLinks: true,
    skipImageLinks: true,
    maxHtmlLengthToParse: Infinity,
  });

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));

function mailbox(text: string): Mailbox {
  const parsed = parseMailbox(text);
  if (!parsed.ok) throw new Error(`${text} ${parsed.problem}`);
  return parsed.mailbox;
}

const base: MessageParts = {
  from: mailbox('Jane <jane@x.example>'),
  to: [mailbox('bob@y.example')],
  cc: [],
  replyTo: [],
  subject: 'Hello',
  text: 'Hi\n',
  html: null,
  headers: [],
  messageId: '019b0c1e@x.example',
  date: new Date(Date.UTC(2026, 0, 2, 3, 4, 5)),
  boundarySeed: '019b0c1e-8f00-7abc-9def-0123456789ab',
};
const composed = (parts: Partial<MessageParts>): Buffer => compose({ ...base, ...parts }).raw;
/** Empty when there is none. */
const header = (raw: Buffer, name: string): string =>
  findHeaders(splitHeader(raw).fields, name)[0] ?? '';
const bodyOf = (raw: Buffer): string => raw.toString('latin1', splitHeader(raw).bodyStart);

/** What dkim, the SMTP client and every relay on the way are promised. */
function assertWellFormed(raw: Buffer): void {
  const { bodyStart, fields } = splitHeader(raw);
  const text = raw.toString('latin1');
  assert.not.match(text, /[^\t\r\n\x20-\x7e]/, '7-bit, no control characters');
  assert.not.match(text, /\r(?!\n)|(?<!\r)\n/, 'CRLF only');
  assert.ok(text.endsWith('\r\n'), 'ends its last line');
  assert.not.match(text, /[ \t]\r\n/, 'no white space at a line end');
  for (const line of text.slice(0, bodyStart).split('\r\n')) assert.ok(line.length <= 998);
  for (const line of text.slice(bodyStart).split('\r\n')) {
    assert.ok(line.length <= 76, `body line of ${line.length}`);
    assert.ok(!line.startsWith('From ') && !line.startsWith('.'), line);
  }
  assert.match(text.slice(bodyStart), /\S/, 'a body that is not blank');
  assert.not.match(text.slice(bodyStart), /(?:\r\n){103}/, 'no long run of blank lines');
  for (const name of [
    'From',
    'To',
    'Subject',
    'Date',
    'Message-ID',
    'MIME-Version',
    'Content-Type',
  ]) {
    const count = findHeaders(fields, name).length;
    assert.ok(count === 1 || (name === 'Subject' && count === 0), `${count} of ${name}`);
  }
  assert.equal(findHeaders(fields, 'Bcc'), []);
}

test('a plain message is exactly this', () => {
  const raw = composed({
    to: [mailbox('Bob <bob@y.example>'), mailbox('"Roe, R" <r@z.example>')],
    cc: [mailbox('c@y.example')],
    replyTo: [mailbox('support@x.example')],
    headers: [
      ['X-Ref', '42'],
      ['X-Empty', ''],
    ],
    messageId: '<019b0c1e@x.example>',
  });
  assert.is(
    raw.toString('latin1'),
    [
      'From: Jane <jane@x.example>',
      'To: Bob <bob@y.example>, "Roe, R" <r@z.example>',
      'Cc: c@y.example',
      'Reply-To: support@x.example',
      'Subject: Hello',
      'Message-ID: <019b0c1e@x.example>',
      'Date: Fri, 02 Jan 2026 03:04:05 +0000',
      'X-Ref: 42',
      'MIME-Version: 1.0',
      'Content-Type: text/plain; charset=utf-8',
      'Content-Transfer-Encoding: 7bit',
      '',
      'Hi',
      '',
    ].join('\r\n'),
  );
});

test('the same parts give the same bytes, another seed another boundary', () => {
  const parts = { text: 'a', html: '<p>a</p>' };
  assert.equal(composed(parts), composed(parts));
  assert.not.equal(composed(parts), composed({ ...parts, boundarySeed: 'other' }));
});

test('the body decides the structure', async () => {
  const type = (parts: Partial<MessageParts>): string => {
    const raw = composed(parts);
    assertWellFormed(raw);
    return header(raw, 'Content-Type').split(';')[0] ?? '';
  };
  assert.is(type({ text: 'a', html: null }), 'text/plain');
  assert.is(type({ text: null, html: '<p>a</p>' }), 'text/html');
  assert.is(type({ text: '', html: '<p>a</p>' }), 'text/html');
  assert.is(type({ text: 'a', html: '<p>a</p>' }), 'multipart/alternative');
  assert.is(type({ text: null, html: null }), 'text/plain');

  const both = await read(composed({ text: 'plain', html: '<p>html</p>' }));
  assert.is(both.text, 'plain');
  assert.is(both.html, '<p>html</p>');
  assert.is(both.attachments.length, 0);
});

test('an empty body is a valid body, and never blank', async () => {
  for (const text of [null, '', '\n', '\r\n\r\n', ' ', ' \n\t\n', '\n'.repeat(500)]) {
    const raw = composed({ text });
    assertWellFormed(raw);
    const parsed = await read(raw);
    assert.is(
      withoutLastBreak(parsed.text ?? ''),
      withoutLastBreak(text ?? ''),
      JSON.stringify(text),
    );
  }
});

test('without a visible recipient To is an empty group', async () => {
  const raw = composed({ to: [] });
  assert.is(header(raw, 'To'), 'undisclosed-recipients:;');
  assertWellFormed(raw);
});

test('fifty recipients with long names fold and read back', async () => {
  const to = Array.from({ length: 50 }, (_, i) =>
    mailbox(`"Müller-${'x'.repeat(i)}, Nr. ${i}" <recipient.number.${i}@y${i}.example>`),
  );
  const raw = composed({ to });
  assertWellFormed(raw);
  for (const line of raw.toString('latin1', 0, splitHeader(raw).bodyStart).split('\r\n')) {
    assert.ok(line.length <= 78, line);
  }
  const parsed = await read(raw);
  assert.equal(
    parsed.to?.value.map(({ name, address }) => [name, address]),
    to.map(({ name, address }) => [name, address]),
  );
});

test('subjects survive', async () => {
  for (const subject of [
    'x',
    'Ihre Bestellung № 1 ist unterwegs – 🚚',
    '日本語の件名'.repeat(30),
    'x'.repeat(2_000),
    'NBSP\u00a0between',
    '=?UTF-8?X?no?=',
    'a =? b ?= c',
  ]) {
    const raw = composed({ subject });
    assertWellFormed(raw);
    assert.is((await read(raw)).subject, subject);
  }
  // Nobody can break out of the subject, whoever forgot to check it.
  const raw = composed({ subject: 'a\r\nBcc: b@y.example\u0000' });
  assert.is(header(raw, 'Subject'), 'a Bcc: b@y.example');
  assertWellFormed(raw);
  assert.is(header(composed({ subject: '' }), 'Subject'), '');
});

test('custom fields: encoded, folded, singletons once, never ours', () => {
  const raw = composed({
    replyTo: [mailbox('r@x.example')],
    headers: [
      ['X-Name', 'Größe 10 µm'],
      ['List-Unsubscribe', `<https://x.example/${'u'.repeat(200)}>, <mailto:u@x.example>`],
      ['X-Twice', 'one'],
      ['x-twice', 'two'],
      ['In-Reply-To', '<1@x.example>'],
      ['in-reply-to', '<2@x.example>'],
      ['Reply-To', 'other@x.example'],
      ['X-Long', 'word '.repeat(400).trim()],
    ],
  });
  assertWellFormed(raw);
  const { fields } = splitHeader(raw);
  assert.match(header(raw, 'X-Name'), /^=\?UTF-8\?[QB]\?\S+\?= 10 =\?UTF-8\?[QB]\?\S+\?=$/);
  assert.match(
    header(raw, 'List-Unsubscribe'),
    /^<https:\/\/x\.example\/u{200}>, <mailto:u@x\.example>$/,
  );
  assert.equal(findHeaders(fields, 'X-Twice'), ['one', 'two']);
  assert.equal(findHeaders(fields, 'In-Reply-To'), ['<2@x.example>']);
  assert.equal(findHeaders(fields, 'Reply-To'), ['r@x.example']);
  assert.is(header(raw, 'X-Long'), 'word '.repeat(400).trim());
  assert.is(
    header(composed({ headers: [['Reply-To', 'o@x.example']] }), 'Reply-To'),
    'o@x.example',
  );

  for (const bad of [
    ['From', 'x'],
    ['Content-Type', 'x'],
    ['X A', 'x'],
    ['X-A', 'a\r\nBcc: b@y.example'],
  ] as const) {
    assert.throws(() => composed({ headers: [bad] }), undefined, bad[0]);
  }
  assert.throws(() => composed({ messageId: 'a@b>\r\nX: y' }));
  assert.throws(() => composed({ messageId: 'no-at-sign' }));
  assert.throws(() => composed({ date: new Date(Number.NaN) }));
});

test('UTF-8 addresses stand as UTF-8 in the header; everything else stays ASCII', () => {
  const plain = compose({ ...base, from: mailbox('Jürgen <j@münchen.de>') });
  assert.is(plain.needsSmtpUtf8, false);
  assertWellFormed(plain.raw);
  assert.is(header(plain.raw, 'From'), '=?UTF-8?Q?J=C3=BCrgen?= <j@xn--mnchen-3ya.de>');

  const from = mailbox('Jürgen <jürgen@münchen.de>');
  for (const parts of [{ from }, { to: [from] }, { cc: [from] }, { replyTo: [from] }]) {
    const { raw, needsSmtpUtf8 } = compose({ ...base, ...parts, text: 'ü', subject: 'ü' });
    assert.is(needsSmtpUtf8, true);
    const eightBit = raw
      .toString('utf8')
      .split('\r\n')
      .filter((line) => /[^\x20-\x7e]/.test(line));
    assert.is(eightBit.length, 1);
    assert.match(eightBit[0] ?? '', /=\?UTF-8\?Q\?J=C3=BCrgen\?= <jürgen@xn--mnchen-3ya\.de>$/);
  }
});

const withoutLastBreak = (text: string): string =>
  text.replace(/\r\n|\r|\n/g, '\n').replace(/\n$/, '');
/** Lines that readers must find again, and what a reader makes of what cannot be sent at all. */
const expected = (text: string): string => withoutLastBreak(text.toWellFormed());

const boundary = (parts: Partial<MessageParts>): string =>
  /boundary="([^"]+)"/.exec(composed(parts).toString('latin1'))?.[1] ?? '';
const known = boundary({ text: 'a', html: 'b' });

const hostile: Record<string, string> = {
  'no-break space': 'a\u00a0b\u00a0\u00a0\n\u00a0\n',
  emoji: '🚀👩‍👩‍👧‍👦'.repeat(200),
  'Latin-1 letters': 'Größe, façade, ñandú\n'.repeat(40),
  'mostly foreign': '日本語のテキスト\n'.repeat(100),
  'one line of 40,000': 'x'.repeat(40_000),
  'one line of 40,000 words': 'word '.repeat(8_000),
  'one line of 40,000 umlauts': 'ü'.repeat(40_000),
  'long line of equals signs': '='.repeat(5_000),
  'lone surrogates': 'a\ud800b\udc00c\ud83d',
  'NUL inside': 'a\u0000b\u0000',
  'all controls': String.fromCharCode(...Array(0x20).keys(), 0x7f, ...Array(0x20).keys()),
  'form feed and vertical tab': 'a\fb\u000b\n\f\nc',
  'C1 and separators': 'a\u0085b\u2028c\u2029d',
  'byte order mark inside': 'a\ufeffb',
  'leading dots': '.\n..\n.a\n. b\nü.\n',
  'lonely dot in a long line': `${'x'.repeat(75)}.${'y'.repeat(80)}\n.`,
  'From lines': 'From me\nFrom you ü\n>From\nFriday\n',
  'From at a soft break': `${'x'.repeat(75)}From here ${'y'.repeat(75)}`,
  'boundary look-alikes': `--${known}\nContent-Type: text/html\n\n<b>\n--${known}--\n--=_\n`,
  'boundary in a folded line': `${'ü '.repeat(20)}\n--${known}--\n`,
  'header look-alike': 'Subject: x\nContent-Type: y\n\nbody',
  'CR only': 'a\rb\r\rc\r',
  'LF only': 'a\nb\n\nc\n',
  'mixed line ends': 'a\r\nb\rc\nd\n\r\ne\r\r\nf',
  'no line end': 'a',
  'trailing white space': 'a \nb\t\n \n\t\nc  ',
  'long white space': `a${' '.repeat(16_000)}b${'\t'.repeat(16_000)}`,
  'white space to the edge': `${'x'.repeat(70)}${' '.repeat(10)}\n${'x'.repeat(75)} \n${'x'.repeat(76)} \n`,
  'blank lines': `a${'\n'.repeat(16_000)}b`,
  'hundred blank lines': `a${'\n'.repeat(100)}b\n`,
  'encoded look-alikes': '=20=0D=0A= =\n=C3=BC =?UTF-8?Q?x?=\n',
  'lines of 74 to 80': Array.from({ length: 7 }, (_, i) => 'z'.repeat(74 + i)).join('\n'),
  'umlaut at the edge': Array.from({ length: 12 }, (_, i) => `${'z'.repeat(66 + i)}üé`).join('\n'),
  'emoji at the edge': Array.from({ length: 16 }, (_, i) => `${'z'.repeat(60 + i)}🚀 end`).join(
    '\n',
  ),
  'one megabyte of lines': 'The quick brown fox jumps over the lazy dog.\n'.repeat(23_000),
  'one megabyte in one line': 'x'.repeat(1_000_000),
  'one megabyte of umlauts': 'ö'.repeat(500_000),
  'one megabyte of blank lines': '\n'.repeat(1_000_000),
};

test('hostile text and HTML read back as they were, alone and together', async () => {
  for (const [name, content] of Object.entries(hostile)) {
    const alone = composed({ text: content });
    assertWellFormed(alone);
    assert.is(withoutLastBreak((await read(alone)).text ?? ''), expected(content), name);

    const html = composed({ text: null, html: content });
    assertWellFormed(html);
    assert.is(withoutLastBreak((await read(html)).html || ''), expected(content), name);

    const both = composed({ text: content, html: `<p>${content}</p>` });
    assertWellFormed(both);
    const parsed = await read(both);
    assert.is(withoutLastBreak(parsed.text ?? ''), expected(content), name);
    assert.is(parsed.html, `<p>${content}</p>`.toWellFormed().replace(/\r\n|\r|\n/g, '\n'), name);
    assert.is(parsed.attachments.length, 0, name);
  }
});

test('quoted-printable for letters, base64 for scripts and blank lines, 7-bit where nothing can go wrong', () => {
  const encoding = (text: string): string =>
    header(composed({ text }), 'Content-Transfer-Encoding');
  assert.is(encoding('plain\n'), '7bit');
  assert.is(encoding('x'.repeat(76)), '7bit');
  assert.is(encoding('x'.repeat(77)), 'quoted-printable');
  assert.is(encoding('Größe und Gewicht der Sendung\n'), 'quoted-printable');
  assert.is(encoding('.dot'), 'quoted-printable');
  assert.is(encoding('From me'), 'quoted-printable');
  assert.is(encoding('Friday'), '7bit');
  assert.is(encoding('end '), 'quoted-printable');
  assert.is(encoding('日本語'), 'base64');
  assert.is(encoding(`a${'\n'.repeat(102)}b`), 'base64');
  assert.is(bodyOf(composed({ text: '.a\nFrom b = c \n' })), '=2Ea\r\n=46rom b =3D c=20\r\n');
  assert.is(bodyOf(composed({ text: '' })), '=\r\n');
});

test('naughty strings survive as subject, name and text', async () => {
  const file = `${corpora}/strings-blns/blns.json`;
  if (!existsSync(file)) {
    console.log(`skipped: no corpus at ${file}`);
    return;
  }
  const strings = JSON.parse(readFileSync(file, 'utf8')) as string[];
  assert.ok(strings.length > 400);
  for (const string of strings) {
    const { raw } = compose({
      ...base,
      from: { ...base.from, name: string },
      subject: string,
      text: string,
      headers: [['X-Naughty', string.replace(/[\p{Cc}]/gu, ' ')]],
    });
    assertWellFormed(raw);
    const parsed = await read(raw);
    assert.is(withoutLastBreak(parsed.text ?? ''), expected(string));
    assert.equal(parsed.from?.value[0]?.address, 'jane@x.example', string);
    const squeezed = (text: string | undefined): string =>
      (text ?? '').replace(/[\p{Cc}\s\ufeff]+/gu, ' ').trim();
    assert.is(squeezed(parsed.subject), squeezed(string));
  }
  console.log(`blns: ${strings.length} strings survive`);
});

test('means the same as what MailComposer writes', async () => {
  let compared = 0;
  for (const [name, content] of Object.entries(hostile)) {
    if (content.length > 200_000) continue;
    // MailComposer keeps lone CR as it is; those cases are ours alone.
    if (/\r(?!\n)/.test(content)) continue;
    compared += 1;
    const ours = await read(composed({ text: content, html: `<p>${content}</p>`, subject: 'Ü b' }));
    const theirs = await read(
      await new MailComposer({
        from: { name: 'Jane', address: 'jane@x.example' },
        to: 'bob@y.example',
        subject: 'Ü b',
        text: content,
        html: `<p>${content}</p>`,
        newline: 'windows',
        disableFileAccess: true,
        disableUrlAccess: true,
      })
        .compile()
        .build(),
    );
    assert.is(ours.text, theirs.text, name);
    assert.is(ours.html, theirs.html, name);
    assert.is(ours.subject, theirs.subject);
    assert.equal(ours.from?.value, theirs.from?.value);
    assert.equal(ours.to?.value, theirs.to?.value);
  }
  assert.ok(compared > 25, `${compared} compared`);
});

test('attachments and inline images', async () => {
  const file = (part: Partial<Attachment>): Attachment => ({
    filename: 'a.pdf',
    contentType: 'application/pdf',
    contentId: null,
    content: Buffer.from('pdf'),
    ...part,
  });
  const large = Buffer.alloc(300_001, 'abc\u0000\xff', 'latin1');
  const raw = composed({
    text: 'see below',
    html: '<img src="cid:logo@x">',
    attachments: [
      file({ content: large }),
      file({ filename: 'logo.png', contentType: 'image/png', contentId: 'logo@x' }),
      file({ filename: 'Größe "1"; x\r\ny.txt', contentType: 'text/plain; charset=utf-8' }),
      file({
        filename: 'empty.bin',
        contentType: 'x/y\r\nBcc: b@y.example',
        content: Buffer.alloc(0),
      }),
      file({ filename: 'mail.eml', contentType: 'message/rfc822' }),
      file({ filename: 'invite.ics', contentType: 'text/calendar; method=REQUEST' }),
    ],
  });
  assertWellFormed(raw);
  assert.match(header(raw, 'Content-Type'), /^multipart\/mixed;/);
  const parsed = await read(raw);
  assert.is(parsed.text, 'see below');
  assert.is(parsed.html, '<img src="cid:logo@x">');
  const found = new Map(parsed.attachments.map((part) => [part.filename, part]));
  assert.is(found.size, 6);
  assert.equal(found.get('a.pdf')?.content, large);
  assert.is(found.get('logo.png')?.cid, 'logo@x');
  assert.is(found.get('empty.bin')?.contentType, 'application/octet-stream');
  // RFC 2046 §5.2.1: not in base64 under its own name.
  assert.not.match(raw.toString('latin1'), /message\/rfc822/);
  assert.equal(found.get('mail.eml')?.content, Buffer.from('pdf'));
  assert.is(found.get('invite.ics')?.contentType, 'text/calendar');
  assert.ok([...found.keys()].some((name) => name?.startsWith('Größe "1"; x')));
});

test('text from HTML: links kept, images and hidden parts dropped, lines readable', () => {
  const html =
    '<html><head><title>T</title><style>p{}</style></head><body><div id="__react-email-preview">pre</div>' +
    '<h1>Hello Ü</h1><p>Go <a href="https://x.example/a?b=c&amp;d">here</a> or ' +
    '<a href="https://x.example">https://x.example</a>.</p><img src="x.png" alt="no">' +
    '<ul><li>one<li>two</ul><table><tr><td>a</td><td>b</td></tr><tr><td>c</td><td>d</td></tr></table>' +
    '<script>x()</script></body></html>';
  assert.is(
    textFromHtml(html),
    'Hello Ü\n\nGo here <https://x.example/a?b=c&d> or https://x.example.\n\n * one\n * two\n\na b\nc d',
  );
  assert.is(textFromHtml(''), '');
  assert.is(textFromHtml('<img src=x>'), '');
  assert.is(textFromHtml('just text'), 'just text');
  assert.is(textFromHtml('a\ud800'), 'a\ufffd');
  // Quotes and lists in each other are indented to a limit; tags are read to a limit.
  assert.is(textFromHtml(`${'<blockquote>'.repeat(20)}x`), `${'> '.repeat(indentDepthMax)}x`);
  assert.is(textFromHtml('<b>x</b>'.repeat(20_000)), `${'x'.repeat(htmlTagsMax / 2)}\n…`);
});

test('text from HTML: any HTML comes back, within limits', () => {
  const megabyte = (part: string, end = ''): string =>
    part.repeat(Math.ceil(1_000_000 / part.length)) + end;
  for (const html of [
    megabyte('<div>', 'x'),
    `<body>${megabyte('<table><tr><td>', 'x')}`,
    megabyte('<p>'),
    megabyte('<ul><li>', 'x'),
    `${'<b>'.repeat(10_000)}${megabyte('</i>')}`,
    `${'<blockquote>'.repeat(190)}<pre>${megabyte('a\n')}`,
    `${'<ol><li>'.repeat(90)}${megabyte('a<br>')}`,
    megabyte('<'),
    megabyte('<a '),
    megabyte('&'),
    megabyte('<!--'),
    megabyte('word '),
    `<a href="${'x'.repeat(1_000_000)}">a</a>`,
    megabyte(' ', 'x'),
  ]) {
    const text = textFromHtml(html);
    assert.ok(text.length <= textCharsMax + 2, `${html.slice(0, 20)}: ${text.length}`);
    assert.ok(text.endsWith('…'), html.slice(0, 20));
  }
});

test.run();
