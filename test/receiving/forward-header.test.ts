// Headers that strangers wrote: read without failing, and what is rebuilt of them is a message that nothing in them can
// add a field to.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { randomBytes, randomInt } from 'node:crypto';
import { formatMailbox, parseMailbox } from '../../src/mail/address.ts';
import {
  forwardFields,
  readForwardHeader,
  receivedFields,
  resultsIn,
  traceWithoutReturnPath,
} from '../../src/mail/forward-header.ts';
import { findHeaders, splitHeader } from '../../src/mail/header.ts';
import { rebuildAround } from '../../src/mail/rebuild.ts';
import { ONCE } from '../support/composed.ts';
import { HOST, TRACE } from '../support/forwarding.ts';

const readOf = (header: string | Buffer): ReturnType<typeof readForwardHeader> =>
  readForwardHeader(Buffer.from(header), { hostname: HOST, traceSizeBytes: 0 });
const rebuild = (header: string | Buffer): Buffer => {
  const { head, tail } = rebuildAround({
    emailId: '019b0c1e-8f00-7abc-9def-0123456789ab',
    messageId: '<x@acme.test>',
    date: new Date('2026-01-02T03:04:05Z'),
    target: 'info@acme.test',
    domain: 'acme.test',
    recipient: 'info@acme.test',
    header: readOf(header),
    top: forwardFields('info@acme.test', 'ab'),
    received: Buffer.alloc(0),
    is8Bit: false,
  });
  return Buffer.concat([head, Buffer.from('From: a@b.test\r\n\r\nx'), tail]);
};

test('our own fields are taken apart with their folds', () => {
  const trace = Buffer.from(TRACE);
  const kept = traceWithoutReturnPath(trace).toString();
  assert.is(`Return-Path: <ada@author.test>\r\n${kept}`, TRACE);
  assert.match(receivedFields(trace).toString(), /^Received: [^]*\+0000\r\n$/);
  assert.is(resultsIn(trace), `${HOST}; spf=pass smtp.mailfrom=author.test`);
  assert.is(resultsIn(Buffer.alloc(0)), null);
  assert.is(traceWithoutReturnPath(Buffer.alloc(0)).length, 0);
});

test('who wrote it, and whether anybody can be answered', () => {
  for (const [from, author, address] of [
    ['Ada <ada@author.test>', 'Ada <ada@author.test>', 'ada@author.test'],
    ['"Ada, Countess" <ada@author.test>', '"Ada, Countess" <ada@author.test>', 'ada@author.test'],
    ['=?utf-8?Q?Ad=C3=A4?= <ada@author.test>', 'Adä <ada@author.test>', 'ada@author.test'],
    ['ada@author.test (Ada)', 'Ada <ada@author.test>', 'ada@author.test'],
    ['a@author.test, b@author.test', 'a@author.test', null],
    ['', '', null],
    ['nobody', 'nobody', null],
  ] as const) {
    const header = readOf(`From: ${from}\r\n\r\n`);
    assert.is(header.authorMailbox?.address ?? null, address, from);
    if (address !== null) assert.is(header.author, author);
  }
});

test('a subject, a name and a field that try to add one cannot', () => {
  const hostile = [
    'From: =?utf-8?Q?x=0D=0ABcc:_victim@x.test?= <a@author.test>',
    'Subject: =?utf-8?Q?x=0D=0ABcc:_victim@x.test=0D=0A=0D=0Abody?=',
    'Message-ID: <a@b>\r\n Bcc: x',
    'List-Id: <l>\r\n\tBcc: victim@x.test',
    'Received: x\rBcc: victim@x.test',
  ].join('\r\n');
  const { fields } = splitHeader(rebuild(`${hostile}\r\n\r\n`));
  assert.equal(findHeaders(fields, 'Bcc'), []);
  assert.is(findHeaders(fields, 'Subject').length, 1);
});

test('noise is read, and what is rebuilt of it is a message', () => {
  const names =
    'From|Subject|Message-ID|Received|Delivered-To|X-Mailstead-Loop|List-Id|Auto-Submitted|Precedence|To|| |From '.split(
      '|',
    );
  const words =
    '\r\n |\r|\n|\0|<a@b.test>|"|=?utf-8?B?w7w=?=|=?x?Q?=0D=0A?=|,|;|:|ü|漢| |\t|(|\\|<|>|@';
  const pieces = [...words.split('|'), '\ud800', 'a'.repeat(1_100), `by ${HOST}`];
  for (let i = 0; i < 3_000; i += 1) {
    const field = (): string => {
      const value = Array.from({ length: randomInt(12) }, () => pieces[randomInt(pieces.length)]);
      return `${names[randomInt(names.length)]}: ${value.join('')}\r\n`;
    };
    const header = Buffer.concat([
      Buffer.from(Array.from({ length: randomInt(1, 12) }, field).join('')),
      randomInt(4) === 0 ? randomBytes(50) : Buffer.alloc(0),
      Buffer.from('\r\n'),
    ]);
    const { authorMailbox, subject } = readOf(header);
    if (authorMailbox !== null) assert.ok(parseMailbox(formatMailbox(authorMailbox)).ok);
    assert.not.match(subject, /[\r\n\0]/);
    const raw = rebuild(header);
    const { fields, bodyStart } = splitHeader(raw);
    const text = raw.toString('latin1', 0, bodyStart);
    assert.not.match(text, /\r(?!\n)|(?<!\r)\n|\0/);
    for (const line of text.split('\r\n')) assert.ok(line.length <= 998, `${line.length} octets`);
    for (const name of ONCE) assert.is(findHeaders(fields, name).length, 1, name);
    assert.is(findHeaders(fields, 'Delivered-To')[0], 'info@acme.test');
    assert.match(findHeaders(fields, 'From')[0] ?? '', / <info@acme\.test>$/);
  }
});

test('domains that could be the author’s, in whatever is written for one', () => {
  const domainsOf = (from: string): readonly string[] =>
    readForwardHeader(Buffer.from(`${from}\r\n\r\nx\r\n`), {
      hostname: 'h.test',
      traceSizeBytes: 0,
    }).authorDomains;
  for (const [from, domains] of [
    ['From: Ann <ann@A.test>', ['a.test']],
    ['From: "boss@b.test \\" <" <ann@a.test>', ['a.test']],
    ['From: "boss <boss@b.test>', ['b.test']],
    ['From: ann@a.test, boss@b.test', ['a.test', 'b.test']],
    ['From: ann@a.test\r\nfrom : boss@b.test', ['a.test', 'b.test']],
    ['From: boss@ (here)\r\n b.test', ['b.test']],
    ['From: x@bücher.test', ['xn--bcher-kva.test']],
    ['Subject: x@a.test', []],
  ] as const) {
    assert.equal(domainsOf(from), domains, from);
  }
  // One that is never closed must not be looked for from each of its quotes: this would take minutes.
  for (const noise of ['"\\', '"', '\\"', '(', '("']) {
    assert.equal(domainsOf(`From: ${noise.repeat(120_000)}`), []);
  }
});

test('a header of a megabyte is read as far as it counts', () => {
  assert.is(readOf(`From: ${'a@b.test, '.repeat(100_000)}\r\n\r\n`).authorMailbox, null);
  assert.is(readOf(`Received: ${'by '.repeat(300_000)}\r\n\r\n`).ownHops, 1);
  // headerFieldsMax, and this time.
  assert.is(readOf(`Received: by ${HOST}\r\n`.repeat(30_000)).ownHops, 2_001);
});

test.run();
