// The report of RFC 8460 §4.4 field by field, the name of its file, and the email around it as a mail reader sees it.
import { gunzipSync } from 'node:zlib';
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { splitHeader } from '../../src/mail/header.ts';
import { readShownParts } from '../../src/mail/shown-parts.ts';
import {
  packReport,
  writeReport,
  writeReportMessage,
  type TlsCount,
} from '../../src/sending/tls-report-document.ts';
import { header, mailbox, read } from '../support/composed.ts';

const test = suite('tls report document');

// The figures of RFC 8460, appendix B.
const about = {
  day: '2016-04-01',
  domain: 'company-y.example',
  hostname: 'mail.sender.example',
  submitter: 'sender.example',
};
const sts: TlsCount['policy'] = {
  type: 'sts',
  strings: ['version: STSv1', 'mode: testing', 'mx: *.mail.company-y.example', 'max_age: 86400'],
  mxHosts: ['*.mail.company-y.example'],
};
const tlsa: TlsCount['policy'] = {
  type: 'tlsa',
  strings: ['3 1 1 0123456789abcdef'],
  mxHosts: ['mx1.mail.company-y.example'],
};
const none: TlsCount['policy'] = { type: 'no-policy-found', strings: [], mxHosts: [] };
const success = { mxHost: '', receivingIp: '', sendingIp: '', result: 'success', reason: null };
const failed = {
  mxHost: 'mx1.mail.company-y.example',
  receivingIp: '203.0.113.56',
  sendingIp: '2001:db8:abcd:0012::1',
};
const counts: readonly TlsCount[] = [
  {
    ...failed,
    policy: sts,
    policyHash: 'a',
    result: 'certificate-expired',
    reason: null,
    sessions: 100,
  },
  {
    ...failed,
    policy: sts,
    policyHash: 'a',
    result: 'validation-failure',
    reason: 'X509_V_ERR_PROXY_PATH_LENGTH_EXCEEDED',
    sessions: 3,
  },
  {
    ...failed,
    mxHost: '',
    receivingIp: '',
    sendingIp: '',
    policy: sts,
    policyHash: 'a',
    result: 'starttls-not-supported',
    reason: null,
    sessions: 200,
  },
  { ...success, policy: sts, policyHash: 'a', sessions: 5_326 },
  { ...success, policy: tlsa, policyHash: 'b', sessions: 7 },
  { ...success, policy: none, policyHash: 'no-policy-found', sessions: 1 },
];
const report = writeReport(about, counts);
const file = packReport(about, report);

test('every field of the document', () => {
  const { 'report-id': id, ...rest } = report;
  assert.match(id, /^[0-9a-f]{32}$/);
  assert.equal(rest, {
    'organization-name': 'sender.example',
    'date-range': {
      'start-datetime': '2016-04-01T00:00:00Z',
      'end-datetime': '2016-04-01T23:59:59Z',
    },
    'contact-info': 'postmaster@sender.example',
    policies: [
      {
        policy: {
          'policy-type': 'sts',
          'policy-string': [
            'version: STSv1',
            'mode: testing',
            'mx: *.mail.company-y.example',
            'max_age: 86400',
          ],
          'policy-domain': 'company-y.example',
          'mx-host': ['*.mail.company-y.example'],
        },
        summary: {
          'total-successful-session-count': 5326,
          'total-failure-session-count': 303,
        },
        'failure-details': [
          {
            'result-type': 'certificate-expired',
            'sending-mta-ip': '2001:db8:abcd:0012::1',
            'receiving-mx-hostname': 'mx1.mail.company-y.example',
            'receiving-ip': '203.0.113.56',
            'failed-session-count': 100,
          },
          {
            'result-type': 'validation-failure',
            'sending-mta-ip': '2001:db8:abcd:0012::1',
            'receiving-mx-hostname': 'mx1.mail.company-y.example',
            'receiving-ip': '203.0.113.56',
            'failed-session-count': 3,
            'failure-reason-code': 'X509_V_ERR_PROXY_PATH_LENGTH_EXCEEDED',
          },
          { 'result-type': 'starttls-not-supported', 'failed-session-count': 200 },
        ],
      },
      {
        policy: {
          'policy-type': 'tlsa',
          'policy-string': ['3 1 1 0123456789abcdef'],
          'policy-domain': 'mx1.mail.company-y.example',
        },
        summary: { 'total-successful-session-count': 7, 'total-failure-session-count': 0 },
      },
      {
        policy: { 'policy-type': 'no-policy-found', 'policy-domain': 'company-y.example' },
        summary: { 'total-successful-session-count': 1, 'total-failure-session-count': 0 },
      },
    ],
  });
});

test('the file has the name of RFC 8460 §5.1 and holds the document', () => {
  const id = report['report-id'];
  assert.is(file.name, `sender.example!company-y.example!1459468800!1459555199!${id}.json.gz`);
  assert.equal(JSON.parse(gunzipSync(file.gzipped).toString()), report);
});

test('the id follows from day, domain and sender, and from nothing else', () => {
  const idOf = (changes: Partial<typeof about>): string =>
    writeReport({ ...about, ...changes }, [])['report-id'];
  assert.is(idOf({ submitter: 'other.example' }), report['report-id']);
  const others = [{ day: '2016-04-02' }, { domain: 'x.example' }, { hostname: 'x.example' }];
  assert.is(new Set([report['report-id'], ...others.map(idOf)]).size, 4);
});

test('the email: multipart/report with the two parts, and the fields of RFC 8460 §5.3', async () => {
  const message = writeReportMessage(about, {
    from: mailbox('tls-reports@sender.example'),
    to: mailbox('mts-sts-tlsrpt@company-y.example'),
    date: new Date('2016-04-02T01:02:03Z'),
    report,
    file,
  });
  const { raw } = message;
  const id = report['report-id'];
  const subject = `Report Domain: company-y.example Submitter: sender.example Report-ID: <${id}@sender.example>`;
  const expected: Readonly<Record<string, string | RegExp>> = {
    From: 'tls-reports@sender.example',
    To: 'mts-sts-tlsrpt@company-y.example',
    Subject: subject,
    'Message-ID': new RegExp(`^<${id}\\.[0-9a-f]{16}@sender\\.example>$`),
    Date: 'Sat, 02 Apr 2016 01:02:03 +0000',
    'TLS-Report-Domain': 'company-y.example',
    'TLS-Report-Submitter': 'sender.example',
    'TLS-Required': 'No',
    'Auto-Submitted': 'auto-generated',
    'MIME-Version': '1.0',
    'Content-Type': /^multipart\/report; report-type="tlsrpt";\s+boundary="[^"]+"$/,
  };
  assert.equal(
    splitHeader(raw).fields.map(({ name }) => name),
    Object.keys(expected),
  );
  for (const [name, value] of Object.entries(expected)) {
    if (typeof value === 'string') assert.is(header(raw, name), value, name);
    else assert.match(header(raw, name), value);
  }
  const text = raw.toString('latin1');
  assert.not.match(text, /[^\t\r\n\x20-\x7e]/, '7-bit');
  assert.not.match(text, /\r(?!\n)|(?<!\r)\n|[ \t]\r\n/, 'CRLF only, no white space at line ends');

  const parsed = await read(raw);
  assert.is(parsed.subject, subject);
  assert.match(parsed.text ?? '', /company-y\.example/);
  assert.match(parsed.text ?? '', /Sessions as the policy wants them: 5334\n/);
  assert.match(parsed.text ?? '', /Sessions that failed: 303\n/);
  assert.is(parsed.attachments.length, 1);
  const [attached] = parsed.attachments;
  assert.is(attached?.contentType, 'application/tlsrpt+gzip');
  assert.is(attached?.filename, file.name);
  assert.equal(attached?.content, file.gzipped);

  // What the API shows of it is what a reader finds in it.
  const shown = await readShownParts(raw);
  assert.equal(shown.files[0]?.place, message.place);
  assert.is(shown.text?.trimEnd(), message.text.trimEnd());
});

test('names of any length stay within the lines of mail', async () => {
  const domain = `${`${'a'.repeat(62)}.`.repeat(3)}${'b'.repeat(50)}.example`;
  const long = { ...about, domain, submitter: domain };
  const packed = packReport(long, report);
  const { raw } = writeReportMessage(long, {
    from: mailbox(`tls-reports@sender.example`),
    to: mailbox(`${'l'.repeat(60)}@${'d'.repeat(60)}.example`),
    date: new Date('2016-04-02T01:02:03Z'),
    report,
    file: packed,
  });
  for (const line of raw.toString().split('\r\n')) assert.ok(line.length <= 998, line);
  assert.is((await read(raw)).attachments[0]?.filename, packed.name);
});

test.run();
