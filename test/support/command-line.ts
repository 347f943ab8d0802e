// The operator's command line for tests: in this process with streams that are kept, or as the real program.
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { resolve } from 'node:path';
import { runCommandLine } from '../../src/compose-cli.ts';
import { loadConfig } from '../../src/config.ts';
import { LOADER } from './loader.ts';

const ENTRY = resolve(import.meta.dirname, '../../src/cli.ts');

export interface Told {
  readonly code: number | null;
  readonly out: string;
  readonly err: string;
}

/** `settings` are MAILSTEAD_* variables; here and below. */
export async function command(
  settings: Readonly<Record<string, string>>,
  words: readonly string[],
  isAscii = false,
): Promise<Told> {
  let out = '';
  let err = '';
  const code = await runCommandLine(words, {
    readConfig: () => loadConfig({ MAILSTEAD_MODE: 'development', ...settings }),
    stdout: { write: (text: unknown) => ((out += String(text)), true) },
    stderr: { write: (text: unknown) => ((err += String(text)), true) },
    signal: new AbortController().signal,
    isAscii,
  });
  return { code, out, err };
}

/** The answer with `--json`. Throws when it is not one document, or not the exit code that is expected. */
export async function commandJson<T>(
  settings: Readonly<Record<string, string>>,
  words: readonly string[],
  code = 0,
): Promise<T> {
  const told = await command(settings, [...words, '--json']);
  if (told.code !== code) throw new Error(`exit code ${told.code}: ${told.out}${told.err}`);
  return JSON.parse(told.out) as T;
}

/** The real program. `env` is all that it gets beside PATH and HOME; SIGTERM comes when stderr says `stopAt`. */
export async function program(
  env: Readonly<Record<string, string>>,
  words: readonly string[],
  { stopAt }: { readonly stopAt?: RegExp } = {},
): Promise<Told> {
  const { PATH, HOME, NODE_COMPILE_CACHE } = process.env;
  const child = spawn(process.execPath, [...LOADER, ENTRY, ...words], {
    env: { PATH, HOME, NODE_COMPILE_CACHE, ...env },
    stdio: ['ignore', 'pipe', 'pipe'],
  });
  let out = '';
  let err = '';
  child.stdout.on('data', (chunk: Buffer) => (out += chunk.toString()));
  child.stderr.on('data', (chunk: Buffer) => {
    err += chunk.toString();
    if (stopAt?.test(err) === true && !child.killed) child.kill('SIGTERM');
  });
  const [code] = (await once(child, 'close')) as [number | null];
  return { code, out, err };
}
