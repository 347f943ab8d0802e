// Blobs without a row: found and removed after a day, and nothing else is.
import { mkdtempSync, rmSync, utimesSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { collectBlobs } from '../../src/sending/collect-blobs.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { openQueue, type Bench } from '../support/queue.ts';

const DAY_MS = 86_400_000;
const folder = mkdtempSync(join(tmpdir(), 'mailstead-collect-'));
const blobs = openDiskBlobs(folder);

const test = suite('collecting blobs');
let queue: Bench;
test.before(async () => {
  queue = await openQueue();
});
test.after(async () => {
  await queue.stop();
  rmSync(folder, { recursive: true, force: true });
});

/** A blob of that age. */
async function blob(ageMs: number): Promise<string> {
  const key = newId();
  await blobs.put(key, Buffer.from(key));
  const at = new Date(Date.now() - ageMs);
  utimesSync(join(folder, key.slice(-2), key), at, at);
  return key;
}

const isThere = async (key: string): Promise<boolean> => (await blobs.get(key)) !== null;

test('only what is old and has no row goes', async () => {
  const named = await blob(2 * DAY_MS);
  const staged = await blob(2 * DAY_MS);
  const [orphan, young] = [await blob(2 * DAY_MS), await blob(DAY_MS / 2)];
  await queue.enqueue(1, { raw: null, blobKey: named });
  const [emailId] = await queue.enqueue(1);
  await queue.store.pool.query(
    `insert into attachment (tenant_id, email_id, id, position, content_type, disposition, blob_key)
     values ($1, $2, $3, 0, 'text/plain', 'attachment', $4)`,
    [queue.tenantId, emailId, newId(), staged],
  );
  const now = new Date();
  assert.is(await collectBlobs(queue.store, blobs, now), 1);
  assert.equal(await Promise.all([named, staged, orphan, young].map(isThere)), [
    true,
    true,
    false,
    true,
  ]);
  assert.is(await collectBlobs(queue.store, blobs, now), 0);
  assert.is(await collectBlobs(queue.store, blobs, new Date(now.getTime() + DAY_MS)), 1);
  assert.not(await isThere(young));
});

test('nothing that is still to be sent, or could be released, loses its message, however old', async () => {
  const states = [
    'scheduled',
    'preparing',
    'ready',
    'in_flight',
    'deferred',
    'unknown',
    'failed',
    'bounced',
  ];
  const keys = new Map<string, string>();
  for (const state of states) {
    const key = await blob(400 * DAY_MS);
    const [id] = await queue.enqueue(1, { raw: null, blobKey: key });
    await queue.store.pool.query(
      `update delivery set state = $2, due_at = now() - interval '400 days',
         expires_at = now() - interval '396 days' where email_id = $1`,
      [id, state],
    );
    keys.set(state, key);
  }
  const orphan = await blob(400 * DAY_MS);
  assert.is(await collectBlobs(queue.store, blobs, new Date()), 1);
  assert.not(await isThere(orphan));
  for (const [state, key] of keys) assert.ok(await isThere(key), state);
});

test('more than one statement asks about', async () => {
  const orphans = await Promise.all(Array.from({ length: 1_200 }, () => blob(2 * DAY_MS)));
  assert.is(await collectBlobs(queue.store, blobs, new Date()), orphans.length);
});

test('a folder of which the database knows nothing is left alone', async () => {
  const other = await openQueue();
  const key = await blob(2 * DAY_MS);
  assert.is(await collectBlobs(other.store, blobs, new Date()), 0);
  assert.ok(await isThere(key));
  await other.stop();
  assert.is(await collectBlobs(queue.store, blobs, new Date()), 1);
});

test('every table that names blobs is asked, also one that came later', async () => {
  await queue.store.pool.query('create table later (id uuid, picture_blob_key text)');
  const key = await blob(2 * DAY_MS);
  await queue.store.pool.query('insert into later (picture_blob_key) values ($1)', [key]);
  assert.is(await collectBlobs(queue.store, blobs, new Date()), 0);
  assert.ok(await isThere(key));
});

test.run();
