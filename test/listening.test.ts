// Listeners whose port is taken or forbidden, in whole appliances.
import { once } from 'node:events';
import { createServer, type AddressInfo } from 'node:net';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { PortUnusable } from '../src/http/front-door.ts';
import { listenOrExplain } from '../src/listening.ts';
import { createLogger } from '../src/log.ts';
import { startApp } from './support/app.ts';

const test = suite('listening');

async function taken(): Promise<{ port: number; free: () => void }> {
  const server = createServer().listen(0);
  await once(server, 'listening');
  return { port: (server.address() as AddressInfo).port, free: () => void server.close() };
}

for (const setting of ['MX', 'SUBMISSION', 'SUBMISSIONS', 'METRICS']) {
  test(`a chosen port that is taken ends the start with one sentence: ${setting}`, async () => {
    const { port, free } = await taken();
    const name = `MAILSTEAD_${setting}_PORT`;
    try {
      await startApp({ [name]: String(port) });
      assert.unreachable('it started');
    } catch (error) {
      assert.instance(error, PortUnusable);
      assert.is(
        (error as Error).message,
        `port ${port} is in use by another program; stop it or set ${name}`,
      );
    } finally {
      free();
    }
  });
}

const trouble = (code: string, port: number, mode: 'development' | 'production') =>
  listenOrExplain({
    what: 'inbound mail',
    mode,
    ports: [{ port, setting: 'MAILSTEAD_MX_PORT' }],
    log: createLogger({ level: 'silent', name: 'test' }),
    start: () => Promise.reject(Object.assign(new Error(code), { code, port, syscall: 'listen' })),
  });

test('two clones side by side: the second one does without', async () => {
  assert.equal(await trouble('EADDRINUSE', 2525, 'development'), { listener: null, missing: null });
});

test('in production a port in use always ends the start', async () => {
  for (const port of [25, 2525]) {
    const error = await trouble('EADDRINUSE', port, 'production').catch((e: unknown) => e);
    assert.instance(error, PortUnusable);
  }
});

test('a port without the right to it: the process runs and says what is missing', async () => {
  const { listener, missing } = await trouble('EACCES', 25, 'production');
  assert.is(listener, null);
  assert.match(
    missing!.why,
    /^Port 25 needs rights .* set MAILSTEAD_MX_PORT, or leave the role out/,
  );
});

test('other faults are not explained away', async () => {
  const error = await listenOrExplain({
    what: 'x',
    mode: 'development',
    ports: [],
    log: createLogger({ level: 'silent', name: 'test' }),
    start: () => Promise.reject(new TypeError('a bug')),
  }).catch((e: unknown) => e);
  assert.instance(error, TypeError);
});

test.run();
