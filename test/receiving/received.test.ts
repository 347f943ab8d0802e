// What is stored of a message: a copy for each tenant with its own decisions and forwards, a second arrival never; and what
// the API shows of it. On a real database, with several writers at once.
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { parseMessage } from '../../src/mail/parse.ts';
import type { Arrival } from '../../src/receiving/arrival.ts';
import { digestOf, forgetOldDigests } from '../../src/receiving/digest.ts';
import { receive, type Receiving } from '../../src/receiving/receive.ts';
import { createCopyWriter } from '../../src/receiving/store-copies.ts';
import { openDiskBlobs, type BlobStore } from '../../src/store/blob.ts';
import { newId } from '../../src/store/id.ts';
import { openStore, type Store } from '../../src/store/orm.ts';
import type { Authentication, RouteDecision } from '../../src/store/received-email.ts';
import { startApp, type App } from '../support/app.ts';
import { arrivalOf, receiver } from '../support/arrival.ts';
import { silent } from '../support/queue.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { closeAll, send } from '../support/sink-session.ts';

interface Context {
  app: App;
  store: Store;
  folder: string;
  blobs: BlobStore;
  /** As two processes have it. */
  processes: readonly Receiving[];
  tenantId: string;
  second: { readonly tenantId: string; readonly key: string };
  nudges: { unread: number; forwards: number };
}

const test = suite<Context>('received');

test.before(async (context) => {
  context.app = await startApp();
  context.second = await secondTenant(context.app);
  context.folder = await mkdtemp(join(tmpdir(), 'mailstead-test-'));
  context.store = await openStore({
    url: context.app.databaseUrl,
    log: silent,
    connectionsMax: 8,
    migrate: false,
  });
  context.blobs = openDiskBlobs(context.folder);
  context.nudges = { unread: 0, forwards: 0 };
  const { nudges, store, blobs } = context;
  context.processes = [1, 2].map(() => ({
    store,
    blobs,
    write: createCopyWriter(store.pool),
    parse: parseMessage,
    onUnread: () => void (nudges.unread += 1),
    onForwards: () => void (nudges.forwards += 1),
  }));
  context.tenantId = await onDatabase(context.app, async (pool) => {
    const { rows } = await pool.query<{ tenant_id: string }>(
      `select tenant_id from sending_domain where name = 'mailstead.test'`,
    );
    return rows[0]!.tenant_id;
  });
});
test.after.each(closeAll);
test.after(async ({ app, store, folder }) => {
  await store.close();
  await app.stop();
  await rm(folder, { recursive: true });
});

let number = 0;
/** A message like no other here. */
const message = (sizeBytes = 0): Buffer => {
  number += 1;
  return Buffer.from(
    `Message-ID: <${number}@outside.test>\r\nSubject: number ${number}\r\n\r\nwords\r\n${'0123456\r\n'.repeat(sizeBytes / 9)}`,
  );
};

const count = async (store: Store, ids: readonly string[]): Promise<number> => {
  const { rows } = await store.pool.query(
    `select 1 from received_email e join received_content c
       on c.tenant_id = e.tenant_id and c.email_id = e.id where e.id = any ($1)`,
    [ids],
  );
  return rows.length;
};

const blobKeys = async (blobs: BlobStore): Promise<readonly string[]> => {
  const keys: string[] = [];
  for await (const key of blobs.list(new Date(Date.now() + 60_000))) keys.push(key);
  return keys;
};

test('a client that did not hear the 250 hears the same one again', async ({ app }) => {
  const port = app.appliance.mxPort!;
  const raw = message().toString();
  const from = 'a@outside.test';
  const to = ['One@mailstead.test', 'two@mailstead.test'];
  const first = await send(port, { from, to, raw });
  assert.match(first.response, /^250 2\.0\.0 Ok: stored as [0-9a-f-]{36}$/);
  const again = await send(port, { from, to: ['two@mailstead.test', 'one@mailstead.test'], raw });
  assert.is(again.response, first.response, 'the order and the case of recipients do not matter');
  const { body } = await app.call<{ data: unknown[] }>('GET', '/emails/receiving');
  assert.is(body.data.length, 1);

  const others = [
    { from, to: ['one@mailstead.test'], raw },
    { from: 'b@outside.test', to, raw },
    { from, to, raw: `${raw}.\r\n` },
  ];
  for (const other of others) assert.is.not((await send(port, other)).response, first.response);
});

test('of many arrivals at the same time one is stored, and no blob is left of the others', async ({
  processes,
  store,
  blobs,
  tenantId,
}) => {
  const raw = message(300_000);
  const receivers = [receiver(tenantId, 'race@mailstead.test')];
  const answers = await Promise.all(
    Array.from({ length: 20 }, (_, at) =>
      receive(processes[at % 2]!, arrivalOf({ receivers, raw })),
    ),
  );
  const ids = [...new Set(answers.flat())];
  assert.is(ids.length, 1);
  assert.is(await count(store, ids), 1);
  assert.is((await blobKeys(blobs)).length, 1);
});

test('groups that hold the same messages in different orders do not wait for each other', async ({
  processes,
  store,
  tenantId,
}) => {
  const arrivals = Array.from({ length: 60 }, () =>
    arrivalOf({ receivers: [receiver(tenantId, 'order@mailstead.test')], raw: message() }),
  );
  const store1 = (all: readonly Arrival[], process: Receiving) =>
    Promise.all(all.map((one) => receive(process, one)));
  const [there, back] = await Promise.all([
    store1(arrivals, processes[0]!),
    store1(arrivals.toReversed(), processes[1]!),
  ]);
  assert.equal(back.toReversed(), there);
  const ids = [...new Set(there.flat())];
  assert.is(ids.length, 60);
  assert.is(await count(store, ids), 60);
});

test('after an hour the same message is a new one', async ({ processes, store, tenantId }) => {
  const about = { receivers: [receiver(tenantId, 'later@mailstead.test')], raw: message() };
  const at = (minutes: number) => ({
    ...arrivalOf(about),
    receivedAt: new Date(Date.UTC(2031, 4, 6, 7, minutes)),
  });
  const [first] = await receive(processes[0]!, at(0));
  assert.equal(await receive(processes[1]!, at(59)), [first]);
  const [later] = await receive(processes[0]!, at(61));
  assert.is.not(later, first);
  assert.equal(await receive(processes[1]!, at(62)), [later]);
  assert.is(await count(store, [first!, later!]), 2);
});

test('the trace of the second arrival does not make it another message', () => {
  const body = message();
  const withTrace = (trace: string) => ({
    mailFrom: '',
    raw: Buffer.concat([Buffer.from(trace), body]),
    traceSizeBytes: trace.length,
  });
  const digest = (trace: string, recipients: readonly string[]) =>
    digestOf(withTrace(trace))(recipients).toString('hex');
  assert.is(digest('Received: 1\r\n', ['a@x.test']), digest('Received: 22\r\n', ['A@X.test']));
  assert.is.not(digest('', ['a@x.test', 'b@x.test']), digest('', ['a@x.test']));
});

test('what has no Message-ID and came by no host is a new message each time', async ({
  processes,
  store,
  tenantId,
}) => {
  const receivers = [receiver(tenantId, 'alarm@mailstead.test')];
  const arrive = async (header: string): Promise<readonly string[]> => {
    const raw = Buffer.from(`${header}Subject: Alarm\r\n\r\nDoor 3 is open.\r\n`);
    const traced = Buffer.concat([Buffer.from('Received: ours\r\n'), raw]);
    const traceSizeBytes = traced.length - raw.length;
    const both = [1, 2].map(() => arrivalOf({ receivers, raw: traced, traceSizeBytes }));
    const ids = await Promise.all(both.map((one) => receive(processes[0]!, one)));
    return [...new Set(ids.flat())];
  };
  for (const header of ['', 'Date: Thu, 01 Jan 1970 00:00:00 +0000\r\n', 'Message-ID:\r\n']) {
    const ids = await arrive(header);
    assert.is(await count(store, ids), 2, header);
  }
  const told = ['Message-Id: <a@x>\r\n', 'Received: from a by b with ESMTP id 7\r\n'];
  for (const header of told) assert.is((await arrive(header)).length, 1, header);
});

test('digests that are too old to matter are forgotten', async ({ processes, store, tenantId }) => {
  const receivers = [receiver(tenantId, 'old@mailstead.test')];
  const hoursAgo = (hours: number) => new Date(Date.now() - hours * 3_600_000);
  const store1 = (hours: number) =>
    receive(processes[0]!, {
      ...arrivalOf({ receivers, raw: message() }),
      receivedAt: hoursAgo(hours),
    });
  const ids = [...(await store1(3)), ...(await store1(3)), ...(await store1(1))];
  assert.is(await forgetOldDigests(store.pool, 1), 1);
  assert.is(await forgetOldDigests(store.pool, 10), 1);
  const { rows } = await store.pool.query<{ email_id: string }>(
    'select email_id from received_digest where email_id = any ($1)',
    [ids],
  );
  assert.equal(
    rows.map(({ email_id }) => email_id),
    [ids[2]],
  );
});

const decision = (recipient: string, ruleId: string | null): Partial<RouteDecision> => ({
  recipient,
  status: 'alias',
  route_id: newId(),
  route_type: 'alias',
  local_part: recipient.split('@')[0]!,
  target_address: 'target@mailstead.test',
  forwarding_rule_id: ruleId,
});

test('each tenant has its own decisions and forwards, each rule once', async ({
  processes,
  store,
  tenantId,
  second,
  nudges,
}) => {
  const [mine, another, theirs] = [newId(), newId(), newId()];
  const to = (tenant: string, recipient: string, ruleId: string | null) =>
    receiver(tenant, recipient, decision(recipient, ruleId));
  const arrival = arrivalOf({
    raw: message(),
    receivers: [
      to(tenantId, 'a@mailstead.test', mine),
      to(second.tenantId, 'b@second.test', theirs),
      to(tenantId, 'A@mailstead.test', mine),
      to(tenantId, 'c@mailstead.test', mine),
      to(tenantId, 'd@mailstead.test', another),
      to(tenantId, 'e@mailstead.test', null),
    ],
    unrouteable: [
      receiver(tenantId, 'nobody@mailstead.test'),
      receiver(newId(), 'nobody@third.test'),
    ],
  });
  const before = nudges.forwards;
  const [first, other] = await receive(processes[0]!, arrival);
  assert.is(nudges.forwards, before + 1);
  interface Row {
    id: string;
    received_for: string[];
    route_decisions: RouteDecision[];
    tasks: [string, string][] | null;
  }
  const { rows } = await store.pool.query<Row>(
    `select id, received_for, route_decisions, (
       select json_agg(json_build_array(t.rule_id, t.recipient) order by t.recipient)
       from forwarding_task t where t.received_email_id = e.id and t.tenant_id = e.tenant_id
         and t.due_at < now() + interval '1 minute') as tasks
     from received_email e where id = any ($1) order by id`,
    [[first, other]],
  );
  assert.equal(
    rows.map(({ id, received_for, route_decisions, tasks }) => ({
      id,
      received_for,
      decided: route_decisions.map(({ recipient, status }) => `${status} ${recipient}`),
      tasks,
    })),
    [
      {
        id: first,
        received_for: [
          'a@mailstead.test',
          'c@mailstead.test',
          'd@mailstead.test',
          'e@mailstead.test',
        ],
        decided: [
          'alias a@mailstead.test',
          'alias c@mailstead.test',
          'alias d@mailstead.test',
          'alias e@mailstead.test',
          'unrouteable nobody@mailstead.test',
        ],
        tasks: [
          [mine, 'a@mailstead.test'],
          [another, 'd@mailstead.test'],
        ],
      },
      {
        id: other,
        received_for: ['b@second.test'],
        decided: ['alias b@second.test'],
        tasks: [[theirs, 'b@second.test']],
      },
    ],
  );

  assert.equal(await receive(processes[1]!, arrival), [first, other], 'it came again');
  assert.is(nudges.forwards, before + 1, 'and is not forwarded again');
  const { rows: tasks } = await store.pool.query(
    'select 1 from forwarding_task where received_email_id = any ($1)',
    [[first, other]],
  );
  assert.is(tasks.length, 3);

  // One of the tenants has it, the other has not: its copy alone is new.
  const wider = {
    ...arrival,
    receivers: [...arrival.receivers, to(tenantId, 'f@mailstead.test', mine)],
  };
  const [third, same] = await receive(processes[1]!, wider);
  assert.is(same, other);
  assert.is.not(third, first);
});

test('what the database refuses does not take the others of its group with it', async ({
  processes,
  store,
  tenantId,
}) => {
  const bad = arrivalOf({ receivers: [receiver(tenantId, 'bad@mailstead.test')], raw: message() });
  const good = Array.from({ length: 10 }, () =>
    arrivalOf({ receivers: [receiver(tenantId, 'good@mailstead.test')], raw: message() }),
  );
  const results = await Promise.allSettled(
    [...good.slice(0, 5), { ...bad, mailFrom: 'nul\0@x.test' }, ...good.slice(5)].map((one) =>
      receive(processes[0]!, one),
    ),
  );
  assert.equal(
    results.map(({ status }) => status === 'fulfilled'),
    [true, true, true, true, true, false, true, true, true, true, true],
  );
  const ids = results.flatMap((one) => (one.status === 'fulfilled' ? one.value : []));
  assert.is(await count(store, ids), 10);
});

const AUTHENTICATION: Authentication = {
  spf: { result: 'pass', domain: 'outside.test', reason: null },
  dkim: [{ result: 'fail', domain: 'outside.test', selector: 's', aligned: true, reason: 'bad' }],
  dmarc: {
    result: 'pass',
    domain: 'outside.test',
    policy: 'reject',
    aligned: { spf: true, dkim: false },
    reason: null,
  },
  arc: { result: 'none', sealer: null, instances: 0 },
  verdict: 'accepted',
};

test('the API shows what was decided, checked and done', async ({
  app,
  processes,
  store,
  tenantId,
  second,
}) => {
  const [ruleId, outboundId] = [newId(), newId()];
  const [id] = await receive(
    processes[0]!,
    arrivalOf({
      receivers: [receiver(tenantId, 'a@mailstead.test', decision('a@mailstead.test', null))],
      raw: message(),
      mailFrom: 'a@outside.test',
      authentication: AUTHENTICATION,
      client: { address: '2001:db8::1', helo: 'mx.outside.test', isTls: true },
    }),
  );
  const attempts = [
    { id: newId(), status: 'skipped', reason: 'rule_disabled', method: null, emailId: null },
    { id: newId(), status: 'queued', reason: null, method: 'relayed', emailId: outboundId },
  ];
  for (const one of attempts.toReversed()) {
    await store.pool.query(
      `insert into forwarding_attempt (tenant_id, id, received_email_id, rule_id, recipient,
         destinations, status, reason, explanation, method, email_id, created_at)
       values ($1, $2, $3, $4, 'a@mailstead.test', '["b@far.test"]', $5, $6, 'Because.', $7, $8, now())`,
      [tenantId, one.id, id, ruleId, one.status, one.reason, one.method, one.emailId],
    );
  }
  const { body } = await app.call('GET', `/emails/receiving/${id}`);
  assert.equal(body['authentication'], AUTHENTICATION);
  assert.is(body['mail_from'], 'a@outside.test');
  assert.is(body['remote_address'], '2001:db8::1');
  assert.is(body['helo'], 'mx.outside.test');
  assert.is(body['answers_email_id'], null);
  assert.is(body['parsing'], 'complete');
  const shown = body['forwarding_attempts'] as Record<string, unknown>[];
  assert.equal(
    shown.map(({ created_at, ...rest }) => ({ ...rest, isDated: typeof created_at === 'string' })),
    attempts.map(({ id: attempt, status, reason, method, emailId }) => ({
      id: attempt,
      rule_id: ruleId,
      recipient: 'a@mailstead.test',
      destinations: ['b@far.test'],
      status,
      reason,
      explanation: 'Because.',
      method,
      email_id: emailId,
      isDated: true,
    })),
  );
  const { body: list } = await app.call<{ data: Record<string, unknown>[] }>(
    'GET',
    '/api/emails/receiving?limit=1',
  );
  assert.is(list.data[0]!['id'], id);
  assert.equal(list.data[0]!['route_decisions'], body['route_decisions']);
  assert.is((await app.call('GET', `/emails/receiving/${id}`, { key: second.key })).status, 404);
});

test('what could not be read is marked, and shows what there is', async ({
  app,
  processes,
  tenantId,
}) => {
  const raw = Buffer.from('Subject: torn\r\nContent-Type: text/plain\r\n\r\nwords\r\n');
  const receivers = [receiver(tenantId, 'torn@mailstead.test')];
  const stored = async (about: Partial<Receiving>): Promise<Record<string, unknown>> => {
    const [id] = await receive(
      { ...processes[0]!, ...about },
      arrivalOf({ receivers, raw: Buffer.concat([raw, message()]) }),
    );
    return (await app.call('GET', `/emails/receiving/${id}`)).body;
  };
  assert.is((await stored({ parse: () => Promise.resolve(null) }))['parsing'], 'pending');
  const parts = Array.from(
    { length: 600 },
    (_, n) => `--b\r\nContent-Disposition: attachment; filename=${n}\r\n\r\nx\r\n`,
  );
  const many = await stored({
    parse: () =>
      parseMessage(
        Buffer.from(
          `Subject: many\r\nContent-Type: multipart/mixed; boundary=b\r\n\r\n${parts.join('')}--b--\r\n`,
        ),
      ),
  });
  assert.is(many['parsing'], 'partial');
  assert.is(many['subject'], 'many');
});

test('the list by time, and bad filters', async ({ app, processes, tenantId }) => {
  const receivers = [receiver(tenantId, 'list@mailstead.test')];
  await receive(processes[0]!, arrivalOf({ receivers, raw: message() }));
  const [id] = await receive(processes[0]!, arrivalOf({ receivers, raw: message() }));
  const list = async (query: string) =>
    (await app.call<{ data: { id: string }[] }>('GET', `/emails/receiving?limit=1&${query}`)).body;
  const today = new Date().toISOString().slice(0, 10);
  assert.is((await list(`start_date=${today}`)).data[0]!.id, id);
  assert.equal((await list('start_date=2036-01-01')).data, []);
  assert.equal((await list('end_date=2020-01-01')).data, []);
  assert.equal((await list(`answers_email_id=${newId()}`)).data, []);
  for (const query of ['start_date=x', 'end_date=32', 'answers_email_id=x']) {
    const { status, body } = await app.call('GET', `/emails/receiving?${query}`);
    assert.is(status, 422, query);
    assert.match(JSON.stringify(body), new RegExp(query.split('=')[0]!));
  }
});

test.run();
