// Stores what was accepted: all emails of a request in one transaction, together with the row of its idempotency
// key. What lies apart from the database is removed again when the database certainly has no row that names it.
import { Refusal } from '../access/refusal.ts';
import { enqueue, type NewEmail } from '../queue/enqueue.ts';
import type { GroupCommit } from '../queue/group-commit.ts';
import type { BlobStore } from '../store/blob.ts';
import type { Store } from '../store/orm.ts';
import { noteAccepted } from '../telemetry/counted.ts';
import { traced } from '../telemetry/trace.ts';
import { takeKey, type IdempotentRequest, type StoredAnswer } from './idempotency.ts';

export interface StoringDependencies {
  readonly store: Store;
  readonly blobs: BlobStore;
  readonly commit: GroupCommit;
  /** Called after the commit with what is stored now. */
  readonly onStored: (emails: readonly NewEmail[]) => void;
}

export interface Accepted extends StoredAnswer {
  readonly replayed: boolean;
}

/** Stores the emails, or replays the answer that the key has already. Durable when it resolves. */
export function storeEmails(
  d: StoringDependencies,
  emails: readonly NewEmail[],
  about: { readonly key: IdempotentRequest | null; readonly answer: StoredAnswer },
): Promise<Accepted> {
  return traced('accept', {}, async (span) => {
    const accepted = await storeOnce(d, emails, about);
    if (!accepted.replayed) noteAccepted(emails, span);
    return accepted;
  });
}

async function storeOnce(
  d: StoringDependencies,
  emails: readonly NewEmail[],
  { key, answer }: { readonly key: IdempotentRequest | null; readonly answer: StoredAnswer },
): Promise<Accepted> {
  const replay = await keepBlobsUnlessRefused(d, emails, () => write(d, emails, { key, answer }));
  if (replay !== null) {
    await removeBlobs(d.blobs, emails);
    return { ...replay, replayed: true };
  }
  if (emails.length > 0) d.onStored(emails);
  return { ...answer, replayed: false };
}

async function write(
  d: StoringDependencies,
  emails: readonly NewEmail[],
  { key, answer }: { readonly key: IdempotentRequest | null; readonly answer: StoredAnswer },
): Promise<StoredAnswer | null> {
  const [only, ...more] = emails;
  if (key === null && only === undefined) return null;
  if (key === null && only !== undefined && more.length === 0) {
    await d.commit(only);
    return null;
  }
  return d.store.transact(async (client) => {
    const stored = key === null ? null : await takeKey(client, key, answer);
    if (stored === null) await enqueue(client, emails);
    return stored;
  });
}

/** Removes what the emails have in the blob store. */
export async function removeBlobs(blobs: BlobStore, emails: readonly Blobbed[]): Promise<void> {
  for (const { blobKey, attachments } of emails) {
    for (const key of [blobKey, ...attachments.map((one) => one.blobKey)]) {
      if (key !== null) await blobs.remove(key);
    }
  }
}

type Blobbed = Pick<NewEmail, 'blobKey'> & {
  readonly attachments: readonly { readonly blobKey: string | null }[];
};

/**
 * Runs the work; when it was certainly refused, the blobs go too. After a lost connection nobody knows
 * whether the emails exist, so their blobs stay.
 */
export async function keepBlobsUnlessRefused<T>(
  d: { readonly blobs: BlobStore },
  emails: readonly Blobbed[],
  work: () => Promise<T>,
): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (error instanceof Refusal) await removeBlobs(d.blobs, emails);
    throw error;
  }
}
