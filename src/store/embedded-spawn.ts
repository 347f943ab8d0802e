/**
 * How the programs of Postgres are run: as which account, in which environment, on which directories.
 *
 * Postgres refuses to run as root, so root runs it as another user, who must not need to enter the folders above
 * the cluster (a clone under /root): a program gets the open directories and knows them as /proc/self/fd/N,
 * which the kernel follows without asking the path's permissions.
 */
import { spawn } from 'node:child_process';
import { existsSync } from 'node:fs';
import * as fs from 'node:fs/promises';

const OUTPUT_MAX_CHARS = 16_384;

/** Nothing of our own environment reaches Postgres: PGDATA and its kin would change what it does. */
export const ENVIRONMENT = {
  PATH: '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin',
  LC_ALL: 'C', // We read its messages.
  TZ: 'UTC',
};

/** Who runs Postgres: null = we ourselves. */
export type Account = { readonly uid: number; readonly gid: number } | null;

/** The directory as a child sees it that gets `stdio` at position `fd`. */
export async function openForChild(
  dir: string,
  fd: number,
): Promise<{
  readonly path: string;
  readonly stdio: number | 'ignore';
  close(): Promise<void>;
}> {
  if (!existsSync('/proc/self/fd')) {
    return { path: dir, stdio: 'ignore', close: () => Promise.resolve() };
  }
  const handle = await fs.open(dir, fs.constants.O_RDONLY | fs.constants.O_DIRECTORY);
  return { path: `/proc/self/fd/${fd}`, stdio: handle.fd, close: () => handle.close() };
}

/** Runs a program to its end; its output is stdout and stderr together. Code null: it never ran. */
export function run(
  command: string,
  args: readonly string[],
  account: Account = null,
  fd3: number | 'ignore' = 'ignore',
): Promise<{ readonly code: number | null; readonly output: string }> {
  return new Promise((settle) => {
    const child = spawn(command, args, {
      ...account,
      cwd: '/',
      env: ENVIRONMENT,
      stdio: ['ignore', 'pipe', 'pipe', fd3],
    });
    let output = '';
    for (const stream of [child.stdout, child.stderr]) {
      stream?.on('data', (chunk: Buffer) => {
        output = (output + chunk.toString('utf8')).slice(-OUTPUT_MAX_CHARS);
      });
    }
    child.once('error', (error) => settle({ code: null, output: error.message }));
    child.once('close', (code) => settle({ code, output }));
  });
}
