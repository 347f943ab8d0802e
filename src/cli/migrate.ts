// `migrate`: brings the database's schema to this version, or says what that would do.
import { existsSync } from 'node:fs';
import { join } from 'node:path';
import { rehearseMigrations } from '../backup/rehearse.ts';
import { openStore, readSchemaGap, refuseNewerSchema } from '../store/orm.ts';
import { explained } from './backup.ts';
import { CommandFailed, type AddCommands, type Tools } from './command.ts';
import { withExample } from './options.ts';

const CONNECTIONS_MAX = 2;

export interface MigrateParts {
  /** What is thrown in place of an error of the database at `url`. */
  readonly explainDatabase: (error: unknown, url: string) => unknown;
}

export const migrateCommand =
  (parts: MigrateParts): AddCommands =>
  (program, run) => {
    withExample(
      program
        .command('migrate')
        .description("Bring the database's schema to this version, as every start does")
        .option(
          '--check',
          'only say which migrations would run; exit code 1 when the schema is newer',
        )
        .option('--rehearse', 'run them on a copy of the database, which is dropped afterwards'),
      'migrate --check',
    ).action(
      run(async (tools, options: { readonly check?: true; readonly rehearse?: true }) => {
        if (options.rehearse === true) await rehearse(tools);
        else if (options.check === true) await check(tools, parts);
        else await migrate(tools, parts);
      }),
    );
  };

async function rehearse(tools: Tools): Promise<void> {
  const databaseUrl = await tools.databaseUrl();
  const rehearsal = await explained(() =>
    rehearseMigrations({ databaseUrl, log: tools.log, onStep: (words) => tools.out.say(words) }),
  );
  const { copiedBy, copyMs, rows, migrations, differences } = rehearsal;
  tools.out.result(
    {
      object: 'migration_rehearsal',
      copied_by: copiedBy,
      copy_ms: copyMs,
      rows,
      migrations,
      differences,
    },
    () =>
      [
        `Copied the database in ${copyMs} ms${rows === null ? '' : ` (${rows} rows, while it is used)`}`,
        ...migrations.map(({ name, ms }) => `${name}: ${ms} ms`),
        migrations.length === 0
          ? 'No migration would run.'
          : 'A copy is quieter than the real one: there they may take longer.',
        ...(differences.length === 0
          ? []
          : [
              'The result is not the schema of this version:',
              ...differences.map((one) => `  ${one}`),
            ]),
      ].join('\n'),
  );
  // All has been said; this is the exit code.
  if (differences.length > 0) throw new CommandFailed('');
}

async function check(tools: Tools, parts: MigrateParts): Promise<void> {
  const { config, dataDir } = tools;
  const isThere =
    config.databaseUrl !== null || existsSync(join(dataDir, 'postgres', 'PG_VERSION'));
  if (!isThere) tools.out.say(`There is no database in ${dataDir} yet.`);
  const pending = isThere ? await readPending(tools, parts) : null;
  tools.out.result({ object: 'migration_check', database: isThere, pending: pending ?? [] }, () => {
    if (pending === null) return 'A start, or migrate, would make it with the newest schema.';
    if (pending.length === 0) return 'The schema is that of this version: nothing would run.';
    return `These migrations would run:\n${pending.map((name) => `  ${name}`).join('\n')}`;
  });
}

async function readPending(tools: Tools, parts: MigrateParts): Promise<readonly string[]> {
  const url = await tools.databaseUrl({ mayMake: true });
  const options = { url, log: tools.log, connectionsMax: CONNECTIONS_MAX, migrate: false };
  try {
    const store = await openStore(options);
    try {
      const gap = await readSchemaGap(store.pool);
      refuseNewerSchema(gap);
      return gap.pending;
    } finally {
      await store.close();
    }
  } catch (error) {
    throw tools.config.databaseUrl === null ? error : parts.explainDatabase(error, url);
  }
}

async function migrate(tools: Tools, parts: MigrateParts): Promise<void> {
  const pending = await readPending(tools, parts);
  const progress = tools.out.progress('migrating', pending.length);
  const ran: string[] = [];
  const url = await tools.databaseUrl({ mayMake: true });
  try {
    const store = await openStore({
      url,
      log: tools.log,
      connectionsMax: CONNECTIONS_MAX,
      migrate: true,
      onMigrated(name) {
        ran.push(name);
        progress.at(ran.length);
      },
    });
    await store.close();
  } catch (error) {
    throw tools.config.databaseUrl === null ? error : parts.explainDatabase(error, url);
  } finally {
    progress.end();
  }
  tools.out.result({ object: 'migration', ran }, () =>
    ran.length === 0
      ? 'The schema was that of this version already.'
      : `Migrated:\n${ran.map((name) => `  ${name}`).join('\n')}`,
  );
}
