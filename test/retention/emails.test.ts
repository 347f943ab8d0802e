// Which sent emails go by age, and which never do: on a real Postgres, with emails in every state of their deliveries, in
// every order of removal and whatever else happens to them at that moment.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { PoolClient } from 'pg';
import { recordEngagements } from '../../src/queue/engagement.ts';
import { settleReport } from '../../src/queue/late.ts';
import { releaseEmail } from '../../src/queue/release.ts';
import { rescheduleEmail, wakeScheduled } from '../../src/queue/schedule.ts';
import { settle } from '../../src/queue/settle.ts';
import { rollUpMetrics } from '../../src/sending/metric-rollup.ts';
import { readMetrics, type MetricsQuery } from '../../src/sending/metrics.ts';
import { findEmail } from '../../src/sending/read.ts';
import { releaseGivenUp } from '../../src/sending/release.ts';
import { newId } from '../../src/store/id.ts';
import { readTrace } from '../../src/timeline/trace.ts';
import type { RetentionRow } from '../../src/retention/retain.ts';
import { keptIds, scheduled, send, STATES, tracesOf } from '../support/email-states.ts';
import { addReceived } from '../support/forwarded.ts';
import { file, openQueue, recipients, result, type Bench } from '../support/queue.ts';
import { DAY_MS, memoryBlobs, runRetention } from '../support/retention.ts';

const test = suite<{ q: Bench }>('retention of emails');
test.before(async (context) => {
  context.q = await openQueue();
});
test.before.each(async ({ q }) => {
  await q.store.pool.query(
    `truncate email, email_content, email_search, delivery, attempt, timeline, attachment, attachment_fetch,
       engagement, forwarding_attempt, received_email, received_content, metric_quarter, metric_rolled,
       metric_stale, metric_removed, suppression, outbox`,
  );
});
test.after(({ q }) => q.stop());

const EMAILS = { keep: { emails: '30d', dead_letters: '60d' } };
const countOf = (rows: readonly RetentionRow[]): number =>
  rows.reduce((sum, { count }) => sum + count, 0);

const GOES_AT: Readonly<Record<string, number>> = {
  delivered: 30,
  bounced: 30,
  canceled: 33,
  suppressed: 30,
  failed: 60,
  expired: 60,
  'unknown for good': 60,
};

for (const [name, make] of Object.entries(STATES)) {
  test(`${name}: ${GOES_AT[name] === undefined ? 'never' : `after ${GOES_AT[name]} days`}`, async ({
    q,
  }) => {
    const id = await make(q);
    const days = GOES_AT[name];
    for (const keep of [EMAILS.keep, { email_bodies: '30d', dead_letters: '60d' }]) {
      const early = await runRetention(q.store, { keep, inDays: (days ?? 3_001) - 1 });
      assert.is(countOf(early.rows), 0, 'too early');
      assert.ok((await tracesOf(q, id)).includes('email_content'));
    }
    if (days === undefined) return;
    const dry = await runRetention(q.store, { ...EMAILS, inDays: days + 1, isDry: true });
    assert.equal(
      dry.rows.map(({ kind, count, unsent }) => ({ kind, count, unsent })),
      [{ kind: 'emails', count: 1, unsent: 0 }],
    );
    assert.ok((await tracesOf(q, id)).includes('email'), 'a dry run removes nothing');
    const done = await runRetention(q.store, { ...EMAILS, inDays: days + 1 });
    assert.is(countOf(done.rows), 1);
    assert.equal(await tracesOf(q, id), []);
    assert.is(await findEmail(q.store, q.tenantId, id), null);
    assert.is(await readTrace(q.store, q.tenantId, id), null);
  });
}

test('kept for ever: what was given up, unless somebody says how long', async ({ q }) => {
  const given = await STATES['failed']!(q);
  const gone = await STATES['delivered']!(q);
  await runRetention(q.store, { keep: { emails: '30d', email_bodies: '1d' }, inDays: 3_000 });
  assert.equal(await keptIds(q), [given]);
  assert.ok((await tracesOf(q, given)).includes('email_content'));
  assert.equal(await tracesOf(q, gone), []);
});

test('an email is as old as the last that was done for it', async ({ q }) => {
  const id = await scheduled(q, 20);
  await q.store.pool.query(
    `update delivery set due_at = now() - interval '1 second' where email_id = $1`,
    [id],
  );
  assert.is(await wakeScheduled(q.store), 1);
  await send(q, 'delivered');
  assert.is(countOf((await runRetention(q.store, { ...EMAILS, inDays: 49 })).rows), 0);
  assert.is(countOf((await runRetention(q.store, { ...EMAILS, inDays: 51 })).rows), 1);
});

test('without its body an email keeps its record, its timeline and its deliveries', async ({
  q,
}) => {
  const blobs = memoryBlobs();
  const [raw, staged] = [newId(), newId()];
  await blobs.put(raw, Buffer.from('x'));
  await blobs.put(staged, Buffer.from('y'));
  const [id] = await q.enqueue(1, {
    html: '<p>x</p>',
    raw: null,
    blobKey: raw,
    attachments: [file({ blobKey: staged, sizeBytes: 1 })],
    searchTerms: ['hello'],
  });
  await send(q, 'delivered');
  const before = (await readTrace(q.store, q.tenantId, id!))!;
  const about = { keep: { email_bodies: '1d' }, blobs };
  const dry = await runRetention(q.store, { ...about, inDays: 2, isDry: true });
  const done = await runRetention(q.store, { ...about, inDays: 2 });
  assert.equal(
    dry.rows.map((row) => ({ ...row, before: null })),
    done.rows.map((row) => ({ ...row, before: null })),
  );
  assert.is(done.rows[0]!.count, 1);
  assert.equal([...blobs.kept.keys()], []);
  const found = (await findEmail(q.store, q.tenantId, id!))!;
  assert.equal(
    [found.content.html, found.content.text, found.content.headers, found.lastEvent],
    [null, null, null, 'delivered'],
  );
  assert.ok(found.contentRemovedAt instanceof Date);
  assert.equal(await readTrace(q.store, q.tenantId, id!), before);
  assert.is(countOf((await runRetention(q.store, { ...about, inDays: 3 })).rows), 0, 'once');
  const more = await runRetention(q.store, { ...EMAILS, inDays: 31 });
  assert.is(countOf(more.rows), 1);
  assert.equal(await tracesOf(q, id!), []);
});

test('what was given up and has no content any more cannot be released', async ({ q }) => {
  const id = await STATES['failed']!(q);
  await runRetention(q.store, { keep: { email_bodies: '1d', dead_letters: '2d' }, inDays: 3 });
  const released = releaseGivenUp(
    { store: q.store, blobs: memoryBlobs(), lifetimeMs: DAY_MS, onReady: () => undefined },
    { tenantId: q.tenantId } as never,
    { id, includeUnknown: true },
  );
  const refusal = await released.then(
    () => null,
    (error: Error) => error,
  );
  assert.match(
    refusal?.message ?? '',
    /^What this email said was removed on .* Send the email anew\.$/,
  );
  assert.equal(await q.states(), { failed: 1 });
});

/** What `work` does in a transaction that is open while retention runs; and whether it found the email afterwards. */
async function whileHeld(
  q: Bench,
  hold: (client: PoolClient) => Promise<unknown>,
  run: () => Promise<unknown>,
): Promise<void> {
  await q.store.transact(async (client) => {
    await hold(client);
    await run();
  });
}

test('who holds a row has it: the email is left for the next time', async ({ q }) => {
  const locks = [
    `select 1 from email where id = $1 for no key update`,
    `select 1 from delivery where email_id = $1 and position = 2 for no key update`,
  ];
  for (const lock of locks) {
    const [id] = await q.enqueue(1, { deliveries: recipients(3) });
    await send(q, 'delivered');
    await whileHeld(
      q,
      (client) => client.query(lock, [id]),
      async () => {
        for (const keep of [EMAILS.keep, { email_bodies: '1d' }]) {
          assert.is(countOf((await runRetention(q.store, { keep, inDays: 31 })).rows), 0);
        }
      },
    );
    assert.is(countOf((await runRetention(q.store, { ...EMAILS, inDays: 31 })).rows), 1);
    assert.equal(await tracesOf(q, id!), []);
  }
});

test('released or removed, never both: a hundred times at once', async ({ q }) => {
  const keeps = [
    { emails: '30d', dead_letters: '30d' },
    { email_bodies: '30d', dead_letters: '30d' },
  ];
  for (const keep of keeps) {
    const ids = await q.enqueue(100);
    const epoch = await q.run();
    const claimed = await q.claim(epoch, 100);
    await settle(
      q.store,
      claimed.map((one) =>
        result(one, epoch, { verdict: 'failed', evidence: { cause: 'config' } }),
      ),
    );
    const how = { includeUnknown: true, lifetimeMs: DAY_MS };
    const [, , ...outcomes] = await Promise.all([
      runRetention(q.store, { keep, inDays: 31 }),
      runRetention(q.store, { keep, inDays: 31 }),
      ...ids.map(async (emailId, index) => {
        await new Promise((resolve) => setTimeout(resolve, index % 10));
        return releaseEmail(q.store, { tenantId: q.tenantId, emailId }, how);
      }),
    ]);
    const released = ids.filter(
      (_, at) => (outcomes[at] as { outcome: string }).outcome === 'released',
    );
    const { rows } = await q.store.pool.query<{ id: string; content: boolean }>(
      `select d.email_id as id, k.email_id is not null as content from delivery d
       left join email_content k on k.tenant_id = d.tenant_id and k.email_id = d.email_id
       where d.state = 'ready' order by 1`,
    );
    assert.equal(
      rows.map(({ id }) => id),
      [...released].sort(),
    );
    assert.ok(
      rows.every(({ content }) => content),
      'what is ready has its message',
    );
    await q.store.pool.query('truncate email, email_content, delivery, attempt, timeline');
  }
});

test('a schedule that is moved while it is looked at stays', async ({ q }) => {
  const id = await scheduled(q, 1);
  await Promise.all([
    rescheduleEmail(q.store, q.tenantId, id, {
      scheduledAt: new Date(Date.now() + 90 * DAY_MS),
      blobKey: null,
    }),
    runRetention(q.store, { keep: { emails: '11d', email_bodies: '1d' }, inDays: 60 }),
  ]);
  assert.ok((await tracesOf(q, id)).includes('email_content'));
  assert.equal(await q.states(), { scheduled: 1 });
});

test('a fault of the rule removes nothing, and says so', async ({ q }) => {
  const id = await STATES['delivered']!(q);
  // As if the deliveries said one thing and the email another.
  await q.store.pool.query(`update email set provider_next_retry_at = now() where id = $1`, [id]);
  for (const isDry of [true, false]) {
    const failure = await runRetention(q.store, { ...EMAILS, inDays: 31, isDry }).then(
      () => null,
      (error: Error) => error,
    );
    assert.match(
      failure?.message ?? '',
      /^1 of 1 emails of tenant .* are not: nothing of them was removed$/,
    );
  }
  assert.ok((await tracesOf(q, id)).includes('email'));
});

test('a late bounce for a removed email changes nothing and suppresses nobody', async ({ q }) => {
  const [gone, kept] = [await STATES['delivered']!(q), await STATES['delivered']!(q)];
  await runRetention(q.store, { ...EMAILS, inDays: 31 });
  assert.equal(await keptIds(q), []);
  const bounce = {
    kind: 'dsn' as const,
    reporter: 'mx.recipient.test',
    returnPaths: [],
    recipients: [
      {
        address: 'b@recipient.test',
        originalAddress: null,
        action: 'failed' as const,
        status: '5.1.1',
        diagnostic: '550 5.1.1 No such user',
        stage: null,
      },
    ],
  };
  for (const emailId of [gone, kept]) {
    assert.is(
      await settleReport(q.store, { emailId, position: 0 }, { report: bounce, rules: [] }),
      'nothing',
    );
  }
  const { rows } = await q.store.pool.query('select 1 from suppression');
  assert.equal(rows, []);
});

test('metrics are what they were, whatever was removed, counted before or after', async ({ q }) => {
  const query: MetricsQuery = {
    startDate: new Date(Math.floor(Date.now() / DAY_MS) * DAY_MS - DAY_MS).toISOString(),
    endDate: undefined,
    timezone: undefined,
    granularity: undefined,
    metrics: undefined,
    dimensions: ['period', 'domain'],
    domainIds: undefined,
    emailIds: undefined,
    broadcastIds: undefined,
  };
  const at = (days: number): Date => new Date(Date.now() + days * DAY_MS);
  const read = async () => {
    const { totals, data } = await readMetrics(q.store, q.tenantId, { query, now: at(40) });
    return { totals, data: data?.filter(({ period }) => String(period) < at(2).toISOString()) };
  };
  for (const isCountedBefore of [true, false]) {
    await q.store.pool.query('truncate metric_quarter, metric_rolled, metric_stale');
    await STATES['delivered']!(q);
    await STATES['bounced']!(q);
    await STATES['failed']!(q);
    const opened = await STATES['delivered']!(q);
    await addReceived(q);
    const open = {
      id: newId(),
      tenantId: q.tenantId,
      emailId: opened,
      kind: 'opened' as const,
      at: new Date(),
      link: null,
      remoteAddress: '192.0.2.1',
      userAgent: 'x',
      suspect: null,
      isOfCrowd: false,
    };
    await recordEngagements(q.store, [open]);
    const before = await read();
    assert.is(before.totals['delivered'], isCountedBefore ? 2 : 4);
    if (isCountedBefore) await rollUpMetrics(q.store, { now: at(35) });
    assert.equal(await read(), before);
    const { rows } = await runRetention(q.store, {
      keep: { emails: '30d', received: '30d' },
      inDays: 31,
    });
    assert.ok(countOf(rows) >= 4);
    assert.equal(await read(), before, 'after the removal');
    // What was left of the quarter changes, so that it is counted anew.
    await q.store.pool.query(
      `insert into metric_stale (tenant_id, quarter, token)
       select tenant_id, quarter, gen_random_uuid()
       from (select distinct tenant_id, quarter from metric_removed) m`,
    );
    assert.equal(await read(), before, 'while it is stale');
    await rollUpMetrics(q.store, { now: at(36) });
    assert.equal(await read(), before, 'counted anew');
    await q.store.pool.query('truncate metric_quarter, metric_rolled, metric_stale');
    await rollUpMetrics(q.store, { now: at(37) });
    assert.equal(await read(), before, 'counted from nothing');
  }
});

test('each tenant has what its row says, and takes its turn', async ({ q }) => {
  const second = newId();
  await q.store.pool.query(`insert into tenant (id, name) values ($1, 'second')`, [second]);
  const settled = async (tenantId: string, count: number): Promise<void> => {
    await q.enqueue(count, { tenantId });
    await q.store.pool.query(`update delivery set state = 'delivered' where tenant_id = $1`, [
      tenantId,
    ]);
    await q.store.pool.query(`update email set last_event = 'delivered' where tenant_id = $1`, [
      tenantId,
    ]);
  };
  await settled(q.tenantId, 1_201);
  await settled(second, 3);
  const about = { keep: { emails: '30d' }, tenants: { [second]: { emails: '90d' } } };
  const dry = await runRetention(q.store, { ...about, inDays: 31, isDry: true });
  const done = await runRetention(q.store, { ...about, inDays: 31 });
  assert.equal(
    dry.rows.map(({ tenantId, count }) => [tenantId, count]),
    [[q.tenantId, 1_201]],
  );
  assert.equal(
    done.rows.map(({ tenantId, count }) => [tenantId, count]),
    [[q.tenantId, 1_201]],
  );
  assert.is((await keptIds(q)).length, 3);
  const rest = await runRetention(q.store, { ...about, inDays: 91, tenantId: second });
  assert.equal(
    rest.rows.map(({ tenantId, count }) => [tenantId, count]),
    [[second, 3]],
  );
  assert.equal(await keptIds(q), []);
});

test('a stop ends it between two steps, and the next run goes on', async ({ q }) => {
  await q.enqueue(1_400);
  await q.store.pool.query(`update delivery set state = 'delivered'`);
  await q.store.pool.query(`update email set last_event = 'delivered'`);
  const ending = new AbortController();
  const cut = await runRetention(q.store, {
    ...EMAILS,
    inDays: 31,
    signal: ending.signal,
    onStep: () => ending.abort(),
  });
  assert.ok(cut.isCut);
  assert.is(countOf(cut.rows), 500);
  assert.is((await keptIds(q)).length, 900);
  const [one, other] = await Promise.all([
    runRetention(q.store, { ...EMAILS, inDays: 31 }),
    runRetention(q.store, { ...EMAILS, inDays: 31 }),
  ]);
  assert.is(countOf(one.rows) + countOf(other.rows), 900, 'two at once do not count twice');
  assert.equal(await keptIds(q), []);
});

test.run();
