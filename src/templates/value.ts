// The values of variables: what each type takes, and how a value is written into a text.
import type { TemplateVariable } from '../store/template.ts';

/** Of a string, and of an object or list as JSON. */
export const VALUE_MAX_CHARACTERS = 2_000;

/** What is wrong with the value, as the end of a sentence that begins with its path; null: nothing. */
export function valueProblem(type: TemplateVariable['type'], value: unknown): string | null {
  switch (type) {
    case 'string':
      return typeof value === 'string' ? stringProblem(value) : 'must be a string';
    case 'number':
      return typeof value === 'number' && Math.abs(value) <= Number.MAX_SAFE_INTEGER
        ? null
        : 'must be a number from -(2^53 - 1) to 2^53 - 1';
    case 'boolean':
      return typeof value === 'boolean' ? null : 'must be true or false';
    case 'object':
      return typeof value === 'object' && value !== null && !Array.isArray(value)
        ? jsonProblem(value)
        : 'must be an object';
    case 'list':
      return Array.isArray(value) ? jsonProblem(value) : 'must be an array';
  }
}

/** The same for a value whose type nobody declared. */
export function undeclaredValueProblem(value: unknown): string | null {
  if (typeof value === 'string') return valueProblem('string', value);
  if (typeof value === 'number') return valueProblem('number', value);
  return typeof value === 'boolean' ? null : 'must be a string, a number, true or false';
}

function stringProblem(text: string): string | null {
  if (text.length > VALUE_MAX_CHARACTERS) return tooLong(text.length);
  return isStorable(text) ? null : UNSTORABLE;
}

function jsonProblem(value: unknown): string | null {
  let allStorable = true;
  const json = JSON.stringify(value, (key, inner: unknown) => {
    allStorable &&= isStorable(key) && (typeof inner !== 'string' || isStorable(inner));
    return inner;
  });
  if (json.length > VALUE_MAX_CHARACTERS) return tooLong(json.length);
  return allStorable ? null : UNSTORABLE;
}

const tooLong = (length: number): string =>
  `has ${length} characters; at most ${VALUE_MAX_CHARACTERS} are allowed`;

const UNSTORABLE = 'contains a NUL character or half a surrogate pair; remove it';

/** JSON can write both, UTF-8 and Postgres cannot hold them. */
export const isStorable = (text: string): boolean => !text.includes('\0') && text.isWellFormed();

/** How the value stands in a text: strings as they are, objects and lists as JSON. */
export function writeValue(value: unknown): string {
  return typeof value === 'string' ? value : JSON.stringify(value);
}
