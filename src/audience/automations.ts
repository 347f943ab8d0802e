// Automations: what is done by itself when a custom event comes. Runs have a copy of the steps, so a change is for runs
// that begin after it; automation-runner.ts carries them out.
import type { PoolClient } from 'pg';
import {
  checkPage,
  orderOf,
  rangeOf,
  refuseCursor,
  toPage,
  type PageRequest,
} from '../access/page.ts';
import { refuseFields, type Issue } from '../access/refusal.ts';
import { Automation, type AutomationConnection, type AutomationStep } from '../store/automation.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { whereIs } from '../templates/find.ts';
import { cancelRuns } from './automation-move.ts';
import { findRun, listRuns, readStatuses } from './automation-runs.ts';
import type { RunPage, RunRecord, RunStepRecord } from './automation-runs.ts';
import { readGraph, type Graph } from './automation-config.ts';
import { nameIssues } from './texts.ts';

export interface AutomationRecord {
  readonly id: string;
  readonly name: string;
  readonly status: 'enabled' | 'disabled';
  readonly steps: readonly AutomationStep[];
  readonly connections: readonly AutomationConnection[];
  readonly createdAt: Date;
  readonly updatedAt: Date;
}

export interface AutomationPage {
  readonly items: readonly AutomationRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** One thing that is done. */
export interface AutomationStepRequest {
  /** 1 to 100 characters; unique in the automation. */
  key: string;
  type:
    | 'trigger'
    | 'delay'
    | 'send_email'
    | 'wait_for_event'
    | 'condition'
    | 'contact_update'
    | 'contact_delete'
    | 'add_to_segment';
  /**
   * `trigger`: `event_name`. `delay`: `duration`, such as `30 minutes`, at most 30 days. `send_email`: `template` with `id`
   * and `variables`, and `from`, `subject`, `reply_to`, `topic_id`. `wait_for_event`: `event_name`, `timeout` (at most 30
   * days; without one 90 days) and `filter_rule`. `condition`: a rule. `contact_update`: `first_name`, `last_name`,
   * `unsubscribed`, `properties`. `add_to_segment`: `segment_id`. Values may be `{"var": "event.field"}`,
   * `{"var": "contact.first_name"}` or `{"var": "wait_events.name.field"}`.
   */
  config?: { [field: string]: unknown };
}

/** What follows what. */
export interface AutomationConnectionRequest {
  /** The key of a step. */
  from: string;
  /** The key of the step that follows. */
  to: string;
  /**
   * From a condition `condition_met` or `condition_not_met`, from `wait_for_event` `event_received` or `timeout`, else
   * `default`.
   */
  type?: 'default' | 'condition_met' | 'condition_not_met' | 'timeout' | 'event_received';
}

/** A new automation. */
export interface CreateAutomationRequest {
  /** 1 to 100 characters. */
  name: string;
  /** Default: `disabled`. */
  status?: 'enabled' | 'disabled';
  /** 1 to 150, one of them a trigger. */
  steps: AutomationStepRequest[];
  connections: AutomationConnectionRequest[];
}

/** A change of an automation: what is absent stays. Runs that have begun go on as they began. */
export interface UpdateAutomationRequest {
  /** 1 to 100 characters. */
  name?: string;
  /** `disabled`: no run begins any more. */
  status?: 'enabled' | 'disabled';
  /** Together with `connections`. */
  steps?: AutomationStepRequest[];
  /** Together with `steps`. */
  connections?: AutomationConnectionRequest[];
}

export interface AutomationVerbs {
  /** The id. Throws a Refusal when a field is wrong. */
  create(tenantId: string, request: CreateAutomationRequest): Promise<string>;
  /** Newest first. */
  list(
    tenantId: string,
    page: PageRequest,
    status: 'enabled' | 'disabled' | null,
  ): Promise<AutomationPage>;
  find(tenantId: string, id: string): Promise<AutomationRecord | null>;
  /** False when there is no such automation. Throws a Refusal when a field is wrong. */
  update(tenantId: string, id: string, request: UpdateAutomationRequest): Promise<boolean>;
  /** The id of a disabled copy; null when there is no such automation. Throws a Refusal when there are too many. */
  duplicate(tenantId: string, id: string): Promise<string | null>;
  /** Disables it and cancels its runs. False when there is no such automation. */
  stop(tenantId: string, id: string): Promise<boolean>;
  /** With its runs. False when there is no such automation. */
  remove(tenantId: string, id: string): Promise<boolean>;
  /** Null when there is no such automation. Throws a Refusal for a bad page or status. */
  listRuns(
    tenantId: string,
    id: string,
    query: PageRequest & { readonly status: readonly string[] | undefined },
  ): Promise<RunPage | null>;
  findRun(
    tenantId: string,
    id: string,
    runId: string,
  ): Promise<(RunRecord & { readonly steps: readonly RunStepRecord[] }) | null>;
}

const NAME_MAX_CHARACTERS = 100;
/** Of one tenant. */
export const AUTOMATIONS_MAX = 500;
/** Enabled ones of one event: sending it starts a run of each in one transaction. */
export const TRIGGERED_MAX = 50;
/** Runs that stopping cancels before it answers; the rest ends within seconds, and does nothing until then. */
const CANCELLED_AT_ONCE = 500;

export function createAutomationVerbs(d: {
  readonly store: Store;
  readonly now: () => Date;
  /** Runs have to be ended. */
  readonly onRuns: () => void;
}): AutomationVerbs {
  const { store, now } = d;
  const exists = async (tenantId: string, id: string): Promise<boolean> =>
    (await store.em().count(Automation, { tenantId, id, removedAt: null })) > 0;
  const find: AutomationVerbs['find'] = async (tenantId, id) => {
    const automation = await store.em().findOne(Automation, { tenantId, id, removedAt: null });
    return automation === null ? null : toRecord(automation);
  };
  const insert = async (
    tenantId: string,
    automation: Pick<AutomationRecord, 'name' | 'status' | 'steps' | 'connections'>,
  ): Promise<string> => {
    const { name, status, steps, connections } = automation;
    const id = newId();
    await store.transact(async (client) => {
      const { rowCount } = await client.query(
        `insert into automation (tenant_id, id, name, status, trigger_event, steps, connections,
           created_at, updated_at)
         select $1, $2, $3, $4, $5, $6::jsonb, $7::jsonb, $8, $8
         where (select count(*) from automation where tenant_id = $1 and removed_at is null)
           < ${AUTOMATIONS_MAX}`,
        [
          tenantId,
          id,
          name,
          status,
          triggerOf(steps),
          JSON.stringify(steps),
          JSON.stringify(connections),
          now(),
        ],
      );
      if (rowCount === 0) throw refuseFields([tooMany]);
      await checkTriggered(client, tenantId, triggerOf(steps));
    });
    return id;
  };

  return {
    find,

    async create(tenantId, request) {
      const issues = nameIssues('name', request.name, NAME_MAX_CHARACTERS);
      const graph = readGraph(request, issues);
      if (issues.length > 0) throw refuseFields(issues);
      await checkNamed(store, tenantId, graph);
      return insert(tenantId, {
        name: request.name,
        status: request.status ?? 'disabled',
        ...graph,
      });
    },

    async list(tenantId, page, status) {
      const cursor = checkPage(page);
      const at = cursor.after ?? cursor.before;
      if (at !== null && !(await exists(tenantId, at))) refuseCursor(cursor);
      const rows = await store.em().find(
        Automation,
        {
          tenantId,
          removedAt: null,
          ...(status === null ? {} : { status }),
          ...rangeOf(cursor),
        },
        orderOf(cursor),
      );
      const { items, hasMore } = toPage(rows, cursor);
      return { items: items.map(toRecord), hasMore };
    },

    async update(tenantId, id, request) {
      if (!(await exists(tenantId, id))) return false;
      const { name, status, steps, connections } = request;
      const issues: Issue[] =
        name === undefined ? [] : nameIssues('name', name, NAME_MAX_CHARACTERS);
      let graph: Graph | null = null;
      if (steps !== undefined && connections !== undefined) {
        graph = readGraph({ steps, connections }, issues);
      } else if (steps !== undefined || connections !== undefined) {
        const path = steps === undefined ? 'steps' : 'connections';
        issues.push({ path, message: 'Give `steps` and `connections` together.' });
      }
      if (issues.length > 0) throw refuseFields(issues);
      if (graph !== null) await checkNamed(store, tenantId, graph);
      return store.transact(async (client) => {
        const { rows } = await client.query<{ trigger_event: string }>(
          `update automation set name = coalesce($3, name), status = coalesce($4, status),
             trigger_event = coalesce($5, trigger_event), steps = coalesce($6::jsonb, steps),
             connections = coalesce($7::jsonb, connections), updated_at = $8
           where tenant_id = $1 and id = $2 and removed_at is null returning trigger_event`,
          [
            tenantId,
            id,
            name ?? null,
            status ?? null,
            graph === null ? null : triggerOf(graph.steps),
            graph === null ? null : JSON.stringify(graph.steps),
            graph === null ? null : JSON.stringify(graph.connections),
            now(),
          ],
        );
        if (rows[0] === undefined) return false;
        await checkTriggered(client, tenantId, rows[0].trigger_event);
        return true;
      });
    },

    async duplicate(tenantId, id) {
      const automation = await find(tenantId, id);
      if (automation === null) return null;
      const { steps, connections } = automation;
      const suffix = ' (copy)';
      const name = automation.name.slice(0, NAME_MAX_CHARACTERS - suffix.length).toWellFormed();
      return insert(tenantId, { name: name + suffix, status: 'disabled', steps, connections });
    },

    async stop(tenantId, id) {
      const isThere = await store.transact(async (client) => {
        // Events that arrive at this moment are waited for here, and their runs cancelled with the others.
        const { rowCount } = await client.query(
          `select 1 from automation
           where tenant_id = $1 and id = $2 and removed_at is null for update`,
          [tenantId, id],
        );
        if (rowCount === 0) return false;
        const at = now();
        // All that began are meant, and those by a clock that is ahead of ours.
        const { rows } = await client.query<{ until: Date | string }>(
          `update automation set status = 'disabled', updated_at = $3, stopped_at = greatest($3, (
             select max(created_at) from automation_run
             where tenant_id = $1 and automation_id = $2 and status = 'running'))
           where tenant_id = $1 and id = $2 returning stopped_at as until`,
          [tenantId, id, at],
        );
        const until = new Date(rows[0]!.until);
        const about = { tenantId, automationId: id, runId: null, until, at };
        const count = await cancelRuns(client, { ...about, max: CANCELLED_AT_ONCE });
        if (count < CANCELLED_AT_ONCE) {
          await client.query(
            'update automation set stopped_at = null where tenant_id = $1 and id = $2',
            [tenantId, id],
          );
        }
        return true;
      });
      if (isThere) d.onRuns();
      return isThere;
    },

    async remove(tenantId, id) {
      const { rowCount } = await store.pool.query(
        `update automation set status = 'disabled', removed_at = $3
         where tenant_id = $1 and id = $2 and removed_at is null`,
        [tenantId, id, now()],
      );
      if (rowCount === 0) return false;
      d.onRuns();
      return true;
    },

    async listRuns(tenantId, id, query) {
      const statuses = readStatuses(query.status);
      if (!(await exists(tenantId, id))) return null;
      return listRuns(store, { tenantId, automationId: id, statuses }, query);
    },

    findRun: (tenantId, id, runId) => findRun(store, { tenantId, automationId: id, runId }),
  };
}

const tooMany: Issue = {
  path: 'name',
  message: `There are ${AUTOMATIONS_MAX} automations already; remove one first.`,
};

const triggerOf = (steps: readonly AutomationStep[]): string =>
  String(steps.find(({ type }) => type === 'trigger')?.config['event_name']);

/** In the transaction that may have made it one more. */
async function checkTriggered(client: PoolClient, tenantId: string, event: string): Promise<void> {
  const { rows } = await client.query<{ count: number }>(
    `select count(*)::integer as count from automation
     where tenant_id = $1 and trigger_event = $2 and status = 'enabled' and removed_at is null`,
    [tenantId, event],
  );
  if ((rows[0]?.count ?? 0) <= TRIGGERED_MAX) return;
  const message = `The event \`${event}\` triggers ${TRIGGERED_MAX} enabled automations already; disable one first.`;
  throw refuseFields([{ path: 'status', message }]);
}

/** Whether the templates, segments and topics that steps name are the tenant's. Throws a Refusal. */
async function checkNamed(store: Store, tenantId: string, { steps }: Graph): Promise<void> {
  const named = steps.flatMap(({ config }, index) => {
    const path = `steps.${index}.config`;
    const template = config['template'] as { readonly id: string } | undefined;
    return [
      ...(template === undefined
        ? []
        : [{ path: `${path}.template.id`, kind: 'template', name: template.id }]),
      ...['topic', 'segment'].flatMap((kind) => {
        const name = config[`${kind}_id`];
        return typeof name === 'string' ? [{ path: `${path}.${kind}_id`, kind, name }] : [];
      }),
    ];
  });
  const known = await findNamed(store, tenantId, named);
  const issues = named
    .filter(({ kind, name }) => !known.has(`${kind} ${name.toLowerCase()}`))
    .map(({ path, kind }) => ({ path, message: `\`${path}\` must be the id of a ${kind}.` }));
  if (issues.length > 0) throw refuseFields(issues);
}

async function findNamed(
  store: Store,
  tenantId: string,
  named: readonly { readonly kind: string; readonly name: string }[],
): Promise<ReadonlySet<string>> {
  if (named.length === 0) return new Set();
  const of = (kind: string): readonly string[] =>
    named.filter((one) => one.kind === kind).map(({ name }) => name);
  const templates = of('template').flatMap((name) => whereIs(tenantId, name) ?? []);
  const { rows } = await store.pool.query<{ named: string }>(
    `select 'template ' || lower(id::text) as named from template
       where tenant_id = $1 and id = any ($2::uuid[])
     union all select 'template ' || lower(alias) from template
       where tenant_id = $1 and alias = any ($3::text[])
     union all select 'topic ' || id from topic where tenant_id = $1 and id = any ($4::uuid[])
     union all select 'segment ' || id from segment where tenant_id = $1 and id = any ($5::uuid[])`,
    [
      tenantId,
      templates.flatMap((one) => ('id' in one ? [one.id] : [])),
      templates.flatMap((one) => ('alias' in one ? [one.alias] : [])),
      of('topic'),
      of('segment'),
    ],
  );
  return new Set(rows.map((row) => row.named));
}

const toRecord = (automation: InstanceType<typeof Automation.class>): AutomationRecord => ({
  id: automation.id,
  name: automation.name,
  status: automation.status,
  steps: automation.steps,
  connections: automation.connections,
  createdAt: automation.createdAt,
  updatedAt: automation.updatedAt,
});
