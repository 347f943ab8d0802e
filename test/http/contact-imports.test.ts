// Importing contacts at the door: forms of every kind, what is refused and why, and that a file which does not become an
// import is gone. Then what else an SDK may ask for: usage, grants and inboxes.
import { once } from 'node:events';
import { readdirSync } from 'node:fs';
import { connect } from 'node:net';
import { join } from 'node:path';
import { Resend } from 'resend';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { newId } from '../../src/store/id.ts';
import { startApp, until, type Answer, type App } from '../support/app.ts';
import { secondTenant } from '../support/second-tenant.ts';
import { send as sendMail } from '../support/sink-session.ts';
import { assertRefused as assertEnvelope } from './envelope.ts';

const MIB = 1024 * 1024;

const test = suite('contact imports');
let app: App;
let resend: Resend;
test.before(async () => {
  app = await startApp();
  resend = new Resend(app.key, { baseUrl: app.base });
});
test.after(async () => {
  await app.stop();
});

interface Details {
  readonly details?: { readonly issues: readonly { readonly path: string }[] };
}

function assertRefused(answer: Answer, status: number, code: string): void {
  const paths = (answer.body as Details).details?.issues.map(({ path }) => path);
  assertEnvelope(answer, { status, code, ...(paths === undefined ? {} : { paths }) });
}

type Body = Record<string, unknown> & { id: string };

async function post(form: FormData, path = '/contacts/imports', key = app.key) {
  const headers = { authorization: `Bearer ${key}` };
  const response = await fetch(app.base + path, { method: 'POST', body: form, headers });
  const body = (await response.json()) as Body;
  return { status: response.status, headers: response.headers, body } as Answer<Body>;
}

function form(file: string | Blob | null, fields: Readonly<Record<string, string>> = {}): FormData {
  const made = new FormData();
  for (const [name, value] of Object.entries(fields)) made.append(name, value);
  if (file !== null) made.append('file', new Blob([file], { type: 'text/csv' }), 'contacts.csv');
  return made;
}

/** A body of one's own making. */
const raw = (
  body: string | Uint8Array,
  type = 'multipart/form-data; boundary=x',
): Promise<Answer> =>
  app.call('POST', '/contacts/imports', { body, headers: { 'content-type': type } });

const part = (name: string, text: string, more = ''): string =>
  `--x\r\nContent-Disposition: form-data; name="${name}"${more}\r\n\r\n${text}\r\n`;

const done = async (id: string): Promise<Body> => {
  const read = () => app.call<Body>('GET', `/contacts/imports/${id}`);
  const { body } = await until(read, (answer) =>
    ['completed', 'failed'].includes(String(answer.body['status'])),
  );
  return body;
};

/** Files under the folder of blobs, finished or not. */
const files = (): readonly string[] =>
  readdirSync(join(app.dataDir, 'blobs'), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile() && entry.name !== 'blob-store-id')
    .map((entry) => entry.name);
/** A file goes after what is told of it was stored. */
const untilEmpty = (): Promise<readonly string[]> =>
  until(
    () => Promise.resolve(files()),
    (found) => found.length === 0,
  );

test('the SDK imports a file and follows it', async () => {
  const file = new Blob(['Email,Name\r\nada@recipient.test,Ada\r\nnobody,X\r\n'], {
    type: 'text/csv',
  });
  const made = await resend.contacts.imports.create({
    file,
    columnMap: { email: 'Email', firstName: 'Name' },
    onConflict: 'skip',
  });
  assert.is(made.error, null);
  assert.is(made.data!.object, 'contact_import');
  const body = await done(made.data!.id);
  assert.is(body['status'], 'completed');
  assert.equal(body['counts'], { total: 2, created: 1, updated: 0, skipped: 0, failed: 1 });
  assert.equal(body['errors'], [
    {
      row: 3,
      message:
        'Invalid `email` field: the address needs an @ between the local part and the domain.',
    },
  ]);
  assert.equal([body['size'], body['read'], body['failure']], [file.size, file.size, null]);
  const got = await resend.contacts.imports.get(made.data!.id);
  assert.ok(got.data!.completed_at !== null);
  const listed = await resend.contacts.imports.list({ status: 'completed' });
  assert.equal(
    listed.data!.data.map(({ id }) => id),
    [made.data!.id],
  );
  assert.not('errors' in listed.data!.data[0]!);
  assert.equal((await resend.contacts.imports.list({ status: 'failed' })).data!.data, []);
  assert.equal(files(), []);
});

test('the fields may come in any order, at both mounts, and a file needs no name', async () => {
  const answers = [
    await post(form('email\n', { on_conflict: 'upsert' })),
    await post(form('email\n'), '/api/contacts/imports'),
    await raw(`${part('file', 'email\na@recipient.test')}${part('on_conflict', 'skip')}--x--\r\n`),
    await raw(`preamble\r\n${part('file', 'email\n', '; filename="a.csv"')}--x--\r\nepilogue`),
  ];
  for (const { status, body } of answers) {
    assert.is(status, 201, JSON.stringify(body));
    assert.is((await done(String(body['id'])))['status'], 'completed');
  }
  const page = await app.call<{ data: Body[]; has_more: boolean }>(
    'GET',
    '/contacts/imports?limit=2',
  );
  assert.equal(
    page.body.data.map(({ id }) => id),
    answers
      .toReversed()
      .slice(0, 2)
      .map(({ body }) => body['id']),
  );
  assert.is(page.body.has_more, true);
  const rest = await app.call<{ data: Body[] }>(
    'GET',
    `/contacts/imports?after=${page.body.data[1]!.id}`,
  );
  assert.equal(
    rest.body.data.slice(0, 2).map(({ id }) => id),
    [answers[1]!.body['id'], answers[0]!.body['id']],
  );
  // The log shows what was asked for.
  const { body } = await app.call<{ data: Body[] }>('GET', '/logs?method=POST&limit=100');
  const shown = await Promise.all(body.data.map(({ id }) => app.call('GET', `/logs/${id}`)));
  assert.ok(
    shown.some(
      (answer) => JSON.stringify(answer.body['request_body']) === '{"on_conflict":"skip"}',
    ),
  );
});

test('what is no good form is refused, and its file is gone', async () => {
  const good = part('file', 'email\n');
  const cases: readonly [Promise<Answer>, number, string, RegExp][] = [
    [post(form(null, { on_conflict: 'skip' })), 422, 'missing_required_field', /Missing `file`/],
    [raw('{}', 'application/json'), 422, 'missing_required_field', /multipart/],
    [raw('', 'application/json'), 422, 'missing_required_field', /multipart/],
    [raw('{', 'application/json'), 400, 'invalid_json', /JSON/],
    [raw(good, 'multipart/form-data'), 400, 'invalid_request', /boundary/],
    [raw(good), 400, 'invalid_request', /not a whole/],
    [raw('--x\r\nContent-Disp'), 400, 'invalid_request', /not a whole/],
    [raw('nothing of the kind'), 400, 'invalid_request', /not a whole/],
    [raw(`${good}${good}--x--\r\n`), 422, 'validation_error', /`file` is there more than once/],
    [
      raw(`${good}${part('topics', '[]').repeat(2)}--x--\r\n`),
      422,
      'validation_error',
      /`topics` is there more than once/,
    ],
    [
      raw(`${part('column_map', 'x'.repeat(70_000))}${good}--x--\r\n`),
      422,
      'validation_error',
      /`column_map` is longer/,
    ],
    [
      raw(`${Array.from({ length: 30 }, (_, n) => part(`f${n}`, '')).join('')}${good}--x--\r\n`),
      422,
      'validation_error',
      /more than 20 fields/,
    ],
    [post(form('Email\n')), 422, 'validation_error', /no column `email`/],
    [post(form('email\n', { segments: '[{"id":1}]' })), 422, 'validation_error', /segments\.0/],
    [
      app.call('POST', '/contacts/imports', {
        body: Buffer.from(`${good}--x--\r\n`),
        headers: { 'content-type': 'multipart/form-data; boundary=x', 'content-encoding': 'gzip' },
      }),
      400,
      'invalid_request',
      /without compression/,
    ],
  ];
  for (const [answering, status, code, words] of cases) {
    const answer = await answering;
    assertRefused(answer, status, code);
    assert.match(String((answer.body as Body)['message']), words);
  }
  assert.equal(files(), []);
});

test('a file of 100 MiB is the largest, and a caller hears so before or after it came', async () => {
  // No row of it ends, so that nobody reads it for long.
  const most = new Blob(['email\n"', ' '.repeat(100 * MIB - 7)]);
  assert.is(most.size, 100 * MIB);
  const over = await post(form(new Blob([most, '\n'])));
  assertRefused(over, 413, 'request_too_large');
  await untilEmpty();
  // Announced, it is refused before it comes.
  const socket = connect(Number(new URL(app.base).port), '127.0.0.1');
  socket.write(
    `POST /contacts/imports HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${app.key}\r\n` +
      `Content-Type: multipart/form-data; boundary=x\r\nContent-Length: ${300 * MIB}\r\n\r\n`,
  );
  let said = '';
  socket.on('data', (chunk: Buffer) => (said += chunk.toString()));
  await once(socket, 'close');
  assert.match(said, /^HTTP\/1\.1 413 /);
  const taken = await post(form(most));
  assert.is(taken.status, 201);
  const { size, status, failure } = await done(taken.body.id);
  assert.equal([size, status], [100 * MIB, 'failed']);
  assert.match(String(failure), /^Row 2 cannot be read: it is longer than 100000 characters/);
  await untilEmpty();
});

test('an upload that its caller breaks off leaves nothing', async () => {
  const socket = connect(Number(new URL(app.base).port), '127.0.0.1');
  socket.on('error', () => undefined);
  socket.write(
    `POST /contacts/imports HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ${app.key}\r\n` +
      `Content-Type: multipart/form-data; boundary=x\r\nTransfer-Encoding: chunked\r\n\r\n`,
  );
  const piece = part('file', `email\n${'a@recipient.test\n'.repeat(10_000)}`).slice(0, -2);
  socket.write(`${piece.length.toString(16)}\r\n${piece}\r\n`);
  await until(
    () => Promise.resolve(files()),
    (found) => found.length === 1,
  );
  socket.destroy();
  await untilEmpty();
});

test('a key that may only send, a foreign id, a bad one, a bad filter', async () => {
  const { body: made } = await app.call<{ token: string }>('POST', '/api-keys', {
    body: { name: 'sends', permission: 'sending_access' },
  });
  assertRefused(
    await post(form('email\n'), '/contacts/imports', made.token),
    401,
    'restricted_api_key',
  );
  const own = await post(form('email\n'));
  const { key } = await secondTenant(app);
  for (const id of [own.body.id, newId()]) {
    assertRefused(await app.call('GET', `/contacts/imports/${id}`, { key }), 404, 'not_found');
  }
  const foreign = await app.call<{ data: unknown[] }>('GET', '/contacts/imports', { key });
  assert.equal(foreign.body.data, []);
  assertRefused(await app.call('GET', '/contacts/imports/x'), 422, 'invalid_parameter');
  assertRefused(await app.call('GET', '/contacts/imports?status=done'), 422, 'validation_error');
  assertRefused(
    await app.call('GET', `/contacts/imports?after=${own.body.id}`, { key }),
    422,
    'validation_error',
  );
});

test('usage counts what there is, of this tenant alone', async () => {
  const { key } = await secondTenant(app);
  const other = new Resend(key, { baseUrl: app.base });
  const none = (await other.usage.get()).data!;
  assert.equal([none.emails.monthly.used, none.contacts.used, none.domains.used], [0, 0, 0]);
  const before = (await resend.usage.get()).data!;
  await app.send();
  await sendMail(app.appliance.mxPort!, {
    to: ['x@mailstead.test'],
    raw: 'Subject: x\r\n\r\nx\r\n',
  });
  const after = (await resend.usage.get()).data!;
  for (const period of ['daily', 'monthly'] as const) {
    const [was, is] = [before.emails[period], after.emails[period]];
    assert.equal([is.sent - was.sent, is.received - was.received], [1, 1]);
    assert.is(is.used, is.sent + is.received);
    assert.is(is.limit, null);
    assert.ok(new Date(is.resets_at) > new Date());
  }
  assert.is(after.contacts.used, 2);
  assert.ok(after.domains.used >= 1);
  assert.equal(after.rate_limit, { limit: 100_000, duration: '1s' });
  assert.equal(after.ai_credits, { used: 0, limit: null, next_increase_at: null });
  assert.is((await other.usage.get()).data!.emails.monthly.used, 0);
});

test('there are no grants and no inboxes', async () => {
  assert.equal((await resend.oauthGrants.list()).data, {
    object: 'list',
    data: [],
    has_more: false,
  });
  assertRefused(await app.call('GET', '/oauth/grants?limit=0'), 422, 'validation_error');
  assertRefused(await app.call('DELETE', `/oauth/grants/${newId()}`), 404, 'not_found');
  assertRefused(await app.call('DELETE', '/oauth/grants/x'), 422, 'invalid_parameter');
  for (const [method, path] of [
    ['GET', '/inboxes'],
    ['POST', '/inboxes'],
    ['GET', '/inboxes/a@b.test/threads'],
    ['PUT', `/api/inboxes/x/threads/${newId()}/labels`],
  ] as const) {
    assertRefused(await app.call(method, path), 404, 'not_found');
  }
});

test.run();
