// Automations over the API and through the SDK: what is stored and shown, what is refused with which path, runs with their
// steps, an email that really arrives, and what another tenant sees.
import { Resend } from 'resend';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { startApp, until, type App } from '../support/app.ts';
import { secondTenant } from '../support/second-tenant.ts';
import { assertHeaders, assertRefused } from './envelope.ts';

const test = suite('automations API');
let app: App;
let resend: Resend;
let stranger: string;
test.before(async () => {
  app = await startApp();
  resend = new Resend(app.key, { baseUrl: app.base });
  ({ key: stranger } = await secondTenant(app));
});
test.after(() => app.stop());

function dataOf<T>(result: { data: T | null; error: unknown }): T {
  assert.is(result.error, null, JSON.stringify(result.error));
  return result.data!;
}
const notFound = { status: 404, code: 'not_found', says: /^Automation not found$/ };
const simple = (event: string, name = 'Simple') => ({
  name,
  steps: [
    { key: 'start', type: 'trigger' as const, config: { eventName: event } },
    { key: 'pause', type: 'delay' as const, config: { duration: '1 hour' } },
  ],
  connections: [{ from: 'start', to: 'pause' }],
});

test('it is made, shown, listed, changed, copied, stopped and removed', async () => {
  const { id } = dataOf(await resend.automations.create(simple('one')));
  const shown = dataOf(await resend.automations.get(id));
  assert.equal(shown, {
    object: 'automation',
    id,
    name: 'Simple',
    status: 'disabled',
    created_at: shown.created_at,
    updated_at: shown.created_at,
    steps: [
      { key: 'start', type: 'trigger', config: { event_name: 'one' } },
      { key: 'pause', type: 'delay', config: { duration: '1 hour' } },
    ],
    connections: [{ from: 'start', to: 'pause', type: 'default' }],
  });
  dataOf(await resend.automations.update(id, { name: 'Renamed', status: 'enabled' }));
  const lists = await Promise.all(
    (['enabled', 'disabled'] as const).map((status) => resend.automations.list({ status })),
  );
  const names = lists.map((list) => dataOf(list).data.map(({ name }) => name));
  assert.equal(names, [['Renamed'], []]);
  assert.is((await app.call('GET', '/automations?status=other')).status, 422);
  const half = await app.call('PATCH', `/automations/${id}`, { body: { steps: [] } });
  assertRefused(half, {
    status: 422,
    code: 'validation_error',
    says: /together/,
    paths: ['connections'],
  });

  const copied = await app.call('POST', `/automations/${id}/duplicate`);
  assert.is(copied.status, 201);
  assertHeaders(copied);
  const copy = dataOf(await resend.automations.get(String(copied.body['id'])));
  assert.equal([copy.name, copy.status, copy.steps.length], ['Renamed (copy)', 'disabled', 2]);
  assert.equal(dataOf(await resend.automations.stop(id)), {
    object: 'automation',
    id,
    status: 'disabled',
  });
  const removed = { object: 'automation', id, deleted: true };
  assert.equal(dataOf(await resend.automations.remove(id)), removed);
  assertRefused(await app.call('GET', `/automations/${id}`), notFound);
  assertRefused(await app.call('GET', `/automations/${id}/runs`), notFound);
  assert.is((await app.call('GET', '/automations/x')).status, 422);
});

test('all that is wrong is listed by its path', async () => {
  const answer = await app.call<{ details: { issues: { path: string }[] } }>(
    'POST',
    '/automations',
    {
      body: {
        name: '',
        steps: [
          { key: 'start', type: 'trigger', config: { event_name: '' } },
          { key: 'mail', type: 'send_email', config: {} },
        ],
        connections: [{ from: 'start', to: 'nowhere' }],
      },
    },
  );
  assert.is(answer.status, 422);
  assert.equal(
    answer.body.details.issues.map(({ path }) => path),
    ['name', 'connections.0.to', 'steps.0.config.event_name', 'steps.1.config.template'],
  );
  // Templates, segments and topics have to be there, and be one's own.
  const segment = dataOf(await resend.segments.create({ name: 'Mine' }));
  const topic = dataOf(await resend.topics.create({ name: 'News', defaultSubscription: 'opt_in' }));
  const template = dataOf(
    await resend.templates.create({ name: 'T', html: '<p>x</p>', alias: 'own' }),
  );
  const body = (ids: { segment: string; topic: string; template: string }) => ({
    name: 'Named',
    steps: [
      { key: 'start', type: 'trigger', config: { event_name: 'named' } },
      { key: 'sort', type: 'add_to_segment', config: { segment_id: ids.segment } },
      {
        key: 'mail',
        type: 'send_email',
        config: { template: { id: ids.template }, topic_id: ids.topic },
      },
    ],
    connections: [
      { from: 'start', to: 'sort' },
      { from: 'sort', to: 'mail' },
    ],
  });
  const mine = { segment: segment.id, topic: topic.id, template: template.id };
  for (const good of [mine, { ...mine, template: 'own', segment: segment.id.toUpperCase() }]) {
    assert.is((await app.call('POST', '/automations', { body: body(good) })).status, 201);
  }
  const none = { segment: newId(), topic: newId(), template: 'nobody' };
  const missing = await app.call<typeof answer.body>('POST', '/automations', { body: body(none) });
  const foreign = await app.call('POST', '/automations', { key: stranger, body: body(mine) });
  assert.equal([missing.status, foreign.status], [422, 422]);
  assert.equal(
    missing.body.details.issues.map(({ path }) => path),
    ['steps.1.config.segment_id', 'steps.2.config.template.id', 'steps.2.config.topic_id'],
  );
  assert.equal(foreign.body, missing.body);
});

test('an event starts a run, and its email arrives', async () => {
  const { id: templateId } = dataOf(
    await resend.templates.create({
      name: 'Welcome',
      from: 'Ada <ada@mailstead.test>',
      subject: 'Welcome {{{NAME}}}',
      html: '<p>{{{PLAN}}} <a href="{{{RESEND_UNSUBSCRIBE_URL}}}">no more</a></p>',
      variables: [
        { key: 'NAME', type: 'string' },
        { key: 'PLAN', type: 'string' },
      ],
    }),
  );
  dataOf(await resend.templates.publish(templateId));
  const contact = dataOf(
    await resend.contacts.create({ email: 'bea@recipient.test', firstName: 'Bea' }),
  );
  const automation = dataOf(
    await resend.automations.create({
      name: 'Welcome',
      status: 'enabled',
      steps: [
        { key: 'start', type: 'trigger', config: { eventName: 'joined' } },
        {
          key: 'mail',
          type: 'send_email',
          config: {
            template: {
              id: templateId,
              variables: { NAME: { var: 'contact.first_name' }, PLAN: { var: 'event.plan' } },
            },
            replyTo: 'answers@mailstead.test',
          },
        },
        { key: 'wait', type: 'wait_for_event', config: { eventName: 'paid' } },
      ],
      connections: [
        { from: 'start', to: 'mail' },
        { from: 'mail', to: 'wait' },
      ],
    }),
  );
  const automationId = automation.id;
  dataOf(
    await resend.events.send({ event: 'joined', contactId: contact.id, payload: { plan: 'gold' } }),
  );
  const [run] = dataOf(await resend.automations.runs.list({ automationId })).data;
  const runId = run!.id;
  const read = async () => dataOf(await resend.automations.runs.get({ automationId, runId }));
  const waiting = await until(read, ({ steps }) => steps[2]!.status === 'waiting');
  assert.equal(
    [waiting.object, waiting.status, waiting.completed_at],
    ['automation_run', 'running', null],
  );
  const emailId = String(waiting.steps[1]!.output?.['email_id']);
  const email = await app.untilEvent(emailId, 'delivered');
  assert.equal(
    [email['subject'], email['to'], email['reply_to']],
    ['Welcome Bea', ['bea@recipient.test'], ['answers@mailstead.test']],
  );
  const [, link = ''] = /href="([^"]+)"/.exec(String(email['html'])) ?? [];
  const page = await fetch(link);
  assert.is(page.status, 200, link);

  dataOf(await resend.events.send({ event: 'paid', email: 'bea@recipient.test' }));
  const done = await until(read, ({ status }) => status === 'completed');
  for (const step of done.steps) assert.is(step.status, 'completed');

  const bogus = newId();
  for (const path of [
    `/automations/${automationId}/runs/${bogus}`,
    `/automations/${bogus}/runs/${runId}`,
  ]) {
    const says = /^Automation run not found$/;
    assertRefused(await app.call('GET', path), { status: 404, code: 'not_found', says });
  }
  const list = async (query: string): Promise<unknown[]> => {
    const path = `/automations/${automationId}/runs?${query}`;
    const answer = await app.call<{ data: { id: string }[] }>('GET', path);
    assert.is(answer.status, 200, JSON.stringify(answer.body));
    return answer.body.data.map(({ id }) => id);
  };
  assert.equal(await list('status=failed,completed'), [runId]);
  assert.equal(await list('status=failed&status=completed'), [runId]);
  assert.equal(await list('status=running'), []);
  const wrong = await app.call('GET', `/automations/${automationId}/runs?status=done`);
  assertRefused(wrong, {
    status: 422,
    code: 'validation_error',
    says: /running, completed/,
    paths: ['status'],
  });
});

test('another tenant can do nothing with it', async () => {
  const { id } = dataOf(await resend.automations.create({ ...simple('mine'), status: 'enabled' }));
  dataOf(await resend.events.send({ event: 'mine', email: 'x@recipient.test' }));
  const [run] = dataOf(await resend.automations.runs.list({ automationId: id })).data;
  const asked = [
    ['GET', `/automations/${id}`],
    ['PATCH', `/automations/${id}`],
    ['DELETE', `/automations/${id}`],
    ['POST', `/automations/${id}/stop`],
    ['POST', `/automations/${id}/duplicate`],
    ['GET', `/automations/${id}/runs`],
  ] as const;
  for (const [method, path] of asked) {
    const body = method === 'PATCH' ? { body: { name: 'taken over' } } : {};
    assertRefused(await app.call(method, path, { key: stranger, ...body }), notFound);
  }
  const path = `/automations/${id}/runs/${run!.id}`;
  assert.is((await app.call('GET', path, { key: stranger })).status, 404);
  // Its event of the same name starts nothing here.
  const event = { event: 'mine', email: 'y@recipient.test' };
  assert.is((await app.call('POST', '/events/send', { key: stranger, body: event })).status, 202);
  assert.is(dataOf(await resend.automations.runs.list({ automationId: id })).data.length, 1);
  assert.is(dataOf(await resend.automations.get(id)).status, 'enabled');
  const list = await app.call<{ data: unknown[] }>('GET', '/automations', { key: stranger });
  assert.equal(list.body.data, []);
});

test.run();
