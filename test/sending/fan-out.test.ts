// The fan-out of broadcasts on a real database: whatever runs at the same time, fails or ends in the middle, each contact
// is reached once, and who does not want it or cannot get it is left out.
import { readdir } from 'node:fs/promises';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { BATCH_MAX } from '../../src/sending/fan-out-batch.ts';
import { createFanOut, type FanOut, type FanOutDependencies } from '../../src/sending/fan-out.ts';
import { INLINE_MAX_BYTES } from '../../src/store/blob.ts';
import { openFanOut, type Made, type State } from '../support/fan-out.ts';
import { newId } from '../../src/store/id.ts';

const test = suite('fan-out');
const { bench, folder, d, query, newDomain, queued, stateOf, outcomes, stop } = await openFanOut();
test.after(stop);

/** Runs turns until it is over. */
async function untilOver(fanOut: FanOut, made: Made): Promise<State> {
  for (let turn = 0; turn < 200; turn++) {
    await fanOut.turn();
    const state = await stateOf(made);
    if (state.status !== 'queued') return state;
  }
  throw new Error('it does not end');
}

test('two at once, with ends in the middle: everyone once', async () => {
  const made = await queued(3 * BATCH_MAX + 10);
  let transactions = 0;
  const failing: FanOutDependencies = {
    ...d,
    store: {
      ...d.store,
      em: () => d.store.em(),
      // Every third batch ends when all is written and nothing is committed.
      transact: (work) =>
        d.store.transact(async (client) => {
          const result = await work(client);
          transactions += 1;
          if (transactions % 3 === 0) throw new Error('ended');
          return result;
        }),
    },
  };
  const loops = [createFanOut(failing), createFanOut(failing)];
  for (let turn = 0; (await stateOf(made)).status === 'queued'; turn++) {
    assert.ok(turn < 100);
    // What failed rests for a while.
    await query('update broadcast set next_turn_at = null where id = $1', [made.broadcastId]);
    await Promise.all(loops.map((loop) => loop.turn()));
  }
  assert.ok(transactions > 4);
  assert.equal(
    new Set(await outcomes(made)),
    new Set([1]),
    'one email for each, however many batches were undone',
  );
  assert.equal(await stateOf(made), {
    status: 'sent',
    failure: null,
    recipients: made.contacts.length,
    left_out: 0,
  });
  const [email] = await query<Record<string, unknown>>(
    `select e.topic_id, e.last_event, d.is_bulk, d.lane, t.detail from email e
     join delivery d on d.email_id = e.id join timeline t on t.email_id = e.id and t.kind = 'accepted'
     where e.broadcast_id = $1 limit 1`,
    [made.broadcastId],
  );
  assert.is(email?.['is_bulk'], true);
  assert.is(email?.['lane'], 'mx:people.test');
});

test('who does not want it is left out, whenever that was said', async () => {
  const topicId = newId();
  const { tenantId } = bench;
  await query(
    `insert into topic (tenant_id, id, name, default_subscription, visibility, created_at, updated_at)
     values ($1, $2, 't', 'opt_out', 'public', now(), now())`,
    [tenantId, topicId],
  );
  const choose = (contactId: string, subscription: string): Promise<unknown> =>
    query(
      `insert into contact_topic (tenant_id, contact_id, topic_id, subscription, updated_at)
       values ($1, $2, $3, $4, now())
       on conflict (tenant_id, contact_id, topic_id) do update set subscription = excluded.subscription`,
      [tenantId, contactId, topicId, subscription],
    );
  const count = BATCH_MAX + 4;
  const made = await queued(count, { topicId });
  for (const id of made.contacts.slice(5)) await choose(id, 'opt_in');
  await choose(made.contacts[0]!, 'opt_in');
  await choose(made.contacts[1]!, 'opt_out');
  // The default of the topic speaks for the third.
  await choose(made.contacts[3]!, 'opt_in');
  await query('update contact set unsubscribed = true where id = $1', [made.contacts[3]]);
  await choose(made.contacts[4]!, 'opt_in');
  await query(
    `insert into suppression (tenant_id, id, address, origin, created_at) values ($1, $2, $3, 'manual', now())`,
    [tenantId, newId(), `${made.contacts[4]}@people.test`],
  );
  const [inBatch, behind] = [made.contacts[BATCH_MAX - 1]!, made.contacts[BATCH_MAX + 1]!];
  const said: Promise<unknown>[] = [];
  const meanwhile = createFanOut({
    ...d,
    preferenceLinks: {
      ...d.preferenceLinks,
      // While the first batch is composed, its last contact and one of the next batch opt out.
      url(target) {
        if (said.length === 0) said.push(choose(inBatch, 'opt_out'), choose(behind, 'opt_out'));
        return d.preferenceLinks.url(target);
      },
    },
  });
  await meanwhile.turn();
  await Promise.all(said);
  assert.is((await untilOver(meanwhile, made)).status, 'sent');
  const found = await outcomes(made);
  assert.equal(found.slice(0, 6), [
    1,
    'unsubscribed',
    'unsubscribed',
    'unsubscribed',
    'suppressed',
    1,
  ]);
  assert.is(found[BATCH_MAX + 1], 'unsubscribed');
  assert.is((await stateOf(made)).left_out, 5);
  // Its email was stored by then; it is not sent.
  assert.is(found[BATCH_MAX - 1], 1);
  const claimed = new Set<string>();
  for (const epoch of [await bench.run(), await bench.run()]) {
    for (const { recipient } of await bench.claim(epoch, 1_000)) claimed.add(recipient);
  }
  assert.ok(claimed.has(`${made.contacts[0]}@people.test`));
  assert.not.ok(claimed.has(`${inBatch}@people.test`));
});

test('what cannot be stored or made is passed over, and nobody fails for it', async () => {
  const made = await queued(40);
  await query(`update contact set email = 'nobody', address = 'nobody' where id = $1`, [
    made.contacts[3],
  ]);
  const refused = `${made.contacts[20]}@people.test`;
  await query(
    `create function refuse_one() returns trigger language plpgsql as $$ begin
       if new.recipient = '${refused}' then raise exception 'no' using errcode = '22000'; end if;
       return new; end $$`,
  );
  await query(
    'create trigger refuse_one before insert on delivery for each row execute function refuse_one()',
  );
  try {
    assert.equal(await untilOver(createFanOut(d), made), {
      status: 'sent',
      failure: null,
      recipients: 38,
      left_out: 2,
    });
  } finally {
    await query('drop trigger refuse_one on delivery');
  }
  const found = await outcomes(made);
  assert.is(found[3], 'failed');
  assert.is(found[20], 'failed');
  assert.is(found.filter((one) => one === 1).length, 38);
});

test('who is removed and made again in the middle gets it once; who joins gets it, too', async () => {
  const made = await queued(BATCH_MAX + 4);
  const fanOut = createFanOut(d);
  await fanOut.turn();
  const again = async (index: number): Promise<string> => {
    const id = newId();
    const address = `${made.contacts[index]}@people.test`;
    await query('delete from contact where id = $1', [made.contacts[index]]);
    await query(
      `insert into contact (tenant_id, id, email, address, created_at, updated_at)
       values ($1, $2, $3, $3, now(), now())`,
      [made.tenantId, id, address],
    );
    await query(
      `insert into segment_contact (tenant_id, segment_id, contact_id, created_at) values ($1, $2, $3, now())`,
      [made.tenantId, made.segmentId, id],
    );
    return address;
  };
  const twice = [await again(0), await again(5), await again(BATCH_MAX + 1)];
  assert.is((await untilOver(fanOut, made)).recipients, BATCH_MAX + 4);
  const rows = await query<{ recipient: string; count: string }>(
    `select d.recipient, count(*) as count from email e join delivery d on d.email_id = e.id
     where e.broadcast_id = $1 and d.recipient = any ($2) group by 1`,
    [made.broadcastId, twice],
  );
  assert.equal(
    rows.map(({ count }) => count),
    ['1', '1', '1'],
  );
});

test('an email that cannot be made is passed over, and the broadcast does not hang', async () => {
  const made = await queued(20);
  const poisoned = createFanOut({
    ...d,
    preferenceLinks: {
      ...d.preferenceLinks,
      url(target) {
        if (target.contactId === made.contacts[7]) throw new TypeError('a fault of ours');
        return d.preferenceLinks.url(target);
      },
    },
  });
  assert.equal(await untilOver(poisoned, made), {
    status: 'sent',
    failure: null,
    recipients: 19,
    left_out: 1,
  });
  assert.is((await outcomes(made))[7], 'failed');
  // What is no fault of the email is no reason to leave somebody out.
  const full = await queued(2);
  const noDisk = createFanOut({
    ...d,
    preferenceLinks: {
      ...d.preferenceLinks,
      url() {
        throw Object.assign(new Error('no space'), { code: 'ENOSPC', syscall: 'write' });
      },
    },
  });
  await noDisk.turn();
  assert.is((await stateOf(full)).status, 'queued');
  await query('update broadcast set next_turn_at = null where id = $1', [full.broadcastId]);
  assert.is((await untilOver(createFanOut(d), full)).recipients, 2);
});

test('one tenant whose batch waits or takes too long keeps nobody else waiting', async () => {
  const other = newId();
  await query('insert into tenant (id, name) values ($1, $2)', [other, 'other']);
  await newDomain(other);
  const slow = await queued(3);
  const theirs = [await queued(2, { tenantId: other }), await queued(2, { tenantId: other })];
  const release = await bench.store.pool.connect();
  try {
    // As a long removal of its segment does.
    await release.query('begin');
    await release.query('delete from segment where id = $1', [slow.segmentId]);
    await createFanOut(d).turn();
    assert.is((await stateOf(slow)).status, 'queued');
    assert.is((await stateOf(theirs[0]!)).status, 'sent');
  } finally {
    await release.query('rollback');
    release.release();
  }
  const timedOut = createFanOut({
    ...d,
    preferenceLinks: {
      ...d.preferenceLinks,
      url(target) {
        if (target.tenantId === slow.tenantId) throw new Error('Query read timeout');
        return d.preferenceLinks.url(target);
      },
    },
  });
  await query('update broadcast set next_turn_at = null where id = $1', [slow.broadcastId]);
  await timedOut.turn();
  assert.is((await stateOf(theirs[1]!)).status, 'sent');
  await query('update broadcast set next_turn_at = null where id = $1', [slow.broadcastId]);
  assert.is((await untilOver(createFanOut(d), slow)).recipients, 3);
});

test('large messages leave nothing behind when their batch is undone', async () => {
  const files = async (): Promise<number> =>
    (await readdir(folder, { recursive: true })).filter((name) => name.length > 30).length;
  const before = await files();
  const made = await queued(5, { html: `<p>${'words '.repeat(INLINE_MAX_BYTES / 6)}</p>` });
  const undone = createFanOut({
    ...d,
    store: {
      ...d.store,
      em: () => d.store.em(),
      transact: (work) =>
        d.store.transact(async (client) => {
          await work({
            ...client,
            query: (statement: { name?: string }, ...more: unknown[]) => {
              if (statement.name === 'broadcast-reached') throw new Error('ended');
              return (client.query as (...all: unknown[]) => unknown).call(
                client,
                statement,
                ...more,
              );
            },
          } as never);
          throw new Error('it should have ended');
        }),
    },
  });
  await undone.turn();
  assert.is((await stateOf(made)).recipients, 0);
  assert.is(await files(), before);
  await query('update broadcast set next_turn_at = null where id = $1', [made.broadcastId]);
  assert.is((await untilOver(createFanOut(d), made)).status, 'sent');
  assert.is(await files(), before + 5);
});

test('what a broadcast needs may go: then it fails and says so', async () => {
  const noSegment = await queued(3);
  await query('delete from segment where id = $1', [noSegment.segmentId]);
  const noDomain = await queued(3, { from: 'a@unknown.test' });
  const topicId = newId();
  const noTopic = await queued(3, { topicId });
  const fanOut = createFanOut(d);
  assert.equal(await untilOver(fanOut, noSegment), {
    status: 'failed',
    failure: 'Its segment was deleted.',
    recipients: 0,
    left_out: 0,
  });
  assert.match(String((await untilOver(fanOut, noDomain)).failure), 'unknown.test is not verified');
  assert.is((await untilOver(fanOut, noTopic)).failure, 'Its topic was deleted.');
  assert.equal(new Set(await outcomes(noTopic)), new Set(['missing']));
});

test('tenants take turns', async () => {
  const other = newId();
  await query('insert into tenant (id, name) values ($1, $2)', [other, 'other']);
  await newDomain(other);
  const ours = [await queued(2 * BATCH_MAX), await queued(2 * BATCH_MAX)];
  const theirs = await queued(2, { tenantId: other });
  const fanOut = createFanOut(d);
  await fanOut.turn();
  assert.is((await stateOf(theirs)).status, 'sent', 'one turn is one batch for each');
  const reached = (await Promise.all(ours.map(stateOf))).map(({ recipients }) => recipients);
  assert.is(reached[0]! + reached[1]!, BATCH_MAX);
  for (const made of ours) assert.is((await untilOver(fanOut, made)).status, 'sent');
});

test('canceled in the middle: nobody else, and what has not begun is taken back', async () => {
  const made = await queued(2 * BATCH_MAX);
  const fanOut = createFanOut(d);
  await fanOut.turn();
  const epoch = await bench.run();
  // One of them is under way by now.
  const begun = await query<{ email_id: string }>(
    `update delivery set state = 'in_flight', attempts = 1, lease_epoch = $2
     where email_id = (select email_id from broadcast_recipient where broadcast_id = $1 order by contact_id limit 1)
     returning email_id`,
    [made.broadcastId, epoch],
  );
  await query(`update broadcast set status = 'canceled' where id = $1`, [made.broadcastId]);
  await Promise.all([
    fanOut.withdraw(made.tenantId, made.broadcastId),
    createFanOut(d).turn(),
    fanOut.turn(),
  ]);
  await fanOut.turn();
  const rows = await query<{ state: string; last_event: string; count: string; facts: string }>(
    `select d.state, e.last_event, count(*) as count, count(t.id) as facts from broadcast_recipient r
     join email e on e.id = r.email_id join delivery d on d.email_id = e.id
     left join timeline t on t.email_id = e.id and t.kind = 'canceled'
     where r.broadcast_id = $1 group by 1, 2 order by 1`,
    [made.broadcastId],
  );
  const canceled = String(BATCH_MAX - 1);
  assert.equal(rows, [
    { state: 'canceled', last_event: 'canceled', count: canceled, facts: canceled },
    { state: 'in_flight', last_event: 'queued', count: '1', facts: '0' },
  ]);
  assert.is(begun.length, 1);
  const [{ cursor_id: cursor }] = (await query<{ cursor_id: string | null }>(
    'select cursor_id from broadcast where id = $1',
    [made.broadcastId],
  )) as [{ cursor_id: string | null }];
  assert.is(cursor, null, 'nothing is left to take back');
});

test.run();
