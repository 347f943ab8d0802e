// A message on the wire: what a host that reads it by the letter, or by bare line ends, finds in it.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { toWire, wholeOf } from '../../src/delivery/message-source.ts';

const test = suite('message-source');
const wireOf = (text: string): string => toWire(Buffer.from(text, 'latin1')).toString('latin1');

/** RFC 5321 §4.5.2, as a host undoes it; the end must be the only one. */
function received(wire: string): string {
  assert.ok(wire.endsWith('\r\n.\r\n') || wire === '.\r\n', JSON.stringify(wire));
  const lines = wire.split('\r\n').slice(0, -2);
  assert.not.ok(lines.includes('.'), 'an end in the middle');
  return lines.map((line) => `${line.replace(/^\./, '')}\r\n`).join('');
}

test('an ordinary message is as it was, with the final dot', () => {
  assert.is(wireOf('A: b\r\n\r\nhello.\r\n'), 'A: b\r\n\r\nhello.\r\n.\r\n');
});

test('dots at the start of lines are doubled, the first line among them', () => {
  assert.is(wireOf('.\r\n..a\r\nb.\r\n.\r\n.c\r\n'), '..\r\n...a\r\nb.\r\n..\r\n..c\r\n.\r\n');
});

test('bare line ends become CRLF, and hide no end of the message', () => {
  assert.is(wireOf('a\n.\nb\r.\rc\r\n'), 'a\r\n..\r\nb\r\n..\r\nc\r\n.\r\n');
  assert.is(wireOf('a\r\n.\nb\n.\r\nc'), 'a\r\n..\r\nb\r\n..\r\nc\r\n.\r\n');
});

test('a last line without an end gets one', () => {
  assert.is(wireOf('a'), 'a\r\n.\r\n');
  assert.is(wireOf('a\r'), 'a\r\n.\r\n');
  assert.is(wireOf('a\r\n.'), 'a\r\n..\r\n.\r\n');
  assert.is(wireOf(''), '\r\n.\r\n');
});

test('every short text of what matters comes back as it was, with CRLF', () => {
  const parts = ['\r', '\n', '.', 'a', '\u00e9'];
  let texts = [''];
  let count = 0;
  for (let length = 1; length <= 5; length += 1) {
    texts = texts.flatMap((text) => parts.map((part) => text + part));
    for (const text of texts) {
      const wire = wireOf(text);
      assert.not.match(wire, /\r(?!\n)|(?<!\r)\n/, JSON.stringify(text));
      const lines = text.replace(/\r\n|\r|\n/g, '\r\n');
      const whole = lines.endsWith('\r\n') ? lines : `${lines}\r\n`;
      assert.is(received(wire), whole, JSON.stringify(text));
      count += 1;
    }
  }
  assert.is(count, 3_905);
});

test('up to one slice is whole, in one piece; more is not', () => {
  const piece = Buffer.alloc(32 * 1024, 'a');
  assert.is(wholeOf([piece, piece])?.length, 64 * 1024);
  assert.is(wholeOf([piece, piece, Buffer.from('a')]), null);
  async function* read(): AsyncGenerator<Buffer> {
    yield piece;
  }
  assert.is(wholeOf(read()), null);
});

test.run();
