// What webhooks are told about contacts.
import type { PoolClient } from 'pg';
import { isHooked, tellWebhooks, type EventType } from '../timeline/outbox.ts';

type ContactEvent = Extract<EventType, `contact.${string}`>;

/** What a call about a contact says. */
export interface Told {
  readonly id: string;
  readonly data: Readonly<Record<string, unknown>>;
}

/** Of one contact, so that a call stays small; the oldest memberships. */
const SEGMENT_IDS_MAX = 1_000;

/** The contacts as a call shows them, as they are now; none where nobody listens. */
export async function readTold(
  client: PoolClient,
  tenantId: string,
  type: ContactEvent,
  ids: readonly string[],
): Promise<readonly Told[]> {
  if (ids.length === 0) return [];
  const { rows } = await client.query<Row>({
    name: 'contacts-told',
    text: `select c.id, c.email, c.first_name as "firstName", c.last_name as "lastName", c.unsubscribed,
        c.created_at as "createdAt", c.updated_at as "updatedAt",
        array(select sc.segment_id::text from segment_contact sc
          where sc.tenant_id = c.tenant_id and sc.contact_id = c.id
          order by sc.created_at, sc.segment_id limit ${SEGMENT_IDS_MAX}) as "segmentIds"
      from contact c
      where c.tenant_id = $1 and c.id = any ($2::uuid[]) and ${isHooked('$1::uuid', '$3::text')}
      order by c.id`,
    values: [tenantId, ids, type],
  });
  return rows.map((row) => ({
    id: row.id,
    data: {
      id: row.id,
      audience_id: row.segmentIds[0] ?? null,
      segment_ids: row.segmentIds,
      created_at: new Date(row.createdAt).toISOString(),
      updated_at: new Date(row.updatedAt).toISOString(),
      email: row.email,
      first_name: row.firstName,
      last_name: row.lastName,
      unsubscribed: row.unsubscribed,
    },
  }));
}

/** Inside the caller's transaction: by what was read before, or by ids as they are now. */
export async function tellContacts(
  client: PoolClient,
  tenantId: string,
  about: { readonly type: ContactEvent; readonly at: Date } & (
    { readonly ids: readonly string[] } | { readonly told: readonly Told[] }
  ),
): Promise<void> {
  const { type, at } = about;
  const told = 'told' in about ? about.told : await readTold(client, tenantId, type, about.ids);
  await tellWebhooks(
    client,
    told.map(({ id, data }) => ({ tenantId, type, subjectId: id, detail: data, at })),
  );
}

interface Row {
  readonly id: string;
  readonly email: string;
  readonly firstName: string | null;
  readonly lastName: string | null;
  readonly unsubscribed: boolean;
  readonly createdAt: Date;
  readonly updatedAt: Date;
  readonly segmentIds: readonly string[];
}
