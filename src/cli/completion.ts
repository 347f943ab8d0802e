// `completion`: what a shell needs to complete our commands and options, made from the tree of commands itself. Scripts
// stand alone: completing starts no program of ours.
import { Argument, type Command, type Option } from 'commander';
import type { AddCommands } from './command.ts';
import { withExample } from './options.ts';
import type { Screen } from './output.ts';

const SHELLS = ['bash', 'zsh', 'fish'] as const;
type Shell = (typeof SHELLS)[number];

interface Word {
  readonly text: string;
  readonly about: string;
}

/** One command: how it is reached, and what can follow. */
interface Place {
  /** `queue pause`; empty for the program itself. */
  readonly path: string;
  readonly commands: readonly Word[];
  readonly options: readonly Word[];
  /** What an argument can be. */
  readonly choices: readonly string[];
  /** By the name of an option that takes a value what that can be; empty: anything. */
  readonly values: ReadonlyMap<string, readonly string[]>;
}

export const completionCommand =
  (stdout: Screen): AddCommands =>
  (program) => {
    withExample(
      program
        .command('completion')
        .description('Print a script that completes commands and options in a shell')
        .addArgument(new Argument('<shell>').choices(SHELLS)),
      'completion bash > /etc/bash_completion.d/mailstead',
      'completion fish > ~/.config/fish/completions/mailstead.fish',
    ).action((shell: Shell, _options: unknown, command: Command) => {
      const script = WRITERS[shell](placesOf(program), program.name());
      const isJson = command.optsWithGlobals()['json'] === true;
      stdout.write(
        isJson ? `${JSON.stringify({ object: 'completion', shell, script })}\n` : script,
      );
    });
  };

/** The program and every command below it, the program first. */
function placesOf(program: Command): readonly Place[] {
  const globals = program.options;
  const walk = (command: Command, path: string): Place[] => {
    const shown = command.commands.filter((one) => one.name() !== 'help');
    const options = [...command.options, ...(path === '' ? [] : globals)];
    const place: Place = {
      path,
      commands: shown.map((one) => ({ text: one.name(), about: one.description() })),
      options: [
        ...options.flatMap((option) =>
          namesOf(option).map((text) => ({ text, about: option.description })),
        ),
        { text: '--help', about: 'Show how it is used' },
      ],
      choices: command.registeredArguments.flatMap((argument) => argument.argChoices ?? []),
      values: new Map(
        options
          .filter((option) => option.required || option.optional)
          .flatMap((option) => namesOf(option).map((name) => [name, option.argChoices ?? []])),
      ),
    };
    return [place, ...shown.flatMap((one) => walk(one, `${path} ${one.name()}`.trim()))];
  };
  return walk(program, '');
}

const namesOf = ({ long, short }: Option): string[] => [long ?? short ?? ''].filter(Boolean);

/** In single quotes for a POSIX shell, of one line. */
const quote = (text: string): string => `'${text.replace(/\s+/g, ' ').replaceAll("'", "'\\''")}'`;
/** Fish takes a backslash in single quotes. */
const quoteFish = (text: string): string =>
  `'${text.replace(/\s+/g, ' ').replaceAll('\\', '\\\\').replaceAll("'", "\\'")}'`;

const WRITERS: Readonly<Record<Shell, (places: readonly Place[], name: string) => string>> = {
  bash(places, name) {
    return `# Completes ${name} in bash; made by: ${name} completion bash
_${name}() {
  local cur="\${COMP_WORDS[COMP_CWORD]}" prev="\${COMP_WORDS[COMP_CWORD-1]}" at='' word words='' i
  for ((i = 1; i < COMP_CWORD; i++)); do
    word="\${COMP_WORDS[i]}"
${walkCases(places, '    ')}
  done
  case "$at $prev" in
${valueCases(places, (values) => `words=${quote(values.join(' '))}; COMPREPLY=($(compgen -W "$words" -- "$cur")); return`)}
  esac
  case "$at" in
${wordCases(places, ({ commands, choices, options }) => {
  const plain = [...commands.map(({ text }) => text), ...choices].join(' ');
  const dashed = options.map(({ text }) => text).join(' ');
  return `if [[ $cur == -* ]]; then words=${quote(dashed)}; else words=${quote(plain)}; fi`;
})}
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cur"))
}
complete -o default -F _${name} ${name}
`;
  },

  zsh(places, name) {
    const described = (words: readonly Word[]): string =>
      words.map(({ text, about }) => quote(`${text.replaceAll(':', '\\:')}:${about}`)).join(' ');
    return `#compdef ${name}
# Completes ${name} in zsh; made by: ${name} completion zsh
_${name}() {
  local at='' word prev="\${words[CURRENT-1]}" i
  local -a found
  for ((i = 2; i < CURRENT; i++)); do
    word="\${words[i]}"
${walkCases(places, '    ')}
  done
  case "$at $prev" in
${valueCases(places, (values) => (values.length === 0 ? '_files; return' : `compadd -- ${values.map(quote).join(' ')}; return`))}
  esac
  case "$at" in
${wordCases(places, ({ commands, choices, options }) => {
  const plain = described([...commands, ...choices.map((text) => ({ text, about: text }))]);
  return `if [[ $PREFIX == -* ]]; then found=(${described(options)}); else found=(${plain}); fi`;
})}
  esac
  if (( \${#found} )); then _describe '${name}' found; else _files; fi
}
if [ "\${funcstack[1]}" = "_${name}" ]; then _${name} "$@"; else compdef _${name} ${name}; fi
`;
  },

  fish(places, name) {
    const lines = places.flatMap(({ path, commands, options, choices, values }) => {
      const here = `complete -c ${name} -n ${quoteFish(`test "$(__${name}_at)" = "${path}"`)}`;
      return [
        ...commands.map(
          ({ text, about }) => `${here} -f -a ${quoteFish(text)} -d ${quoteFish(about)}`,
        ),
        ...choices.map((text) => `${here} -f -a ${quoteFish(text)}`),
        ...options.map(({ text, about }) => {
          const long = text.startsWith('--') ? `-l ${text.slice(2)}` : `-s ${text.slice(1)}`;
          const choicesOf = values.get(text);
          const takes =
            choicesOf === undefined
              ? ''
              : choicesOf.length === 0
                ? ' -r'
                : ` -x -a ${quoteFish(choicesOf.join(' '))}`;
          return `${here} ${long}${takes} -d ${quoteFish(about)}`;
        }),
      ];
    });
    return `# Completes ${name} in fish; made by: ${name} completion fish
function __${name}_at
    set -l at ''
    for word in (commandline -opc)[2..-1]
        switch "$at $word"
${places
  .filter(({ path }) => path !== '')
  .map(
    ({ path }) =>
      `            case ${quoteFish(path.includes(' ') ? path : ` ${path}`)}\n                set at ${quoteFish(path)}`,
  )
  .join('\n')}
        end
    end
    echo $at
end
${lines.join('\n')}
`;
  },
};

/** POSIX cases that follow the words typed so far to the command they name. */
function walkCases(places: readonly Place[], indent: string): string {
  const cases = places
    .filter(({ path }) => path !== '')
    .map(
      ({ path }) =>
        `${indent}  ${quote(path.includes(' ') ? path : ` ${path}`)}) at=${quote(path)} ;;`,
    );
  return [`${indent}case "$at $word" in`, ...cases, `${indent}esac`].join('\n');
}

function valueCases(
  places: readonly Place[],
  write: (values: readonly string[]) => string,
): string {
  return places
    .flatMap(({ path, values }) =>
      [...values].map(
        ([option, choices]) => `    ${quote(`${path} ${option}`)}) ${write(choices)} ;;`,
      ),
    )
    .join('\n');
}

const wordCases = (places: readonly Place[], write: (place: Place) => string): string =>
  places.map((place) => `    ${quote(place.path)}) ${write(place)} ;;`).join('\n');
