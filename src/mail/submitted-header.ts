/**
 * The header of a message that a program hands in over SMTP: who wrote it, and the header that goes out.
 *
 * In: the fields as they were written. Out: the author, what the API shows, and the fields to send. The author's
 * field is written anew, so that no two programs can read it differently. Left out: what belongs to the envelope
 * or to us. It refuses (UnfitMessage) no author or several, a field that may occur once and does not, a loop.
 */
import { Buffer, isUtf8 } from 'node:buffer';
import libmime from 'libmime';
import addressparser from 'nodemailer/lib/addressparser';
import { formatMailbox, parseMailbox, type Mailbox } from './address.ts';
import { foldHeader, isAscii, isOwnedHeader } from './header.ts';
import { UnfitMessage, valueOf, type RawField } from './mime-tree.ts';
import { ENCODED_FIELDS, plainField } from './seven-bit.ts';

export interface SubmittedHeader {
  readonly from: Mailbox;
  /** As people read them: `Name <a@b.c>`. */
  readonly to: readonly string[];
  readonly cc: readonly string[];
  readonly replyTo: readonly string[];
  /** Decoded, one line. */
  readonly subject: string;
  /** With angle brackets; null: there is none that can be used. */
  readonly messageId: string | null;
  readonly idempotencyKey: string | null;
  /** What the program calls itself. */
  readonly mailer: string | null;
  /** Custom fields by name, decoded; null when there is none. */
  readonly custom: Readonly<Record<string, string>> | null;
  /** To send, but for the fields of the body and for what `missing` names. */
  readonly fields: readonly Buffer[];
  readonly missing: ReadonlySet<'date' | 'message-id' | 'mime-version' | 'to'>;
  /** An address has characters outside ASCII before its @ (RFC 6531). */
  readonly needsSmtpUtf8: boolean;
}

/** RFC 5322 §3.6: these occur once at most. */
const SINGLE = [
  'from',
  'sender',
  'reply-to',
  'to',
  'cc',
  'message-id',
  'in-reply-to',
  'references',
  'subject',
  'date',
  'mime-version',
  'content-type',
  'content-transfer-encoding',
  'resend-idempotency-key',
];
/** They belong to the envelope, or to us (mail/header.ts). */
const LEFT_OUT = new Set([
  'bcc',
  'resent-bcc',
  'return-path',
  'feedback-id',
  'resend-idempotency-key',
]);
const ADDRESS_FIELDS = new Set(['sender', 'reply-to', 'to', 'cc']);
/** RFC 5321 §6.3: a message with more of them goes round in a circle. */
const RECEIVED_MAX = 50;
const SHOWN_ADDRESSES_MAX = 1_000;
const SHOWN_FIELDS_MAX = 100;
const SHOWN_CHARACTERS_MAX = 64 * 1024;
const SUBJECT_CHARACTERS_MAX = 2_000;
const MAILER_CHARACTERS_MAX = 200;
const MESSAGE_ID = /^<[!-;=?A-~]+@[!-;=?A-~]+>$/;
const MESSAGE_ID_MAX = 500;

/** `allowsUtf8`: the client said SMTPUTF8. Throws an UnfitMessage. */
export function readSubmittedHeader(
  fields: readonly RawField[],
  { allowsUtf8 }: { readonly allowsUtf8: boolean },
): SubmittedHeader {
  const first = (lower: string): string => {
    const field = fields.find((one) => one.lower === lower);
    return field === undefined ? '' : valueOf(field);
  };
  const count = (lower: string): number => fields.filter((one) => one.lower === lower).length;
  for (const lower of SINGLE) {
    if (count(lower) < 2) continue;
    const { name } = fields.find((one) => one.lower === lower)!;
    throw new UnfitMessage(
      '5.6.0',
      `The header ${name} occurs ${count(lower)} times; it may occur once`,
    );
  }
  if (count('received') > RECEIVED_MAX) {
    throw new UnfitMessage(
      '5.4.6',
      'Too many Received fields: this message goes round in a circle',
    );
  }
  const from = readAuthor(fields.find(({ lower }) => lower === 'from') ?? null);
  const messageId = first('message-id');
  const usableId = MESSAGE_ID.test(messageId) && messageId.length <= MESSAGE_ID_MAX;
  const usableDate = !Number.isNaN(Date.parse(first('date')));

  const sent: Buffer[] = [];
  let needsSmtpUtf8 = from.needsSmtpUtf8;
  let namesRecipients = false;
  for (const field of fields) {
    const { lower } = field;
    if (LEFT_OUT.has(lower) || ENCODED_FIELDS.has(lower)) continue;
    if (lower === 'message-id' && !usableId) continue;
    if (lower === 'date' && !usableDate) continue;
    if (lower === 'dkim-signature' && isSignatureOf(field, from.domain)) continue;
    if (lower === 'from') sent.push(Buffer.from(foldHeader('From', formatMailbox(from))));
    else if (ADDRESS_FIELDS.has(lower)) {
      const rewritten = addressField(field);
      if (rewritten === null) continue;
      if (lower === 'to' || lower === 'cc') namesRecipients = true;
      needsSmtpUtf8 ||= rewritten.needsSmtpUtf8;
      sent.push(rewritten.field);
    } else sent.push(plainField(field));
  }
  if (needsSmtpUtf8 && !allowsUtf8) {
    throw new UnfitMessage(
      '5.6.7',
      'The header has an address with characters outside ASCII: announce SMTPUTF8 at MAIL FROM',
    );
  }
  const missing = new Set<'date' | 'message-id' | 'mime-version' | 'to'>();
  if (!usableDate) missing.add('date');
  if (!usableId) missing.add('message-id');
  if (count('mime-version') === 0) missing.add('mime-version');
  if (!namesRecipients) missing.add('to');
  const key = fields.find(({ lower }) => lower === 'resend-idempotency-key');
  // Keys that differ must not become the same by U+FFFD.
  if (key !== undefined) assureUtf8(key);
  const mailer = shown(first('x-mailer') || first('user-agent'), MAILER_CHARACTERS_MAX);
  return {
    from,
    to: mailboxesOf(first('to')),
    cc: mailboxesOf(first('cc')),
    replyTo: mailboxesOf(first('reply-to')),
    subject: shown(first('subject'), SUBJECT_CHARACTERS_MAX),
    messageId: usableId ? messageId : null,
    idempotencyKey: key === undefined ? null : valueOf(key),
    mailer: mailer === '' ? null : mailer,
    custom: customOf(fields),
    fields: sent,
    missing,
    needsSmtpUtf8,
  };
}

function assureUtf8({ name, raw }: RawField): void {
  if (isUtf8(raw)) return;
  throw new UnfitMessage('5.6.7', `The header ${name} has 8-bit text that is not UTF-8`);
}

/** Exactly one mailbox; also in the old form `a@b.c (Name)`. */
function readAuthor(field: RawField | null): Mailbox {
  const value = field === null ? '' : valueOf(field);
  if (field === null || value === '') {
    throw new UnfitMessage('5.6.0', 'The message has no From header: who writes it?');
  }
  assureUtf8(field);
  const old = /^([^\s()<>",;:]+@[^\s()<>",;:]+)[ \t]+\(([^()\\]*)\)$/.exec(value);
  const parsed = parseMailbox(old === null ? value : old[1]!);
  if (!parsed.ok) {
    throw new UnfitMessage(
      '5.6.0',
      `The From header must hold one address; this one ${parsed.problem}`,
    );
  }
  const { mailbox } = parsed;
  const written = old === null ? mailbox.name : old[2]!;
  const name = written === null ? '' : shown(written, SUBJECT_CHARACTERS_MAX);
  return {
    ...mailbox,
    name: name === '' ? null : name,
    given: name === '' ? mailbox.address : displayed(name, mailbox.address),
  };
}

/**
 * Names are encoded where they must be; an address that mail cannot reach stays as it is written. Null: nothing is left
 * of it, and an address field may not be empty (RFC 5322 §3.6.3).
 */
function addressField(
  field: RawField,
): { readonly field: Buffer; readonly needsSmtpUtf8: boolean } | null {
  const value = valueOf(field);
  if (value === '') return null;
  if (isAscii(value)) return { field: plainField(field), needsSmtpUtf8: false };
  const parsed = listOf(value).map(({ name, address }) =>
    parseMailbox(name === '' ? address : displayed(name, address)),
  );
  const known = parsed.flatMap((one) => (one.ok ? [one.mailbox] : []));
  if (known.length < parsed.length || value.includes('\uFFFD')) {
    throw new UnfitMessage(
      '5.6.7',
      `The header ${field.name} has characters outside ASCII that cannot be encoded`,
    );
  }
  if (known.length === 0) return null;
  const line = foldHeader(field.name, known.map((mailbox) => formatMailbox(mailbox)).join(', '));
  return { field: Buffer.from(line), needsSmtpUtf8: known.some((one) => one.needsSmtpUtf8) };
}

function listOf(value: string): readonly { readonly name: string; readonly address: string }[] {
  return addressparser(value, { flatten: true })
    .filter(({ address }) => address !== '')
    .map(({ name, address }) => ({ name: shown(name, SUBJECT_CHARACTERS_MAX), address }));
}

/** The addresses of a field as people read them. */
export function mailboxesOf(value: string): readonly string[] {
  return listOf(value)
    .slice(0, SHOWN_ADDRESSES_MAX)
    .map(({ name, address }) => storable(name === '' ? address : displayed(name, address)));
}

/** Readable, and read back by parseMailbox. */
function displayed(name: string, address: string): string {
  const needsQuotes = /["(),:;<>@[\\\]]/.test(name);
  return `${needsQuotes ? `"${name.replace(/["\\]/g, '\\$&')}"` : name} <${address}>`;
}

function customOf(fields: readonly RawField[]): Readonly<Record<string, string>> | null {
  const custom = new Map<string, string>();
  let characters = 0;
  for (const field of fields) {
    const { lower, name } = field;
    const isOurs = isOwnedHeader(name) || LEFT_OUT.has(lower) || lower === 'reply-to';
    if (isOurs || custom.has(name) || custom.size >= SHOWN_FIELDS_MAX) continue;
    const value = shown(valueOf(field), SHOWN_CHARACTERS_MAX);
    characters += name.length + value.length;
    if (characters > SHOWN_CHARACTERS_MAX) break;
    custom.set(name, value);
  }
  return custom.size === 0 ? null : Object.fromEntries(custom);
}

/** Ours takes its place: the same domain signs again when the message leaves. */
function isSignatureOf(field: RawField, domain: string): boolean {
  const signer = /(?:^|;)\s*d\s*=\s*([^;\s]+)/i.exec(valueOf(field))?.[1]?.toLowerCase();
  return signer === domain || domain.endsWith(`.${signer ?? ''}`);
}

/** Encoded words decoded, without control characters. */
export function shown(text: string, charactersMax: number): string {
  let decoded: string;
  try {
    decoded = libmime.decodeWords(text.slice(0, SHOWN_CHARACTERS_MAX));
  } catch {
    decoded = text;
  }
  return storable(
    decoded
      .replace(/\p{Cc}+/gu, ' ')
      .trim()
      .slice(0, charactersMax),
  );
}

/** Text that Postgres can hold: NUL, and half a surrogate pair, it cannot. */
const storable = (text: string): string => text.replaceAll('\0', '\uFFFD').toWellFormed();
