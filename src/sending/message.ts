// From a checked email to its stored message: small ones as bytes for their row, large ones streamed into the blob
// store, so that no attachment is ever held whole. The same input gives the same bytes.
import { open } from 'node:fs/promises';
import { Refusal } from '../access/refusal.ts';
import {
  composeSegments,
  type Attachment,
  type Composition,
  type MessageParts,
} from '../mail/compose.ts';
import { base64Piece, BASE64_PIECE_OCTETS } from '../mail/transfer-encoding.ts';
import type { NewAttachment } from '../queue/enqueue.ts';
import { INLINE_MAX_BYTES, type BlobStore } from '../store/blob.ts';
import { newId } from '../store/id.ts';
import { contentSize, type CheckedAttachment } from './attachments.ts';

export interface MessageInput extends Omit<MessageParts, 'boundarySeed' | 'attachments'> {
  /** Seeds the boundaries. */
  readonly emailId: string;
  readonly attachments: readonly CheckedAttachment[];
}

export interface StoredMessage {
  /** At most one of the two; neither while attachments are to be fetched. */
  readonly raw: Buffer | null;
  readonly blobKey: string | null;
  /** 0 while there is no message yet. */
  readonly rawSizeBytes: number;
  readonly needsSmtpUtf8: boolean;
  /** In the order of the input. */
  readonly attachments: readonly NewAttachment[];
}

/** Attachments, bodies and line ends together. */
export const MESSAGE_MAX_BYTES = 60 * 1024 * 1024;

/**
 * Composes the message and stores it where it is too large for a row. With an attachment that is still to be
 * fetched nothing is composed: what the request held is staged in the blob store. Blobs are durable when this
 * resolves; after a failure none is left. Throws a Refusal (413) when the message is too large.
 */
export async function storeMessage(blobs: BlobStore, input: MessageInput): Promise<StoredMessage> {
  if (input.attachments.some(({ content }) => content === null)) return stage(blobs, input);
  const parts = input.attachments.map((one): FilePart => ({
    filename: one.filename,
    contentType: one.contentType,
    contentId: one.contentId,
    content: Buffer.isBuffer(one.content)
      ? one.content
      : { sizeBytes: one.content === null ? 0 : contentSize(one.content) },
    source: one.content!,
  }));
  const composition = composeSegments({
    ...input,
    boundarySeed: input.emailId,
    attachments: parts,
  });
  const { sizeBytes, needsSmtpUtf8, places } = composition;
  if (sizeBytes > MESSAGE_MAX_BYTES) {
    throw new Refusal(
      'request_too_large',
      `The message has ${sizeBytes} bytes; at most ${MESSAGE_MAX_BYTES} are allowed.`,
    );
  }
  const attachments = input.attachments.map((one, index) => ({
    ...describe(one),
    sizeBytes: contentSize(one.content!),
    blobKey: null,
    rawOffset: places[index]!.offset,
    rawLength: places[index]!.length,
  }));
  const stored = { rawSizeBytes: sizeBytes, needsSmtpUtf8, attachments };
  const chunks = chunksOf(composition, { blobs, parts });
  if (sizeBytes <= INLINE_MAX_BYTES) {
    const raw: Buffer[] = [];
    for await (const chunk of chunks) raw.push(chunk);
    return { ...stored, raw: Buffer.concat(raw, sizeBytes), blobKey: null };
  }
  const blobKey = newId();
  await blobs.write(blobKey, chunks);
  return { ...stored, raw: null, blobKey };
}

/** An attachment with where its bytes are. */
interface FilePart extends Attachment {
  readonly source: NonNullable<CheckedAttachment['content']>;
}

type Described = Pick<
  NewAttachment,
  'id' | 'filename' | 'contentType' | 'contentId' | 'disposition' | 'url'
>;

const describe = (one: CheckedAttachment): Described => ({
  id: newId(),
  filename: one.filename,
  contentType: one.contentType,
  contentId: one.contentId,
  disposition: one.disposition,
  url: one.url,
});

async function stage(blobs: BlobStore, input: MessageInput): Promise<StoredMessage> {
  const staged: string[] = [];
  const attachments: NewAttachment[] = [];
  try {
    for (const one of input.attachments) {
      const blobKey = one.content === null ? null : newId();
      if (blobKey !== null) {
        staged.push(blobKey);
        await blobs.write(blobKey, piecesOf(one.content!, blobs));
      }
      attachments.push({
        ...describe(one),
        sizeBytes: one.content === null ? null : contentSize(one.content),
        blobKey,
        rawOffset: null,
        rawLength: null,
      });
    }
  } catch (error) {
    for (const key of staged) await blobs.remove(key);
    throw error;
  }
  const { needsSmtpUtf8 } = composeSegments({
    ...input,
    boundarySeed: input.emailId,
    attachments: [],
  });
  return { raw: null, blobKey: null, rawSizeBytes: 0, needsSmtpUtf8, attachments };
}

/** The message from its first byte to its last. */
async function* chunksOf(
  { segments, places }: Composition,
  d: { readonly blobs: BlobStore; readonly parts: readonly FilePart[] },
): AsyncGenerator<Buffer> {
  for (const segment of segments) {
    if (Buffer.isBuffer(segment)) {
      yield segment;
      continue;
    }
    const { source } = d.parts[segment.index]!;
    let encodedBytes = 0;
    for await (const piece of piecesOf(source, d.blobs)) {
      const lines = base64Piece(piece, encodedBytes === 0);
      encodedBytes += lines.length;
      yield lines;
    }
    // A file that changed below us would move everything that comes after it.
    if (encodedBytes !== places[segment.index]!.length) {
      throw new Error('an attachment does not have the size that it was announced with');
    }
  }
}

/** Content in pieces of BASE64_PIECE_OCTETS, but for the last. */
async function* piecesOf(
  source: NonNullable<CheckedAttachment['content']>,
  blobs: BlobStore,
): AsyncGenerator<Buffer> {
  if (Buffer.isBuffer(source)) {
    for (let at = 0; at < source.length; at += BASE64_PIECE_OCTETS) {
      yield source.subarray(at, at + BASE64_PIECE_OCTETS);
    }
    return;
  }
  if ('blobKey' in source) {
    const stream = await blobs.read(source.blobKey);
    if (stream === null) throw new Error('a staged attachment is gone');
    yield* regroup(stream);
    return;
  }
  const file = await open(source.path, 'r');
  try {
    const piece = Buffer.allocUnsafeSlow(BASE64_PIECE_OCTETS);
    for (let at = 0; at < source.sizeBytes;) {
      const length = await readFully(file, piece, at);
      if (length === 0) break;
      at += length;
      yield piece.subarray(0, length); // overwritten by the next one: whoever keeps it copies it
    }
  } finally {
    await file.close();
  }
}

/** Fills the buffer from `position` on as far as the file goes. */
async function readFully(
  file: Awaited<ReturnType<typeof open>>,
  into: Buffer,
  position: number,
): Promise<number> {
  let filled = 0;
  while (filled < into.length) {
    const { bytesRead } = await file.read(into, filled, into.length - filled, position + filled);
    if (bytesRead === 0) break;
    filled += bytesRead;
  }
  return filled;
}

async function* regroup(chunks: AsyncIterable<Buffer>): AsyncGenerator<Buffer> {
  let kept: Buffer = Buffer.alloc(0);
  for await (const chunk of chunks) {
    kept = kept.length === 0 ? chunk : Buffer.concat([kept, chunk]);
    while (kept.length >= BASE64_PIECE_OCTETS) {
      yield kept.subarray(0, BASE64_PIECE_OCTETS);
      kept = kept.subarray(BASE64_PIECE_OCTETS);
    }
  }
  if (kept.length > 0) yield kept;
}
