// How far webhooks are behind: for metrics. Every number costs the same however much waits.
import type { Pool } from 'pg';

export interface WebhookBacklog {
  /** Seconds that the oldest event has been due; 0: none is. */
  readonly oldestDueS: number;
  /** What waits to be made into events, up to OUTBOX_MAX. */
  readonly outbox: number;
}

const OUTBOX_MAX = 10_000;
/** Endpoints that are looked at; of more, the oldest may be with one that is not. */
const ENDPOINTS_MAX = 1_000;

export async function readWebhookBacklog(db: Pick<Pool, 'query'>): Promise<WebhookBacklog> {
  const { rows } = await db.query<{ oldest: number | null; outbox: number }>({
    name: 'webhook-backlog',
    // Jumps through the index of what waits from endpoint to endpoint; its first row of each is the one due first.
    text: `with recursive firsts as (
        (select tenant_id, webhook_id, next_attempt_at, 1 as number from webhook_event
          where next_attempt_at is not null
          order by tenant_id, webhook_id, next_attempt_at, id limit 1)
        union all
        select n.tenant_id, n.webhook_id, n.next_attempt_at, f.number + 1
        from firsts f cross join lateral (
          select tenant_id, webhook_id, next_attempt_at from webhook_event
          where next_attempt_at is not null
            and (tenant_id, webhook_id) > (f.tenant_id, f.webhook_id)
          order by tenant_id, webhook_id, next_attempt_at, id limit 1) n
        where f.number < ${ENDPOINTS_MAX}
      )
      select (select extract(epoch from now() - min(next_attempt_at)) from firsts)::float8 as oldest,
        (select count(*)::integer from (
          select 1 from outbox order by tenant_id, id limit ${OUTBOX_MAX}) o) as outbox`,
  });
  const { oldest, outbox } = rows[0]!;
  return { oldestDueS: Math.max(0, oldest ?? 0), outbox };
}
