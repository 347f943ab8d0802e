// The rows of events that wait for a call: which endpoints have some, claims, and what became of them. A claim is a lease:
// `next_attempt_at` is set ahead, so what a process that died had claimed is due again by itself; `lease_id` keeps a
// result from counting once somebody else has claimed the event or its owner has asked for a replay.
import type { PoolClient } from 'pg';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import type { EndpointKey } from './fan-out.ts';

/** An event that is ours to call with until the lease is over. */
export interface ClaimedEvent extends EndpointKey {
  readonly id: string;
  readonly leaseId: string;
  readonly payload: string;
  /** Calls before this one, since it was made or replayed. */
  readonly attempts: number;
  readonly endpoint: string;
  readonly secretSealed: Buffer;
  /** Signs as well; null: its time is over. */
  readonly secretPreviousSealed: Buffer | null;
  /** Nothing was acknowledged lately. */
  readonly isFailing: boolean;
}

/** A call that was made. */
export interface Attempt {
  readonly sentAt: Date;
  readonly durationMs: number;
  readonly httpStatus: number | null;
  readonly response: string | null;
  readonly error: string | null;
}

/** `released`: as if it had not been claimed. */
export interface Ended {
  readonly event: ClaimedEvent;
  readonly outcome: 'acknowledged' | 'failed' | 'gone' | 'released';
  /** Null for `released`. */
  readonly attempt: Attempt | null;
  /** The next call; null: none. */
  readonly nextAt: Date | null;
}

export interface Seen extends EndpointKey {
  readonly isDue: boolean;
  readonly state: 'enabled' | 'disabled' | 'removed';
}

/** Nothing acknowledged for so long, and so many calls meanwhile: the endpoint is disabled. */
export const SILENT_MAX_MS = 5 * 86_400_000;
const FAILURES_MIN = 10;
/** Events of an endpoint that is disabled or gone, in one statement. */
const CLOSED_PER_TURN = 1_000;
export const GONE_REASON = 'The endpoint answered with status 410 (Gone).';
export const SILENT_REASON = 'The endpoint has acknowledged nothing for 5 days.';

/** The next endpoints behind this one that have events waiting, due or not. */
export async function lookAround(
  store: Store,
  about: { readonly behind: EndpointKey; readonly max: number; readonly now: Date },
): Promise<readonly Seen[]> {
  const { rows } = await store.pool.query<{
    tenant_id: string;
    webhook_id: string;
    is_due: boolean;
    state: Seen['state'];
  }>({
    name: 'look-around-webhooks',
    // Each step asks for the whole order of the index that holds only what waits.
    text: `with recursive endpoints as (
        (select tenant_id, webhook_id, 1 as number from webhook_event
          where next_attempt_at is not null and (tenant_id, webhook_id) > ($1::uuid, $2::uuid)
          order by tenant_id, webhook_id, next_attempt_at, id limit 1)
        union all
        select n.tenant_id, n.webhook_id, e.number + 1 from endpoints e cross join lateral (
          select tenant_id, webhook_id from webhook_event
          where next_attempt_at is not null
            and (tenant_id, webhook_id) > (e.tenant_id, e.webhook_id)
          order by tenant_id, webhook_id, next_attempt_at, id limit 1) n
        where e.number < $3
      )
      select e.tenant_id, e.webhook_id, coalesce(w.status, 'removed') as state, exists (
          select 1 from webhook_event d where d.tenant_id = e.tenant_id
            and d.webhook_id = e.webhook_id and d.next_attempt_at <= $4) as is_due
      from endpoints e
      left join webhook w on w.tenant_id = e.tenant_id and w.id = e.webhook_id
      order by e.number`,
    values: [about.behind.tenantId, about.behind.webhookId, about.max, about.now],
  });
  return rows.map((row) => ({
    tenantId: row.tenant_id,
    webhookId: row.webhook_id,
    isDue: row.is_due,
    state: row.state,
  }));
}

interface ClaimedRow {
  readonly tenant_id: string;
  readonly webhook_id: string;
  readonly id: string;
  readonly payload: string;
  readonly attempts: number;
  readonly endpoint: string;
  readonly secret_sealed: Buffer;
  readonly secret_previous_sealed: Buffer | null;
  readonly is_failing: boolean;
}

/** Of each endpoint as many due events as it has room for, those that wait longest first, past those of others. */
export async function claimDue(
  store: Store,
  wanted: readonly (EndpointKey & { readonly room: number })[],
  about: { readonly now: Date; readonly leaseMs: number },
): Promise<readonly ClaimedEvent[]> {
  const leaseId = newId();
  const { rows } = await store.pool.query<ClaimedRow>({
    name: 'claim-webhook-events',
    text: `with taken as (
        select e.tenant_id, e.webhook_id, e.id
        from unnest($1::uuid[], $2::uuid[], $3::integer[]) as w (tenant_id, webhook_id, room)
        cross join lateral (
          select tenant_id, webhook_id, id from webhook_event d
          where d.tenant_id = w.tenant_id and d.webhook_id = w.webhook_id
            and d.next_attempt_at <= $4
          order by d.tenant_id, d.webhook_id, d.next_attempt_at, d.id
          limit w.room for update skip locked) e
      ), claimed as (
        update webhook_event e set status = 'attempting', next_attempt_at = $5, lease_id = $6
        from taken t join webhook h on h.tenant_id = t.tenant_id and h.id = t.webhook_id
          and h.status = 'enabled'
        where e.tenant_id = t.tenant_id and e.webhook_id = t.webhook_id and e.id = t.id
        returning e.tenant_id, e.webhook_id, e.id, e.payload, e.attempts, h.endpoint, h.secret_sealed,
          case when h.secret_previous_until > $4 then h.secret_previous_sealed end
            as secret_previous_sealed,
          h.failing_since is not null as is_failing
      )
      select * from claimed order by id`,
    values: [
      wanted.map(({ tenantId }) => tenantId),
      wanted.map(({ webhookId }) => webhookId),
      wanted.map(({ room }) => room),
      about.now,
      new Date(about.now.getTime() + about.leaseMs),
      leaseId,
    ],
  });
  return rows.map((row) => ({
    tenantId: row.tenant_id,
    webhookId: row.webhook_id,
    id: row.id,
    leaseId,
    payload: row.payload,
    attempts: row.attempts,
    endpoint: row.endpoint,
    secretSealed: row.secret_sealed,
    secretPreviousSealed: row.secret_previous_sealed,
    isFailing: row.is_failing,
  }));
}

/** Stores what became of calls; which endpoints were disabled over it. */
export async function settle(
  store: Store,
  ended: readonly Ended[],
  now: Date,
): Promise<readonly (EndpointKey & { readonly reason: string })[]> {
  return store.transact(async (client) => {
    await storeAttempts(client, ended);
    await storeStates(client, ended, now);
    return judgeEndpoints(client, ended, now);
  });
}

async function storeAttempts(client: PoolClient, ended: readonly Ended[]): Promise<void> {
  const made = ended.flatMap(({ event, attempt }) =>
    attempt === null ? [] : [{ event, attempt }],
  );
  if (made.length === 0) return;
  await client.query({
    name: 'insert-webhook-attempts',
    // What was removed meanwhile keeps nothing.
    text: `insert into webhook_attempt (tenant_id, webhook_id, event_id, id, sent_at, duration_ms,
        http_status, response, error)
      select a.* from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::timestamptz[],
          $6::integer[], $7::smallint[], $8::text[], $9::text[])
        as a (tenant_id, webhook_id, event_id, id, sent_at, duration_ms, http_status, response, error)
      where exists (select 1 from webhook_event e where e.tenant_id = a.tenant_id
        and e.webhook_id = a.webhook_id and e.id = a.event_id)`,
    values: [
      made.map(({ event }) => event.tenantId),
      made.map(({ event }) => event.webhookId),
      made.map(({ event }) => event.id),
      made.map(() => newId()),
      made.map(({ attempt }) => attempt.sentAt),
      made.map(({ attempt }) => attempt.durationMs),
      made.map(({ attempt }) => attempt.httpStatus),
      made.map(({ attempt }) => attempt.response),
      made.map(({ attempt }) => attempt.error),
    ],
  });
}

async function storeStates(client: PoolClient, ended: readonly Ended[], now: Date): Promise<void> {
  await client.query({
    name: 'settle-webhook-events',
    text: `update webhook_event e set lease_id = null, next_attempt_at = r.next_at,
        attempts = e.attempts + r.calls, status = r.status
      from unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::timestamptz[], $6::integer[],
          $7::text[]) as r (tenant_id, webhook_id, id, lease_id, next_at, calls, status)
      where e.tenant_id = r.tenant_id and e.webhook_id = r.webhook_id and e.id = r.id
        and e.lease_id = r.lease_id`,
    values: [
      ended.map(({ event }) => event.tenantId),
      ended.map(({ event }) => event.webhookId),
      ended.map(({ event }) => event.id),
      ended.map(({ event }) => event.leaseId),
      ended.map(({ outcome, nextAt }) => (outcome === 'released' ? (nextAt ?? now) : nextAt)),
      ended.map(({ attempt }) => (attempt === null ? 0 : 1)),
      ended.map(({ outcome, nextAt }) => {
        if (outcome === 'acknowledged') return 'success';
        return nextAt === null && outcome !== 'released' ? 'failed' : 'pending';
      }),
    ],
  });
}

interface Verdict extends EndpointKey {
  readonly endpoint: string;
  readonly failures: number;
  readonly isAcknowledged: boolean;
  readonly isGone: boolean;
}

/** By endpoint and the URL that was called: what an old URL does says nothing about a new one. */
function verdicts(ended: readonly Ended[]): readonly Verdict[] {
  const found = new Map<string, Verdict>();
  for (const { event, outcome } of ended) {
    if (outcome === 'released') continue;
    const key = `${event.webhookId} ${event.endpoint}`;
    const before = found.get(key);
    found.set(key, {
      tenantId: event.tenantId,
      webhookId: event.webhookId,
      endpoint: event.endpoint,
      failures: (before?.failures ?? 0) + (outcome === 'acknowledged' ? 0 : 1),
      isAcknowledged: outcome === 'acknowledged' || before?.isAcknowledged === true,
      isGone: outcome === 'gone' || before?.isGone === true,
    });
  }
  return [...found.values()];
}

async function judgeEndpoints(
  client: PoolClient,
  ended: readonly Ended[],
  now: Date,
): Promise<readonly (EndpointKey & { readonly reason: string })[]> {
  const found = verdicts(ended);
  if (found.length === 0) return [];
  const { rows } = await client.query<{ tenant_id: string; id: string; reason: string | null }>({
    name: 'judge-webhooks',
    // Locked in one order, since other processes do the same. Whoever acknowledges all the time is not written.
    text: `with r as (
        select * from unnest($1::uuid[], $2::uuid[], $3::text[], $4::integer[], $5::boolean[],
            $6::boolean[])
          as r (tenant_id, id, endpoint, failures, is_acknowledged, is_gone)
      ), locked as (
        select w.tenant_id, w.id, w.failing_since, w.failures
        from webhook w join r on r.tenant_id = w.tenant_id and r.id = w.id
          and r.endpoint = w.endpoint
        where w.status = 'enabled' and (not r.is_acknowledged or r.is_gone
          or w.failing_since is not null)
        order by w.tenant_id, w.id for no key update of w
      ), judged as (
        select l.tenant_id, l.id,
          case when r.is_acknowledged then null else coalesce(l.failing_since, $7) end as since,
          case when r.is_acknowledged then 0 else l.failures + r.failures end as failures,
          case when r.is_gone then $8
            when not r.is_acknowledged and l.failing_since <= $9 and l.failures + r.failures >= $10
            then $11 end as reason
        from locked l join r on r.tenant_id = l.tenant_id and r.id = l.id
      )
      update webhook w set failing_since = j.since, failures = j.failures,
        disabled_reason = j.reason,
        status = case when j.reason is null then w.status else 'disabled' end,
        updated_at = case when j.reason is null then w.updated_at else $7 end
      from judged j where w.tenant_id = j.tenant_id and w.id = j.id
      returning w.tenant_id, w.id, j.reason`,
    values: [
      found.map(({ tenantId }) => tenantId),
      found.map(({ webhookId }) => webhookId),
      found.map(({ endpoint }) => endpoint),
      found.map(({ failures }) => failures),
      found.map(({ isAcknowledged }) => isAcknowledged),
      found.map(({ isGone }) => isGone),
      now,
      GONE_REASON,
      new Date(now.getTime() - SILENT_MAX_MS),
      FAILURES_MIN,
      SILENT_REASON,
    ],
  });
  return rows.flatMap((row) =>
    row.reason === null ? [] : [{ tenantId: row.tenant_id, webhookId: row.id, reason: row.reason }],
  );
}

/**
 * Of a disabled endpoint: what waits has failed, and can be replayed. Of one that was removed: what waits is deleted. But
 * for calls that are under way. True: there may be more.
 */
export async function closeWaiting(
  store: Store,
  { tenantId, webhookId, state }: Seen,
  now: Date,
): Promise<boolean> {
  const waiting = `select id from webhook_event
    where tenant_id = $1 and webhook_id = $2 and next_attempt_at is not null
      and (lease_id is null or next_attempt_at <= $3)
      ${state === 'removed' ? '' : 'and exists (select 1 from hook)'}
    order by tenant_id, webhook_id, next_attempt_at, id limit ${CLOSED_PER_TURN}
    for update skip locked`;
  const { rowCount } = await store.pool.query({
    name: `close-waiting-${state}`,
    text:
      state === 'removed'
        ? `with waiting as (${waiting}), attempts as (
            delete from webhook_attempt a using waiting w
            where a.tenant_id = $1 and a.webhook_id = $2 and a.event_id = w.id)
          delete from webhook_event e using waiting w
          where e.tenant_id = $1 and e.webhook_id = $2 and e.id = w.id`
        : // Looked at anew: its owner may have enabled it since, and replays.
          `with hook as (
            select 1 from webhook where tenant_id = $1 and id = $2 and status = 'disabled' for share
          ), waiting as (${waiting})
          update webhook_event e set status = 'failed', next_attempt_at = null, lease_id = null
          from waiting w where e.tenant_id = $1 and e.webhook_id = $2 and e.id = w.id`,
    values: [tenantId, webhookId, now],
  });
  return rowCount === CLOSED_PER_TURN;
}
