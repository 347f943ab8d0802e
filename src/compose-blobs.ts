// Where large messages are kept, from the settings to an open store that is the right one: part of the composition root.
import { mkdirSync } from 'node:fs';
import { join } from 'node:path';
import { setTimeout as pause } from 'node:timers/promises';
import type { Pool } from 'pg';
import type { Config } from './config.ts';
import type { Logger } from './log.ts';
import { checkBlobStore } from './store/blob-identity.ts';
import { openDiskBlobs, type MarkedBlobStore } from './store/blob.ts';
import { measureBlobs } from './store/measured-blobs.ts';
import { BlobsUnavailable } from './store/blobs-unavailable.ts';
import { openS3Blobs } from './store/s3-blobs.ts';

/** Survives JSON: worker processes are told it. */
export type BlobPlace =
  | { readonly kind: 'disk'; readonly folder: string }
  /** As MAILSTEAD_BLOB_STORE says it. */
  | { readonly kind: 's3'; readonly url: string };

const WAIT_MAX_MS = 60_000;
const RETRY_MS = 2_000;

/** `dataDir` is absolute. */
export function blobPlaceOf({ blobStore }: Pick<Config, 'blobStore'>, dataDir: string): BlobPlace {
  return blobStore === 'disk'
    ? { kind: 'disk', folder: join(dataDir, 'blobs') }
    : { kind: 's3', url: blobStore };
}

/** Makes the folder when it is not there; asks no network yet. */
export function openBlobs(place: BlobPlace): MarkedBlobStore {
  if (place.kind === 's3') return measureBlobs(openS3Blobs(place.url));
  mkdirSync(place.folder, { recursive: true, mode: 0o700 });
  return measureBlobs(openDiskBlobs(place.folder));
}

/**
 * The same, once it is the one that the database's rows point into. A bucket that starts beside us may need a while.
 * Throws NotThisAppliance, BlobsUnavailable, or the signal's reason.
 */
export async function openOwnBlobs(
  place: BlobPlace,
  d: { readonly pool: Pool; readonly log: Logger; readonly signal: AbortSignal },
): Promise<MarkedBlobStore> {
  const blobs = openBlobs(place);
  const deadline = Date.now() + WAIT_MAX_MS;
  for (;;) {
    d.signal.throwIfAborted();
    try {
      await checkBlobStore({ pool: d.pool, blobs, where: describePlace(place) });
      return blobs;
    } catch (error) {
      if (!(error instanceof BlobsUnavailable) || Date.now() > deadline) throw error;
      d.log.info({ reason: error.message }, 'waiting for the blob store');
      await pause(RETRY_MS, undefined, { signal: d.signal });
    }
  }
}

/** Without the password. */
function describePlace(place: BlobPlace): string {
  if (place.kind === 'disk') return `the folder ${place.folder}`;
  const { hostname, pathname } = new URL(place.url);
  return `the bucket s3://${hostname}${pathname.replace(/\/$/, '')}`;
}
