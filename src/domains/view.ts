// A domain as its tenant sees it: over the API, and in what webhooks are told when that changes.
import type { PoolClient } from 'pg';
import type { RecordStatus } from '../store/sending-domain.ts';
import { isHooked, tellWebhooks, type EventType } from '../timeline/outbox.ts';
import { wantedRecords, type Place } from './records.ts';
import type { DomainRow } from './rows.ts';

/** A record to publish, and what was found of it. */
export interface RecordView {
  readonly record: string;
  readonly name: string;
  readonly type: 'MX' | 'TXT' | 'CNAME';
  readonly value: string;
  readonly priority: number | null;
  readonly status: RecordStatus;
  readonly detail: string | null;
}

export interface DomainView extends Omit<DomainRow, 'recordChecks' | 'keys'> {
  readonly records: readonly RecordView[];
}

export function viewOf({ recordChecks, keys, ...domain }: DomainRow, place: Place): DomainView {
  const records = wantedRecords(domain, keys, place).map(({ kind, ...record }) => ({
    ...record,
    status: recordChecks[kind]?.status ?? 'not_started',
    detail: recordChecks[kind]?.detail ?? null,
  }));
  return { ...domain, records };
}

type DomainEvent = Extract<EventType, `domain.${string}`>;

/** Whether anybody wants to hear of it. */
export async function isDomainHooked(
  client: PoolClient,
  tenantId: string,
  type: DomainEvent,
): Promise<boolean> {
  const { rows } = await client.query<{ hooked: boolean }>(
    `select ${isHooked('$1::uuid', '$2::text')} as hooked`,
    [tenantId, type],
  );
  return rows[0]?.hooked === true;
}

/** What a call says of a domain: without the words about each record, which change with every look at the DNS. */
export function domainData(row: DomainRow, place: Place): Readonly<Record<string, unknown>> {
  const { records, ...domain } = viewOf(row, place);
  const word = (isOn: boolean): string => (isOn ? 'enabled' : 'disabled');
  return {
    id: domain.id,
    name: domain.name,
    status: domain.status,
    created_at: domain.createdAt.toISOString(),
    region: domain.region,
    capabilities: { sending: word(domain.sending), receiving: word(domain.receiving) },
    custom_return_path: domain.returnPathLabel,
    open_tracking: domain.openTracking,
    click_tracking: domain.clickTracking,
    tracking_subdomain: domain.trackingSubdomain,
    tls: domain.tls,
    inbound_dmarc: domain.inboundDmarc,
    mta_sts: domain.mtaSts,
    records: records.map(({ record, name, type, value, status, priority }) => ({
      record,
      name,
      type,
      ttl: 'Auto',
      status,
      value,
      ...(priority === null ? {} : { priority }),
    })),
  };
}

/** Inside the transaction that makes it so. */
export async function tellDomain(
  client: PoolClient,
  type: DomainEvent,
  { domain, place, at }: { readonly domain: DomainRow; readonly place: Place; readonly at: Date },
): Promise<void> {
  const { tenantId, id: subjectId } = domain;
  await tellWebhooks(client, [
    { tenantId, type, subjectId, detail: domainData(domain, place), at },
  ]);
}
