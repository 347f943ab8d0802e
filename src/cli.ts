// The operator's program: a process around the command line. Exit codes: 64 for a wrong use, 78 for wrong settings, 130 and
// 143 after SIGINT and SIGTERM, 1 for the rest.
import { CommandFailed } from './cli/command.ts';
import { runCommandLine } from './compose-cli.ts';
import { isTerminalAscii, readEnvironment } from './config.ts';

/** What a command that was told to stop may take to leave things in order. */
const STOP_MAX_MS = 20_000;
/** What a command left open after it ended keeps nobody waiting. */
const LINGER_MAX_MS = 2_000;

const { stdout, stderr } = process;
const stopping = new AbortController();

for (const [signal, code] of [
  ['SIGINT', 130],
  ['SIGTERM', 143],
  ['SIGHUP', 129],
] as const) {
  process.on(signal, () => {
    if (stopping.signal.aborted) process.exit(code); // asked twice
    stopping.abort(new CommandFailed(`Stopped by ${signal}.`, code));
    setTimeout(() => process.exit(code), STOP_MAX_MS).unref();
  });
}

// Whoever reads may have had enough (head).
for (const stream of [stdout, stderr]) stream.on('error', () => undefined);

process.exitCode = await runCommandLine(process.argv.slice(2), {
  readConfig: readEnvironment,
  stdout,
  stderr,
  signal: stopping.signal,
  isAscii: isTerminalAscii(),
});
setTimeout(() => process.exit(), LINGER_MAX_MS).unref();
