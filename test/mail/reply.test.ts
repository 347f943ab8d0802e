// Replies as peers really write them, and what each means for a delivery.
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { Buffer } from 'node:buffer';
import { existsSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import {
  causes,
  causeTexts,
  classifyReply,
  isDeadRecipient,
  outcomeOfReply,
} from '../../src/mail/outcome.ts';
import type { Hop } from '../../src/mail/outcome.ts';
import {
  formatReply,
  isPermanent,
  isTransient,
  parseReply,
  replyCharsMax,
  replyLineCharsMax,
  replyLinesMax,
} from '../../src/mail/reply.ts';
import type { Reply, Stage } from '../../src/mail/reply.ts';

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));

function reply(raw: string): Reply {
  const parsed = parseReply(raw);
  if (parsed === null) throw new Error(`no reply: ${raw}`);
  return parsed;
}

test('reads code, enhanced status code and text', () => {
  assert.equal(reply('250 2.0.0 Ok: queued as 12345'), {
    code: 250,
    enhanced: '2.0.0',
    text: 'Ok: queued as 12345',
    lines: ['250 2.0.0 Ok: queued as 12345'],
  });
  assert.equal(reply('550 No such user\r\n'), {
    code: 550,
    enhanced: null,
    text: 'No such user',
    lines: ['550 No such user'],
  });
  assert.is(reply('250').text, '');
  assert.is(reply('250-').code, 250);
  assert.is(reply('550 5.1.1').enhanced, '5.1.1');
  assert.is(reply('550 5.1.1').text, '');
  assert.is(reply('550 #5.1.1 unknown').enhanced, '5.1.1');
  assert.is(reply('550 [5.1.1] unknown').text, 'unknown');
  assert.is(reply('550 5.7.1: refused').text, 'refused');
  // Not every number with dots is a status code.
  assert.is(reply('550 10.0.0.1 is listed').enhanced, null);
  assert.is(reply('550 5.1.1.1 is listed').enhanced, null);
  assert.is(reply('550 1.5.1 x').enhanced, null);
});

test('joins the lines of a reply, with CRLF, LF or CR', () => {
  const raw =
    '550-5.1.1 The email account that you tried to reach does not exist. Please try\r\n' +
    "550-5.1.1 double-checking the recipient's email address for typos.\r\n550 5.1.1  https://x.example";
  for (const text of [raw, raw.replaceAll('\r\n', '\n'), raw.replaceAll('\r\n', '\r')]) {
    const parsed = reply(text);
    assert.is(parsed.code, 550);
    assert.is(parsed.enhanced, '5.1.1');
    assert.is(
      parsed.text,
      'The email account that you tried to reach does not exist. Please try ' +
        "double-checking the recipient's email address for typos. https://x.example",
    );
    assert.is(parsed.lines.length, 3);
  }
  assert.is(
    reply('452-one\r\ntwo without a code\r\n452 three').text,
    'one two without a code three',
  );
  assert.is(reply('250-a\r\n550 b').code, 550);
  assert.is(reply('550-5.1.1 a\r\n550 b').enhanced, '5.1.1');
});

test('is null without a code', () => {
  for (const raw of [
    '',
    ' ',
    '\r\n',
    'HTTP/1.1 400',
    '99 x',
    '650 x',
    '150 x',
    '2500 x',
    '55O x',
  ]) {
    assert.is(parseReply(raw), null, raw);
  }
});

test('is safe to store and show: octets, controls and length', () => {
  assert.is(
    reply(Buffer.from('550 Empfänger unbekannt').toString('latin1')).text,
    'Empfänger unbekannt',
  );
  assert.is(reply('550 Empf\xe4nger').text, 'Empfänger');
  assert.is(reply('550 日本').text, '日本');
  assert.is(reply('550 a\u0000b\u001b[31mc\u0085d\ud800').text, 'a?b?[31mc?d\ufffd');
  const long = reply(`550 ${'x'.repeat(100_000)}`);
  assert.is(long.text.length, replyLineCharsMax - 4);
  const many = reply('550-x\r\n'.repeat(10_000));
  assert.is(many.lines.length, replyLinesMax);
  const both = reply(`550-${'y'.repeat(900)}\r\n`.repeat(100));
  assert.ok(both.lines.join('').length <= replyCharsMax);
});

test('formats in one line and knows its class', () => {
  assert.is(formatReply(reply('550-5.1.1 a\r\n550 5.1.1 b')), '550 5.1.1 a b');
  assert.is(formatReply(reply('421')), '421');
  assert.ok(isPermanent(reply('550 x')) && !isTransient(reply('550 x')));
  assert.ok(isTransient(reply('450 x')) && !isPermanent(reply('450 x')));
  assert.ok(!isPermanent(reply('250 x')) && !isTransient(reply('354 x')));
});

type Row = [stage: Stage, verdict: 'transient' | 'permanent' | 'dead', raw: string];
// `dead` is permanent and proves that the recipient is gone.
const table: readonly Row[] = [
  // 4yz at every stage.
  [
    'rcpt',
    'transient',
    '450 4.2.0 <a@x.example>: Recipient address rejected: Greylisted, see https://x.example',
  ],
  ['rcpt', 'transient', '451 4.7.1 Greylisting in action, please come back later'],
  ['rcpt', 'transient', "452 4.2.2 The recipient's inbox is out of storage space."],
  ['rcpt', 'transient', '450 4.1.1 <a@x.example>: Recipient address rejected: unverified address'],
  ['rcpt', 'transient', '451 5.7.1 mixed classes: the code decides'],
  ['mail', 'transient', '452 4.3.1 Insufficient system storage'],
  ['mail', 'transient', '451 4.1.8 Domain of sender address does not resolve'],
  [
    'dot',
    'transient',
    '421 4.7.0 [TSS04] Messages from 192.0.2.1 temporarily deferred due to unexpected volume',
  ],
  [
    'dot',
    'transient',
    '421-4.7.28 Our system has detected an unusual rate of unsolicited mail\r\n421 4.7.28 gsmtp',
  ],
  ['dot', 'transient', '451 4.3.0 Error: queue file write error'],
  ['data', 'transient', '421 Service not available, closing transmission channel'],
  ['greeting', 'transient', '421 Too many connections'],
  // A 5yz before MAIL is about the lane, never about the recipient.
  [
    'greeting',
    'transient',
    '554 5.7.1 Service unavailable; Client host [192.0.2.1] blocked using zen.dnsbl.example',
  ],
  ['greeting', 'transient', '554 mx.x.example ESMTP not accepting messages'],
  ['greeting', 'transient', '521 5.3.2 Server does not accept mail'],
  ['ehlo', 'transient', '550 5.7.1 Bad HELO'],
  ['ehlo', 'transient', '502 Command not implemented'],
  ['tls', 'transient', '554 5.7.3 Unable to initialize security subsystem'],
  ['auth', 'transient', '535 5.7.8 Authentication credentials invalid'],
  // TLS wanted: another connection may have it.
  ['mail', 'transient', '530 5.7.0 Must issue a STARTTLS command first'],
  ['mail', 'transient', '538 5.7.10 STARTTLS is required to send mail'],
  ['mail', 'permanent', '530 5.7.1 Client was not authenticated'],
  // Full mailboxes, whatever the code.
  ['rcpt', 'transient', '552 5.2.2 <a@x.example>: Recipient address rejected: Mailbox over quota'],
  ['rcpt', 'transient', '550 5.2.2 <a@x.example>... Mailbox Full'],
  ['rcpt', 'transient', '552 Requested mail action aborted: exceeded storage allocation'],
  ['rcpt', 'transient', '554 5.0.0 Quota exceeded (mailbox for user is full)'],
  ['rcpt', 'transient', '552 5.1.1 mailbox is full'],
  ['rcpt', 'transient', '550 User a@x.example has exceeded their storage quota'],
  ['rcpt', 'transient', '552 too many recipients'],
  ['rcpt', 'transient', '552 5.5.3 Too many recipients'],
  ['dot', 'transient', '552 user is over quota'],
  [
    'rcpt',
    'permanent',
    '552-5.2.2 The email account that you tried to reach is over quota and inactive. 552 5.2.2 OverQuotaPerm',
  ],
  ['rcpt', 'transient', '550 5.0.0 Mail system full'],
  ['mail', 'transient', '554 5.3.1 no room'],
  // Too large is not too full.
  ['mail', 'permanent', '552 5.3.4 Message size exceeds fixed limit'],
  ['dot', 'permanent', '552 5.2.3 Message size exceeds fixed maximum message size (10485760)'],
  ['rcpt', 'permanent', '552 message size exceeds the limit'],
  [
    'dot',
    'permanent',
    '552-5.7.0 This message was blocked because its content presents a potential\r\n552 5.7.0 security issue.',
  ],
  // 5yz that says "later".
  [
    'rcpt',
    'transient',
    '550 5.7.1 <a@x.example>: Recipient address rejected: Greylisted for 5 minutes',
  ],
  ['rcpt', 'transient', '550 5.7.1 User a@x.example temporary locked. Please try again later!'],
  ['rcpt', 'transient', '550 The domain is currently suspended. Try later.'],
  // The recipient does not exist.
  [
    'rcpt',
    'dead',
    '550-5.1.1 The email account that you tried to reach does not exist.\r\n550 5.1.1 NoSuchUser gsmtp',
  ],
  [
    'rcpt',
    'dead',
    '550 5.1.1 <a@x.example>: Recipient address rejected: User unknown in virtual mailbox table',
  ],
  [
    'rcpt',
    'dead',
    '550 5.1.10 RESOLVER.ADR.RecipientNotFound; Recipient a@x.example not found by SMTP address lookup',
  ],
  ['rcpt', 'dead', '550 5.2.1 The email account that you tried to reach is disabled.'],
  ['rcpt', 'dead', '550 5.1.6 recipient no longer on server'],
  ['rcpt', 'dead', '550 a@x.example... No such user'],
  ['rcpt', 'dead', '550 Requested action not taken: mailbox unavailable or account does not exist'],
  ['rcpt', 'dead', '553 sorry, no mailbox here by that name'],
  ['rcpt', 'dead', '550 5.1.0 Address rejected: unknown user'],
  ['rcpt', 'dead', '550 Unrouteable address'],
  // Final, but no proof about the recipient.
  ['rcpt', 'permanent', '550 5.7.1 Unable to relay for a@x.example'],
  ['rcpt', 'permanent', '550 relay not permitted'],
  ['rcpt', 'permanent', '550 5.1.1 <a@x.example>: your address is blocked'],
  ['rcpt', 'permanent', '550 5.1.1 <a@x.example>: 192.0.2.1 is on a black list'],
  ['rcpt', 'permanent', '550 5.1.1 Blocked - see https://lookup.example'],
  ['rcpt', 'permanent', '550 5.1.1 recipient rejected: poor sending history'],
  ['rcpt', 'permanent', '550 Invalid recipient for a sender without SPF'],
  ['rcpt', 'permanent', '550 5.4.1 Recipient address rejected: Access denied.'],
  [
    'rcpt',
    'permanent',
    '550 5.7.1 Recipient unknown or blocked: your host is listed at zen.dnsbl.example',
  ],
  ['rcpt', 'permanent', '554 5.7.1 <a@x.example>: Recipient address rejected: user unknown'],
  ['rcpt', 'permanent', '556 5.7.1 policy'],
  ['rcpt', 'permanent', '501 5.1.3 Bad recipient address syntax'],
  ['mail', 'permanent', '550 5.1.8 Domain of sender address example.org does not exist'],
  ['mail', 'permanent', '550 5.7.1 No such user: sender address must exist'],
  [
    'dot',
    'permanent',
    '550-5.7.26 Unauthenticated email from x.example is not accepted due to DMARC policy\r\n550 5.7.26 gsmtp',
  ],
  ['dot', 'permanent', '554 5.7.1 Message rejected as spam'],
  [
    'dot',
    'permanent',
    '550 5.7.515 Access denied, sending domain does not meet the required authentication level',
  ],
  ['dot', 'permanent', '550 5.1.1 User unknown, said after the message'],
  ['data', 'permanent', '554 5.5.1 Error: no valid recipients'],
  ['dot', 'permanent', '554 5.4.6 Hop count exceeded - possible mail loop'],
  ['dot', 'permanent', '550 5.6.0 improperly-formatted binary content'],
  // Nonsense is deferred.
  ['rcpt', 'transient', '354 go ahead'],
  ['data', 'transient', '250 ok'],
  ['rcpt', 'transient', '221 bye'],
];

test('judges real-world replies', () => {
  assert.ok(table.length >= 40);
  for (const [stage, verdict, raw] of table) {
    const parsed = reply(raw);
    const seen = classifyReply(parsed, stage);
    assert.is(seen, verdict === 'dead' ? 'permanent' : verdict, `${stage}: ${raw}`);
    assert.is(isDeadRecipient(parsed, stage), verdict === 'dead', `${stage}: ${raw}`);
  }
});

const via: Hop = { host: 'mx.x.example', address: '192.0.2.1', port: 25, tls: null };

test('turns replies into outcomes', () => {
  const of = (raw: string, stage: Stage): unknown => {
    const { kind, ...rest } = outcomeOfReply({ reply: reply(raw), stage, via });
    return 'cause' in rest ? `${kind} ${rest.cause}` : kind;
  };
  assert.is(of('250 2.0.0 queued', 'dot'), 'delivered');
  assert.is(of('250 2.1.5 ok', 'rcpt'), 'deferred protocol_error');
  assert.is(of('354 go on', 'dot'), 'deferred protocol_error');
  assert.is(of('450 later', 'rcpt'), 'deferred peer_transient');
  assert.is(of('550 5.1.1 no', 'rcpt'), 'bounced no_mailbox');
  assert.is(of('554 no', 'greeting'), 'deferred greeting_refused');
  assert.is(of('550 no', 'ehlo'), 'deferred greeting_refused');
  assert.is(of('454 no', 'tls'), 'deferred tls_failed');
  assert.is(of('535 no', 'auth'), 'deferred auth_failed');
});

test('every cause is a short code with a sentence', () => {
  for (const cause of causes) {
    assert.match(cause, /^[a-z][a-z0-9_]+$/);
    assert.match(causeTexts[cause], /^[A-Z].*\.$/);
  }
});

test('agrees with the replies of the sisimai corpus about dead recipients and full mailboxes', () => {
  const file = `${corpora}/bounces-sisimai/reason-strings.json`;
  if (!existsSync(file)) {
    console.log(`skipped: no corpus at ${file}`);
    return;
  }
  const entries = JSON.parse(readFileSync(file, 'utf8')) as { text: string; reason: string }[];
  let checked = 0;
  for (const { text, reason } of entries) {
    const parsed = parseReply(text.replace(/^[:#\s]+/, ''));
    if (parsed === null) continue;
    checked += 1;
    const verdict = classifyReply(parsed, 'rcpt');
    if (parsed.code < 500) assert.is(verdict, 'transient', text);
    if (reason === 'userunknown') assert.is(verdict, 'permanent', text);
    if (reason === 'mailboxfull') assert.is(verdict, 'transient', text);
    const isAboutUs = /auth|spam|blocked|reputation|policy|relaying|ptr|rfc|virus|size|big/.test(
      reason,
    );
    if (isAboutUs) assert.is(isDeadRecipient(parsed, 'rcpt'), false, text);
  }
  console.log(`sisimai: ${checked} of ${entries.length} texts are replies, all agree`);
  assert.ok(checked > 40);
});

test('is fast on hostile text', () => {
  // Bounded by replyCharsMax; a backtracking pattern would not come back at all.
  for (const part of [
    'a',
    'try ',
    'size ',
    'mailbox ',
    'user ',
    'exceeded a ',
    'no ',
    '5.1.1 ',
    '-',
    ' ',
  ]) {
    const parsed = reply(`550-${part.repeat(2_000)}\r\n`.repeat(30));
    assert.is(typeof classifyReply(parsed, 'rcpt'), 'string');
    assert.is(typeof isDeadRecipient(parsed, 'rcpt'), 'boolean');
  }
});

test.run();
