/**
 * A forwarded message written anew around the original, for mail whose author's domain would have the original refused
 * (DMARC): the route is its author, the original is attached as it came.
 *
 * In: what is known of the original, and who forwards it. Out: the bytes before and behind the original's. All of it is
 * 7-bit; the original is attached as 7bit or 8bit, the only encodings of a message (RFC 2046 §5.2.1).
 */
import { Buffer } from 'node:buffer';
import { formatMailbox } from './address.ts';
import { wayFields, type ForwardHeader } from './forward-header.ts';
import { encodeText, findHeaders, foldHeader } from './header.ts';
import { quotedPrintable } from './transfer-encoding.ts';

/** What a forwarded message is, whichever way it is made. */
export interface ForwardNames {
  readonly emailId: string;
  /** With angle brackets. */
  readonly messageId: string;
  readonly date: Date;
  /** The route's target address, and its domain. */
  readonly target: string;
  readonly domain: string;
  /** The envelope recipient that the message came to. */
  readonly recipient: string;
  readonly header: ForwardHeader;
}

export interface RebuiltInput extends ForwardNames {
  /** Our fields for the top. */
  readonly top: string;
  /** Our Received fields. */
  readonly received: Buffer;
  /** The original has octets above 127 anywhere. */
  readonly is8Bit: boolean;
}

export interface Rebuilt {
  readonly head: Buffer;
  readonly tail: Buffer;
}

/** Of the original, when they can be written as they are: what a mail program sorts and answers by. */
const KEPT = ['Auto-Submitted', 'Precedence', 'List-Id', 'Importance', 'X-Priority'];
const KEPT_CHARS_MAX = 500;

/** The route's name for mail of this author: `Ada via example.com`. */
export function nameVia({ authorMailbox, author }: ForwardHeader, domain: string): string {
  // An address in a name is what filters take for a disguise.
  const name =
    authorMailbox?.name ?? authorMailbox?.local ?? (author.split('@', 1)[0] || 'Somebody');
  return `${name.replace(/@.*$/s, '').trim() || 'Somebody'} via ${domain}`;
}

export function rebuildAround(input: RebuiltInput): Rebuilt {
  const { header, target, domain, emailId } = input;
  const boundary = `=_${emailId.replaceAll('-', '')}`;
  const kept = KEPT.flatMap((name) => {
    const [value = ''] = findHeaders(header.fields, name);
    return value !== '' && value.length <= KEPT_CHARS_MAX && /^[\x20-\x7e]+$/.test(value)
      ? [foldHeader(name, value)]
      : [];
  });
  const { authorMailbox, messageId } = header;
  const from = { name: nameVia(header, domain), address: target };
  const head = [
    input.top,
    input.received.toString('latin1'),
    wayFields(header.fields),
    foldHeader('From', formatMailbox(from)),
    ...(authorMailbox === null ? [] : [foldHeader('Reply-To', formatMailbox(authorMailbox))]),
    foldHeader('To', input.recipient),
    foldHeader('Subject', encodeText(header.subject, { column: 9, wordMax: 60 })),
    `Date: ${input.date.toUTCString().replace('GMT', '+0000')}\r\n`,
    `Message-ID: ${input.messageId}\r\n`,
    ...(messageId === null ? [] : [foldHeader('References', messageId)]),
    ...kept,
    'MIME-Version: 1.0\r\n',
    `Content-Type: multipart/mixed; boundary="${boundary}"\r\n`,
    '\r\n',
    `--${boundary}\r\n`,
    'Content-Type: text/plain; charset=utf-8\r\n',
    'Content-Transfer-Encoding: quoted-printable\r\n',
    '\r\n',
    quotedPrintable(noteOf(input), '').toString('latin1'),
    `\r\n--${boundary}\r\n`,
    // RFC 6532 §3.7 names the second, for a header in UTF-8.
    `Content-Type: ${header.hasUtf8 ? 'message/global' : 'message/rfc822'}\r\n`,
    'Content-Disposition: attachment; filename="original.eml"\r\n',
    `Content-Transfer-Encoding: ${input.is8Bit ? '8bit' : '7bit'}\r\n`,
    '\r\n',
  ];
  // Addresses alone may be UTF-8 (RFC 6532); what was read as latin1 is ASCII.
  return {
    head: Buffer.from(head.join('')),
    tail: Buffer.from(`\r\n--${boundary}--\r\n`),
  };
}

const noteOf = ({ header, recipient, domain }: RebuiltInput): string =>
  [
    `A message for ${recipient} is attached as it came.`,
    '',
    `From: ${header.author || 'nobody that could be read'}`,
    `Subject: ${header.subject}`,
    '',
    `It is not sent on in its author's name, because the author's domain has such copies refused (DMARC). An answer to this message goes to its author, not to ${domain}.`,
    '',
  ].join('\r\n');
