// A run and its way: ends the step at which it stands and goes on to the next, or ends the run. Every change is made under
// a lock on the run's row, so a step ends once.
import type { PoolClient } from 'pg';
import type { AutomationConnection, AutomationStep } from '../store/automation.ts';
import { fromJson } from '../store/json.ts';
import { parseDuration } from './automation-duration.ts';
import { nextKey, reachableFrom, type ConnectionType } from './automation-graph.ts';
import type { Payload } from './automation-values.ts';

export interface Run {
  readonly tenantId: string;
  readonly id: string;
  readonly automationId: string;
  readonly contactId: string;
  /** Normalized. */
  readonly address: string;
  readonly event: { readonly name: string; readonly payload: Payload | null };
  readonly steps: readonly AutomationStep[];
  readonly connections: readonly AutomationConnection[];
  readonly step: AutomationStep;
  readonly tries: number;
  readonly createdAt: Date;
}

interface RunRow {
  readonly tenant_id: string;
  readonly id: string;
  readonly automation_id: string;
  readonly contact_id: string;
  readonly address: string;
  readonly event: Run['event'] | string;
  readonly steps: readonly AutomationStep[] | string;
  readonly connections: readonly AutomationConnection[] | string;
  readonly step_key: string;
  readonly tries: number;
  readonly created_at: Date | string;
}

/** Of the table `automation_run r`, for `toRun`. */
export const RUN_COLUMNS = `r.tenant_id, r.id, r.automation_id, r.contact_id, r.address, r.event,
  r.steps, r.connections, r.step_key, r.tries, r.created_at`;

/** Of a row that has not ended. */
export function toRun(row: object): Run {
  const given = row as RunRow;
  const steps = fromJson(given.steps);
  const step = steps.find(({ key }) => key === given.step_key);
  if (step === undefined) throw new Error('a run stands at a step that it does not have');
  return {
    tenantId: given.tenant_id,
    id: given.id,
    automationId: given.automation_id,
    contactId: given.contact_id,
    address: given.address,
    event: fromJson(given.event),
    steps,
    connections: fromJson(given.connections),
    step,
    tries: given.tries,
    createdAt: new Date(given.created_at),
  };
}

export type Output = Readonly<Record<string, unknown>> | null;

/** An event that does not come is waited for no longer than this where the step says no time. */
const WAIT_MAX_MS = 90 * 24 * 3_600_000;

export interface Wait {
  readonly until: Date;
  /** The event that ends it before; null: none does. */
  readonly forEvent: string | null;
}

/**
 * How a run that comes to the step at that moment waits there; null: it does not. Waiting begins in the transaction that
 * ended the step before, so an event that comes right after that is not missed.
 */
export function waitOf(step: AutomationStep | undefined, at: Date): Wait | null {
  if (step?.type !== 'delay' && step?.type !== 'wait_for_event') return null;
  const isDelay = step.type === 'delay';
  const duration = parseDuration(step.config[isDelay ? 'duration' : 'timeout']);
  return {
    until: new Date(at.getTime() + (duration.ok ? duration.ms : WAIT_MAX_MS)),
    forEvent: isDelay ? null : String(step.config['event_name']),
  };
}

/**
 * Ends the step, skips what cannot be reached any more, and stands at the next step; whether that one is due at once.
 * False: it waits, or there is none, and the run is completed. The caller holds the lock on the run.
 */
export async function moveOn(
  client: PoolClient,
  run: Run,
  ended: {
    readonly status: 'completed' | 'skipped';
    readonly output: Output;
    readonly via: ConnectionType;
    readonly at: Date;
  },
): Promise<boolean> {
  const next = nextKey(run.connections, run.step.key, ended.via);
  const open = next === null ? [] : [...reachableFrom(run.connections, next)];
  const wait = waitOf(
    run.steps.find(({ key }) => key === next),
    ended.at,
  );
  await client.query({
    name: 'automation-move-on',
    text: `with ended as (
        update automation_run_step set status = $4, output = $5, request = null,
          started_at = coalesce(started_at, $6), completed_at = $6
        where tenant_id = $1 and run_id = $2 and key = $3),
      passed as (
        update automation_run_step set status = 'skipped'
        where tenant_id = $1 and run_id = $2 and status = 'pending' and key <> $3
          and not (key = any ($7::text[]))),
      waiting as (
        update automation_run_step set status = 'waiting', started_at = $6
        where tenant_id = $1 and run_id = $2 and key = $8 and $9::timestamptz is not null)
      update automation_run set step_key = $8, waits_for = $10, tries = 0,
        status = case when $8::text is null then 'completed' else 'running' end,
        due_at = case when $8::text is not null then coalesce($9, $6::timestamptz) end,
        completed_at = case when $8::text is null then $6::timestamptz end
      where tenant_id = $1 and id = $2`,
    values: [
      run.tenantId,
      run.id,
      run.step.key,
      ended.status,
      ended.output === null ? null : JSON.stringify(ended.output),
      ended.at,
      open,
      next,
      wait?.until ?? null,
      wait?.forEvent ?? null,
    ],
  });
  return next !== null && wait === null;
}

/** What a failed step says. */
export interface Failure {
  readonly code: string;
  readonly message: string;
  readonly issues?: readonly { readonly path: string; readonly message: string }[];
}

/** The step has failed, and so has the run. The caller holds the lock on it. */
export async function failRun(
  client: PoolClient,
  run: Run,
  failure: Failure,
  at: Date,
): Promise<void> {
  await client.query({
    name: 'automation-fail',
    text: `with ended as (
        update automation_run_step set status = 'failed', error = $4, request = null,
          started_at = coalesce(started_at, $5), completed_at = $5
        where tenant_id = $1 and run_id = $2 and key = $3),
      passed as (
        update automation_run_step set status = 'skipped'
        where tenant_id = $1 and run_id = $2 and status = 'pending' and key <> $3)
      update automation_run set status = 'failed', waits_for = null, due_at = null, completed_at = $5
      where tenant_id = $1 and id = $2`,
    values: [run.tenantId, run.id, run.step.key, JSON.stringify(failure), at],
  });
}

/**
 * Cancels runs of an automation that have not ended, at most `max`. Their open steps are skipped. How many.
 */
export async function cancelRuns(
  client: PoolClient,
  about: {
    readonly tenantId: string;
    readonly automationId: string;
    /** Only this one; null: all. */
    readonly runId: string | null;
    /** Those that began until then. */
    readonly until: Date;
    readonly max: number;
    readonly at: Date;
  },
): Promise<number> {
  const { rowCount } = await client.query({
    name: 'automation-cancel',
    text: `with ended as materialized (
        select id from automation_run
        where tenant_id = $1 and automation_id = $2 and status = 'running' and created_at <= $3
          and ($6::uuid is null or id = $6)
        order by id limit $5 for update),
      passed as (
        update automation_run_step s set status = 'skipped', request = null from ended
        where s.tenant_id = $1 and s.run_id = ended.id
          and s.status in ('pending', 'waiting', 'running'))
      update automation_run r set status = 'cancelled', waits_for = null, due_at = null,
        completed_at = $4
      from ended where r.tenant_id = $1 and r.id = ended.id`,
    values: [about.tenantId, about.automationId, about.until, about.at, about.max, about.runId],
  });
  return rowCount ?? 0;
}
