// What the cases beside the plain speed have in common: our side with its sink and load, warmed up; a rate as often as
// wanted; and the lines about memory.
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { BenchFailed, findFreePort, type Cleanup } from './children.ts';
import { startGenerator, type Load } from './load.ts';
import { makeRequest, RECIPIENT } from './message.ts';
import { PROGRAMS } from './postfix.ts';
import { startProduct, type Peak, type Product, type Settings } from './product.ts';
import { median } from './report.ts';
import { startSink, type Sink } from './sink.ts';

export interface CasePlan {
  readonly emails: number;
  readonly rounds: number;
  readonly rows: number;
  readonly connections: number;
  readonly workers: number;
  readonly folder: string;
  readonly hasSmtpSink: boolean;
  readonly cleanup: Cleanup;
  readonly say: (line: string) => void;
}

export interface Side {
  readonly product: Product;
  readonly sink: Sink;
  /** Sends to these recipients in turn; resolves when all are accepted. `ratePerS` null: as fast as they are. */
  post(options: {
    readonly count: number;
    readonly recipients?: readonly string[];
    readonly ratePerS?: number | null;
  }): Promise<Load>;
  /**
   * Messages a second from the first request to the last message in the sink, median of the rounds. `arriving`: how
   * many of a round do; all where it is left out.
   */
  rate(options: {
    readonly recipients?: readonly string[];
    readonly arriving?: number;
  }): Promise<number>;
  stop(): Promise<void>;
}

const WARM_UP_MAX = 1_000;
const PHASE_MAX_MS = 600_000;
const SETTLE_MS = 500;
const SETTLES_MAX = 40;
/** What no process of ours may hold. */
export const MEMORY_MAX_MB = 300;

export async function startSide(
  plan: CasePlan,
  about: {
    readonly name: string;
    /** Whom the warm-up is for. */
    readonly recipients?: readonly string[];
    /** Of the sink, besides 127.0.0.1. */
    readonly addresses?: number;
    readonly settings?: (sinkPort: number) => Settings;
  },
): Promise<Side> {
  const { folder, cleanup, connections } = plan;
  const port = await findFreePort();
  const generator = startGenerator(cleanup);
  const sink = await startSink({
    program: plan.hasSmtpSink ? PROGRAMS.sink : null,
    port,
    folder,
    addresses: about.addresses ?? 0,
    cleanup,
  });
  const product = await startProduct({
    folder: join(folder, about.name),
    sinkPort: port,
    workers: plan.workers,
    roles: null,
    profileFolder: null,
    settings: about.settings?.(port) ?? {},
    cleanup,
  });
  const post: Side['post'] = ({ count, recipients = [RECIPIENT], ratePerS = null }) => {
    const requests = recipients.map((one) => makeRequest(product.httpPort, product.key, one));
    const order = { port: product.httpPort, requests, count, ratePerS };
    return generator.send({ ...order, connections: Math.min(connections, count) }, PHASE_MAX_MS);
  };
  const quiet = async (): Promise<number> => {
    let count = sink.count();
    for (let tries = 0; tries < SETTLES_MAX; tries += 1) {
      await sleep(SETTLE_MS);
      const now = sink.count();
      if (now === count) return count;
      count = now;
    }
    throw new BenchFailed('messages come to the sink that nobody counts on');
  };
  const recipients = about.recipients ?? [RECIPIENT];
  const warmUp = Math.min(Math.max(WARM_UP_MAX, recipients.length), plan.emails);
  const had = await quiet();
  await Promise.all([
    post({ count: warmUp, recipients }),
    sink.untilCount(had + warmUp, PHASE_MAX_MS),
  ]);

  const measure = async (of: {
    readonly recipients?: readonly string[];
    readonly arriving?: number;
  }): Promise<number> => {
    const before = await quiet();
    const arriving = of.arriving ?? plan.emails;
    const [load, endedAt] = await Promise.all([
      post({ count: plan.emails, ...(of.recipients && { recipients: of.recipients }) }),
      sink.untilCount(before + arriving, PHASE_MAX_MS),
    ]);
    return arriving / ((endedAt - (load.startedAtMs - performance.timeOrigin)) / 1_000);
  };
  return {
    product,
    sink,
    post,
    async rate(of) {
      const rates: number[] = [];
      for (let round = 0; round < plan.rounds; round += 1) rates.push(await measure(of));
      return median(rates);
    },
    async stop() {
      await generator.stop();
      await product.stop();
      await sink.stop();
    },
  };
}

/** The largest of each part, and whether ours keep the limit. */
export function renderPeaks(peaks: readonly Peak[]): string {
  const parts = [...new Set(peaks.map(({ part }) => part))].map((part) => ({
    part,
    mb: Math.max(...peaks.filter((one) => one.part === part).map(({ peakMb }) => peakMb)),
  }));
  const isKept = parts.every(({ part, mb }) => part === 'postgres' || mb < MEMORY_MAX_MB);
  const list = parts.map(({ part, mb }) => `${part} ${mb.toFixed(0)} MB`).join(', ');
  return `largest memory of a process (RSS): ${list}; the limit of ours is ${MEMORY_MAX_MB} MB: ${isKept ? 'kept' : 'BROKEN'}`;
}

/** `name  0.93 of the rate without (1,234/s, 1,320/s); the limit is 0.80: kept` */
export function renderRatio(
  name: string,
  { without, beside, min }: { without: number; beside: number; min: number },
): string {
  const ratio = beside / without;
  const rates = `${Math.round(beside)}/s, ${Math.round(without)}/s without`;
  return `${name.padEnd(56)} ${ratio.toFixed(2)} of the rate (${rates}); at least ${min.toFixed(2)}: ${ratio >= min ? 'kept' : 'BROKEN'}`;
}
