// What webhooks are to be told, written in the transaction that makes it true: so nothing is told that did not happen, and
// nothing that happened is forgotten. Only where somebody listens. webhooks/ reads it and calls.
import type { Pool, PoolClient } from 'pg';
import { newId } from '../store/id.ts';

/** Whom an endpoint can ask to be told about (Resend's names). */
export const eventTypes = [
  'email.sent',
  'email.scheduled',
  'email.delivered',
  'email.delivery_delayed',
  'email.complained',
  'email.bounced',
  'email.opened',
  'email.clicked',
  'email.received',
  'email.failed',
  'email.suppressed',
  'contact.created',
  'contact.updated',
  'contact.deleted',
  'contact.topics.updated',
  'domain.created',
  'domain.updated',
  'domain.deleted',
  'suppression.added',
  'suppression.removed',
  'topic.created',
  'topic.updated',
  'topic.deleted',
  'doctor.finding_changed',
] as const;
export type EventType = (typeof eventTypes)[number];

export interface OutboxEvent {
  readonly tenantId: string;
  readonly type: EventType;
  /** The email, received email, contact, domain, suppression, topic or finding. */
  readonly subjectId: string;
  /**
   * Of `email.*`: what this event adds to the email's own data, and `recipient` where it is about one of several. Of all
   * others: the whole `data` of the call, since the row may be another or gone when it is made.
   */
  readonly detail: Readonly<Record<string, unknown>>;
  /** Default: now. */
  readonly at?: Date;
  /** Default: a new one. Given where the same may be written again: it is told once. */
  readonly id?: string;
}

/**
 * A condition: an endpoint of the tenant wants events of this type. Both are expressions of SQL. One look at an index, so
 * it can stand in statements that every email passes; `offset 0` keeps the planner from reading the whole table for it.
 */
export const isHooked = (tenant: string, type: string): string => `exists (
  select 1 from webhook w
  where w.tenant_id = ${tenant} and w.status = 'enabled' and ${type} = any (w.events)
  order by w.tenant_id, w.id offset 0)`;

/** Stores those that somebody listens to, inside the caller's transaction; one statement for all. */
export async function tellWebhooks(
  db: Pick<Pool | PoolClient, 'query'>,
  events: readonly OutboxEvent[],
): Promise<void> {
  if (events.length === 0) return;
  await db.query({
    name: 'tell-webhooks',
    text: `insert into outbox (tenant_id, id, type, subject_id, detail, at)
      select r.tenant_id, r.id, r.type, r.subject_id, r.detail, coalesce(r.at, now())
      from unnest($1::uuid[], $2::uuid[], $3::text[], $4::uuid[], $5::jsonb[], $6::timestamptz[])
        as r (tenant_id, id, type, subject_id, detail, at)
      where ${isHooked('r.tenant_id', 'r.type')}
      on conflict do nothing`,
    values: [
      events.map(({ tenantId }) => tenantId),
      events.map(({ id }) => id ?? newId()),
      events.map(({ type }) => type),
      events.map(({ subjectId }) => subjectId),
      events.map(({ detail }) => JSON.stringify(detail, storable)),
      events.map(({ at }) => at ?? null),
    ],
  });
}

/** jsonb takes neither NUL nor half a surrogate pair, and what is true must not fail for the telling. */
const storable = (_key: string, value: unknown): unknown =>
  typeof value === 'string' ? value.replaceAll('\0', '\ufffd').toWellFormed() : value;
