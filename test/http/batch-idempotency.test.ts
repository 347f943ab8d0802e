// An idempotency key on a batch: the same key and batch are the same emails and one answer; another batch is told so
// with 422. And what holds for both kinds of sending: a replay wins over whatever has changed since.
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, type Answer, type App } from '../support/app.ts';
import { assertHeaders, assertRefused, type Refused } from './envelope.ts';

const test = suite('batch idempotency');
let app: App;
let pool: Pool;
test.before(async () => {
  // Where mail can leave, a domain that is gone is refused.
  app = await startApp({
    MAILSTEAD_DELIVERY: 'smarthost',
    MAILSTEAD_SMARTHOST_URL: 'smtp://127.0.0.1:1',
  });
  pool = new Pool({ connectionString: app.databaseUrl, max: 1 });
});
test.after(async () => {
  await pool.end();
  await app.stop();
});

const conflict: Refused = { status: 422, code: 'invalid_idempotent_batch', says: /new key/ };
const emailOf = (subject: string, change: Record<string, unknown> = {}) => ({
  from: 'Ada <ada@mailstead.test>',
  to: 'ok@recipient.test',
  subject,
  text: 'Plain words.',
  ...change,
});
const post = (
  key: string,
  body: unknown,
  { path = '/emails/batch', permissive = false } = {},
): Promise<Answer> =>
  app.call('POST', path, {
    body,
    headers: {
      'idempotency-key': key,
      ...(permissive ? { 'x-batch-validation': 'permissive' } : {}),
    },
  });
const isReplay = (answer: Answer): boolean => answer.headers.get('idempotent-replayed') === 'true';
const countOf = async (pattern: string): Promise<number> => {
  const { rows } = await pool.query<{ count: string }>(
    'select count(*) from email where subject like $1',
    [pattern],
  );
  return Number(rows[0]?.count);
};

test('the same batch: the same answer, each email once', async () => {
  const batch = [emailOf('Same 1'), emailOf('Same 2')];
  const first = await post('same', batch);
  assert.is(first.status, 200, JSON.stringify(first.body));
  assert.is(isReplay(first), false);
  for (const path of ['/emails/batch', '/api/emails/batch']) {
    const again = await post('same', batch, { path });
    assert.is(again.status, 200);
    assert.equal(again.body, first.body);
    assert.is(isReplay(again), true);
    assertHeaders(again);
  }
  assert.is(await countOf('Same %'), 2);
});

test('another batch with the same key is refused with 422', async () => {
  const batch = [emailOf('Other 1'), emailOf('Other 2')];
  await post('other', batch);
  for (const body of [
    batch.toReversed(),
    batch.slice(0, 1),
    [...batch, emailOf('Other 3')],
    [batch[0], emailOf('Other 2', { scheduled_at: 'in 1 hour' })],
    [batch[0], emailOf('Other 2', { attachments: [{ filename: 'a.txt', content: 'YQ==' }] })],
  ]) {
    assertRefused(await post('other', body), conflict);
  }
  assertRefused(await post('other', batch, { permissive: true }), conflict);
  assert.is(await countOf('Other %'), 2);
});

test('a batch and an email do not share their keys', async () => {
  const email = emailOf('Apart');
  const single = await post('apart', email, { path: '/emails' });
  const batch = await post('apart', [email]);
  assert.is(single.status, 200);
  assert.is(batch.status, 200);
  assert.is(isReplay(batch), false);
  assert.is(await countOf('Apart'), 2);
});

test('fifty at once are one batch and fifty equal answers', async () => {
  const batch = Array.from({ length: 20 }, (_, index) => emailOf(`Parallel ${index}`));
  const answers = await Promise.all(Array.from({ length: 50 }, () => post('parallel', batch)));
  assert.equal([...new Set(answers.map(({ status }) => status))], [200]);
  for (const { body } of answers) assert.equal(body, answers[0]?.body);
  assert.is(answers.filter((answer) => !isReplay(answer)).length, 1);
  assert.is(await countOf('Parallel %'), 20);
});

test('of two different batches at once one wins and the other is told', async () => {
  const answers = await Promise.all(
    Array.from({ length: 10 }, (_, index) => post('race', [emailOf(`Race ${index}`)])),
  );
  assert.is(answers.filter(({ status }) => status === 200).length, 1);
  for (const answer of answers) if (answer.status !== 200) assertRefused(answer, conflict);
  assert.is(await countOf('Race %'), 1);
});

test('a permissive batch is replayed with its errors', async () => {
  const large = Buffer.alloc(300_000, 'large ').toString('base64');
  const batch = [
    emailOf('Permissive 1'),
    emailOf('Wrong', { to: 'x', attachments: [{ filename: 'a.bin', content: large }] }),
    emailOf('Of a wrong type', { to: 7 }),
    emailOf('Permissive 2'),
  ];
  const first = await post('permissive', batch, { permissive: true });
  assert.is(first.status, 200);
  assert.is((first.body['errors'] as unknown[]).length, 2);
  const again = await post('permissive', batch, { permissive: true });
  assert.equal(again.body, first.body);
  assert.is(isReplay(again), true);
  assertRefused(await post('permissive', batch.slice(0, 2), { permissive: true }), conflict);
  const other = batch.with(2, emailOf('Otherwise wrong', { to: 7 }));
  assertRefused(await post('permissive', other, { permissive: true }), conflict);
  assert.is(await countOf('Permissive %'), 2);
});

test('a refused batch does not use its key up', async () => {
  assert.is((await post('refused', [emailOf('Refused'), emailOf('x', { to: 'x' })])).status, 422);
  assert.is((await post('refused', [])).status, 422);
  const sent = await post('refused', [emailOf('Refused')]);
  assert.is(sent.status, 200);
  assert.is(isReplay(sent), false);
  assertRefused(await post('', [emailOf('Refused')]), {
    status: 400,
    code: 'invalid_idempotency_key',
  });
  assertRefused(await post('k'.repeat(257), [emailOf('Refused')]), {
    status: 400,
    code: 'invalid_idempotency_key',
  });
  assert.is(await countOf('Refused'), 1);
});

// ---- a replay wins -------------------------------------------------------------------------------

test('large files, relative and absolute times are the same when they come again', async () => {
  const file = { filename: 'a.bin', content: Buffer.alloc(400_000, 'abc').toString('base64') };
  const email = emailOf('Again', { scheduled_at: 'in 1 hour', attachments: [file] });
  const soon = emailOf('Soon', { scheduled_at: new Date(Date.now() + 1_000).toISOString() });
  const first = await post('again', email, { path: '/emails' });
  const batch = await post('again', [email, soon]);
  assert.is(first.status, 200, JSON.stringify(first.body));
  assert.is(batch.status, 200, JSON.stringify(batch.body));
  const [, { id }] = batch.body['data'] as [unknown, { id: string }];
  await app.untilEvent(id, 'queued', 'sent', 'delivery_delayed'); // its time has passed
  const again = await post('again', email, { path: '/emails' });
  assert.equal(again.body, first.body);
  assert.is(isReplay(again), true);
  assert.equal((await post('again', [email, soon])).body, batch.body);
  const other = { filename: 'a.bin', content: Buffer.alloc(400_000, 'abd').toString('base64') };
  assertRefused(await post('again', { ...email, attachments: [other] }, { path: '/emails' }), {
    status: 409,
    code: 'invalid_idempotent_request',
  });
  assertRefused(await post('again', [{ ...email, attachments: [other] }, soon]), conflict);
  assert.is(await countOf('Again'), 2);
});

test('a replay is answered when its template and its domain are gone', async () => {
  const template = await app.call<{ id: string }>('POST', '/templates', {
    body: { name: 'T', subject: 'Gone', html: '<p>x</p>', from: 'a@mailstead.test' },
  });
  const path = `/templates/${template.body.id}`;
  await app.call('POST', `${path}/publish`);
  const email = { to: 'ok@recipient.test', template: { id: template.body.id } };
  const first = await post('gone', email, { path: '/emails' });
  const batch = await post('gone', [email]);
  assert.is(first.status, 200, JSON.stringify(first.body));
  assert.is(batch.status, 200, JSON.stringify(batch.body));
  assert.is((await app.call('DELETE', path)).status, 200);
  await pool.query(
    `update sending_domain set sending_verified = false where name = 'mailstead.test'`,
  );
  assert.equal((await post('gone', email, { path: '/emails' })).body, first.body);
  assert.equal((await post('gone', [email])).body, batch.body);
  assert.is((await post('gone anew', email, { path: '/emails' })).status, 404);
  assert.is(await countOf('Gone'), 2);
});

test('nothing was logged as an error', () => {
  assert.equal(
    app.complaints.filter((line) => / error /.test(line)),
    [],
  );
});

test.run();
