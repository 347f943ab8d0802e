/**
 * The thread that reads messages for parse-aside.ts, one at a time.
 *
 * In: a message. Out: what it shows, or null. It runs without a loader, so it imports only files that need none.
 */
import { Buffer } from 'node:buffer';
import { parentPort } from 'node:worker_threads';
import { parseMessage } from './parse.ts';

const port = parentPort;
port?.on('message', (raw: Uint8Array) => {
  const message = Buffer.from(raw.buffer, raw.byteOffset, raw.byteLength);
  void parseMessage(message).then((parsed) => port.postMessage(parsed));
});
