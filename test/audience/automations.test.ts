// Automations under a clock of the test: delays and waits that outlive their runner, steps that are done once whoever runs
// them and whenever he falls down, branches, and people who are no contacts. Emails are really accepted.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createAutomationRunner } from '../../src/audience/automation-runner.ts';
import type { AutomationRunner } from '../../src/audience/automation-runner.ts';
import { findContact } from '../../src/audience/contacts.ts';
import { createSegmentVerbs } from '../../src/audience/segments.ts';
import { newId } from '../../src/store/id.ts';
import type { Store } from '../../src/store/orm.ts';
import { silent } from '../support/queue.ts';
import {
  openAutomations,
  chain,
  trigger,
  MINUTE_MS,
  HOUR_MS,
  DAY_MS,
  type Fields,
  type Steps,
} from '../support/automations.ts';

const test = suite('automations');
const bench = await openAutomations();
const {
  automation,
  contact,
  contacts,
  emailsTo,
  events,
  mail,
  mailStep,
  now,
  onlyState,
  pass,
  plainId,
  settle,
  states,
  store,
  templateId,
  tenantId,
} = bench;
test.after(() => bench.stop());

test('an hour passes, an event is waited for, and the runner is another one each time', async () => {
  const { id, event } = await automation((name) => ({
    steps: [
      trigger(name),
      { key: 'pause', type: 'delay', config: { duration: '1 hour' } },
      mailStep('welcome', {
        template: { id: 'welcome', variables: { PLAN: { var: 'event.plan' } } },
      }),
      {
        key: 'paid',
        type: 'wait_for_event',
        config: { event_name: `${name}.paid`, timeout: '3 days' },
      },
      mailStep('thanks', {
        template: { id: templateId, variables: { PLAN: { var: `wait_events.${name}.paid.plan` } } },
      }),
      mailStep('remind'),
    ],
    connections: [
      { from: 'start', to: 'pause' },
      { from: 'pause', to: 'welcome' },
      { from: 'welcome', to: 'paid' },
      { from: 'paid', to: 'thanks', type: 'event_received' },
      { from: 'paid', to: 'remind', type: 'timeout' },
    ],
  }));
  const [payer, idler] = [await contact(), await contact()];
  for (const { id: contactId } of [payer, idler]) {
    await events.send(tenantId, { event, contact_id: contactId, payload: { plan: 'gold' } });
  }
  await settle();
  pass(HOUR_MS - 1);
  await settle();
  assert.equal(
    (await states(id)).map(({ steps }) => steps['pause']),
    ['waiting', 'waiting'],
  );
  assert.is((await emailsTo(payer.email)).length, 0);

  pass(1);
  const restarted = createAutomationRunner({ store, log: silent, now, ...mail });
  await settle(restarted);
  for (const { email } of [payer, idler]) {
    const [welcome, ...others] = await emailsTo(email);
    assert.match(welcome!.html, 'you gold https://m.test/unsubscribe/');
    assert.is(others.length, 0);
  }

  pass(DAY_MS);
  await events.send(tenantId, {
    event: `${event}.paid`,
    email: payer.email.toUpperCase(),
    payload: { plan: 'platinum' },
  });
  await settle(createAutomationRunner({ store, log: silent, now, ...mail }));
  assert.match((await emailsTo(payer.email))[1]!.html, 'you platinum');
  pass(2 * DAY_MS - 1);
  await settle(restarted);
  assert.is((await emailsTo(idler.email)).length, 1);
  pass(1);
  await settle(restarted);
  assert.is((await emailsTo(idler.email)).length, 2);
  // Too late, and nobody waits any more.
  await events.send(tenantId, { event: `${event}.paid`, contact_id: idler.id });
  await settle();

  const [second, first] = await states(id);
  const common = {
    start: 'completed',
    pause: 'completed',
    welcome: 'completed',
    paid: 'completed',
  };
  assert.equal(first!.steps, { ...common, thanks: 'completed', remind: 'skipped' });
  assert.equal(second!.steps, { ...common, thanks: 'skipped', remind: 'completed' });
  assert.equal((first!.all['paid'] as Fields)['output'], {
    event: `${event}.paid`,
    payload: { plan: 'platinum' },
  });
  assert.equal((second!.all['paid'] as Fields)['output'], { timed_out: true });
  assert.equal([first!.status, second!.status], ['completed', 'completed']);
});

test('an event is waited for by its contact only, and only when it passes the filter', async () => {
  const { id, event } = await automation((name) =>
    ((steps: Steps) => ({
      steps,
      connections: [
        { from: 'start', to: 'wait' },
        { from: 'wait', to: 'note', type: 'event_received' as const },
      ],
    }))([
      trigger(name),
      {
        key: 'wait',
        type: 'wait_for_event',
        config: {
          event_name: 'bought',
          filter_rule: { type: 'rule', field: 'event.amount', operator: 'gte', value: 10 },
        },
      },
      {
        key: 'note',
        type: 'contact_update',
        config: { first_name: { var: 'wait_events.bought.by' } },
      },
    ]),
  );
  const [buyer, other] = [await contact(), await contact()];
  await events.send(tenantId, { event, contact_id: buyer.id });
  // It waits from the beginning, whenever a runner comes by.
  assert.is((await onlyState(id)).steps['wait'], 'waiting');
  await settle();
  await events.send(tenantId, { event: 'bought', contact_id: other.id, payload: { amount: 99 } });
  await events.send(tenantId, { event: 'bought', contact_id: buyer.id, payload: { amount: 9 } });
  await settle();
  assert.is((await onlyState(id)).steps['wait'], 'waiting');
  const before = bench.nudges();
  await events.send(tenantId, {
    event: 'bought',
    email: buyer.email,
    payload: { amount: 10, by: 'Bea' },
  });
  assert.is(bench.nudges(), before + 1);
  await settle();
  assert.is((await onlyState(id)).status, 'completed');
  assert.is((await findContact(store.pool, tenantId, buyer.id))!.firstName, 'Bea');
  // Without a time of its own a wait ends some day; without a way on for that, so does the run.
  await events.send(tenantId, { event, contact_id: buyer.id });
  await settle();
  pass(89 * DAY_MS);
  await settle();
  assert.is((await states(id))[0]!.status, 'running');
  pass(DAY_MS);
  await settle();
  assert.equal((await states(id))[0]!.steps, {
    start: 'completed',
    wait: 'completed',
    note: 'skipped',
  });
});

test('two runners at once do every step once', async () => {
  const { id, event } = await automation((name) =>
    chain(trigger(name), mailStep('one'), mailStep('two'), {
      key: 'note',
      type: 'contact_update',
      config: { last_name: 'Done' },
    }),
  );
  const people = await Promise.all(Array.from({ length: 30 }, () => contact()));
  for (const { id: contactId } of people)
    await events.send(tenantId, { event, contact_id: contactId });
  const second = createAutomationRunner({ store, log: silent, now, ...mail });
  await Promise.all([settle(), settle(second), settle(), settle(second)]);
  await settle();
  const all = await states(id);
  assert.is(all.length, people.length);
  for (const { status } of all) assert.is(status, 'completed');
  for (const { email } of people) assert.is((await emailsTo(email)).length, 2);
});

test('a crash after an email was accepted sends no second one', async () => {
  const { id, event } = await automation((name) =>
    chain(
      trigger(name),
      mailStep('mail', {
        template: { id: templateId, variables: { NAME: { var: 'contact.first_name' } } },
      }),
      { key: 'note', type: 'contact_update', config: { last_name: 'Mailed' } },
    ),
  );
  const crashing = (): AutomationRunner => {
    let isDown = false;
    const broken: Store = {
      ...store,
      transact: (work) =>
        isDown
          ? Promise.reject(Object.assign(new Error('gone'), { code: 'ECONNRESET' }))
          : store.transact(work),
    };
    return createAutomationRunner({
      store: broken,
      log: silent,
      now,
      ...mail,
      async sendEmail(...send) {
        const emailId = await mail.sendEmail(...send);
        isDown = true;
        return emailId;
      },
    });
  };
  const soon = await contact({ first_name: 'Ann' });
  await events.send(tenantId, { event, contact_id: soon.id });
  await crashing()
    .turn()
    .then(
      () => assert.unreachable(),
      (error: Error) => assert.is(error.message, 'gone'),
    );
  assert.is((await onlyState(id)).steps['mail'], 'running');
  // The contact is another one now: the email that was begun is not.
  await contacts.update(tenantId, soon.id, { first_name: 'Zoe' });
  await settle();
  assert.is((await onlyState(id)).steps['mail'], 'running', 'nobody else takes it at once');
  pass(MINUTE_MS);
  await settle();
  const done = await onlyState(id);
  const [email, ...others] = await emailsTo(soon.email);
  assert.is(others.length, 0);
  assert.match(email!.html, 'Ann');
  assert.equal((done.all['mail'] as Fields)['output'], { email_id: email!.id });
  assert.is(done.status, 'completed');

  // After the time for which answers are kept, nobody can tell: it is said, and not sent.
  const late = await contact();
  await events.send(tenantId, { event, contact_id: late.id });
  await crashing()
    .turn()
    .catch(() => undefined);
  pass(DAY_MS);
  await settle();
  const [lost] = await states(id);
  assert.equal(
    [lost!.status, lost!.steps],
    ['failed', { start: 'completed', mail: 'failed', note: 'skipped' }],
  );
  assert.is(((lost!.all['mail'] as Fields)['error'] as Fields)['code'], 'outcome_unknown');
  assert.is((await emailsTo(late.email)).length, 1);
});

test('a refused email fails its run and says why; one that falls down is tried again, and not for ever', async () => {
  const { id, event } = await automation((name) =>
    chain(
      trigger(name),
      mailStep('mail', { from: 'eve@elsewhere.test', template: { id: plainId } }),
      mailStep('more'),
    ),
  );
  await events.send(tenantId, { event, email: 'r@recipient.test' });
  await settle();
  const refused = await onlyState(id);
  assert.equal([refused.status, refused.steps['more']], ['failed', 'skipped']);
  const error = (refused.all['mail'] as Fields)['error'] as Fields;
  assert.is(error['code'], 'domain_not_verified');
  assert.match(String(error['message']), /elsewhere\.test is not verified/);

  let tries = 0;
  const falling = createAutomationRunner({
    store,
    log: silent,
    now,
    ...mail,
    sendEmail: () => {
      tries += 1;
      return Promise.reject(new Error('a bug of ours'));
    },
  });
  await events.send(tenantId, { event, email: 'f@recipient.test' });
  for (let turn = 0; turn < 40; turn += 1) {
    await settle(falling);
    pass(10 * MINUTE_MS);
  }
  const [fallen] = await states(id);
  assert.equal([tries, fallen!.status], [10, 'failed']);
  assert.not.match(JSON.stringify(fallen!.all['mail']), 'bug of ours');
});

test('branches: one is taken, what cannot be reached any more is skipped at once', async () => {
  const { id, event } = await automation((name) => ({
    steps: [
      trigger(name),
      {
        key: 'check',
        type: 'condition',
        config: {
          type: 'and',
          rules: [
            { type: 'rule', field: 'event.plan', operator: 'eq', value: 'gold' },
            {
              type: 'rule',
              field: 'contact.properties.city',
              operator: 'starts_with',
              value: 'Ber',
            },
          ],
        },
      },
      { key: 'gold', type: 'delay', config: { duration: '5 min' } },
      { key: 'plain', type: 'delay', config: { duration: '5 min' } },
      { key: 'extra', type: 'contact_delete' },
      { key: 'end', type: 'contact_update', config: { unsubscribed: true, last_name: null } },
    ],
    connections: [
      { from: 'start', to: 'check' },
      { from: 'check', to: 'gold', type: 'condition_met' },
      { from: 'check', to: 'plain', type: 'condition_not_met' },
      { from: 'plain', to: 'extra' },
      { from: 'gold', to: 'end' },
      { from: 'extra', to: 'end' },
    ],
  }));
  const one = await contact({ last_name: 'Old', properties: { city: 'Berlin' } });
  await events.send(tenantId, { event, contact_id: one.id, payload: { plan: 'gold' } });
  await settle();
  assert.equal((await onlyState(id)).steps, {
    start: 'completed',
    check: 'completed',
    gold: 'waiting',
    plain: 'skipped',
    extra: 'skipped',
    end: 'pending',
  });
  pass(5 * MINUTE_MS);
  await settle();
  assert.is((await onlyState(id)).status, 'completed');
  const after = await findContact(store.pool, tenantId, one.id);
  assert.equal([after!.unsubscribed, after!.lastName], [true, null]);

  const other = await contact({ properties: { city: 'Bern' } });
  await events.send(tenantId, { event, contact_id: other.id, payload: { plan: 'tin' } });
  await settle();
  pass(5 * MINUTE_MS);
  await settle();
  const [deleted] = await states(id);
  assert.is(await findContact(store.pool, tenantId, other.id), null);
  assert.equal(
    [deleted!.status, deleted!.steps['extra'], deleted!.steps['end']],
    ['completed', 'completed', 'skipped'],
  );
});

test('who is no contact becomes one; what is done to contacts that went is passed over', async () => {
  const segments = createSegmentVerbs(store, now);
  const segmentId = await segments.create(tenantId, { name: 'Sorted' });
  await store.pool.query(
    `insert into webhook (tenant_id, id, endpoint, events, status, secret_sealed, created_at, updated_at)
     values ($1, $2, 'https://hooks.test/', '{contact.created,contact.updated}', 'enabled', '', now(), now())`,
    [tenantId, newId()],
  );
  const { id, event } = await automation((name) =>
    chain(
      trigger(name),
      { key: 'sort', type: 'add_to_segment', config: { segment_id: segmentId } },
      { key: 'note', type: 'contact_update', config: { first_name: { var: 'event.name' } } },
      mailStep('mail', { template: { id: plainId } }),
    ),
  );
  await events.send(tenantId, { event, email: 'Nobody@Recipient.test', payload: { name: 'N' } });
  await settle();
  const stranger = await onlyState(id);
  assert.equal(
    [stranger.status, stranger.steps],
    ['completed', { start: 'completed', sort: 'completed', note: 'completed', mail: 'completed' }],
  );
  const made = await findContact(store.pool, tenantId, 'nobody@recipient.test');
  assert.equal([made!.email, made!.firstName], ['Nobody@Recipient.test', 'N']);
  assert.is((await emailsTo(made!.email)).length, 1);
  const { rows: told } = await store.pool.query<{ type: string }>(
    'select type from outbox where tenant_id = $1 and subject_id = $2 order by id',
    [tenantId, made!.id],
  );
  assert.equal(
    told.map(({ type }) => type),
    ['contact.created', 'contact.updated', 'contact.updated'],
  );

  // One that was just made has a link to unsubscribe, too; the address is one contact, however it is written.
  const { id: linkedId, event: linked } = await automation((name) =>
    chain(trigger(name), mailStep('mail')),
  );
  await events.send(tenantId, { event: linked, email: 'nobody@recipient.test' });
  await events.send(tenantId, { event: linked, email: 'newcomer@recipient.test' });
  await settle();
  assert.equal(
    (await states(linkedId)).map(({ status }) => status),
    ['completed', 'completed'],
  );
  for (const address of [made!.email, 'newcomer@recipient.test']) {
    assert.match((await emailsTo(address)).at(-1)!.html, 'https://m.test/unsubscribe/');
  }
  const { rows: contactsMade } = await store.pool.query(
    `select 1 from contact where tenant_id = $1 and address = 'nobody@recipient.test'`,
    [tenantId],
  );
  assert.is(contactsMade.length, 1);

  // Whoever unsubscribed gets no mail of it; the rest is done.
  const shy = await contact({ unsubscribed: true });
  await events.send(tenantId, { event, contact_id: shy.id, payload: { name: 'Shy' } });
  await settle();
  const [unsubscribed] = await states(id);
  assert.equal(unsubscribed!.steps, {
    start: 'completed',
    sort: 'completed',
    note: 'completed',
    mail: 'skipped',
  });
  assert.is((await findContact(store.pool, tenantId, shy.id))!.firstName, 'Shy');
  assert.is((await emailsTo(shy.email)).length, 0);
  const { rows } = await store.pool.query('select 1 from segment_contact where contact_id = $1', [
    shy.id,
  ]);
  assert.is(rows.length, 1);

  // A value of the wrong type, and a segment that went, fail the run.
  await events.send(tenantId, { event, contact_id: shy.id, payload: { name: 7 } });
  await settle();
  const [wrong] = await states(id);
  assert.match(JSON.stringify(wrong!.all['note']), 'The value for `first_name` must be a string');
  await segments.remove(tenantId, segmentId);
  await events.send(tenantId, { event, contact_id: shy.id });
  await settle();
  assert.match(
    JSON.stringify((await states(id))[0]!.all['sort']),
    'The segment is not there any more',
  );

  // A contact that was removed meanwhile is not written to.
  const { id: slowId, event: slow } = await automation((name) =>
    chain(
      trigger(name),
      { key: 'pause', type: 'delay', config: { duration: '1h' } },
      mailStep('mail'),
    ),
  );
  const gone = await contact();
  await events.send(tenantId, { event: slow, contact_id: gone.id });
  await settle();
  await contacts.remove(tenantId, gone.id);
  pass(HOUR_MS);
  await settle();
  assert.equal(((await onlyState(slowId)).all['mail'] as Fields)['output'], {
    reason: 'contact_deleted',
  });
  assert.is((await emailsTo(gone.email)).length, 0);
});

test.run();
