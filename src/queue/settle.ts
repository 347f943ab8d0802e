// Writes what became of attempts: the only way a claimed delivery changes state. Every result carries
// the epoch of the worker run that claimed it; a result whose lease is gone is dropped, because
// somebody else has decided since (fencing). Deliveries, attempts and the emails' shown state change
// in one transaction. The database's clock decides what has expired.
import type { PoolClient } from 'pg';
import { UNSUBSCRIBED } from '../audience/wanting.ts';
import { sandboxFate } from '../mail/sandbox.ts';
import { isTriedAgain, UNKNOWNS_MAX } from '../store/delivery.ts';
import { SANDBOX_LANE, SINK_LANE } from '../store/destination.ts';
import { NEW_ID } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { suppress } from '../suppressions/suppressions.ts';
import { isLate, noteLateChanges } from '../timeline/late-changes.ts';
import { isHooked, tellWebhooks } from '../timeline/outbox.ts';
import { recordComplaint } from './complaint.ts';
import type { Queryable } from './enqueue.ts';
import { tellFacts, type Fact } from './facts.ts';
import { DEFAULT_OUTCOMES, type OutcomePolicy } from './outcome-policy.ts';
import { admitSuspects, IS_SUSPECT } from './suspect.ts';
import { eventsOf, type SettledDelivery } from './told.ts';

export type Verdict = 'delivered' | 'deferred' | 'bounced' | 'failed' | 'unknown';

/** What proves a verdict; null where it does not apply. */
export interface Evidence {
  /** Short code from mail/outcome.ts; null when delivered. */
  readonly cause: string | null;
  readonly stage: string | null;
  readonly host: string | null;
  readonly address: string | null;
  readonly port: number | null;
  /** Protocol and cipher, null for plaintext or before TLS. */
  readonly tls: string | null;
  /** What had to hold for the connection (store/delivery.ts); null before one was tried. */
  readonly tlsPolicy: string | null;
  /** The address of this machine that was dialled from, or was to be; null where the system was to choose and there was no connection. */
  readonly source: string | null;
  readonly code: number | null;
  readonly enhanced: string | null;
  /** The peer's words, or ours where no reply came. */
  readonly reply: string | null;
}

export interface Settlement {
  readonly tenantId: string;
  readonly emailId: string;
  readonly position: number;
  readonly attempt: number;
  readonly epoch: string;
  readonly recipientCount: number;
  readonly verdict: Verdict;
  /** Deferred and unknown: how long until the next try. */
  readonly delayMs: number;
  /** The lane was at fault and not this mail: later pauses do not grow by it. */
  readonly isLaneFault: boolean;
  readonly evidence: Evidence;
}

/** Where nothing is known. */
export const NO_EVIDENCE: Evidence = {
  cause: null,
  stage: null,
  host: null,
  address: null,
  port: null,
  tls: null,
  tlsPolicy: null,
  source: null,
  code: null,
  enhanced: null,
  reply: null,
};

/** A delivery that now waits for a clock. */
export interface Waiting {
  readonly lane: string;
  readonly dueAt: Date;
}

export interface Settled {
  readonly count: number;
  /** Results that came too late: the lease was gone. */
  readonly fenced: number;
  readonly waiting: readonly Waiting[];
}

const DEADLOCK = '40P01';
/** SQLSTATE classes 22 (data) and 23 (constraint). */
const REFUSED_DATA = /^2[23]/;
const UNSTORABLE = 'The answer holds something that cannot be stored.';
/** SQL text: without quotes. */
const SENT_ONCE = 'It is not sent again: mail of this tenant is sent at most once (at_most_once).';
const SENT_TWICE = 'It is not sent a third time.';
const TRIES_MAX = 5;

/** The last try comes this long before the end of the lifetime, or 5 % of what is left where that is less. */
const LAST_TRY_MS = 60_000;
const PLANNED = `(now() + r.delay_ms * interval '1 millisecond')`;
const IS_LATE = `(r.verdict = 'deferred' and ${PLANNED} > d.expires_at)`;
// A lifetime is used: where at least half of the planned pause is left of it, there is a last try at its end.
const IS_LAST = `(${IS_LATE} and d.expires_at - now() >= r.delay_ms * 0.5 * interval '1 millisecond')`;
const IS_EXPIRED = `(${IS_LATE} and not ${IS_LAST})`;
const IS_WAITING = `(r.verdict in ('deferred', 'unknown') and not ${IS_EXPIRED})`;

/** Failed, because the recipient opted out: no dead letter. */
const IS_UNWANTED = `(d.state = 'failed' and coalesce(d.last_cause = '${UNSUBSCRIBED.cause}', false))`;

// The worst recipient still undecided, else the worst final one: failed, bounced, suppressed, unknown
// for good, delivered. So one suppressed recipient shows although the others have it, as a bounced one does. Who does
// not want it shows only where that is all there is (as failed): nothing went wrong, and nobody has to look into it.
// `rows`: the deliveries of whole emails, as `d`.
const showing = (rows: string): string => `
  update email e
  set last_event = case
        when e.last_event in ('opened', 'clicked', 'complained', 'canceled') then e.last_event
        when x.delayed then 'delivery_delayed'
        when x.moving and not x.begun then 'queued'
        when x.moving then 'sent'
        when x.scheduled then 'scheduled'
        when x.failed then 'failed'
        when x.bounced then 'bounced'
        when x.suppressed then 'suppressed'
        when x.unsure then 'sent'
        when x.unwanted then 'failed'
        else 'delivered' end,
    provider_retry_count = x.retries,
    provider_next_retry_at = x.next_at,
    provider_last_error = coalesce(x.error, e.provider_last_error),
    provider_dead_lettered_at = case
        when x.dead then coalesce(e.provider_dead_lettered_at, now()) else null end
  from (
    select d.tenant_id, d.email_id,
      bool_or(d.state = 'deferred' or (d.state = 'unknown' and d.unknowns < ${UNKNOWNS_MAX})
        or (d.state in ('ready', 'in_flight') and d.last_cause is not null)) as delayed,
      bool_or(d.state in ('preparing', 'ready', 'in_flight')) as moving,
      bool_or(d.state = 'scheduled') as scheduled,
      bool_or(d.attempts > 0) as begun,
      bool_or(d.state = 'failed' and not ${IS_UNWANTED}) as failed,
      bool_and(${IS_UNWANTED}) as unwanted,
      bool_or(d.state = 'bounced') as bounced,
      bool_or(d.state = 'suppressed') as suppressed,
      bool_or(d.state = 'unknown') as unsure,
      bool_or((d.state = 'failed' and not ${IS_UNWANTED}) or (d.state = 'bounced' and d.last_cause = 'expired')
        or (d.state = 'unknown' and d.unknowns >= ${UNKNOWNS_MAX})) as dead,
      sum(greatest(d.attempts - 1, 0)) as retries,
      min(d.due_at) filter (where d.state = 'deferred'
        or (d.state = 'unknown' and d.unknowns < ${UNKNOWNS_MAX})) as next_at,
      (array_agg(jsonb_build_object('code', d.last_cause, 'message', coalesce(d.last_reply, ''))
        order by d.state = 'suppressed' or ${IS_UNWANTED}, d.position)
        filter (where d.last_cause is not null))[1] as error
    from ${rows}
    group by d.tenant_id, d.email_id
  ) x
  where e.tenant_id = x.tenant_id and e.id = x.email_id`;

const SHOW = showing(`unnest($1::uuid[], $2::uuid[]) as k (tenant_id, id)
    join delivery d on d.tenant_id = k.tenant_id and d.email_id = k.id`);

const SETTLE = `
  with result as (
    -- claimed: where the state is a constant, a scan of all that is in flight looks cheap to the planner.
    select *, 'in_flight' as claimed
    from unnest($1::uuid[], $2::uuid[], $3::smallint[], $4::integer[], $5::uuid[], $6::text[],
      $7::bigint[], $8::text[], $9::text[], $10::text[], $11::text[], $12::integer[], $13::text[],
      $14::smallint[], $15::text[], $16::text[], $17::text[], $18::text[], $19::boolean[], $20::boolean[],
      $22::boolean[])
    as r (tenant_id, email_id, position, number, epoch, verdict, delay_ms, cause, stage, host, address,
      port, tls, code, enhanced, reply, tls_policy, source, is_lane_fault, is_once, is_only)
  ), settled as (
    update delivery d
    set state = case when ${IS_EXPIRED} then 'bounced' else r.verdict end,
      due_at = case when ${IS_LAST}
          then d.expires_at
            - least(interval '${LAST_TRY_MS} milliseconds', (d.expires_at - now()) * 0.05)
          else ${PLANNED} end,
      lease_epoch = null,
      unknowns = case
          when r.verdict <> 'unknown' then d.unknowns
          when r.is_once then ${UNKNOWNS_MAX}
          else d.unknowns + 1 end,
      lane_faults = d.lane_faults + r.is_lane_fault::int,
      interruptions = 0,
      deferred_at = case when ${IS_WAITING} then coalesce(d.deferred_at, now()) else d.deferred_at end,
      delay_told_at = case
          when ${IS_WAITING} and d.deferred_at <= now() - $21::bigint * interval '1 millisecond'
            then coalesce(d.delay_told_at, now())
          else d.delay_told_at end,
      last_cause = case
          when r.verdict = 'delivered' then null
          when ${IS_EXPIRED} then 'expired'
          else coalesce(r.enhanced, r.cause) end,
      last_reply = case
          when r.verdict = 'delivered' then null
          -- The last that a peer said: our own words about a connection explain less.
          when ${IS_EXPIRED} and r.code is null then coalesce(
            (select a.reply from attempt a
             where a.tenant_id = d.tenant_id and a.email_id = d.email_id and a.position = d.position
               and a.code is not null order by a.number desc limit 1), r.reply)
          when r.verdict = 'unknown' and r.is_once then concat_ws(' ', r.reply, '${SENT_ONCE}')
          when r.verdict = 'unknown' and d.unknowns + 1 >= ${UNKNOWNS_MAX}
            then concat_ws(' ', r.reply, '${SENT_TWICE}')
          else r.reply end
    from result r
    where d.tenant_id = r.tenant_id and d.email_id = r.email_id and d.position = r.position
      and d.state = r.claimed and d.lease_epoch is not distinct from r.epoch and d.attempts = r.number
    returning d.tenant_id, d.email_id, d.position, d.recipient, d.lane, d.state, d.due_at,
      d.unknowns, d.attempts, d.expires_at, d.last_cause, d.last_reply, r.cause, r.is_only,
      coalesce(d.delay_told_at = now(), false) as is_delay_told
  ), finished as (
    update attempt a
    set finished_at = now(), outcome = r.verdict, cause = r.cause, stage = r.stage, host = r.host,
      address = r.address, port = r.port, tls = r.tls, code = r.code, enhanced = r.enhanced,
      reply = r.reply, tls_policy = r.tls_policy, source = r.source
    from result r
    join settled s on s.tenant_id = r.tenant_id and s.email_id = r.email_id and s.position = r.position
    where a.tenant_id = r.tenant_id and a.email_id = r.email_id and a.position = r.position
      and a.number = r.number
  ), told as (
    insert into outbox (tenant_id, id, type, subject_id, detail, at)
    select s.tenant_id, ${NEW_ID}, 'email.delivered', s.email_id,
      jsonb_build_object('recipient', s.recipient), now()
    from settled s
    where s.state = 'delivered' and ${isHooked('s.tenant_id', `'email.delivered'`)}
  ), shown as (${showing('(select * from settled where is_only) d')})
  select tenant_id, email_id, recipient, cause, lane, state, unknowns, attempts, last_cause, last_reply,
    is_delay_told, (extract(epoch from due_at) * 1000)::bigint::text as due_ms,
    (extract(epoch from expires_at) * 1000)::bigint::text as expires_ms,
    (select exists (select 1 from delivery where ${IS_SUSPECT})) as has_suspects,
    (select exists (select 1 from webhook)) as has_hooks
  from settled`;

// Settlements of several recipients of one email meet here; the order of the locks is fixed.
const LOCK_EMAILS = `
  select 1 from email e join unnest($1::uuid[], $2::uuid[]) as k (tenant_id, id)
    on e.tenant_id = k.tenant_id and e.id = k.id
  order by e.tenant_id, e.id for no key update of e`;

/**
 * Stores the results, all or none. Safe to call again with the same results after an error whose
 * effect is not known: what was settled already is fenced off.
 */
export async function settle(
  store: Store,
  results: readonly Settlement[],
  policy: OutcomePolicy = DEFAULT_OUTCOMES,
): Promise<Settled> {
  if (results.length === 0) return { count: 0, fenced: 0, waiting: [] };
  for (let tries = 1; ; tries++) {
    try {
      if (results.every(isOneStatement)) return await settlePlain(store, results, policy);
      return await store.transact((client) => settleIn(client, results, policy));
    } catch (error) {
      const code = String((error as { code?: string }).code);
      if (REFUSED_DATA.test(code)) return settleApart(store, results, { error, policy });
      if (code !== DEADLOCK || tries === TRIES_MAX) throw error;
    }
  }
}

/** Something in the evidence cannot be stored: it must not hold up the others, nor its own verdict. */
async function settleApart(
  store: Store,
  results: readonly Settlement[],
  { error, policy }: { readonly error: unknown; readonly policy: OutcomePolicy },
): Promise<Settled> {
  const [only, ...more] = results;
  if (only === undefined) throw error;
  if (more.length === 0) {
    if (only.evidence.reply === UNSTORABLE) throw error;
    const evidence = { ...NO_EVIDENCE, cause: only.evidence.cause, reply: UNSTORABLE };
    return settle(store, [{ ...only, evidence }], policy);
  }
  const settled: Settled[] = [];
  for (const result of results) settled.push(await settle(store, [result], policy));
  return {
    count: settled.reduce((sum, { count }) => sum + count, 0),
    fenced: settled.reduce((sum, { fenced }) => sum + fenced, 0),
    waiting: settled.flatMap(({ waiting }) => waiting),
  };
}

/** Nothing follows from it but what its statement writes. Over a connection: the sandbox's answers have consequences. */
const isOneStatement = ({ emailId, verdict, recipientCount, evidence }: Settlement): boolean =>
  verdict === 'delivered' && recipientCount === 1 && evidence.port !== null && !isLate(emailId);

async function settlePlain(
  store: Store,
  results: readonly Settlement[],
  policy: OutcomePolicy,
): Promise<Settled> {
  const rows = await write(store.pool, results, policy);
  if (rows.some((row) => row.has_suspects)) await store.transact(admitSuspects);
  return { count: rows.length, fenced: results.length - rows.length, waiting: [] };
}

async function write(
  db: Queryable,
  results: readonly Settlement[],
  policy: OutcomePolicy,
): Promise<readonly SettledRow[]> {
  const of = <T>(pick: (result: Settlement) => T): T[] => results.map(pick);
  const { rows } = await db.query<SettledRow>({
    name: 'settle',
    text: SETTLE,
    values: [
      of((r) => r.tenantId),
      of((r) => r.emailId),
      of((r) => r.position),
      of((r) => r.attempt),
      of((r) => r.epoch),
      of((r) => r.verdict),
      of((r) => Math.round(r.delayMs)),
      of((r) => r.evidence.cause),
      of((r) => r.evidence.stage),
      of((r) => r.evidence.host),
      of((r) => r.evidence.address),
      of((r) => r.evidence.port),
      of((r) => r.evidence.tls),
      of((r) => r.evidence.code),
      of((r) => r.evidence.enhanced),
      of((r) => r.evidence.reply),
      of((r) => r.evidence.tlsPolicy),
      of((r) => r.evidence.source),
      of((r) => r.isLaneFault),
      of((r) => policy.unknownOf(r.tenantId) === 'at_most_once'),
      policy.delayedAfterMs,
      of((r) => r.recipientCount === 1),
    ],
  });
  return rows;
}

async function settleIn(
  client: PoolClient,
  results: readonly Settlement[],
  policy: OutcomePolicy,
): Promise<Settled> {
  const rows = await write(client, results, policy);
  // Not of what was fenced off: somebody else's row is not locked here, so what it shows could be out of date.
  const changed = new Set(rows.map((row) => row.email_id));
  const shared = results.filter(
    ({ emailId, recipientCount }) => recipientCount > 1 && changed.has(emailId),
  );
  if (shared.length > 0) await show(client, shared);
  await noteLateChanges(client, results);
  await tellFacts(client, rows.flatMap(factsOf));
  if (rows.some((row) => row.has_hooks)) await tellWebhooks(client, rows.flatMap(eventsOf));
  await followUp(client, rows);
  if (rows.some((row) => row.has_suspects)) await admitSuspects(client);
  return {
    count: rows.length,
    fenced: results.length - rows.length,
    waiting: rows
      .filter(isTriedAgain)
      .map(({ lane, due_ms }) => ({ lane, dueAt: new Date(Number(due_ms)) })),
  };
}

interface SettledRow extends SettledDelivery {
  readonly lane: string;
  /** Of the whole queue, as it was before. */
  readonly has_suspects: boolean;
  /** Anybody has webhooks. */
  readonly has_hooks: boolean;
}

/** What the attempt itself does not say: that its recipient is late, or was given up for being late. */
function factsOf(row: SettledRow): readonly Fact[] {
  const isExpired = row.state === 'bounced' && row.last_cause === 'expired';
  if (!isExpired && !row.is_delay_told) return [];
  const timeOf = (ms: string): string => new Date(Number(ms)).toISOString();
  const about = {
    tenantId: row.tenant_id,
    emailId: row.email_id,
    recipients: [row.recipient],
  };
  const { attempts, cause, last_reply: reply } = row;
  if (isExpired) return [{ ...about, kind: 'expired', detail: { attempts, cause, reply } }];
  const next = isTriedAgain(row)
    ? { next_attempt_at: timeOf(row.due_ms), expires_at: timeOf(row.expires_ms) }
    : {};
  return [{ ...about, kind: 'delivery_delayed', detail: { attempts, cause, reply, ...next } }];
}

/**
 * A mailbox that does not exist is not written to again. What the sink and the sandbox refuse suppresses nobody: their
 * addresses are there to be tried again and again.
 */
async function followUp(client: PoolClient, rows: readonly SettledRow[]): Promise<void> {
  const dead = rows.filter(
    ({ state, cause, lane }) =>
      state === 'bounced' && cause === 'no_mailbox' && lane !== SINK_LANE && lane !== SANDBOX_LANE,
  );
  await suppress(
    client,
    dead.map(({ tenant_id: tenantId, email_id: sourceId, recipient: address }) => ({
      tenantId,
      sourceId,
      address,
      origin: 'bounce',
    })),
  );
  for (const { tenant_id: tenantId, email_id: emailId, recipient, state, lane } of rows) {
    if (lane !== SANDBOX_LANE || state !== 'delivered') continue;
    if (sandboxFate(recipient) !== 'complained') continue;
    await recordComplaint(client, {
      tenantId,
      emailId,
      recipient,
      detail: { source: 'sandbox', feedback_type: 'abuse' },
    });
  }
}

/** Recomputes what the emails show from all their deliveries. */
export async function showEmails(client: PoolClient, emails: readonly ShownEmail[]): Promise<void> {
  await show(client, emails);
  await noteLateChanges(client, emails);
}

type ShownEmail = Pick<Settlement, 'tenantId' | 'emailId' | 'recipientCount'>;

async function show(client: PoolClient, emails: readonly ShownEmail[]): Promise<void> {
  const shared = emails.filter(({ recipientCount }) => recipientCount > 1);
  const keysOf = (list: typeof emails): [string[], string[]] => {
    const distinct = [...new Map(list.map((email) => [email.emailId, email])).values()];
    return [distinct.map(({ tenantId }) => tenantId), distinct.map(({ emailId }) => emailId)];
  };
  if (shared.length > 0) {
    await client.query({ name: 'settle-lock', text: LOCK_EMAILS, values: keysOf(shared) });
  }
  await client.query({ name: 'settle-show', text: SHOW, values: keysOf(emails) });
}
