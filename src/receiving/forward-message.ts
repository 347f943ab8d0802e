// The bytes of a forwarded message, from those that are stored of the received one: read in pieces and written in pieces, so
// that a message of 50 MB costs no more memory than its header.
import { isAscii } from 'node:buffer';
import {
  FORWARD_HEAD_MAX,
  forwardFields,
  receivedFields,
  traceWithoutReturnPath,
} from '../mail/forward-header.ts';
import { rebuildAround, type ForwardNames } from '../mail/rebuild.ts';
import { INLINE_MAX_BYTES, type BlobStore } from '../store/blob.ts';
import { newId } from '../store/id.ts';

/** What is stored of a received message. */
export interface StoredOriginal {
  /** Null when it lies in the blob store. */
  readonly raw: Buffer | null;
  readonly blobKey: string | null;
  readonly rawSizeBytes: number;
  /** Our own fields on top of it. */
  readonly traceSizeBytes: number;
}

/** What is stored of the forwarded one; at most one of `raw` and `blobKey`. */
export interface ForwardBytes {
  readonly raw: Buffer | null;
  readonly blobKey: string | null;
  readonly rawSizeBytes: number;
  readonly needsSmtpUtf8: boolean;
}

export interface ForwardPlan extends ForwardNames {
  readonly method: 'relayed' | 'rebuilt';
  readonly token: string;
  /** Null: a return path of ours. */
  readonly envelopeFrom: string | null;
  /** The fields to put on top of a relayed message; absent: it is not sealed. */
  readonly seal?: (pieces: AsyncIterable<Buffer>, trace: Buffer) => Promise<Buffer>;
}

/** The stored message is gone, or is not the one that its row tells of. */
export class OriginalMissing extends Error {
  override name = 'OriginalMissing';
}

/** The beginning, with the whole header. Null: the bytes are gone. */
export async function readHead(blobs: BlobStore, stored: StoredOriginal): Promise<Buffer | null> {
  if (stored.raw !== null) return stored.raw;
  if (stored.blobKey === null) return null;
  const length = Math.min(stored.rawSizeBytes, FORWARD_HEAD_MAX);
  const stream = await blobs.read(stored.blobKey, { offset: 0, length });
  if (stream === null) return null;
  const chunks: Buffer[] = [];
  for await (const chunk of stream as AsyncIterable<Buffer>) chunks.push(chunk);
  return Buffer.concat(chunks);
}

/**
 * Makes the message; what is too large for a row is durable in the blob store when it resolves. Throws an OriginalMissing.
 */
export async function writeForward(
  blobs: BlobStore,
  stored: StoredOriginal,
  plan: ForwardPlan,
): Promise<ForwardBytes> {
  const head = await readHead(blobs, stored);
  if (head === null) throw new OriginalMissing('the message was removed');
  const trace = head.subarray(0, stored.traceSizeBytes);
  const original = (): AsyncGenerator<Buffer> => piecesOf(blobs, stored);
  const { top, tail } =
    plan.method === 'relayed'
      ? { top: await relayedTop(plan, { trace, original }), tail: Buffer.alloc(0) }
      : await rebuiltFrame(plan, { trace, original });
  const whole = async function* (): AsyncGenerator<Buffer> {
    yield top;
    yield* original();
    yield tail;
  };
  const rawSizeBytes = top.length + (stored.rawSizeBytes - stored.traceSizeBytes) + tail.length;
  const needsSmtpUtf8 =
    !isAscii(top) ||
    (plan.method === 'relayed' && plan.header.hasUtf8) ||
    !isAscii(Buffer.from(plan.envelopeFrom ?? ''));
  if (rawSizeBytes <= INLINE_MAX_BYTES) {
    const pieces: Buffer[] = [];
    for await (const piece of whole()) pieces.push(piece);
    return { raw: Buffer.concat(pieces), blobKey: null, rawSizeBytes, needsSmtpUtf8 };
  }
  const blobKey = newId();
  await blobs.write(blobKey, whole());
  return { raw: null, blobKey, rawSizeBytes, needsSmtpUtf8 };
}

interface Original {
  readonly trace: Buffer;
  readonly original: () => AsyncGenerator<Buffer>;
}

async function relayedTop(plan: ForwardPlan, { trace, original }: Original): Promise<Buffer> {
  const fields = Buffer.concat([
    Buffer.from(forwardFields(plan.target, plan.token)),
    traceWithoutReturnPath(trace),
  ]);
  if (plan.seal === undefined) return fields;
  const sealed = async function* (): AsyncGenerator<Buffer> {
    yield fields;
    yield* original();
  };
  return Buffer.concat([await plan.seal(sealed(), trace), fields]);
}

async function rebuiltFrame(
  plan: ForwardPlan,
  { trace, original }: Original,
): Promise<{ readonly top: Buffer; readonly tail: Buffer }> {
  let is8Bit = false;
  for await (const piece of original()) {
    is8Bit = !isAscii(piece);
    if (is8Bit) break;
  }
  const { head, tail } = rebuildAround({
    ...plan,
    top: forwardFields(plan.target, plan.token),
    received: receivedFields(trace),
    is8Bit,
  });
  return { top: head, tail };
}

/** What came, below our own fields. */
async function* piecesOf(blobs: BlobStore, stored: StoredOriginal): AsyncGenerator<Buffer> {
  const { raw, blobKey, traceSizeBytes, rawSizeBytes } = stored;
  if (raw !== null) {
    yield raw.subarray(traceSizeBytes);
    return;
  }
  const length = rawSizeBytes - traceSizeBytes;
  const range = { offset: traceSizeBytes, length };
  const stream = blobKey === null ? null : await blobs.read(blobKey, range);
  if (stream === null) throw new OriginalMissing('the message was removed');
  let sizeBytes = 0;
  for await (const chunk of stream as AsyncIterable<Buffer>) {
    sizeBytes += chunk.length;
    yield chunk;
  }
  if (sizeBytes !== length) {
    throw new OriginalMissing(`the stored message has ${sizeBytes} bytes, not ${length}`);
  }
}
