// Claims due deliveries for one worker run: fair over tenants, in batches, each row locked past others'
// locks. In the same statement the attempt is stored and the email becomes `sent`, so whatever happens
// after the claim, the database already knows that an attempt began and by whom.
import type { Store } from '../store/orm.ts';
import { withholdSuppressed } from './withhold.ts';

export interface ClaimedDelivery {
  readonly tenantId: string;
  readonly emailId: string;
  readonly position: number;
  readonly recipient: string;
  readonly lane: string;
  /** The number of the attempt that this claim begins; 1 for the first. */
  readonly attempt: number;
  readonly createdAt: Date;
  readonly recipientCount: number;
  /** Null when the message lies in the blob store. */
  readonly raw: Buffer | null;
  readonly rawSizeBytes: number;
  readonly blobKey: string | null;
  readonly needsSmtpUtf8: boolean;
  readonly signingTenantId: string | null;
  readonly signingDomainId: string | null;
  /** Where bounces of this email come home; null where no domain of ours is behind `from`. */
  readonly fromDomain: string;
}

interface ClaimRow {
  tenant_id: string;
  email_id: string;
  position: number;
  recipient: string;
  lane: string;
  attempts: number;
  created_ms: string;
  recipient_count: number;
  raw: Buffer | null;
  raw_size_bytes: number;
  blob_key: string | null;
  needs_smtp_utf8: boolean;
  signing_tenant_id: string | null;
  signing_domain_id: string | null;
  from_domain: string;
}

// mta.md's fair claim: a loose index scan over the tenants that have ready rows, then at most
// $1 rows of each, at most $2 in all. `order by random()` keeps workers off each other's tenants.
const CLAIM = `
  with recursive tenants as (
    (select tenant_id from delivery where state = 'ready' order by tenant_id limit 1)
    union all
    select (select d.tenant_id from delivery d where d.state = 'ready' and d.tenant_id > t.tenant_id
            order by d.tenant_id limit 1)
    from tenants t where t.tenant_id is not null
  ), due as (
    select j.tenant_id, j.email_id, j.position
    from (select tenant_id from tenants where tenant_id is not null order by random()) t
    cross join lateral (
      select d.tenant_id, d.email_id, d.position from delivery d
      where d.tenant_id = t.tenant_id and d.state = 'ready' and d.due_at <= now()
        and d.lane <> all ($4::text[])
      order by d.due_at, d.email_id, d.position limit $1 for update skip locked) j
    limit $2
  ), claimed as (
    update delivery d
    set state = 'in_flight', lease_epoch = $3, attempts = attempts + 1
    from due
    where d.tenant_id = due.tenant_id and d.email_id = due.email_id and d.position = due.position
    returning d.tenant_id, d.email_id, d.position, d.recipient, d.lane, d.attempts
  ), begun as (
    insert into attempt (tenant_id, email_id, position, number, started_at)
    select tenant_id, email_id, position, attempts, now() from claimed
  ), emails as (
    -- An email that a settlement holds right now gets its event from there.
    select e.tenant_id, e.id from email e
    where (e.tenant_id, e.id) in (select tenant_id, email_id from claimed)
    for no key update skip locked
  ), sent as (
    update email e
    set last_event = case when e.last_event in ('queued', 'scheduled') then 'sent' else e.last_event end,
      provider_last_attempted_at = now()
    from emails where e.tenant_id = emails.tenant_id and e.id = emails.id
  )
  select c.*, (extract(epoch from e.created_at) * 1000)::bigint::text as created_ms,
    e.recipient_count, e.from_domain, k.raw, k.raw_size_bytes, k.blob_key, k.needs_smtp_utf8,
    k.signing_tenant_id, k.signing_domain_id
  from claimed c
  join email e on e.tenant_id = c.tenant_id and e.id = c.email_id
  join email_content k on k.tenant_id = c.tenant_id and k.email_id = c.email_id`;

/**
 * Claims at most `max` due deliveries for the worker run `epoch`, at most `perTenant` of one tenant,
 * none of the lanes in `exceptLanes`. An empty list: nothing is due. What was claimed for an address that is
 * suppressed by now ends here and is not in the list.
 */
export async function claim(
  store: Store,
  options: {
    readonly epoch: string;
    readonly max: number;
    readonly perTenant: number;
    readonly exceptLanes: readonly string[];
  },
): Promise<readonly ClaimedDelivery[]> {
  const { rows } = await store.pool.query<ClaimRow>({
    name: 'claim',
    text: CLAIM,
    values: [options.perTenant, options.max, options.epoch, options.exceptLanes],
  });
  const claimed = rows.map((row) => ({
    tenantId: row.tenant_id,
    emailId: row.email_id,
    position: row.position,
    recipient: row.recipient,
    lane: row.lane,
    attempt: row.attempts,
    createdAt: new Date(Number(row.created_ms)),
    recipientCount: row.recipient_count,
    raw: row.raw,
    rawSizeBytes: row.raw_size_bytes,
    blobKey: row.blob_key,
    needsSmtpUtf8: row.needs_smtp_utf8,
    signingTenantId: row.signing_tenant_id,
    signingDomainId: row.signing_domain_id,
    fromDomain: row.from_domain,
  }));
  return withholdSuppressed(store, options.epoch, claimed);
}
