// An idempotency key: the same key and request are one email and one answer for 24 hours, whoever asks again, however
// often and at whatever mount; and nothing else shares the key.
import { randomUUID } from 'node:crypto';
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createKey, newToken } from '../../src/access/keys.ts';
import { hashRequest } from '../../src/sending/idempotency.ts';
import { startApp, until, type Answer, type App } from '../support/app.ts';
import { assertHeaders, assertRefused, type Refused } from './envelope.ts';

const test = suite('idempotency');
let app: App;
let pool: Pool;
test.before(async () => {
  app = await startApp();
  pool = new Pool({ connectionString: app.databaseUrl, max: 1 });
});
test.after(async () => {
  await pool.end();
  await app.stop();
});

const conflict: Refused = { status: 409, code: 'invalid_idempotent_request', says: /new key/ };
const emailOf = (subject: string): Record<string, unknown> => ({
  from: 'Ada <ada@mailstead.test>',
  to: ['ok@recipient.test'],
  subject,
  text: 'Plain words.',
});

const post = (
  key: string,
  body: unknown,
  { path = '/emails', apiKey = app.key }: { path?: string; apiKey?: string } = {},
): Promise<Answer> =>
  app.call('POST', path, { body, headers: { 'idempotency-key': key }, key: apiKey });

const isReplay = (answer: Answer): boolean => answer.headers.get('idempotent-replayed') === 'true';

/** Waits for the emails to be delivered; how many the database and the sink have of this subject. */
async function countOf(subject: string): Promise<{ stored: number; received: number }> {
  const { rows } = await pool.query<{ id: string }>('select id from email where subject = $1', [
    subject,
  ]);
  const states = await until(
    async () => {
      const found = await pool.query<{ state: string }>(
        'select state from delivery where email_id = any ($1)',
        [rows.map(({ id }) => id)],
      );
      return found.rows.map(({ state }) => state);
    },
    (all) => all.every((state) => state === 'delivered'),
  );
  assert.is(states.length, rows.length);
  const sunk = await pool.query<{ raw: Buffer }>('select raw from sink_message');
  const received = sunk.rows.filter(({ raw }) => raw.includes(`Subject: ${subject}\r\n`));
  return { stored: rows.length, received: received.length };
}
const once = { stored: 1, received: 1 };

test('the same key and request: the same answer, one email', async () => {
  const first = await post('same', emailOf('Same'));
  assert.is(first.status, 200);
  assert.is(isReplay(first), false);
  for (const path of ['/emails', '/api/emails', '/emails/', '/emails?x=1']) {
    const again = await post('same', emailOf('Same'), { path });
    assert.is(again.status, 200);
    assert.is(JSON.stringify(again.body), JSON.stringify(first.body), 'also the order of its keys');
    assert.is(isReplay(again), true, path);
    assertHeaders(again);
  }
  assert.equal(await countOf('Same'), once);
});

test('how a request is written does not matter, what it says does', async () => {
  const email = {
    ...emailOf('Written'),
    cc: null,
    headers: { 'X-A': 'a', 'X-B': 'b' },
    tags: [{ name: 'a', value: 'b' }],
  };
  const first = await post('written', email);
  const written: readonly string[] = [
    JSON.stringify(Object.fromEntries(Object.entries(email).toReversed())),
    JSON.stringify({ ...email, cc: undefined, to: 'ok@recipient.test' }),
    JSON.stringify({ ...email, tags: [{ value: 'b', name: 'a' }] }),
    JSON.stringify({ ...email, headers: { 'X-B': 'b', 'X-A': 'a' } }),
    JSON.stringify(email, null, 2),
    JSON.stringify(email).replace('Plain', '\\u0050lain'),
  ];
  for (const body of written) {
    const again = await post('written', body);
    assert.equal(again.body, first.body, body);
    assert.is(isReplay(again), true);
  }
  const changes: readonly Record<string, unknown>[] = [
    { from: 'Eve <ada@mailstead.test>' },
    { to: ['other@recipient.test'] },
    { to: ['ok@recipient.test', 'other@recipient.test'] },
    { cc: 'other@recipient.test' },
    { bcc: 'other@recipient.test' },
    { reply_to: 'other@recipient.test' },
    { subject: 'Written differently' },
    { text: 'Other words.' },
    { html: '<p>Plain words.</p>' },
    { headers: { 'X-A': 'a' } },
    { headers: { 'X-A': 'b', 'X-B': 'a' } },
    { headers: null },
    { tags: [{ name: 'a', value: 'c' }] },
    { tags: [] },
  ];
  for (const change of changes) {
    assertRefused(await post('written', { ...email, ...change }), conflict);
    assertRefused(
      await post('written', { ...email, ...change }, { path: '/api/emails' }),
      conflict,
    );
  }
  assert.equal(await countOf('Written'), once);
});

test('other keys and other tenants are other requests', async () => {
  const tenantId = randomUUID();
  const apiKey = newToken();
  await pool.query('insert into tenant (id, name) values ($1, $2)', [tenantId, 'other']);
  await createKey(pool, {
    tenantId,
    name: 'test',
    token: apiKey,
    permission: 'full_access',
    domainId: null,
  });
  const email = emailOf('Others');
  const answers = [
    await post('others', email),
    await post('Others', email),
    await post('others ü', email),
    await post('others', email, { apiKey }),
    await app.call('POST', '/emails', { body: email }),
    await app.call('POST', '/emails', { body: email }),
  ];
  assert.ok(answers.every(({ status }) => status === 200));
  assert.ok(!answers.some(isReplay));
  assert.is(new Set(answers.map(({ body }) => body['id'])).size, 6);
  const { rows } = await pool.query(`select from email where subject = 'Others'`);
  assert.is(rows.length, 6);
  const again = await post('others', email, { apiKey });
  assert.equal(again.body, answers[3]?.body, 'each tenant gets its own answer again');
  assertRefused(await post('others', emailOf('Mine'), { apiKey }), conflict);
});

test('two keys of one tenant share its idempotency keys', async () => {
  const { rows } = await pool.query<{ id: string }>(`select id from tenant where name = 'first'`);
  const apiKey = newToken();
  await createKey(pool, {
    tenantId: rows[0]?.id ?? '',
    name: 'second',
    token: apiKey,
    permission: 'sending_access',
    domainId: null,
  });
  const first = await post('shared', emailOf('Shared'));
  const again = await post('shared', emailOf('Shared'), { apiKey });
  assert.equal(again.body, first.body);
  assert.equal(await countOf('Shared'), once);
});

test('fifty at once are one email and fifty equal answers', async () => {
  const answers = await Promise.all(
    Array.from({ length: 50 }, (_, index) =>
      post('parallel', emailOf('Parallel'), { path: index % 2 === 0 ? '/emails' : '/api/emails' }),
    ),
  );
  assert.equal([...new Set(answers.map(({ status }) => status))], [200]);
  for (const { body } of answers) assert.equal(body, answers[0]?.body);
  assert.is(answers.filter((answer) => !isReplay(answer)).length, 1, 'one of them was the first');
  assert.equal(await countOf('Parallel'), once);
});

test('of two different requests at once one wins and the other is told', async () => {
  const answers = await Promise.all(
    Array.from({ length: 10 }, (_, index) => post('race', emailOf(`Race ${index}`))),
  );
  const won = answers.filter(({ status }) => status === 200);
  assert.is(won.length, 1);
  for (const answer of answers) if (answer.status !== 200) assertRefused(answer, conflict);
  const { rows } = await pool.query(`select id from email where subject like 'Race %'`);
  assert.equal(rows, [{ id: won[0]?.body['id'] }]);
});

test('a large email, whose bytes lie apart, is stored once, too', async () => {
  const email = { ...emailOf('Large'), text: 'x'.repeat(70).concat('\n').repeat(8_000) };
  const answers = await Promise.all(Array.from({ length: 4 }, () => post('large', email)));
  assert.is(new Set(answers.map(({ body }) => body['id'])).size, 1);
  assert.equal(await countOf('Large'), once);
});

test('a refused request does not use its key up', async () => {
  const email = emailOf('Refused');
  for (const change of [{ to: 'nobody' }, { from: undefined }, { headers: { From: 'a' } }]) {
    const answer = await post('refused', { ...email, ...change });
    assert.is(answer.status, 422);
    assert.is(isReplay(answer), false);
  }
  assert.is((await post('refused', '{')).status, 400);
  assert.is((await post('refused', email, { apiKey: newToken() })).status, 401);
  const sent = await post('refused', email);
  assert.is(sent.status, 200);
  assert.is(isReplay(sent), false);
  assert.equal(await countOf('Refused'), once);
});

test('after 24 hours the key is new; until then it is not', async () => {
  const age = (interval: string) =>
    pool.query(`update idempotency_key set created_at = now() - $1::interval where key = 'aged'`, [
      interval,
    ]);
  const first = await post('aged', emailOf('Aged'));
  await age('23 hours 59 minutes');
  assert.equal((await post('aged', emailOf('Aged'))).body, first.body);
  assertRefused(await post('aged', emailOf('Aged differently')), conflict);
  await age('24 hours 1 second');
  const second = await post('aged', emailOf('Aged differently'));
  assert.is(second.status, 200);
  assert.is(isReplay(second), false);
  assert.is.not(second.body['id'], first.body['id']);
  assertRefused(await post('aged', emailOf('Aged')), conflict);
  await age('25 hours');
  const third = await Promise.all(Array.from({ length: 5 }, () => post('aged', emailOf('Aged'))));
  assert.is(new Set(third.map(({ body }) => body['id'])).size, 1);
  assert.is.not(third[0]?.body['id'], first.body['id']);
  assert.equal(await countOf('Aged'), { stored: 2, received: 2 });
});

test('a hash does not depend on the order of keys, at any depth, and on everything else it does', () => {
  const hash = (value: unknown): string => hashRequest(value).toString('hex');
  assert.is(hash({ a: 1, b: { c: 2, d: [3] } }), hash({ b: { d: [3], c: 2 }, a: 1 }));
  const different = [
    { a: 1 },
    { a: '1' },
    { a: null },
    { a: [1] },
    { b: 1 },
    [1, 2],
    [2, 1],
    [],
    {},
  ];
  assert.is(new Set(different.map(hash)).size, different.length);
  assert.is.not(hash(JSON.parse('{"__proto__":"a"}')), hash(JSON.parse('{"__proto__":"b"}')));
});

test('nothing was logged', () => {
  assert.equal(app.complaints, []);
});

test.run();
