/**
 * The header of a message that is to be forwarded: what deciding about it needs, and what is put on top of it.
 *
 * In: the beginning of the stored bytes, our trace fields first. Out: who wrote it, which ways it went, what kind of mail
 * it is; fields as bytes. It never fails: what cannot be read is not there.
 */
import { Buffer, isUtf8 } from 'node:buffer';
import { normalizedAddress, parseDomain, parseMailbox, type Mailbox } from './address.ts';
import {
  findHeaders,
  foldHeader,
  headerOctetsMax,
  splitHeader,
  type HeaderField,
} from './header.ts';
import { LOOP_HEADER } from './loop-token.ts';
import { mailboxesOf, shown } from './submitted-header.ts';

/** How much of a stored message is read for its header. */
export const FORWARD_HEAD_MAX = headerOctetsMax;

export interface ForwardHeader {
  /** As people read it; empty when there is none. */
  readonly author: string;
  /** Null: there is none that could be answered. */
  readonly authorMailbox: Mailbox | null;
  /** In A-labels: every domain that a reader of From fields, however it reads them, could take for the author's. */
  readonly authorDomains: readonly string[];
  /** Decoded, one line. */
  readonly subject: string;
  /** With angle brackets; null when there is none that can be used. */
  readonly messageId: string | null;
  /** Normalized. */
  readonly deliveredTo: readonly string[];
  /** What the loop fields hold, whoever wrote them. */
  readonly loopTokens: readonly string[];
  /** How often this host took it in, this time included. */
  readonly ownHops: number;
  /** RFC 3834 §5: a program wrote it, as an answer. */
  readonly isAutoReply: boolean;
  /** From a program, a list or to many: nobody waits to hear what became of it. */
  readonly isAutomatic: boolean;
  /** UTF-8 as it is, so the next host must offer SMTPUTF8 (RFC 6532). */
  readonly hasUtf8: boolean;
  readonly fields: readonly HeaderField[];
}

const SUBJECT_MAX = 2_000;
const ADDRESS_FIELD_MAX = 8 * 1024;
const MESSAGE_ID = /^<[!-;=?A-~]+@[!-;=?A-~]+>$/;
const MESSAGE_ID_MAX = 500;
const AUTHOR_DOMAINS_MAX = 1_000;

/** `head`: at least the header; `hostname`: as our Received fields say it. */
export function readForwardHeader(
  head: Buffer,
  { hostname, traceSizeBytes }: { readonly hostname: string; readonly traceSizeBytes: number },
): ForwardHeader {
  const original = head.subarray(traceSizeBytes);
  const { fields, bodyStart } = splitHeader(original);
  const all = (name: string): readonly string[] => findHeaders(fields, name);
  const first = (name: string): string => all(name)[0] ?? '';
  const from = first('From').slice(0, ADDRESS_FIELD_MAX);
  const [author = '', ...more] = mailboxesOf(from);
  const whole = parseMailbox(author);
  // A name that cannot be read is no reason not to know the address.
  const parsed = whole.ok ? whole : parseMailbox(/<([^<>]*)>$/.exec(author)?.[1] ?? '');
  const messageId = first('Message-ID');
  const automatic = first('Auto-Submitted').toLowerCase();
  const byUs = new RegExp(`\\bby ${hostname.replaceAll('.', '\\.')}(?:[\\s;(]|$)`, 'i');
  const bytes = original.subarray(0, bodyStart);
  return {
    author,
    authorMailbox: parsed.ok && more.length === 0 ? parsed.mailbox : null,
    authorDomains: domainsIn(all('From')),
    subject: shown(first('Subject'), SUBJECT_MAX),
    messageId: MESSAGE_ID.test(messageId) && messageId.length <= MESSAGE_ID_MAX ? messageId : null,
    deliveredTo: all('Delivered-To').map((value) => normalizedAddress(value.replace(/^<|>$/g, ''))),
    loopTokens: all(LOOP_HEADER),
    ownHops: all('Received').filter((value) => byUs.test(value)).length + 1,
    isAutoReply: /^auto-(?:replied|notified)\b/.test(automatic),
    isAutomatic:
      (automatic !== '' && !/^no\b/.test(automatic)) ||
      all('List-Id').length > 0 ||
      /^(?:bulk|list|junk)\b/i.test(first('Precedence')),
    hasUtf8: bytes.some((octet) => octet > 0x7f) && isUtf8(bytes),
    fields,
  };
}

/** Outside of names in quotes; with and without what may stand between the parts of an address (RFC 5322 §4.4). */
function domainsIn(values: readonly string[]): readonly string[] {
  const texts = values.flatMap((value) => {
    // To the end where a quote is not closed, and then it is none: each character is looked at once.
    const unquoted = value.replace(/"(?:[^"\\]|\\.)*("|\\?$)/gs, (text, end) =>
      end === '' ? text : '',
    );
    const bare = unquoted.replace(/\([^()]*\)/g, '').replace(/[ \t]+/g, '');
    return [unquoted, bare];
  });
  const names = texts.flatMap((text) => [...text.matchAll(/@([\p{L}\p{M}\p{N}._-]+)/gu)]);
  const domains = names.slice(0, AUTHOR_DOMAINS_MAX).flatMap(([, name = '']) => {
    const parsed = parseDomain(name.replace(/\.$/, ''));
    return parsed.ok ? [parsed.domain] : [];
  });
  return [...new Set(domains)];
}

/** RFC 9228, and our own field, for the top of a forwarded message. */
export const forwardFields = (target: string, token: string): string =>
  `Delivered-To: ${target}\r\n${LOOP_HEADER}: ${token}\r\n`;

/** Our own trace fields without the return path, which only final delivery writes (RFC 5321 §4.4). */
export function traceWithoutReturnPath(trace: Buffer): Buffer {
  return Buffer.concat(
    fieldsOf(trace).filter(
      (field) => !/^return-path[ \t]*:/i.test(field.toString('latin1', 0, 40)),
    ),
  );
}

/** Of our own trace fields, those that say that it came through here. */
export function receivedFields(trace: Buffer): Buffer {
  return Buffer.concat(
    fieldsOf(trace).filter((field) => /^received[ \t]*:/i.test(field.toString('latin1', 0, 40))),
  );
}

/** What our Authentication-Results field says, on one line, the name of the host first; null: there is none. */
export function resultsIn(trace: Buffer): string | null {
  const [value] = findHeaders(splitHeader(trace).fields, 'Authentication-Results');
  return value === undefined ? null : value.replace(/[ \t]+/g, ' ');
}

/** Where it has been, for a message that takes the place of it; in the order of the original. */
export function wayFields(fields: readonly HeaderField[]): string {
  const way = new Set(['received', 'delivered-to', LOOP_HEADER.toLowerCase()]);
  return fields
    .filter(({ name, value }) => way.has(name.toLowerCase()) && isPlainValue(value))
    .map(({ name, value }) => foldHeader(name, value))
    .join('');
}

// What a line can hold without encoding; garbage in a trace field is not handed on.
const isPlainValue = (value: string): boolean => /^[\t\x20-\x7e]{1,900}$/.test(value);

/** The fields as they are, folds and line ends included. */
function fieldsOf(bytes: Buffer): readonly Buffer[] {
  const fields: Buffer[] = [];
  let start = 0;
  while (start < bytes.length) {
    let end = bytes.indexOf('\n', start);
    while (end !== -1 && (bytes[end + 1] === 0x20 || bytes[end + 1] === 0x09)) {
      end = bytes.indexOf('\n', end + 1);
    }
    const next = end === -1 ? bytes.length : end + 1;
    fields.push(bytes.subarray(start, next));
    start = next;
  }
  return fields;
}
