// Carries out one step of a run in one transaction: what it changes and that it was done are one commit, so a crash repeats
// nothing. An email cannot be accepted in our transaction: its step begins in one, with its request fixed, and ends in
// another; between them the request is repeated under the same idempotency key until its answer is known.
import type { PoolClient } from 'pg';
import { Refusal } from '../access/refusal.ts';
import { fromJson } from '../store/json.ts';
import type { Store } from '../store/orm.ts';
import { factsOf } from './automation-facts.ts';
import { cancelRuns, failRun, moveOn, RUN_COLUMNS, toRun } from './automation-move.ts';
import type { Failure, Output, Run } from './automation-move.ts';
import { holds, type ConditionRule } from './automation-rules.ts';
import { resolved, type Payload, type Scope } from './automation-values.ts';
import { addToSegment, changeContact, removeContact } from './contact-changes.ts';
import type { ContactFields } from './contact-fields.ts';
import { findContact } from './contacts.ts';

/** What a step asks to be sent: the body of `POST /emails`. */
export type EmailRequest = Readonly<Record<string, unknown>>;

export interface StepDependencies {
  readonly store: Store;
  readonly now: () => Date;
  /** Where the contact unsubscribes; null where there is no such page. */
  readonly unsubscribeUrl:
    | ((of: {
        readonly tenantId: string;
        readonly contactId: string;
        readonly topicId: string | null;
      }) => string)
    | null;
}

export type Taken =
  /** It was not due, or another process has it. */
  | 'nothing'
  /** It ended or waits now. */
  | 'rest'
  /** The next step is due. */
  | 'moved'
  /** To be sent, and then to be ended with endEmail. */
  | { readonly run: Run; readonly request: EmailRequest; readonly idempotencyKey: string };

/** A step that sends is somebody's for this long; then it is tried again. */
const EMAIL_LEASE_MS = 60_000;
/**
 * An answer is kept under its key for 24 hours. What began longer ago than this may have been sent, and asking again might
 * send it twice.
 */
const EMAIL_BEGUN_MAX_MS = 23 * 3_600_000;
/** A step that fell down so often, without a refusal that says why, has failed. */
const TRIES_MAX = 10;
const BACKOFF_MS = 5_000;
const BACKOFF_MAX_MS = 10 * 60_000;

interface StepRow {
  readonly key: string;
  readonly status: string;
  readonly started_at: Date | string | null;
  readonly request: EmailRequest | string | null;
  readonly output: Output | string;
}

/** One step of the run, if it is due. */
export function takeStep(
  d: StepDependencies,
  key: { readonly tenantId: string; readonly id: string },
): Promise<Taken> {
  return d.store.transact(async (client) => {
    const at = d.now();
    const { rows } = await client.query<{ is_stopped: boolean }>({
      name: 'take-run',
      text: `select ${RUN_COLUMNS},
          a.removed_at is not null or coalesce(r.created_at <= a.stopped_at, false) as is_stopped
        from automation_run r
        join automation a on a.tenant_id = r.tenant_id and a.id = r.automation_id
        where r.tenant_id = $1 and r.id = $2 and r.due_at <= $3 for update of r skip locked`,
      values: [key.tenantId, key.id, at],
    });
    if (rows[0] === undefined) return 'nothing';
    const run = toRun(rows[0]);
    if (rows[0].is_stopped) {
      const { tenantId, automationId, id: runId, createdAt: until } = run;
      await cancelRuns(client, { tenantId, automationId, runId, until, max: 1, at });
      return 'rest';
    }
    const { rows: steps } = await client.query<StepRow>({
      name: 'read-run-steps',
      text: `select key, status, started_at, request, output from automation_run_step
        where tenant_id = $1 and run_id = $2
          and (key = $3 or (type = 'wait_for_event' and status = 'completed'))
        order by completed_at nulls last`,
      values: [run.tenantId, run.id, run.step.key],
    });
    const now = steps.find((row) => row.key === run.step.key);
    if (now === undefined) throw new Error('a run has no row for its step');
    if (run.step.type === 'send_email') return takeEmail(d, client, { run, steps, now, at });
    if (run.tries >= TRIES_MAX) {
      await failRun(client, run, FELL_DOWN, at);
      return 'rest';
    }
    return act(client, { run, steps, now, at });
  });
}

const FELL_DOWN: Failure = {
  code: 'internal_server_error',
  message: 'Something went wrong on our side, several times.',
};

interface Standing {
  readonly run: Run;
  readonly steps: readonly StepRow[];
  /** The row of the step at which the run stands. */
  readonly now: StepRow;
  readonly at: Date;
}

async function act(client: PoolClient, standing: Standing): Promise<'moved' | 'rest'> {
  const { run, at } = standing;
  const { type, config } = run.step;
  const complete = async (
    output: Output,
    via: Parameters<typeof moveOn>[2]['via'] = 'default',
    status: 'completed' | 'skipped' = 'completed',
  ): Promise<'moved' | 'rest'> =>
    (await moveOn(client, run, { status, output, via, at })) ? 'moved' : 'rest';
  // It has waited since the step before ended.
  if (type === 'wait_for_event') return complete({ timed_out: true }, 'timeout');
  if (type === 'delay' || type === 'trigger') return complete(null);
  const scope = await scopeOf(client, standing);
  if (type === 'condition') {
    const isMet = holds(config as unknown as ConditionRule, scope);
    return complete({ met: isMet }, isMet ? 'condition_met' : 'condition_not_met');
  }
  const contactId = scope.contact?.id ?? null;
  if (contactId === null) return complete({ reason: 'no_contact' }, 'default', 'skipped');
  await client.query('savepoint step');
  const failure = await changeAudience(client, standing, { ...scope, contactId }).catch(
    (error: unknown) => {
      if (error instanceof Refusal && error.status < 500) return toFailure(error);
      throw error;
    },
  );
  if (failure === null) return complete({ contact_id: contactId });
  await client.query('rollback to savepoint step');
  await failRun(client, run, failure, at);
  return 'rest';
}

/** Null: done. */
async function changeAudience(
  client: PoolClient,
  { run, at }: Standing,
  scope: Scope & { readonly contactId: string },
): Promise<Failure | null> {
  const { tenantId, step } = run;
  const { contactId } = scope;
  if (step.type === 'contact_delete') {
    await removeContact(client, tenantId, contactId, at);
    return null;
  }
  if (step.type === 'add_to_segment') {
    const segmentId = String(step.config['segment_id']);
    const outcome = await addToSegment(client, tenantId, { contactId, segmentId }, at);
    return outcome === 'missing'
      ? { code: 'not_found', message: 'The segment is not there any more.' }
      : null;
  }
  const change = changeOf(step.config, scope);
  if ('code' in change) return change;
  await changeContact(client, tenantId, contactId, change, at);
  return null;
}

/** References to nothing change nothing. */
function changeOf(
  config: Readonly<Record<string, unknown>>,
  scope: Scope,
): ContactFields | Failure {
  const wrong = (field: string, wanted: string): Failure => ({
    code: 'validation_error',
    message: `The value for \`${field}\` must be ${wanted}.`,
  });
  const change: { -readonly [field in keyof ContactFields]: ContactFields[field] } = {};
  for (const [field, name] of [
    ['first_name', 'firstName'],
    ['last_name', 'lastName'],
  ] as const) {
    const value = resolved(config[field], scope);
    if (value === undefined) continue;
    if (value !== null && typeof value !== 'string') return wrong(field, 'a string or null');
    change[name] = value;
  }
  const unsubscribed = resolved(config['unsubscribed'], scope);
  if (unsubscribed !== undefined) {
    if (typeof unsubscribed !== 'boolean') return wrong('unsubscribed', 'true or false');
    change.unsubscribed = unsubscribed;
  }
  const given = (config['properties'] ?? {}) as Readonly<Record<string, unknown>>;
  const properties: Record<string, string | number | boolean | null> = {};
  for (const [key, from] of Object.entries(given)) {
    const value = resolved(from, scope);
    if (value === undefined) continue;
    if (
      value !== null &&
      typeof value !== 'string' &&
      typeof value !== 'number' &&
      typeof value !== 'boolean'
    ) {
      return wrong(`properties.${key}`, 'a string, a number, true, false or null');
    }
    properties[key] = value;
  }
  return { ...change, properties };
}

/** With the contact as it is now. */
async function scopeOf(client: PoolClient, { run, steps }: Standing): Promise<Scope> {
  const contact = await findContact(client, run.tenantId, run.contactId);
  const waits = new Map<string, Payload | null>();
  for (const { status, output } of steps) {
    const came = status === 'completed' ? fromJson<Output>(output) : null;
    if (typeof came?.['event'] !== 'string') continue;
    waits.set(came['event'], (came['payload'] ?? null) as Payload | null);
  }
  return {
    event: run.event.payload,
    contact: contact === null ? null : await factsOf(client, run.tenantId, contact),
    waits,
  };
}

// ---- emails --------------------------------------------------------------------------------------

async function takeEmail(
  d: StepDependencies,
  client: PoolClient,
  standing: Standing,
): Promise<Taken> {
  const { run, now, at } = standing;
  const begunAt = now.started_at === null ? at : new Date(now.started_at);
  const mayBeSent = now.status === 'running';
  if (mayBeSent && at.getTime() - begunAt.getTime() > EMAIL_BEGUN_MAX_MS) {
    const message =
      'It is not known whether this email was sent: we were interrupted, for a day. It is not sent again.';
    await failRun(client, run, { code: 'outcome_unknown', message }, at);
    return 'rest';
  }
  if (run.tries >= TRIES_MAX) {
    await failRun(client, run, FELL_DOWN, at);
    return 'rest';
  }
  let request = fromJson<EmailRequest | null>(now.request);
  if (request === null) {
    const scope = await scopeOf(client, standing);
    const skipped = reasonToSkip(scope);
    if (skipped !== null) {
      const output = { reason: skipped };
      return (await moveOn(client, run, { status: 'skipped', output, via: 'default', at }))
        ? 'moved'
        : 'rest';
    }
    request = requestOf(d, run, scope);
  }
  await client.query({
    name: 'automation-begin-email',
    text: `with begun as (
        update automation_run_step set status = 'running', request = $4,
          started_at = coalesce(started_at, $5)
        where tenant_id = $1 and run_id = $2 and key = $3)
      update automation_run set tries = tries + 1, due_at = $6 where tenant_id = $1 and id = $2`,
    values: [
      run.tenantId,
      run.id,
      run.step.key,
      JSON.stringify(request),
      at,
      new Date(at.getTime() + EMAIL_LEASE_MS),
    ],
  });
  return { run, request, idempotencyKey: `automation:${run.id}:${run.step.key}` };
}

/** Whoever was removed or wants no such mail any more gets none; what else the run does goes on. */
function reasonToSkip({ contact }: Scope): string | null {
  if (contact === null) return 'contact_deleted';
  return contact.unsubscribed ? 'unsubscribed' : null;
}

function requestOf(d: StepDependencies, run: Run, scope: Scope): EmailRequest {
  const { template, ...overrides } = run.step.config;
  const { id, variables } = template as {
    readonly id: string;
    readonly variables?: Readonly<Record<string, unknown>> | null;
  };
  const contact = scope.contact!;
  const topicId = (overrides['topic_id'] as string | undefined) ?? null;
  const own = {
    EMAIL: contact.email,
    FIRST_NAME: contact.first_name,
    LAST_NAME: contact.last_name,
    ...unsubscribeVariables(d, { tenantId: run.tenantId, contactId: contact.id, topicId }),
  };
  const given = Object.entries(variables ?? {}).map(([key, value]) => [
    key,
    resolved(value, scope) ?? null,
  ]);
  return {
    ...overrides,
    to: contact.email,
    template: { id, variables: { ...own, ...Object.fromEntries(given) } },
  };
}

function unsubscribeVariables(
  d: StepDependencies,
  of: { readonly tenantId: string; readonly contactId: string; readonly topicId: string | null },
): Readonly<Record<string, string>> {
  if (d.unsubscribeUrl === null) return {};
  const url = d.unsubscribeUrl(of);
  return { UNSUBSCRIBE_URL: url, RESEND_UNSUBSCRIBE_URL: url };
}

export const toFailure = (refusal: Refusal): Failure => ({
  code: refusal.code,
  message: refusal.message,
  ...(refusal.issues.length === 0 ? {} : { issues: refusal.issues }),
});

/** Ends the step that sent, unless somebody else did; whether the next is due. */
export function endEmail(
  d: StepDependencies,
  run: Run,
  outcome: { readonly emailId: string } | Failure,
): Promise<boolean> {
  return d.store.transact(async (client) => {
    const at = d.now();
    const { rows } = await client.query<{ is_here: boolean }>({
      name: 'end-email',
      text: `select r.step_key = $3 and r.status = 'running' and s.status = 'running' as is_here
        from automation_run r join automation_run_step s
          on s.tenant_id = r.tenant_id and s.run_id = r.id and s.key = $3
        where r.tenant_id = $1 and r.id = $2 for update of r`,
      values: [run.tenantId, run.id, run.step.key],
    });
    const output = 'emailId' in outcome ? { email_id: outcome.emailId } : null;
    if (rows[0]?.is_here === true) {
      if (output !== null) {
        return moveOn(client, run, { status: 'completed', output, via: 'default', at });
      }
      await failRun(client, run, outcome as Failure, at);
    } else if (output !== null) {
      // Cancelled while it was sent: what was done is said all the same.
      await client.query(
        `update automation_run_step set status = 'completed', output = $4, completed_at = $5
         where tenant_id = $1 and run_id = $2 and key = $3 and status = 'skipped'`,
        [run.tenantId, run.id, run.step.key, JSON.stringify(output), at],
      );
    }
    return false;
  });
}

/** After a step that fell down: it is tried again, later each time. */
export async function putOff(
  d: StepDependencies,
  key: { readonly tenantId: string; readonly id: string },
  tries: { readonly isCounted: boolean },
): Promise<void> {
  await d.store.pool.query({
    name: 'automation-put-off',
    text: `update automation_run set tries = least(tries + $3, 100),
        due_at = $4::timestamptz + least($6::integer, $5 * 2 ^ least(tries, 20)) * interval '1 millisecond'
      where tenant_id = $1 and id = $2 and due_at is not null`,
    values: [key.tenantId, key.id, tries.isCounted ? 0 : 1, d.now(), BACKOFF_MS, BACKOFF_MAX_MS],
  });
}
