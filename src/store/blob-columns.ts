// Which columns name blobs: read from the database, so that no table can be forgotten (blob.ts).
import type { Pool } from 'pg';

export interface BlobColumn {
  /** Both quoted for SQL. */
  readonly table: string;
  readonly column: string;
}

export async function findBlobColumns(db: Pick<Pool, 'query'>): Promise<readonly BlobColumn[]> {
  const { rows } = await db.query<{ table: string; column: string }>(
    `select quote_ident(table_name) as table, quote_ident(column_name) as column
     from information_schema.columns
     where table_schema = current_schema() and column_name like '%blob\\_key'
     order by 1, 2`,
  );
  return rows;
}
