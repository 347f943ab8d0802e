// The real program of the operator's commands: beside an appliance with embedded Postgres, without one, several at once, on a
// schema that is not of this version, killed and stopped in the middle.
import { execFile } from 'node:child_process';
import { existsSync } from 'node:fs';
import { mkdtemp, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { promisify } from 'node:util';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startAppliance } from '../../src/appliance.ts';
import { loadConfig } from '../../src/config.ts';
import { createLogger } from '../../src/log.ts';
import { command, commandJson, program } from '../support/command-line.ts';
import { freshDatabase, migratedDatabase } from '../support/postgres.ts';

const test = suite('command line, processes');
let dataDir: string;
let env: Record<string, string>;

test.before(async () => {
  dataDir = await mkdtemp(join(tmpdir(), 'mailstead-cli-'));
  env = { MAILSTEAD_DATA_DIR: dataDir };
});
test.after(() => rm(dataDir, { recursive: true, force: true }));

test('an empty data directory: nothing is made but by migrate', async () => {
  const settings = { MAILSTEAD_DATA_DIR: join(dataDir, 'nothing') };
  const none = await command(settings, ['tenant', 'list']);
  assert.is(none.code, 1);
  assert.match(none.err, /There is no database in .* yet\. .*`migrate`/);
  const check = await commandJson<{ database: boolean }>(settings, ['migrate', '--check']);
  assert.is(check.database, false);
  const file = join(dataDir, 'none.tar');
  for (const words of [
    ['backup', file],
    ['migrate', '--rehearse'],
  ]) {
    assert.match((await command(settings, words)).err, /There is no database in /, words[0]);
  }
  assert.not.ok(existsSync(settings.MAILSTEAD_DATA_DIR));

  await writeFile(file, '');
  const below = await command({ MAILSTEAD_DATA_DIR: join(file, 'data') }, ['migrate']);
  assert.match(below.err, /The data directory .* cannot be used: ENOTDIR/);
});

test('beside an appliance the commands use its database; without one they start it, several at once', async () => {
  const appliance = await startAppliance(
    loadConfig({
      ...env,
      MAILSTEAD_HTTP_HOST: '127.0.0.1',
      MAILSTEAD_HTTP_PORT: '0',
      MAILSTEAD_MX_PORT: '0',
      MAILSTEAD_SUBMISSION_PORT: '0',
      MAILSTEAD_SUBMISSIONS_PORT: '0',
      MAILSTEAD_METRICS_PORT: '0',
      MAILSTEAD_WORKERS: '0',
    }),
    createLogger({ level: 'warn', name: 'test', mode: 'development' }),
  );
  try {
    // Without a mode or any other setting, as in a clone.
    const made = await program(env, ['tenant', 'create', 'second', '--json']);
    assert.equal([made.code, made.err], [0, '']);
    assert.is((JSON.parse(made.out) as { name: string }).name, 'second');
    const live = await fetch(`${appliance.localUrl}/health/live`);
    assert.is(live.status, 200);
  } finally {
    await appliance.stop();
  }

  const started = await Promise.all([
    program(env, ['key', 'create', 'second']),
    command(env, ['tenant', 'list']),
    command(env, ['queue']),
  ]);
  for (const { code, err } of started) assert.is(code, 0, err);
  assert.match(started[1].out, /^ID +NAME[^]*second/);
  // By whichever was first; with --json it would say nothing.
  const said = started.map(({ err }) => err).join('');
  assert.match(said, /Starting the database of .* for this command/);
  assert.match(started[0].out, /^token +re_/m);
  assert.not.ok(existsSync(join(dataDir, 'mailstead.lock')));
  assert.not.ok(existsSync(join(dataDir, 'postgres.socket')));
});

test('a schema of another version: older is for migrate, newer is refused', async () => {
  const [empty, newer] = await Promise.all([freshDatabase(), migratedDatabase()]);
  try {
    const settings = { ...env, MAILSTEAD_DATABASE_URL: empty.url };
    const older = await command(settings, ['tenant', 'list']);
    assert.is(older.code, 1);
    assert.match(older.err, /not migrated to this version \(0001-first-house.*`migrate`/);
    const check = await commandJson<{ pending: string[] }>(settings, ['migrate', '--check']);
    assert.is(check.pending[0], '0001-first-house');
    assert.is((await command(settings, ['tenant', 'list'])).code, 1);
    const { ran } = await commandJson<{ ran: string[] }>(settings, ['migrate']);
    assert.equal(ran, check.pending);
    assert.match((await command(settings, ['migrate'])).out, /that of this version already/);

    const client = new Client({ connectionString: newer.url });
    await client.connect();
    await client.query("insert into migration (name) values ('9999-later')");
    await client.end();
    const ahead = { ...settings, MAILSTEAD_DATABASE_URL: newer.url };
    for (const words of [['tenant', 'list'], ['migrate', '--check'], ['migrate']]) {
      const told = await command(ahead, words);
      assert.is(told.code, 1);
      assert.match(told.err, /migrated by a newer Mailstead \(9999-later\)/);
    }
  } finally {
    await Promise.all([empty.drop(), newer.drop()]);
  }
});

test('bash completes commands, options and their values', async () => {
  const { code, out: script } = await command({}, ['completion', 'bash']);
  assert.is(code, 0);
  const complete = async (...words: readonly string[]): Promise<string[]> => {
    const asked = `COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _mailstead; printf '%s\\n' "\${COMPREPLY[@]}"`;
    const line = ['--norc', '-c', `${script}\n${asked}`, 'bash', 'mailstead', ...words];
    const { stdout } = await promisify(execFile)('bash', line);
    return stdout.split('\n').filter(Boolean);
  };
  assert.equal(await complete('te'), ['tenant']);
  assert.equal(await complete('queue', 're'), ['resume', 'release']);
  assert.equal(await complete('queue', 'pause', 'la'), ['lane']);
  assert.ok((await complete('key', 'create', 'acme', '--')).includes('--permission'));
  assert.ok((await complete('key', 'create', 'acme', '--')).includes('--json'));
  assert.equal(await complete('key', 'create', '--permission', 'f'), ['full_access']);
  assert.equal(await complete('completion', ''), ['bash', 'zsh', 'fish']);
  for (const shell of ['zsh', 'fish']) {
    const told = await command({}, ['completion', shell]);
    assert.match(told.out, /release/);
  }
});

test('stopped while it starts the database, a command leaves nothing behind', async () => {
  const told = await program(env, ['tenant', 'list'], { stopAt: /Starting the database/ });
  assert.is(told.code, 143);
  assert.match(told.err, /Stopped by SIGTERM\./);
  assert.not.ok(existsSync(join(dataDir, 'mailstead.lock')));
  assert.not.ok(existsSync(join(dataDir, 'postgres.socket')));
});

test.run();
