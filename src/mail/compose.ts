/**
 * From the parts of an email to the bytes of its message (RFC 5322, MIME RFC 2045–2047).
 *
 * In: mailboxes, subject, bodies, fields and attachments that the edge has checked. Out: bytes that every later step
 * can rely on: CRLF, 7-bit except for UTF-8 addresses (RFC 6532), body lines of at most 78, no white space at line
 * ends, no long run of blank lines, and a body with at least one line that is not blank (the DKIM canonicaliser in
 * use is wrong or slow on the rest). The same parts always give the same bytes. It refuses (throws) what the edge
 * should have refused: a header that could break out of its line.
 *
 * Written by hand because it is the hot path: see docs/architecture.md for the numbers against MailComposer, which
 * the test uses as its oracle.
 */
import assert from 'node:assert/strict';
import { Buffer } from 'node:buffer';
import { hash } from 'node:crypto';
import { buildHeaderValue } from 'nodemailer/lib/mime-funcs';
import { formatMailbox } from './address.ts';
import type { Mailbox } from './address.ts';
import { encodeText, foldHeader, headerSyntaxProblem } from './header.ts';
import {
  base64Lines,
  base64LinesSize,
  blankLinesMax,
  quotedPrintable,
  surveyText,
} from './transfer-encoding.ts';

export interface Attachment {
  /** null: it has none. */
  readonly filename: string | null;
  /** With parameters, such as `text/calendar; method=REQUEST`; nonsense becomes application/octet-stream. */
  readonly contentType: string;
  /** Makes it part of the HTML body (`cid:`), without angle brackets; null for an ordinary attachment. */
  readonly contentId: string | null;
  /** The octets, or how many there are: the caller of composeSegments writes them. */
  readonly content: Buffer | { readonly sizeBytes: number };
}

/** There is no Bcc: it belongs to the envelope and never reaches the wire (RFC 5322 §3.6.3). */
export interface MessageParts {
  readonly from: Mailbox;
  readonly to: readonly Mailbox[];
  readonly cc: readonly Mailbox[];
  readonly replyTo: readonly Mailbox[];
  readonly subject: string;
  /** null, or empty beside an HTML body: no plain text part. */
  readonly text: string | null;
  readonly html: string | null;
  /** In their order; ours (List-Unsubscribe, Feedback-ID) and the tenant's. An empty value leaves the field out. */
  readonly headers: readonly (readonly [name: string, value: string])[];
  /** With or without angle brackets. */
  readonly messageId: string;
  readonly date: Date;
  /** Any text that is the same on every composition of this email, such as its id. */
  readonly boundarySeed: string;
  readonly attachments?: readonly Attachment[];
}

export interface ComposedMessage {
  readonly raw: Buffer;
  /** A header holds a UTF-8 address: only hosts that offer SMTPUTF8 can take the message (RFC 6531). */
  readonly needsSmtpUtf8: boolean;
}

/** Stands for the base64 lines of an attachment (transfer-encoding.ts, base64Piece). */
export interface FileSegment {
  /** In the attachments of the parts. */
  readonly index: number;
  /** Of the lines. */
  readonly sizeBytes: number;
}

/** Where the base64 lines of an attachment are in the message, in bytes. */
export interface Place {
  readonly offset: number;
  readonly length: number;
}

export interface Composition {
  /** The message in its order. */
  readonly segments: readonly (Buffer | FileSegment)[];
  readonly sizeBytes: number;
  /** One for each attachment, in the order of the parts. */
  readonly places: readonly Place[];
  readonly needsSmtpUtf8: boolean;
}

/** The message. Throws an AssertionError on a header that was not checked, and on an attachment without octets. */
export function compose(parts: MessageParts): ComposedMessage {
  const { pieces, needsSmtpUtf8 } = lay(parts);
  return { raw: join(pieces.map((piece) => withOctets(piece, parts))), needsSmtpUtf8 };
}

/** The message with its attachments left out, so that it can be written without holding them. Throws as compose. */
export function composeSegments(parts: MessageParts): Composition {
  const { pieces, needsSmtpUtf8 } = lay(parts);
  const segments: (Buffer | FileSegment)[] = [];
  const places: Place[] = [];
  let sizeBytes = 0;
  let between: (string | Buffer)[] = [];
  const close = (): void => {
    const segment = join(between);
    between = [];
    if (segment.length > 0) segments.push(segment);
    sizeBytes += segment.length;
  };
  for (const piece of pieces) {
    if (typeof piece === 'string' || Buffer.isBuffer(piece)) {
      between.push(piece);
      continue;
    }
    close();
    segments.push(piece);
    places[piece.index] = { offset: sizeBytes, length: piece.sizeBytes };
    sizeBytes += piece.sizeBytes;
  }
  close();
  return { segments, sizeBytes, places, needsSmtpUtf8 };
}

function lay(parts: MessageParts): { pieces: readonly Piece[]; needsSmtpUtf8: boolean } {
  const body = arrange(parts);
  const pieces: Piece[] = [writeHeader(parts)];
  writeEntity(pieces, body, 'MIME-Version: 1.0\r\n');
  const authors = [parts.from, ...parts.to, ...parts.cc, ...parts.replyTo];
  return { pieces, needsSmtpUtf8: authors.some((mailbox) => mailbox.needsSmtpUtf8) };
}

function withOctets(piece: Piece, parts: MessageParts): string | Buffer {
  if (typeof piece === 'string' || Buffer.isBuffer(piece)) return piece;
  const content = parts.attachments?.[piece.index]?.content;
  assert(Buffer.isBuffer(content), 'compose: an attachment without its octets');
  return base64Lines(content, false);
}

const subjectWordMax = 60;
/** RFC 5322 §3.6: fields that may occur once. The last one given counts. */
const singleFields: ReadonlySet<string> = new Set([
  'sender',
  'reply-to',
  'in-reply-to',
  'references',
  'list-id',
  'list-unsubscribe',
  'list-unsubscribe-post',
  'auto-submitted',
  'feedback-id',
]);

/** ASCII, or the header, whose addresses may be UTF-8. */
type Piece = string | Buffer | FileSegment;

interface Leaf {
  readonly type: string;
  readonly encoding: '7bit' | 'quoted-printable' | 'base64';
  /** Further fields with their CRLF. */
  readonly fields: string;
  readonly content: Piece;
}

interface Branch {
  readonly subtype: string;
  readonly boundary: string;
  readonly children: readonly Entity[];
}

type Entity = Leaf | Branch;

function writeHeader(parts: MessageParts): string {
  assert(!Number.isNaN(parts.date.getTime()), 'compose: invalid date');
  const id = parts.messageId.replace(/^<|>$/g, '');
  assert(/^[!-;=?A-~]+@[!-;=?A-~]+$/.test(id), 'compose: invalid message id');

  let header = foldHeader('From', formatMailbox(parts.from));
  // RFC 5322 §3.6.3: a group without members says that there are recipients whom nobody shall see.
  header += parts.to.length > 0 ? mailboxField('To', parts.to) : 'To: undisclosed-recipients:;\r\n';
  header += mailboxField('Cc', parts.cc) + mailboxField('Reply-To', parts.replyTo);
  header += textField('Subject', parts.subject, subjectWordMax);
  header += `Message-ID: <${id}>\r\n`;
  // RFC 5322 §3.3: "GMT" is obsolete syntax.
  header += `Date: ${parts.date.toUTCString().replace('GMT', '+0000')}\r\n`;

  const fields = new Map<string, string>();
  for (const [index, [name, value]] of parts.headers.entries()) {
    const problem = headerSyntaxProblem(name, value);
    assert(problem === null, `compose: ${problem}`);
    const lower = name.toLowerCase();
    assert(!composedFields.has(lower) && !lower.startsWith('content-'), `compose: ${name} is ours`);
    if (lower === 'reply-to' && parts.replyTo.length > 0) continue;
    fields.set(
      singleFields.has(lower) ? lower : `${lower}:${index}`,
      textField(name, value, Infinity),
    );
  }
  for (const field of fields.values()) header += field;
  return header;
}

const composedFields: ReadonlySet<string> = new Set([
  'from',
  'to',
  'cc',
  'bcc',
  'subject',
  'date',
  'message-id',
  'mime-version',
]);

function mailboxField(name: string, mailboxes: readonly Mailbox[]): string {
  if (mailboxes.length === 0) return '';
  return foldHeader(name, mailboxes.map((mailbox) => formatMailbox(mailbox)).join(', '));
}

function textField(name: string, value: string, wordMax: number): string {
  const encoded = encodeText(value, { column: name.length + 2, wordMax });
  return encoded === '' ? '' : foldHeader(name, encoded);
}

/** mixed( alternative( text, related( html, inline… ) ), attachment… ), without the levels that have one child. */
function arrange(parts: MessageParts): Entity {
  const attachments = parts.attachments ?? [];
  const { html } = parts;
  const text = parts.text === '' && html !== null ? null : parts.text;
  const inline = html === null ? [] : attachments.filter((part) => part.contentId !== null);
  const apart = attachments.filter((part) => !inline.includes(part));
  const alone = attachments.length === 0 && (text === null || html === null);
  const leaf = (part: Attachment): Leaf => fileLeaf(part, attachments.indexOf(part));

  const bodies: Entity[] = [];
  if (text !== null || html === null) bodies.push(textLeaf('plain', text ?? '', alone));
  if (html !== null) {
    const page = textLeaf('html', html, alone);
    bodies.push(wrap('related', [page, ...inline.map(leaf)], parts));
  }
  const body = wrap('alternative', bodies, parts);
  return wrap('mixed', [body, ...apart.map(leaf)], parts);
}

function wrap(subtype: string, children: readonly Entity[], parts: MessageParts): Entity {
  const only = children.length === 1 ? children[0] : undefined;
  if (only !== undefined) return only;
  // "=_" cannot occur in quoted-printable or base64, and 7-bit text with it is encoded (RFC 2045 §6.7).
  const digest = hash('sha256', `${subtype} ${parts.boundarySeed}`, 'hex').slice(0, 24);
  return { subtype, boundary: `=_${digest}`, children };
}

function writeEntity(out: Piece[], entity: Entity, fields = ''): void {
  if ('boundary' in entity) {
    const { subtype, boundary, children } = entity;
    const type = subtype === 'related' ? 'related; type="text/html"' : subtype;
    out.push(`${fields}Content-Type: multipart/${type};\r\n boundary="${boundary}"\r\n\r\n`);
    for (const child of children) {
      out.push(`--${boundary}\r\n`);
      writeEntity(out, child);
      out.push('\r\n');
    }
    out.push(`--${boundary}--\r\n`);
    return;
  }
  out.push(
    `${fields}${foldHeader('Content-Type', entity.type)}${entity.fields}` +
      `Content-Transfer-Encoding: ${entity.encoding}\r\n\r\n`,
    entity.content,
  );
}

/**
 * `alone`: the body of the whole message, which must end its last line and must not be blank. A lone surrogate
 * becomes U+FFFD on the way to UTF-8.
 */
function textLeaf(subtype: 'plain' | 'html', text: string, alone: boolean): Leaf {
  const content = text.replace(/\r\n|\r|\n/g, '\r\n');
  const survey = surveyText(content);
  const type = `text/${subtype}; charset=utf-8`;
  const ending = !alone || content.endsWith('\r\n') ? '' : '\r\n';
  if (survey.blankRunMax > blankLinesMax || survey.isMostlyForeign) {
    return {
      type,
      fields: '',
      encoding: 'base64',
      content: base64Lines(Buffer.from(content), alone),
    };
  }
  if (survey.isPlain && (survey.isVisible || !alone)) {
    return { type, fields: '', encoding: '7bit', content: content + ending };
  }
  // A blank body gets a soft line break (RFC 2045 §6.7 (5)): it decodes to nothing and is not a blank line.
  const end = survey.isVisible || !alone ? ending : '=\r\n';
  return { type, fields: '', encoding: 'quoted-printable', content: quotedPrintable(content, end) };
}

function fileLeaf(part: Attachment, index: number): Leaf {
  const type = checkedType(part);
  const params = part.filename === null ? {} : { filename: part.filename.toWellFormed() };
  const kind = part.contentId === null ? 'attachment' : 'inline';
  let fields = foldHeader('Content-Disposition', buildHeaderValue({ value: kind, params }));
  if (part.contentId !== null) {
    const id = part.contentId.replace(/^<|>$/g, '');
    assert(/^[!-;=?-~]+$/.test(id), 'compose: invalid content id');
    fields += foldHeader('Content-ID', `<${id}>`);
  }
  const octets = Buffer.isBuffer(part.content) ? part.content.length : part.content.sizeBytes;
  const content = { index, sizeBytes: base64LinesSize(octets) };
  return { type, fields, encoding: 'base64', content };
}

/** RFC 2045 §5.1 with lengths: names of RFC 6838 §4.2, up to four parameters. */
const contentType =
  /^[\w!#$&^.+-]{1,127}\/[\w!#$&^.+-]{1,127}(?: ?; ?[\w-]{1,40}=(?:[\w!#$&^.+:-]{1,80}|"[ !#-[\]-~]{1,80}")){0,4}$/;

/** Whether the text can stand in a Content-Type field: `type/subtype`, with parameters or without. */
export const isContentType = (text: string): boolean => contentType.test(text);

/**
 * RFC 2046 §5.1 and 5.2.1: multipart and message must not be base64, and as 7bit lines they would become a part of
 * this message (its boundaries, its line lengths). So they travel as plain files; `.eml` opens all the same.
 */
function checkedType({ contentType: given }: Attachment): string {
  const type = given.trim();
  return isContentType(type) && !/^(?:multipart|message)\//i.test(type)
    ? type
    : 'application/octet-stream';
}

/** One buffer. Strings are ASCII but for the header, which may hold UTF-8 addresses. */
function join(pieces: readonly (string | Buffer)[]): Buffer {
  let size = 0;
  for (const piece of pieces) {
    size += typeof piece === 'string' ? Buffer.byteLength(piece, 'utf8') : piece.length;
  }
  const raw = Buffer.allocUnsafe(size);
  let to = 0;
  for (const piece of pieces) {
    to += typeof piece === 'string' ? raw.write(piece, to, 'utf8') : piece.copy(raw, to);
  }
  assert.equal(to, size);
  return raw;
}
