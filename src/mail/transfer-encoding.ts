/**
 * Body text and files as lines that survive the way: 7bit, quoted-printable or base64 (RFC 2045 §6, RFC 2049 §3).
 *
 * In: text with CRLF line ends, or bytes. Out: what one text needs, and the encoded lines of at most 76 (7bit: 78).
 * Pure, and the hot path of composing: every octet is looked at once or twice.
 */
import assert from 'node:assert/strict';
import { Buffer } from 'node:buffer';
import { lineCharsMax } from './header.ts';

/** Text longer than this in one body part goes to base64 rather than over quoted-printable's blank lines. */
export const blankLinesMax = 100;
/** RFC 5322 §2.1.1: what a line of text should not exceed. Encoded ones are shorter (RFC 2045 §6.7, §6.8). */
const plainLineCharsMax = 78;
/** Octets that base64 puts into one line of 76. */
const base64LineOctets = 57;

interface Survey {
  /** May go out as it is. */
  readonly isPlain: boolean;
  /** Base64 is shorter than quoted-printable. */
  readonly isMostlyForeign: boolean;
  readonly blankRunMax: number;
  /** Some line is not blank. */
  readonly isVisible: boolean;
}

/** What an encoding has to spare the text. Its line ends are CRLF. */
export function surveyText(text: string): Survey {
  let foreign = 0;
  let octets = 0;
  let blankRun = 0;
  let blankRunMax = 0;
  let isVisible = false;
  let isPlain = true;
  for (let start = 0; start < text.length;) {
    const found = text.indexOf('\r\n', start);
    const end = found === -1 ? text.length : found;
    if (end === start) {
      blankRun += 1;
      if (blankRun > blankRunMax) blankRunMax = blankRun;
    } else {
      blankRun = 0;
      isVisible = true;
      octets += end - start;
      if (end - start > plainLineCharsMax) isPlain = false;
      for (let i = start; i < end; i += 1) {
        const code = text.charCodeAt(i);
        if (code >= 0x20 ? code > 0x7e : code !== 0x09) {
          // A surrogate is half of a character of four octets.
          const width = code < 0x80 ? 1 : code < 0x800 || (code & 0xf800) === 0xd800 ? 2 : 3;
          foreign += width;
          octets += width - 1;
        }
      }
      if (isPlain && isFragile(text, start, end)) isPlain = false;
    }
    start = end + 2;
  }
  return {
    isPlain: isPlain && foreign === 0 && blankRunMax <= blankLinesMax,
    // Quoted-printable adds two octets to each foreign one, base64 a third (and line ends) to all.
    isMostlyForeign: foreign * 2 > octets * 0.37,
    blankRunMax,
    isVisible,
  };
}

/** Lines that something on the way is known to change or to take for its own: see RFC 2049 §3. */
function isFragile(text: string, start: number, end: number): boolean {
  const first = text.charCodeAt(start);
  const last = text.charCodeAt(end - 1);
  return (
    last === 0x20 ||
    last === 0x09 ||
    first === 0x2e ||
    (first === 0x46 && text.startsWith('From ', start)) ||
    (first === 0x2d && text.startsWith('--=_', start))
  );
}

const hexDigits = Buffer.from('0123456789ABCDEF', 'latin1');

/** RFC 2045 §6.7. `ending` is appended unencoded. Characters are not split over lines. */
export function quotedPrintable(text: string, ending: string): Buffer {
  const input = Buffer.from(text, 'utf8');
  // Three octets each, and a soft break (three more) in every 73 at the latest.
  const out = Buffer.allocUnsafe(input.length * 3 + Math.ceil((input.length * 3) / 60) * 3 + 8);
  let to = 0;
  let column = 0;
  for (let i = 0; i < input.length; i += 1) {
    const octet = input[i] ?? 0;
    const next = input[i + 1];
    if (octet === 0x0d && next === 0x0a) {
      out[to++] = 0x0d;
      out[to++] = 0x0a;
      i += 1;
      column = 0;
      continue;
    }
    let literal =
      (octet > 0x20 && octet < 0x7f && octet !== 0x3d) || octet === 0x20 || octet === 0x09;
    // White space at the end of a line is lost on the way.
    if ((octet === 0x20 || octet === 0x09) && (next === undefined || next === 0x0d))
      literal = false;
    const width = literal ? 1 : octet >= 0xf0 ? 12 : octet >= 0xe0 ? 9 : octet >= 0xc0 ? 6 : 3;
    const isContinuation = octet >= 0x80 && octet < 0xc0;
    if (!isContinuation && column + width > lineCharsMax - 1) {
      out[to++] = 0x3d;
      out[to++] = 0x0d;
      out[to++] = 0x0a;
      column = 0;
    }
    // RFC 2049 §3: a dot alone ends the message for careless software, "From " starts one in an mbox.
    if (column === 0 && (octet === 0x2e || (octet === 0x46 && startsFrom(input, i))))
      literal = false;
    if (literal) {
      out[to++] = octet;
      column += 1;
    } else {
      out[to++] = 0x3d;
      out[to++] = hexDigits[octet >> 4] ?? 0;
      out[to++] = hexDigits[octet & 15] ?? 0;
      column += 3;
    }
  }
  to += out.write(ending, to, 'latin1');
  return out.subarray(0, to);
}

function startsFrom(input: Buffer, at: number): boolean {
  return input.toString('latin1', at, at + 5) === 'From ';
}

/** What base64Piece takes at a time: whole lines, and large enough to be worth a write. */
export const BASE64_PIECE_OCTETS = base64LineOctets * 1_024;

/** The size of base64Lines for so many octets. */
export function base64LinesSize(octets: number): number {
  const breaks = Math.max(Math.ceil(octets / base64LineOctets) - 1, 0) * 2;
  return Math.ceil(octets / 3) * 4 + breaks;
}

/** Lines of 76 without the last CRLF, unless `alone`. Works in pieces, so a large part is copied once. */
export function base64Lines(content: Buffer, alone: boolean): Buffer {
  const size = base64LinesSize(content.length) + (alone ? 2 : 0);
  const out = Buffer.allocUnsafe(size);
  let to = 0;
  for (let from = 0; from < content.length; from += BASE64_PIECE_OCTETS) {
    to += writeLines(out, to, content.subarray(from, from + BASE64_PIECE_OCTETS));
  }
  if (alone) to += out.write('\r\n', to, 'latin1');
  assert.equal(to, size);
  return out;
}

/** The lines of one piece of BASE64_PIECE_OCTETS (the last may be shorter), with the CRLF that parts it from the one before. */
export function base64Piece(piece: Buffer, isFirst: boolean): Buffer {
  const out = Buffer.allocUnsafe(base64LinesSize(piece.length) + (isFirst ? 0 : 2));
  const start = isFirst ? 0 : out.write('\r\n', 'latin1');
  assert.equal(start + writeLines(out.subarray(start), 0, piece), out.length);
  return out;
}

/** Writes whole lines after what stands before `to`; how much it wrote. */
function writeLines(out: Buffer, to: number, octets: Buffer): number {
  const text = Buffer.from(octets.toString('base64'), 'latin1');
  let at = to;
  for (let from = 0; from < text.length; from += lineCharsMax) {
    if (at > 0) {
      out[at++] = 0x0d;
      out[at++] = 0x0a;
    }
    at += text.copy(out, at, from, from + lineCharsMax);
  }
  return at - to;
}
