// Opens what a command asks for, and closes it when the command ends: the database of the setting, of the appliance that
// runs on this data directory, or of an embedded Postgres that is started for the command alone.
import { existsSync } from 'node:fs';
import { hostname } from 'node:os';
import { join } from 'node:path';
import { setTimeout as pause } from 'node:timers/promises';
import { findFirstTenant } from '../access/tenants.ts';
import type { Config } from '../config.ts';
import type { Logger } from '../log.ts';
import type { BlobStore } from '../store/blob.ts';
import { DataDirInUse, openDataDir, readGeneratedSecret } from '../store/data-dir.ts';
import {
  enterAsGuest,
  runningPostgresUrl,
  startEmbeddedPostgres,
  untilNoGuests,
} from '../store/embedded.ts';
import { LockHeld } from '../store/lock.ts';
import { openStore, readSchemaGap, refuseNewerSchema, type Store } from '../store/orm.ts';
import { CommandFailed, type Output, type Tools } from './command.ts';

const CONNECTIONS_MAX = 4;
const SECRET_BYTES = 32;
/** An appliance that recovers from a crash starts for a while; so may the command before this one stop. */
const WAIT_MAX_MS = 30_000;
const POLL_MS = 200;
const SAY_AFTER_MS = 1_000;
/** For how long an embedded Postgres stays for other commands that found it. */
const GUESTS_MAX_MS = 10 * 60_000;

export interface ToolParts {
  readonly config: Config;
  readonly log: Logger;
  readonly out: Output;
  readonly signal: AbortSignal;
  readonly openBlobs: (config: Config, dataDir: string) => BlobStore;
  /** What is thrown in place of an error of the database at `url`. */
  readonly explainDatabase: (error: unknown, url: string) => unknown;
}

/** Nothing is opened before it is asked for. */
export function openTools(parts: ToolParts): Tools & { close(): Promise<void> } {
  const { config, log, out, signal } = parts;
  const { dataDir } = config;
  const closers: (() => Promise<void>)[] = [];
  const opening: Promise<unknown>[] = [];
  const once = <T>(open: () => Promise<T>): (() => Promise<T>) => {
    let opened: Promise<T> | null = null;
    return () => {
      if (opened === null) opening.push((opened = open()));
      return opened;
    };
  };

  const openUrl = once(async () => {
    if (config.databaseUrl !== null) return config.databaseUrl;
    const found = await findEmbedded(parts);
    closers.push(found.close);
    signal.throwIfAborted();
    return found.url;
  });

  // A path that somebody mistyped is not filled with an empty database.
  const databaseUrl = async (how = { mayMake: false }): Promise<string> => {
    if (config.databaseUrl !== null || how.mayMake || hasCluster(dataDir)) return openUrl();
    throw new CommandFailed(
      `There is no database in ${dataDir} yet. Start the appliance once, run the command \`migrate\`, ` +
        'or set MAILSTEAD_DATA_DIR or MAILSTEAD_DATABASE_URL to where it is.',
    );
  };

  const store = once(async (): Promise<Store> => {
    const url = await databaseUrl();
    try {
      const opened = await openStore({ url, log, connectionsMax: CONNECTIONS_MAX, migrate: false });
      closers.push(() => opened.close());
      const gap = await readSchemaGap(opened.pool);
      refuseNewerSchema(gap);
      if (gap.pending.length > 0) {
        throw new CommandFailed(
          `The database is not migrated to this version (${gap.pending.join(', ')} did not run there). ` +
            'Run the command `migrate`, or start the appliance of this version.',
        );
      }
      return opened;
    } catch (error) {
      throw config.databaseUrl === null ? error : parts.explainDatabase(error, url);
    }
  });

  return {
    config,
    log,
    out,
    signal,
    dataDir,
    databaseUrl,
    store,
    blobs: once(async () => parts.openBlobs(config, dataDir)),
    secret: once(async () => {
      if (config.secret !== null) return config.secret;
      const known = await readGeneratedSecret(dataDir, 'master', SECRET_BYTES);
      if (known !== null) return known;
      if ((await findFirstTenant(await store())) === null) return generateSecret(dataDir);
      throw new CommandFailed(
        `The master secret is not in ${dataDir}: what is sealed in the database cannot be read without it. ` +
          'Set MAILSTEAD_SECRET, or MAILSTEAD_DATA_DIR to the data directory of the appliance.',
      );
    }),
    async close() {
      // What was still being opened when the command was stopped is closed like the rest.
      await Promise.allSettled(opening);
      for (const close of closers.toReversed()) {
        await close().catch((error: unknown) => log.warn({ err: error }, 'did not close in order'));
      }
    },
  };
}

const hasCluster = (dataDir: string): boolean =>
  existsSync(join(dataDir, 'postgres', 'PG_VERSION'));

/** Nothing has been sealed yet, so a new one harms nobody; the appliance goes on with it. */
async function generateSecret(path: string): Promise<string> {
  const dataDir = await openDataDir(path, { now: () => new Date() });
  try {
    return await dataDir.secret('master', SECRET_BYTES);
  } finally {
    await dataDir.release();
  }
}

interface Found {
  readonly url: string;
  close(): Promise<void>;
}

/** The embedded Postgres that runs, else one of our own. Throws CommandFailed when there is none to be had. */
async function findEmbedded(parts: ToolParts): Promise<Found> {
  const { dataDir } = parts.config;
  const startedAt = Date.now();
  let isSaid = false;
  for (;;) {
    parts.signal.throwIfAborted();
    const running = await runningPostgresUrl(join(dataDir, 'postgres'));
    const leave = running === null ? null : await enterAsGuest(running);
    if (running !== null && leave !== null) return { url: running, close: leave };
    const holder = await startOwn(parts);
    if ('url' in holder) return holder;
    const waitedMs = Date.now() - startedAt;
    if (holder.isElsewhere || waitedMs > WAIT_MAX_MS) throw unreachable(dataDir, holder);
    if (waitedMs > SAY_AFTER_MS && !isSaid) {
      isSaid = true;
      parts.out.say(
        `Waiting for the database of ${dataDir}: ${holder.words} is starting or stopping`,
      );
    }
    await pause(POLL_MS, undefined, { signal: parts.signal });
  }
}

interface Holder {
  readonly words: string;
  /** Of another machine or container. */
  readonly isElsewhere: boolean;
}

const unreachable = (dataDir: string, { words, isElsewhere }: Holder): CommandFailed =>
  new CommandFailed(
    isElsewhere
      ? `The data directory ${dataDir} is in use by ${words}, whose database cannot be reached from here. ` +
          'Run the command there (docker exec), or stop the appliance first.'
      : `The data directory ${dataDir} is in use by ${words}, and no database answers there. If that is an appliance with ` +
          'MAILSTEAD_DATABASE_URL, set the same for this command; otherwise wait until it has started.',
  );

async function startOwn({ config, log, out }: ToolParts): Promise<Found | Holder> {
  let dataDir;
  try {
    dataDir = await openDataDir(config.dataDir, { now: () => new Date() });
  } catch (error) {
    if (!(error instanceof DataDirInUse)) throw error;
    const { cause } = error;
    if (!(cause instanceof LockHeld)) throw error;
    const { pid, hostname: host, at } = cause.holder;
    return {
      words: `process ${pid} on host ${host} (since ${at})`,
      isElsewhere: host !== hostname(),
    };
  }
  const release = dataDir.release;
  try {
    out.say(
      hasCluster(config.dataDir)
        ? `Starting the database of ${config.dataDir} for this command`
        : `Creating a database in ${config.dataDir}`,
    );
    const postgres = await startEmbeddedPostgres({ dir: join(config.dataDir, 'postgres'), log });
    return {
      url: postgres.url,
      async close() {
        try {
          // Commands that found it running would lose it in the middle.
          const door = await untilNoGuests(postgres.url, GUESTS_MAX_MS);
          await postgres.stop();
          await door.open();
        } finally {
          await release();
        }
      },
    };
  } catch (error) {
    await release();
    throw error;
  }
}
