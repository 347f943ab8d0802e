// Audiences for tests: a store on a fresh database with two tenants, both of them with an endpoint that listens to all.
import * as assert from 'uvu/assert';
import { ensureFirstTenant } from '../../src/access/first-tenant.ts';
import { Refusal } from '../../src/access/refusal.ts';
import { upsertContact, type Upserted } from '../../src/audience/contact-changes.ts';
import type { NewContact } from '../../src/audience/contact-fields.ts';
import { newId } from '../../src/store/id.ts';
import { openStore, type Store } from '../../src/store/orm.ts';
import { eventTypes } from '../../src/timeline/outbox.ts';
import { migratedDatabase } from './postgres.ts';
import { silent } from './queue.ts';

export interface Told {
  readonly type: string;
  readonly detail: Record<string, unknown>;
}

export interface Audience {
  readonly store: Store;
  readonly tenantId: string;
  /** Another tenant. */
  readonly other: string;
  /** By the first tenant, at `at`. */
  upsert(contact: NewContact, tells?: boolean): Promise<Upserted>;
  /** What endpoints were told since the last time, in order. */
  told(tenant?: string): Promise<readonly Told[]>;
  stop(): Promise<void>;
}

export const at = new Date('2026-05-06T12:00:00.000Z');

export async function openAudience(): Promise<Audience> {
  const database = await migratedDatabase();
  const store = await openStore({
    url: database.url,
    log: silent,
    connectionsMax: 8,
    migrate: true,
  });
  const { tenantId } = await ensureFirstTenant(store, null);
  const other = newId();
  await store.pool.query(`insert into tenant (id, name) values ($1, 'other')`, [other]);
  for (const tenant of [tenantId, other]) {
    await store.pool.query(
      `insert into webhook (tenant_id, id, endpoint, events, status, secret_sealed, created_at, updated_at)
       values ($1, $2, 'https://hook.test', $3, 'enabled', '', now(), now())`,
      [tenant, newId(), eventTypes],
    );
  }
  return {
    store,
    tenantId,
    other,
    upsert: (contact, tells = true) =>
      store.transact((client) => upsertContact(client, tenantId, contact, { at, tells })),
    async told(tenant = tenantId) {
      const { rows } = await store.pool.query<Told>(
        `with gone as (delete from outbox where tenant_id = $1 returning *)
         select type, detail from gone order by id`,
        [tenant],
      );
      return rows.map(({ type, detail }) => ({
        type,
        detail: (typeof detail === 'string' ? JSON.parse(detail) : detail) as Told['detail'],
      }));
    },
    async stop() {
      await store.close();
      await database.drop();
    },
  };
}

/** The refusal that the work must end with. */
export async function refusal(work: Promise<unknown>): Promise<Refusal> {
  const error = await work.then(
    () => null,
    (thrown: unknown) => thrown,
  );
  assert.instance(error, Refusal, String(error));
  return error as Refusal;
}
