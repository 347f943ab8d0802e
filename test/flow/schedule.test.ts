// From POST /emails with a time to the sink: everything that is scheduled for one moment leaves soon after it, once,
// and nothing that was canceled or moved does. MAILSTEAD_TEST_SCHEDULED sets the number of emails (default 300);
// 10000 takes some minutes and says how long they took to leave.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { onDatabase } from '../support/second-tenant.ts';

const EMAILS = Number(process.env['MAILSTEAD_TEST_SCHEDULED'] ?? 300);
const BATCH = 100;
/** Time to accept them all, and to change some, before they are due. */
const AHEAD_MS = 3_000 + EMAILS * 5;
const WAIT_MAX_MS = 30_000 + EMAILS * 20;

const test = suite('schedule');
let app: App;
test.before(async () => {
  app = await startApp();
});
test.after(() => app.stop());

const scheduleAll = async (at: Date): Promise<string[]> => {
  const ids: string[] = [];
  for (let from = 0; from < EMAILS; from += BATCH) {
    const { status, body } = await app.call<{ data: { id: string }[] }>('POST', '/emails/batch', {
      body: Array.from({ length: Math.min(BATCH, EMAILS - from) }, (_, index) => ({
        from: 'Ada <ada@mailstead.test>',
        to: `r${from + index}@recipient.test`,
        subject: `Number ${from + index}`,
        text: 'Plain words.',
        scheduled_at: at.toISOString(),
      })),
    });
    assert.is(status, 200, JSON.stringify(body));
    ids.push(...body.data.map(({ id }) => id));
  }
  return ids;
};
const countOf = (event: string): Promise<number> =>
  onDatabase(app, async (pool) => {
    const { rows } = await pool.query<{ count: number }>(
      'select count(*)::int as count from email where last_event = $1',
      [event],
    );
    return rows[0]?.count ?? 0;
  });

test('what is scheduled for one moment leaves then; canceled and moved mail does not', async () => {
  const at = new Date(Date.now() + AHEAD_MS);
  const ids = await scheduleAll(at);
  assert.is(ids.length, EMAILS);
  const canceled = ids.slice(0, 20);
  const moved = ids.slice(20, 40);
  const later = new Date(Date.now() + 3_600_000).toISOString();
  for (const id of canceled) {
    const { status, body } = await app.call('POST', `/emails/${id}/cancel`);
    assert.equal([status, body], [200, { object: 'email', id }]);
  }
  for (const id of moved) {
    const { status, body } = await app.call('PATCH', `/emails/${id}`, {
      body: { scheduled_at: later },
    });
    assert.equal([status, body], [200, { object: 'email', id }]);
  }
  assert.ok(Date.now() < at.getTime(), 'the machine was too slow for AHEAD_MS');
  assert.is(await countOf('scheduled'), EMAILS - canceled.length);

  const expected = EMAILS - canceled.length - moved.length;
  await until(
    () => countOf('delivered'),
    (count) => count === expected,
    WAIT_MAX_MS,
  );
  assert.is(await countOf('canceled'), canceled.length);
  assert.is(await countOf('scheduled'), moved.length);
  const { rows } = await onDatabase(app, (pool) =>
    pool.query<{ early: number; attempts: number; emails: number; last_ms: number; jobs: number }>(
      `select count(*) filter (where started_at < $1)::int as early, count(*)::int as attempts,
         count(distinct email_id)::int as emails,
         (extract(epoch from max(finished_at) - $1::timestamptz) * 1000)::int as last_ms,
         (select count(*)::int from agenda_jobs where name = 'wake-lane') as jobs
       from attempt`,
      [at],
    ),
  );
  const facts = rows[0]!;
  assert.is(facts.early, 0, 'nothing leaves before its time');
  assert.is(facts.emails, expected);
  assert.is(facts.attempts, expected, 'nothing is sent twice');
  assert.ok(facts.jobs <= 2, `${facts.jobs} alarms for one moment`);
  if (EMAILS >= 10_000)
    console.log(`the last of ${expected} left ${facts.last_ms} ms after its time`);

  // And what was moved can still be canceled, what was sent cannot.
  assert.is((await app.call('POST', `/emails/${moved[0]}/cancel`)).status, 200);
  assert.is((await app.call('POST', `/emails/${ids.at(-1)}/cancel`)).status, 422);
  assert.is((await app.call('POST', `/emails/${canceled[0]}/cancel`)).status, 422);
  assert.equal(app.complaints, []);
});

const moves: readonly (readonly [what: string, text: string])[] = [
  ['an email', 'Plain words.'],
  ['a large email', 'Plain words.\n'.repeat(15_000)],
];
for (const [index, [what, text]] of moves.entries()) {
  test(`${what} that is moved nearer leaves at the nearer time, and says that it was written then`, async () => {
    const to = `moved-${index}@recipient.test`;
    const id = await app.send({ to, text, scheduled_at: 'in 1 hour' });
    const at = new Date(Date.now() + 1_500);
    const { status } = await app.call('PATCH', `/emails/${id}`, {
      body: { scheduled_at: at.toISOString() },
    });
    assert.is(status, 200);
    const email = await app.untilEvent(id, 'delivered');
    assert.is(email['scheduled_at'], at.toISOString());
    const { body } = await app.call<{ events: { type: string; at: string }[] }>(
      'GET',
      `/emails/${id}/timeline`,
    );
    const started = body.events.find(({ type }) => type === 'attempt_started');
    assert.ok(Date.parse(started?.at ?? '') >= at.getTime());
    assert.ok(body.events.some(({ type }) => type === 'rescheduled'));
    const sunk = await app.call<{ data: { rcpt_to: string[]; raw: string }[] }>(
      'GET',
      '/sink/messages',
    );
    const raw = sunk.body.data.find(({ rcpt_to: [first] }) => first === to)?.raw ?? '';
    const date = /^Date: (.*)\r\n/m.exec(raw)?.[1] ?? '';
    assert.is(Date.parse(date), Math.floor(at.getTime() / 1_000) * 1_000);
    assert.match(raw, /^Message-ID: </m);
    assert.is(raw.split('Plain words.').length, text.split('Plain words.').length);
  });
}

test.run();
