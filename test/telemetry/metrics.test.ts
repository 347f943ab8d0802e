// What Prometheus is told by a running appliance with a worker process, which has sent, failed, received, forwarded and
// called a webhook; and that the dashboard and the alert rules name nothing else.
import { readdirSync, readFileSync } from 'node:fs';
import { join } from 'node:path';
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readJournal } from '../../src/delivery/journal.ts';
import { eventTypes } from '../../src/timeline/outbox.ts';
import { startApp, until, type App } from '../support/app.ts';
import { rulesOf } from '../support/forwarding-rules.ts';
import { closeAll, send } from '../support/sink-session.ts';
import { startReceiver, type Receiver } from '../support/webhooks.ts';

const test = suite('metrics of an appliance');
const root = join(import.meta.dirname, '../..');
let app: App;
let endpoint: Receiver;

test.before(async () => {
  endpoint = await startReceiver();
  app = await startApp({ MAILSTEAD_WORKERS: '1' });
});
test.after(async () => {
  await closeAll();
  await app.stop();
  await endpoint.stop();
});

interface Sample {
  readonly name: string;
  readonly labels: Readonly<Record<string, string>>;
  readonly value: number;
}

async function scrape(accept = ''): Promise<{ readonly type: string; readonly text: string }> {
  const response = await fetch(`http://127.0.0.1:${app.appliance.metricsPort}/metrics`, {
    headers: { accept },
  });
  assert.is(response.status, 200);
  return { type: response.headers.get('content-type') ?? '', text: await response.text() };
}

function samplesOf(text: string): readonly Sample[] {
  return text
    .split('\n')
    .filter((line) => line !== '' && !line.startsWith('#'))
    .map((line) => {
      const [, name = '', labels = '', value = ''] = /^(\w+)(?:\{(.*)\})? (\S+)$/.exec(line) ?? [];
      assert.is.not(name, '', line);
      return {
        name,
        labels: Object.fromEntries(
          [...labels.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, key, said]) => [key, said]),
        ),
        value: Number(value),
      };
    });
}

const valueOf = (
  samples: readonly Sample[],
  name: string,
  labels: Readonly<Record<string, string>> = {},
): number =>
  samples
    .filter(
      (one) =>
        one.name === name &&
        Object.entries(labels).every(([key, said]) => one.labels[key] === said),
    )
    .reduce((sum, { value }) => sum + value, 0);

/** Every metric that an expression of these files asks for. */
function namesIn(file: string): readonly string[] {
  const found = readFileSync(join(root, file), 'utf8').match(/\b(?:mailstead|nodejs|process)_\w+/g);
  return [...new Set(found)].filter((name) => name !== 'mailstead_dashboard');
}

test('what an appliance does is counted, whichever process did it', async () => {
  const pool = new Pool({ connectionString: app.databaseUrl, max: 1 });
  await pool.query(
    `insert into egress (name, blocked_since, reason, silent, probed_at, reported_at)
     values ('second', now(), 'a test', '{}', now(), now())`,
  );
  await pool.end();
  const hook = await app.call('POST', '/webhooks', {
    body: { endpoint: endpoint.url, events: eventTypes },
  });
  assert.is(hook.status, 201);
  const domains = await app.call<{ data: { id: string }[] }>('GET', '/domains');
  await rulesOf(app).forward(domains.body.data[0]!.id, 'desk', ['ok@elsewhere.test']);
  const large = { filename: 'a.bin', content: Buffer.alloc(200_000, 7).toString('base64') };
  await app.untilEvent(await app.send({ attachments: [large] }), 'delivered');
  await app.untilEvent(await app.send({ to: 'reject@recipient.test' }), 'bounced');
  await app.untilEvent(await app.send({ to: 'tempfail@recipient.test' }), 'delivery_delayed');
  await app.call('POST', '/suppressions', { body: { email: 'gone@recipient.test' } });
  await app.call('GET', '/no/such/path');
  for (const recipient of ['desk@mailstead.test', 'nobody@not-ours.test']) {
    await send(app.appliance.mxPort!, {
      from: 'a@sender.test',
      to: [recipient],
      raw: 'From: a@sender.test\r\nTo: desk@mailstead.test\r\nSubject: In\r\n\r\nHello\r\n',
    }).catch(() => undefined);
  }
  await until(
    async () => samplesOf((await scrape()).text),
    (now) =>
      valueOf(now, 'mailstead_emails_accepted_total', { channel: 'forward' }) === 1 &&
      valueOf(now, 'mailstead_attempts_total', { outcome: 'delivered' }) === 2 &&
      valueOf(now, 'mailstead_webhook_calls_total', { outcome: 'acknowledged' }) > 4,
  );
  const samples = samplesOf((await scrape()).text);
  const about = (name: string, labels: Readonly<Record<string, string>> = {}): number =>
    valueOf(samples, `mailstead_${name}`, labels);
  assert.is(about('emails_accepted_total', { channel: 'api' }), 3);
  assert.is(about('attempts_total', { provider: 'sink', outcome: 'delivered' }), 2);
  assert.is(about('attempts_total', { provider: 'sink', outcome: 'bounced' }), 1);
  assert.is(about('attempts_total', { provider: 'sink', outcome: 'deferred' }), 1);
  assert.is(about('attempt_causes_total', { outcome: 'bounced', cause: 'no_mailbox' }), 1);
  assert.is(about('first_attempt_delay_seconds_count'), 4);
  assert.is(about('delivery_delay_seconds_count'), 2);
  assert.is(about('attempt_phase_seconds_count', { phase: 'dot' }), 2);
  assert.is(about('http_requests_total', { route: '/emails', method: 'POST', status: '2xx' }), 3);
  assert.is(about('http_requests_total', { route: 'none', method: 'GET', status: '4xx' }), 1);
  assert.is(about('suppressions_added_total', { origin: 'manual' }), 1);
  assert.is(about('inbound_messages_total', { result: 'taken', code: '2xx' }), 1);
  assert.is(about('inbound_recipients_total', { code: '5xx' }), 1);
  assert.is(about('forwards_total', { status: 'queued' }), 1);
  assert.is(about('queue_deliveries', { state: 'deferred' }), 1);
  assert.is(about('port25_blocked', { egress: 'second' }), 1);
  assert.is(about('delivery_workers'), 1);
  assert.ok(about('blob_operations_total', { operation: 'write', result: 'done' }) > 0);
  assert.ok(
    about('blob_operations_total', { operation: 'read' }) +
      about('blob_operations_total', { operation: 'get' }) >
      0,
    'by the worker',
  );
  assert.is(about('ready'), 1);
  assert.ok(about('certificate_expiry_timestamp_seconds') > Date.now() / 1_000);
  const processes = samples.filter(({ name }) => name === 'process_resident_memory_bytes');
  assert.equal(
    processes.map(({ labels }) => labels['process']),
    ['main', 'delivery-1'],
  );
});

test('nothing that it says names a person, a tenant or a domain', async () => {
  const { text } = await scrape();
  const { body } = await app.call<{ data: { id: string }[] }>('GET', '/domains');
  assert.not.match(text, /@|recipient\.test|elsewhere\.test|sender\.test|not-ours/);
  assert.not.ok(text.includes(body.data[0]!.id));
  assert.not.match(text, /[0-9a-f]{8}-[0-9a-f]{4}-7/, 'an id of ours');
});

test('dashboard and alert rules name what there is, and each has its meaning and its row', async () => {
  const files = ['docker/grafana/mailstead-dashboard.json', 'docker/prometheus/alerts.yaml'];
  const named = new Set(files.flatMap(namesIn));
  assert.ok(named.size > 50, `${named.size} names were found`);
  // Counted from its first occurrence on: nothing failed here.
  const rare = ['mailstead_database_errors_total'];
  const missingIn = (text: string): readonly string[] => {
    const samples = new Set(samplesOf(text).map(({ name }) => name));
    return [...named].filter((name) => !samples.has(name) && !rare.includes(name));
  };
  // A busy machine may answer before all has been looked at or has happened.
  const { text } = await until(scrape, (found) => missingIn(found.text).length === 0);
  assert.equal(missingIn(text), []);
  const page = readFileSync(join(root, 'docs/metrics.md'), 'utf8');
  const types = [...text.matchAll(/^# TYPE (\w+) (\w+)$/gm)].map(([, name]) => name!);
  const helps = new Set([...text.matchAll(/^# HELP (\w+) \S.+$/gm)].map(([, name]) => name));
  assert.ok(types.length > 60);
  assert.equal(
    types.filter((name) => !helps.has(name)),
    [],
  );
  assert.equal(
    types.filter((name) => name.startsWith('mailstead_') && !page.includes(`| \`${name}\``)),
    [],
  );
  for (const name of rare) assert.ok(types.includes(name));
});

test('OpenMetrics by Accept, with the same numbers', async () => {
  const { type, text } = await scrape(
    'application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3',
  );
  assert.match(type, /^application\/openmetrics-text; version=1\.0\.0/);
  assert.match(text, /\n# TYPE mailstead_attempts counter\n/);
  assert.match(text, /\nmailstead_attempts_total\{.*\} 2\n/);
  assert.not.match(text, /_total_total/);
  assert.ok(text.endsWith('\n# EOF\n'));
  assert.match((await scrape()).type, /^text\/plain; version=0\.0\.4/);
});

test('a worker that dies takes no total along, and the next one adds to it', async () => {
  const before = samplesOf((await scrape()).text);
  const delivered = valueOf(before, 'mailstead_attempts_total', { outcome: 'delivered' });
  const statements = valueOf(before, 'mailstead_database_statement_seconds_count');
  const folder = join(app.dataDir, 'journal');
  const [journal] = readdirSync(folder).map((name) => readJournal(join(folder, name)));
  process.kill(journal!.pid, 'SIGKILL');
  await until(
    () => app.call('GET', '/health/ready'),
    ({ status }) => status === 503,
  );
  const between = samplesOf((await scrape()).text);
  assert.is(valueOf(between, 'mailstead_attempts_total', { outcome: 'delivered' }), delivered);
  assert.ok(valueOf(between, 'mailstead_database_statement_seconds_count') >= statements);
  await app.untilEvent(await app.send(), 'delivered');
  const after = samplesOf((await scrape()).text);
  assert.is(valueOf(after, 'mailstead_attempts_total', { outcome: 'delivered' }), delivered + 1);
});

test.run();
