// The operator's routes: who may use them, what they say, what they refuse; and that pausing and resuming work on a real
// worker.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createKey, newToken } from '../../src/access/keys.ts';
import { newId } from '../../src/store/id.ts';
import { startApp, until, type Answer, type App } from '../support/app.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';

interface Load {
  readonly ready: number;
  readonly ready_is_capped: boolean;
  readonly oldest_due_at: string | null;
}
interface Queue {
  readonly object: string;
  readonly generated_at: string;
  readonly workers: number;
  readonly totals: Record<string, number>;
  readonly port_25: { readonly blocked: boolean; readonly since: string | null };
  readonly lanes: { readonly data: readonly (Load & { name: string })[]; has_more: boolean };
  readonly tenants: {
    readonly data: readonly (Load & { id: string; name: string; paused: boolean })[];
  };
  readonly pauses: readonly { id: string; kind: string; name: string | null }[];
}
interface Failure {
  readonly name: string;
  readonly message: string;
  readonly details?: { readonly issues: readonly { path: string }[] };
}

const queue = suite('queue routes');
let app: App;
let other: { tenantId: string; key: string };

queue.before(async () => {
  app = await startApp();
  other = await secondTenant(app);
});
queue.after(() => app.stop());

const pause = (body: unknown): Promise<Answer<Record<string, string>>> =>
  app.call('POST', '/queue/pauses', { body });
const read = async (): Promise<Queue> => (await app.call<Queue>('GET', '/queue')).body;

queue('the queue is told to the operator', async () => {
  const id = await app.send();
  await app.untilEvent(id, 'delivered');
  const state = await until(read, ({ workers, lanes }) => workers === 1 && lanes.data.length > 0);
  assert.is(state.object, 'queue');
  assert.equal(state.port_25, { blocked: false, since: null, reason: null, sources: [] });
  assert.ok(state.lanes.data.some(({ name }) => name === 'sink'));
  assert.not(state.lanes.has_more);
  assert.is(state.totals['ready'], 0);
});

queue('for every other key the routes do not exist', async () => {
  const tenantId = await onDatabase(app, async (pool) => {
    const { rows } = await pool.query<{ tenant_id: string }>(
      `select tenant_id from api_key where tenant_id <> $1 limit 1`,
      [other.tenantId],
    );
    return rows[0]!.tenant_id;
  });
  const sending = newToken();
  await onDatabase(app, (pool) =>
    createKey(pool, {
      tenantId,
      name: 'sending',
      token: sending,
      permission: 'sending_access',
      domainId: null,
    }),
  );
  const requests = [
    ['GET', ''],
    ['GET', '/pauses'],
    ['POST', '/pauses'],
    ['PUT', '/pauses'],
    ['DELETE', `/pauses/${newId()}`],
    ['DELETE', '/pauses/nonsense'],
  ] as const;
  const volatile = ['date', 'x-request-id', 'ratelimit-remaining', 'ratelimit-reset'];
  const seen = ({ status, headers, body }: Answer, path: string): unknown => [
    status,
    JSON.stringify(body).replaceAll(path, 'PATH'),
    [...headers].filter(([name]) => !volatile.includes(name)).map(([name]) => name),
  ];
  for (const key of [other.key, sending]) {
    for (const [method, rest] of requests) {
      for (const prefix of ['', '/api']) {
        const body = method === 'POST' ? { body: '{"kind": 1' } : {};
        const here = await app.call(method, `${prefix}/queue${rest}`, { key, ...body });
        const nowhere = await app.call(method, `${prefix}/quail${rest}`, { key, ...body });
        assert.is(here.status, 404);
        assert.equal(seen(here, '/queue'), seen(nowhere, '/quail'), `${method} ${rest}`);
      }
    }
  }
  assert.is((await app.call('GET', '/queue', { key: null })).status, 401);
  assert.is((await app.call('PUT', '/queue')).status, 405);
});

queue('pauses are made, changed, listed and removed', async () => {
  const first = await pause({ kind: 'destination', name: 'mx:example.com', reason: 'one' });
  assert.is(first.status, 201);
  const until = new Date(Date.now() + 3_600_000).toISOString();
  const second = await pause({ kind: 'destination', name: 'mx:example.com', until });
  assert.is(second.body['id'], first.body['id']);
  assert.equal([second.body['reason'], second.body['until']], [null, until]);
  const lane = await pause({ kind: 'lane', name: 'default/mx.example.com' });
  const list = await app.call<{ data: readonly { id: string }[]; has_more: boolean }>(
    'GET',
    '/queue/pauses',
  );
  assert.equal(
    list.body.data.map(({ id }) => id).toSorted(),
    [String(first.body['id']), String(lane.body['id'])].toSorted(),
  );
  assert.not(list.body.has_more);
  assert.is((await read()).pauses.length, 2);
  for (const { id } of list.body.data) {
    const gone = await app.call('DELETE', `/queue/pauses/${id}`);
    assert.equal([gone.status, gone.body], [200, { object: 'pause', id, deleted: true }]);
    assert.is((await app.call('DELETE', `/queue/pauses/${id}`)).status, 404);
  }
  assert.is((await app.call('DELETE', '/queue/pauses/nonsense')).status, 422);
});

queue('what cannot be paused is refused with what to fix', async () => {
  const cases: readonly (readonly [unknown, string])[] = [
    [{ kind: 'lane' }, 'name'],
    [{}, 'kind'],
    [{ kind: 'planet', name: 'x' }, 'kind'],
    [{ kind: 'lane', name: 'no-slash' }, 'name'],
    [{ kind: 'lane', name: 7 }, 'name'],
    [{ kind: 'lane', name: `a/${'b'.repeat(400)}` }, 'name'],
    [{ kind: 'destination', name: 'example.com' }, 'name'],
    [{ kind: 'destination', name: 'mx:EXAMPLE.com' }, 'name'],
    [{ kind: 'destination', name: 'mx:a.test\u0000' }, 'name'],
    [{ kind: 'destination', name: 'mx:münchen.de' }, 'name'],
    [{ kind: 'destination', name: 'mx:example.com.' }, 'name'],
    [{ kind: 'tenant', name: 'first' }, 'name'],
    [{ kind: 'tenant', name: newId() }, 'name'],
    [{ kind: 'all', name: 'x' }, 'name'],
    [{ kind: 'all', reason: 'x'.repeat(501) }, 'reason'],
    [{ kind: 'all', reason: 'a\nb' }, 'reason'],
    [{ kind: 'all', until: 'tomorrow' }, 'until'],
    [{ kind: 'all', until: '2020-01-01T00:00:00Z' }, 'until'],
    [{ kind: 'all', until: '2999-01-01T00:00:00Z' }, 'until'],
    [{ kind: 'all', until: '2027-01-01' }, 'until'],
  ];
  for (const [body, path] of cases) {
    const { status, body: answer } = await app.call<Failure>('POST', '/queue/pauses', { body });
    assert.is(status, 422, JSON.stringify(body));
    assert.equal(
      answer.details?.issues.map((issue) => issue.path),
      [path],
      JSON.stringify([body, answer]),
    );
  }
  assert.is((await app.call('POST', '/queue/pauses', { body: '{' })).status, 400);
  assert.equal((await read()).pauses, []);
});

queue('a paused tenant waits, others do not, and resuming sends what waited', async () => {
  const paused = await pause({ kind: 'tenant', name: other.tenantId, reason: 'An audit.' });
  assert.is(paused.status, 201);
  await new Promise((resolve) => setTimeout(resolve, 1_500)); // workers read pauses once a second
  const theirs = await app.call<{ id: string }>('POST', '/emails', {
    key: other.key,
    body: { from: 'a@mailstead.test', to: 'b@recipient.test', subject: 'x', text: 'x' },
  });
  assert.is(theirs.status, 200, JSON.stringify(theirs.body));
  await app.untilEvent(await app.send(), 'delivered');
  const waiting = async (): Promise<Record<string, string> | null> =>
    (
      await app.call<{ waiting: Record<string, string> | null }>(
        'GET',
        `/emails/${theirs.body.id}/timeline`,
        { key: other.key },
      )
    ).body.waiting;
  const why = await waiting();
  assert.is(why?.['code'], 'paused');
  assert.match(why?.['reason'] ?? '', /this tenant is paused by the operator: An audit\.$/);
  assert.match(why?.['remedy'] ?? '', /operator has to resume/);
  const state = await read();
  const own = state.tenants.data.find(({ id }) => id === other.tenantId);
  assert.equal([own?.ready, own?.paused], [1, true]);
  assert.ok(own?.oldest_due_at);

  assert.is((await app.call('DELETE', `/queue/pauses/${paused.body['id']}`)).status, 200);
  await until(waiting, (value) => value === null);
  const { body } = await app.call('GET', `/emails/${theirs.body.id}`, { key: other.key });
  assert.is(body['last_event'], 'delivered');
});

queue('everything can be paused, and a pause ends by itself', async () => {
  const ends = new Date(Date.now() + 4_000).toISOString();
  await pause({ kind: 'all', until: ends });
  await new Promise((resolve) => setTimeout(resolve, 1_500));
  const id = await app.send();
  const { body } = await app.call<{ waiting: Record<string, string> }>(
    'GET',
    `/emails/${id}/timeline`,
  );
  assert.is(body.waiting['code'], 'paused');
  assert.is(body.waiting['next_attempt_at'], ends);
  await app.untilEvent(id, 'delivered');
  assert.ok(Date.now() >= Date.parse(ends), 'not before its end');
});

queue('a batch and a list of recipients are bulk, one email to one recipient is not', async () => {
  const of = async (id: string): Promise<boolean> =>
    onDatabase(app, async (pool) => {
      const { rows } = await pool.query<{ is_bulk: boolean }>(
        'select bool_and(is_bulk) as is_bulk from delivery where email_id = $1',
        [id],
      );
      return rows[0]!.is_bulk;
    });
  const email = { from: 'a@mailstead.test', to: 'b@recipient.test', subject: 'x', text: 'x' };
  assert.not(await of(await app.send()));
  assert.ok(await of(await app.send({ to: ['a@recipient.test', 'b@recipient.test'] })));
  const batch = await app.call<{ data: { id: string }[] }>('POST', '/emails/batch', {
    body: [email, { ...email, scheduled_at: 'in 1 hour' }],
  });
  assert.is(batch.body.data.length, 2);
  for (const { id } of batch.body.data) assert.ok(await of(id));
});

queue.run();
