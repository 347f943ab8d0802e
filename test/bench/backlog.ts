// What a long queue costs: the rate beside a million rows that are not to be sent now, as a part of the rate without
// them. Of another tenant and of the same one behind a paused destination; and put off until later.
import { setTimeout as sleep } from 'node:timers/promises';
import { openRows, type Rows } from './rows.ts';
import { renderPeaks, renderRatio, startSide, type CasePlan } from './side.ts';
import type { Peak } from './product.ts';

/** A backlog costs less than a fifth. */
const RATE_MIN = 0.8;
const PAUSED = 'mx:parked.test';
/** Workers know by then what is paused, and the machine is quiet again. */
const SETTLE_MS = 6_000;

type Add = (rows: Rows, count: number) => Promise<void>;
const later = { lane: null, state: 'deferred', dueInS: 7_200 } as const;
const parked = { lane: PAUSED, state: 'ready', dueInS: 0 } as const;

const BACKLOGS: readonly (readonly [string, Add])[] = [
  [
    "another tenant's, its destination paused",
    async (rows, count) => rows.add({ tenantId: await rows.addTenant(), count, ...parked }),
  ],
  [
    "the same tenant's, their destination paused",
    (rows, count) => rows.add({ tenantId: rows.ownTenantId, count, ...parked }),
  ],
  [
    "the same tenant's, put off for two hours",
    (rows, count) => rows.add({ tenantId: rows.ownTenantId, count, ...later }),
  ],
];

export async function benchBacklog(plan: CasePlan): Promise<string> {
  const lines: string[] = [];
  const peaks: Peak[] = [];
  for (const [index, [name, add]] of BACKLOGS.entries()) {
    const side = await startSide(plan, { name: `backlog-${index}` });
    const rows = await openRows(await side.product.databaseUrl());
    const without = await side.rate({});
    await rows.pause(PAUSED);
    await sleep(SETTLE_MS);
    const filledAt = performance.now();
    await add(rows, plan.rows);
    plan.say(
      `${plan.rows} rows are in after ${Math.round((performance.now() - filledAt) / 1_000)} s`,
    );
    await sleep(SETTLE_MS);
    const beside = await side.rate({});
    const line = renderRatio(name, { without, beside, min: RATE_MIN });
    plan.say(line);
    lines.push(`  ${line}`);
    peaks.push(...side.product.memory());
    await rows.end();
    await side.stop();
  }
  return [
    `End to end beside ${plan.rows.toLocaleString('en-US')} queued rows (${plan.emails} emails a round, medians of ${plan.rounds}):`,
    ...lines,
    renderPeaks(peaks),
  ].join('\n');
}
