// Releasing given-up mail: who gets one more lifetime, who is left alone, and what the timeline says.
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Refusal } from '../../src/access/refusal.ts';
import { releaseEmail } from '../../src/queue/release.ts';
import { settle, type Verdict } from '../../src/queue/settle.ts';
import { wake } from '../../src/queue/wake.ts';
import { findEmail } from '../../src/sending/read.ts';
import { releaseGivenUp } from '../../src/sending/release.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { suppress } from '../../src/suppressions/suppressions.ts';
import { readTrace } from '../../src/timeline/trace.ts';
import { openQueue, recipients, result, type Bench } from '../support/queue.ts';

const DAY = 86_400_000;
const test = suite<{ q: Bench }>('release');
test.before.each(async (context) => {
  context.q = await openQueue();
});
test.after.each(({ q }) => q.stop());

/** An email whose recipients end like this, in this order; `expired` is a deferral after the lifetime. */
async function ended(
  q: Bench,
  verdicts: readonly (Verdict | 'expired')[],
  about: { readonly cause?: string } = {},
): Promise<string> {
  const [id] = await q.enqueue(1, { deliveries: recipients(verdicts.length) });
  const epoch = await q.run();
  const claimed = await q.claim(epoch, verdicts.length);
  await settle(
    q.store,
    claimed.map((one) => {
      const verdict = verdicts[one.position]!;
      return result(one, epoch, {
        verdict: verdict === 'expired' ? 'deferred' : verdict,
        delayMs: verdict === 'expired' ? 30 * DAY : 60_000,
        evidence: { cause: about.cause ?? 'peer_transient', enhanced: null, reply: 'why' },
      });
    }),
  );
  return id!;
}
const release = (q: Bench, emailId: string, includeUnknown = false) =>
  releaseEmail(q.store, { tenantId: q.tenantId, emailId }, { includeUnknown, lifetimeMs: 2 * DAY });
const rows = async (q: Bench, id: string) =>
  (
    await q.store.pool.query<Record<string, unknown>>(
      `select state, attempts, lane_faults, unknowns, last_cause,
         round(extract(epoch from expires_at - now()) / 3600)::int as hours
       from delivery where email_id = $1 order by position`,
      [id],
    )
  ).rows;

test('failed and expired go out again with a new lifetime; delivered, refused and deferred do not', async ({
  q,
}) => {
  const id = await ended(q, ['failed', 'expired', 'delivered', 'bounced', 'deferred']);
  const released = await release(q, id);
  assert.equal(released, {
    outcome: 'released',
    recipients: ['r0@recipient.test', 'r1@recipient.test'],
  });
  const after = await rows(q, id);
  assert.equal(
    after.map(({ state }) => state),
    ['ready', 'ready', 'delivered', 'bounced', 'deferred'],
  );
  assert.equal(after[0], {
    state: 'ready',
    attempts: 1,
    lane_faults: 1,
    unknowns: 0,
    last_cause: null,
    hours: 48,
  });
  assert.is((await findEmail(q.store, q.tenantId, id))?.providerDeadLetteredAt, null);
  const events = (await readTrace(q.store, q.tenantId, id))?.events ?? [];
  assert.equal(
    events.filter(({ type }) => type === 'released').map(({ recipient }) => recipient),
    ['r0@recipient.test', 'r1@recipient.test'],
  );
  const claimed = await q.claim(await q.run(), 10);
  assert.equal(
    claimed.map(({ attempt, laneFaults }) => [attempt, laneFaults]),
    [
      [2, 1],
      [2, 1],
    ],
  );
});

test('released twice at the same time: once', async ({ q }) => {
  const id = await ended(q, ['failed']);
  const outcomes = await Promise.all([1, 2, 3].map(() => release(q, id)));
  assert.equal(outcomes.map(({ outcome }) => outcome).toSorted(), [
    'nothing',
    'nothing',
    'released',
  ]);
});

test('who is suppressed by now is not written to', async ({ q }) => {
  const id = await ended(q, ['failed', 'failed']);
  await q.store.transact((client) =>
    suppress(client, [
      { tenantId: q.tenantId, address: 'r0@recipient.test', origin: 'bounce', sourceId: newId() },
    ]),
  );
  assert.equal(await release(q, id), {
    outcome: 'released',
    recipients: ['r1@recipient.test'],
  });
  assert.equal(await release(q, id), { outcome: 'nothing', why: 'suppressed' });
});

test('an unknown outcome only when asked for, then once more, flagged, and final', async ({
  q,
}) => {
  const id = await ended(q, ['unknown']);
  assert.equal(await release(q, id, true), { outcome: 'nothing', why: 'not_given_up' }, 'waits');
  const again = async (): Promise<void> => {
    const epoch = await q.run();
    const [one] = await q.claim(epoch, 1);
    await settle(q.store, [result(one!, epoch, { verdict: 'unknown' })]);
  };
  await q.store.pool.query('update delivery set due_at = now()');
  await wake(q.store.pool, null);
  await again();
  assert.equal(await release(q, id), { outcome: 'nothing', why: 'unknown' });
  assert.is((await release(q, id, true)).outcome, 'released');
  await again();
  assert.equal(await q.states(), { unknown: 1 });
  await q.store.pool.query('update delivery set due_at = now()');
  assert.is(await wake(q.store.pool, null), 0, 'final again');
  const events = (await readTrace(q.store, q.tenantId, id))?.events ?? [];
  assert.is(events.filter(({ type }) => type === 'possible_duplicate').length, 2);
});

test('put off until the end after an answer was lost: it may have arrived, so only when asked for', async ({
  q,
}) => {
  const id = await ended(q, ['unknown']);
  await q.store.pool.query('update delivery set due_at = now()');
  await wake(q.store.pool, null);
  const epoch = await q.run();
  const [one] = await q.claim(epoch, 1);
  await settle(q.store, [result(one!, epoch, { verdict: 'deferred', delayMs: 30 * DAY })]);
  assert.equal(await q.states(), { bounced: 1 });
  assert.equal(await release(q, id), { outcome: 'nothing', why: 'unknown' });
  assert.is((await release(q, id, true)).outcome, 'released');
});

test('what cannot be mended, is not there, or belongs to somebody else', async ({ q }) => {
  const folder = mkdtempSync(join(tmpdir(), 'mailstead-release-'));
  const blobs = openDiskBlobs(folder);
  let nudged = 0;
  const ask = async (id: string, tenantId = q.tenantId): Promise<string> => {
    const caller = { tenantId } as Parameters<typeof releaseGivenUp>[1];
    const d = { store: q.store, blobs, lifetimeMs: DAY, onReady: () => void (nudged += 1) };
    try {
      return (await releaseGivenUp(d, caller, { id, includeUnknown: false })).join();
    } catch (error) {
      if (!(error instanceof Refusal)) throw error;
      return `${error.code}: ${error.message}`;
    }
  };
  assert.match(
    await ask(await ended(q, ['failed'], { cause: 'attachment_refused' })),
    /^nothing_to_release: The attachments/,
  );
  assert.match(await ask(await ended(q, ['delivered'])), /^nothing_to_release: No recipient/);
  assert.is(await ask(newId()), 'not_found: Email not found');
  assert.is(await ask(await ended(q, ['failed']), newId()), 'not_found: Email not found');
  const key = newId();
  const large = await ended(q, ['failed']);
  await q.store.pool.query(
    'update email_content set raw = null, blob_key = $2 where email_id = $1',
    [large, key],
  );
  assert.match(await ask(large), /^message_missing: The stored bytes/);
  assert.is(nudged, 0);
  await blobs.put(key, Buffer.from('x'));
  assert.is(await ask(large), 'r0@recipient.test');
  assert.is(nudged, 1);
  rmSync(folder, { recursive: true, force: true });
});

test.run();
