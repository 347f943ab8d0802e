// Starting and stopping the program as its operator does: the story of the first start, an orderly stop
// with work in flight, a second appliance on the same data directory.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { resolve } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { until } from '../support/app.ts';
import { createProgram, freePort, type Program } from '../support/program.ts';

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
  const child = spawn(process.execPath, ['--import', 'tsx', resolve('src/main.ts')], {
    env: {
      PATH: process.env['PATH'],
      HOME: process.env['HOME'],
      MAILSTEAD_MODE: 'development',
      MAILSTEAD_DATA_DIR: program.dataDir,
      MAILSTEAD_HTTP_PORT: String(await freePort()),
    },
  });
  let said = '';
  child.stderr.on('data', (chunk: Buffer) => {
    said += chunk.toString();
  });
  const [code] = (await once(child, 'close')) as [number];
  assert.is(code, 1);
  assert.match(said, /Mailstead cannot start: .*in use/);
  assert.is((await program.call('GET', '/emails')).status, 200, 'the first one is unharmed');
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

test.run();
