// Bodies whose large attachments go to disk while they arrive: what is parsed means the same, however the bytes were
// cut; nothing can name a file of somebody else's; no file outlives its request.
import { createHash, randomBytes } from 'node:crypto';
import { once } from 'node:events';
import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { connect, type AddressInfo } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { gzipSync } from 'node:zlib';
import express from 'express';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createBodyBudget } from '../../src/http/body-budget.ts';
import { createBodyReader } from '../../src/http/body.ts';
import { createErrorHandler } from '../../src/http/envelope.ts';
import { createJsonScanner } from '../../src/http/json-scanner.ts';
import {
  isAttachmentContent,
  openSpool,
  spooledOf,
  type RequestSpool,
} from '../../src/http/spool.ts';
import { createLogger } from '../../src/log.ts';
import { until } from '../support/app.ts';

const folder = mkdtempSync(join(tmpdir(), 'mailstead-spool-'));
const octets = randomBytes(300_000);
const base64 = octets.toString('base64');

/** What the reader made of a body: parsed, with the files in place of what stands for them. */
interface Reading {
  readonly parsed: unknown;
  readonly files: readonly { readonly octets: Buffer; readonly problem: string | null }[];
}

async function read(json: string | Buffer, cut: () => number): Promise<Reading> {
  const bytes = Buffer.from(json);
  const spool = openSpool(join(folder, 'unit')).open(null);
  try {
    return await readInto(spool, bytes, cut);
  } finally {
    await spool.empty();
    assert.equal(readdirSync(join(folder, 'unit')), []);
  }
}

async function readInto(spool: RequestSpool, bytes: Buffer, cut: () => number): Promise<Reading> {
  const scanner = createJsonScanner({ isWanted: isAttachmentContent, take: () => spool.take() });
  for (let at = 0; at < bytes.length;) {
    const length = cut();
    await scanner.write(bytes.subarray(at, at + length));
    at += length;
  }
  const parsed: unknown = JSON.parse(scanner.end().toString(), (_, value: unknown) => {
    const file = typeof value === 'string' ? spool.spooled.get(value) : undefined;
    if (file === undefined || file.problem !== null) return value;
    const content = readFileSync(file.path);
    assert.is(statSync(file.path).mode & 0o777, 0o600);
    assert.is(content.length, file.sizeBytes);
    assert.is(createHash('sha256').update(content).digest('hex'), file.sha256);
    return content.toString('base64');
  });
  const files = [...spool.spooled.values()].map(({ path, problem }) => ({
    octets: problem === null ? readFileSync(path) : Buffer.alloc(0),
    problem,
  }));
  return { parsed, files };
}

const mail = (content: string): string => `{"attachments":[{"filename":"a","content":${content}}]}`;
/** JSON with an escape for every so many characters. */
const escaped = (text: string, every: number): string =>
  `"${text.replace(/./g, (found, at: number) =>
    at % every === 0
      ? `\\u${found.charCodeAt(0).toString(16).padStart(4, '0')}`
      : found === '/'
        ? '\\/'
        : found,
  )}"`;

const test = suite('spool');
test.after(() => rmSync(folder, { recursive: true, force: true }));

test('a large content is taken out and means the same, cut anywhere', async () => {
  const plain = { filename: 'a', content: base64, note: 'x"\\"y', content_type: null };
  const values = [
    { attachments: [plain, { content: 'c21hbGw=' }, plain] },
    [
      { to: 'x', attachments: [plain] },
      { attachments: [plain], text: '{"attachments":[{"content":"' },
    ],
  ];
  let seed = 7;
  const random = (max: number): number => {
    seed = (seed * 1_103_515_245 + 12_345) % 2_147_483_648;
    return 1 + (seed % max);
  };
  for (const value of values) {
    for (const cut of [() => 65_536, () => 1_000_000, () => 997, () => random(5_000)]) {
      const { parsed, files } = await read(JSON.stringify(value, null, 1), cut);
      assert.equal(parsed, value);
      assert.is(files.length, 2);
      for (const file of files) assert.ok(file.octets.equals(octets));
    }
  }
});

test('one byte at a time, through every escape', async () => {
  const some = base64.slice(0, 80_000);
  for (const every of [3, 7, 1_000]) {
    const { parsed, files } = await read(mail(escaped(some, every)), () => 1);
    assert.equal(parsed, { attachments: [{ filename: 'a', content: some }] });
    assert.is(files.length, 1);
  }
});

test('lines of base64, as MIME has them, are read over', async () => {
  const lines = base64.replace(/.{76}/g, '$&\r\n');
  const { files } = await read(mail(JSON.stringify(lines)), () => 4_096);
  assert.ok(files[0]?.octets.equals(octets));
});

test('many of middling size go to disk too, once there is enough of them', async () => {
  const value = Array.from({ length: 200 }, (_, index) => ({
    attachments: [{ content: base64.slice(0, 40_000 + 4 * index) }],
  }));
  const { parsed, files } = await read(JSON.stringify(value), () => 65_536);
  assert.equal(parsed, value);
  assert.ok(files.length > 80 && files.length < 110, String(files.length));
});

test('an escaped key is the same key, the last of two counts', async () => {
  const key = JSON.stringify('attachments').replace('tt', '\\u0074t');
  const { parsed, files } = await read(
    `{${key}:[{"content":"${base64}","c\\u006fntent":"${base64.slice(0, 100_000)}"}]}`,
    () => 10_000,
  );
  assert.is(files.length, 2);
  assert.equal(parsed, { attachments: [{ content: base64.slice(0, 100_000) }] });
});

test('long texts elsewhere stay where they are', async () => {
  for (const value of [
    { html: base64 },
    { content: base64 },
    { attachments: { content: base64 } },
    { attachments: [base64] },
    { attachments: [{ filename: base64 }] },
    { attachments: [{ content: [base64] }] },
    { attachments: [[{ content: base64 }]] },
    { template: { variables: { attachments: [{ content: base64 }] } } },
    [[{ attachments: [{ content: base64 }] }]],
  ]) {
    const { parsed, files } = await read(JSON.stringify(value), () => 3_333);
    assert.equal(parsed, value);
    assert.is(files.length, 0);
  }
});

test('what is not base64 leaves no file and says so', async () => {
  for (const content of [`${base64}!`, `!${base64}`, `${base64}é`, `${base64}=`, `${base64}A`]) {
    const { files } = await read(mail(JSON.stringify(content)), () => 8_192);
    assert.is(files.length, 1);
    assert.type(files[0]?.problem, 'string', content.slice(-3));
  }
});

test('a string that is no JSON is no JSON, on its way to disk too', async () => {
  for (const inside of [
    `${base64}\n`,
    `${base64}\0`,
    `${base64}\\x`,
    `${base64}\\u00`,
    `\\u12x4${base64}`,
  ]) {
    let code = 'taken';
    try {
      await read(mail(`"${inside}"`), () => 10_000);
    } catch (error) {
      code = (error as { code?: string }).code ?? String(error);
    }
    assert.is(code, 'invalid_json', JSON.stringify(inside.slice(-6)));
  }
});

/** The reader in an app that shows what it read. */
async function serve() {
  const path = join(folder, 'served');
  const app = express();
  app.use(createBodyReader(createBodyBudget(100_000_000), openSpool(path)));
  let onArrival: () => void = () => undefined;
  let hold: Promise<void> = Promise.resolve();
  app.post(['/emails', '/emails/batch', '/other'], (request, response) => {
    onArrival();
    const answer = (): void => {
      const sizes = [...spooledOf(request).values()].map(({ path: at }) => statSync(at).size);
      response.json({ sizes, body: request.body as unknown });
    };
    void hold.then(answer);
  });
  app.use(createErrorHandler(createLogger({ level: 'silent', name: 'test' })));
  const server = app.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  return {
    port,
    files: () => readdirSync(path),
    holdNext() {
      let release: () => void = () => undefined;
      hold = new Promise((resolve) => (release = resolve));
      const arrived = new Promise<void>((resolve) => (onArrival = resolve));
      return { arrived, release: () => release() };
    },
    async post(route: string, body: string | Buffer, headers: Record<string, string> = {}) {
      const answer = await fetch(`http://127.0.0.1:${port}${route}`, {
        method: 'POST',
        body: body as NonNullable<RequestInit['body']>,
        headers,
      });
      return { status: answer.status, body: (await answer.json()) as Record<string, unknown> };
    },
    close() {
      server.closeAllConnections();
      server.close();
    },
  };
}

test('files are there while a request is answered, and gone after it', async () => {
  const app = await serve();
  const json = mail(`"${base64}"`);
  for (const [route, body, headers] of [
    ['/emails', json, {}],
    ['/emails/batch', `[${json}]`, {}],
    ['/emails', gzipSync(json), { 'content-encoding': 'gzip' }],
  ] as const) {
    const answer = await app.post(route, body, headers);
    assert.equal(answer.body['sizes'], [octets.length]);
    await until(
      async () => app.files(),
      (files) => files.length === 0,
    );
  }
  assert.equal((await app.post('/other', json)).body['sizes'], [], 'only where emails are sent');

  for (const bad of [
    `${json}}`,
    mail(`"${base64}`),
    json.replace('{', `{"x":${'['.repeat(70)},`),
  ]) {
    assert.is((await app.post('/emails', bad)).status, 400);
    assert.equal(app.files(), []);
  }
  app.close();
});

test('a placeholder that somebody writes means nothing', async () => {
  const app = await serve();
  const held = app.holdNext();
  const first = app.post('/emails', mail(`"${base64}"`));
  await held.arrived;
  const [name = ''] = app.files();
  const [request = '', number = ''] = name.split('.');
  const guess = `spooled:${request}:${number}`;
  const second = app.post('/emails', mail(JSON.stringify(guess)));
  held.release();
  const known = (await first).body['body'] as { attachments: { content: string }[] };
  assert.is(known.attachments[0]?.content, guess, 'the guess is right');
  assert.equal((await second).body['sizes'], []);
  app.close();
});

test('who hangs up half-way leaves nothing', async () => {
  const app = await serve();
  const socket = connect(app.port, '127.0.0.1');
  socket.on('error', () => undefined);
  const json = mail(`"${base64}"`);
  socket.write(`POST /emails HTTP/1.1\r\nHost: t\r\nContent-Length: ${json.length}\r\n\r\n`);
  socket.write(json.slice(0, 200_000));
  await until(
    async () => app.files(),
    (files) => files.length === 1,
  );
  socket.destroy();
  await until(
    async () => app.files(),
    (files) => files.length === 0,
  );
  app.close();
});

test('a start empties the folder', () => {
  const path = join(folder, 'again');
  openSpool(path);
  writeFileSync(join(path, 'crashed.0'), 'x');
  openSpool(path);
  assert.equal(readdirSync(path), []);
});

test.run();
