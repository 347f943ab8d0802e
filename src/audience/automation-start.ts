// A custom event arrives: in one transaction it lets go on the runs that wait for it, and starts a run of every automation
// that it triggers. An event needs no definition: a name in the trigger of an automation is enough, and one that nobody
// waits for is not a mistake of the sender. Only a defined one has a schema to fit.
import type { PoolClient, QueryResult } from 'pg';
import { refuseFields, type Issue } from '../access/refusal.ts';
import type { AutomationConnection, AutomationStep } from '../store/automation.ts';
import { isUuid, LOWEST_ID, newId } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import type { Store } from '../store/orm.ts';
import { factsOf } from './automation-facts.ts';
import { nextKey } from './automation-graph.ts';
import { moveOn, RUN_COLUMNS, toRun, waitOf } from './automation-move.ts';
import { holds, type ConditionRule } from './automation-rules.ts';
import type { ContactFacts, Payload } from './automation-values.ts';
import { upsertContact } from './contact-changes.ts';
import { emailIssues } from './contact-fields.ts';
import { findContact, type ContactRecord } from './contacts.ts';
import { eventNameIssues, fitIssues, payloadIssues, type EventSchema } from './event-payload.ts';

/** An event that happened to a contact. */
export interface SendEventRequest {
  /** Its name: 1 to 100 characters, not beginning with `resend:`. It needs no definition. */
  event: string;
  /** To whom it happened: the id of a contact. Give this or `email`. */
  contact_id?: string | null;
  /** To whom it happened: an address. One that is no contact becomes one. Give this or `contact_id`. */
  email?: string | null;
  /** What is known of it: at most 64 KiB as JSON. Where the event has a schema, its fields must be of their types. */
  payload?: { [field: string]: unknown } | null;
}

/** Of one contact or address, in all automations of the tenant together; an event is refused beyond it. */
export const OPEN_RUNS_MAX = 1_000;

/** Runs are long: they have their steps and payloads with them. */
const RELEASED_AT_ONCE = 20;

/**
 * Stores what the event leads to; whether there is something to do now. Throws a Refusal when a field is wrong or the
 * payload does not fit the event's schema.
 */
export async function sendEvent(
  store: Store,
  tenantId: string,
  request: SendEventRequest,
  at: Date,
): Promise<boolean> {
  const payload = request.payload ?? null;
  const issues = [
    ...eventNameIssues('event', request.event),
    ...subjectIssues(request),
    ...payloadIssues(payload),
  ];
  if (issues.length > 0) throw refuseFields(issues);
  const event = { name: request.event, payload };
  await checkFit(store, tenantId, event);
  const contact = await subjectOf(store, tenantId, request, at);
  return store.transact(async (client) => {
    // Automations are locked before runs, as where they are stopped.
    const automations = await findTriggered(client, tenantId, event.name);
    const released = await release(client, tenantId, { event, contact, at });
    await start(client, tenantId, automations, { event, contact, at });
    return released + automations.length > 0;
  });
}

function subjectIssues({ contact_id: contactId, email }: SendEventRequest): readonly Issue[] {
  const hasContact = contactId !== undefined && contactId !== null;
  const hasEmail = email !== undefined && email !== null;
  if (hasContact && hasEmail) {
    return [{ path: 'email', message: 'Give `contact_id` or `email`, not both.' }];
  }
  if (hasContact) return isUuid(contactId) ? [] : [badContact()];
  return hasEmail
    ? emailIssues('email', email)
    : [{ path: 'contact_id', message: 'Missing `contact_id` or `email` field.' }];
}

const badContact = (): Issue => ({
  path: 'contact_id',
  message: '`contact_id` must be the id of a contact.',
});

interface Event {
  readonly name: string;
  readonly payload: Payload | null;
}

async function checkFit(store: Store, tenantId: string, event: Event): Promise<void> {
  const { rows } = await store.pool.query<{ schema: EventSchema | string | null }>({
    name: 'event-schema',
    text: 'select schema from event_definition where tenant_id = $1 and name = $2',
    values: [tenantId, event.name],
  });
  const schema = fromJson<EventSchema | null>(rows[0]?.schema ?? null);
  const issues = schema === null ? [] : fitIssues(event.payload, schema);
  if (issues.length > 0) throw refuseFields(issues);
}

/**
 * The contact to whom it happened. It is made in a transaction of its own: where contacts and runs are locked together, as
 * steps do it, the runs come first.
 */
async function subjectOf(
  store: Store,
  tenantId: string,
  { contact_id: contactId, email }: SendEventRequest,
  at: Date,
): Promise<ContactRecord> {
  const known = await findContact(store.pool, tenantId, contactId ?? email ?? '');
  if (known !== null) return known;
  const contact = await store.transact(async (client) => {
    if (typeof email !== 'string') return null;
    const { id } = await upsertContact(client, tenantId, { email }, { at, tells: true });
    return findContact(client, tenantId, id);
  });
  if (contact === null) throw refuseFields([badContact()]);
  return contact;
}

interface Arrival {
  readonly event: Event;
  readonly contact: ContactRecord;
  readonly at: Date;
}

/** Lets those go on that wait for it and whose filter it passes. How many. */
async function release(
  client: PoolClient,
  tenantId: string,
  { event, contact, at }: Arrival,
): Promise<number> {
  let facts: ContactFacts | null = null;
  let count = 0;
  for (let last: string | undefined = LOWEST_ID; last !== undefined;) {
    const { rows }: QueryResult<{ id: string }> = await client.query({
      name: 'runs-that-wait',
      text: `select ${RUN_COLUMNS} from automation_run r
        where r.tenant_id = $1 and r.address = $2 and r.waits_for = $3 and r.due_at is not null
          and r.id > $4
        order by r.id limit ${RELEASED_AT_ONCE} for update`,
      values: [tenantId, contact.address, event.name, last],
    });
    for (const run of rows.map((row) => toRun(row))) {
      facts ??= await factsOf(client, tenantId, contact);
      const rule = run.step.config['filter_rule'] as ConditionRule | undefined;
      const scope = { event: event.payload, contact: facts, waits: new Map() };
      if (rule !== undefined && !holds(rule, scope)) continue;
      const output = { event: event.name, payload: event.payload };
      await moveOn(client, run, { status: 'completed', output, via: 'event_received', at });
      count += 1;
    }
    last = rows.at(-1)?.id;
  }
  return count;
}

interface Triggered {
  readonly id: string;
  readonly steps: readonly AutomationStep[] | string;
  readonly connections: readonly AutomationConnection[] | string;
}

/** Whoever stops or removes one waits until our runs are there to be seen. */
async function findTriggered(
  client: PoolClient,
  tenantId: string,
  event: string,
): Promise<readonly Triggered[]> {
  const { rows } = await client.query<Triggered>({
    name: 'triggered-automations',
    text: `select id, steps, connections from automation
      where tenant_id = $1 and trigger_event = $2 and status = 'enabled' and removed_at is null
      order by id for share`,
    values: [tenantId, event],
  });
  return rows;
}

/** Starts a run of each. */
async function start(
  client: PoolClient,
  tenantId: string,
  automations: readonly Triggered[],
  { event, contact, at }: Arrival,
): Promise<void> {
  if (automations.length === 0) return;
  const { rows } = await client.query<{ count: number }>({
    name: 'count-open-runs',
    text: `select count(*)::integer as count from (
        select 1 from automation_run where tenant_id = $1 and address = $2 and due_at is not null
        limit ${OPEN_RUNS_MAX}) as open`,
    values: [tenantId, contact.address],
  });
  if ((rows[0]?.count ?? 0) + automations.length > OPEN_RUNS_MAX) {
    const message = `This contact is in ${rows[0]?.count} runs of automations already, and at most ${OPEN_RUNS_MAX} are allowed; wait until some have ended, or stop an automation.`;
    throw refuseFields([{ path: 'event', message }]);
  }
  const starts = automations.map((automation) => {
    const steps = fromJson(automation.steps);
    const trigger = steps.find(({ type }) => type === 'trigger')?.key ?? '';
    const next = nextKey(fromJson(automation.connections), trigger, 'default');
    const wait = waitOf(
      steps.find(({ key }) => key === next),
      at,
    );
    return { id: newId(), automationId: automation.id, next, wait };
  });
  await client.query({
    name: 'start-runs',
    text: `insert into automation_run (tenant_id, id, automation_id, contact_id, address, event, steps,
        connections, status, step_key, waits_for, due_at, started_at, completed_at, created_at)
      select $1, s.id, a.id, $2, $3, $4, a.steps, a.connections,
        case when s.next is null then 'completed' else 'running' end, s.next, s.waits_for,
        case when s.next is not null then coalesce(s.until, $5::timestamptz) end, $5,
        case when s.next is null then $5::timestamptz end, $5
      from unnest($6::uuid[], $7::uuid[], $8::text[], $9::timestamptz[], $10::text[])
        as s (id, automation_id, next, until, waits_for)
      join automation a on a.tenant_id = $1 and a.id = s.automation_id`,
    values: [
      tenantId,
      contact.id,
      contact.address,
      JSON.stringify(event),
      at,
      starts.map(({ id }) => id),
      starts.map(({ automationId }) => automationId),
      starts.map(({ next }) => next),
      starts.map(({ wait }) => wait?.until ?? null),
      starts.map(({ wait }) => wait?.forEvent ?? null),
    ],
  });
  await client.query({
    name: 'start-run-steps',
    text: `insert into automation_run_step (tenant_id, run_id, key, type, status, created_at,
        started_at, completed_at)
      select $1, r.id, step ->> 'key', step ->> 'type',
        case when step ->> 'type' = 'trigger' then 'completed'
          when waits.is_here then 'waiting' else 'pending' end, $3,
        case when step ->> 'type' = 'trigger' or waits.is_here then $3::timestamptz end,
        case when step ->> 'type' = 'trigger' then $3::timestamptz end
      from automation_run r cross join lateral jsonb_array_elements(r.steps) as step
      cross join lateral (
        select step ->> 'key' = r.step_key and step ->> 'type' in ('delay', 'wait_for_event') as is_here) waits
      where r.tenant_id = $1 and r.id = any ($2::uuid[])`,
    values: [tenantId, starts.map(({ id }) => id), at],
  });
}
