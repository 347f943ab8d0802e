// Makes of what happened (timeline/outbox.ts) an event for every enabled endpoint that wants to hear of it. The outbox row
// goes in the transaction that writes the events, under the same id: so after a crash nothing is missing and nothing comes
// twice. Several processes may do so at once; tenants take turns.
import type { PoolClient } from 'pg';
import type { Logger } from '../log.ts';
import { LOWEST_ID } from '../store/id.ts';
import { fromJson } from '../store/json.ts';
import type { Store } from '../store/orm.ts';
import { writePayloads, type Happened } from './payload.ts';

export interface EndpointKey {
  readonly tenantId: string;
  readonly webhookId: string;
}

export interface FannedOut {
  /** Whether there may be more. */
  readonly hasMore: boolean;
  /** Which have something new. */
  readonly endpoints: readonly EndpointKey[];
}

export interface FanOut {
  turn(): Promise<FannedOut>;
}

/** Rows of the outbox in one transaction; each may have a long list of recipients. */
const BATCH = 200;
/** Tenants in one turn. */
const TENANTS_MAX = 50;
/** Of events for all endpoints that one transaction writes: it must end well before a statement is given up. */
const WRITTEN_MAX_BYTES = 8 * 1024 * 1024;
/** What a row costs beside its payload. */
const ROW_BYTES = 1_024;

const NOTHING: FannedOut = { hasMore: false, endpoints: [] };

export function createFanOut(d: {
  readonly store: Store;
  readonly log: Logger;
  readonly now: () => Date;
}): FanOut {
  /** The next turn begins behind this tenant. */
  let behind = LOWEST_ID;
  return {
    async turn() {
      // Costs one look at an index while nothing happens.
      const { rowCount } = await d.store.pool.query({
        name: 'outbox-has-rows',
        text: 'select 1 from outbox order by tenant_id, id limit 1',
      });
      if (rowCount === 0) return NOTHING;
      return d.store.transact(async (client) => {
        const { happened, last } = await take(client, behind);
        const isRound = behind === LOWEST_ID && last === null;
        behind = last ?? LOWEST_ID;
        if (happened.length === 0) return { ...NOTHING, hasMore: !isRound };
        const payloads = await writePayloads(client, happened);
        const told = happened.flatMap((one, index) => {
          const payload = payloads[index] ?? null;
          // It must not stop what others are to be told.
          if (payload === null) d.log.error({ event: one.id, type: one.type }, 'cannot be told');
          return payload === null ? [] : [{ ...one, payload }];
        });
        const afforded = await afford(client, told);
        const endpoints = await store(client, { told: afforded, now: d.now() });
        const left = new Set(told.filter((one) => !afforded.includes(one)).map(({ id }) => id));
        await remove(
          client,
          happened.filter(({ id }) => !left.has(id)),
        );
        return { hasMore: true, endpoints };
      });
    },
  };
}

interface OutboxRow {
  readonly tenant_id: string;
  readonly id: string;
  readonly type: string;
  readonly subject_id: string;
  readonly detail: Readonly<Record<string, unknown>> | string;
  readonly at_ms: number;
}

/** Of each of the next tenants the first, then of each the second. `last`: null when there is no tenant behind these. */
async function take(
  client: PoolClient,
  behind: string,
): Promise<{ readonly happened: readonly Happened[]; readonly last: string | null }> {
  const { rows } = await client.query<
    { readonly last: string | null } & (OutboxRow | { readonly id: null })
  >({
    name: 'take-outbox',
    // What others take at the same time is passed over, so more are chosen than are taken.
    text: `with recursive tenants as (
        (select tenant_id, 1 as number from outbox
          where tenant_id > $1 order by tenant_id, id limit 1)
        union all
        select n.tenant_id, t.number + 1 from tenants t cross join lateral (
          select tenant_id from outbox
          where tenant_id > t.tenant_id order by tenant_id, id limit 1) n
        where t.number < ${TENANTS_MAX}
      ), chosen as (
        select t.tenant_id, q.id, row_number() over (
          partition by t.tenant_id order by q.id) as place
        from tenants t cross join lateral (
          select id from outbox where tenant_id = t.tenant_id
          order by tenant_id, id limit ${2 * BATCH}) q
      ), taken as (
        select o.tenant_id, o.id, o.type, o.subject_id, o.detail, o.at
        from chosen c join outbox o on o.tenant_id = c.tenant_id and o.id = c.id
        order by c.place, o.id limit ${BATCH} for update of o skip locked
      )
      select l.last, t.tenant_id, t.id, t.type, t.subject_id, t.detail,
        (extract(epoch from t.at) * 1000)::float8 as at_ms
      from (select (select tenant_id from tenants where number = ${TENANTS_MAX}) as last) l
      left join taken t on true order by t.id`,
    values: [behind],
  });
  return {
    last: rows[0]?.last ?? null,
    happened: rows.flatMap((row) =>
      row.id === null
        ? []
        : [
            {
              tenantId: row.tenant_id,
              id: row.id,
              type: row.type,
              subjectId: row.subject_id,
              detail: fromJson<Readonly<Record<string, unknown>>>(row.detail),
              at: new Date(row.at_ms),
            },
          ],
    ),
  };
}

type Told = Happened & { readonly payload: string };

/**
 * As many as may be written at once, one at least: of each tenant the first, then of each the second, and what costs least
 * before what costs most. So a tenant with large events and many endpoints stops nobody.
 */
async function afford(client: PoolClient, told: readonly Told[]): Promise<readonly Told[]> {
  const { rows } = await client.query<{ tenant_id: string; count: number }>({
    name: 'count-endpoints',
    text: `select tenant_id, count(*)::int as count from webhook
      where tenant_id = any ($1::uuid[]) and status = 'enabled' group by tenant_id`,
    values: [[...new Set(told.map(({ tenantId }) => tenantId))]],
  });
  const endpoints = new Map(rows.map((row) => [row.tenant_id, row.count]));
  const places = new Map<string, number>();
  const ranked = told.map((one) => {
    const place = places.get(one.tenantId) ?? 0;
    places.set(one.tenantId, place + 1);
    const bytes = Buffer.byteLength(one.payload) + ROW_BYTES;
    return { one, place, cost: bytes * (endpoints.get(one.tenantId) ?? 0) };
  });
  let left = WRITTEN_MAX_BYTES;
  return ranked
    .toSorted((a, b) => a.place - b.place || a.cost - b.cost)
    .filter(({ cost }, index) => {
      left -= cost;
      return left >= 0 || index === 0;
    })
    .map(({ one }) => one);
}

async function store(
  client: PoolClient,
  d: {
    readonly told: readonly Told[];
    readonly now: Date;
  },
): Promise<readonly EndpointKey[]> {
  const { told } = d;
  const { rows } = await client.query<{ tenant_id: string; webhook_id: string }>({
    name: 'insert-webhook-events',
    text: `with made as (
        insert into webhook_event (tenant_id, webhook_id, id, type, payload, status,
          next_attempt_at, created_at)
        select r.tenant_id, w.id, r.id, r.type, r.payload, 'pending', $6, r.at
        from unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[], $5::timestamptz[])
          as r (tenant_id, id, type, payload, at)
        join webhook w on w.tenant_id = r.tenant_id and w.status = 'enabled'
          and r.type = any (w.events)
        on conflict do nothing
        returning tenant_id, webhook_id
      )
      select distinct tenant_id, webhook_id from made`,
    values: [
      told.map(({ tenantId }) => tenantId),
      told.map(({ id }) => id),
      told.map(({ type }) => type),
      told.map(({ payload }) => payload),
      told.map(({ at }) => at),
      d.now,
    ],
  });
  return rows.map((row) => ({ tenantId: row.tenant_id, webhookId: row.webhook_id }));
}

async function remove(client: PoolClient, happened: readonly Happened[]): Promise<void> {
  await client.query({
    name: 'delete-outbox',
    text: `delete from outbox o using unnest($1::uuid[], $2::uuid[]) as r (tenant_id, id)
      where o.tenant_id = r.tenant_id and o.id = r.id`,
    values: [happened.map(({ tenantId }) => tenantId), happened.map(({ id }) => id)],
  });
}
