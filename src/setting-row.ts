/**
 * One row of the table of settings: its shape, and the way from what is set to a value.
 *
 * In: a row, and the variables that are set (handed in: only src/config.ts reads the environment). Out: a value, or
 * one sentence that says what is wrong and what is allowed, without the value of a secret.
 */
import { closeSync, openSync, readSync } from 'node:fs';
import type { Kind } from './setting-kinds.ts';

const FILE_BYTES_MAX = 64 * 1024;
const SHOWN_CHARACTERS_MAX = 100;

export type Mode = 'development' | 'production';

/** What is written when nothing is set, the same in both modes or `[development, production]`. Null: nothing. */
type Default = string | null | readonly [development: string | null, production: string | null];

export interface Setting<T> {
  readonly name: string;
  readonly kind: Kind<T>;
  readonly default: Default;
  /** Sentences for docs/config.md. */
  readonly meaning: string;
  /** What the reference says in place of a default of null. */
  readonly absent?: string;
  /** There is no default in production. */
  readonly required?: true;
  /** The value is never shown. */
  readonly secret?: true;
  /** A value for the example file, where there is no default. */
  readonly example?: string;
  /** Not in this release: the whole setting, or these values (up to a colon). Delete it to turn it on. */
  readonly notYet?: true | readonly string[];
}

type Read = { readonly value: unknown } | { readonly problem: string };

type Text = { readonly text: string | null } | { readonly problem: string };

/** The value of a setting, given the values of those above it in the table. `readFile` throws when it cannot. */
export function readSetting(
  setting: Setting<unknown>,
  above: Readonly<Record<string, unknown>>,
  source: { readonly env: NodeJS.ProcessEnv; readonly readFile: (path: string) => string },
): Read {
  const found = findText(setting, source.env, source.readFile);
  if ('problem' in found) return found;
  const { name, kind, notYet } = setting;
  const must = `it must be ${describe(setting)}.`;
  if (found.text === null) {
    const mode = above['mode'] ?? null; // Null while the mode is read, and after a bad one.
    if (mode === 'production' && setting.required) {
      return { problem: `${name} is required in production: ${must}` };
    }
    const fallback = defaultIn(setting, mode === 'production' ? mode : 'development');
    const port = String(above['httpPort'] ?? 0);
    return { value: fallback === null ? null : kind.parse(fallback.replace('<port>', port)) };
  }
  const value = /\p{Cc}/u.test(found.text) ? undefined : kind.parse(found.text);
  if (value === undefined) {
    const shown = setting.secret
      ? 'has a bad value (a secret, not shown)'
      : `is ${show(found.text)}`;
    return { problem: `${name} ${shown}, but ${must}` };
  }
  const parts = found.text.split(',').map((part) => part.replace(/:.*/, '').trim());
  const early =
    notYet === undefined || notYet === true ? [] : notYet.filter((one) => parts.includes(one));
  if (early.length > 0) {
    return { problem: `${name} names ${early.join(', ')}, not in this release: ${must}` };
  }
  return { value };
}

function findText(
  { name, notYet, secret }: Setting<unknown>,
  env: NodeJS.ProcessEnv,
  readFile: (path: string) => string,
): Text {
  const direct = env[name] ?? '';
  const path = env[`${name}_FILE`] ?? '';
  if (notYet === true && `${direct}${path}` !== '') {
    return { problem: `${name} is set, but is not in this release; leave it out.` };
  }
  if (path === '') return { text: direct === '' ? null : direct };
  if (direct !== '') return { problem: `${name} and ${name}_FILE are both set; set only one.` };
  // Not shown for a secret: the easiest mistake is to put the secret itself here.
  const file = `${name}_FILE${secret ? '' : ` ${show(path)}`}`;
  try {
    const text = readFile(path).replace(/\r?\n$/, '');
    return text === ''
      ? { problem: `${file} names an empty file; it must hold the value.` }
      : { text };
  } catch (error) {
    const code = error instanceof Error && 'code' in error ? ` (${String(error.code)})` : '';
    return {
      problem: `${file} cannot be read${code}; it must be the path of a text file of at most ${FILE_BYTES_MAX} bytes.`,
    };
  }
}

/** What counts when nothing is set; null: nothing. */
export function defaultIn(setting: Setting<unknown>, mode: Mode): string | null {
  if (setting.default === null || typeof setting.default === 'string') return setting.default;
  return setting.default[mode === 'production' ? 1 : 0];
}

/** What is allowed, with what this release cannot do yet. */
export function describe({ kind, notYet }: Setting<unknown>): string {
  if (notYet === undefined || notYet === true) return kind.allowed;
  return `${kind.allowed} (not in this release: ${notYet.map((one) => `\`${one}\``).join(', ')})`;
}

/** One line, without the user and the query of a URL that should not have been there. */
function show(value: string): string {
  const safe = value.replace(/\/\/[^/]*@/g, '//...@').replace(/\?.*/s, '?...');
  const short =
    safe.length > SHOWN_CHARACTERS_MAX ? `${safe.slice(0, SHOWN_CHARACTERS_MAX)}...` : safe;
  return JSON.stringify(short);
}

/** The file as UTF-8. Throws when it is not that, cannot be read or is larger than 64 KiB. */
export function readSmallFile(path: string): string {
  const file = openSync(path, 'r');
  try {
    const buffer = Buffer.alloc(FILE_BYTES_MAX + 1);
    let lengthBytes = 0;
    for (let read = -1; read !== 0 && lengthBytes < buffer.length; lengthBytes += read) {
      read = readSync(file, buffer, lengthBytes, buffer.length - lengthBytes, null);
    }
    if (lengthBytes > FILE_BYTES_MAX)
      throw Object.assign(new Error('too large'), { code: 'EFBIG' });
    // A secret of random bytes would lose most of its randomness in a lenient decoder.
    return new TextDecoder('utf-8', { fatal: true }).decode(buffer.subarray(0, lengthBytes));
  } finally {
    closeSync(file);
  }
}

/** One sentence for every variable with our prefix that no row has. */
export function findUnknownNames(
  rows: readonly Setting<unknown>[],
  env: NodeJS.ProcessEnv,
): readonly string[] {
  const known = new Set(rows.flatMap(({ name }) => [name, `${name}_FILE`]));
  return Object.keys(env)
    .filter((name) => name.startsWith('MAILSTEAD_') && env[name] !== '' && !known.has(name))
    .filter((name) => !name.startsWith('MAILSTEAD_TEST_') && name !== 'MAILSTEAD_CORPORA')
    .sort()
    .map((name) => name.slice(0, SHOWN_CHARACTERS_MAX))
    .map((name) => {
      const near = Math.min(3, (name.length - 'MAILSTEAD_'.length) / 2);
      const [nearest] = [...known]
        .map((other) => ({ other, distance: editDistance(name, other) }))
        .filter(({ distance }) => distance <= near)
        .sort((a, b) => a.distance - b.distance);
      return `${name} is not a setting; ${nearest ? `did you mean ${nearest.other}?` : 'leave it out.'}`;
    });
}

/** Insertions, deletions and replacements that turn `a` into `b` (Levenshtein). */
function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, index) => index);
  for (const [i, char] of [...a].entries()) {
    const next = [i + 1];
    for (let j = 0; j < b.length; j += 1) {
      const replaced = (row[j] ?? 0) + (char === b[j] ? 0 : 1);
      next.push(Math.min(replaced, (row[j + 1] ?? 0) + 1, (next[j] ?? 0) + 1));
    }
    row = next;
  }
  return row.at(-1) ?? 0;
}
