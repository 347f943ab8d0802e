// Tenants for whoever runs the appliance: made, listed, found by id or name. The one with the smallest id of those
// made here is the first: its full-access keys are the operator's.
import type { PoolClient } from 'pg';
import { isUuid, newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { Tenant } from '../store/tenant.ts';
import {
  checkPage,
  orderOf,
  rangeOf,
  refuseCursor,
  toPage,
  type Cursor,
  type PageRequest,
} from './page.ts';
import { refuseFields } from './refusal.ts';

/** Serialises whoever makes a tenant, the first start included; any constant of our own. */
const TENANT_LOCK = 7_245_178_302;
const NAME_MAX_CHARACTERS = 100;
/** Names were not always unique. */
const NAMESAKES_MAX = 20;

export interface TenantRecord {
  readonly id: string;
  readonly name: string;
  readonly createdAt: Date;
  /** The first tenant. */
  readonly isOperator: boolean;
}

/** Until the transaction ends, nobody else makes a tenant. */
export async function lockTenants(client: PoolClient): Promise<void> {
  await client.query('select pg_advisory_xact_lock($1)', [TENANT_LOCK]);
}

/** Its id. The caller holds the lock. */
export async function insertTenant(client: PoolClient, name: string): Promise<string> {
  const id = newId();
  await client.query('insert into tenant (id, name) values ($1, $2)', [id, name]);
  return id;
}

/** A tenant without keys and domains. Throws a Refusal for a name that is none, or that another tenant has. */
export async function createTenant(store: Store, given: string): Promise<TenantRecord> {
  const name = given.trim();
  const refuse = (what: string): never => {
    throw refuseFields([{ path: 'name', message: `The name of a tenant ${what}.` }]);
  };
  const length = [...name].length;
  if (length === 0 || length > NAME_MAX_CHARACTERS) {
    refuse(`must be 1 to ${NAME_MAX_CHARACTERS} characters long`);
  }
  if (/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/u.test(name) || !name.isWellFormed()) {
    refuse('must not hold control characters');
  }
  if (isUuid(name)) refuse('must not look like an id');
  const id = await store.transact(async (client) => {
    await lockTenants(client);
    const { rowCount } = await client.query('select from tenant where name = $1 limit 1', [name]);
    if (rowCount !== 0) refuse(`must not be that of another one: there is a tenant "${name}"`);
    return insertTenant(client, name);
  });
  const [made] = await findTenants(store, id);
  if (made === undefined) throw new Error(`tenant ${id} vanished while it was made`);
  return made;
}

/** Newest first. Throws a Refusal for a bad page. */
export async function listTenants(
  store: Store,
  page: PageRequest,
): Promise<{ readonly items: readonly TenantRecord[]; readonly hasMore: boolean }> {
  const cursor: Cursor = checkPage(page);
  const at = cursor.after ?? cursor.before;
  const em = store.em();
  if (at !== null && (await em.count(Tenant, { id: at })) === 0) refuseCursor(cursor);
  const rows = await em.find(Tenant, { ...rangeOf(cursor) }, orderOf(cursor));
  const { items, hasMore } = toPage(rows, cursor);
  return { items: await toRecords(store, items), hasMore };
}

/** Those of that id or name: at most one, but where names were given twice. */
export async function findTenants(
  store: Store,
  idOrName: string,
): Promise<readonly TenantRecord[]> {
  const where = isUuid(idOrName) ? { id: idOrName.toLowerCase() } : { name: idOrName };
  const limits = { orderBy: { id: 'asc' as const }, limit: NAMESAKES_MAX };
  return toRecords(store, await store.em().find(Tenant, where, limits));
}

async function toRecords(
  store: Store,
  rows: readonly InstanceType<typeof Tenant.class>[],
): Promise<readonly TenantRecord[]> {
  const first = await findFirstTenant(store);
  return rows.map(({ id, name, createdAt }) => {
    return { id, name, createdAt, isOperator: id === first };
  });
}

/** The id of the first tenant; null: there is none yet. */
export async function findFirstTenant(store: Store): Promise<string | null> {
  const [first] = await store
    .em()
    .find(Tenant, { importedAt: null }, { orderBy: { id: 'asc' }, limit: 1 });
  return first?.id ?? null;
}
