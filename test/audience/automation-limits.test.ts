// Many runs of automations: stopping and removing them, tenants that take turns, and what there is a limit for.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { Refusal } from '../../src/access/refusal.ts';
import { findRun, listRuns } from '../../src/audience/automation-runs.ts';
import { OPEN_RUNS_MAX } from '../../src/audience/automation-start.ts';
import { TRIGGERED_MAX } from '../../src/audience/automations.ts';
import { newId } from '../../src/store/id.ts';
import { openAutomations, chain, trigger, DAY_MS } from '../support/automations.ts';
import { firstIdAt } from '../../src/access/request-log.ts';
import { removeOld } from '../support/retention.ts';

const test = suite('automation limits');
const bench = await openAutomations();
const {
  automation,
  emailsTo,
  events,
  mailStep,
  pass,
  plainId,
  runner,
  settle,
  states,
  store,
  tenantId,
  verbs,
} = bench;
test.after(() => bench.stop());

async function refusalOf(work: Promise<unknown>): Promise<Refusal> {
  const error: unknown = await work.then(
    () => new Error('accepted'),
    (reason: unknown) => reason,
  );
  assert.instance(error, Refusal, String(error));
  return error as Refusal;
}

/** Many runs like the only one of the automation. */
const multiply = (automationId: string, times: number): Promise<unknown> =>
  store.pool.query(
    `with made as (
       insert into automation_run (tenant_id, id, automation_id, contact_id, address, event, steps, connections,
         status, step_key, waits_for, due_at, tries, started_at, created_at)
       select tenant_id, gen_random_uuid(), automation_id, contact_id, address, event, steps, connections, status,
         step_key, waits_for, due_at, tries, started_at, created_at
       from automation_run, generate_series(1, $3) where tenant_id = $1 and automation_id = $2
       returning tenant_id, id)
     insert into automation_run_step (tenant_id, run_id, key, type, status, created_at)
     select made.tenant_id, made.id, s ->> 'key', s ->> 'type', 'pending', now()
     from made, automation a, jsonb_array_elements(a.steps) s where a.tenant_id = $1 and a.id = $2`,
    [tenantId, automationId, times],
  );

test('stopping cancels every run that began, however many; removing leaves nothing', async () => {
  const { id, event } = await automation((name) =>
    chain(
      trigger(name),
      { key: 'pause', type: 'delay', config: { duration: '1 day' } },
      mailStep('mail', { template: { id: plainId } }),
    ),
  );
  await events.send(tenantId, { event, email: 'many@recipient.test' });
  await settle();
  await multiply(id, 700);
  const running = async (): Promise<number> => {
    const { rows } = await store.pool.query<{ count: number }>(
      `select count(*)::integer from automation_run where automation_id = $1 and status = 'running'`,
      [id],
    );
    return rows[0]!.count;
  };
  assert.is(await running(), 701);
  assert.ok(await verbs.stop(tenantId, id));
  assert.ok((await running()) > 0, 'more than are cancelled at once');
  // Enabled again: those that begin now are not meant.
  await verbs.update(tenantId, id, { status: 'enabled' });
  pass(1);
  await events.send(tenantId, { event, email: 'after@recipient.test' });
  await settle();
  assert.is(await running(), 1);
  const cancelled = (await states(id)).filter(({ status }) => status === 'cancelled');
  assert.ok(cancelled.length >= 99);
  for (const { steps } of cancelled) assert.is(steps['mail'], 'skipped');
  pass(DAY_MS);
  await settle();
  assert.is((await emailsTo('many@recipient.test')).length, 0);
  assert.is((await emailsTo('after@recipient.test')).length, 1);

  assert.ok(await verbs.remove(tenantId, id));
  assert.is(await verbs.find(tenantId, id), null);
  assert.not.ok(await verbs.stop(tenantId, id));
  assert.not.ok(await verbs.remove(tenantId, id));
  await events.send(tenantId, { event, email: 'late@recipient.test' });
  await settle();
  const { rows } = await store.pool.query(
    `select 1 from automation_run where automation_id = $1 union all select 1 from automation where id = $1`,
    [id],
  );
  assert.is(rows.length, 0);
});

test('events that arrive while it is stopped start runs that are cancelled, or none', async () => {
  const { id, event } = await automation((name) =>
    chain(trigger(name), {
      key: 'wait',
      type: 'wait_for_event',
      config: { event_name: `${name}.go`, timeout: '1 day' },
    }),
  );
  const send = (index: number, what = event): Promise<void> =>
    events.send(tenantId, { event: what, email: `s${index}@recipient.test` });
  await Promise.all(Array.from({ length: 10 }, (_, index) => send(index)));
  await settle();
  await Promise.all([
    ...Array.from({ length: 10 }, (_, index) => send(index)),
    ...Array.from({ length: 10 }, (_, index) => send(index, `${event}.go`)),
    verbs.stop(tenantId, id),
    settle(),
  ]);
  await settle();
  assert.equal(
    (await states(id)).filter(({ status }) => status === 'running'),
    [],
  );
});

test('tenants take turns', async () => {
  const other = newId();
  await store.pool.query('insert into tenant (id, name) values ($1, $2)', [other, 'other']);
  const { id, event } = await automation((name) =>
    chain(trigger(name), mailStep('mail', { template: { id: plainId } })),
  );
  await events.send(tenantId, { event, email: 'first@recipient.test' });
  await multiply(id, 200);
  pass(1);
  const small = await verbs.create(other, {
    name: 'small',
    status: 'enabled',
    ...chain(trigger('small'), { key: 'd', type: 'delay', config: { duration: '1h' } }),
  });
  await events.send(other, { event: 'small', email: 'x@recipient.test' });
  await runner.turn();
  const about = { tenantId: other, automationId: small, statuses: ['running'] as const };
  const page = { limit: 1, after: undefined, before: undefined };
  const runId = (await listRuns(store, about, page)).items[0]!.id;
  const run = await findRun(store, { tenantId: other, automationId: small, runId });
  assert.is(run!.steps[1]!.status, 'waiting', 'it did not wait for all of the other tenant');
  // And neither sees the other's.
  assert.is(await verbs.find(tenantId, small), null);
  assert.is(await verbs.findRun(tenantId, small, runId), null);
  assert.is(await verbs.findRun(other, id, runId), null);
  await verbs.stop(tenantId, id);
});

test('limits: runs of one address, automations of one event', async () => {
  const { id, event } = await automation((name) =>
    chain(trigger(name), { key: 'pause', type: 'delay', config: { duration: '30 days' } }),
  );
  await events.send(tenantId, { event, email: 'full@recipient.test' });
  await multiply(id, OPEN_RUNS_MAX - 1);
  const refusal = await refusalOf(events.send(tenantId, { event, email: 'FULL@recipient.test' }));
  assert.match(refusal.message, /1000 runs of automations already/);
  await events.send(tenantId, { event, email: 'other@recipient.test' });
  await verbs.stop(tenantId, id);
  await settle();

  const request = { name: 'x', status: 'enabled' as const, ...chain(trigger('popular')) };
  for (let made = 0; made < TRIGGERED_MAX; made += 1) await verbs.create(tenantId, request);
  assert.match((await refusalOf(verbs.create(tenantId, request))).message, /disable one first/);
  const spare = await verbs.create(tenantId, { ...request, status: 'disabled' });
  await refusalOf(verbs.update(tenantId, spare, { status: 'enabled' }));
  assert.is((await verbs.find(tenantId, spare))!.status, 'disabled');
  // A trigger alone is an automation: its runs are over when they begin.
  await events.send(tenantId, { event: 'popular', email: 'p@recipient.test' });
  const { rows } = await store.pool.query<{ status: string; count: number }>(
    `select status, count(*)::integer as count from automation_run where address = $1 group by 1`,
    ['p@recipient.test'],
  );
  assert.equal(rows, [{ status: 'completed', count: TRIGGERED_MAX }]);
});

test('runs are forgotten 90 days after their end', async () => {
  const count = async (): Promise<number> => {
    const { rows } = await store.pool.query<{ count: number }>(
      // Copies have ids of any time.
      `select count(*)::integer from automation_run where completed_at is not null and id < $1`,
      [firstIdAt(Date.now() + 86_400_000)],
    );
    return rows[0]!.count;
  };
  await store.pool.query(
    'update automation_run set completed_at = now() where completed_at is not null',
  );
  const all = await count();
  assert.ok(all > 3);
  // As old as its end: the ids are of now.
  assert.is(await removeOld(store, 'automation_runs', new Date(Date.now() + 89 * 86_400_000)), 0);
  assert.is(await removeOld(store, 'automation_runs', new Date(Date.now() + 91 * 86_400_000)), all);
});

test.run();
