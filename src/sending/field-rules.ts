// The rules for single fields of an email, whether a request holds them or a template made them. Pure: a rule answers
// with every issue it finds.
import { TAG_NAME, TAG_VALUE } from '../access/filters.ts';
import type { Issue } from '../access/refusal.ts';
import { checkHeader } from '../mail/header.ts';

const TAGS_MAX = 75;
const HEADERS_MAX = 100;
const HEADERS_MAX_BYTES = 64 * 1024;
const SUBJECT_MAX_CHARACTERS = 2_000;
/** Of `html` and of `text`; mail programs clip at a fiftieth of it, and every byte is looked at several times. */
export const CONTENT_MAX_BYTES = 5 * 1024 * 1024;
/** CR, LF, NUL: what could end a header line or cannot be stored. */
// oxlint-disable-next-line no-control-regex
const LINE_BREAKERS = /[\r\n\0]/;
// oxlint-disable-next-line no-control-regex
const CONTROLS = /[\u0000-\u0008\u000a-\u001f\u007f]/;

/** Size and storability of `html` or `text`. */
export function bodyIssues(path: 'html' | 'text', body: string | null): readonly Issue[] {
  const sizeBytes = body === null ? 0 : Buffer.byteLength(body);
  if (sizeBytes > CONTENT_MAX_BYTES) {
    const message = `\`${path}\` has ${sizeBytes} bytes; at most ${CONTENT_MAX_BYTES} are allowed.`;
    return [{ path, message }];
  }
  if (body?.includes('\0') !== true) return [];
  return [{ path, message: `\`${path}\` contains a NUL character; remove it.` }];
}

export function subjectIssues(subject: string): readonly Issue[] {
  const path = 'subject';
  if (LINE_BREAKERS.test(subject)) {
    return [{ path, message: '`subject` contains a line break or NUL; it must be one line.' }];
  }
  if (CONTROLS.test(subject)) {
    return [{ path, message: '`subject` contains a control character; remove it.' }];
  }
  if (subject.length > SUBJECT_MAX_CHARACTERS) {
    return [
      {
        path,
        message: `\`subject\` has ${subject.length} characters; at most ${SUBJECT_MAX_CHARACTERS} are allowed.`,
      },
    ];
  }
  return [];
}

export function headerIssues(headers: readonly (readonly [string, string])[]): readonly Issue[] {
  if (headers.length > HEADERS_MAX) {
    return [
      {
        path: 'headers',
        message: `\`headers\` has ${headers.length} fields; at most ${HEADERS_MAX} are allowed.`,
      },
    ];
  }
  // The schema lets values through whose names every object has: `constructor`, `__proto__`, …
  const wrong = headers.filter(([, value]) => typeof value !== 'string');
  if (wrong.length > 0) {
    return wrong.map(([name]) => ({
      path: `headers.${name}`,
      message: `\`headers.${name}\` must be a string.`,
    }));
  }
  const sizeBytes = headers.reduce(
    (sum, [name, value]) => sum + Buffer.byteLength(name) + Buffer.byteLength(value),
    0,
  );
  if (sizeBytes > HEADERS_MAX_BYTES) {
    return [
      {
        path: 'headers',
        message: `\`headers\` has ${sizeBytes} bytes; at most ${HEADERS_MAX_BYTES} are allowed.`,
      },
    ];
  }
  return headers.flatMap(([name, value]) => {
    const problem = checkHeader(name, value) ?? unicodeProblem(name, value);
    return problem === null ? [] : [{ path: `headers.${name}`, message: problem }];
  });
}

/** Half a surrogate pair: JSON can write it, UTF-8 and Postgres cannot. */
const unicodeProblem = (name: string, value: string): string | null =>
  value.isWellFormed() ? null : `The header ${name} is not valid Unicode text.`;

export function tagIssues(
  tags: readonly { readonly name: string; readonly value: string }[],
): readonly Issue[] {
  if (tags.length > TAGS_MAX) {
    return [
      {
        path: 'tags',
        message: `\`tags\` has ${tags.length} items; at most ${TAGS_MAX} are allowed.`,
      },
    ];
  }
  const allowed = 'ASCII letters, digits, underscores or dashes';
  return tags.flatMap(({ name, value }, index) => [
    ...(TAG_NAME.test(name)
      ? []
      : [
          {
            path: `tags.${index}.name`,
            message: `\`tags.${index}.name\` must be 1 to 256 ${allowed}.`,
          },
        ]),
    ...(TAG_VALUE.test(value)
      ? []
      : [
          {
            path: `tags.${index}.value`,
            message: `\`tags.${index}.value\` must be at most 256 ${allowed}.`,
          },
        ]),
  ]);
}
