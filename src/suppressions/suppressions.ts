// Addresses that a tenant does not send to any more: asked on every accept, kept by hand or after a bounce
// or complaint. One row for each address, spelled as `normalizedAddress` of mail/address.ts spells it.
import type { Pool, PoolClient } from 'pg';
import {
  checkPage,
  refuseCursor,
  toPage,
  type PageRequest,
  orderOf,
  rangeOf,
} from '../access/page.ts';
import { Refusal, refuseFields, type Issue } from '../access/refusal.ts';
import { normalizedAddress, parseMailbox } from '../mail/address.ts';
import { isUuid, NEW_ID, newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { askTogether } from '../store/together.ts';
import { Suppression, type suppressionOrigins } from '../store/suppression.ts';
import { suppressionsAdded } from '../telemetry/instruments.ts';
import { isHooked } from '../timeline/outbox.ts';

type Queryable = Pick<Pool | PoolClient, 'query'>;

export type SuppressionOrigin = (typeof suppressionOrigins)[number];

export interface SuppressionRecord {
  readonly id: string;
  readonly address: string;
  readonly origin: SuppressionOrigin;
  /** The email whose bounce or complaint it was. */
  readonly sourceId: string | null;
  readonly createdAt: Date;
}

export interface SuppressionPage {
  readonly items: readonly SuppressionRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** Suppressions to remove: by address or by id. */
export interface RemovedSuppressions {
  /** 1 to 100 addresses. */
  emails?: string[] | null;
  /** 1 to 100 ids. */
  ids?: string[] | null;
}

/**
 * `idOrEmail` is an id or an address in any spelling; what is missing, foreign or neither of them is one Refusal:
 * not_found.
 */
export interface SuppressionVerbs {
  /** The id, for an address that is suppressed already the one it has. Throws a Refusal for what is no address. */
  add(tenantId: string, email: string): Promise<string>;
  /** The same for 1 to 100 addresses, in their order. Throws a Refusal and adds nothing when one is wrong. */
  addAll(tenantId: string, emails: readonly string[]): Promise<readonly string[]>;
  list(
    tenantId: string,
    page: PageRequest,
    origin: SuppressionOrigin | null,
  ): Promise<SuppressionPage>;
  find(tenantId: string, idOrEmail: string): Promise<SuppressionRecord>;
  /** The id of what was removed. */
  remove(tenantId: string, idOrEmail: string): Promise<string>;
  /** The ids of what was there and is removed, in the order asked. Throws a Refusal. */
  removeAll(tenantId: string, what: RemovedSuppressions): Promise<readonly string[]>;
}

const BATCH_MAX = 100;
/** Emails that are accepted at the same time ask together. */
const LOOKUPS_PER_QUERY = 100;
/** A suppression that a bounce made ends after this. */
const BOUNCE_DAYS = 365;

/**
 * Which of the addresses the tenant does not send to. In and out as `normalizedAddress` of mail/address.ts
 * writes them.
 */
export function suppressedAmong(
  db: Queryable,
  tenantId: string,
  addresses: readonly string[],
): Promise<ReadonlySet<string>> {
  if (addresses.length === 0) return Promise.resolve(new Set());
  let lookup = lookups.get(db);
  if (lookup === undefined) lookups.set(db, (lookup = createLookup(db)));
  return lookup({ tenantId, addresses });
}

type Lookup = (asked: {
  readonly tenantId: string;
  readonly addresses: readonly string[];
}) => Promise<ReadonlySet<string>>;

const lookups = new WeakMap<Queryable, Lookup>();

const createLookup = (db: Queryable): Lookup =>
  askTogether(LOOKUPS_PER_QUERY, async (batch) => {
    const asked = batch.flatMap(({ tenantId, addresses }, number) =>
      addresses.map((address) => ({ number, tenantId, address })),
    );
    const { rows } = await db.query<{ number: number; address: string }>({
      name: 'suppressed-among',
      text: `select r.number, s.address
        from unnest($1::integer[], $2::uuid[], $3::text[]) as r (number, tenant_id, address)
        join suppression s on s.tenant_id = r.tenant_id and s.address = r.address`,
      values: [
        asked.map(({ number }) => number),
        asked.map(({ tenantId }) => tenantId),
        asked.map(({ address }) => address),
      ],
    });
    const listed = batch.map(() => new Set<string>());
    for (const { number, address } of rows) listed[number]?.add(address);
    return listed;
  });

/** SQL: tells webhooks of the suppressions in `rows`. */
const tell = (type: 'suppression.added' | 'suppression.removed', rows: string): string => `
  insert into outbox (tenant_id, id, type, subject_id, detail, at)
  select s.tenant_id, ${NEW_ID}, '${type}', s.id,
    jsonb_build_object('id', s.id, 'email', s.address, 'origin', s.origin, 'source_id', s.source_id,
      'created_at', to_char(s.created_at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')),
    now()
  from ${rows} s where ${isHooked('s.tenant_id', `'${type}'`)}`;

/** An address to suppress, in any spelling, and the email that gave the reason. */
export interface NewSuppression {
  readonly tenantId: string;
  readonly address: string;
  readonly origin: 'bounce' | 'complaint';
  readonly sourceId: string;
}

/** Inside the caller's transaction. An address that is suppressed already keeps the reason it has. */
export async function suppress(db: Queryable, list: readonly NewSuppression[]): Promise<void> {
  if (list.length === 0) return;
  const { rows } = await db.query<{ origin: string }>({
    text: `with added as (
        insert into suppression (tenant_id, id, address, origin, source_id)
        select * from unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::uuid[])
          as one (tenant_id, id, address, origin, source_id)
        order by one.tenant_id, one.address
        on conflict (tenant_id, address) do nothing
        returning *
      ), told as (${tell('suppression.added', 'added')})
      select origin from added`,
    values: [
      list.map(({ tenantId }) => tenantId),
      list.map(() => newId()),
      list.map(({ address }) => normalizedAddress(address)),
      list.map(({ origin }) => origin),
      list.map(({ sourceId }) => sourceId),
    ],
  });
  for (const { origin } of rows) suppressionsAdded.inc({ origin });
}

/**
 * Forgets bounces of long ago: mailboxes are opened again, and one more try a year tells. Complaints and what was
 * added by hand stay. At most `max` at a time; how many.
 */
export async function expireSuppressions(db: Queryable, max: number): Promise<number> {
  const { rows } = await db.query<{ count: number }>(
    `with gone as (
       delete from suppression s using (
         select tenant_id, id from suppression
         where origin = 'bounce' and created_at < now() - $1 * interval '1 day'
         limit $2 for update skip locked) old
       where s.tenant_id = old.tenant_id and s.id = old.id
       returning s.*
     ), told as (${tell('suppression.removed', 'gone')})
     select count(*)::int as count from gone`,
    [BOUNCE_DAYS, max],
  );
  return rows[0]!.count;
}

export function createSuppressionVerbs(store: Store): SuppressionVerbs {
  return {
    async add(tenantId, email) {
      const ids = await insert(store.pool, tenantId, checkAddresses([{ path: 'email', email }]));
      return ids[0]!;
    },

    async addAll(tenantId, emails) {
      checkCount('emails', emails);
      return insert(store.pool, tenantId, checkAddresses(listed(emails)));
    },

    async list(tenantId, page, origin) {
      const cursor = checkPage(page);
      const at = cursor.after ?? cursor.before;
      const of = { tenantId, ...(origin === null ? {} : { origin }) };
      const em = store.em();
      if (at !== null && (await em.count(Suppression, { ...of, id: at })) === 0) {
        refuseCursor(cursor);
      }
      const rows = await em.find(
        Suppression,
        {
          ...of,
          ...rangeOf(cursor),
        },
        orderOf(cursor),
      );
      const { items, hasMore } = toPage(rows, cursor);
      return { items: items.map(toRecord), hasMore };
    },

    async find(tenantId, idOrEmail) {
      const name = nameOf(idOrEmail);
      const row =
        name === null ? null : await store.em().findOne(Suppression, { tenantId, ...name });
      if (row === null) throw notFound();
      return toRecord(row);
    },

    async remove(tenantId, idOrEmail) {
      const name = nameOf(idOrEmail);
      const [removed] = name === null ? [] : await remove(store.pool, tenantId, [name]);
      if (removed === undefined) throw notFound();
      return removed;
    },

    async removeAll(tenantId, { emails = null, ids = null }) {
      if ((emails === null) === (ids === null)) {
        const message = 'Give either `emails` or `ids`, with 1 to 100 items.';
        throw refuseFields([{ path: emails === null ? 'emails' : 'ids', message }]);
      }
      if (emails !== null) {
        checkCount('emails', emails);
        const addresses = checkAddresses(listed(emails));
        return remove(
          store.pool,
          tenantId,
          addresses.map((address) => ({ address })),
        );
      }
      const given = ids ?? [];
      checkCount('ids', given);
      const issues = given.flatMap((id, index): Issue[] =>
        isUuid(id)
          ? []
          : [{ path: `ids.${index}`, message: `\`ids.${index}\` must be a valid UUID.` }],
      );
      if (issues.length > 0) throw refuseFields(issues);
      return remove(
        store.pool,
        tenantId,
        given.map((id) => ({ id: id.toLowerCase() })),
      );
    },
  };
}

type Name = { readonly id: string } | { readonly address: string };

const notFound = (): Refusal => new Refusal('not_found', 'Suppression not found');

const listed = (emails: readonly string[]): readonly { path: string; email: string }[] =>
  emails.map((email, index) => ({ path: `emails.${index}`, email }));

function checkCount(path: 'emails' | 'ids', list: readonly string[]): void {
  if (list.length >= 1 && list.length <= BATCH_MAX) return;
  const message = `\`${path}\` has ${list.length} items; 1 to ${BATCH_MAX} are allowed.`;
  throw refuseFields([{ path, message }]);
}

/** The addresses in their one spelling. Throws a Refusal that lists every issue. */
function checkAddresses(
  given: readonly { readonly path: string; readonly email: string }[],
): readonly string[] {
  const issues: Issue[] = [];
  const addresses = given.map(({ path, email }) => {
    const parsed = parseMailbox(email);
    const problem = !parsed.ok
      ? parsed.problem
      : isBare(parsed.mailbox.given)
        ? null
        : 'must stand alone, without a name and angle brackets';
    if (problem !== null) {
      issues.push({ path, message: `Invalid \`${path}\` field: the address ${problem}.` });
    }
    return normalizedAddress(email);
  });
  if (issues.length > 0) throw refuseFields(issues);
  return addresses;
}

const isBare = (given: string): boolean => !given.endsWith('>');

function nameOf(idOrEmail: string): Name | null {
  if (isUuid(idOrEmail)) return { id: idOrEmail.toLowerCase() };
  return parseMailbox(idOrEmail).ok ? { address: normalizedAddress(idOrEmail) } : null;
}

/** Rows are always taken in the order of addresses, so that two batches never wait for each other. */
async function insert(
  db: Queryable,
  tenantId: string,
  addresses: readonly string[],
): Promise<readonly string[]> {
  const distinct = [...new Set(addresses)].toSorted();
  const ids = distinct.map(() => newId());
  const { rows } = await db.query<{ id: string; address: string }>(
    `with kept as (
       insert into suppression (tenant_id, id, address, origin)
       select $1, one.id, one.address, 'manual'
       from unnest($2::uuid[], $3::text[]) with ordinality as one (id, address, position)
       order by one.position
       on conflict (tenant_id, address) do update set address = excluded.address
       returning *
     ), told as (${tell('suppression.added', '(select * from kept where id = any ($2::uuid[]))')})
     select id, address from kept`,
    [tenantId, ids, distinct],
  );
  suppressionsAdded.inc({ origin: 'manual' }, rows.filter(({ id }) => ids.includes(id)).length);
  const idOf = new Map(rows.map(({ id, address }) => [address, id]));
  return addresses.map((address) => idOf.get(address)!);
}

async function remove(
  db: Queryable,
  tenantId: string,
  names: readonly Name[],
): Promise<readonly string[]> {
  const keys = [...new Set(names.map((name) => ('id' in name ? name.id : name.address)))];
  const [first] = names;
  const [column, type] =
    first !== undefined && 'id' in first ? ['id', 'uuid'] : ['address', 'text'];
  const { rows } = await db.query<{ id: string; address: string }>(
    `with found as (
       select id from suppression where tenant_id = $1 and ${column} = any ($2::${type}[])
       order by address for update
     ), gone as (
       delete from suppression s using found where s.tenant_id = $1 and s.id = found.id
       returning s.*
     ), told as (${tell('suppression.removed', 'gone')})
     select id, address from gone`,
    [tenantId, keys],
  );
  const idOf = new Map(rows.map(({ id, address }) => [column === 'id' ? id : address, id]));
  return keys.flatMap((key) => idOf.get(key) ?? []);
}

const toRecord = (row: InstanceType<typeof Suppression.class>): SuppressionRecord => ({
  id: row.id,
  address: row.address,
  origin: row.origin,
  sourceId: row.sourceId ?? null,
  createdAt: row.createdAt,
});
