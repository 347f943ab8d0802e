// Moving a scheduled email whose message is a blob: the copy with the new date and the row change together, whoever else
// moves or wakes it meanwhile, and no blob is left over.
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { Caller } from '../../src/access/keys.ts';
import { Refusal } from '../../src/access/refusal.ts';
import { wakeScheduled } from '../../src/queue/schedule.ts';
import { moveScheduled } from '../../src/sending/scheduled.ts';
import { openDiskBlobs, type BlobStore } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { openQueue, type Bench } from '../support/queue.ts';

const test = suite<{ q: Bench; blobs: BlobStore; folder: string }>('scheduled');
test.before.each(async (context) => {
  context.q = await openQueue();
  context.folder = await mkdtemp(join(tmpdir(), 'mailstead-scheduled-'));
  context.blobs = openDiskBlobs(context.folder);
});
test.after.each(async ({ q, folder }) => {
  await q.stop();
  await rm(folder, { recursive: true });
});

const HOUR_MS = 3_600_000;
const headers = (date: Date, filler: number): string =>
  `From: a@sender.test\r\nTo: ${'b@recipient.test,\r\n '.repeat(filler)}b@recipient.test\r\nDate: ${date.toUTCString().replace('GMT', '+0000')}\r\n`;
const BODY = `\r\n${'Date: not this one\r\n'.repeat(8_000)}`;

interface Setup {
  readonly q: Bench;
  readonly blobs: BlobStore;
}
async function schedule({ q, blobs }: Setup, at: Date, filler = 0): Promise<string> {
  const raw = Buffer.from(headers(at, filler) + BODY);
  const blobKey = newId();
  await blobs.put(blobKey, raw);
  const about = { raw: null, blobKey, rawSizeBytes: raw.length, scheduledAt: at };
  return (await q.enqueue(1, about))[0]!;
}

/** False: it was not scheduled any more. */
async function move({ q, blobs }: Setup, id: string, at: Date): Promise<boolean> {
  const caller: Caller = {
    tenantId: q.tenantId,
    keyId: newId(),
    permission: 'full_access',
    domainId: null,
  };
  const d = { store: q.store, blobs, now: () => new Date(), onPlanned: () => undefined };
  try {
    await moveScheduled(d, caller, { id, scheduledAt: at.toISOString() });
    return true;
  } catch (error) {
    if (error instanceof Refusal && error.code === 'email_not_scheduled') return false;
    throw error;
  }
}

async function read(
  { q, blobs }: Setup,
  id: string,
): Promise<{ scheduledAt: Date; raw: string; event: string }> {
  const { rows } = await q.store.pool.query<{ ms: string; blob_key: string; event: string }>(
    `select (extract(epoch from e.scheduled_at) * 1000)::bigint::text as ms, k.blob_key, e.last_event as event
     from email e join email_content k on k.email_id = e.id where e.id = $1`,
    [id],
  );
  const { ms, blob_key: key, event } = rows[0]!;
  const raw = await blobs.get(key);
  assert.ok(raw !== null, 'the row names a blob that is there');
  return { scheduledAt: new Date(Number(ms)), raw: raw.toString(), event };
}

async function blobCount({ blobs }: Setup): Promise<number> {
  let count = 0;
  for await (const _ of blobs.list(new Date(Date.now() + HOUR_MS))) count += 1;
  return count;
}
const inHours = (hours: number): Date => new Date(Date.now() + hours * HOUR_MS);

test('the message says the new time, wherever in a chunk its date stands', async (setup) => {
  // Chunks of a file are 64 KiB: before, across and after the end of the first.
  for (const filler of [0, 3_271, 3_272, 3_273, 3_274, 3_275, 4_000]) {
    const id = await schedule(setup, inHours(1), filler);
    const at = inHours(2);
    assert.ok(await move(setup, id, at));
    assert.is((await read(setup, id)).raw, headers(at, filler) + BODY);
  }
  assert.is(await blobCount(setup), 7);
});

test('a disk that fails changes nothing and leaves no file open', async (setup) => {
  const at = inHours(1);
  const id = await schedule(setup, at);
  const streams: { readonly destroyed: boolean }[] = [];
  const failing: BlobStore = {
    ...setup.blobs,
    write: () => Promise.reject(new Error('no space left')),
    async read(...args) {
      const stream = await setup.blobs.read(...args);
      if (stream !== null) streams.push(stream);
      return stream;
    },
  };
  try {
    await move({ ...setup, blobs: failing }, id, inHours(2));
    assert.unreachable();
  } catch (error) {
    assert.is((error as Error).message, 'no space left');
  }
  assert.equal(
    streams.map(({ destroyed }) => destroyed),
    [true],
  );
  const { scheduledAt, raw } = await read(setup, id);
  assert.is(scheduledAt.getTime(), at.getTime());
  assert.is(raw, headers(at, 0) + BODY);
});

test('several moves at once: one of them wins, whole, and one blob is left', async (setup) => {
  for (let round = 0; round < 5; round++) {
    const id = await schedule(setup, inHours(1));
    const times = [2, 3, 4, 5].map(inHours);
    assert.equal(
      await Promise.all(times.map((at) => move(setup, id, at))),
      times.map(() => true),
    );
    const { scheduledAt, raw } = await read(setup, id);
    assert.is(raw, headers(scheduledAt, 0) + BODY);
    assert.is(await blobCount(setup), round + 1);
  }
});

test('woken while its blob is copied: it is not moved, and keeps its blob', async (setup) => {
  const due = new Date(Date.now() - 1_000);
  const id = await schedule(setup, due);
  const waking: BlobStore = {
    ...setup.blobs,
    async write(...args) {
      await setup.blobs.write(...args);
      assert.is(await wakeScheduled(setup.q.store), 1);
    },
  };
  assert.is(await move({ ...setup, blobs: waking }, id, inHours(2)), false);
  const { raw, event } = await read(setup, id);
  assert.is(raw, headers(due, 0) + BODY);
  assert.is(event, 'queued');
  assert.is(await blobCount(setup), 1);
});

test('moving and waking at once: moved or woken, with the blob that says so', async (setup) => {
  for (let round = 0; round < 10; round++) {
    const due = new Date(Date.now() - 1_000);
    const ids: string[] = [];
    for (let index = 0; index < 4; index++) ids.push(await schedule(setup, due));
    const moving = ids.map((id) => move(setup, id, inHours(2)));
    for (let turn = 0; turn < 5 * round; turn++) await setup.q.store.pool.query('select 1');
    await wakeScheduled(setup.q.store);
    for (const [index, isMoved] of (await Promise.all(moving)).entries()) {
      const { scheduledAt, raw, event } = await read(setup, ids[index]!);
      assert.is(raw, headers(scheduledAt, 0) + BODY);
      assert.is(scheduledAt.getTime() === due.getTime(), !isMoved);
      assert.is(event, isMoved ? 'scheduled' : 'queued');
    }
    assert.is(await blobCount(setup), 4 * (round + 1));
  }
});

test.run();
