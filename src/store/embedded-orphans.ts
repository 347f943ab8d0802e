/**
 * What an earlier run left running on a cluster: servers that outlived their parent, and an initdb.
 *
 * In: the cluster's directory, whose lock we hold. Out: nothing runs there any more, and no pid file misleads
 * Postgres. Processes are found by the directory that they work in, so a recycled pid is never signalled.
 */
import { existsSync } from 'node:fs';
import * as fs from 'node:fs/promises';
import { basename, join } from 'node:path';
import { setTimeout as pause } from 'node:timers/promises';
import type { Logger } from '../log.ts';
import { STAGING_NAME } from './embedded-cluster.ts';
import { run } from './embedded-spawn.ts';
import { hasCode, readText } from './files.ts';
import { isPidTaken } from './process.ts';

const ORPHAN_FAST_STOP_MS = 10_000;
const IMMEDIATE_STOP_MS = 10_000;
const POLL_MS = 25;

/** Ends every server process on the cluster. We hold its lock, so they have lost the one they served. */
export async function stopOrphans(dir: string, log: Logger): Promise<void> {
  const pidFile = join(dir, 'postmaster.pid');
  const noted = Number.parseInt((await readText(pidFile)) ?? '', 10);
  const orphans = await findServers(dir, noted);
  if (orphans.length > 0) {
    log.warn({ pids: orphans, dir }, 'stopping the Postgres that an earlier run left behind');
    const first = orphans.includes(noted) ? [noted] : orphans;
    await signalUntilGone({
      dir,
      noted,
      pids: first,
      signal: 'SIGINT',
      waitMs: ORPHAN_FAST_STOP_MS,
    });
    await killServers(dir, noted);
  }
  // An initdb whose parent was killed goes on, and would write into what we are about to wipe.
  await killServers(join(dir, STAGING_NAME), 0);
  // Postgres believes its pid file when any process has that pid, a zombie or a recycled one included.
  if (Number.isSafeInteger(noted) && noted > 0 && isPidTaken(noted)) {
    await fs.rm(pidFile, { force: true });
  }
}

async function killServers(dir: string, noted: number): Promise<void> {
  for (const signal of ['SIGQUIT', 'SIGKILL'] as const) {
    const pids = await findServers(dir, noted);
    if (pids.length === 0) return;
    await signalUntilGone({ dir, noted, pids, signal, waitMs: IMMEDIATE_STOP_MS });
  }
  const left = await findServers(dir, noted);
  if (left.length > 0) throw new Error(`Postgres (process ${left.join(', ')}) does not stop`);
}

async function signalUntilGone(d: {
  readonly dir: string;
  readonly noted: number;
  readonly pids: readonly number[];
  readonly signal: NodeJS.Signals;
  readonly waitMs: number;
}): Promise<void> {
  for (const pid of d.pids) signalProcess(pid, d.signal);
  for (let waitedMs = 0; waitedMs < d.waitMs; waitedMs += POLL_MS) {
    if ((await findServers(d.dir, d.noted)).length === 0) return;
    await pause(POLL_MS);
  }
}

/**
 * The Postgres processes of a cluster's directory: those that work in it, and an initdb, which has it
 * open as fd 3. Without /proc at most `noted`, the pid that postmaster.pid names.
 */
async function findServers(dir: string, noted: number): Promise<readonly number[]> {
  const home = await fs.stat(dir).catch(() => null);
  if (home === null) return [];
  if (!existsSync('/proc/self')) {
    if (!(noted > 0)) return [];
    const { output } = await run('ps', ['-o', 'command=', '-p', String(noted)]);
    return output.includes('postgres') && output.includes(dir) ? [noted] : [];
  }
  const pids: number[] = [];
  for (const name of await fs.readdir('/proc')) {
    if (!/^\d+$/.test(name)) continue;
    // Nothing to read: it ended meanwhile, or belongs to somebody else.
    const program = basename(await fs.readlink(`/proc/${name}/exe`).catch(() => ''));
    if (!/^(postgres|initdb)( \(deleted\))?$/.test(program)) continue;
    for (const place of ['cwd', 'fd/3']) {
      // Leads to the directory itself, whatever its path was called when the program started.
      const found = await fs.stat(`/proc/${name}/${place}`).catch(() => null);
      if (found?.dev !== home.dev || found.ino !== home.ino) continue;
      pids.push(Number(name));
      break;
    }
  }
  return pids;
}

function signalProcess(pid: number, signal: NodeJS.Signals): void {
  try {
    process.kill(pid, signal);
  } catch (error) {
    if (!hasCode(error, 'ESRCH')) throw error;
  }
}
