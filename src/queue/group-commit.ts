// Writes emails that arrive at the same time in one statement, so that many requests share one commit and one fsync. Each
// caller learns of its own email only.
import { createGroupWriter } from '../store/group-writer.ts';
import { enqueue, GROUP_SIZES, type NewEmail, type Queryable } from './enqueue.ts';

/** More at a time would not be faster: the statement's cost is per row by then. */
const GROUP_MAX = Math.max(...GROUP_SIZES);
const GROUP_MAX_BYTES = 4 * 1024 * 1024;
const WAITING_MAX_MS = 10_000;

/** Resolves after the commit that holds the email. */
export type GroupCommit = (email: NewEmail) => Promise<void>;

export const createGroupCommit = (db: Queryable): GroupCommit =>
  createGroupWriter<NewEmail, void>({
    waitingMaxMs: WAITING_MAX_MS,
    async write(emails) {
      await enqueue(db, emails);
      return [];
    },
    countFirst(waiting) {
      let sizeBytes = 0;
      let count = 0;
      for (const { rawSizeBytes } of waiting) {
        sizeBytes += rawSizeBytes;
        if (count === GROUP_MAX || (count > 0 && sizeBytes > GROUP_MAX_BYTES)) break;
        count += 1;
      }
      // The others go with those that come next.
      return GROUP_SIZES.findLast((one) => one <= count) ?? 1;
    },
  });
