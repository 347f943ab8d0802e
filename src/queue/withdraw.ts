// Takes back deliveries that nobody has begun: of a broadcast that was canceled while it was being sent.
import type { PoolClient } from 'pg';
import { newId } from '../store/id.ts';

/**
 * Cancels the deliveries of these emails that were never attempted, inside the caller's transaction; how many. What a
 * worker has claimed goes on. At most a few hundred emails at a time: claims pass over them meanwhile.
 */
export async function withdrawEmails(
  client: PoolClient,
  tenantId: string,
  emailIds: readonly string[],
): Promise<number> {
  if (emailIds.length === 0) return 0;
  // In the order of the primary key, and only deliveries: whoever is claiming waits for none of them, so it ends, and
  // then the row says whether it was claimed.
  const { rows: locked } = await client.query<{ email_id: string }>({
    name: 'lock-withdrawn',
    text: `select email_id from delivery
      where tenant_id = $1 and email_id = any ($2::uuid[]) and state = 'ready' and attempts = 0
      order by email_id, position for update`,
    values: [tenantId, emailIds],
  });
  if (locked.length === 0) return 0;
  const ids = [...new Set(locked.map((row) => row.email_id))];
  await client.query({
    name: 'withdraw',
    text: `with withdrawn as (
        update delivery set state = 'canceled'
        where tenant_id = $1 and email_id = any ($2::uuid[]) and state = 'ready' and attempts = 0
        returning email_id
      ), shown as (
        -- Where others of the same email go on, it shows what becomes of them.
        update email e set last_event = 'canceled'
        where e.tenant_id = $1 and e.id in (select email_id from withdrawn)
          and e.last_event = 'queued' and e.recipient_count = 1
      )
      insert into timeline (tenant_id, email_id, id, at, kind, detail)
      select $1, k.email_id, k.id, now(), 'canceled', '{}'
      from unnest($2::uuid[], $3::uuid[]) as k (email_id, id)
      where k.email_id in (select email_id from withdrawn)`,
    values: [tenantId, ids, ids.map(() => newId())],
  });
  return ids.length;
}
