// Rewritten senders: made, read back by us and by a reader of the grammar, never accepted when forged or old.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { Buffer } from 'node:buffer';
import { randomBytes, randomInt } from 'node:crypto';
import { parseMailbox } from '../../src/mail/address.ts';
import { mintSrs, readSrs, SRS_DAYS } from '../../src/mail/srs.ts';

const key = Buffer.from('0123456789abcdef0123456789abcdef');
const other = Buffer.from('fedcba9876543210fedcba9876543210');
const keys = [key];
const host = 'send.forward.test';
const now = new Date('2026-11-21T12:00:00Z');
const DAY_MS = 86_400_000;
const at = (days: number): Date => new Date(now.getTime() + days * DAY_MS);
const mint = (sender: string, about: { host?: string; keys?: readonly Buffer[] } = {}): string => {
  const minted = mintSrs({ sender, host, keys, now, ...about });
  assert.ok(minted !== null, `no address for ${sender}`);
  return minted;
};
const local = (address: string): string => address.slice(0, address.lastIndexOf('@'));

test('a sender comes back out of its address, whole or local part, in any case', () => {
  for (const sender of [
    'a@b.test',
    'o=ne=two@b.test',
    'prvs=1234abcdef=a.b@b.test',
    'a+tag-x@sub.b.test',
    '"two words"@b.test',
    '"a@b"@b.test',
    '"quo\\"te"@b.test',
    'srs0@b.test',
    'SRS0=not=it@b.test',
    'SRS1=x=y==z@b.test',
  ]) {
    const minted = mint(sender);
    assert.match(minted, /^"?SRS0=[A-Z2-7]{8}=[A-Z2-7]{2}=.+@send\.forward\.test$/, sender);
    assert.ok(Buffer.byteLength(local(minted)) <= 64);
    assert.equal(readSrs(minted, keys, now), { kind: 'srs0', sender });
    assert.equal(readSrs(local(minted), keys, now), { kind: 'srs0', sender });
    const lower = readSrs(minted.toLowerCase(), keys, now);
    assert.equal(lower, { kind: 'srs0', sender: sender.toLowerCase() });
    assert.is(readSrs(minted.toUpperCase(), keys, now)?.kind, 'srs0');
  }
});

test('an international sender keeps its local part, and an international domain its A-label', () => {
  const minted = mint('ünï@bücher.test');
  assert.ok(minted.includes('=xn--bcher-kva.test=ünï@'));
  assert.equal(readSrs(minted, keys, now), { kind: 'srs0', sender: 'ünï@xn--bcher-kva.test' });
  assert.ok(parseMailbox(minted).ok);
});

test('no address where there is no room, or no sender', () => {
  const room = 64 - 'SRS0=HHHHHHHH=TT=b.test='.length;
  assert.is(Buffer.byteLength(local(mint(`${'a'.repeat(room)}@b.test`))), 64);
  for (const sender of [
    `${'a'.repeat(room + 1)}@b.test`,
    `${'ü'.repeat(room / 2 + 1)}@b.test`,
    '',
    'a',
    '@b.test',
    'a@[192.0.2.1]',
    'a@localhost',
    'a b@b.test',
    'a@b.test\r\nX: y',
  ]) {
    assert.is(mintSrs({ sender, host, keys, now }), null, sender);
  }
});

test('an address of another forwarder becomes SRS1, and goes back to the first of them', () => {
  // The examples of the SRS paper, in the three spellings of the mark.
  for (const [given, behind] of [
    ['SRS0=opaque+string=QV=ext.test=user', '=opaque+string=QV=ext.test=user'],
    ['SRS0+opaque-string=QV=ext.test=user', '+opaque-string=QV=ext.test=user'],
    ['SRS0-HHH=TT=ext.test=user', '-HHH=TT=ext.test=user'],
    ['srs0=aaaa=bb=ext.test=user', '=aaaa=bb=ext.test=user'],
  ] as const) {
    const minted = mint(`${given}@first.test`);
    assert.match(local(minted), /^SRS1=[A-Z2-7]{8}=first\.test=[=+-]/);
    assert.ok(local(minted).endsWith(`=first.test=${behind}`), minted);
    assert.equal(readSrs(minted, keys, now), {
      kind: 'srs1',
      sender: `SRS0${behind}@first.test`,
    });
    // The third forwarder drops the second: the bounce takes one hop less.
    const third = mint(minted, { host: 'third.test', keys: [other] });
    assert.match(local(third), /^SRS1=[A-Z2-7]{8}=first\.test=[=+-]/);
    assert.ok(local(third).endsWith(`=first.test=${behind}`));
    assert.equal(readSrs(third, [other], now), {
      kind: 'srs1',
      sender: `SRS0${behind}@first.test`,
    });
  }
  assert.is(
    readSrs(local(mint('SRS1+HHH=first.test=-AAA=TT=ext.test=u@second.test')), keys, now)?.kind,
    'srs1',
  );
});

test('forwarded twice by us it stays as it is', () => {
  const once = mint('a@b.test');
  assert.is(mint(once), once);
  const twice = mint(once, { host: 'another.forward.test' });
  assert.equal(readSrs(twice, keys, now), { kind: 'srs1', sender: once });
});

test('other marks behind ours are read too', () => {
  for (const mark of ['+', '-']) {
    const minted = mint('a@b.test').replace('SRS0=', `SRS0${mark}`);
    assert.equal(readSrs(minted, keys, now), { kind: 'srs0', sender: 'a@b.test' });
  }
});

test('is good for 21 days, also over the turn of the round, and a day early', () => {
  const minted = mint('a@b.test');
  const forwarded = mint('SRS0=AAAA=BB=ext.test=u@first.test');
  for (const days of [-1, 0, 1, SRS_DAYS]) {
    assert.is(readSrs(minted, keys, at(days))?.kind, 'srs0', `${days}`);
  }
  for (const days of [-3, SRS_DAYS + 1, 100, 600, 1_000]) {
    assert.equal(readSrs(minted, keys, at(days)), { kind: 'expired' }, `${days}`);
  }
  assert.is(readSrs(forwarded, keys, at(400))?.kind, 'srs1');
  for (let day = 0; day < 1_024; day += 1) {
    const made = mintSrs({ sender: 'a@b.test', host, keys, now: at(day) });
    assert.is(readSrs(made ?? '', keys, at(day + SRS_DAYS))?.kind, 'srs0');
    assert.is(readSrs(made ?? '', keys, at(day + SRS_DAYS + 1))?.kind, 'expired');
  }
});

test('keys can be rotated: the first makes, all read', () => {
  const old = mint('a@b.test', { keys: [other] });
  assert.is(readSrs(old, [key, other], now)?.kind, 'srs0');
  assert.is(readSrs(old, [key], now), null);
  assert.is(mint('a@b.test', { keys: [key, other] }), mint('a@b.test'));
});

test('nothing but what we made is read', () => {
  for (const text of [
    '',
    '@',
    'a@b.test',
    'SRS0',
    'SRS0=',
    'SRS0=@b.test',
    'SRS1==@b.test',
    'SRS0=AAAAAAAA=AA=b.test=a@send.forward.test',
    'SRS1=AAAAAAAA=b.test==x=y=z=w@send.forward.test',
    '"',
    '"SRS0=',
  ]) {
    assert.is(readSrs(text, keys, now), null, text);
  }
});

test('every change of an address but that of case is seen', () => {
  const letters = 'abcdefghijklmnopqrstuvwxyz234567=+-.@';
  for (const minted of [mint('alice@b.test'), mint('SRS0=AAAA=BB=ext.test=u@first.test')]) {
    const text = local(minted);
    for (let i = 0; i < text.length; i += 1) {
      for (const letter of letters) {
        // The mark is no part of what is proven.
        if (text[i]!.toLowerCase() === letter || i === 4) continue;
        const changed = text.slice(0, i) + letter + text.slice(i + 1);
        assert.is(readSrs(changed, keys, now), null, changed);
      }
      assert.is(readSrs(text.slice(0, i) + text.slice(i + 1), keys, now), null);
    }
  }
});

test('any sender of a domain comes back, or has no address; noise is never read', () => {
  const characters = [...'abcXYZ019=+-._!#$%&\'*/?^`{|}~ "\\@(),:;[]üß漢\u{1f600}'];
  const word = (max: number): string =>
    Array.from({ length: randomInt(1, max) }, () => characters[randomInt(characters.length)]).join(
      '',
    );
  let known = 0;
  for (let i = 0; i < 20_000; i += 1) {
    const content = word(30);
    const prefix = ['', '', 'SRS0=', 'SRS1+', 'srs0-A=B='][randomInt(5)]!;
    const parsed = parseMailbox(`"${(prefix + content).replace(/["\\]/g, '\\$&')}"@x.test`);
    assert.is(readSrs(`${prefix}${content}@${host}`, keys, now), null);
    if (!parsed.ok) continue;
    const { address } = parsed.mailbox;
    const minted = mintSrs({ sender: address, host, keys: [key, randomBytes(32)], now });
    if (minted === null) continue;
    known += 1;
    assert.ok(Buffer.byteLength(local(minted)) <= 64);
    assert.ok(parseMailbox(minted).ok, minted);
    const found = readSrs(minted, keys, now);
    assert.ok(found !== null && found.kind !== 'expired', `${address} → ${minted}`);
    assert.is(found.sender.toLowerCase(), address.toLowerCase());
  }
  assert.ok(known > 2_000, `only ${known} addresses`);
});

test.run();
