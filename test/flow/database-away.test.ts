// Postgres goes away under load and comes back: meanwhile the API answers 503 with the envelope; afterwards
// everything that was acknowledged arrives exactly once, and nobody had to restart anything.
// MAILSTEAD_TEST_AWAY_MS sets for how long (default 1.5 s).
import { mkdtemp, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startEmbeddedPostgres, type EmbeddedPostgres } from '../../src/store/embedded.ts';
import { until } from '../support/app.ts';
import { startCountingSink, type CountingSink } from '../support/counting-sink.ts';
import { createProgram, type Program } from '../support/program.ts';
import { silent } from '../support/queue.ts';

const AWAY_MS = Number(process.env['MAILSTEAD_TEST_AWAY_MS'] ?? 1_500);
const EMAILS = 100;

const test = suite('database away');
let folder: string;
let postgres: EmbeddedPostgres;
let sink: CountingSink;
let program: Program;

test.before(async () => {
  folder = await mkdtemp(join(tmpdir(), 'mailstead-away-'));
  postgres = await startEmbeddedPostgres({ dir: join(folder, 'pg'), log: silent });
  sink = await startCountingSink();
  program = await createProgram({
    MAILSTEAD_DATABASE_URL: postgres.url,
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://127.0.0.1:${sink.port}`,
    MAILSTEAD_RETRY_SCHEDULE: '1s',
    MAILSTEAD_LOG_LEVEL: 'error',
  });
  await program.start();
});
test.after(async () => {
  await program.remove();
  await postgres.stop();
  await sink.stop();
  await rm(folder, { recursive: true, force: true });
});

const email = (number: number) => ({
  from: 'Ada <ada@mailstead.test>',
  to: `r${number}@recipient.test`,
  subject: `Number ${number}`,
  text: 'x'.repeat(1_500),
});

test('503 while it is away, nothing lost, nothing doubled, back by itself', async () => {
  const accepted = new Set<string>();
  const refusals: { status: number; body: Record<string, unknown> }[] = [];
  let next = 0;
  let stopSending = false;
  const connection = async (): Promise<void> => {
    while (!stopSending && next < EMAILS * 100) {
      const answer = await program.call('POST', '/emails', email(next++));
      if (answer.status === 200) accepted.add(String(answer.body['id']));
      else {
        refusals.push(answer);
        await new Promise((resolve) => setTimeout(resolve, 50));
      }
    }
  };
  const sending = Array.from({ length: 10 }, connection);
  await until(
    () => Promise.resolve(accepted.size),
    (count) => count >= EMAILS,
  );
  await postgres.stop();
  const before = accepted.size;
  await until(
    () => Promise.resolve(refusals.length),
    (count) => count >= 20,
  );
  const ready = await fetch(`${program.base}/health/ready`);
  assert.is(ready.status, 503);
  const report = (await ready.json()) as { missing: { what: string }[] };
  assert.ok(report.missing.some(({ what }) => what === 'database'));
  assert.is((await fetch(`${program.base}/health/live`)).status, 200);
  await new Promise((resolve) => setTimeout(resolve, AWAY_MS));

  postgres = await startEmbeddedPostgres({ dir: join(folder, 'pg'), log: silent });
  await until(
    () => Promise.resolve(accepted.size),
    (count) => count >= before + EMAILS,
  );
  stopSending = true;
  await Promise.all(sending);

  for (const { status, body } of refusals) {
    assert.is(status, 503);
    assert.equal(Object.keys(body).toSorted(), ['code', 'message', 'name', 'statusCode']);
    assert.is(body['name'], 'service_unavailable');
    assert.not.match(String(body['message']), /ECONN|socket|postgres|\/tmp/i);
  }
  for (const id of accepted) {
    const { body } = await until(
      () => program.call('GET', `/emails/${id}`),
      (answer) => answer.body['last_event'] === 'delivered',
    );
    assert.is(sink.counts.get(String(body['message_id'])), 1);
  }
  for (const [messageId, count] of sink.counts)
    assert.is(count, 1, `${messageId} arrived ${count} times`);
});

test.run();
