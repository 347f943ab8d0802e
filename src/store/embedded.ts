/**
 * The embedded Postgres: a cluster in a directory, run as a child process of ours.
 *
 * In: a directory; out: a running server with a database `mailstead`, reached over a unix socket in a
 * private directory and by no other way. It stops when our process ends, however it ends; whatever
 * an earlier run left behind is stopped or tidied up first. Refuses: a cluster of another major
 * version, a directory with other files in it, a second server on one directory.
 *
 * This file is the door: the steps of a start, each in a file of its own (embedded-*.ts).
 */
import * as fs from 'node:fs/promises';
import { basename, dirname, join, resolve } from 'node:path';
import type { Logger } from '../log.ts';
import { chooseAccount } from './embedded-account.ts';
import { initialise, isFresh, settleOwnership, writeSettings } from './embedded-cluster.ts';
import type { ClusterOptions } from './embedded-cluster.ts';
import { explain } from './embedded-failure.ts';
import { stopOrphans } from './embedded-orphans.ts';
import { findPrograms } from './embedded-programs.ts';
import { launch } from './embedded-server.ts';
import type { EmbeddedPostgres } from './embedded-server.ts';
import { takeLock } from './lock.ts';

export { enterAsGuest, untilNoGuests } from './embedded-guests.ts';
export { runningPostgresUrl } from './embedded-server.ts';
export type { EmbeddedPostgres } from './embedded-server.ts';

const PROGRESS_MS = 1_000;

interface Options extends ClusterOptions {
  /** The cluster's directory; created where missing. */
  readonly dir: string;
  readonly log: Logger;
}

/**
 * Resolves when the server accepts connections and the database `mailstead` exists.
 *
 * Does not keep the process alive by itself. Throws EmbeddedPostgresFailed.
 */
export async function startEmbeddedPostgres(options: Options): Promise<EmbeddedPostgres> {
  const wanted = resolve(options.dir);
  const progress = reportProgress(options.log);
  try {
    await fs.mkdir(dirname(wanted), { recursive: true, mode: 0o700 });
    const dir = await fs.realpath(wanted).catch(() => resolveParent(wanted));
    const lock = await takeLock(`${dir}.lock`, { now: () => new Date(), log: options.log });
    try {
      const account = await chooseAccount(dir, progress.at);
      const programs = await findPrograms(account, progress.at);
      await stopOrphans(dir, options.log);
      if (await isFresh(dir, programs)) {
        progress.at('creating the cluster');
        await initialise({ ...options, dir, account, programs });
      }
      await settleOwnership(dir, account);
      await writeSettings({ ...options, dir, account });
      progress.at('starting the server');
      return await launch({ log: options.log, dir, account, programs, unlock: lock.release });
    } catch (error) {
      await lock.release();
      throw error;
    }
  } catch (error) {
    throw explain(error, wanted);
  } finally {
    progress.end();
  }
}

/** The real path of a directory that does not exist yet, in one that does. */
async function resolveParent(path: string): Promise<string> {
  return join(await fs.realpath(dirname(path)), basename(path));
}

interface Progress {
  at(step: string): void;
  end(): void;
}

/** Says where a slow start has got to, once a second. */
function reportProgress(log: Logger): Progress {
  let step = 'looking for its programs';
  const timer = setInterval(
    () => log.info({ step }, 'starting the embedded Postgres'),
    PROGRESS_MS,
  );
  return { at: (next) => void (step = next), end: () => clearInterval(timer) };
}
