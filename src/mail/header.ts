/**
 * The header of a message (RFC 5322 §2.2): which field names are ours, what a custom field may hold, how text
 * becomes printable ASCII (RFC 2047), how a line is folded, and how a received header is taken apart.
 *
 * In: names and values as JavaScript strings, or the bytes of a message. Out: ASCII lines with CRLF, or fields.
 * It refuses control characters, names outside RFC 5322 §3.6.8, and words too long to fold. Reading is tolerant,
 * writing is strict.
 */
import { Buffer } from 'node:buffer';

/** RFC 5322 §2.1.1: a line should not be longer; RFC 2047 §2 makes 76 a must for encoded words. */
export const lineCharsMax = 76;
/** RFC 5322 §2.1.1: a line must not be longer, without its CRLF. */
export const lineOctetsMax = 998;
export const headerNameCharsMax = 76;
export const headerValueOctetsMax = 32_768;
/** How much of a received message is searched for its header's end. */
export const headerOctetsMax = 1_048_576;
export const headerFieldsMax = 2_000;

/** Longer runs of white space become one space: they carry nothing and cost a DKIM canonicaliser dear. */
const whiteRunMax = 30;
/** Payload of one encoded word: 12 characters of frame, a comma and a leading space still fit into 76. */
const encodedPayloadMax = 60;
/** In a phrase even the first one has to fit, after a field name such as Reply-To. */
const phrasePayloadMax = 52;
/** An encoded word must hold at least one whole character: 4 octets of UTF-8 in Q. */
const encodedPayloadMin = 12;
const encodedFrame = '=?UTF-8?Q??='.length;

/** The names a custom field may not have, for texts and documentation; `Content-*` stands for the whole family. */
export const ownedHeaders: readonly string[] = [
  'From',
  'To',
  'Cc',
  'Bcc',
  'Subject',
  'Date',
  'Message-ID',
  'DKIM-Signature',
  'Received',
  'Return-Path',
  'MIME-Version',
  'Content-*',
  'Feedback-ID',
];

const ownedNames: ReadonlySet<string> = new Set(ownedHeaders.map((name) => name.toLowerCase()));

/** RFC 5322 §3.6.8: ftext is printable ASCII without the colon. */
const headerName = /^[!-9;-~]+$/;

/** True for a field that the transport writes itself; case does not matter. */
export function isOwnedHeader(name: string): boolean {
  const lower = name.toLowerCase();
  return ownedNames.has(lower) || lower.startsWith('content-');
}

/** What is wrong with a custom field, as a sentence, or null when it can be sent. */
export function checkHeader(name: string, value: string): string | null {
  const problem = headerSyntaxProblem(name, value);
  if (problem !== null) return problem;
  return isOwnedHeader(name) ? `The header ${name} is set by the transport.` : null;
}

/** The same check without the names that are ours; for fields that we add ourselves. */
export function headerSyntaxProblem(name: string, value: string): string | null {
  if (!headerName.test(name)) {
    return 'A header name has printable ASCII characters only, without spaces and colons.';
  }
  if (name.length > headerNameCharsMax) {
    return `A header name has at most ${headerNameCharsMax} characters.`;
  }
  // oxlint-disable-next-line no-control-regex -- control characters are what is looked for
  if (/[\x00-\x08\x0a-\x1f\x7f]/.test(value)) {
    return `The header ${name} contains a line break or another control character.`;
  }
  if (utf8Length(value) > headerValueOctetsMax) {
    return `The header ${name} is longer than ${headerValueOctetsMax} octets.`;
  }
  const wordMax = lineOctetsMax - name.length - 2;
  if (
    value.length > wordMax &&
    value.split(/[ \t]+/).some((w) => w.length > wordMax && isAscii(w))
  ) {
    return `The header ${name} has a word of more than ${wordMax} characters, which cannot be folded.`;
  }
  return null;
}

/**
 * `text` as printable ASCII that decodes to it again: words that need it become RFC 2047 encoded words of UTF-8.
 *
 * Valid encoded words in an all-ASCII text pass through. Control characters become a space. `column` is where the
 * text starts in its line; words longer than `wordMax` are encoded so that they can be folded (not for
 * structured fields such as a list of URLs).
 */
export function encodeText(
  text: string,
  { column = 0, wordMax = Infinity }: { column?: number; wordMax?: number } = {},
): string {
  const clean = tidyText(text);
  const ascii = isAscii(clean);
  const lookalike = clean.includes('=?') && !(ascii && holdsOnlyValidEncodedWords(clean));
  if (ascii && !lookalike && clean.length <= wordMax) return clean;
  const firstMax = Math.max(
    encodedPayloadMin,
    Math.min(encodedPayloadMax, lineCharsMax - column - encodedFrame),
  );
  // A text that a lenient reader could decode by mistake is encoded as a whole.
  if (lookalike) return encodeRun(clean, firstMax);

  const pieces = clean.split(/([ \t]+)/);
  const out: string[] = [];
  for (let i = 0; i < pieces.length; i += 2) {
    if (!needsEncoding(pieces[i], wordMax)) {
      out.push(pieces[i] ?? '', pieces[i + 1] ?? '');
      continue;
    }
    // White space between encoded words is dropped by readers (RFC 2047 §6.2), so a run is encoded together.
    let end = i;
    while (end + 2 < pieces.length && needsEncoding(pieces[end + 2], wordMax)) end += 2;
    const run = pieces.slice(i, end + 1).join('');
    out.push(encodeRun(run, i === 0 ? firstMax : encodedPayloadMax), pieces[end + 1] ?? '');
    i = end;
  }
  return out.join('');
}

/** `text` as encoded words, all of it: for display names that hold what neither atoms nor quotes can. */
export function encodePhrase(text: string): string {
  return encodeRun(tidyText(text), phrasePayloadMax, phrasePayloadMax);
}

/** One field with its CRLF, folded at white space (RFC 5322 §2.2.3) so that lines keep to 76 where words allow it. */
export function foldHeader(name: string, value: string): string {
  const line = `${name}: ${value.trimEnd()}`;
  if (line.length <= lineCharsMax) return `${line}\r\n`;
  let out = '';
  let start = 0;
  let floor = name.length + 2;
  while (line.length - start > lineCharsMax) {
    const at = foldPoint(line, floor, start + lineCharsMax);
    if (at === -1) break;
    out += `${line.slice(start, at)}\r\n`;
    start = at;
    floor = at;
    while (isWhite(line.charCodeAt(floor))) floor += 1;
  }
  return `${out}${line.slice(start)}\r\n`;
}

/** One field of a received header. `value` is unfolded and trimmed; bytes that are not UTF-8 became U+FFFD. */
export interface HeaderField {
  readonly name: string;
  readonly value: string;
}

/**
 * The fields of a message in their order, and the offset of its body (the message's length when there is none).
 *
 * Takes bare LF as well as CRLF. Lines that are no field (an mbox `From ` line, garbage) are passed over; at most
 * `headerOctetsMax` octets and `headerFieldsMax` fields are read.
 */
export function splitHeader(message: Buffer): {
  fields: readonly HeaderField[];
  bodyStart: number;
} {
  const bodyStart = findBody(message);
  const end = Math.min(bodyStart, headerOctetsMax);
  const unfolded = message.toString('utf8', 0, end).replace(/\r?\n(?=[ \t])/g, '');
  const fields: HeaderField[] = [];
  for (const line of unfolded.split(/\r?\n/)) {
    if (fields.length >= headerFieldsMax) break;
    // RFC 5322 §4.5: obsolete syntax allows white space before the colon.
    const colon = line.indexOf(':');
    const name = line.slice(0, Math.max(colon, 0)).trimEnd();
    if (headerName.test(name)) fields.push({ name, value: line.slice(colon + 1).trim() });
  }
  return { fields, bodyStart };
}

/** The values of every field called `name` (any case), in their order. */
export function findHeaders(fields: readonly HeaderField[], name: string): readonly string[] {
  const lower = name.toLowerCase();
  return fields.filter((field) => field.name.toLowerCase() === lower).map((field) => field.value);
}

/** True when every character is printable ASCII, a space or a tab. */
export function isAscii(text: string): boolean {
  return /^[\t\x20-\x7e]*$/.test(text);
}

function tidyText(text: string): string {
  const plain = isAscii(text)
    ? text
    : // oxlint-disable-next-line no-control-regex -- control characters are what is looked for
      text.toWellFormed().replace(/[\x00-\x08\x0a-\x1f\x7f-\x9f]+/g, ' ');
  return plain.replace(whiteRun, ' ').replace(/^[ \t]+|(?<![ \t])[ \t]+$/g, '');
}

const whiteRun = new RegExp(`[ \\t]{${whiteRunMax + 1},}`, 'g');

function needsEncoding(word: string | undefined, wordMax: number): boolean {
  return word !== undefined && (word.length > wordMax || !isAscii(word));
}

// RFC 2047 §2: charset, encoding, text without '?' and white space, at most 75 characters.
const encodedWord = /^=\?[!#$%&'*+\-0-9A-Z^_`a-z{|}~]+\?[BbQq]\?[!->@-~]*\?=$/;

function holdsOnlyValidEncodedWords(text: string): boolean {
  return text
    .split(/[ \t]+/)
    .every((word) => !word.includes('=?') || (word.length <= 75 && encodedWord.test(word)));
}

/** Encoded words that together decode to `run`, one space between them; B where Q would be half as long again. */
function encodeRun(run: string, firstMax: number, nextMax = encodedPayloadMax): string {
  const words: string[] = [];
  const asQ = qLength(run) <= utf8Length(run) * 2;
  let payload = '';
  let used = 0;
  let max = firstMax;
  const flush = (): void => {
    const body = asQ ? payload : Buffer.from(payload, 'utf8').toString('base64');
    words.push(`=?UTF-8?${asQ ? 'Q' : 'B'}?${body}?=`);
    payload = '';
    used = 0;
    max = nextMax;
  };
  // RFC 2047 §5: a character is never split over two words, so the loop goes by code points.
  for (const character of run) {
    const piece = asQ ? qEncode(character) : character;
    const cost = asQ ? piece.length : utf8Length(piece);
    const room = asQ ? max : Math.floor(max / 4) * 3;
    if (used > 0 && used + cost > room) flush();
    payload += piece;
    used += cost;
  }
  flush();
  return words.join(' ');
}

/** RFC 2047 §5 (3): the alphabet that is safe in a phrase is safe everywhere. */
function qEncode(character: string): string {
  if (/^[A-Za-z0-9!*+\-/]$/.test(character)) return character;
  if (character === ' ') return '_';
  return encodeURIComponent(character).startsWith('%')
    ? encodeURIComponent(character).replaceAll('%', '=')
    : `=${character.charCodeAt(0).toString(16).toUpperCase().padStart(2, '0')}`;
}

function qLength(text: string): number {
  const literal = text.match(/[A-Za-z0-9!*+\-/ ]/g)?.length ?? 0;
  return literal + (utf8Length(text) - literal) * 3;
}

function foldPoint(line: string, floor: number, ideal: number): number {
  for (let i = ideal; i > floor; i -= 1) {
    if (isWhite(line.charCodeAt(i)) && !isWhite(line.charCodeAt(i - 1))) return i;
  }
  for (let i = Math.max(ideal, floor) + 1; i < line.length; i += 1) {
    if (isWhite(line.charCodeAt(i))) return i;
  }
  return -1;
}

function utf8Length(text: string): number {
  return Buffer.byteLength(text, 'utf8');
}

function isWhite(code: number): boolean {
  return code === 0x20 || code === 0x09;
}

function findBody(message: Buffer): number {
  // A message may start with its body: an empty header is one line break.
  if (message[0] === 0x0a) return 1;
  if (message[0] === 0x0d && message[1] === 0x0a) return 2;
  let at = message.indexOf(0x0a);
  while (at !== -1 && at < headerOctetsMax) {
    if (message[at + 1] === 0x0a) return at + 2;
    if (message[at + 1] === 0x0d && message[at + 2] === 0x0a) return at + 3;
    at = message.indexOf(0x0a, at + 1);
  }
  return message.length;
}
