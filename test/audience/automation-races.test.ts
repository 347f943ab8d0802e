// Automations when several things happen at once: events while an automation is stopped or removed, runs that cannot be
// carried out, and much to clear away.
import type { QueryConfig } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createAutomationRunner } from '../../src/audience/automation-runner.ts';
import { createEventVerbs } from '../../src/audience/events.ts';
import type { Store } from '../../src/store/orm.ts';
import { until } from '../support/app.ts';
import {
  openAutomations,
  chain,
  trigger,
  DAY_MS,
  type Fields,
  type Steps,
} from '../support/automations.ts';
import { silent } from '../support/queue.ts';

const test = suite('automation races');
const bench = await openAutomations();
const { automation, contact, events, mail, now, onlyState, pass } = bench;
const { runner, settle, states, store, tenantId, verbs } = bench;
test.after(() => bench.stop());

const waiting = (eventName: string): Steps[number] => ({
  key: 'wait',
  type: 'wait_for_event',
  config: { event_name: eventName, timeout: '1 day' },
});
const note: Steps[number] = { key: 'note', type: 'contact_update', config: { last_name: 'Noted' } };

async function count(sql: string, ...values: unknown[]): Promise<number> {
  const { rows } = await store.pool.query<{ count: number }>(
    `select count(*)::integer as count from ${sql}`,
    values,
  );
  return rows[0]!.count;
}

/** Somebody waits for a lock of somebody else. */
const someoneWaits = (): Promise<unknown> =>
  until(
    () => count('pg_locks where not granted'),
    (locks) => locks > 0,
  );

test('an event that comes while the run is on its way to wait for it is not missed', async () => {
  const { id, event } = await automation((name) => ({
    steps: [trigger(name), waiting(`${name}.go`), { ...waiting(`${name}.go`), key: 'again' }, note],
    connections: [
      { from: 'start', to: 'wait' },
      { from: 'wait', to: 'again', type: 'event_received' },
      { from: 'again', to: 'note', type: 'event_received' },
    ],
  }));
  const { id: contactId } = await contact();
  await events.send(tenantId, { event, contact_id: contactId });
  // No runner has seen it, and each event ends one wait.
  await events.send(tenantId, { event: `${event}.go`, contact_id: contactId });
  assert.equal((await onlyState(id)).steps, {
    start: 'completed',
    wait: 'completed',
    again: 'waiting',
    note: 'pending',
  });
  await events.send(tenantId, { event: `${event}.go`, contact_id: contactId });
  await settle();
  assert.is((await onlyState(id)).status, 'completed');
});

test('runs that began while it was being stopped are cancelled, by whatever clock they began', async () => {
  const { id, event } = await automation((name) => chain(trigger(name), waiting('nothing')));
  let goOn: () => void = () => undefined;
  const gate = new Promise<void>((resolve) => (goOn = resolve));
  const slow: Store = {
    ...store,
    transact: (work) =>
      store.transact(async (client) => {
        const result = await work(client);
        await gate;
        return result;
      }),
  };
  const ahead = createEventVerbs({
    store: slow,
    now: () => new Date(now().getTime() + 1_500),
    onRuns: () => undefined,
  });
  const { id: contactId } = await contact();
  const sent = ahead.send(tenantId, { event, contact_id: contactId });
  await until(
    () =>
      count(`pg_locks where mode = 'RowShareLock' and granted
        and relation = 'automation'::regclass`),
    (locks) => locks > 0,
  );
  const stopped = verbs.stop(tenantId, id);
  await someoneWaits();
  goOn();
  await Promise.all([sent, stopped]);
  await settle();
  assert.equal((await onlyState(id)).status, 'cancelled');
});

test('removing locks runs in the order in which events do', async () => {
  const { id, event } = await automation((name) => chain(trigger(name), waiting(`${name}.go`)));
  const { id: contactId } = await contact();
  for (let sent = 0; sent < 12; sent += 1) {
    await events.send(tenantId, { event, contact_id: contactId });
  }
  const { rows } = await store.pool.query<{ id: string }>(
    'select id from automation_run where automation_id = $1 order by id',
    [id],
  );
  const [first, ...others] = rows.map((row) => row.id);
  const locking = await store.pool.connect();
  try {
    const lock = 'select 1 from automation_run where id = any ($1::uuid[]) order by id for update';
    await locking.query('begin');
    await locking.query(lock, [[first]]);
    await verbs.remove(tenantId, id);
    const turn = runner.turn();
    await someoneWaits();
    await locking.query(lock, [others]);
    await locking.query('commit');
    await turn;
  } finally {
    locking.release();
  }
  await settle();
  assert.is(await count('automation where id = $1', id), 0);
});

test('runs that cannot be carried out and automations that cannot be cleared keep nobody else back', async () => {
  const make = (): ReturnType<typeof automation> =>
    automation((name) => chain(trigger(name), note, { ...waiting('nothing'), key: 'end' }));
  const broken = await make();
  const removed = await make();
  const good = await make();
  const { id: contactId } = await contact();
  await events.send(tenantId, { event: broken.event, contact_id: contactId });
  await store.pool.query(
    `update automation_run set step_key = 'nowhere', tries = 2000, due_at = due_at - interval '1 day'
     where automation_id = $1`,
    [broken.id],
  );
  await store.pool.query(
    `create function refuse() returns trigger language plpgsql as
       $$ begin raise exception 'it does not go'; end $$`,
  );
  await store.pool.query(
    `create trigger refuse before delete on automation for each row
       when (old.id = '${removed.id}') execute function refuse()`,
  );
  await verbs.remove(tenantId, removed.id);
  await events.send(tenantId, { event: good.event, contact_id: contactId });
  try {
    await runner.turn();
    assert.is((await onlyState(good.id)).steps['end'], 'waiting');
  } finally {
    await store.pool.query('drop trigger refuse on automation');
  }
  await store.pool.query(
    'update automation_run set step_key = null, due_at = null where step_key = $1',
    ['nowhere'],
  );
  await settle();
  assert.is(await count('automation where id = $1', removed.id), 0);
});

test('a turn clears a bounded part and has time for those that are due; one that waits makes room', async () => {
  const [first, second] = await Promise.all(
    [1, 2].map(() => automation((name) => chain(trigger(name), waiting('nothing')))),
  );
  for (const { event } of [first!, second!]) {
    await events.send(tenantId, { event, contact_id: (await contact()).id });
  }
  await store.pool.query(
    `insert into automation_run (tenant_id, id, automation_id, contact_id, address, event, steps,
       connections, status, step_key, waits_for, due_at, tries, started_at, created_at)
     select tenant_id, gen_random_uuid(), automation_id, contact_id, address, event, steps,
       connections, status, step_key, waits_for, due_at, tries, started_at, created_at
     from automation_run, generate_series(1, 450) where automation_id = any ($1::uuid[])`,
    [[first!.id, second!.id]],
  );
  const left = (): Promise<number> =>
    count('automation_run where automation_id = any ($1::uuid[])', [first!.id, second!.id]);
  for (const { id } of [first!, second!]) await verbs.remove(tenantId, id);
  const before = await left();
  assert.is(await runner.turn(), 0);
  assert.is(before - (await left()), 500);
  await settle();
  assert.is(await left(), 0);

  // Runs whose only step that is due ends them or begins to wait are work as well: the next turn comes at once.
  const { event } = await automation((name) => chain(trigger(name), note, waiting('nothing')));
  await events.send(tenantId, { event, contact_id: (await contact()).id });
  assert.is(await runner.turn(), 0);
  pass(DAY_MS);
  assert.is(await runner.turn(), 0, 'the wait is over');
  await settle();
});

test('what is done to contacts is passed over once the contact is gone', async () => {
  const { id, event } = await automation((name) =>
    chain(trigger(name), { key: 'remove', type: 'contact_delete' }, note),
  );
  await events.send(tenantId, { event, contact_id: (await contact()).id });
  await settle();
  const { steps, all, status } = await onlyState(id);
  assert.equal([status, steps['remove'], steps['note']], ['completed', 'completed', 'skipped']);
  assert.equal((all['note'] as Fields)['output'], { reason: 'no_contact' });
});

test('runs that wait are let go on a few at a time', async () => {
  const { id, event } = await automation((name) => chain(trigger(name), waiting(`${name}.go`)));
  const { id: contactId } = await contact();
  for (let sent = 0; sent < 50; sent += 1) {
    await events.send(tenantId, { event, contact_id: contactId });
  }
  let most = 0;
  const counting: Store = {
    ...store,
    transact: (work) =>
      store.transact((client) =>
        work(
          new Proxy(client, {
            get: (target, name) =>
              name === 'query'
                ? async (query: QueryConfig, values?: unknown[]) => {
                    const answer = await target.query(query, values);
                    most = Math.max(most, answer.rows.length);
                    return answer;
                  }
                : (Reflect.get(target, name) as unknown),
          }),
        ),
      ),
  };
  const counted = createEventVerbs({ store: counting, now, onRuns: () => undefined });
  await counted.send(tenantId, { event: `${event}.go`, contact_id: contactId });
  const all = await states(id);
  assert.equal(
    [all.length, new Set(all.map(({ status }) => status))],
    [50, new Set(['completed'])],
  );
  assert.ok(most <= 20, `${most} runs with all that they have in memory at once`);
});

test('new addresses that come at once are one contact, while it is stopped and run', async () => {
  const { id, event } = await automation((name) => chain(trigger(name), note, waiting('nothing')));
  const second = createAutomationRunner({ store, log: silent, now, ...mail });
  await Promise.all([
    ...Array.from({ length: 24 }, (_, index) =>
      events.send(tenantId, { event, email: `New${index % 3}@recipient.test` }),
    ),
    settle(),
    settle(second),
    verbs.stop(tenantId, id),
  ]);
  await settle();
  assert.is(await count(`contact where address like 'new_@recipient.test'`), 3);
  assert.equal(
    (await states(id)).filter(({ status }) => status === 'running'),
    [],
  );
});

test.run();
