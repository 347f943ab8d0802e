// Header fields: which may be set, how text is encoded and folded, how a received header is read.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { Buffer } from 'node:buffer';
import { createRequire } from 'node:module';
import {
  checkHeader,
  encodeText,
  findHeaders,
  foldHeader,
  headerFieldsMax,
  headerSyntaxProblem,
  headerValueOctetsMax,
  isOwnedHeader,
  ownedHeaders,
  splitHeader,
} from '../../src/mail/header.ts';

// The package has no types; this is what the tests use of it.
const { simpleParser } = createRequire(import.meta.url)('mailparser') as {
  simpleParser: (source: Buffer | string) => Promise<{ subject?: string }>;
};

test('the names that the transport owns are refused in any case', () => {
  const owned = [
    'From',
    'to',
    'CC',
    'Bcc',
    'Subject',
    'Date',
    'message-id',
    'DKIM-Signature',
    'Received',
    'Return-Path',
    'mime-version',
    'Content-Type',
    'content-transfer-encoding',
    'Content-Anything',
    'Feedback-ID',
  ];
  for (const name of owned) {
    assert.ok(isOwnedHeader(name), name);
    assert.match(checkHeader(name, 'x') ?? '', name);
    assert.is(headerSyntaxProblem(name, 'x'), null);
  }
  assert.is(ownedHeaders.length, 13);
});

test('other names pass', () => {
  for (const name of [
    'X-Entity-Ref-ID',
    'Reply-To',
    'Sender',
    'In-Reply-To',
    'References',
    'List-Unsubscribe',
    'List-Unsubscribe-Post',
    'Auto-Submitted',
    'Importance',
    'Contents',
    'Fromage',
    "X-!#$%&'*+.^_`|~",
    'x'.repeat(76),
  ]) {
    assert.is(checkHeader(name, 'value'), null, name);
  }
});

test('names and values that would break the message are refused', () => {
  for (const name of ['', 'X Y', 'X:Y', 'X\r\nBcc', 'X-ü', 'X\u0000', 'X\t', 'x'.repeat(77)]) {
    assert.match(checkHeader(name, 'value') ?? '', /header name/, JSON.stringify(name));
  }
  for (let code = 0; code < 0x20; code += 1) {
    if (code === 0x09) continue;
    assert.match(checkHeader('X-A', `a${String.fromCharCode(code)}b`) ?? '', /control/, `${code}`);
  }
  assert.match(checkHeader('X-A', 'a\u007fb') ?? '', /control/);
  assert.match(checkHeader('X-A', 'a\r\nBcc: b@x.example') ?? '', /control/);
  assert.is(checkHeader('X-A', 'a\tb ü 日 🚀'), null);
  assert.is(checkHeader('X-A', ''), null);
  assert.match(checkHeader('X-A', 'ab '.repeat(headerValueOctetsMax / 2)) ?? '', /longer/);
  assert.match(checkHeader('X-A', 'x'.repeat(994)) ?? '', /folded/);
  assert.is(checkHeader('X-A', 'x'.repeat(993)), null);
  assert.is(checkHeader('X-A', 'ü'.repeat(2_000)), null);
});

test('text is encoded only where it must be', () => {
  assert.is(encodeText('plain text, (all) "fine"; 1 = 1 ?'), 'plain text, (all) "fine"; 1 = 1 ?');
  assert.is(encodeText('Grüße aus Köln'), '=?UTF-8?B?R3LDvMOfZQ==?= aus =?UTF-8?Q?K=C3=B6ln?=');
  assert.is(encodeText('a é è b'), 'a =?UTF-8?B?w6kgw6g=?= b');
  assert.is(encodeText('=?UTF-8?Q?K=C3=B6ln?= now'), '=?UTF-8?Q?K=C3=B6ln?= now');
  assert.match(encodeText('=?UTF-8?Q?K ln?='), /^=\?UTF-8\?[QB]\?[A-Za-z0-9+/=_-]+\?=$/);
  assert.is(encodeText('  a\u0000\r\nb\u0085c  '), 'a b c');
  assert.is(encodeText(`a${' '.repeat(500)}b`), 'a b');
  assert.is(encodeText('\ud800'), '=?UTF-8?B?77+9?=');
});

test('what is encoded and folded decodes to the same text, in lines of 76', async () => {
  const subjects = [
    'x',
    'Grüße aus Köln',
    '日本語の件名'.repeat(40),
    '🚀'.repeat(100),
    'mixed 日本 and ascii, ü again '.repeat(20).trim(),
    'a  b   c',
    'ü  ü',
    'x'.repeat(2_000),
    `start ${'y'.repeat(200)} end`,
    '=?UTF-8?Q?not really',
    '=?UTF-8?X?no?= =?utf-8?Q?a b?=',
    '?= =? ?=',
    '_under_score_ = equals ? question',
    'ü_ü=ü?ü',
    '"quoted" <angle@x.example>, (comment); ü',
    'NBSP\u00a0here',
    'Re: '.repeat(100).trim(),
    'word '.repeat(300).trim(),
  ];
  for (const subject of subjects) {
    const encoded = encodeText(subject, { column: 9, wordMax: 60 });
    assert.match(encoded, /^[\x20-\x7e]*$/);
    const field = foldHeader('Subject', encoded);
    for (const line of field.split('\r\n')) assert.ok(line.length <= 76, `${line.length}: ${line}`);
    assert.not.match(field, /[ \t]\r\n|\r\n[ \t]*\r\n/);
    const parsed = await simpleParser(`${field}\r\n`);
    assert.is(parsed.subject, subject);
  }
});

test('folds at white space only, and unfolds to the same value', () => {
  const long = `<https://x.example/${'u'.repeat(300)}>`;
  for (const value of [
    `${long}, <mailto:u@x.example>`,
    `<mailto:u@x.example>, ${long}`,
    '<0123456789.abcdef@mail.x.example> '.repeat(40).trim(),
    `a${' '.repeat(30)}${'b'.repeat(70)} c`,
    `${'b'.repeat(70)}${' '.repeat(30)}c`,
    `a${' '.repeat(100)}b${'c'.repeat(70)} d`,
    '{"a": 1, "b": [2, 3]}'.repeat(20),
    'tab\tseparated '.repeat(20).trim(),
    'x'.repeat(900),
  ]) {
    const field = foldHeader('X-Field', value);
    assert.is(field.replaceAll(/\r\n(?=[ \t])/g, ''), `X-Field: ${value}\r\n`);
    assert.not.match(field, /[ \t]\r\n/, field);
    for (const line of field.slice(0, -2).split('\r\n')) {
      assert.ok(line.length <= 76 || !/\S\s+\S/.test(line.replace(/^X-Field: |^\s+/, '')), line);
      assert.match(line, /\S/);
    }
  }
  assert.is(foldHeader('X', 'y'), 'X: y\r\n');
});

test('takes a received header apart', () => {
  const message = Buffer.from(
    'From mbox line\r\nReceived: from a\r\n\tby b\r\n  ; now\r\nSubject : odd space\r\n' +
      'X-A: ü\r\nno colon here\r\nX-Empty:\r\nx-a:second\r\n\r\nBody: no header\r\n',
  );
  const { fields, bodyStart } = splitHeader(message);
  assert.equal(
    fields.map((field) => field.name),
    ['Received', 'Subject', 'X-A', 'X-Empty', 'x-a'],
  );
  assert.equal(findHeaders(fields, 'received'), ['from a\tby b  ; now']);
  assert.equal(findHeaders(fields, 'SUBJECT'), ['odd space']);
  assert.equal(findHeaders(fields, 'X-A'), ['ü', 'second']);
  assert.equal(findHeaders(fields, 'X-Empty'), ['']);
  assert.equal(findHeaders(fields, 'Body'), []);
  assert.is(message.toString('utf8', bodyStart), 'Body: no header\r\n');
});

test('finds the body behind bare LF, at the start, or not at all', () => {
  const bodyOf = (text: string): string => {
    const message = Buffer.from(text);
    return message.toString('utf8', splitHeader(message).bodyStart);
  };
  assert.is(bodyOf('A: b\n\nbody\n\nmore'), 'body\n\nmore');
  assert.is(bodyOf('A: b\r\n\nbody'), 'body');
  assert.is(bodyOf('\r\nbody'), 'body');
  assert.is(bodyOf('\nbody'), 'body');
  assert.is(bodyOf('A: b\r\n'), '');
  assert.is(bodyOf(''), '');
  assert.equal(splitHeader(Buffer.from('A: b')).fields, [{ name: 'A', value: 'b' }]);
  assert.is(splitHeader(Buffer.from('A: b\r\n'.repeat(9_000))).fields.length, headerFieldsMax);
});

test.run();
