// One round of either side: start it fresh, send a sample and see that it is signed, warm it up, send the
// measured messages, see the last one in the sink, count what it cost, stop it.
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { BenchFailed, findFreePort, type Cleanup } from './children.ts';
import { startGenerator, type Load } from './load.ts';
import { makeRequest } from './message.ts';
import { PROGRAMS, startPostfix } from './postfix.ts';
import { machineBusyS, threadCpuS } from './processes.ts';
import { startProduct, type Peak, type Product } from './product.ts';
import { signedWith, verifySamples } from './signatures.ts';
import { startSink, type Sink } from './sink.ts';

export interface Plan {
  readonly emails: number;
  readonly connections: number;
  readonly workers: number;
  /** Everything that a round writes goes below it. */
  readonly folder: string;
  /** Whether Postfix's smtp-sink is there. */
  readonly hasSmtpSink: boolean;
  readonly cleanup: Cleanup;
}

/** What one side did with the measured messages. */
export interface Round {
  /** Messages a second, from the first request to the last message in the sink. */
  readonly endToEndPerS: number;
  readonly acceptPerS: number;
  /** CPU seconds by part of the side that is measured. */
  readonly cpuS: ReadonlyMap<string, number>;
  readonly generatorCpuS: number;
  readonly sinkCpuS: number;
  /** CPU seconds of everything else on the machine meanwhile, this program included. */
  readonly othersCpuS: number;
  readonly seconds: number;
  /** The algorithms that signed the sample. */
  readonly signedWith: readonly string[];
}

export interface ProductRound extends Round {
  /** Closed loop, while it delivers. */
  readonly full: Load;
  /** At half of the rate that it keeps up end to end. */
  readonly half: Load & { readonly ratePerS: number };
  readonly peakMb: readonly Peak[];
  /** CPU seconds by thread name of main and the workers, while measured. */
  readonly threads: readonly {
    readonly part: string;
    readonly pid: number;
    readonly cpuS: ReadonlyMap<string, number>;
  }[];
  /** When the measured part began and ended, in microseconds of the monotonic clock. */
  readonly window: { readonly fromUs: number; readonly toUs: number };
}

const SAMPLES = 3;
/** Until then V8 is still compiling, for about 5 % of the processor time. */
const WARM_UP_MAX = 4_000;
const PHASE_MAX_MS = 180_000;
const SETTLE_MS = 300;
const PACED_MAX_S = 8;

const subtract = (
  after: ReadonlyMap<string, number>,
  before: ReadonlyMap<string, number>,
): ReadonlyMap<string, number> =>
  new Map([...after].map(([name, value]) => [name, value - (before.get(name) ?? 0)]));

const sum = (values: ReadonlyMap<string, number>): number =>
  [...values.values()].reduce((total, one) => total + one, 0);

const clockUs = (): number => Number(process.hrtime.bigint() / 1_000n);

let rounds = 0;
const nextFolder = (plan: Plan, name: string): string =>
  join(plan.folder, `${name}-${(rounds += 1)}`);

interface Measured {
  readonly startedAt: number;
  readonly endedAt: number;
  readonly sinkCpuS: number;
  readonly cpuS: ReadonlyMap<string, number>;
  readonly busyS: number;
}

/** Counts what `send` costs until its messages are in the sink. It resolves with when it began. */
async function measure(
  about: {
    readonly sink: Sink;
    readonly emails: number;
    readonly cpu: () => ReadonlyMap<string, number>;
    readonly tail: () => string;
  },
  send: () => Promise<number>,
): Promise<Measured> {
  const { sink, emails } = about;
  const had = sink.count();
  const before = { cpu: about.cpu(), sink: sink.cpuS(), busy: machineBusyS() };
  let startedAt: number;
  let endedAt: number;
  try {
    // The sink is watched from the start: sending may end long before or after the last delivery.
    [startedAt, endedAt] = await Promise.all([send(), sink.untilCount(had + emails, PHASE_MAX_MS)]);
  } catch (error) {
    throw new BenchFailed(`${(error as Error).message}\n${about.tail()}`, { cause: error });
  }
  const busyS = machineBusyS() - before.busy;
  const cpuS = subtract(about.cpu(), before.cpu);
  const sinkCpuS = sink.cpuS() - before.sink;
  await sleep(SETTLE_MS);
  const came = sink.count() - had;
  if (came !== emails) throw new BenchFailed(`${came} messages in the sink instead of ${emails}`);
  return { startedAt, endedAt, sinkCpuS, cpuS, busyS };
}

function toRound(
  measured: Measured,
  about: {
    readonly emails: number;
    readonly acceptPerS: number;
    readonly generatorCpuS: number;
    readonly signedWith: readonly string[];
  },
): Round {
  const seconds = (measured.endedAt - measured.startedAt) / 1000;
  const known = sum(measured.cpuS) + about.generatorCpuS + measured.sinkCpuS;
  return {
    endToEndPerS: about.emails / seconds,
    acceptPerS: about.acceptPerS,
    cpuS: measured.cpuS,
    generatorCpuS: about.generatorCpuS,
    sinkCpuS: measured.sinkCpuS,
    othersCpuS: Math.max(0, measured.busyS - known),
    seconds,
    signedWith: about.signedWith,
  };
}

/** A sink that keeps the sample, and, on the same port after it, one that only counts. */
async function withSinks<T>(
  plan: Plan,
  name: string,
  work: (sinks: {
    readonly port: number;
    /** Sends the sample with `send`; gives the folder with it. `uncalled` messages come by themselves. */
    sample(send: (count: number) => Promise<unknown>, uncalled?: number): Promise<string>;
    start(): Promise<Sink>;
  }) => Promise<T>,
): Promise<T> {
  const port = await findFreePort();
  const program = plan.hasSmtpSink ? PROGRAMS.sink : null;
  const common = { program, port, folder: plan.folder, cleanup: plan.cleanup };
  const dumpFolder = nextFolder(plan, `sample-${name}`);
  let sampleSink: Sink | null = await startSink({ ...common, dumpFolder });
  let sink: Sink | null = null;
  try {
    return await work({
      port,
      async sample(send, uncalled = 0) {
        await send(SAMPLES);
        await sampleSink?.untilCount(SAMPLES + uncalled, PHASE_MAX_MS);
        await sleep(SETTLE_MS);
        await sampleSink?.stop();
        sampleSink = null;
        return dumpFolder;
      },
      async start() {
        sink = await startSink(common);
        return sink;
      },
    });
  } finally {
    await sampleSink?.stop();
    await (sink as Sink | null)?.stop();
  }
}

export function measureProduct(
  plan: Plan,
  options: { readonly profileFolder: string | null } = { profileFolder: null },
): Promise<ProductRound> {
  return withSinks(plan, 'product', async (sinks) => {
    const generator = startGenerator(plan.cleanup);
    const product = await startProduct({
      folder: nextFolder(plan, 'product'),
      sinkPort: sinks.port,
      workers: plan.workers,
      roles: null,
      profileFolder: options.profileFolder,
      cleanup: plan.cleanup,
    });
    const post = (count: number, ratePerS: number | null = null): Promise<Load> =>
      generator.send(orderFor(product, plan, { count, ratePerS }), PHASE_MAX_MS);
    // The first start in development mode sends an email of its own.
    const samples = await sinks.sample(post, 1);
    const sink = await sinks.start();
    const warmUp = Math.min(WARM_UP_MAX, plan.emails);
    await Promise.all([post(warmUp), sink.untilCount(warmUp, PHASE_MAX_MS)]);
    await sleep(SETTLE_MS);

    const threadsBefore = new Map(product.processes().map(({ pid }) => [pid, threadCpuS(pid)]));
    const fromUs = clockUs();
    let full: Load | null = null;
    const measured = await measure(
      { sink, emails: plan.emails, cpu: product.cpu, tail: product.tail },
      async () => {
        full = await post(plan.emails);
        return full.startedAtMs - performance.timeOrigin;
      },
    );
    const window = { fromUs, toUs: clockUs() };
    const threads = product.processes().map(({ pid, part }) => ({
      pid,
      part,
      cpuS: subtract(threadCpuS(pid), threadsBefore.get(pid) ?? new Map()),
    }));
    const load = full as Load | null;
    if (load === null) throw new BenchFailed('no load was sent');

    const round = toRound(measured, {
      emails: plan.emails,
      acceptPerS: load.accepted / load.seconds,
      generatorCpuS: load.cpuS,
      signedWith: signedWith(samples),
    });
    const ratePerS = round.endToEndPerS / 2;
    const count = Math.ceil(Math.min(plan.emails, ratePerS * PACED_MAX_S));
    const had = sink.count();
    const [half] = await Promise.all([
      post(count, ratePerS),
      sink.untilCount(had + count, PHASE_MAX_MS),
    ]);
    const peakMb = product.memory();
    await generator.stop();
    await product.stop();
    return {
      ...round,
      full: load,
      half: { ...half, ratePerS },
      peakMb,
      threads,
      window,
    };
  });
}

/** What the API alone accepts when nothing delivers beside it. */
export async function measureAcceptAlone(plan: Plan): Promise<Load> {
  const generator = startGenerator(plan.cleanup);
  const product = await startProduct({
    folder: nextFolder(plan, 'accept'),
    sinkPort: await findFreePort(),
    workers: plan.workers,
    roles: 'api',
    profileFolder: null,
    cleanup: plan.cleanup,
  });
  const post = (count: number): Promise<Load> =>
    generator.send(orderFor(product, plan, { count, ratePerS: null }), PHASE_MAX_MS);
  await post(Math.min(WARM_UP_MAX, plan.emails));
  const load = await post(plan.emails);
  await generator.stop();
  await product.stop();
  return load;
}

function orderFor(
  { httpPort, key }: Product,
  { connections }: Plan,
  { count, ratePerS }: { readonly count: number; readonly ratePerS: number | null },
) {
  const requests = [makeRequest(httpPort, key)];
  return { port: httpPort, requests, count, connections: Math.min(connections, count), ratePerS };
}

export function measurePostfix(plan: Plan): Promise<Round> {
  return withSinks(plan, 'postfix', async (sinks) => {
    const postfix = await startPostfix({
      folder: nextFolder(plan, 'postfix'),
      sinkPort: sinks.port,
      cleanup: plan.cleanup,
    });
    const load = { connections: plan.connections, maxMs: PHASE_MAX_MS };
    const samples = await sinks.sample((count) => postfix.send({ ...load, count }));
    await verifySamples(samples, postfix.publicKey);
    const sink = await sinks.start();
    const warmUp = Math.min(WARM_UP_MAX, plan.emails);
    await Promise.all([
      postfix.send({ ...load, count: warmUp }),
      sink.untilCount(warmUp, PHASE_MAX_MS),
    ]);
    await sleep(SETTLE_MS);

    let sent = { seconds: 0, cpuS: 0 };
    const measured = await measure(
      { sink, emails: plan.emails, cpu: postfix.cpu, tail: postfix.tail },
      async () => {
        const done = await postfix.send({ ...load, count: plan.emails });
        sent = done;
        return done.startedAt;
      },
    );
    await postfix.stop();
    return toRound(measured, {
      emails: plan.emails,
      acceptPerS: plan.emails / sent.seconds,
      generatorCpuS: sent.cpuS,
      signedWith: signedWith(samples),
    });
  });
}
