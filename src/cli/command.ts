// What every command of the operator is given, and how it answers. The commands are in files of their own, one for each
// noun; src/cli.ts puts them together.
import type { Command } from 'commander';
import type { Config } from '../config.ts';
import type { Logger } from '../log.ts';
import type { BlobStore } from '../store/blob.ts';
import type { Store } from '../store/orm.ts';

export interface Progress {
  at(done: number): void;
  end(): void;
}

export interface Output {
  /** The answer, on stdout: with `--json` the value as one JSON document, else what `text` makes of it. */
  result(value: unknown, text: () => string): void;
  /** A sentence for people, on stderr; nothing with `--json`. */
  say(sentence: string): void;
  /** A bar on stderr in a terminal, now and then a line elsewhere; nothing with `--json`. `total` null: unknown. */
  progress(what: string, total: number | null): Progress;
}

/** Ends the command with a sentence that says what to do, and no stack. */
export class CommandFailed extends Error {
  override name = 'CommandFailed';
  readonly exitCode: number;
  constructor(message: string, exitCode = 1) {
    super(message);
    this.exitCode = exitCode;
  }
}

/** What is opened is opened once, at the first call, and closed when the command ends. */
export interface Tools {
  readonly config: Config;
  readonly log: Logger;
  readonly out: Output;
  /** Aborted by SIGINT and SIGTERM. */
  readonly signal: AbortSignal;
  /**
   * The URL of the database: of the setting, of the appliance that runs here, or of an embedded one that is started. Throws
   * CommandFailed where there is none yet, unless it may be made.
   */
  databaseUrl(how?: { readonly mayMake: boolean }): Promise<string>;
  /** Throws CommandFailed when the schema is not the one of this program. */
  store(): Promise<Store>;
  blobs(): Promise<BlobStore>;
  /** The master secret. */
  secret(): Promise<string>;
  /** Absolute; it may be in use by an appliance. */
  readonly dataDir: string;
}

/** Makes the action of a commander command out of one that wants the tools. */
export type Runner = <A extends unknown[]>(
  work: (tools: Tools, ...args: A) => Promise<void>,
) => (...args: A) => Promise<void>;

/** Adds the commands of one noun. */
export type AddCommands = (program: Command, run: Runner) => void;
