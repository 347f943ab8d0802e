// Reads the messages that took too long to be read before they were acknowledged: one after the other, by a thread
// of its own, also those that a stop or a crash left. Several processes may read the same one; the first to
// finish fills it in.
import type { Logger } from '../log.ts';
import { readHeaderOnly } from '../mail/parse.ts';
import type { Parser } from '../mail/parse-aside.ts';
import type { BlobStore } from '../store/blob.ts';
import { LOWEST_ID } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';
import { readReceivedRaw } from './read-received.ts';
import { saveShown, type Place } from './shown.ts';

export interface LateReader {
  /** A message was stored that has not been read. */
  nudge(): void;
  /** Resolves when the database is not asked any more. What is being read is read again at the next start. */
  stop(): Promise<void>;
}

/** After the database was away. */
const RETRY_MS = 10_000;
const START: Place = {
  tenantId: LOWEST_ID,
  id: LOWEST_ID,
};

/** Begins with what earlier processes left. */
export function startLateReader(d: {
  readonly store: Store;
  readonly blobs: BlobStore;
  /** Of a message that it cannot read, the header is shown. */
  readonly parse: Parser;
  readonly log: Logger;
}): LateReader {
  let isWanted = false;
  let isRunning = false;
  let isStopped = false;
  let asking: Promise<unknown> = Promise.resolve();
  let retry: NodeJS.Timeout | undefined;

  const ask = <T>(work: () => Promise<T>): Promise<T> => {
    const asked = work();
    asking = asked.catch(() => undefined);
    return asked;
  };

  /** Each once; one that cannot be filled in waits for the next turn. */
  const readAll = async (): Promise<void> => {
    for (let at: Place | null = START; at !== null && !isStopped;) {
      const behind: Place = at;
      const found: Place | null = await ask(() => nextUnread(d.store, behind));
      at = found;
      if (found === null || isStopped) return;
      await readOne(found).catch((err: unknown) => {
        if (isDatabaseUnavailable(err)) throw err;
        d.log.error(
          { err, received_email_id: found.id, tenant_id: found.tenantId },
          'a received message could not be read',
        );
      });
    }
  };

  const readOne = async (place: Place): Promise<void> => {
    const raw = await ask(() => readReceivedRaw(d, place.tenantId, place.id));
    const parsed = raw === null ? null : ((await d.parse(raw)) ?? readHeaderOnly(raw));
    if (isStopped) return;
    await ask(() => d.store.transact((client) => saveShown(client, place, parsed)));
  };

  const run = async (): Promise<void> => {
    if (isRunning) return;
    isRunning = true;
    while (isWanted && !isStopped) {
      isWanted = false;
      try {
        await readAll();
      } catch (err) {
        if (isStopped) break;
        d.log.warn({ err }, 'received messages wait for being read');
        retry = setTimeout(nudge, RETRY_MS).unref();
      }
    }
    isRunning = false;
  };

  const nudge = (): void => {
    clearTimeout(retry);
    isWanted = true;
    void run();
  };

  nudge();
  return {
    nudge,
    async stop() {
      isStopped = true;
      clearTimeout(retry);
      await asking;
    },
  };
}

async function nextUnread({ pool }: Store, behind: Place): Promise<Place | null> {
  const { rows } = await pool.query<{ tenant_id: string; id: string }>({
    name: 'next-unread',
    text: `select tenant_id, id from received_email
      where not is_read and (tenant_id, id) > ($1, $2) order by tenant_id, id limit 1`,
    values: [behind.tenantId, behind.id],
  });
  const [row] = rows;
  return row === undefined ? null : { tenantId: row.tenant_id, id: row.id };
}
