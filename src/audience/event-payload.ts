// Custom events as they are sent: their names, and payloads with the schema they may have to fit. Pure.
import type { Issue } from '../access/refusal.ts';
import { fieldTypes, type FieldType } from '../store/automation.ts';
import { isStorable } from '../templates/value.ts';
import type { Payload } from './automation-values.ts';
import { nameIssues } from './texts.ts';

export type EventSchema = Readonly<Record<string, FieldType>>;

const NAME_MAX_CHARACTERS = 100;
/** For events of our own. */
const RESERVED = /^resend:/i;
const FIELDS_MAX = 100;
const FIELD_MAX_CHARACTERS = 100;
/** As JSON in UTF-8. */
const PAYLOAD_MAX_BYTES = 64 * 1024;
const DEPTH_MAX = 16;
/** A day, or a time with a zone (RFC 3339 §5.6). */
const DATE =
  /^\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?(?:Z|[+-]\d\d(?::?\d\d)?)?)?$/i;

export function eventNameIssues(path: string, name: string): Issue[] {
  if (RESERVED.test(name)) {
    return [{ path, message: `\`${path}\` must not start with \`resend:\`.` }];
  }
  // No URL can have them as a segment.
  if (name === '.' || name === '..') {
    return [{ path, message: `\`${path}\` must be more than dots.` }];
  }
  return nameIssues(path, name, NAME_MAX_CHARACTERS);
}

export function schemaIssues(schema: EventSchema | null): Issue[] {
  const entries = Object.entries(schema ?? {});
  if (entries.length > FIELDS_MAX) {
    return [{ path: 'schema', message: `\`schema\` must have at most ${FIELDS_MAX} fields.` }];
  }
  return entries.flatMap(([field, type]) => [
    ...nameIssues('schema', field, FIELD_MAX_CHARACTERS).map(() => ({
      path: 'schema',
      message: `The fields of \`schema\` must have names of 1 to ${FIELD_MAX_CHARACTERS} characters without control characters.`,
    })),
    ...(fieldTypes.includes(type)
      ? []
      : [
          {
            path: `schema.${field}`,
            message: `\`schema.${field}\` must be one of ${fieldTypes.join(', ')}.`,
          },
        ]),
  ]);
}

/** Size, depth and storability. */
export function payloadIssues(payload: Payload | null): Issue[] {
  const path = 'payload';
  if (payload === null) return [];
  if (depthOf(payload, DEPTH_MAX) > DEPTH_MAX) {
    return [{ path, message: `\`payload\` is nested more than ${DEPTH_MAX} deep.` }];
  }
  const sizeBytes = Buffer.byteLength(JSON.stringify(payload));
  if (sizeBytes > PAYLOAD_MAX_BYTES) {
    const message = `\`payload\` has ${sizeBytes} bytes as JSON; at most ${PAYLOAD_MAX_BYTES} are allowed.`;
    return [{ path, message }];
  }
  return isStorableDeep(payload)
    ? []
    : [{ path, message: '`payload` contains a NUL character or half a surrogate pair.' }];
}

/**
 * Where the payload does not fit the schema. A field that is there must be of its type; null is no value, fields may be
 * missing, and those that the schema does not know are let through.
 */
export function fitIssues(payload: Payload | null, schema: EventSchema): Issue[] {
  return Object.entries(schema).flatMap(([field, type]) => {
    const value =
      payload !== null && Object.hasOwn(payload, field) ? (payload[field] ?? null) : null;
    const path = `payload.${field}`;
    return value === null || fits(value, type)
      ? []
      : [{ path, message: `\`${path}\` must be ${WANTED[type]}: the event's schema says so.` }];
  });
}

const WANTED: Readonly<Record<FieldType, string>> = {
  string: 'a string',
  number: 'a number',
  boolean: 'true or false',
  date: 'a date or a date-time in ISO 8601, such as `2030-01-31` or `2030-01-31T09:30:00Z`',
};

const fits = (value: unknown, type: FieldType): boolean =>
  type === 'date'
    ? typeof value === 'string' && DATE.test(value) && isTime(value)
    : typeof value === type;

/** Date.parse takes 31 February for a day in March. */
function isTime(text: string): boolean {
  const day = text.slice(0, 'yyyy-mm-dd'.length);
  const dayMs = Date.parse(day);
  return (
    !Number.isNaN(dayMs) &&
    !Number.isNaN(Date.parse(text)) &&
    new Date(dayMs).toISOString().startsWith(day)
  );
}

/** Not followed deeper than one beyond `max`. */
function depthOf(value: unknown, max: number): number {
  if (typeof value !== 'object' || value === null) return 0;
  if (max < 0) return 1;
  // Not Math.max(...all): an array may have more members than a call has arguments.
  return (
    1 +
    Object.values(value).reduce<number>(
      (deepest, one) => Math.max(deepest, depthOf(one, max - 1)),
      0,
    )
  );
}

/** Of something that is not nested deeply. */
export function isStorableDeep(value: unknown): boolean {
  if (typeof value === 'string') return isStorable(value);
  if (typeof value !== 'object' || value === null) return true;
  return Object.entries(value).every(([key, one]) => isStorable(key) && isStorableDeep(one));
}
