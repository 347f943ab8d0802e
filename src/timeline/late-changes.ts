// Old mail that changes after all: opened weeks later, complained about, released. What was counted of its quarter of an
// hour (sending/metric-rollup.ts) holds no more, which is noted in the transaction that changes it.
import type { PoolClient } from 'pg';

/** What metrics are counted in: the local hours and days of every time zone of today begin at one. */
export const QUARTER_MS = 900_000;
/** Younger mail is counted from its rows. Deliveries live 4 days by default, so few change later. */
export const COUNTED_AFTER_MS = 5 * 86_400_000;
/** Clocks differ, and transactions take their time. */
const MARGIN_MS = 86_400_000;

export interface LateChange {
  readonly tenantId: string;
  readonly emailId: string;
}

/** When a UUIDv7 was made, in milliseconds. */
export const timeOfId = (id: string): number =>
  Number.parseInt(id.slice(0, 8) + id.slice(9, 13), 16);

/** Whether its changes have to be noted. */
export const isLate = (emailId: string): boolean =>
  timeOfId(emailId) < Date.now() - (COUNTED_AFTER_MS - MARGIN_MS);

/**
 * Notes which of these emails are old, inside the transaction that changes what metrics count of them: once, after it has
 * locked the emails. Costs nothing for the others.
 */
export async function noteLateChanges(
  client: PoolClient,
  changes: readonly LateChange[],
): Promise<void> {
  const late = changes.filter(({ emailId }) => isLate(emailId));
  if (late.length === 0) return;
  const quarters = new Map(
    late.map(({ tenantId, emailId }) => {
      const ms = Math.floor(timeOfId(emailId) / QUARTER_MS) * QUARTER_MS;
      return [`${tenantId} ${ms}`, { tenantId, at: new Date(ms) }];
    }),
  );
  const rows = [...quarters.values()];
  // In one order, so that nobody waits in a circle. A new token each time: who counts at this moment sees that it was in vain.
  await client.query({
    name: 'note-late-changes',
    text: `insert into metric_stale (tenant_id, quarter, token)
      select tenant_id, quarter, gen_random_uuid()
      from unnest($1::uuid[], $2::timestamptz[]) as k (tenant_id, quarter) order by 1, 2
      on conflict (tenant_id, quarter) do update set token = excluded.token`,
    values: [rows.map(({ tenantId }) => tenantId), rows.map(({ at }) => at)],
  });
}
