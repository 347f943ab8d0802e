// Endpoints that want to hear of something, without anybody behind them, and what they are to be told.
import { fromJson } from '../../src/store/json.ts';
import type { Store } from '../../src/store/orm.ts';

export async function listen(
  { pool }: Pick<Store, 'pool'>,
  tenantId: string,
  events: readonly string[],
  { status = 'enabled', count = 1 } = {},
): Promise<void> {
  await pool.query(
    `insert into webhook (tenant_id, id, endpoint, events, status, secret_sealed, created_at, updated_at)
     select $1, gen_random_uuid(), 'https://hooks.test/', $2, $3, '\\x00', now(), now()
     from generate_series(1, $4::integer)`,
    [tenantId, events, status, count],
  );
}

export interface Told {
  readonly id: string;
  readonly tenant_id: string;
  readonly type: string;
  readonly subject_id: string;
  readonly detail: Readonly<Record<string, unknown>>;
}

/** In the order of their ids. */
export async function told(
  { pool }: Pick<Store, 'pool'>,
  subjectId?: string,
): Promise<readonly Told[]> {
  const { rows } = await pool.query<Told>(
    `select id, tenant_id, type, subject_id, detail from outbox
     where $1::uuid is null or subject_id = $1 order by id`,
    [subjectId ?? null],
  );
  return rows.map((row) => ({ ...row, detail: fromJson<Told['detail']>(row.detail) }));
}
