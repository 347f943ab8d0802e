/**
 * Which account runs the embedded Postgres: we ourselves, or, where we are root, somebody who is not.
 *
 * In: the cluster's directory. Out: null for ourselves, or ids that the caller hands to spawn and chown. As root it
 * makes the system user postgres where there is none. Refuses: a cluster of another user when we are not root.
 */
import * as fs from 'node:fs/promises';
import { join } from 'node:path';
import { EmbeddedPostgresFailed, noBinaries } from './embedded-failure.ts';
import { run } from './embedded-spawn.ts';
import type { Account } from './embedded-spawn.ts';

/** As root: the owner of an existing cluster, else user `postgres`, made where missing, else `nobody`. */
export async function chooseAccount(dir: string, report: (step: string) => void): Promise<Account> {
  if (process.getuid === undefined) throw noBinaries();
  if (process.getuid() !== 0) {
    await refuseForeign(dir, process.getuid());
    return null;
  }
  const cluster = await fs.stat(join(dir, 'PG_VERSION')).catch(() => null);
  if (cluster !== null && cluster.uid !== 0) return { uid: cluster.uid, gid: cluster.gid };
  const known = await findAccount('postgres');
  if (known !== null) return known;
  report('creating the system user postgres');
  // shadow's programs; else busybox's.
  const shell = ['--shell', '/usr/sbin/nologin'];
  await run('useradd', ['--system', '--user-group', '--no-create-home', ...shell, 'postgres']);
  if ((await findAccount('postgres')) === null) {
    await run('addgroup', ['-S', 'postgres']);
    await run('adduser', ['-S', '-D', '-H', '-G', 'postgres', 'postgres']);
  }
  const account = (await findAccount('postgres')) ?? (await findAccount('nobody'));
  if (account !== null) return account;
  throw new EmbeddedPostgresFailed(
    'Postgres refuses to run as root, and there is no user postgres or nobody to run it as. ' +
      'Start as an ordinary user, or set MAILSTEAD_DATABASE_URL.',
  );
}

async function refuseForeign(dir: string, uid: number): Promise<void> {
  const owner = (await fs.stat(dir).catch(() => null))?.uid ?? uid;
  if (owner === uid) return;
  throw new EmbeddedPostgresFailed(
    `The database in ${dir} belongs to user id ${owner}, and this process runs as ${uid}. ` +
      `Start as that user or as root, or change the owner (chown -R ${uid} ${dir}).`,
  );
}

async function findAccount(name: string): Promise<Account> {
  const [user, group] = await Promise.all([run('id', ['-u', name]), run('id', ['-g', name])]);
  const [uid, gid] = [Number.parseInt(user.output, 10), Number.parseInt(group.output, 10)];
  return user.code === 0 && group.code === 0 && uid > 0 ? { uid, gid } : null;
}
