// Reads the rows of domains, and decides under a lock whose a name is. They are written by changes.ts.
import type { Pool, PoolClient } from 'pg';
import { checkPage, refuseCursor, toPage, type PageRequest } from '../access/page.ts';
import type { DomainStatus, InboundDmarc, RecordChecks, TlsMode } from '../store/sending-domain.ts';
import { isUuid } from '../store/id.ts';
import type { DomainSettings, PublicKey } from './records.ts';

/** A name may be a domain of many tenants until one of them has verified it. */
const NAMESAKES_MAX = 20;

export type Queryable = Pool | PoolClient;

export interface DomainRow extends DomainSettings {
  readonly tenantId: string;
  readonly id: string;
  readonly status: DomainStatus;
  readonly region: string;
  readonly tls: TlsMode;
  readonly inboundDmarc: InboundDmarc;
  readonly recordChecks: RecordChecks;
  readonly verifyingSince: Date | null;
  readonly checkCount: number;
  /** When the look began that is known here. */
  readonly checkedAt: Date | null;
  readonly createdAt: Date;
  readonly keys: readonly PublicKey[];
}

/** The pool reads times as text (MikroORM sees to that), so they travel as milliseconds. */
export const msOf = (column: string): string =>
  `(extract(epoch from ${column}) * 1000)::bigint::text`;
export const toDate = (ms: string | null): Date | null =>
  ms === null ? null : new Date(Number(ms));

type RawRow = Omit<DomainRow, 'verifyingSince' | 'checkedAt' | 'createdAt'> & {
  readonly verifyingMs: string | null;
  readonly checkedMs: string | null;
  readonly createdMs: string;
};

const toRow = ({ verifyingMs, checkedMs, createdMs, ...row }: RawRow): DomainRow => ({
  ...row,
  verifyingSince: toDate(verifyingMs),
  checkedAt: toDate(checkedMs),
  createdAt: new Date(Number(createdMs)),
});

const COLUMNS = `d.tenant_id as "tenantId", d.id, d.name, d.status, d.region, d.tls, d.sending, d.receiving,
  d.return_path_label as "returnPathLabel", d.tracking_subdomain as "trackingSubdomain",
  d.inbound_dmarc as "inboundDmarc", d.mta_sts as "mtaSts", d.open_tracking as "openTracking", d.click_tracking as "clickTracking",
  d.record_checks as "recordChecks", d.check_count as "checkCount",
  ${msOf('d.verifying_since')} as "verifyingMs", ${msOf('d.checked_at')} as "checkedMs",
  ${msOf('d.created_at')} as "createdMs",
  (select coalesce(jsonb_agg(jsonb_build_object('selector', k.selector, 'algorithm', k.algorithm,
      'record', k.public_record) order by k.algorithm desc), '[]')
    from dkim_key k where k.tenant_id = d.tenant_id and k.domain_id = d.id) as keys`;

/** The tenant's domain, or null: missing and foreign are the same. `lock` keeps others from changing it. */
export async function readDomain(
  db: Queryable,
  tenantId: string,
  id: string,
  lock: 'lock' | null = null,
): Promise<DomainRow | null> {
  const { rows } = await db.query<RawRow>(
    `select ${COLUMNS} from sending_domain d where d.tenant_id = $1 and d.id = $2
     ${lock === null ? '' : 'for update of d'}`,
    [tenantId, id],
  );
  return rows[0] === undefined ? null : toRow(rows[0]);
}

/** By id or by name, of all tenants when none is named; at most `NAMESAKES_MAX`, the oldest first. */
export async function readNamed(
  db: Queryable,
  idOrName: string,
  tenantId: string | null = null,
): Promise<readonly DomainRow[]> {
  const { rows } = await db.query<RawRow>(
    `select ${COLUMNS} from sending_domain d where d.${isUuid(idOrName) ? 'id' : 'name'} = $1
       and ($2::uuid is null or d.tenant_id = $2)
     order by d.id limit ${NAMESAKES_MAX}`,
    [idOrName.toLowerCase(), tenantId],
  );
  return rows.map(toRow);
}

/** Newest first; of all tenants when none is named. Throws a Refusal for a bad page. */
export async function readPage(
  db: Queryable,
  tenantId: string | null,
  page: PageRequest,
): Promise<{ readonly items: readonly DomainRow[]; readonly hasMore: boolean }> {
  const cursor = checkPage(page);
  const at = cursor.after ?? cursor.before;
  if (at !== null && (await readNamed(db, at, tenantId)).length === 0) refuseCursor(cursor);
  const { rows } = await db.query<RawRow>(
    `select ${COLUMNS} from sending_domain d
     where ($1::uuid is null or d.tenant_id = $1)
       and ($2::uuid is null or d.id < $2) and ($3::uuid is null or d.id > $3)
     order by d.id ${cursor.before === null ? 'desc' : 'asc'} limit $4`,
    [tenantId, cursor.after, cursor.before, cursor.limit + 1],
  );
  return toPage(rows.map(toRow), cursor);
}

/** Any constant that no other advisory lock of two keys has. */
const NAME_LOCK = 724_517;

/** Until the transaction ends, nobody else decides whose this name is. Take it before any row lock. */
export async function lockName(client: PoolClient, name: string): Promise<void> {
  await client.query('select pg_advisory_xact_lock($1, hashtext($2))', [NAME_LOCK, name]);
}

/** The statuses in which a tenant holds a name; the same as `holdsName` of status.ts. */
const HOLDING = ['verified', 'partially_verified', 'partially_failed'] as const;

/** Another tenant holds the name: something of it is verified there, or it was given to them by a claim. */
export async function isTaken(db: Queryable, tenantId: string, name: string): Promise<boolean> {
  const { rows } = await db.query(
    `select 1 from sending_domain where name = $2 and tenant_id <> $1 and status = any ($3)
     union all
     select 1 from domain_claim where name = $2 and tenant_id <> $1 and status = 'completed'
     limit 1`,
    [tenantId, name, HOLDING],
  );
  return rows.length > 0;
}

/** Who holds the name beside this tenant. */
export async function holdersOf(
  db: Queryable,
  tenantId: string,
  name: string,
): Promise<readonly { readonly tenantId: string; readonly id: string }[]> {
  const { rows } = await db.query<{ tenantId: string; id: string }>(
    `select d.tenant_id as "tenantId", d.id from sending_domain d
     where d.name = $2 and d.tenant_id <> $1 and (d.status = any ($3) or exists (
       select 1 from domain_claim c
       where c.tenant_id = d.tenant_id and c.domain_id = d.id and c.status = 'completed'))`,
    [tenantId, name, HOLDING],
  );
  return rows;
}
