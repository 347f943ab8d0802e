// Reports of ours about mail that could not be delivered: what others read in them, and that our own reader reads every
// one of them back.
import { Buffer } from 'node:buffer';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import {
  composeDsn,
  FAILURES_MAX,
  FIELDS_BYTES_MAX,
  type ComposedDsn,
  type DsnFailure,
  type DsnParts,
} from '../../src/mail/dsn-compose.ts';
import { returnedFields } from '../../src/mail/dsn-returned.ts';
import { readReport } from '../../src/mail/report.ts';
import { header, mailbox, read } from '../support/composed.ts';

const test = suite('dsn-compose');

const failure: DsnFailure = {
  finalRecipient: 'far@dest.example',
  originalRecipient: 'info@route.example',
  status: '5.1.1',
  remoteMta: 'mx.dest.example',
  reason: '550 5.1.1 <far@dest.example>: User unknown',
  lastAttemptAt: new Date(Date.UTC(2026, 0, 2, 3, 4, 6)),
};
const original = [
  'Received: from a by b; Fri, 2 Jan 2026 03:04:05 +0000',
  'From: Ann <ann@author.example>',
  'To: info@route.example',
  'Subject: Hello',
  'Message-ID: <one@author.example>',
  'X-Mailstead-Loop: 0123abc',
  '',
  'A body that nobody gets back.',
  '',
].join('\r\n');
const base: DsnParts = {
  reportingMta: 'mail.host.example',
  from: mailbox('Mail Delivery System <MAILER-DAEMON@route.example>'),
  to: mailbox('ann@author.example'),
  messageId: '<id@route.example>',
  date: new Date(Date.UTC(2026, 0, 2, 3, 5, 0)),
  boundarySeed: 'id',
  arrivedAt: new Date(Date.UTC(2026, 0, 2, 3, 4, 5)),
  original: Buffer.from(original),
  failures: [failure],
};
const make = (parts: Partial<DsnParts> = {}): ComposedDsn => composeDsn({ ...base, ...parts });

test('has the fields and parts of RFC 3464 and 6522', () => {
  const dsn = make();
  const text = dsn.raw.toString('latin1');
  assert.is(header(dsn.raw, 'Auto-Submitted'), 'auto-replied');
  assert.is(header(dsn.raw, 'In-Reply-To'), '<one@author.example>');
  assert.is(header(dsn.raw, 'To'), 'ann@author.example');
  assert.match(header(dsn.raw, 'From'), /^Mail Delivery System <MAILER-DAEMON@route\.example>$/);
  assert.match(header(dsn.raw, 'Content-Type'), /^multipart\/report; report-type=delivery-status;/);
  const status = text.slice(text.indexOf('Reporting-MTA'));
  assert.ok(
    status.startsWith(
      [
        'Reporting-MTA: dns; mail.host.example',
        'Arrival-Date: Fri, 02 Jan 2026 03:04:05 +0000',
        '',
        'Original-Recipient: rfc822; info@route.example',
        'Final-Recipient: rfc822; far@dest.example',
        'Action: failed',
        'Status: 5.1.1',
        'Remote-MTA: dns; mx.dest.example',
        'Diagnostic-Code: smtp; 550 5.1.1 <far@dest.example>: User unknown',
        'Last-Attempt-Date: Fri, 02 Jan 2026 03:04:06 +0000',
        '',
      ].join('\r\n'),
    ),
    status.slice(0, 500),
  );
  assert.match(
    text,
    /Content-Type: text\/rfc822-headers\r\nContent-Transfer-Encoding: 7bit\r\n\r\nReceived: from a/,
  );
  assert.not.match(text, /A body that nobody gets back/);
  assert.is(dsn.needsSmtpUtf8, false);
  assert.equal(make().raw, dsn.raw, 'the same bytes again');
});

test('reads back as it was written, and names the message that it is about', () => {
  assert.equal(readReport(make().raw), {
    kind: 'dsn',
    reporter: 'mail.host.example',
    returnPaths: [],
    recipients: [
      {
        address: 'far@dest.example',
        originalAddress: 'info@route.example',
        action: 'failed',
        status: '5.1.1',
        diagnostic: '550 5.1.1 <far@dest.example>: User unknown',
        stage: null,
      },
    ],
  });
  assert.equal(returnedFields(make().raw, 'X-Mailstead-Loop'), ['0123abc']);
});

test('mailparser shows the words, and the rest as parts', async () => {
  const seen = await read(make().raw);
  assert.is(seen.subject, 'Undelivered Mail Returned to Sender');
  assert.is(seen.from?.value[0]?.address, 'MAILER-DAEMON@route.example');
  assert.match(
    seen.text ?? '',
    /<far@dest\.example>: the host mx\.dest\.example said: 550 5\.1\.1/,
  );
  assert.equal(
    seen.attachments.map(({ contentType }) => contentType),
    ['text/rfc822-headers'],
  );
  // Shown as text, since it has no body of its own.
  assert.match(seen.text ?? '', /Final-Recipient: rfc822; far@dest\.example/);
  assert.match(String(seen.attachments[0]?.content), /^Received: from a[\s\S]*Subject: Hello/);
});

test('what expired without a host, and why', () => {
  const late: DsnFailure = {
    ...failure,
    status: '4.4.7',
    remoteMta: null,
    reason: 'No mail host of the recipient could be reached.',
    lastAttemptAt: null,
  };
  const dsn = make({ failures: [late] });
  const text = dsn.raw.toString('latin1');
  assert.match(text, /Diagnostic-Code: X-Mailstead; No mail host/);
  assert.not.match(text, /Remote-MTA|Last-Attempt-Date/);
  assert.is(readReport(dsn.raw)?.recipients[0]?.status, '4.4.7');
  assert.is(readReport(dsn.raw)?.recipients[0]?.action, 'failed');
  assert.match(
    make({ failures: [{ ...failure, status: null }] }).raw.toString(),
    /Status: 5\.0\.0/,
  );
});

test('UTF-8: spelled out for an author in ASCII, as it is for one who writes so (RFC 6533)', async () => {
  const failures = [
    { ...failure, finalRecipient: 'пётр@dest.example', originalRecipient: 'zoë@route.example' },
  ];
  const ascii = make({ failures });
  assert.is(ascii.needsSmtpUtf8, false);
  assert.not.match(ascii.raw.toString('latin1'), /[^\t\r\n\x20-\x7e]/);
  assert.match(
    ascii.raw.toString(),
    /Final-Recipient: utf-8; \\x\{43F\}\\x\{451\}\\x\{442\}\\x\{440\}@dest/,
  );
  const wide = make({ failures, to: mailbox('änne@author.example') });
  assert.is(wide.needsSmtpUtf8, true);
  assert.match(wide.raw.toString(), /^To: änne@author\.example$/m);
  assert.match(wide.raw.toString(), /Content-Type: message\/global-delivery-status/);
  for (const { raw } of [ascii, wide]) {
    const [only] = readReport(raw)?.recipients ?? [];
    assert.is(only?.address, 'пётр@dest.example');
    assert.is(only?.originalAddress, 'zoë@route.example');
    assert.match((await read(raw)).text ?? '', /<пётр@dest\.example>: the host/);
  }
});

test('the returned header comes back whole, whatever is in it', async () => {
  const heads: readonly (readonly [string, Buffer])[] = [
    ['text/rfc822-headers', Buffer.from(`Subject: plain\r\nX-Long: ${'x'.repeat(900)}\r\n`)],
    ['text/rfc822-headers', Buffer.from(`X-Too-Long: ${'x'.repeat(1_500)}\r\n`)],
    ['message/global-headers', Buffer.from('Subject: Grüße\r\nX-B: trailing \r\n')],
    ['text/rfc822-headers', Buffer.from('Subject: Gr\xfc\xdfe\r\n', 'latin1')],
    ['text/rfc822-headers', Buffer.from('--=_abc: x\r\n')],
    ['text/rfc822-headers', Buffer.from('Subject: ends in white \r\n')],
  ];
  for (const [type, head] of heads) {
    const { raw } = make({ original: Buffer.concat([head, Buffer.from('\r\nbody\r\n')]) });
    assert.not.match(raw.toString('latin1'), /[^\t\r\n\x20-\x7e]/);
    assert.ok(
      raw
        .toString('latin1')
        .split('\r\n')
        .every((line) => line.length <= 998),
    );
    const part = (await read(raw)).attachments.at(-1)!;
    assert.is(part.contentType, type);
    assert.is(part.content.toString('latin1').trimEnd(), head.toString('latin1').trimEnd());
  }
});

test('bounds: fields, failures, words', () => {
  const field = `X-Filler: ${'y'.repeat(60)}\r\n`;
  const huge = make({ original: Buffer.from(`${field.repeat(5_000)}\r\nbody\r\n`) });
  assert.ok(huge.raw.length < FIELDS_BYTES_MAX + 4_096, String(huge.raw.length));
  assert.match(huge.raw.toString(), /y\r\n\r\n--=_/, 'cut between two fields');
  const many = make({ failures: Array.from({ length: 300 }, () => failure) });
  assert.is(readReport(many.raw)?.recipients.length, FAILURES_MAX);
  const long = make({ failures: [{ ...failure, reason: `550 ${'w'.repeat(5_000)}` }] });
  assert.ok(
    long.raw
      .toString()
      .split('\r\n')
      .every((line) => line.length <= 998),
  );
});

test('nothing that a host says breaks out of its field', () => {
  const reason = '550 5.1.1 gone\r\nFinal-Recipient: rfc822; victim@x.example\r\n\r\n--=_end\u0000';
  const { raw } = make({ failures: [{ ...failure, reason }] });
  assert.is(readReport(raw)?.recipients.length, 1);
  assert.is(readReport(raw)?.recipients[0]?.address, 'far@dest.example');
});

test('round trip: whoever failed and why, our reader reads it back', () => {
  let seed = 20_260_102;
  const random = (below: number): number => {
    seed = (Math.imul(seed, 1_103_515_245) + 12_345) >>> 0;
    return (seed >>> 8) % below;
  };
  const pick = (alphabet: string, from: number, to: number): string =>
    Array.from({ length: from + random(to - from + 1) }, () => {
      const characters = [...alphabet];
      return characters[random(characters.length)]!;
    }).join('');
  const atoms = "abcXYZ019!#$%&'*+-/=?^_`{|}~";
  const local = (): string =>
    random(4) === 0 ? pick(`${atoms}äßпё漢`, 1, 12) : `${pick(atoms, 1, 20)}.${pick(atoms, 1, 9)}`;
  const address = (): string => mailbox(`<${local()}@${pick('abc09', 1, 20)}.example>`).address;
  for (let turn = 0; turn < 400; turn += 1) {
    const failures = Array.from({ length: 1 + random(5) }, (_, index): DsnFailure => ({
      finalRecipient: address(),
      originalRecipient: address(),
      status: `${random(2) === 0 ? 4 : 5}.${random(8)}.${random(30)}`,
      remoteMta: random(3) === 0 ? null : 'mx.dest.example',
      reason: `${random(2) === 0 ? '550 5.7.1' : '451'} ${index} ${pick('abc <>;:.,()"\'', 0, 300)}e`,
      lastAttemptAt: random(2) === 0 ? null : base.date,
    }));
    const to = mailbox(`<${address()}>`);
    const { raw } = make({ failures, to, boundarySeed: String(turn) });
    const report = readReport(raw);
    assert.equal(
      report?.recipients.map((one) => [one.address, one.originalAddress, one.action, one.status]),
      failures.map((one) => [one.finalRecipient, one.originalRecipient, 'failed', one.status]),
      `turn ${turn}`,
    );
    assert.equal(
      report?.recipients.map(({ diagnostic }) => diagnostic),
      failures.map(({ reason }) => reason.replace(/ +/g, ' ')),
      `turn ${turn}`,
    );
  }
});

test.run();
