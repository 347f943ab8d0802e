// The TLSRPT record as people publish it: the examples of RFC 8460, what it allows beyond them, and what counts as none.
import { suite } from 'uvu';
import * as assert from 'uvu/assert';
import { readTlsReportRecord, TARGETS_MAX } from '../../src/sending/tls-report-record.ts';

const test = suite('tls report record');

const targetsOf = (...records: readonly string[]): readonly string[] => {
  const read = readTlsReportRecord(records);
  if (!read.ok) return [`! ${read.problem}`];
  return read.targets.map((one) => (one.kind === 'mail' ? `mail ${one.to.address}` : one.uri));
};

const GOOD: Readonly<Record<string, readonly string[]>> = {
  // RFC 8460 §3.1.1 and §3.1.2.
  'v=TLSRPTv1;rua=mailto:reports@example.com': ['mail reports@example.com'],
  'v=TLSRPTv1; rua=https://reporting.example.com/v1/tlsrpt': [
    'https://reporting.example.com/v1/tlsrpt',
  ],
  'v=TLSRPTv1; rua=mailto:a@x.test , https://x.test/r?a=b&c=d;': [
    'mail a@x.test',
    'https://x.test/r?a=b&c=d',
  ],
  'v=TLSRPTv1 ; rua=mailto:a@x.test': ['mail a@x.test'],
  'v=TLSRPTv1;future=yes; rua=mailto:a@x.test; x_y-z.1=2': ['mail a@x.test'],
  'v=TLSRPTv1;rua=mailto:a@x.test;rua=mailto:b@x.test': ['mail a@x.test', 'mail b@x.test'],
  'v=TLSRPTv1;rua=mailto:a@x.test,mailto:a@x.test': ['mail a@x.test'],
  'v=TLSRPTv1;rua=MAILTO:tls%2Brpt@X.test?subject=hi': ['mail tls+rpt@x.test'],
  'v=TLSRPTv1;rua=ftp://x.test/,http://x.test/,mailto:a@x.test': ['mail a@x.test'],
  'v=TLSRPTv1;rua=mailto:a@x.test%2Cb@x.test,mailto:c@x.test': ['mail c@x.test'],
  'v=TLSRPTv1;rua=mailto:%0D%0Abcc:a@x.test,mailto:c@x.test': ['mail c@x.test'],
  'v=TLSRPTv1;rua=mailto:Some%20Body%20%3Ca@x.test%3E,mailto:c@x.test': ['mail c@x.test'],
  'v=TLSRPTv1;rua=mailto:%FF@x.test,mailto:c@x.test': ['mail c@x.test'],
};

test('where reports go', () => {
  for (const [record, targets] of Object.entries(GOOD)) {
    assert.equal(targetsOf(record), targets, record);
  }
});

test('other TXT records at the name are read over', () => {
  assert.equal(targetsOf('v=spf1 -all', 'v=TLSRPTv1;rua=mailto:a@x.test', ''), ['mail a@x.test']);
});

test('not more addresses than there is patience for', () => {
  const uris = Array.from({ length: 40 }, (_, index) => `mailto:a${index}@x.test`);
  assert.is(targetsOf(`v=TLSRPTv1;rua=${uris.join(',')}`).length, TARGETS_MAX);
});

const NONE: readonly (readonly string[])[] = [
  [],
  ['v=TLSRPTv2;rua=mailto:a@x.test'],
  ['v=tlsrptv1;rua=mailto:a@x.test'],
  [' v=TLSRPTv1;rua=mailto:a@x.test'],
  ['rua=mailto:a@x.test;v=TLSRPTv1'],
  ['v=TLSRPTv1'],
  ['v=TLSRPTv1;'],
  ['v=TLSRPTv1;rua='],
  ['v=TLSRPTv1;rua=reports@x.test'],
  ['v=TLSRPTv1;rua=http://x.test/'],
  ['v=TLSRPTv1;RUA=mailto:a@x.test'],
  ['v=TLSRPTv1;rua=mailto:a@x.test!10m'],
  ['v=TLSRPTv1;rua=mailto:a b@x.test'],
  ['v=TLSRPTv1;rua=mailto:a@x.test,,mailto:b@x.test'],
  ['v=TLSRPTv1;rua=mailto:a@x.test; nonsense'],
  ['v=TLSRPTv1;rua=mailto:a@x.test;;a=b'],
  ['v=TLSRPTv1;rua=mailto:ä@x.test'],
  ['v=TLSRPTv1;rua=mailto:nobody'],
  [`v=TLSRPTv1;rua=https://x.test/${'a'.repeat(10_000)}`],
  ['v=TLSRPTv1;rua=mailto:a@x.test', 'v=TLSRPTv1;rua=mailto:a@x.test'],
  ['v=TLSRPTv1;rua=mailto:a@x.test', 'v=TLSRPTv1; broken'],
];

test('what counts as no record', () => {
  for (const records of NONE) {
    const [first, ...more] = targetsOf(...records);
    assert.ok(first?.startsWith('! ') === true && more.length === 0, JSON.stringify(records));
  }
});

test.run();
