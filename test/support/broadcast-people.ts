// A segment with many contacts, some of whom must not get a broadcast, and what became of each of them.
import { newId } from '../../src/store/id.ts';

export type Ask = <T extends object>(
  sql: string,
  values?: readonly unknown[],
) => Promise<readonly T[]>;

export interface People {
  readonly segmentId: string;
  readonly topicId: string;
  /** How many shall get it. */
  readonly wanted: number;
}

/** Of ten contacts one has unsubscribed, one opted out of the topic, one is suppressed. */
const WHO = `array['wants', 'wants', 'wants', 'unsubscribed', 'wants', 'opted-out', 'wants', 'suppressed', 'wants', 'wants']`;
const WANTED_OF_TEN = 7;

/** `contacts` is a multiple of ten. Their addresses begin with who they are. */
export async function insertPeople(
  ask: Ask,
  about: { readonly tenantId: string; readonly contacts: number; readonly domain: string },
): Promise<People> {
  const { tenantId, contacts, domain } = about;
  const [segmentId, topicId] = [newId(), newId()];
  await ask(
    `insert into segment (tenant_id, id, name, created_at, updated_at) values ($1, $2, 'All', now(), now())`,
    [tenantId, segmentId],
  );
  await ask(
    `insert into topic (tenant_id, id, name, default_subscription, visibility, created_at, updated_at)
     values ($1, $2, 'News', 'opt_in', 'public', now(), now())`,
    [tenantId, topicId],
  );
  await ask(
    `with people as (
       insert into contact (tenant_id, id, email, address, first_name, unsubscribed, created_at, updated_at)
       select $1, uuidv7(), address, address, 'Person ' || n, who = 'unsubscribed', now(), now()
       from (select n, w.who, w.who || '-' || n || '@' || $5::text as address
         from generate_series(1, $4::integer) as n
         cross join lateral (select (${WHO})[1 + n % 10] as who) w) p
       returning id, address
     ), members as (
       insert into segment_contact (tenant_id, segment_id, contact_id, created_at)
       select $1, $2, id, now() from people
     ), choices as (
       insert into contact_topic (tenant_id, contact_id, topic_id, subscription, updated_at)
       select $1, id, $3, 'opt_out', now() from people where address like 'opted-out-%'
     )
     insert into suppression (tenant_id, id, address, origin, created_at)
     select $1, uuidv7(), address, 'manual', now() from people where address like 'suppressed-%'`,
    [tenantId, segmentId, topicId, contacts, domain],
  );
  return { segmentId, topicId, wanted: (contacts / 10) * WANTED_OF_TEN };
}

/** What the rows say of a broadcast. */
export interface Reached {
  readonly status: string;
  readonly recipients: number;
  readonly left_out: number;
  /** Rows, and of how many contacts. */
  readonly rows: number;
  readonly contacts: number;
  /** Emails, to how many addresses, and to how many who must not get any. */
  readonly emails: number;
  readonly addresses: number;
  readonly forbidden: number;
  /** Deliveries that are neither delivered nor possibly so. */
  readonly open: number;
  readonly unknown: number;
}

export async function readReached(ask: Ask, broadcastId: string): Promise<Reached> {
  const [found] = await ask<Reached>(
    `select b.status, b.recipients, b.left_out, r.*, e.*
     from broadcast b
     cross join lateral (select count(*)::integer as rows, count(distinct contact_id)::integer as contacts
       from broadcast_recipient where tenant_id = b.tenant_id and broadcast_id = b.id) r
     cross join lateral (
       select count(*)::integer as emails, count(distinct d.recipient)::integer as addresses,
         count(*) filter (where d.recipient not like 'wants-%')::integer as forbidden,
         count(*) filter (where d.state not in ('delivered', 'unknown'))::integer as open,
         count(*) filter (where d.state = 'unknown')::integer as unknown
       from email m join delivery d on d.tenant_id = m.tenant_id and d.email_id = m.id
       where m.broadcast_id = b.id) e
     where b.id = $1`,
    [broadcastId],
  );
  if (found === undefined) throw new Error('there is no such broadcast');
  return found;
}
