// Writes the TLS report of one day and domain (RFC 8460): the JSON document, its file, and the email that carries it.
//
// In: the counts that delivery kept. Out: values and bytes; the same counts give the same document, whose id follows from
// day and domain, so that a receiver that gets it twice can tell. Pure.
import { createHash } from 'node:crypto';
import { gzipSync } from 'node:zlib';
import type { Mailbox } from '../mail/address.ts';
import { foldHeader } from '../mail/header.ts';
import { base64Lines } from '../mail/transfer-encoding.ts';

/** A row of `tls_result`; an empty text where nothing is known. */
export interface TlsCount {
  readonly policy: {
    readonly type: 'sts' | 'tlsa' | 'no-policy-found';
    readonly strings: readonly string[];
    readonly mxHosts: readonly string[];
  };
  readonly policyHash: string;
  readonly mxHost: string;
  readonly receivingIp: string;
  readonly sendingIp: string;
  /** `success`, or a result type of RFC 8460 §4.3. */
  readonly result: string;
  readonly reason: string | null;
  readonly sessions: number;
}

/** RFC 8460 §4.4. */
export interface TlsReport {
  readonly 'organization-name': string;
  readonly 'date-range': { readonly 'start-datetime': string; readonly 'end-datetime': string };
  readonly 'contact-info': string;
  readonly 'report-id': string;
  readonly policies: readonly PolicyReport[];
}

interface PolicyReport {
  readonly policy: {
    readonly 'policy-type': string;
    readonly 'policy-string'?: readonly string[];
    readonly 'policy-domain': string;
    readonly 'mx-host'?: readonly string[];
  };
  readonly summary: {
    readonly 'total-successful-session-count': number;
    readonly 'total-failure-session-count': number;
  };
  readonly 'failure-details'?: readonly FailureDetails[];
}

interface FailureDetails {
  readonly 'result-type': string;
  readonly 'sending-mta-ip'?: string;
  readonly 'receiving-mx-hostname'?: string;
  readonly 'receiving-ip'?: string;
  readonly 'failed-session-count': number;
  readonly 'failure-reason-code'?: string;
}

/** What a report is about and who sends it. */
export interface ReportAbout {
  /** `YYYY-MM-DD`, of UTC. */
  readonly day: string;
  readonly domain: string;
  /** This appliance; makes the report's id another one than that of another sender. */
  readonly hostname: string;
  /** The domain that reports: that of the author, whose keys sign. */
  readonly submitter: string;
}

export interface ReportFile {
  readonly name: string;
  readonly gzipped: Buffer;
}

export const GZIP_TYPE = 'application/tlsrpt+gzip';
const SUCCESS = 'success';
const DAY_SECONDS = 86_400;
const ID_CHARS = 32;

/** Letters and digits only, as RFC 8460 §5.1 wants the last part of the file name. */
export const reportIdOf = ({ day, domain, hostname }: ReportAbout): string =>
  createHash('sha256').update(`${hostname} ${domain} ${day}`).digest('hex').slice(0, ID_CHARS);

export function writeReport(about: ReportAbout, counts: readonly TlsCount[]): TlsReport {
  const byPolicy = new Map<string, TlsCount[]>();
  for (const count of counts) {
    const same = byPolicy.get(count.policyHash);
    if (same === undefined) byPolicy.set(count.policyHash, [count]);
    else same.push(count);
  }
  return {
    'organization-name': about.submitter,
    'date-range': {
      'start-datetime': `${about.day}T00:00:00Z`,
      'end-datetime': `${about.day}T23:59:59Z`,
    },
    // RFC 5321 §4.5.1: the one address that a mail domain has to have.
    'contact-info': `postmaster@${about.submitter}`,
    'report-id': reportIdOf(about),
    policies: [...byPolicy.values()].map((same) => reportPolicy(about.domain, same)),
  };
}

function reportPolicy(domain: string, counts: readonly TlsCount[]): PolicyReport {
  const policy = counts[0]!.policy;
  const failures = counts.filter(({ result }) => result !== SUCCESS);
  const successes = counts.filter(({ result }) => result === SUCCESS);
  const { type, strings, mxHosts } = policy;
  return {
    policy: {
      'policy-type': type,
      ...(strings.length > 0 ? { 'policy-string': strings } : {}),
      // RFC 8460 §1.1: a DANE policy is that of the host whose TLSA records they are.
      'policy-domain': type === 'tlsa' ? (mxHosts[0] ?? domain) : domain,
      ...(type === 'sts' && mxHosts.length > 0 ? { 'mx-host': mxHosts } : {}),
    },
    summary: {
      'total-successful-session-count': sum(successes),
      'total-failure-session-count': sum(failures),
    },
    ...(failures.length > 0 ? { 'failure-details': failures.map(detailsOf) } : {}),
  };
}

const detailsOf = (count: TlsCount): FailureDetails => ({
  'result-type': count.result,
  ...(count.sendingIp === '' ? {} : { 'sending-mta-ip': count.sendingIp }),
  ...(count.mxHost === '' ? {} : { 'receiving-mx-hostname': count.mxHost }),
  ...(count.receivingIp === '' ? {} : { 'receiving-ip': count.receivingIp }),
  'failed-session-count': count.sessions,
  ...(count.reason === null ? {} : { 'failure-reason-code': count.reason }),
});

const sum = (counts: readonly TlsCount[]): number =>
  counts.reduce((total, { sessions }) => total + sessions, 0);

/** RFC 8460 §5.1 and §5.2. */
export function packReport(about: ReportAbout, report: TlsReport): ReportFile {
  const begin = Date.parse(`${about.day}T00:00:00Z`) / 1_000;
  const parts = [about.submitter, about.domain, begin, begin + DAY_SECONDS - 1, reportIdOf(about)];
  return {
    name: `${parts.join('!')}.json.gz`,
    gzipped: gzipSync(Buffer.from(JSON.stringify(report))),
  };
}

export interface ReportMessage {
  readonly raw: Buffer;
  readonly subject: string;
  readonly text: string;
  /** With angle brackets. */
  readonly messageId: string;
  readonly headers: Readonly<Record<string, string>>;
  /** The base64 lines of the file in `raw`. */
  readonly place: { readonly offset: number; readonly length: number };
}

/** RFC 8460 §5.3 and §5.6. The same but for `Date` on every call with the same parts. */
export function writeReportMessage(
  about: ReportAbout,
  parts: {
    readonly from: Mailbox;
    readonly to: Mailbox;
    readonly date: Date;
    readonly report: TlsReport;
    readonly file: ReportFile;
  },
): ReportMessage {
  const { from, to, file } = parts;
  const id = reportIdOf(about);
  const which = createHash('sha256')
    .update(to.address)
    .digest('hex')
    .slice(0, ID_CHARS / 2);
  const messageId = `<${id}.${which}@${from.domain}>`;
  const subject = `Report Domain: ${about.domain} Submitter: ${about.submitter} Report-ID: <${id}@${about.submitter}>`;
  const headers = {
    'TLS-Report-Domain': about.domain,
    'TLS-Report-Submitter': about.submitter,
    // RFC 8689 §5: it must arrive where TLS is what is broken.
    'TLS-Required': 'No',
    // RFC 3834 §5: nobody's holiday is to answer it.
    'Auto-Submitted': 'auto-generated',
  };
  const boundary = `=_${id}`;
  const text = textOf(about, parts.report);
  const head = [
    foldHeader('From', from.address),
    foldHeader('To', to.address),
    foldHeader('Subject', subject),
    foldHeader('Message-ID', messageId),
    // RFC 5322 §3.3: "GMT" is obsolete syntax.
    foldHeader('Date', parts.date.toUTCString().replace('GMT', '+0000')),
    ...Object.entries(headers).map(([name, value]) => foldHeader(name, value)),
    'MIME-Version: 1.0\r\n',
    `Content-Type: multipart/report; report-type="tlsrpt";\r\n boundary="${boundary}"\r\n`,
    `\r\n--${boundary}\r\n`,
    'Content-Type: text/plain; charset=us-ascii\r\n',
    'Content-Transfer-Encoding: 7bit\r\n\r\n',
    `${text.replaceAll('\n', '\r\n')}\r\n`,
    `--${boundary}\r\n`,
    `Content-Type: ${GZIP_TYPE}\r\n`,
    'Content-Transfer-Encoding: base64\r\n',
    `Content-Disposition: attachment;\r\n filename="${file.name}"\r\n\r\n`,
  ].join('');
  const before = Buffer.from(head);
  const lines = base64Lines(file.gzipped, false);
  return {
    raw: Buffer.concat([before, lines, Buffer.from(`\r\n--${boundary}--\r\n`)]),
    subject,
    text,
    messageId,
    headers,
    place: { offset: before.length, length: lines.length },
  };
}

function textOf(about: ReportAbout, report: TlsReport): string {
  const of = (name: keyof PolicyReport['summary']): number =>
    report.policies.reduce((total, { summary }) => total + summary[name], 0);
  return [
    'This is a report about TLS on the way to the mail servers of',
    about.domain,
    'from',
    about.submitter,
    `for the day ${about.day} (UTC), as the TLSRPT record of the domain asks (RFC 8460).`,
    '',
    `Sessions as the policy wants them: ${of('total-successful-session-count')}`,
    `Sessions that failed: ${of('total-failure-session-count')}`,
    '',
    'The attached file says more, to programs.',
    '',
  ].join('\n');
}
