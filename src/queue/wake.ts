// Makes waiting deliveries claimable when their time has come. Alarms call it for one lane, the sweep
// for all of them, so a lost alarm costs at most one sweep interval.
import { SUSPECT_INTERRUPTIONS, UNKNOWNS_MAX } from '../store/delivery.ts';
import type { Queryable } from './enqueue.ts';
import { admitSuspects } from './suspect.ts';

const BATCH = 1_000;
/** A call moves at most this many rows; the next alarm or sweep takes the rest. */
const BATCHES_MAX = 100;
/** Rows that are asked for alarms; the rest is near enough when a later sweep comes. */
const LOOKED_AT_MAX = 100_000;

const WAKE = `
  with due as (
    select tenant_id, email_id, position from delivery
    where state in ('deferred', 'unknown') and unknowns < ${UNKNOWNS_MAX} and due_at <= now()
      and interruptions < ${SUSPECT_INTERRUPTIONS} and ($1::text is null or lane = $1)
    order by due_at limit ${BATCH} for update skip locked
  )
  update delivery d set state = 'ready'
  from due
  where d.tenant_id = due.tenant_id and d.email_id = due.email_id and d.position = due.position`;

/** Moves what is due in `lane` (null: in every lane) to ready; how many. */
export async function wake(db: Queryable, lane: string | null): Promise<number> {
  let woken = 0;
  for (let batch = 0; batch < BATCHES_MAX; batch++) {
    const { rowCount } = await db.query({ name: 'wake', text: WAKE, values: [lane] });
    woken += rowCount ?? 0;
    if ((rowCount ?? 0) < BATCH) break;
  }
  return woken + (await admitSuspects(db));
}

/**
 * The alarms that ought to be set: lanes with something to wake within `horizonMs`, by time bucket.
 * At most `max`, the earliest first.
 */
export async function waitingLanes(
  db: Queryable,
  options: { readonly horizonMs: number; readonly bucketMs: number; readonly max: number },
): Promise<readonly { lane: string; dueAt: Date }[]> {
  const { rows } = await db.query<{ lane: string; bucket: string }>({
    text: `
      select lane, ceil(extract(epoch from due_at) * 1000 / $2)::bigint::text as bucket
      from (
        select lane, due_at from delivery
        where state in ('deferred', 'unknown') and unknowns < ${UNKNOWNS_MAX}
          and due_at <= now() + $1 * interval '1 millisecond'
        order by due_at limit ${LOOKED_AT_MAX}) d
      group by 1, 2 order by 2 limit $3`,
    values: [options.horizonMs, options.bucketMs, options.max],
  });
  return rows.map(({ lane, bucket }) => ({
    lane,
    dueAt: new Date(Number(bucket) * options.bucketMs),
  }));
}
