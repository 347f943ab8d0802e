// Bodies that are no email: bytes that are not UTF-8 or not JSON, JSON that is no object, too deep, too wide, too large,
// or not what its headers say. Each gets the whole envelope, the process stays up and the connection goes on.
import { once } from 'node:events';
import { connect, type AddressInfo } from 'node:net';
import { gzipSync } from 'node:zlib';
import express from 'express';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createBodyBudget } from '../../src/http/body-budget.ts';
import { createBodyReader } from '../../src/http/body.ts';
import { createErrorHandler } from '../../src/http/envelope.ts';
import { createLogger } from '../../src/log.ts';
import { newId } from '../../src/store/id.ts';
import { startApp, until, type Answer, type App } from '../support/app.ts';
import { assertRefused, type Refused } from './envelope.ts';
import { ask, exchange } from './wire.ts';

const email = {
  from: 'Ada <ada@mailstead.test>',
  to: 'ok@recipient.test',
  subject: 'Bad body',
  text: 'Plain words.',
};
const json = JSON.stringify(email);
const MIB = 1024 * 1024;

const test = suite('bad body');
let app: App;
test.before(async () => {
  app = await startApp();
});
test.after(() => app.stop());

const post = (body: string | Uint8Array, headers: Record<string, string> = {}): Promise<Answer> =>
  app.call('POST', '/emails', { body, headers });
const authorized = (): string => `Authorization: Bearer ${app.key}`;

const nest = (levels: number): string => '['.repeat(levels) + ']'.repeat(levels);
const nestKeys = (levels: number): string => '{"a":'.repeat(levels) + '1' + '}'.repeat(levels);
const withField = (field: string, value: string): string =>
  json.replace('{', `{"${field}":${value},`);
const notJson: Refused = { status: 400, code: 'invalid_json', says: /not valid JSON/ };
const notUtf8: Refused = { status: 400, code: 'invalid_json', says: /UTF-8/ };
const tooDeep: Refused = { status: 400, code: 'invalid_request', says: /deep.* 64 levels/ };
const noObject: Refused = { status: 422, code: 'validation_error', paths: ['body'] };
const nothingGiven: Refused = {
  status: 422,
  code: 'missing_required_field',
  paths: ['to', 'html', 'subject', 'from'],
};
const bytes = (...parts: readonly (string | number)[]): Uint8Array =>
  Buffer.concat(
    parts.map((part) => (typeof part === 'string' ? Buffer.from(part) : Buffer.of(part))),
  );

const bodies: Readonly<Record<string, readonly [string | Uint8Array, Refused]>> = {
  'a lone byte 0xff': [bytes('{"subject":"', 0xff, '"}'), notUtf8],
  'half of a UTF-8 character': [bytes('{"subject":"', 0xe2, 0x82, '"}'), notUtf8],
  'an overlong slash': [bytes('{"subject":"', 0xc0, 0xaf, '"}'), notUtf8],
  'a UTF-8 surrogate': [bytes('{"subject":"', 0xed, 0xa0, 0x80, '"}'), notUtf8],
  'UTF-16': [Buffer.from(`\ufeff${json}`, 'utf16le'), notUtf8],
  'truncated JSON': [json.slice(0, -5), notJson],
  'half a string': ['{"from":"a', notJson],
  'half an escape': ['{"from":"a\\', notJson],
  'text after the object': [`${json}}`, notJson],
  'two objects': [json + json, notJson],
  'a trailing comma': [json.replace('}', ',}'), notJson],
  'a comment': [json.replace('{', '{/* a */'), notJson],
  'single quotes': [json.replaceAll('"', "'"), notJson],
  NaN: ['{"from":NaN}', notJson],
  'a raw line break in a string': ['{"subject":"a\nb"}', notJson],
  'a raw NUL in a string': ['{"subject":"a\0b"}', notJson],
  'a form': ['from=a%40mailstead.test&to=b%40recipient.test', notJson],
  XML: ['<email/>', notJson],
  'white space': [' \n', notJson],
  'a text': ['"x"', noObject],
  'a number': ['1', noObject],
  null: ['null', noObject],
  true: ['true', noObject],
  'an empty list': ['[]', noObject],
  'a list of emails': [`[${json}]`, noObject],
  nothing: ['', nothingGiven],
  'an empty object': ['{}', nothingGiven],
  'an object with a prototype': [`{"__proto__":${json}}`, nothingGiven],
  'an object with a constructor': [`{"constructor":{"prototype":${json}}}`, nothingGiven],
  'lists nested 100,000 deep': [nest(100_000), tooDeep],
  'objects nested 100,000 deep': [nestKeys(100_000), tooDeep],
  'a never-ending list': ['['.repeat(1_000_000), tooDeep],
  '100,000 levels in to': [withField('to', nest(100_000)), tooDeep],
  '100,000 levels in headers': [withField('headers', nestKeys(100_000)), tooDeep],
  '100,000 levels in tags': [withField('tags', nest(100_000)), tooDeep],
  '100,000 levels in template': [withField('template', nestKeys(100_000)), tooDeep],
  '100,000 levels in an unknown key': [withField('zzz', nest(100_000)), tooDeep],
  '100,000 wrong tags': [
    withField('zzz', `{"tags":[${'5,'.repeat(100_000)}5]}`),
    { status: 422, code: 'validation_error', paths: ['zzz.tags'], says: /100001.*128/ },
  ],
  '129 wrong tags': [
    withField('tags', `[${'{},'.repeat(128)}{}]`),
    { status: 422, code: 'validation_error', paths: ['tags'], says: /129.*128/ },
  ],
  '1,001 keys': [
    withField(
      'headers',
      JSON.stringify(Object.fromEntries(Array.from({ length: 1_001 }, (_, i) => [`X-${i}`, 5]))),
    ),
    { status: 422, code: 'validation_error', paths: ['headers'], says: /1001.*1000/ },
  ],
  '1,001 emails': [
    `[${'{},'.repeat(1_000)}{}]`,
    { status: 422, code: 'validation_error', paths: ['body'], says: /1001.*128/ },
  ],
  'a million values': [
    withField('zzz', `[${'0,'.repeat(1_000_000)}0]`),
    { status: 400, code: 'invalid_request', says: /too many values/ },
  ],
};
for (const [title, [body, expected]] of Object.entries(bodies)) {
  test(`body: ${title}`, async () => assertRefused(await post(body), expected));
}

test('a replay takes 1,000 ids, and no list of anything else is as long', async () => {
  const replay = (ids: readonly unknown[]): Promise<Answer> =>
    app.call('POST', '/receiving/replays', { body: JSON.stringify({ ids }) });
  const refused = (says: RegExp): Refused => ({
    status: 422,
    code: 'validation_error',
    paths: ['ids'],
    says,
  });
  const ids = Array.from({ length: 1_001 }, () => newId());
  assertRefused(await replay(ids.slice(1)), refused(/no received email/));
  assertRefused(await replay(ids), refused(/1001.*1000/));
  assertRefused(await replay(Array.from({ length: 129 }, () => ({}))), refused(/129.*128/));
});

test('brackets and escaped quotes inside strings are no nesting', async () => {
  const text = '[{"'.repeat(10_000) + '\\'.repeat(9) + '"';
  assert.is((await post(JSON.stringify({ ...email, text }))).status, 200);
  assert.is((await post(withField('zzz', nest(60)))).status, 200);
});

test('a value for a template may be a longer list', async () => {
  const list = `[${'0,'.repeat(900)}0]`;
  const answer = await post(withField('template', `{"id":"none","variables":{"LIST":${list}}}`));
  assertRefused(answer, { status: 422, code: 'validation_error', paths: ['template'] });
});

test('a byte order mark is read over', async () => {
  assert.is((await post(bytes(0xef, 0xbb, 0xbf, json))).status, 200);
});

test('any content type, and none, means JSON in UTF-8', async () => {
  for (const type of [
    'application/json',
    'application/json; charset=utf-8',
    'application/json; charset=latin1',
    'application/json; charset="',
    'text/plain',
    'multipart/form-data; boundary=x',
    'application/x-www-form-urlencoded',
    ';',
    '"',
  ]) {
    assert.is((await post(json, { 'content-type': type })).status, 200, type);
  }
  const headers = [authorized(), `Content-Length: ${json.length}`];
  const bare = await ask(app.base, { line: 'POST /emails HTTP/1.1', headers, body: [json] });
  assert.is(bare.status, 200, 'no content type');
});

test('a compressed body is read; a lie about it is refused', async () => {
  assert.is((await post(gzipSync(json), { 'content-encoding': 'gzip' })).status, 200);
  for (const encoding of ['gzip', 'deflate', 'br']) {
    assertRefused(await post(json, { 'content-encoding': encoding }), {
      status: 400,
      code: 'invalid_request',
      says: /content encoding/,
    });
  }
  for (const encoding of ['compress', 'gzip, gzip', 'x']) {
    assertRefused(await post(json, { 'content-encoding': encoding }), {
      status: 400,
      code: 'invalid_request',
      says: /gzip, deflate or br/,
    });
  }
  assertRefused(await post(gzipSync(json).subarray(0, 40), { 'content-encoding': 'gzip' }), {
    status: 400,
    code: 'invalid_request',
  });
});

const tooLarge: Refused = { status: 413, code: 'request_too_large', says: /\d+ bytes/ };

test('a small body that unpacks to 100 MB is refused', async () => {
  const bomb = gzipSync(Buffer.alloc(100 * MIB, ' '));
  assertRefused(await post(bomb, { 'content-encoding': 'gzip' }), tooLarge);
});

function* repeated(count: number, chunk: string): Generator<string> {
  for (let i = 0; i < count; i += 1) yield chunk;
}

test('50 MB are refused, announced or not, without being kept', async () => {
  const piece = 'x'.repeat(MIB);
  const chunk = `${MIB.toString(16)}\r\n${piece}\r\n`;
  const before = process.memoryUsage().arrayBuffers;
  let peak = 0;
  const sampler = setInterval(() => {
    peak = Math.max(peak, process.memoryUsage().arrayBuffers - before);
  }, 5);
  const line = 'POST /emails HTTP/1.1';
  const announced = await ask(app.base, {
    line,
    headers: [authorized(), `Content-Length: ${50 * MIB}`],
    body: repeated(50, piece),
  });
  assertRefused(announced.answer(), tooLarge);
  const chunked = await ask(app.base, {
    line,
    headers: [authorized(), 'Transfer-Encoding: chunked'],
    body: [...repeated(50, chunk), '0\r\n\r\n'],
  });
  assertRefused(chunked.answer(), tooLarge);
  clearInterval(sampler);
  assert.ok(peak < 200 * MIB, `${Math.round(peak / MIB)} MB at the peak`);
});

test('all bodies together have a budget, plain or unpacked, and give it back', async () => {
  const reads = express();
  reads.use(createBodyReader(createBodyBudget(3 * MIB)));
  let answer: () => void = () => undefined;
  reads.post('/wait', (_request, response) => {
    answer = () => void response.end();
  });
  reads.post('/', (_request, response) => void response.end());
  reads.use(createErrorHandler(createLogger({ level: 'silent', name: 'test' })));
  const server = reads.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  const twoMiB = Buffer.from(`"${'x'.repeat(2 * MIB)}"`);
  const send = (path: string, body: Uint8Array, headers: Record<string, string> = {}) =>
    fetch(`http://127.0.0.1:${port}${path}`, {
      method: 'POST',
      body: body as NonNullable<RequestInit['body']>,
      headers,
    });

  const first = send('/wait', twoMiB);
  const gzip = { 'content-encoding': 'gzip' };
  for (const again of [() => send('/', twoMiB), () => send('/', gzipSync(twoMiB), gzip)]) {
    const refused = await until(again, ({ status }) => status === 503);
    assert.is(refused.headers.get('retry-after'), '2');
    assert.is(((await refused.json()) as { code: string }).code, 'service_unavailable');
  }
  assert.is((await send('/', Buffer.from('{}'))).status, 200, 'a small one always goes in');
  answer();
  assert.is((await first).status, 200);
  await until(
    () => send('/', gzipSync(twoMiB), gzip),
    ({ status }) => status === 200,
  );
  server.closeAllConnections();
  server.close();
});

test('no tenant gets more than half of the budget', () => {
  const budget = createBodyBudget(100);
  assert.ok(budget.take(50, 'a'));
  assert.not(budget.take(1, 'a'));
  assert.ok(budget.take(40, 'b'));
  assert.not(budget.take(11, null), 'all of it is all of it');
  budget.give(50, 'a');
  assert.ok(budget.take(30, 'a'));
});

test('who announces much and sends nothing keeps nobody out', async () => {
  const idle = Array.from({ length: 10 }, () => {
    const socket = connect(Number(new URL(app.base).port), '127.0.0.1');
    socket.on('error', () => undefined);
    socket.write(
      `POST /emails HTTP/1.1\r\nHost: t\r\n${authorized()}\r\nContent-Length: ${48 * MIB}\r\n\r\n{`,
    );
    return socket;
  });
  const content = Buffer.alloc(3 * MIB).toString('base64');
  await app.send({ attachments: [{ filename: 'a.bin', content }] });
  for (const socket of idle) socket.destroy();
});

test('who hangs up before the body is read takes nothing out of the budget', async () => {
  let taken = 0;
  const budget = {
    take: (bytes: number) => (taken += bytes) > 0,
    give: (n: number) => (taken -= n),
  };
  const { promise: proceed, resolve: start } = Promise.withResolvers<void>();
  let arrived = 0;
  let closed = 0;
  const refused: number[] = [];
  const reads = express();
  reads.use(async (_request, response, next) => {
    arrived += 1;
    response.once('close', () => (closed += 1));
    await proceed;
    next();
  });
  reads.use(createBodyReader(budget));
  const note: express.ErrorRequestHandler = (
    error: { status: number },
    _request,
    _response,
    _next,
  ) => {
    refused.push(error.status);
  };
  reads.use(note);
  const server = reads.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  const packed = gzipSync(Buffer.from(`"${'x'.repeat(8 * MIB)}"`));
  for (const [headers, body] of [
    [`Content-Length: ${40 * MIB}`, Buffer.from('{')],
    [`Content-Encoding: gzip\r\nContent-Length: ${packed.length}`, packed],
    [`Content-Encoding: gzip\r\nContent-Length: ${packed.length + 1}`, packed],
  ] as const) {
    const socket = connect(port, '127.0.0.1');
    socket.write(`POST / HTTP/1.1\r\nHost: t\r\n${headers}\r\n\r\n`);
    socket.write(body, () => setTimeout(() => socket.destroy(), 50));
  }
  await until(
    async () => [arrived, closed],
    ([all, gone]) => all === 3 && gone === 3,
  );
  start();
  await until(
    async () => refused,
    (list) => list.length === 3,
  );
  assert.equal(refused, [400, 400, 400]);
  assert.is(taken, 0);
  server.close();
});

test('an announced length that is not kept ends that connection only', async () => {
  const { hostname, port } = new URL(app.base);
  const socket = connect(Number(port), hostname);
  socket.write(
    `POST /emails HTTP/1.1\r\nHost: t\r\n${authorized()}\r\nContent-Length: 999\r\n\r\n{`,
  );
  await new Promise<void>((resolve) => socket.end(() => resolve()));
  socket.destroy();
  assert.is((await post(json)).status, 200);
});

test('the body of a refused request is not taken for the next one', async () => {
  const hidden = 'GET /emails HTTP/1.1\r\nHost: hidden\r\n\r\n';
  for (const [line, authorization, status] of [
    ['POST /emails', 'Authorization: Bearer wrong', 401],
    ['POST /nothing', authorized(), 404],
    ['PUT /emails', authorized(), 405],
    ['POST /emails', authorized(), 400],
  ] as const) {
    for (const body of [hidden, hidden.padEnd(5 * MIB, 'x')]) {
      const answers = await exchange(app.base, [
        `${line} HTTP/1.1\r\nHost: t\r\n${authorization}\r\nContent-Length: ${body.length}\r\n\r\n`,
        body,
        'GET /health/live HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n',
      ]);
      assert.equal(
        answers.map((answer) => answer.status),
        [status, 200],
      );
    }
  }
});

test('afterwards a good email is delivered, and nothing was logged', async () => {
  await app.untilEvent(await app.send(email), 'delivered');
  assert.equal(app.complaints, []);
});

test.run();
