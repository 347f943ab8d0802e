// Settings for tests: values that are good, and what loadConfig has to say against others.
import { ConfigError, loadConfig } from '../../src/config.ts';

export type Env = Readonly<Record<string, string>>;

export const SECRET = 'correct-horse-battery-staple-0123';
export const API_KEY = 're_AbCd1234_0123456789abcdefghijklmn';

/** `NAME=value` pairs without the prefix, to keep tables readable. */
export function env(short: Env): Env {
  return Object.fromEntries(
    Object.entries(short).map(([name, value]) => [`MAILSTEAD_${name}`, value]),
  );
}

/** Every problem of these settings; none when they can be used. */
export function problemsOf(
  variables: NodeJS.ProcessEnv,
  readFile?: (path: string) => string,
): readonly string[] {
  try {
    loadConfig(variables, readFile);
  } catch (error) {
    if (error instanceof ConfigError) return error.problems;
    throw error;
  }
  return [];
}
