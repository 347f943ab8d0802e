// Ends the lifetime of mail that nobody tries: while a lane's circuit is open, what waits behind it is not claimed, so
// no attempt could find out that its time is over. The failures that keep the lane open stand for an attempt of each.
// Mail that waits for anything else (a worker, an operator's pause, a blocked port) is tried once more first.
import type { PoolClient } from 'pg';
import type { Store } from '../store/orm.ts';
import { tellWebhooks } from '../timeline/outbox.ts';
import { tellFacts } from './facts.ts';
import { showEmails } from './settle.ts';
import { bounced } from './told.ts';

/** A lane whose first probe failed, too. */
const OPENS_MIN = 2;
/** Of one look, any of those that are closed: the next looks at others. */
const DESTINATIONS_MAX = 200;
const BATCH = 500;
/** Of one run; the next goes on. */
const BATCHES_MAX = 100;
/** Not what the lane says: that may be about mail of others. */
const NEVER_TRIED =
  'No mail host of the recipient could be reached within the lifetime of the message.';

// One look per tenant with ready mail and closed destination, along the index that claims use.
const EXPIRE = `
  with recursive tenants as (
    (select tenant_id from delivery where state = 'ready' order by tenant_id limit 1)
    union all
    select (select d.tenant_id from delivery d where d.state = 'ready' and d.tenant_id > t.tenant_id
            order by d.tenant_id limit 1)
    from tenants t where t.tenant_id is not null
  ), paused as materialized (
    select kind, name from pause where until is null or until > now()
  ), shut as (
    select s.destination
    from lane_destination s join lane l on l.name = s.lane
    where not exists (select 1 from paused where kind = 'all'
      or (kind = 'destination' and name = s.destination) or (kind = 'lane' and name = s.lane))
    group by s.destination
    having bool_and(l.circuit = 'open' and l.open_until > now() and l.opens >= ${OPENS_MIN})
    order by random() limit ${DESTINATIONS_MAX}
  ), due as (
    select r.tenant_id, r.email_id, r.position
    from tenants cross join shut cross join lateral (
      select d.tenant_id, d.email_id, d.position from delivery d
      where d.tenant_id = tenants.tenant_id and d.is_bulk in (false, true) and d.lane = shut.destination
        and d.state = 'ready' and d.expires_at <= now()
      limit ${BATCH} for update skip locked) r
    where tenants.tenant_id is not null
      and not exists (select 1 from paused where kind = 'tenant' and name = tenants.tenant_id::text)
    limit ${BATCH}
  )
  update delivery d
  set state = 'bounced', last_cause = 'expired', interruptions = 0,
    last_reply = coalesce(
      (select a.reply from attempt a
       where a.tenant_id = d.tenant_id and a.email_id = d.email_id and a.position = d.position
         and a.code is not null order by a.number desc limit 1),
      d.last_reply, '${NEVER_TRIED}')
  from due
  where d.tenant_id = due.tenant_id and d.email_id = due.email_id and d.position = due.position
  returning d.tenant_id, d.email_id, d.recipient, d.attempts, d.last_reply`;

interface ExpiredRow {
  readonly tenant_id: string;
  readonly email_id: string;
  readonly recipient: string;
  readonly attempts: number;
  readonly last_reply: string;
}

/** Bounces what is past its lifetime and waits behind an open circuit; how many. */
export async function expireUntried(store: Store): Promise<number> {
  let expired = 0;
  for (let batch = 0; batch < BATCHES_MAX; batch++) {
    const count = await store.transact(expireBatch);
    expired += count;
    if (count < BATCH) break;
  }
  return expired;
}

async function expireBatch(client: PoolClient): Promise<number> {
  const { rows } = await client.query<ExpiredRow>({ name: 'expire-untried', text: EXPIRE });
  await tellFacts(
    client,
    rows.map((row) => ({
      tenantId: row.tenant_id,
      emailId: row.email_id,
      kind: 'expired',
      recipients: [row.recipient],
      detail: { attempts: row.attempts, cause: 'connect_failed', reply: row.last_reply },
    })),
  );
  await tellWebhooks(
    client,
    rows.map((row) =>
      bounced(
        { tenantId: row.tenant_id, emailId: row.email_id, recipient: row.recipient },
        { code: 'expired', cause: 'connect_failed', reply: row.last_reply },
      ),
    ),
  );
  // More than one: the rows are locked for their recomputation, whatever their number.
  await showEmails(
    client,
    rows.map((row) => ({ tenantId: row.tenant_id, emailId: row.email_id, recipientCount: 2 })),
  );
  return rows.length;
}
