// Which tables and columns there are, asked of the database and so true for every version of the schema; and the session
// in which rows are copied. pg_dump does not come with the embedded Postgres, so this does the part of it that we need.
import { Client, type ClientBase } from 'pg';

/**
 * What a machine knows of itself, of its workers and of the hosts that it spoke to. A backup carries none of it: a
 * restored appliance has processes, addresses and connections of its own. Agenda's jobs follow from rows and are left out
 * by their name, counters of the rate limit by being unlogged.
 */
const NOT_CARRIED: ReadonlySet<string> = new Set([
  'migration', // in the manifest
  'worker',
  'appliance_process',
  'appliance_fact',
  'lane',
  'lane_destination',
  'lane_share',
  'egress',
  'acme_challenge',
  'finding',
]);
const AGENDA = /^agenda_/;

export interface Table {
  readonly name: string;
  /** In their order; no generated ones. */
  readonly columns: readonly string[];
}

/** The tables of the current schema that a backup carries; who is referred to comes before who refers. */
export async function readTables(client: ClientBase): Promise<readonly Table[]> {
  const { rows } = await client.query<{ name: string; columns: string[]; parents: string[] }>(
    `select c.relname as name,
       array(select a.attname::text from pg_attribute a
         where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped and a.attgenerated = ''
         order by a.attnum) as columns,
       array(select distinct p.relname::text from pg_constraint f join pg_class p on p.oid = f.confrelid
         where f.conrelid = c.oid and f.contype = 'f' and p.oid <> c.oid) as parents
     from pg_class c
     where c.relnamespace = current_schema()::regnamespace and c.relkind in ('r', 'p')
       and c.relpersistence = 'p' and not c.relispartition
     order by c.relname`,
  );
  const left = rows.filter(({ name }) => !NOT_CARRIED.has(name) && !AGENDA.test(name));
  const sorted: Table[] = [];
  const known = new Set<string>();
  while (sorted.length < left.length) {
    const ready = left.filter(
      ({ name, parents }) =>
        !known.has(name) && parents.every((one) => known.has(one) || NOT_CARRIED.has(one)),
    );
    if (ready.length === 0) throw new Error('tables refer to each other in a circle');
    for (const { name, columns } of ready) {
      known.add(name);
      sorted.push({ name, columns });
    }
  }
  return sorted;
}

/** The migrations that the database has, in their order; empty: it was never one of ours. */
export async function readSchema(client: ClientBase): Promise<readonly string[]> {
  const { rows: found } = await client.query<{ found: boolean }>(
    `select to_regclass('migration') is not null as found`,
  );
  if (found[0]?.found !== true) return [];
  const { rows } = await client.query<{ name: string }>('select name from migration order by id');
  return rows.map(({ name }) => name);
}

/** Columns that name blobs; the rule is that of store/blob.ts. */
export const isBlobColumn = (column: string): boolean => column.endsWith('blob_key');

/** A name or several as SQL. */
export const quote = (name: string): string => `"${name.replaceAll('"', '""')}"`;
export const quoteAll = (names: readonly string[]): string => names.map(quote).join(', ');

/** Whether a table of ours has a row. */
export async function findRows(client: ClientBase): Promise<string | null> {
  for (const { name } of await readTables(client)) {
    const { rowCount } = await client.query(`select from ${quote(name)} limit 1`);
    if (rowCount !== 0) return name;
  }
  return null;
}

/**
 * A connection on which a copy may take as long as it takes, whatever limits the server has for others, and on which values
 * have one spelling.
 */
export async function connect(url: string): Promise<Client> {
  const client = new Client({
    connectionString: url,
    keepAlive: true,
    application_name: 'mailstead backup',
  });
  // Without a listener a connection that Postgres closes ends the process; the statement under way fails anyway.
  client.on('error', () => undefined);
  await client.connect();
  await client.query(
    `set statement_timeout = 0; set idle_in_transaction_session_timeout = 0;
     set client_encoding = 'UTF8'; set datestyle = 'ISO'; set intervalstyle = 'postgres';
     set timezone = 'UTC'; set extra_float_digits = 3; set bytea_output = 'hex'`,
  );
  return client;
}
