// The operator's command line: its commands, what they share with the API and the start, and how a failure is told. Part of
// the composition root.
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as pause } from 'node:timers/promises';
import { Refusal } from './access/refusal.ts';
import { CommandFailed, type AddCommands, type Tools } from './cli/command.ts';
import { addBackupCommands } from './cli/backup.ts';
import { completionCommand } from './cli/completion.ts';
import { addDoctorCommands } from './cli/doctor.ts';
import { domainCommands } from './cli/domains.ts';
import { addExplainCommand } from './cli/explain.ts';
import { addKeyCommands } from './cli/keys.ts';
import { migrateCommand } from './cli/migrate.ts';
import { queueCommands } from './cli/queue.ts';
import { retentionCommands } from './cli/retention.ts';
import { addSuppressionCommands } from './cli/suppressions.ts';
import { addTenantCommands } from './cli/tenants.ts';
import { addTenantCopyCommands } from './cli/tenant-copy.ts';
import { findFirstTenant } from './access/tenants.ts';
import { createOutput, printable, printableLines, type Screen } from './cli/output.ts';
import { createProgram, usageExitCode } from './cli/program.ts';
import { openTools } from './cli/tools.ts';
import { blobPlaceOf, openBlobs } from './compose-blobs.ts';
import { composeQueue } from './compose-queue.ts';
import { openRetentionPolicy } from './compose-retention.ts';
import { ConfigError, type Config } from './config.ts';
import { DatabaseUnusable, explainDatabase } from './database.ts';
import { readPauseRequest } from './http/pause-request.ts';
import { presentPause, presentQueue } from './http/queue.controller.ts';
import { createLogger } from './log.ts';
import { BlobsUnavailable } from './store/blobs-unavailable.ts';
import { DataDirInUse, DataDirUnusable } from './store/data-dir.ts';
import { EmbeddedPostgresFailed } from './store/embedded-failure.ts';
import { NotThisAppliance } from './store/appliance-facts.ts';
import { NewerSchema } from './store/orm.ts';
import { deriveKey } from './store/seal.ts';
import { isDatabaseUnavailable } from './store/unavailable.ts';

const { version } = JSON.parse(
  readFileSync(new URL('../package.json', import.meta.url), 'utf8'),
) as { version: string };

/** In the order in which the help shows them. */
function composeCommands(stdout: Screen): readonly AddCommands[] {
  return [
    addTenantCommands,
    addKeyCommands,
    domainCommands({
      async openDomains({ config, store, secret }) {
        const opened = await store();
        // Half of what there is to load, for one command.
        const { composeDomains } = await import('./compose-domains.ts');
        return composeDomains({
          config,
          store: opened,
          sealingKey: deriveKey(await secret(), 'dkim keys at rest'),
          firstTenantId: (await findFirstTenant(opened)) ?? '',
        });
      },
    }),
    addDoctorCommands,
    addExplainCommand,
    queueCommands({
      presentQueue,
      presentPause,
      readPause: readPauseRequest,
      async openQueue({ store }) {
        const opened = await store();
        return composeQueue({
          store: opened,
          firstTenantId: (await findFirstTenant(opened)) ?? '',
          // Workers look by themselves every second.
          nudge: () => undefined,
        });
      },
    }),
    addSuppressionCommands,
    retentionCommands({
      readPolicy({ config, dataDir, log }) {
        const file = openRetentionPolicy(config, join(dataDir, 'config'), log);
        file.stop();
        return file.current();
      },
    }),
    addTenantCopyCommands,
    addBackupCommands,
    migrateCommand({ explainDatabase }),
    completionCommand(stdout),
  ];
}

const EXIT_CONFIG = 78;
/** For a command that does not heed that it is to stop. */
const HEED_MAX_MS = 1_000;

/** What may be expected to go wrong; its message is all that an operator needs. */
const EXPECTED = [
  BlobsUnavailable,
  CommandFailed,
  ConfigError,
  DatabaseUnusable,
  DataDirInUse,
  DataDirUnusable,
  EmbeddedPostgresFailed,
  NewerSchema,
  NotThisAppliance,
  Refusal,
];

export interface CommandLineParts {
  /** Throws ConfigError. Called by commands that need the settings. */
  readonly readConfig: () => Config;
  readonly stdout: Screen;
  readonly stderr: Screen;
  /** Aborted with what is to be said of it. */
  readonly signal: AbortSignal;
  readonly isAscii: boolean;
}

/** Runs the command that the words name; its exit code. Never throws: what went wrong is said on stderr. */
export async function runCommandLine(
  words: readonly string[],
  d: CommandLineParts,
): Promise<number> {
  const program = createProgram(
    { ...d, version, withTools: (how, work) => withTools(d, how, work) },
    composeCommands(d.stdout),
  );
  try {
    await program.parseAsync(words, { from: 'user' });
    return 0;
  } catch (error) {
    return report(d.signal.aborted ? d.signal.reason : error, words.includes('--json'), d);
  }
}

async function withTools(
  d: CommandLineParts,
  how: { readonly isJson: boolean; readonly isVerbose: boolean },
  work: (tools: Tools) => Promise<void>,
): Promise<void> {
  const config = d.readConfig();
  const log = createLogger({
    level: how.isVerbose ? 'debug' : 'warn',
    name: 'mailstead-cli',
    mode: 'development',
    write: (line) => void d.stderr.write(line),
  });
  const out = createOutput({ ...d, isJson: how.isJson });
  const tools = openTools({
    config,
    log,
    out,
    signal: d.signal,
    openBlobs: (settings, dataDir) => openBlobs(blobPlaceOf(settings, dataDir)),
    explainDatabase,
  });
  const ended = new AbortController();
  try {
    await Promise.race([work(tools), untilStopped(d.signal, ended.signal)]);
  } finally {
    ended.abort();
    await tools.close();
  }
}

/** Rejects some time after the command was told to stop: most know how to, the others are left where they are. */
async function untilStopped(stop: AbortSignal, ended: AbortSignal): Promise<never> {
  const told = new Promise<void>((resolve) => {
    if (stop.aborted) resolve();
    else stop.addEventListener('abort', () => resolve(), { once: true, signal: ended });
  });
  await told;
  await pause(HEED_MAX_MS);
  throw stop.reason;
}

/** Says what went wrong; the exit code. */
function report(error: unknown, isJson: boolean, d: CommandLineParts): number {
  const usage = usageExitCode(error);
  const code =
    usage ??
    (error instanceof ConfigError
      ? EXIT_CONFIG
      : error instanceof CommandFailed
        ? error.exitCode
        : 1);
  const message = wordsOf(error);
  if (code === 0 || message === '') return code;
  const isExpected =
    usage !== null ||
    EXPECTED.some((kind) => error instanceof kind) ||
    isDatabaseUnavailable(error) ||
    isForbidden(error);
  if (isJson) {
    // What commander says where it has shown the help.
    const shown =
      message === '(outputHelp)' ? 'a command is missing' : message.replace(/^error: /, '');
    d.stdout.write(
      `${JSON.stringify({ object: 'error', message: shown, exit_code: code }, null, 2)}\n`,
    );
  }
  if (usage !== null) return code; // commander has said it
  if (error instanceof Refusal && error.issues.length > 1) {
    for (const issue of error.issues) {
      d.stderr.write(`mailstead: ${printable(dashed(issue.message))}\n`);
    }
  } else if (isExpected) {
    d.stderr.write(`mailstead: ${printableLines(message)}${isForbidden(error) ? FORBIDDEN : ''}\n`);
  } else {
    const stack = error instanceof Error ? (error.stack ?? message) : message;
    d.stderr.write(`mailstead: a fault of ours: ${printableLines(stack)}\n`);
  }
  return code;
}

/** A refusal names fields of requests, some of which are options here. */
function wordsOf(error: unknown): string {
  const message = error instanceof Error ? error.message : String(error);
  return error instanceof Refusal ? dashed(message) : message;
}

const dashed = (text: string): string => text.replace(/`(after|until|reason)`/g, '`--$1`');

const FORBIDDEN = ' (run it as the user that runs the appliance, or as root)';
const isForbidden = (error: unknown): boolean =>
  error instanceof Error && 'code' in error && ['EACCES', 'EPERM'].includes(String(error.code));
