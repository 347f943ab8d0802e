// Puts tracked links and a pixel into the html of an email. In: html of any quality. Out: the same characters, but for the
// values of `href` that now lead through us, and one image. Nothing is parsed into a tree and written anew: a tokenizer
// (htmlparser2) says where values begin and end, and they are cut out and replaced. Linear in the length, and bounded.
import { Tokenizer, QuoteType, type TokenizerCallbacks } from 'htmlparser2';
import { LINK_MAX_CHARS, readLink, type TrackedEmail, type TrackingTokens } from './tokens.ts';

/** How the html of one email is tracked. JSON, so that it can be kept until the message is composed. */
export interface TrackingPlan {
  readonly opens: boolean;
  readonly clicks: boolean;
  /** Where pixels and links lead, without a slash at the end. */
  readonly base: string;
  /** Links that begin so stay as they are: a reader's own choices are nobody's statistics. */
  readonly keep: string;
}

export interface TrackedHtml {
  readonly html: string;
  /** A pixel is in it. */
  readonly opens: boolean;
  /** How many lead through us. */
  readonly links: number;
  /** Why the html stayed as it was, in a sentence; null: it was looked at. */
  readonly skipped: string | null;
}

/** Mail programs clip at a tenth of a megabyte; what is longer is pictures in the text. The worst found takes 0.1 s, others 10 ms. */
export const TRACKED_HTML_MAX_CHARS = 2 * 1024 * 1024;
/** Each costs an HMAC and at least a hundred bytes. */
export const TRACKED_LINKS_MAX = 2_000;
/** Windows programs, Outlook among them, follow nothing above 2,083 characters: a link that would get longer stays as it is. */
export const TRACKED_URL_MAX_CHARS = 2_048;
/** An element with it keeps its link. */
export const NO_TRACK = 'data-mailstead-no-track';

export const PIXEL_PATH = '/o/';
export const CLICK_PATH = '/c/';
/** A tag that opens only where text is: what stands before it is no comment, no script and no half tag. */
const PROBE = '<b>';

interface Edit {
  readonly start: number;
  readonly end: number;
  readonly link: string;
}

/** The html with tracking; the same input gives the same output. */
export function trackHtml(
  html: string,
  plan: TrackingPlan,
  d: { readonly of: TrackedEmail; readonly tokens: TrackingTokens },
): TrackedHtml {
  const untouched = (skipped: string): TrackedHtml => ({ html, opens: false, links: 0, skipped });
  if (html.length > TRACKED_HTML_MAX_CHARS) {
    return untouched(`The html has more than ${TRACKED_HTML_MAX_CHARS} characters.`);
  }
  const found = new Scan(html, plan);
  const { edits } = found;
  if (edits.length > TRACKED_LINKS_MAX) {
    return untouched(`The html has more than ${TRACKED_LINKS_MAX} links.`);
  }
  const base = escapeAttribute(plan.base);
  const urls = new Map<string, string | null>();
  const urlOf = (link: string): string | null => {
    const known = urls.get(link);
    if (known !== undefined) return known;
    const path = `${CLICK_PATH}${d.tokens.link(d.of, link)}`;
    const isLong = plan.base.length + path.length > TRACKED_URL_MAX_CHARS;
    const url = isLong ? null : `"${base}${path}"`;
    urls.set(link, url);
    return url;
  };
  const cuts = edits.flatMap(({ start, end, link }) => {
    const text = urlOf(link);
    return text === null ? [] : [{ start, end, text }];
  });
  const links = cuts.length;
  if (found.pixelAt !== null) {
    const image = `<img src="${base}${PIXEL_PATH}${d.tokens.pixel(d.of)}.gif" alt="" width="1" height="1" border="0" style="display:block;width:1px;height:1px;border:0">`;
    cuts.push({ start: found.pixelAt, end: found.pixelAt, text: image });
    cuts.sort((one, other) => one.start - other.start); // links may stand behind the body
  }
  const pieces: string[] = [];
  let at = 0;
  for (const { start, end, text } of cuts) {
    pieces.push(html.slice(at, start), text);
    at = end;
  }
  pieces.push(html.slice(at));
  return {
    html: pieces.join(''),
    opens: found.pixelAt !== null,
    links,
    skipped: null,
  };
}

/** One walk over the html: which values are to be replaced, quotes included, and where the pixel goes. */
class Scan implements TokenizerCallbacks {
  readonly edits: Edit[] = [];
  /** Null where it would not be an image. */
  pixelAt: number | null = null;

  readonly #html: string;
  readonly #plan: TrackingPlan;
  readonly #tokenizer: Tokenizer;
  /** In an `<a>` or `<area>`. */
  #isLink = false;
  #isExempt = false;
  /** Of its first `href`, the one that counts: where its name ends; -1 before. */
  #nameEnd = -1;
  #isReading = false;
  #edit: Edit | null = null;
  #bodyEnd = -1;
  #endsInText = false;

  constructor(html: string, plan: TrackingPlan) {
    this.#html = html;
    this.#plan = plan;
    // Without entities it skips from tag to tag, which is several times faster; links are decoded one by one.
    this.#tokenizer = new Tokenizer({ decodeEntities: false }, this);
    this.#tokenizer.write(html);
    this.#tokenizer.write(PROBE);
    if (!plan.opens) return;
    if (this.#bodyEnd >= 0) this.pixelAt = this.#bodyEnd;
    else if (this.#endsInText) this.pixelAt = html.length;
  }

  onopentagname(start: number, end: number): void {
    if (start > this.#html.length) {
      this.#endsInText = true;
      return;
    }
    const length = end - start;
    this.#isLink =
      this.#plan.clicks &&
      (length === 1 || length === 4) &&
      LINK_TAGS.has(this.#html.slice(start, end).toLowerCase());
    this.#isExempt = false;
    this.#nameEnd = -1;
    this.#edit = null;
  }

  onattribname(start: number, end: number): void {
    if (!this.#isLink) return;
    const length = end - start;
    if (length !== HREF.length && length !== NO_TRACK.length) return;
    const name = this.#html.slice(start, end).toLowerCase();
    if (name === NO_TRACK) this.#isExempt = true;
    if (name !== HREF || this.#nameEnd >= 0) return;
    this.#nameEnd = end;
    this.#isReading = true;
  }

  onattribend(quote: QuoteType, end: number): void {
    if (!this.#isReading) return;
    this.#isReading = false;
    if (quote === QuoteType.NoValue) return;
    VALUE_START.lastIndex = this.#nameEnd;
    const start = this.#nameEnd + VALUE_START.exec(this.#html)![0].length;
    if (end - start > VALUE_MAX_CHARS) return;
    const value = this.#html.slice(start, end);
    const isQuoted = quote !== QuoteType.Unquoted;
    const href = value.includes('&') ? decode(value) : isQuoted ? value.slice(1, -1) : value;
    const link = readLink(href);
    if (link === null || link.startsWith(this.#plan.keep)) return;
    this.#edit = { start, end, link };
  }

  onopentagend(end: number): void {
    // A tag that only the probe ends is no tag.
    if (end >= this.#html.length) return;
    if (this.#edit !== null && !this.#isExempt) this.edits.push(this.#edit);
    if (this.edits.length > TRACKED_LINKS_MAX) this.#tokenizer.pause();
    this.#edit = null;
    this.#isLink = false;
  }

  onselfclosingtag(end: number): void {
    this.onopentagend(end);
  }

  onclosetag(start: number, end: number): void {
    if (end - start !== BODY.length || end > this.#html.length) return;
    if (this.#html.slice(start, end).toLowerCase() !== BODY) return;
    this.#bodyEnd = this.#html.lastIndexOf('<', start);
  }

  readonly onattribdata = ignore;
  readonly onattribentity = ignore;
  readonly oncdata = ignore;
  readonly oncomment = ignore;
  readonly ondeclaration = ignore;
  readonly onend = ignore;
  readonly onprocessinginstruction = ignore;
  readonly ontext = ignore;
  readonly ontextentity = ignore;
}

const ignore = (): void => undefined;

/** What an attribute's value, with its quotes, means: as a browser reads it, entities and all. */
function decode(value: string): string {
  let text = '';
  const html = `<a b=${value}>`;
  const tokenizer = new Tokenizer(
    { decodeEntities: true },
    {
      ...NOTHING,
      onattribdata: (start, end) => void (text += html.slice(start, end)),
      onattribentity: (codepoint) => void (text += String.fromCodePoint(codepoint)),
    },
  );
  tokenizer.write(html);
  return text;
}

const NOTHING: TokenizerCallbacks = {
  onattribdata: ignore,
  onattribend: ignore,
  onattribentity: ignore,
  onattribname: ignore,
  oncdata: ignore,
  onclosetag: ignore,
  oncomment: ignore,
  ondeclaration: ignore,
  onend: ignore,
  onopentagend: ignore,
  onopentagname: ignore,
  onprocessinginstruction: ignore,
  onselfclosingtag: ignore,
  ontext: ignore,
  ontextentity: ignore,
};

const LINK_TAGS = new Set(['a', 'area']);
const HREF = 'href';
const BODY = 'body';
/** An entity takes up to 33 characters, so what is longer may still be short; nobody writes that. */
const VALUE_MAX_CHARS = 4 * LINK_MAX_CHARS;
/** Between a name and the first character of its value or its quote. */
const VALUE_START = /[\t\n\f\r ]*=[\t\n\f\r ]*/y;

const ENTITIES: Readonly<Record<string, string>> = {
  '&': '&amp;',
  '<': '&lt;',
  '>': '&gt;',
  '"': '&quot;',
};
const escapeAttribute = (text: string): string =>
  text.replace(/[&<>"]/g, (found) => ENTITIES[found] ?? '');
