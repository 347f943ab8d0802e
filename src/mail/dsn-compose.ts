/**
 * Tells the author of a message that it could not be delivered (RFC 3464 in the container of RFC 6522; RFC 6533 where
 * addresses or fields are not ASCII).
 *
 * In: who failed and why, and the header of the message that it is about. Out: bytes in 7-bit lines, but for a UTF-8
 * address in To. The same parts always give the same bytes. The body of the message is not returned: its author has it,
 * and who is written to in an author's name should not get it from us. It is sent with the null sender (RFC 5321 §6.1).
 */
import { Buffer } from 'node:buffer';
import { hash } from 'node:crypto';
import { formatMailbox, type Mailbox } from './address.ts';
import { foldHeader, isAscii, lineOctetsMax } from './header.ts';
import { base64Lines, quotedPrintable, surveyText } from './transfer-encoding.ts';

export interface DsnFailure {
  /** Where it failed. */
  readonly finalRecipient: string;
  /** As the author addressed it. */
  readonly originalRecipient: string;
  /** RFC 3463, of class 4 or 5; null: nobody said one. */
  readonly status: string | null;
  /** The host that said so; null: none was reached. */
  readonly remoteMta: string | null;
  /** What the host said, code first, or a sentence of ours. */
  readonly reason: string;
  /** Null: no attempt was made. */
  readonly lastAttemptAt: Date | null;
}

export interface DsnParts {
  /** Our host name. */
  readonly reportingMta: string;
  /** MAILER-DAEMON of the domain that reports. */
  readonly from: Mailbox;
  /** The envelope sender of the message that it is about. */
  readonly to: Mailbox;
  /** With angle brackets. */
  readonly messageId: string;
  readonly date: Date;
  /** Any text that is the same on every composition, such as an id. */
  readonly boundarySeed: string;
  /** When we took the message. */
  readonly arrivedAt: Date;
  /** The beginning of the message at least: of its header, FIELDS_BYTES_MAX are returned. */
  readonly original: Buffer;
  /** At least one; what is above FAILURES_MAX is left out. */
  readonly failures: readonly DsnFailure[];
}

export interface ComposedDsn {
  readonly raw: Buffer;
  readonly subject: string;
  /** What people read of it. */
  readonly text: string;
  /** Its own fields that are not shown elsewhere. */
  readonly headers: Readonly<Record<string, string>>;
  /** The author's address is in UTF-8 (RFC 6531). */
  readonly needsSmtpUtf8: boolean;
}

export const DSN_SUBJECT = 'Undelivered Mail Returned to Sender';
export const FAILURES_MAX = 100;
/** Of the returned header; whole fields. */
export const FIELDS_BYTES_MAX = 32 * 1024;
const REASON_CHARS_MAX = 900;
const NO_STATUS = '5.0.0';

interface Part {
  readonly type: string;
  readonly encoding: '7bit' | 'quoted-printable' | 'base64';
  readonly body: string | Buffer;
}

export function composeDsn(parts: DsnParts): ComposedDsn {
  const failures = parts.failures.slice(0, FAILURES_MAX);
  const needsSmtpUtf8 = parts.to.needsSmtpUtf8;
  const text = wordsFor(parts, failures);
  const answered = answeredId(parts.original);
  const headers: Record<string, string> = {
    'Auto-Submitted': 'auto-replied',
    // RFC 3834 §3.1.5.
    ...(answered === null ? {} : { 'In-Reply-To': answered, References: answered }),
  };
  const digest = hash('sha256', `dsn ${parts.boundarySeed}`, 'hex').slice(0, 24);
  // "=_" cannot stand in quoted-printable or base64, and 7-bit lines that begin so are encoded.
  const boundary = `=_${digest}`;
  const pieces: (string | Buffer)[] = [
    foldHeader('From', formatMailbox(parts.from)),
    foldHeader('To', formatMailbox({ name: null, address: parts.to.address })),
    foldHeader('Subject', DSN_SUBJECT),
    foldHeader('Message-ID', parts.messageId),
    foldHeader('Date', dateText(parts.date)),
    ...Object.entries(headers).map(([name, value]) => foldHeader(name, value)),
    'MIME-Version: 1.0\r\n',
    `Content-Type: multipart/report; report-type=delivery-status;\r\n boundary="${boundary}"\r\n\r\n`,
  ];
  for (const part of [
    textPart(text),
    statusPart(parts, failures, needsSmtpUtf8),
    fieldsPart(headerOf(parts.original)),
  ]) {
    pieces.push(
      `--${boundary}\r\nContent-Type: ${part.type}\r\n`,
      `Content-Transfer-Encoding: ${part.encoding}\r\n\r\n`,
      part.body,
      '\r\n',
    );
  }
  pieces.push(`--${boundary}--\r\n`);
  const raw = Buffer.concat(
    pieces.map((piece) => (typeof piece === 'string' ? Buffer.from(piece) : piece)),
  );
  return { raw, subject: DSN_SUBJECT, text, headers, needsSmtpUtf8 };
}

/** RFC 5322 §3.3: "GMT" is obsolete syntax. */
const dateText = (date: Date): string => date.toUTCString().replace('GMT', '+0000');

/** For people. */
function wordsFor(parts: DsnParts, failures: readonly DsnFailure[]): string {
  const names = [...new Set(failures.map(({ originalRecipient }) => originalRecipient))];
  const lines = [
    `This is the mail system at host ${parts.reportingMta}.`,
    '',
    `Your message to ${names.map((name) => `<${name}>`).join(', ')} arrived here`,
    `on ${dateText(parts.arrivedAt)} and was passed on, as its recipient wants it.`,
    'From there it could not be delivered to:',
    '',
  ];
  for (const failure of failures) {
    const said = failure.remoteMta === null ? '' : `the host ${failure.remoteMta} said: `;
    lines.push(`<${failure.finalRecipient}>: ${said}${reasonOf(failure)}`, '');
  }
  lines.push('Nothing more is tried. The header of your message is attached.');
  return `${lines.join('\r\n')}\r\n`;
}

function textPart(text: string): Part {
  const type = 'text/plain; charset=utf-8';
  const { isPlain } = surveyText(text);
  return isPlain
    ? { type, encoding: '7bit', body: text }
    : { type, encoding: 'quoted-printable', body: quotedPrintable(text, '') };
}

/** RFC 3464 §2; with UTF-8 in it RFC 6533 §4. */
function statusPart(parts: DsnParts, failures: readonly DsnFailure[], isUtf8: boolean): Part {
  const groups = [
    [
      foldHeader('Reporting-MTA', `dns; ${parts.reportingMta}`),
      foldHeader('Arrival-Date', dateText(parts.arrivedAt)),
    ],
    ...failures.map((failure) => [
      foldHeader('Original-Recipient', typed(failure.originalRecipient, isUtf8)),
      foldHeader('Final-Recipient', typed(failure.finalRecipient, isUtf8)),
      'Action: failed\r\n',
      `Status: ${failure.status ?? NO_STATUS}\r\n`,
      failure.remoteMta === null ? '' : foldHeader('Remote-MTA', `dns; ${failure.remoteMta}`),
      foldHeader('Diagnostic-Code', diagnosticOf(failure)),
      failure.lastAttemptAt === null
        ? ''
        : foldHeader('Last-Attempt-Date', dateText(failure.lastAttemptAt)),
    ]),
  ];
  const text = groups.map((fields) => fields.join('')).join('\r\n');
  if (isAscii(text.replaceAll('\r\n', ''))) {
    // RFC 3464 §2.1: 7bit, so that people without MIME can read it.
    return { type: 'message/delivery-status', encoding: '7bit', body: text };
  }
  const body = quotedPrintable(text, '');
  return { type: 'message/global-delivery-status', encoding: 'quoted-printable', body };
}

/** What `xtext` must not hold as it is (RFC 6533 §3). */
const NO_XTEXT = /[^\x21-\x2a\x2c-\x3c\x3e-\x5b\x5d-\x7e]/gu;

/** An ASCII report spells an international address out; one in UTF-8 has it as it is. */
function typed(address: string, isUtf8: boolean): string {
  if (isAscii(address)) return `rfc822; ${address}`;
  if (isUtf8) return `utf-8; ${address}`;
  const spelled = address.replace(
    NO_XTEXT,
    (character) => `\\x{${character.codePointAt(0)!.toString(16).toUpperCase()}}`,
  );
  return `utf-8; ${spelled}`;
}

/** RFC 3464 §2.3.6: what is not a reply has a type of its own. */
function diagnosticOf(failure: DsnFailure): string {
  const reason = reasonOf(failure).replace(/[^\x20-\x7e]/gu, '?');
  return /^[245]\d\d(?:[ -]|$)/.test(reason) ? `smtp; ${reason}` : `X-Mailstead; ${reason}`;
}

/** In one line. */
const reasonOf = ({ reason }: DsnFailure): string =>
  reason
    .replace(/[\s\p{Cc}]+/gu, ' ')
    .trim()
    .slice(0, REASON_CHARS_MAX)
    .toWellFormed()
    .trimEnd();

/** RFC 6522 §4, RFC 6533 §6. */
function fieldsPart(fields: Buffer): Part {
  const text = fields.toString('utf8');
  if (isSevenBit(text)) return { type: 'text/rfc822-headers', encoding: '7bit', body: text };
  const isUtf8 = Buffer.from(text).equals(fields);
  if (isUtf8 && !hasControls(text)) {
    const body = quotedPrintable(text, '');
    const isPlain = text.length === fields.length;
    const type = isPlain ? 'text/rfc822-headers' : 'message/global-headers';
    return { type, encoding: 'quoted-printable', body };
  }
  return { type: 'text/rfc822-headers', encoding: 'base64', body: base64Lines(fields, false) };
}

const hasControls = (text: string): boolean => /[^\P{Cc}\t]/u.test(text.replaceAll('\r\n', ''));

/** Goes through unchanged, and through the signing of it. */
const isSevenBit = (text: string): boolean =>
  text
    .split('\r\n')
    .every((line) => isAscii(line) && line.length <= lineOctetsMax && !/[ \t]$|^--=_/.test(line));

/** The fields at the beginning of the message, whole, as many as there is room for; each ends with CRLF. */
function headerOf(message: Buffer): Buffer {
  const end = message.indexOf('\r\n\r\n');
  const header = end === -1 ? message : message.subarray(0, end + 2);
  if (header.length <= FIELDS_BYTES_MAX) return header;
  const text = header.toString('latin1', 0, FIELDS_BYTES_MAX);
  const starts = [...text.matchAll(/\r\n(?=[^ \t])/g)];
  return header.subarray(0, (starts.at(-1)?.index ?? -2) + 2);
}

/** The Message-ID of the message, when it has one that can be repeated. */
function answeredId(message: Buffer): string | null {
  const text = headerOf(message).toString('latin1');
  return /^message-id:\s*(<[!-;=?A-~]{1,200}@[!-;=?A-~]{1,200}>)\s*$/im.exec(text)?.[1] ?? null;
}
