// Runs automations: finds the runs that are due and takes them on, step by step. Any number of processes may do so: a run is
// whose lock it is, and what is due lies in the rows, so a stop or a crash loses nothing. Tenants take turns.
import type { PoolClient } from 'pg';
import { Refusal } from '../access/refusal.ts';
import type { Logger } from '../log.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';
import { cancelRuns } from './automation-move.ts';
import {
  endEmail,
  putOff,
  takeStep,
  toFailure,
  type EmailRequest,
  type StepDependencies,
} from './automation-step.ts';

export interface RunnerDependencies extends StepDependencies {
  readonly log: Logger;
  /** Accepts an email; the same key within a day is the same email. Its id. Throws a Refusal. */
  readonly sendEmail: (
    tenantId: string,
    request: EmailRequest,
    idempotencyKey: string,
  ) => Promise<string>;
}

export interface AutomationRunner {
  /** What is due now, a bounded part of it; in how many milliseconds to look again. */
  turn(): Promise<number>;
}

/** Runs of all tenants in one turn, and of one tenant. */
const RUNS_MAX = 200;
const RUNS_OF_TENANT_MAX = 20;
/** Of one run before the others have their turn. */
const STEPS_MAX = 10;
const PARALLEL = 4;
/** What others stored is found within this time. */
const IDLE_MS = 1_000;
/** Runs of automations that were stopped or removed, in one turn, and these automations. */
const CLOSED_MAX = 500;
const CLOSING_MAX = 20;

interface RunKey {
  readonly tenantId: string;
  readonly id: string;
}

export function createAutomationRunner(d: RunnerDependencies): AutomationRunner {
  /** Whether it did something. */
  const takeOn = async (key: RunKey): Promise<boolean> => {
    for (let count = 0; count < STEPS_MAX; count += 1) {
      const taken = await takeStep(d, key);
      if (taken === 'nothing') return count > 0;
      if (taken === 'rest') return true;
      if (taken === 'moved') continue;
      const { run, request, idempotencyKey } = taken;
      try {
        const emailId = await d.sendEmail(run.tenantId, request, idempotencyKey);
        if (!(await endEmail(d, run, { emailId }))) return true;
      } catch (error) {
        if (!(error instanceof Refusal) || !isFinal(error)) throw new FellDown(error);
        await endEmail(d, run, toFailure(error));
        return true;
      }
    }
    return true;
  };

  const carryOn = async (key: RunKey): Promise<boolean> => {
    try {
      return await takeOn(key);
    } catch (error) {
      const cause = error instanceof FellDown ? error.cause : error;
      if (isDatabaseUnavailable(cause)) throw cause;
      d.log.error(
        { err: cause, run_id: key.id, tenant_id: key.tenantId },
        'a step of an automation fell down',
      );
      // An email's try is counted when it begins.
      await putOff(d, key, { isCounted: error instanceof FellDown });
      return true;
    }
  };

  return {
    async turn() {
      const closed = await close(d);
      const due = await findDue(d);
      const waiting = [...due];
      let hasMoved = false;
      const away: unknown[] = [];
      const one = async (): Promise<void> => {
        for (let key = waiting.shift(); key !== undefined; key = waiting.shift()) {
          try {
            hasMoved = (await carryOn(key)) || hasMoved;
          } catch (error) {
            away.push(error);
            waiting.length = 0;
          }
        }
      };
      await Promise.all(Array.from({ length: Math.min(PARALLEL, due.length) }, one));
      if (away.length > 0) throw away[0];
      return hasMoved || closed ? 0 : IDLE_MS;
    },
  };
}

/** An email that was begun; whether it was accepted is not known. */
class FellDown extends Error {
  constructor(cause: unknown) {
    super('an email of an automation fell down', { cause });
  }
}

/** Others ask us to come again. */
const isFinal = ({ status }: Refusal): boolean => status < 500 && status !== 429;

/** The runs that are due longest, of each tenant a few. */
async function findDue(d: RunnerDependencies): Promise<readonly RunKey[]> {
  const at = d.now();
  const { rows: any } = await d.store.pool.query({
    name: 'is-run-due',
    text: 'select 1 from automation_run where due_at <= $1 limit 1',
    values: [at],
  });
  if (any.length === 0) return [];
  const { rows } = await d.store.pool.query<{ tenant_id: string; id: string }>({
    name: 'due-runs',
    text: `with recursive tenants (tenant_id) as (
        (select tenant_id from automation_run where due_at is not null order by tenant_id limit 1)
        union all
        select (select r.tenant_id from automation_run r
          where r.due_at is not null and r.tenant_id > t.tenant_id order by r.tenant_id limit 1)
        from tenants t where t.tenant_id is not null)
      select r.tenant_id, r.id from tenants t cross join lateral (
        select tenant_id, id, due_at, row_number() over (order by due_at) as place
        from (select tenant_id, id, due_at from automation_run
          where tenant_id = t.tenant_id and due_at <= $1 order by due_at
          limit ${RUNS_OF_TENANT_MAX}) as due) r
      order by r.place, r.due_at limit ${RUNS_MAX}`,
    values: [at],
  });
  return rows.map(({ tenant_id: tenantId, id }) => ({ tenantId, id }));
}

/**
 * Ends the runs of automations that were stopped, and those of removed ones with all that is left of them: a bounded part
 * of it, so that those that are due do not wait. Whether there is more.
 */
async function close(d: RunnerDependencies): Promise<boolean> {
  const { rows } = await d.store.pool.query<Closing>({
    name: 'closing-automations',
    text: `select tenant_id as "tenantId", id from automation
      where stopped_at is not null or removed_at is not null
      order by coalesce(removed_at, stopped_at), tenant_id, id limit ${CLOSING_MAX}`,
  });
  let left = CLOSED_MAX;
  for (const automation of rows) {
    try {
      left -= await d.store.transact((client) =>
        closeSome(d, client, { ...automation, max: left }),
      );
    } catch (err) {
      d.log.error({ err, automation: automation.id }, 'an automation that ended was not cleared');
      // Whether it is away is told by what is due, which must not wait for this.
      if (isDatabaseUnavailable(err)) return false;
    }
    if (left === 0) return true;
  }
  return false;
}

interface Closing {
  readonly tenantId: string;
  readonly id: string;
}

/** Of one automation. How many runs; fewer than `max`: it was the rest. */
async function closeSome(
  d: RunnerDependencies,
  client: PoolClient,
  { tenantId, id, max }: Closing & { readonly max: number },
): Promise<number> {
  const { rows } = await client.query<{ stopped_at: Date | string | null; is_removed: boolean }>(
    `select stopped_at, removed_at is not null as is_removed from automation
     where tenant_id = $1 and id = $2 for update skip locked`,
    [tenantId, id],
  );
  const [found] = rows;
  if (found === undefined) return 0;
  if (found.is_removed) {
    // Runs are locked in the order of their ids, as where events let go on those that wait.
    const { rowCount } = await client.query(
      `with ended as materialized (
         select id from automation_run where tenant_id = $1 and automation_id = $2
         order by id limit $3 for update)
       delete from automation_run r using ended where r.tenant_id = $1 and r.id = ended.id`,
      [tenantId, id, max],
    );
    if (rowCount === max) return max;
    await client.query('delete from automation where tenant_id = $1 and id = $2', [tenantId, id]);
    return rowCount ?? 0;
  }
  if (found.stopped_at === null) return 0;
  const until = new Date(found.stopped_at);
  const about = { tenantId, automationId: id, runId: null, until, at: d.now() };
  const count = await cancelRuns(client, { ...about, max });
  if (count === max) return max;
  await client.query('update automation set stopped_at = null where tenant_id = $1 and id = $2', [
    tenantId,
    id,
  ]);
  return count;
}
