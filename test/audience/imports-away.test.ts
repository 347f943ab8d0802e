// An import whose file lies in a blob store that is away for long: it waits, and is read when the store is back.
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createImporter } from '../../src/audience/importer.ts';
import { createImportVerbs } from '../../src/audience/imports.ts';
import { openDiskBlobs, type BlobStore } from '../../src/store/blob.ts';
import { BlobsUnavailable } from '../../src/store/blobs-unavailable.ts';
import { newId } from '../../src/store/id.ts';
import { openQueue, silent } from '../support/queue.ts';

const test = suite('imports away');

test('a blob store that is away for long costs an import no try', async () => {
  const bench = await openQueue();
  const { store } = bench;
  const folder = mkdtempSync(join(tmpdir(), 'mailstead-imports-away-'));
  const blobs = openDiskBlobs(folder);
  const away: BlobStore = { ...blobs, read: () => Promise.reject(new BlobsUnavailable('away')) };
  const about = { store, now: () => new Date(), onImport: () => undefined };
  const verbs = createImportVerbs({ ...about, blobs });
  const tenantId = newId();
  await store.pool.query("insert into tenant (id, name) values ($1, 'x')", [tenantId]);
  // oxlint-disable-next-line typescript/require-await -- an async iterable of one
  const file = async function* (): AsyncGenerator<Buffer> {
    yield Buffer.from('email\na@recipient.test\n');
  };
  const id = await verbs.create(tenantId, await verbs.receive(file()), new Map());
  for (let tries = 1; tries <= 20; tries += 1) {
    const fault = await createImporter({ store, blobs: away, log: silent })
      .turn()
      .catch((error: unknown) => error);
    assert.instance(fault, BlobsUnavailable);
    await store.pool.query('update contact_import set leased_until = null where id = $1', [id]);
  }
  const importer = createImporter({ store, blobs, log: silent });
  while ((await importer.turn()) === 0);
  const done = await verbs.find(tenantId, id);
  assert.equal([done?.record.status, done?.record.counts.created], ['completed', 1]);
  await bench.stop();
  rmSync(folder, { recursive: true });
});

test.run();
