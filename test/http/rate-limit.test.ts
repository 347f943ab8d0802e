// The rate limit over HTTP: two appliances on one database share every budget, and every answer says what is left.
import { mkdtemp, rm, symlink } from 'node:fs/promises';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startAppliance, type Appliance } from '../../src/appliance.ts';
import { loadConfig } from '../../src/config.ts';
import { startApp, type Answer, type App } from '../support/app.ts';
import { silent } from '../support/queue.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { assertHeaders, assertRefused } from './envelope.ts';

const LIMIT = 100;

const test = suite('rate limit over HTTP');
let app: App;
let second: Appliance;
let dataDir: string;

test.before(async () => {
  const shared = { MAILSTEAD_RATE_LIMIT: `${LIMIT}/10m`, MAILSTEAD_SECRET: 'x'.repeat(64) };
  app = await startApp(shared);
  dataDir = await mkdtemp(join(tmpdir(), 'mailstead-second-'));
  await symlink(join(app.dataDir, 'blobs'), join(dataDir, 'blobs'));
  const config = loadConfig({
    MAILSTEAD_MODE: 'development',
    MAILSTEAD_ROLES: 'api',
    MAILSTEAD_DATA_DIR: dataDir,
    MAILSTEAD_DATABASE_URL: app.databaseUrl,
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_HTTP_PORT: '0',
    MAILSTEAD_HTTP_HOST: '127.0.0.1',
    ...shared,
  });
  second = await startAppliance(config, silent);
});
test.after(async () => {
  await second.stop();
  await app.stop();
  await rm(dataDir, { recursive: true, force: true });
});

const get = (base: string, path: string, key: string): Promise<Response> =>
  fetch(base + path, { headers: { authorization: `Bearer ${key}` } });

test('300 requests at once to two appliances, by both mounts: exactly 100 pass', async () => {
  const { key } = await secondTenant(app);
  const bases = [app.base, `http://127.0.0.1:${second.httpPort}`] as const;
  const answers = await Promise.all(
    Array.from({ length: 3 * LIMIT }, async (_, index) => {
      const path = index % 3 === 0 ? '/emails' : '/api/emails';
      const answer = await get(bases[index % 2]!, path, key);
      await answer.arrayBuffer();
      return answer;
    }),
  );
  const count = (status: number): number =>
    answers.filter((answer) => answer.status === status).length;
  assert.equal([count(200), count(429)], [LIMIT, 2 * LIMIT]);
  for (const { status, headers } of answers) {
    assert.is(headers.get('ratelimit-limit'), String(LIMIT));
    assert.is(headers.get('ratelimit-policy'), `${LIMIT};w=600`);
    assert.match(headers.get('ratelimit-remaining') ?? '', /^\d+$/);
    assert.match(headers.get('ratelimit-reset') ?? '', /^\d+$/);
    assert.is(headers.has('retry-after'), status === 429);
  }
});

test('every answer of the API says what is left', async () => {
  const { key } = await secondTenant(app);
  const cases: readonly (readonly [number, () => Promise<Answer>])[] = [
    [200, () => app.call('GET', '/emails', { key })],
    [201, () => app.call('POST', '/api-keys', { key, body: { name: 'x' } })],
    [400, () => app.call('POST', '/emails', { key, body: '{' })],
    [401, () => app.call('GET', '/emails', { key: null })],
    [401, () => app.call('GET', '/emails', { key: 're_wrong' })],
    [404, () => app.call('GET', '/nowhere', { key })],
    [404, () => app.call('GET', '/logs/019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70', { key })],
    [405, () => app.call('PUT', '/emails', { key, body: {} })],
    [422, () => app.call('POST', '/emails', { key, body: {} })],
  ];
  for (const [status, ask] of cases) {
    const answer = await ask();
    assert.is(answer.status, status, JSON.stringify(answer.body));
    assertHeaders(answer);
    assert.is(answer.headers.get('ratelimit-limit'), String(LIMIT));
    assert.is(answer.headers.get('retry-after'), null);
  }
});

test('a fault of ours says it, too', async () => {
  await onDatabase(app, async (pool) => {
    await pool.query('alter table api_key rename to api_key_gone');
    const answer = await app.call('GET', '/emails');
    await pool.query('alter table api_key_gone rename to api_key');
    assertRefused(answer, { status: 500, code: 'internal_server_error' });
    assert.is(answer.headers.get('ratelimit-limit'), String(LIMIT));
  });
});

test('a refused request is told when to come again, and costs nobody else', async () => {
  const { key } = await secondTenant(app);
  for (let left = LIMIT - 1; left >= 0; left -= 1) {
    const answer = await get(app.base, '/api-keys?limit=1', key);
    await answer.arrayBuffer();
    assert.is(answer.status, 200);
    assert.is(answer.headers.get('ratelimit-remaining'), String(left));
  }
  for (const [method, path] of [
    ['GET', '/emails'],
    ['POST', '/api/emails'],
    ['GET', '/logs'],
  ] as const) {
    const answer = await app.call(method, path, { key });
    assertRefused(answer, { status: 429, code: 'rate_limit_exceeded', says: /100 in 600 s/ });
    assert.is(answer.headers.get('ratelimit-remaining'), '0');
    const seconds = Number(answer.headers.get('retry-after'));
    assert.ok(seconds >= 1 && seconds <= 600, `${seconds} s`);
    assert.is(answer.headers.get('ratelimit-reset'), String(seconds));
  }
  assert.is((await app.call('GET', '/emails')).status, 200, 'another tenant');
});

test('links are counted by address, with everybody who has no key', async () => {
  const answers: Answer[] = [];
  for (let count = 0; count <= LIMIT; count += 1) {
    answers.push(await app.call('GET', '/links/no-such', { key: null }));
  }
  const refused = answers.find(({ status }) => status === 429);
  assert.is(answers[0]?.status, 404);
  assert.match(answers[0]?.headers.get('ratelimit-remaining') ?? '', /^\d+$/);
  assert.ok(refused !== undefined, 'the limit was never reached');
  assertRefused(refused, { status: 429, code: 'rate_limit_exceeded', says: /100 in 600 s/ });
  assert.is((await app.call('GET', '/emails')).status, 200, 'who has a key has another budget');
});

test.run();
