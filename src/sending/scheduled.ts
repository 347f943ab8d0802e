// What can still be done with an email that waits for its time: canceling it, and moving it to another time.
import type { Caller } from '../access/keys.ts';
import { Refusal } from '../access/refusal.ts';
import {
  cancelEmail,
  dateText,
  findScheduledBlob,
  rescheduleEmail,
  type ScheduleChange,
} from '../queue/schedule.ts';
import type { BlobStore } from '../store/blob.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { checkSchedule } from './request.ts';

export interface ScheduledDependencies {
  readonly store: Store;
  readonly blobs: BlobStore;
  readonly now: () => Date;
  /** Called after the commit: an email is to be sent then. */
  readonly onPlanned: (at: Date) => void;
}

/** Cancels the email, for good. Throws a Refusal when the tenant has no such email or it does not wait any more. */
export async function cancelScheduled(
  d: ScheduledDependencies,
  caller: Caller,
  id: string,
): Promise<void> {
  const change = await cancelEmail(d.store, caller.tenantId, id);
  if (change.outcome !== 'canceled') throw refuse(change.outcome, 'canceled');
  for (const key of change.blobKeys) await d.blobs.remove(key);
}

/** Moves the email to the time that `scheduledAt` says, in the words of a request. Throws a Refusal as above. */
export async function moveScheduled(
  d: ScheduledDependencies,
  caller: Caller,
  move: { readonly id: string; readonly scheduledAt: string | null | undefined },
): Promise<void> {
  const at = checkSchedule(move.scheduledAt, d.now());
  const blobKey = await copyWithDate(d, caller.tenantId, { id: move.id, at });
  // After a lost connection nobody knows which of the two blobs the email has, so both stay; the one without a row
  // is collected (collect-blobs.ts).
  const change = await rescheduleEmail(d.store, caller.tenantId, move.id, {
    scheduledAt: at,
    blobKey,
  });
  const isMoved = change.outcome === 'rescheduled';
  const spare = isMoved ? change.replacedBlob : blobKey;
  if (spare !== null) await d.blobs.remove(spare);
  if (!isMoved) throw refuse(change.outcome, 'rescheduled');
  d.onPlanned(at);
}

/** Moves of one email at the same time, each of which takes the blob away that another is about to read. */
const COPIES_MAX = 10;
const DATE_FIELD = Buffer.from('\r\nDate: ');
/** No header that is composed comes near. */
const HEADER_MAX_BYTES = 1024 * 1024;

/** Copies the email's blob with another date in its header; the key of the copy, or null where there is no blob. */
async function copyWithDate(
  { store, blobs }: ScheduledDependencies,
  tenantId: string,
  { id, at }: { readonly id: string; readonly at: Date },
): Promise<string | null> {
  for (let copies = 0; copies < COPIES_MAX; copies++) {
    const from = await findScheduledBlob(store.pool, tenantId, id);
    const stream = from === null ? null : await blobs.read(from);
    if (from === null) return null;
    if (stream === null) continue; // moved by somebody else since
    const to = newId();
    try {
      await blobs.write(to, withDate(stream, dateText(at)));
    } finally {
      stream.destroy(); // where the disk failed before anything was read
    }
    return to;
  }
  throw new Error('the message of a scheduled email is missing from the blob store');
}

/** In place: every date is equally long, so that attachments stay where they are. */
async function* withDate(chunks: AsyncIterable<Buffer>, date: Buffer): AsyncGenerator<Buffer> {
  let head: Buffer | null = Buffer.alloc(0);
  for await (const chunk of chunks) {
    if (head === null) {
      yield chunk;
      continue;
    }
    head = Buffer.concat([head, chunk]);
    const isWhole = placeDate(head, date) || head.length > HEADER_MAX_BYTES;
    if (!isWhole) continue;
    yield head;
    head = null;
  }
  if (head !== null) yield head;
}

function placeDate(head: Buffer, date: Buffer): boolean {
  const at = head.indexOf(DATE_FIELD);
  const start = at + DATE_FIELD.length;
  if (at === -1 || head.length < start + date.length) return false;
  date.copy(head, start);
  return true;
}

// 422 and not 400: the contract lists both for these routes, and official clients look for 422.
const refuse = (outcome: ScheduleChange, what: string): Refusal =>
  outcome === 'not_found'
    ? new Refusal('not_found', 'Email not found')
    : new Refusal(
        'email_not_scheduled',
        `Only an email that is still scheduled can be ${what}; this one is not.`,
      );
