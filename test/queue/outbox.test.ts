// What webhooks are told of emails, on a real Postgres: each change once, with the change or not at all, and nothing where
// nobody listens.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { recordComplaint } from '../../src/queue/complaint.ts';
import { enqueue } from '../../src/queue/enqueue.ts';
import { expireUntried } from '../../src/queue/expire.ts';
import { settleReport } from '../../src/queue/late.ts';
import { heldBy, recover, release } from '../../src/queue/lease.ts';
import { claimFetches, failPrepared } from '../../src/queue/prepare.ts';
import { releaseEmail } from '../../src/queue/release.ts';
import { wakeScheduled } from '../../src/queue/schedule.ts';
import { settle } from '../../src/queue/settle.ts';
import { tellSent } from '../../src/queue/told.ts';
import { wake } from '../../src/queue/wake.ts';
import { idNamed, NEW_ID, newId } from '../../src/store/id.ts';
import {
  createSuppressionVerbs,
  expireSuppressions,
  suppress,
} from '../../src/suppressions/suppressions.ts';
import { eventTypes } from '../../src/timeline/outbox.ts';
import { listen, told as toldBy, type Told } from '../support/outbox.ts';
import { file, newEmail, openQueue, recipients, result, type Bench } from '../support/queue.ts';

const test = suite<{ q: Bench; deafId: string }>('outbox');
test.before(async (context) => {
  context.q = await openQueue();
  const { q } = context;
  await listen(q.store, q.tenantId, eventTypes);
  context.deafId = newId();
  await q.store.pool.query('insert into tenant (id, name) values ($1, $2)', [context.deafId, 'x']);
  await listen(q.store, context.deafId, eventTypes, { status: 'disabled' });
  await listen(q.store, context.deafId, ['contact.created']);
});
test.before.each(async ({ q }) => {
  await q.store.pool.query('truncate outbox, delivery, suppression, attachment_fetch');
});
test.after(({ q }) => q.stop());

const told = (q: Bench, subjectId?: string): Promise<readonly Told[]> => toldBy(q.store, subjectId);
const typesOf = async (q: Bench, subjectId?: string): Promise<readonly string[]> =>
  (await told(q, subjectId)).map(({ type }) => type);
/** The only event of this type. */
async function only(q: Bench, subjectId: string, type: string): Promise<Told['detail']> {
  const found = (await told(q, subjectId)).filter((one) => one.type === type);
  assert.is(found.length, 1, `${type} is told once`);
  assert.match(
    found[0]!.id,
    /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/,
  );
  return found[0]!.detail;
}

const one = (recipient: string, about: object = {}) => ({
  deliveries: [{ recipient, lane: 'mx:recipient.test', ...about }],
});
const again = (q: Bench): Promise<unknown> =>
  q.store.pool.query(`update delivery set due_at = now() where state in ('deferred', 'unknown')`);

test('what nobody listens to is not written', async ({ q, deafId: tenantId }) => {
  const soon = new Date(Date.now() + 60_000);
  await q.enqueue(1, { tenantId, scheduledAt: soon });
  await q.enqueue(1, { tenantId, ...one('a@recipient.test', { isSuppressed: true }) });
  const [id] = await q.enqueue(1, { tenantId, deliveries: recipients(3) });
  const epoch = await q.run();
  const claimed = await q.claim(epoch, 10);
  const verdicts = ['delivered', 'bounced', 'failed'] as const;
  const results = claimed.map((delivery, index) =>
    result(delivery, epoch, { verdict: verdicts[index]! }),
  );
  assert.is((await settle(q.store, results)).count, 3);
  await q.store.transact((client) =>
    recordComplaint(client, { tenantId, emailId: id!, recipient: 'x@y.test', detail: {} }),
  );
  await createSuppressionVerbs(q.store).add(tenantId, 'b@recipient.test');
  assert.equal(await told(q), []);
});

test('sent: once for each email, at its first claim, whatever follows', async ({ q }) => {
  const [id] = await q.enqueue(1, { deliveries: recipients(3) });
  const epoch = await q.run();
  const first = await q.claim(epoch, 1);
  assert.equal(await typesOf(q, id), ['email.sent']);
  const rest = await q.claim(epoch, 10);
  const all = [...first, ...rest].map((delivery) =>
    result(delivery, epoch, { verdict: 'deferred', delayMs: 1 }),
  );
  assert.is((await settle(q.store, all)).count, 3);
  await again(q);
  await wake(q.store.pool, null);
  assert.is((await q.claim(epoch, 10)).length, 3);
  assert.equal(await typesOf(q, id), ['email.sent']);
});

test('sent: what is taken out of its claim was not sent', async ({ q }) => {
  const [alone] = await q.enqueue(1, one('Gone@recipient.test'));
  const [two] = await q.enqueue(1, {
    deliveries: ['gone@recipient.test', 'ok@recipient.test'].map((recipient) => ({
      recipient,
      lane: 'mx:recipient.test',
    })),
  });
  await suppress(q.store.pool, [
    { tenantId: q.tenantId, address: 'gone@recipient.test', origin: 'complaint', sourceId: alone! },
  ]);
  assert.is((await q.claim(await q.run(), 10)).length, 1);
  assert.equal(
    (await typesOf(q, alone)).filter((type) => type.startsWith('email.')),
    ['email.suppressed'],
  );
  const { recipient, suppressed } = await only(q, alone!, 'email.suppressed');
  assert.is(recipient, 'Gone@recipient.test');
  assert.equal(suppressed, {
    message: 'The address is on the suppression list, so nothing is sent to it.',
    type: 'OnAccountSuppressionList',
    reason: 'previous_complaint',
  });
  assert.equal([...(await typesOf(q, two))].toSorted(), ['email.sent', 'email.suppressed']);
});

test('sent: a claim that was lost before it told is made up for, under the same id', async ({
  q,
}) => {
  const [id] = await q.enqueue(1);
  const epoch = await q.run();
  await q.claim(epoch, 1);
  const [before] = await told(q, id);
  await release(q.store, epoch, { held: await heldBy(q.store.pool, epoch, 1), begun: false });
  await q.claim(epoch, 1);
  assert.equal(await told(q, id), [before!], 'given back: told once');
  let holder = epoch;
  for (const phase of ['before_dot', 'dot'] as const) {
    const next = await q.run();
    await recover(q.store, holder, () => ({ phase }));
    await q.store.pool.query('delete from outbox');
    await again(q);
    await wake(q.store.pool, null);
    assert.is((await q.claim(next, 1)).length, 1);
    const [after] = await told(q, id);
    assert.equal([after?.type, after?.id], ['email.sent', before!.id], phase);
    holder = next;
  }
});

test('sent: workers that tell the same at one time do not wait in a circle', async ({ q }) => {
  const begun = (emailId: string) => ({
    tenantId: q.tenantId,
    emailId,
    attempt: 1,
    unknowns: 0,
    interruptions: 0,
    isHooked: true,
    plannedMs: Date.now(),
  });
  const [first, last] = [begun(newId()), begun(newId())];
  const holder = await q.store.pool.connect();
  await holder.query('begin');
  await tellSent(holder, [first]);
  const waiting = tellSent(q.store.pool, [last, first]).catch((error: unknown) => error);
  for (let turn = 0; turn < 500; turn++) {
    const { rows } = await q.store.pool.query(
      `select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like 'insert into outbox%'`,
    );
    if (rows.length > 0) break;
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  // Whoever waits for the first has not told the last.
  await holder.query(`set local lock_timeout = '2s'`);
  const failure = await tellSent(holder, [last]).catch((error: unknown) => error);
  await holder.query(failure === undefined ? 'commit' : 'rollback');
  holder.release();
  assert.equal([failure, await waiting], [undefined, undefined]);
  assert.is((await told(q)).length, 2);
});

test('delivered, one alone and several together', async ({ q }) => {
  const [alone] = await q.enqueue(1, one('a@recipient.test'));
  const [three] = await q.enqueue(1, { deliveries: recipients(3) });
  const epoch = await q.run();
  const claimed = await q.claim(epoch, 10);
  const results = claimed.map((delivery) => result(delivery, epoch, { verdict: 'delivered' }));
  const of = (id: string) => results.filter(({ emailId }) => emailId === id);
  await settle(q.store, of(alone!));
  await settle(q.store, of(alone!)); // fenced off
  assert.equal(await only(q, alone!, 'email.delivered'), { recipient: 'a@recipient.test' });
  await settle(q.store, of(three!));
  const events = (await told(q, three)).filter(({ type }) => type === 'email.delivered');
  assert.equal(
    events.map(({ detail }) => String(detail['recipient'])).toSorted(),
    recipients(3).map(({ recipient }) => recipient),
  );
});

test('a bounce says what kind it was, and suppresses a mailbox that is gone', async ({ q }) => {
  const cases = [
    ['no_mailbox', '5.1.1', '550 5.1.1 No such user', 'Permanent', 'NoEmail'],
    ['content_refused', '5.7.1', '554 5.7.1 Spam', 'Permanent', 'ContentRejected'],
    ['message_refused', '5.3.4', '552 5.3.4 Too big', 'Permanent', 'MessageTooLarge'],
    ['mailbox_full', '5.2.2', '552 5.2.2 Full', 'Permanent', 'MailboxFull'],
    ['peer_permanent', null, '550 No', 'Undetermined', 'General'],
    ['no_domain', null, 'The domain does not exist.', 'Undetermined', 'General'],
  ] as const;
  const epoch = await q.run();
  for (const [cause, enhanced, reply, type, subType] of cases) {
    const [id] = await q.enqueue(1, one(`${cause}@recipient.test`));
    const [delivery] = await q.claim(epoch, 1);
    const evidence = { cause, enhanced, reply, code: /^\d/.test(reply) ? 550 : null };
    await settle(q.store, [result(delivery!, epoch, { verdict: 'bounced', evidence })]);
    const { recipient, bounce } = await only(q, id!, 'email.bounced');
    assert.is(recipient, `${cause}@recipient.test`);
    const { message, ...rest } = bounce as Record<string, unknown>;
    assert.ok(String(message).length > 10);
    const diagnosticCode = /^\d/.test(reply) ? [`smtp; ${reply}`] : [];
    assert.equal(rest, { type, subType, diagnosticCode });
  }
  const added = (await told(q)).filter(({ type }) => type === 'suppression.added');
  assert.equal(
    added.map(({ detail }) => [detail['email'], detail['origin']]),
    [['no_mailbox@recipient.test', 'bounce']],
  );
});

test('failed, put off for long, lost after the dot, and too late', async ({ q }) => {
  const epoch = await q.run();
  const policy = { delayedAfterMs: 0, unknownOf: () => 'retry_once' as const };
  const settleOne = async (verdict: 'failed' | 'deferred' | 'unknown', cause: string) => {
    const [delivery] = await q.claim(epoch, 1);
    const evidence = { cause, enhanced: null, reply: 'Later.', code: null };
    await settle(
      q.store,
      [result(delivery!, epoch, { verdict, evidence, delayMs: 60_000 })],
      policy,
    );
    await again(q);
    await wake(q.store.pool, null);
  };
  const [failed] = await q.enqueue(1, one('failed@recipient.test'));
  await settleOne('failed', 'message_missing');
  assert.equal(await only(q, failed!, 'email.failed'), {
    recipient: 'failed@recipient.test',
    failed: { reason: 'message_missing', message: 'Later.' },
  });

  const [slow] = await q.enqueue(1, one('slow@recipient.test'));
  await settleOne('deferred', 'greylisted');
  assert.equal(await typesOf(q, slow), ['email.sent'], 'not at once');
  await settleOne('deferred', 'greylisted');
  await settleOne('deferred', 'greylisted');
  const { delay } = await only(q, slow!, 'email.delivery_delayed');
  const { next_attempt_at: next, expires_at: expires, ...rest } = delay as Record<string, unknown>;
  assert.equal(rest, { outcome: 'deferred', attempts: 2, cause: 'greylisted', message: 'Later.' });
  assert.ok(String(next) < String(expires));
  await q.store.pool.query('update delivery set expires_at = now() where email_id = $1', [slow]);
  await settleOne('deferred', 'greylisted');
  const { bounce } = await only(q, slow!, 'email.bounced');
  assert.equal((bounce as { type: string }).type, 'Transient');

  const [lost] = await q.enqueue(1, one('lost@recipient.test'));
  await settleOne('unknown', 'unknown_after_dot');
  await settleOne('unknown', 'unknown_after_dot');
  const unsure = (await told(q, lost)).filter(({ type }) => type === 'email.delivery_delayed');
  const delays = unsure.map(({ detail }) => detail['delay'] as Record<string, unknown>);
  assert.equal(
    delays.map(({ outcome, next_attempt_at: at }) => [outcome, at === null]),
    [
      ['unknown', false],
      ['unknown', true],
    ],
  );
  assert.not((await typesOf(q, lost)).includes('email.failed'), 'it may have arrived');
});

test('given up behind a closed lane, and released again', async ({ q }) => {
  await q.store.pool.query(
    `insert into lane (name, egress, site, circuit, opens, open_until, reason, reported_at)
     values ('default/closed', 'default', 'closed', 'open', 3, now() + interval '1 hour', 'refused', now())`,
  );
  await q.store.pool.query(
    `insert into lane_destination (destination, lane, seen_at)
     values ('mx:closed.test', 'default/closed', now())`,
  );
  const [id] = await q.enqueue(1, {
    deliveries: [{ recipient: 'a@closed.test', lane: 'mx:closed.test' }],
  });
  await q.store.pool.query('update delivery set expires_at = now() where email_id = $1', [id]);
  assert.is(await expireUntried(q.store), 1);
  const { bounce } = await only(q, id!, 'email.bounced');
  assert.equal(bounce, {
    message: 'The message could not be delivered within its lifetime.',
    type: 'Transient',
    subType: 'General',
    diagnosticCode: [],
  });
  const how = { includeUnknown: false, lifetimeMs: 60_000 };
  await releaseEmail(q.store, { tenantId: q.tenantId, emailId: id! }, how);
  await q.claim(await q.run(), 1);
  assert.equal([...(await typesOf(q, id))].toSorted(), ['email.bounced', 'email.sent']);
});

test('acceptance: scheduled, suppressed, opted out; and who is suppressed when it wakes', async ({
  q,
}) => {
  const { pool } = q.store;
  await suppress(pool, [
    { tenantId: q.tenantId, address: 'old@recipient.test', origin: 'bounce', sourceId: newId() },
  ]);
  const scheduledAt = new Date(Date.now() + 60_000);
  const lane = 'mx:recipient.test';
  const [id] = await q.enqueue(1, {
    scheduledAt,
    deliveries: [
      { recipient: 'Old@Recipient.test', lane, isSuppressed: true },
      { recipient: 'out@recipient.test', lane, isUnwanted: true },
      { recipient: 'late@recipient.test', lane },
      { recipient: 'ok@recipient.test', lane },
    ],
  });
  assert.equal([...(await typesOf(q, id))].toSorted(), [
    'email.failed',
    'email.scheduled',
    'email.suppressed',
  ]);
  assert.equal(await only(q, id!, 'email.scheduled'), { scheduled_at: scheduledAt.toISOString() });
  const { recipient, suppressed } = await only(q, id!, 'email.suppressed');
  assert.is(recipient, 'Old@Recipient.test');
  assert.is((suppressed as { reason?: string }).reason, 'previous_bounce');
  const { failed } = await only(q, id!, 'email.failed');
  assert.is((failed as { reason: string }).reason, 'unsubscribed');

  const [nobody] = await q.enqueue(1, {
    scheduledAt,
    ...one('old@recipient.test', { isSuppressed: true }),
  });
  assert.equal(await typesOf(q, nobody), ['email.suppressed'], 'nothing is scheduled');

  await createSuppressionVerbs(q.store).add(q.tenantId, 'late@recipient.test');
  await pool.query(`update delivery set due_at = now() where state = 'scheduled'`);
  await wakeScheduled(q.store);
  const late = (await told(q, id)).filter(({ type }) => type === 'email.suppressed').at(-1)!;
  assert.is(late.detail['recipient'], 'late@recipient.test');
  assert.not('reason' in (late.detail['suppressed'] as object), 'by hand: no reason');
});

test('attachments that cannot be had: every recipient has failed', async ({ q }) => {
  const [id] = await q.enqueue(1, {
    raw: null,
    rawSizeBytes: 0,
    attachments: [file({ url: 'https://files.test/a.pdf' })],
    deliveries: recipients(2),
  });
  const all = { max: 1, leaseMs: 60_000, perTenant: 1, active: [] };
  const [claimed] = await claimFetches(q.store.pool, all);
  const why = { cause: 'attachment_unavailable', reply: 'It is not there.' };
  await q.store.transact((client) => failPrepared(client, claimed!, why));
  assert.equal(
    (await told(q, id)).map(({ type, detail }) => [type, detail['failed']]),
    Array.from({ length: 2 }, () => ['email.failed', { reason: why.cause, message: why.reply }]),
  );
});

test('what comes back by mail: a late bounce, an arrival, a complaint', async ({ q }) => {
  const [a, b] = await q.enqueue(2, one('b@recipient.test'));
  await q.store.pool.query(`update delivery set attempts = 1, state = 'unknown', unknowns = 2`);
  const about = {
    address: 'b@recipient.test',
    originalAddress: null,
    diagnostic: '550 5.1.1 No such user',
    stage: null,
  };
  const dsn = { kind: 'dsn' as const, reporter: 'mx.recipient.test', returnPaths: [] };
  const come = (emailId: string, action: 'failed' | 'delivered', status: string) =>
    settleReport(
      q.store,
      { emailId, position: 0 },
      { report: { ...dsn, recipients: [{ ...about, action, status }] }, rules: [] },
    );
  await come(a!, 'failed', '5.1.1');
  await come(a!, 'failed', '5.1.1');
  assert.equal((await only(q, a!, 'email.bounced'))['bounce'], {
    message: 'The mailbox does not exist, or is closed.',
    type: 'Permanent',
    subType: 'NoEmail',
    diagnosticCode: ['smtp; 550 5.1.1 No such user'],
  });
  await come(b!, 'delivered', '2.0.0');
  await only(q, b!, 'email.delivered');
  for (let times = 0; times < 2; times++) {
    await settleReport(
      q.store,
      { emailId: b!, position: 0 },
      {
        report: { ...dsn, kind: 'arf', feedbackType: 'abuse', recipients: [] },
        rules: [],
      },
    );
  }
  assert.equal(await only(q, b!, 'email.complained'), {
    recipient: 'b@recipient.test',
    complaint: { type: 'abuse' },
  });
});

test('ids that the database makes are in order, as those made here', async ({ q }) => {
  const ids: string[] = [];
  for (let turn = 0; turn < 50; turn++) {
    const { rows } = await q.store.pool.query<{ id: string }>(`select ${NEW_ID} as id`);
    ids.push(rows[0]!.id);
  }
  const many = await q.store.pool.query<{ id: string }>(
    `select ${NEW_ID} as id from generate_series(1, 1000)`,
  );
  assert.is(new Set(many.rows.map(({ id }) => id)).size, 1_000);
  assert.equal(ids.toSorted(), ids);
  const ageMs = Date.now() - Number.parseInt(ids[0]!.replace('-', '').slice(0, 12), 16);
  assert.ok(Math.abs(ageMs) < 60_000);
  for (const id of [...ids, idNamed('a', Date.now()), newId()]) {
    assert.match(id, /^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
  }
  assert.is(idNamed('a', 1), idNamed('a', 1));
  assert.is(new Set([idNamed('a', 1), idNamed('b', 1), idNamed('a', 2)]).size, 3);
});

test('what is rolled back was not told', async ({ q }) => {
  const { tenantId } = q;
  const email = newEmail({ tenantId, scheduledAt: new Date(Date.now() + 60_000) });
  const undo = q.store.transact(async (client) => {
    await enqueue(client, [email]);
    await suppress(client, [
      { tenantId, address: 'x@y.test', origin: 'bounce', sourceId: email.id },
    ]);
    await recordComplaint(client, {
      tenantId,
      emailId: email.id,
      recipient: 'x@y.test',
      detail: {},
    });
    const { rows } = await client.query<{ type: string }>('select type from outbox order by type');
    const types = ['email.complained', 'email.scheduled', 'suppression.added'];
    assert.equal(
      rows.map(({ type }) => type),
      types,
    );
    throw new Error('no');
  });
  await undo.then(
    () => assert.unreachable(),
    (error: unknown) => assert.is((error as Error).message, 'no'),
  );
  assert.equal(await told(q), []);
  // In one statement, too: the second email has the key of the first.
  await enqueue(q.store.pool, [email, { ...email }]).then(
    () => assert.unreachable(),
    () => undefined,
  );
  assert.equal(await told(q), []);
});

test('suppressions that are added, removed and forgotten', async ({ q }) => {
  const { tenantId } = q;
  const verbs = createSuppressionVerbs(q.store);
  const id = await verbs.add(tenantId, 'Hand@Recipient.test');
  assert.is(await verbs.add(tenantId, 'hand@recipient.test'), id, 'known: nothing is added');
  const added = await only(q, id, 'suppression.added');
  const record = await verbs.find(tenantId, id);
  assert.equal(added, {
    id,
    email: 'hand@recipient.test',
    origin: 'manual',
    source_id: null,
    created_at: record.createdAt.toISOString(),
  });
  await verbs.remove(tenantId, id);
  assert.equal(await only(q, id, 'suppression.removed'), added);
  const ids = await verbs.addAll(tenantId, ['a@x.test', 'b@x.test', 'a@x.test']);
  assert.is(new Set(ids).size, 2);
  await verbs.removeAll(tenantId, { ids: [...new Set(ids), newId()] });
  const sourceId = newId();
  await suppress(q.store.pool, [
    { tenantId, address: 'old@x.test', origin: 'bounce', sourceId },
    { tenantId, address: 'old@x.test', origin: 'complaint', sourceId },
  ]);
  await q.store.pool.query(`update suppression set created_at = now() - interval '366 days'`);
  assert.is(await expireSuppressions(q.store.pool, 100), 1);
  assert.is(await expireSuppressions(q.store.pool, 100), 0);
  const counts = Object.groupBy(await told(q), ({ type }) => type);
  assert.is(counts['suppression.added']?.length, 4);
  assert.is(counts['suppression.removed']?.length, 4);
});

test.run();
