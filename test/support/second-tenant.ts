// Another tenant beside the first one of an appliance, for tests of who sees what.
import { Pool } from 'pg';
import { createKey, newToken } from '../../src/access/keys.ts';
import { newId } from '../../src/store/id.ts';
import type { App } from './app.ts';

/** Runs `work` on a connection of its own to the appliance's database. */
export async function onDatabase<T>(app: App, work: (pool: Pool) => Promise<T>): Promise<T> {
  const pool = new Pool({ connectionString: app.databaseUrl, max: 1 });
  // A connection that is closing may still hear that its database goes.
  pool.on('error', () => undefined);
  try {
    return await work(pool);
  } finally {
    await pool.end();
  }
}

/** A tenant with a full-access key. */
export function secondTenant(app: App): Promise<{ tenantId: string; key: string }> {
  return onDatabase(app, async (pool) => {
    const tenantId = newId();
    const key = newToken();
    await pool.query('insert into tenant (id, name) values ($1, $2)', [tenantId, 'second']);
    await createKey(pool, {
      tenantId,
      name: 'k',
      token: key,
      permission: 'full_access',
      domainId: null,
    });
    return { tenantId, key };
  });
}
