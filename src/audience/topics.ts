// Topics: subjects that contacts opt in to or out of.
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
import { isUuid, newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { Topic } from '../store/topic.ts';

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
/** A name is one line wherever it is shown. */
// oxlint-disable-next-line no-control-regex
const CONTROLS = /[\u0000-\u001f\u007f]/;

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
      const at = now();
      const id = newId();
      await store.em().insert(Topic, {
        tenantId,
        id,
        name: request.name,
        description: request.description ?? null,
        defaultSubscription: request.default_subscription,
        visibility: request.visibility ?? 'private',
        createdAt: at,
        updatedAt: at,
      });
      return id;
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
      const changed = await em.nativeUpdate(
        Topic,
        { tenantId, id },
        {
          ...(request.name === undefined ? {} : { name: request.name }),
          ...(request.description === undefined ? {} : { description: request.description }),
          ...(request.visibility === undefined ? {} : { visibility: request.visibility }),
          updatedAt: now(),
        },
      );
      return changed > 0;
    },

    remove: async (tenantId, id) => (await store.em().nativeDelete(Topic, { tenantId, id })) > 0,
  };
}

/** Throws a Refusal that lists these issues and what is wrong with the texts. */
function checkTexts(
  { name, description }: { readonly name?: string; readonly description?: string | null },
  issues: readonly Issue[] = [],
): void {
  const all = [
    ...(name === undefined
      ? []
      : name.trim() === '' || name.length > NAME_MAX_CHARACTERS
        ? [{ path: 'name', message: `\`name\` must have 1 to ${NAME_MAX_CHARACTERS} characters.` }]
        : CONTROLS.test(name)
          ? [{ path: 'name', message: '`name` contains a line break or a control character.' }]
          : storableIssues('name', name)),
    ...((description?.length ?? 0) > DESCRIPTION_MAX_CHARACTERS
      ? [
          {
            path: 'description',
            message: `\`description\` must have at most ${DESCRIPTION_MAX_CHARACTERS} characters.`,
          },
        ]
      : storableIssues('description', description ?? '')),
    ...issues,
  ];
  if (all.length > 0) throw refuseFields(all);
}

/** JSON can write both, UTF-8 and Postgres cannot hold them. */
const storableIssues = (path: string, text: string): readonly Issue[] =>
  text.includes('\0') || !text.isWellFormed()
    ? [{ path, message: `\`${path}\` contains a NUL character or half a surrogate pair.` }]
    : [];

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
      : storableIssues('search', search);
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
