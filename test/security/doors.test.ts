// The HTTP door against what browsers and programs should not send: foreign Host headers, paths that mean another one, origins,
// many and slow connections' worth of headers; and that metrics and the operator's routes are behind no other door.
import { connect } from 'node:net';
import { once } from 'node:events';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { startApp, type App } from '../support/app.ts';
import { secondTenant } from '../support/second-tenant.ts';

const test = suite('doors');
let app: App;
let stranger: { readonly key: string };

test.before(async () => {
  app = await startApp({ MAILSTEAD_PUBLIC_URL: 'https://mail.a.test' });
  stranger = await secondTenant(app);
});
test.after(() => app?.stop());

/** What comes back for these bytes, the connection closed behind them. */
async function raw(text: string): Promise<string> {
  const socket = connect(Number(new URL(app.base).port), '127.0.0.1');
  await once(socket, 'connect');
  socket.write(text);
  let answer = '';
  socket.on('data', (chunk: Buffer) => (answer += chunk.toString('latin1')));
  await once(socket, 'close');
  return answer;
}
const get = (path: string, ...fields: readonly string[]): Promise<string> =>
  raw([`GET ${path} HTTP/1.1`, ...fields, 'Connection: close', '', ''].join('\r\n'));

test('nobody is led where a Host header says', async () => {
  const foreign = ['Host: evil.test', 'X-Forwarded-Host: evil.test', 'Forwarded: host=evil.test'];
  for (const path of ['/', '/docs', '/openapi.json', '/.well-known/mta-sts.txt', '/nothing']) {
    assert.not.match(await get(path, ...foreign), /evil\.test/, path);
  }
  const id = await app.send();
  const { body } = await app.call<{ url: string }>('POST', `/emails/${id}/share`, {
    headers: { 'x-forwarded-host': 'evil.test' },
  });
  assert.match(body.url, /^https:\/\/mail\.a\.test\/links\//);
  for (const host of [
    '',
    '..',
    'mta-sts.',
    'mta-sts.a.test:99999999',
    '[::1]',
    'a\tb',
    'x'.repeat(300),
  ]) {
    const answer = await get('/.well-known/mta-sts.txt', `Host: ${host}`);
    assert.match(answer, /^HTTP\/1\.1 4\d\d /, `${host}: ${answer.slice(0, 300)}`);
  }
});

test('a path means what it says: no way round the gate, none into a folder', async () => {
  for (const path of [
    '/../../etc/passwd',
    '/docs/../../package.json',
    '/docs/%2e%2e%2fpackage.json',
    '//docs/..',
    '/.well-known/acme-challenge/../../emails',
    '/.well-known/acme-challenge/%2e%2e%2f',
    '/%00',
    '/.well-known/acme-challenge/',
    '/emails%2f',
    '/EMAILS',
    '/;/emails',
    '/health/live/../../emails',
    '/metrics',
    '/doctor',
    '/%64octor',
    '/api/doctor',
    '/api/api/emails',
    '/queue;x',
    '/links/..%2f..',
    'http://127.0.0.1/emails',
    '/\\emails',
    '/emails?x=/health/live',
    '/emails#/health/live',
    '*',
  ]) {
    const answer = await get(path, 'Host: a.test');
    assert.match(answer, /^HTTP\/1\.1 4\d\d /, `${path}: ${answer.slice(0, 300)}`);
    assert.not.match(answer, /root:|"dependencies"|node_modules|at \w+ \(/, path);
  }
});

test('the operator’s routes do not exist for another tenant, by whatever path', async () => {
  for (const path of [
    '/queue',
    '/doctor',
    '/api/doctor',
    '/queue/',
    '/doctor/?x',
    '/Doctor',
    '/queue/pauses',
  ]) {
    const { status } = await app.call('GET', path, { key: stranger.key });
    assert.is(status, 404, path);
  }
});

test('no other origin reads an answer, nothing of it is kept, no frame shows it', async () => {
  for (const path of [
    '/emails',
    '/docs',
    '/health/ready',
    '/nothing',
    '/openapi.json',
    '/doctor',
  ]) {
    const { headers } = await app.call('GET', path, { headers: { origin: 'https://evil.test' } });
    assert.is(headers.get('access-control-allow-origin'), null, path);
    assert.is(headers.get('x-content-type-options'), 'nosniff', path);
    assert.match(headers.get('content-security-policy') ?? '', /frame-ancestors 'none'/, path);
    assert.match(headers.get('cache-control') ?? '', /no-store|no-cache|private/, path);
    assert.is(headers.get('x-powered-by'), null, path);
  }
  const asked = await fetch(`${app.base}/emails`, {
    method: 'OPTIONS',
    headers: { origin: 'https://evil.test', 'access-control-request-method': 'POST' },
  });
  assert.ok(asked.status >= 400);
  assert.is(asked.headers.get('access-control-allow-methods'), null);
});

test('headers have a limit, and a request is one request', async () => {
  assert.match(
    await get('/health/live', 'Host: a.test', `X: ${'a'.repeat(20_000)}`),
    /^HTTP\/1\.1 431 /,
  );
  for (const fields of [
    ['Host: a.test', 'Content-Length: 5', 'Transfer-Encoding: chunked'],
    ['Host: a.test', 'Content-Length: 5', 'Content-Length: 6'],
    ['Host: a.test', 'Transfer-Encoding: chunked, identity'],
    ['Host: a.test', 'X-A : b'],
    ['Host: a.test\n X: y'],
  ]) {
    const answer = await get('/health/live', ...fields);
    assert.match(answer, /^HTTP\/1\.1 400 /, `${fields.join(' | ')}: ${answer.slice(0, 200)}`);
    assert.is(answer.split('HTTP/1.1 ').length, 2);
  }
});

test.run();
