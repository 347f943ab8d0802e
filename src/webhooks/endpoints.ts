// Endpoints as their owners manage them: where to call, what about, and the secret that calls are signed with.
import {
  checkPage,
  orderOf,
  PAGE_MAX,
  rangeOf,
  refuseCursor,
  toPage,
  type PageRequest,
} from '../access/page.ts';
import { refuseFields, type Issue } from '../access/refusal.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { Webhook } from '../store/webhook.ts';
import { eventTypes, type EventType } from '../timeline/outbox.ts';
import { endpointProblem, type EndpointRules } from './endpoint.ts';
import { createEventVerbs, type WebhookEventVerbs } from './events.ts';
import { newSecret, OVERLAP_MS, sealSecret, unsealSecret } from './secrets.ts';

export interface WebhookRecord {
  readonly id: string;
  readonly endpoint: string;
  readonly events: readonly EventType[];
  readonly status: 'enabled' | 'disabled';
  /** Why the service disabled it; null when its owner did, or nobody. */
  readonly disabledReason: string | null;
  readonly createdAt: Date;
}

export interface WebhookPage {
  readonly items: readonly WebhookRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

export interface NewWebhook {
  readonly endpoint: string;
  readonly events: readonly string[];
}

/** What is absent stays. */
export interface WebhookChange {
  readonly endpoint?: string;
  /** In place of those before. */
  readonly events?: readonly string[];
  readonly status?: 'enabled' | 'disabled';
}

export interface WebhookVerbs {
  /** Throws a Refusal when a field is wrong. */
  create(tenantId: string, wanted: NewWebhook): Promise<{ id: string; secret: string }>;
  /** Newest first, up to 100 where no limit is given. */
  list(tenantId: string, page: PageRequest): Promise<WebhookPage>;
  find(tenantId: string, id: string): Promise<(WebhookRecord & { readonly secret: string }) | null>;
  /** False when there is no such webhook. Throws a Refusal when a field is wrong. */
  update(tenantId: string, id: string, change: WebhookChange): Promise<boolean>;
  /** False when there is no such webhook. */
  remove(tenantId: string, id: string): Promise<boolean>;
  /** The new secret; the old one signs as well for a day. Null when there is no such webhook. */
  rotate(tenantId: string, id: string): Promise<string | null>;
  readonly events: WebhookEventVerbs;
}

export interface WebhookVerbParts extends EndpointRules {
  readonly store: Store;
  /** Secrets are sealed with it. */
  readonly key: Buffer;
  readonly now: () => Date;
  /** An event is due. */
  readonly onDue: () => void;
}

/** Of one tenant: whoever happens to write an event looks at all of them. */
const WEBHOOKS_MAX = 100;

export function createWebhookVerbs(d: WebhookVerbParts): WebhookVerbs {
  const { store } = d;
  return {
    async create(tenantId, wanted) {
      await check(d, wanted);
      const [id, secret, at] = [newId(), newSecret(), d.now()];
      const { rowCount } = await store.pool.query({
        name: 'create-webhook',
        text: `insert into webhook (tenant_id, id, endpoint, events, status, secret_sealed, created_at,
            updated_at)
          select $1, $2, $3, $4::text[], 'enabled', $5, $6, $6
          where (select count(*) from webhook where tenant_id = $1) < ${WEBHOOKS_MAX}`,
        values: [
          tenantId,
          id,
          wanted.endpoint,
          [...new Set(wanted.events)],
          sealSecret(d.key, { tenantId, webhookId: id }, secret),
          at,
        ],
      });
      if (rowCount === 0) {
        const message = `There are ${WEBHOOKS_MAX} webhooks already, which is the limit; delete one that is not used.`;
        throw refuseFields([{ path: 'endpoint', message }]);
      }
      return { id, secret };
    },

    async list(tenantId, page) {
      const cursor = checkPage({ ...page, limit: page.limit ?? PAGE_MAX });
      const at = cursor.after ?? cursor.before;
      const em = store.em();
      if (at !== null && (await em.count(Webhook, { tenantId, id: at })) === 0) {
        refuseCursor(cursor);
      }
      const rows = await em.find(Webhook, { tenantId, ...rangeOf(cursor) }, orderOf(cursor));
      const { items, hasMore } = toPage(rows, cursor);
      return { items: items.map(toRecord), hasMore };
    },

    async find(tenantId, id) {
      const row = await store.em().findOne(Webhook, { tenantId, id });
      if (row === null) return null;
      const secret = unsealSecret(d.key, { tenantId, webhookId: id }, row.secretSealed);
      return { ...toRecord(row), secret };
    },

    async update(tenantId, id, change) {
      const isThere = await store.em().count(Webhook, { tenantId, id });
      if (isThere === 0) return false;
      await check(d, change);
      const { rowCount } = await store.pool.query({
        name: 'update-webhook',
        // Whoever says something about it begins anew.
        text: `update webhook set endpoint = coalesce($3, endpoint),
            events = coalesce($4::text[], events), status = coalesce($5, status),
            disabled_reason = case when $5::text is null then disabled_reason end,
            failing_since = case when coalesce($3, $5) is null then failing_since end,
            failures = case when coalesce($3, $5) is null then failures else 0 end,
            updated_at = $6
          where tenant_id = $1 and id = $2`,
        values: [
          tenantId,
          id,
          change.endpoint ?? null,
          change.events === undefined ? null : [...new Set(change.events)],
          change.status ?? null,
          d.now(),
        ],
      });
      return rowCount === 1;
    },

    async remove(tenantId, id) {
      // Its events go in pieces (due-events.ts, forget.ts): there may be millions.
      return (await store.em().nativeDelete(Webhook, { tenantId, id })) > 0;
    },

    async rotate(tenantId, id) {
      const secret = newSecret();
      const at = d.now();
      const { rowCount } = await store.pool.query({
        name: 'rotate-webhook-secret',
        text: `update webhook set secret_previous_sealed = secret_sealed, secret_previous_until = $3,
            secret_sealed = $4, updated_at = $5 where tenant_id = $1 and id = $2`,
        values: [
          tenantId,
          id,
          new Date(at.getTime() + OVERLAP_MS),
          sealSecret(d.key, { tenantId, webhookId: id }, secret),
          at,
        ],
      });
      return rowCount === 1 ? secret : null;
    },

    events: createEventVerbs(d),
  };
}

const known: ReadonlySet<string> = new Set(eventTypes);
/** More cannot be meant, even where each is given twice. */
const EVENTS_MAX = 100;

/** Throws a Refusal that lists what is wrong. */
async function check(rules: EndpointRules, given: Partial<NewWebhook>): Promise<void> {
  const { endpoint, events } = given;
  const problem = endpoint === undefined ? null : await endpointProblem(rules, endpoint);
  const issues: readonly Issue[] = [
    ...(problem === null ? [] : [{ path: 'endpoint', message: problem }]),
    ...(events === undefined ? [] : eventIssues(events)),
  ];
  if (issues.length > 0) throw refuseFields(issues);
}

function eventIssues(events: readonly string[]): readonly Issue[] {
  if (events.length === 0 || events.length > EVENTS_MAX) {
    return [{ path: 'events', message: '`events` must name at least one type, and each once.' }];
  }
  return events.flatMap((type, index) =>
    known.has(type)
      ? []
      : [
          {
            path: `events.${index}`,
            message: `${JSON.stringify(type.slice(0, 60).toWellFormed())} is not a type of event; the types are ${eventTypes.join(', ')}.`,
          },
        ],
  );
}

const toRecord = (row: InstanceType<typeof Webhook.class>): WebhookRecord => ({
  id: row.id,
  endpoint: row.endpoint,
  events: row.events as EventType[],
  status: row.status,
  disabledReason: row.disabledReason ?? null,
  createdAt: row.createdAt,
});
