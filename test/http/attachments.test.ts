// Attachments over the API: on the way in (large ones too), as the recipient gets them, listed and downloaded, and
// never seen by another tenant.
import { randomBytes, randomUUID } from 'node:crypto';
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { Resend } from 'resend';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, until, type App } from '../support/app.ts';
import { read } from '../support/composed.ts';
import { onDatabase, secondTenant } from '../support/second-tenant.ts';
import { assertInstant, assertRefused, type Refused } from './envelope.ts';

const HOUR_MS = 3_600_000;
const email = {
  from: 'Ada <ada@mailstead.test>',
  to: 'ok@recipient.test',
  subject: 'Files',
  html: '<p>See <img src="cid:logo"></p>',
};
const PIXEL = Buffer.from('iVBORw0KGgo=', 'base64');
const base64 = (content: string | Buffer): string => Buffer.from(content).toString('base64');
const note = { filename: 'note.txt', content: base64('a note') };
const logo = { filename: 'logo.png', content: base64(PIXEL), content_id: 'logo' };

interface Listed {
  readonly id: string;
  readonly filename: string;
  readonly size: number | null;
  readonly content_type: string;
  readonly content_disposition: string;
  readonly content_id: string | null;
  readonly download_url: string | null;
  readonly expires_at: string | null;
}

const test = suite('attachments over the API');
let app: App;
test.before(async () => {
  app = await startApp();
});
test.after(() => app.stop());

const list = async (id: string, query = ''): Promise<readonly Listed[]> => {
  const { status, body } = await app.call<{ data: Listed[] }>(
    'GET',
    `/emails/${id}/attachments${query}`,
  );
  assert.is(status, 200, JSON.stringify(body));
  return body.data;
};
/** Without the API key. */
const download = (url: string | null): Promise<Response> => {
  const { pathname } = new URL(url ?? '');
  return fetch(app.base + pathname);
};
const bytesOf = async (url: string | null): Promise<Buffer> => {
  const answer = await download(url);
  assert.is(answer.status, 200);
  return Buffer.from(await answer.arrayBuffer());
};
/** As it arrived at the sink. */
const arrived = async (id: string): Promise<Buffer> => {
  await app.untilEvent(id, 'delivered');
  return onDatabase(app, async (pool) => {
    const { rows } = await pool.query<{ raw: Buffer }>(
      'select raw from sink_message where position($1::bytea in raw) > 0',
      [Buffer.from(`Message-ID: <${id}@`)],
    );
    assert.is(rows.length, 1);
    return rows[0]!.raw;
  });
};

test('they arrive, are listed in their order and download as they were', async () => {
  const eml = {
    filename: 'forwarded_message.eml',
    content: base64('Subject: x\r\n\r\ny'),
    content_type: 'message/rfc822',
  };
  const id = await app.send({ ...email, attachments: [note, logo, eml] });
  const found = await list(id);
  assert.equal(
    found.map(({ id: _id, download_url: _url, expires_at: _at, ...rest }) => rest),
    [
      {
        filename: 'note.txt',
        size: 6,
        content_type: 'text/plain',
        content_disposition: 'attachment',
        content_id: null,
      },
      {
        filename: 'logo.png',
        size: PIXEL.length,
        content_type: 'image/png',
        content_disposition: 'inline',
        content_id: 'logo',
      },
      {
        filename: 'forwarded_message.eml',
        size: 15,
        content_type: 'message/rfc822',
        content_disposition: 'attachment',
        content_id: null,
      },
    ],
  );
  for (const one of found) {
    assertInstant(one.expires_at);
    const leftMs = Date.parse(one.expires_at ?? '') - Date.now();
    assert.ok(leftMs > HOUR_MS - 60_000 && leftMs <= HOUR_MS + 1_000, String(leftMs));
  }
  assert.equal(await bytesOf(found[0]!.download_url), Buffer.from('a note'));
  assert.equal(await bytesOf(found[1]!.download_url), PIXEL);

  const parsed = await read(await arrived(id));
  const files = new Map(parsed.attachments.map((one) => [one.filename, one]));
  assert.equal(files.get('note.txt')?.content, Buffer.from('a note'));
  assert.equal(files.get('logo.png')?.content, PIXEL);
  assert.is(files.get('logo.png')?.cid, 'logo');
  assert.is(files.get('forwarded_message.eml')?.content.toString(), 'Subject: x\r\n\r\ny');
});

test('one of them', async () => {
  const id = await app.send({ ...email, attachments: [note] });
  const [listed] = await list(id);
  const one = await app.call<Listed & { object: string }>(
    'GET',
    `/emails/${id}/attachments/${listed!.id}`,
  );
  assert.is(one.status, 200);
  assert.is(one.body.object, 'attachment');
  assert.is(one.body.id, listed!.id);
  assert.equal(await bytesOf(one.body.download_url), Buffer.from('a note'));
  assert.equal(await list(await app.send(email)), [], 'an email without any');
});

test('pages of the list', async () => {
  const attachments = Array.from({ length: 5 }, (_, index) => ({
    ...note,
    filename: `${index}.txt`,
  }));
  const id = await app.send({ ...email, attachments });
  const [first, second] = await list(id, '?limit=2');
  assert.equal([first?.filename, second?.filename], ['0.txt', '1.txt']);
  const rest = await list(id, `?after=${second!.id}`);
  assert.equal(
    rest.map(({ filename }) => filename),
    ['2.txt', '3.txt', '4.txt'],
  );
  const back = await list(id, `?before=${rest[0]!.id}`);
  assert.equal(
    back.map(({ filename }) => filename),
    ['0.txt', '1.txt'],
  );
  for (const query of [
    '?limit=0',
    `?after=${randomUUID()}`,
    '?after=x',
    `?after=${first!.id}&before=${first!.id}`,
  ]) {
    assert.is((await app.call('GET', `/emails/${id}/attachments${query}`)).status, 422, query);
  }
});

test('large ones: through the spool into the blob store and out again', async () => {
  const content = randomBytes(3_000_001);
  const attachments = [
    { filename: 'large.bin', content: base64(content) },
    note,
    { filename: 'lines.bin', content: base64(content).replace(/.{76}/g, '$&\r\n') },
  ];
  const id = await app.send({ ...email, attachments });
  const found = await list(id);
  assert.equal(
    found.map(({ size }) => size),
    [content.length, 6, content.length],
  );
  assert.ok((await bytesOf(found[0]!.download_url)).equals(content));
  assert.equal(await bytesOf(found[1]!.download_url), Buffer.from('a note'));
  assert.ok((await bytesOf(found[2]!.download_url)).equals(content));
  const parsed = await read(await arrived(id));
  assert.ok(parsed.attachments[0]?.content.equals(content));
});

test('in a batch, each email its own', async () => {
  const content = randomBytes(200_000);
  const answer = await app.call<{ data: { id: string }[] }>('POST', '/emails/batch', {
    body: [
      { ...email, attachments: [{ filename: '1.bin', content: base64(content) }] },
      { ...email, attachments: [{ filename: '2.bin', content: base64(content.subarray(1)) }] },
    ],
  });
  assert.is(answer.status, 200, JSON.stringify(answer.body));
  const [one, two] = answer.body.data;
  assert.ok((await bytesOf((await list(one!.id))[0]!.download_url)).equals(content));
  assert.ok((await bytesOf((await list(two!.id))[0]!.download_url)).equals(content.subarray(1)));
});

test('the same key and the same file replay, another file does not', async () => {
  const content = randomBytes(200_000);
  const send = (bytes: Buffer) =>
    app.call('POST', '/emails', {
      body: { ...email, attachments: [{ filename: 'a.bin', content: base64(bytes) }] },
      headers: { 'idempotency-key': 'attached' },
    });
  const first = await send(content);
  const again = await send(content);
  assert.equal([first.status, again.status], [200, 200]);
  assert.equal(again.body, first.body);
  assert.is(again.headers.get('idempotent-replayed'), 'true');
  assert.is((await send(content.subarray(1))).status, 409);
});

const refusals: Readonly<Record<string, readonly [unknown, Refused]>> = {
  'no base64': [
    [{ ...note, content: 'not base64!' }],
    { status: 422, code: 'invalid_attachment', paths: ['attachments.0.content'] },
  ],
  'no base64, at length': [
    [{ ...note, content: `${'QUJD'.repeat(50_000)}!` }],
    { status: 422, code: 'invalid_attachment', paths: ['attachments.0.content'] },
  ],
  'neither content nor path': [
    [note, { filename: 'a.txt' }],
    { status: 422, code: 'invalid_attachment', paths: ['attachments.1'] },
  ],
  'both content and path': [
    [{ ...note, path: 'https://files.example/a' }],
    { status: 422, code: 'invalid_attachment', paths: ['attachments.0'] },
  ],
  'a path into the machine': [
    [{ filename: 'a', path: 'http://localhost:5432/' }],
    { status: 422, code: 'invalid_attachment', paths: ['attachments.0.path'] },
  ],
  'no name': [
    [{ content: note.content }],
    { status: 422, code: 'invalid_attachment', paths: ['attachments.0.filename'] },
  ],
  'a program': [
    [{ ...note, filename: 'setup.exe' }],
    { status: 422, code: 'invalid_attachment', paths: ['attachments.0.filename'] },
  ],
  'a name that breaks out': [
    [{ ...note, filename: 'a.txt"\r\nBcc: b@y.example' }],
    { status: 422, code: 'invalid_attachment', paths: ['attachments.0.filename'] },
  ],
  'a type that breaks out': [
    [{ ...note, content_type: 'text/plain\r\nBcc: b@y.example' }],
    { status: 422, code: 'invalid_attachment', paths: ['attachments.0.content_type'] },
  ],
  '101 of them': [
    Array.from({ length: 101 }, () => note),
    { status: 422, code: 'invalid_attachment', paths: ['attachments'] },
  ],
  'no list': ['x', { status: 422, code: 'validation_error', paths: ['attachments'] }],
  'a list of texts': [['x'], { status: 422, code: 'validation_error', paths: ['attachments.0'] }],
  'a number for content': [
    [{ ...note, content: 5 }],
    { status: 422, code: 'validation_error', paths: ['attachments.0.content'] },
  ],
};
for (const [title, [attachments, expected]] of Object.entries(refusals)) {
  test(`refused: ${title}`, async () => {
    assertRefused(await app.call('POST', '/emails', { body: { ...email, attachments } }), expected);
  });
}

test('40 MiB in base64 go in, four bytes more do not', async () => {
  const whole = 'QUJD'.repeat(10 * 1024 * 1024);
  const json = (content: string): string =>
    JSON.stringify({ ...email, attachments: [{ filename: 'whole.bin', content }] });
  const answer = await app.call<{ id: string }>('POST', '/emails', { body: json(whole) });
  assert.is(answer.status, 200, JSON.stringify(answer.body));
  assert.equal(
    (await list(answer.body.id)).map(({ size }) => size),
    [30 * 1024 * 1024],
  );
  assertRefused(await app.call('POST', '/emails', { body: json(`${whole}QUJD`) }), {
    status: 422,
    code: 'invalid_attachment',
    paths: ['attachments'],
    says: /41943044 bytes in base64; at most 41943040/,
  });
});

test('another tenant sees nothing, and a missing one looks the same', async () => {
  const id = await app.send({ ...email, attachments: [note] });
  const [one] = await list(id);
  const { key } = await secondTenant(app);
  for (const [path, options] of [
    [`/emails/${id}/attachments`, { key }],
    [`/emails/${randomUUID()}/attachments`, {}],
    [`/emails/${id}/attachments/${one!.id}`, { key }],
    [`/emails/${id}/attachments/${randomUUID()}`, {}],
    [`/emails/${randomUUID()}/attachments/${one!.id}`, {}],
  ] as const) {
    const answer = await app.call<{ code: string; message: string }>('GET', path, options);
    assert.is(answer.status, 404, path);
    assert.is(answer.body.code, 'not_found');
    const isList = path.endsWith('attachments');
    assert.is(answer.body.message, isList ? 'Email not found' : 'Attachment not found');
  }
  for (const [path, name] of [
    [`/emails/x/attachments`, 'id'],
    [`/emails/${id}/attachments/x`, 'attachmentId'],
  ] as const) {
    const refused = { status: 422, code: 'invalid_parameter', paths: [name] };
    assertRefused(await app.call('GET', path), refused);
  }
  assert.is((await app.call('GET', `/emails/${id}/attachments`, { key: null })).status, 401);
});

test('a message that was submitted as a whole has its files by position', async () => {
  const id = await app.send({ ...email, attachments: [note, logo] });
  await onDatabase(app, (pool) =>
    pool.query(
      // The page's image stands before what is attached to all of it.
      `update attachment set raw_offset = null, raw_length = null, position = 1 - position
       where email_id = $1`,
      [id],
    ),
  );
  const found = await list(id);
  const contents = await Promise.all(found.map(({ download_url: url }) => bytesOf(url)));
  assert.equal(contents, [PIXEL, Buffer.from('a note')]);
});

test('the official SDK', async () => {
  const resend = new Resend(app.key, { baseUrl: app.base });
  const sent = await resend.emails.send({
    ...email,
    attachments: [
      { filename: 'note.txt', content: Buffer.from('a note'), contentType: 'text/plain' },
      { filename: 'logo.png', content: base64(PIXEL), contentId: 'logo' },
    ],
  });
  const emailId = sent.data?.id ?? '';
  const listed = await resend.emails.attachments.list({ emailId });
  assert.equal(
    listed.data?.data.map(({ filename }) => filename),
    ['note.txt', 'logo.png'],
  );
  const [first] = listed.data!.data;
  const one = await resend.emails.attachments.get({ emailId, id: first!.id });
  assert.is(one.data?.object, 'attachment');
  assert.equal(await bytesOf(one.data?.download_url ?? null), Buffer.from('a note'));
});

test('afterwards the spool is empty and nothing was logged', async () => {
  await until(
    async () => readdirSync(join(app.dataDir, 'spool')),
    (files) => files.length === 0,
  );
  assert.equal(app.complaints, []);
});

test.run();
