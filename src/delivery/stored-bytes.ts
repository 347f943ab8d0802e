// The bytes of a stored message, for signing and for sending: small ones whole, large ones read from the blob store
// piece by piece, once for each purpose, so that a message of 40 MB costs a worker no more than one of 1 MB.
import type { ClaimedDelivery } from '../queue/claim.ts';
import type { BlobStore } from '../store/blob.ts';

export interface StoredBytes {
  readonly sizeBytes: number;
  /** Null when it is to be read in pieces. */
  readonly whole: Buffer | null;
  /** From the first byte to the last; throws when the store fails, or has another message than was stored. */
  readonly pieces: () => AsyncGenerator<Buffer>;
  /** What `pieces` threw. */
  readonly fault: Error | null;
}

/** Above this a message is not held in memory. */
export const WHOLE_MAX_BYTES = 1024 * 1024;

/** Null when there are no bytes to send. */
export async function openMessage(
  blobs: BlobStore,
  delivery: Pick<ClaimedDelivery, 'raw' | 'blobKey' | 'rawSizeBytes'>,
): Promise<StoredBytes | null> {
  const { raw, blobKey, rawSizeBytes } = delivery;
  if (raw !== null || blobKey === null || rawSizeBytes <= WHOLE_MAX_BYTES) {
    const whole = raw ?? (blobKey === null ? null : await blobs.get(blobKey));
    return whole === null ? null : inMemory(whole);
  }
  const first = await blobs.read(blobKey, { offset: 0, length: 1 });
  if (first === null) return null;
  first.destroy();
  let fault: Error | null = null;
  return {
    sizeBytes: rawSizeBytes,
    whole: null,
    get fault() {
      return fault;
    },
    async *pieces() {
      try {
        yield* read(blobs, { blobKey, rawSizeBytes });
      } catch (error) {
        fault = error instanceof Error ? error : new Error(String(error));
        throw fault;
      }
    },
  };
}

function inMemory(whole: Buffer): StoredBytes {
  return {
    sizeBytes: whole.length,
    whole,
    fault: null,
    async *pieces() {
      yield whole;
    },
  };
}

async function* read(
  blobs: BlobStore,
  { blobKey, rawSizeBytes }: { readonly blobKey: string; readonly rawSizeBytes: number },
): AsyncGenerator<Buffer> {
  const stream = await blobs.read(blobKey);
  if (stream === null) throw new Error('the message was removed from the blob store');
  let sizeBytes = 0;
  for await (const chunk of stream as AsyncIterable<Buffer>) {
    sizeBytes += chunk.length;
    yield chunk;
  }
  // Before the final dot, so that half a message is never taken for a whole one.
  if (sizeBytes !== rawSizeBytes) {
    throw new Error(`the stored message has ${sizeBytes} bytes, not ${rawSizeBytes}`);
  }
}
