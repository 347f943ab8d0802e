/**
 * The cluster on disk: made by initdb, owned by the account that runs it, with our settings.
 *
 * In: a directory, the account, the programs. Out: a cluster that postgres can be started on. What an initialisation
 * that was interrupted left is made anew. Refuses: a cluster of another major version, a directory with other files
 * in it, a setting that could break out of its line.
 */
import { randomBytes } from 'node:crypto';
import * as fs from 'node:fs/promises';
import { join } from 'node:path';
import { EmbeddedPostgresFailed } from './embedded-failure.ts';
import type { Programs } from './embedded-programs.ts';
import { openForChild, run } from './embedded-spawn.ts';
import type { Account } from './embedded-spawn.ts';
import { readText, syncDir } from './files.ts';

export const SUPERUSER = 'postgres';
/** Exists from before initdb until its files are in place, so that what it left can be told. */
export const STAGING_NAME = '.initialising';
const CONF_NAME = 'mailstead.conf';
/** What a fresh file system puts into the directory that it is mounted on. */
const NOT_OURS: ReadonlySet<string> = new Set(['lost+found']);
const INITDB_LINES_MAX = 6;

const SETTINGS: Readonly<Record<string, string>> = {
  max_connections: '100',
  shared_buffers: '128MB',
  fsync: 'on',
  synchronous_commit: 'on', // 250 and 200 are only said after a commit that is on disk.
  max_wal_size: '1GB',
  idle_in_transaction_session_timeout: '60s',
  timezone: 'UTC',
  log_timezone: 'UTC',
  cluster_name: 'mailstead',
  // The queue's rows change state several times within minutes: vacuum earlier than after 20 %.
  autovacuum_naptime: '15s',
  autovacuum_vacuum_scale_factor: '0.05',
  autovacuum_analyze_scale_factor: '0.05',
  autovacuum_vacuum_cost_limit: '1000',
  random_page_cost: '1.1',
  jit: 'off', // Short statements only; compiling one costs more than running it.
  log_checkpoints: 'off',
  log_min_error_statement: 'panic', // Statements carry addresses.
};
/** For tests: no disk is waited for, so a crash of the machine (not of a process) loses the cluster. */
const VOLATILE_SETTINGS: Readonly<Record<string, string>> = {
  fsync: 'off',
  full_page_writes: 'off',
  wal_level: 'minimal',
  max_wal_senders: '0',
  checkpoint_timeout: '1h',
};

/** The cluster as its owner wants it. */
export interface ClusterOptions {
  readonly dir: string;
  /** False = nothing is fsynced (tests). Default true. */
  readonly durable?: boolean;
  /** Postgres settings that replace ours. */
  readonly settings?: Readonly<Record<string, string>>;
}

/** False for a cluster of our major version, true for an empty directory; everything else throws. */
export async function isFresh(dir: string, programs: Programs): Promise<boolean> {
  const cluster = (await readText(join(dir, 'PG_VERSION')))?.trim();
  const major = programs.version.split('.')[0];
  if (cluster === major) return false;
  if (cluster !== undefined) {
    throw new EmbeddedPostgresFailed(
      `The database in ${dir} was made by Postgres ${cluster}, and this Mailstead brings Postgres ` +
        `${programs.version}. Take a backup with the Mailstead that made it, move the directory away, ` +
        'and restore; or set MAILSTEAD_DATABASE_URL.',
    );
  }
  const names = (await fs.readdir(dir).catch(() => [])).filter((name) => !NOT_OURS.has(name));
  if (names.length === 0 || names.includes(STAGING_NAME)) return true;
  throw new EmbeddedPostgresFailed(
    `${dir} holds files (${names.slice(0, 3).join(', ')}), but no complete Postgres cluster. ` +
      'Nothing was touched: move the directory away, or restore what is missing (PG_VERSION).',
  );
}

/** Makes the cluster in a directory within `dir` and moves it up, PG_VERSION last. */
export async function initialise(
  d: ClusterOptions & { readonly account: Account; readonly programs: Programs },
): Promise<void> {
  const staging = join(d.dir, STAGING_NAME);
  await fs.mkdir(staging, { recursive: true, mode: 0o700 });
  // Left by an initialisation that was interrupted; nothing else can be beside our staging directory.
  for (const name of await fs.readdir(d.dir)) {
    if (name === STAGING_NAME || NOT_OURS.has(name)) continue;
    await fs.rm(join(d.dir, name), { recursive: true });
  }
  for (const name of await fs.readdir(staging))
    await fs.rm(join(staging, name), { recursive: true });
  for (const path of [d.dir, staging]) {
    if (d.account !== null) await fs.chown(path, d.account.uid, d.account.gid);
    await fs.chmod(path, 0o700);
  }
  const opened = await openForChild(staging, 3);
  try {
    const flags = ['--encoding=UTF8', '--locale=C', '--locale-provider=builtin'];
    flags.push('--builtin-locale=C.UTF-8', '--data-checksums', '--auth=trust', '--no-instructions');
    if (d.durable === false) flags.push('--no-sync');
    const args = [`--pgdata=${opened.path}`, `--username=${SUPERUSER}`, ...flags];
    const { code, output } = await run(d.programs.initdb, args, d.account, opened.stdio);
    const last = output.trim().split('\n').slice(-INITDB_LINES_MAX).join('\n');
    if (code !== 0) throw new Error(`initdb failed: ${last}`);
  } finally {
    await opened.close();
  }
  await writeOwned(join(staging, 'pg_hba.conf'), 'local all all trust\n', d.account);
  const names = (await fs.readdir(staging)).filter((name) => name !== 'PG_VERSION');
  for (const name of [...names, 'PG_VERSION']) {
    if (name === 'PG_VERSION') await syncDir(d.dir);
    await fs.rename(join(staging, name), join(d.dir, name));
  }
  await syncDir(d.dir);
  await fs.rmdir(staging);
}

/** Postgres insists on owning its directory alone; a copy that root restored belongs to root. */
export async function settleOwnership(dir: string, account: Account): Promise<void> {
  const found = await fs.stat(dir);
  if (account !== null && found.uid !== account.uid) {
    for (const path of await fs.readdir(dir, { recursive: true })) {
      await fs.lchown(join(dir, path), account.uid, account.gid);
    }
    await fs.chown(dir, account.uid, account.gid);
  }
  if ((found.mode & 0o077) !== 0) await fs.chmod(dir, 0o700);
}

/** At every start, so that a new release brings its own. */
export async function writeSettings(
  d: ClusterOptions & { readonly account: Account },
): Promise<void> {
  const volatile = d.durable === false ? VOLATILE_SETTINGS : {};
  const lines = Object.entries({ ...SETTINGS, ...volatile, ...d.settings }).map(([name, value]) => {
    if (!/^[a-z_.]+$/.test(name) || /[\n\0]/.test(value)) {
      throw new EmbeddedPostgresFailed(`not a Postgres setting: ${name} = ${value}`);
    }
    return `${name} = '${value.replaceAll('\\', '\\\\').replaceAll("'", "''")}'\n`;
  });
  const header = '# Written at every start of Mailstead; ALTER SYSTEM settings win over these.\n';
  await writeOwned(join(d.dir, CONF_NAME), header + lines.join(''), d.account);
  const main = join(d.dir, 'postgresql.conf');
  const text = (await readText(main)) ?? '';
  const include = `include_if_exists = '${CONF_NAME}'`;
  if (!text.includes(include)) await writeOwned(main, `${text}\n${include}\n`, d.account);
}

/** Replaces a file in the account's directory, where it may have put links for root to fall for. */
async function writeOwned(path: string, text: string, account: Account): Promise<void> {
  const draft = `${path}.${randomBytes(6).toString('hex')}`;
  const handle = await fs.open(draft, 'wx', 0o600);
  try {
    if (account !== null) await handle.chown(account.uid, account.gid);
    await handle.writeFile(text);
    await handle.sync();
  } finally {
    await handle.close();
  }
  await fs.rename(draft, path);
}
