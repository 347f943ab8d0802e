// The tenant that is there from the beginning, its key, and in development mode its domain: part of the composition root.
import { existsSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { ensureFirstTenant } from './access/first-tenant.ts';
import { HOME_DOMAIN } from './compose-verbs.ts';
import type { Config } from './config.ts';
import { createDomain, generateDkimKeys } from './domains/create.ts';
import type { DataDir } from './store/data-dir.ts';
import type { Store } from './store/orm.ts';

export interface FirstKey {
  readonly token: string;
  /** It was made by this start. */
  readonly isNew: boolean;
}

/** Makes the first tenant and its key where there is none; in development mode its domain, too. */
export async function prepareFirstTenant(d: {
  config: Config;
  store: Store;
  dataDir: DataDir;
  sealingKey: Buffer;
}): Promise<{ firstKey: FirstKey | null; firstTenantId: string }> {
  const { config, store, dataDir } = d;
  const isDevelopment = config.mode === 'development';
  const keyFile = join(dataDir.path, 'first-api-key');
  // In development the key stays readable on disk, so that every start can show a curl that works.
  const first = await ensureFirstTenant(store, config.apiKey, (token) => {
    if (isDevelopment) writeFileSync(keyFile, token, { mode: 0o600 });
  });
  if (isDevelopment) await ensureHomeDomain(store, first.tenantId, d.sealingKey);
  const remembered =
    isDevelopment && existsSync(keyFile) ? readFileSync(keyFile, 'utf8').trim() : null;
  const token = first.token ?? remembered;
  return {
    firstTenantId: first.tenantId,
    firstKey: token === null ? null : { token, isNew: first.token !== null && first.generated },
  };
}

async function ensureHomeDomain(store: Store, tenantId: string, sealingKey: Buffer): Promise<void> {
  const isThere = async (): Promise<boolean> => {
    const { rowCount } = await store.pool.query(
      'select 1 from sending_domain where tenant_id = $1 and name = $2',
      [tenantId, HOME_DOMAIN],
    );
    return rowCount === 1;
  };
  if (await isThere()) return;
  const keys = await generateDkimKeys();
  try {
    await store.transact((client) =>
      createDomain(
        client,
        { tenantId, name: HOME_DOMAIN, status: 'verified', receiving: true },
        { sealingKey, keys },
      ),
    );
  } catch (error) {
    if (!(await isThere())) throw error; // else another process was first
  }
}
