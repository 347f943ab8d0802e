// What the request log keeps of a body: JSON of bounded size without secrets. Tokens, passwords and signed
// links are replaced wherever they stand, contents of attachments and raw messages by their size. Works
// through a body once and stops as soon as it is too large, so that a body of 48 MB costs no more than
// one of 64 KiB.
import { LINK_PATH, PREFERENCE_PATH } from './signed-link.ts';

/** Of one body, as UTF-8. */
export const LOGGED_BODY_MAX_BYTES = 64 * 1024;
const REDACTED = '[redacted]';

const SECRET_KEY =
  /(?:token|secret|password|passwd|passphrase|authorization|credential|api_?-?key|private_?-?key)s?$/i;
/** What a string of a shortened body keeps. */
const CUT_CHARACTERS = 1_000;
/** Longer than any secret, so that none is cut in the middle and missed. */
const SECRET_MAX_CHARACTERS = 600;
const CUT_ITEMS = 20;
/** Of any other string than the texts of a message: longer ones are files in the wrong place. */
const STRING_MAX_CHARACTERS = 4 * 1_024;
const TEXTS = new Set(['html', 'text']);
const ATTACHMENTS = /^attachments?$/;
const DEPTH_MAX = 70;

const SECRETS_IN_TEXT: readonly (readonly [string, RegExp, string])[] = [
  ['re_', /\bre_([A-Za-z0-9]{8})_[A-Za-z0-9]{24}/g, `re_$1_${REDACTED}`],
  ['whsec_', /\bwhsec_[A-Za-z0-9+/=_-]+/g, `whsec_${REDACTED}`],
  [
    LINK_PATH,
    new RegExp(`${LINK_PATH}[A-Za-z0-9_-]{1,400}\\.[A-Za-z0-9_-]{43}`, 'g'),
    LINK_PATH + REDACTED,
  ],
  // User and password of a URL, up to where its host begins.
  ['://', /:\/\/[^\s/?#@"<>]{1,600}@/g, `://${REDACTED}@`],
  [
    PREFERENCE_PATH,
    new RegExp(`${PREFERENCE_PATH}[A-Za-z0-9_-]{60,140}`, 'g'),
    PREFERENCE_PATH + REDACTED,
  ],
];

/** For logs: the text with the tokens and signed links in it replaced. */
export function withoutSecrets(text: string): string {
  let clean = text;
  for (const [sign, pattern, substitute] of SECRETS_IN_TEXT) {
    if (clean.includes(sign)) clean = clean.replace(pattern, substitute);
  }
  return clean;
}

/** Decoded bytes of what the caller put elsewhere and left a placeholder for. */
export type SizeOf = (placeholder: string) => number | null;

/**
 * The body as JSON, or null when there is none. A body that is too large has its strings and lists cut; when
 * that is not enough, only `{"truncated": true}` is left.
 */
export function describeBody(body: unknown, sizeOf: SizeOf = () => null): string | null {
  if (body === undefined) return null;
  for (const isCut of [false, true]) {
    const text = new Writer(isCut, sizeOf).write(body);
    if (text !== null) return text;
  }
  return JSON.stringify({ truncated: true });
}

class TooLarge extends Error {}

class Writer {
  readonly #isCut: boolean;
  readonly #sizeOf: SizeOf;
  #parts: string[] = [];
  #length = 0;

  constructor(isCut: boolean, sizeOf: SizeOf) {
    this.#isCut = isCut;
    this.#sizeOf = sizeOf;
  }

  /** Null when it does not fit. */
  write(body: unknown): string | null {
    try {
      this.#value(body, '', '', 0);
      const text = this.#parts.join('');
      return Buffer.byteLength(text) > LOGGED_BODY_MAX_BYTES ? null : text;
    } catch (error) {
      if (error instanceof TooLarge) return null;
      throw error;
    }
  }

  #put(text: string): void {
    this.#length += text.length; // at most its bytes, and cheaper to know
    if (this.#length > LOGGED_BODY_MAX_BYTES) throw new TooLarge();
    this.#parts.push(text);
  }

  /**
   * `key` is the field that holds the value, empty for an item of a list; `parent` the field around that, or the
   * one for attachments, however far around.
   */
  #value(given: unknown, key: string, parent: string, depth: number): void {
    const value = given instanceof Date ? given.toJSON() : given;
    const isAttachment = ATTACHMENTS.test(key) || ATTACHMENTS.test(parent);
    if (value === null || value === undefined || typeof value === 'function') this.#put('null');
    else if (SECRET_KEY.test(key)) this.#text(REDACTED);
    else if (isAttachment && key === 'content') this.#text(this.#describeContent(value));
    else if (typeof value === 'string') {
      const isUrl = key === 'endpoint' && depth <= 1;
      const shown = isUrl ? withoutCredentials(value) : value;
      this.#text(isAttachment ? this.#ofAttachment(value, key) : this.#clean(shown, key));
    } else if (depth > DEPTH_MAX) this.#text('[too deep]');
    else if (Array.isArray(value)) this.#list(value, around(key, parent), depth);
    else if (typeof value === 'object') this.#object(value, around(key, parent), depth);
    else this.#put(JSON.stringify(value));
  }

  #text(text: string): void {
    if (text.length > LOGGED_BODY_MAX_BYTES) throw new TooLarge();
    this.#put(JSON.stringify(text));
  }

  #list(items: readonly unknown[], parent: string, depth: number): void {
    const shown = this.#isCut ? items.slice(0, CUT_ITEMS) : items;
    this.#put('[');
    for (const [index, item] of shown.entries()) {
      if (index > 0) this.#put(',');
      this.#value(item, '', parent, depth + 1);
    }
    if (shown.length < items.length) this.#put(`,"[${items.length - shown.length} more]"`);
    this.#put(']');
  }

  #object(value: object, parent: string, depth: number): void {
    this.#put('{');
    let isFirst = true;
    for (const [name, item] of Object.entries(value)) {
      if (item === undefined) continue;
      if (!isFirst) this.#put(',');
      isFirst = false;
      this.#text(name);
      this.#put(':');
      this.#value(item, name.toLowerCase(), parent, depth + 1);
    }
    this.#put('}');
  }

  #ofAttachment(text: string, key: string): string {
    if (key === '' || ATTACHMENTS.test(key) || /^data:/i.test(text))
      return this.#describeContent(text);
    return this.#clean(key === 'path' ? withoutCredentials(text) : text, key);
  }

  #describeContent(content: unknown): string {
    if (typeof content !== 'string') return '[content]';
    const sizeBytes = this.#sizeOf(content) ?? Math.floor((content.length * 3) / 4);
    return `[content, about ${sizeBytes} bytes]`;
  }

  #clean(text: string, key: string): string {
    if (key === 'raw') return `[raw message, ${text.length} characters]`;
    if (text.length > STRING_MAX_CHARACTERS && !TEXTS.has(key)) {
      return `[${text.length} characters]`;
    }
    const isCut = this.#isCut && text.length > CUT_CHARACTERS;
    const shown = isCut ? text.slice(0, CUT_CHARACTERS + SECRET_MAX_CHARACTERS) : text;
    if (shown.length > LOGGED_BODY_MAX_BYTES) throw new TooLarge();
    const clean = withoutSecrets(shown);
    if (!isCut) return clean;
    return `${clean.slice(0, CUT_CHARACTERS).toWellFormed()}… [${text.length} characters]`;
  }
}

const around = (key: string, parent: string): string =>
  key === '' || ATTACHMENTS.test(parent) ? parent : key;

/** A URL to fetch from: what is before the host or after the path may be what lets one in. */
function withoutCredentials(url: string): string {
  const [place = '', query] = url.slice(0, CUT_CHARACTERS).split(/[?#]/, 2);
  const clean = place.replace(/^([^/]*\/\/)[^/]*@/, `$1${REDACTED}@`);
  return query === undefined ? clean : `${clean}?${REDACTED}`;
}
