/**
 * Where a template's variables stand: `{{{NAME}}}`, or `{{{NAME|what else}}}` with a default of its own.
 *
 * Pure, and linear in the text. White space around the key and around the default does not count. Three braces
 * around anything that does not look like a name stay as they are: they may be part of a script or style.
 */

/** 1 to 50 letters, digits and underscores; case matters. */
export const KEY = /^[A-Za-z0-9_]{1,50}$/;

export interface Placeholder {
  readonly key: string;
  /** Stands in for a missing value, before the variable's fallback; null: none. */
  readonly fallback: string | null;
}

/** Literal text and placeholders, in their order. */
export type Segments = readonly (string | Placeholder)[];

export interface ParsedText {
  readonly segments: Segments;
  readonly placeholders: readonly Placeholder[];
  /** What was probably meant as a key and is none, at most ten of them. */
  readonly misnamed: readonly string[];
}

const MISNAMED_MAX = 10;
// No two starts look at the same text: what is inside has no brace.
const BRACES = /\{\{\{([^{}]*)\}\}\}/g;
/** What a person would write for a name: `first-name`, `contact.email`. */
const NAME_LIKE = /^[\p{L}\p{N}_.\- ]{1,100}$/u;

/** Takes a text apart. `keys`: what is a key here. */
export function parsePlaceholders(text: string, keys: RegExp = KEY): ParsedText {
  const segments: (string | Placeholder)[] = [];
  const placeholders: Placeholder[] = [];
  const misnamed = new Set<string>();
  let done = 0;
  for (const match of text.matchAll(BRACES)) {
    const inside = match[1] ?? '';
    const bar = inside.indexOf('|');
    const key = (bar === -1 ? inside : inside.slice(0, bar)).trim();
    if (!keys.test(key)) {
      if (NAME_LIKE.test(key) && misnamed.size < MISNAMED_MAX) misnamed.add(key);
      continue;
    }
    const placeholder = { key, fallback: bar === -1 ? null : inside.slice(bar + 1).trim() };
    if (match.index > done) segments.push(text.slice(done, match.index));
    segments.push(placeholder);
    placeholders.push(placeholder);
    done = match.index + match[0].length;
  }
  if (done < text.length) segments.push(text.slice(done));
  return { segments, placeholders, misnamed: [...misnamed] };
}
