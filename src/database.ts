// The database of this appliance: the embedded Postgres, kept running, or one at MAILSTEAD_DATABASE_URL, waited for.
// What is wrong with the setting is said in one sentence that names the host and never the password.
import { join } from 'node:path';
import { setTimeout as pause } from 'node:timers/promises';
import type { Logger } from './log.ts';
import { startEmbeddedPostgres } from './store/embedded.ts';
import { openStore, type Store } from './store/orm.ts';
import { isDatabaseUnavailable } from './store/unavailable.ts';

const CONNECTIONS_MAX = 12;
const WAIT_MAX_MS = 60_000;
const RETRY_MS = 1_000;

/** The database at MAILSTEAD_DATABASE_URL cannot be used; the message says why. */
export class DatabaseUnusable extends Error {
  override name = 'DatabaseUnusable';
}

export interface KeptPostgres {
  readonly url: string;
  stop(): Promise<void>;
}

/**
 * Starts the embedded Postgres and starts it again whenever it ends without being asked to. `onMoved` is called
 * when it came back at another address than everyone holds: nothing can go on then.
 */
export async function keepPostgres(options: {
  readonly dataDir: string;
  readonly log: Logger;
  readonly onMoved: () => void;
}): Promise<KeptPostgres> {
  const { log } = options;
  const place = { dir: join(options.dataDir, 'postgres'), log };
  const stopping = new AbortController();
  let running = await startEmbeddedPostgres(place);
  const { url } = running;

  const watch = async (): Promise<void> => {
    while (!stopping.signal.aborted) {
      const { expected, code, signal } = await running.exited;
      if (expected || stopping.signal.aborted) return;
      log.error({ code, signal }, 'Postgres ended; starting it again');
      try {
        running = await startEmbeddedPostgres(place);
        if (running.url !== url) return options.onMoved();
      } catch (error) {
        log.error({ err: error }, 'Postgres cannot be started; trying again');
        await pause(RETRY_MS, undefined, { signal: stopping.signal }).catch(() => undefined);
      }
    }
  };
  const watching = watch();
  return {
    url,
    async stop() {
      stopping.abort();
      await running.stop();
      await watching;
      await running.stop(); // the one that the watcher was just starting
    },
  };
}

/**
 * Connects and migrates. A database that starts beside us may need a while; one that answers "no" needs no wait.
 * `isOurs`: the embedded one. Throws DatabaseUnusable, NewerSchema, or the signal's reason.
 */
export async function openWhenReady(options: {
  readonly url: string;
  readonly isOurs: boolean;
  readonly log: Logger;
  readonly signal: AbortSignal;
}): Promise<Store> {
  const { url, log, signal } = options;
  const deadline = Date.now() + WAIT_MAX_MS;
  for (;;) {
    signal.throwIfAborted();
    try {
      return await openStore({ url, log, connectionsMax: CONNECTIONS_MAX, migrate: true });
    } catch (error) {
      if (!isDatabaseUnavailable(error) || Date.now() > deadline) {
        throw options.isOurs ? error : explainDatabase(error, url);
      }
      log.info({ reason: reasonOf(error) }, 'waiting for the database');
      await pause(RETRY_MS, undefined, { signal });
    }
  }
}

/** Only what a database or a socket said becomes advice about the setting; a fault of ours stays what it is. */
export function explainDatabase(error: unknown, url: string): unknown {
  const { code } = withCode(error);
  const { database, host } = describe(url);
  const setting = '(MAILSTEAD_DATABASE_URL)';
  const say = (text: string): Error => new DatabaseUnusable(`${text} ${setting}`, { cause: error });
  if (code === '3D000') return say(`database "${database}" does not exist on ${host}`);
  if (isDatabaseUnavailable(error)) {
    return say(`the database at ${host} does not answer: ${reasonOf(error)}`);
  }
  if (code.startsWith('28'))
    return say(`the database at ${host} lets us not in: ${reasonOf(error)}`);
  if (/^[0-9A-Z]{5}$/.test(code) || code === 'ERR_INVALID_URL' || error instanceof URIError) {
    return say(`the database at ${host} cannot be used: ${reasonOf(error)}`);
  }
  return error;
}

function describe(text: string): { readonly database: string; readonly host: string } {
  try {
    const url = new URL(text);
    const host = url.host === '' ? (url.searchParams.get('host') ?? 'this machine') : url.host;
    return { database: decodeURIComponent(url.pathname.slice(1)), host: decodeURIComponent(host) };
  } catch {
    return { database: '', host: 'an address that cannot be read' };
  }
}

/** The innermost error that has a code, or the outermost one. */
function withCode(error: unknown): { readonly code: string; readonly message: string } {
  let at = error;
  for (let depth = 0; at instanceof Error && depth < 5; depth += 1) {
    const { code } = at as { code?: unknown };
    if (typeof code === 'string') return { code, message: at.message };
    at = at.cause;
  }
  return { code: '', message: error instanceof Error ? error.message : String(error) };
}

/** An error of several addresses has no message of its own. */
function reasonOf(error: unknown): string {
  const { message, code } = withCode(error);
  return message === '' ? code : message;
}
