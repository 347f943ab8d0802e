// Mail that comes back, as mail programs write it: for tests of bounces and complaints.

export interface Returned {
  readonly recipient: string;
  readonly action?: string;
  readonly status?: string;
  readonly diagnostic?: string;
  /** Of the message that comes back. */
  readonly returnPath?: string;
}

const message = (lines: readonly string[]): string => `${lines.join('\r\n')}\r\n`;

/** As Postfix writes it (RFC 3464). */
export const deliveryReport = ({
  recipient,
  action = 'failed',
  status = '5.1.1',
  diagnostic = `550 5.1.1 <${recipient}>: Recipient address rejected: User unknown`,
  returnPath = 'sender@elsewhere.test',
}: Returned): string =>
  message([
    'From: MAILER-DAEMON@mx.recipient.test (Mail Delivery System)',
    'To: somebody@elsewhere.test',
    'Subject: Undelivered Mail Returned to Sender',
    'Auto-Submitted: auto-replied',
    'MIME-Version: 1.0',
    'Content-Type: multipart/report; report-type=delivery-status;',
    '\tboundary="A1B2/mx.recipient.test"',
    '',
    '--A1B2/mx.recipient.test',
    'Content-Type: text/plain; charset=us-ascii',
    '',
    'This is the mail system at host mx.recipient.test.',
    '',
    '--A1B2/mx.recipient.test',
    'Content-Type: message/delivery-status',
    '',
    'Reporting-MTA: dns; mx.recipient.test',
    'Arrival-Date: Thu, 19 Nov 2026 10:00:00 +0000 (UTC)',
    '',
    `Final-Recipient: rfc822; ${recipient}`,
    `Original-Recipient: rfc822;${recipient}`,
    `Action: ${action}`,
    `Status: ${status}`,
    `Diagnostic-Code: smtp; ${diagnostic}`,
    '',
    '--A1B2/mx.recipient.test',
    'Content-Type: message/rfc822',
    '',
    `Return-Path: <${returnPath}>`,
    'From: a@mailstead.test',
    'Subject: Hello',
    '',
    'Plain words.',
    '',
    '--A1B2/mx.recipient.test--',
  ]);

/** RFC 5965, as feedback loops send it. */
export const feedbackReport = ({
  recipient,
  returnPath = 'sender@elsewhere.test',
  type = 'abuse',
}: Pick<Returned, 'recipient' | 'returnPath'> & { readonly type?: string }): string =>
  message([
    'From: <abusedesk@provider.test>',
    'To: <abuse@elsewhere.test>',
    'Subject: FW: Hello',
    'MIME-Version: 1.0',
    'Content-Type: multipart/report; report-type=feedback-report; boundary="part1"',
    '',
    '--part1',
    'Content-Type: text/plain; charset="US-ASCII"',
    '',
    'This is an email abuse report.',
    '',
    '--part1',
    'Content-Type: message/feedback-report',
    '',
    `Feedback-Type: ${type}`,
    'User-Agent: SomeGenerator/1.0',
    'Version: 1',
    `Original-Mail-From: <${returnPath}>`,
    `Original-Rcpt-To: <${recipient}>`,
    '',
    '--part1',
    'Content-Type: message/rfc822',
    'Content-Disposition: inline',
    '',
    'From: <a@mailstead.test>',
    'Subject: Hello',
    '',
    'Plain words.',
    '--part1--',
  ]);

/** As qmail writes it: no format at all (QSBMF). */
export const qmailNotice = (recipient: string): string =>
  message([
    'From: MAILER-DAEMON@mx.recipient.test',
    'To: somebody@elsewhere.test',
    'Subject: failure notice',
    '',
    'Hi. This is the qmail-send program at mx.recipient.test.',
    "I'm afraid I wasn't able to deliver your message to the following addresses.",
    "This is a permanent error; I've given up. Sorry it didn't work out.",
    '',
    `<${recipient}>:`,
    'Sorry, no mailbox here by that name. (#5.1.1)',
    '',
    '--- Below this line is a copy of the message.',
    '',
    'Subject: Hello',
    '',
    'Plain words.',
  ]);

/** A vacation program (RFC 3834), with the null sender as it ought to. */
export const vacationReply = (from: string): string =>
  message([
    `From: ${from}`,
    'To: somebody@elsewhere.test',
    'Subject: Out of office: Hello',
    'Auto-Submitted: auto-replied (vacation)',
    '',
    'I am away until December 20th. Delivery to my desk has failed before; the following message',
    'could not be delivered: <nobody@recipient.test>: 550 5.1.1 unknown.',
  ]);
