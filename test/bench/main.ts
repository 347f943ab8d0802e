// `npm run bench`: how fast mail goes from the API to an SMTP sink, always beside Postfix with OpenDKIM doing the
// same work on the same machine in the same minutes.
//
//   --emails N        messages a round and side (default 8,000)
//   --rounds R        rounds of both sides in turn (default 3)
//   --connections C   connections of the load (default 20)
//   --workers W       MAILSTEAD_WORKERS (default 1)
//   --only SIDE       product or postfix
//   --profile         one more round of the product under V8's profiler, and where its time went
//   --json            the numbers as JSON on stdout, and nothing else there
//
// Other cases, each printed as ratios of what the same machine did just before:
//
//   attachment        what an email with 40 MB of attachments costs in memory
//   backlog           the rate beside --rows queued rows that are not to be sent now
//   noisy             how long other tenants' mail takes while one tenant has --rows emails to be sent
//   dead              the rate of 990 destinations beside ten that refuse or never answer
//   inbound           mail that comes in, checked, routed and stored, beside Postfix taking it into its queue
//   workers           a backlog delivered by one worker process and by two, to hosts that take their time and to one
//                     that answers at once (--emails, default 8,000)
//   fan-out           a broadcast to --rows contacts (default 100,000), and what the API feels of it
//
//   --rows N          (default 1,000,000)
//
// Loopback only. Everything it starts it stops, everything it writes lies in one temporary folder that it removes;
// also after a failure and on SIGINT. Where the temporary folder lies decides which disk is measured (TMPDIR).
import { chmodSync, existsSync, mkdirSync, mkdtempSync, rmSync, statfsSync } from 'node:fs';
import { availableParallelism, cpus, release, tmpdir, type } from 'node:os';
import { join } from 'node:path';
import { parseArgs } from 'node:util';
import { benchAttachment } from './attachment.ts';
import { benchBacklog } from './backlog.ts';
import { BenchFailed, createCleanup } from './children.ts';
import { benchDead } from './dead.ts';
import { benchFanOut } from './fan-out.ts';
import { benchInbound } from './inbound.ts';
import type { Load } from './load.ts';
import { benchNoisyTenant } from './noisy-tenant.ts';
import { describePostfix, PROGRAMS, whyNoPostfix } from './postfix.ts';
import { readProfiles } from './profile.ts';
import { renderProfiles, renderResults, summarise, type Results } from './report.ts';
import {
  measureAcceptAlone,
  measurePostfix,
  measureProduct,
  type Plan,
  type ProductRound,
  type Round,
} from './rounds.ts';
import { benchWorkers } from './workers.ts';

const MAX = { emails: 1_000_000, rounds: 20, connections: 200, workers: 16, rows: 10_000_000 };
const TMPFS = 0x01021994;
const EXIT = { SIGINT: 130, SIGTERM: 143, SIGHUP: 129 } as const;

const CASES = ['speed', 'attachment', 'backlog', 'noisy', 'dead', 'inbound', 'fan-out', 'workers'];

interface Options {
  readonly what: string;
  readonly emails: number;
  readonly rounds: number;
  readonly connections: number;
  readonly workers: number;
  readonly rows: number;
  readonly only: 'product' | 'postfix' | null;
  readonly profile: boolean;
  readonly json: boolean;
}

function readOptions(): Options {
  const { values, positionals } = parseArgs({
    allowPositionals: true,
    options: {
      emails: { type: 'string', default: '8000' },
      rounds: { type: 'string', default: '3' },
      connections: { type: 'string', default: '20' },
      workers: { type: 'string', default: '1' },
      rows: { type: 'string' },
      only: { type: 'string' },
      profile: { type: 'boolean', default: false },
      json: { type: 'boolean', default: false },
    },
  });
  const whole = (name: keyof typeof MAX, min: number): number => {
    const rows = positionals[0] === 'fan-out' ? '100000' : '1000000';
    const value = Number(values[name] ?? rows);
    if (Number.isInteger(value) && value >= min && value <= MAX[name]) return value;
    throw new BenchFailed(`--${name} must be a whole number from ${min} to ${MAX[name]}`);
  };
  const only = values.only ?? null;
  if (only !== null && only !== 'product' && only !== 'postfix') {
    throw new BenchFailed('--only must be product or postfix');
  }
  const [what = 'speed', ...more] = positionals;
  if (!CASES.includes(what) || more.length > 0) {
    throw new BenchFailed(`what to measure is one of ${CASES.join(', ')}`);
  }
  return {
    what,
    emails: whole('emails', 1),
    rounds: whole('rounds', 1),
    connections: whole('connections', 1),
    workers: whole('workers', 0),
    rows: whole('rows', 1),
    only,
    profile: values.profile,
    json: values.json,
  };
}

async function bench(options: Options, plan: Plan): Promise<void> {
  const say = (line: string): void => console.error(`bench: ${line}`);
  const whyNoRatio = options.only === 'product' ? 'only the product was asked for' : whyNoPostfix();
  if (whyNoRatio !== null) say(`no Postfix beside: ${whyNoRatio}`);
  if (statfsSync(plan.folder).type === TMPFS) {
    say(`${plan.folder} is in memory, so nothing waits for a disk: set TMPDIR to a folder on one`);
  }
  const product: ProductRound[] = [];
  const postfix: Round[] = [];
  for (let round = 1; round <= options.rounds; round += 1) {
    if (options.only !== 'postfix') {
      const one = await measureProduct(plan);
      say(`round ${round}: Mailstead ${Math.round(one.endToEndPerS)}/s end to end`);
      product.push(one);
    }
    if (whyNoRatio === null) {
      const one = await measurePostfix(plan);
      say(`round ${round}: Postfix ${Math.round(one.endToEndPerS)}/s end to end`);
      postfix.push(one);
    }
  }
  const acceptAlone: Load | null =
    options.only === 'postfix' ? null : await measureAcceptAlone(plan);
  const results: Results = {
    emails: plan.emails,
    connections: plan.connections,
    machine: await describeMachine(plan, whyNoRatio === null),
    cpuCount: availableParallelism(),
    postfixName: whyNoRatio === null ? 'Postfix+OpenDKIM' : null,
    whyNoRatio,
    product,
    postfix,
    acceptAlone,
  };
  if (options.json) {
    // A Map is a detail of ours.
    const plain = (_: string, value: unknown): unknown =>
      value instanceof Map ? Object.fromEntries(value) : value;
    console.log(JSON.stringify({ ...summarise(results), ...results }, plain, 2));
  } else {
    console.log(renderResults(results));
  }
  if (!options.profile || options.only === 'postfix') return;
  const profileFolder = join(plan.folder, 'profile');
  mkdirSync(profileFolder);
  const round = await measureProduct(plan, { profileFolder });
  const text = renderProfiles(round, readProfiles(profileFolder, round.window));
  if (options.json) console.error(text);
  else console.log(text);
}

async function describeMachine(plan: Plan, withPostfix: boolean): Promise<string> {
  const [cpu] = cpus();
  const parts = [
    `${type()} ${release()}`,
    `${availableParallelism()} x ${cpu?.model ?? 'unknown CPU'}`,
    `Node ${process.version}`,
    ...(plan.workers === 1 ? [] : [`${plan.workers} workers`]),
    ...(withPostfix ? [await describePostfix()] : []),
  ];
  return parts.join(', ');
}

const cleanup = createCleanup();
let isStopped = false;
async function end(exitCode: number): Promise<void> {
  isStopped = true;
  await cleanup.run();
  process.exit(exitCode);
}
for (const signal of ['SIGINT', 'SIGTERM', 'SIGHUP'] as const) {
  process.on(signal, () => void end(EXIT[signal]));
}
// A stray error event must not leave servers behind either.
process.on('uncaughtException', (fault) => {
  console.error(fault);
  void end(1);
});
try {
  const options = readOptions();
  const folder = mkdtempSync(join(tmpdir(), 'mailstead-bench-'));
  // Whatever still writes there has ended when this first step is undone last.
  cleanup.add(async () => rmSync(folder, { recursive: true, force: true }));
  chmodSync(folder, 0o755); // Postfix and smtp-sink leave root behind.
  const { emails, connections, workers } = options;
  const hasSmtpSink = existsSync(PROGRAMS.sink);
  const plan: Plan = { emails, connections, workers, folder, hasSmtpSink, cleanup };
  const say = (line: string): void => console.error(`bench: ${line}`);
  const many = { ...plan, rounds: options.rounds, rows: options.rows, say };
  if (options.what === 'attachment') console.log(await benchAttachment(plan));
  else if (options.what === 'backlog') console.log(await benchBacklog(many));
  else if (options.what === 'noisy') console.log(await benchNoisyTenant(many));
  else if (options.what === 'dead') console.log(await benchDead(many));
  else if (options.what === 'inbound') console.log(await benchInbound(many));
  else if (options.what === 'fan-out') console.log(await benchFanOut(many));
  else if (options.what === 'workers') console.log(await benchWorkers(many));
  else await bench(options, plan);
} catch (error) {
  // What fails after a signal fails because of it.
  if (!isStopped) {
    process.exitCode = 1;
    console.error(error instanceof BenchFailed ? `bench: ${error.message}` : error);
  }
}
await cleanup.run();
