// What a message's header says about TLS: exactly one field that says No, in the header and nowhere else.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readTlsWishes } from '../../src/delivery/tls-required.ts';

const test = suite('tls-required');

const wishes = (text: string, isWhole = true, isReport = false) => {
  const bytes = Buffer.from(text);
  const stored = {
    sizeBytes: bytes.length,
    whole: isWhole ? bytes : null,
    async *pieces() {
      yield bytes;
    },
    fault: null,
  };
  return readTlsWishes(stored, isReport);
};
const ignores = async (text: string): Promise<boolean> => (await wishes(text)).ignoresPolicy;

test('TLS-Required: No', async () => {
  assert.ok(await ignores('From: a\r\nTLS-Required: No\r\nTo: b\r\n\r\nbody'));
  assert.ok(await ignores('tls-required:\tNO \r\n\r\n'));
  assert.ok((await wishes('TLS-Required: No\r\n\r\n', false)).ignoresPolicy);
});

test('anything else is no wish', async () => {
  for (const text of [
    '',
    'From: a\r\n\r\nTLS-Required: No\r\n',
    'TLS-Required: Yes\r\n\r\n',
    'TLS-Required: No way\r\n\r\n',
    'X-TLS-Required: No\r\n\r\n',
    'Subject: x\r\n TLS-Required: No\r\n\r\n',
    'TLS-Required: No\r\nTLS-Required: No\r\n\r\n',
    'TLS-Required: No\r\nTLS-Required: Yes\r\n\r\n',
  ]) {
    assert.is(await ignores(text), false, JSON.stringify(text));
  }
});

test('white space costs what its length is', async () => {
  // What takes the square of it would need minutes.
  const field = `TLS-Required: No${' '.repeat(60_000)}x\r\n\r\n`;
  for (let number = 0; number < 50; number += 1) assert.is(await ignores(field), false);
});

test('our own TLS reports ignore policies, whatever their header says', async () => {
  assert.equal(await wishes('', true, true), { ignoresPolicy: true, isReport: true });
  const claimed = await wishes('TLS-Report-Domain: a.test\r\n\r\n');
  assert.equal(claimed, { ignoresPolicy: false, isReport: false });
});

test.run();
