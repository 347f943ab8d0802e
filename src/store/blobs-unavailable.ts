// Tells "what keeps large messages does not answer" from every other error: 503 or 451 and later again.

/** The blob store cannot be asked right now; the cause says why. */
export class BlobsUnavailable extends Error {
  override name = 'BlobsUnavailable';
}

/** Looks through causes. */
export function isBlobsUnavailable(error: unknown): boolean {
  for (let at: unknown = error, depth = 0; at instanceof Error && depth < 5; depth++) {
    if (at instanceof BlobsUnavailable) return true;
    at = at.cause;
  }
  return false;
}
