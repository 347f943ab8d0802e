// A tenant's API keys: made, listed, renamed, revoked. A revoked key keeps its row, which logs name, and
// nothing shows it any more.
import { ApiKey } from '../store/api-key.ts';
import { isUuid } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { SendingDomain } from '../store/sending-domain.ts';
import { createKey, newToken, type Caller, type Permission } from './keys.ts';
import { checkPage, refuseCursor, toPage, type PageRequest, orderOf, rangeOf } from './page.ts';
import { refuseFields, type Issue } from './refusal.ts';

export interface NewKeyRequest {
  readonly name: string;
  readonly permission?: Permission | undefined;
  readonly domain_id?: string | null | undefined;
}

export interface ApiKeyRecord {
  readonly tenantId: string;
  readonly id: string;
  readonly name: string;
  /** The first part of the token. */
  readonly prefix: string;
  readonly permission: Permission;
  readonly domainId: string | null;
  readonly createdAt: Date;
  readonly lastUsedAt: Date | null;
}

export interface ApiKeyPage {
  readonly items: readonly ApiKeyRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

export interface ApiKeyVerbs {
  /** The key and its token, which nobody can read again. Throws a Refusal. */
  create(
    caller: Caller,
    request: NewKeyRequest,
  ): Promise<{ readonly key: ApiKeyRecord; readonly token: string }>;
  list(caller: Caller, page: PageRequest): Promise<ApiKeyPage>;
  /** False when there is no such key. Throws a Refusal. */
  rename(caller: Caller, id: string, name: string): Promise<boolean>;
  /** At once, in every process. False when there is no such key. */
  revoke(caller: Caller, id: string): Promise<boolean>;
}

const NAME_MAX_CHARACTERS = 50;

export function createApiKeyVerbs(store: Store): ApiKeyVerbs {
  return {
    async create(caller, request) {
      const { tenantId } = caller;
      const name = request.name;
      const permission = request.permission ?? 'full_access';
      const domainId = request.domain_id?.toLowerCase() ?? null;
      const issues = [...checkName(name), ...checkScope(permission, domainId)];
      const hasDomain =
        domainId !== null &&
        isUuid(domainId) &&
        (await store.em().count(SendingDomain, { tenantId, id: domainId })) > 0;
      if (domainId !== null && issues.every(({ path }) => path !== 'domain_id') && !hasDomain) {
        issues.push({
          path: 'domain_id',
          message: '`domain_id` is not the id of a domain of yours.',
        });
      }
      if (issues.length > 0) throw refuseFields(issues);
      const token = newToken();
      const id = await createKey(store.pool, { tenantId, name, token, permission, domainId });
      const key = await store.em().findOneOrFail(ApiKey, { tenantId, id });
      return { key: toRecord(key), token };
    },

    list: ({ tenantId }, page) => listKeys(store, { tenantId }, page),

    async rename({ tenantId }, id, name) {
      const issues = checkName(name);
      if (issues.length > 0) throw refuseFields(issues);
      const found = { tenantId, id, revokedAt: null };
      return (await store.em().nativeUpdate(ApiKey, found, { name })) > 0;
    },

    async revoke({ tenantId }, id) {
      const found = { tenantId, id, revokedAt: null };
      return (await store.em().nativeUpdate(ApiKey, found, { revokedAt: new Date() })) > 0;
    },
  };
}

/** Newest first, without revoked ones; of all tenants when none is named. Throws a Refusal. */
export async function listKeys(
  store: Store,
  of: { readonly tenantId?: string },
  page: PageRequest,
): Promise<ApiKeyPage> {
  const cursor = checkPage(page);
  const at = cursor.after ?? cursor.before;
  const em = store.em();
  // The key at the cursor may have been revoked since the page before.
  if (at !== null && (await em.count(ApiKey, { ...of, id: at })) === 0) refuseCursor(cursor);
  const found = { ...of, revokedAt: null, ...rangeOf(cursor) };
  const { items, hasMore } = toPage(await em.find(ApiKey, found, orderOf(cursor)), cursor);
  return { items: items.map(toRecord), hasMore };
}

/** Whosever it is; null: missing or revoked. */
export async function findKey(store: Store, id: string): Promise<ApiKeyRecord | null> {
  const key = await store.em().findOne(ApiKey, { id, revokedAt: null });
  return key === null ? null : toRecord(key);
}

function checkName(name: string): Issue[] {
  const length = [...name].length;
  if (name.trim() === '' || length > NAME_MAX_CHARACTERS) {
    const message = `\`name\` must be 1 to ${NAME_MAX_CHARACTERS} characters long.`;
    return [{ path: 'name', message }];
  }
  return /\p{Cc}/u.test(name)
    ? [{ path: 'name', message: '`name` must not hold control characters.' }]
    : [];
}

function checkScope(permission: Permission, domainId: string | null): Issue[] {
  if (domainId === null) return [];
  if (permission !== 'sending_access') {
    const message = '`domain_id` needs `permission` to be `sending_access`.';
    return [{ path: 'domain_id', message }];
  }
  return isUuid(domainId)
    ? []
    : [{ path: 'domain_id', message: '`domain_id` must be the id of a domain.' }];
}

const toRecord = (key: InstanceType<typeof ApiKey.class>): ApiKeyRecord => ({
  tenantId: key.tenantId,
  id: key.id,
  name: key.name,
  prefix: key.prefix,
  permission: key.permission,
  domainId: key.domainId ?? null,
  createdAt: key.createdAt,
  lastUsedAt: key.lastUsedAt ?? null,
});
