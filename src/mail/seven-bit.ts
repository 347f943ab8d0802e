/**
 * A message with 8-bit or overlong lines as one that every host takes: 7-bit, lines of at most 998 octets, so
 * that nothing on the way has a reason to change it and its signature stays valid.
 *
 * In: a message and its tree. Out: the pieces of its body. Only the leaves that need it are encoded anew
 * (RFC 2045 §6); what surrounds them stays octet for octet. It refuses (UnfitMessage) what must not be changed: parts of a
 * signed multipart (RFC 1847 §2.1), an embedded message, an encoding that it does not know.
 */
import { Buffer, isUtf8 } from 'node:buffer';
import libmime from 'libmime';
import { encodeText, foldHeader, lineOctetsMax } from './header.ts';
import {
  parseStructured,
  UnfitMessage,
  valueOf,
  type MimePart,
  type RawField,
} from './mime-tree.ts';
import { base64Lines, quotedPrintable, surveyText } from './transfer-encoding.ts';
import { surveyWire } from './wire-survey.ts';

/** What takes the place of a part's own fields and of its body. */
export interface PlainPart {
  /** The fields that describe the encoding of the body. */
  readonly fields: readonly Buffer[];
  /** Behind the blank line. */
  readonly body: readonly Buffer[];
}

const CRLF = Buffer.from('\r\n');
const ENCODING = 'content-transfer-encoding';

/** The body of the message itself; `fields` are to replace those of ENCODED_FIELDS. Throws an UnfitMessage. */
export function makePlain(message: Buffer, root: MimePart): PlainPart {
  const budget = { octets: CONVERTED_MAX_OCTETS };
  return plainPart(message, root, { isWhole: true, budget, known: new Map() });
}

/** Of all parts that are encoded anew: it happens on the event loop. Files come in base64 anyway. */
const CONVERTED_MAX_OCTETS = 16 * 1024 * 1024;

interface Turn {
  readonly isWhole: boolean;
  readonly budget: { octets: number };
  /** Whose body is plain. */
  readonly known: Map<MimePart, boolean>;
}

/** What makePlain may write in place of what was there. */
export const ENCODED_FIELDS: ReadonlySet<string> = new Set(['content-type', ENCODING]);

function plainPart(message: Buffer, part: MimePart, turn: Turn): PlainPart {
  const body = message.subarray(part.bodyStart, part.end);
  const own = part.fields.filter(({ lower }) => ENCODED_FIELDS.has(lower));
  if (isPlain(message, part, turn.known)) return { fields: own.map(plainField), body: [body] };
  if (part.type === 'multipart/signed') {
    throw unfit('A signed part has 8-bit text or lines of more than 998 octets');
  }
  if (part.type.startsWith('message/')) {
    throw unfit('An attached message has 8-bit text or lines of more than 998 octets');
  }
  return part.children === null
    ? plainLeaf(part, { own, body, turn })
    : plainBranch(message, part, { own, turn });
}

/** Of the body; each octet is looked at once, however deep it lies. */
function isPlain(message: Buffer, part: MimePart, known: Turn['known']): boolean {
  const found = known.get(part);
  if (found !== undefined) return found;
  let at = part.bodyStart;
  let isAll = true;
  for (const child of part.children ?? []) {
    isAll &&= surveyWire(message.subarray(at, child.bodyStart)).isPlain;
    isAll &&= isPlain(message, child, known);
    at = child.end;
  }
  isAll &&= surveyWire(message.subarray(at, part.end)).isPlain;
  known.set(part, isAll);
  return isAll;
}

function plainBranch(
  message: Buffer,
  part: MimePart,
  { own, turn }: { readonly own: readonly RawField[]; readonly turn: Turn },
): PlainPart {
  const children = part.children ?? [];
  const pieces: Buffer[] = [];
  let at = part.bodyStart;
  for (const child of children) {
    pieces.push(...between(message.subarray(at, child.start), at === part.bodyStart));
    const plain = plainPart(message, child, { ...turn, isWhole: false });
    const others = child.fields.filter(({ lower }) => !ENCODED_FIELDS.has(lower)).map(plainField);
    pieces.push(...others, ...plain.fields, CRLF, ...plain.body);
    at = child.end;
  }
  pieces.push(...between(message.subarray(at, part.end), false));
  // What was 8bit as a whole is not any more (RFC 2045 §6.4).
  const fields = own.filter(({ lower }) => lower !== ENCODING).map(plainField);
  return { fields, body: pieces };
}

/**
 * The delimiter lines between two parts as they are; text before the first and behind the last one is shown to
 * nobody, so when it is not plain it goes.
 */
function between(bytes: Buffer, isFirst: boolean): readonly Buffer[] {
  if (surveyWire(bytes).isPlain) return [bytes];
  const lines = bytes.toString('latin1').split('\r\n');
  const delimiters = lines.filter(
    (line) => line.startsWith('--') && /^[\x20-\x7e\t]{3,200}$/.test(line),
  );
  const text = `${isFirst ? '' : '\r\n'}${delimiters.join('\r\n')}\r\n`;
  return [Buffer.from(text, 'latin1')];
}

function plainLeaf(
  part: MimePart,
  about: { readonly own: readonly RawField[]; readonly body: Buffer; readonly turn: Turn },
): PlainPart {
  const { own, turn } = about;
  turn.budget.octets -= about.body.length;
  if (turn.budget.octets < 0) {
    throw unfit(
      `More than ${CONVERTED_MAX_OCTETS} bytes are 8-bit text or lines of more than 998 octets`,
    );
  }
  const content = decodeBody(about.body, part.encoding);
  if (content === null) {
    // Into a reply: printable ASCII only.
    const shown = part.encoding.slice(0, 40).replace(/[^ -~]/g, '?');
    throw unfit(
      `A part in the encoding "${shown}" has 8-bit text or lines of more than 998 octets`,
    );
  }
  if (part.type.startsWith('multipart/')) {
    throw new UnfitMessage(
      '5.6.0',
      'A multipart has no parts: its boundary is missing or never used',
    );
  }
  const types = own.filter(({ lower }) => lower === 'content-type').map(plainField);
  const isText = part.type.startsWith('text/');
  const charset = isUtf8(content) ? 'utf-8' : 'unknown-8bit'; // RFC 1428 §3 names the second
  if (types.length === 0) {
    types.push(Buffer.from(`Content-Type: text/plain; charset=${charset}\r\n`));
  }
  const encoded = (encoding: string, body: Buffer): PlainPart => ({
    fields: [...types, Buffer.from(`Content-Transfer-Encoding: ${encoding}\r\n`)],
    body: [body],
  });
  if (isText && charset === 'utf-8') {
    const text = content.toString('utf8');
    if (!/\r(?!\n)|(?<!\r)\n/.test(text) && !surveyText(text).isMostlyForeign) {
      return encoded('quoted-printable', quotedPrintable(text, ''));
    }
  }
  return encoded('base64', base64Lines(content, turn.isWhole));
}

/** The octets of a leaf's body, or null when the encoding is not known. Damaged text is read as far as it goes. */
export function decodeBody(body: Buffer, encoding: string): Buffer | null {
  if (encoding === '7bit' || encoding === '8bit' || encoding === 'binary') return body;
  if (encoding === 'base64') return Buffer.from(body.toString('latin1'), 'base64');
  return encoding === 'quoted-printable' ? decodeQuotedPrintable(body) : null;
}

/** RFC 2045 §6.7; an octet that should have been encoded stands for itself. */
function decodeQuotedPrintable(body: Buffer): Buffer {
  const out = Buffer.allocUnsafe(body.length);
  let to = 0;
  /** Behind the last octet that is not white space: what follows it goes when the line ends. */
  let solid = 0;
  for (let i = 0; i < body.length; i += 1) {
    const octet = body[i]!;
    if (octet === SPACE || octet === TAB) {
      out[to++] = octet;
      continue;
    }
    if (octet === EQUALS) {
      const [high, low] = [hexDigit(body[i + 1]), hexDigit(body[i + 2])];
      const isOctet = high >= 0 && low >= 0;
      const soft = isOctet ? -1 : softBreakEnd(body, i + 1);
      if (isOctet) out[to++] = high * 16 + low;
      else if (soft === -1) out[to++] = octet;
      i = isOctet ? i + 2 : soft === -1 ? i : soft - 1;
    } else {
      if (octet === CR && body[i + 1] === LF) to = solid;
      out[to++] = octet;
    }
    solid = to;
  }
  return out.subarray(0, solid);
}

const [TAB, LF, CR, SPACE, EQUALS] = [0x09, 0x0a, 0x0d, 0x20, 0x3d];

/** Behind the line end of a soft line break whose `=` stands before `at`, or -1 when there is none. */
function softBreakEnd(body: Buffer, at: number): number {
  let end = at;
  while (body[end] === SPACE || body[end] === TAB) end += 1;
  if (end === body.length) return end;
  return body[end] === CR && body[end + 1] === LF ? end + 2 : -1;
}

function hexDigit(octet: number | undefined): number {
  if (octet === undefined) return -1;
  if (octet >= 0x30 && octet <= 0x39) return octet - 0x30;
  const letter = octet | 0x20;
  return letter >= 0x61 && letter <= 0x66 ? letter - 0x57 : -1;
}

/** Text whose words may be encoded (RFC 2047 §5 (1)); in other fields they would change the meaning. */
const structured =
  /^(?:date|from|sender|reply-to|to|cc|bcc|message-id|in-reply-to|references|mime-version|return-path|received|list-.*|resent-.*|dkim-signature|arc-.*|authentication-results|content-(?!description).*)$/;

/**
 * The field in ASCII and in lines of at most 998 octets. Text becomes encoded words of UTF-8, parameters take the
 * form of RFC 2231. Throws an UnfitMessage where neither is possible.
 */
export function plainField(field: RawField): Buffer {
  const survey = surveyWire(field.raw);
  if (survey.isPlain) return field.raw;
  const { name, lower } = field;
  if (!isUtf8(field.raw)) {
    throw new UnfitMessage('5.6.7', `The header ${name} has 8-bit text that is not UTF-8`);
  }
  const value = valueOf(field);
  // oxlint-disable-next-line no-control-regex -- ASCII is what is asked for
  const isAscii = (text: string): boolean => /^[\x00-\x7f]*$/.test(text);
  let line: string;
  if (isAscii(value)) line = foldHeader(name, value);
  else if (lower === 'content-type' || lower === 'content-disposition') {
    line = foldHeader(name, libmime.buildHeaderValue(parseStructured(value)));
  } else if (structured.test(lower)) line = value;
  else {
    line = foldHeader(name, encodeText(decoded(value), { column: name.length + 2, wordMax: 60 }));
  }
  // Also what stands where parameters cannot help, such as the type itself.
  if (!isAscii(line)) {
    throw new UnfitMessage('5.6.7', `The header ${name} has characters outside ASCII`);
  }
  const folded = Buffer.from(line);
  if (
    folded
      .toString('latin1')
      .split('\r\n')
      .some((one) => one.length > lineOctetsMax)
  ) {
    throw new UnfitMessage(
      '5.6.0',
      `The header ${name} has a line of more than ${lineOctetsMax} characters that cannot be folded`,
    );
  }
  return folded;
}

/** Encoded words beside raw text would be read as they stand once all of it is encoded. */
function decoded(value: string): string {
  try {
    return libmime.decodeWords(value);
  } catch {
    return value;
  }
}

const unfit = (message: string): UnfitMessage =>
  new UnfitMessage(
    '5.6.3',
    `${message}, which cannot be converted here: encode it as quoted-printable or base64`,
  );
