// `tenant export` and `tenant import`: one tenant as one file, and into another appliance.
import { readFileSync, statSync } from 'node:fs';
import type { Command } from 'commander';
import { exportTenant, type TenantExportReport } from '../backup/tenant-export.ts';
import { importTenant, type TenantImportReport } from '../backup/tenant-import.ts';
import { findTenants } from '../access/tenants.ts';
import { createPause } from '../queue/pauses.ts';
import { explained, stepProgress } from './backup.ts';
import { CommandFailed, type AddCommands, type Tools } from './command.ts';

/** What is under way when the tenant is paused ends within the time that a conversation may take. */
const QUIET_MAX_MS = 15 * 60_000;
const QUIET_POLL_MS = 500;
/** Workers look at the pauses once a second. */
const SEEN_MS = 3_000;

interface Given {
  readonly passphraseFile: string;
  readonly withQueue?: boolean;
}

export const addTenantCopyCommands: AddCommands = (program, run) => {
  const tenant = nounOf(program, 'tenant');
  tenant
    .command('export')
    .description('write one tenant to a file that another appliance can import')
    .argument('<tenant>', 'id or name')
    .argument('<file>', 'a file that does not exist yet')
    .requiredOption(
      '--passphrase-file <path>',
      'its first line protects DKIM keys and webhook secrets in the file',
    )
    .option(
      '--with-queue',
      'take along what is under way; this appliance does not deliver for the tenant any more',
    )
    .addHelpText(
      'after',
      '\nExample:\n  mailstead tenant export acme acme.tenant --passphrase-file pass.txt',
    )
    .action(run(runExport));
  tenant
    .command('import')
    .description('read a tenant that another appliance exported')
    .argument('<file>', 'what `tenant export` wrote, with this version')
    .requiredOption('--passphrase-file <path>', 'the one that it was exported with')
    .addHelpText(
      'after',
      '\nExample:\n  mailstead tenant import acme.tenant --passphrase-file pass.txt',
    )
    .action(run(runImport));
};

const nounOf = (program: Command, name: string): Command =>
  program.commands.find((one) => one.name() === name) ?? program.command(name);

function passphraseOf({ passphraseFile }: Given): string {
  try {
    return readFileSync(passphraseFile, 'utf8').split(/\r?\n/, 1)[0]!;
  } catch (error) {
    throw new CommandFailed(
      `The passphrase cannot be read from ${passphraseFile}: ${(error as Error).message}`,
    );
  }
}

async function runExport(tools: Tools, named: string, file: string, given: Given): Promise<void> {
  const passphrase = passphraseOf(given);
  const tenantId = await tenantOf(tools, named);
  const withQueue = given.withQueue === true;
  if (withQueue) await quiet(tools, tenantId);
  const steps = stepProgress(tools, { rows: 'Copying rows', blobs: 'Copying large messages' });
  const report = await explained(async () =>
    exportTenant({
      file,
      databaseUrl: await tools.databaseUrl(),
      blobs: await tools.blobs(),
      secret: await tools.secret(),
      tenantId,
      passphrase,
      withQueue,
      onProgress: ({ step, bytes }) => steps.at(step, bytes),
      signal: tools.signal,
    }),
  ).finally(() => steps.end());
  tools.out.result(describeExport(report, tenantId, withQueue), () =>
    [
      `${report.file}: ${report.rows} rows and ${report.blobs} large messages, as of ${report.takenAt}`,
      withQueue
        ? 'What is under way is in the file, and this appliance delivers nothing more for the tenant while its pause holds: also not what ' +
          'its keys and domains bring in here from now on. Ending the pause here would send what the file holds a second time.'
        : `${report.leftEmails} emails that are under way stay here, where they are delivered; they are not in the file.`,
      ...(report.missingBlobs.length === 0
        ? []
        : [
            `It cannot be imported: rows name large messages that the blob store does not have: ${report.missingBlobs.join(', ')}`,
          ]),
    ].join('\n'),
  );
}

const describeExport = (
  report: TenantExportReport,
  tenantId: string,
  withQueue: boolean,
): Record<string, unknown> => ({
  object: 'tenant_export',
  tenant_id: tenantId,
  file: report.file,
  bytes: report.bytes,
  taken_at: report.takenAt,
  rows: report.rows,
  blobs: report.blobs,
  with_queue: withQueue,
  left_emails: report.leftEmails,
  missing_blobs: report.missingBlobs,
});

async function tenantOf(tools: Tools, named: string): Promise<string> {
  const found = await findTenants(await tools.store(), named);
  if (found.length === 1) return found[0]!.id;
  throw new CommandFailed(
    found.length === 0
      ? `There is no tenant ${named}; see \`tenant list\`.`
      : `Several tenants are called ${named}; name one by its id.`,
  );
}

/** The pause's id, once every worker has seen it. */
async function pauseTenant(tools: Tools, tenantId: string, reason: string): Promise<string> {
  const { pool } = await tools.store();
  const pause = await createPause(pool, { kind: 'tenant', name: tenantId, reason, until: null });
  if (pause === null) throw new CommandFailed('Too many pauses are there; remove some first.');
  tools.out.say(`Paused the tenant (${pause.id})`);
  await new Promise((resolve) => setTimeout(resolve, SEEN_MS));
  return pause.id;
}

/** Pauses the tenant, so that nothing of it is sent here and there, and waits until nothing is under way. */
async function quiet(tools: Tools, tenantId: string): Promise<void> {
  const pauseId = await pauseTenant(tools, tenantId, 'exported with its queue');
  const { pool } = await tools.store();
  const deadline = Date.now() + QUIET_MAX_MS;
  for (;;) {
    tools.signal.throwIfAborted();
    const { rowCount } = await pool.query(
      `select from delivery where tenant_id = $1 and state = 'in_flight' limit 1`,
      [tenantId],
    );
    if (rowCount === 0) return;
    if (Date.now() > deadline) {
      throw new CommandFailed(
        'Deliveries of the tenant are still under way. Start the appliance, so that they end, and export again; ' +
          `the tenant stays paused (${pauseId}).`,
      );
    }
    await new Promise((resolve) => setTimeout(resolve, QUIET_POLL_MS));
  }
}

async function runImport(tools: Tools, file: string, given: Given): Promise<void> {
  const passphrase = passphraseOf(given);
  await tools.store(); // its schema must be this program's
  const total = statSync(file, { throwIfNoEntry: false })?.size ?? null;
  const steps = stepProgress(
    tools,
    {
      verify: 'Checking the file',
      blobs: 'Writing large messages',
      rows: 'Writing rows',
      migrate: '',
    },
    total,
  );
  let pauseId: string | null = null;
  const report = await explained(async () =>
    importTenant({
      file,
      databaseUrl: await tools.databaseUrl(),
      blobs: await tools.blobs(),
      secret: await tools.secret(),
      passphrase,
      onProgress: (step, done) => steps.at(step, done),
      signal: tools.signal,
      async beforeCommit({ id, withQueue }) {
        if (withQueue) pauseId = await pauseTenant(tools, id, 'imported with its queue');
      },
    }),
  ).finally(() => steps.end());
  tools.out.result(describeImport(report, pauseId), () =>
    [
      `Imported ${report.name} (${report.tenantId}): ${report.rows} rows, ${report.blobs} large messages`,
      report.domains.length === 0
        ? 'It has no domains.'
        : `Its domains prove themselves anew: verify ${report.domains.join(', ')}.`,
      ...(pauseId === null
        ? []
        : [`What was under way waits behind a pause: then run \`queue resume ${pauseId}\`.`]),
    ].join('\n'),
  );
}

const describeImport = (
  report: TenantImportReport,
  pauseId: string | null,
): Record<string, unknown> => ({
  object: 'tenant_import',
  tenant_id: report.tenantId,
  name: report.name,
  taken_at: report.takenAt,
  rows: report.rows,
  blobs: report.blobs,
  domains: report.domains,
  with_queue: report.withQueue,
  pause_id: pauseId,
});
