// Every statement that changes or deletes a stored domain. They are in one file since others hang on whether mail can
// arrive at a domain: whoever ends that, by whatever way, tells them in the same transaction. So are webhooks told, where
// something changed that the tenant sees.
import type { PoolClient } from 'pg';
import type { RecordChecks } from '../store/sending-domain.ts';
import type { Place } from './records.ts';
import { readDomain, type DomainRow, type Queryable } from './rows.ts';
import type { Standing } from './status.ts';
import { domainData, isDomainHooked, tellDomain } from './view.ts';

type DomainKey = Pick<DomainRow, 'tenantId' | 'id'>;

/** Mail could arrive at this domain until now. A deleted one is told in any case. */
export interface ReceivingEnd extends DomainKey {
  readonly name: string;
  readonly why: 'deleted' | 'switched_off' | 'not_verified';
  readonly at: Date;
}

export interface ChangeDependencies {
  readonly now: () => Date;
  readonly place: Place;
  /**
   * Called in the transaction of the change, which holds the row of the domain; a deleted one is still there. Locks of its own
   * come after that of the domain.
   */
  readonly onReceivingEnd: (client: PoolClient, end: ReceivingEnd) => Promise<void>;
}

/** Sets columns ($1 and $2 are the key); tells it where mail could arrive before, and cannot afterwards. */
async function change(
  d: ChangeDependencies,
  client: PoolClient,
  { tenantId, id }: DomainKey,
  to: { readonly set: string; readonly values: readonly unknown[] },
): Promise<void> {
  const { rows: found } = await client.query<{ name: string; receives: boolean }>(
    `select name, receiving and receiving_verified as receives from sending_domain
     where tenant_id = $1 and id = $2 for no key update`,
    [tenantId, id],
  );
  const [before] = found;
  if (before === undefined) return;
  const isTold = await isDomainHooked(client, tenantId, 'domain.updated');
  const seen = isTold ? await readDomain(client, tenantId, id) : null;
  const { rows: changed } = await client.query<{ receiving: boolean; isVerified: boolean }>(
    `update sending_domain set ${to.set} where tenant_id = $1 and id = $2
     returning receiving, receiving_verified as "isVerified"`,
    [tenantId, id, ...to.values],
  );
  const { receiving, isVerified } = changed[0]!;
  if (before.receives && !(receiving && isVerified)) {
    const why = receiving ? 'not_verified' : 'switched_off';
    await d.onReceivingEnd(client, { tenantId, id, name: before.name, why, at: d.now() });
  }
  const domain = seen === null ? null : await readDomain(client, tenantId, id);
  if (seen === null || domain === null || isSeenSame(seen, domain, d.place)) return;
  await tellDomain(client, 'domain.updated', { domain, place: d.place, at: d.now() });
}

const isSeenSame = (before: DomainRow, after: DomainRow, place: Place): boolean =>
  JSON.stringify(domainData(before, place)) === JSON.stringify(domainData(after, place));

/** What one check, or a change of the settings, made of a domain. */
export interface Outcome extends Standing {
  readonly recordChecks: RecordChecks;
  readonly verifyingSince: Date | null;
  readonly checkCount: number;
  readonly checkedAt: Date | null;
  readonly nextCheckAt: Date | null;
}

const SET_OUTCOME = `status = $3, sending_verified = $4, receiving_verified = $5, record_checks = $6,
  verifying_since = $7, check_count = $8, checked_at = coalesce($9, checked_at), next_check_at = $10`;

const valuesOf = (outcome: Outcome): readonly unknown[] => [
  outcome.status,
  outcome.sendingVerified,
  outcome.receivingVerified,
  JSON.stringify(outcome.recordChecks),
  outcome.verifyingSince,
  outcome.checkCount,
  outcome.checkedAt,
  outcome.nextCheckAt,
];

/** What a caller can change of a domain, and what follows from it: one change. */
export async function writeSettings(
  d: ChangeDependencies,
  client: PoolClient,
  domain: DomainRow,
  outcome: Outcome,
): Promise<void> {
  await change(d, client, domain, {
    set: `${SET_OUTCOME}, tracking_subdomain = $11, open_tracking = $12, click_tracking = $13, tls = $14,
      sending = $15, receiving = $16, inbound_dmarc = $17, mta_sts = $18`,
    values: [
      ...valuesOf(outcome),
      domain.trackingSubdomain,
      domain.openTracking,
      domain.clickTracking,
      domain.tls,
      domain.sending,
      domain.receiving,
      domain.inboundDmarc,
      domain.mtaSts,
    ],
  });
}

export async function writeOutcome(
  d: ChangeDependencies,
  client: PoolClient,
  domain: DomainKey,
  outcome: Outcome,
): Promise<void> {
  await change(d, client, domain, { set: SET_OUTCOME, values: valuesOf(outcome) });
}

const LOST = 'Another account on this server has proven that the name is theirs.';

/** The name belongs to another tenant now: nothing leaves or arrives for this one any more. */
export async function loseName(
  d: ChangeDependencies,
  client: PoolClient,
  domain: DomainKey,
): Promise<void> {
  const lost = { status: 'failed', detail: LOST, since: null };
  await change(d, client, domain, {
    set: `status = 'failed', sending_verified = false, receiving_verified = false,
      record_checks = (select coalesce(jsonb_object_agg(kind, $3::jsonb), '{}')
        from jsonb_object_keys(record_checks) kind),
      verifying_since = coalesce(verifying_since, $4), checked_at = $4, next_check_at = null`,
    values: [JSON.stringify(lost), d.now()],
  });
}

/** With its keys, claims and receiving routes. False: no such domain. */
export async function deleteDomain(
  d: ChangeDependencies,
  client: PoolClient,
  { tenantId, id }: DomainKey,
): Promise<boolean> {
  const { rows } = await client.query<{ name: string }>(
    'select name from sending_domain where tenant_id = $1 and id = $2 for update',
    [tenantId, id],
  );
  if (rows[0] === undefined) return false;
  const { name } = rows[0];
  await d.onReceivingEnd(client, { tenantId, id, name, why: 'deleted', at: d.now() });
  const domain = (await readDomain(client, tenantId, id))!;
  await tellDomain(client, 'domain.deleted', { domain, place: d.place, at: d.now() });
  await client.query('delete from sending_domain where tenant_id = $1 and id = $2', [tenantId, id]);
  return true;
}

/**
 * Takes what is due for a check, at most `max`, and puts it off by `leaseMs`: whoever comes next in that time, here or
 * in another process, leaves it alone.
 */
export async function takeDue(
  db: Queryable,
  d: { readonly now: Date; readonly max: number; readonly leaseMs: number },
): Promise<readonly { readonly tenantId: string; readonly id: string }[]> {
  const { rows } = await db.query<{ tenantId: string; id: string }>(
    `update sending_domain d set next_check_at = $1::timestamptz + $3 * interval '1 millisecond'
     from (
       select tenant_id, id from sending_domain where next_check_at <= $1
       order by next_check_at limit $2 for update skip locked
     ) due
     where d.tenant_id = due.tenant_id and d.id = due.id
     returning d.tenant_id as "tenantId", d.id`,
    [d.now, d.max, d.leaseMs],
  );
  return rows;
}
