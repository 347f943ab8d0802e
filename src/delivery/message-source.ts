// A message as a stream of slices, as fast as a connection takes them. Tells when each slice leaves, and when the last
// one has: then only the final dot is left.
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
