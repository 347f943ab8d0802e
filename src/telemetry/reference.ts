// docs/metrics.md, written from the instruments themselves.
import { describeInstruments, type Described } from './instrument.ts';
import * as instruments from './instruments.ts';

/** The page; `generatedBy` says where it comes from. As Prettier would write it. */
export function renderMetricsPage(generatedBy: string): string {
  if (Object.keys(instruments).length === 0) throw new Error('there are no instruments');
  const sections = Map.groupBy(describeInstruments(), ({ section }) => section);
  const tables = [...sections].map(
    ([title, instruments]) => `## ${title}\n\n${renderTable(instruments)}\n`,
  );
  return `<!-- ${generatedBy}. -->

# Metrics

What \`GET /metrics\` on \`MAILSTEAD_METRICS_PORT\` says. A histogram has the names with \`_bucket\`, \`_sum\` and \`_count\`
behind them. Counters and histograms are sums over the process and its delivery workers. What is read from the
database (\`mailstead_queue_*\`, \`mailstead_delivery_workers\`, \`mailstead_webhook_lag_seconds\`,
\`mailstead_outbox_events\`, \`mailstead_port25_blocked\`) is told by every process with the role \`jobs\`, at most 15
seconds old: take the \`max\` of several processes, not the sum.

Beside these there are the usual metrics of Node (\`process_*\`, \`nodejs_*\`), with a label \`process\`: \`main\`, or
\`delivery-1\` and so on for delivery workers.

${tables.join('\n')}`;
}

function renderTable(instruments: readonly Described[]): string {
  const rows = [
    ['Metric', 'Type', 'Labels', 'Meaning'],
    ...instruments.map(({ name, type, labels, help }) => [
      `\`${name}\``,
      type,
      labels.map((label) => `\`${label}\``).join(', '),
      help,
    ]),
  ];
  const widths = [0, 1, 2, 3].map((column) =>
    Math.max(...rows.map((row) => row[column]!.length), 3),
  );
  const lines = rows.map(
    (row) => `| ${row.map((cell, column) => cell.padEnd(widths[column]!)).join(' | ')} |`,
  );
  lines.splice(1, 0, `| ${widths.map((width) => '-'.repeat(width)).join(' | ')} |`);
  return lines.join('\n');
}
