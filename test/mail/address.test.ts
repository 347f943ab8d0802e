// Addresses: what is taken, in which spelling, what is refused and with which advice.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import addressparser from 'nodemailer/lib/addressparser';
import {
  formatMailbox,
  normalizedAddress,
  parseDomain,
  parseMailbox,
} from '../../src/mail/address.ts';
import type { Mailbox } from '../../src/mail/address.ts';

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));

function mailbox(text: string): Mailbox {
  const parsed = parseMailbox(text);
  if (!parsed.ok) throw new Error(`${text} ${parsed.problem}`);
  return parsed.mailbox;
}

function problem(text: string): string {
  const parsed = parseMailbox(text);
  return parsed.ok ? `taken as ${parsed.mailbox.address}` : parsed.problem;
}

const taken: readonly [text: string, name: string | null, address: string][] = [
  ['a@b.cc', null, 'a@b.cc'],
  ['  a@b.cc ', null, 'a@b.cc'],
  ['<a@b.cc>', null, 'a@b.cc'],
  ['"" <a@b.cc>', null, 'a@b.cc'],
  ['Jane <jane@X.Example>', 'Jane', 'jane@x.example'],
  ['Jane<jane@x.example>', 'Jane', 'jane@x.example'],
  ['Jane < jane@x.example >', 'Jane', 'jane@x.example'],
  ['"Doe, Jane" <j@x.example>', 'Doe, Jane', 'j@x.example'],
  ['"a \\"b\\" \\\\c" <j@x.example>', 'a "b" \\c', 'j@x.example'],
  ['"a <b@c.dd>" <j@x.example>', 'a <b@c.dd>', 'j@x.example'],
  ['Matt "The Matt" M <m@x.example>', 'Matt The Matt M', 'm@x.example'],
  ['Acme Inc. (Support) [EU] <a@b.cc>', 'Acme Inc. (Support) [EU]', 'a@b.cc'],
  ['jane@x.example <jane@x.example>', 'jane@x.example', 'jane@x.example'],
  ["Conan O'Brien <c@x.example>", "Conan O'Brien", 'c@x.example'],
  ['Jürgen Groß <j@x.example>', 'Jürgen Groß', 'j@x.example'],
  ['山田 太郎 <t@x.example>', '山田 太郎', 't@x.example'],
  ['🚀 Launch <t@x.example>', '🚀 Launch', 't@x.example'],
  // Quoted local parts lose quotes that they do not need (RFC 5321 §4.1.2).
  ['"a b"@x.example', null, '"a b"@x.example'],
  ['"a\\b"@x.example', null, 'ab@x.example'],
  ['"a.b"@x.example', null, 'a.b@x.example'],
  ['"a..b"@x.example', null, '"a..b"@x.example'],
  ['"a\\"b\\\\"@x.example', null, '"a\\"b\\\\"@x.example'],
  ['Jane <"j d"@x.example>', 'Jane', '"j d"@x.example'],
  ['"a@b"@x.example', null, '"a@b"@x.example'],
  ["!#$%&'*+-/=?^_`{|}~@x.example", null, "!#$%&'*+-/=?^_`{|}~@x.example"],
  // International: U-labels become A-labels, A-labels stay.
  ['a@münchen.de', null, 'a@xn--mnchen-3ya.de'],
  ['a@MÜNCHEN.de', null, 'a@xn--mnchen-3ya.de'],
  ['a@XN--MNCHEN-3YA.DE', null, 'a@xn--mnchen-3ya.de'],
  ['a@faß.de', null, 'a@xn--fa-hia.de'],
  ['a@例子。广告', null, 'a@xn--fsqu00a.xn--4rr70v'],
  ['a@i❤.ws', null, 'a@xn--i-7iq.ws'],
  ['用户@例子.广告', null, '用户@xn--fsqu00a.xn--4rr70v'],
  ['θσερ@εχαμπλε.ψομ', null, 'θσερ@xn--mxahbxey0c.xn--xxaf0a'],
  [`${'x'.repeat(64)}@x.example`, null, `${'x'.repeat(64)}@x.example`],
  [`a@${'x'.repeat(63)}.example`, null, `a@${'x'.repeat(63)}.example`],
  ['a@3com.com', null, 'a@3com.com'],
  ['a@123.com', null, 'a@123.com'],
  ['a@x--y.example', null, 'a@x--y.example'],
];

test('takes a@b.c and Name <a@b.c>', () => {
  for (const [text, name, address] of taken) {
    const parsed = mailbox(text);
    assert.is(parsed.name, name, text);
    assert.is(parsed.address, address, text);
    assert.is(parsed.address, `${parsed.local}@${parsed.domain}`, text);
    assert.is(parsed.given, text.trim());
    assert.match(parsed.domain, /^[a-z0-9.-]+$/);
  }
});

test('knows which addresses need SMTPUTF8: those with a UTF-8 local part, not those with an IDN', () => {
  assert.is(mailbox('用户@例子.广告').needsSmtpUtf8, true);
  assert.is(mailbox('"ü b"@x.example').needsSmtpUtf8, true);
  assert.is(mailbox('user@例子.广告').needsSmtpUtf8, false);
  assert.is(mailbox('Jürgen <j@x.example>').needsSmtpUtf8, false);
});

const refused: readonly [text: string, advice: RegExp][] = [
  ['', /empty/],
  ['   ', /empty/],
  ['jane', /needs an @/],
  ['Jane <>', /empty between/],
  ['jane@', /needs a domain/],
  ['@x.example', /needs a local part/],
  ['a@b@x.example', /more than one @/],
  ['a@localhost', /full domain name/],
  ['a@x', /full domain name/],
  ['a@[1.2.3.4]', /IP address/],
  ['a@[IPv6:::1]', /IP address/],
  ['a@1.2.3.4', /IP address/],
  ['a@１２７.０.０.１', /IP address/],
  ['a@x.example.', /dot at the end/],
  ['a@x.例子。', /dot at the end/],
  ['a@.x.example', /empty label/],
  ['a@x..example', /empty label/],
  ['a@-x.example', /hyphen/],
  ['a@x-.example', /hyphen/],
  ['a@-ü.example', /hyphen/],
  ['a@x_y.example', /domain names cannot have/],
  ['a@ü_y.example', /domain names cannot have/],
  ['a@x.exa%6dple', /domain names cannot have/],
  ['a@ü.example/x', /domain names cannot have/],
  ['a@ü.example／x', /domain/],
  ['a@xn--example.com', /punycode/],
  ['a@xn--0.example', /punycode/],
  ['a@ex\u200dample.example', /domain/],
  [`a@${'x'.repeat(64)}.example`, /label of more than 63/],
  [`a@${'ü'.repeat(60)}.example`, /label of more than 63|international/],
  [`a@${`${'x'.repeat(62)}.`.repeat(4)}example`, /octets|longer than 254/],
  [`${'x'.repeat(65)}@x.example`, /64 octets/],
  [`${'ü'.repeat(33)}@x.example`, /64 octets/],
  ['x'.repeat(2001), /2000 characters/],
  ['.a@x.example', /dot/],
  ['a.@x.example', /dot/],
  ['a..b@x.example', /dot/],
  ['a b@x.example', /space before the @/],
  ['Jane jane@x.example', /space before the @/],
  ['a@x .example', /space/],
  ['a"b"@x.example', /quoted local part/],
  ['a\\b@x.example', /quoted local part/],
  ['"a<b"@x.example', /< or >/],
  ['Jane <"a>b"@x.example>', /< or >/],
  ['""@x.example', /nothing between the quotes/],
  ['"a@x.example', /not closed/],
  ['"a"b@x.example', /@ right after/],
  ['a,b@x.example', /list/],
  ['a@x.example, b@x.example', /list/],
  ['a@x.example;b@x.example', /list/],
  ['A <a@x.example>, B <b@x.example>', /list/],
  ['Doe, Jane <j@x.example>', /double quotes/],
  ['Re: Jane <j@x.example>', /double quotes/],
  ['team: a@x.example, b@x.example;', /group/],
  ['undisclosed-recipients:;', /group/],
  ['a@x.example (home)', /comment/],
  ['(home) a@x.example', /comment/],
  ['a(home)@x.example', /comment/],
  ['Jane <a@x.example> (home)', /text after the >/],
  ['Jane <a@x.example', /without a >/],
  ['Jane a@x.example>', /no </],
  ['"Jane <a@x.example>', /not closed/],
  ['Ja"ne <a@x.example>', /not closed/],
  ['<<a@x.example>>', /quoted local part/],
  ['Jane > <a@x.example>', /double quotes/],
  ['<@relay.example:a@x.example>', /local part|comma|@/],
  ['a\u00a0b@x.example', /space/],
  ['a\u202eb@x.example', /invisible/],
  ['"a\u2028b"@x.example', /invisible/],
  ['a\ud800@x.example', /Unicode/],
  ['\udc00 <a@x.example>', /Unicode/],
];

test('refuses the rest and says what to fix', () => {
  for (const [text, advice] of refused) assert.match(problem(text), advice, JSON.stringify(text));
});

test('refuses every control character at every place', () => {
  const controls = [...Array(0x20).keys(), ...Array.from({ length: 0x21 }, (_, i) => 0x7f + i)];
  for (const code of controls) {
    const c = String.fromCharCode(code);
    for (const text of [
      `${c}a@x.example`,
      `a${c}b@x.example`,
      `"a${c}b"@x.example`,
      `a@x${c}.example`,
      `a@x.example${c}`,
      `Ja${c}ne <a@x.example>`,
      `"Ja${c}ne" <a@x.example>`,
      `Jane <a@x.example>${c}Bcc: b@x.example`,
    ]) {
      assert.match(
        problem(text),
        /control character/,
        `0x${code.toString(16)} in ${JSON.stringify(text)}`,
      );
    }
  }
});

test('domains stand alone too', () => {
  assert.equal(parseDomain('Mail.Example'), { ok: true, domain: 'mail.example' });
  assert.equal(parseDomain('例子.广告'), { ok: true, domain: 'xn--fsqu00a.xn--4rr70v' });
  assert.is(parseDomain('').ok, false);
  assert.is(parseDomain('localhost').ok, false);
});

test('formats names bare, quoted or encoded', () => {
  const format = (name: string | null): string => formatMailbox({ name, address: 'j@x.example' });
  assert.is(format(null), 'j@x.example');
  assert.is(format('Jane Doe'), 'Jane Doe <j@x.example>');
  assert.is(format('Doe, Jane'), '"Doe, Jane" <j@x.example>');
  assert.is(format('J. Doe'), '"J. Doe" <j@x.example>');
  assert.is(format('a"b\\c'), '"a\\"b\\\\c" <j@x.example>');
  assert.is(format('Jürgen'), '=?UTF-8?Q?J=C3=BCrgen?= <j@x.example>');
  assert.is(format('太郎'), '=?UTF-8?B?5aSq6YOO?= <j@x.example>');
  // What is encoded already stays; what only looks so does not.
  assert.is(format('=?UTF-8?Q?J=C3=BCrgen?='), '=?UTF-8?Q?J=C3=BCrgen?= <j@x.example>');
  assert.is(format('=?UTF-8?Q?a b?='), '=?UTF-8?Q?=3D=3FUTF-8=3FQ=3Fa_b=3F=3D?= <j@x.example>');
  for (const word of format('x'.repeat(300)).split(' ')) assert.ok(word.length <= 76);
  assert.throws(() => formatMailbox({ name: null, address: 'a@x.example\r\nBcc: b@x.example' }));
});

test('what is formatted reads back as the same one mailbox, for any name', () => {
  const random = seeded(7);
  const letters = [...'ab "\\,;:<>()[]@.=?_-é日🚀'];
  for (let round = 0; round < 2_000; round += 1) {
    const length = Math.floor(random() * 12);
    const name = Array.from({ length }, () => letters[Math.floor(random() * letters.length)])
      .join('')
      .trim();
    const header = formatMailbox({ name, address: 'j@x.example' });
    assert.match(header, /^[\x20-\x7e]+$/);
    const again = mailbox(header);
    assert.is(again.address, 'j@x.example');
    // A parser that we did not write sees one address as well.
    const seen = addressparser(header);
    assert.is(seen.length, 1, header);
    assert.is(seen[0]?.address, 'j@x.example', header);
    if (again.name?.includes('=?') !== true) assert.is(again.name ?? '', name, header);
  }
});

test('any text gets an answer, and what is taken survives a round trip', () => {
  const random = seeded(11);
  const letters = [...'aaabc..@@ "\\<>,;:()[]-_é日\u0000\n\u200b\ud83d'];
  let takenCount = 0;
  for (let round = 0; round < 20_000; round += 1) {
    const length = Math.floor(random() * 14);
    const noise = Array.from({ length }, () => letters[Math.floor(random() * letters.length)]);
    const text = round % 4 === 0 ? noise.join('') : `${noise.slice(0, 5).join('')}@x.example`;
    const parsed = parseMailbox(text);
    if (!parsed.ok) {
      assert.ok(parsed.problem.length > 5);
      continue;
    }
    takenCount += 1;
    assert.is(
      mailbox(parsed.mailbox.address).address,
      parsed.mailbox.address,
      JSON.stringify(text),
    );
    assert.is(mailbox(formatMailbox(parsed.mailbox)).address, parsed.mailbox.address);
    assert.is(normalizedAddress(normalizedAddress(text)), normalizedAddress(text));
  }
  assert.ok(takenCount > 500, `only ${takenCount} of the texts were addresses`);
});

test('compares addresses by mailbox, not by spelling', () => {
  const same: readonly [string, string][] = [
    ['Jane@X.Example', 'jane@x.example'],
    ['"jane"@x.example', 'jane@x.example'],
    ['jane@MÜNCHEN.de', 'jane@xn--mnchen-3ya.de'],
    [' jane@x.example ', 'jane@x.example'],
    ['ju\u0308rgen@x.example', 'j\u00fcrgen@x.example'],
  ];
  for (const [a, b] of same) assert.is(normalizedAddress(a), normalizedAddress(b), a);
  assert.is.not(normalizedAddress('ja.ne@x.example'), normalizedAddress('jane@x.example'));
  assert.is.not(normalizedAddress('jane+a@x.example'), normalizedAddress('jane@x.example'));
  assert.is(normalizedAddress('Not An Address'), 'not an address');
});

// Every entry of the corpus that we judge otherwise, and why.
const intended: ReadonlyMap<string, string> = new Map([
  ...[
    'postbox@com',
    'admin@mailserver1',
    'bob@mi-nus',
    'first.last@com',
    'test@example',
    'a@b',
    'a@bar',
  ].map((text) => [text, 'a domain of one label cannot be delivered to from outside'] as const),
  ['bob@under_scope', 'RFC 5321 §4.1.2: no underscore in a domain'],
  [
    'Bill Gates <"billy"@retired.Micr!osoft99.com>',
    'RFC 5321 §4.1.2: no exclamation mark in a domain',
  ],
  ['first.last@example.123', 'no top-level domain is a number'],
  ['test@123.123.123.123', 'an IP address is no domain'],
  ['foobar@192.168.0.1', 'an IP address is no domain'],
  ...[
    '(this is a comment) test@example.com',
    '(this is a comment)test@example.com',
    'test@example.com(this is a comment)',
    'test@example.com (this is a comment)',
  ].map((text) => [text, 'comments are refused'] as const),
  ...[
    'very.(),:;<>[]\\".VERY.\\"very@\\\\ \\"very\\".unusual',
    '()<>[]:,;@\\\\\\"!#$%&\'*+-/=?^_`{}| ~.a',
  ]
    .flatMap((local) =>
      ['strange.example.com', 'example.org', 'iana.org'].map((at) => `"${local}"@${at}`),
    )
    .map((text) => [text, 'angle brackets in a quoted local part cannot be sent'] as const),
]);

test('agrees with the corpus of flanker except where intended', () => {
  const folder = `${corpora}/addresses-flanker`;
  if (!existsSync(folder)) {
    console.log(`skipped: no corpus at ${folder}`);
    return;
  }
  const files: readonly [file: string, valid: boolean, suffix: string][] = [
    ['mailbox_valid.txt', true, ''],
    ['mailbox_invalid.txt', false, ''],
    ['abridged_localpart_valid.txt', true, '@iana.org'],
    ['abridged_localpart_invalid.txt', false, '@iana.org'],
  ];
  const disagreements: string[] = [];
  let count = 0;
  for (const [file, valid, suffix] of files) {
    const entries = readFileSync(`${folder}/${file}`, 'utf8')
      .split('\n')
      .filter((line) => !/^\s*#(?: |$)/.test(line))
      .map((line) => line.replace(/\s{2,}#.*$/, ''))
      .filter((line) => line.trim() !== '');
    assert.ok(entries.length > 20, `${file} has ${entries.length} entries`);
    for (const entry of entries) {
      count += 1;
      if (parseMailbox(entry + suffix).ok !== valid) disagreements.push(entry + suffix);
    }
  }
  const agreed = count - disagreements.length;
  console.log(`flanker: ${agreed} of ${count} agree, ${disagreements.length} differ on purpose`);
  assert.equal(
    disagreements.filter((text) => !intended.has(text)),
    [],
  );
});

/** Numbers in [0, 1), the same ones every time (mulberry32). */
function seeded(seed: number): () => number {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4_294_967_296;
  };
}

test.run();
