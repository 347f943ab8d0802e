// Webhooks over the API, as the official SDK drives them: endpoints are made, read, changed and removed; what happens
// arrives, is listed, and is called again.
import { Resend } from 'resend';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { startApp, until, type App } from '../support/app.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { startReceiver, type Receiver } from '../support/webhooks.ts';
import { assertHeaders, assertInstant, assertRefused } from './envelope.ts';

const test = suite('webhooks');
let app: App;
let resend: Resend;
let stranger: string;
let endpoint: Receiver;
test.before(async () => {
  app = await startApp();
  resend = new Resend(app.key, { baseUrl: app.base });
  ({ key: stranger } = await secondTenant(app));
  endpoint = await startReceiver();
});
test.after(async () => {
  await endpoint.stop();
  await app.stop();
});

async function ok<T>(answer: Promise<{ data: T | null; error: unknown }>): Promise<T> {
  const { data, error } = await answer;
  assert.is(error, null, JSON.stringify(error));
  return data!;
}

const create = (about: Partial<Parameters<Resend['webhooks']['create']>[0]> = {}) =>
  ok(
    resend.webhooks.create({
      endpoint: endpoint.url,
      events: ['contact.created', 'email.sent'],
      ...about,
    }),
  );

/** As whoever writes facts does it, in its transaction. */
const happen = (type: string, detail: object): Promise<string> =>
  onDatabase(app, async (pool) => {
    const id = newId();
    await pool.query(
      `insert into outbox (tenant_id, id, type, subject_id, detail, at)
        select tenant_id, $1, $2, $1, $3, now() from webhook limit 1`,
      [id, type, JSON.stringify(detail)],
    );
    return `msg_${id.replaceAll('-', '')}`;
  });

test('a webhook shows its secret when it is made and read, and not in the list', async () => {
  const made = await create();
  assert.equal(Object.keys(made), ['object', 'id', 'signing_secret']);
  assert.match(made.signing_secret, /^whsec_[A-Za-z0-9+/]{43}=$/);
  for (const path of [`/webhooks/${made.id}`, `/api/webhooks/${made.id.toUpperCase()}`]) {
    const answer = await app.call('GET', path);
    assertHeaders(answer);
    const { created_at: createdAt, ...rest } = answer.body;
    assertInstant(createdAt);
    assert.equal(rest, {
      object: 'webhook',
      id: made.id,
      endpoint: endpoint.url,
      events: ['contact.created', 'email.sent'],
      status: 'enabled',
      disabled_reason: null,
      signing_secret: made.signing_secret,
    });
  }
  const later = await create();
  const { data, has_more: hasMore } = await ok(resend.webhooks.list());
  assert.equal(
    data.map(({ id }) => id),
    [later.id, made.id],
  );
  assert.is(hasMore, false);
  assert.not.match(JSON.stringify(data), /whsec_/);
  const page = await ok(resend.webhooks.list({ limit: 1, after: later.id }));
  assert.equal([page.data[0]!.id, page.has_more], [made.id, false]);
  for (const { id } of data) await ok(resend.webhooks.remove(id));
});

test('it is changed, rotated and removed', async () => {
  const { id, signing_secret: secret } = await create();
  assert.equal(
    await ok(
      resend.webhooks.update(id, {
        endpoint: `${endpoint.url}/moved`,
        events: ['topic.created'],
        status: 'disabled',
      }),
    ),
    { object: 'webhook', id },
  );
  const found = await ok(resend.webhooks.get(id));
  assert.equal(
    [found.endpoint, found.events, found.status, found.signing_secret],
    [`${endpoint.url}/moved`, ['topic.created'], 'disabled', secret],
  );
  const rotated = await ok(resend.webhooks.rotateSigningSecret(id));
  assert.is.not(rotated.signing_secret, secret);
  assert.is((await ok(resend.webhooks.get(id))).signing_secret, rotated.signing_secret);
  assert.equal(await ok(resend.webhooks.remove(id)), { object: 'webhook', id, deleted: true });
  assertRefused(await app.call('GET', `/webhooks/${id}`), {
    status: 404,
    code: 'not_found',
    says: /^Webhook not found$/,
  });
});

test('bad fields are all named', async () => {
  const { id } = await create();
  const bad = [
    [{ endpoint: 'ftp://x.test/', events: ['email.sent'] }, ['endpoint']],
    [{ endpoint: 'http://u:p@x.test/', events: ['email.sent'] }, ['endpoint']],
    [{ endpoint: 'http://169.254.169.254/', events: ['email.sent'] }, ['endpoint']],
    [{ endpoint: 'http://10.0.0.1/', events: [] }, ['endpoint', 'events']],
    [
      { endpoint: endpoint.url, events: ['email.sent', 'inbox.created', 'x\0'] },
      ['events.1', 'events.2'],
    ],
  ] as const;
  for (const [body, paths] of bad) {
    for (const [method, path] of [
      ['POST', '/webhooks'],
      ['PATCH', `/webhooks/${id}`],
    ] as const) {
      const answer = await app.call<{ details: { issues: { path: string }[] } }>(method, path, {
        body,
      });
      assert.is(answer.status, 422, JSON.stringify(answer.body));
      assert.equal(
        answer.body.details.issues.map((issue) => issue.path),
        paths,
      );
    }
  }
  for (const body of [{}, { endpoint: endpoint.url }, { endpoint: 1, events: 'x' }]) {
    assert.is((await app.call('POST', '/webhooks', { body })).status, 422);
  }
  const wrongStatus = await app.call('PATCH', `/webhooks/${id}`, { body: { status: 'paused' } });
  assert.is(wrongStatus.status, 422);
  await ok(resend.webhooks.remove(id));
});

test('a tenant has a hundred webhooks at most', async () => {
  const { id: first } = await create();
  await onDatabase(app, (pool) =>
    pool.query(
      `insert into webhook (tenant_id, id, endpoint, events, status, secret_sealed, created_at,
          updated_at)
        select tenant_id, gen_random_uuid(), endpoint, events, status, secret_sealed, now(), now()
        from webhook cross join generate_series(1, 99) where id = $1`,
      [first],
    ),
  );
  const { error } = await resend.webhooks.create({
    endpoint: endpoint.url,
    events: ['email.sent'],
  });
  assert.match(String(error?.message), /100 webhooks already/);
  const { data, has_more: hasMore } = await ok(resend.webhooks.list());
  assert.equal([data.length, hasMore], [100, false]);
  await onDatabase(app, (pool) => pool.query('delete from webhook'));
});

test('what happens arrives, is listed, read and replayed; nobody else sees it', async () => {
  const { id: webhookId, signing_secret: secret } = await create();
  const eventId = await happen('contact.created', { email: 'a@recipient.test', first_name: 'A' });
  const other = await happen('contact.created', { email: 'b@recipient.test' });
  const calls = () => endpoint.calls.filter(({ id }) => id === eventId);
  await until(
    async () => calls().length,
    (count) => count === 1,
  );
  const [call] = calls();
  const read = resend.webhooks.verify({
    payload: call!.body,
    headers: {
      id: call!.headers['svix-id'] as string,
      timestamp: call!.headers['svix-timestamp'] as string,
      signature: call!.headers['svix-signature'] as string,
    },
    webhookSecret: secret,
  });
  assert.equal(read.data, { email: 'a@recipient.test', first_name: 'A' });
  const list = await until(
    () => ok(resend.webhooks.events.list({ webhookId })),
    ({ data }) => data.length === 2 && data.every(({ status }) => status === 'success'),
  );
  assert.equal(
    list.data.map(({ id }) => id),
    [other, eventId],
  );
  const page = await ok(resend.webhooks.events.list({ webhookId, limit: 1, after: other }));
  assert.equal(
    [page.data[0]!.id, page.data[0]!.type, page.has_more],
    [eventId, 'contact.created', false],
  );
  const event = await ok(resend.webhooks.events.get({ webhookId, eventId }));
  assert.equal(
    [event.object, event.status, event.next_attempt_at],
    ['webhook_event', 'success', null],
  );
  assert.equal(event.payload, read);

  assert.equal(await ok(resend.webhooks.events.replay({ webhookId, eventId })), {
    object: 'webhook_event',
    id: eventId,
  });
  await until(
    async () => calls().length,
    (count) => count === 2,
  );
  const attempts = await until(
    () => ok(resend.webhooks.events.attempts.list({ webhookId, eventId })),
    ({ data }) => data.length === 2,
  );
  assert.equal(
    attempts.data.map(({ http_status_code: status, response }) => [status, response]),
    [
      [200, 'answer 200'],
      [200, 'answer 200'],
    ],
  );
  assertInstant(attempts.data[0]!.sent_at);

  for (const [method, path] of [
    ['GET', `/webhooks/${webhookId}`],
    ['GET', `/webhooks/${webhookId}/events`],
    ['GET', `/webhooks/${webhookId}/events/${eventId}`],
    ['GET', `/webhooks/${webhookId}/events/${eventId}/attempts`],
    ['POST', `/webhooks/${webhookId}/events/${eventId}/replay`],
  ] as const) {
    assert.is((await app.call(method, path, { key: stranger })).status, 404, path);
  }
  for (const path of ['msg_x', newId(), `msg_${'0'.repeat(32)}`]) {
    assert.is((await app.call('GET', `/webhooks/${webhookId}/events/${path}`)).status, 404);
  }
  for (const query of ['limit=0', 'limit=101', 'after=msg_x', `after=msg_${'0'.repeat(32)}`]) {
    assert.is((await app.call('GET', `/webhooks/${webhookId}/events?${query}`)).status, 422, query);
  }
  await ok(resend.webhooks.update(webhookId, { status: 'disabled' }));
  const { error } = await resend.webhooks.events.replay({ webhookId, eventId });
  assert.match(String(error?.message), /enable it/);
});

test.run();
