// What several commands have in common: options of lists, checked numbers, an example below the help.
import { InvalidArgumentError, type Command } from 'commander';
import { PAGE_MAX } from '../access/page.ts';

export interface PageOptions {
  readonly limit?: number | undefined;
  readonly after?: string | undefined;
}

/** A whole number from 1 to `max`, as commander wants to be told. */
export const wholeNumberTo =
  (max: number) =>
  (given: string): number => {
    const number = /^[1-9]\d{0,8}$/.test(given) ? Number(given) : Infinity;
    if (number <= max) return number;
    throw new InvalidArgumentError(`It must be a whole number from 1 to ${max}.`);
  };

/** `--limit` and `--after` of a list. */
export function pageOptions(command: Command): Command {
  return command
    .option(
      '--limit <count>',
      `how many, at most ${PAGE_MAX} (default: 20)`,
      wholeNumberTo(PAGE_MAX),
    )
    .option('--after <id>', 'go on after this item, the last one of the page before');
}

/** `line` without the name of the program. */
export function withExample(command: Command, ...lines: readonly string[]): Command {
  const shown = lines.map((line) => `  mailstead ${line}`).join('\n');
  return command.addHelpText('after', `\nExample:\n${shown}`);
}
