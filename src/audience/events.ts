// Definitions of custom events: a name, and the fields that its payload has. Sending one is automation-start.ts.
import {
  checkPage,
  orderOf,
  rangeOf,
  refuseCursor,
  toPage,
  type PageRequest,
} from '../access/page.ts';
import { refuseFields, type Issue } from '../access/refusal.ts';
import { EventDefinition, type FieldType } from '../store/automation.ts';
import { isUuid, newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { sendEvent, type SendEventRequest } from './automation-start.ts';
import { eventNameIssues, schemaIssues } from './event-payload.ts';

export interface EventRecord {
  readonly id: string;
  readonly name: string;
  readonly schema: Readonly<Record<string, FieldType>> | null;
  readonly createdAt: Date;
  readonly updatedAt: Date;
}

export interface EventPage {
  readonly items: readonly EventRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** A new event definition. */
export interface CreateEventRequest {
  /** 1 to 100 characters, not beginning with `resend:`; unique. Never changes. */
  name: string;
  /** The types of its payload's fields; at most 100. Absent or null: anything. */
  schema?: { [field: string]: 'string' | 'number' | 'boolean' | 'date' } | null;
}

/** A change of an event definition. */
export interface UpdateEventRequest {
  /** The types of its payload's fields; at most 100. Null: anything. */
  schema: { [field: string]: 'string' | 'number' | 'boolean' | 'date' } | null;
}

export interface EventVerbs {
  /** The id. Throws a Refusal when a field is wrong or the name is taken. */
  create(tenantId: string, request: CreateEventRequest): Promise<string>;
  /** Newest first. */
  list(tenantId: string, page: PageRequest): Promise<EventPage>;
  /** By id, or by its exact name; what looks like an id is first taken for one. */
  find(tenantId: string, idOrName: string): Promise<EventRecord | null>;
  /** The id; null when there is no such event. Throws a Refusal when a field is wrong. */
  update(tenantId: string, idOrName: string, request: UpdateEventRequest): Promise<string | null>;
  /** The id; null when there is no such event. Automations that it triggers stay. */
  remove(tenantId: string, idOrName: string): Promise<string | null>;
  /** Throws a Refusal when a field is wrong or the payload does not fit the event's schema. */
  send(tenantId: string, request: SendEventRequest): Promise<void>;
}

/** Of one tenant. */
export const EVENTS_MAX = 1_000;

export function createEventVerbs(d: {
  readonly store: Store;
  readonly now: () => Date;
  /** Runs of automations are due. */
  readonly onRuns: () => void;
}): EventVerbs {
  const { store, now } = d;
  const find: EventVerbs['find'] = async (tenantId, idOrName) => {
    const em = store.em();
    const byId = isUuid(idOrName)
      ? await em.findOne(EventDefinition, { tenantId, id: idOrName.toLowerCase() })
      : null;
    // The name comes from a path: no event can have one that Postgres cannot hold.
    if (byId === null && eventNameIssues('name', idOrName).length > 0) return null;
    const event = byId ?? (await em.findOne(EventDefinition, { tenantId, name: idOrName }));
    return event === null ? null : toRecord(event);
  };
  return {
    find,

    async create(tenantId, request) {
      const schema = request.schema ?? null;
      const issues = [...eventNameIssues('name', request.name), ...schemaIssues(schema)];
      if (issues.length > 0) throw refuseFields(issues);
      const id = newId();
      const { rowCount } = await store.pool.query(
        `insert into event_definition (tenant_id, id, name, schema, created_at, updated_at)
         select $1, $2, $3, $4::jsonb, $5, $5
         where (select count(*) from event_definition where tenant_id = $1) < ${EVENTS_MAX}
         on conflict (tenant_id, name) do nothing`,
        [tenantId, id, request.name, schema === null ? null : JSON.stringify(schema), now()],
      );
      if (rowCount === 0) {
        const isTaken = (await find(tenantId, request.name)) !== null;
        throw refuseFields([isTaken ? taken : tooMany]);
      }
      return id;
    },

    async list(tenantId, page) {
      const cursor = checkPage(page);
      const at = cursor.after ?? cursor.before;
      const em = store.em();
      if (at !== null && (await em.count(EventDefinition, { tenantId, id: at })) === 0) {
        refuseCursor(cursor);
      }
      const rows = await em.find(
        EventDefinition,
        { tenantId, ...rangeOf(cursor) },
        orderOf(cursor),
      );
      const { items, hasMore } = toPage(rows, cursor);
      return { items: items.map(toRecord), hasMore };
    },

    async update(tenantId, idOrName, { schema }) {
      const event = await find(tenantId, idOrName);
      if (event === null) return null;
      const issues = schemaIssues(schema);
      if (issues.length > 0) throw refuseFields(issues);
      const changed = await store
        .em()
        .nativeUpdate(EventDefinition, { tenantId, id: event.id }, { schema, updatedAt: now() });
      return changed === 0 ? null : event.id;
    },

    async remove(tenantId, idOrName) {
      const event = await find(tenantId, idOrName);
      if (event === null) return null;
      const removed = await store.em().nativeDelete(EventDefinition, { tenantId, id: event.id });
      return removed === 0 ? null : event.id;
    },

    async send(tenantId, request) {
      if (await sendEvent(store, tenantId, request, now())) d.onRuns();
    },
  };
}

const taken: Issue = { path: 'name', message: 'There is an event of this name already.' };
const tooMany: Issue = {
  path: 'name',
  message: `There are ${EVENTS_MAX} events already; remove one first.`,
};

const toRecord = (event: InstanceType<typeof EventDefinition.class>): EventRecord => ({
  id: event.id,
  name: event.name,
  schema: event.schema ?? null,
  createdAt: event.createdAt,
  updatedAt: event.updatedAt,
});
