// What the workers know about port 25 from each source address (egress), in one small table that all of them and the
// API share. The database's clock decides what is fresh: nobody keeps saying it, it does not hold any more.
import type { Store } from '../store/orm.ts';
import type { Queryable } from './enqueue.ts';
import { showEmails } from './settle.ts';

export interface BlockedEgress {
  readonly name: string;
  readonly since: Date;
  readonly reason: string;
  /** Addresses that could not be connected to. */
  readonly silent: readonly string[];
}

/** A worker that watches a blocked egress says so every few seconds; after this nobody does. */
const FRESH_MS = 10 * 60_000;
const EGRESSES_MAX = 1_000;
/** Attempts given back at a time. */
const CHUNK = 500;
const CHUNKS_MAX = 200;
const FRESH = `reported_at > now() - interval '${FRESH_MS} milliseconds'`;

/** The egresses that are blocked now, by name. */
export async function readBlockedEgresses(db: Queryable): Promise<readonly BlockedEgress[]> {
  const { rows } = await db.query<{
    name: string;
    since_ms: string;
    reason: string | null;
    silent: string[];
  }>({
    text: `select name, (extract(epoch from blocked_since) * 1000)::bigint::text as since_ms, reason, silent
      from egress where blocked_since is not null and ${FRESH} order by name limit $1`,
    values: [EGRESSES_MAX],
  });
  return rows.map(({ name, since_ms, reason, silent }) => ({
    name,
    since: new Date(Number(since_ms)),
    reason: reason ?? '',
    silent,
  }));
}

/**
 * Says that an egress is blocked. Null: it is not, since another worker saw a connection succeed within `windowMs`.
 * `isNew`: nobody has said so before, so the caller tells the operator.
 */
export async function reportBlocked(
  db: Queryable,
  about: Omit<BlockedEgress, 'since'> & { readonly windowMs: number },
): Promise<{ readonly since: Date; readonly isNew: boolean } | null> {
  const { rows } = await db.query<{ since_ms: string; is_new: boolean }>({
    text: `
      insert into egress as e (name, blocked_since, reason, silent, probed_at, reported_at)
      values ($1, now(), $2, $4, now(), now())
      on conflict (name) do update
      set blocked_since = case when e.blocked_since is not null and e.${FRESH} then e.blocked_since else now() end,
        reason = case when e.blocked_since is not null and e.${FRESH} then e.reason else excluded.reason end,
        probed_at = case when e.blocked_since is not null and e.${FRESH} then e.probed_at else now() end,
        silent = excluded.silent, reported_at = now()
      where e.last_success_at is null or e.last_success_at < now() - $3 * interval '1 millisecond'
      returning (extract(epoch from blocked_since) * 1000)::bigint::text as since_ms,
        blocked_since = now() as is_new`,
    values: [about.name, about.reason, about.windowMs, about.silent],
  });
  const [row] = rows;
  return row === undefined ? null : { since: new Date(Number(row.since_ms)), isNew: row.is_new };
}

/** Still blocked, says a worker that watches it. */
export async function keepBlocked(db: Queryable, names: readonly string[]): Promise<void> {
  if (names.length === 0) return;
  await db.query({
    text: 'update egress set reported_at = now() where name = any ($1) and blocked_since is not null',
    values: [names],
  });
}

/** A connection to port 25 succeeded. True: it was blocked until now. */
export async function reportOpen(db: Queryable, name: string): Promise<boolean> {
  const { rows } = await db.query<{ was_blocked: boolean }>({
    text: `
      with before as (select blocked_since from egress where name = $1)
      insert into egress (name, last_success_at, reported_at) values ($1, now(), now())
      on conflict (name) do update
      set blocked_since = null, reason = null, last_success_at = now(), reported_at = now()
      returning coalesce((select blocked_since is not null from before), false) as was_blocked`,
    values: [name],
  });
  return rows[0]?.was_blocked === true;
}

/** Takes the turn to look whether the port is open: of all workers one gets it in `everyMs`. */
export async function takeProbe(
  db: Queryable,
  about: { readonly name: string; readonly everyMs: number },
): Promise<boolean> {
  const { rows } = await db.query({
    text: `
      insert into egress as e (name, probed_at, reported_at) values ($1, now(), now())
      on conflict (name) do update set probed_at = now()
      where e.probed_at is null or e.probed_at <= now() - $2 * interval '1 millisecond'
      returning 1`,
    values: [about.name, about.everyMs],
  });
  return rows.length > 0;
}

// What ended while nobody knew yet: the last attempt of deliveries that wait for their next one.
const GIVE_BACK = `
  with found as (
    select d.tenant_id, d.email_id, d.position, d.attempts as number, e.recipient_count
    from delivery d
    join attempt a on a.tenant_id = d.tenant_id and a.email_id = d.email_id
      and a.position = d.position and a.number = d.attempts
    join email e on e.tenant_id = d.tenant_id and e.id = d.email_id
    where d.state = 'deferred' and d.lane like 'mx:%' and a.outcome = 'deferred' and a.stage = 'connect'
      and a.cause in ('connect_timeout', 'connect_refused', 'connect_failed')
      and a.finished_at > now() - $1 * interval '1 millisecond'
      and (a.source is null or a.source = any ($2::text[]))
    limit ${CHUNK}
    for update of d skip locked
  ), before as (
    select f.tenant_id, f.email_id, f.position, f.number, f.recipient_count,
      a.enhanced, a.cause, a.reply
    from found f
    left join attempt a on a.tenant_id = f.tenant_id and a.email_id = f.email_id
      and a.position = f.position and a.number = f.number - 1
  ), back as (
    update delivery d
    set state = 'ready', due_at = now(), attempts = d.attempts - 1,
      lane_faults = greatest(d.lane_faults - 1, 0), last_cause = coalesce(b.enhanced, b.cause),
      last_reply = b.reply
    from before b
    where d.tenant_id = b.tenant_id and d.email_id = b.email_id and d.position = b.position
    returning d.tenant_id, d.email_id, d.position, b.number, b.recipient_count
  ), gone as (
    delete from attempt a using back
    where a.tenant_id = back.tenant_id and a.email_id = back.email_id
      and a.position = back.position and a.number = back.number
  )
  select tenant_id, email_id, recipient_count from back`;

/**
 * Gives back the attempts that found out that the port is blocked: those of the last `withinMs` that could not connect
 * from one of `sources`. They count for nothing, and their deliveries are due again. How many.
 */
export async function giveBackUnconnected(
  store: Store,
  about: { readonly withinMs: number; readonly sources: readonly string[] },
): Promise<number> {
  let count = 0;
  for (let chunk = 0; chunk < CHUNKS_MAX; chunk++) {
    const given = await store.transact(async (client) => {
      const { rows } = await client.query<{
        tenant_id: string;
        email_id: string;
        recipient_count: number;
      }>({ text: GIVE_BACK, values: [about.withinMs, about.sources] });
      const emails = rows.map((row) => ({
        tenantId: row.tenant_id,
        emailId: row.email_id,
        recipientCount: row.recipient_count,
      }));
      if (emails.length > 0) await showEmails(client, emails);
      return emails.length;
    });
    count += given;
    if (given < CHUNK) break;
  }
  return count;
}
