// What the list of emails is searched by: the lexemes of an email, and the filters of a request as a query over
// them. A lexeme begins with a piece of the tenant's id, so that one tenant's frequent words cost another
// nothing; then `w:` a word, `a:` an address, `d:` the domain of from, `t:` a tag, `m:` a Message-ID of a client's own.
import { createHash } from 'node:crypto';
import { domainToUnicode } from 'node:url';
import { checkTag, parseTime, type Refuse, type TagFilter } from '../access/filters.ts';
import { refuseFields, type Issue } from '../access/refusal.ts';
import { firstIdAt } from '../access/request-log.ts';
import { normalizedAddress, parseDomain } from '../mail/address.ts';
import { isAscii } from '../mail/header.ts';
import { emailEvents, type EmailEvent, type Tag } from '../store/email.ts';

/** 132 bits: who finds one compares the Message-IDs themselves. */
const MESSAGE_ID_CHARACTERS = 22;
/** Longer words are cut, in emails and in searches alike. */
const WORD_MAX_CHARACTERS = 40;
/** The first ones of an email; what is beyond is not found. */
const WORDS_MAX = 400;
const SEARCH_MIN_CHARACTERS = 2;
const SEARCH_MAX_CHARACTERS = 200;
const SEARCH_WORDS_MAX = 20;
const DAY_MS = 86_400_000;

/** Letters, digits and what modifies them. */
const WORD = /[\p{L}\p{N}\p{M}]+/gu;
/** Scripts that put no spaces between words: their runs are indexed by pairs of characters. */
const UNSPACED =
  /[\p{sc=Han}\p{sc=Hiragana}\p{sc=Katakana}\p{sc=Thai}\p{sc=Lao}\p{sc=Khmer}\p{sc=Myanmar}]+/gu;

/** Full and half width, ligatures and case do not matter. */
const fold = (text: string): string => text.normalize('NFKC').toLowerCase();
const cut = (word: string): string => [...word].slice(0, WORD_MAX_CHARACTERS).join('');

/** What most texts are made of: it needs no tables of Unicode. */
const ASCII_WORD = /[a-z0-9]+/g;

/** The words of a text in order, each with whether it must match to its end. */
function wordsOf(text: string): { readonly word: string; readonly isWhole: boolean }[] {
  if (isAscii(text)) {
    const words = text.toLowerCase().match(ASCII_WORD) ?? [];
    return words.map((word) => ({ word: word.slice(0, WORD_MAX_CHARACTERS), isWhole: false }));
  }
  return [...fold(text).matchAll(WORD)].flatMap(([run]) => {
    const words: { word: string; isWhole: boolean }[] = [];
    let from = 0;
    const spaced = (to: number): void => {
      if (to > from) words.push({ word: cut(run.slice(from, to)), isWhole: false });
    };
    for (const { 0: part, index } of run.matchAll(UNSPACED)) {
      spaced(index);
      const characters = [...part];
      for (const [at, one] of characters.entries()) {
        const next = characters[at + 1];
        words.push({ word: one + (next ?? ''), isWhole: next !== undefined });
      }
      from = index + part.length;
    }
    spaced(run.length);
    return words;
  });
}

/** The random end of the id: its beginning is a time that tenants may share. */
const mark = (tenantId: string): string => tenantId.slice(-6).toLowerCase();

/** The lexemes of one email, without repeats, at most a few hundred, each below 600 bytes. */
export function searchTermsOf(email: {
  readonly tenantId: string;
  readonly subject: string;
  /** A-labels, lower case. */
  readonly fromDomain: string;
  /** As given, with its name. */
  readonly from: string;
  /** Addresses alone. */
  readonly recipients: readonly string[];
  readonly tags: readonly Tag[] | null;
  /** With angle brackets, where it is not made of the email's id: what answers it is found by it. */
  readonly clientMessageId?: string | null;
}): readonly string[] {
  const words = new Set<string>();
  const addresses = [email.from.replace(/^[\s\S]*<([^<>]*)>\s*$/, '$1'), ...email.recipients];
  for (const text of [email.subject, email.from, ...addresses.flatMap(spellings)]) {
    for (const { word } of wordsOf(text)) {
      if (words.size >= WORDS_MAX) break;
      words.add(word);
    }
  }
  const own = mark(email.tenantId);
  return [
    ...new Set([
      `${own}d:${email.fromDomain}`,
      ...(email.tags ?? []).flatMap(({ name, value }) => [
        `${own}t:${name}`,
        `${own}t:${name}=${value}`,
      ]),
      ...[...words].map((word) => `${own}w:${word}`),
      ...addresses.map((address) => `${own}a:${spelled(address)}`),
      ...(email.clientMessageId ? [messageIdTerm(email.tenantId, email.clientMessageId)] : []),
    ]),
  ];
}

/** A digest of it: lexemes are short, Message-IDs need not be. Letters, digits, `:`, `-` and `_` alone. */
export function messageIdTerm(tenantId: string, messageId: string): string {
  const digest = createHash('sha256').update(messageId).digest('base64url');
  return `${mark(tenantId)}m:${digest.slice(0, MESSAGE_ID_CHARACTERS)}`;
}

/** As normalizedAddress() has it; an address of plain ASCII is spelled so already. */
const spelled = (address: string): string =>
  PLAIN_ADDRESS.test(address) ? address.toLowerCase() : normalizedAddress(address);
const PLAIN_ADDRESS = /^[\w.+-]+@[A-Za-z0-9.-]+$/;

/** The address as it is, and with its domain as people write it. */
function spellings(address: string): string[] {
  if (!address.includes('xn--')) return [address];
  const at = address.lastIndexOf('@');
  return [address, domainToUnicode(address.slice(at + 1))];
}

/** As the query of a list has them; an undefined one is not there. */
export interface EmailFilters extends TagFilter {
  /** One of the twelve, or several with commas. */
  readonly status: string | undefined;
  /** Of `from`. */
  readonly domain: string | undefined;
  readonly startDate: string | undefined;
  readonly endDate: string | undefined;
  readonly search: string | undefined;
}

export const NO_FILTERS: EmailFilters = {
  status: undefined,
  tagName: undefined,
  tagNameAlias: undefined,
  tagValue: undefined,
  tagValueAlias: undefined,
  domain: undefined,
  startDate: undefined,
  endDate: undefined,
  search: undefined,
};

export interface CheckedFilters {
  /** Without repeats, at least one; null: any. */
  readonly statuses: readonly EmailEvent[] | null;
  /** A tsquery over the lexemes; null: any. */
  readonly terms: string | null;
  /** The smallest id in range; null: no limit. */
  readonly fromId: string | null;
  /** The smallest id beyond the range. */
  readonly toId: string | null;
}

/** Throws a Refusal that lists every filter that is wrong. */
export function checkEmailFilters(tenantId: string, given: EmailFilters): CheckedFilters {
  const issues: Issue[] = [];
  const refuse: Refuse = (path, message) => {
    issues.push({ path, message });
    return null;
  };
  const own = mark(tenantId);
  const tag = checkTag(given, refuse);
  const domain = given.domain === undefined ? null : checkDomain(given.domain, refuse);
  const parts = [
    ...(tag === null ? [] : [lexeme(`${own}t:${tag}`)]),
    ...(domain === null ? [] : [lexeme(`${own}d:${domain}`)]),
    ...(given.search === undefined ? [] : checkSearch(own, given.search, refuse)),
  ];
  const statuses = given.status === undefined ? null : checkStatuses(given.status, refuse);
  const range = checkRange(given, refuse);
  if (issues.length > 0) throw refuseFields(issues);
  return { statuses, terms: parts.length === 0 ? null : parts.join(' & '), ...range };
}

/** PostgreSQL's syntax of a quoted lexeme in a tsquery; `:*` matches what begins with it. */
const lexeme = (text: string, isPrefix = false): string =>
  `'${text.replace(/['\\]/g, '$&$&')}'${isPrefix ? ':*' : ''}`;

function checkStatuses(given: string, refuse: Refuse): readonly EmailEvent[] | null {
  const parts = new Set(given.split(',', emailEvents.length * 2).map((part) => part.trim()));
  const known = emailEvents.filter((event) => parts.has(event));
  if (known.length === parts.size) return known;
  const message = `\`status\` must be one of ${emailEvents.join(', ')}, or several of them with commas.`;
  return refuse('status', message);
}

function checkDomain(given: string, refuse: Refuse): string | null {
  const parsed = parseDomain(given.trim());
  if (parsed.ok) return parsed.domain;
  return refuse('domain', '`domain` must be a domain name such as `example.com`: that of `from`.');
}

/** Every word must occur; the end of a word may be left out. */
function checkSearch(own: string, given: string, refuse: Refuse): readonly string[] {
  const length = [...given].length;
  if (length < SEARCH_MIN_CHARACTERS || length > SEARCH_MAX_CHARACTERS) {
    const message = `\`search\` must be ${SEARCH_MIN_CHARACTERS} to ${SEARCH_MAX_CHARACTERS} characters long.`;
    refuse('search', message);
    return [];
  }
  const found = given.split(/\s+/).flatMap((written) => {
    const token = written.replace(/^[<("',;]+|[>)"',;]+$/g, '');
    const isAddress = /^[^@]+@/.test(token) && !/\p{Cc}/u.test(token);
    if (isAddress) return [lexeme(`${own}a:${normalizedAddress(token)}`, true)];
    return wordsOf(token).map(({ word, isWhole }) =>
      // What begins with one letter is nearly everything.
      lexeme(`${own}w:${word}`, !isWhole && (word.length > 1 || /[^\p{ASCII}]/u.test(word))),
    );
  });
  const terms = [...new Set(found)];
  if (terms.length === 0) {
    refuse('search', '`search` must have a letter or a digit to look for.');
  } else if (terms.length > SEARCH_WORDS_MAX) {
    refuse('search', `\`search\` must have at most ${SEARCH_WORDS_MAX} words.`);
  }
  return terms;
}

/** Creation times as a range of ids, both ends inside: a whole day, or the millisecond that is named. */
function checkRange(
  given: Pick<EmailFilters, 'startDate' | 'endDate'>,
  refuse: Refuse,
): { fromId: string | null; toId: string | null } {
  const when = 'must be a date like `2026-05-06` or an ISO 8601 time.';
  const parse = (path: string, text: string | undefined): ReturnType<typeof parseTime> => {
    if (text === undefined) return null;
    return parseTime(text) ?? refuse(path, `\`${path}\` ${when}`);
  };
  const start = parse('start_date', given.startDate);
  const end = parse('end_date', given.endDate);
  const endMs = end === null ? null : end.ms + (end.isDay ? DAY_MS : 1);
  if (start !== null && endMs !== null && start.ms >= endMs) {
    refuse('end_date', '`end_date` must not be before `start_date`.');
  }
  return {
    fromId: start === null ? null : firstIdAt(start.ms),
    toId: endMs === null ? null : firstIdAt(endMs),
  };
}
