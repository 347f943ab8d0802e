// The first start: a tenant and its full-access key, so that there is somebody to be.
import type { Store } from '../store/orm.ts';
import { createKey, newToken } from './keys.ts';
import { insertTenant, lockTenants } from './tenants.ts';

export interface FirstTenant {
  readonly tenantId: string;
  /** The token, when it was made now; null when the tenant existed: a token is shown once. */
  readonly token: string | null;
  readonly generated: boolean;
}

/**
 * Makes the first tenant when there is none. `apiKey` (MAILSTEAD_API_KEY) becomes its key; absent:
 * one is generated. Does nothing when any tenant exists. `beforeCommit` may keep the token: when it throws,
 * there is no tenant.
 */
export async function ensureFirstTenant(
  store: Store,
  apiKey: string | null,
  beforeCommit: (token: string) => void = () => undefined,
): Promise<FirstTenant> {
  return store.transact(async (client) => {
    await lockTenants(client);
    const { rows } = await client.query<{ id: string }>(
      'select id from tenant where imported_at is null order by id limit 1',
    );
    const existing = rows[0];
    if (existing !== undefined) return { tenantId: existing.id, token: null, generated: false };
    const token = apiKey ?? newToken();
    const tenantId = await insertTenant(client, 'first');
    await createKey(client, {
      tenantId,
      name: 'first key',
      token,
      permission: 'full_access',
      domainId: null,
    });
    beforeCommit(token);
    return { tenantId, token, generated: apiKey === null };
  });
}
