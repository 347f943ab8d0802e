// The one statement that claims: which rows are taken, in which order, at what cost. claim.ts says what it means.
//
// Its cost does not follow the length of the queue. It jumps through the index (tenant, class, destination, time): from
// tenant to tenant and from destination to destination, on from where the last claim stopped and round to the
// beginning. So a backlog costs one look, be it behind a closed lane or in front of it. How many tenants, destinations
// and rows one claim looks at is limited.
//
// The plan must be right on tables that were never analyzed or have changed since: every look is `order by` the
// index's columns and a constant limit, which makes any other plan dearer, and what is joined afterwards is
// estimated by a constant limit, too. `offset 0` keeps a look from being taken once for each of its uses.

import { isHooked } from '../timeline/outbox.ts';

/** Tenants that one claim visits. */
const TENANTS_MAX = 64;
/** Destinations that one claim looks at, all tenants together; each tenant may look at a few at least. */
const STEPS_MAX = 600;
const STEPS_MIN = 8;
/** Above every `max`. */
const ROWS_MAX = 1_000;
/** Of what fits, bulk mail that waits gets one in four. */
const BULK_SHARE = 4;

/** Of delivery_claimable. */
const INDEX_ORDER = ['tenant_id', 'is_bulk', 'lane', 'due_at', 'email_id', 'position'];

/**
 * The first of `column` in the index behind `after`, else the first of all. It is asked for in the whole order of the
 * index: the primary key also has tenants in order, and where most rows were ready once the planner takes it and reads
 * through all that was sent since.
 */
const nextOf = (column: string, where: string, after: string): string => {
  const ordered = `order by ${INDEX_ORDER.slice(INDEX_ORDER.indexOf(column))
    .map((one) => `d.${one}`)
    .join(', ')} limit 1`;
  return `coalesce(
  (select d.${column} from delivery d where ${where} and d.${column} > ${after} ${ordered}),
  (select d.${column} from delivery d where ${where} ${ordered}))`;
};

const nextTenant = (after: string): string => nextOf('tenant_id', `d.state = 'ready'`, after);

/**
 * Due rows of one class of one tenant `t`, destination by destination, locked past others' locks; at most `limit`.
 * A row without an email says that there are more destinations than it looked at, and which was the last.
 */
function walk(isBulk: boolean, limit: string): string {
  const ofClass = `d.tenant_id = t.id and d.is_bulk = ${isBulk} and d.state = 'ready'`;
  const nextLane = (after: string): string => nextOf('lane', ofClass, after);
  // Where nothing is known of the last claim it begins anywhere, so that no destination is always the last.
  const cursor = `coalesce($9::jsonb -> t.id::text ->> ${isBulk ? 1 : 0},
    'mx:' || chr(97 + floor(random() * 26)::integer))`;
  return `(
    with recursive start as materialized (
      select ${cursor} as lane
    ), lanes as (
      select n.lane, n.lane as first, 1::bigint as number
      from (select ${nextLane('start.lane')} as lane from start offset 0) n
      where n.lane is not null
      union all
      select n.lane, l.first, l.number + 1
      from lanes l cross join lateral (select ${nextLane('l.lane')} as lane offset 0) n
      where n.lane <> l.first and l.number < t.steps
    ), looked as (
      select lane, number from lanes
      union all
      -- No number: where the walk goes on does not follow from it.
      select n.lane, 0 from unnest($10::text[]) with ordinality as n (lane, number)
      where n.number <= t.steps and n.lane not in (select lane from lanes)
    )
    select r.email_id, r.position, r.due_at, l.lane, l.number
    from looked l
    left join lateral (
      select * from (
        select d.email_id, d.position, d.due_at from delivery d
        where ${ofClass} and d.lane = l.lane and d.due_at <= now()
        order by d.due_at, d.email_id, d.position
        limit ${ROWS_MAX} for update skip locked) r
      limit greatest(coalesce(($4::jsonb ->> l.lane)::integer, $5::integer), 0)) r on true
    where r.email_id is not null or l.number = t.steps
    limit ${limit})`;
}

// $1 epoch, $2 how many, $3 of one tenant, $4 rooms by destination, $5 room of the others, $6 tenants to pass over,
// $7 the tenants to visit (null: all, from behind $8), $9 where the last claim stopped: tenant -> [single, bulk],
// $10 destinations to look at whether the walk comes to them or not (null: none): those that have room where the
// others have none, so that a tenant with few destinations is served by its walk and one with many by this list.
export const CLAIM = `
  with recursive turns as materialized (
    -- Which of ${BULK_SHARE} places in a row is for bulk.
    select floor(random() * ${BULK_SHARE})::integer as of_bulk
  ), walked as (
    select n.id, n.id as first, 1 as number
    from (select ${nextTenant('$8::uuid')} as id where $7::uuid[] is null offset 0) n
    where n.id is not null
    union all
    select n.id, w.first, w.number + 1
    from walked w cross join lateral (select ${nextTenant('w.id')} as id offset 0) n
    where n.id <> w.first and w.number < least(${TENANTS_MAX}, $2::integer)
  ), visited as materialized (
    select id from walked where id <> all ($6::uuid[])
    union all select unnest($7::uuid[])
    limit ${TENANTS_MAX}
  ), tenants as materialized (
    select id, greatest(1, least($3::integer, $2 / count(*) over ()))::integer as share,
      greatest(${STEPS_MIN}, ${STEPS_MAX} / count(*) over ())::integer as steps,
      ${isHooked('visited.id', `'email.sent'`)} as is_hooked
    from visited
  ), singles as materialized (
    select t.id as tenant_id, t.share, r.*, false as is_bulk
    from tenants t cross join lateral ${walk(false, 't.share')} r
    limit ${ROWS_MAX}
  ), bulk as materialized (
    select t.id as tenant_id, t.share, r.*, true as is_bulk
    from (
      select tenants.*, (select count(*) from singles s
        where s.tenant_id = tenants.id and s.email_id is not null) as found
      from tenants) t
    cross join turns
    cross join lateral ${walk(
      true,
      `greatest(t.share - t.found, (t.share + ${BULK_SHARE - 1} - turns.of_bulk) / ${BULK_SHARE})`,
    )} r
    limit ${ROWS_MAX}
  ), queued as (
    -- In which order they leave: one-recipient mail first, every fourth place for bulk.
    select c.*, case when c.is_bulk then c.place * ${BULK_SHARE} + turns.of_bulk
      else c.place + (c.place + ${BULK_SHARE - 1} - turns.of_bulk) / ${BULK_SHARE - 1} end as turn
    from turns, (
      select a.*, row_number() over (partition by a.tenant_id, a.is_bulk
        order by a.number, a.due_at, a.email_id, a.position) - 1 as place
      from (select * from singles union all select * from bulk) a
      where a.email_id is not null) c
  ), due as materialized (
    select tenant_id, email_id, position, share, number
    from (
      select o.*, row_number() over (partition by o.lane order by o.turn, random()) as lane_place
      from (
        select q.*, row_number() over (partition by q.tenant_id order by q.turn) as tenant_place
        from queued q) o
      where o.tenant_place <= o.share) p
    where p.lane_place <= coalesce(($4::jsonb ->> p.lane)::integer, $5::integer)
    order by p.turn limit least($2, ${ROWS_MAX})
  ), claimed as (
    update delivery d
    set state = 'in_flight', lease_epoch = $1, attempts = attempts + 1
    from (select * from due limit ${ROWS_MAX}) due
    where d.tenant_id = due.tenant_id and d.email_id = due.email_id and d.position = due.position
    returning d.tenant_id, d.email_id, d.position, d.recipient, d.lane, d.attempts, d.is_bulk,
      d.lane_faults, d.unknowns, d.interruptions, due.number, due.share
  ), begun as (
    insert into attempt (tenant_id, email_id, position, number, started_at)
    select tenant_id, email_id, position, attempts, now() from claimed
  ), emails as (
    -- An email that a settlement holds right now gets its event from there.
    select e.tenant_id, e.id from email e
    where (e.tenant_id, e.id) in (select tenant_id, email_id from claimed)
    for no key update skip locked
  ), sent as (
    update email e
    set last_event = case when e.last_event in ('queued', 'scheduled') then 'sent' else e.last_event end,
      provider_last_attempted_at = now()
    from emails where e.tenant_id = emails.tenant_id and e.id = emails.id
  ), told as (
    select * from claimed
    union all
    -- What was not looked at: where the next claim goes on.
    select tenant_id, null, null, null, lane, null, is_bulk, null, null, null, number, share
    from (select * from singles union all select * from bulk) m where m.email_id is null
    union all
    select id, null, null, null, null, null, null, null, null, null, number, null
    from walked where number = least(${TENANTS_MAX}, $2)
  )
  select c.*, (extract(epoch from e.created_at) * 1000)::bigint::text as created_ms,
    coalesce(t.is_hooked, false) as is_hooked,
    (extract(epoch from coalesce(e.scheduled_at, e.created_at)) * 1000)::bigint::text as planned_ms,
    e.recipient_count, e.from_domain, e.topic_id, e.broadcast_id, k.raw, k.raw_size_bytes, k.blob_key, k.needs_smtp_utf8,
    k.signing_tenant_id, k.signing_domain_id, k.ignores_tls_policy, k.envelope_from, k.may_go_unsigned
  from told c
  left join tenants t on t.id = c.tenant_id
  left join email e on e.tenant_id = c.tenant_id and e.id = c.email_id
  left join email_content k on k.tenant_id = c.tenant_id and k.email_id = c.email_id`;
