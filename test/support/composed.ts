// Composed messages for tests: one to vary, mailparser as the reader, and what every message must be.
import type { Buffer } from 'node:buffer';
import { createRequire } from 'node:module';
import * as assert from 'uvu/assert';
import { parseMailbox } from '../../src/mail/address.ts';
import type { Mailbox } from '../../src/mail/address.ts';
import { compose } from '../../src/mail/compose.ts';
import type { MessageParts } from '../../src/mail/compose.ts';
import { findHeaders, splitHeader } from '../../src/mail/header.ts';

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
/** The message as a mail reader sees it. */
export const read = (raw: Buffer): Promise<Parsed> =>
  simpleParser(raw, {
    skipTextToHtml: true,
    skipHtmlToText: true,
    skipTextLinks: true,
    skipImageLinks: true,
    maxHtmlLengthToParse: Infinity,
  });

export function mailbox(text: string): Mailbox {
  const parsed = parseMailbox(text);
  if (!parsed.ok) throw new Error(`${text} ${parsed.problem}`);
  return parsed.mailbox;
}

export const base: MessageParts = {
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
export const composed = (parts: Partial<MessageParts>): Buffer =>
  compose({ ...base, ...parts }).raw;
/** Empty when there is none. */
export const header = (raw: Buffer, name: string): string =>
  findHeaders(splitHeader(raw).fields, name)[0] ?? '';
export const bodyOf = (raw: Buffer): string => raw.toString('latin1', splitHeader(raw).bodyStart);

/** Fields that what we compose has one of. */
export const ONCE = [
  'From',
  'To',
  'Subject',
  'Date',
  'Message-ID',
  'MIME-Version',
  'Content-Type',
] as const;

/** What dkim, the SMTP client and every relay on the way are promised. */
export function assertWellFormed(raw: Buffer): void {
  const { bodyStart, fields } = splitHeader(raw);
  const text = raw.toString('latin1');
  assert.not.match(text, /[^\t\r\n\x20-\x7e]/, '7-bit, no control characters');
  assert.not.match(text, /\r(?!\n)|(?<!\r)\n/, 'CRLF only');
  assert.ok(text.endsWith('\r\n'), 'ends its last line');
  assert.not.match(text, /[ \t]\r\n/, 'no white space at a line end');
  for (const line of text.slice(0, bodyStart).split('\r\n')) assert.ok(line.length <= 998);
  // RFC 5322 §2.1.1 for text as it is, RFC 2045 §6.7 and §6.8 for what is encoded.
  const lineMax = /^Content-Transfer-Encoding: 7bit\r$/m.test(text) ? 78 : 76;
  for (const line of text.slice(bodyStart).split('\r\n')) {
    assert.ok(line.length <= lineMax, `body line of ${line.length}`);
    assert.ok(!line.startsWith('From ') && !line.startsWith('.'), line);
  }
  assert.match(text.slice(bodyStart), /\S/, 'a body that is not blank');
  assert.not.match(text.slice(bodyStart), /(?:\r\n){103}/, 'no long run of blank lines');
  for (const name of ONCE) {
    const count = findHeaders(fields, name).length;
    assert.ok(count === 1 || (name === 'Subject' && count === 0), `${count} of ${name}`);
  }
  assert.equal(findHeaders(fields, 'Bcc'), []);
}

export const withoutLastBreak = (text: string): string =>
  text.replace(/\r\n|\r|\n/g, '\n').replace(/\n$/, '');
