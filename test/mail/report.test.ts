// Reports that come back by mail, as programs write them and as nobody should; and what they say about one delivery.
import { Buffer } from 'node:buffer';
import { existsSync, readdirSync, readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { test } from 'uvu';
import * as assert from 'uvu/assert';
import { readBounceRules } from '../../src/mail/bounce-rules.ts';
import { readReport, type Report, type ReportedRecipient } from '../../src/mail/report.ts';
import { verdictOfReport } from '../../src/mail/report-verdict.ts';
import { deliveryReport, feedbackReport } from '../support/returned.ts';

const corpora =
  process.env['MAILSTEAD_CORPORA'] ??
  fileURLToPath(new URL('../../../shared/corpora', import.meta.url));

const read = (raw: string): Report | null => readReport(Buffer.from(raw));
const only = (raw: string): ReportedRecipient => {
  const report = read(raw);
  assert.is(report?.recipients.length, 1, raw.slice(0, 300));
  return report!.recipients[0]!;
};
const mail = (header: readonly string[], body: readonly string[]): string =>
  [...header, '', ...body, ''].join('\r\n');
const daemon = (subject: string): string[] => [
  'From: Mail Delivery Subsystem <MAILER-DAEMON@mx.b.test>',
  'To: b+abc@send.a.test',
  `Subject: ${subject}`,
];

test('RFC 3464: who, what, why, and who says so', () => {
  const report = read(deliveryReport({ recipient: 'b@r.test', returnPath: 'b+x@send.a.test' }));
  assert.equal(report, {
    kind: 'dsn',
    reporter: 'mx.recipient.test',
    returnPaths: ['b+x@send.a.test'],
    recipients: [
      {
        address: 'b@r.test',
        originalAddress: 'b@r.test',
        action: 'failed',
        status: '5.1.1',
        diagnostic: '550 5.1.1 <b@r.test>: Recipient address rejected: User unknown',
        stage: null,
      },
    ],
  });
  for (const action of ['delayed', 'delivered', 'relayed', 'expanded'] as const) {
    assert.is(only(deliveryReport({ recipient: 'b@r.test', action })).action, action);
  }
});

const standard = (fields: readonly string[], part: readonly string[] = []): string =>
  mail(
    [...daemon('x'), 'Content-Type: multipart/report; boundary=b'],
    ['--b', 'Content-Type: message/delivery-status', ...part, '', ...fields, '', '--b--'],
  );

test('RFC 3464 as it is really written', () => {
  // No blank line between the groups, folds, comments, brackets, other types of addresses.
  const folded = only(
    standard([
      'Reporting-MTA: dns; mx.b.test',
      'Original-Recipient: rfc822;<A@r.test>',
      'Final-Recipient: X400; /PN=b/',
      'Action: failed (bad destination mailbox)',
      'Status: 5.1.1 (bad destination mailbox)',
      'Diagnostic-Code: smtp; 550-No such',
      '\tuser here',
    ]),
  );
  assert.equal(folded, {
    address: null,
    originalAddress: 'A@r.test',
    action: 'failed',
    status: '5.1.1',
    diagnostic: '550-No such user here',
    stage: null,
  });
  // No action: the status says it.
  const actionOf = (...fields: string[]): string | undefined =>
    read(standard(['Reporting-MTA: dns; x', '', 'Final-Recipient: rfc822; b@r.test', ...fields]))
      ?.recipients[0]?.action;
  assert.is(actionOf('Status: 5.0.0'), 'failed');
  assert.is(actionOf('Status: 4.4.7'), 'delayed');
  assert.is(actionOf('Status: 2.0.0'), 'delivered');
  assert.is(actionOf('Diagnostic-Code: smtp; 550 no'), 'failed');
  assert.is(actionOf('Action: failed', 'Status: 4.4.7'), 'failed', 'given up');
  assert.is(actionOf(), undefined, 'nothing tells');
  // Several recipients, one without the blank line before it.
  const several = read(
    standard([
      'Final-Recipient: rfc822; a@r.test',
      'Action: delayed',
      'Final-Recipient: rfc822; b@r.test',
      'Action: failed',
      '',
      'Final-Recipient: rfc822; c@r.test',
      'Action: delivered',
    ]),
  );
  assert.equal(
    several?.recipients.map(({ address, action }) => [address, action]),
    [
      ['a@r.test', 'delayed'],
      ['b@r.test', 'failed'],
      ['c@r.test', 'delivered'],
    ],
  );
  // Encoded, and with bare line ends.
  const fields = 'Final-Recipient: rfc822; b@r.test\nAction: failed\nStatus: 5.1.1\n';
  const encoded = standard(
    [Buffer.from(fields).toString('base64')],
    ['Content-Transfer-Encoding: base64'],
  );
  assert.is(only(encoded).status, '5.1.1');
  assert.is(only(encoded.replaceAll('\r\n', '\n')).address, 'b@r.test');
  // Inside of another multipart, and a type for addresses beyond ASCII (RFC 6533).
  const nested = mail(
    [...daemon('x'), 'Content-Type: multipart/mixed; boundary=o'],
    [
      '--o',
      'Content-Type: multipart/report; boundary=b',
      '',
      '--b',
      'Content-Type: message/global-delivery-status',
      '',
      'Final-Recipient: utf-8; jörg@r.test',
      'Action: failed',
      '',
      '--b--',
      '--o--',
    ],
  );
  assert.is(only(nested).address, 'jörg@r.test');
  const spell = (local: string): string | null => only(nested.replace('jörg', local)).address;
  assert.is(spell('j\\x{F6}rg'), 'jörg@r.test');
  assert.is(spell('\\x{1F600}\\x{10FFFF}'), '\u{1f600}\u{10ffff}@r.test');
  assert.is(spell('a\\x{0}\\x{D800}b'), 'a?\ufffdb@r.test');
});

test('the report of the message inside is not ours', () => {
  const inner = deliveryReport({ recipient: 'inner@r.test' });
  const outer = mail(
    ['From: a@b.test', 'Subject: Fwd', 'Content-Type: multipart/mixed; boundary=o'],
    [
      '--o',
      'Content-Type: text/plain',
      '',
      'See this.',
      '--o',
      'Content-Type: message/rfc822',
      '',
      inner,
      '--o--',
    ],
  );
  assert.is(read(outer), null);
});

test('RFC 5965', () => {
  const report = read(feedbackReport({ recipient: 'b@r.test', returnPath: 'b+x@send.a.test' }));
  assert.equal(
    [
      report?.kind,
      report?.kind === 'arf' && report.feedbackType,
      report?.returnPaths,
      report?.reporter,
    ],
    ['arf', 'abuse', ['b+x@send.a.test'], 'SomeGenerator/1.0'],
  );
  assert.is(read(feedbackReport({ recipient: 'b@r.test', type: 'Not-Spam' }))?.kind, 'arf');
});

test('hostile messages end, and what is taken from them is bounded and can be stored', () => {
  const status = (body: string): Buffer => Buffer.from(standard([body]));
  const huge = [
    status(`Final-Recipient: rfc822; b@r.test\r\nStatus: 5.1.1\r\n\r\n`.repeat(20_000)),
    status(`Final-Recipient: rfc822; ${'a'.repeat(300_000)}@r.test\r\nStatus: 5.1.1`),
    status(
      `Final-Recipient: rfc822; b@r.test\r\nStatus: 5.1.1\r\nDiagnostic-Code: ${'x \r\n '.repeat(60_000)}`,
    ),
    Buffer.from(
      mail([...daemon('failure notice'), 'Content-Type: text/html'], ['<a'.repeat(200_000)]),
    ),
    Buffer.from(mail(daemon('failure notice'), [`user ${'user '.repeat(50_000)}`])),
    Buffer.from(
      mail(
        daemon('failure notice'),
        Array.from({ length: 100_000 }, (_, n) => `<u${n}@r.test>: unknown`),
      ),
    ),
    Buffer.from(
      mail(
        [...daemon('x'), 'Content-Type: multipart/report; boundary=b'],
        Array.from(
          { length: 5_000 },
          () => '--b\r\nContent-Type: multipart/report; boundary=b\r\n',
        ),
      ),
    ),
    Buffer.alloc(3_000_000, 'Subject: \r\n '),
    Buffer.from(Array.from({ length: 100_000 }, (_, n) => (n * 7919) % 256)),
  ];
  for (const raw of huge) {
    const report = readReport(raw);
    for (const { address, diagnostic } of report?.recipients ?? []) {
      assert.ok((address?.length ?? 0) <= 320);
      assert.ok((diagnostic?.length ?? 0) <= 2_000);
    }
    assert.ok((report?.recipients.length ?? 0) <= 100);
  }
  const nul = Buffer.from(
    'Final-Recipient: rfc822; b@r.test\r\nStatus: 5.1.1\r\nDiagnostic-Code: smtp; 550 a\0b\r\n',
  );
  const raw = standard([nul.toString('base64')], ['Content-Transfer-Encoding: base64']);
  assert.is(only(raw).diagnostic, '550 a?b');
});

test('a report cut anywhere is read or not, and never throws', () => {
  const whole = Buffer.from(deliveryReport({ recipient: 'b@r.test' }));
  let reports = 0;
  for (let end = 0; end <= whole.length; end += 7) {
    if (readReport(whole.subarray(0, end)) !== null) reports += 1;
  }
  assert.ok(reports > 0);
});

const about = {
  recipient: 'B@r.test',
  tenantId: 'one',
  rules: readBounceRules({
    rules: [
      {
        name: 'x',
        text: 'gone fishing',
        verdict: 'permanent',
        cause: 'no_mailbox',
        example: '550 gone fishing',
      },
    ],
  }),
};
const verdict = (given: Parameters<typeof deliveryReport>[0]): string => {
  const seen = verdictOfReport(read(deliveryReport(given))!, about);
  return seen?.kind === 'failed'
    ? `${seen.cause}${seen.isDead ? ' dead' : ''}`
    : String(seen?.kind);
};

test('what a report says about one delivery', () => {
  const recipient = 'b@R.test';
  assert.is(verdict({ recipient }), 'no_mailbox dead');
  assert.is(verdict({ recipient: 'other@r.test' }), 'no_mailbox', 'somebody behind an alias');
  assert.is(verdict({ recipient, status: '5.1.1', diagnostic: '550 no' }), 'no_mailbox dead');
  assert.is(verdict({ recipient, status: '5.0.0', diagnostic: '554 policy' }), 'policy_refused');
  assert.is(
    verdict({ recipient, status: '5.7.1', diagnostic: '550 5.7.1 spam' }),
    'content_refused',
  );
  assert.is(
    verdict({ recipient, status: '5.0.0', diagnostic: '550 gone fishing' }),
    'no_mailbox dead',
  );
  assert.is(verdict({ recipient, status: '4.4.7', diagnostic: 'delivery expired' }), 'expired');
  // Given up after a time, so the words decide; but nobody is dead by them.
  assert.is(
    verdict({ recipient, status: '4.1.1', diagnostic: '450 4.1.1 user unknown' }),
    'peer_permanent',
  );
  assert.is(verdict({ recipient, status: '4.0.0', diagnostic: '450 busy' }), 'expired');
  const afterDot = '550 5.1.1 user unknown (in reply to end of DATA command)';
  assert.is(verdict({ recipient, diagnostic: afterDot }), 'peer_permanent');
  assert.is(verdict({ recipient, action: 'delayed' }), 'delayed');
  assert.is(verdict({ recipient, action: 'relayed' }), 'arrived');
  const typed = (type: string): string | undefined =>
    verdictOfReport(read(feedbackReport({ recipient, type }))!, about)?.kind;
  for (const type of ['abuse', 'fraud', 'virus', 'opt-out']) assert.is(typed(type), 'complained');
  for (const type of ['not-spam', 'auth-failure', 'dmarc', 'other'])
    assert.is(typed(type), undefined);
});

interface Labelled {
  readonly file: string;
  readonly recipients: readonly { recipient: string; action: string }[];
  readonly labels: readonly { reason: string; feedback_type: string }[];
}

test('310 bounces that others have collected', () => {
  const folder = `${corpora}/bounces-sisimai`;
  if (!existsSync(folder)) return;
  const labelled = JSON.parse(readFileSync(`${folder}/expected.json`, 'utf8')) as Labelled[];
  const seen = { standard: 0, standardOk: 0, words: 0, wordsOk: 0 };
  for (const { file, recipients, labels } of labelled) {
    const raw = readFileSync(`${folder}/${file}`);
    const report = readReport(raw);
    const reason = labels[0]?.reason;
    if (reason === 'vacation') {
      assert.is(report, null, file);
    } else if (file.startsWith('arf-')) {
      assert.is(report?.kind === 'arf' && report.feedbackType, labels[0]?.feedback_type, file);
    } else if (reason !== 'feedback' && reason !== 'delivered') {
      const wanted = recipients[0]?.recipient.toLowerCase();
      // Whether what has expired is over or only late is a matter of the label.
      const isRight =
        report?.kind === 'dsn' &&
        report.recipients.some(
          ({ address, originalAddress, action }) =>
            (action === 'failed' || action === 'delayed') &&
            [address, originalAddress].some((one) => one?.toLowerCase() === wanted),
        );
      const isStandard = /message\/(?:global-)?delivery-status/i.test(raw.toString('latin1'));
      seen[isStandard ? 'standard' : 'words'] += 1;
      if (isRight) seen[isStandard ? 'standardOk' : 'wordsOk'] += 1;
    }
  }
  const { standard: all, standardOk, words, wordsOk } = seen;
  console.log(
    `sisimai: ${standardOk} of ${all} with a report part, ${wordsOk} of ${words} in words`,
  );
  assert.ok(all + words > 280);
  assert.ok(standardOk / all >= 0.95);
  assert.ok(wordsOk / words >= 0.75);
});

test('feedback reports that others have collected', () => {
  const folder = `${corpora}/arf-stalwart`;
  if (!existsSync(folder)) return;
  const files = readdirSync(folder).filter((name) => name.endsWith('.eml'));
  assert.ok(files.length >= 5);
  for (const name of files) {
    const label = JSON.parse(
      readFileSync(`${folder}/${name.replace('.eml', '.json')}`, 'utf8'),
    ) as {
      feedback_type: string;
      original_mail_from: string | null;
    };
    const report = readReport(readFileSync(`${folder}/${name}`));
    assert.is(report?.kind, 'arf', name);
    if (report?.kind !== 'arf') continue;
    assert.is(report.feedbackType.replace('-', ''), label.feedback_type.toLowerCase(), name);
    const from = label.original_mail_from?.replace(/[<>]/g, '') ?? null;
    if (from !== null) assert.is(report.returnPaths[0], from, name);
  }
});

test('ordinary mail that others have collected is no report', () => {
  for (const folder of ['mime-inbucket', 'mime-mikel/emails', 'mime-mailparser']) {
    const path = `${corpora}/${folder}`;
    if (!existsSync(path)) continue;
    const files = readdirSync(path, { recursive: true, withFileTypes: true }).filter(
      (entry) => entry.isFile() && /\.(?:eml|raw)$/.test(entry.name),
    );
    const found = files.map((entry) => readFileSync(`${entry.parentPath}/${entry.name}`));
    assert.ok(found.length > 0);
    const odd = found.filter(
      (raw) =>
        readReport(raw) !== null &&
        !/message\/(?:delivery-status|feedback-report)|^From:.*daemon/im.test(
          raw.toString('latin1'),
        ),
    );
    assert.equal(odd.map(String), []);
  }
});

test.run();
