// Postgres: does it answer, how fast, has it connections left, does vacuum keep up, and is what it commits on the disk.
import type { Pool } from 'pg';
import { bad, ok, type Finding } from './finding.ts';
import type { Surroundings } from './surroundings.ts';

const ROUNDS = 5;
const LATENCY_WARN_MS = 20;
const LATENCY_ERROR_MS = 250;
const CONNECTIONS_WARN = 0.8;
const CONNECTIONS_ERROR = 0.95;
/** Tables that most statements of delivery touch. */
const HOT_TABLES = [
  'delivery',
  'email',
  'email_content',
  'attempt',
  'timeline',
  'outbox',
  'webhook_event',
  'received_email',
] as const;
const DEAD_MIN = 50_000;
/** A queue that has just run empty has few live rows; autovacuum comes within a minute or two. */
const LIVE_MIN = 500_000;
const DEAD_WARN = 0.3;
const DEAD_ERROR = 2;
/** Of 2^31; Postgres begins to complain at 40 million before the end, and stops at 3. */
const AGE_WARN = 1_000_000_000;
const AGE_ERROR = 1_700_000_000;
const SNAPSHOT_WARN_S = 3_600;
const VERSION_MIN = 15;

export interface DatabaseFacts {
  readonly latencyMs: number;
  readonly version: string;
  readonly major: number;
  readonly used: number;
  readonly max: number;
  readonly settings: Readonly<Record<string, string>>;
  readonly age: number;
  /** Of the oldest open transaction. */
  readonly oldestSnapshotS: number;
  readonly tables: readonly TableFacts[];
}

interface TableFacts {
  readonly name: string;
  readonly live: number;
  readonly dead: number;
  /** ISO 8601; null: never. */
  readonly vacuumedAt: string | null;
}

export async function checkDatabase(s: Surroundings, pool: Pool): Promise<readonly Finding[]> {
  return judgeDatabase(await readFacts(s, pool));
}

const SETTINGS = ['fsync', 'synchronous_commit', 'full_page_writes', 'autovacuum'] as const;

async function readFacts(s: Surroundings, pool: Pool): Promise<DatabaseFacts> {
  const client = await pool.connect();
  try {
    const times: number[] = [];
    for (let round = 0; round < ROUNDS; round += 1) {
      const startedAt = s.ticks();
      await client.query('select 1');
      times.push(s.ticks() - startedAt);
    }
    const { rows } = await client.query<{
      version: string;
      major: number;
      used: number;
      max: number;
      age: number;
      snapshot_s: number;
    }>(
      `select current_setting('server_version') as version,
        current_setting('server_version_num')::integer / 10000 as major,
        (select count(*)::integer from pg_stat_activity where backend_type = 'client backend') as used,
        current_setting('max_connections')::integer as max,
        (select age(datfrozenxid)::integer from pg_database where datname = current_database()) as age,
        coalesce((select extract(epoch from max(clock_timestamp() - xact_start))::float8
          from pg_stat_activity where xact_start is not null and datname = current_database()
            and backend_type = 'client backend' and pid <> pg_backend_pid()), 0) as snapshot_s`,
    );
    const { rows: settings } = await client.query<{ name: string; setting: string }>(
      'select name, setting from pg_settings where name = any ($1)',
      [SETTINGS],
    );
    const { rows: tables } = await client.query<{
      name: string;
      live: number;
      dead: number;
      vacuumed_ms: string | null;
    }>(
      `select relname as name, n_live_tup::float8 as live, n_dead_tup::float8 as dead,
        (extract(epoch from greatest(last_vacuum, last_autovacuum)) * 1000)::bigint::text as vacuumed_ms
       from pg_stat_user_tables where schemaname = any (current_schemas(false)) and relname = any ($1)`,
      [HOT_TABLES],
    );
    const row = rows[0]!;
    return {
      ...row,
      latencyMs: times.toSorted((a, b) => a - b)[Math.floor(ROUNDS / 2)]!,
      oldestSnapshotS: row.snapshot_s,
      settings: Object.fromEntries(settings.map(({ name, setting }) => [name, setting])),
      tables: tables.map(({ name, live, dead, vacuumed_ms }) => ({
        name,
        live,
        dead,
        vacuumedAt: vacuumed_ms === null ? null : new Date(Number(vacuumed_ms)).toISOString(),
      })),
    };
  } finally {
    client.release();
  }
}

export function judgeDatabase(facts: DatabaseFacts): readonly Finding[] {
  return [
    judgeLatency(facts),
    judgeConnections(facts),
    judgeVersion(facts),
    judgeDurability(facts),
    judgeAge(facts),
    ...judgeTables(facts),
  ];
}

function judgeLatency({ latencyMs }: DatabaseFacts): Finding {
  const about = ['database', 'latency'] as const;
  const ms = Math.round(latencyMs * 10) / 10;
  const detail = { latency_ms: ms };
  if (latencyMs < LATENCY_WARN_MS) {
    return ok(about, `The database answers within ${ms} ms.`, detail);
  }
  return bad(latencyMs < LATENCY_ERROR_MS ? 'warning' : 'error', about, {
    message: `The database needs ${ms} ms for the simplest statement; every e-mail takes several.`,
    advice:
      'Move the database nearer (the same machine or data centre), or give it more processor time.',
    detail,
  });
}

function judgeConnections({ used, max }: DatabaseFacts): Finding {
  const about = ['database', 'connections'] as const;
  const detail = { used, max };
  const message = `${used} of ${max} connections of the database are in use.`;
  if (used < max * CONNECTIONS_WARN) return ok(about, message, detail);
  return bad(used < max * CONNECTIONS_ERROR ? 'warning' : 'error', about, {
    message,
    advice: 'Raise max_connections, run fewer processes, or put a pooler in session mode between.',
    detail,
  });
}

function judgeVersion({ version, major }: DatabaseFacts): Finding {
  const about = ['database', 'version'] as const;
  if (major >= VERSION_MIN) return ok(about, `The database is PostgreSQL ${version}.`, { version });
  return bad('warning', about, {
    message: `The database is PostgreSQL ${version}; this release is tested from ${VERSION_MIN} on.`,
    advice: `Upgrade PostgreSQL to ${VERSION_MIN} or newer.`,
    detail: { version },
  });
}

function judgeDurability({ settings }: DatabaseFacts): Finding {
  const about = ['database', 'durability'] as const;
  const off = ['fsync', 'full_page_writes', 'synchronous_commit'].filter(
    (name) => settings[name] === 'off',
  );
  if (off.length === 0) return ok(about, 'What the database commits is on its disk.', settings);
  return bad('error', about, {
    message: `${off.join(' and ')} ${off.length === 1 ? 'is' : 'are'} off in the database, so mail that was accepted can be lost in a power cut.`,
    advice: `Set ${off.join(', ')} to on in postgresql.conf and reload it.`,
    detail: settings,
  });
}

function judgeAge({ age, oldestSnapshotS, settings }: DatabaseFacts): Finding {
  const about = ['database', 'vacuum'] as const;
  const detail = { age, oldest_transaction_s: Math.round(oldestSnapshotS) };
  if (settings['autovacuum'] === 'off') {
    return bad('error', about, {
      message: 'autovacuum is off in the database, so its tables only grow and claims get slower.',
      advice: 'Set autovacuum to on in postgresql.conf and reload it.',
      detail,
    });
  }
  if (age > AGE_WARN) {
    return bad(age > AGE_ERROR ? 'error' : 'warning', about, {
      message: `The oldest transaction id of the database is ${age} back; at 2,147 million it stops writing.`,
      advice: 'Run VACUUM (FREEZE) on its oldest tables, and end what keeps autovacuum from it.',
      detail,
    });
  }
  if (oldestSnapshotS > SNAPSHOT_WARN_S) {
    return bad('warning', about, {
      message: `A transaction has been open for ${Math.round(oldestSnapshotS / 60)} minutes; until it ends nothing can be vacuumed and claims get slower.`,
      advice: 'Find it in pg_stat_activity (a pg_dump, a forgotten session) and end it.',
      detail,
    });
  }
  return ok(about, 'Vacuum keeps up with the transaction ids.', detail);
}

function judgeTables({ tables }: DatabaseFacts): readonly Finding[] {
  return tables.map(({ name, live, dead, vacuumedAt }) => {
    const about = ['database_table', name] as const;
    const ratio = dead / Math.max(live, LIVE_MIN);
    const detail = { live, dead, vacuumed_at: vacuumedAt };
    if (dead < DEAD_MIN || ratio < DEAD_WARN) {
      return ok(about, `${dead} of the rows of \`${name}\` are dead.`, detail);
    }
    return bad(ratio < DEAD_ERROR ? 'warning' : 'error', about, {
      message: `\`${name}\` has ${dead} dead rows beside ${live} live ones; it was vacuumed ${vacuumedAt === null ? 'never' : `at ${vacuumedAt}`}.`,
      advice: `Run VACUUM ${name}, and look for a long transaction or too few autovacuum workers.`,
      detail,
    });
  });
}
