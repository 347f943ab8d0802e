// Return paths: minted, read back, and never accepted when forged.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { Buffer } from 'node:buffer';
import { parseMailbox } from '../../src/mail/address.ts';
import {
  mintReturnPathLocal,
  positionMax,
  readReturnPathLocal,
  sharedPosition,
  WHOLE_EMAIL,
} from '../../src/mail/return-path.ts';

const emailId = '019b0c1e-8f00-7abc-9def-0123456789ab';
const key = Buffer.from('0123456789abcdef0123456789abcdef');
const other = Buffer.from('fedcba9876543210fedcba9876543210');

test('reads back what it minted, in any case, with any of the keys', () => {
  for (const position of [0, 1, 49, 149, 255, 256, positionMax, WHOLE_EMAIL]) {
    for (const keyId of ['a', 'z', '0']) {
      const local = mintReturnPathLocal({ emailId, position, key, keyId });
      assert.equal(readReturnPathLocal(local, { [keyId]: key }), { emailId, position });
      assert.equal(readReturnPathLocal(local.toUpperCase(), { [keyId]: key, x: other }), {
        emailId,
        position,
      });
    }
  }
  const upper = mintReturnPathLocal({
    emailId: emailId.toUpperCase(),
    position: 0,
    key,
    keyId: 'a',
  });
  assert.is(upper, mintReturnPathLocal({ emailId, position: 0, key, keyId: 'a' }));
});

test('what several recipients share is of the email and the destination, and of no delivery', () => {
  const seen = new Set<number>();
  for (let number = 0; number < 2_000; number++) {
    const position = sharedPosition(emailId, `mx:d${number}.test`);
    assert.ok(position > positionMax && position < WHOLE_EMAIL, `${position}`);
    seen.add(position);
  }
  assert.ok(seen.size > 1_900, `${seen.size} of 2000 differ`);
  const [one, same, elsewhere] = [
    emailId,
    emailId.toUpperCase(),
    emailId.replace('019b', '019c'),
  ].map((id) => sharedPosition(id, 'mx:d.test'));
  assert.is(one, same);
  assert.is.not(one, elsewhere);
});

test('is a plain local part of at most 64 octets', () => {
  const local = mintReturnPathLocal({ emailId, position: 3, key, keyId: 'a' });
  assert.match(local, /^b\+[a-z0-9]{46}$/);
  assert.is(local.length, 48);
  assert.is(parseMailbox(`${local}@send.x.example`).ok, true);
});

test('gives every delivery and every key its own', () => {
  const minted = new Set([
    mintReturnPathLocal({ emailId, position: 0, key, keyId: 'a' }),
    mintReturnPathLocal({ emailId, position: 1, key, keyId: 'a' }),
    mintReturnPathLocal({ emailId, position: 0, key, keyId: 'b' }),
    mintReturnPathLocal({ emailId, position: 0, key: other, keyId: 'a' }),
    mintReturnPathLocal({
      emailId: emailId.replace('ab', 'ac'),
      position: 0,
      key,
      keyId: 'a',
    }),
  ]);
  assert.is(minted.size, 5);
});

test('refuses a change of any character', () => {
  const local = mintReturnPathLocal({ emailId, position: 7, key, keyId: 'a' });
  const keys = { a: key, b: key };
  const alphabet = 'abcdefghijklmnopqrstuvwxyz0123456789+-';
  for (let i = 0; i < local.length; i += 1) {
    for (const character of alphabet) {
      if (character === local[i]) continue;
      const forged = local.slice(0, i) + character + local.slice(i + 1);
      assert.is(readReturnPathLocal(forged, keys), null, forged);
    }
  }
});

test('refuses other keys, unknown keys and everything that is not a return path', () => {
  const local = mintReturnPathLocal({ emailId, position: 7, key, keyId: 'a' });
  assert.is(readReturnPathLocal(local, { a: other }), null);
  assert.is(readReturnPathLocal(local, { b: key }), null);
  assert.is(readReturnPathLocal(local, {}), null);
  for (const text of [
    '',
    'b+',
    'bounce',
    'b+a',
    local.slice(0, -1),
    `${local}a`,
    ` ${local}`,
    local.replace('b+', 'b-'),
    local.replace('b+', ''),
    local.replace('b+a', 'b+_'),
    'b+__proto__',
    `b+${'ü'.repeat(46)}`,
  ]) {
    assert.is(readReturnPathLocal(text, { a: key }), null, text);
  }
});

test('mints nothing from a malformed id, position or key id', () => {
  const good = { emailId, position: 0, key, keyId: 'a' };
  for (const bad of [
    { ...good, emailId: 'x' },
    { ...good, emailId: `${emailId}0` },
    { ...good, position: -1 },
    { ...good, position: 1.5 },
    { ...good, position: WHOLE_EMAIL + 1 },
    { ...good, keyId: '' },
    { ...good, keyId: 'A' },
    { ...good, keyId: 'ab' },
  ]) {
    assert.throws(() => mintReturnPathLocal(bad));
  }
});

test.run();
