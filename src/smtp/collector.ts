// Collects messages in memory while they arrive; all of a listener together have room for so many bytes.
import type { SMTPServerDataStream } from 'smtp-server';

/** A message whose final dot was read. */
export interface Collected {
  /** There was no room for all of it. */
  readonly isTooMuch: boolean;
  /** The message, where there was room and smtp-server found it not too large. */
  readonly bytes: () => Buffer;
  /** Its room is free again; call once it is answered. */
  readonly release: () => void;
}

/** `onEnd` is called once, after the last byte; never when the client is lost before the final dot. */
export type Collect = (stream: SMTPServerDataStream, onEnd: (message: Collected) => void) => void;

export function createCollector(maxBytes: number): Collect {
  let held = 0;
  return (stream, onEnd) => {
    let chunks: Buffer[] = [];
    let sizeBytes = 0;
    let isTooMuch = false;
    const release = (): void => {
      held -= sizeBytes;
      sizeBytes = 0;
      chunks = [];
    };
    stream.on('data', (chunk: Buffer) => {
      if (held + chunk.length > maxBytes) isTooMuch = true;
      // smtp-server answers an oversized message by itself, after its last byte.
      if (isTooMuch || stream.sizeExceeded) return release();
      chunks.push(chunk);
      sizeBytes += chunk.length;
      held += chunk.length;
    });
    // The client left before the final dot. Not an `end`: nothing was received.
    stream.on('error', release);
    stream.on('end', () =>
      onEnd({ isTooMuch, bytes: () => Buffer.concat(chunks, sizeBytes), release }),
    );
  };
}
