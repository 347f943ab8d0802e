/**
 * The thread that reads the signatures of large messages for verdicts-aside.ts, one message at a time. It asks the DNS
 * through the main thread only, and runs without a loader, so it imports only files that need none.
 */
import { Buffer } from 'node:buffer';
import { parentPort } from 'node:worker_threads';
import { dnsError, type Ask, type DnsRecords } from './verdicts-questions.ts';
import { readSignatures, type Signatures } from './verdicts-signatures.ts';

export type ToThread =
  | { readonly kind: 'message'; readonly raw: Uint8Array }
  | { readonly kind: 'answer'; readonly number: number; readonly records: DnsRecords }
  | { readonly kind: 'no_answer'; readonly number: number; readonly code: string };

export type FromThread =
  | {
      readonly kind: 'question';
      readonly number: number;
      readonly about: 'keys' | 'seals';
      readonly name: string;
      readonly type: string;
    }
  | { readonly kind: 'read'; readonly signatures: Signatures }
  | { readonly kind: 'failed'; readonly error: unknown };

interface Open {
  readonly resolve: (records: DnsRecords) => void;
  readonly reject: (error: Error) => void;
}

const port = parentPort;
const open = new Map<number, Open>();
let count = 0;

const send = (message: FromThread): void => port?.postMessage(message);

const askFor =
  (about: 'keys' | 'seals'): Ask =>
  (name, type) =>
    new Promise((resolve, reject) => {
      count += 1;
      open.set(count, { resolve, reject });
      send({ kind: 'question', number: count, about, name, type });
    });

async function read(raw: Buffer): Promise<void> {
  try {
    const asks = { askKeys: askFor('keys'), askSeals: askFor('seals') };
    send({ kind: 'read', signatures: await readSignatures(raw, asks) });
  } catch (error) {
    send({ kind: 'failed', error });
  } finally {
    open.clear();
  }
}

port?.on('message', (message: ToThread) => {
  if (message.kind === 'message') {
    const { raw } = message;
    void read(Buffer.from(raw.buffer, raw.byteOffset, raw.byteLength));
    return;
  }
  const question = open.get(message.number);
  open.delete(message.number);
  if (message.kind === 'answer') question?.resolve(message.records);
  else question?.reject(dnsError(message.code, 'no answer'));
});
