// Replays on a real Postgres: which messages, under which rules, at what rate, each once, whatever ends in between.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { Caller } from '../../src/access/keys.ts';
import { Refusal } from '../../src/access/refusal.ts';
import {
  createReplayVerbs,
  type CreateReplayRequest,
  type ReplayRecord,
  type ReplayVerbs,
} from '../../src/receiving/replay.ts';
import { runReplays } from '../../src/receiving/replay-turns.ts';
import { newId } from '../../src/store/id.ts';
import { addDomain, addReceived, addRule, forgetMail } from '../support/forwarded.ts';
import { listen } from '../support/outbox.ts';
import { openQueue, type Bench } from '../support/queue.ts';
import { removeOld } from '../support/retention.ts';

interface Context {
  q: Bench;
  verbs: ReplayVerbs;
  caller: Caller;
  domainId: string;
  rule: { id: string; routeId: string };
  nudges: number;
}
const test = suite<Context>('replay');

test.before(async (context) => {
  const q = (context.q = await openQueue());
  context.caller = {
    tenantId: q.tenantId,
    keyId: newId(),
    permission: 'full_access',
    domainId: null,
  };
  context.domainId = await addDomain(q);
  context.rule = await addRule(q, context.domainId);
  context.verbs = createReplayVerbs({
    store: q.store,
    now: () => new Date(),
    onReplay: () => (context.nudges += 1),
  });
});
test.before.each(async (context) => {
  context.nudges = 0;
  await forgetMail(context.q);
});
test.after(({ q }) => q.stop());

const receive = async (context: Context, count: number, about = {}): Promise<string[]> => {
  const ids: string[] = [];
  const { routeId, id: ruleId } = context.rule;
  for (let at = 0; at < count; at += 1) {
    ids.push(await addReceived(context.q, { routeId, ruleId, ...about }));
  }
  return ids;
};
const create = ({ verbs, caller }: Context, request: CreateReplayRequest): Promise<ReplayRecord> =>
  verbs.create(caller, request);
const turn = ({ q }: Context): ReturnType<typeof runReplays> =>
  runReplays(q.store, () => undefined);
/** As if the time of that many messages had gone by. */
const wait = ({ q }: Context, ms: number): Promise<unknown> =>
  q.store.pool.query(
    `update receiving_replay set paced_at = paced_at - $1 * interval '1 millisecond'`,
    [ms],
  );
const tasks = async (
  { q }: Context,
  replayId?: string,
): Promise<readonly { email: string; rule: string; recipient: string }[]> => {
  const { rows } = await q.store.pool.query<{ email: string; rule: string; recipient: string }>(
    `select received_email_id as email, rule_id as rule, recipient from forwarding_task
     where $1::uuid is null or replay_id = $1 order by id`,
    [replayId ?? null],
  );
  return rows;
};
const reload = async ({ verbs, caller }: Context, id: string) => (await verbs.find(caller, id))!;
async function issuesOf(work: Promise<unknown>): Promise<readonly string[]> {
  try {
    await work;
  } catch (error) {
    assert.instance(error, Refusal);
    return (error as Refusal).issues.map(({ path }) => path);
  }
  return [];
}

test('by id: each message once for its rule, in the order of arrival', async (context) => {
  const ids = await receive(context, 5);
  const replay = await create(context, {
    ids: [ids[3]!, ids[0]!, ids[3]!.toUpperCase()],
    per_minute: 6_000,
  });
  assert.is(replay.status, 'running');
  assert.is(context.nudges, 1);
  await wait(context, 1_000);
  assert.equal(await turn(context), { nextInMs: null });
  assert.equal(
    (await tasks(context, replay.id)).map(({ email }) => email),
    [ids[0], ids[3]],
  );
  assert.is((await tasks(context))[0]?.recipient, 'support+x@route.test');
  const seen = await reload(context, replay.id);
  assert.is(seen.replay.status, 'finished');
  assert.is(seen.replay.planned, 2);
  assert.equal(seen.forwards, { waiting: 2, queued: 0, skipped: 0, failed: 0 });
  await turn(context);
  assert.is((await tasks(context)).length, 2);
});

test('webhooks are told again, in their turn, where one listens', async (context) => {
  const { pool } = context.q.store;
  const ids = await receive(context, 3);
  const run = async (request: CreateReplayRequest): Promise<ReplayRecord> => {
    const { id } = await create(context, { ids, per_minute: 6_000, ...request });
    await wait(context, 1_000);
    await turn(context);
    return (await reload(context, id)).replay;
  };
  const told = async (): Promise<readonly string[]> => {
    const { rows } = await pool.query<{ id: string }>(
      `delete from outbox where type = 'email.received' returning subject_id as id`,
    );
    return rows.map(({ id }) => id).toSorted();
  };
  const deaf = await run({ kinds: ['webhook'] });
  assert.equal([deaf.status, deaf.planned, deaf.skipped], ['finished', 0, 3]);
  await listen(context.q.store, context.q.tenantId, ['email.received']);
  await pool.query('update received_email set is_read = false where id = $1', [ids[2]]);
  const heard = await run({ kinds: ['webhook'] });
  assert.equal([heard.kinds, heard.planned, heard.skipped], [['webhook'], 2, 1]);
  assert.equal(await told(), ids.slice(0, 2));
  assert.equal(await tasks(context), []);
  const both = await run({ kinds: ['webhook', 'forward', 'webhook'] });
  assert.equal([both.kinds, both.planned], [['forward', 'webhook'], 5]);
  assert.equal(await told(), ids.slice(0, 2));
  assert.is((await tasks(context, both.id)).length, 3);
  const usual = await run({});
  assert.equal([usual.kinds, usual.planned], [['forward'], 3]);
  assert.equal(await told(), []);
  await pool.query('delete from webhook');
});

test('by time: from the beginning to the end, and what no rule is for is counted', async (context) => {
  const at = (day: number): Date => new Date(Date.UTC(2026, 4, day, 12));
  const old = new Date(Date.UTC(2026, 4, 1));
  // Ids are made when a message is stored: these are of then.
  const { q } = context;
  const made = new Map<string, number>();
  for (const day of [1, 2, 3, 4]) {
    const [id] = await receive(context, 1, { createdAt: at(day) });
    const moved = newIdAt(at(day).getTime() + 5);
    await q.store.pool.query('update received_email set id = $2 where id = $1', [id, moved]);
    made.set(moved, day);
  }
  await q.store.pool.query(
    `update received_email set route_decisions = jsonb_set(jsonb_set(route_decisions,
       '{0,route_id}', 'null'), '{0,forwarding_rule_id}', 'null') where created_at = $1`,
    [at(3)],
  );
  const replay = await create(context, {
    start_date: '2026-05-02',
    end_date: '2026-05-03',
    per_minute: 6_000,
  });
  await wait(context, 1_000);
  await turn(context);
  assert.equal(
    (await tasks(context)).map(({ email }) => made.get(email)),
    [2],
  );
  const seen = await reload(context, replay.id);
  assert.is(seen.replay.skipped, 1);
  assert.is(seen.replay.planned, 1);
  assert.is(seen.replay.status, 'finished');
  assert.ok(seen.replay.startsAt! > old);
});

/** A UUIDv7 of that time. */
const newIdAt = (ms: number): string => {
  const time = ms.toString(16).padStart(12, '0');
  return `${time.slice(0, 8)}-${time.slice(8)}${newId().slice(13)}`;
};

test('at the given rate, whatever the pauses between turns', async (context) => {
  const ids = await receive(context, 12);
  await create(context, { ids, per_minute: 60 });
  const first = await turn(context);
  assert.is((await tasks(context)).length, 1, 'the first at once');
  assert.ok(first.nextInMs! > 0 && first.nextInMs! <= 1_000, String(first.nextInMs));
  await turn(context);
  assert.is((await tasks(context)).length, 1, 'and no second before its time');
  await wait(context, 3_000);
  await turn(context);
  assert.is((await tasks(context)).length, 4);
  // Nobody was there for an hour: no flood.
  await wait(context, 3_600_000);
  await turn(context);
  const after = (await tasks(context)).length;
  assert.ok(after > 4 && after <= 10, String(after));
});

test('several take turns, and a message comes once in each', async (context) => {
  const ids = await receive(context, 130);
  const one = await create(context, { ids, per_minute: 6_000 });
  const two = await create(context, { ids, per_minute: 6_000 });
  await wait(context, 5_000);
  await turn(context);
  assert.is((await tasks(context, one.id)).length, 100);
  assert.is((await tasks(context, two.id)).length, 100);
  await wait(context, 5_000);
  await Promise.all([turn(context), turn(context), turn(context)]);
  for (const replay of [one, two]) {
    const emails = (await tasks(context, replay.id)).map(({ email }) => email);
    assert.equal(emails, ids);
    assert.is((await reload(context, replay.id)).replay.status, 'finished');
  }
});

test('a turn that ends in the middle leaves nothing, and the next one does it all', async (context) => {
  const { q } = context;
  const ids = await receive(context, 3);
  const replay = await create(context, { ids, per_minute: 6_000 });
  await wait(context, 5_000);
  await q.store.pool.query(`
    create function give_up() returns trigger language plpgsql as $$ begin raise 'power cut'; end $$`);
  await q.store.pool.query(
    `create trigger give_up before update on receiving_replay for each row execute function give_up()`,
  );
  try {
    await turn(context);
    assert.unreachable('the turn had to fail');
  } catch (error) {
    assert.match(String(error), /power cut/);
  }
  assert.is((await tasks(context)).length, 0);
  await q.store.pool.query('drop function give_up cascade');
  await turn(context);
  assert.is((await tasks(context, replay.id)).length, 3);
});

test('a replay whose turn fails holds up no other', async (context) => {
  const { q } = context;
  const [bad, good] = await receive(context, 2);
  const stuck = await create(context, { ids: [bad!], per_minute: 6_000 });
  const other = await create(context, { ids: [good!], per_minute: 6_000 });
  await q.store.pool.query(
    `alter table receiving_replay add constraint stuck check (id <> '${stuck.id}' or cursor_id is null)`,
  );
  try {
    await turn(context);
    assert.unreachable('the failure has to be told');
  } catch (error) {
    assert.match(String(error), /stuck/);
  } finally {
    await q.store.pool.query('alter table receiving_replay drop constraint stuck');
  }
  assert.is((await tasks(context, stuck.id)).length, 0);
  assert.is((await tasks(context, other.id)).length, 1);
});

test('the rule of the route as it is now; a rule that is gone counts as none', async (context) => {
  const { q, domainId } = context;
  const late = await addRule(q, domainId);
  const [before] = await receive(context, 1, { routeId: late.routeId, ruleId: null });
  const [gone] = await receive(context, 1, { routeId: newId(), ruleId: newId() });
  // Its route was removed, the rule has stayed.
  const [kept] = await receive(context, 1, { routeId: newId(), ruleId: late.id });
  const [other] = await receive(context, 1);
  const ids = [before!, gone!, kept!, other!];
  const replay = await create(context, { ids, per_minute: 6_000 });
  const only = await create(context, { ids, per_minute: 6_000, rule_id: late.id });
  await wait(context, 5_000);
  await turn(context);
  assert.equal(
    (await tasks(context, replay.id)).map(({ email, rule }) => [email, rule]),
    [
      [before, late.id],
      [kept, late.id],
      [other, context.rule.id],
    ],
  );
  assert.is((await reload(context, replay.id)).replay.skipped, 1);
  assert.equal(
    (await tasks(context, only.id)).map(({ email }) => email),
    [before, kept],
  );
});

test('one message for two addresses of one rule is forwarded once, for two rules twice', async (context) => {
  const { q, domainId, rule } = context;
  const second = await addRule(q, domainId);
  const [id] = await receive(context, 1);
  const more = [
    { route_id: rule.routeId, forwarding_rule_id: rule.id, recipient: 'again@route.test' },
    { route_id: second.routeId, forwarding_rule_id: second.id, recipient: 'other@route.test' },
  ];
  await q.store.pool.query(
    'update received_email set route_decisions = route_decisions || $2::jsonb where id = $1',
    [id, JSON.stringify(more)],
  );
  const replay = await create(context, { ids: [id!] });
  await turn(context);
  assert.equal(
    (await tasks(context, replay.id)).map((task) => [task.rule, task.recipient]),
    [
      [rule.id, 'support+x@route.test'],
      [second.id, 'other@route.test'],
    ],
  );
});

test('canceled: what is in line goes, what was done stays, and nothing follows', async (context) => {
  const { verbs, caller } = context;
  const ids = await receive(context, 5);
  const [, spared] = await receive(context, 2);
  const replay = await create(context, { ids, per_minute: 60 });
  const other = await create(context, { ids: [spared!] });
  await turn(context);
  assert.is(await verbs.cancel(caller, replay.id), true);
  await wait(context, 60_000);
  await turn(context);
  assert.is((await tasks(context, replay.id)).length, 0);
  assert.is((await tasks(context, other.id)).length, 1);
  assert.is((await reload(context, replay.id)).replay.status, 'canceled');
  assert.is(await verbs.cancel(caller, replay.id), true, 'again');
  assert.is(await verbs.cancel(caller, other.id), true);
  assert.is((await reload(context, other.id)).replay.status, 'finished', 'it was over');
  assert.is((await tasks(context, other.id)).length, 1);
  assert.is(await verbs.cancel(caller, newId()), false);
});

test('another tenant’s messages, rules and replays do not exist', async (context) => {
  const { q, verbs, caller } = context;
  const stranger = { ...caller, tenantId: newId() };
  await q.store.pool.query('insert into tenant (id, name) values ($1, $2)', [
    stranger.tenantId,
    'second',
  ]);
  const [id] = await receive(context, 1);
  assert.equal(await issuesOf(verbs.create(stranger, { ids: [id!] })), ['ids']);
  const range = { start_date: '2020-01-01', end_date: '2090-01-01' };
  assert.equal(await issuesOf(verbs.create(stranger, { ...range, rule_id: context.rule.id })), [
    'rule_id',
  ]);
  const replay = await create(context, { ids: [id!] });
  assert.is(await verbs.find(stranger, replay.id), null);
  assert.is(await verbs.cancel(stranger, replay.id), false);
  const theirs = await verbs.create(stranger, range);
  await wait(context, 5_000);
  await turn(context);
  assert.is((await tasks(context, theirs.id)).length, 0);
});

const BAD: readonly (readonly [string, CreateReplayRequest, readonly string[]])[] = [
  ['nothing to replay', {}, ['ids']],
  ['both ways', { ids: [newId()], start_date: '2026-05-01', end_date: '2026-05-02' }, ['ids']],
  ['no ids', { ids: [] }, ['ids']],
  ['too many ids', { ids: Array.from({ length: 1_001 }, () => newId()) }, ['ids']],
  ['an id that is none', { ids: [newId(), 'x'] }, ['ids.1']],
  ['unknown ids', { ids: [newId()] }, ['ids']],
  ['half of a range', { start_date: '2026-05-01' }, ['end_date']],
  ['a bad date', { start_date: 'May', end_date: '2026-05-02' }, ['start_date']],
  ['a range backwards', { start_date: '2026-05-02', end_date: '2026-05-01' }, ['end_date']],
  ['the future', { start_date: '2999-01-01', end_date: '2999-01-02' }, ['start_date']],
  ['another kind', { kinds: ['forward', 'bounce'], ids: [newId()] }, ['kinds.1']],
  ['no kind', { kinds: [], ids: [newId()] }, ['kinds']],
  ['a rate of 0', { per_minute: 0, ids: [newId()] }, ['per_minute']],
  ['a rate beyond', { per_minute: 6_001, ids: [newId()] }, ['per_minute']],
  ['a rate between', { per_minute: 1.5, ids: [newId()] }, ['per_minute']],
  ['a bad rule', { rule_id: 'x', ids: [newId()] }, ['rule_id']],
];
for (const [name, request, expected] of BAD) {
  test(`refused: ${name}`, async (context) => {
    assert.equal(await issuesOf(create(context, request)), expected);
  });
}

test('the record of one that ended is kept for 90 days', async (context) => {
  const { q } = context;
  const ids = await receive(context, 1);
  const ended = await create(context, { ids });
  await turn(context);
  const running = await create(context, { ids });
  await q.store.pool.query(`update receiving_replay set updated_at = now() - interval '89 days'`);
  await removeOld(q.store, 'replays');
  assert.ok(await context.verbs.find(context.caller, ended.id));
  await q.store.pool.query(`update receiving_replay set updated_at = now() - interval '91 days'`);
  await removeOld(q.store, 'replays');
  assert.is(await context.verbs.find(context.caller, ended.id), null);
  assert.ok(await context.verbs.find(context.caller, running.id));
});

test('ten at a time', async (context) => {
  const ids = await receive(context, 2);
  const made = await Promise.all(
    Array.from({ length: 12 }, () =>
      create(context, { ids, per_minute: 1 }).then(
        () => 'made',
        () => 'refused',
      ),
    ),
  );
  assert.is(made.filter((one) => one === 'made').length, 10);
});

test.run();
