// What every text of an audience has to be: storable, and where it is a name, one line of bounded length.
import type { Issue } from '../access/refusal.ts';
import { isStorable } from '../templates/value.ts';

/** A name is one line wherever it is shown. */
// oxlint-disable-next-line no-control-regex
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u2028\u2029]/;

/** What is wrong with a name of at least one and at most `max` characters. */
export function nameIssues(path: string, name: string, max: number): Issue[] {
  if (name.trim() === '' || name.length > max) {
    return [{ path, message: `\`${path}\` must have 1 to ${max} characters.` }];
  }
  return lineIssues(path, name, max);
}

/** The same for a name that may be empty. */
export function lineIssues(path: string, text: string, max: number): Issue[] {
  if (text.length > max) {
    return [{ path, message: `\`${path}\` must have at most ${max} characters.` }];
  }
  return CONTROLS.test(text)
    ? [{ path, message: `\`${path}\` contains a line break or a control character.` }]
    : textIssues(path, text);
}

/** JSON can write both, UTF-8 and Postgres cannot hold them. */
export const textIssues = (path: string, text: string): Issue[] =>
  isStorable(text)
    ? []
    : [{ path, message: `\`${path}\` contains a NUL character or half a surrogate pair.` }];
