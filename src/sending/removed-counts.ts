// What metrics count of emails that are removed for their age (retention/): kept by quarter of an hour beside the rows, so
// that whoever counts a quarter anew, or reads it from its rows, gets what it always was.
import type { PoolClient } from 'pg';
import { QUARTER_MS } from '../timeline/late-changes.ts';
import { countRowsSql, COUNTS, NO_BROADCAST, quarterOf } from './metric-counts.ts';

const LOWEST = `'00000000-0000-0000-0000-000000000000'::uuid`;
const HIGHEST = `'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid`;

const SOURCES = countRowsSql({
  tenant: '$1::uuid',
  ids: { first: LOWEST, past: HIGHEST },
  keys: { quarter: true, domain: true, broadcast: true, email: false },
  counts: COUNTS,
  sentWhere: ['e.id = any ($2::uuid[])'],
  receivedWhere: ['r.id = any ($2::uuid[])'],
  emailsMax: null,
});

const NOTE = `
  with counted as (
    select s.*, 0::bigint as accepted from (${SOURCES.join(' union all ')}) s
    union all
    select ${quarterOf('e.id')}, e.from_domain, coalesce(e.broadcast_id, ${NO_BROADCAST}),
      ${COUNTS.map(() => '0::bigint').join(', ')}, count(*)
    from email e where e.tenant_id = $1 and e.id = any ($2::uuid[]) group by 1, 2, 3
  )
  insert into metric_removed as m (tenant_id, quarter, domain, broadcast_id, accepted, ${COUNTS.join(', ')})
  select $1::uuid, to_timestamp(c.quarter * ${QUARTER_MS / 1_000}), c.domain, c.broadcast_id,
    sum(c.accepted), ${COUNTS.map((name) => `sum(c.${name})`).join(', ')}
  from counted c group by c.quarter, c.domain, c.broadcast_id order by 2, 3, 4
  on conflict (tenant_id, quarter, domain, broadcast_id) do update
    set ${['accepted', ...COUNTS].map((name) => `${name} = m.${name} + excluded.${name}`).join(', ')}`;

/** Inside the transaction that removes these sent or received emails, before it does; they are locked. */
export async function noteRemoved(
  client: PoolClient,
  tenantId: string,
  ids: readonly string[],
): Promise<void> {
  if (ids.length > 0)
    await client.query({ name: 'note-removed', text: NOTE, values: [tenantId, ids] });
}
