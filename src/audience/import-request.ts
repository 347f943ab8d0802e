// What a request to import contacts says beside its file: texts of a form, some of them JSON. All issues are found, not
// only the first.
import { refuseFields, type Issue, type Refusal } from '../access/refusal.ts';
import type { Subscription } from '../store/contact.ts';
import { isUuid } from '../store/id.ts';
import type { PropertyType } from './properties.ts';

/** Names of columns, by what they are for; what is absent is not read, but for `email`. */
export interface ColumnMap {
  readonly email?: string;
  readonly first_name?: string;
  readonly last_name?: string;
  readonly unsubscribed?: string;
  /** By key of a contact property, which is made where it is missing. */
  readonly properties?: Readonly<Record<string, MappedProperty>>;
}

export interface MappedProperty {
  readonly column: string;
  /** Null: that of the property, `string` for a new one. */
  readonly type: PropertyType | null;
}

export interface ImportRequest {
  /** Null: columns are found by their names. */
  readonly columnMap: ColumnMap | null;
  readonly onConflict: 'upsert' | 'skip';
  readonly segmentIds: readonly string[];
  readonly topics: readonly { readonly id: string; readonly subscription: Subscription }[];
}

const MAPPED_MAX = 100;
const SEGMENTS_MAX = 50;
const TOPICS_MAX = 50;
const COLUMN_NAME_MAX_CHARACTERS = 200;
/** Of a contact property. */
const PROPERTY_KEY = /^[A-Za-z0-9_]{1,50}$/;
const PROPERTY_TYPES: readonly string[] = ['string', 'number', 'boolean'];
const PLAIN_COLUMNS = ['email', 'first_name', 'last_name', 'unsubscribed'] as const;

/** The texts by the names of their fields; what is empty or `null` is absent. Throws a Refusal. */
export function checkImportRequest(fields: ReadonlyMap<string, string>): ImportRequest {
  const issues: Issue[] = [];
  const refuse = (path: string, message: string): void => void issues.push({ path, message });
  const jsonOf = (name: string): unknown => {
    const text = fields.get(name)?.trim() ?? '';
    if (text === '') return null;
    try {
      return JSON.parse(text) as unknown;
    } catch {
      refuse(name, `\`${name}\` must be JSON.`);
      return null;
    }
  };
  const request = {
    columnMap: checkColumnMap(jsonOf('column_map'), refuse),
    onConflict: checkOnConflict(fields.get('on_conflict')?.trim() ?? '', refuse),
    segmentIds: checkSegments(jsonOf('segments'), refuse),
    topics: checkTopics(jsonOf('topics'), refuse),
  };
  if (issues.length > 0) throw refuseFields(issues);
  return request;
}

type Refuse = (path: string, message: string) => void;

const isObject = (value: unknown): value is Readonly<Record<string, unknown>> =>
  typeof value === 'object' && value !== null && !Array.isArray(value);

function checkOnConflict(given: string, refuse: Refuse): 'upsert' | 'skip' {
  if (given !== '' && given !== 'upsert' && given !== 'skip') {
    refuse('on_conflict', '`on_conflict` must be one of `upsert` or `skip`.');
  }
  return given === 'skip' ? 'skip' : 'upsert';
}

function checkColumnMap(given: unknown, refuse: Refuse): ColumnMap | null {
  if (given === null) return null;
  if (!isObject(given)) {
    refuse('column_map', '`column_map` must be an object.');
    return null;
  }
  const { properties = null } = given;
  const map: { -readonly [key in keyof ColumnMap]: ColumnMap[key] } = {};
  for (const key of PLAIN_COLUMNS) {
    const column = checkColumn(`column_map.${key}`, given[key] ?? null, refuse);
    if (column !== null) map[key] = column;
  }
  if (properties === null) return map;
  if (!isObject(properties)) {
    refuse('column_map.properties', '`column_map.properties` must be an object.');
    return map;
  }
  const entries = Object.entries(properties);
  if (entries.length > MAPPED_MAX) {
    const words = `has ${entries.length} properties; at most ${MAPPED_MAX} are allowed`;
    refuse('column_map.properties', `\`column_map.properties\` ${words}.`);
    return map;
  }
  const mapped = entries.flatMap(([key, value]) => {
    const property = checkProperty(key, value, refuse);
    return property === null ? [] : [[key, property] as const];
  });
  return { ...map, properties: Object.fromEntries(mapped) };
}

function checkProperty(key: string, given: unknown, refuse: Refuse): MappedProperty | null {
  const path = `column_map.properties.${key}`;
  if (!PROPERTY_KEY.test(key)) {
    refuse(path, `\`${path}\`: a key has 1 to 50 ASCII letters, digits and underscores.`);
    return null;
  }
  if (!isObject(given)) {
    refuse(path, `\`${path}\` must be an object with \`column\` and \`type\`.`);
    return null;
  }
  const column = checkColumn(`${path}.column`, given['column'] ?? null, refuse);
  const type = given['type'] ?? null;
  if (type !== null && !(typeof type === 'string' && PROPERTY_TYPES.includes(type))) {
    refuse(`${path}.type`, `\`${path}.type\` must be one of ${PROPERTY_TYPES.join(', ')}.`);
    return null;
  }
  if (column === null) {
    if (given['column'] === undefined) refuse(`${path}.column`, `Missing \`${path}.column\`.`);
    return null;
  }
  return { column, type: type as PropertyType | null };
}

function checkColumn(path: string, given: unknown, refuse: Refuse): string | null {
  if (given === null) return null;
  const name = typeof given === 'string' ? given.trim() : '';
  if (name === '' || name.length > COLUMN_NAME_MAX_CHARACTERS || !name.isWellFormed()) {
    const words = `must be the name of a column, of 1 to ${COLUMN_NAME_MAX_CHARACTERS} characters`;
    refuse(path, `\`${path}\` ${words}.`);
    return null;
  }
  if (name.includes('\0')) {
    refuse(path, `\`${path}\` contains a NUL character.`);
    return null;
  }
  return name;
}

/** A list of at most so many; each item's id, or undefined where it has none. */
function checkList(
  { name, max }: { readonly name: string; readonly max: number },
  given: unknown,
  refuse: Refuse,
): readonly unknown[] {
  if (given === null) return [];
  if (!Array.isArray(given)) refuse(name, `\`${name}\` must be an array.`);
  else if (given.length > max) {
    refuse(name, `\`${name}\` has ${given.length} items; at most ${max} are allowed.`);
  } else return given;
  return [];
}

/** `[{id}]`, or the ids themselves. */
function checkSegments(given: unknown, refuse: Refuse): readonly string[] {
  const ids = checkList({ name: 'segments', max: SEGMENTS_MAX }, given, refuse).flatMap(
    (item, index) => {
      const id = isObject(item) ? item['id'] : item;
      if (typeof id === 'string' && isUuid(id)) return [id.toLowerCase()];
      refuse(`segments.${index}.id`, `\`segments.${index}.id\` must be the id of a segment.`);
      return [];
    },
  );
  return [...new Set(ids)];
}

function checkTopics(given: unknown, refuse: Refuse): ImportRequest['topics'] {
  const topics = new Map<string, Subscription>();
  checkList({ name: 'topics', max: TOPICS_MAX }, given, refuse).forEach((item, index) => {
    const { id, subscription } = isObject(item) ? item : {};
    const path = `topics.${index}`;
    if (typeof id !== 'string' || !isUuid(id)) {
      refuse(`${path}.id`, `\`${path}.id\` must be the id of a topic.`);
    } else if (subscription !== 'opt_in' && subscription !== 'opt_out') {
      const words = 'must be one of `opt_in` or `opt_out`';
      refuse(`${path}.subscription`, `\`${path}.subscription\` ${words}.`);
    } else topics.set(id.toLowerCase(), subscription);
  });
  return [...topics].map(([id, subscription]) => ({ id, subscription }));
}

/** Said where a request has no file. */
export const refuseMissingFile = (): Refusal =>
  refuseFields(
    [{ path: 'file', message: 'Missing `file` field: send a CSV file as `multipart/form-data`.' }],
    'missing_required_field',
  );
