// Tokens of forwarded messages: read back by whoever has the key, never when forged.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { randomBytes } from 'node:crypto';
import { mintLoopToken, readLoopToken } from '../../src/mail/loop-token.ts';

const emailId = '019b0c1e-8f00-7abc-9def-0123456789ab';
const target = 'info@acme.test';
const key = Buffer.alloc(32, 1);
const other = Buffer.alloc(32, 2);
const token = mintLoopToken({ emailId, target, keys: [key, other] });

test('says which email and which route, in any case, with any of the keys', () => {
  assert.match(token, /^[0-9a-f]{62}$/);
  for (const given of [token, token.toUpperCase(), ` ${token} `]) {
    for (const keys of [[key], [other, key]]) {
      const read = readLoopToken(given, keys);
      assert.is(read?.emailId, emailId);
      assert.ok(read?.isFor('INFO@Acme.test'));
      assert.not(read?.isFor('info@other.test'));
    }
  }
});

test('nothing else is read', () => {
  assert.is(readLoopToken(token, [other]), null);
  assert.is(readLoopToken(token, []), null);
  for (let at = 0; at < token.length; at += 1) {
    const digit = token[at] === '0' ? '1' : '0';
    assert.is(
      readLoopToken(token.slice(0, at) + digit + token.slice(at + 1), [key]),
      null,
      `${at}`,
    );
  }
  for (const text of ['', 'x', token.slice(1), `${token}0`, token.replace('0', 'g')]) {
    assert.is(readLoopToken(text, [key]), null, text);
  }
  for (let i = 0; i < 2_000; i += 1) {
    assert.is(readLoopToken(randomBytes(31).toString('hex'), [key]), null);
  }
});

test.run();
