// What mail brings, as nobody should write it: addresses, headers, reports, replies, messages that are handed in. Seeded
// rounds of support/fuzz.ts; what is held is that reading ends in time, fails only as it says, and that what we write is clean
// and reads back as it was.
import { Buffer } from 'node:buffer';
import { readFileSync } from 'node:fs';
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { formatMailbox, normalizedAddress, parseMailbox } from '../../src/mail/address.ts';
import {
  withoutForgedResults,
  writeAuthenticationResults,
} from '../../src/mail/authentication-results.ts';
import { readBase64 } from '../../src/mail/base64.ts';
import { findBounceRule, readBounceRules } from '../../src/mail/bounce-rules.ts';
import { readForwardHeader } from '../../src/mail/forward-header.ts';
import { checkHeader, encodeText, foldHeader, splitHeader } from '../../src/mail/header.ts';
import { textFromHtml } from '../../src/mail/html-text.ts';
import { readMimeTree, UnfitMessage, type MimePart } from '../../src/mail/mime-tree.ts';
import { formatReply, parseReply } from '../../src/mail/reply.ts';
import { readReport } from '../../src/mail/report.ts';
import { prepareSubmitted } from '../../src/mail/submitted.ts';
import { surveyWire, WireSurvey } from '../../src/mail/wire-survey.ts';
import { plainField, readingsOf } from '../../src/receiving/verdicts-authors.ts';
import {
  clean,
  declared,
  fuzz,
  grow,
  mutate,
  pieces,
  samples,
  staysLinear,
  wireReady,
  type Dice,
} from '../support/fuzz.ts';
import { deliveryReport, feedbackReport } from '../support/returned.ts';

const ADDRESS_PIECES = [
  ...pieces(
    'a¦bob¦"Bob"¦"a b"¦.¦..¦@¦<¦>¦<a@b.test>¦b.test¦xn--¦ ¦xn--bcher-kva.test¦bücher.test',
    '[127.0.0.1]¦:¦;¦,¦(c)¦\\¦\\"¦%2f¦=?utf-8?q?¦=?UTF-8?B?YQ==?=¦üñí¦\u3000¦\u200b',
    'b@c.test¦-',
  ),
  'a'.repeat(63),
];
const addresses = samples(['addresses-flanker'], '.txt', [
  'Bob <bob@b.test>',
  '"Smith, J." <"odd local"@sub.b.test>',
]).flatMap((file) => Buffer.from(file, 'latin1').toString().split('\n'));

test('an address that is taken is one address, written and read back as the same', async () => {
  await fuzz('addresses', 2_000, (d, say) => {
    const text = d.oneIn(3)
      ? grow(d, ADDRESS_PIECES)
      : mutate(d, d.pick(addresses), ADDRESS_PIECES);
    say(text);
    const normal = normalizedAddress(text);
    assert.is(normalizedAddress(normal), normal);
    const parsed = parseMailbox(text);
    if (!parsed.ok) return clean(parsed.problem);
    const { mailbox } = parsed;
    clean(mailbox.address);
    clean(mailbox.name);
    assert.ok(Buffer.byteLength(mailbox.local) <= 64 && Buffer.byteLength(mailbox.address) <= 254);
    assert.ok(!/[<>]/.test(mailbox.address));
    const bare = parseMailbox(mailbox.address);
    assert.ok(bare.ok && bare.mailbox.address === mailbox.address);
    const written = formatMailbox(mailbox);
    clean(written);
    const again = parseMailbox(written);
    assert.ok(again.ok, `${written} is not read`);
    assert.is(again.mailbox.address, mailbox.address);
    assert.is(formatMailbox(again.mailbox), written);
  });
  await staysLinear('addresses', 25, {
    pieces: ADDRESS_PIECES,
    read: (text) => [parseMailbox(text), normalizedAddress(text)],
  });
});

const HEADER_PIECES = [
  ...pieces(
    'Subject¦From: a@b.test\r\n¦To: ¦X-A: b\r\n¦: ¦\r\n¦\r\n ¦\r\n\t¦ \t¦\n',
    '=?UTF-8?Q?=C3=A9?=¦=?¦?=¦é¦Received: by mx.a.test; x\r\n',
    'Authentication-Results: mx.a.test; spf=pass\r\n¦(¦)¦"¦\\¦;¦mx.a.test',
    'Content-Type: multipart/mixed; boundary=b\r\n¦--b\r\n¦--b--\r\n¦\r\n\r\n¦--',
    "Content-Transfer-Encoding: base64\r\n¦name*0*=utf-8''a¦From ¦<a@b.test>¦,",
    'Message-ID: <a@b.test>\r\n¦Date: Mon, 1 Jan 2024 00:00:00 +0000\r\n¦\xc3\xa9¦\xe9',
  ),
  'x'.repeat(90),
];
const messages = samples(
  ['mime-mailparser', 'mime-mikel', 'mime-postal', 'mime-inbucket'],
  '.eml',
  [
    'From: Bob <bob@a.test>\r\nTo: x@b.test\r\nSubject: =?utf-8?q?h=C3=A9?=\r\n\r\nhi\r\n',
    'Authentication-Results: mx.a.test;\r\n spf=pass\r\nFrom: a@b.test\r\n\r\n.\r\n',
  ],
);
const message = (d: Dice): string => {
  const text = d.oneIn(4) ? grow(d, HEADER_PIECES, 40) : mutate(d, d.pick(messages), HEADER_PIECES);
  return d.oneIn(3) ? text : text.replace(/\r?\n/g, '\r\n');
};

test('a field that is let through is one field on the wire, and reads back', async () => {
  await fuzz('fields', 1_500, (d, say) => {
    const name = d.oneIn(3) ? grow(d, ['X', '-', 'Id', 'é', ':'], 5) : 'X-Any';
    const value = d.oneIn(2) ? grow(d, HEADER_PIECES, 40) : mutate(d, 'plain words', HEADER_PIECES);
    say([name, value]);
    if (checkHeader(name, value) !== null) return;
    const field = foldHeader(name, encodeText(value, { column: name.length + 2 }));
    wireReady(Buffer.from(field));
    assert.not.match(field, /[^\t\r\n\x20-\x7e]/);
    const { fields } = splitHeader(Buffer.from(`${field}\r\n`));
    assert.equal(
      fields.map((one) => one.name),
      [name],
    );
  });
  await staysLinear('fields', 20, {
    pieces: HEADER_PIECES,
    read: (text) => [
      checkHeader('X-Any', text),
      foldHeader('X-Any', encodeText(text)),
      splitHeader(Buffer.from(text, 'latin1')),
    ],
  });
});

test('the survey of the wire says the same however the bytes are cut', async () => {
  await fuzz('survey', 1_000, (d, say) => {
    const text = message(d);
    say(text);
    const bytes = Buffer.from(text, 'latin1');
    const pieces = new WireSurvey();
    for (let at = 0; at < bytes.length;) {
      const to = at + 1 + d.below(d.oneIn(2) ? 3 : 500);
      pieces.push(bytes.subarray(at, to));
      at = to;
    }
    const whole = surveyWire(bytes);
    const told = [whole.hasNul, whole.hasBareLineEnd, whole.isPlain, whole.longestLineOctets];
    assert.equal(
      [pieces.hasNul, pieces.hasBareLineEnd, pieces.isPlain, pieces.longestLineOctets],
      told,
    );
    const wire = bytes.toString('latin1');
    assert.is(whole.hasBareLineEnd, /\r(?!\n)|(?<!\r)\n/.test(wire));
    assert.is(whole.hasNul, wire.includes('\0'));
  });
});

test('forged results go, all else stays, and what is written is clean', async () => {
  await fuzz('results', 1_000, (d, say) => {
    const text = message(d);
    say(text);
    const raw = Buffer.from(text, 'latin1');
    const kept = withoutForgedResults(raw, 'mx.a.test');
    assert.ok(kept.length <= raw.length);
    assert.ok(withoutForgedResults(kept, 'mx.a.test').equals(kept));
    const field = writeAuthenticationResults(d.pick(['mx.a.test', text]), [
      { method: 'spf', result: 'pass', reason: text, properties: [['smtp.mailfrom', text]] },
    ] as Parameters<typeof writeAuthenticationResults>[1]);
    wireReady(Buffer.from(field));
    assert.ok(
      field
        .split('\r\n')
        .slice(1, -1)
        .every((line) => /^[ \t]/.test(line)),
    );
  });
  await staysLinear('results', 15, {
    pieces: HEADER_PIECES,
    read: (text) => withoutForgedResults(Buffer.from(text, 'latin1'), 'mx.a.test'),
  });
  await staysLinear('authors', 15, {
    pieces: [...ADDRESS_PIECES, 'From: ', '.xn--a-', '=?utf-8?q?=40?='],
    read: (text) => [plainField(text), readingsOf(`a@${text.slice(0, 10_000)}`)],
  });
});

const REPORT_PIECES = [
  ...HEADER_PIECES,
  ...pieces(
    'Final-Recipient: rfc822; ¦Action: failed\r\n¦Status: 5.1.1\r\n¦Diagnostic-Code: ',
    'Feedback-Type: abuse\r\n¦Original-Rcpt-To: ¦utf-8; ¦\\x{e9}¦\\x{d800}¦\\x{0}',
    'message/delivery-status¦message/feedback-report¦550 5.1.1 ¦smtp; 550-¦User unknown',
    'Return-Path: <b+x@send.a.test>\r\n¦x-failed-recipients: ¦was not delivered to',
    '>>> RCPT',
  ),
];
const reports = samples(['bounces-sisimai', 'arf-stalwart'], '.eml', [
  deliveryReport({ recipient: 'b@r.test', returnPath: 'b+x@send.a.test' }),
  feedbackReport({ recipient: 'b@r.test' }),
]);

test('a report is read or is none, and what it says can be stored and shown', async () => {
  await fuzz('reports', 600, (d, say) => {
    const text = d.oneIn(5)
      ? grow(d, REPORT_PIECES, 60)
      : mutate(d, d.pick(reports), REPORT_PIECES);
    say(text);
    const report = readReport(Buffer.from(text, 'latin1'));
    if (report === null) return;
    assert.ok(report.recipients.length <= 100 && report.returnPaths.length <= 5);
    clean(report.reporter?.replaceAll('\t', ' ') ?? null);
    for (const path of report.returnPaths) clean(path);
    for (const { address, originalAddress, diagnostic, status } of report.recipients) {
      for (const one of [address, originalAddress]) {
        // Hosts have names of their own for mailboxes, such as `bob@server`.
        clean(one);
        assert.match(one ?? 'a@b', /^[^\s<>]*@[^\s<>]+$|^".*@[^\s<>]+$/);
      }
      assert.ok((diagnostic ?? '').isWellFormed());
      assert.not.match(diagnostic ?? '', /[\0\r]/);
      assert.match(status ?? '5.0.0', /^[245]\.\d{1,3}\.\d{1,3}$/);
    }
    // A bare CR changes its meaning with the line ends around it.
    if (/\r(?!\n)/.test(text)) return;
    const unix = readReport(Buffer.from(text.replace(/\r?\n/g, '\n'), 'latin1'));
    const wire = readReport(Buffer.from(text.replace(/\r?\n/g, '\r\n'), 'latin1'));
    assert.equal(unix, wire);
  });
  const standard = 'Content-Type: multipart/report; boundary=b\r\n\r\n--b\r\nContent-Type: ';
  for (const opening of [
    '',
    `${standard}message/delivery-status\r\n\r\n`,
    `${standard}message/feedback-report\r\n\r\n`,
    'From: MAILER-DAEMON@a.test\r\nSubject: Undelivered Mail\r\n\r\n',
  ]) {
    await staysLinear(`reports ${opening.length}`, 12, {
      pieces: REPORT_PIECES,
      read: (text) => readReport(Buffer.from(opening + text, 'latin1')),
    });
  }
});

const REPLY_PIECES = pieces(
  '250 ¦550-¦550 5.1.1 ¦4.2.2¦#5.7.1¦(5.1.1)¦\r\n¦\r¦\n¦no such user¦blocked',
  'mailbox full¦\x80¦é¦\xc3\xa9¦try again¦rate limit¦spam¦listed',
);
const rules = readBounceRules(
  JSON.parse(readFileSync(new URL('../../config/bounces.json', import.meta.url), 'utf8')),
);

test('a reply is one clean line, and the rules about replies end in time', async () => {
  await fuzz('replies', 2_000, (d, say) => {
    const text = d.oneIn(2)
      ? grow(d, REPLY_PIECES)
      : mutate(d, '550-5.1.1 <x@b.test> unknown\r\n550 5.1.1 see http://b.test/', REPLY_PIECES);
    say(text);
    const reply = parseReply(text);
    if (reply === null) return;
    const line = formatReply(reply);
    clean(line);
    assert.ok(line.isWellFormed() && reply.lines.length <= 20);
    assert.is(parseReply(line)?.code, reply.code);
  });
  await staysLinear('replies', 25, {
    pieces: REPLY_PIECES,
    read: (text) => {
      const reply = parseReply(`550 ${text}`)!;
      return findBounceRule(rules, { reply, stage: 'rcpt', host: 'mx.b.test', tenantId: 't' });
    },
  });
});

const isUnfit = (error: Error): boolean => {
  clean(error.message);
  return error instanceof UnfitMessage && /^5\.\d+\.\d+$/.test(error.enhancedCode);
};
const submit = (bytes: Buffer, allowsUtf8: boolean): Buffer =>
  prepareSubmitted({
    message: bytes,
    survey: surveyWire(bytes),
    allowsUtf8,
    newMessageId: 'new',
    now: new Date(0),
    trace: { hostname: 'mx.a.test', id: 'x', isTls: true },
  }).raw;

test('a message that is handed in leaves clean, or is refused with what to fix', async () => {
  await fuzz('submitted', 700, (d, say) => {
    const text = message(d);
    say(text);
    const bytes = Buffer.from(text, 'latin1');
    let raw: Buffer | null = null;
    if (declared(() => (raw = submit(bytes, d.oneIn(2))), isUnfit) !== null) return;
    wireReady(raw!);
    const { fields } = splitHeader(raw!);
    const named = (name: string) => fields.filter((one) => one.name.toLowerCase() === name);
    for (const name of ['from', 'date', 'message-id', 'mime-version']) {
      assert.is(named(name).length, 1, name);
    }
    assert.is(named('bcc').length + named('return-path').length, 0);
    wireReady(submit(raw!, true));
  });
  await staysLinear('submitted', 15, {
    pieces: HEADER_PIECES,
    read: (text) =>
      declared(
        () => submit(Buffer.from(`From: a@b.test\r\n${text}\r\n`, 'latin1'), true),
        (error) => isUnfit(error),
      ),
  });
});

test('parts lie inside their parents, in their order', async () => {
  const look = (part: MimePart): void => {
    assert.ok(part.start <= part.bodyStart && part.bodyStart <= Math.max(part.end, part.bodyStart));
    let from = part.bodyStart;
    for (const child of part.children ?? []) {
      assert.ok(child.start >= from && child.end <= part.end, `${child.start} in ${part.start}`);
      from = child.end;
      look(child);
    }
  };
  await fuzz('parts', 800, (d, say) => {
    const text = message(d);
    say(text);
    const bytes = Buffer.from(text, 'latin1');
    declared(() => look(readMimeTree(bytes)), isUnfit);
    const head = readForwardHeader(bytes, { hostname: 'mx.a.test', traceSizeBytes: 0 });
    clean(head.subject);
    clean(head.messageId);
  });
  const base = 'Content-Type: multipart/mixed; boundary=b\r\n\r\n';
  await staysLinear('parts', 15, {
    pieces: HEADER_PIECES,
    read: (text) => declared(() => readMimeTree(Buffer.from(base + text, 'latin1')), isUnfit),
  });
  await staysLinear('forwarded', 15, {
    pieces: [...HEADER_PIECES, ...ADDRESS_PIECES],
    read: (text) =>
      readForwardHeader(Buffer.from(`From: ${text}`, 'latin1'), {
        hostname: 'mx.a.test',
        traceSizeBytes: 0,
      }),
  });
});

test('base64 is read whole or not at all, html becomes text in time', async () => {
  await fuzz('base64', 1_000, (d, say) => {
    const bytes = d.bytes(d.below(60));
    const text = d.oneIn(3) ? bytes.toString('base64url') : bytes.toString('base64');
    const faulty = mutate(d, text, ['=', '==', '\r\n', '+/', '-_']);
    say([text, faulty]);
    const whole = readBase64(text);
    assert.ok('bytes' in whole && whole.bytes.equals(bytes));
    const read = readBase64(faulty);
    if (!('bytes' in read)) return;
    const symbols = faulty
      .replace(/[ \t\r\n\f=]+/g, '')
      .replaceAll('-', '+')
      .replaceAll('_', '/');
    assert.is(read.bytes.length, Math.floor((symbols.length * 3) / 4));
  });
  await staysLinear('html', 25, {
    pieces: pieces(
      '<p>¦</p>¦<b>¦<table>¦<tr><td>¦<a href="x">¦</a>¦&amp;¦&#x¦<!--¦-->¦<script>',
      '</script>¦<¦>¦ ¦\n¦<ul><li>¦"¦\'¦=¦<br>',
    ),
    read: (text) => textFromHtml(text),
  });
});

test.run();
