// A message on its way to a connection: a small one whole, as it is on the wire; a larger one as a stream of slices, as
// fast as the connection takes them, that tells when each slice leaves, and when the last one has: then only the final
// dot is left.
import { Readable } from 'node:stream';

/** The message from its first byte to its last: in memory, or read as the connection takes it. */
export type MessageBody = readonly Buffer[] | AsyncIterable<Buffer>;

const SLICE_BYTES = 64 * 1024;

interface Steps {
  readonly onSlice: () => void;
  readonly onDot: () => void;
}

/** The message in slices, and the last thing before its end is to call `onDot`. */
export function readSlices(body: MessageBody, { onSlice, onDot }: Steps): Readable {
  if (Array.isArray(body)) return fromMemory(body as readonly Buffer[], { onSlice, onDot });
  const read = async function* (): AsyncGenerator<Buffer> {
    for await (const slice of body) {
      onSlice();
      yield slice;
    }
    onDot();
  };
  return Readable.from(read(), { objectMode: false, highWaterMark: SLICE_BYTES });
}

function fromMemory(chunks: readonly Buffer[], { onSlice, onDot }: Steps): Readable {
  let chunk = 0;
  let offset = 0;
  return new Readable({
    highWaterMark: SLICE_BYTES,
    read() {
      const current = chunks[chunk];
      if (current === undefined) {
        try {
          onDot();
          this.push(null);
        } catch (error) {
          this.destroy(error as Error);
        }
        return;
      }
      onSlice();
      const end = Math.min(offset + SLICE_BYTES, current.length);
      const slice = current.subarray(offset, end);
      if (end === current.length) {
        chunk += 1;
        offset = 0;
      } else {
        offset = end;
      }
      this.push(slice);
    },
  });
}

/** All of a message that is no longer than one slice; null for any other. */
export function wholeOf(body: MessageBody): Buffer | null {
  if (!Array.isArray(body)) return null;
  const chunks = body as readonly Buffer[];
  let sizeBytes = 0;
  for (const { length } of chunks) sizeBytes += length;
  return sizeBytes > SLICE_BYTES ? null : Buffer.concat(chunks, sizeBytes);
}

const END = Buffer.from('.\r\n');
/** A line end that is not CRLF, or a dot at the start of a line. */
const ODD = /\r(?!\n)|(?<!\r)\n|(?:^|\n)\./;

/**
 * A whole message as DATA carries it, with the final dot (RFC 5321 §4.5.2). Bare CR and bare LF become CRLF: a host that
 * takes one for the end of a line must not find the end of the message behind it.
 */
export function toWire(message: Buffer): Buffer {
  const text = message.toString('latin1');
  if (text.endsWith('\r\n') && !ODD.test(text)) return Buffer.concat([message, END]);
  const lines = text.replace(/\r\n|\r|\n/g, '\r\n');
  const ended = lines.endsWith('\r\n') ? lines : `${lines}\r\n`;
  return Buffer.concat([Buffer.from(ended.replace(/^\./gm, '..'), 'latin1'), END]);
}
