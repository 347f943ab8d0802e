// An upgrade tried out on a copy of the database: what the pending migrations do there, how long each takes, and whether the
// result has the shape that a new database has. The copy is a database beside the real one, and is dropped afterwards.
//
// Postgres copies a database by itself only while nobody is connected to it; else rows come through a snapshot, as a backup
// takes them.
import { randomBytes } from 'node:crypto';
import { PassThrough } from 'node:stream';
import type { ClientBase } from 'pg';
import type { Logger } from '../log.ts';
import { hasCode } from '../store/files.ts';
import { openStore, SCHEMA } from '../store/orm.ts';
import { inSnapshot } from './backup.ts';
import { connect, quote, quoteAll, readSchema, readTables } from './catalog.ts';
import { BackupFailed } from './container.ts';
import { copyIn, copyOut } from './copy.ts';

const PREFIX = 'mailstead_rehearsal_';
const IN_USE = '55006';
const NOT_ALLOWED = '42501';
const CONNECTIONS = 2;

export interface Rehearsal {
  /** How the copy was made. */
  readonly copiedBy: 'database' | 'rows';
  readonly copyMs: number;
  readonly rows: number | null;
  readonly migrations: readonly { readonly name: string; readonly ms: number }[];
  /** What the result has or lacks compared to a new database; empty: it is right. */
  readonly differences: readonly string[];
}

export interface RehearseOptions {
  readonly databaseUrl: string;
  readonly log: Logger;
  readonly onStep?: (words: string) => void;
}

/** Changes nothing in the database. Throws BackupFailed where no copy can be made; a migration that fails throws as it came. */
export async function rehearseMigrations(options: RehearseOptions): Promise<Rehearsal> {
  const { databaseUrl, log } = options;
  const say = options.onStep ?? (() => undefined);
  const admin = await connect(databaseUrl);
  const made: string[] = [];
  try {
    await dropLeftovers(admin);
    const schema = await readSchema(admin);
    if (schema.length === 0) throw new BackupFailed('The database has no tables of Mailstead yet.');
    say('Copying the database');
    const begunAt = performance.now();
    const name = PREFIX + randomBytes(6).toString('hex');
    const copy = withDatabase(databaseUrl, name);
    const isTemplate = await createCopy(admin, name);
    made.push(name);
    const rows = isTemplate ? null : await copyRows(options, { copy, schema });
    const copyMs = Math.round(performance.now() - begunAt);
    const migrations: { name: string; ms: number }[] = [];
    for (const next of SCHEMA.slice(schema.length)) {
      say(`Running ${next}`);
      const at = performance.now();
      await migrate({ url: copy, log, to: next });
      migrations.push({ name: next, ms: Math.round(performance.now() - at) });
    }
    say('Comparing the result with a new database');
    const fresh = PREFIX + randomBytes(6).toString('hex');
    await admin.query(`create database ${quote(fresh)} template template0`);
    made.push(fresh);
    await migrate({ url: withDatabase(databaseUrl, fresh), log, to: SCHEMA.at(-1)! });
    const [is, wanted] = [await shapeOf(copy), await shapeOf(withDatabase(databaseUrl, fresh))];
    const differences = [
      ...[...wanted].filter((one) => !is.has(one)).map((one) => `missing: ${one}`),
      ...[...is].filter((one) => !wanted.has(one)).map((one) => `not expected: ${one}`),
    ];
    return { copiedBy: isTemplate ? 'database' : 'rows', copyMs, rows, migrations, differences };
  } finally {
    for (const name of made) {
      await admin.query(`drop database if exists ${quote(name)} with (force)`);
    }
    await admin.end().catch(() => undefined);
  }
}

/** Of rehearsals that were killed; nobody is connected to those. */
async function dropLeftovers(admin: ClientBase): Promise<void> {
  const { rows } = await admin.query<{ name: string }>(
    `select datname as name from pg_database d where datname like $1
     and pg_has_role(datdba, 'usage') and not exists (select from pg_stat_activity a where a.datid = d.oid)`,
    [`${PREFIX.replaceAll('_', '\\_')}%`],
  );
  for (const { name } of rows) await admin.query(`drop database if exists ${quote(name)}`);
}

/** Whether it is a copy of everything; else it is empty, since others are connected. */
async function createCopy(admin: ClientBase, name: string): Promise<boolean> {
  const { rows } = await admin.query<{ name: string; others: number }>(
    `select current_database() as name, (select count(*) from pg_stat_activity
       where datname = current_database() and pid <> pg_backend_pid())::integer as others`,
  );
  const { name: source, others } = rows[0]!;
  try {
    if (others === 0) {
      try {
        await admin.query(`create database ${quote(name)} template ${quote(source)}`);
        return true;
      } catch (error) {
        if (!hasCode(error, IN_USE)) throw error;
      }
    }
    await admin.query(`create database ${quote(name)} template template0`);
    return false;
  } catch (error) {
    if (!hasCode(error, NOT_ALLOWED)) throw error;
    throw new BackupFailed(
      'The database user may not make databases, which a rehearsal needs: `alter role … createdb`, or restore a backup ' +
        'elsewhere and migrate that.',
      { cause: error },
    );
  }
}

async function copyRows(
  { databaseUrl, log }: RehearseOptions,
  d: { readonly copy: string; readonly schema: readonly string[] },
): Promise<number> {
  await migrate({ url: d.copy, log, to: d.schema.at(-1)! });
  const target = await connect(d.copy);
  let count = 0;
  try {
    await inSnapshot(databaseUrl, async (source) => {
      for (const { name, columns } of await readTables(source)) {
        const between = new PassThrough({ objectMode: true, highWaterMark: 1 });
        const reading = copyOut(
          source,
          `select ${quoteAll(columns)} from ${quote(name)}`,
          (part) =>
            new Promise((taken) => {
              if (between.write(part)) taken();
              else between.once('drain', taken);
            }),
        ).then(
          () => between.end(),
          (error: unknown) => between.destroy(error as Error),
        );
        const { rows } = await copyIn(target, `${quote(name)} (${quoteAll(columns)})`, between);
        await reading;
        count += rows;
      }
    });
  } finally {
    await target.end().catch(() => undefined);
  }
  return count;
}

async function migrate(d: {
  readonly url: string;
  readonly log: Logger;
  readonly to: string;
}): Promise<void> {
  const store = await openStore({
    url: d.url,
    log: d.log.child({}, { level: 'error' }), // what is said to whoever starts on a real one
    connectionsMax: CONNECTIONS,
    migrate: true,
    migrateTo: d.to,
  });
  await store.close();
}

/** Columns, constraints and indexes of our tables, a line each. */
async function shapeOf(url: string): Promise<ReadonlySet<string>> {
  const client = await connect(url);
  try {
    const { rows } = await client.query<{ line: string }>(
      `with ours as (
         select oid, relname from pg_class
         where relnamespace = current_schema()::regnamespace and relkind in ('r', 'p') and relname !~ '^agenda_'
       )
       select format('%s.%s %s%s%s', relname, a.attname, format_type(a.atttypid, a.atttypmod),
         case when a.attnotnull then ' not null' else '' end,
         coalesce(' default ' || pg_get_expr(d.adbin, d.adrelid), '')) as line
       from ours join pg_attribute a on a.attrelid = ours.oid and a.attnum > 0 and not a.attisdropped
       left join pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
       union all
       select format('%s %s %s', relname, c.conname, pg_get_constraintdef(c.oid))
       from ours join pg_constraint c on c.conrelid = ours.oid where c.contype <> 'n'
       union all
       select pg_get_indexdef(i.indexrelid) from ours join pg_index i on i.indrelid = ours.oid`,
    );
    return new Set(rows.map(({ line }) => line));
  } finally {
    await client.end();
  }
}

/** The same server, another database. */
function withDatabase(url: string, name: string): string {
  const changed = new URL(url);
  changed.pathname = `/${name}`;
  return changed.toString();
}
