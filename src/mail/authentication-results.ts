/**
 * The field that says what the checks at our door showed: Authentication-Results (RFC 8601).
 *
 * In: the results, with values that strangers chose. Out: one field, folded, printable ASCII, that no value can end or
 * add a result to; and messages without the fields that pretend to be ours, byte for byte as they were otherwise.
 * A value that does not fit into the grammar is left out rather than changed into another one.
 */
import { Buffer } from 'node:buffer';
import { domainToASCII } from 'node:url';

/** One `resinfo` (RFC 8601 §2.2). */
export interface MethodResult {
  /** `spf`, `dkim`, `dmarc`, `arc`. */
  readonly method: string;
  readonly result: string;
  /** Words for whoever reads the message; any characters, cut to 200. */
  readonly reason: string | null;
  /** `ptype.property` and its value; null: nothing to say. */
  readonly properties: readonly (readonly [string, string | null])[];
}

/** RFC 5322 §2.1.1, what a line should not exceed; one long value may. */
const LINE_CHARS = 78;
const REASON_CHARS_MAX = 200;
/** Of a name in the DNS. No line of one such value comes near the 998 octets of RFC 5322 §2.1.1. */
const VALUE_CHARS_MAX = 255;
const FIELD_NAME = 'authentication-results';

/** RFC 2045 §5.1. */
const TOKEN = /^[!#$%&'*+\-.0-9A-Z^_`a-z{|}~]+$/;

/** The field with its CRLF. `hostname` is our authserv-id; no results: `none` (RFC 8601 §2.2). */
export function writeAuthenticationResults(
  hostname: string,
  results: readonly MethodResult[],
): string {
  const infos = results.map((result) => wordsOf(result));
  const lines = [`Authentication-Results: ${inGrammar(hostname) ?? '""'};`];
  if (infos.length === 0) lines.push(' none');
  for (const [index, words] of infos.entries()) {
    let line = '';
    for (const word of words) {
      if (line !== '' && line.length + 1 + word.length > LINE_CHARS) {
        lines.push(line);
        line = '';
      }
      line += `${line === '' ? '\t' : ' '}${word}`;
    }
    lines.push(index === infos.length - 1 ? line : `${line};`);
  }
  return `${lines.join('\r\n')}\r\n`;
}

function wordsOf({ method, result, reason, properties }: MethodResult): string[] {
  const words = [`${method}=${result}`];
  const shown = reason === null ? '' : printable(reason).slice(0, REASON_CHARS_MAX).trim();
  if (shown !== '') words.push(`reason=${quoted(shown)}`);
  for (const [name, value] of properties) {
    const written = value === null ? null : inGrammar(value);
    if (written !== null) words.push(`${name}=${written}`);
  }
  return words;
}

/** `pvalue` (RFC 8601 §2.2); null when it cannot be one. */
function inGrammar(value: string): string | null {
  // U-labels as A-labels (RFC 8616 §4).
  if (/[\p{Cc}\s]/u.test(value) && !isAscii(value)) return null;
  const ascii = isAscii(value) ? value : domainToASCII(value);
  if (ascii === '' || ascii.length > VALUE_CHARS_MAX || /[^ -~]/.test(ascii)) return null;
  return TOKEN.test(ascii) ? ascii : quoted(ascii);
}

/** RFC 5322 §3.2.4. */
const quoted = (text: string): string => `"${text.replace(/["\\]/g, '\\$&')}"`;

const isAscii = (text: string): boolean => Buffer.byteLength(text) === text.length;

/** Control characters become spaces, what is not ASCII `?`. */
const printable = (text: string): string =>
  [...text].map((one) => (one < ' ' || one === '\x7f' ? ' ' : one > '~' ? '?' : one)).join('');

const CR = 0x0d;
const LF = 0x0a;
const SPACE = 0x20;
const TAB = 0x09;

/**
 * The message without its Authentication-Results fields that bear our name (RFC 8601 §5): in any case, quoted, with
 * comments, a version, or folded. What a reader might take for our name goes as well. The same buffer when there are
 * none. Works on CRLF and LF lines.
 */
export function withoutForgedResults(raw: Buffer, hostname: string): Buffer {
  const own = hostname.toLowerCase().replace(/\.$/, '');
  const kept: Buffer[] = [];
  let keptTo = 0;
  for (const { start, end } of fieldsOf(raw)) {
    if (!mayBeResults(raw, start)) continue;
    const field = raw.subarray(start, end).toString('latin1');
    const colon = field.indexOf(':');
    if (colon === -1 || nameIn(field.slice(0, colon)) !== FIELD_NAME) continue;
    if (!isIssuedBy(field.slice(colon + 1), own)) continue;
    kept.push(raw.subarray(keptTo, start));
    keptTo = end;
  }
  return keptTo === 0 && kept.length === 0 ? raw : Buffer.concat([...kept, raw.subarray(keptTo)]);
}

/** Where each field of the header lies, with its continuation lines and line end. */
function* fieldsOf(raw: Buffer): Generator<{ readonly start: number; readonly end: number }> {
  let start = 0;
  let at = 0;
  while (at < raw.length) {
    const newline = raw.indexOf(LF, at);
    const end = newline === -1 ? raw.length : newline + 1;
    const isEmpty = raw[at] === LF || (raw[at] === CR && raw[at + 1] === LF);
    const isContinued = raw[at] === SPACE || raw[at] === TAB;
    if (isEmpty) break;
    if (!isContinued && at > start) {
      yield { start, end: at };
      start = at;
    }
    at = end;
  }
  if (at > start) yield { start, end: at };
}

/** What some readers strip from a name, at its ends (white space of any kind). */
const ODD_OCTETS_LOOK = 16;

/** Cheap: most fields are something else. */
const mayBeResults = (raw: Buffer, start: number): boolean =>
  nameIn(raw.toString('latin1', start, start + FIELD_NAME.length + ODD_OCTETS_LOOK)).startsWith(
    FIELD_NAME,
  );

const nameIn = (text: string): string => text.replace(/[^!-~]+/g, '').toLowerCase();

function isIssuedBy(value: string, own: string): boolean {
  const issuer = issuerOf(value);
  // A comment or string without an end: readers disagree about what such a field says.
  if (issuer === null) return value.replace(/\s/g, '').toLowerCase().includes(own);
  const [first = ''] = issuer.trim().split(/[\s/=]/);
  if (first.replace(/\.$/, '') === own) return true;
  // Some readers drop white space inside a name, or read a version that touches it.
  const joined = issuer.replace(/\s/g, '');
  return joined.startsWith(own) && /^[./\d]*$/.test(joined.slice(own.length));
}

/** What stands before the first `;`, lower case, without comments and quotes; null: it has no end. */
function issuerOf(value: string): string | null {
  let issuer = '';
  let depth = 0;
  let isQuoted = false;
  for (let at = 0; at < value.length; at += 1) {
    const one = value[at]!;
    if (one === '\\') {
      at += 1;
      if (depth === 0) issuer += value[at] ?? '';
    } else if (isQuoted) {
      if (one === '"') isQuoted = false;
      else issuer += one;
    } else if (one === '(') {
      depth += 1;
    } else if (one === ')') {
      // A comment parts words.
      if (depth === 1) issuer += ' ';
      depth = Math.max(0, depth - 1);
    } else if (depth > 0) {
      continue;
    } else if (one === '"') {
      isQuoted = true;
    } else if (one === ';') {
      return issuer.toLowerCase();
    } else {
      issuer += one;
    }
  }
  return depth > 0 || isQuoted ? null : issuer.toLowerCase();
}
