// Sending given-up mail after all: what the tenant is told when there is nothing to send.
import type { Caller } from '../access/keys.ts';
import { Refusal } from '../access/refusal.ts';
import { findMessageBlob, releaseEmail, type NotReleased } from '../queue/release.ts';
import type { BlobStore } from '../store/blob.ts';
import type { Store } from '../store/orm.ts';

export interface ReleaseDependencies {
  readonly store: Store;
  readonly blobs: BlobStore;
  readonly lifetimeMs: number;
  /** Called after the commit: deliveries are ready. */
  readonly onReady: () => void;
}

const REASONS: Readonly<Record<NotReleased, string>> = {
  suppressed:
    'The recipients that were given up are on the suppression list. Remove them from it first, if they want mail from you.',
  unsubscribed:
    'The recipients of this email have opted out of what it is about. Only they can opt in again.',
  unknown:
    'Nobody can know whether this email arrived. Pass `"include_unknown": true` to send it again although there may be two copies then.',
  incomplete:
    'The attachments of this email could not be fetched, so there is no whole message to send. Send it again with attachments that can be fetched.',
  not_given_up:
    'No recipient of this email was given up: only those that failed or expired can be released.',
};

/** Releases the email's given-up recipients; which. Throws a Refusal when there are none or their message is gone. */
export async function releaseGivenUp(
  d: ReleaseDependencies,
  { tenantId }: Caller,
  about: { readonly id: string; readonly includeUnknown: boolean },
): Promise<readonly string[]> {
  const message = await findMessageBlob(d.store.pool, tenantId, about.id);
  if (message === null) throw new Refusal('not_found', 'Email not found');
  if (message.removedAt !== null) throw refuseRemoved(message.removedAt);
  if (message.blobKey !== null && !(await isThere(d.blobs, message.blobKey))) {
    throw new Refusal(
      'message_missing',
      'The stored bytes of this message are missing, so it cannot be sent again. Restore them from a backup, or send the email anew.',
    );
  }
  const release = await releaseEmail(
    d.store,
    { tenantId, emailId: about.id },
    { includeUnknown: about.includeUnknown, lifetimeMs: d.lifetimeMs },
  );
  if (release.outcome === 'not_found') throw new Refusal('not_found', 'Email not found');
  if (release.outcome === 'removed') throw refuseRemoved(release.at);
  if (release.outcome === 'nothing') {
    throw new Refusal('nothing_to_release', REASONS[release.why]);
  }
  d.onReady();
  return release.recipients;
}

const refuseRemoved = (at: Date): Refusal =>
  new Refusal(
    'message_missing',
    `What this email said was removed on ${at.toISOString()}, as old as the operator keeps it, so it cannot be sent again. Send the email anew.`,
  );

async function isThere(blobs: BlobStore, key: string): Promise<boolean> {
  const stream = await blobs.read(key, { offset: 0, length: 1 });
  stream?.destroy();
  return stream !== null;
}
