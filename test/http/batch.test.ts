// A batch: up to a hundred emails in one request, all of them or none, or, permissive, the right ones; everything that
// an email alone can have works in it.
import { Pool } from 'pg';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createKey, newToken } from '../../src/access/keys.ts';
import { startApp, type Answer, type App } from '../support/app.ts';
import { assertHeaders, assertRefused } from './envelope.ts';

interface Accepted {
  data: { object: string; id: string }[];
  errors?: { index: number; message: string }[];
}

const test = suite('batch');
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

const emailOf = (subject: string, change: Record<string, unknown> = {}) => ({
  from: 'Ada <ada@mailstead.test>',
  to: 'ok@recipient.test',
  subject,
  text: 'Plain words.',
  ...change,
});
const post = (
  body: unknown,
  { path = '/emails/batch', ...rest }: { path?: string; key?: string; permissive?: boolean } = {},
): Promise<Answer<Accepted>> =>
  app.call<Accepted>('POST', path, {
    body,
    ...(rest.key === undefined ? {} : { key: rest.key }),
    ...(rest.permissive === true ? { headers: { 'x-batch-validation': 'permissive' } } : {}),
  });
const read = async (id: string | undefined): Promise<Record<string, unknown>> =>
  (await app.call('GET', `/emails/${id}`)).body;
const count = async (): Promise<number> => {
  const { rows } = await pool.query<{ count: string }>('select count(*) from email');
  return Number(rows[0]?.count);
};
const unknownId = '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70';

test('the emails are answered in the order of the request, at both mounts', async () => {
  for (const path of ['/emails/batch', '/api/emails/batch', '/emails/batch/']) {
    const answer = await post([emailOf('One'), emailOf('Two'), emailOf('Three')], { path });
    assert.is(answer.status, 200, JSON.stringify(answer.body));
    assertHeaders(answer);
    assert.equal(Object.keys(answer.body), ['data'], 'no errors unless permissive');
    const ids = answer.body.data.map(({ id }) => id);
    assert.equal(
      answer.body.data,
      ids.map((id) => ({ object: 'email', id })),
    );
    const emails = await Promise.all(ids.map(read));
    assert.equal(
      emails.map(({ subject }) => subject),
      ['One', 'Two', 'Three'],
    );
  }
});

test('a batch is delivered', async () => {
  const { body } = await post([emailOf('A'), emailOf('B', { to: ['a@x.test', 'b@x.test'] })]);
  for (const { id } of body.data) await app.untilEvent(id, 'delivered');
});

test('a hundred emails with all that they can have are one request', async () => {
  const before = await count();
  const recipients = (list: string): string[] =>
    Array.from({ length: 5 }, (_, index) => `${list}${index}@recipient.test`);
  const requests = Array.from({ length: 100 }, (_, index) =>
    emailOf(`Number ${index}`, {
      to: recipients('to'),
      cc: recipients('cc'),
      bcc: recipients('bcc'),
      tags: [{ name: 'number', value: String(index) }],
      headers: { 'X-Number': String(index) },
      scheduled_at: 'in 1 hour',
      attachments: [{ filename: 'n.txt', content: Buffer.from(`${index}`).toString('base64') }],
    }),
  );
  const { status, body } = await post(requests);
  assert.is(status, 200);
  assert.is(new Set(body.data.map(({ id }) => id)).size, 100);
  assert.is(await count(), before + 100);
  const last = await read(body.data[99]?.id);
  assert.is(last['subject'], 'Number 99');
  assert.is(last['last_event'], 'scheduled');
  assert.equal(last['tags'], [{ name: 'number', value: '99' }]);
  const { rows } = await pool.query<{ count: string }>(
    'select count(distinct xmin::text) from email where id = any ($1)',
    [body.data.map(({ id }) => id)],
  );
  assert.is(rows[0]?.count, '1', 'one transaction');
});

test('attachments, schedules, templates, topics and tags work inside', async () => {
  const template = await app.call<{ id: string }>('POST', '/templates', {
    body: {
      name: 'Batch',
      from: 'Tess <tess@mailstead.test>',
      subject: 'Hello {{{NAME}}}',
      html: '<p>{{{NAME}}}</p>',
      variables: [{ key: 'NAME', type: 'string' }],
    },
  });
  assert.is(template.status, 201, JSON.stringify(template.body));
  await app.call('POST', `/templates/${template.body.id}/publish`);
  const topic = await app.call<{ id: string }>('POST', '/topics', {
    body: { name: 'Batch', default_subscription: 'opt_in' },
  });
  const large = Buffer.alloc(400_000, 'large ').toString('base64');
  const { status, body } = await post([
    { to: 'ok@recipient.test', template: { id: template.body.id, variables: { NAME: 'Ada' } } },
    emailOf('Later', { scheduled_at: 'in 2 days', topic_id: topic.body.id }),
    emailOf('With files', {
      attachments: [
        { filename: 'a.txt', content: 'YQ==' },
        { filename: 'b.bin', content: large },
      ],
    }),
  ]);
  assert.is(status, 200, JSON.stringify(body));
  const [templated, later, filed] = await Promise.all(body.data.map(({ id }) => read(id)));
  assert.is(templated?.['subject'], 'Hello Ada');
  assert.is(templated?.['from'], 'Tess <tess@mailstead.test>');
  assert.is(templated?.['html'], '<p>Ada</p>');
  assert.is(later?.['last_event'], 'scheduled');
  assert.is(later?.['topic_id'], topic.body.id);
  const { rows } = await pool.query<{ filename: string; size_bytes: number }>(
    'select filename, size_bytes from attachment where email_id = $1 order by position',
    [filed?.['id']],
  );
  assert.equal(rows, [
    { filename: 'a.txt', size_bytes: 1 },
    { filename: 'b.bin', size_bytes: 400_000 },
  ]);
});

test('one wrong email refuses all, and every issue has its place', async () => {
  const before = await count();
  const refused = await post([
    emailOf('Right'),
    emailOf('Wrong', { to: ['ok@recipient.test', 'nobody'], scheduled_at: 'soon' }),
    emailOf('Missing', { from: undefined, subject: undefined }),
    emailOf('Topic', { topic_id: unknownId }),
    emailOf('Template', { text: undefined, template: { id: 'no-such' } }),
    emailOf('File', { attachments: [{ filename: 'a.txt' }] }),
  ]);
  assertRefused(refused, {
    status: 422,
    code: 'validation_error',
    paths: [
      '1.to.1',
      '1.scheduled_at',
      '2.subject',
      '2.from',
      '3.topic_id',
      '4.template.id',
      '5.attachments.0',
    ],
  });
  assertRefused(await post([emailOf('A'), emailOf('B', { to: undefined })]), {
    status: 422,
    code: 'missing_required_field',
    paths: ['1.to'],
  });
  assert.is(await count(), before, 'nothing was stored');
});

test('values of wrong types are refused with their place, too', async () => {
  for (const [item, path] of [
    [emailOf('A', { to: 7 }), '1.to'],
    [emailOf('A', { tags: [{ name: 'a' }] }), '1.tags.0.value'],
    [emailOf('A', { attachments: [{ filename: 7 }] }), '1.attachments.0.filename'],
    ['email', '1'],
    [null, '1'],
    [[], '1'],
  ] as const) {
    const answer = await post([emailOf('Right'), item]);
    const code = path.endsWith('value') ? 'missing_required_field' : 'validation_error';
    assertRefused(answer, { status: 422, code, paths: [path] });
  }
});

test('a batch is an array of 1 to 100', async () => {
  const before = await count();
  const many = Array.from({ length: 101 }, (_, index) => emailOf(String(index)));
  for (const permissive of [false, true]) {
    for (const body of [[], many, {}, 'x', emailOf('Alone')]) {
      const answer = await post(typeof body === 'string' ? '"x"' : body, { permissive });
      assertRefused(answer, { status: 422, code: 'validation_error', paths: ['body'] });
    }
  }
  assertRefused(await post('[{'), { status: 400, code: 'invalid_json' });
  assert.is(await count(), before);
});

test('templates make no more of a batch than a body can hold', async () => {
  const template = await app.call<{ id: string }>('POST', '/templates', {
    body: { name: 'Large', html: `<p>${'x'.repeat(4_900_000)}</p>`, text: 'Small.' },
  });
  const { id } = template.body;
  assert.is((await app.call('POST', `/templates/${id}/publish`)).status, 200);
  const before = await count();
  const many = Array.from({ length: 11 }, (_, index) =>
    emailOf(String(index), { text: undefined, template: { id } }),
  );
  const strict = await post(many);
  assertRefused(strict, { status: 422, code: 'validation_error', paths: ['10.template'] });
  assert.is(await count(), before);
  const { data, errors } = (await post([...many, emailOf('Small')], { permissive: true })).body;
  assert.is(data.length, 11);
  assert.equal(
    errors?.map(({ index }) => index),
    [10],
  );
});

test('permissive: the right ones are sent, the wrong ones are named', async () => {
  const before = await count();
  const answer = await post(
    [
      emailOf('First'),
      emailOf('Nobody', { to: 'not an address' }),
      emailOf('Second'),
      emailOf('Of a wrong type', { to: 7 }),
      'not an email',
      emailOf('Template', { text: undefined, template: { id: 'no-such' } }),
      emailOf('Past', { scheduled_at: '2020-01-01T00:00:00Z' }),
      emailOf('Last'),
    ],
    { permissive: true },
  );
  assert.is(answer.status, 200, JSON.stringify(answer.body));
  assertHeaders(answer);
  assert.equal(Object.keys(answer.body), ['data', 'errors']);
  const { data, errors } = answer.body;
  const emails = await Promise.all(data.map(({ id }) => read(id)));
  assert.equal(
    emails.map(({ subject }) => subject),
    ['First', 'Second', 'Last'],
  );
  assert.equal(
    errors?.map(({ index }) => index),
    [1, 3, 4, 5, 6],
  );
  assert.match(errors?.[0]?.message ?? '', /^Invalid `to` field/);
  assert.match(errors?.[1]?.message ?? '', /^`to` must be a string or an array of strings\.$/);
  assert.match(errors?.[3]?.message ?? '', /^Template not found/);
  assert.match(errors?.[4]?.message ?? '', /^`scheduled_at` must be in the future/);
  assert.is(await count(), before + 3);
});

test('permissive: an item that is too much to be checked is one wrong item', async () => {
  const before = await count();
  const to = Array.from({ length: 200 }, (_, index) => `r${index}@recipient.test`);
  const items = [
    emailOf('Small'),
    emailOf('Crowd', { to }),
    emailOf('Of a wrong type', { to: 7 }),
    emailOf('Odd', { headers: { toString: 'x' } }),
    emailOf('Small too'),
  ];
  const { status, body } = await post(items, { permissive: true });
  assert.is(status, 200, JSON.stringify(body));
  assert.is(body.data.length, 2);
  assert.equal(
    body.errors?.map(({ index }) => index),
    [1, 2, 3],
  );
  assert.match(body.errors?.[0]?.message ?? '', /^`to` has 200 items/);
  assert.match(body.errors?.[2]?.message ?? '', /toString/);
  assert.is(await count(), before + 2);
  assertRefused(await post(items), { status: 422, code: 'validation_error', paths: ['1.to'] });
});

test('permissive: all right, and all wrong', async () => {
  const right = await post([emailOf('A')], { permissive: true });
  assert.is(right.body.data.length, 1);
  assert.equal(right.body.errors, []);
  const before = await count();
  const wrong = await post([{}, emailOf('B', { to: [] }), 5], { permissive: true });
  assert.is(wrong.status, 200);
  assert.equal(wrong.body.data, []);
  assert.equal(
    wrong.body.errors?.map(({ index }) => index),
    [0, 1, 2],
  );
  assert.is(await count(), before);
});

test('strict is what is said by the header, and nothing else is known', async () => {
  const call = (value: string): Promise<Answer> =>
    app.call('POST', '/emails/batch', {
      body: [emailOf('A'), emailOf('B', { to: 'x' })],
      headers: { 'x-batch-validation': value },
    });
  assertRefused(await call('strict'), { status: 422, code: 'validation_error', paths: ['1.to'] });
  for (const value of ['lenient', 'Permissive', 'permissive, strict']) {
    assertRefused(await call(value), {
      status: 422,
      code: 'validation_error',
      paths: ['x-batch-validation'],
      says: /strict.*permissive/,
    });
  }
});

test('a batch needs a key; a sending key is enough', async () => {
  assertRefused(await post([emailOf('A')], { key: newToken() }), {
    status: 401,
    code: 'invalid_api_key',
  });
  const { rows } = await pool.query<{ id: string }>(`select id from tenant where name = 'first'`);
  const token = newToken();
  await createKey(pool, {
    tenantId: rows[0]?.id ?? '',
    name: 'sending',
    token,
    permission: 'sending_access',
    domainId: null,
  });
  assert.is((await post([emailOf('A')], { key: token })).status, 200);
});

test('nothing was logged', () => assert.equal(app.complaints, []));

test.run();
