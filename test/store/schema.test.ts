// Migrations on a real database: once, by whoever comes first, never by an older program; and the small
// promises of the store: ids, seals, blobs.
import { mkdtemp, readdir, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { isUuid, newId, randomText } from '../../src/store/id.ts';
import { NewerSchema, openStore } from '../../src/store/orm.ts';
import { deriveKey, seal, unseal } from '../../src/store/seal.ts';
import { freshDatabase } from '../support/postgres.ts';
import { silent } from '../support/queue.ts';

const test = suite('store');
const open = (url: string) => openStore({ url, log: silent, connectionsMax: 3, migrate: true });

test('four processes migrate at the same time: one does, all work', async () => {
  const database = await freshDatabase();
  const stores = await Promise.all(Array.from({ length: 4 }, () => open(database.url)));
  const { rows } = await stores[0]!.pool.query<{ name: string }>('select name from migration');
  const names = rows.map(({ name }) => name);
  assert.ok(names.includes('0001-first-house'));
  assert.is(new Set(names).size, names.length, 'no migration ran twice');
  for (const store of stores) await store.close();
  await database.drop();
});

test('a schema that a newer program made stops the start and says so', async () => {
  const database = await freshDatabase();
  await (await open(database.url)).close();
  const client = new Client(database.url);
  await client.connect();
  await client.query("insert into migration (name, executed_at) values ('9999-later', now())");
  await client.end();
  try {
    await open(database.url);
    assert.unreachable();
  } catch (error) {
    assert.instance(error, NewerSchema);
    assert.match((error as Error).message, /newer Mailstead \(9999-later\)/);
  }
  await database.drop();
});

test('tenant_id leads every key of a tenant-owned table', async () => {
  const database = await freshDatabase();
  const store = await open(database.url);
  const { rows } = await store.pool.query<{ table: string; definition: string }>(
    `select c.relname as table, pg_get_constraintdef(k.oid) as definition
     from pg_constraint k join pg_class c on c.oid = k.conrelid
     where k.contype in ('p', 'u', 'f') and exists (
       select 1 from pg_attribute a where a.attrelid = c.oid and a.attname = 'tenant_id')`,
  );
  assert.ok(rows.length >= 10);
  for (const { table, definition } of rows) {
    assert.match(definition, /^(PRIMARY KEY|UNIQUE|FOREIGN KEY) \(tenant_id/, table);
  }
  await store.close();
  await database.drop();
});

test('a schema that can be distributed by tenant has no triggers and no functions of its own', async () => {
  const database = await freshDatabase();
  const store = await open(database.url);
  const { rows } = await store.pool.query<{ name: string }>(
    `select tgname as name from pg_trigger where not tgisinternal
     union all
     select proname from pg_proc where pronamespace = 'public'::regnamespace and not exists (
       select 1 from pg_depend where objid = pg_proc.oid and deptype = 'e')`,
  );
  assert.equal(rows, []);
  await store.close();
  await database.drop();
});

test('ids are UUIDv7, unique, and sort by creation, also within a millisecond and across a clock that steps back', () => {
  const ids = Array.from({ length: 10_000 }, (_, index) => newId(1_700_000_000_000 - (index % 3)));
  assert.ok(ids.every((id) => isUuid(id) && id[14] === '7' && /[89ab]/.test(id[19]!)));
  assert.equal(ids, ids.toSorted());
  assert.is(new Set(ids).size, ids.length);
  assert.match(randomText(24), /^[A-Za-z0-9]{24}$/);
});

test('a sealed value opens with its key and context only', () => {
  const key = deriveKey('a'.repeat(32), 'test');
  const sealed = seal(key, 'row 1', Buffer.from('private'));
  assert.is(unseal(key, 'row 1', sealed).toString(), 'private');
  assert.throws(() => unseal(key, 'row 2', sealed));
  assert.throws(() => unseal(deriveKey('b'.repeat(32), 'test'), 'row 1', sealed));
  sealed[sealed.length - 1]! ^= 1;
  assert.throws(() => unseal(key, 'row 1', sealed));
});

test('blobs: written whole, read back, missing is null, keys cannot leave the folder', async () => {
  const folder = await mkdtemp(join(tmpdir(), 'mailstead-blobs-'));
  const blobs = openDiskBlobs(folder);
  const key = newId();
  const bytes = Buffer.alloc(300_000, 7);
  await blobs.put(key, bytes);
  assert.ok((await blobs.get(key))?.equals(bytes));
  assert.equal(
    (await readdir(join(folder, key.slice(-2)))).filter((name) => name.endsWith('.part')),
    [],
  );
  await blobs.remove(key);
  assert.is(await blobs.get(key), null);
  try {
    await blobs.get('../../etc/passwd');
    assert.unreachable();
  } catch (error) {
    assert.match((error as Error).message, /UUID/);
  }
  await rm(folder, { recursive: true });
});

test.run();
