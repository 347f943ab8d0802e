// Turns rounds into what is printed: medians of both sides beside each other, their ratio, the costs, and each
// round as it was, since one noisy neighbour can spoil any of them.
import type { Load } from './load.ts';
import { canAccount } from './processes.ts';
import type { Profile, Share } from './profile.ts';
import type { ProductRound, Round } from './rounds.ts';

export interface Results {
  readonly emails: number;
  readonly connections: number;
  /** Machine and versions, for people. */
  readonly machine: string;
  readonly cpuCount: number;
  /** Null where the other side cannot be measured; `whyNoRatio` says why. */
  readonly postfixName: string | null;
  readonly whyNoRatio: string | null;
  readonly product: readonly ProductRound[];
  readonly postfix: readonly Round[];
  readonly acceptAlone: Load | null;
}

const NAME_COLUMNS = 38;
const VALUE_COLUMNS = 19;
const PROFILE_GROUPS = 18;
const PROFILE_FUNCTIONS = 30;
/** Above this share of the CPU for others, a measured rate says little. */
const OTHERS_MAX = 0.15;

export const median = (values: readonly number[]): number => {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = Math.floor(sorted.length / 2);
  const upper = sorted[middle] ?? 0;
  return sorted.length % 2 === 1 ? upper : (upper + (sorted[middle - 1] ?? upper)) / 2;
};

const total = (values: ReadonlyMap<string, number>): number =>
  [...values.values()].reduce((sum, one) => sum + one, 0);

const show = (value: number): string =>
  value >= 100 ? Math.round(value).toLocaleString('en-US') : value.toFixed(value >= 10 ? 1 : 2);

/** CPU seconds for each 1,000 of the measured messages. */
const per1000 = (results: Results, cpuS: number): number => cpuS / (results.emails / 1000);

export interface Summary {
  readonly endToEndPerS: { readonly product: number; readonly postfix: number | null };
  readonly ratio: number | null;
  readonly cpuPer1000S: { readonly product: number; readonly postfix: number | null };
  readonly cpuRatio: number | null;
}

export function summarise(results: Results): Summary {
  const { product, postfix } = results;
  const rate = (rounds: readonly Round[]): number =>
    median(rounds.map(({ endToEndPerS }) => endToEndPerS));
  const cost = (rounds: readonly Round[]): number =>
    median(rounds.map(({ cpuS }) => per1000(results, total(cpuS))));
  const both = postfix.length > 0 && product.length > 0;
  const other = <T>(value: () => T): T | null => (postfix.length > 0 ? value() : null);
  return {
    endToEndPerS: { product: rate(product), postfix: other(() => rate(postfix)) },
    ratio: both ? rate(product) / rate(postfix) : null,
    cpuPer1000S: { product: cost(product), postfix: other(() => cost(postfix)) },
    cpuRatio: both && canAccount ? cost(postfix) / cost(product) : null,
  };
}

export function renderResults(results: Results): string {
  const { product, postfix, postfixName } = results;
  const lines: string[] = [];
  const row = (name: string, ...values: readonly string[]): void => {
    lines.push(
      `${name.padEnd(NAME_COLUMNS)}${values.map((value) => value.padStart(VALUE_COLUMNS)).join('')}`.trimEnd(),
    );
  };
  const compare = (
    name: string,
    pick: (round: Round) => number,
    ratio: 'more is better' | 'less is better' | 'no ratio' = 'no ratio',
  ): void => {
    const ours = product.length > 0 ? median(product.map(pick)) : null;
    const theirs = postfix.length > 0 ? median(postfix.map(pick)) : null;
    const better =
      ours === null || theirs === null || ratio === 'no ratio'
        ? ''
        : `${(ratio === 'more is better' ? ours / theirs : theirs / ours).toFixed(2)}x`;
    row(name, ours === null ? '' : show(ours), theirs === null ? '' : show(theirs), better);
  };

  lines.push(
    '',
    `${results.emails.toLocaleString('en-US')} messages of 2 KB text a round, ${results.connections} connections, fsync on, loopback; rounds of each side: ${Math.max(product.length, postfix.length)} (medians below)`,
    results.machine,
    '',
  );
  row('', 'Mailstead', postfixName ?? '', postfixName === null ? '' : 'better by');
  compare('end to end, emails/s', (round) => round.endToEndPerS, 'more is better');
  compare('accepted while delivering, emails/s', (round) => round.acceptPerS, 'more is better');
  if (canAccount) {
    const cpu = (round: Round): number => per1000(results, total(round.cpuS));
    compare('CPU seconds per 1,000 emails', cpu, 'less is better');
    for (const rounds of [product, postfix]) {
      for (const part of rounds[0]?.cpuS.keys() ?? []) {
        const one = show(median(rounds.map(({ cpuS }) => per1000(results, cpuS.get(part) ?? 0))));
        row(`  ${part}`, rounds === product ? one : '', rounds === product ? '' : one);
      }
    }
    compare('  (load generator, not counted above)', (r) => per1000(results, r.generatorCpuS));
    compare('  (sink, not counted above)', (r) => per1000(results, r.sinkCpuS));
  }
  row('signatures', signatures(product), signatures(postfix));
  lines.push(
    '',
    ...renderLatencies(results),
    ...renderMemory(product),
    '',
    ...renderRounds(results),
  );
  if (results.whyNoRatio !== null) lines.push('', `no ratio: ${results.whyNoRatio}`);
  return lines.join('\n');
}

const signatures = (rounds: readonly Round[]): string =>
  (rounds[0]?.signedWith ?? []).map((name) => name.replace('-sha256', '')).join(' + ');

function renderLatencies({ product, acceptAlone, connections }: Results): readonly string[] {
  const lines: string[] = [];
  const add = (name: string, loads: readonly Load[]): void => {
    const rate = median(loads.map(({ accepted, seconds }) => accepted / seconds));
    const [p50, p99, max] = (['p50Ms', 'p99Ms', 'maxMs'] as const).map((field) =>
      show(median(loads.map((load) => load[field]))),
    );
    lines.push(
      `${name.padEnd(NAME_COLUMNS)}${show(rate).padStart(8)}/s   p50 ${p50} ms   p99 ${p99} ms   max ${max} ms`,
    );
  };
  if (product.length > 0) {
    add(
      `POST /emails, ${connections} at a time`,
      product.map(({ full }) => full),
    );
    add(
      'POST /emails, half of end to end',
      product.map(({ half }) => half),
    );
  }
  if (acceptAlone !== null) add('POST /emails, nothing delivers', [acceptAlone]);
  return lines;
}

function renderMemory(product: readonly ProductRound[]): readonly string[] {
  const parts = new Set(product.flatMap(({ peakMb }) => peakMb.map(({ part }) => part)));
  const peaks = [...parts].map((part) => {
    const all = product.flatMap((round) => round.peakMb.filter((one) => one.part === part));
    return `${part} ${show(Math.max(...all.map(({ peakMb }) => peakMb)))} MB`;
  });
  return peaks.length > 0
    ? [`${'largest memory (RSS)'.padEnd(NAME_COLUMNS)}   ${peaks.join(', ')}`]
    : [];
}

function renderRounds({ product, postfix, cpuCount }: Results): readonly string[] {
  const describe = (name: string, round: Round | undefined): readonly string[] => {
    if (round === undefined) return [];
    const others = round.othersCpuS / (round.seconds * cpuCount);
    const noise = canAccount ? `, ${Math.round(others * 100)} % of the CPU for others` : '';
    const warning = others > OTHERS_MAX ? ': too busy to tell' : '';
    return [
      `${name} ${show(round.endToEndPerS)}/s in ${round.seconds.toFixed(1)} s${noise}${warning}`,
    ];
  };
  return Array.from({ length: Math.max(product.length, postfix.length) }, (_, index) => {
    const both = [...describe('Mailstead', product[index]), ...describe('Postfix', postfix[index])];
    return `round ${index + 1}: ${both.join(' | ')}`;
  });
}

export function renderProfiles(round: ProductRound, profiles: readonly Profile[]): string {
  const lines: string[] = [
    '',
    `Profile of one more round, ${round.seconds.toFixed(1)} s of it. Time is by the clock: a thread that waits for a core counts`,
    'as busy in the function it was in, so compare with its CPU seconds.',
  ];
  for (const { part, pid, cpuS } of round.threads) {
    const threads = [...cpuS].filter(([, seconds]) => seconds >= 0.01);
    const list = threads.map(([name, seconds]) => `${name} ${seconds.toFixed(2)} s`).join(', ');
    lines.push('', `${part} (${pid}): CPU by kind of thread: ${list}`);
    for (const profile of profiles.filter((one) => one.pid === pid)) {
      const share = ({ name, seconds }: Share): string =>
        `  ${((seconds / profile.busyS) * 100).toFixed(1).padStart(5)} %  ${name}`;
      lines.push(
        `  thread ${profile.thread}: ${profile.busyS.toFixed(2)} s not idle; self time by group`,
        ...profile.groups.slice(0, PROFILE_GROUPS).map(share),
        '  by function',
        ...profile.functions.slice(0, PROFILE_FUNCTIONS).map(share),
      );
    }
  }
  return lines.join('\n');
}
