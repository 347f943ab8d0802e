// Emails in every state of their deliveries, each brought there by the way it really gets there; and what is left of one
// that was removed.
import * as assert from 'uvu/assert';
import { cancelEmail, wakeScheduled } from '../../src/queue/schedule.ts';
import { settle } from '../../src/queue/settle.ts';
import { newId } from '../../src/store/id.ts';
import { suppress } from '../../src/suppressions/suppressions.ts';
import { addForward, addReceived } from './forwarded.ts';
import { file, recipients, result, type Bench } from './queue.ts';
import { DAY_MS } from './retention.ts';

const TABLES = {
  email: 'id',
  email_content: 'email_id',
  email_search: 'email_id',
  delivery: 'email_id',
  attempt: 'email_id',
  timeline: 'email_id',
  attachment: 'email_id',
  engagement: 'email_id',
};

/** Which tables still know the email. */
export async function tracesOf(q: Bench, id: string): Promise<readonly string[]> {
  const selects = Object.entries(TABLES).map(
    ([table, column]) =>
      `select '${table}' as name where exists (select 1 from ${table} where ${column} = $1)`,
  );
  const { rows } = await q.store.pool.query<{ name: string }>(selects.join(' union all '), [id]);
  return rows.map(({ name }) => name);
}

export const keptIds = async (q: Bench): Promise<readonly string[]> => {
  const { rows } = await q.store.pool.query<{ id: string }>('select id from email order by id');
  return rows.map(({ id }) => id);
};

/** Sends what is ready, with this outcome. */
export async function send(
  q: Bench,
  verdict: Parameters<typeof result>[2]['verdict'],
  evidence: Parameters<typeof result>[2]['evidence'] = {},
): Promise<void> {
  const epoch = await q.run();
  const claimed = await q.claim(epoch, 1_000);
  assert.ok(claimed.length > 0);
  await settle(
    q.store,
    claimed.map((one) => result(one, epoch, { verdict, evidence })),
  );
}

/** Brings one email into a state by the way it really gets there; its id. */
export const STATES: Readonly<Record<string, (q: Bench) => Promise<string>>> = {
  async delivered(q) {
    const [id] = await q.enqueue(1);
    await send(q, 'delivered');
    return id!;
  },
  async bounced(q) {
    const [id] = await q.enqueue(1);
    await send(q, 'bounced', { cause: '5.1.1', code: 550 });
    return id!;
  },
  async canceled(q) {
    const id = await scheduled(q, 3);
    await cancelEmail(q.store, q.tenantId, id);
    return id;
  },
  async suppressed(q) {
    const id = await scheduled(q, 0);
    const address = 'b@recipient.test';
    await suppress(q.store.pool, [
      { tenantId: q.tenantId, address, origin: 'bounce', sourceId: newId() },
    ]);
    assert.is(await wakeScheduled(q.store), 1);
    assert.equal(await q.states(), { suppressed: 1 });
    return id;
  },
  // Given up: kept for as long as it can be released.
  async failed(q) {
    const [id] = await q.enqueue(1);
    await send(q, 'failed', { cause: 'config', code: null });
    return id!;
  },
  async expired(q) {
    const [id] = await q.enqueue(1);
    const epoch = await q.run();
    const [claimed] = await q.claim(epoch, 1);
    await q.store.pool.query(
      `update delivery set expires_at = now() - interval '1 second' where email_id = $1`,
      [id],
    );
    await settle(q.store, [
      result(claimed!, epoch, { verdict: 'deferred', evidence: { cause: '4.2.1', code: 451 } }),
    ]);
    return id!;
  },
  async 'unknown for good'(q) {
    const id = await STATES['unknown, to be tried']!(q);
    await q.store.pool.query(
      `update delivery set state = 'ready', due_at = now() where email_id = $1`,
      [id],
    );
    await send(q, 'unknown', { cause: 'unknown_after_dot', code: null });
    return id;
  },
  // Unsent: kept whatever its age.
  async ready(q) {
    return (await q.enqueue(1))[0]!;
  },
  async 'in flight'(q) {
    const [id] = await q.enqueue(1);
    assert.is((await q.claim(await q.run(), 1)).length, 1);
    return id!;
  },
  async deferred(q) {
    const [id] = await q.enqueue(1);
    await send(q, 'deferred', { cause: '4.2.1', code: 451 });
    return id!;
  },
  async 'unknown, to be tried'(q) {
    const [id] = await q.enqueue(1);
    await send(q, 'unknown', { cause: 'unknown_after_dot', code: null });
    return id!;
  },
  scheduled: (q) => scheduled(q, 400),
  async preparing(q) {
    const [id] = await q.enqueue(1, {
      raw: null,
      attachments: [file({ url: 'https://files.test/a.pdf' })],
    });
    return id!;
  },
  async 'one of three still deferred'(q) {
    const [id] = await q.enqueue(1, { deliveries: recipients(3) });
    const epoch = await q.run();
    const claimed = await q.claim(epoch, 3);
    assert.is(claimed.length, 3);
    await settle(
      q.store,
      claimed.map((one, index) =>
        result(one, epoch, { verdict: index === 1 ? 'deferred' : 'delivered' }),
      ),
    );
    return id!;
  },
  async 'owed to an author'(q) {
    const receivedId = await addReceived(q);
    const destinations = [{ recipient: 'x@dest.test', state: 'bounced', cause: '5.1.1' }];
    const { emailId } = await addForward(q, { receivedId, ruleId: newId(), destinations });
    await q.store.pool.query(`update email set last_event = 'bounced' where id = $1`, [emailId]);
    return emailId;
  },
};

export async function scheduled(q: Bench, inDays: number): Promise<string> {
  const scheduledAt = new Date(Date.now() + inDays * DAY_MS);
  const [id] = await q.enqueue(1, { lastEvent: 'scheduled', scheduledAt });
  return id!;
}
