// A start whose database is not there: named where it was never made, waited for where it is away.
import { mkdtemp, readdir, rm } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { freshDatabase } from '../support/postgres.ts';
import { freePort, runProgram } from '../support/program.ts';

const test = suite('no database');

test('a database that does not exist is named and not made', async () => {
  const database = await freshDatabase();
  const dataDir = await mkdtemp(join(tmpdir(), 'mailstead-url-'));
  const url = new URL(database.url);
  url.pathname = '/not_there';
  for (let times = 0; times < 2; times += 1) {
    const lost = await runProgram({
      MAILSTEAD_DATA_DIR: dataDir,
      MAILSTEAD_DATABASE_URL: url.href,
    });
    assert.is(await lost.ended, 1);
    assert.match(
      lost.said(),
      /^Mailstead cannot start: database "not_there" does not exist.*\(MAILSTEAD_DATABASE_URL\)\n$/,
    );
  }
  await database.drop();
  await rm(dataDir, { recursive: true });
});

test('SIGTERM while the database is waited for: not ready yet, and a quiet end', async () => {
  const dataDir = await mkdtemp(join(tmpdir(), 'mailstead-wait-'));
  const [port, away] = [await freePort(), await freePort()];
  const waiting = await runProgram({
    MAILSTEAD_DATA_DIR: dataDir,
    MAILSTEAD_HTTP_PORT: String(port),
    MAILSTEAD_MX_PORT: '0',
    MAILSTEAD_SUBMISSION_PORT: '0',
    MAILSTEAD_SUBMISSIONS_PORT: '0',
    MAILSTEAD_METRICS_PORT: '0',
    MAILSTEAD_DATABASE_URL: `postgres://me:hunter2@127.0.0.1:${away}/x`,
  });
  await until(
    () => Promise.resolve(waiting.said()),
    (text) => text.includes('waiting for the database'),
  );
  const base = `http://127.0.0.1:${port}`;
  assert.is((await fetch(`${base}/health/live`)).status, 200);
  assert.is((await fetch(`${base}/health/ready`)).status, 503);
  const refused = await fetch(`${base}/emails`);
  assert.is(refused.status, 503);
  assert.ok(refused.headers.get('retry-after'));
  assert.is(((await refused.json()) as { code: string }).code, 'service_unavailable');
  waiting.child.kill('SIGTERM');
  assert.is(await waiting.ended, 0);
  assert.not.match(waiting.said(), /hunter2|cannot start|error/i);
  assert.equal(
    await readdir(dataDir).then((names) => names.filter((n) => n.endsWith('.lock'))),
    [],
  );
  await rm(dataDir, { recursive: true });
});

test.run();
