// What an endpoint was told, and every call: listed, read, and called again when its owner asks for it.
import { checkPage, refuseCursor, toPage, type PageRequest } from '../access/page.ts';
import { refuseFields } from '../access/refusal.ts';
import { isUuid } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { WebhookAttempt, WebhookEvent, type webhookEventStatuses } from '../store/webhook.ts';
import { readEventId, showEventId } from './event-id.ts';

export interface EventRecord {
  /** `msg_…`; the `webhook-id` of every call. */
  readonly id: string;
  readonly type: string;
  readonly status: (typeof webhookEventStatuses)[number];
  /** When it happened. */
  readonly createdAt: Date;
}

export interface WholeEvent extends EventRecord {
  /** Null: none is planned, or a call is under way. */
  readonly nextAttemptAt: Date | null;
  readonly payload: unknown;
}

export interface AttemptRecord {
  readonly id: string;
  readonly httpStatus: number | null;
  /** The beginning of the answer. */
  readonly response: string | null;
  /** What happened instead of an answer. */
  readonly error: string | null;
  readonly sentAt: Date;
  readonly durationMs: number | null;
}

export interface Paged<T> {
  readonly items: readonly T[];
  readonly hasMore: boolean;
}

/** Forward only. */
export type ForwardPage = Pick<PageRequest, 'limit' | 'after'>;

/** Null: there is no such webhook or event. Event ids as others see them. */
export interface WebhookEventVerbs {
  list(tenantId: string, webhookId: string, page: ForwardPage): Promise<Paged<EventRecord> | null>;
  find(tenantId: string, key: EventOf): Promise<WholeEvent | null>;
  /** Calls now, whatever its status. False: there is no such event. Throws a Refusal where the endpoint is disabled. */
  replay(tenantId: string, key: EventOf): Promise<boolean>;
  attempts(tenantId: string, key: EventOf, page: ForwardPage): Promise<Paged<AttemptRecord> | null>;
}

export interface EventOf {
  readonly webhookId: string;
  readonly eventId: string;
}

/** Of one event: every replay adds some. */
const ATTEMPTS_KEPT_MAX = 100;

export function createEventVerbs(d: {
  readonly store: Store;
  readonly now: () => Date;
  readonly onDue: () => void;
}): WebhookEventVerbs {
  const { store } = d;
  const isThere = async (tenantId: string, webhookId: string): Promise<boolean> => {
    if (!isUuid(webhookId)) return false;
    const { rowCount } = await store.pool.query({
      name: 'webhook-exists',
      text: 'select 1 from webhook where tenant_id = $1 and id = $2',
      values: [tenantId, webhookId],
    });
    return rowCount === 1;
  };
  /** The row's key; null: there is no such webhook, or the text is no id. */
  const keyOf = async (tenantId: string, { webhookId, eventId }: EventOf) => {
    const id = readEventId(eventId);
    return id !== null && (await isThere(tenantId, webhookId)) ? { tenantId, webhookId, id } : null;
  };

  return {
    async list(tenantId, webhookId, { limit, after }) {
      if (!(await isThere(tenantId, webhookId))) return null;
      // What is no id of an event is refused as what is no UUID.
      const given = after === undefined ? undefined : (readEventId(after) ?? '');
      const cursor = checkPage({ limit, after: given, before: undefined });
      const em = store.em();
      const of = { tenantId, webhookId };
      if (
        cursor.after !== null &&
        (await em.count(WebhookEvent, { ...of, id: cursor.after })) === 0
      ) {
        refuseCursor(cursor);
      }
      const rows = await em.find(
        WebhookEvent,
        { ...of, ...(cursor.after === null ? {} : { id: { $lt: cursor.after } }) },
        {
          fields: ['id', 'type', 'status', 'createdAt'],
          orderBy: { id: 'desc' },
          limit: cursor.limit + 1,
        },
      );
      const { items, hasMore } = toPage(rows, cursor);
      return { items: items.map(toRecord), hasMore };
    },

    async find(tenantId, asked) {
      const key = await keyOf(tenantId, asked);
      const row = key === null ? null : await store.em().findOne(WebhookEvent, key);
      if (row === null) return null;
      return {
        ...toRecord(row),
        // While it is called, the row says when the call would be taken for lost.
        nextAttemptAt: row.status === 'pending' ? (row.nextAttemptAt ?? null) : null,
        payload: JSON.parse(row.payload) as unknown,
      };
    },

    async replay(tenantId, asked) {
      const key = await keyOf(tenantId, asked);
      if (key === null) return false;
      const values = [tenantId, key.webhookId, key.id];
      const { rows } = await store.pool.query<{ is_enabled: boolean }>({
        name: 'replay-webhook-event',
        text: `with hook as (
            select status = 'enabled' as is_enabled from webhook where tenant_id = $1 and id = $2
          ), replayed as (
            update webhook_event set status = 'pending', attempts = 0, next_attempt_at = $4,
              lease_id = null
            where tenant_id = $1 and webhook_id = $2 and id = $3
              and (select is_enabled from hook)
          )
          select h.is_enabled from hook h where exists (
            select 1 from webhook_event where tenant_id = $1 and webhook_id = $2 and id = $3)`,
        values: [...values, d.now()],
      });
      const [found] = rows;
      if (found === undefined) return false;
      if (!found.is_enabled) {
        const message = 'The webhook is disabled; enable it, then replay its events.';
        throw refuseFields([{ path: 'id', message }]);
      }
      await store.pool.query({
        name: 'trim-webhook-attempts',
        text: `delete from webhook_attempt where tenant_id = $1 and webhook_id = $2 and event_id = $3
          and id in (select id from webhook_attempt
            where tenant_id = $1 and webhook_id = $2 and event_id = $3
            order by id desc offset ${ATTEMPTS_KEPT_MAX - 1})`,
        values,
      });
      d.onDue();
      return true;
    },

    async attempts(tenantId, asked, { limit, after }) {
      const key = await keyOf(tenantId, asked);
      const em = store.em();
      if (key === null || (await em.count(WebhookEvent, key)) === 0) return null;
      const cursor = checkPage({ limit, after, before: undefined });
      const of = { tenantId, webhookId: key.webhookId, eventId: key.id };
      if (
        cursor.after !== null &&
        (await em.count(WebhookAttempt, { ...of, id: cursor.after })) === 0
      ) {
        refuseCursor(cursor);
      }
      const rows = await em.find(
        WebhookAttempt,
        { ...of, ...(cursor.after === null ? {} : { id: { $lt: cursor.after } }) },
        { orderBy: { id: 'desc' }, limit: cursor.limit + 1 },
      );
      const { items, hasMore } = toPage(rows, cursor);
      return {
        items: items.map((row) => ({
          id: row.id,
          httpStatus: row.httpStatus ?? null,
          response: row.response ?? null,
          error: row.error ?? null,
          sentAt: row.sentAt,
          durationMs: row.durationMs ?? null,
        })),
        hasMore,
      };
    },
  };
}

const toRecord = (
  row: Pick<InstanceType<typeof WebhookEvent.class>, 'id' | 'type' | 'status' | 'createdAt'>,
): EventRecord => ({
  id: showEventId(row.id),
  type: row.type,
  status: row.status,
  createdAt: row.createdAt,
});
