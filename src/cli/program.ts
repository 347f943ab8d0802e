// The tree of commands, and what holds for all of them: `--json`, one runner, exit codes.
import { Command, CommanderError } from 'commander';
import type { AddCommands, Runner, Tools } from './command.ts';
import type { Screen } from './output.ts';

/** sysexits.h: how the command line is to be used was not heeded. */
export const EXIT_USAGE = 64;

export interface ProgramParts {
  readonly version: string;
  readonly stdout: Screen;
  readonly stderr: Screen;
  /** Opens the tools, runs `work` with them and closes them, whatever happens. */
  readonly withTools: (
    how: { readonly isJson: boolean; readonly isVerbose: boolean },
    work: (tools: Tools) => Promise<void>,
  ) => Promise<void>;
}

export function createProgram(parts: ProgramParts, nouns: readonly AddCommands[]): Command {
  const program = new Command('mailstead')
    .description("The operator's commands of a Mailstead appliance.")
    .version(parts.version, '--version', 'Show the version')
    .option('--json', 'answer with one JSON document on stdout')
    .option('--verbose', 'say on stderr what is going on')
    .helpOption('-h, --help', 'Show how it is used')
    .helpCommand('help [command]', 'Show how a command is used')
    .configureHelp({ showGlobalOptions: true, sortSubcommands: false })
    .configureOutput({
      writeOut: (text) => void parts.stdout.write(text),
      writeErr: (text) => void parts.stderr.write(text),
      outputError: (text, write) => write(text.replace(/^error: /, 'mailstead: ')),
    })
    .showHelpAfterError('Run it with --help to see how it is used.')
    .exitOverride();
  const run: Runner =
    (work) =>
    async (...args) => {
      const command = args.at(-1) as Command;
      refuseUnknown(command);
      const { json, verbose } = command.optsWithGlobals<{ json?: true; verbose?: true }>();
      const how = { isJson: json === true, isVerbose: verbose === true };
      await parts.withTools(how, (tools) => work(tools, ...args));
    };
  for (const addCommands of nouns) addCommands(program, run);
  for (const command of below(program)) {
    if (command.commands.length === 0) continue;
    // What follows a command's name belongs to it, also where the one above it has an option of that name.
    command.enablePositionalOptions().allowExcessArguments();
  }
  return program;
}

const below = (command: Command): readonly Command[] =>
  command.commands.flatMap((one) => [one, ...below(one)]);

/** A word after a command that has commands below it and does something by itself as well. */
function refuseUnknown(command: Command): void {
  const unknown = command.args[command.registeredArguments.length];
  if (command.commands.length === 0 || unknown === undefined) return;
  const known = command.commands.map((one) => one.name()).join(', ');
  command.error(`error: unknown command '${unknown}'\n(Known are: ${known})`);
}

/** The exit code for what commander throws; null when it is not about usage. */
export function usageExitCode(error: unknown): number | null {
  if (!(error instanceof CommanderError)) return null;
  return error.exitCode === 0 ? 0 : EXIT_USAGE;
}
