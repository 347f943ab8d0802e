// Writes what became of attempts: the only way a claimed delivery changes state. Every result carries
// the epoch of the worker run that claimed it; a result whose lease is gone is dropped, because
// somebody else has decided since (fencing). Deliveries, attempts and the emails' shown state change
// in one transaction. The database's clock decides what has expired.
import type { PoolClient } from 'pg';
import { sandboxFate } from '../mail/sandbox.ts';
import { isTriedAgain, SANDBOX_LANE, SINK_LANE, UNKNOWNS_MAX } from '../store/delivery.ts';
import type { Store } from '../store/orm.ts';
import { suppress } from '../suppressions/suppressions.ts';
import { recordComplaint } from './complaint.ts';

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
const TRIES_MAX = 5;

const SETTLE = `
  with result as (
    select * from unnest($1::uuid[], $2::uuid[], $3::smallint[], $4::integer[], $5::uuid[], $6::text[],
      $7::bigint[], $8::text[], $9::text[], $10::text[], $11::text[], $12::integer[], $13::text[],
      $14::smallint[], $15::text[], $16::text[])
    as r (tenant_id, email_id, position, number, epoch, verdict, delay_ms, cause, stage, host, address,
      port, tls, code, enhanced, reply)
  ), settled as (
    update delivery d
    set state = case
          when r.verdict = 'deferred' and now() + r.delay_ms * interval '1 millisecond' > d.expires_at
            then 'bounced'
          else r.verdict end,
      due_at = now() + r.delay_ms * interval '1 millisecond',
      lease_epoch = null,
      unknowns = d.unknowns + (r.verdict = 'unknown')::int,
      last_cause = case
          when r.verdict = 'delivered' then null
          when r.verdict = 'deferred' and now() + r.delay_ms * interval '1 millisecond' > d.expires_at
            then 'expired'
          else coalesce(r.enhanced, r.cause) end,
      last_reply = case when r.verdict = 'delivered' then null else r.reply end
    from result r
    where d.tenant_id = r.tenant_id and d.email_id = r.email_id and d.position = r.position
      and d.state = 'in_flight' and d.lease_epoch = r.epoch and d.attempts = r.number
    returning d.tenant_id, d.email_id, d.position, d.recipient, d.lane, d.state, d.due_at,
      d.unknowns, r.cause
  ), finished as (
    update attempt a
    set finished_at = now(), outcome = r.verdict, cause = r.cause, stage = r.stage, host = r.host,
      address = r.address, port = r.port, tls = r.tls, code = r.code, enhanced = r.enhanced,
      reply = r.reply
    from result r
    join settled s on s.tenant_id = r.tenant_id and s.email_id = r.email_id and s.position = r.position
    where a.tenant_id = r.tenant_id and a.email_id = r.email_id and a.position = r.position
      and a.number = r.number
  )
  select tenant_id, email_id, recipient, cause, lane, state, unknowns,
    (extract(epoch from due_at) * 1000)::bigint::text as due_ms
  from settled`;

// Settlements of several recipients of one email meet here; the order of the locks is fixed.
const LOCK_EMAILS = `
  select 1 from email e join unnest($1::uuid[], $2::uuid[]) as k (tenant_id, id)
    on e.tenant_id = k.tenant_id and e.id = k.id
  order by e.tenant_id, e.id for no key update of e`;

// The worst recipient still undecided, else the worst final one: failed, bounced, suppressed, unknown
// for good, delivered. So one suppressed recipient shows although the others have it, as a bounced one does.
const SHOW = `
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
      bool_or(d.state = 'failed') as failed,
      bool_or(d.state = 'bounced') as bounced,
      bool_or(d.state = 'suppressed') as suppressed,
      bool_or(d.state = 'unknown') as unsure,
      bool_or(d.state = 'failed' or (d.state = 'bounced' and d.last_cause = 'expired')
        or (d.state = 'unknown' and d.unknowns >= ${UNKNOWNS_MAX})) as dead,
      sum(greatest(d.attempts - 1, 0)) as retries,
      min(d.due_at) filter (where d.state = 'deferred'
        or (d.state = 'unknown' and d.unknowns < ${UNKNOWNS_MAX})) as next_at,
      (array_agg(jsonb_build_object('code', d.last_cause, 'message', coalesce(d.last_reply, ''))
        order by d.state = 'suppressed', d.position)
        filter (where d.last_cause is not null))[1] as error
    from unnest($1::uuid[], $2::uuid[]) as k (tenant_id, id)
    join delivery d on d.tenant_id = k.tenant_id and d.email_id = k.id
    group by d.tenant_id, d.email_id
  ) x
  where e.tenant_id = x.tenant_id and e.id = x.email_id`;

/**
 * Stores the results, all or none. Safe to call again with the same results after an error whose
 * effect is not known: what was settled already is fenced off.
 */
export async function settle(store: Store, results: readonly Settlement[]): Promise<Settled> {
  if (results.length === 0) return { count: 0, fenced: 0, waiting: [] };
  for (let tries = 1; ; tries++) {
    try {
      return await store.transact((client) => settleIn(client, results));
    } catch (error) {
      const code = String((error as { code?: string }).code);
      if (REFUSED_DATA.test(code)) return settleApart(store, results, error);
      if (code !== DEADLOCK || tries === TRIES_MAX) throw error;
    }
  }
}

/** Something in the evidence cannot be stored: it must not hold up the others, nor its own verdict. */
async function settleApart(
  store: Store,
  results: readonly Settlement[],
  error: unknown,
): Promise<Settled> {
  const [only, ...more] = results;
  if (only === undefined) throw error;
  if (more.length === 0) {
    if (only.evidence.reply === UNSTORABLE) throw error;
    const evidence = { ...NO_EVIDENCE, cause: only.evidence.cause, reply: UNSTORABLE };
    return settle(store, [{ ...only, evidence }]);
  }
  const settled: Settled[] = [];
  for (const result of results) settled.push(await settle(store, [result]));
  return {
    count: settled.reduce((sum, { count }) => sum + count, 0),
    fenced: settled.reduce((sum, { fenced }) => sum + fenced, 0),
    waiting: settled.flatMap(({ waiting }) => waiting),
  };
}

async function settleIn(client: PoolClient, results: readonly Settlement[]): Promise<Settled> {
  const of = <T>(pick: (result: Settlement) => T): T[] => results.map(pick);
  const { rows } = await client.query<SettledRow>({
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
    ],
  });
  await showEmails(client, results);
  await followUp(client, rows);
  return {
    count: rows.length,
    fenced: results.length - rows.length,
    waiting: rows
      .filter(isTriedAgain)
      .map(({ lane, due_ms }) => ({ lane, dueAt: new Date(Number(due_ms)) })),
  };
}

interface SettledRow {
  readonly tenant_id: string;
  readonly email_id: string;
  readonly recipient: string;
  readonly cause: string | null;
  readonly lane: string;
  readonly state: string;
  readonly unknowns: number;
  readonly due_ms: string;
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
export async function showEmails(
  client: PoolClient,
  emails: readonly Pick<Settlement, 'tenantId' | 'emailId' | 'recipientCount'>[],
): Promise<void> {
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
