// What a broadcast needs is deleted while it is sent: topics with their choices, segments with their members.
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createPreferenceLinks } from '../../src/audience/preference-links.ts';
import { createSegmentVerbs } from '../../src/audience/segments.ts';
import { createTopicVerbs } from '../../src/audience/topics.ts';
import { createDomainLookup } from '../../src/domains/lookup.ts';
import { createFanOut, type FanOutDependencies } from '../../src/sending/fan-out.ts';
import { openDiskBlobs } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { until } from '../support/app.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';

const test = suite('fan-out, deleted meanwhile');
let bench: Bench;
let folder: string;
let d: FanOutDependencies;
const query = async <T extends object>(
  sql: string,
  values: readonly unknown[] = [],
): Promise<readonly T[]> => (await bench.store.pool.query<T>(sql, [...values])).rows;

test.before(async () => {
  bench = await openQueue();
  folder = await mkdtemp(join(tmpdir(), 'mailstead-fan-out-'));
  await newDomain(bench.tenantId);
  d = {
    store: bench.store,
    log: silent,
    blobs: openDiskBlobs(folder),
    domains: createDomainLookup(bench.store.pool, Buffer.alloc(32)),
    preferenceLinks: createPreferenceLinks({ key: Buffer.alloc(32), publicUrl: 'https://m.test' }),
    now: () => new Date(),
    laneOf: (domain) => `mx:${domain}`,
    lifetimeMs: 60_000,
    standIn: null,
    onReady: () => undefined,
  };
});
test.after(async () => {
  await bench.stop();
  await rm(folder, { recursive: true, force: true });
});

const newDomain = (tenantId: string): Promise<unknown> =>
  query(
    `insert into sending_domain (tenant_id, id, name, status, sending_verified)
     values ($1, $2, $3, 'verified', true)`,
    [tenantId, newId(), `${tenantId}.test`],
  );

interface Made {
  readonly tenantId: string;
  readonly segmentId: string;
  /** In their order. */
  readonly contacts: readonly string[];
  readonly broadcastId: string;
}

/** A broadcast on its way, to so many new contacts. */
async function queued(
  count: number,
  about: {
    readonly tenantId?: string;
    readonly html?: string;
    readonly topicId?: string;
    readonly from?: string;
  } = {},
): Promise<Made> {
  const { tenantId = bench.tenantId } = about;
  const segmentId = newId();
  const broadcastId = newId();
  const contacts = Array.from({ length: count }, () => newId());
  await query(
    `insert into segment (tenant_id, id, name, created_at, updated_at) values ($1, $2, 's', now(), now())`,
    [tenantId, segmentId],
  );
  await query(
    `insert into contact (tenant_id, id, email, address, first_name, created_at, updated_at)
     select $1, id, id || '@people.test', id || '@people.test', 'Name', now(), now() from unnest($2::uuid[]) as i (id)`,
    [tenantId, contacts],
  );
  await query(
    `insert into segment_contact (tenant_id, segment_id, contact_id, created_at)
     select $1, $2, id, now() from unnest($3::uuid[]) as i (id)`,
    [tenantId, segmentId, contacts],
  );
  await query(
    `insert into broadcast (tenant_id, id, name, segment_id, topic_id, from_given, subject, html, status, queued_at,
       created_at, updated_at)
     values ($1, $2, 'b', $3, $4, $5, 'Hello', $6, 'queued', now(), now(), now())`,
    [
      tenantId,
      broadcastId,
      segmentId,
      about.topicId ?? null,
      about.from ?? `a@${tenantId}.test`,
      about.html ?? '<p>Hi {{{FIRST_NAME}}}</p>',
    ],
  );
  return { tenantId, segmentId, contacts, broadcastId };
}

interface State {
  readonly status: string;
  readonly failure: string | null;
  readonly recipients: number;
  readonly left_out: number;
}

const stateOf = async ({ broadcastId }: Made): Promise<State> =>
  (
    await query<State>(
      'select status, failure, recipients, left_out from broadcast where id = $1',
      [broadcastId],
    )
  )[0]!;

/** What each contact got: how many emails, or why none. */
async function outcomes({ contacts, broadcastId }: Made): Promise<readonly (string | number)[]> {
  const rows = await query<{ contact_id: string; left_out: string | null; emails: string }>(
    `select r.contact_id, r.left_out,
       (select count(*) from email e join delivery d on d.tenant_id = e.tenant_id and d.email_id = e.id
        where e.broadcast_id = r.broadcast_id and d.recipient = r.address) as emails
     from broadcast_recipient r where r.broadcast_id = $1`,
    [broadcastId],
  );
  assert.ok(rows.length <= contacts.length);
  const of = new Map(rows.map((row) => [row.contact_id, row.left_out ?? Number(row.emails)]));
  return contacts.map((id) => of.get(id) ?? 'missing');
}

test('a topic or a segment that is deleted while a batch reads waits for it: nobody is taken for another', async () => {
  const { store, tenantId } = bench;
  const now = (): Date => new Date();
  const topics = createTopicVerbs(store, now);
  const segments = createSegmentVerbs(store, now);
  const isWaiting = (count: number): Promise<unknown> =>
    until(
      () =>
        query(`select 1 from pg_stat_activity
          where datname = current_database() and wait_event_type = 'Lock'`),
      ({ length }) => length >= count,
    );
  for (const deleted of ['topic', 'segment'] as const) {
    const topicId = await topics.create(tenantId, { name: 't', default_subscription: 'opt_in' });
    const made = await queued(3, { topicId });
    await query(
      `insert into contact_topic (tenant_id, contact_id, topic_id, subscription, updated_at)
       values ($1, $2, $3, 'opt_out', now())`,
      [tenantId, made.contacts[0], topicId],
    );
    const { both } = await store.transact(async (client) => {
      await client.query('lock table contact in access exclusive mode');
      const turn = createFanOut(d).turn();
      await isWaiting(1);
      const removal =
        deleted === 'topic'
          ? topics.remove(tenantId, topicId)
          : segments.remove(tenantId, made.segmentId);
      await Promise.race([removal, isWaiting(2)]);
      return { both: Promise.all([turn, removal]) };
    });
    await both;
    assert.equal(await outcomes(made), ['unsubscribed', 1, 1], deleted);
    assert.is((await stateOf(made)).status, 'sent');
  }
});

test.run();
