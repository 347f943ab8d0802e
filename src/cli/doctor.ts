// `doctor`: looks at the surroundings of the appliance from where the command runs, and says what to do. It needs no running
// appliance, and no database: then that is what it finds.
import type { Command } from 'commander';
import { findingsOf, look, type DoctorParts, type LookAt } from '../doctor/doctor.ts';
import { severities, worstOf, type Finding, type Severity } from '../doctor/finding.ts';
import { nameOf, toALabels } from '../dns/host-name.ts';
import type { MarkedBlobStore } from '../store/blob.ts';
import { CommandFailed, type AddCommands, type Tools } from './command.ts';

interface Options {
  readonly active?: boolean;
  readonly domain?: string;
  readonly all?: boolean;
}

const MARKS: Readonly<Record<Severity, string>> = {
  error: 'ERROR',
  warning: 'WARNING',
  unknown: 'UNKNOWN',
  info: 'INFO',
  ok: 'OK',
};

export const addDoctorCommands: AddCommands = (program, run) => {
  program
    .command('doctor')
    .description('look at DNS, reverse DNS, ports, certificates, clock, disk, database, domains')
    .option('--active', 'dial well-known mail hosts to see whether port 25 is open')
    .option('--domain <name>', 'look at this domain only')
    .option('--all', 'also show what is well, one line each')
    .addHelpText('after', '\nExit code: 0 when nothing is an error, 1 when something is.')
    .addHelpText('after', '\nExample:\n  mailstead doctor --domain example.com')
    .action(
      run(async (tools: Tools, options: Options, _command: Command) => {
        await examine(tools, options);
      }),
    );
};

async function examine(tools: Tools, options: Options): Promise<void> {
  const domain = options.domain === undefined ? null : nameOf(toALabels(options.domain));
  if (domain === '') throw new CommandFailed(`${options.domain} is no domain name.`);
  const { config, log, dataDir, out, signal } = tools;
  const database = await openDatabase(tools);
  if (domain !== null && 'why' in database) {
    throw new CommandFailed(
      `Which domains there are is in the database, which cannot be used: ${database.why}`,
    );
  }
  const progress = out.progress('Looking', null);
  const checked = await look(
    { config, log, dataDir, now: () => new Date(), readBlobMark: await markReader(tools) },
    { database, isActive: options.active === true, domain, signal },
  ).finally(() => progress.end());
  signal.throwIfAborted();
  // There is one look only: what is still silent now counts as such.
  const findings = findingsOf(checked).map(({ whenLasting, ...finding }) => ({
    ...finding,
    severity: whenLasting ?? finding.severity,
  }));
  if (domain !== null && findings.length === 0) {
    throw new CommandFailed(
      config.mode === 'development' && config.dnsServers === null
        ? 'In development mode the DNS is asked only where MAILSTEAD_DNS_SERVERS names a server.'
        : `There is no domain ${domain} here. The command \`domain list\` shows those that there are.`,
    );
  }
  const status = worstOf(findings);
  out.result({ object: 'doctor', status, findings }, () => report(findings, options.all === true));
  // All has been said; this is the exit code.
  if (status === 'error') throw new CommandFailed('');
}

async function openDatabase(tools: Tools): Promise<LookAt['database']> {
  try {
    return (await tools.store()).pool;
  } catch (error) {
    return { why: error instanceof Error ? error.message : String(error) };
  }
}

/** Null where the store cannot be opened: other commands say why. */
async function markReader(tools: Tools): Promise<DoctorParts['readBlobMark']> {
  const blobs = await tools.blobs().catch(() => null);
  const { readMark } = (blobs ?? {}) as Partial<MarkedBlobStore>;
  return readMark === undefined ? null : () => readMark.call(blobs);
}

function report(findings: readonly Finding[], showsAll: boolean): string {
  const groups = severities.flatMap((severity) => {
    const found = findings.filter((finding) => finding.severity === severity);
    return found.length === 0 ? [] : [{ severity, found }];
  });
  const counts = groups.map(({ severity, found }) => `${found.length} ${severity}`).join(', ');
  const texts = groups
    .filter(({ severity }) => showsAll || severity !== 'ok')
    .map(({ severity, found }) =>
      [`${MARKS[severity]} (${found.length})`, ...found.map(describe)].join('\n'),
    );
  return [...texts, `${findings.length} findings: ${counts}.`].join('\n\n');
}

const describe = ({ code, subject, message, advice }: Finding): string =>
  [`  ${code} ${subject}`, `    ${message}`, ...(advice === null ? [] : [`    -> ${advice}`])].join(
    '\n',
  );
