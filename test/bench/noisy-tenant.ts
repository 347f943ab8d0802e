// Whether one tenant's million emails make the others wait: from accept to delivered, while nothing else happens, and
// while that tenant's mail is sent as fast as it goes.
import { setTimeout as sleep } from 'node:timers/promises';
import { BenchFailed, until } from './children.ts';
import { openRows, type Rows } from './rows.ts';
import { renderPeaks, startSide, type CasePlan, type Side } from './side.ts';

const RATIO_MAX = 2;
/** A tenant that sends now and then. */
const RATE_PER_S = 20;
const SECONDS = 20;
const SETTLE_MS = 5_000;
const ARRIVE_MAX_MS = 120_000;

interface Latencies {
  readonly p50Ms: number;
  readonly p95Ms: number;
}

export async function benchNoisyTenant(plan: CasePlan): Promise<string> {
  const side = await startSide(plan, { name: 'noisy' });
  const rows = await openRows(await side.product.databaseUrl());
  const idle = await measure(side, rows);
  plan.say(`idle: p95 ${idle.p95Ms.toFixed(0)} ms`);
  await rows.add({
    tenantId: await rows.addTenant(),
    count: plan.rows,
    lane: null,
    state: 'ready',
    dueInS: 0,
  });
  await sleep(SETTLE_MS);
  const had = side.sink.count();
  const startedAt = performance.now();
  const beside = await measure(side, rows);
  const seconds = (performance.now() - startedAt) / 1_000;
  const left = await rows.count('ready');
  const peaks = side.product.memory();
  const sent = side.sink.count() - had;
  await rows.end();
  await side.stop();
  if (left === 0) throw new BenchFailed('the noisy tenant was done too early: more --rows');
  const ratio = beside.p95Ms / idle.p95Ms;
  const show = ({ p50Ms, p95Ms }: Latencies): string =>
    `p50 ${p50Ms.toFixed(0)} ms, p95 ${p95Ms.toFixed(0)} ms`;
  return [
    `From accept to delivered, ${RATE_PER_S} emails a second of one tenant:`,
    `  alone: ${show(idle)}`,
    `  while another has ${plan.rows.toLocaleString('en-US')} to be sent (${Math.round(sent / seconds)}/s): ${show(beside)}`,
    `  p95 ${ratio.toFixed(2)} times as long; less than ${RATIO_MAX}: ${ratio < RATIO_MAX ? 'kept' : 'BROKEN'}`,
    renderPeaks(peaks),
  ].join('\n');
}

async function measure(side: Side, rows: Rows): Promise<Latencies> {
  const since = await rows.now();
  const count = RATE_PER_S * SECONDS;
  await side.post({ count, ratePerS: RATE_PER_S });
  const all = await until('all delivered', { maxMs: ARRIVE_MAX_MS, pollMs: 500 }, async () => {
    const found = await rows.latenciesMs(rows.ownTenantId, since);
    return found.length >= count ? found : null;
  });
  const sorted = all.toSorted((a, b) => a - b);
  const at = (part: number): number => sorted[Math.ceil(part * sorted.length) - 1] ?? 0;
  return { p50Ms: at(0.5), p95Ms: at(0.95) };
}
