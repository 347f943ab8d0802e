/**
 * Signs messages without holding up the event loop: mail/dkim.ts, with the bodies above 64 KiB hashed by a thread.
 *
 * In: messages, whole or in pieces, and keys. Out: the fields to send in front. A body goes to the thread in pieces
 * through two small buffers that travel to and fro, so nothing holds or copies a message as a whole, and one in
 * memory stays the caller's.
 *
 * Threads start with the first large body and do not keep the process alive. One that dies fails the body it was
 * at; the next body gets a new one. It refuses (rejects) when too many large bodies wait, and after `close`.
 */
import { Worker } from 'node:worker_threads';
import { hashSmallBody, signMessage, signPieces } from '../mail/dkim.ts';
import type { MessagePieces, SigningRequest } from '../mail/dkim.ts';
import type { FromThread, ToThread } from './signing-thread.ts';

export interface Signing {
  /** The DKIM-Signature fields; rejects rather than leave one out. */
  sign(request: SigningRequest): Promise<Buffer>;
  /** The same for a message in pieces, read once; rejects with the error of the pieces where they fail. */
  signPieces(
    request: Omit<SigningRequest, 'message'> & { readonly pieces: MessagePieces },
  ): Promise<Buffer>;
  /** Ends the threads; what was under way or waiting rejects. */
  close(): Promise<void>;
}

export interface SigningOptions {
  readonly threadsMax?: number;
  /** Large bodies that wait for a thread. */
  readonly waitingMax?: number;
  /** A thread that speaks as signing-thread.ts does. */
  readonly startThread?: () => Worker;
}

/** Hashing this much takes about 0.2 ms, twice what it costs to ask a thread. */
const smallBodyOctetsMax = 65_536;
const pieceOctets = 262_144;
const piecesPerThread = 2;

interface Job {
  readonly body: Iterable<Uint8Array> | MessagePieces;
  readonly resolve: (bodyHash: string) => void;
  readonly reject: (error: Error) => void;
}

interface Thread {
  readonly worker: Worker;
  /** Pieces that are on this side, to be filled. */
  readonly spare: ArrayBuffer[];
  job: Job | null;
  isGone: boolean;
  /** Told when there is a spare piece, or the thread is gone. */
  wake: (() => void) | null;
}

export function createSigning({
  // One thread hashes about 300 MB a second, more than a link takes.
  threadsMax = 1,
  waitingMax = 512,
  startThread = startSigningThread,
}: SigningOptions = {}): Signing {
  const threads = new Set<Thread>();
  const waiting: Job[] = [];
  let isClosed = false;

  const hashLarge = (body: Job['body']): Promise<string> =>
    new Promise((resolve, reject) => {
      if (isClosed) throw closedError();
      if (waiting.length >= waitingMax)
        throw new Error(`signing: ${waitingMax} bodies are waiting`);
      waiting.push({ body, resolve, reject });
      assign();
    });
  const hashBody = (body: Uint8Array): string | Promise<string> =>
    body.length <= smallBodyOctetsMax ? hashSmallBody(body) : hashLarge([body]);

  /** Gives waiting bodies to threads that have none. */
  const assign = (): void => {
    for (let job = waiting[0]; job !== undefined; job = waiting[0]) {
      const idle = [...threads].find((thread) => thread.job === null);
      if (idle === undefined && threads.size >= threadsMax) return;
      waiting.shift();
      try {
        const thread = idle ?? addThread();
        thread.job = job;
        thread.worker.ref();
        void feed(thread, job);
      } catch (error) {
        job.reject(new Error('signing: no thread can be started', { cause: error }));
      }
    }
  };

  const addThread = (): Thread => {
    const worker = startThread();
    const spare = Array.from({ length: piecesPerThread }, () => new ArrayBuffer(pieceOctets));
    const thread: Thread = { worker, spare, job: null, isGone: false, wake: null };
    threads.add(thread);
    worker.on('message', (message: FromThread) => receive(thread, message));
    worker.on('error', (error: unknown) => {
      lose(thread, new Error('signing: the thread broke', { cause: error }));
    });
    worker.on('exit', (code) => lose(thread, new Error(`signing: the thread ended with ${code}`)));
    return thread;
  };

  const receive = (thread: Thread, { memory, bodyHash }: FromThread): void => {
    const { job } = thread;
    thread.spare.push(memory);
    thread.wake?.();
    if (job === null || bodyHash === null) return;
    thread.job = null;
    thread.worker.unref();
    job.resolve(bodyHash);
    assign();
  };

  const lose = (thread: Thread, error: Error): void => {
    if (!threads.delete(thread)) return;
    thread.job?.reject(error);
    leave(thread);
    assign();
  };

  return {
    async sign(request) {
      if (isClosed) throw closedError();
      return signMessage({ ...request, hashBody });
    },
    async signPieces(request) {
      if (isClosed) throw closedError();
      return signPieces({ ...request, hashBody: hashLarge });
    },
    async close() {
      isClosed = true;
      const ending = [...threads];
      threads.clear();
      for (const thread of ending) {
        thread.job?.reject(closedError());
        leave(thread);
      }
      for (const job of waiting.splice(0)) job.reject(closedError());
      await Promise.all(ending.map(({ worker }) => worker.terminate()));
    },
  };
}

/** Whoever feeds it stops. */
function leave(thread: Thread): void {
  thread.job = null;
  thread.isGone = true;
  thread.wake?.();
}

/** Sends the body as the thread gives memory back. Where the body fails, the thread ends it all the same. */
async function feed(thread: Thread, { body, reject }: Job): Promise<void> {
  try {
    for await (const octets of body) {
      for (let at = 0; at < octets.length; at += pieceOctets) {
        await send(thread, octets.subarray(at, at + pieceOctets), false);
        if (thread.isGone) return;
      }
    }
  } catch (error) {
    reject(error instanceof Error ? error : new Error(String(error)));
  }
  await send(thread, new Uint8Array(0), true);
}

async function send(thread: Thread, piece: Uint8Array, isLast: boolean): Promise<void> {
  while (thread.spare.length === 0 && !thread.isGone) {
    await new Promise<void>((resolve) => {
      thread.wake = resolve;
    });
    thread.wake = null;
  }
  const memory = thread.spare.pop();
  if (memory === undefined || thread.isGone) return;
  new Uint8Array(memory).set(piece);
  thread.worker.postMessage({ memory, length: piece.length, isLast } satisfies ToThread, [memory]);
}

/** A built checkout runs .js, tests run .ts, which Node reads without a loader. */
function startSigningThread(): Worker {
  const name = import.meta.url.endsWith('.ts') ? './signing-thread.ts' : './signing-thread.js';
  return new Worker(new URL(name, import.meta.url), { name: 'signing', execArgv: [] });
}

const closedError = (): Error => new Error('signing: closed');
