// Bounces in the words of programs that have no format for them, and mail that only looks like one.
import { Buffer } from 'node:buffer';
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { readReport, type ReportedRecipient } from '../../src/mail/report.ts';
import { qmailNotice, vacationReply } from '../support/returned.ts';

const mail = (header: readonly string[], body: readonly string[]): string =>
  [...header, '', ...body, ''].join('\r\n');
const daemon = (subject: string): string[] => [
  'From: Mail Delivery Subsystem <MAILER-DAEMON@mx.b.test>',
  'To: b+abc@send.a.test',
  `Subject: ${subject}`,
];

const REFUSALS = [
  'This is the mail system at host mx.b.test.',
  '',
  'The following message could not be delivered to one or more recipients:',
  '',
  '<a@r.test>:',
  '192.0.2.25 does not like recipient.',
  'Remote host said: 552 5.2.2 Mailbox full',
  '',
  '<b@r.test>:',
  'Remote host said: 550 5.7.1 Your server is blocked',
  'It was the answer after MAIL FROM.',
];

test('of several recipients each has its own reason', () => {
  const report = readReport(Buffer.from(mail(daemon('Undelivered Mail'), REFUSALS)));
  assert.equal(
    report?.recipients.map(({ address, status, stage }) => [address, status, stage]),
    [
      ['a@r.test', '5.2.2', 'rcpt'],
      ['b@r.test', '5.7.1', 'mail'],
    ],
  );
});

test('the words beside a report say what its fields leave out', () => {
  const report = (fields: readonly string[]): ReportedRecipient | undefined =>
    readReport(
      Buffer.from(
        mail(
          [...daemon('x'), 'Content-Type: multipart/report; boundary=b'],
          ['--b', '', '<b@r.test>: 550 5.7.26 checks failed (in reply to end of DATA command)']
            .concat(['--b', 'Content-Type: message/delivery-status', '', 'Reporting-MTA: dns; m'])
            .concat(['', 'Final-Recipient: rfc822; b@r.test', 'Action: failed', ...fields])
            .concat(['', '--b--']),
        ),
      ),
    )?.recipients[0];
  const bare = report(['Status: 5.0.0']);
  assert.match(bare?.diagnostic ?? '', /^550 5\.7\.26 checks failed/);
  assert.is(bare?.stage, 'dot');
  const full = report(['Status: 5.1.1', 'Diagnostic-Code: smtp; 550 no user']);
  assert.is(full?.diagnostic, '550 no user');
  assert.is(full?.stage, 'dot');
});

test('fields of a report that stand in the text, below an encoded subject', () => {
  const header = [...daemon('=?utf-8?Q?Delivery_Status_Notification_=28Failure=29?=')];
  const text = ['An error occurred while trying to deliver the mail:', 'b@r.test', ''];
  const fields = ['Final-Recipient: rfc822; b@r.test', 'Action: failed', 'Status: 5.2.1'];
  const report = readReport(
    Buffer.from(mail(header, [...text, 'Reporting-MTA: dsn; m.test', '', ...fields])),
  );
  assert.is(report?.recipients[0]?.status, '5.2.1');
});

const NOTICES: readonly (readonly [string, string, Partial<ReportedRecipient>])[] = [
  ['qmail', qmailNotice('b@r.test'), { address: 'b@r.test', action: 'failed', status: '5.1.1' }],
  [
    'Exim',
    mail(
      [
        ...daemon('Mail delivery failed: returning message to sender'),
        'X-Failed-Recipients: b@r.test',
      ],
      [
        'This message was created automatically by mail delivery software.',
        '',
        'A message that you sent could not be delivered to one or more of its',
        'recipients. This is a permanent error. The following address(es) failed:',
        '',
        '  b@r.test',
        '    host mx.r.test [192.0.2.1]',
        '    SMTP error from remote mail server after RCPT TO:<b@r.test>:',
        '    550 5.1.1 <b@r.test>: Recipient address rejected: User unknown',
        '',
        '------ This is a copy of the message, including all the headers. ------',
        '',
        'Return-path: <a@a.test>',
      ],
    ),
    {
      address: 'b@r.test',
      action: 'failed',
      status: '5.1.1',
      diagnostic: '550 5.1.1 <b@r.test>: Recipient address rejected: User unknown',
    },
  ],
  [
    'Exim, still trying',
    mail(daemon('Warning: message 1abc delayed 24 hours'), [
      'This message was created automatically by mail delivery software.',
      'A message that you sent has not yet been delivered to one or more of its',
      'recipients after more than 24 hours on the queue on mx.b.test.',
      '',
      '  b@r.test',
      '    Delay reason: host mx.r.test: 450 4.7.1 try later',
      '',
      'No action is required on your part. Delivery attempts will continue.',
    ]),
    { address: 'b@r.test', action: 'delayed', status: '4.7.1' },
  ],
  [
    'Postfix without a report part',
    mail(daemon('Undelivered Mail Returned to Sender'), [
      'This is the mail system at host mx.b.test.',
      '',
      "I'm sorry to have to inform you that your message could not",
      "be delivered to one or more recipients. It's attached below.",
      '',
      '<b@r.test>: host mx.r.test[192.0.2.1] said: 550 5.1.1 No such user',
      '    (in reply to RCPT TO command)',
    ]),
    {
      address: 'b@r.test',
      action: 'failed',
      diagnostic: '550 5.1.1 No such user (in reply to RCPT TO command)',
    },
  ],
  [
    'Sendmail of long ago',
    mail(daemon('Returned mail: User unknown'), [
      '   ----- Transcript of session follows -----',
      '... while talking to mx.r.test.:',
      '>>> RCPT To:<b@r.test>',
      '<<< 550 5.1.1 <b@r.test>... User unknown',
      '550 <b@r.test>... User unknown',
      '',
      '   ----- Unsent message follows -----',
      'Received: by mx.b.test; now',
      'To: c@r.test',
    ]),
    { address: 'b@r.test', action: 'failed' },
  ],
  [
    'Exchange',
    mail(
      [
        'From: System Administrator <postmaster@b.test>',
        'To: a@a.test',
        'Subject: Undeliverable: Hello',
      ],
      [
        'Your message',
        '',
        '  To:      b@r.test',
        '  Subject: Hello',
        '',
        'did not reach the following recipient(s):',
        '',
        'b@r.test on Thu, 19 Nov 2026 10:00:00 -0000',
        '    The recipient name is not recognized',
      ],
    ),
    { address: 'b@r.test', action: 'failed' },
  ],
  [
    'Gmail',
    mail(
      [
        'From: Mail Delivery Subsystem <mailer-daemon@googlemail.com>',
        'To: a@a.test',
        'X-Failed-Recipients: b@r.test',
        'Subject: Delivery Status Notification (Failure)',
      ],
      [
        'Delivery to the following recipient failed permanently:',
        '',
        '     b@r.test',
        '',
        'The error that the other server returned was:',
        '550 5.1.1 <b@r.test>... User Unknown',
        '',
        '----- Original message -----',
      ],
    ),
    { address: 'b@r.test', action: 'failed', status: '5.1.1' },
  ],
  [
    'Yahoo',
    mail(
      ['From: MAILER-DAEMON@yahoo.com', 'To: a@a.test', 'Subject: Failure Notice'],
      [
        'Sorry, we were unable to deliver your message to the following address.',
        '',
        '<b@r.test>:',
        'Remote host said:',
        '550 5.2.2 <b@r.test>... Mailbox Full',
        '[RCPT_TO]',
        '',
        '--- Below this line is a copy of the message.',
      ],
    ),
    { address: 'b@r.test', action: 'failed', status: '5.2.2' },
  ],
  [
    'HTML only',
    mail(
      [...daemon('Undeliverable: Hello'), 'Content-Type: text/html'],
      [
        '<html><body><p>Your message to <b>b@r.test</b> could not be delivered.</p>',
        '<p>550 5.1.1 User unknown</p></body></html>',
      ],
    ),
    { address: 'b@r.test', action: 'failed', status: '5.1.1' },
  ],
];
for (const [name, raw, expected] of NOTICES) {
  test(`in words: ${name}`, () => {
    const report = readReport(Buffer.from(raw));
    assert.is(report?.recipients.length, 1);
    const seen = report!.recipients[0]!;
    for (const [key, value] of Object.entries(expected)) {
      assert.is(seen[key as keyof ReportedRecipient], value, key);
    }
  });
}

const NO_REPORTS: readonly (readonly [string, string])[] = [
  ['a vacation reply', vacationReply('b@r.test')],
  ['a vacation reply in the name of a postmaster', vacationReply('postmaster@r.test')],
  [
    'a person who answers and quotes a bounce',
    mail(
      ['From: Bea <b@r.test>', 'Subject: Re: Hello'],
      [
        'Why did I get this?',
        '> This is the mail system at host mx.b.test.',
        '> <c@r.test>: 550 5.1.1 No such user',
      ],
    ),
  ],
  [
    'a receipt of having read (RFC 8098)',
    mail(
      ['From: b@r.test', 'Subject: Read: Hello', 'Content-Type: multipart/report; boundary=b'],
      [
        '--b',
        'Content-Type: text/plain',
        '',
        'Your message was read.',
        '--b',
        'Content-Type: message/disposition-notification',
        '',
        'Final-Recipient: rfc822; b@r.test',
        'Disposition: manual-action/MDN-sent-manually; displayed',
        '--b--',
      ],
    ),
  ],
  [
    'a newsletter',
    mail(['From: News <news@b.test>', 'Subject: Failed states'], ['User unknown: <b@r.test>']),
  ],
  ['nothing', ''],
  ['no header', 'hello'],
  ['only a header', 'Subject: x\r\n\r\n'],
];
for (const [name, raw] of NO_REPORTS) {
  test(`no report: ${name}`, () => {
    assert.is(readReport(Buffer.from(raw)), null);
  });
}

test.run();
