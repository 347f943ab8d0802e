// Forgets what is left of endpoints that were removed: too much for the transaction that removes one.
import type { Pool } from 'pg';

const BATCH = 5_000;
/** Endpoints that one batch looks at. */
const ENDPOINTS_MAX = 10_000;

/** At most about so many, with their attempts; how many events it were. */
export async function forgetRemovedEndpoints(
  pool: Pick<Pool, 'query'>,
  max: number,
): Promise<number> {
  let count = 0;
  while (count < max) {
    const { rowCount } = await pool.query({
      name: 'forget-removed-endpoints',
      text: `with recursive endpoints as (
          (select tenant_id, webhook_id, 1 as number from webhook_event
            order by tenant_id, webhook_id, id limit 1)
          union all
          select n.tenant_id, n.webhook_id, e.number + 1 from endpoints e cross join lateral (
            select tenant_id, webhook_id from webhook_event
            where (tenant_id, webhook_id) > (e.tenant_id, e.webhook_id)
            order by tenant_id, webhook_id, id limit 1) n
          where e.number < ${ENDPOINTS_MAX}
        ), old as materialized (
          select d.tenant_id, d.webhook_id, d.id from endpoints e
          cross join lateral (
            select tenant_id, webhook_id, id from webhook_event
            where tenant_id = e.tenant_id and webhook_id = e.webhook_id
            order by tenant_id, webhook_id, id limit $1) d
          where not exists (select 1 from webhook w
            where w.tenant_id = e.tenant_id and w.id = e.webhook_id)
          limit $1
        ), attempts as (
          delete from webhook_attempt a using old o
          where a.tenant_id = o.tenant_id and a.webhook_id = o.webhook_id and a.event_id = o.id
        )
        delete from webhook_event e using old o
        where e.tenant_id = o.tenant_id and e.webhook_id = o.webhook_id and e.id = o.id`,
      values: [Math.min(BATCH, max - count)],
    });
    count += rowCount ?? 0;
    if ((rowCount ?? 0) < BATCH) break;
  }
  return count;
}
