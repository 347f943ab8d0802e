/**
 * Addresses as people and programs write them: `a@b.c` and `Name <a@b.c>` (RFC 5322 §3.4), with quoted names and
 * local parts, UTF-8 local parts (RFC 6531) and international domains (IDNA, kept as A-labels).
 *
 * In: one text. Out: a Mailbox, or what to fix. It refuses control characters, several addresses in one text,
 * groups, comments, source routes, address literals and domains of one label: nothing that we could not deliver to
 * or that two programs could read differently.
 */
import { domainToASCII, domainToUnicode } from 'node:url';
import { Buffer } from 'node:buffer';
import assert from 'node:assert/strict';
import { encodePhrase, isAscii } from './header.ts';

/** The whole text, name included. */
export const mailboxCharsMax = 2_000;
/** RFC 5321 §4.5.3.1.1. */
export const localPartOctetsMax = 64;
/** RFC 5321 §4.5.3.1.3: a path of 256 octets less its angle brackets. */
export const addressOctetsMax = 254;
/** RFC 1035 §2.3.4. */
export const labelOctetsMax = 63;
/** Longer quoted names and words are written as encoded words, which can be folded anywhere. */
const nameWordMax = 60;

export interface Mailbox {
  /** The display name without quotes; null when there is none. */
  readonly name: string | null;
  /** In wire form: quoted only where it must be. */
  readonly local: string;
  /** A-labels, lower case. */
  readonly domain: string;
  /** `local@domain`. */
  readonly address: string;
  /** The local part has characters outside ASCII, so the next hop must offer SMTPUTF8 (RFC 6531). */
  readonly needsSmtpUtf8: boolean;
  /** The text that was parsed, white space around it removed: what an API answer repeats. */
  readonly given: string;
}

export type ParsedMailbox = { ok: true; mailbox: Mailbox } | { ok: false; problem: string };
export type ParsedDomain = { ok: true; domain: string } | { ok: false; problem: string };

/**
 * One mailbox. `problem` is a sentence fragment that follows "the address": "needs an @ …".
 *
 * A name without quotes may hold any printable character but `< > , ; :` and a single `"`: programs write
 * `Acme (Support) <a@b.c>` and mean it.
 */
export function parseMailbox(text: string): ParsedMailbox {
  if (text.length > mailboxCharsMax) return no(`is longer than ${mailboxCharsMax} characters`);
  if (/\p{Cc}/u.test(text)) return no('contains a line break or another control character');
  if (!text.isWellFormed()) return no('is not valid Unicode text');
  const given = text.trim();
  if (given === '') return no('is empty');

  const open = findOutsideQuotes(given, '<');
  if (open === -1) {
    if (given.endsWith('>')) {
      return no(
        given.includes('"') ? 'has a quote " that is not closed' : 'ends with > but has no <',
      );
    }
    return parseAddress(given, null, given);
  }
  if (!given.endsWith('>')) {
    return no(
      given.includes('>')
        ? 'has text after the >; several addresses belong in a list, one each'
        : 'has a < without a > at its end',
    );
  }
  const name = parseName(given.slice(0, open).trim());
  if (!name.ok) return name;
  return parseAddress(given.slice(open + 1, -1).trim(), name.name, given);
}

/** A domain as mail uses it: A-labels in lower case, two labels at least, never an IP address. */
export function parseDomain(text: string): ParsedDomain {
  if (text === '') return no('needs a domain after the @');
  if (text.startsWith('[')) return no('has an IP address as its domain, which is not accepted');
  if (text.length > addressOctetsMax)
    return no(`has a domain of more than ${addressOctetsMax - 1} octets`);
  // Checked before IDNA: domainToASCII works like a URL parser, decodes %xx and stops at a slash.
  if (!/^[A-Za-z0-9.\-\u{a1}-\u{10ffff}]+$/u.test(text)) {
    return no('has a character in its domain that domain names cannot have');
  }
  const domain = isAscii(text) ? text.toLowerCase() : domainToASCII(text);
  if (domain === '') return no('has a domain that is not a valid international domain name');
  if (domain.endsWith('.')) return no('has a dot at the end of its domain; leave it out');
  const labels = domain.split('.');
  for (const label of labels) {
    const problem = labelProblem(label);
    if (problem !== null) return no(problem);
  }
  if (labels.length < 2) return no('needs a full domain name with a dot, such as example.com');
  if (/^\d+$/.test(labels.at(-1) ?? '')) {
    return no('has an IP address or a number as its domain, which is not accepted');
  }
  return { ok: true, domain };
}

/**
 * The mailbox as a header writes it, not folded: ASCII, except for a UTF-8 local part (RFC 6532).
 *
 * The name is bare, quoted or in RFC 2047 encoded words, whichever is the least that carries it.
 */
export function formatMailbox(mailbox: Pick<Mailbox, 'name' | 'address'>): string {
  // The last line of defence against a header injected through a hand-made Mailbox.
  assert(!/\p{Cc}/u.test(mailbox.address));
  const { name, address } = mailbox;
  return name === null || name === '' ? address : `${formatName(name)} <${address}>`;
}

/**
 * One spelling for all that reach the same mailbox, to compare recipients and to look up suppressions.
 *
 * Lower case, A-labels, no needless quotes, NFC. Dots and +tags stay: only the receiving host knows what they mean.
 * What does not parse is returned trimmed and in lower case.
 */
export function normalizedAddress(address: string): string {
  const bare = address.trim();
  // Fields of received mail come here, of any length.
  const parsed = bare.length > mailboxCharsMax ? null : parseAddress(bare, null, address);
  const known = parsed?.ok === true ? parsed.mailbox.address : bare;
  return known.toLowerCase().normalize('NFC');
}

const atext = "[A-Za-z0-9!#$%&'*+\\-/=?^_`{|}~\\u{80}-\\u{10ffff}]";
/** RFC 5322 §3.2.3 dot-atom-text, widened by RFC 6531 §3.3 to UTF-8. */
const dotAtom = new RegExp(`^${atext}+(?:\\.${atext}+)*$`, 'u');
/** White space, invisible direction changes and non-characters have no place in an address that people compare. */
const deceptive = /[\p{Z}\u202a-\u202e\u2066-\u2069\ufeff\p{Noncharacter_Code_Point}]/u;

function no(problem: string): { ok: false; problem: string } {
  return { ok: false, problem };
}

function parseAddress(spec: string, name: string | null, given: string): ParsedMailbox {
  const split = spec.startsWith('"') ? splitQuotedLocal(spec) : splitBareLocal(spec);
  if (!split.ok) return split;
  const { local } = split;
  if (Buffer.byteLength(local, 'utf8') > localPartOctetsMax) {
    return no(`has more than ${localPartOctetsMax} octets before the @`);
  }
  const parsed = parseDomain(split.domain);
  if (!parsed.ok) return parsed;
  const address = `${local}@${parsed.domain}`;
  if (Buffer.byteLength(address, 'utf8') > addressOctetsMax) {
    return no(`is longer than ${addressOctetsMax} octets`);
  }
  const { domain } = parsed;
  return {
    ok: true,
    mailbox: { name, local, domain, address, needsSmtpUtf8: !isAscii(local), given },
  };
}

type SplitAddress = { ok: true; local: string; domain: string } | { ok: false; problem: string };

function splitBareLocal(spec: string): SplitAddress {
  const at = spec.indexOf('@');
  const local = spec.slice(0, at);
  if (at !== -1 && dotAtom.test(local) && !deceptive.test(local)) {
    const domain = spec.slice(at + 1);
    if (domain.includes('@')) {
      return /[,;\s]/.test(domain)
        ? no('is more than one address; several addresses belong in a list, one each')
        : no('has more than one @');
    }
    if (domain.includes(',') || domain.includes(';')) {
      return no('has a comma or semicolon; several addresses belong in a list, one each');
    }
    if (/[()]/.test(domain)) return no('has a comment in parentheses, which is not accepted');
    if (/\s/.test(domain)) return no('has a space in or after its domain');
    return { ok: true, local, domain };
  }
  return no(bareLocalProblem(spec, at));
}

function bareLocalProblem(spec: string, at: number): string {
  if (spec === '') return 'is empty between < and >';
  if (/^[^@]*:.*;$/.test(spec)) return 'is a group; name each address instead';
  if (/^[^@"]*[,;]/.test(spec)) {
    return 'has a comma or semicolon; several addresses belong in a list, one each';
  }
  if (at === -1) return 'needs an @ between the local part and the domain';
  const local = spec.slice(0, at);
  if (local === '') return 'needs a local part before the @';
  if (/[()]/.test(local)) return 'has a comment in parentheses, which is not accepted';
  if (local.startsWith('.') || local.endsWith('.') || local.includes('..')) {
    return 'has a dot at the start or end of its local part, or two in a row';
  }
  if (/\s/.test(local)) return 'has a space before the @; put a name before <the address>';
  if (deceptive.test(local)) return 'has an invisible character before the @';
  return 'has a character before the @ that needs a quoted local part';
}

/** RFC 5321 §4.1.2: quotes that are not needed are dropped, so that one mailbox has one spelling. */
function splitQuotedLocal(spec: string): SplitAddress {
  const end = closingQuote(spec, 0);
  if (end === -1) return no('has a quote " that is not closed');
  if (spec[end + 1] !== '@') {
    return no('needs the @ right after the quoted local part; a name belongs before <the address>');
  }
  const content = unescape(spec.slice(1, end));
  if (content === '') return no('has nothing between the quotes before the @');
  // RFC 5321 allows them; half of all mail programs, the client that sends our mail among them, do not.
  if (/[<>]/.test(content))
    return no('has a < or > in its quoted local part, which is not accepted');
  if (deceptive.test(content.replaceAll(' ', ''))) {
    return no('has an invisible character before the @');
  }
  const local = dotAtom.test(content) ? content : quote(content);
  return { ok: true, local, domain: spec.slice(end + 2) };
}

type ParsedName = { ok: true; name: string | null } | { ok: false; problem: string };

/** RFC 5322 §3.2.5 phrase: words and quoted strings; the quotes are syntax, not part of the name. */
function parseName(text: string): ParsedName {
  let name = '';
  for (let i = 0; i < text.length; i += 1) {
    const character = text.charAt(i);
    if (character === '"') {
      const end = closingQuote(text, i);
      if (end === -1) return no('has a quote " in its name that is not closed');
      name += unescape(text.slice(i + 1, end));
      i = end;
    } else if (character === ',') {
      return no(
        'has a comma: put the name in double quotes; several addresses belong in a list, one each',
      );
    } else if (character === ';' || character === ':' || character === '>') {
      return no(`has a ${character} in its name: put the name in double quotes`);
    } else {
      name += character;
    }
  }
  const trimmed = name.trim();
  return { ok: true, name: trimmed === '' ? null : trimmed };
}

function formatName(name: string): string {
  if (name.includes('=?')) return isEncoded(name) ? name : encodePhrase(name);
  if (name.length > nameWordMax || !isAscii(name)) return encodePhrase(name);
  return atomPhrase.test(name) ? name : quote(name);
}

/** RFC 5322 §3.2.3: a phrase of atoms needs no quotes. A dot there is obsolete syntax, so it gets them. */
const atomPhrase = /^[A-Za-z0-9!#$%&'*+\-/=?^_`{|}~]+(?: [A-Za-z0-9!#$%&'*+\-/=?^_`{|}~]+)*$/;
/** Names that came encoded already, in the alphabet of RFC 2047 §5 (3), are not encoded again; §2: 75 characters a word. */
const encodedWord = /^=\?[A-Za-z0-9-]{1,20}\?[BbQq]\?[A-Za-z0-9!*+\-/=_]+\?=$/;
const isEncoded = (name: string): boolean =>
  name.split(' ').every((word) => word.length <= 75 && encodedWord.test(word));

function quote(content: string): string {
  return `"${content.replace(/["\\]/g, '\\$&')}"`;
}

function unescape(content: string): string {
  return content.replace(/\\(.)/gu, '$1');
}

/** The index of the quote that closes the one at `start`, or -1. */
function closingQuote(text: string, start: number): number {
  for (let i = start + 1; i < text.length; i += 1) {
    if (text[i] === '\\') i += 1;
    else if (text[i] === '"') return i;
  }
  return -1;
}

function findOutsideQuotes(text: string, wanted: string): number {
  for (let i = 0; i < text.length; i += 1) {
    if (text[i] === wanted) return i;
    if (text[i] !== '"') continue;
    const end = closingQuote(text, i);
    if (end === -1) return -1;
    i = end;
  }
  return -1;
}

function labelProblem(label: string): string | null {
  if (label === '') return 'has an empty label in its domain: a dot too many';
  if (label.length > labelOctetsMax) {
    return `has a label of more than ${labelOctetsMax} characters in its domain`;
  }
  if (label.startsWith('-') || label.endsWith('-')) {
    return 'has a domain label that starts or ends with a hyphen';
  }
  if (!/^[a-z0-9-]+$/.test(label)) {
    return 'has a character in its domain that domain names cannot have';
  }
  // An A-label must decode and encode back to itself (RFC 5890 §2.3.2.1).
  if (label.startsWith('xn--')) {
    const unicode = domainToUnicode(label);
    if (unicode === label || domainToASCII(unicode) !== label) {
      return 'has a domain label that starts with xn-- but is not valid punycode';
    }
    if (unicode.startsWith('-') || unicode.endsWith('-')) {
      return 'has a domain label that starts or ends with a hyphen';
    }
  }
  return null;
}
