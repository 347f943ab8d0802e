// Composed messages: what every later step relies on, with mailparser as the reader.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { Buffer } from 'node:buffer';
import { compose, composeSegments, isContentType } from '../../src/mail/compose.ts';
import type { Attachment, MessageParts } from '../../src/mail/compose.ts';
import { findHeaders, splitHeader } from '../../src/mail/header.ts';
import {
  assertWellFormed,
  base,
  composed,
  header,
  mailbox,
  read,
  withoutLastBreak,
} from '../support/composed.ts';

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

test('segments are the message with its attachments left out', () => {
  const parts: MessageParts = {
    ...base,
    text: 'see below',
    html: '<img src="cid:logo@x">',
    attachments: [
      {
        filename: 'a.pdf',
        contentType: 'application/pdf',
        contentId: null,
        content: Buffer.alloc(1_000, 'a'),
      },
      {
        filename: null,
        contentType: 'image/png',
        contentId: 'logo@x',
        content: Buffer.alloc(58, 'b'),
      },
      { filename: 'empty', contentType: 'text/plain', contentId: null, content: Buffer.alloc(0) },
    ],
  };
  const { raw } = compose(parts);
  const withoutOctets = parts.attachments!.map((part) => ({
    ...part,
    content: { sizeBytes: (part.content as Buffer).length },
  }));
  const composition = composeSegments({ ...parts, attachments: withoutOctets });
  assert.is(composition.sizeBytes, raw.length);
  // The page's image comes before what is attached to all of it.
  const order = composition.segments.flatMap((one) => (Buffer.isBuffer(one) ? [] : [one.index]));
  assert.equal(order, [1, 0, 2]);
  let at = 0;
  for (const segment of composition.segments) {
    if (Buffer.isBuffer(segment)) {
      assert.ok(raw.subarray(at, at + segment.length).equals(segment));
      at += segment.length;
      continue;
    }
    const { offset, length } = composition.places[segment.index]!;
    assert.equal([offset, length], [at, segment.sizeBytes]);
    const lines = raw.toString('latin1', at, at + length);
    assert.ok(
      Buffer.from(lines, 'base64').equals(parts.attachments![segment.index]!.content as Buffer),
    );
    at += length;
  }
  assert.is(at, raw.length);
  assert.throws(() => compose({ ...parts, attachments: withoutOctets }));
});

test('a type with parameters or without is one, a header that breaks out is none', () => {
  for (const type of [
    'text/plain',
    'text/calendar; method=REQUEST; charset="utf-8"',
    'application/vnd.openxmlformats-officedocument.presentationml.presentation',
  ]) {
    assert.ok(isContentType(type), type);
  }
  for (const type of [
    '',
    'text',
    'text/',
    '/x',
    'a b/c',
    'text/plain;',
    'x/y\r\nBcc: z',
    'x/y; a="\u0000"',
  ]) {
    assert.not(isContentType(type), type);
  }
});

test.run();
