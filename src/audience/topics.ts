// Topics: subjects that contacts opt in to or out of. When one is deleted, mail that names it may still wait; so what was
// chosen about it, and its default, hold for as long as any can, and are shown to nobody.
import {
  checkPage,
  PAGE_MAX,
  refuseCursor,
  toPage,
  type PageRequest,
  orderOf,
  rangeOf,
} from '../access/page.ts';
import { refuseFields, type Issue } from '../access/refusal.ts';
import type { Pool, PoolClient } from 'pg';
import { isUuid, newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { Topic } from '../store/topic.ts';
import { tellWebhooks } from '../timeline/outbox.ts';
import { nameIssues, textIssues } from './texts.ts';

export interface TopicRecord {
  readonly id: string;
  readonly name: string;
  readonly description: string | null;
  readonly defaultSubscription: 'opt_in' | 'opt_out';
  readonly visibility: 'public' | 'private';
  readonly createdAt: Date;
}

export interface TopicPage {
  readonly items: readonly TopicRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** A new topic. */
export interface CreateTopicRequest {
  /** 1 to 50 characters. */
  name: string;
  /** At most 200 characters. */
  description?: string | null;
  /** What holds for a contact that has not chosen. Never changes. */
  default_subscription: 'opt_in' | 'opt_out';
  /** `public`: shown to everyone who sets preferences; `private` (default): only to contacts that opted in. */
  visibility?: 'public' | 'private';
}

/** A change of a topic: what is absent stays. */
export interface UpdateTopicRequest {
  /** 1 to 50 characters. */
  name?: string;
  /** At most 200 characters; null removes it. */
  description?: string | null;
  visibility?: 'public' | 'private';
  /** Cannot be changed: only the value that it has already is taken. */
  default_subscription?: 'opt_in' | 'opt_out';
}

export interface TopicVerbs {
  /** The id. Throws a Refusal when a field is wrong. */
  create(tenantId: string, request: CreateTopicRequest): Promise<string>;
  /** Newest first, up to 100 where no limit is given; `search` is a part of name or description in any case. */
  list(tenantId: string, page: PageRequest, search: string | null): Promise<TopicPage>;
  find(tenantId: string, id: string): Promise<TopicRecord | null>;
  /** False when there is no such topic. Throws a Refusal when a field is wrong. */
  update(tenantId: string, id: string, request: UpdateTopicRequest): Promise<boolean>;
  /** False when there is no such topic. */
  remove(tenantId: string, id: string): Promise<boolean>;
}

const NAME_MAX_CHARACTERS = 50;
const DESCRIPTION_MAX_CHARACTERS = 200;
const SEARCH_MAX_CHARACTERS = 200;
/** Of one tenant. */
export const TOPICS_MAX = 1_000;
/** Mail waits at most 30 days for its time and is tried for at most 30 more; the rest is for release by hand. */
const DELETED_KEPT_DAYS = 65;

/** Whether the tenant has this topic; false for what is no UUID. */
export async function topicExists(store: Store, tenantId: string, id: string): Promise<boolean> {
  if (!isUuid(id)) return false;
  const { rowCount } = await store.pool.query({
    name: 'topic-exists',
    text: 'select 1 from topic where tenant_id = $1 and id = $2',
    values: [tenantId, id],
  });
  return rowCount === 1;
}

export function createTopicVerbs(store: Store, now: () => Date): TopicVerbs {
  return {
    async create(tenantId, request) {
      checkTexts(request);
      const id = newId();
      return store.transact(async (client) => {
        const { rows } = await client.query<RawTopic>(
          `insert into topic (tenant_id, id, name, description, default_subscription, visibility,
             created_at, updated_at)
           select $1, $2, $3, $4, $5, $6, $7, $7
           where (select count(*) from topic where tenant_id = $1) < ${TOPICS_MAX}
           returning ${COLUMNS}`,
          [
            tenantId,
            id,
            request.name,
            request.description ?? null,
            request.default_subscription,
            request.visibility ?? 'private',
            now(),
          ],
        );
        if (rows[0] === undefined) {
          const message = `There can be at most ${TOPICS_MAX} topics; delete some first.`;
          throw refuseFields([{ path: 'name', message }]);
        }
        await tell(client, tenantId, 'topic.created', rows[0]);
        return id;
      });
    },

    async list(tenantId, page, search) {
      const cursor = checkPage({ ...page, limit: page.limit ?? PAGE_MAX });
      const matching = search === null || search === '' ? {} : containing(search);
      const at = cursor.after ?? cursor.before;
      const em = store.em();
      if (at !== null && (await em.count(Topic, { tenantId, id: at })) === 0) refuseCursor(cursor);
      const rows = await em.find(
        Topic,
        {
          tenantId,
          ...matching,
          ...rangeOf(cursor),
        },
        orderOf(cursor),
      );
      const { items, hasMore } = toPage(rows, cursor);
      return { items: items.map(toRecord), hasMore };
    },

    async find(tenantId, id) {
      const topic = await store.em().findOne(Topic, { tenantId, id });
      return topic === null ? null : toRecord(topic);
    },

    async update(tenantId, id, request) {
      const em = store.em();
      const topic = await em.findOne(Topic, { tenantId, id });
      if (topic === null) return false;
      const { default_subscription: wanted = topic.defaultSubscription } = request;
      checkTexts(
        request,
        wanted === topic.defaultSubscription
          ? []
          : [
              {
                path: 'default_subscription',
                message: '`default_subscription` cannot be changed; make another topic.',
              },
            ],
      );
      return store.transact(async (client) => {
        const { rows } = await client.query<RawTopic & { readonly isChanged: boolean }>(
          `with held as (select * from topic where tenant_id = $1 and id = $2 for update)
           update topic t set name = coalesce($3, t.name), visibility = coalesce($4, t.visibility),
             description = case when $5 then $6 else t.description end, updated_at = $7
           from held where t.tenant_id = $1 and t.id = held.id
           returning ${QUALIFIED},
             (t.name, t.description, t.visibility) is distinct from
               (held.name, held.description, held.visibility) as "isChanged"`,
          [
            tenantId,
            id,
            request.name ?? null,
            request.visibility ?? null,
            request.description !== undefined,
            request.description ?? null,
            now(),
          ],
        );
        const [changed] = rows;
        if (changed?.isChanged === true) await tell(client, tenantId, 'topic.updated', changed);
        return changed !== undefined;
      });
    },

    async remove(tenantId, id) {
      const at = now();
      return store.transact(async (client) => {
        const { rows } = await client.query<RawTopic>(
          `with gone as (
             delete from topic where tenant_id = $1 and id = $2 returning ${COLUMNS}
           ), kept as (
             insert into deleted_topic (tenant_id, id, default_subscription, deleted_at)
             select $1, id, default_subscription, $3 from gone
           )
           select ${COLUMNS} from gone`,
          [tenantId, id, at],
        );
        if (rows[0] !== undefined) await tell(client, tenantId, 'topic.deleted', rows[0], at);
        return rows[0] !== undefined;
      });
    },
  };
}

/**
 * Forgets what was chosen about topics that were deleted DELETED_KEPT_DAYS ago, at most `max` choices, and then the topics
 * of which no choice is left, at most `max`. How many rows went; below `max`, nothing is left to do.
 */
export async function forgetDeletedTopics(pool: Pool, max: number, now: Date): Promise<number> {
  const until = new Date(now.getTime() - DELETED_KEPT_DAYS * 86_400_000);
  const choices = await pool.query({
    name: 'forget-choices',
    text: `delete from contact_topic where ctid = any (array(
      select s.ctid from deleted_topic g
      join contact_topic s on s.tenant_id = g.tenant_id and s.topic_id = g.id
      where g.deleted_at < $1 limit $2 for update of s skip locked))`,
    values: [until, max],
  });
  // Its default must not hold again for who chose otherwise.
  const topics = await pool.query({
    name: 'forget-deleted-topics',
    text: `delete from deleted_topic where ctid = any (array(
      select g.ctid from deleted_topic g
      where g.deleted_at < $1 and not exists (
        select 1 from contact_topic s where s.tenant_id = g.tenant_id and s.topic_id = g.id)
      order by g.deleted_at limit $2))`,
    values: [until, max],
  });
  return (choices.rowCount ?? 0) + (topics.rowCount ?? 0);
}

interface RawTopic {
  readonly id: string;
  readonly name: string;
  readonly description: string | null;
  readonly default_subscription: string;
  readonly created_at: Date;
  readonly updated_at: Date;
}

const columns = ['id', 'name', 'description', 'default_subscription', 'created_at', 'updated_at'];
const COLUMNS = columns.join(', ');
const QUALIFIED = columns.map((column) => `t.${column}`).join(', ');

async function tell(
  client: PoolClient,
  tenantId: string,
  type: 'topic.created' | 'topic.updated' | 'topic.deleted',
  topic: RawTopic,
  at: Date = new Date(topic.updated_at),
): Promise<void> {
  const detail = {
    id: topic.id,
    name: topic.name,
    description: topic.description,
    default_subscription: topic.default_subscription,
    deleted: type === 'topic.deleted',
    created_at: new Date(topic.created_at).toISOString(),
    updated_at: new Date(topic.updated_at).toISOString(),
  };
  await tellWebhooks(client, [{ tenantId, type, subjectId: topic.id, detail, at }]);
}

/** Throws a Refusal that lists these issues and what is wrong with the texts. */
function checkTexts(
  { name, description }: { readonly name?: string; readonly description?: string | null },
  issues: readonly Issue[] = [],
): void {
  const all = [
    ...(name === undefined ? [] : nameIssues('name', name, NAME_MAX_CHARACTERS)),
    ...((description?.length ?? 0) > DESCRIPTION_MAX_CHARACTERS
      ? [
          {
            path: 'description',
            message: `\`description\` must have at most ${DESCRIPTION_MAX_CHARACTERS} characters.`,
          },
        ]
      : textIssues('description', description ?? '')),
    ...issues,
  ];
  if (all.length > 0) throw refuseFields(all);
}

/** The condition for a part of name or description, in any case. */
function containing(search: string): object {
  const issues =
    search.length > SEARCH_MAX_CHARACTERS
      ? [
          {
            path: 'search',
            message: `\`search\` must have at most ${SEARCH_MAX_CHARACTERS} characters.`,
          },
        ]
      : textIssues('search', search);
  if (issues.length > 0) throw refuseFields(issues);
  const pattern = `%${search.replace(/[\\%_]/g, '\\$&')}%`;
  return { $or: [{ name: { $ilike: pattern } }, { description: { $ilike: pattern } }] };
}

const toRecord = (topic: InstanceType<typeof Topic.class>): TopicRecord => ({
  id: topic.id,
  name: topic.name,
  description: topic.description ?? null,
  defaultSubscription: topic.defaultSubscription,
  visibility: topic.visibility,
  createdAt: topic.createdAt,
});
