// The statements that write contacts, memberships and choices. Only contact-changes.ts calls them, in the order of locks
// that it keeps.
import type { PoolClient } from 'pg';
import type { PropertyValue } from '../store/contact.ts';
import { newId } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import type { TopicChoice } from './contact-fields.ts';

/** A contact as it is to be. */
export interface NewRow {
  readonly email: string;
  readonly address: string;
  readonly firstName: string | null;
  readonly lastName: string | null;
  readonly unsubscribed: boolean;
  /** By id of a property. */
  readonly properties: Readonly<Record<string, PropertyValue>>;
}

/** A contact that this transaction has locked. */
export interface Held extends Omit<NewRow, 'email'> {
  readonly id: string;
}

const HELD = `id, address, first_name as "firstName", last_name as "lastName", unsubscribed, properties`;

const toHeld = (row: Held): Held => ({ ...row, properties: fromJson(row.properties) });

export async function lockContact(
  client: PoolClient,
  tenantId: string,
  contactId: string,
): Promise<Held | null> {
  const { rows } = await client.query<Held>({
    name: 'lock-contact',
    text: `select ${HELD} from contact where tenant_id = $1 and id = $2 for update`,
    values: [tenantId, contactId],
  });
  return rows[0] === undefined ? null : toHeld(rows[0]);
}

/** Those that insertNew found and locked. */
export async function readLocked(
  client: PoolClient,
  tenantId: string,
  addresses: readonly string[],
): Promise<readonly Held[]> {
  if (addresses.length === 0) return [];
  const { rows } = await client.query<Held>({
    name: 'locked-contacts',
    text: `select ${HELD} from contact where tenant_id = $1 and address = any ($2::text[])`,
    values: [tenantId, addresses],
  });
  return rows.map(toHeld);
}

/**
 * Those that were not there; the others are locked, in one pass by address: whoever does the same with the same addresses,
 * and whoever removes one in between, is waited for and never in a circle.
 */
export async function insertNew(
  client: PoolClient,
  tenantId: string,
  rows: readonly NewRow[],
  at: Date,
): Promise<readonly { readonly id: string; readonly address: string }[]> {
  const { rows: made } = await client.query<{ id: string; address: string }>({
    name: 'insert-contacts',
    text: `insert into contact (tenant_id, id, email, address, first_name, last_name, unsubscribed,
        properties, created_at, updated_at)
      select $1, r.id, r.email, r.address, r.first_name, r.last_name, r.unsubscribed, r.properties, $9, $9
      from unnest($2::uuid[], $3::text[], $4::text[], $5::text[], $6::text[], $7::boolean[], $8::jsonb[])
        as r (id, email, address, first_name, last_name, unsubscribed, properties)
      order by r.address
      on conflict (tenant_id, address) do update set updated_at = excluded.updated_at where false
      returning id, address`,
    values: [
      tenantId,
      rows.map(() => newId()),
      rows.map(({ email }) => email),
      rows.map(({ address }) => address),
      rows.map(({ firstName }) => firstName),
      rows.map(({ lastName }) => lastName),
      rows.map(({ unsubscribed }) => unsubscribed),
      rows.map(({ properties }) => JSON.stringify(properties)),
      at,
    ],
  });
  return made;
}

export async function writeChanged(
  client: PoolClient,
  tenantId: string,
  changed: readonly Held[],
  at: Date,
): Promise<void> {
  if (changed.length === 0) return;
  await client.query({
    name: 'write-contacts',
    text: `update contact c set first_name = r.first_name, last_name = r.last_name,
        unsubscribed = r.unsubscribed, properties = r.properties, updated_at = $7
      from unnest($2::uuid[], $3::text[], $4::text[], $5::boolean[], $6::jsonb[])
        as r (id, first_name, last_name, unsubscribed, properties)
      where c.tenant_id = $1 and c.id = r.id`,
    values: [
      tenantId,
      changed.map(({ id }) => id),
      changed.map(({ firstName }) => firstName),
      changed.map(({ lastName }) => lastName),
      changed.map(({ unsubscribed }) => unsubscribed),
      changed.map(({ properties }) => JSON.stringify(properties)),
      at,
    ],
  });
}

export async function touch(
  client: PoolClient,
  tenantId: string,
  ids: readonly string[],
  at: Date,
): Promise<void> {
  if (ids.length === 0) return;
  await client.query(
    'update contact set updated_at = $3 where tenant_id = $1 and id = any ($2::uuid[])',
    [tenantId, ids, at],
  );
}

/** The ids of contacts that are in a segment more than before. */
export async function insertMembers(
  client: PoolClient,
  tenantId: string,
  members: readonly { readonly contactId: string; readonly segmentId: string }[],
  at: Date,
): Promise<ReadonlySet<string>> {
  if (members.length === 0) return new Set();
  const { rows } = await client.query<{ id: string }>({
    name: 'insert-members',
    text: `with live as materialized (
        select id from segment where tenant_id = $1 and id = any ($3::uuid[]) order by id for key share)
      insert into segment_contact (tenant_id, segment_id, contact_id, created_at)
      select $1, r.segment_id, r.contact_id, $4
      from unnest($2::uuid[], $3::uuid[]) as r (contact_id, segment_id)
      join live on live.id = r.segment_id
      order by r.segment_id, r.contact_id
      on conflict do nothing
      returning contact_id as id`,
    values: [
      tenantId,
      members.map(({ contactId }) => contactId),
      members.map(({ segmentId }) => segmentId),
      at,
    ],
  });
  return new Set(rows.map(({ id }) => id));
}

export type Chosen = ReadonlyMap<string, readonly TopicChoice[]>;

/** The choices that are different now, by contact. The last one about a topic holds. */
export async function storeChoices(
  client: PoolClient,
  tenantId: string,
  choices: readonly (TopicChoice & { readonly contactId: string })[],
  at: Date,
): Promise<Chosen> {
  if (choices.length === 0) return new Map();
  const last = [
    ...new Map(choices.map((one) => [`${one.contactId} ${one.id.toLowerCase()}`, one])).values(),
  ];
  const { rows } = await client.query<{ contactId: string } & TopicChoice>({
    name: 'store-choices',
    text: `with live as materialized (
        select id from topic where tenant_id = $1 and id = any ($3::uuid[]) order by id for key share)
      insert into contact_topic as held (tenant_id, contact_id, topic_id, subscription, updated_at)
      select $1, r.contact_id, r.topic_id, r.subscription, $5
      from unnest($2::uuid[], $3::uuid[], $4::text[]) as r (contact_id, topic_id, subscription)
      join live on live.id = r.topic_id
      order by r.contact_id, r.topic_id
      on conflict (tenant_id, contact_id, topic_id)
        do update set subscription = excluded.subscription, updated_at = excluded.updated_at
        where held.subscription <> excluded.subscription
      returning contact_id as "contactId", topic_id as id, subscription`,
    values: [
      tenantId,
      last.map(({ contactId }) => contactId),
      last.map(({ id }) => id),
      last.map(({ subscription }) => subscription),
      at,
    ],
  });
  const chosen = new Map<string, TopicChoice[]>();
  for (const { contactId, ...choice } of rows) {
    const list = chosen.get(contactId) ?? [];
    list.push(choice);
    chosen.set(contactId, list);
  }
  return chosen;
}
