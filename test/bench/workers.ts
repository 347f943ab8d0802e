// What a second delivery worker brings: a backlog that was accepted while everything was paused, delivered by one worker
// process and by two. To hosts that answer as real ones do, so many of them that no lane's limit binds; and to a sink
// that answers at once, where processors are all that counts. One after the other in every round, each on a fresh
// database. With what the processors did meanwhile: where one worker has taken all there is, a second can bring nothing.
import { availableParallelism } from 'node:os';
import { join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { Client } from 'pg';
import { startDns, type DnsZones } from '../support/dns.ts';
import { addressAt } from './addresses.ts';
import { findFreePort } from './children.ts';
import { startGenerator } from './load.ts';
import { makeRequest } from './message.ts';
import { PROGRAMS } from './postfix.ts';
import { machineBusyS } from './processes.ts';
import { startProduct, type Settings } from './product.ts';
import { median } from './report.ts';
import type { CasePlan } from './side.ts';
import { startSink } from './sink.ts';

const DESTINATIONS = 200;
const REPLY_MS = 30;
/** Two bring this much more than one, where processors are left. */
const RATIO_MIN = 1.6;
const PHASE_MAX_MS = 900_000;
/** Workers have read by then that all is paused. */
const SETTLE_MS = 3_000;

interface Round {
  readonly perS: number;
  /** Processors in use, by part; `machine`: everything, other programs too. */
  readonly cpus: ReadonlyMap<string, number>;
}

interface Kind {
  readonly name: string;
  readonly isSlow: boolean;
}

const KINDS: readonly Kind[] = [
  { name: `${DESTINATIONS} hosts that take ${REPLY_MS} ms for a reply`, isSlow: true },
  { name: 'a sink that answers at once', isSlow: false },
];

export async function benchWorkers(plan: CasePlan): Promise<string> {
  const lines: string[] = [];
  for (const kind of KINDS) {
    const ones: Round[] = [];
    const twos: Round[] = [];
    for (let round = 1; round <= plan.rounds; round += 1) {
      for (const workers of [1, 2]) {
        const one = await deliver(plan, kind, { workers, name: `${ones.length}-${twos.length}` });
        plan.say(
          `round ${round}: ${workers} to ${kind.name}: ${Math.round(one.perS)}/s; processors: ${render(one)}`,
        );
        (workers === 1 ? ones : twos).push(one);
      }
    }
    const rate = (rounds: readonly Round[]): number => median(rounds.map(({ perS }) => perS));
    const ratio = rate(twos) / rate(ones);
    const verdict = ratio >= RATIO_MIN ? '' : `, below ${RATIO_MIN}`;
    lines.push(
      `  ${kind.name}: one ${Math.round(rate(ones))}/s, two ${Math.round(rate(twos))}/s, ratio ${ratio.toFixed(2)}${verdict}`,
      `    processors with one: ${render(ones[0]!)}`,
      `    processors with two: ${render(twos[0]!)}`,
    );
  }
  return [
    `A backlog of ${plan.emails} emails, one worker process and two, on ${availableParallelism()} processors (medians of ${plan.rounds}):`,
    ...lines,
  ].join('\n');
}

const render = ({ cpus }: Round): string =>
  [...cpus].map(([part, count]) => `${part} ${count.toFixed(2)}`).join(', ');

async function deliver(
  plan: CasePlan,
  { isSlow }: Kind,
  about: { readonly workers: number; readonly name: string },
): Promise<Round> {
  const { cleanup, folder } = plan;
  const port = await findFreePort();
  const hosts = Array.from({ length: isSlow ? DESTINATIONS : 1 }, (_, index) => index);
  const zones: DnsZones = {};
  for (const index of hosts) {
    zones[`d${index}.test`] = { MX: [`10 mx.d${index}.test`] };
    zones[`mx.d${index}.test`] = { A: [addressAt(index)] };
  }
  const dns = await startDns(zones);
  const { stop: stopDns } = cleanup.add(dns.stop);
  const sink = await startSink({
    program: plan.hasSmtpSink ? PROGRAMS.sink : null,
    port,
    folder,
    ...(isSlow ? { addresses: DESTINATIONS, replyMs: REPLY_MS } : {}),
    cleanup,
  });
  const direct: Settings = {
    MAILSTEAD_DELIVERY: 'direct',
    MAILSTEAD_SMARTHOST_URL: null,
    MAILSTEAD_DNS_SERVERS: dns.server,
    MAILSTEAD_MX_DESTINATION_PORT: String(port),
    MAILSTEAD_PRIVATE_HOSTS: '127.0.0.0/8',
  };
  const product = await startProduct({
    folder: join(folder, `workers-${isSlow ? 'slow' : 'fast'}-${about.name}`),
    sinkPort: port,
    workers: about.workers,
    roles: null,
    profileFolder: null,
    settings: isSlow ? direct : {},
    cleanup,
  });
  const requests = hosts.map((index) =>
    makeRequest(product.httpPort, product.key, `one@d${index}.test`),
  );
  const generator = startGenerator(cleanup);
  const post = async (count: number): Promise<void> => {
    const order = { port: product.httpPort, requests, count, ratePerS: null };
    const connections = Math.min(plan.connections, count);
    await generator.send({ ...order, connections }, PHASE_MAX_MS);
  };
  const db = new Client({ connectionString: await product.databaseUrl() });
  await db.connect();
  // Ways and lanes are known, and code is compiled, as in a program that runs for longer than a benchmark.
  const warm = Math.max(1_000, hosts.length);
  await Promise.all([post(warm), sink.untilCount(warm, PHASE_MAX_MS)]);
  await db.query(
    `insert into pause (id, kind, name, reason, paused_at) values (uuidv7(), 'all', '', 'benchmark', now())`,
  );
  await sleep(SETTLE_MS);
  const before = sink.count();
  await post(plan.emails);
  await db.query('vacuum (analyze) email, email_content, delivery');
  await db.query('checkpoint');
  await db.query(`delete from pause where kind = 'all'`);
  const beganAt = await sink.untilCount(before + 1, PHASE_MAX_MS);
  const cpu = product.cpu();
  const [sinkS, busyS] = [sink.cpuS(), machineBusyS()];
  const endedAt = await sink.untilCount(before + plan.emails, PHASE_MAX_MS);
  const seconds = (endedAt - beganAt) / 1_000;
  const cpus = new Map(
    [...product.cpu()].map(([part, used]) => [part, (used - (cpu.get(part) ?? 0)) / seconds]),
  );
  cpus.set('sink', (sink.cpuS() - sinkS) / seconds);
  cpus.set('machine', (machineBusyS() - busyS) / seconds);
  await db.end();
  await product.stop();
  await sink.stop();
  await stopDns();
  return { perS: plan.emails / seconds, cpus };
}
