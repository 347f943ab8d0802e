// `backup <file>` and `restore <file>`: the whole appliance as one file, and back.
import { statSync } from 'node:fs';
import type { PoolClient } from 'pg';
import { backUp, type BackupReport } from '../backup/backup.ts';
import { BackupFailed } from '../backup/container.ts';
import { restore, type RestoreReport } from '../backup/restore.ts';
import { createPause } from '../queue/pauses.ts';
import { CommandFailed, type AddCommands, type Progress, type Tools } from './command.ts';

const MEGABYTE = 1_000_000;

export const addBackupCommands: AddCommands = (program, run) => {
  program
    .command('backup')
    .description('write the whole appliance to one file, while it runs')
    .argument('<file>', 'a file that does not exist yet; it holds secrets and everybody’s mail')
    .addHelpText('after', '\nExample:\n  mailstead backup /backups/monday.tar')
    .action(run(runBackup));
  program
    .command('restore')
    .description('read a backup into an empty database and data directory')
    .argument('<file>', 'what `backup` wrote, with this version or an earlier one')
    .option(
      '--paused',
      'deliver nothing until the pause is removed, as long as the original may still run',
    )
    .addHelpText('after', '\nExample:\n  mailstead restore /backups/monday.tar --paused')
    .action(run(runRestore));
};

async function runBackup(tools: Tools, file: string): Promise<void> {
  const steps = stepProgress(tools, { rows: 'Copying rows', blobs: 'Copying large messages' });
  const report = await explained(async () =>
    backUp({
      file,
      databaseUrl: await tools.databaseUrl(),
      blobs: await tools.blobs(),
      secret: await tools.secret(),
      isSecretGenerated: tools.config.secret === null,
      dataDir: tools.dataDir,
      onProgress: ({ step, bytes }) => steps.at(step, bytes),
      signal: tools.signal,
    }),
  ).finally(() => steps.end());
  tools.out.result(describeBackup(report), () => backupText(report));
}

const describeBackup = (report: BackupReport): Record<string, unknown> => ({
  object: 'backup',
  file: report.file,
  bytes: report.bytes,
  taken_at: report.takenAt,
  tables: report.tables,
  rows: report.rows,
  row_bytes: report.rowBytes,
  blobs: report.blobs,
  blob_bytes: report.blobBytes,
  missing_blobs: report.missingBlobs,
  snapshot_ms: report.snapshotMs,
});

function backupText(report: BackupReport): string {
  const lines = [
    `${report.file}: ${size(report.bytes)}, as of ${report.takenAt}`,
    `${report.rows} rows of ${report.tables} tables (${size(report.rowBytes)}), ${report.blobs} large messages (${size(report.blobBytes)})`,
    'It holds secrets and mail: keep it where only you can read it.',
  ];
  if (report.missingBlobs.length > 0) {
    lines.push(
      `Rows name large messages that the blob store does not have: ${report.missingBlobs.join(', ')}`,
    );
  }
  return lines.join('\n');
}

async function runRestore(
  tools: Tools,
  file: string,
  options: { readonly paused?: boolean },
): Promise<void> {
  const isPaused = options.paused === true;
  const total = sizeOf(file);
  // Before a database is made for it.
  if (total === null) throw new CommandFailed(`${file} does not exist, or cannot be read.`);
  const steps = stepProgress(
    tools,
    {
      verify: 'Checking the file',
      blobs: 'Writing large messages',
      rows: 'Writing rows',
      migrate: 'Bringing the schema up to this version',
    },
    total,
  );
  const report = await explained(async () =>
    restore({
      file,
      databaseUrl: await tools.databaseUrl({ mayMake: true }),
      blobs: await tools.blobs(),
      secret: tools.config.secret,
      dataDir: tools.dataDir,
      log: tools.log,
      onProgress: (step, done) => steps.at(step, done),
      signal: tools.signal,
      async beforeCommit(client) {
        if (!isPaused) return;
        const pause = await createPause(client as PoolClient, {
          kind: 'all',
          name: '',
          reason: 'restored from a backup with --paused',
          until: null,
        });
        if (pause !== null) return;
        throw new CommandFailed(
          'The backup holds as many pauses as there may be, so --paused cannot add its own. Nothing was restored.',
        );
      },
    }),
  ).finally(() => steps.end());
  tools.out.result(describeRestore(report, isPaused), () => restoreText(report, isPaused));
}

const describeRestore = (report: RestoreReport, isPaused: boolean): Record<string, unknown> => ({
  object: 'restore',
  taken_at: report.takenAt,
  tables: report.tables,
  rows: report.rows,
  blobs: report.blobs,
  under_way: report.underWay,
  migrated: report.migrated,
  left_out: report.leftOut,
  kept: report.kept,
  paused: isPaused,
});

function restoreText(report: RestoreReport, isPaused: boolean): string {
  const lines = [
    `Restored what was there at ${report.takenAt}: ${report.rows} rows of ${report.tables} tables, ${report.blobs} large messages`,
    isPaused
      ? 'Nothing is delivered until the pause of everything is removed (DELETE /queue/pauses/{id}).'
      : 'What waited then is delivered when the appliance starts, also what the original sent since: it must not run any more.',
  ];
  if (report.underWay > 0) {
    lines.push(
      `${report.underWay} deliveries were under way: they are told as unknown and tried once more after 20 minutes.`,
    );
  }
  if (report.migrated.length > 0) lines.push(`Migrations since: ${report.migrated.join(', ')}`);
  if (report.leftOut.length > 0) {
    lines.push(`Tables that are not Mailstead's were left out: ${report.leftOut.join(', ')}`);
  }
  if (report.kept.length > 0) {
    lines.push(`Files of yours that were there already stayed: ${report.kept.join(', ')}`);
  }
  return lines.join('\n');
}

/** One progress after the other, a step at a time. */
export function stepProgress<Step extends string>(
  { out }: Pick<Tools, 'out'>,
  words: Readonly<Record<Step, string>>,
  total: number | null = null,
): { at(step: Step, done: number): void; end(): void } {
  let now: { readonly step: Step; readonly progress: Progress } | null = null;
  return {
    at(step, done) {
      if (now?.step !== step) {
        now?.progress.end();
        now = { step, progress: out.progress(words[step], total) };
      }
      now.progress.at(done);
    },
    end: () => now?.progress.end(),
  };
}

/** What the room says to operators is said as the command's failure. */
export async function explained<T>(work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (error instanceof BackupFailed) throw new CommandFailed(error.message);
    throw error;
  }
}

function sizeOf(file: string): number | null {
  try {
    return statSync(file).size;
  } catch {
    return null;
  }
}

const size = (bytes: number): string => `${(bytes / MEGABYTE).toFixed(1)} MB`;
