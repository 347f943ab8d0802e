// Deliveries that were under way at several crashes of a worker in a row: one of them may be what crashes it. They wait
// apart from what was merely put off, and are let in by groups that grow smaller with every crash, at last one by one:
// so the guilty one goes down alone, and those that only stood beside it get through soon.
import { SUSPECT_INTERRUPTIONS } from '../store/delivery.ts';
import type { Queryable } from './enqueue.ts';

/** How many are let in together: after the second crash in a row, after the third; later ones are alone. */
const GROUPS = [64, 8];
/** So long a group is alone; a crash comes sooner than that, and a slow host must not hold up all the others. */
const ALONE_MS = 60_000;
/** One that nobody claims in that time has a lane that is closed: it waits behind the others. */
const ASIDE_MS = 5 * 60_000;
/** Of the lock that two who let some in at the same time meet at; any number. */
const GATE = 7_318_001;

/** What the index over suspects says, word for word. */
export const IS_SUSPECT = `interruptions >= ${SUSPECT_INTERRUPTIONS}
  and state in ('ready', 'in_flight', 'deferred')`;
/** The same for the index over those that were let in. */
const IS_LET_IN = `interruptions >= ${SUSPECT_INTERRUPTIONS} and state in ('ready', 'in_flight')`;

const ALONE = `interval '${ALONE_MS} milliseconds'`;
const IS_NEXT = `${IS_SUSPECT} and state = 'deferred' and due_at <= now()
  and (let_in_at is null or let_in_at <= now() - ${ALONE} - interval '${ASIDE_MS} milliseconds')`;
/** Those that had their turn come behind those that had none. */
const TURN = `greatest(due_at, let_in_at)`;
const LEVEL = `least(interruptions, ${SUSPECT_INTERRUPTIONS + GROUPS.length})`;
const SIZE = `case level ${GROUPS.map((size, index) => `when ${SUSPECT_INTERRUPTIONS + index} then ${size}`).join(' ')} else 1 end`;

// What is let in keeps its place in its destination's line: a new one would be behind everything that waits there.
const ADMIT = `
  with gate as materialized (
    select pg_try_advisory_xact_lock(${GATE}) as is_open
  ), overdue as (
    select tenant_id, email_id, position from delivery
    where ${IS_LET_IN} and state = 'ready' and let_in_at <= now() - ${ALONE}
      and (select is_open from gate)
    for update skip locked
  ), aside as (
    update delivery d set state = 'deferred'
    from overdue o
    where d.tenant_id = o.tenant_id and d.email_id = o.email_id and d.position = o.position
  ), first as materialized (
    select ${LEVEL} as level from delivery
    where ${IS_NEXT} and (select is_open from gate)
      and not exists (select 1 from delivery where ${IS_LET_IN} and let_in_at > now() - ${ALONE})
    order by ${TURN} limit 1
  ), next as (
    select tenant_id, email_id, position from delivery
    where ${IS_NEXT} and exists (select 1 from first) and ${LEVEL} = (select level from first)
    order by ${TURN} limit (select ${SIZE} from first) for update skip locked
  )
  update delivery d set state = 'ready', let_in_at = now()
  from next
  where d.tenant_id = next.tenant_id and d.email_id = next.email_id and d.position = next.position`;

/** Lets the next suspects in, when none are being tried; how many. */
export async function admitSuspects(db: Queryable): Promise<number> {
  // Nearly always there are none, and this question never leaves its small index.
  const { rows } = await db.query<{ any: boolean }>({
    name: 'any-suspect',
    text: `select exists (select 1 from delivery where ${IS_SUSPECT}) as any`,
  });
  if (rows[0]?.any !== true) return 0;
  const { rowCount } = await db.query({ name: 'admit-suspects', text: ADMIT });
  return rowCount ?? 0;
}
