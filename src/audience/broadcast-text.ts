// What a broadcast says to one contact. Its texts are taken apart once; for each contact the places of variables are
// filled with what is known of it. Pure.
//
// The author of a broadcast writes HTML, its contacts do not: what is known of a contact is escaped in `html`, stands as it
// is in `text`, and on one line in `subject`. A default behind the bar is the author's and stays as it is.
import type { Issue } from '../access/refusal.ts';
import { textFromHtml } from '../mail/html-text.ts';
import type { PropertyValue } from '../store/contact.ts';
import { CONTENT_MAX_BYTES, PLACEHOLDERS_MAX } from '../templates/content.ts';
import { parsePlaceholders } from '../templates/placeholder.ts';
import { writeValue } from '../templates/value.ts';

/** The texts of a broadcast that is sent. */
export interface BroadcastTexts {
  readonly subject: string;
  readonly previewText: string | null;
  readonly html: string | null;
  /** Null: made from html. Empty: no text part. */
  readonly text: string | null;
}

/** What is known of a contact. */
export interface Person {
  readonly email: string;
  readonly firstName: string | null;
  readonly lastName: string | null;
  /** The value, or what the property says for contacts without one. */
  propertyOf(key: string): PropertyValue | null;
  /** The property's own fallback. */
  fallbackOf(key: string): PropertyValue | null;
  /** Where the contact can unsubscribe. */
  readonly preferenceUrl: string;
}

/** A broadcast, ready to be filled. */
export interface ParsedBroadcast {
  readonly subject: Parts;
  readonly html: Parts | null;
  readonly text: Parts | null;
  /** Why it cannot be sent as it is. */
  readonly issues: readonly Issue[];
  /** In UTF-16 units, about. */
  readonly size: number;
}

export interface Filled {
  readonly subject: string;
  readonly html: string | null;
  readonly text: string | null;
}

interface Place {
  /** Of the contact: a field, the link to its choices, or a property by its key. */
  readonly what: 'first_name' | 'last_name' | 'email' | 'url' | 'property';
  readonly key: string;
  /** The author's; null: none. */
  readonly fallback: string | null;
}

type Parts = readonly (string | Place)[];

/** `{{{contact.first_name}}}` and `{{{FIRST_NAME}}}` are the same. */
const KEYS = /^(?:contact\.)?[A-Za-z0-9_]{1,50}$/;
const FIELDS: ReadonlyMap<string, Exclude<Place['what'], 'property'>> = new Map([
  ['FIRST_NAME', 'first_name'],
  ['LAST_NAME', 'last_name'],
  ['EMAIL', 'email'],
  ['contact.first_name', 'first_name'],
  ['contact.last_name', 'last_name'],
  ['contact.email', 'email'],
  ['RESEND_UNSUBSCRIBE_URL', 'url'],
  ['UNSUBSCRIBE_URL', 'url'],
]);
const CONTACT = 'contact.';
/** The same as of other mail (sending/field-rules.ts); what values make longer is cut. */
const SUBJECT_MAX_CHARACTERS = 2_000;
// oxlint-disable-next-line no-control-regex
const CONTROLS = /[\u0000-\u001f\u007f\u0085\u2028\u2029]+/g;
/** Mail programs show what follows behind a short preview: these push it out of sight. */
const PREVIEW_FILL = '&#847;&zwnj;&nbsp;'.repeat(80);
const PREVIEW_STYLE =
  'display:none;overflow:hidden;line-height:1px;opacity:0;max-height:0;max-width:0';

/**
 * Takes the texts apart. `properties`: the keys that there are, to find those that nobody knows; null: every key will do,
 * as when a property was deleted after the broadcast was sent on its way.
 */
export function parseBroadcast(
  { subject, previewText, html, text }: BroadcastTexts,
  properties: ReadonlySet<string> | null,
): ParsedBroadcast {
  const issues: Issue[] = [];
  const take = (path: string, given: string): Parts =>
    takeApart(path, given, { properties, issues });
  const preview = previewText === null || previewText.trim() === '' ? null : previewText;
  const plain = text ?? (html === null ? null : textFromHtml(html));
  const parsed = {
    subject: take('subject', subject),
    html: html === null ? null : take('html', html),
    text: plain === null ? null : take('text', plain),
  };
  if (preview !== null) take('preview_text', preview);
  return {
    ...parsed,
    // Once more with the preview in it, which has no text of its own for what is wrong.
    html:
      html === null || preview === null
        ? parsed.html
        : takeApart('html', withPreview(html, preview), { properties: null, issues: [] }),
    // What is made of html says again what is wrong there.
    issues: text === null ? issues.filter(({ path }) => path !== 'text') : issues,
    size: subject.length + 2 * (html?.length ?? 0) + (plain?.length ?? 0),
  };
}

function takeApart(
  path: string,
  text: string,
  d: { readonly properties: ReadonlySet<string> | null; readonly issues: Issue[] },
): Parts {
  const { segments, placeholders, misnamed } = parsePlaceholders(text, KEYS);
  if (placeholders.length > PLACEHOLDERS_MAX) {
    const message = `\`${path}\` has more than ${PLACEHOLDERS_MAX} places for variables.`;
    d.issues.push({ path, message });
  }
  const unknown = new Set<string>();
  const parts = segments.map((segment): string | Place => {
    if (typeof segment === 'string') return segment;
    const { key, fallback } = segment;
    const field = FIELDS.get(key);
    if (field !== undefined) return { what: field, key, fallback };
    const property = key.startsWith(CONTACT) ? key.slice(CONTACT.length) : key;
    if (d.properties?.has(property) === false && fallback === null) unknown.add(key);
    return { what: 'property', key: property, fallback };
  });
  for (const name of misnamed) {
    const message = `\`${path}\` has {{{${name}}}}, but a key is 1 to 50 ASCII letters, digits or underscores.`;
    d.issues.push({ path, message });
  }
  for (const key of unknown) {
    const message = `\`${path}\` uses {{{${key}}}}, which is no contact property; create it, or give a default: {{{${key}|…}}}.`;
    d.issues.push({ path, message });
  }
  return parts;
}

/** The texts for one contact; null when they have become too large. */
export function fillBroadcast(broadcast: ParsedBroadcast, person: Person): Filled | null {
  const html = broadcast.html === null ? null : fill(broadcast.html, person, escapeHtml);
  const text = broadcast.text === null ? null : fill(broadcast.text, person, asItIs);
  if (isTooLarge(html) || isTooLarge(text)) return null;
  const subject = fill(broadcast.subject, person, oneLine);
  return { subject: subject.slice(0, SUBJECT_MAX_CHARACTERS).toWellFormed(), html, text };
}

/** No character has more than three bytes for each of its UTF-16 units. */
const isTooLarge = (text: string | null): boolean =>
  text !== null &&
  text.length > CONTENT_MAX_BYTES / 3 &&
  Buffer.byteLength(text) > CONTENT_MAX_BYTES;

function fill(parts: Parts, person: Person, write: (value: string) => string): string {
  let text = '';
  for (const part of parts) {
    if (typeof part === 'string') {
      text += part;
      continue;
    }
    const value = valueOf(part, person);
    if (value !== null) text += write(value);
    else if (part.fallback !== null) text += part.fallback;
    else if (part.what === 'property') {
      const fallback = person.fallbackOf(part.key);
      if (fallback !== null) text += write(writeValue(fallback));
    }
  }
  return text;
}

/** What is known of the contact; an empty value is none. */
function valueOf({ what, key }: Place, person: Person): string | null {
  switch (what) {
    case 'first_name':
      return orNull(person.firstName);
    case 'last_name':
      return orNull(person.lastName);
    case 'email':
      return person.email;
    case 'url':
      return person.preferenceUrl;
    case 'property': {
      const value = person.propertyOf(key);
      return value === null ? null : orNull(writeValue(value));
    }
  }
}

const orNull = (text: string | null): string | null => (text === '' ? null : text);
const asItIs = (text: string): string => text;
const oneLine = (text: string): string => text.replace(CONTROLS, ' ');

const SPECIAL = /[&<>"'`=]/g;
const ENTITIES: Readonly<Record<string, string>> = {
  '&': '&amp;',
  '<': '&lt;',
  '>': '&gt;',
  '"': '&quot;',
  "'": '&#39;',
  '`': '&#96;',
  '=': '&#61;',
};

/** For text and for the values of attributes, with quotes or without. */
const escapeHtml = (text: string): string =>
  text.replace(SPECIAL, (character) => ENTITIES[character]!);

/** The preview as mail programs look for it: the first text of the body, which the body does not show. */
function withPreview(html: string, preview: string): string {
  const hidden = `<div style="${PREVIEW_STYLE}" data-skip-in-text="true">${escapeText(preview)}${PREVIEW_FILL}</div>`;
  const at = bodyStart(html);
  return html.slice(0, at) + hidden + html.slice(at);
}

/** Not what stands in braces: a default there is the author's text, too, but its braces and bar are not. */
const escapeText = (text: string): string =>
  text.replace(/[&<>"]/g, (character) => ENTITIES[character]!);

/** Behind the tag that opens the body, else behind the head, else at the beginning. */
function bodyStart(html: string): number {
  for (const tag of [/<body(?=[\s>])/i, /<\/head(?=[\s>])/i]) {
    const opened = tag.exec(html);
    const end = opened === null ? -1 : html.indexOf('>', opened.index);
    if (end !== -1) return end + 1;
  }
  return 0;
}
