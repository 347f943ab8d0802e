// Counts old mail once, so that questions about months stay fast: metric_quarter holds what metrics count of every quarter
// of an hour before the tenant's `counted_until`. Where something changes later (timeline/late-changes.ts), the quarter is
// read from its rows again until it is counted anew, so an answer is always that of the rows. One exception: that a first
// attempt has begun (`sent`) of mail that is this old is seen when the attempt is decided.
import type { PoolClient } from 'pg';
import { firstIdAt } from '../access/request-log.ts';
import type { Store } from '../store/orm.ts';
import { COUNTED_AFTER_MS, QUARTER_MS, timeOfId } from '../timeline/late-changes.ts';
import { countQuartersSql, countRowsSql, COUNTS, type Keys } from './metric-counts.ts';

/** Sent or received, counted in one transaction; more where more came in a single quarter of an hour. */
const EMAILS_PER_STEP = 20_000;
const STEP_MAX_MS = 7 * 86_400_000;
/** Of one run, over all tenants; the next goes on. */
const STEPS_MAX = 500;
const TENANTS_MAX = 5_000;
const STALE_MAX = 2_000;
/** Of one run: one tenant's must not hold up the others, but where nothing works it ends. */
const FAILURES_MAX = 20;

/**
 * How many steps were made and how many quarters were counted anew. Several processes may do it at the same time. What fails
 * is passed over; when all else is done, the first error is thrown.
 */
export async function rollUpMetrics(
  store: Store,
  { now }: { readonly now: Date },
): Promise<{ readonly steps: number; readonly renewed: number }> {
  const target = floor(now.getTime() - COUNTED_AFTER_MS);
  const { rows } = await store.pool.query<{ id: string; until: string | null }>({
    name: 'tenants-to-roll-up',
    text: `select t.id, (extract(epoch from r.counted_until) * 1000)::bigint::text as until
      from tenant t left join metric_rolled r on r.tenant_id = t.id
      where r.counted_until is null or r.counted_until < $1
      order by r.counted_until nulls first limit ${TENANTS_MAX}`,
    values: [new Date(target)],
  });
  const errors: unknown[] = [];
  let steps = 0;
  for (const tenant of rows) {
    let until = tenant.until === null ? null : Number(tenant.until);
    while (steps < STEPS_MAX && (until === null || until < target)) {
      steps += 1;
      try {
        until = await advance(store, { tenantId: tenant.id, until, target });
      } catch (error) {
        if (errors.push(error) >= FAILURES_MAX) throw errors[0];
        break;
      }
    }
  }
  const renewed = await renewStale(store, errors);
  if (errors.length > 0) throw errors[0];
  return { steps, renewed };
}

const floor = (ms: number): number => Math.floor(ms / QUARTER_MS) * QUARTER_MS;

/** Counts the next quarters that have mail; until when it was counted then. */
async function advance(
  store: Store,
  at: { readonly tenantId: string; readonly until: number | null; readonly target: number },
): Promise<number> {
  const { tenantId, target } = at;
  const idAfter = async (id: string, count: number): Promise<number> => {
    const next = (table: string): string => `(select id from ${table}
      where tenant_id = $1 and id >= $2 order by id offset $3 limit 1)`;
    const { rows } = await store.pool.query<{ id: string | null }>({
      name: 'next-email-to-count',
      text: `select least(${next('email')}, ${next('received_email')}) as id`,
      values: [tenantId, id, count],
    });
    const found = rows[0]?.id ?? null;
    return found === null ? Infinity : timeOfId(found);
  };
  const first = await idAfter(firstIdAt(at.until ?? 0), 0);
  const removed = await firstRemoved(store, tenantId, at.until ?? 0);
  const from = Math.max(at.until ?? 0, Math.min(target, floor(first), removed));
  const full = await idAfter(firstIdAt(from), EMAILS_PER_STEP);
  const to = Math.min(
    target,
    from + STEP_MAX_MS,
    full === Infinity ? target : Math.max(from + QUARTER_MS, floor(full)),
  );
  return store.transact(async (client) => {
    // Only at the beginning: an operator may have removed it meanwhile, with what was counted.
    if (at.until === null) {
      await client.query({
        text: `insert into metric_rolled (tenant_id, counted_until) values ($1, $2)
          on conflict do nothing`,
        values: [tenantId, new Date(from)],
      });
    }
    const { rowCount } = await client.query({
      text: `update metric_rolled set counted_until = $3 where tenant_id = $1 and counted_until = $2`,
      values: [tenantId, new Date(at.until ?? from), new Date(to)],
    });
    // Another process has counted it: its count is no worse, and the next run goes on from there.
    if (rowCount === 1 && from < to) await count(client, { tenantId, from, to });
    return rowCount === 1 ? to : target;
  });
}

/** The first quarter from then on of which emails were removed; Infinity: there is none. */
async function firstRemoved(store: Store, tenantId: string, fromMs: number): Promise<number> {
  const { rows } = await store.pool.query<{ ms: string | null }>({
    name: 'first-removed-quarter',
    text: `select (extract(epoch from min(quarter)) * 1000)::bigint::text as ms from metric_removed
      where tenant_id = $1 and quarter >= $2`,
    values: [tenantId, new Date(fromMs)],
  });
  const ms = rows[0]?.ms ?? null;
  return ms === null ? Infinity : Number(ms);
}

/** Those that changed last come in any order, so that none waits for ever; how many. */
async function renewStale(store: Store, errors: unknown[]): Promise<number> {
  const { rows } = await store.pool.query<{ tenant_id: string; ms: string; token: string }>({
    name: 'stale-quarters',
    text: `select s.tenant_id, (extract(epoch from s.quarter) * 1000)::bigint::text as ms, s.token
      from metric_stale s join metric_rolled r on r.tenant_id = s.tenant_id
      where s.quarter < r.counted_until order by random() limit ${STALE_MAX}`,
  });
  let renewed = 0;
  for (const { tenant_id: tenantId, ms, token } of rows) {
    const from = Number(ms);
    const renew = async (client: PoolClient): Promise<boolean> => {
      // First: what changes from now on waits and is noted behind it. Another token: it has changed since, or another
      // process is at it.
      const { rowCount } = await client.query({
        text: 'delete from metric_stale where tenant_id = $1 and quarter = $2 and token = $3',
        values: [tenantId, new Date(from), token],
      });
      if (rowCount !== 1) return false;
      await client.query({
        text: 'delete from metric_quarter where tenant_id = $1 and quarter = $2',
        values: [tenantId, new Date(from)],
      });
      await count(client, { tenantId, from, to: from + QUARTER_MS });
      return true;
    };
    try {
      if (await store.transact(renew)) renewed += 1;
    } catch (error) {
      if (errors.push(error) >= FAILURES_MAX) throw errors[0];
    }
  }
  return renewed;
}

const KEYS: Keys = { quarter: true, domain: true, broadcast: true, email: false };
const SOURCES = [
  ...countRowsSql({
    tenant: '$1::uuid',
    ids: { first: '$2::uuid', past: '$3::uuid' },
    keys: KEYS,
    counts: COUNTS,
    sentWhere: [],
    receivedWhere: [],
    emailsMax: null,
  }),
  countQuartersSql({
    table: 'metric_removed',
    keys: KEYS,
    counts: COUNTS,
    where: [
      'q.tenant_id = $1::uuid',
      'q.quarter >= $4::timestamptz',
      'q.quarter < $5::timestamptz',
    ],
  }),
];

const COUNT = `
  insert into metric_quarter (tenant_id, quarter, domain, broadcast_id, ${COUNTS.join(', ')})
  select $1::uuid, to_timestamp(s.quarter * ${QUARTER_MS / 1_000}), s.domain, s.broadcast_id,
    ${COUNTS.map((name) => `sum(s.${name})`).join(', ')}
  from (${SOURCES.join(' union all ')}) s group by s.quarter, s.domain, s.broadcast_id`;

/** Milliseconds since 1970, both at a quarter; `to` is exclusive. */
async function count(
  client: PoolClient,
  { tenantId, from, to }: { readonly tenantId: string; readonly from: number; readonly to: number },
): Promise<void> {
  await client.query({
    text: COUNT,
    values: [tenantId, firstIdAt(from), firstIdAt(to), new Date(from), new Date(to)],
  });
}
