/**
 * The parts of a message (RFC 2045, 2046), as places in its bytes: nothing is decoded, nothing is copied.
 *
 * In: a complete message whose lines end in CRLF. Out: its tree. It refuses (UnfitMessage) what has no end: too many
 * parts, too many levels, a header without measure, delimiters without measure. A multipart without its boundary is a
 * leaf. Each octet is looked at once, however deep it lies.
 */
import { Buffer } from 'node:buffer';
import libmime from 'libmime';

/** This message cannot be sent as it is; the text says what to fix. */
export class UnfitMessage extends Error {
  override name = 'UnfitMessage';
  /** RFC 3463, of class 5. */
  readonly enhancedCode: string;

  constructor(enhancedCode: string, message: string) {
    super(message);
    this.enhancedCode = enhancedCode;
  }
}

/** One field as it was written. */
export interface RawField {
  readonly name: string;
  /** Of the name. */
  readonly lower: string;
  /** With its folds and a last CRLF, without white space before the colon (RFC 5322 §4.5). */
  readonly raw: Buffer;
}

export interface MimePart {
  readonly fields: readonly RawField[];
  readonly start: number;
  /** Behind the blank line. */
  readonly bodyStart: number;
  /** Without the CRLF that belongs to the delimiter behind it. */
  readonly end: number;
  /** Lower case, such as `text/plain`. */
  readonly type: string;
  readonly typeParams: Readonly<Record<string, string>>;
  /** Of Content-Transfer-Encoding, lower case; `7bit` when there is none. */
  readonly encoding: string;
  /** Null for a leaf. */
  readonly children: readonly MimePart[] | null;
}

export const HEADER_BYTES_MAX = 256 * 1024;
const FIELDS_MAX = 1_000;
const PARTS_MAX = 1_000;
const LEVELS_MAX = 30;
/** Of the whole message and all of its parts. */
const ALL_HEADERS_BYTES_MAX = 4 * HEADER_BYTES_MAX;
/** Lines that begin like a delimiter, each counted again for every boundary that it is compared with. */
const DELIMITER_LOOKS_MAX = 1_000_000;
/** RFC 2046 §5.1.1 allows 70; some programs write longer ones. */
const BOUNDARY_MAX = 200;
/** RFC 5322 §3.6.8: printable ASCII without the colon; §4.5 allows white space before it. */
const FIELD = /^([!-9;-~]+)[ \t]*:/;
const CRLF = '\r\n';

/** The tree of the whole message. Throws an UnfitMessage. */
export function readMimeTree(message: Buffer): MimePart {
  const budget = { parts: PARTS_MAX, headers: ALL_HEADERS_BYTES_MAX, looks: DELIMITER_LOOKS_MAX };
  const at = { start: 0, end: message.length, level: 0, defaultType: 'text/plain' };
  return readPart(message, { ...at, budget, dashes: null });
}

interface Budget {
  parts: number;
  headers: number;
  looks: number;
}

function readPart(
  message: Buffer,
  at: {
    readonly start: number;
    readonly end: number;
    readonly level: number;
    readonly budget: Budget;
    readonly defaultType: string;
    /** Where lines begin with `--`; null: not looked for yet. */
    readonly dashes: readonly number[] | null;
  },
): MimePart {
  const { start, end, level, budget, defaultType } = at;
  budget.parts -= 1;
  if (budget.parts < 0) throw new UnfitMessage('5.6.0', `The message has over ${PARTS_MAX} parts`);
  if (level > LEVELS_MAX) {
    throw new UnfitMessage('5.6.0', `The parts are nested more than ${LEVELS_MAX} levels deep`);
  }
  const { fields, bodyStart } = readFields(message, start, end, level === 0);
  budget.headers -= bodyStart - start;
  if (budget.headers < 0) {
    throw new UnfitMessage(
      '5.3.4',
      `The headers of all parts have more than ${ALL_HEADERS_BYTES_MAX} bytes`,
    );
  }
  const content = parseStructured(textOf(fields, 'content-type'));
  const type = content.value.trim().toLowerCase() || defaultType;
  const { boundary = '' } = content.params;
  const isMultipart =
    type.startsWith('multipart/') && boundary !== '' && boundary.length <= BOUNDARY_MAX;
  const dashes = isMultipart ? (at.dashes ?? findDashes(message, bodyStart, budget)) : at.dashes;
  const ranges =
    isMultipart && dashes !== null
      ? splitAtBoundary(message, { from: bodyStart, to: end, boundary, dashes, budget })
      : null;
  // RFC 2046 §5.1.5.
  const inner = type === 'multipart/digest' ? 'message/rfc822' : 'text/plain';
  return {
    fields,
    start,
    bodyStart,
    end,
    type,
    typeParams: content.params,
    encoding: textOf(fields, 'content-transfer-encoding').trim().toLowerCase() || '7bit',
    children:
      ranges === null || ranges.length === 0
        ? null
        : ranges.map(([from, to]) => {
            const place = { start: from, end: to, level: level + 1 };
            return readPart(message, { ...place, budget, defaultType: inner, dashes });
          }),
  };
}

/** The fields from `start` on, and where the body begins. Throws an UnfitMessage. */
export function readFields(
  message: Buffer,
  start: number,
  end: number,
  isWhole = true,
): { readonly fields: readonly RawField[]; readonly bodyStart: number } {
  const fields: RawField[] = [];
  let at = start;
  while (at < end) {
    if (message[at] === 0x0d && message[at + 1] === 0x0a) return { fields, bodyStart: at + 2 };
    const next = fieldEnd(message, at, end);
    if (next - start > HEADER_BYTES_MAX || fields.length >= FIELDS_MAX) {
      const most = `at most ${HEADER_BYTES_MAX} bytes and ${FIELDS_MAX} fields are allowed`;
      throw new UnfitMessage('5.3.4', `The header is too large: ${most}`);
    }
    const raw = message.subarray(at, next);
    const name = FIELD.exec(raw.toString('latin1', 0, 1_000))?.[1];
    // In a part, the text may have begun without the blank line.
    if (name === undefined && !isWhole) return { fields, bodyStart: at };
    if (name === undefined) {
      const shown = raw
        .toString('latin1', 0, 40)
        .trim()
        .replace(/[^\x20-\x7e]/g, '?');
      throw new UnfitMessage(
        '5.6.0',
        `A line of the header is no field: "${shown}". A field is "Name: value", and a blank line ends the header`,
      );
    }
    fields.push({ name, lower: name.toLowerCase(), raw: tidied(raw, name) });
    at = next;
  }
  return { fields, bodyStart: end };
}

/** Obsolete white space before the colon goes: half of all readers take such a line for text. */
function tidied(raw: Buffer, name: string): Buffer {
  const isWhole = raw.at(-2) === 0x0d && raw.at(-1) === 0x0a;
  if (raw[name.length] === 0x3a && isWhole) return raw;
  const value = raw.subarray(raw.indexOf(':'));
  return Buffer.concat([Buffer.from(name), value, Buffer.from(isWhole ? '' : CRLF)]);
}

/** Behind the CRLF of the last line of the field. */
function fieldEnd(message: Buffer, start: number, end: number): number {
  let at = start;
  for (;;) {
    const found = message.indexOf(CRLF, at, 'latin1');
    if (found === -1 || found + 2 >= end) return end;
    at = found + 2;
    if (message[at] !== 0x20 && message[at] !== 0x09) return at;
    if (at - start > HEADER_BYTES_MAX) return at;
  }
}

/** Where lines begin with `--`, from `start` on. Throws an UnfitMessage. */
function findDashes(message: Buffer, start: number, budget: Budget): readonly number[] {
  const places = message[start] === DASH && message[start + 1] === DASH ? [start] : [];
  const wanted = `${CRLF}--`;
  for (let at = start; ; at += 2) {
    at = message.indexOf(wanted, at, 'latin1');
    if (at === -1) return places;
    look(budget);
    places.push(at + 2);
  }
}

const DASH = 0x2d;

function look(budget: Budget): void {
  budget.looks -= 1;
  if (budget.looks >= 0) return;
  throw new UnfitMessage('5.6.0', 'Too many lines begin with "--" for the parts to be found');
}

/** The places between the delimiter lines; the last part ends with its parent when it is not closed. */
function splitAtBoundary(
  message: Buffer,
  about: {
    readonly from: number;
    readonly to: number;
    readonly boundary: string;
    readonly dashes: readonly number[];
    readonly budget: Budget;
  },
): readonly (readonly [number, number])[] {
  const { from, to, dashes, budget } = about;
  const delimiter = Buffer.from(`--${about.boundary}`, 'latin1');
  const ranges: [number, number][] = [];
  let open = -1;
  for (let i = firstFrom(dashes, from); i < dashes.length; i += 1) {
    const at = dashes[i]!;
    const behind = at + delimiter.length;
    if (behind > to) break;
    look(budget);
    if (message.compare(delimiter, 0, delimiter.length, at, behind) !== 0) continue;
    const line = /^(--)?[ \t]*(\r\n|$)/.exec(
      message.toString('latin1', behind, Math.min(behind + 200, to)),
    );
    if (line === null) continue;
    // RFC 2046 §5.1.1: the CRLF before a delimiter is part of it.
    if (open !== -1) ranges.push([open, Math.max(open, at - 2)]);
    open = line[1] === undefined ? Math.min(behind + line[0].length, to) : -1;
    if (open === -1) return ranges;
    if (ranges.length >= PARTS_MAX) break;
  }
  if (open !== -1) ranges.push([open, to]);
  return ranges;
}

/** The index of the first place that is not before `from`. */
function firstFrom(places: readonly number[], from: number): number {
  let low = 0;
  let high = places.length;
  while (low < high) {
    const middle = (low + high) >>> 1;
    if (places[middle]! < from) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** The unfolded value of the first field of this name; empty when there is none. */
export function textOf(fields: readonly RawField[], lower: string): string {
  const field = fields.find((one) => one.lower === lower);
  return field === undefined ? '' : valueOf(field);
}

/** Unfolded and trimmed; bytes that are not UTF-8 became U+FFFD. */
export function valueOf({ raw }: RawField): string {
  const text = raw.toString('utf8');
  return text
    .slice(text.indexOf(':') + 1)
    .replaceAll(CRLF, '')
    .trim();
}

/** A value with parameters (RFC 2045 §5.1, RFC 2231), as well as it can be read. */
export function parseStructured(text: string): {
  readonly value: string;
  readonly params: Readonly<Record<string, string>>;
} {
  try {
    const { value, params } = libmime.parseHeaderValue(text);
    return { value: value || '', params };
  } catch {
    return { value: text.split(';')[0] ?? '', params: {} };
  }
}
