// Writes emails that arrive at the same time in one statement, so that many requests share one
// commit and one fsync. An email on an idle appliance is written at once; under load those that arrive
// while others are being written form the next group. Each caller learns of its own email only.
import { DatabaseBusy } from '../store/unavailable.ts';
import { enqueue, type NewEmail, type Queryable } from './enqueue.ts';

/** More at a time would not be faster: the statement's cost is per row by then. */
const GROUP_MAX = 32;
const GROUP_MAX_BYTES = 4 * 1024 * 1024;
/** Above this the database is not keeping up, and a caller is better told than kept. */
const WAITING_MAX = 2_000;
const WAITING_MAX_MS = 10_000;
/** Groups under way at a time: one is being planned while another waits for its fsync. */
const WRITERS = 3;

interface Entry {
  readonly since: number;
  readonly email: NewEmail;
  readonly resolve: () => void;
  readonly reject: (error: unknown) => void;
}

/** Resolves after the commit that holds the email. */
export type GroupCommit = (email: NewEmail) => Promise<void>;

export function createGroupCommit(db: Queryable): GroupCommit {
  const waiting: Entry[] = [];
  let writing = 0;

  const writeOne = async ({ email, resolve, reject }: Entry): Promise<void> => {
    try {
      await enqueue(db, [email]);
      resolve();
    } catch (error) {
      reject(error);
    }
  };

  const writeGroup = async (group: readonly Entry[]): Promise<void> => {
    try {
      await enqueue(
        db,
        group.map(({ email }) => email),
      );
      for (const { resolve } of group) resolve();
    } catch (error) {
      // An SQL error rolled the whole group back, so each may be tried alone: one email that the
      // database refuses must not take the others with it. After a lost connection nobody knows
      // what was committed: everyone is told.
      const rolledBack = /^(22|23)/.test(String((error as { code?: string }).code));
      if (!rolledBack || group.length === 1) for (const { reject } of group) reject(error);
      else for (const entry of group) await writeOne(entry);
    }
  };

  const pump = (): void => {
    const tooOld = Date.now() - WAITING_MAX_MS;
    while (waiting.length > 0 && waiting[0]!.since < tooOld)
      waiting.shift()!.reject(new DatabaseBusy());
    while (writing < WRITERS && waiting.length > 0) {
      let sizeBytes = 0;
      let count = 0;
      while (count < Math.min(waiting.length, GROUP_MAX)) {
        sizeBytes += waiting[count]!.email.rawSizeBytes;
        if (count > 0 && sizeBytes > GROUP_MAX_BYTES) break;
        count += 1;
      }
      writing += 1;
      void writeGroup(waiting.splice(0, count)).finally(() => {
        writing -= 1;
        pump();
      });
    }
  };

  return (email) =>
    new Promise((resolve, reject) => {
      if (waiting.length >= WAITING_MAX) {
        reject(new DatabaseBusy());
        return;
      }
      waiting.push({ since: Date.now(), email, resolve, reject });
      // The requests of one turn of the event loop go together.
      if (waiting.length === 1) setImmediate(pump);
    });
}
