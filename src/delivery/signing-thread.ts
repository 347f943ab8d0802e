/**
 * The thread that hashes large bodies for signing.ts.
 *
 * In: pieces of one body at a time, in order. Out: for each piece its memory, to be filled again; with the last one
 * the hash. It runs without a loader, so it imports only files that need none.
 */
import { parentPort } from 'node:worker_threads';
import { createBodyHasher } from '../mail/dkim-body.ts';

export interface ToThread {
  readonly memory: ArrayBuffer;
  /** The octets at the start of `memory` that count. */
  readonly length: number;
  readonly isLast: boolean;
}

export interface FromThread {
  readonly memory: ArrayBuffer;
  /** With the last piece only. */
  readonly bodyHash: string | null;
}

let hasher = createBodyHasher();
const port = parentPort;
port?.on('message', ({ memory, length, isLast }: ToThread) => {
  hasher.update(new Uint8Array(memory, 0, length));
  const bodyHash = isLast ? hasher.digest() : null;
  if (isLast) hasher = createBodyHasher();
  port.postMessage({ memory, bodyHash } satisfies FromThread, [memory]);
});
