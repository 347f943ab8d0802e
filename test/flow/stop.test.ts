// Starting and stopping the program as its operator does: the story of the first start, an orderly stop
// with work in flight, and a second start beside it.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync } from 'node:fs';
import { mkdtemp, rm } from 'node:fs/promises';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { API_KEY, createProgram, runProgram, type Program } from '../support/program.ts';

/** As many as the sink takes at once: one answer is waited for. */
const IN_FLIGHT = 8;

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

test('a second appliance on the same data directory is refused and says why', async () => {
  const second = await runProgram({ MAILSTEAD_DATA_DIR: program.dataDir });
  assert.is(await second.ended, 1);
  assert.match(second.said(), /^Mailstead cannot start: .*in use.*\n$/);
  assert.is((await program.call('GET', '/emails')).status, 200, 'the first one is unharmed');
});

test('a port in use is all that is said, and nothing was begun', async () => {
  const parent = await mkdtemp(join(tmpdir(), 'mailstead-port-'));
  const dataDir = join(parent, 'data');
  const { port } = new URL(program.base);
  const second = await runProgram({
    MAILSTEAD_DATA_DIR: dataDir,
    MAILSTEAD_HTTP_PORT: port,
    MAILSTEAD_MX_PORT: '0',
    MAILSTEAD_SUBMISSION_PORT: '0',
    MAILSTEAD_SUBMISSIONS_PORT: '0',
    MAILSTEAD_METRICS_PORT: '0',
  });
  assert.is(await second.ended, 1);
  assert.match(
    second.said(),
    /^Mailstead cannot start: port \d+ is in use .*MAILSTEAD_HTTP_PORT\n$/,
  );
  assert.not(existsSync(dataDir));
  await rm(parent, { recursive: true });
});

test('SIGTERM with work in flight: exit 0, nothing lost, nothing doubled', async () => {
  const ids: string[] = [];
  for (let number = 0; number < IN_FLIGHT; number++) {
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
