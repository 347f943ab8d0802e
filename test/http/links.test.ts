// Signed links: what they open, for how long, and that a browser can do nothing with it but save or read it.
import { once } from 'node:events';
import type { AddressInfo } from 'node:net';
import { Readable } from 'node:stream';
import express from 'express';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import type { LinkedEmail, LinkedFile, LinkOpeners } from '../../src/access/linked.ts';
import { createSignedLinks, type LinkKind, type LinkTarget } from '../../src/access/signed-link.ts';
import { createErrorHandler } from '../../src/http/envelope.ts';
import { createLinkHandler, LINK_ROUTE } from '../../src/http/links.ts';
import { createLogger } from '../../src/log.ts';
import { startApp, type App } from '../support/app.ts';

const HOUR_MS = 3_600_000;
const ids = {
  tenantId: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e70',
  id: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e71',
  partId: '019e6f0a-5a1c-7000-8f3e-2b6a4c1d9e72',
};
const file: Omit<LinkedFile, 'content'> = {
  kind: 'file',
  filename: 'note.txt',
  contentType: 'text/plain',
  sizeBytes: 6,
};
const mail: LinkedEmail = {
  kind: 'email',
  subject: 'Hello',
  from: 'Ada <ada@x.example>',
  to: ['bob@y.example'],
  cc: [],
  createdAt: new Date(0),
  html: null,
  text: 'Plain words.',
};

let now = new Date('2026-05-06T12:00:00Z');
let linked: Omit<LinkedFile, 'content'> | LinkedEmail | null = file;
let content: () => Readable = () => Readable.from([Buffer.from('a note')], { objectMode: false });
let opened: LinkTarget[] = [];
let streams: Readable[] = [];

const open = async (target: LinkTarget) => {
  opened.push(target);
  if (linked === null || linked.kind === 'email') return Promise.resolve(linked);
  const stream = content();
  streams.push(stream);
  return Promise.resolve({ ...linked, content: stream });
};
const openers: LinkOpeners = {
  attachment: open,
  email: open,
  received_raw: open,
  received_attachment: open,
};
const complaints: string[] = [];
const links = createSignedLinks({
  key: Buffer.alloc(32, 'k'),
  publicUrl: 'https://mail.example/',
  now: () => now,
});
const web = express();
web.get(LINK_ROUTE, createLinkHandler({ links, openers }));
web.use(
  createErrorHandler(
    createLogger({ level: 'error', name: 'test', write: (line) => complaints.push(line) }),
  ),
);
const server = web.listen(0, '127.0.0.1');
await once(server, 'listening');
const base = `http://127.0.0.1:${(server.address() as AddressInfo).port}`;

const pathOf = (kind: LinkKind, lifetimeMs = HOUR_MS): string =>
  new URL(links.sign({ kind, ...ids }, lifetimeMs).url).pathname;
const get = (path: string, method = 'GET'): Promise<Response> => fetch(base + path, { method });

const test = suite('links');
test.before.each(() => {
  now = new Date('2026-05-06T12:00:00Z');
  linked = file;
  content = () => Readable.from([Buffer.from('a note')], { objectMode: false });
  opened = [];
  streams = [];
});
let app: App;
test.before(async () => {
  app = await startApp();
});
test.after(async () => {
  server.closeAllConnections();
  server.close();
  await app.stop();
});

async function assertGone(answer: Response): Promise<void> {
  assert.is(answer.status, 404);
  assert.equal(await answer.json(), {
    name: 'not_found',
    code: 'not_found',
    message: 'This link is not valid, or not any more.',
    statusCode: 404,
  });
  assert.is(answer.headers.get('cache-control'), 'private, no-store');
}

test('a link opens exactly what it names', async () => {
  for (const kind of ['attachment', 'received_raw', 'received_attachment'] as const) {
    const answer = await get(pathOf(kind));
    assert.is(answer.status, 200);
    assert.is(await answer.text(), 'a note');
    assert.equal(opened.at(-1), { kind, ...ids });
  }
});

test('a file is a download and nothing else', async () => {
  linked = { ...file, filename: 'a.html', contentType: 'text/html; charset=utf-8' };
  const { headers } = await get(pathOf('attachment'));
  assert.is(headers.get('content-type'), 'text/html; charset=utf-8');
  assert.is(headers.get('content-disposition'), 'attachment; filename=a.html');
  assert.is(headers.get('content-length'), '6');
  assert.match(headers.get('content-security-policy') ?? '', /default-src 'none'.*\bsandbox\b/);
  assert.is(headers.get('cache-control'), 'private, no-store');
  assert.is(headers.get('referrer-policy'), 'no-referrer');
});

test('any name fits into the header', async () => {
  for (const [filename, says] of [
    [
      'Größe "1".pdf',
      /filename="[^"]*\\"1\\"\.pdf"; filename\*=UTF-8''Gr%C3%B6%C3%9Fe%20%221%22\.pdf$/,
    ],
    ['日本.txt', /filename\*=UTF-8''%E6%97%A5%E6%9C%AC\.txt$/],
    ['../../a.txt', /^attachment; filename="?\.\._\.\._a\.txt"?$/],
    ['a\r\nSet-Cookie: x=1', /^attachment; filename="a__Set-Cookie: x=1"$/],
    ['\ud800', /filename\*=UTF-8''%EF%BF%BD$/],
    ['', /^attachment; filename="?attachment"?$/],
  ] as const) {
    linked = { ...file, filename };
    const answer = await get(pathOf('attachment'));
    assert.is(answer.status, 200, JSON.stringify(filename));
    assert.match(answer.headers.get('content-disposition') ?? '', says);
    assert.is(answer.headers.get('set-cookie'), null);
  }
});

test('any type fits into the header', async () => {
  for (const contentType of [
    'a/b\u007f',
    'text/\u0001x',
    'a/b\r\nSet-Cookie: x=1',
    'a/\u20ac',
    '',
  ]) {
    linked = { ...file, contentType };
    const answer = await get(pathOf('attachment'));
    assert.is(answer.status, 200, JSON.stringify(contentType));
    assert.is(answer.headers.get('content-type'), 'application/octet-stream');
    assert.is(await answer.text(), 'a note');
  }
});

test('HEAD tells the same and reads nothing', async () => {
  const answer = await get(pathOf('attachment'), 'HEAD');
  assert.is(answer.status, 200);
  assert.is(answer.headers.get('content-length'), '6');
  assert.match(answer.headers.get('content-disposition') ?? '', /note\.txt/);
  assert.is(await answer.text(), '');
  assert.ok(streams[0]?.destroyed);
});

test('forged, cut, stretched, over: all the same 404', async () => {
  const path = pathOf('attachment');
  const [payload = '', mac = ''] = path.slice('/links/'.length).split('.');
  const other = Buffer.from(payload, 'base64url').toString().replace(ids.tenantId, ids.id);
  const later = Buffer.from(payload, 'base64url').toString().replace(/\d+$/, '9999999999');
  for (const token of [
    'x',
    payload,
    `${payload}.`,
    `.${mac}`,
    `${payload}.${mac.slice(1)}`,
    `${payload}.${'A'.repeat(43)}`,
    `${Buffer.from(other).toString('base64url')}.${mac}`,
    `${Buffer.from(later).toString('base64url')}.${mac}`,
    `${payload}.${mac}%00`,
    'a'.repeat(4_000),
  ]) {
    await assertGone(await get(`/links/${token}`));
  }
  assert.is(opened.length, 0);

  now = new Date(now.getTime() + HOUR_MS - 1);
  assert.is((await get(path)).status, 200);
  now = new Date(now.getTime() + 1_000);
  await assertGone(await get(path));
  linked = null;
  await assertGone(await get(pathOf('attachment')));
});

test('a file that breaks off is not told as whole', async () => {
  content = () =>
    Readable.from(
      (async function* () {
        yield await Promise.resolve(Buffer.from('a n'));
        throw new Error('damaged');
      })(),
      { objectMode: false },
    );
  let failed = false;
  await get(pathOf('attachment'))
    .then((answer) => answer.text())
    .catch(() => (failed = true));
  assert.ok(failed);
  const complaint = complaints.splice(0).join();
  assert.match(complaint, /damaged/);
  assert.match(complaint, /links\/\[redacted\]/, 'the link still works');
});

test('a shared email: everything of it is text, its HTML in a frame without rights', async () => {
  const evil = '"><script>alert(1)</script>';
  linked = {
    ...mail,
    subject: evil,
    from: evil,
    to: [evil],
    cc: [evil],
    html: `<p>Hi</p>${evil}<img src="https://track.example/x">`,
  };
  const answer = await get(pathOf('email'));
  assert.is(answer.status, 200);
  assert.is(answer.headers.get('content-type'), 'text/html; charset=utf-8');
  const policy = answer.headers.get('content-security-policy') ?? '';
  assert.match(policy, /default-src 'none'/);
  assert.match(policy, /frame-ancestors 'none'/);
  assert.match(policy, /img-src data:;/);
  assert.not.match(policy, /script-src|unsafe-eval|https?:/);
  const html = await answer.text();
  assert.not.match(html, /<script/i);
  assert.match(
    html,
    /<iframe sandbox title="Message" srcdoc="&lt;p&gt;Hi&lt;\/p&gt;&quot;&gt;&lt;script/,
  );
  assert.not.match(html.replace(/srcdoc="[^"]*"/, ''), /track\.example/);

  linked = { ...mail, text: `a\n${evil}` };
  assert.match(
    await (await get(pathOf('email'))).text(),
    /<pre>a\n&quot;&gt;&lt;script&gt;alert\(1\)&lt;\/script&gt;<\/pre>/,
  );
});

test('on the appliance: no key needed, no other method, the common headers', async () => {
  const answer = await app.call('GET', '/links/x', { key: null });
  assert.is(answer.status, 404);
  assert.is(answer.headers.get('x-content-type-options'), 'nosniff');
  assert.match(answer.headers.get('x-request-id') ?? '', /./);
  for (const method of ['POST', 'PUT', 'DELETE']) {
    const refused = await app.call<{ code: string }>(method, '/links/x', { key: null });
    assert.equal([refused.status, refused.body.code], [405, 'method_not_allowed']);
    assert.is(refused.headers.get('allow'), 'GET, HEAD');
  }
});

test.run();
