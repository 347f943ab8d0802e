// Emails whose attachments are fetched first, on a real Postgres: who fetches, and how it ends.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { NewAttachment } from '../../src/queue/enqueue.ts';
import {
  claimFetches,
  deferFetch,
  failPrepared,
  makeReady,
  type ClaimedFetch,
} from '../../src/queue/prepare.ts';
import { wakeScheduled } from '../../src/queue/schedule.ts';
import { findEmail } from '../../src/sending/read.ts';
import { newId } from '../../src/store/id.ts';
import { readTrace } from '../../src/timeline/trace.ts';
import { file, openQueue, recipients, type Bench } from '../support/queue.ts';

const test = suite<{ q: Bench }>('prepare');
test.before.each(async (context) => {
  context.q = await openQueue();
});
test.after.each(({ q }) => q.stop());

const ALL = { max: 10, leaseMs: 60_000, perTenant: 10, active: [] };
const raw = Buffer.from('Subject: Prepared\r\n\r\nx\r\n');
const fetched = (attachments: readonly NewAttachment[]) => ({
  raw,
  blobKey: null,
  rawSizeBytes: raw.length,
  needsSmtpUtf8: true,
  attachments: attachments.map((one, index) => ({
    ...one,
    id: newId(),
    sizeBytes: 5,
    contentType: 'application/pdf',
    blobKey: null,
    rawOffset: 100 * index,
    rawLength: 8,
  })),
});
/** One email with a staged file and one to fetch. */
const enqueueUnfetched = async (q: Bench, about: { count?: number; scheduledAt?: Date } = {}) => {
  const staged = newId();
  const attachments = [
    file({ blobKey: staged, sizeBytes: 3 }),
    file({ url: 'https://files.test/a.pdf', sizeBytes: null }),
  ];
  const [id] = await q.enqueue(1, {
    raw: null,
    rawSizeBytes: 0,
    attachments,
    deliveries: recipients(about.count ?? 1),
    scheduledAt: about.scheduledAt ?? null,
  });
  return { id: id!, staged, attachments };
};
const claimOne = async (q: Bench): Promise<ClaimedFetch> => {
  const [one] = await claimFetches(q.store.pool, ALL);
  assert.ok(one);
  return one;
};

test('an email with a file to fetch waits, is leased once and leaves when it is composed', async ({
  q,
}) => {
  const { id, staged, attachments } = await enqueueUnfetched(q, { count: 2 });
  const epoch = await q.run();
  assert.equal(await q.claim(epoch, 10), []);
  assert.is((await findEmail(q.store, q.tenantId, id))?.lastEvent, 'queued');
  const waiting = async () => (await readTrace(q.store, q.tenantId, id))?.waiting;
  assert.is((await waiting())?.code, 'preparing');

  const leases = await Promise.all(
    Array.from({ length: 5 }, () => claimFetches(q.store.pool, ALL)),
  );
  assert.equal(leases.flat(), [{ tenantId: q.tenantId, emailId: id, attempt: 1 }]);
  assert.match((await waiting())?.reason ?? '', /being fetched/);

  const stored = fetched(attachments);
  const end = () => q.store.transact((client) => makeReady(client, q.tenantId, id, stored));
  assert.equal(await end(), [staged]);
  assert.is(await end(), null, 'the second one comes too late');
  const claimed = await q.claim(epoch, 10);
  assert.is(claimed.length, 2);
  assert.equal(claimed[0]?.raw, raw);
  assert.is(claimed[0]?.needsSmtpUtf8, true);
  const { rows } = await q.store.pool.query<Record<string, unknown>>(
    'select id, size_bytes, blob_key, raw_offset from attachment order by position',
  );
  assert.equal(
    rows,
    attachments.map((one, index) => ({
      id: one.id,
      size_bytes: 5,
      blob_key: null,
      raw_offset: 100 * index,
    })),
  );
});

test('who has much to fetch gets no more than a share, and who has the least comes first', async ({
  q,
}) => {
  const quiet = newId();
  await q.store.pool.query("insert into tenant (id, name) values ($1, 'quiet')", [quiet]);
  for (let count = 0; count < 6; count += 1) await enqueueUnfetched(q);
  await q.enqueue(1, {
    tenantId: quiet,
    raw: null,
    rawSizeBytes: 0,
    attachments: [file({ url: 'https://files.test/a.pdf', sizeBytes: null })],
  });
  const share = { ...ALL, perTenant: 2 };
  const [first, ...none] = await claimFetches(q.store.pool, {
    ...share,
    max: 1,
    active: [q.tenantId],
  });
  assert.equal([first?.tenantId, none], [quiet, []]);
  const more = await claimFetches(q.store.pool, { ...share, active: [q.tenantId, quiet] });
  assert.equal(
    more.map(({ tenantId }) => tenantId),
    [q.tenantId],
  );
  const busy = [q.tenantId, q.tenantId];
  assert.equal(await claimFetches(q.store.pool, { ...share, active: busy }), []);
});

test('a try that failed waits for its time and says why', async ({ q }) => {
  const { id } = await enqueueUnfetched(q);
  const first = await claimOne(q);
  const later = { delayMs: 60_000, error: 'files.test does not answer.' };
  assert.is(await deferFetch(q.store.pool, first, later), true);
  assert.equal(await claimFetches(q.store.pool, ALL), []);
  const trace = await readTrace(q.store, q.tenantId, id);
  assert.match(trace?.waiting?.reason ?? '', 'files.test does not answer.');
  assert.ok((trace?.waiting?.next_attempt_at?.getTime() ?? 0) > Date.now());

  await q.store.pool.query('update attachment_fetch set due_at = now()');
  const second = await claimOne(q);
  assert.is(second.attempt, 2);
  assert.is(await deferFetch(q.store.pool, first, later), false, 'its lease is gone');
});

test('a lease that runs out is taken over, and the first fetcher cannot fail it any more', async ({
  q,
}) => {
  await enqueueUnfetched(q);
  const first = await claimOne(q);
  await q.store.pool.query(`update attachment_fetch set leased_until = now() - interval '1 s'`);
  const second = await claimOne(q);
  assert.is(second.attempt, 2);
  const why = { cause: 'attachment_unavailable', reply: 'a.pdf could not be fetched: 404' };
  const fail = (fetch: ClaimedFetch) =>
    q.store.transact((client) => failPrepared(client, fetch, why));
  assert.is(await fail(first), null);
  assert.equal(await q.states(), { preparing: 1 });
  assert.is((await fail(second))?.length, 1);
  assert.equal(await q.states(), { failed: 1 });
});

test('what cannot be fetched fails, with the reason everywhere', async ({ q }) => {
  const { id, staged } = await enqueueUnfetched(q, { count: 2 });
  const why = { cause: 'attachment_unavailable', reply: 'a.pdf could not be fetched: 404' };
  const fetch = await claimOne(q);
  const keys = await q.store.transact((client) => failPrepared(client, fetch, why));
  assert.equal(keys, [staged]);
  const email = await findEmail(q.store, q.tenantId, id);
  assert.is(email?.lastEvent, 'failed');
  assert.equal(email?.providerLastError, { code: why.cause, message: why.reply });
  assert.ok(email?.providerDeadLetteredAt);
  const trace = await readTrace(q.store, q.tenantId, id);
  assert.is(trace?.waiting, null);
  assert.is(trace?.events.at(-1)?.type, 'failed');
  assert.equal(
    trace?.recipients.map(({ state, last_reply }) => [state, last_reply]),
    [
      ['failed', why.reply],
      ['failed', why.reply],
    ],
  );
});

test('nothing is fetched for an email that can still be canceled', async ({ q }) => {
  await enqueueUnfetched(q, { scheduledAt: new Date(Date.now() - 1) });
  assert.equal(await claimFetches(q.store.pool, ALL), []);
  await wakeScheduled(q.store);
  assert.equal(await q.states(), { preparing: 1 });
  assert.is((await claimOne(q)).attempt, 1);
});

test('a full batch with everything stays below the limit of parameters', async ({ q }) => {
  const ids = await q.enqueue(100, {
    deliveries: recipients(150),
    attachments: Array.from({ length: 20 }, () => file({ url: 'https://files.test/a' })),
    tags: Array.from({ length: 50 }, (_, index) => ({ name: `tag${index}`, value: 'x' })),
    searchTerms: Array.from({ length: 500 }, (_, index) => `w:word${index}`),
    scheduledAt: new Date(Date.now() + 60_000),
    topicId: newId(),
    raw: null,
  });
  assert.is(ids.length, 100);
  assert.equal(await q.states(), { scheduled: 15_000 });
  const { rows } = await q.store.pool.query<Record<string, number>>(
    `select (select count(*)::int from attachment) as files,
      (select count(*)::int from attachment_fetch) as fetches,
      (select count(*)::int from email_search where terms @@ 'w\\:word499'::tsquery) as searched,
      (select sum(attachment_count)::int from email) as counted`,
  );
  assert.equal(rows[0], { files: 2_000, fetches: 100, searched: 100, counted: 2_000 });
});

test.run();
