// Metrics that were counted before are those of the rows: for random mail, readers and changes, in time zones whose days
// begin within an hour or change their length, and against a count made here.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { rollUpMetrics } from '../../src/sending/metric-rollup.ts';
import { readMetrics, type EmailMetrics, type MetricsQuery } from '../../src/sending/metrics.ts';
import { recordComplaint } from '../../src/queue/complaint.ts';
import { recordEngagements } from '../../src/queue/engagement.ts';
import { newId } from '../../src/store/id.ts';
import { openQueue, type Bench } from '../support/queue.ts';

const test = suite('metrics counted before');
const DAY_MS = 86_400_000;
const NOW = new Date();
/** Around both changes of the clocks in Europe and America, and one by half an hour in Australia. */
const CHANGES = ['2026-03-08', '2026-03-29', '2025-10-26', '2025-11-02', '2026-04-05'];
const ZONES = ['UTC', 'Europe/Berlin', 'Asia/Kolkata', 'Asia/Kathmandu', 'Australia/Lord_Howe'];
const EVENTS = ['delivered', 'opened', 'bounced', 'sent', 'failed', 'suppressed', 'queued'];
const BROADCASTS = [newId(), newId()];
const DOMAINS = ['a.test', 'b.test'];

interface Mail {
  readonly id: string;
  readonly ms: number;
  readonly domain: string;
  readonly broadcastId: string | null;
  readonly event: string;
}

let bench: Bench;
let seed = 20_261;
/** Below `max`; the same in every run (mulberry32). */
function random(max: number): number {
  seed = (seed + 0x6d2b79f5) | 0;
  let mixed = Math.imul(seed ^ (seed >>> 15), 1 | seed);
  mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
  return ((mixed ^ (mixed >>> 14)) >>> 0) % max;
}
const pick = <T>(list: readonly T[]): T => list[random(list.length)]!;
const idAt = (ms: number): string =>
  ms.toString(16).padStart(12, '0').replace(/^.{8}/, '$&-') + newId().slice(13);

const mails: Mail[] = [];
const received: { readonly id: string; readonly ms: number }[] = [];
/** By email, what persons did. */
const opens = new Map<string, number>();
const clicks = new Map<string, number>();

async function addMail(ms: number): Promise<void> {
  const mail: Mail = {
    id: idAt(ms),
    ms,
    domain: pick(DOMAINS),
    broadcastId: pick([null, ...BROADCASTS]),
    event: pick(EVENTS),
  };
  mails.push(mail);
  await bench.store.pool.query(
    `insert into email (tenant_id, id, created_at, message_id, from_given, from_domain, to_given, subject, last_event,
       recipient_count, provider_last_attempted_at, provider_last_error, provider_retry_count, broadcast_id)
     values ($1, $2, $3, '<x>', 'a@a.test', $4, '[]', 's', $5, 1, $6, $7, $8, $9)`,
    [
      bench.tenantId,
      mail.id,
      // The time of the id counts, not this.
      new Date(ms + random(3) * 400_000),
      mail.domain,
      mail.event,
      ['queued', 'suppressed'].includes(mail.event) ? null : new Date(ms),
      mail.event === 'bounced' ? JSON.stringify({ code: pick(['5.1.1', '4.2.2', 'x']) }) : null,
      random(2),
      mail.broadcastId,
    ],
  );
}

async function addReceived(ms: number): Promise<void> {
  const id = idAt(ms);
  received.push({ id, ms });
  await bench.store.pool.query(
    `insert into received_email (tenant_id, id, created_at, mail_from, received_for, route_decisions, from_shown,
       to_shown, cc_shown, bcc_shown, reply_to_shown, subject, attachments)
     values ($1, $2, $3, '', $4, '[]', '', '[]', '[]', '[]', '[]', '', '[]')`,
    [bench.tenantId, id, new Date(ms), JSON.stringify([`who@${pick(DOMAINS).toUpperCase()}`])],
  );
}

/** As readers and machines do it. */
async function engage(count: number): Promise<void> {
  await recordEngagements(
    bench.store,
    Array.from({ length: count }, () => {
      const { id: emailId } = pick(mails);
      const kind = pick(['opened', 'clicked'] as const);
      const suspect = pick([null, null, 'proxy', 'scanner', 'prefetch'] as const);
      if (suspect === null || suspect === 'proxy') {
        const done = kind === 'opened' ? opens : clicks;
        done.set(emailId, (done.get(emailId) ?? 0) + 1);
      }
      return {
        id: newId(),
        tenantId: bench.tenantId,
        emailId,
        kind,
        at: NOW,
        link: kind === 'clicked' ? 'https://example.com/' : null,
        remoteAddress: null,
        userAgent: null,
        suspect,
        isOfCrowd: false,
      };
    }),
  );
}

const NOTHING: MetricsQuery = {
  startDate: undefined,
  endDate: undefined,
  timezone: undefined,
  granularity: undefined,
  metrics: undefined,
  dimensions: undefined,
  domainIds: undefined,
  emailIds: undefined,
  broadcastIds: undefined,
};
const ask = (query: Partial<MetricsQuery>): Promise<EmailMetrics> =>
  readMetrics(bench.store, bench.tenantId, { query: { ...NOTHING, ...query }, now: NOW });

const iso = (ms: number): string => new Date(ms).toISOString();
let questions: readonly Partial<MetricsQuery>[] = [];

const answers = (): Promise<readonly EmailMetrics[]> => Promise.all(questions.map(ask));

/** The answers with what was counted, and from the rows alone. */
async function both(): Promise<readonly [readonly EmailMetrics[], readonly EmailMetrics[]]> {
  const { pool } = bench.store;
  const counted = await answers();
  await pool.query('alter table metric_rolled rename to hidden');
  await pool.query('create table metric_rolled (like hidden including all)');
  const fromRows = await answers();
  await pool.query('drop table metric_rolled');
  await pool.query('alter table hidden rename to metric_rolled');
  return [counted, fromRows];
}

/** Of what was counted. */
const stale = async (): Promise<number> => {
  const { rowCount } = await bench.store.pool.query(
    'select 1 from metric_stale s join metric_rolled r using (tenant_id) where s.quarter < r.counted_until',
  );
  return rowCount ?? 0;
};

test.before(async () => {
  bench = await openQueue();
  const around = CHANGES.map((day) => Date.parse(day)).filter((ms) => ms < NOW.getTime());
  const old = (): number => pick(around) - DAY_MS + random(3 * DAY_MS);
  const young = (): number => NOW.getTime() - 1 - random(8 * DAY_MS);
  await Promise.all(
    Array.from({ length: 300 }, (_, number) => [
      addMail(old()),
      ...(number % 3 === 0 ? [addMail(young())] : []),
      ...(number % 5 === 0 ? [addReceived(old())] : []),
      ...(number % 9 === 0 ? [addReceived(young())] : []),
    ]).flat(),
  );
  await engage(400);
  questions = Array.from({ length: 24 }, (_, number) => {
    const start = pick(around) - DAY_MS + random(DAY_MS);
    const end = pick([start + random(4 * DAY_MS), NOW.getTime()]);
    return {
      startDate: iso(Math.max(start, end - 399 * DAY_MS)),
      endDate: iso(end),
      timezone: ZONES[number % ZONES.length],
      granularity: pick(['hourly', 'daily', 'weekly', 'monthly']),
      dimensions: pick([undefined, ['period'], ['period', 'domain'], ['broadcast'], ['email']]),
    };
  }).map((question) =>
    // An hour of more than a year has more rows than an answer may.
    question.granularity === 'hourly' ? { ...question, dimensions: undefined } : question,
  );
});
test.after(() => bench.stop());

test('what was counted is what the rows say, before and after', async () => {
  const before = await answers();
  const { steps } = await rollUpMetrics(bench.store, { now: NOW });
  assert.ok(steps > 1);
  assert.equal((await both())[0], before);
  const { rowCount } = await bench.store.pool.query('select 1 from metric_quarter');
  assert.ok(rowCount! > 100);
  assert.equal(await rollUpMetrics(bench.store, { now: NOW }), { steps: 0, renewed: 0 });
});

test('and what a count made here says', async () => {
  const start = NOW.getTime() - 399 * DAY_MS;
  const { totals } = await ask({ startDate: iso(start) });
  const inside = mails.filter(({ ms }) => ms >= start);
  const of = (...events: string[]) => inside.filter(({ event }) => events.includes(event)).length;
  const sum = (done: Map<string, number>) =>
    inside.reduce((all, { id }) => all + (done.get(id) ?? 0), 0);
  const { rows } = await bench.store.pool.query<{ last_event: string; count: string }>(
    'select last_event, count(*) from email where id >= $1 group by 1',
    [idAt(start)],
  );
  const shown = new Map(rows.map(({ last_event: event, count }) => [event, Number(count)]));
  assert.equal(
    {
      received: totals['received'],
      delivered: totals['delivered'],
      bounced: totals['bounced'],
      failed: totals['failed'],
      opened: totals['opened'],
      clicked: totals['clicked'],
      unique_opened: totals['unique_opened'],
      unique_clicked: totals['unique_clicked'],
      sent: totals['sent'],
    },
    {
      received: received.filter(({ ms }) => ms >= start).length,
      delivered: ['delivered', 'opened', 'clicked'].reduce((n, e) => n + (shown.get(e) ?? 0), 0),
      bounced: of('bounced'),
      failed: of('failed'),
      opened: sum(opens),
      clicked: sum(clicks),
      unique_opened: inside.filter(({ id }) => opens.has(id)).length,
      unique_clicked: inside.filter(({ id }) => clicks.has(id)).length,
      sent: inside.length - of('queued', 'suppressed'),
    },
  );
});

test('no hour is lost where the clock is changed by half of one', async () => {
  const range = { startDate: '2026-04-04', endDate: '2026-04-07' };
  const { totals } = await ask(range);
  assert.ok(totals['sent']! > 0);
  const hours = await ask({
    ...range,
    timezone: 'Australia/Lord_Howe',
    granularity: 'hourly',
    dimensions: ['period'],
  });
  assert.equal(hours.totals, totals);
});

test('what changes later counts at once, and is counted anew', async () => {
  const before = await answers();
  await engage(60);
  await bench.store.transact(async (client) => {
    for (const { id } of mails.slice(0, 5)) {
      const about = { tenantId: bench.tenantId, emailId: id, recipient: 'r@x.test', detail: {} };
      await recordComplaint(client, about);
    }
  });
  assert.ok((await stale()) > 0);
  const [counted, fromRows] = await both();
  assert.equal(counted, fromRows);
  assert.not.equal(counted, before);
  assert.ok((await rollUpMetrics(bench.store, { now: NOW })).renewed > 0);
  assert.is(await stale(), 0);
  assert.equal(await answers(), fromRows);
});

test('a change that commits while its quarter is counted is not lost', async () => {
  const { store } = bench;
  const target = mails.find(({ ms }) => ms < NOW.getTime() - 20 * DAY_MS)!;
  const complain = (recipient: string) => ({
    tenantId: bench.tenantId,
    emailId: target.id,
    recipient,
    detail: {},
  });
  await store.transact((client) => recordComplaint(client, complain('one@x.test')).then(() => {}));
  await store.pool.query(`update email set last_event = 'delivered' where id = $1`, [target.id]);
  const client = await store.pool.connect();
  await client.query('begin');
  await recordComplaint(client, complain('two@x.test'));
  const counting = rollUpMetrics(store, { now: NOW });
  for (let turn = 0; turn < 500; turn++) {
    const { rows } = await store.pool.query(
      `select 1 from pg_stat_activity where wait_event_type = 'Lock' and query like 'delete from metric_stale%'`,
    );
    if (rows.length > 0) break;
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
  await client.query('commit');
  client.release();
  assert.is((await counting).renewed, 0, 'its token was replaced');
  assert.is(await stale(), 1);
  const [counted, fromRows] = await both();
  assert.equal(counted, fromRows);
  await Promise.all([1, 2, 3].map(() => rollUpMetrics(store, { now: NOW })));
  assert.equal((await both())[0], fromRows);
});

test('two processes and a later hour count nothing twice', async () => {
  const later = new Date(NOW.getTime() + 2 * DAY_MS);
  await Promise.all([1, 2, 3].map(() => rollUpMetrics(bench.store, { now: later })));
  const [counted, fromRows] = await both();
  assert.equal(counted, fromRows);
});

test('a tenant whose mail cannot be counted does not hold up the others', async () => {
  const { pool } = bench.store;
  const tenantId = newId();
  await pool.query("insert into tenant (id, name) values ($1, 'broken')", [tenantId]);
  const [mail] = mails.filter(({ broadcastId }) => broadcastId === null);
  // The count of its only email exists already, so it is refused; and who was never counted comes first.
  await pool.query(
    `insert into email (tenant_id, id, created_at, message_id, from_given, from_domain, to_given, subject, last_event,
       recipient_count)
     values ($1, $2, $3, '<x>', 'a@a.test', $4, '[]', 's', 'sent', 1)`,
    [tenantId, idAt(mail!.ms), new Date(mail!.ms), mail!.domain],
  );
  const quarter = new Date(Math.floor(mail!.ms / 900_000) * 900_000);
  await pool.query(
    `insert into metric_quarter select (q).* from (
       select jsonb_populate_record(q, jsonb_build_object('tenant_id', $1::uuid, 'quarter', $2::timestamptz, 'domain', $3::text,
         'broadcast_id', '00000000-0000-0000-0000-000000000000')) as q
       from metric_quarter q limit 1) made`,
    [tenantId, quarter, mail!.domain],
  );
  const later = new Date(NOW.getTime() + 3 * DAY_MS);
  const refused = await rollUpMetrics(bench.store, { now: later }).catch((error: unknown) => error);
  assert.match(String(refused), /metric_quarter_pkey/);
  const { rows } = await pool.query<{ until: Date | string }>(
    'select counted_until as until from metric_rolled where tenant_id = $1',
    [bench.tenantId],
  );
  assert.ok(new Date(rows[0]!.until).getTime() > later.getTime() - 5.1 * DAY_MS);
});

test.run();
