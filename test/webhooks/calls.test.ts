// Endpoints are called: every event until it is acknowledged, at an endpoint that fails often, beside dead and hanging ones,
// with the delays of the schedule under a clock of our own.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { forgetRemovedEndpoints } from '../../src/webhooks/forget.ts';
import { RETRY_DELAYS_MS } from '../../src/webhooks/calls.ts';
import { closeWaiting } from '../../src/webhooks/due-events.ts';
import { tellWebhooks } from '../../src/timeline/outbox.ts';
import { createFanOut } from '../../src/webhooks/fan-out.ts';
import { idNamed, newId } from '../../src/store/id.ts';
import { until } from '../support/app.ts';
import { freePort } from '../support/program.ts';
import { openQueue, silent, type Bench } from '../support/queue.ts';
import {
  countEvents,
  startReceiver,
  startTeller,
  type Receiver,
  type Teller,
} from '../support/webhooks.ts';
import { removeOld } from '../support/retention.ts';

const test = suite('webhook calls');
let bench: Bench;
let teller: Teller;
const receivers: Receiver[] = [];

test.before(async () => {
  bench = await openQueue();
  teller = startTeller({ store: bench.store, log: silent });
});
test.after(async () => {
  await teller.stop();
  for (const receiver of receivers) await receiver.stop();
  await bench.stop();
});

async function receive(reply?: Parameters<typeof startReceiver>[0]): Promise<Receiver> {
  const receiver = await startReceiver(reply);
  receivers.push(receiver);
  return receiver;
}

async function newTenant(): Promise<string> {
  const tenantId = newId();
  await bench.store.pool.query('insert into tenant (id, name) values ($1, $2)', [tenantId, 'x']);
  return tenantId;
}

async function subscribe(tenantId: string, endpoint: string): Promise<string> {
  const { id } = await teller.verbs.create(tenantId, { endpoint, events: ['contact.created'] });
  return id;
}

const counts = (webhookId: string) => countEvents(bench.store, webhookId);

test('a call that never ends is given up, and what it was is in the log', async () => {
  // Alone: the other one would take its events.
  await teller.stop();
  const hasty = startTeller({ store: bench.store, log: silent, callMaxMs: 200 });
  const tenantId = await newTenant();
  // One says nothing, one does not end its headers, one does not end its answer.
  const replies: Record<string, Parameters<typeof startReceiver>[0]> = {
    silent: () => null,
    chatty: () => (response) => response.writeProcessing(),
    endless: () => (response) => response.writeHead(200).write('{'),
    flooding: () => (response) => response.writeHead(200).end('x'.repeat(100_000)),
  };
  const found: Record<string, unknown> = {};
  for (const [name, reply] of Object.entries(replies)) {
    const { url } = await receive(reply);
    const about = { endpoint: url, events: ['contact.created'] };
    const { id: webhookId } = await hasty.verbs.create(tenantId, about);
    const [eventId = ''] = await hasty.happen(tenantId, 1);
    await hasty.tell();
    const key = { webhookId, eventId };
    const { items } = await until(
      async () =>
        (await hasty.verbs.events.attempts(tenantId, key, { limit: 10, after: undefined }))!,
      ({ items }) => items.length > 0,
    );
    const [first] = items;
    found[name] = [first!.httpStatus, first!.response?.length ?? null, first!.error];
    await hasty.verbs.remove(tenantId, webhookId);
  }
  await hasty.stop();
  teller = startTeller({ store: bench.store, log: silent });
  const late = 'it took longer than 0.2 seconds';
  assert.equal(found, {
    silent: [null, null, late],
    chatty: [null, null, late],
    endless: [200, 1, null],
    flooding: [200, 1_000, null],
  });
});

test('500 events arrive exactly once by id at an endpoint that fails 30 %', async () => {
  const tenantId = await newTenant();
  // Of ten thousand with eight tries at 30 %, one would fail every time and be left: not so here.
  const failures = new Map<string, number>();
  const endpoint = await receive(({ id }) => {
    const failed = failures.get(id) ?? 0;
    if (Math.random() >= 0.3 || failed === RETRY_DELAYS_MS.length) return 204;
    failures.set(id, failed + 1);
    return 500;
  });
  const webhookId = await subscribe(tenantId, endpoint.url);
  const wanted = new Set(await teller.happen(tenantId, 500));
  await teller.tell();
  const acknowledged = (): readonly string[] =>
    endpoint.calls.filter(({ status }) => status === 204).map(({ id }) => id);
  for (const delayMs of [0, ...RETRY_DELAYS_MS]) {
    teller.advance(delayMs * 1.2);
    teller.nudge();
    // All that is due by now was called and stored.
    await until(
      async () =>
        (
          await bench.store.pool.query(
            'select 1 from webhook_event where webhook_id = $1 and next_attempt_at <= $2 limit 1',
            [webhookId, teller.now()],
          )
        ).rowCount === 0 && ((await counts(webhookId))['attempting'] ?? 0) === 0,
      Boolean,
    );
    if (acknowledged().length === wanted.size) break;
  }
  assert.equal([acknowledged().length, new Set(acknowledged()).size], [500, 500]);
  assert.ok(acknowledged().every((id) => wanted.has(id)));
  assert.ok(endpoint.calls.length > 550, String(endpoint.calls.length));
  await until(
    () => counts(webhookId),
    ({ success }) => success === 500,
  );
  assert.ok(endpoint.most() <= 10, String(endpoint.most()));
});

test('a dead and a hanging endpoint delay no other, neither of their tenant nor of another', async () => {
  const [tenantId, otherId] = [await newTenant(), await newTenant()];
  const hanging = await receive(() => null);
  const dead = await subscribe(tenantId, `http://127.0.0.1:${await freePort()}/`);
  const hung = await subscribe(tenantId, hanging.url);
  const good = [await receive(), await receive()];
  for (const { url } of good) await subscribe(tenantId, url);
  const other = await receive();
  await subscribe(otherId, other.url);
  const ids = await teller.happen(tenantId, 200);
  const otherIds = await teller.happen(otherId, 200);
  await teller.tell();
  // The hanging one is still waited for when all others have everything.
  for (const [receiver, all] of [
    ...good.map((one) => [one, ids] as const),
    [other, otherIds] as const,
  ]) {
    await until(
      async () => receiver.calls.length,
      (count) => count === all.length,
    );
    assert.equal(receiver.calls.map(({ id }) => id).toSorted(), [...all].toSorted());
  }
  assert.ok(hanging.calls.length > 0 && hanging.calls.length <= 10, String(hanging.calls.length));
  assert.is((await counts(hung))['success'], undefined);
  await until(
    () => counts(dead),
    ({ pending = 0 }) => pending > 0,
  );
  // What a dead one is owed waits: it is not called two hundred times in a row.
  const { rows } = await bench.store.pool.query<{ count: number }>(
    'select count(*)::int as count from webhook_attempt where webhook_id = $1',
    [dead],
  );
  assert.ok(rows[0]!.count >= 10 && rows[0]!.count < 50, JSON.stringify(rows));
  for (const id of [dead, hung]) await teller.verbs.update(tenantId, id, { status: 'disabled' });
  await hanging.stop();
});

test('the calls about an event have the schedule of the contract; then it has failed, and is replayed', async () => {
  const tenantId = await newTenant();
  let status = 503;
  const endpoint = await receive(() => status);
  const webhookId = await subscribe(tenantId, endpoint.url);
  const [eventId = ''] = await teller.happen(tenantId, 1);
  await teller.tell();
  const key = { webhookId, eventId };
  const settled = (calls: number) =>
    until(
      async () => (await teller.verbs.events.find(tenantId, key))!,
      (event) => event.status !== 'attempting' && endpoint.calls.length === calls,
    );
  for (const [index, delayMs] of RETRY_DELAYS_MS.entries()) {
    const event = await settled(index + 1);
    assert.is(event.status, 'pending');
    const waitMs = event.nextAttemptAt!.getTime() - teller.now().getTime();
    assert.ok(waitMs <= delayMs * 1.1 && waitMs > delayMs - 5_000, `${index}: ${waitMs}`);
    teller.advance(waitMs);
  }
  const last = await settled(RETRY_DELAYS_MS.length + 1);
  assert.equal([last.status, last.nextAttemptAt], ['failed', null]);
  status = 200;
  assert.is(await teller.verbs.events.replay(tenantId, key), true);
  const replayed = await until(
    async () => (await teller.verbs.events.find(tenantId, key))!,
    (event) => event.status === 'success',
  );
  assert.equal(replayed.payload, last.payload);
  // An event that was acknowledged can be replayed, too. All calls had one id and one body.
  await teller.verbs.events.replay(tenantId, key);
  await until(
    async () => endpoint.calls.length,
    (count) => count === 10,
  );
  assert.equal([...new Set(endpoint.calls.map(({ id }) => id))], [eventId]);
  assert.is(new Set(endpoint.calls.map(({ body }) => body)).size, 1);
  const attempts = async (limit: number, after?: string) =>
    (await teller.verbs.events.attempts(tenantId, key, { limit, after }))!;
  const page = await until(
    () => attempts(10),
    ({ items }) => items.length === 10,
  );
  assert.equal(
    page.items.map(({ httpStatus }) => httpStatus),
    [200, 200, ...Array.from({ length: 8 }, () => 503)],
  );
  assert.is(page.items[9]!.response, 'answer 503');
  const rest = await attempts(5, page.items[6]!.id);
  assert.equal([rest.items.length, rest.hasMore], [3, false]);
});

test('an endpoint that acknowledges nothing for five days is disabled, one that is gone at once', async () => {
  const tenantId = await newTenant();
  let isWell = false;
  const endpoint = await receive(() => (isWell ? 200 : 500));
  const webhookId = await subscribe(tenantId, endpoint.url);
  const find = async () => (await teller.verbs.find(tenantId, webhookId))!;
  const calls = async (count: number): Promise<void> => {
    await until(
      async () => endpoint.calls.length,
      (seen) => seen >= count,
    );
    await until(
      () => counts(webhookId),
      ({ attempting = 0 }) => attempting === 0,
    );
  };
  const isOn = async (): Promise<void> => {
    const { status, disabledReason } = await find();
    assert.equal([status, disabledReason], ['enabled', null]);
  };
  await teller.happen(tenantId, 3);
  await teller.tell();
  await calls(3);
  teller.advance(4.9 * 86_400_000);
  teller.nudge();
  await calls(6);
  await isOn();
  // Long enough, and still too few calls to tell.
  teller.advance(0.2 * 86_400_000);
  teller.nudge();
  await calls(9);
  await isOn();
  teller.advance(3_600_000);
  teller.nudge();
  const disabled = await until(find, ({ status }) => status === 'disabled');
  assert.match(String(disabled.disabledReason), /nothing for 5 days/);
  // What waits has failed, nothing new is taken up, and nothing can be replayed until it is enabled.
  await until(
    () => counts(webhookId),
    ({ failed }) => failed === 3,
  );
  const [lost = ''] = await teller.happen(tenantId, 1);
  await teller.tell();
  assert.is(await teller.verbs.events.find(tenantId, { webhookId, eventId: lost }), null);
  const { items } = (await teller.verbs.events.list(tenantId, webhookId, {
    limit: 1,
    after: undefined,
  }))!;
  const key = { webhookId, eventId: items[0]!.id };
  try {
    await teller.verbs.events.replay(tenantId, key);
    assert.unreachable();
  } catch (error) {
    assert.match((error as Error).message, /enable it/);
  }
  isWell = true;
  await teller.verbs.update(tenantId, webhookId, { status: 'enabled' });
  assert.is((await find()).disabledReason, null);
  await teller.verbs.events.replay(tenantId, key);
  await until(
    () => counts(webhookId),
    ({ success }) => success === 1,
  );

  const leaving = await receive(() => 410);
  const gone = await subscribe(tenantId, leaving.url);
  await teller.happen(tenantId, 1);
  await teller.tell();
  const found = await until(
    async () => (await teller.verbs.find(tenantId, gone))!,
    ({ status }) => status === 'disabled',
  );
  assert.match(String(found.disabledReason), /410/);
  await until(
    () => counts(gone),
    ({ failed }) => failed === 1,
  );
});

test('a lease that ends without a result is called again under the same id, and what came late does not count', async () => {
  const tenantId = await newTenant();
  const endpoint = await receive();
  const webhookId = await subscribe(tenantId, endpoint.url);
  const [eventId = ''] = await teller.happen(tenantId, 1);
  // Claimed by a process that has died since.
  await teller.tell();
  await until(
    () => counts(webhookId),
    ({ success }) => success === 1,
  );
  await bench.store.pool.query(
    `update webhook_event set status = 'attempting', lease_id = $2, next_attempt_at = $3
      where webhook_id = $1`,
    [webhookId, newId(), new Date(teller.now().getTime() + 60_000)],
  );
  teller.nudge();
  await new Promise((resolve) => setTimeout(resolve, 100));
  assert.is(endpoint.calls.length, 1, 'the lease holds');
  teller.advance(61_000);
  await until(
    async () => endpoint.calls.length,
    (count) => count === 2,
  );
  assert.equal(
    endpoint.calls.map(({ id }) => id),
    [eventId, eventId],
  );
});

test('what is left of a removed endpoint goes, and old events are forgotten', async () => {
  const tenantId = await newTenant();
  const endpoint = await receive(() => 500);
  const [kept, removed] = [
    await subscribe(tenantId, endpoint.url),
    await subscribe(tenantId, endpoint.url),
  ];
  await teller.happen(tenantId, 3);
  await teller.tell();
  await until(
    async () => endpoint.calls.length,
    (count) => count === 6,
  );
  await teller.verbs.remove(tenantId, removed);
  await until(
    () => counts(removed),
    (left) => Object.keys(left).length === 0,
  );
  await teller.verbs.update(tenantId, kept, { status: 'disabled' });
  await until(
    () => counts(kept),
    ({ failed }) => failed === 3,
  );
  const forget = (inDays: number): Promise<number> =>
    removeOld(bench.store, 'webhook_events', new Date(Date.now() + inDays * 86_400_000));
  await forget(29);
  assert.equal(await counts(kept), { failed: 3 });
  while ((await forgetRemovedEndpoints(bench.store.pool, 10_000)) > 0);
  assert.equal(await counts(kept), { failed: 3 });
  await forget(31);
  assert.equal(await counts(kept), {});
  const { rows } = await bench.store.pool.query(
    'select 1 from webhook_attempt where webhook_id = $1',
    [kept],
  );
  assert.equal(rows, []);
});

test('of an email that waited for long it is not forgotten at once that it was sent', async () => {
  const tenantId = await newTenant();
  const { url } = await receive();
  const webhookId = await subscribe(tenantId, url);
  const told = new Date();
  await bench.store.pool.query(
    `insert into webhook_event (tenant_id, webhook_id, id, type, payload, status, created_at)
     values ($1, $2, $3, 'email.sent', '{}', 'success', $4)`,
    [tenantId, webhookId, idNamed('email.sent x', told.getTime() - 40 * 86_400_000), told],
  );
  await removeOld(bench.store, 'webhook_events', told);
  assert.equal(await counts(webhookId), { success: 1 });
  await removeOld(bench.store, 'webhook_events', new Date(told.getTime() + 31 * 86_400_000));
  assert.equal(await counts(webhookId), {});
});

test('what waits for an endpoint that was enabled again meanwhile does not fail', async () => {
  const tenantId = await newTenant();
  // Nobody calls it: what is due is later.
  const { url } = await receive();
  const webhookId = await subscribe(tenantId, url);
  teller.advance(-3_600_000);
  await teller.happen(tenantId, 1);
  teller.advance(3_600_000);
  await bench.store.pool.query(
    `with o as (delete from outbox where tenant_id = $1 returning *)
      insert into webhook_event (tenant_id, webhook_id, id, type, payload, status, next_attempt_at,
        created_at)
      select tenant_id, $2, id, type, '{}', 'pending', $3, at from o`,
    [tenantId, webhookId, new Date(teller.now().getTime() + 3_600_000)],
  );
  // As a look saw it a moment ago.
  const seen = { tenantId, webhookId, isDue: true, state: 'disabled' as const };
  assert.is(await closeWaiting(bench.store, seen, teller.now()), false);
  assert.equal(await counts(webhookId), { pending: 1 });
  await teller.verbs.update(tenantId, webhookId, { status: 'disabled' });
  await closeWaiting(bench.store, seen, teller.now());
  await until(
    () => counts(webhookId),
    ({ failed }) => failed === 1,
  );
});

test('a row that nothing can be made of stops nobody', async () => {
  const [tenantId, otherId] = [await newTenant(), await newTenant()];
  const endpoint = await receive();
  for (const id of [tenantId, otherId]) await subscribe(id, endpoint.url);
  await bench.store.pool.query(
    `insert into outbox (tenant_id, id, type, subject_id, detail, at)
      values ($1, $2, 'contact.created', $2, '{}', 'infinity'),
        ($1, $3, 'contact.created', $3, '7', now())`,
    [tenantId, newId(), newId()],
  );
  const ids = [...(await teller.happen(tenantId, 1)), ...(await teller.happen(otherId, 1))];
  await teller.tell();
  await until(
    async () => endpoint.calls.map(({ id }) => id).toSorted(),
    (seen) => seen.join() === ids.toSorted().join(),
  );
  const { rowCount } = await bench.store.pool.query('select 1 from outbox');
  assert.is(rowCount, 0);
});

test('large events for many endpoints are written in pieces, and others need not wait for them', async () => {
  const [tenantId, otherId] = [await newTenant(), await newTenant()];
  // Nobody calls them: it is their writing that counts.
  await bench.store.pool.query(
    `insert into webhook (tenant_id, id, endpoint, events, status, secret_sealed, created_at, updated_at)
      select $1, uuidv7(), 'http://[::1]:1/', '{contact.created}', 'enabled', '', now(), now()
      from generate_series(1, 100)`,
    [tenantId],
  );
  const { url } = await receive();
  const webhookId = await subscribe(otherId, url);
  const fanOut = createFanOut({ store: bench.store, log: silent, now: () => teller.now() });
  await teller.happen(tenantId, 5, { detail: { text: 'x'.repeat(60_000) } });
  await teller.happen(otherId, 1);
  await fanOut.turn();
  const { rows } = await bench.store.pool.query<{ made: number; left: number }>(
    `select (select count(*)::int from webhook_event where tenant_id = $1) as made,
      (select count(*)::int from outbox where tenant_id = $1) as left`,
    [tenantId],
  );
  assert.equal(rows, [{ made: 100, left: 4 }]);
  assert.is(Object.keys(await counts(webhookId)).length, 1, 'the other is told in the first turn');
  await teller.tell();
  const { rowCount } = await bench.store.pool.query(
    'select 1 from webhook_event where tenant_id = $1',
    [tenantId],
  );
  assert.is(rowCount, 500);
  await bench.store.pool.query('delete from webhook where tenant_id = $1', [tenantId]);
});

test('text that jsonb does not take is no reason not to do what is told', async () => {
  const tenantId = await newTenant();
  const endpoint = await receive();
  await subscribe(tenantId, endpoint.url);
  const detail = { first_name: 'a\0b', last_name: 'half \ud83d', list: ['\udc00'] };
  await tellWebhooks(bench.store.pool, [
    { tenantId, type: 'contact.created', subjectId: newId(), detail },
  ]);
  await teller.tell();
  const body = await until(
    async () => endpoint.calls[0]?.body,
    (text) => text !== undefined,
  );
  const { data } = JSON.parse(body!) as { data: unknown };
  assert.equal(data, { first_name: 'a\ufffdb', last_name: 'half \ufffd', list: ['\ufffd'] });
});

test.run();
