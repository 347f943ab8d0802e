// What came back by mail about deliveries in every state, on a real Postgres: what it changes, what it only tells, and
// that it never interferes with a worker. And what is withheld at the last moment.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { Report } from '../../src/mail/report.ts';
import { sharedPosition, WHOLE_EMAIL } from '../../src/mail/return-path.ts';
import { settleReport, type LateResult } from '../../src/queue/late.ts';
import { settle } from '../../src/queue/settle.ts';
import { findEmail } from '../../src/sending/read.ts';
import { newId } from '../../src/store/id.ts';
import {
  expireSuppressions,
  suppress,
  suppressedAmong,
} from '../../src/suppressions/suppressions.ts';
import { readTrace } from '../../src/timeline/trace.ts';
import { openQueue, recipients, result, type Bench } from '../support/queue.ts';

const test = suite<{ q: Bench }>('late');
test.before(async (context) => {
  context.q = await openQueue();
});
test.after(({ q }) => q.stop());

const report = (about: {
  action?: 'failed' | 'delayed' | 'delivered';
  address?: string | null;
  originalAddress?: string;
  status?: string | null;
  diagnostic?: string | null;
}): Report => ({
  kind: 'dsn',
  reporter: 'mx.recipient.test',
  returnPaths: [],
  recipients: [
    {
      address: 'b@recipient.test',
      originalAddress: null,
      action: 'failed',
      status: '5.1.1',
      diagnostic: '550 5.1.1 No such user',
      stage: null,
      ...about,
    },
  ],
});
const complaint: Report = {
  kind: 'arf',
  feedbackType: 'abuse',
  reporter: 'SomeGenerator/1.0',
  returnPaths: [],
  recipients: [],
};

const come = (q: Bench, emailId: string, what: Report, position = 0): Promise<LateResult> =>
  settleReport(q.store, { emailId, position }, { report: what, rules: [] });

interface Seen {
  readonly event: string | undefined;
  readonly states: readonly string[];
  readonly told: readonly string[];
  readonly isSuppressed: boolean;
}
async function see(q: Bench, id: string): Promise<Seen> {
  const trace = await readTrace(q.store, q.tenantId, id);
  const address = trace!.recipients[0]!.recipient;
  return {
    event: (await findEmail(q.store, q.tenantId, id))?.lastEvent,
    states: trace!.recipients.map(({ state }) => state),
    told: trace!.events.flatMap(({ type, detail }) => ('source' in detail ? [type] : [])),
    isSuppressed: (await suppressedAmong(q.store.pool, q.tenantId, [address])).size > 0,
  };
}

/** An email in this state; nobody else's address. */
async function emailIn(q: Bench, state: string): Promise<{ id: string; address: string }> {
  const address = `r${newId()}@recipient.test`;
  const [id] = await q.enqueue(1, {
    deliveries: [{ recipient: address, lane: 'mx:recipient.test' }],
  });
  await q.store.pool.query('update delivery set state = $2, attempts = 1 where email_id = $1', [
    id,
    state,
  ]);
  const event = state === 'unknown' ? 'delivery_delayed' : state;
  if (['delivered', 'bounced', 'unknown'].includes(state)) {
    await q.store.pool.query('update email set last_event = $2 where id = $1', [id, event]);
  }
  return { id: id!, address };
}

const TABLE: readonly (readonly [
  string,
  'failed' | 'delayed' | 'delivered',
  LateResult,
  string,
])[] = [
  ['delivered', 'failed', 'settled', 'bounced'],
  ['unknown', 'failed', 'settled', 'bounced'],
  ['in_flight', 'failed', 'not_now', 'in_flight'],
  ['deferred', 'failed', 'noted', 'deferred'],
  ['ready', 'failed', 'noted', 'ready'],
  ['bounced', 'failed', 'nothing', 'bounced'],
  ['failed', 'failed', 'nothing', 'failed'],
  ['suppressed', 'failed', 'nothing', 'suppressed'],
  ['canceled', 'failed', 'nothing', 'canceled'],
  ['delivered', 'delayed', 'noted', 'delivered'],
  ['in_flight', 'delayed', 'noted', 'in_flight'],
  ['unknown', 'delayed', 'noted', 'unknown'],
  ['unknown', 'delivered', 'settled', 'delivered'],
  ['delivered', 'delivered', 'nothing', 'delivered'],
  ['deferred', 'delivered', 'nothing', 'deferred'],
];
for (const [state, action, expected, after] of TABLE) {
  test(`${action} about ${state}: ${expected}`, async ({ q }) => {
    const { id, address } = await emailIn(q, state);
    assert.is(await come(q, id, report({ action, address })), expected);
    const seen = await see(q, id);
    assert.equal(seen.states, [after]);
    assert.is(seen.told.length, expected === 'settled' || expected === 'noted' ? 1 : 0);
    assert.is(seen.isSuppressed, expected === 'settled' && after === 'bounced');
    if (expected === 'settled') assert.is(seen.event, after);
  });
}

for (const [state, expected] of [
  ['delivered', 'settled'],
  ['bounced', 'settled'],
  ['unknown', 'settled'],
  ['deferred', 'settled'],
  ['in_flight', 'not_now'],
  ['suppressed', 'nothing'],
  ['scheduled', 'nothing'],
] as const) {
  test(`a complaint about ${state}: ${expected}`, async ({ q }) => {
    const { id } = await emailIn(q, state);
    assert.is(await come(q, id, complaint), expected);
    const seen = await see(q, id);
    assert.equal(seen.states, [state === 'unknown' ? 'delivered' : state]);
    assert.is(seen.isSuppressed, expected === 'settled');
    assert.is(seen.event === 'complained', expected === 'settled');
    if (expected === 'settled') assert.is(await come(q, id, complaint), 'nothing', 'told once');
  });
}

test('reports of one bounce that come together settle it once', async ({ q }) => {
  const { id, address } = await emailIn(q, 'delivered');
  const results = await Promise.all(
    Array.from({ length: 5 }, () => come(q, id, report({ address }))),
  );
  assert.equal(results.toSorted(), ['nothing', 'nothing', 'nothing', 'nothing', 'settled']);
  assert.equal((await see(q, id)).told, ['bounced']);
});

test('complaints that come together are told once', async ({ q }) => {
  const { id } = await emailIn(q, 'delivered');
  const results = await Promise.all(Array.from({ length: 5 }, () => come(q, id, complaint)));
  assert.is(results.filter((one) => one === 'settled').length, 1);
  assert.equal((await see(q, id)).told, ['complained']);
});

test('a late bounce of one recipient shows, and a complaint stays over everything', async ({
  q,
}) => {
  const [id] = await q.enqueue(1, { deliveries: recipients(3) });
  const epoch = await q.run();
  const claimed = (await q.claim(epoch, 100)).filter(({ emailId }) => emailId === id);
  await settle(
    q.store,
    claimed.map((one) => result(one, epoch, { verdict: 'delivered' })),
  );
  assert.is((await see(q, id!)).event, 'delivered');
  await come(q, id!, report({ address: 'r1@recipient.test' }), 1);
  assert.equal(await see(q, id!).then(({ event, states }) => [event, ...states]), [
    'bounced',
    'delivered',
    'bounced',
    'delivered',
  ]);
  await come(q, id!, complaint, 0);
  await come(q, id!, report({ address: 'r2@recipient.test' }), 2);
  assert.is((await see(q, id!)).event, 'complained');
});

test('who has a return path cannot fill the timeline', async ({ q }) => {
  const { id, address } = await emailIn(q, 'delivered');
  for (let times = 0; times < 25; times++)
    await come(q, id, report({ action: 'delayed', address }));
  assert.is((await see(q, id)).told.length, 20);
});

test('an email or a recipient that is not there', async ({ q }) => {
  const { id, address } = await emailIn(q, 'delivered');
  assert.is(await come(q, newId(), report({ address })), 'nothing');
  assert.is(await come(q, id, report({ address }), 1), 'nothing');
});

test('what a report says is stored whatever it says', async ({ q }) => {
  const { id, address } = await emailIn(q, 'delivered');
  const diagnostic = '550 5.1.1 \u{1F600} "quoted" \\u0000 \'';
  await come(q, id, report({ address, diagnostic }));
  const trace = await readTrace(q.store, q.tenantId, id);
  assert.is(trace?.recipients[0]?.last_reply, diagnostic);
});

test('no mailbox: the sink suppresses nobody, hosts do', async ({ q }) => {
  const [mx, sink] = [`mx${newId()}@recipient.test`, `sink${newId()}@recipient.test`];
  await q.enqueue(1, {
    deliveries: [
      { recipient: mx, lane: 'mx:recipient.test' },
      { recipient: sink, lane: 'sink' },
    ],
  });
  const epoch = await q.run();
  const claimed = await q.claim(epoch, 100);
  const evidence = { cause: 'no_mailbox', stage: 'rcpt', code: 550, enhanced: '5.1.1' };
  await settle(
    q.store,
    claimed.map((one) => result(one, epoch, { verdict: 'bounced', evidence })),
  );
  assert.equal(await suppressedAmong(q.store.pool, q.tenantId, [mx, sink]), new Set([mx]));
});

test('what was suppressed since it was accepted is not attempted', async ({ q }) => {
  const [gone, ok] = [`Gone${newId()}@recipient.test`, `ok${newId()}@recipient.test`];
  const [id] = await q.enqueue(1, {
    deliveries: [
      { recipient: gone, lane: 'mx:recipient.test' },
      { recipient: ok, lane: 'mx:recipient.test' },
    ],
  });
  const [alone] = await q.enqueue(1, {
    deliveries: [{ recipient: gone, lane: 'mx:recipient.test' }],
  });
  await suppress(q.store.pool, [
    { tenantId: q.tenantId, address: gone, origin: 'complaint', sourceId: id! },
  ]);
  const epoch = await q.run();
  const claimed = await q.claim(epoch, 100);
  assert.equal(
    claimed.map(({ recipient }) => recipient),
    [ok],
  );
  await settle(q.store, [result(claimed[0]!, epoch, { verdict: 'delivered' })]);
  const trace = await readTrace(q.store, q.tenantId, id!);
  assert.equal(
    trace?.recipients.map(({ state, attempts, last_code }) => [state, attempts, last_code]),
    [
      ['suppressed', 0, 'suppressed'],
      ['delivered', 1, null],
    ],
  );
  const begun = trace?.events.filter(({ type }) => type === 'attempt_started');
  assert.equal(
    begun?.map(({ recipient }) => recipient),
    [ok],
  );
  assert.is((await findEmail(q.store, q.tenantId, alone!))?.lastEvent, 'suppressed');
  assert.equal(await q.claim(epoch, 100), [], 'nothing is left');
});

test('bounces of long ago are forgotten; complaints, and what somebody wrote, are not', async ({
  q,
}) => {
  const { pool } = q.store;
  const [old, young, complained] = ['old@x.test', 'young@x.test', 'complained@x.test'];
  const of = (address: string, origin: 'bounce' | 'complaint') => ({
    tenantId: q.tenantId,
    address,
    origin,
    sourceId: newId(),
  });
  await suppress(pool, [of(old, 'bounce'), of(young, 'bounce'), of(complained, 'complaint')]);
  await suppress(pool, [of(complained, 'bounce')]);
  await pool.query(
    `update suppression set created_at = now() - interval '366 days' where address = any ($1)`,
    [[old, complained]],
  );
  assert.is(await expireSuppressions(pool, 1_000), 1);
  assert.equal(
    await suppressedAmong(pool, q.tenantId, [old, young, complained]),
    new Set([young, complained]),
  );
});

/** An email to three, of which these have been delivered; the others are still on their way. */
async function emailToThree(
  q: Bench,
  state = 'delivered',
): Promise<{ id: string; addresses: readonly string[] }> {
  const addresses = ['a', 'b', 'c'].map((name) => `${name}${newId()}@recipient.test`);
  const [id] = await q.enqueue(1, {
    deliveries: addresses.map((recipient) => ({ recipient, lane: 'mx:recipient.test' })),
  });
  await q.store.pool.query('update delivery set state = $2, attempts = 1 where email_id = $1', [
    id,
    state,
  ]);
  return { id: id!, addresses };
}

test('of a return path that several share, the report counts for whom it names', async ({ q }) => {
  const { id, addresses } = await emailToThree(q);
  const about = report({ address: addresses[1]!.toUpperCase() });
  assert.is(await come(q, id, about, WHOLE_EMAIL), 'settled');
  assert.equal((await see(q, id)).states, ['delivered', 'bounced', 'delivered']);
  assert.is(await come(q, id, about, WHOLE_EMAIL), 'nothing', 'it came again');
  // Any of the three could have written it of another.
  assert.is((await suppressedAmong(q.store.pool, q.tenantId, addresses)).size, 0);
});

test('the address that we sent to goes before the one behind it', async ({ q }) => {
  const { id, addresses } = await emailToThree(q);
  const about = report({ address: addresses[2]!, originalAddress: addresses[0]! });
  assert.is(await come(q, id, about, WHOLE_EMAIL), 'settled');
  assert.equal((await see(q, id)).states, ['bounced', 'delivered', 'delivered']);
});

test('one report about two of three', async ({ q }) => {
  const { id, addresses } = await emailToThree(q);
  const [first] = report({ address: addresses[0]! }).recipients;
  const [second] = report({ address: addresses[2]!, action: 'delayed' }).recipients;
  const both = { ...report({}), recipients: [first!, second!] };
  assert.is(await come(q, id, both, WHOLE_EMAIL), 'settled');
  const { states, told } = await see(q, id);
  assert.equal(states, ['bounced', 'delivered', 'delivered']);
  assert.equal(told, ['bounced', 'reported']);
});

test('a report that names none of those who share the return path changes nothing', async ({
  q,
}) => {
  const { id, addresses } = await emailToThree(q);
  for (const address of [null, 'stranger@elsewhere.test']) {
    assert.is(await come(q, id, report({ address }), WHOLE_EMAIL), 'noted');
  }
  assert.is(await come(q, id, complaint, WHOLE_EMAIL), 'noted');
  const { states, told } = await see(q, id);
  assert.equal(states, ['delivered', 'delivered', 'delivered']);
  assert.equal(told, ['reported', 'reported', 'reported']);
  assert.is((await suppressedAmong(q.store.pool, q.tenantId, addresses)).size, 0);
  const trace = await readTrace(q.store, q.tenantId, id);
  const noted = trace!.events.filter(({ type }) => type === 'reported');
  assert.equal(
    noted.map(({ recipient }) => recipient ?? null),
    [null, null, null],
    'told of the email, of no recipient',
  );
});

test('a complaint on a return path that several share shows, and suppresses nobody', async ({
  q,
}) => {
  const { id, addresses } = await emailToThree(q);
  const [of] = report({ address: addresses[1]! }).recipients;
  const about: Report = { ...complaint, recipients: [of!] };
  assert.is(await come(q, id, about, WHOLE_EMAIL), 'settled');
  assert.is(await come(q, id, about, WHOLE_EMAIL), 'nothing', 'told once');
  assert.is((await see(q, id)).event, 'complained');
  // Any of the three could have written it of another.
  assert.is((await suppressedAmong(q.store.pool, q.tenantId, addresses)).size, 0);
});

test('of a return path that several share, nobody speaks for who goes elsewhere alone', async ({
  q,
}) => {
  const lanes = ['mx:recipient.test', 'mx:recipient.test', 'mx:other.test'];
  const deliveries = lanes.map((lane) => ({ recipient: `${newId()}@${lane.slice(3)}`, lane }));
  const [id] = await q.enqueue(1, { deliveries });
  await q.store.pool.query(
    "update delivery set state = 'delivered', attempts = 1 where email_id = $1",
    [id],
  );
  const address = deliveries[2]!.recipient;
  assert.is(await come(q, id!, report({ address }), WHOLE_EMAIL), 'noted');
  assert.equal((await see(q, id!)).states, ['delivered', 'delivered', 'delivered']);
  assert.is((await suppressedAmong(q.store.pool, q.tenantId, [address])).size, 0);
  assert.is(await come(q, id!, report({ address }), 2), 'settled', 'its own return path does');
});

test('who shares a return path at one destination cannot speak for those at another', async ({
  q,
}) => {
  const lanes = ['mx:hostile.test', 'mx:hostile.test', 'mx:victim.test', 'mx:victim.test'];
  const deliveries = lanes.map((lane) => ({ recipient: `${newId()}@${lane.slice(3)}`, lane }));
  const [id] = await q.enqueue(1, { deliveries });
  await q.store.pool.query(
    "update delivery set state = case position when 2 then 'unknown' else 'delivered' end, attempts = 1 where email_id = $1",
    [id],
  );
  const [hostile, victim] = ['mx:hostile.test', 'mx:victim.test'].map((lane) =>
    sharedPosition(id!, lane),
  );
  const unknown = report({ action: 'delivered', address: deliveries[2]!.recipient });
  const bounce = report({ address: deliveries[3]!.recipient });
  assert.is(await come(q, id!, unknown, hostile), 'noted');
  assert.is(await come(q, id!, bounce, hostile), 'noted');
  assert.equal((await see(q, id!)).states, ['delivered', 'delivered', 'unknown', 'delivered']);
  assert.is(await come(q, id!, bounce, victim), 'settled', 'a neighbour there can');
  assert.is(await come(q, id!, report({ address: deliveries[0]!.recipient }), hostile), 'settled');
  assert.equal((await see(q, id!)).states, ['bounced', 'delivered', 'unknown', 'bounced']);
});

test('of a return path that several share: not now while one of the named is under way', async ({
  q,
}) => {
  const { id, addresses } = await emailToThree(q, 'in_flight');
  assert.is(await come(q, id, report({ address: addresses[0]! }), WHOLE_EMAIL), 'not_now');
  assert.equal((await see(q, id)).states, ['in_flight', 'in_flight', 'in_flight']);
});

test.run();
