// Starting and stopping the program as its operator does: the story of the first start, an orderly stop
// with work in flight, and every expected reason not to start.
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { existsSync } from 'node:fs';
import { mkdtemp, readdir, rm } from 'node:fs/promises';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join, resolve } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { freshDatabase } from '../support/postgres.ts';
import { API_KEY, createProgram, freePort, type Program } from '../support/program.ts';

const test = suite('stop');
let program: Program;

test.before(async () => {
  program = await createProgram({ MAILSTEAD_LOG_LEVEL: 'warn' });
  await program.start();
});
test.after(() => program.remove());

test('the first start tells its story and ends with a curl that works', async () => {
  const output = await until(
    () => Promise.resolve(program.output()),
    (text) => text.includes('Stop with Ctrl-C'),
  );
  assert.match(output, /accepted[\s\S]*attempt_started[\s\S]*delivered/);
  const curl = /^curl .*$/m.exec(output)?.[0] ?? '';
  const child = spawn('sh', ['-c', curl.replace('localhost', '127.0.0.1')]);
  let answer = '';
  child.stdout.on('data', (chunk: Buffer) => {
    answer += chunk.toString();
  });
  await once(child, 'close');
  assert.match(answer, /^\{"object":"email","id":"[0-9a-f-]{36}"\}$/);
});

interface Run {
  readonly child: ChildProcess;
  said(): string;
  /** Its exit code. */
  readonly ended: Promise<number | null>;
}

/** The program with these settings, production where they say so. */
async function run(settings: Record<string, string>): Promise<Run> {
  const child = spawn(process.execPath, ['--import', 'tsx', resolve('src/main.ts')], {
    env: {
      PATH: process.env['PATH'],
      HOME: process.env['HOME'],
      MAILSTEAD_MODE: 'development',
      MAILSTEAD_HTTP_HOST: '127.0.0.1',
      MAILSTEAD_HTTP_PORT: String(await freePort()),
      MAILSTEAD_MX_PORT: '0',
      MAILSTEAD_SUBMISSION_PORT: '0',
      MAILSTEAD_SUBMISSIONS_PORT: '0',
      ...settings,
    },
  });
  let text = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.on('data', (chunk: Buffer) => {
      text += chunk.toString();
    });
  }
  const ended = once(child, 'close').then(([code]) => code as number | null);
  return { child, said: () => text, ended };
}

test('a second appliance on the same data directory is refused and says why', async () => {
  const second = await run({ MAILSTEAD_DATA_DIR: program.dataDir });
  assert.is(await second.ended, 1);
  assert.match(second.said(), /^Mailstead cannot start: .*in use.*\n$/);
  assert.is((await program.call('GET', '/emails')).status, 200, 'the first one is unharmed');
});

test('a port in use is all that is said, and nothing was begun', async () => {
  const parent = await mkdtemp(join(tmpdir(), 'mailstead-port-'));
  const dataDir = join(parent, 'data');
  const { port } = new URL(program.base);
  const second = await run({
    MAILSTEAD_DATA_DIR: dataDir,
    MAILSTEAD_HTTP_PORT: port,
    MAILSTEAD_MX_PORT: '0',
    MAILSTEAD_SUBMISSION_PORT: '0',
    MAILSTEAD_SUBMISSIONS_PORT: '0',
  });
  assert.is(await second.ended, 1);
  assert.match(
    second.said(),
    /^Mailstead cannot start: port \d+ is in use .*MAILSTEAD_HTTP_PORT\n$/,
  );
  assert.not(existsSync(dataDir));
  await rm(parent, { recursive: true });
});

test('a database that does not exist is named and not made', async () => {
  const database = await freshDatabase();
  const dataDir = await mkdtemp(join(tmpdir(), 'mailstead-url-'));
  const url = new URL(database.url);
  url.pathname = '/not_there';
  for (let times = 0; times < 2; times += 1) {
    const lost = await run({ MAILSTEAD_DATA_DIR: dataDir, MAILSTEAD_DATABASE_URL: url.href });
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
  const waiting = await run({
    MAILSTEAD_DATA_DIR: dataDir,
    MAILSTEAD_HTTP_PORT: String(port),
    MAILSTEAD_MX_PORT: '0',
    MAILSTEAD_SUBMISSION_PORT: '0',
    MAILSTEAD_SUBMISSIONS_PORT: '0',
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

test('SIGTERM with work in flight: exit 0, nothing lost, nothing doubled', async () => {
  const ids: string[] = [];
  for (let number = 0; number < 60; number++) {
    const { body } = await program.call('POST', '/emails', {
      from: 'Ada <ada@mailstead.test>',
      to: `slow@r${number}.test`, // answers after 5 s
      subject: `In flight ${number}`,
      text: 'x',
    });
    ids.push(String(body['id']));
  }
  await until(
    () => program.call('GET', `/emails/${ids[0]}`),
    ({ body }) => body['last_event'] === 'sent',
  );
  assert.is(await program.terminate(), 0);
  await program.start();
  for (const id of ids) {
    const { body } = await until(
      () => program.call('GET', `/emails/${id}`),
      (answer) => answer.body['last_event'] === 'delivered',
    );
    assert.is(body['provider_retry_count'], 0, 'no attempt was wasted');
  }
  const { body } = await program.call('GET', '/sink/messages?limit=100');
  const subjects = (body['data'] as { raw: string }[])
    .map(({ raw }) => /^Subject: (In flight \d+)/m.exec(raw)?.[1])
    .filter((subject) => subject !== undefined);
  assert.is(subjects.length, ids.length);
  assert.is(new Set(subjects).size, ids.length);
});

test('SIGTERM with an upload that never ends: exit 0 all the same', async () => {
  const { hostname, port } = new URL(program.base);
  const socket = connect(Number(port), hostname);
  socket.on('error', () => undefined);
  const head = `POST /emails HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer ${API_KEY}\r\n`;
  socket.write(`${head}Content-Length: 999\r\n\r\n{`);
  await once(socket, 'connect');
  // An answer on a later connection: the upload has been seen by then.
  assert.is((await program.call('GET', '/emails')).status, 200);
  const closed = once(socket, 'close');
  socket.resume();
  assert.is(await program.terminate(), 0);
  await closed;
});

test.run();
