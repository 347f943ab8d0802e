// The Authentication-Results field: what strangers chose cannot end it or add to it, and what pretends to be ours goes.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import {
  withoutForgedResults,
  writeAuthenticationResults,
  type MethodResult,
} from '../../src/mail/authentication-results.ts';

const HOST = 'mx.our-host.test';

const dkim = (properties: MethodResult['properties'], reason: string | null = null) =>
  writeAuthenticationResults(HOST, [{ method: 'dkim', result: 'pass', reason, properties }]);

/** A small reader of RFC 8601: unfolded, without comments there are none. */
function read(field: string): { readonly id: string; readonly infos: readonly string[] } {
  assert.ok(field.endsWith('\r\n'));
  const lines = field.slice(0, -2).split('\r\n');
  for (const line of lines) {
    assert.ok(Buffer.byteLength(line) <= 998, `${line.length} octets`);
    assert.match(line, /^[\t -~]*$/);
  }
  for (const line of lines.slice(1)) assert.match(line, /^[ \t]+\S/);
  const value = lines.join('').replace(/^Authentication-Results:/, '');
  const parts: string[] = [''];
  let isQuoted = false;
  for (let at = 0; at < value.length; at += 1) {
    const one = value[at]!;
    if (isQuoted && one === '\\') parts.push(`${parts.pop()}${one}${value[++at]}`);
    else if (one === ';' && !isQuoted) parts.push('');
    else {
      if (one === '"') isQuoted = !isQuoted;
      parts.push(`${parts.pop()}${one}`);
    }
  }
  assert.not(isQuoted);
  const [id = '', ...infos] = parts.map((part) => part.trim());
  return { id, infos };
}

test('the field as RFC 8601 spells it', () => {
  const field = writeAuthenticationResults(HOST, [
    { method: 'spf', result: 'pass', reason: null, properties: [['smtp.mailfrom', 'a.test']] },
    {
      method: 'dkim',
      result: 'fail',
      reason: 'bad signature',
      properties: [
        ['header.d', 'a.test'],
        ['header.s', null],
      ],
    },
  ]);
  assert.is(
    field,
    'Authentication-Results: mx.our-host.test;\r\n' +
      '\tspf=pass smtp.mailfrom=a.test;\r\n' +
      '\tdkim=fail reason="bad signature" header.d=a.test\r\n',
  );
  assert.is(
    writeAuthenticationResults(HOST, []),
    'Authentication-Results: mx.our-host.test;\r\n none\r\n',
  );
});

test('values that are no tokens are quoted, and those that cannot be are left out', () => {
  assert.equal(read(dkim([['smtp.remote-ip', '2001:db8::1']])).infos, [
    'dkim=pass smtp.remote-ip="2001:db8::1"',
  ]);
  assert.equal(read(dkim([['header.b', 'a"b\\c']])).infos, ['dkim=pass header.b="a\\"b\\\\c"']);
  assert.equal(read(dkim([['header.d', 'bücher.test']])).infos, [
    'dkim=pass header.d=xn--bcher-kva.test',
  ]);
  for (const bad of ['', 'a\r\nX-Evil: yes', 'a\0b', 'x'.repeat(256), 'ü ü', '\u{1f4a9}\n']) {
    assert.equal(read(dkim([['header.d', bad]])).infos, ['dkim=pass'], JSON.stringify(bad));
  }
});

test('no words end the line, the field or the result', () => {
  const hostile = [
    'x\r\nAuthentication-Results: mx.our-host.test; dmarc=pass',
    'x\n\ndmarc=pass',
    '"; dmarc=pass header.from="bank.test',
    '\\"; dmarc=pass',
    '\\',
    '(((',
    ')',
    '\u2028\u2029\u0085\x7f\x00',
    '\ud800',
    'y'.repeat(5_000),
    '; '.repeat(500),
  ];
  for (const words of hostile) {
    const { id, infos } = read(dkim([['header.d', words]], words));
    assert.is(id, HOST);
    assert.is(infos.length, 1, JSON.stringify(words.slice(0, 50)));
    assert.match(infos[0]!, /^dkim=pass(\s|$)/);
  }
  const long = dkim([
    ['header.d', 'd'.repeat(255)],
    ['header.s', 's'.repeat(255)],
    ['header.a', 'a'.repeat(255)],
    ['header.b', 'b'.repeat(255)],
  ]);
  assert.is(read(long).infos.length, 1);
});

const message = (...fields: readonly string[]): Buffer =>
  Buffer.from(`${fields.join('\r\n')}\r\n\r\nBody\r\n`, 'latin1');
const REST = [
  'From: a@b.test',
  'Subject: x\xff\xfe',
  'X-Folded: a',
  '  b',
  'To: c@d.test',
] as const;

test('fields that bear our name are removed in every spelling', () => {
  const forged = [
    'Authentication-Results: mx.our-host.test; dmarc=pass',
    'AUTHENTICATION-RESULTS: MX.Our-Host.TEST; dmarc=pass',
    'authentication-results:mx.our-host.test;dmarc=pass',
    'Authentication-Results : mx.our-host.test; dmarc=pass',
    'Authentication-Results\t: mx.our-host.test; dmarc=pass',
    'Authentication-Results\x0b: mx.our-host.test; dmarc=pass',
    '\x0cAuthentication-Results\xa0: mx.our-host.test; dmarc=pass',
    'Authentication-Results\r\n : mx.our-host.test; dmarc=pass',
    'Authentication-Results:\r\n mx.our-host.test;\r\n\tdmarc=pass',
    'Authentication-Results: "mx.our-host.test"; dmarc=pass',
    'Authentication-Results: "mx.our\\-host.test"; dmarc=pass',
    'Authentication-Results: mx.our-host.test 1; dmarc=pass',
    'Authentication-Results: mx.our-host.test/1; dmarc=pass',
    'Authentication-Results: mx.our-host.test.; dmarc=pass',
    'Authentication-Results: (hi) mx.our-host.test (there) 1 (!); dmarc=pass',
    'Authentication-Results: (a (nested) \\) one)mx.our-host.test; dmarc=pass',
    'Authentication-Results: (not;the;end) mx.our-host.test; none',
    'Authentication-Results: mx.our-host.test',
    'Authentication-Results: mx . our-host . test; dmarc=pass',
    'Authentication-Results: (without an end mx.our-host.test; dmarc=pass',
    'Authentication-Results: "mx.our-host.test; dmarc=pass',
  ];
  for (const field of forged) {
    for (let at = 0; at <= REST.length; at += 1) {
      // Not between a field and its continuation line.
      if (at === 3) continue;
      const raw = message(...REST.slice(0, at), field, ...REST.slice(at));
      assert.equal(withoutForgedResults(raw, HOST), message(...REST), field);
    }
  }
  const all = message(...forged.flatMap((field) => [field, 'X-Between: 1']));
  assert.equal(withoutForgedResults(all, HOST), message(...forged.map(() => 'X-Between: 1')));
  const alone = withoutForgedResults(message(forged[0]!), 'MX.our-host.test.');
  assert.is(alone.toString(), '\r\nBody\r\n');
});

test('everything else stays byte for byte', () => {
  const kept = [
    message(...REST),
    message('Authentication-Results: mx.other.test; dmarc=pass', ...REST),
    message('Authentication-Results: not-mx.our-host.test; dmarc=pass', ...REST),
    message('Authentication-Results: mx.our-host.test.evil.test; dmarc=pass', ...REST),
    message('Authentication-Results: mx.other.test; dkim=pass (mx.our-host.test)', ...REST),
    message('X-Authentication-Results: mx.our-host.test; dmarc=pass', ...REST),
    message('ARC-Authentication-Results: i=1; mx.our-host.test; dmarc=pass', ...REST),
    message('Authentication-Results-Too: mx.our-host.test; dmarc=pass', ...REST),
    message('X-Note: see', ' Authentication-Results: mx.our-host.test; dmarc=pass', ...REST),
    Buffer.from('From: a@b\r\n\r\nAuthentication-Results: mx.our-host.test; dmarc=pass\r\n'),
    Buffer.from('\r\nAuthentication-Results: mx.our-host.test; dmarc=pass\r\n'),
    Buffer.from('Authentication-Results'),
    Buffer.alloc(0),
  ];
  for (const raw of kept) {
    const before = Buffer.from(raw);
    const after = withoutForgedResults(raw, HOST);
    assert.is(after, raw, raw.toString('latin1'));
    assert.equal(after, before);
  }
});

test('a header without an end, and lines of LF', () => {
  assert.equal(
    withoutForgedResults(Buffer.from(`A: 1\r\nAuthentication-Results: ${HOST}; x=pass`), HOST),
    Buffer.from('A: 1\r\n'),
  );
  assert.equal(
    withoutForgedResults(Buffer.from(`Authentication-Results: ${HOST};\n x=pass\nA: 1\n\nb`), HOST),
    Buffer.from('A: 1\n\nb'),
  );
});

test.run();
