// Secrets stay where they belong. A whole program runs at log level trace with a secret of every kind planted in it, does what
// works and what fails, and then all that it said is searched: its output, the request log, timelines, answers, metrics, the
// reference, its command line. Database, S3 server, smarthost and webhook endpoint are real and on this machine.
import { Buffer } from 'node:buffer';
import { createPrivateKey, randomBytes } from 'node:crypto';
import { mkdir, mkdtemp, readdir, readFile, rm, writeFile } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Client } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { sealContext } from '../../src/domains/create.ts';
import { deriveKey, unseal } from '../../src/store/seal.ts';
import { until } from '../support/app.ts';
import { command } from '../support/command-line.ts';
import { adminUrl, freshDatabase, type FreshDatabase } from '../support/postgres.ts';
import { createProgram, freePort, runProgram, type Program } from '../support/program.ts';
import { startRawPeer, type RawPeer } from '../support/raw-peer.ts';
import { startS3, type S3Bench } from '../support/s3.ts';
import { problemsOf } from '../support/settings.ts';
import { closeClients } from '../support/smtp-client.ts';
import { dialSubmission } from '../support/submission-session.ts';
import { startReceiver, type Receiver } from '../support/webhooks.ts';

const planted = (name: string): string => `${name}${randomBytes(15).toString('hex')}`;
const API_KEY = `re_${randomBytes(4).toString('hex')}_${randomBytes(12).toString('hex')}`;
const SECRETS = {
  api_key: API_KEY,
  master_secret: planted('master'),
  database_password: planted('database'),
  smarthost_password: planted('smarthost'),
  s3_key: planted('bucket'),
  otlp_header: planted('otlp'),
  acme_binding: planted('eab'),
  broken_file: planted('broken'),
  url_password: planted('url'),
};
type Name = keyof typeof SECRETS;
/** Found out on the way: keys that the appliance makes. */
const found = new Map<string, string | Buffer>();

/** A secret as it may be written: plain, in base64 at any offset, in hex. */
function spellings(secret: string | Buffer): readonly string[] {
  const bytes = Buffer.from(secret);
  const inner = (offset: number): string =>
    Buffer.concat([Buffer.alloc(offset), bytes])
      .toString('base64')
      .slice(4, -4);
  return [String(secret), inner(0), inner(1), inner(2), bytes.toString('hex')];
}

/** Which of the secrets a text holds; the part of a key that its list shows is none. */
function leaksIn(where: string, text: string): readonly string[] {
  return [...Object.entries(SECRETS), ...found].flatMap(([name, secret]) =>
    spellings(secret).flatMap((one) => {
      const at = text.indexOf(one);
      return at === -1
        ? []
        : [`${name} in ${where}: …${text.slice(Math.max(0, at - 200), at)}[here]`];
    }),
  );
}

const test = suite('secrets');
let database: FreshDatabase;
let role = '';
let program: Program;
let s3: S3Bench;
let relay: RawPeer;
let endpoint: Receiver;
let collector: Receiver;
let settings: Record<string, string> = {};
let [submissionPort, metricsPort] = [0, 0];
let saidByRelay = 0;
/** What the relay says to a login. */
let loginReply = (line: string): string => `500 5.5.1 unrecognized command: ${line}`;

const sql = async (statement: string, values: readonly unknown[] = []) => {
  const client = new Client({ connectionString: database.url });
  await client.connect();
  try {
    return (await client.query(statement, [...values])).rows as Record<string, unknown>[];
  } finally {
    await client.end();
  }
};
const email = { from: 'a@mailstead.test', to: 'b@recipient.test', subject: 'x', text: 'words' };
const writeFiles = (files: Readonly<Record<string, string>>): Promise<unknown> =>
  Promise.all(
    Object.entries(files).map(([name, text]) =>
      writeFile(join(program.dataDir, 'config', `${name}.json`), text),
    ),
  );

test.before(async () => {
  database = await freshDatabase();
  role = `planted_${randomBytes(6).toString('hex')}`;
  // No more rights than SECURITY.md says are enough: the owner of an empty database.
  await sql(`create role ${role} login password '${SECRETS.database_password}'`);
  await sql(`alter database "${new URL(database.url).pathname.slice(1)}" owner to ${role}`);
  const url = new URL(database.url);
  url.username = role;
  url.password = SECRETS.database_password;
  s3 = await startS3();
  relay = await startRawPeer({
    keywords: ['AUTH PLAIN LOGIN', 'ENHANCEDSTATUSCODES'],
    on: {
      AUTH: (line) => {
        saidByRelay += 1;
        return { reply: loginReply(line) };
      },
    },
  });
  endpoint = await startReceiver(() => 500);
  // It repeats in its answer what it was sent.
  collector = await startReceiver(
    () => (response) =>
      void response.writeHead(400).end(String(response.req.headers.authorization)),
  );
  [submissionPort, metricsPort] = [await freePort(), await freePort()];
  settings = {
    MAILSTEAD_LOG_LEVEL: 'trace',
    MAILSTEAD_API_KEY: API_KEY,
    MAILSTEAD_SECRET: SECRETS.master_secret,
    MAILSTEAD_DATABASE_URL: url.href,
    MAILSTEAD_BLOB_STORE: s3.url.replace('S3RVER:S3RVER@', `S3RVER:${SECRETS.s3_key}@`),
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: `smtp://appliance:${SECRETS.smarthost_password}@127.0.0.1:${relay.port}`,
    MAILSTEAD_SUBMISSION_PORT: String(submissionPort),
    MAILSTEAD_METRICS_PORT: String(metricsPort),
    MAILSTEAD_RETRY_SCHEDULE: '1s',
  };
  program = await createProgram(settings, {
    dataDir: await mkdtemp(join(tmpdir(), 'mailstead-secrets-')),
  });
  await mkdir(join(program.dataDir, 'config'));
  const authorization = `Bearer ${SECRETS.otlp_header}`;
  const eab = { kid: 'k', hmac_key: Buffer.from(SECRETS.acme_binding).toString('base64url') };
  await writeFiles({
    telemetry: JSON.stringify({
      otlp: { url: collector.url, headers: { authorization }, ratio: 1 },
    }),
    tls: JSON.stringify({
      acme: { directory: 'https://127.0.0.1:1/dir', email: 'a@b.test', agree_to_terms: true, eab },
    }),
  });
  await program.start();
});

/** It outlives its database. */
async function dropRole(): Promise<void> {
  const client = new Client({ connectionString: await adminUrl() });
  await client.connect();
  await client.query(`drop role if exists ${role}`);
  await client.end();
}

test.after(async () => {
  await program?.remove();
  await endpoint?.stop();
  await collector?.stop();
  await relay?.stop();
  await s3?.stop();
  await database?.drop();
  await dropRole();
  await rm(program.dataDir, { recursive: true, force: true });
});

interface Asked {
  readonly path: string;
  readonly method?: string;
  readonly body?: unknown;
  readonly headers?: Record<string, string>;
}

async function ask({
  path,
  method = 'GET',
  body,
  headers = {},
}: Asked): Promise<{ status: number; text: string }> {
  const response = await fetch(program.base + path, {
    method,
    headers: { authorization: `Bearer ${API_KEY}`, 'content-type': 'application/json', ...headers },
    ...(body === undefined ? {} : { body: typeof body === 'string' ? body : JSON.stringify(body) }),
  });
  return { status: response.status, text: await response.text() };
}
const post = (path: string, body: unknown): Promise<{ status: number; text: string }> =>
  ask({ method: 'POST', path, body });
const json = async (path: string): Promise<Record<string, unknown>> =>
  JSON.parse((await ask({ path })).text) as Record<string, unknown>;

test('nothing that it says holds a secret, whatever goes well or wrong', async () => {
  const said: [string, string][] = [];
  const keep = async (where: string, text: Promise<{ text: string }>): Promise<void> => {
    said.push([where, (await text).text]);
  };

  // An operator's file breaks right behind a secret.
  await writeFiles({
    telemetry: `{"otlp": {"headers": {"authorization": ${SECRETS.broken_file}}}}`,
  });

  // Keys that it makes are told once, to whoever asked for them.
  const created = JSON.parse((await post('/api-keys', { name: 'second' })).text) as {
    token: string;
  };
  found.set('second api key', created.token);
  const hook = JSON.parse(
    (
      await post('/webhooks', {
        endpoint: endpoint.url,
        events: ['email.sent', 'email.delivery_delayed', 'email.delivered'],
      })
    ).text,
  ) as { id: string; signing_secret: string };
  assert.match(hook.signing_secret, /^whsec_/);
  found.set('webhook secret', hook.signing_secret.slice('whsec_'.length));
  const made = JSON.parse((await post('/domains', { name: 'planted.test' })).text) as {
    id: string;
  };
  const [dkim] = await sql('select * from dkim_key where domain_id = $1', [made.id]);
  const plain = unseal(
    deriveKey(SECRETS.master_secret, 'dkim keys at rest'),
    sealContext(made.id, String(dkim?.['selector'])),
    dkim?.['private_key_sealed'] as Buffer,
  );
  const der = createPrivateKey({ key: plain, format: 'der', type: 'pkcs8' }).export({
    format: 'der',
    type: 'pkcs8',
  });
  found.set('dkim key', der.subarray(-24));

  // The smarthost repeats what it was told, as some servers do with what they do not know.
  const first = JSON.parse((await post('/emails', email)).text) as { id: string };
  await until(
    () => json(`/emails/${first.id}`),
    ({ last_event }) => last_event === 'delivery_delayed',
  );
  loginReply = (line) =>
    `535 5.7.8 ${Buffer.from(line.split(' ')[2] ?? '', 'base64')
      .toString('latin1')
      .replaceAll('\0', ' ')} is wrong`;
  const second = JSON.parse((await post('/emails', email)).text) as { id: string };
  await until(
    () => json(`/emails/${second.id}`),
    ({ last_event }) => last_event === 'delivery_delayed',
  );
  loginReply = () => '235 2.7.0 ok';
  const third = JSON.parse((await post('/emails', email)).text) as { id: string };
  await until(
    () => json(`/emails/${third.id}`),
    ({ last_event }) => last_event === 'delivered',
  );
  assert.ok(saidByRelay >= 3, 'the smarthost was never told the password');

  // Callers who put a key where it does not belong, and who have none.
  await keep('a refusal', post('/emails', { ...email, from: API_KEY, subject: API_KEY }));
  await keep('bad JSON', post('/emails', `{"from": "${API_KEY}", "to": ${API_KEY}`));
  await keep('a parameter', ask({ path: `/emails?limit=${API_KEY}&after=${API_KEY}` }));
  await keep('a path', ask({ path: `/emails/${API_KEY}` }));
  // Whoever asks for a path is told that there is none; the log must not say which.
  await ask({ path: `/nothing/${API_KEY}`, headers: { cookie: `key=${API_KEY}` } });
  await keep(
    'a wrong key',
    ask({ path: '/emails', headers: { authorization: `Bearer ${API_KEY.slice(0, -1)}` } }),
  );
  await keep(
    'Basic',
    ask({ path: '/emails', headers: { authorization: `Basic ${btoa(`x:${API_KEY}`)}` } }),
  );
  await keep(
    'an idempotency key',
    ask({
      path: '/emails',
      method: 'POST',
      body: { ...email, tags: [{ name: 'a b', value: API_KEY }] },
      headers: { 'idempotency-key': API_KEY },
    }),
  );
  const from = `http://user:${SECRETS.url_password}@127.0.0.1/x?token=${SECRETS.url_password}`;
  await post('/emails', { ...email, attachments: [{ filename: 'a', path: from }] });
  await post('/webhooks', { endpoint: from, events: ['email.sent'] });

  // SMTP: a wrong password, a right one, and one where a command is expected.
  const client = await dialSubmission(submissionPort);
  await client.secure();
  assert.match(await client.logIn('mailstead', `${API_KEY}x`), /^535/);
  said.push(['a refused command', await client.say(`XPASS ${API_KEY}`)]);
  assert.match(await client.logIn('mailstead', API_KEY), /^235/);
  await client.say('MAIL FROM:<a@mailstead.test>');
  closeClients();

  // Large messages go to the S3 server, which goes away.
  const content = randomBytes(300_000).toString('base64');
  const large = { ...email, attachments: [{ filename: 'a.bin', content }] };
  assert.is((await post('/emails', large)).status, 200);
  assert.ok(s3.asked.length > 0, 'nothing went to the S3 server');
  s3.fault = 'away';
  const refused = await post('/emails', large);
  s3.fault = 'none';
  assert.is(refused.status, 503);
  said.push(['no S3', refused.text]);

  await until(
    () => Promise.resolve(program.output()),
    (text) => /the file cannot be used/.test(text),
  );
  await until(
    () => Promise.resolve(endpoint.calls.length),
    (calls) => calls > 0,
  );

  for (const path of [
    '/emails',
    '/domains',
    `/domains/${made.id}`,
    '/api-keys',
    '/webhooks',
    '/queue',
    '/doctor',
    '/docs',
    '/openapi.json',
    '/health/ready',
    '/usage',
    `/webhooks/${hook.id}/events`,
    ...[first, second, third].flatMap(({ id }) => [`/emails/${id}`, `/emails/${id}/timeline`]),
  ]) {
    await keep(path, ask({ path }));
  }
  const logs = (await json('/logs?limit=100'))['data'] as { id: string }[];
  assert.ok(logs.length >= 15, `${logs.length} requests are in the log`);
  said.push(['/logs', JSON.stringify(logs)]);
  for (const { id } of logs) await keep(`/logs/${id}`, ask({ path: `/logs/${id}` }));
  const metrics = await fetch(`http://127.0.0.1:${metricsPort}/metrics`);
  said.push(['/metrics', await metrics.text()]);
  assert.match(said.at(-1)![1], /mailstead/);

  said.push(...(await processesBelow(program.pid()!)));
  const env = { ...settings, MAILSTEAD_MODE: 'development', MAILSTEAD_DATA_DIR: program.dataDir };
  for (const words of [
    ['tenant', 'list'],
    ['key', 'list'],
    ['domain', 'list', '--json'],
    ['explain', second.id],
    ['doctor', '--json'],
  ]) {
    const told = await command(env, words);
    said.push([`mailstead ${words.join(' ')}`, `${told.out}${told.err}`]);
  }
  assert.is(await program.terminate(), 0);
  // A newcomer in development mode is shown the key, and a command with it.
  const output = program.output().replace(/^ {2}API key .*$|^curl .*$/gm, '');
  said.push(['its output', output]);
  for (const fault of [
    'login to submission failed',
    'the bucket mail',
    'traces could not be sent',
  ]) {
    assert.ok(output.includes(fault), `the log says nothing of ${fault}`);
  }
  assert.is(collector.calls[0]?.headers.authorization, `Bearer ${SECRETS.otlp_header}`);
  const leaks = said.flatMap(([where, text]) => leaksIn(where, text));
  assert.is(leaks.length, 0, leaks.join('\n'));
});

/** What every user of the machine sees of the program and its children. */
async function processesBelow(pid: number): Promise<[string, string][]> {
  const read = (id: string, file: string): Promise<string> =>
    readFile(`/proc/${id}/${file}`, 'latin1').catch(() => '');
  const ids = (await readdir('/proc').catch(() => [])).filter((name) => /^\d+$/.test(name));
  const parents = new Map<string, string>();
  for (const id of ids) parents.set(id, /\) \S (\d+)/.exec(await read(id, 'stat'))?.[1] ?? '');
  const isBelow = (id: string): boolean =>
    id === String(pid) ||
    ((parents.get(id) ?? '0') > '0' && parents.get(id) !== '1' && isBelow(parents.get(id)!));
  return Promise.all(
    ids
      .filter(isBelow)
      .map(async (id): Promise<[string, string]> => [
        `the words of ${id}`,
        await read(id, 'cmdline'),
      ]),
  );
}

test('a start that fails says why without the secret in it', async () => {
  const said: [string, string][] = [];
  const bad: Readonly<Partial<Record<Name, Record<string, string>>>> = {
    database_password: {
      MAILSTEAD_DATABASE_URL: `postgres://nobody:${SECRETS.database_password}@127.0.0.1:1/none`,
    },
    s3_key: {
      MAILSTEAD_BLOB_STORE: `s3://user:${SECRETS.s3_key}@bucket?endpoint=http://127.0.0.1:1`,
    },
  };
  const tryOne = async ([name, change]: [string, Record<string, string>]): Promise<void> => {
    const dataDir = await mkdtemp(join(tmpdir(), 'mailstead-secrets-'));
    const run = await runProgram({
      ...settings,
      MAILSTEAD_DATA_DIR: dataDir,
      ...change,
    });
    await until(
      () => Promise.resolve(run.said()),
      (text) => run.child.exitCode !== null || text.length > 200,
    );
    run.child.kill('SIGTERM');
    await run.ended;
    said.push([`a start with another ${name}`, run.said()]);
    assert.ok(run.said().length > 50, run.said());
    const env = {
      ...settings,
      ...change,
      MAILSTEAD_MODE: 'development',
      MAILSTEAD_DATA_DIR: dataDir,
    };
    const told = await command(env, ['tenant', 'list']);
    said.push([`mailstead with another ${name}`, `${told.out}${told.err}`]);
    await rm(dataDir, { recursive: true, force: true });
  };
  await Promise.all(Object.entries(bad).map(tryOne));
  // Settings that cannot be read at all.
  const problems = problemsOf({
    MAILSTEAD_MODE: 'production',
    MAILSTEAD_DATABASE_URL: `postgres://u:${SECRETS.database_password}@host:no port/x`,
    MAILSTEAD_MONGODB_URL: `mongo://u:${SECRETS.database_password}@host`,
    MAILSTEAD_SMARTHOST_URL: `smtp://u:${SECRETS.smarthost_password}@host:25/path?x`,
    MAILSTEAD_BLOB_STORE: `s3://u:${SECRETS.s3_key}@UPPER bucket`,
    MAILSTEAD_API_KEY: `${API_KEY} `,
    MAILSTEAD_SECRET: SECRETS.master_secret.slice(0, 20),
  });
  assert.ok(problems.length >= 6, problems.join('\n'));
  const text = problems.join('\n');
  said.push(['the problems of settings', text]);
  assert.not.ok(text.includes(SECRETS.master_secret.slice(0, 20)));
  const leaks = said.flatMap(([where, one]) => leaksIn(where, one));
  assert.is(leaks.length, 0, leaks.join('\n'));
});

test.run();
