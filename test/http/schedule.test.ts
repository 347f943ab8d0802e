// An email that waits for its time: accepted, shown, moved, canceled, sent; and what is refused of one that does not
// wait any more, or that is not the caller's.
import { randomUUID } from 'node:crypto';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type Answer, type App } from '../support/app.ts';
import { secondTenant } from '../support/second-tenant.ts';
import { assertHeaders, assertInstant, assertRefused } from './envelope.ts';

interface Timeline {
  events: { type: string; detail: Record<string, unknown> }[];
  recipients: { state: string }[];
}

const test = suite('schedule');
let app: App;
let stranger: string;
test.before(async () => {
  app = await startApp();
  stranger = (await secondTenant(app)).key;
});
test.after(() => app.stop());

const HOUR_MS = 3_600_000;
const inMs = (ms: number): string => new Date(Date.now() + ms).toISOString();
const read = async (id: string): Promise<Record<string, unknown>> =>
  (await app.call('GET', `/emails/${id}`)).body;
const timelineOf = async (id: string): Promise<Timeline> =>
  (await app.call<Timeline>('GET', `/emails/${id}/timeline`)).body;
const patch = (id: string, body: unknown, path = '/emails'): Promise<Answer> =>
  app.call('PATCH', `${path}/${id}`, { body });
const cancel = (id: string, key: string = app.key, path = '/emails'): Promise<Answer> =>
  app.call('POST', `${path}/${id}/cancel`, { key });
const notScheduled = { status: 422, code: 'email_not_scheduled', says: /scheduled/ } as const;

test('a scheduled email waits, and shows for when', async () => {
  const at = inMs(HOUR_MS);
  const id = await app.send({ subject: 'Waits', scheduled_at: at });
  const email = await read(id);
  assert.is(email['last_event'], 'scheduled');
  assert.is(email['status'], 'scheduled');
  assert.is(email['scheduled_at'], at);
  assertInstant(email['scheduled_at']);
  const { events, recipients } = await timelineOf(id);
  assert.equal(
    events.map(({ type }) => type),
    ['accepted'],
  );
  assert.is(events[0]?.detail['scheduled_at'], at);
  assert.equal(
    recipients.map(({ state }) => state),
    ['scheduled'],
  );
  const list = await app.call<{ data: Record<string, unknown>[] }>('GET', '/emails?limit=1');
  assert.is(list.body.data[0]?.['scheduled_at'], at);
  assert.is(list.body.data[0]?.['last_event'], 'scheduled');
});

test('a relative time counts from acceptance', async () => {
  const before = Date.now();
  const id = await app.send({ scheduled_at: 'in 90 minutes' });
  const at = Date.parse(String((await read(id))['scheduled_at']));
  assert.ok(at >= before + 1.5 * HOUR_MS && at <= Date.now() + 1.5 * HOUR_MS);
});

test('an offset is an offset', async () => {
  const at = new Date(Math.ceil(Date.now() / HOUR_MS + 5) * HOUR_MS);
  const local = new Date(at.getTime() + 2 * HOUR_MS).toISOString().replace('.000Z', '+02:00');
  assert.is(
    (await read(await app.send({ scheduled_at: local })))['scheduled_at'],
    at.toISOString(),
  );
});

test('when its time has come it is sent, once', async () => {
  const id = await app.send({ subject: 'On time', scheduled_at: inMs(1_500) });
  assert.is((await read(id))['last_event'], 'scheduled');
  const email = await app.untilEvent(id, 'delivered');
  assert.ok(
    Date.parse(String(email['provider_last_attempted_at'])) >=
      Date.parse(String(email['scheduled_at'])),
  );
  assert.is((await timelineOf(id)).events.filter(({ type }) => type === 'delivered').length, 1);
  assertRefused(await cancel(id), notScheduled);
  assertRefused(await patch(id, { scheduled_at: 'in 1 hour' }), notScheduled);
});

test('it moves to another time, at both mounts, and back to soon', async () => {
  const id = await app.send({ scheduled_at: 'in 1 day' });
  for (const [path, ms] of [
    ['/emails', 2 * HOUR_MS],
    ['/api/emails', 3 * HOUR_MS],
  ] as const) {
    const at = inMs(ms);
    const moved = await patch(id, { scheduled_at: at }, path);
    assert.is(moved.status, 200);
    assertHeaders(moved);
    assert.equal(moved.body, { object: 'email', id });
    assert.is((await read(id))['scheduled_at'], at);
  }
  assert.is((await read(id))['last_event'], 'scheduled');
  assert.is((await patch(id.toUpperCase(), { scheduled_at: inMs(1_000) })).status, 200);
  await app.untilEvent(id, 'delivered');
});

test('a canceled email is never sent, and stays canceled', async () => {
  const at = inMs(1_000);
  const id = await app.send({ subject: 'Canceled', scheduled_at: at });
  const canceled = await cancel(id, app.key, '/api/emails');
  assert.is(canceled.status, 200);
  assertHeaders(canceled);
  assert.equal(canceled.body, { object: 'email', id });
  // Another one that was to be sent later is delivered: its time has passed.
  await app.untilEvent(await app.send({ scheduled_at: inMs(1_500) }), 'delivered');
  const email = await read(id);
  assert.is(email['last_event'], 'canceled');
  assert.is(email['scheduled_at'], at, 'what it was scheduled for stays');
  const { events, recipients } = await timelineOf(id);
  assert.equal(
    events.map(({ type }) => type),
    ['accepted', 'canceled'],
  );
  assert.equal(
    recipients.map(({ state }) => state),
    ['canceled'],
  );
  assertRefused(await cancel(id), notScheduled);
  assertRefused(await patch(id, { scheduled_at: 'in 1 hour' }), notScheduled);
  assert.is((await read(id))['last_event'], 'canceled');
});

test('of many who cancel at once one succeeds', async () => {
  const id = await app.send({ scheduled_at: 'in 1 hour' });
  const answers = await Promise.all(Array.from({ length: 10 }, () => cancel(id)));
  assert.is(answers.filter(({ status }) => status === 200).length, 1);
  for (const answer of answers) if (answer.status !== 200) assertRefused(answer, notScheduled);
});

test('what was sent at once has no schedule to change', async () => {
  const id = await app.send();
  await app.untilEvent(id, 'delivered');
  assertRefused(await cancel(id), notScheduled);
  assertRefused(await patch(id, { scheduled_at: 'in 1 hour' }), notScheduled);
});

test('a bad time changes nothing', async () => {
  const at = inMs(HOUR_MS);
  const id = await app.send({ scheduled_at: at });
  for (const [body, code] of [
    [{}, 'missing_required_field'],
    [{ scheduled_at: null }, 'missing_required_field'],
    [{ subject: 'Another' }, 'missing_required_field'],
    [{ scheduled_at: 'soon' }, 'validation_error'],
    [{ scheduled_at: inMs(-1_000) }, 'validation_error'],
    [{ scheduled_at: 'in 31 days' }, 'validation_error'],
    [{ scheduled_at: 5 }, 'validation_error'],
    [{ scheduled_at: ['in 1 hour'] }, 'validation_error'],
  ] as const) {
    assertRefused(await patch(id, body), { status: 422, code, paths: ['scheduled_at'] });
  }
  assertRefused(await patch(id, '{'), { status: 400, code: 'invalid_json' });
  assertRefused(await patch(id, []), { status: 422, code: 'validation_error', paths: ['body'] });
  assert.is((await read(id))['scheduled_at'], at);
});

test('foreign and missing ids are the same, malformed ones are told', async () => {
  const id = await app.send({ scheduled_at: 'in 1 hour' });
  const missing = randomUUID();
  const body = { scheduled_at: 'in 2 hours' };
  const answers = [
    await cancel(id, stranger),
    await cancel(missing),
    await app.call('PATCH', `/emails/${id}`, { body, key: stranger }),
    await patch(missing, body),
  ];
  for (const answer of answers) {
    assertRefused(answer, { status: 404, code: 'not_found' });
    assert.equal(answer.body, answers[0]?.body);
  }
  assert.is((await read(id))['last_event'], 'scheduled');
  for (const answer of [await cancel('x'), await patch('x', body)]) {
    assertRefused(answer, { status: 422, code: 'invalid_parameter', paths: ['id'] });
  }
  assertRefused(await cancel(id, 're_00000000_000000000000000000000000'), {
    status: 401,
    code: 'invalid_api_key',
  });
});

test('a scheduled email with large files is canceled with them', async () => {
  const content = Buffer.alloc(300_000, 'large ').toString('base64');
  const id = await app.send({
    scheduled_at: 'in 1 hour',
    attachments: [{ filename: 'a.bin', content }],
  });
  assert.is((await cancel(id)).status, 200);
  await until(
    () => read(id),
    (email) => email['last_event'] === 'canceled',
  );
});

test('nothing was logged', () => assert.equal(app.complaints, []));

test.run();
