// Mail that comes in: how fast it is taken, checked, routed and stored, beside a private Postfix that takes the same messages
// into its queue and does nothing more with them. Both durable before the 250, both driven by Postfix's smtp-source in turn on
// the same machine. What the DNS says about the sender comes from a server of ours.
import { mkdirSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { Client } from 'pg';
import { startDns } from '../support/dns.ts';
import { BenchFailed, findFreePort } from './children.ts';
import { runSource, startPostfix, whyNoPostfix } from './postfix.ts';
import { startProduct, type Product } from './product.ts';
import { median } from './report.ts';
import { renderPeaks, type CasePlan } from './side.ts';

/** Of the product beside Postfix. */
const RATIO_MIN = 1;
const PHASE_MAX_MS = 600_000;
const WARM_UP_MAX = 2_000;
/** Beside the one that is meant. */
const ROUTES = 100;
const SENDER_DOMAIN = 'sender.test';
const AUTHOR = `bench@${SENDER_DOMAIN}`;
const RECIPIENT_DOMAIN = 'mailstead.test';
const RECIPIENT = `Box@${RECIPIENT_DOMAIN}`;

interface Rounds {
  readonly port: number;
  readonly tail: () => string;
  readonly cpu: Product['cpu'];
  readonly rates: number[];
  /** Of each part of it, a message. */
  readonly cpuMs: ReadonlyMap<string, number>[];
}

export async function benchInbound(plan: CasePlan): Promise<string> {
  const missing = whyNoPostfix();
  if (missing !== null) throw new BenchFailed(missing);
  const { cleanup, connections, emails, folder } = plan;
  const dns = await startDns({
    [SENDER_DOMAIN]: { TXT: ['v=spf1 ip4:127.0.0.0/8 -all'], A: ['127.0.0.1'] },
    [`_dmarc.${SENDER_DOMAIN}`]: { TXT: ['v=DMARC1; p=none'] },
  });
  const { stop: stopDns } = cleanup.add(dns.stop);
  const mxPort = await findFreePort();
  const productFolder = join(folder, 'inbound');
  const policy = join(productFolder, 'data', 'config');
  mkdirSync(policy, { recursive: true });
  // One client is one address here.
  writeFileSync(
    join(policy, 'receiving.json'),
    JSON.stringify({ connections: { max: 1_000, per_client: 500, new_per_minute: 100_000 } }),
  );
  const product = await startProduct({
    folder: productFolder,
    sinkPort: await findFreePort(),
    workers: plan.workers,
    roles: null,
    profileFolder: null,
    settings: {
      MAILSTEAD_MX_PORT: String(mxPort),
      MAILSTEAD_DNS_SERVERS: dns.server,
    },
    cleanup,
  });
  const postfix = await startPostfix({
    folder: join(folder, 'inbound-postfix'),
    sinkPort: await findFreePort(),
    isQueueOnly: true,
    cleanup,
  });
  await addRoutes(product);

  const sides: Record<'product' | 'postfix', Rounds> = {
    product: { port: mxPort, tail: product.tail, cpu: product.cpu, rates: [], cpuMs: [] },
    postfix: { port: postfix.smtpPort, tail: postfix.tail, cpu: postfix.cpu, rates: [], cpuMs: [] },
  };
  const send = (side: 'product' | 'postfix', count: number) => {
    const { port, tail } = sides[side];
    const load = { count, connections, maxMs: PHASE_MAX_MS, author: AUTHOR, recipient: RECIPIENT };
    return runSource({ ...load, port, tail, cleanup });
  };
  const warmUp = Math.min(WARM_UP_MAX, emails);
  for (const side of ['product', 'postfix'] as const) await send(side, warmUp);
  for (let round = 1; round <= plan.rounds; round += 1) {
    for (const side of ['product', 'postfix'] as const) {
      const before = sides[side].cpu();
      const { seconds } = await send(side, emails);
      sides[side].rates.push(emails / seconds);
      const spent = [...sides[side].cpu()].map(
        ([part, s]) => [part, ((s - (before.get(part) ?? 0)) * 1_000) / emails] as const,
      );
      sides[side].cpuMs.push(new Map(spent));
      plan.say(`round ${round}: ${side} ${Math.round(emails / seconds)}/s`);
    }
  }
  const expected = warmUp + emails * plan.rounds;
  const stored = await countStored(product);
  const peaks = product.memory();
  await product.stop();
  await postfix.stop();
  await stopDns();
  if (stored !== expected) throw new BenchFailed(`${expected} were accepted, ${stored} are stored`);
  const ratio = median(sides.product.rates) / median(sides.postfix.rates);
  const line = (name: string, { rates, cpuMs }: Rounds): string => {
    const cpu = [...cpuMs[0]!.keys()].map((part) => {
      const ms = median(cpuMs.map((round) => round.get(part) ?? 0));
      return `${part} ${ms.toFixed(2)}`;
    });
    return `  ${name.padEnd(10)} ${Math.round(median(rates))}/s; ms of CPU a message: ${cpu.join(', ')}`;
  };
  return [
    `Inbound, ${emails} messages of 2 KB a round over ${connections} connections, medians of ${plan.rounds}:`,
    line('Mailstead', sides.product),
    line('Postfix', sides.postfix),
    `  ratio ${ratio.toFixed(2)}; at least ${RATIO_MIN.toFixed(2)}: ${ratio >= RATIO_MIN ? 'kept' : 'BROKEN'}`,
    `  every accepted message is stored once, with its route: ${stored}`,
    renderPeaks(peaks),
  ].join('\n');
}

/** The recipient's route is one of many. */
async function addRoutes(product: Product): Promise<void> {
  const call = async (method: string, path: string, body?: unknown): Promise<unknown> => {
    const response = await fetch(`http://127.0.0.1:${product.httpPort}${path}`, {
      method,
      headers: { authorization: `Bearer ${product.key}`, 'content-type': 'application/json' },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
    });
    if (!response.ok) throw new BenchFailed(`${method} ${path}: ${await response.text()}`);
    return response.json();
  };
  const { data } = (await call('GET', '/domains')) as { data: { id: string; name: string }[] };
  const domain = data.find(({ name }) => name === RECIPIENT_DOMAIN);
  if (domain === undefined) throw new BenchFailed(`no domain ${RECIPIENT_DOMAIN}`);
  for (let number = 0; number <= ROUTES; number += 1) {
    const local = number === ROUTES ? RECIPIENT.split('@')[0] : `box${number}`;
    await call('POST', '/receiving/routes', {
      domain_id: domain.id,
      type: 'exact',
      local_part: local,
    });
  }
}

async function countStored(product: Product): Promise<number> {
  const client = new Client({ connectionString: await product.databaseUrl() });
  await client.connect();
  try {
    const { rows } = await client.query<{ count: string }>(
      `select count(*) from received_email e
       join received_content c on c.tenant_id = e.tenant_id and c.email_id = e.id
       where e.route_decisions -> 0 ->> 'status' = 'exact'`,
    );
    return Number(rows[0]?.count);
  } finally {
    await client.end();
  }
}
