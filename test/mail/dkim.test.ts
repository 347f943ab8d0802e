// Signatures against two independent verifiers: mailauth, and Debian's python3-dkim where it is installed. Both get
// what the SMTP engine makes of a message (test/delivery/signing.test.ts holds `onTheWire` to a real session).
import { spawnSync } from 'node:child_process';
import { createHash, createPrivateKey, createPublicKey } from 'node:crypto';
import { join } from 'node:path';
import { dkimVerify } from 'mailauth/lib/dkim/verify.js';
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { parseMailbox } from '../../src/mail/address.ts';
import { compose } from '../../src/mail/compose.ts';
import { createBodyHasher, hashBodyOctets } from '../../src/mail/dkim-body.ts';
import {
  generateKeyPair,
  hashSmallBody,
  isPackageBody,
  publicKeyRecord,
  relaxedField,
  signData,
  signMessage,
} from '../../src/mail/dkim.ts';
import type { DkimKey } from '../../src/mail/dkim.ts';
import { LOADER } from '../support/loader.ts';

const signedAt = new Date('2024-02-29T12:34:56.789Z');
const keys: readonly DkimKey[] = await Promise.all(
  (['rsa-sha256', 'ed25519-sha256'] as const).map(async (algorithm) => {
    const { privateKey } = await generateKeyPair(algorithm);
    return { domain: 'sender.example', selector: `test-${algorithm}`, algorithm, privateKey };
  }),
);
const records = new Map(
  keys.map((key) => [`${key.selector}._domainkey.${key.domain}`, publicKeyRecord(key.privateKey)]),
);

const latin1 = (text: string): Buffer => Buffer.from(text, 'latin1');
const utf8 = (text: string): Buffer => Buffer.from(text, 'utf8');

/** What nodemailer's data stream sends: every line end is CRLF, and there is one at the end. */
const onTheWire = (message: Buffer): Buffer => {
  const text = message.toString('latin1').replace(/\r\n|\r|\n/g, '\r\n');
  return latin1(text.endsWith('\r\n') ? text : `${text}\r\n`);
};

const signed = async (message: Buffer): Promise<Buffer> =>
  onTheWire(Buffer.concat([await signMessage({ message, keys, signedAt }), message]));

/** One word a signature: pass, or what is wrong. */
async function askMailauth(message: Buffer): Promise<readonly string[]> {
  const { results } = await dkimVerify(message, {
    resolver: (name) => {
      const record = records.get(name);
      return Promise.resolve(record === undefined ? [] : [[record]]);
    },
  });
  return results.map(({ status }) =>
    status.result === 'pass' ? 'pass' : `${status.result} ${String(status.comment)}`,
  );
}

const python = '/usr/bin/python3';
const hasDkimpy = spawnSync(python, ['-c', 'import dkim, nacl.signing']).status === 0;
if (!hasDkimpy) console.log('skipped: python3-dkim or python3-nacl is not installed');
const dkimpyTest = hasDkimpy ? test : test.skip;

const verifier = `
import base64, dkim, json, sys
job = json.load(sys.stdin)
def lookup(name, timeout=5):
    return job["records"][name.decode().rstrip(".")].encode()
def ask(message, index):
    try:
        return "pass" if dkim.DKIM(message).verify(idx=index, dnsfunc=lookup) else "fail"
    except Exception as problem:
        return "fail " + repr(problem)
messages = [base64.b64decode(message) for message in job["messages"]]
json.dump([[ask(message, index) for index in (0, 1)] for message in messages], sys.stdout)
`;

/** All messages in one process. */
function askDkimpy(messages: readonly Buffer[]): readonly (readonly string[])[] {
  const job = {
    records: Object.fromEntries(records),
    messages: messages.map((message) => message.toString('base64')),
  };
  const { stdout, stderr } = spawnSync(python, ['-c', verifier], { input: JSON.stringify(job) });
  assert.is(stderr.toString(), '');
  return JSON.parse(stdout.toString()) as string[][];
}

const plainHeader = [
  'From: "Ann, A." <ann@sender.example>',
  'To: bob@receiver.example',
  'Subject: Hello',
  'Date: Thu, 29 Feb 2024 12:34:56 +0000',
  'Message-ID: <1@sender.example>',
  'MIME-Version: 1.0',
  'Content-Type: text/plain; charset=utf-8',
  '',
].join('\r\n');

const withBody = (body: Buffer | string): Buffer =>
  Buffer.concat([latin1(`${plainHeader}\r\n`), typeof body === 'string' ? utf8(body) : body]);
const withField = (field: Buffer | string): Buffer =>
  Buffer.concat([typeof field === 'string' ? utf8(field) : field, withBody('text\r\n')]);

const withSubject = (subject: string): Buffer =>
  latin1(withBody('text\r\n').toString('latin1').replace('Subject: Hello', `Subject: ${subject}`));

const words = (count: number): string =>
  Array.from({ length: count }, (_, at) => `word${at}`).join(' ');
const everyOctet = Buffer.from(Array.from({ length: 256 }, (_, octet) => octet));

const messages: Readonly<Record<string, Buffer>> = {
  plain: withBody('Hello  Bob,\r\n\r\nthis is it. \t\r\n'),
  'empty body': withBody(''),
  'a body of only CRLFs': withBody('\r\n\r\n\r\n'),
  'a body of only white space': withBody(' \t \r\n \r\n\t'),
  'no body separator': latin1(plainHeader),
  'no line end after the header': latin1(plainHeader.trimEnd()),
  'no line end after the body': withBody('text'),
  'white space at the very end': withBody('text \t'),
  'no From at all': latin1('Subject: x\r\n\r\ntext\r\n'),
  NBSP: withBody('a\u00a0\u00a0b\u00a0\r\n\u00a0\r\n'),
  'NBSP in Latin-1': withBody(latin1('a\xa0\xa0b\xa0\r\n\xa0\r\n')),
  'Latin-1': withBody(latin1('Gr\xfc\xdfe  aus K\xf6ln \r\n')),
  'UTF-8': withBody('Grüße  aus Köln \r\nこんにちは\u3000世界\r\n'),
  emoji: withBody('👩‍👩‍👧‍👦  🎉 \r\n'),
  'every octet': withBody(Buffer.concat([everyOctet, everyOctet])),
  'form feed and vertical tab': withBody('a\f\r\nb\v \r\n\f\v\r\n \f \r\nc\x85\x1c\x1f\r\n'),
  'NUL and delete': withBody('a\0b\x7f\r\n'),
  'a line of 40,000 characters': withBody(`${'x'.repeat(40_000)}\r\n`),
  'a line of 40,000 characters with spaces': withBody(`${'x  y '.repeat(8_000)}\r\n`),
  '16,000 spaces': withBody(`a${' '.repeat(16_000)}b\r\n`),
  '16,000 blank lines': withBody(`a${'\r\n'.repeat(16_000)}b\r\n`),
  '16,000 blank lines at the end': withBody(`a${'\r\n'.repeat(16_000)}`),
  '1 MB': withBody('The quick  brown fox. \r\n'.repeat(43_000)),
  '1 MB of 8-bit octets': withBody(Buffer.alloc(1_000_000, everyOctet)),
  'bare CR': withBody('a\rb \r c\r\r\nd\r'),
  'bare LF': withBody('a\nb \n c\n\r\nd\n'),
  'only bare line ends': withBody('\n\r\r\n\n'),
  'bare LF throughout': latin1(withBody('a\n\nb\n').toString('latin1').replaceAll('\r\n', '\n')),
  'blank lines at the end': withBody('text\r\n \r\n\t\r\n\r\n'),
  'dots at line starts': withBody('.\r\n..\r\n.x\r\n'),
  'a long folded subject': withSubject(words(900).replaceAll(' ', '\r\n ')),
  'a subject in one long line': withSubject(words(400)),
  'white space after a value': withField('Reply-To: a@sender.example \t \r\n'),
  'no space after the colon': withField('Reply-To:a@sender.example\r\n'),
  'an empty value': withField('Reply-To:\r\n'),
  'a value of white space': withField('Reply-To: \t \r\n'),
  'folds with tabs': withField('References:\r\n\t<1@a>\r\n\t \t<2@a>\r\n \r\n <3@a>\r\n'),
  'odd case': withField('reply-TO: A@Sender.Example\r\n'),
  'a field twice': withField('To: x@receiver.example\r\nTo: y@receiver.example\r\n'),
  'a field twice, apart': withField('Cc: x@a.test\r\nTo: y@a.test\r\nCc: z@a.test\r\n'),
  'UTF-8 in a field': withField('Reply-To: "Jörg\u00a0 Ü\u00a0" <jörg@sender.example>\r\n'),
  'Latin-1 in a field': withField(latin1('Reply-To: J\xf6rg\xa0 \xa0<a@sender.example>\xa0\r\n')),
  'colons in a value': withField('List-Id: a : b:c <d:e>\r\n'),
  'every signed field': withField(
    'Sender: a@sender.example\r\nReply-To: b@sender.example\r\nCc: c@receiver.example\r\n' +
      'Content-Transfer-Encoding: 7bit\r\nIn-Reply-To: <2@a>\r\nReferences: <2@a>\r\n' +
      'List-Id: <l.sender.example>\r\nList-Unsubscribe: <https://sender.example/u>\r\n' +
      'List-Unsubscribe-Post: List-Unsubscribe=One-Click\r\nFeedback-ID: a:b:c:d\r\n' +
      'Auto-Submitted: auto-generated\r\nX-Other: not signed\r\n',
  ),
};

/** Malformed or obsolete: dkimpy refuses to read them, mailauth reads them as we do. */
const oddMessages: Readonly<Record<string, Buffer>> = {
  'a space before the colon': withField('Reply-To : a@sender.example\r\n'),
  'a fold before the colon': withField('Reply-To\r\n : a@sender.example\r\n'),
  'a line that is no field': withField('Reply-To: a@sender.example\r\nno field at all\r\n'),
  'an empty header': latin1('\r\ntext\r\n'),
};

/** mulberry32: the same numbers on every run. */
function seeded(seed: number): (below: number) => number {
  let state = seed;
  return (below) => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61);
    return Math.floor((((t ^ (t >>> 14)) >>> 0) / 4_294_967_296) * below);
  };
}

const asciiPieces = ['a', 'Word', '.', '=', '--', ' ', '  ', '\t', ' \t ', '\r\n', '\r\n\r\n'];
const wildPieces = asciiPieces.concat(
  ['\n', '\r', '\f', '\v', '\0', '\xa0', '\xc2\xa0', '\xfc', '\xf0\x9f\x8e\x89', '\x85'],
  [' '.repeat(80), '\r\n'.repeat(130), 'x'.repeat(1_000), '\r\r\n', ' \n', '\xe3\x80\x80'],
);

function randomText(random: (below: number) => number, pieces: readonly string[]): string {
  let text = '';
  for (let left = random(60); left > 0; left -= 1) text += pieces[random(pieces.length)];
  return text;
}

function randomMessage(random: (below: number) => number): Buffer {
  const names = ['From', 'to', 'SUBJECT', 'Cc', 'Reply-To', 'References', 'List-Id', 'X-Other'];
  const values = ['a', 'b:', ' ', '  ', '\t', '\r\n ', '\r\n\t', '=?', '\xa0', '\xc3\xbc', 'Z'];
  let header = 'From: a@sender.example\r\n';
  for (let left = random(12); left > 0; left -= 1) {
    const value = Array.from({ length: random(12) }, () => values[random(values.length)]).join('');
    header += `${names[random(names.length)]}:${value}\r\n`;
  }
  return latin1(`${header}\r\n${randomText(random, wildPieces)}`);
}

const bothPass = ['pass', 'pass'];

for (const [name, message] of Object.entries({ ...messages, ...oddMessages })) {
  test(`both signatures pass in mailauth: ${name}`, async () => {
    assert.equal(await askMailauth(await signed(message)), bothPass);
  });
}

test('300 random messages pass in mailauth', async () => {
  const random = seeded(1);
  for (let round = 0; round < 300; round += 1) {
    const message = randomMessage(random);
    const what = `round ${round}: ${JSON.stringify(message.toString('latin1'))}`;
    assert.equal(await askMailauth(await signed(message)), bothPass, what);
  }
});

dkimpyTest('the same messages and 40 random ones pass in dkimpy', async () => {
  const random = seeded(2);
  const all = Object.entries(messages);
  for (let round = 0; round < 40; round += 1) all.push([`random ${round}`, randomMessage(random)]);
  const results = askDkimpy(await Promise.all(all.map(([, message]) => signed(message))));
  assert.is(results.length, all.length);
  for (const [at, [name]] of all.entries()) assert.equal(results[at], bothPass, name);
});

// What somebody on the way may add or change; each must break both signatures.
const base = messages['every signed field'] as Buffer;
const addedFields = [
  'From: evil@attacker.example',
  'Sender: evil@attacker.example',
  'Reply-To: evil@attacker.example',
  'To: other@receiver.example',
  'Cc: other@receiver.example',
  'Subject: Changed',
  'Date: Fri, 01 Mar 2024 00:00:00 +0000',
  'Message-ID: <2@attacker.example>',
  'MIME-Version: 1.0',
  'Content-Type: text/html',
  'Content-Transfer-Encoding: base64',
  'In-Reply-To: <9@a>',
  'References: <9@a>',
  'List-Id: <other.example>',
  'List-Unsubscribe: <https://attacker.example>',
  'List-Unsubscribe-Post: List-Unsubscribe=One-Click',
  'Feedback-ID: x:y:z:e',
  'Auto-Submitted: no',
];

async function tampered(): Promise<readonly (readonly [string, Buffer])[]> {
  const all: [string, Buffer][] = [];
  const bare = latin1('From: a@sender.example\r\nX-Other: 1\r\n\r\ntext\r\n');
  for (const message of [base, bare]) {
    const text = (await signed(message)).toString('latin1');
    for (const field of addedFields) {
      all.push([`${field} on top`, latin1(`${field}\r\n${text}`)]);
      all.push([`${field} last`, latin1(text.replace('\r\n\r\n', `\r\n${field}\r\n\r\n`))]);
    }
    all.push(['body', latin1(text.replace('text\r\n', 'Text\r\n'))]);
    all.push(['more body', latin1(`${text}more\r\n`)]);
    all.push(['From', latin1(text.replace('a@sender', 'b@sender'))]);
  }
  return all;
}

test('a field added or changed on the way fails in mailauth', async () => {
  for (const [name, message] of await tampered()) {
    const results = await askMailauth(message);
    assert.is(results.length, 2, name);
    assert.not(results.includes('pass'), `${name}: ${results.join(', ')}`);
  }
  const other = latin1(
    `X-Other: 2\r\nReceived: by a\r\n${(await signed(base)).toString('latin1')}`,
  );
  assert.equal(await askMailauth(other), bothPass);
});

dkimpyTest('a field added or changed on the way fails in dkimpy', async () => {
  const all = await tampered();
  const results = askDkimpy(all.map(([, message]) => message));
  for (const [at, [name]] of all.entries()) {
    assert.not(results[at]?.includes('pass'), `${name}: ${results[at]?.join(', ')}`);
  }
  assert.equal(askDkimpy([await signed(base)]), [bothPass]);
});

test('signing twice gives the same octets, and another second gives others', async () => {
  const message = messages['plain'] as Buffer;
  const first = await signMessage({ message, keys, signedAt });
  assert.equal(await signMessage({ message: new Uint8Array(message), keys, signedAt }), first);
  const sameSecond = new Date('2024-02-29T12:34:56.001Z');
  assert.equal(await signMessage({ message, keys, signedAt: sameSecond }), first);
  const later = await signMessage({ message, keys, signedAt: new Date('2024-02-29T12:34:57Z') });
  assert.not.equal(later, first);
});

test('the field: tags, names and folds', async () => {
  const fields = (await signMessage({ message: base, keys, signedAt })).toString('latin1');
  assert.match(fields, /^(?:[\x20-\x7e]{1,78}\r\n)+$/);
  const [rsa = '', ed25519 = '', ...more] = fields.split(/(?<=\r\n)(?=DKIM-Signature: )/);
  assert.is(more.length, 0);
  assert.match(rsa, 'a=rsa-sha256; c=relaxed/relaxed; d=sender.example;');
  assert.match(ed25519, 'a=ed25519-sha256;');
  assert.match(rsa, 't=1709210096;');
  const tags = rsa.slice('DKIM-Signature:'.length).replace(/\s/g, '').split(';');
  const names = tags.map((tag) => tag.slice(0, tag.indexOf('=')));
  assert.equal(names, ['v', 'a', 'c', 'd', 's', 't', 'h', 'bh', 'b']);
  const listed = tags[6]?.slice(2).split(':') ?? [];
  for (const field of addedFields) {
    const name = field.slice(0, field.indexOf(':')).toLowerCase();
    assert.is(listed.filter((one) => one === name).length, 2, name);
  }
  assert.is(listed.length, addedFields.length * 2);
  const thrice = await signMessage({
    message: messages['a field twice'] as Buffer,
    keys,
    signedAt,
  });
  const list = thrice.toString('latin1').replace(/\s/g, '');
  assert.match(list, 'h=from:from:sender:reply-to:to:to:to:to:cc:subject:subject:');
});

test('what cannot be signed throws', async () => {
  const message = messages['plain'] as Buffer;
  const [rsa, ed25519] = keys as [DkimKey, DkimKey];
  const publicKey = createPublicKey(rsa.privateKey);
  const refused: [RegExp, Parameters<typeof signMessage>[0]][] = [
    [/unsigned/, { message, keys: [], signedAt }],
    [/more than 4 keys/, { message, keys: [rsa, rsa, rsa, rsa, rsa], signedAt }],
    [/not a key for rsa/, { message, keys: [{ ...ed25519, algorithm: 'rsa-sha256' }], signedAt }],
    [/not a private key/, { message, keys: [{ ...rsa, privateKey: publicKey }], signedAt }],
    [/no DNS name/, { message, keys: [{ ...rsa, domain: 'a.example; l=0' }], signedAt }],
    [/no DNS name/, { message, keys: [{ ...rsa, domain: 'bücher.example' }], signedAt }],
    [/no DNS name/, { message, keys: [{ ...rsa, selector: 'a\r\nb' }], signedAt }],
    [/no instant/, { message, keys, signedAt: new Date(Number.NaN) }],
    [/header of more than/, { message: Buffer.alloc(1_048_577, 'a: b\r\n'), keys, signedAt }],
    [/header of more than/, { message: Buffer.alloc(1_048_577, 'a'), keys, signedAt }],
    [/more than 2000 fields/, { message: Buffer.alloc(20_000, 'To: b\r\n'), keys, signedAt }],
  ];
  for (const [problem, request] of refused) {
    const error = await signMessage(request).then(
      () => null,
      (thrown: Error) => thrown,
    );
    assert.match(error?.message ?? 'nothing was thrown', problem);
  }
});

test('dkim-signer and our canonicaliser agree where both may be used', () => {
  const random = seeded(3);
  let compared = 0;
  for (let round = 0; round < 2_000; round += 1) {
    const body = latin1(randomText(random, asciiPieces));
    const isBlank = !/[!-~]/.test(body.toString('latin1'));
    assert.is(isPackageBody(body), !isBlank, JSON.stringify(body.toString('latin1')));
    assert.is(hashSmallBody(body), hashBodyOctets(body), JSON.stringify(body.toString('latin1')));
    if (!isBlank) compared += 1;
    // One octet above ASCII takes the way without dkim-signer.
    const field = `Subject:${randomText(random, ['a', 'B:', ' ', '  ', '\t', '\r\n ', '\r\n\t'])}x`;
    const foreign = relaxedField(field.replace(/x$/, '\x80'));
    assert.is(foreign, relaxedField(field).replace(/x$/, '\x80'), JSON.stringify(field));
  }
  assert.ok(compared > 1_000);
});

test('dkim-signer gets what it does right and fast, and nothing else', () => {
  const border: [boolean, string][] = [
    [true, 'text'],
    [true, '\ta \r\n\r\nb\r\n'],
    [true, `a${' '.repeat(77)}b`],
    [false, `a${' '.repeat(78)}b`],
    [true, `a${'\r\n'.repeat(128)}b`],
    [false, `a${'\r\n'.repeat(129)}b`],
    [false, `a${' \r\n'.repeat(129)}b`],
    [true, 'a'.repeat(1_024)],
    [false, 'a'.repeat(1_025)],
    ...['', ' ', '\r\n', ' \r\n\t', 'a\rb', 'a\nb', 'a\r', 'a\fb', 'a\vb', 'a\xa0b', 'a\x7fb'].map(
      (body): [boolean, string] => [false, body],
    ),
  ];
  for (const [isIn, body] of border) assert.is(isPackageBody(latin1(body)), isIn, body.slice(0, 9));

  const from = parseMailbox('Ann <ann@sender.example>');
  assert.ok(from.ok);
  const texts = [
    '',
    ' ',
    '\n\n',
    'Grüße  \f\v',
    '🎉',
    ' '.repeat(300),
    `${' '.repeat(77)}a`,
    `a${'\n'.repeat(102)}b`,
  ];
  texts.push(words(100), 'x'.repeat(800), '\u00a0', 'a\n\n \t\nb \n');
  for (const text of texts) {
    const { raw } = compose({
      from: from.mailbox,
      to: [],
      cc: [],
      replyTo: [],
      subject: '',
      text,
      html: null,
      headers: [],
      messageId: '1@sender.example',
      date: signedAt,
      boundarySeed: '1',
    });
    assert.ok(isPackageBody(raw.subarray(raw.indexOf('\r\n\r\n') + 4)), JSON.stringify(text));
  }
});

test('a body in pieces has the hash of the whole', () => {
  const random = seeded(4);
  for (let round = 0; round < 500; round += 1) {
    const body = latin1(randomText(random, wildPieces));
    const hasher = createBodyHasher(4 + random(40));
    for (let at = 0; at < body.length;) {
      const end = at + 1 + random(random(2) === 0 ? 3 : 90);
      hasher.update(body.subarray(at, end));
      at = end;
    }
    assert.is(hasher.digest(), hashBodyOctets(body), JSON.stringify(body.toString('latin1')));
  }
  // RFC 6376 §3.4.4: a body without content hashes as nothing.
  assert.is(hashSmallBody(latin1(' \r\n\r\n')), createHash('sha256').digest('base64'));
});

test('RFC 8463 appendix A', async () => {
  // The seed and the public key of §A.1; PKCS #8 around the seed (RFC 8410 §7).
  const seed = Buffer.from('nWGxne/9WmC6hEr0kuwsxERJxWl7MmkZcDusAxyuf2A=', 'base64');
  const der = Buffer.concat([Buffer.from('302e020100300506032b657004220420', 'hex'), seed]);
  const privateKey = createPrivateKey({ key: der, format: 'der', type: 'pkcs8' });
  const record = 'v=DKIM1; k=ed25519; p=11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=';
  assert.is(publicKeyRecord(privateKey), record);
  assert.is(publicKeyRecord(createPublicKey(privateKey)), record);

  const from = 'From: Joe SixPack <joe@football.example.com>';
  const to = 'To: Suzie Q <suzie@shopping.example.net>';
  const subject = 'Subject: Is dinner ready?';
  const date = 'Date: Fri, 11 Jul 2003 21:00:37 -0700 (PDT)';
  const id = 'Message-ID: <20030712040037.46341.5F8J@football.example.com>';
  const body = 'Hi.\r\n\r\nWe lost the game.  Are you hungry yet?\r\n\r\nJoe.\r\n';
  const bodyHash = '2jUSOH9NhtVGCQWNr9BrIAPreKQjO6Sn7XIkfJVOzv8=';
  assert.is(hashSmallBody(latin1(body)), bodyHash);
  assert.is(hashBodyOctets(latin1(body)), bodyHash);

  // §A.3, its own tags and order: h= lists From, Subject and Date once more than they occur.
  const field =
    'DKIM-Signature: v=1; a=ed25519-sha256; c=relaxed/relaxed;\r\n' +
    ' d=football.example.com; i=@football.example.com;\r\n' +
    ' q=dns/txt; s=brisbane; t=1528637909; h=from : to :\r\n' +
    ' subject : date : message-id : from : subject : date;\r\n' +
    ` bh=${bodyHash};\r\n b=`;
  const lines = [from, to, subject, date, id].map((line) => `${relaxedField(line)}\r\n`);
  const data = latin1(lines.join('') + relaxedField(field));
  const signature = await signData(data, { algorithm: 'ed25519-sha256', privateKey });
  assert.is(
    signature.toString('base64'),
    '/gCrinpcQOoIfuHNQIbq4pgh9kyIK3AQUdt9OdqQehSwhEIug4D11BusFa3bT3FY5OsU7ZbnKELq+eXdp1Q1Dw==',
  );
});

test('new keys are what the records say', async () => {
  const rsa = await generateKeyPair('rsa-sha256');
  assert.is(rsa.privateKey.asymmetricKeyDetails?.modulusLength, 2_048);
  assert.is(publicKeyRecord(rsa.publicKey), publicKeyRecord(rsa.privateKey));
  assert.match(publicKeyRecord(rsa.publicKey), /^v=DKIM1; k=rsa; p=MIIBIjAN[\w+/]+=*$/);
  const ed25519 = await generateKeyPair('ed25519-sha256');
  assert.match(publicKeyRecord(ed25519.publicKey), /^v=DKIM1; k=ed25519; p=[\w+/]{43}=$/);
});

test('loading dkim-signer warns nobody', () => {
  const file = join(import.meta.dirname, '../../src/mail/dkim.ts');
  const code = `await import(${JSON.stringify(file)}); console.log('loaded');`;
  const child = spawnSync(process.execPath, [...LOADER, '--input-type=module', '--eval', code], {
    cwd: import.meta.dirname,
    encoding: 'utf8',
  });
  assert.is(child.stderr, '');
  assert.is(child.stdout, 'loaded\n');
});

test.run();
