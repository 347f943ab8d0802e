// The fetcher by itself on a real queue: how many at a time, what a stop leaves behind, what happens to staged blobs,
// and that two of them never make an email ready twice.
import { once } from 'node:events';
import { mkdtemp, readdir, rm } from 'node:fs/promises';
import { createServer, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createAddressGuard } from '../../src/dns/address-guard.ts';
import { createResolver } from '../../src/dns/resolver.ts';
import type { NewAttachment } from '../../src/queue/enqueue.ts';
import { startFetcher, type Fetcher, type FetcherOptions } from '../../src/sending/fetcher.ts';
import { openDiskBlobs, type BlobStore } from '../../src/store/blob.ts';
import { BlobsUnavailable } from '../../src/store/blobs-unavailable.ts';
import { newId } from '../../src/store/id.ts';
import { until } from '../support/app.ts';
import { createTrackingTokens } from '../../src/tracking/tokens.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';

const test = suite('fetcher');
const resolver = createResolver({ servers: ['127.0.0.1:9'] });
let queue: Bench;
let blobs: BlobStore;
let folder: string;
let web: Server;
let base: string;
/** Requests that are not answered yet. */
const held: ServerResponse[] = [];
let isHolding = false;
let heldMax = 0;
let ready = 0;
const fetchers: Fetcher[] = [];

test.before(async () => {
  queue = await openQueue();
  folder = await mkdtemp(join(tmpdir(), 'mailstead-fetcher-'));
  blobs = openDiskBlobs(join(folder, 'blobs'));
  web = createServer((_request, response) => {
    if (!isHolding) {
      response.end('fetched');
      return;
    }
    held.push(response);
    heldMax = Math.max(heldMax, held.length);
  });
  web.listen(0, '127.0.0.1');
  await once(web, 'listening');
  base = `http://127.0.0.1:${(web.address() as AddressInfo).port}`;
});
test.after.each(async () => {
  await Promise.all(fetchers.splice(0).map((fetcher) => fetcher.stop()));
  await queue.store.pool.query(
    'truncate attachment_fetch, attachment, delivery, email, email_content, timeline',
  );
  isHolding = false;
  held.length = 0;
});
test.after(async () => {
  resolver.close();
  await queue.stop();
  web.closeAllConnections();
  await new Promise((resolve) => web.close(resolve));
  await rm(folder, { recursive: true });
});

let spools = 0;
async function start(about: Partial<FetcherOptions> = {}): Promise<Fetcher> {
  const fetcher = await startFetcher({
    store: queue.store,
    blobs,
    log: silent,
    resolver,
    guard: createAddressGuard({ allow: ['127.0.0.0/8'] }),
    spoolFolder: join(folder, `spool-${(spools += 1)}`),
    trackingTokens: createTrackingTokens(Buffer.alloc(32)),
    onReady: () => {
      ready += 1;
    },
    ...about,
  });
  fetchers.push(fetcher);
  return fetcher;
}

const byUrl = (about: Partial<NewAttachment> = {}): NewAttachment => ({
  id: newId(),
  filename: 'file.txt',
  contentType: 'text/plain',
  contentId: null,
  disposition: 'attachment',
  sizeBytes: null,
  url: `${base}/file`,
  blobKey: null,
  rawOffset: null,
  rawLength: null,
  ...about,
});

const enqueue = (
  count: number,
  attachments: readonly NewAttachment[] = [byUrl()],
): Promise<readonly string[]> =>
  queue.enqueue(count, {
    raw: null,
    rawSizeBytes: 0,
    attachments: attachments.map((one) => ({ ...one })),
  });

const untilStates = (wanted: Record<string, number>): Promise<unknown> =>
  until(
    () => queue.states(),
    (states) => JSON.stringify(states) === JSON.stringify(wanted),
  );

test('four emails of a tenant at a time, and all in the end', async () => {
  isHolding = true;
  heldMax = 0;
  for (let index = 0; index < 10; index += 1) await enqueue(1);
  await start();
  await until(
    () => Promise.resolve(held.length),
    (count) => count === 4,
  );
  assert.equal(await queue.states(), { preparing: 10 });
  isHolding = false;
  for (const response of held) response.end('late');
  await untilStates({ ready: 10 });
  assert.is(heldMax, 4);
});

test('a tenant whose hosts hang does not hold up the others', async () => {
  isHolding = true;
  const quiet = newId();
  await queue.store.pool.query("insert into tenant (id, name) values ($1, 'quiet')", [quiet]);
  for (let index = 0; index < 20; index += 1) await enqueue(1);
  await start();
  await until(
    () => Promise.resolve(held.length),
    (count) => count === 4,
  );
  isHolding = false;
  await queue.enqueue(1, {
    tenantId: quiet,
    raw: null,
    rawSizeBytes: 0,
    attachments: [byUrl()],
  });
  await untilStates({ preparing: 20, ready: 1 });
});

test('a disk that fails costs a try, however many files were on their way', async () => {
  const fetcher = await start({ retryDelaysMs: [10_000] });
  const spool = join(folder, `spool-${spools}`);
  isHolding = true;
  await enqueue(
    1,
    Array.from({ length: 4 }, () => byUrl()),
  );
  fetcher.nudge();
  await until(
    () => Promise.resolve(held.length),
    (count) => count === 4,
  );
  await rm(spool, { recursive: true });
  held[0]?.end('nowhere to write');
  await until(
    () => queue.store.pool.query<{ last_error: string }>('select last_error from attachment_fetch'),
    ({ rows }) => rows[0]?.last_error === 'interrupted',
  );
  await until(
    () => Promise.resolve(held.every((response) => response.destroyed || response.writableEnded)),
    (areEnded) => areEnded,
  );
  assert.equal(await queue.states(), { preparing: 1 });
});

test('a stop gives back what is under way, and the next start takes it at once', async () => {
  isHolding = true;
  await enqueue(1);
  const first = await start();
  await until(
    () => Promise.resolve(held.length),
    (count) => count === 1,
  );
  await first.stop();
  const { rows } = await queue.store.pool.query(
    'select attempts, leased_until, due_at <= now() as is_due from attachment_fetch',
  );
  assert.equal(rows, [{ attempts: 1, leased_until: null, is_due: true }]);
  const facts = await queue.store.pool.query(
    "select 1 from timeline where kind = 'attachment_fetch_failed'",
  );
  assert.is(facts.rowCount, 0, 'it was not the fault of the far end');
  isHolding = false;
  await start();
  await untilStates({ ready: 1 });
});

test('ids stay, staged bytes come along, and their blobs go', async () => {
  const blobKey = newId();
  await blobs.put(blobKey, Buffer.from('staged'));
  const staged = byUrl({ url: null, blobKey, sizeBytes: 6, filename: 'staged.txt' });
  const fetched = byUrl();
  const [emailId] = await enqueue(1, [staged, fetched]);
  await start();
  await untilStates({ ready: 1 });
  const { rows } = await queue.store.pool.query<{
    id: string;
    size_bytes: number;
    place: string;
  }>(
    `select a.id, a.size_bytes,
      substring(convert_from(k.raw, 'UTF8') from a.raw_offset + 1 for a.raw_length) as place
    from attachment a join email_content k on k.email_id = a.email_id
    where a.email_id = $1 order by a.position`,
    [emailId],
  );
  assert.equal(
    rows.map((row) => [row.id, row.size_bytes, Buffer.from(row.place, 'base64').toString()]),
    [
      [staged.id, 6, 'staged'],
      [fetched.id, 7, 'fetched'],
    ],
  );
  await until(
    () => blobs.get(blobKey),
    (bytes) => bytes === null,
  );
});

test('given and fetched bytes count together', async () => {
  const blobKey = newId();
  await blobs.put(blobKey, Buffer.from('x'));
  // In base64 all but four bytes of the limit.
  const staged = byUrl({ url: null, blobKey, sizeBytes: (40 * 1024 * 1024 * 3) / 4 - 3 });
  await enqueue(1, [staged, byUrl()]);
  await start();
  await untilStates({ failed: 1 });
  const { rows } = await queue.store.pool.query<{ last_cause: string; last_reply: string }>(
    'select last_cause, last_reply from delivery',
  );
  assert.is(rows[0]?.last_cause, 'attachment_unavailable');
  assert.match(rows[0]?.last_reply ?? '', /"file\.txt".*40 MB/);
  await until(
    () => blobs.get(blobKey),
    (bytes) => bytes === null,
  );
});

test('two fetchers: each email becomes ready once', async () => {
  ready = 0;
  await enqueue(1);
  await enqueue(1);
  await enqueue(1);
  await Promise.all([start(), start()]);
  await untilStates({ ready: 3 });
  await Promise.all(fetchers.splice(0).map((fetcher) => fetcher.stop()));
  assert.is(ready, 3);
  const { rowCount } = await queue.store.pool.query(
    "select 1 from timeline where kind = 'attachments_fetched'",
  );
  assert.is(rowCount, 3);
});

test('trouble that passes is tried again by itself; the spool is empty afterwards', async () => {
  let asked = 0;
  const flaky = createServer((_request, response) => {
    asked += 1;
    if (asked < 3) response.writeHead(502).end();
    else response.end('third time');
  });
  flaky.listen(0, '127.0.0.1');
  await once(flaky, 'listening');
  const url = `http://127.0.0.1:${(flaky.address() as AddressInfo).port}/`;
  await enqueue(1, [byUrl({ url })]);
  const fetcher = await start({ retryDelaysMs: [10, 10, 10] });
  await untilStates({ ready: 1 });
  assert.is(asked, 3);
  await fetcher.stop();
  assert.equal(await readdir(join(folder, `spool-${spools}`)), []);
  flaky.closeAllConnections();
  flaky.close();
});

test('a blob store that is away for long costs an email no try', async () => {
  let asked = 0;
  const write: BlobStore['write'] = async (key, chunks) => {
    asked += 1;
    if (asked <= 4) throw new BlobsUnavailable('away');
    await blobs.write(key, chunks);
  };
  const large = createServer((_request, response) => response.end(Buffer.alloc(300_000, 'x')));
  large.listen(0, '127.0.0.1');
  await once(large, 'listening');
  const url = `http://127.0.0.1:${(large.address() as AddressInfo).port}/`;
  await enqueue(1, [byUrl({ url })]);
  // Two more, and it would be given up.
  await queue.store.pool.query('update attachment_fetch set attempts = 18');
  const fetcher = await start({ retryDelaysMs: [1], blobs: { ...blobs, write } });
  const nudging = setInterval(() => fetcher.nudge(), 10);
  await untilStates({ ready: 1 });
  clearInterval(nudging);
  assert.is(asked, 5);
  large.closeAllConnections();
  large.close();
});

test.run();
