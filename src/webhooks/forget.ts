// Forgets what endpoints were told long ago, and what is left of endpoints that were removed.
import type { Pool } from 'pg';
import { firstIdAt } from '../access/request-log.ts';

/** Events can be read and replayed for so long. */
const EVENT_DAYS = 30;
const BATCH = 5_000;
/** Endpoints that one batch looks at. */
const ENDPOINTS_MAX = 10_000;
const HIGHEST_ID = 'ffffffff-ffff-ffff-ffff-ffffffffffff';

/** At most about so many, with their attempts; how many events it were. */
export async function forgetOldWebhookEvents(
  pool: Pick<Pool, 'query'>,
  max: number,
  now: Date,
): Promise<number> {
  const until = now.getTime() - EVENT_DAYS * 86_400_000;
  let count = 0;
  while (count < max) {
    const { rowCount } = await pool.query({
      name: 'forget-webhook-events',
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
          left join webhook w on w.tenant_id = e.tenant_id and w.id = e.webhook_id
          cross join lateral (
            select tenant_id, webhook_id, id from webhook_event
            where tenant_id = e.tenant_id and webhook_id = e.webhook_id
              and id < case when w.id is null then $3::uuid else $1::uuid end
              -- The id of email.sent is as old as its email, which may have waited for long.
              and (w.id is null or type <> 'email.sent' or created_at < $4::timestamptz)
            order by tenant_id, webhook_id, id limit $2) d
          limit $2
        ), attempts as (
          delete from webhook_attempt a using old o
          where a.tenant_id = o.tenant_id and a.webhook_id = o.webhook_id and a.event_id = o.id
        )
        delete from webhook_event e using old o
        where e.tenant_id = o.tenant_id and e.webhook_id = o.webhook_id and e.id = o.id`,
      values: [firstIdAt(until), Math.min(BATCH, max - count), HIGHEST_ID, new Date(until)],
    });
    count += rowCount ?? 0;
    if ((rowCount ?? 0) < BATCH) break;
  }
  return count;
}
