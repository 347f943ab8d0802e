// The report of a torture run as Markdown: a table of rows with what was done, what was counted and the verdict; and the
// tests that hold the short rows.
import { availableParallelism, cpus, release, type } from 'node:os';
import type { Judged } from './row.ts';

/** Rows of the fault table that are short enough to be tests, and parts of long ones that are. */
export const TESTS: readonly {
  readonly number: number;
  readonly title: string;
  readonly files: readonly string[];
}[] = [
  { number: 1, title: 'kill -9 at random, a few rounds', files: ['test/flow/kill.test.ts'] },
  {
    number: 2,
    title: 'after the 250 and before the commit',
    files: ['test/flow/after-250.test.ts', 'test/delivery/journal.test.ts'],
  },
  { number: 3, title: 'Postgres away', files: ['test/flow/database-away.test.ts'] },
  {
    number: 4,
    title: "Agenda's store dropped, or away",
    files: ['test/flow/clock-lost.test.ts', 'test/jobs/clock.test.ts'],
  },
  { number: 5, title: 'no place for the journal', files: ['test/flow/journal-full.test.ts'] },
  {
    number: 6,
    title: 'peers and name servers that say nothing',
    files: ['test/flow/direct.test.ts', 'test/flow/lanes-dns.test.ts'],
  },
  {
    number: 7,
    title: 'what a peer does at each stage',
    files: ['test/flow/direct.test.ts', 'test/delivery/session.test.ts'],
  },
  {
    number: 8,
    title: 'a peer that caps connections, circuits',
    files: ['test/flow/lanes.test.ts', 'test/flow/lanes-circuit.test.ts'],
  },
  {
    number: 9,
    title: 'MX sets, addresses, failing DNS, a blocked port',
    files: ['test/dns/mx.test.ts', 'test/flow/direct.test.ts', 'test/flow/port25.test.ts'],
  },
  {
    number: 10,
    title: 'TLS',
    files: [
      'test/flow/tls-enforced.test.ts',
      'test/flow/tls-policy.test.ts',
      'test/delivery/ladder.test.ts',
      'test/delivery/ladder-dane.test.ts',
    ],
  },
  { number: 11, title: 'lease theft', files: ['test/flow/lease-theft.test.ts'] },
  { number: 13, title: 'what a backlog costs a claim', files: ['test/queue/claim.test.ts'] },
  { number: 15, title: 'too many hops at the MX listener', files: ['test/smtp/mx-loop.test.ts'] },
  {
    number: 16,
    title: 'a message that ends its worker',
    files: ['test/flow/poison.test.ts', 'test/queue/suspect.test.ts'],
  },
  { number: 17, title: 'SIGTERM with work in flight', files: ['test/flow/stop.test.ts'] },
  { number: 19, title: 'idle, greedy and slow clients', files: ['test/smtp/mx-door.test.ts'] },
  {
    number: 21,
    title: 'messages that do not end, or end twice',
    files: ['test/smtp/mx-data.test.ts', 'test/smtp/mx-smuggling.test.ts'],
  },
  { number: 22, title: 'guesses and many recipients', files: ['test/smtp/mx-envelope.test.ts'] },
  {
    number: 18,
    title: 'kill -9 while mail comes in, a few rounds',
    files: ['test/flow/kill-inbound.test.ts'],
  },
  {
    number: 24,
    title: 'kill -9 in the middle of a broadcast, a short one',
    files: ['test/flow/broadcast-kill.test.ts', 'test/sending/fan-out.test.ts'],
  },
  {
    number: 25,
    title: 'webhook endpoints that fail, hang, are dead; kill -9 during a call',
    files: ['test/webhooks/calls.test.ts', 'test/webhooks/crash.test.ts'],
  },
  {
    number: 26,
    title: 'rolling restart of several processes, a short one; a bucket that is away',
    files: ['test/flow/rolling.test.ts', 'test/flow/bucket-away.test.ts'],
  },
];

export function renderReport(
  judged: readonly Judged[],
  about: { readonly short: boolean; readonly rounds: number | null },
): string {
  const [cpu] = cpus();
  const head = [
    `${type()} ${release()}, ${availableParallelism()} x ${cpu?.model ?? 'unknown CPU'}, Node ${process.version}`,
    ...(about.short ? ['short: the harness was tried, the program was not judged'] : []),
  ];
  const rows = judged.map(({ row, verdict, done, counted, violations, seconds }) =>
    [
      String(row.number),
      `${row.title} (\`${row.name}\`)`,
      done.join('; '),
      [...counted, ...violations.slice(0, 5).map((one) => `NOT KEPT: ${one}`)].join('; '),
      `${verdict}, ${seconds} s`,
    ]
      .map((cell) => cell.replaceAll('|', '\\|').replaceAll('\n', ' '))
      .join(' | '),
  );
  return [
    ...head,
    '',
    '| # | Fault | Done | Counted | Verdict |',
    '| - | - | - | - | - |',
    ...rows.map((row) => `| ${row} |`),
    '',
    renderTests(),
  ].join('\n');
}

export const renderTests = (): string =>
  [
    'Held by tests:',
    ...TESTS.map(({ number, title, files }) => `- ${number}: ${title}: ${files.join(', ')}`),
  ].join('\n');
