// Contact properties: what a tenant may know of each contact beyond its names. A contact keeps its values by the id of
// the property, so a removed property takes its values with it in one statement however many contacts have one, and
// another property of the same key begins empty; a contact's next change of properties sweeps what it still holds.
import type { Pool, PoolClient } from 'pg';
import { checkPage, PAGE_MAX, refuseCursor, toPage, type PageRequest } from '../access/page.ts';
import { refuseFields, type Issue } from '../access/refusal.ts';
import type { PropertyValue } from '../store/contact.ts';
import { newId } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import type { Store } from '../store/orm.ts';
import { valueProblem } from '../templates/value.ts';

type Queryable = Pick<Pool | PoolClient, 'query'>;

export type PropertyType = 'string' | 'number' | 'boolean';

export interface PropertyRecord {
  readonly id: string;
  /** Unique in the tenant, upper and lower case apart. */
  readonly key: string;
  readonly type: PropertyType;
  /** For contacts without a value. */
  readonly fallbackValue: PropertyValue | null;
  readonly createdAt: Date;
}

export interface PropertyPage {
  readonly items: readonly PropertyRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** A new contact property. */
export interface CreatePropertyRequest {
  /** 1 to 50 letters, digits and underscores; never changes. */
  key: string;
  /** Never changes. */
  type: 'string' | 'number' | 'boolean';
  /** For contacts without a value: of that type, a string of at most 2,000 characters. */
  fallback_value?: unknown;
}

/** A change of a contact property. */
export interface UpdatePropertyRequest {
  /** For contacts without a value; null: none. */
  fallback_value?: unknown;
  /** Cannot be changed: only the value that it has already is taken. */
  key?: string;
  /** Cannot be changed: only the value that it has already is taken. */
  type?: 'string' | 'number' | 'boolean';
}

export interface PropertyVerbs {
  /** The id. Throws a Refusal when a field is wrong or the key is taken. */
  create(tenantId: string, request: CreatePropertyRequest): Promise<string>;
  /** Newest first, up to 100 where no limit is given. */
  list(tenantId: string, page: PageRequest): Promise<PropertyPage>;
  find(tenantId: string, id: string): Promise<PropertyRecord | null>;
  /** False when there is no such property. Throws a Refusal when a field is wrong. */
  update(tenantId: string, id: string, request: UpdatePropertyRequest): Promise<boolean>;
  /** With the values of all contacts. False when there is no such property. */
  remove(tenantId: string, id: string): Promise<boolean>;
}

/** Of one tenant. */
export const PROPERTIES_MAX = 500;
const KEY = /^[A-Za-z0-9_]{1,50}$/;
/** What every contact has under these names already, and the one that JavaScript keeps for itself. */
const RESERVED = new Set(['email', 'first_name', 'last_name', 'unsubscribed', '__proto__']);

/**
 * An expression of SQL: the properties of the contact row `alias` by their keys, as jsonb; without those that were
 * removed and without fallbacks.
 */
export const propertiesByKey = (alias: string): string => `coalesce((
  select jsonb_object_agg(held_property.key, held.value)
  from jsonb_each(${alias}.properties) held
  join contact_property held_property
    on held_property.tenant_id = ${alias}.tenant_id and held_property.id = held.key::uuid), '{}'::jsonb)`;

/** All of a tenant, by key. At most PROPERTIES_MAX. */
export async function readProperties(
  db: Queryable,
  tenantId: string,
): Promise<ReadonlyMap<string, PropertyRecord>> {
  const { rows } = await db.query<RawProperty>({
    name: 'contact-properties',
    text: `select ${COLUMNS} from contact_property where tenant_id = $1 order by key`,
    values: [tenantId],
  });
  return new Map(rows.map((row) => [row.key, toRecord(row)]));
}

/**
 * Makes those of the wanted properties that the tenant has not, inside the caller's transaction, and gives all that it
 * has then. One that is there with another type stays as it is. Throws a Refusal for a bad key and for too many.
 */
export async function ensureProperties(
  client: PoolClient,
  tenantId: string,
  wanted: readonly { readonly key: string; readonly type: PropertyType }[],
  at: Date,
): Promise<ReadonlyMap<string, PropertyRecord>> {
  const known = await readProperties(client, tenantId);
  const missing = new Map(
    wanted.filter(({ key }) => !known.has(key)).map(({ key, type }) => [key, type]),
  );
  if (missing.size === 0) return known;
  const issues = [...missing.keys()].flatMap((key) => keyIssues(`properties.${key}`, key));
  if (issues.length > 0) throw refuseFields(issues);
  if (known.size + missing.size > PROPERTIES_MAX) throw refuseFields([tooMany('properties')]);
  const keys = [...missing.keys()].toSorted();
  await client.query(
    `insert into contact_property (tenant_id, id, key, type, created_at, updated_at)
     select $1, one.id, one.key, one.type, $5, $5
     from unnest($2::uuid[], $3::text[], $4::text[]) with ordinality as one (id, key, type, position)
     order by one.position
     on conflict (tenant_id, key) do nothing`,
    [tenantId, keys.map(() => newId()), keys, keys.map((key) => missing.get(key)), at],
  );
  return readProperties(client, tenantId);
}

/** The type that a value of nobody's declaration has. */
export const typeOfValue = (value: PropertyValue): PropertyType => {
  if (typeof value === 'string') return 'string';
  return typeof value === 'number' ? 'number' : 'boolean';
};

const NUMBER = /^-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?$/;

/**
 * The value as this type, or what is wrong with it, as the end of a sentence that begins with its path. Texts that write
 * a number, or true or false, are taken for one: some clients and every file know nothing but texts.
 */
export function typedValue(
  type: PropertyType,
  given: unknown,
): { readonly value: PropertyValue } | { readonly problem: string } {
  const value =
    typeof given !== 'string'
      ? given
      : type === 'number' && NUMBER.test(given.trim())
        ? Number(given)
        : type === 'boolean' && /^(?:true|false)$/i.test(given.trim())
          ? given.trim().toLowerCase() === 'true'
          : given;
  const problem = valueProblem(type, value);
  return problem === null ? { value: value as PropertyValue } : { problem };
}

export function createPropertyVerbs(store: Store, now: () => Date): PropertyVerbs {
  return {
    async create(tenantId, request) {
      const issues = keyIssues('key', request.key);
      const fallback = checkFallback(request.type, request.fallback_value, issues);
      const id = newId();
      const { rowCount } = await store.pool.query(
        `insert into contact_property
           (tenant_id, id, key, type, fallback_value, created_at, updated_at)
         select $1, $2, $3, $4, $5::jsonb, $6, $6
         where (select count(*) from contact_property where tenant_id = $1) < ${PROPERTIES_MAX}
         on conflict (tenant_id, key) do nothing`,
        [tenantId, id, request.key, request.type, toJson(fallback), now()],
      );
      if (rowCount === 1) return id;
      const isTaken = (await readProperties(store.pool, tenantId)).has(request.key);
      const message = `There is a property \`${request.key}\` already.`;
      throw refuseFields([isTaken ? { path: 'key', message } : tooMany('key')]);
    },

    async list(tenantId, page) {
      const cursor = checkPage({ ...page, limit: page.limit ?? PAGE_MAX });
      const at = cursor.after ?? cursor.before;
      if (at !== null && (await find(store.pool, tenantId, at)) === null) refuseCursor(cursor);
      const { rows } = await store.pool.query<RawProperty>(
        `select ${COLUMNS} from contact_property
         where tenant_id = $1 and ($2::uuid is null or id < $2) and ($3::uuid is null or id > $3)
         order by id ${cursor.before === null ? 'desc' : 'asc'} limit $4`,
        [tenantId, cursor.after, cursor.before, cursor.limit + 1],
      );
      const { items, hasMore } = toPage(rows, cursor);
      return { items: items.map(toRecord), hasMore };
    },

    find: (tenantId, id) => find(store.pool, tenantId, id),

    async update(tenantId, id, request) {
      const found = await find(store.pool, tenantId, id);
      if (found === null) return false;
      const issues = (['key', 'type'] as const).flatMap((path) =>
        (request[path] ?? found[path]) === found[path]
          ? []
          : [{ path, message: `\`${path}\` cannot be changed; make another property.` }],
      );
      const fallback = checkFallback(found.type, request.fallback_value, issues);
      if (request.fallback_value === undefined) return true;
      const { rowCount } = await store.pool.query(
        `update contact_property set fallback_value = $3::jsonb, updated_at = $4
         where tenant_id = $1 and id = $2`,
        [tenantId, id, toJson(fallback), now()],
      );
      return rowCount === 1;
    },

    async remove(tenantId, id) {
      const { rowCount } = await store.pool.query(
        'delete from contact_property where tenant_id = $1 and id = $2',
        [tenantId, id],
      );
      return rowCount === 1;
    },
  };
}

interface RawProperty extends Omit<PropertyRecord, 'fallbackValue'> {
  readonly fallback: { readonly value: PropertyValue | null } | string;
}

/** The fallback in an object: a json column that holds a text could be read as the json of another value. */
const COLUMNS = `id, key, type, jsonb_build_object('value', fallback_value) as fallback,
  created_at as "createdAt"`;

const toRecord = ({ fallback, ...row }: RawProperty): PropertyRecord => ({
  ...row,
  fallbackValue: fromJson(fallback).value,
  createdAt: new Date(row.createdAt),
});

async function find(db: Queryable, tenantId: string, id: string): Promise<PropertyRecord | null> {
  const { rows } = await db.query<RawProperty>(
    `select ${COLUMNS} from contact_property where tenant_id = $1 and id = $2`,
    [tenantId, id],
  );
  return rows[0] === undefined ? null : toRecord(rows[0]);
}

const toJson = (value: PropertyValue | null): string | null =>
  value === null ? null : JSON.stringify(value);

/** A key of no property that could be made. */
function keyIssues(path: string, key: string): Issue[] {
  if (!KEY.test(key)) {
    const message = `The key of a property has 1 to 50 letters, digits and underscores.`;
    return [{ path, message }];
  }
  return RESERVED.has(key.toLowerCase())
    ? [{ path, message: `\`${key}\` cannot be the key of a property; choose another one.` }]
    : [];
}

const tooMany = (path: string): Issue => ({
  path,
  message: `There can be at most ${PROPERTIES_MAX} contact properties; delete some first.`,
});

/** Throws a Refusal that lists these issues and what is wrong with the value. */
function checkFallback(
  type: PropertyType,
  given: unknown,
  issues: readonly Issue[],
): PropertyValue | null {
  const checked = given === undefined || given === null ? { value: null } : typedValue(type, given);
  if ('problem' in checked) {
    const message = `\`fallback_value\` ${checked.problem}.`;
    throw refuseFields([...issues, { path: 'fallback_value', message }]);
  }
  if (issues.length > 0) throw refuseFields(issues);
  return checked.value;
}
