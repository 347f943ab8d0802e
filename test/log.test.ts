// What the logger prints in both modes, and what it must never print.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { createLogger } from '../src/log.ts';
import type { Logger } from '../src/log.ts';

const log = suite('log');

function logged(mode: 'development' | 'production', write: (logger: Logger) => void): string[] {
  const lines: string[] = [];
  write(
    createLogger({ level: 'info', name: 'test', mode, write: (line) => void lines.push(line) }),
  );
  return lines;
}

log('production: JSON with the level by name and the time in ISO 8601', () => {
  const [line = '', ...rest] = logged('production', (logger) => {
    logger.info({ code: 250 }, 'attempt settled');
    logger.debug('below the level');
  });
  assert.is(rest.length, 0);
  const { time, level, name, msg, code } = JSON.parse(line) as Record<string, unknown>;
  assert.equal(
    { level, name, msg, code },
    { level: 'info', name: 'test', msg: 'attempt settled', code: 250 },
  );
  assert.match(String(time), /^\d{4}-\d\d-\d\dT.*Z$/);
});

log('an error: type, message, code, stack and causes, and nothing that hangs on it', () => {
  const cause = Object.assign(new TypeError('inner'), { client: { secretKey: 7_654_321 } });
  const error = Object.assign(new Error('outer', { cause }), {
    code: '57P01',
    client: { secretKey: 1_234_567 },
  });
  const [line = ''] = logged('production', (logger) => logger.error({ err: error }, 'it failed'));
  const { err } = JSON.parse(line) as { err: Record<string, unknown> };
  assert.equal(Object.keys(err), ['type', 'message', 'code', 'stack', 'cause']);
  assert.is(err['type'], 'Error');
  assert.is(err['message'], 'outer');
  assert.is(err['code'], '57P01');
  assert.match(String(err['stack']), /^Error: outer\n/);
  const inner = err['cause'] as Record<string, unknown>;
  assert.equal(Object.keys(inner), ['type', 'message', 'stack']);
  assert.is(inner['type'], 'TypeError');
});

log('development: one plain line', () => {
  const [line = ''] = logged('development', (logger) =>
    logger.warn({ code: 451, reply: 'try later', list: [1] }, 'attempt deferred'),
  );
  assert.match(
    line,
    /^\d\d:\d\d:\d\d warn {2}attempt deferred code=451 reply="try later" list=\[1\]\n$/,
  );
});

log('what a peer says cannot add a line or steer the terminal', () => {
  const [line = ''] = logged('development', (logger) =>
    logger.info({ reply: '250\u001b[2J\u009b2J\r\n10:00:00 error forged' }, 'a\nb'),
  );
  assert.is(line.split('\n').length, 2);
  assert.not.match(line.trimEnd(), /\p{Cc}/u);
});

log('an error is on one line, with its stack', () => {
  const [line = ''] = logged('development', (logger) => logger.error(new Error('boom'), 'broke'));
  assert.match(line, /error broke err=.*boom.*log\.test\.ts/);
  assert.is(line.split('\n').length, 2);
});

for (const key of [
  'authorization',
  'Authorization',
  'password',
  'token',
  'secret',
  'apiKey',
  'html',
  'text',
  'raw',
]) {
  log(`redacted at any depth: ${key}`, () => {
    for (const mode of ['development', 'production'] as const) {
      const lines = logged(mode, (logger) => {
        logger.info({ [key]: 'hunter2' }, 'top');
        logger.info({ a: { b: [{ c: { [key]: { deep: 'hunter2' } } }] } }, 'deep');
        logger.child({ x: { [key]: 'hunter2' } }).info('bindings');
        logger.error(Object.assign(new Error('x'), { config: { [key]: 'hunter2' } }), 'error');
      });
      assert.is(lines.length, 4);
      for (const line of lines) {
        assert.not.match(line, /hunter2/);
        // What hangs on an error is left out altogether.
        if (!line.includes('error')) assert.match(line, /\[redacted\]/);
        assert.ok(line.endsWith('\n'));
      }
    }
  });
}

log.run();
