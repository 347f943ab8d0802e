// Who does not want an email: of a topic, whoever opted out of it, or has not opted in where its default says so; of a
// broadcast, whoever unsubscribed from all of them or is no contact any more. Asked when an email is accepted and once
// more when its delivery is claimed.
import type { Pool, PoolClient } from 'pg';
import { normalizedAddress } from '../mail/address.ts';

type Queryable = Pick<Pool | PoolClient, 'query'>;

/** What is said of a recipient that is not sent to. */
export const UNSUBSCRIBED = {
  cause: 'unsubscribed',
  ofTopic: 'The recipient has opted out of this topic.',
  ofBroadcast: 'The recipient does not want broadcasts.',
} as const;

/** What is to be asked about one recipient. */
export interface Offered {
  readonly tenantId: string;
  /** In any spelling. */
  readonly recipient: string;
  /** Null: of no topic. Of one that was deleted, choices and default hold on (topics.ts). */
  readonly topicId: string | null;
  readonly isBroadcast: boolean;
}

/**
 * Of the addresses (normalized, mail/address.ts) of one tenant those that do not want this email. Empty, and no
 * statement, where it has neither a topic nor a broadcast.
 */
export async function unwantedAmong(
  db: Queryable,
  tenantId: string,
  email: {
    readonly addresses: readonly string[];
    readonly topicId: string | null;
    readonly isBroadcast: boolean;
  },
): Promise<ReadonlySet<string>> {
  const { addresses, topicId, isBroadcast } = email;
  const rows = addresses.map((recipient) => ({ tenantId, recipient, topicId, isBroadcast }));
  const unwanted = await findUnwanted(db, rows);
  return new Set([...unwanted].map((index) => addresses[index]!));
}

/** Which of the rows, by their index, are not wanted; one statement for those of all tenants, none where none asks. */
export async function findUnwanted(
  db: Queryable,
  rows: readonly Offered[],
): Promise<ReadonlySet<number>> {
  const found = await ask(db, rows, { withContacts: false });
  return new Set(found.map(({ index }) => index));
}

/** What is known of a recipient of an email with a topic. */
export interface Wish {
  readonly isUnwanted: boolean;
  /** Null: no contact of the tenant. */
  readonly contactId: string | null;
}

/** In the order of the rows; of rows with neither topic nor broadcast nothing is known, and they are wanted. */
export async function findWishes(
  db: Queryable,
  rows: readonly Offered[],
): Promise<readonly Wish[]> {
  const found = new Map(
    (await ask(db, rows, { withContacts: true })).map((row) => [row.index, row]),
  );
  return rows.map((_, index) => ({
    isUnwanted: found.get(index)?.is_unwanted === true,
    contactId: found.get(index)?.contact_id ?? null,
  }));
}

interface WishRow {
  readonly index: number;
  readonly contact_id: string | null;
  readonly is_unwanted: boolean;
}

async function ask(
  db: Queryable,
  rows: readonly Offered[],
  { withContacts }: { readonly withContacts: boolean },
): Promise<readonly WishRow[]> {
  const asked = rows.flatMap((row, index) =>
    row.topicId === null && !row.isBroadcast ? [] : [{ ...row, index }],
  );
  if (asked.length === 0) return [];
  const { rows: found } = await db.query<WishRow>({
    name: 'wishes',
    text: `select * from (
        select r.index, c.id as contact_id,
          coalesce(s.subscription, t.default_subscription, g.default_subscription)
              is not distinct from 'opt_out'
            or r.is_broadcast and coalesce(c.unsubscribed, true) as is_unwanted
        from unnest($1::integer[], $2::uuid[], $3::text[], $4::uuid[], $5::boolean[])
          as r (index, tenant_id, address, topic_id, is_broadcast)
        left join contact c on c.tenant_id = r.tenant_id and c.address = r.address
        left join topic t on t.tenant_id = r.tenant_id and t.id = r.topic_id
        left join deleted_topic g on g.tenant_id = r.tenant_id and g.id = r.topic_id
        left join contact_topic s
          on s.tenant_id = r.tenant_id and s.contact_id = c.id and s.topic_id = r.topic_id) w
      where w.is_unwanted or $6::boolean`,
    values: [
      asked.map(({ index }) => index),
      asked.map(({ tenantId }) => tenantId),
      // Here and not in SQL: what lower() does to letters beyond ASCII depends on the database's locale.
      asked.map(({ recipient }) => normalizedAddress(recipient)),
      asked.map(({ topicId }) => topicId),
      asked.map(({ isBroadcast }) => isBroadcast),
      withContacts,
    ],
  });
  return found;
}
