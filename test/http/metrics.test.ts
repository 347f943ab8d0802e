// GET /emails/metrics, over HTTP and by the official client: the counts are those of the emails, the periods add up,
// and a wrong question is named.
import { Resend } from 'resend';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { noteLateChanges } from '../../src/timeline/late-changes.ts';
import { startApp, type App } from '../support/app.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';

interface Metrics {
  start_date: string;
  end_date: string;
  metrics: string[];
  dimensions: string[];
  granularity: string;
  totals: Record<string, number>;
  data?: ({ period?: string; domain_name?: string; email_id?: string } & Record<string, unknown>)[];
}

const test = suite('metrics');
let app: App;
let tenantId: string;
let domainId: string;
/** Berlin is two hours ahead of UTC then, and an hour after the change in autumn. */
const RANGE = 'start_date=2025-10-24&end_date=2025-10-28';

const idAt = (time: string): string =>
  Date.parse(time).toString(16).padStart(12, '0').replace(/^.{8}/, '$&-') + newId().slice(13);

/** The appliance counts old mail meanwhile, and mail does not come into the past by itself. */
async function note(tenant: string, ...ids: readonly string[]): Promise<void> {
  await onDatabase(app, async (pool) => {
    const client = await pool.connect();
    await noteLateChanges(
      client,
      ids.map((emailId) => ({ tenantId: tenant, emailId })),
    );
    client.release();
  });
}

/** An email of the past, as its row would be. */
async function add(
  time: string,
  event: string,
  about: { domain?: string; code?: string; retries?: number; tenant?: string } = {},
): Promise<string> {
  const id = idAt(time);
  const isSent = !['queued', 'scheduled', 'canceled', 'suppressed'].includes(event);
  await onDatabase(app, (pool) =>
    pool.query(
      `insert into email (tenant_id, id, created_at, message_id, from_given, from_domain, to_given,
         subject, last_event, recipient_count, provider_last_attempted_at, provider_last_error,
         provider_retry_count)
       values ($1, $2, $3, '<x>', 'a@x.test', $4, '[]', 's', $5, 1, $6, $7, $8)`,
      [
        about.tenant ?? tenantId,
        id,
        time,
        about.domain ?? 'mailstead.test',
        event,
        isSent ? time : null,
        about.code === undefined ? null : JSON.stringify({ code: about.code, message: '' }),
        about.retries ?? 0,
      ],
    ),
  );
  await note(about.tenant ?? tenantId, id);
  return id;
}
let bounced: string;

test.before(async () => {
  app = await startApp();
  const { rows } = await onDatabase(app, (pool) =>
    pool.query<{ tenant_id: string; id: string }>('select tenant_id, id from sending_domain'),
  );
  tenantId = rows[0]!.tenant_id;
  domainId = rows[0]!.id;
  await add('2025-10-23T23:59:59Z', 'delivered'); // before the range
  await add('2025-10-24T00:00:00Z', 'delivered');
  await add('2025-10-24T10:00:00Z', 'delivered', { retries: 2 });
  await add('2025-10-24T22:30:00Z', 'sent'); // the 25th in Berlin
  bounced = await add('2025-10-26T00:30:00Z', 'bounced', { code: '5.1.1' }); // 2:30 in Berlin,
  await add('2025-10-26T01:30:00Z', 'bounced', { code: 'expired' }); // and 2:30 again
  await add('2025-10-26T12:00:00Z', 'bounced', { domain: 'other.test' });
  await add('2025-10-27T12:00:00Z', 'failed');
  await add('2025-10-27T13:00:00Z', 'suppressed');
  await add('2025-10-27T14:00:00Z', 'scheduled');
  await add('2025-10-28T00:00:00Z', 'delivered'); // the end is exclusive
});
test.after(() => app.stop());

const ask = async (query: string): Promise<Metrics> => {
  const { status, body } = await app.call<Metrics>('GET', `/emails/metrics?${query}`);
  assert.is(status, 200, JSON.stringify(body));
  return body;
};
const column = (metrics: Metrics, name: string, value: string) =>
  metrics.data?.map((row) => [row[name], row[value]]);

test('opens and clicks of persons, received mail and mail of broadcasts', async () => {
  const range = 'start_date=2025-08-01&end_date=2025-08-02';
  const [one, two] = [
    await add('2025-08-01T01:00:00Z', 'clicked'),
    await add('2025-08-01T02:00:00Z', 'delivered'),
  ];
  const broadcastId = newId();
  const receivedId = idAt('2025-08-01T03:00:00Z');
  await onDatabase(app, async (pool) => {
    await pool.query(
      `insert into broadcast (tenant_id, id, name, status, created_at, updated_at)
       values ($1, $2, 'August', 'sent', now(), now())`,
      [tenantId, broadcastId],
    );
    await pool.query('update email set broadcast_id = $1 where id = $2', [broadcastId, one]);
    for (const [id, kind, suspect] of [
      [one, 'opened', null],
      [one, 'opened', 'proxy'],
      [one, 'clicked', null],
      [one, 'clicked', 'scanner'],
      [one, 'unsubscribed', null],
      [two, 'opened', 'prefetch'],
    ]) {
      await pool.query(
        // Long after: they count where their email does.
        `insert into engagement (tenant_id, email_id, id, kind, at, suspect)
         values ($1, $2, $3, $4, '2025-09-01', $5)`,
        [tenantId, id, newId(), kind, suspect],
      );
    }
    await pool.query(
      `insert into received_email (tenant_id, id, created_at, mail_from, received_for, route_decisions,
         from_shown, to_shown, cc_shown, bcc_shown, reply_to_shown, subject, attachments)
       values ($1, $2, now(), '', '["Ada@MAILSTEAD.test"]', '[]', '', '[]', '[]', '[]', '[]', '', '[]')`,
      [tenantId, receivedId],
    );
  });
  await note(tenantId, one, two, receivedId);
  const metrics =
    'received,delivered,opened,clicked,unsubscribed,unique_opened,unique_clicked,open_rate';
  const of = async (query: string) => (await ask(`${range}&metrics=${metrics}&${query}`)).totals;
  const ofOne = {
    received: 0,
    delivered: 1,
    opened: 2,
    clicked: 1,
    unsubscribed: 1,
    unique_opened: 1,
    unique_clicked: 1,
    open_rate: 100,
  };
  const all = { ...ofOne, received: 1, delivered: 2, open_rate: 50 };
  assert.equal(await of(''), all);
  assert.equal(await of(`domain_id=${domainId}`), all);
  assert.equal(await of(`email_id=${one}`), ofOne);
  assert.equal(await of(`broadcast_id=${broadcastId}`), ofOne);
  assert.equal(await of('dimensions=broadcast'), ofOne);
  assert.is((await of(`email_id=${receivedId}`))['received'], 1);
  const by = await ask(`${range}&metrics=opened&dimensions=period,broadcast`);
  assert.equal(by.data, [
    { period: '2025-08-01', broadcast_id: broadcastId, broadcast_name: 'August', opened: 2 },
  ]);
  const { key } = await secondTenant(app);
  const { body } = await app.call<Metrics>(
    'GET',
    `/emails/metrics?${range}&metrics=received,opened&broadcast_id=${broadcastId}`,
    { key },
  );
  assert.equal(body.totals, { received: 0, opened: 0 });
});

test('mail whose last answer was lost is counted for whoever asks', async () => {
  const range = 'start_date=2025-09-01T00:00:00Z&end_date=2025-09-02T00:00:00Z';
  await add('2025-09-01T01:00:00Z', 'sent', { code: 'unknown_after_dot' });
  await add('2025-09-01T02:00:00Z', 'delivery_delayed', { code: 'unknown_after_dot' });
  await add('2025-09-01T03:00:00Z', 'delivered', { code: 'unknown_after_dot' });
  await add('2025-09-01T04:00:00Z', 'sent');
  const { totals, metrics } = await ask(`metrics=unknown,sent&${range}`);
  assert.equal([metrics, totals], [['unknown', 'sent'], { unknown: 2, sent: 4 }]);
});

test('the totals of a range, all metrics by default', async () => {
  const { totals, metrics, data, ...rest } = await ask(RANGE);
  assert.equal(rest, {
    object: 'metrics',
    start_date: '2025-10-24T00:00:00.000Z',
    end_date: '2025-10-28T00:00:00.000Z',
    dimensions: [],
    granularity: 'daily',
  });
  assert.is(data, undefined);
  assert.is(metrics.length, 22);
  assert.equal(totals, {
    received: 0,
    delivered: 2,
    complained: 0,
    suppressed: 1,
    bounced: 3,
    bounced_transient: 1,
    bounced_permanent: 1,
    bounced_undetermined: 1,
    opened: 0,
    clicked: 0,
    unsubscribed: 0,
    delivery_delayed: 1,
    failed: 1,
    sent: 7,
    unique_opened: 0,
    unique_clicked: 0,
    delivery_rate: 28.6,
    open_rate: 0,
    click_rate: 0,
    bounce_rate: 42.9,
    complaint_rate: 0,
    unsubscribe_rate: 0,
  });
});

test('days, empty ones too, in the time zone asked for', async () => {
  const query = `${RANGE}&metrics=sent,delivery_rate&dimensions=period`;
  const utc = await ask(query);
  assert.equal(column(utc, 'period', 'sent'), [
    ['2025-10-24', 3],
    ['2025-10-25', 0],
    ['2025-10-26', 3],
    ['2025-10-27', 1],
  ]);
  assert.equal(column(utc, 'period', 'delivery_rate')?.[0], ['2025-10-24', 66.7]);
  const berlin = await ask(`${query}&timezone=Europe/Berlin`);
  assert.equal(column(berlin, 'period', 'sent'), [
    ['2025-10-24', 2],
    ['2025-10-25', 1],
    ['2025-10-26', 3],
    ['2025-10-27', 1],
    ['2025-10-28', 0],
  ]);
});

test('an hour that comes twice is two periods; periods always add up', async () => {
  for (const timezone of ['UTC', 'Europe/Berlin', 'Asia/Kathmandu', 'America/St_Johns']) {
    for (const granularity of ['hourly', 'daily', 'weekly', 'monthly']) {
      const { data, totals } = await ask(
        `${RANGE}&metrics=sent&dimensions=period&granularity=${granularity}&timezone=${timezone}`,
      );
      const counted = data?.reduce((sum, row) => sum + Number(row['sent']), 0);
      assert.is(counted, totals['sent'], `${granularity} in ${timezone}`);
      const periods = data?.map(({ period }) => period);
      assert.is(new Set(periods).size, periods?.length);
      assert.equal(periods, periods?.toSorted());
    }
  }
  const hours = await ask(
    'start_date=2025-10-26&end_date=2025-10-26T02:00:00Z&metrics=bounced&dimensions=period&granularity=hourly&timezone=Europe/Berlin',
  );
  assert.equal(column(hours, 'period', 'bounced'), [
    ['2025-10-26T00:00:00.000Z', 1],
    ['2025-10-26T01:00:00.000Z', 1],
  ]);
});

test('by domain and by email, alone and with the period', async () => {
  const domains = await ask(`${RANGE}&metrics=bounced&dimensions=domain`);
  assert.equal(domains.data, [
    { domain_id: domainId, domain_name: 'mailstead.test', bounced: 2 },
    { domain_id: null, domain_name: 'other.test', bounced: 1 },
  ]);
  const both = await ask(`${RANGE}&metrics=bounced&dimensions=period&dimensions=domain`);
  assert.equal(both.data?.at(-1), {
    period: '2025-10-27',
    domain_id: domainId,
    domain_name: 'mailstead.test',
    bounced: 0,
  });
  assert.equal(both.totals, { bounced: 3 });
  const emails = await ask(`${RANGE}&metrics=bounced&dimensions=email&email_id=${bounced}`);
  assert.equal(emails.data, [{ email_id: bounced, bounced: 1 }]);
});

test('filters narrow; what does not exist or is not ours counts nothing', async () => {
  const { tenantId: other, key } = await secondTenant(app);
  const foreign = await add('2025-10-25T00:00:00Z', 'delivered', { tenant: other });
  assert.equal((await ask(`${RANGE}&metrics=bounced&domain_id=${domainId}`)).totals, {
    bounced: 2,
  });
  for (const query of [
    `domain_id=${newId()}`,
    `email_id=${newId()},${foreign}`,
    `broadcast_id=${newId()}`,
    `dimensions=broadcast`,
  ]) {
    const { totals } = await ask(`${RANGE}&metrics=delivered,sent&${query}`);
    assert.equal(totals['delivered'] ?? 0, 0, query);
  }
  const { body } = await app.call<Metrics>('GET', `/emails/metrics?${RANGE}&metrics=sent`, { key });
  assert.equal(body.totals, { sent: 1 });
});

test('without a range: the six days before now, and the official client reads it', async () => {
  const id = await app.send();
  await app.untilEvent(id, 'delivered');
  const resend = new Resend(app.key, { baseUrl: app.base });
  const { data, error } = await resend.emails.metrics({
    metrics: ['sent', 'delivered'],
    emailId: [id],
  });
  assert.is(error, null);
  assert.equal(data?.totals, { sent: 1, delivered: 1 });
  const days = Date.parse(data!.end_date) - Date.parse(data!.start_date);
  assert.is(days, 6 * 86_400_000);
  const future = await ask('end_date=2999-01-01&metrics=sent');
  assert.ok(Date.parse(future.end_date) <= Date.now() + 1_000, 'no later than now');
});

for (const [query, path] of [
  ['start_date=soon', 'start_date'],
  ['end_date=2026-02-30', 'end_date'],
  ['start_date=2999-01-01', 'start_date'],
  ['start_date=2020-01-01', 'start_date'],
  ['start_date=2025-02-02&end_date=2025-02-01', 'start_date'],
  ['timezone=Mars/Olympus', 'timezone'],
  ['timezone=%2B02:00', 'timezone'],
  ['granularity=yearly', 'granularity'],
  ['granularity=constructor', 'granularity'],
  ['metrics=sent,lost', 'metrics'],
  ['metrics=', 'metrics'],
  ['metrics=constructor', 'metrics'],
  ['dimensions=tag', 'dimensions'],
  ['domain_id=x', 'domain_id'],
  [`email_id=${Array.from({ length: 101 }, () => newId()).join()}`, 'email_id'],
  [`email_id=${newId()}&dimensions=broadcast`, 'dimensions'],
  [`broadcast_id=${newId()}&dimensions=email`, 'dimensions'],
] as const) {
  test(`?${query.slice(0, 60)} is refused`, async () => {
    const { status, body } = await app.call<{ details: { issues: { path: string }[] } }>(
      'GET',
      `/emails/metrics?${query}`,
    );
    assert.is(status, 422);
    assert.equal(
      body.details.issues.map((issue) => issue.path),
      [path],
    );
  });
}

test.run();
