// Runs of automations, read back: which there are, and what became of each step. They are kept for 90 days after their end.
import { checkPage, refuseCursor, toPage, type PageRequest } from '../access/page.ts';
import { refuseFields } from '../access/refusal.ts';
import {
  runStatuses,
  type AutomationStep,
  type runStepStatuses,
  type StepType,
} from '../store/automation.ts';
import { fromJson } from '../store/json.ts';
import type { Store } from '../store/orm.ts';
import type { Output } from './automation-move.ts';

export type RunStatus = (typeof runStatuses)[number];

export interface RunRecord {
  readonly id: string;
  readonly status: RunStatus;
  readonly startedAt: Date | null;
  readonly completedAt: Date | null;
  readonly createdAt: Date;
}

export interface RunStepRecord {
  readonly key: string;
  readonly type: StepType;
  readonly status: (typeof runStepStatuses)[number];
  readonly output: Output;
  readonly error: Output;
  readonly startedAt: Date | null;
  readonly completedAt: Date | null;
  readonly createdAt: Date;
}

export interface RunPage {
  readonly items: readonly RunRecord[];
  /** In the direction of travel. */
  readonly hasMore: boolean;
}

/** Some of `running`, `completed`, `failed` and `cancelled`, with commas between; absent: all. Throws a Refusal. */
export function readStatuses(given: readonly string[] | undefined): readonly RunStatus[] {
  const names = (given ?? []).flatMap((text) => text.split(',')).filter((name) => name !== '');
  const wanted = runStatuses.filter((status) => names.includes(status));
  if (names.some((name) => !(runStatuses as readonly string[]).includes(name))) {
    const message = `\`status\` must be some of ${runStatuses.join(', ')}, with commas between.`;
    throw refuseFields([{ path: 'status', message }]);
  }
  return wanted.length === 0 ? runStatuses : wanted;
}

/** Newest first. Throws a Refusal for a bad page. */
export async function listRuns(
  store: Store,
  about: {
    readonly tenantId: string;
    readonly automationId: string;
    readonly statuses: readonly RunStatus[];
  },
  page: PageRequest,
): Promise<RunPage> {
  const { tenantId, automationId, statuses } = about;
  const cursor = checkPage(page);
  const from = cursor.after ?? cursor.before;
  if (from !== null) {
    const { rows } = await store.pool.query(
      'select 1 from automation_run where tenant_id = $1 and id = $2 and automation_id = $3',
      [tenantId, from, automationId],
    );
    if (rows.length === 0) refuseCursor(cursor);
  }
  const [way, order] = cursor.before === null ? ['<', 'desc'] : ['>', 'asc'];
  const range = from === null ? '' : `and id ${way} $5`;
  // Each status is a range of the index, however rare it is.
  const { rows } = await store.pool.query<RawRun>(
    `select r.* from unnest($3::text[]) as wanted (status) cross join lateral (
       select id, status, started_at, completed_at, created_at from automation_run
       where tenant_id = $1 and automation_id = $2 and status = wanted.status ${range}
       order by id ${order} limit $4) r
     order by r.id ${order} limit $4`,
    [tenantId, automationId, statuses, cursor.limit + 1, ...(from === null ? [] : [from])],
  );
  const { items, hasMore } = toPage(rows, cursor);
  return { items: items.map(toRun), hasMore };
}

/** With its steps in the order of the automation. Null: there is no such run. */
export async function findRun(
  store: Store,
  about: { readonly tenantId: string; readonly automationId: string; readonly runId: string },
): Promise<(RunRecord & { readonly steps: readonly RunStepRecord[] }) | null> {
  const { tenantId, automationId, runId } = about;
  // One statement, so that the steps are those of the moment that the status is of.
  const { rows } = await store.pool.query<RawRun & { order: unknown } & RawStep>(
    `select r.id, r.status, r.started_at, r.completed_at, r.created_at, r.steps as order,
       s.key, s.type, s.status as step_status, s.output, s.error, s.started_at as step_started_at,
       s.completed_at as step_completed_at, s.created_at as step_created_at
     from automation_run r join automation a on a.tenant_id = r.tenant_id and a.id = r.automation_id
     join automation_run_step s on s.tenant_id = r.tenant_id and s.run_id = r.id
     where r.tenant_id = $1 and r.id = $2 and r.automation_id = $3 and a.removed_at is null`,
    [tenantId, runId, automationId],
  );
  const [run] = rows;
  if (run === undefined) return null;
  const order = fromJson(run.order as readonly AutomationStep[] | string).map(({ key }) => key);
  const steps = rows.map(toStep).toSorted((a, b) => order.indexOf(a.key) - order.indexOf(b.key));
  return { ...toRun(run), steps };
}

interface RawRun {
  readonly id: string;
  readonly status: RunStatus;
  readonly started_at: Date | string | null;
  readonly completed_at: Date | string | null;
  readonly created_at: Date | string;
}

interface RawStep {
  readonly key: string;
  readonly type: StepType;
  readonly step_status: RunStepRecord['status'];
  readonly output: Output | string;
  readonly error: Output | string;
  readonly step_started_at: Date | string | null;
  readonly step_completed_at: Date | string | null;
  readonly step_created_at: Date | string;
}

const toTime = (value: Date | string | null): Date | null =>
  value === null ? null : new Date(value);

const toRun = (row: RawRun): RunRecord => ({
  id: row.id,
  status: row.status,
  startedAt: toTime(row.started_at),
  completedAt: toTime(row.completed_at),
  createdAt: new Date(row.created_at),
});

const toStep = (row: RawStep): RunStepRecord => ({
  key: row.key,
  type: row.type,
  status: row.step_status,
  output: fromJson(row.output),
  error: fromJson(row.error),
  startedAt: toTime(row.step_started_at),
  completedAt: toTime(row.step_completed_at),
  createdAt: new Date(row.step_created_at),
});
