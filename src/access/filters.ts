// What the filters of several lists have in common: tags and times, as a query writes them.

/** Notes what is wrong with a filter. */
export type Refuse = (path: string, message: string) => null;

/** The filter by tag; an undefined part is not there. */
export interface TagFilter {
  readonly tagName: string | undefined;
  readonly tagNameAlias: string | undefined;
  readonly tagValue: string | undefined;
  readonly tagValueAlias: string | undefined;
}

/** The same for a tag that is given to an email. */
export const TAG_NAME = /^[A-Za-z0-9_-]{1,256}$/;
export const TAG_VALUE = /^[A-Za-z0-9_-]{0,256}$/;
const DAY = /^\d{4}-\d\d-\d\d$/;
const INSTANT = /^\d{4}-\d\d-\d\dT\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?(?:Z|[+-]\d\d:?\d\d)?$/i;

/** `name` or `name=value`; null: not given, or refused. */
export function checkTag(given: TagFilter, refuse: Refuse): string | null {
  const either = (
    names: readonly [string, string],
    ...[first, second]: readonly (string | undefined)[]
  ): string | null => {
    if (first !== undefined && second !== undefined && first !== second) {
      const message = `\`${names[1]}\` is another name of \`${names[0]}\`; give one of them.`;
      return refuse(names[1], message);
    }
    return first ?? second ?? null;
  };
  const name = either(['tag_name', 'tagName'], given.tagName, given.tagNameAlias);
  const value = either(['tag_value', 'tagValue'], given.tagValue, given.tagValueAlias);
  const shown = (snake: string, camel: string, isSnake: boolean): string =>
    isSnake ? snake : camel;
  const namePath = shown('tag_name', 'tagName', given.tagName !== undefined);
  const valuePath = shown('tag_value', 'tagValue', given.tagValue !== undefined);
  const characters = 'ASCII letters, digits, underscores and dashes';
  if (name !== null && !TAG_NAME.test(name)) {
    return refuse(namePath, `\`${namePath}\` must be 1 to 256 ${characters}.`);
  }
  if (value !== null && !TAG_VALUE.test(value)) {
    return refuse(valuePath, `\`${valuePath}\` must be at most 256 ${characters}.`);
  }
  const hasName = given.tagName !== undefined || given.tagNameAlias !== undefined;
  if (value !== null && !hasName) {
    return refuse('tag_name', `\`tag_name\` is needed where \`${valuePath}\` is given.`);
  }
  return name === null || value === null ? name : `${name}=${value}`;
}

/** UTC where no zone is named. Null: not a time. */
export function parseTime(text: string): { ms: number; isDay: boolean } | null {
  const given = text.replace(/ (?=\d\d:?\d\d$)/, '+'); // a plus sign that was not encoded
  const isDay = DAY.test(given);
  if (!isDay && !INSTANT.test(given)) return null;
  const hasZone = /(?:Z|[+-]\d\d:?\d\d)$/i.test(given.slice(10));
  const ms = Date.parse(isDay || hasZone ? given : `${given}Z`);
  // Date.parse takes the 31st of every month.
  const day = new Date(`${given.slice(0, 10)}T00:00:00Z`);
  const isReal = !Number.isNaN(day.getTime()) && day.toISOString().startsWith(given.slice(0, 10));
  return Number.isNaN(ms) || !isReal ? null : { ms, isDay };
}
