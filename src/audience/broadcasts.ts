// Broadcasts: one text for every contact of a segment. A draft can be changed, sent or planned; what is sent on its way is
// stored for each contact by sending/fan-out.ts.
import type { PoolClient } from 'pg';
import type { Caller } from '../access/keys.ts';
import {
  checkPage,
  orderOf,
  PAGE_MAX,
  rangeOf,
  refuseCursor,
  toPage,
  type PageRequest,
} from '../access/page.ts';
import { Refusal, refuseFields } from '../access/refusal.ts';
import { parseMailbox } from '../mail/address.ts';
import { Broadcast, type BroadcastStatus } from '../store/broadcast.ts';
import { newId } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import type { Store } from '../store/orm.ts';
import { copyName } from '../templates/templates.ts';
import {
  applyToBroadcast,
  badSegment,
  badTopicOf,
  checkNewBroadcast,
  checkReady,
  type BroadcastContent,
  type CreateBroadcastRequest,
  type UpdateBroadcastRequest,
} from './broadcast-content.ts';
import {
  listClickedLinks,
  listRecipients,
  type ClickedLinkPage,
  type RecipientPage,
  type RecipientQuery,
} from './broadcast-recipients.ts';

/** What lists show of a broadcast. */
export interface BroadcastSummary {
  readonly id: string;
  readonly name: string;
  readonly segmentId: string | null;
  readonly topicId: string | null;
  readonly status: BroadcastStatus;
  readonly createdAt: Date;
  readonly scheduledAt: Date | null;
  /** When the last of its emails was stored. */
  readonly sentAt: Date | null;
}

export interface BroadcastRecord extends BroadcastSummary, BroadcastContent {
  readonly segmentId: string | null;
  readonly topicId: string | null;
  readonly name: string;
  /** Why it failed. */
  readonly failure: string | null;
}

export interface BroadcastPage {
  readonly items: readonly BroadcastSummary[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

export interface BroadcastVerbs {
  /** The id. Throws a Refusal when a field is wrong, or what is missing for sending it now. */
  create(caller: Caller, request: CreateBroadcastRequest): Promise<string>;
  /** Newest first, up to 100 where no limit is given. */
  list(tenantId: string, page: PageRequest): Promise<BroadcastPage>;
  find(tenantId: string, id: string): Promise<BroadcastRecord | null>;
  /** Throws a Refusal when there is no such broadcast, it is no draft any more, or a field is wrong. */
  update(tenantId: string, id: string, request: UpdateBroadcastRequest): Promise<void>;
  /** Throws a Refusal when there is no such broadcast or it is no draft. */
  remove(tenantId: string, id: string): Promise<void>;
  /** Sends a draft, now or then. Throws a Refusal that says what is missing or wrong. */
  send(caller: Caller, id: string, scheduledAt: string | null): Promise<void>;
  /** A planned one is a draft again; of one that is being sent, what has not begun is not sent. */
  cancel(tenantId: string, id: string): Promise<void>;
  /** The id of a draft that says the same. */
  duplicate(tenantId: string, id: string): Promise<string>;
  listRecipients(tenantId: string, id: string, query: RecipientQuery): Promise<RecipientPage>;
  listClickedLinks(tenantId: string, id: string, page: PageRequest): Promise<ClickedLinkPage>;
}

export interface BroadcastDependencies {
  readonly store: Store;
  readonly now: () => Date;
  /** Throws a Refusal when the caller may not send from this domain. */
  readonly checkAuthor: (caller: Caller, domain: string) => Promise<unknown>;
  /** The time that a `scheduled_at` says. Throws a Refusal. */
  readonly planAt: (given: string) => Date;
  /** Something is to be sent now, is planned, or is to be taken back. */
  readonly onQueued: () => void;
  /** After the commit: takes back what is queued of it, as far as that goes at once. */
  readonly onCanceled: (tenantId: string, id: string) => Promise<void>;
}

/** How often somebody else may change the author between our look and our lock. */
const LOOKS_MAX = 5;

export function createBroadcastVerbs(d: BroadcastDependencies): BroadcastVerbs {
  const { store, now } = d;

  const checkAuthorOf = async (caller: Caller, from: string | null): Promise<void> => {
    const parsed = from === null ? null : parseMailbox(from);
    if (parsed?.ok === true) await d.checkAuthor(caller, parsed.mailbox.domain);
  };

  return {
    async create(caller, request) {
      const { tenantId } = caller;
      const content = checkNewBroadcast(request);
      const wanted = request.send === true ? (request.scheduled_at ?? null) : null;
      const plannedAt = wanted === null ? null : d.planAt(wanted);
      if (request.send === true) await checkAuthorOf(caller, content.fromGiven);
      const id = newId();
      const at = now();
      await store.transact(async (client) => {
        await checkLinked(client, tenantId, content);
        if (request.send === true) checkReady(content, await propertyKeys(client, tenantId));
        await insertBroadcast(client, { tenantId, id, at, content });
        if (request.send === true) await startBroadcast(client, { caller, id, at, plannedAt });
      });
      if (request.send === true) d.onQueued();
      return id;
    },

    async list(tenantId, page) {
      const cursor = checkPage({ ...page, limit: page.limit ?? PAGE_MAX });
      const at = cursor.after ?? cursor.before;
      const em = store.em();
      if (at !== null && (await em.count(Broadcast, { tenantId, id: at })) === 0) {
        refuseCursor(cursor);
      }
      const rows = await em.find(
        Broadcast,
        { tenantId, ...rangeOf(cursor) },
        {
          ...orderOf(cursor),
          fields: ['name', 'segmentId', 'topicId', 'status', 'createdAt', 'scheduledAt', 'sentAt'],
        },
      );
      const { items, hasMore } = toPage(rows, cursor);
      return {
        items: items.map((row) => ({
          id: row.id,
          name: row.name,
          segmentId: row.segmentId ?? null,
          topicId: row.topicId ?? null,
          status: row.status,
          createdAt: row.createdAt,
          scheduledAt: row.scheduledAt ?? null,
          sentAt: row.sentAt ?? null,
        })),
        hasMore,
      };
    },

    find: (tenantId, id) => findBroadcast(store, tenantId, id),

    async update(tenantId, id, request) {
      await store.transact(async (client) => {
        const was = await lockDraft(client, { tenantId, id, what: 'changed' });
        const content = applyToBroadcast(was, request);
        await checkLinked(client, tenantId, {
          segmentId: content.segmentId === was.segmentId ? null : content.segmentId,
          topicId: content.topicId === was.topicId ? null : content.topicId,
        });
        await client.query({
          text: `update broadcast set name = $3, segment_id = $4, topic_id = $5, from_given = $6, subject = $7,
              reply_to_given = $8, preview_text = $9, html = $10, text = $11, updated_at = $12
            where tenant_id = $1 and id = $2`,
          values: [tenantId, id, ...columnsOf(content), now()],
        });
      });
    },

    async remove(tenantId, id) {
      await store.transact(async (client) => {
        await lockDraft(client, { tenantId, id, what: 'deleted' });
        await client.query('delete from broadcast where tenant_id = $1 and id = $2', [
          tenantId,
          id,
        ]);
      });
    },

    async send(caller, id, scheduledAt) {
      const { tenantId } = caller;
      const plannedAt = scheduledAt === null ? null : d.planAt(scheduledAt);
      for (let look = 0; look < LOOKS_MAX; look++) {
        // Asked before the lock: the answer comes over another connection.
        const seen = await findBroadcast(store, tenantId, id);
        if (seen === null) throw notFound();
        if (seen.status === 'draft') await checkAuthorOf(caller, seen.fromGiven);
        const isStarted = await store.transact(async (client) => {
          const content = await lockDraft(client, { tenantId, id, what: 'sent' });
          checkReady(content, await propertyKeys(client, tenantId));
          if (content.fromGiven !== seen.fromGiven) return false;
          await checkLinked(client, tenantId, content);
          await startBroadcast(client, { caller, id, at: now(), plannedAt });
          return true;
        });
        if (!isStarted) continue;
        d.onQueued();
        return;
      }
      throw new Refusal('validation_error', 'The broadcast is being changed; try again.');
    },

    async cancel(tenantId, id) {
      const { rows } = await store.pool.query<{ status: BroadcastStatus }>({
        name: 'cancel-broadcast',
        text: `update broadcast
          set status = case status when 'scheduled' then 'draft' else 'canceled' end,
            scheduled_at = case status when 'scheduled' then null else scheduled_at end,
            api_key_id = case status when 'scheduled' then null else api_key_id end,
            updated_at = $3
          where tenant_id = $1 and id = $2 and status in ('scheduled', 'queued')
          returning status`,
        values: [tenantId, id, now()],
      });
      if (rows[0]?.status === 'canceled') {
        await d.onCanceled(tenantId, id);
        d.onQueued(); // the rest must not wait for the next look
      }
      if (rows.length > 0) return;
      const found = await findBroadcast(store, tenantId, id);
      if (found === null) throw notFound();
      throw new Refusal(
        'validation_error',
        `Only a broadcast that is scheduled or being sent can be canceled; this one is ${WORDS[found.status]}.`,
      );
    },

    async duplicate(tenantId, id) {
      const copyId = newId();
      const content = await findBroadcast(store, tenantId, id);
      if (content === null) throw notFound();
      await store.transact((client) =>
        insertBroadcast(client, {
          tenantId,
          id: copyId,
          at: now(),
          content: { ...content, name: copyName(content.name) },
        }),
      );
      return copyId;
    },

    async listRecipients(tenantId, id, query) {
      await mustExist(store, tenantId, id);
      return listRecipients(store.pool, { tenantId, broadcastId: id }, query);
    },

    async listClickedLinks(tenantId, id, page) {
      await mustExist(store, tenantId, id);
      return listClickedLinks(store.pool, { tenantId, broadcastId: id }, page);
    },
  };
}

const WORDS: Readonly<Record<BroadcastStatus, string>> = {
  draft: 'a draft',
  scheduled: 'scheduled',
  queued: 'being sent',
  sent: 'sent',
  failed: 'failed',
  canceled: 'canceled',
};

const notFound = (): Refusal => new Refusal('not_found', 'Broadcast not found');

async function mustExist(store: Store, tenantId: string, id: string): Promise<void> {
  if ((await store.em().count(Broadcast, { tenantId, id })) === 0) throw notFound();
}

async function findBroadcast(
  store: Store,
  tenantId: string,
  id: string,
): Promise<BroadcastRecord | null> {
  const row = await store.em().findOne(Broadcast, { tenantId, id });
  if (row === null) return null;
  return {
    id: row.id,
    name: row.name,
    segmentId: row.segmentId ?? null,
    topicId: row.topicId ?? null,
    fromGiven: row.fromGiven ?? null,
    subject: row.subject ?? null,
    replyToGiven: row.replyToGiven,
    previewText: row.previewText ?? null,
    html: row.html ?? null,
    text: row.text ?? null,
    status: row.status,
    failure: row.failure ?? null,
    createdAt: row.createdAt,
    scheduledAt: row.scheduledAt ?? null,
    sentAt: row.sentAt ?? null,
  };
}

interface ContentRow {
  readonly status: BroadcastStatus;
  readonly name: string;
  readonly segment_id: string | null;
  readonly topic_id: string | null;
  readonly from_given: string | null;
  readonly subject: string | null;
  readonly reply_to_given: readonly string[] | string;
  readonly preview_text: string | null;
  readonly html: string | null;
  readonly text: string | null;
}

/** What the draft says; nobody else changes it in this transaction. Throws a Refusal when it is none. */
async function lockDraft(
  client: PoolClient,
  about: { readonly tenantId: string; readonly id: string; readonly what: string },
): Promise<BroadcastContent> {
  const { rows } = await client.query<ContentRow>({
    text: `select status, name, segment_id, topic_id, from_given, subject, reply_to_given, preview_text, html, text
      from broadcast where tenant_id = $1 and id = $2 for update`,
    values: [about.tenantId, about.id],
  });
  const [row] = rows;
  if (row === undefined) throw notFound();
  if (row.status !== 'draft') {
    throw new Refusal(
      'validation_error',
      `Only a draft can be ${about.what}; this broadcast is ${WORDS[row.status]}.`,
    );
  }
  return {
    name: row.name,
    segmentId: row.segment_id,
    topicId: row.topic_id,
    fromGiven: row.from_given,
    subject: row.subject,
    replyToGiven: fromJson(row.reply_to_given),
    previewText: row.preview_text,
    html: row.html,
    text: row.text,
  };
}

const columnsOf = (content: BroadcastContent): readonly unknown[] => [
  content.name,
  content.segmentId,
  content.topicId,
  content.fromGiven,
  content.subject,
  JSON.stringify(content.replyToGiven),
  content.previewText,
  content.html,
  content.text,
];

async function insertBroadcast(
  client: PoolClient,
  made: {
    readonly tenantId: string;
    readonly id: string;
    readonly at: Date;
    readonly content: BroadcastContent;
  },
): Promise<void> {
  await client.query({
    text: `insert into broadcast (tenant_id, id, name, segment_id, topic_id, from_given, subject, reply_to_given,
        preview_text, html, text, status, created_at, updated_at)
      values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, 'draft', $12, $12)`,
    values: [made.tenantId, made.id, ...columnsOf(made.content), made.at],
  });
}

/** From a draft to one that is planned or being sent. */
async function startBroadcast(
  client: PoolClient,
  start: {
    readonly caller: Caller;
    readonly id: string;
    readonly at: Date;
    readonly plannedAt: Date | null;
  },
): Promise<void> {
  const { caller, id, at, plannedAt } = start;
  await client.query({
    text: `update broadcast
      set status = case when $4::timestamptz is null then 'queued' else 'scheduled' end, scheduled_at = $4,
        queued_at = case when $4::timestamptz is null then $3::timestamptz end, api_key_id = $5, updated_at = $3
      where tenant_id = $1 and id = $2`,
    values: [caller.tenantId, id, at, plannedAt, caller.keyId],
  });
}

/** Throws a Refusal for a segment or topic that the tenant does not have. */
async function checkLinked(
  client: PoolClient,
  tenantId: string,
  { segmentId, topicId }: Pick<BroadcastContent, 'segmentId' | 'topicId'>,
): Promise<void> {
  const { rows } = await client.query<{ has_segment: boolean; has_topic: boolean }>({
    text: `select exists (select 1 from segment where tenant_id = $1 and id = $2) as has_segment,
        exists (select 1 from topic where tenant_id = $1 and id = $3) as has_topic`,
    values: [tenantId, segmentId, topicId],
  });
  const issues = [
    ...(segmentId === null || rows[0]?.has_segment === true ? [] : [badSegment()]),
    ...(topicId === null || rows[0]?.has_topic === true ? [] : [badTopicOf()]),
  ];
  if (issues.length > 0) throw refuseFields(issues);
}

async function propertyKeys(client: PoolClient, tenantId: string): Promise<readonly string[]> {
  const { rows } = await client.query<{ key: string }>({
    text: 'select key from contact_property where tenant_id = $1',
    values: [tenantId],
  });
  return rows.map(({ key }) => key);
}
