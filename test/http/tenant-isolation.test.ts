// For every operation of the API that takes an id: another tenant's id is answered exactly as one that
// nobody has, and nothing of the other tenant changes. The operations come from the generated OpenAPI
// document, so a new one without a sample here fails.
import { readFileSync } from 'node:fs';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { startApp, until, type Answer, type App } from '../support/app.ts';
import { receivingDomain } from '../support/receiving-domain.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { send as sendMail } from '../support/sink-session.ts';

interface Document {
  readonly paths: Readonly<Record<string, Readonly<Record<string, unknown>>>>;
}
const document = JSON.parse(
  readFileSync(new URL('../../docs/openapi.json', import.meta.url), 'utf8'),
) as Document;
const operations = Object.entries(document.paths)
  .filter(([path]) => path.includes('{'))
  .flatMap(([path, methods]) => Object.keys(methods).map((method) => ({ path, method })));

/** A good body for an operation that needs one. */
const BODIES: Readonly<Record<string, unknown>> = {
  'patch /emails/{id}': { scheduled_at: 'in 2 hours' },
  'post /emails/{id}/share': {},
  'post /emails/{id}/release': { include_unknown: true },
  'patch /templates/{id}': { name: 'taken over' },
  'patch /domains/{id}': { open_tracking: true },
  'patch /api-keys/{id}': { name: 'taken over' },
  'patch /topics/{id}': { name: 'taken over' },
  'patch /webhooks/{id}': { status: 'disabled' },
  'patch /events/{identifier}': { schema: null },
  'patch /automations/{id}': { name: 'taken over' },
  'patch /contacts/{id}': { first_name: 'taken over' },
  'patch /contacts/{id}/topics': [],
  'patch /contact-properties/{id}': { fallback_value: 'taken over' },
  'patch /segments/{id}': { name: 'taken over' },
  'patch /broadcasts/{id}': { name: 'taken over' },
  'patch /audiences/{id}': { name: 'taken over' },
  'post /audiences/{id}/contacts': { email: 'taken-over@recipient.test' },
  'patch /audiences/{id}/contacts/{contact_id}': { first_name: 'taken over' },
  'patch /receiving/routes/{id}': { local_part: 'taken-over' },
  'patch /receiving/forwarding-rules/{id}': { status: 'disabled' },
};

const test = suite<{ app: App; key: string; ids: Record<string, readonly string[]> }>('isolation');

test.before(async (context) => {
  const app = (context.app = await startApp());
  context.key = (await secondTenant(app)).key;
  const made = async (path: string, body: unknown): Promise<string> => {
    const answer = await app.call<{ id: string }>('POST', path, { body });
    assert.ok(answer.status < 300, `${path}: ${JSON.stringify(answer.body)}`);
    return answer.body.id;
  };
  const note = Buffer.from('a note').toString('base64');
  const email = await app.send({
    scheduled_at: 'in 1 hour',
    attachments: [{ filename: 'a.txt', content: note }],
  });
  const parts = await app.call<{ data: { id: string }[] }>('GET', `/emails/${email}/attachments`);
  await sendMail(app.appliance.mxPort!, {
    to: ['x@mailstead.test'],
    raw: [
      'Subject: x',
      'Content-Type: multipart/mixed; boundary=b',
      '',
      '--b',
      'Content-Disposition: attachment; filename=a.txt',
      '',
      'a',
      '--b--',
      '',
    ].join('\r\n'),
  });
  const received = await app.call<{ data: { id: string; attachments: { id: string }[] }[] }>(
    'GET',
    '/emails/receiving',
  );
  const inbound = received.body.data[0]!;
  const logs = await until(
    () => app.call<{ data: { id: string }[] }>('GET', '/logs'),
    ({ body }) => body.data.length > 0,
  );
  const claim = await app.call<{ domain_id: string }>('POST', '/domains/claim', {
    body: { name: 'claimed.test' },
  });
  const routeId = await made('/receiving/routes', {
    domain_id: await receivingDomain(app, 'routed.test'),
    type: 'exact',
    local_part: 'mine',
  });
  const segment = await made('/segments', { name: 'Mine' });
  const contact = await made('/contacts', { email: 'mine@recipient.test', segments: [segment] });
  const automation = await made('/automations', {
    name: 'Mine',
    status: 'enabled',
    steps: [{ key: 'start', type: 'trigger', config: { event_name: 'isolated' } }],
    connections: [],
  });
  await app.call('POST', '/events/send', {
    body: { event: 'isolated', email: 'a@recipient.test' },
  });
  const runs = await app.call<{ data: { id: string }[] }>('GET', `/automations/${automation}/runs`);
  const run = runs.body.data[0]!.id;
  const webhookId = await made('/webhooks', {
    endpoint: 'http://127.0.0.1:1024/',
    events: ['email.scheduled'],
  });
  const webhookEventId = newId();
  await onDatabase(app, (pool) =>
    pool.query(
      `insert into webhook_event (tenant_id, webhook_id, id, type, payload, status, created_at)
        select tenant_id, id, $1, 'email.scheduled', '{}', 'failed', now() from webhook`,
      [webhookEventId],
    ),
  );
  const file = new FormData();
  file.append('file', new Blob(['email\n']));
  const imported = await fetch(`${app.base}/contacts/imports`, {
    method: 'POST',
    body: file,
    headers: { authorization: `Bearer ${app.key}` },
  });
  context.ids = {
    '/contacts/imports': [((await imported.json()) as { id: string }).id],
    '/oauth/grants': [newId()], // there are none
    '/receiving/routes': [routeId],
    '/receiving/replays': [await made('/receiving/replays', { ids: [inbound.id] })],
    '/receiving/forwarding-rules': [
      await made('/receiving/forwarding-rules', {
        route_id: routeId,
        destinations: ['a@recipient.test'],
      }),
    ],
    '/emails/receiving': [inbound.id, inbound.attachments[0]!.id],
    '/emails': [email, parts.body.data[0]!.id],
    '/templates': [await made('/templates', { name: 'Mine', alias: 'mine', html: '<p>x</p>' })],
    '/domains/{id}/claim': [claim.body.domain_id],
    '/domains': [await made('/domains', { name: 'isolated.test' })],
    '/api-keys': [await made('/api-keys', { name: 'mine' })],
    '/logs': [logs.body.data[0]!.id],
    '/suppressions': [await made('/suppressions', { email: 'gone@recipient.test' })],
    '/events': [await made('/events', { name: 'mine' })],
    '/automations': [automation, run],
    '/topics': [await made('/topics', { name: 'News', default_subscription: 'opt_in' })],
    '/contact-properties': [await made('/contact-properties', { key: 'mine', type: 'string' })],
    '/segments': [segment],
    '/broadcasts': [
      await made('/broadcasts', { segment_id: segment, from: 'a@mailstead.test', subject: 'Mine' }),
    ],
    '/audiences': [segment, contact],
    '/contacts': [contact, segment],
    '/webhooks': [webhookId, `msg_${webhookEventId.replaceAll('-', '')}`],
    '/queue/pauses': [await made('/queue/pauses', { kind: 'destination', name: 'mx:x.test' })],
  };
});
test.after(async ({ app }) => {
  await app.stop();
});

test('there are operations to look at', () => {
  assert.ok(operations.length > 20, String(operations.length));
});

for (const { path, method } of operations) {
  const name = `${method} ${path}`;
  test(`${name}: a foreign id is a missing one`, async ({ app, key, ids }) => {
    const sample = Object.entries(ids).find(([start]) => path.startsWith(start));
    assert.ok(sample, `no sample for ${path}: add one`);
    const fill = (values: readonly string[]): string => {
      let next = 0;
      return path.replace(/\{[^}]+\}/g, () => values[next++]!);
    };
    const ask = (values: readonly string[]): Promise<Answer> =>
      app.call(method.toUpperCase(), fill(values), {
        key,
        ...(BODIES[name] === undefined ? {} : { body: BODIES[name] }),
      });
    const missing = [newId(), newId()];
    const foreignAnswer = await ask(sample[1]);
    const missingAnswer = await ask(missing);
    assert.is(foreignAnswer.status, 404, JSON.stringify(foreignAnswer.body));
    assert.is(missingAnswer.status, 404, JSON.stringify(missingAnswer.body));
    const neutral = ({ body }: Answer, values: readonly string[]): string =>
      values.reduce((text, value) => text.replaceAll(value, 'ID'), JSON.stringify(body));
    assert.is(neutral(foreignAnswer, sample[1]), neutral(missingAnswer, missing));
  });
}

test('nothing of the owner has changed', async ({ app, ids }) => {
  const [email = ''] = ids['/emails']!;
  const { body } = await app.call('GET', `/emails/${email}`);
  assert.is(body['last_event'], 'scheduled');
  for (const start of [
    '/templates',
    '/domains',
    '/suppressions',
    '/topics',
    '/webhooks',
    '/contacts',
    '/segments',
    '/broadcasts',
    '/contact-properties',
    '/logs',
    '/receiving/routes',
    '/receiving/forwarding-rules',
  ]) {
    const { status, body: found } = await app.call('GET', `${start}/${ids[start]![0]}`);
    assert.is(status, 200, start);
    assert.not.match(JSON.stringify(found), /taken.over|"status":"disabled"/);
  }
  const revoked = await onDatabase(app, (pool) =>
    pool.query('select 1 from api_key where revoked_at is not null'),
  );
  assert.is(revoked.rowCount, 0);
});

test.run();
