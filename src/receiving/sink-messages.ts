// What the built-in sink took: stored in groups before it is acknowledged, listed newest first, emptied,
// and kept below a limit, oldest out first.
import {
  checkPage,
  refuseCursor,
  toPage,
  type PageRequest,
  orderOf,
  rangeOf,
} from '../access/page.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { SinkMessage } from '../store/sink-message.ts';

export interface NewSinkMessage {
  /** Empty for the null sender. */
  readonly mailFrom: string;
  readonly rcptTo: readonly string[];
  readonly raw: Buffer;
  readonly receivedAt: Date;
  readonly tls: boolean;
}

export interface SinkPage {
  readonly items: readonly InstanceType<typeof SinkMessage.class>[];
  readonly hasMore: boolean;
}

/** The newest messages that are kept. */
const MESSAGES_MAX = 100_000;
const GROUP_MAX = 50;
const GROUP_MAX_BYTES = 8 * 1024 * 1024;

/** Stores messages; each promise resolves after the commit that holds its message. */
export function createSinkStore(store: Store): (message: NewSinkMessage) => Promise<void> {
  interface Entry {
    readonly message: NewSinkMessage;
    readonly resolve: () => void;
    readonly reject: (error: unknown) => void;
  }
  const waiting: Entry[] = [];
  let writing = false;

  const write = async (group: readonly Entry[]): Promise<void> => {
    const values: unknown[] = [];
    const rows = group.map(({ message }) => {
      values.push(
        newId(),
        message.mailFrom,
        JSON.stringify(message.rcptTo),
        message.raw,
        message.receivedAt,
        message.tls,
      );
      const at = values.length - 5;
      return `($${at}, $${at + 1}, $${at + 2}, $${at + 3}, $${at + 4}, $${at + 5})`;
    });
    try {
      await store.pool.query(
        `insert into sink_message (id, mail_from, rcpt_to, raw, received_at, tls)
         values ${rows.join(', ')}`,
        values,
      );
      for (const { resolve } of group) resolve();
    } catch (error) {
      for (const { reject } of group) reject(error);
    }
  };

  const pump = async (): Promise<void> => {
    if (writing) return;
    writing = true;
    while (waiting.length > 0) {
      let count = 0;
      let sizeBytes = 0;
      while (count < Math.min(GROUP_MAX, waiting.length)) {
        sizeBytes += waiting[count]!.message.raw.length;
        if (count > 0 && sizeBytes > GROUP_MAX_BYTES) break;
        count += 1;
      }
      await write(waiting.splice(0, count));
    }
    writing = false;
  };

  return (message) =>
    new Promise((resolve, reject) => {
      waiting.push({ message, resolve, reject });
      void pump();
    });
}

/** A page of what the sink holds, newest first. */
export async function listSinkMessages(store: Store, page: PageRequest): Promise<SinkPage> {
  const cursor = checkPage(page);
  const at = cursor.after ?? cursor.before;
  const em = store.em();
  if (at !== null && (await em.count(SinkMessage, { id: at })) === 0) refuseCursor(cursor);
  const rows = await em.find(
    SinkMessage,
    {
      ...rangeOf(cursor),
    },
    orderOf(cursor),
  );
  return toPage(rows, cursor);
}

export async function emptySink(store: Store): Promise<void> {
  await store.pool.query('truncate sink_message');
}

/** Removes the oldest messages above the limit. */
export async function pruneSink(store: Store): Promise<void> {
  await store.pool.query(
    `delete from sink_message where id <= (
       select id from sink_message order by id desc offset $1 limit 1)`,
    [MESSAGES_MAX],
  );
}
