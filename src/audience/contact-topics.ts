// What one contact chose about topics, and what holds where it has not.
import type { Pool, PoolClient } from 'pg';
import { checkPage, PAGE_MAX, refuseCursor, toPage, type PageRequest } from '../access/page.ts';
import { refuseFields, type Issue } from '../access/refusal.ts';
import type { Subscription } from '../store/contact.ts';
import { isUuid } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import type { TopicChoice } from './contact-fields.ts';

type Queryable = Pick<Pool | PoolClient, 'query'>;

/** A topic as it stands for one contact. */
export interface ContactTopicRecord {
  readonly id: string;
  readonly name: string;
  readonly description: string | null;
  /** The choice of the contact, else the default of the topic. */
  readonly subscription: Subscription;
}

export interface ContactTopicPage {
  readonly items: readonly ContactTopicRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** A choice about a topic. */
export interface TopicChoiceRequest {
  id: string;
  subscription: 'opt_in' | 'opt_out';
}

/** Of one request. */
export const CHOICES_MAX = 100;

/** All topics of the tenant, newest first, up to 100 where no limit is given. */
export async function listContactTopics(
  store: Store,
  tenantId: string,
  contactId: string,
  page: PageRequest,
): Promise<ContactTopicPage> {
  const cursor = checkPage({ ...page, limit: page.limit ?? PAGE_MAX });
  const at = cursor.after ?? cursor.before;
  if (at !== null && (await topicsAmong(store.pool, tenantId, [at])).size === 0) {
    refuseCursor(cursor);
  }
  const { rows } = await store.pool.query<ContactTopicRecord>(
    `select t.id, t.name, t.description,
       coalesce(ct.subscription, t.default_subscription) as subscription
     from topic t
     left join contact_topic ct
       on ct.tenant_id = t.tenant_id and ct.contact_id = $2 and ct.topic_id = t.id
     where t.tenant_id = $1 and ($3::uuid is null or t.id < $3) and ($4::uuid is null or t.id > $4)
     order by t.id ${cursor.before === null ? 'desc' : 'asc'} limit $5`,
    [tenantId, contactId, cursor.after, cursor.before, cursor.limit + 1],
  );
  return toPage(rows, cursor);
}

/**
 * The choices with ids in lower case. Throws a Refusal for more than CHOICES_MAX and for topics that the tenant does not
 * have; inside a transaction those that it has stay until its end. `path` is where the request has them.
 */
export async function checkChoices(
  db: Queryable,
  tenantId: string,
  path: string,
  given: readonly TopicChoiceRequest[],
): Promise<readonly TopicChoice[]> {
  if (given.length > CHOICES_MAX) {
    const message = `\`${path}\` has ${given.length} items; at most ${CHOICES_MAX} are allowed.`;
    throw refuseFields([{ path, message }]);
  }
  const choices = given.map((choice) => ({ ...choice, id: choice.id.toLowerCase() }));
  const wellFormed = choices.map(({ id }) => id).filter(isUuid);
  const there = await topicsAmong(db, tenantId, wellFormed);
  const issues = choices.flatMap(({ id }, index): Issue[] => {
    if (there.has(id)) return [];
    const at = `${path}.${index}.id`;
    const words = isUuid(id) ? 'is not the id of a topic' : 'must be a valid UUID';
    return [{ path: at, message: `\`${at}\` ${words}.` }];
  });
  if (issues.length > 0) throw refuseFields(issues);
  return choices;
}

async function topicsAmong(
  db: Queryable,
  tenantId: string,
  ids: readonly string[],
): Promise<ReadonlySet<string>> {
  if (ids.length === 0) return new Set();
  const { rows } = await db.query<{ id: string }>(
    `select id from topic where tenant_id = $1 and id = any ($2::uuid[]) order by id for key share`,
    [tenantId, ids],
  );
  return new Set(rows.map(({ id }) => id));
}
