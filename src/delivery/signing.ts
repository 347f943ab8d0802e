/**
 * Signs messages without holding up the event loop: mail/dkim.ts, with the bodies above 64 KiB hashed by a thread.
 *
 * In: messages and keys. Out: the fields to send in front. A body goes to the thread in pieces through two small
 * buffers that travel to and fro, so nothing copies a message as a whole and the message stays the caller's.
 *
 * Threads start with the first large body and do not keep the process alive. One that dies fails the body it was
 * at; the next body gets a new one. It refuses (rejects) when too many large bodies wait, and after `close`.
 */
import { Worker } from 'node:worker_threads';
import { hashSmallBody, signMessage } from '../mail/dkim.ts';
import type { SigningRequest } from '../mail/dkim.ts';
import type { FromThread, ToThread } from './signing-thread.ts';

export interface Signing {
  /** The DKIM-Signature fields; rejects rather than leave one out. */
  sign(request: SigningRequest): Promise<Buffer>;
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
  readonly body: Uint8Array;
  offset: number;
  readonly resolve: (bodyHash: string) => void;
  readonly reject: (error: Error) => void;
}

interface Thread {
  readonly worker: Worker;
  /** Pieces that are on this side, to be filled. */
  readonly spare: ArrayBuffer[];
  job: Job | null;
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

  const hashBody = (body: Uint8Array): string | Promise<string> => {
    if (body.length <= smallBodyOctetsMax) return hashSmallBody(body);
    return new Promise((resolve, reject) => {
      if (isClosed) throw closedError();
      if (waiting.length >= waitingMax)
        throw new Error(`signing: ${waitingMax} bodies are waiting`);
      waiting.push({ body, offset: 0, resolve, reject });
      assign();
    });
  };

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
        feed(thread, job);
      } catch (error) {
        job.reject(new Error('signing: no thread can be started', { cause: error }));
      }
    }
  };

  const addThread = (): Thread => {
    const worker = startThread();
    const spare = Array.from({ length: piecesPerThread }, () => new ArrayBuffer(pieceOctets));
    const thread: Thread = { worker, spare, job: null };
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
    if (job === null) return;
    if (bodyHash === null) {
      feed(thread, job);
      return;
    }
    thread.job = null;
    thread.worker.unref();
    job.resolve(bodyHash);
    assign();
  };

  const lose = (thread: Thread, error: Error): void => {
    if (!threads.delete(thread)) return;
    thread.job?.reject(error);
    thread.job = null;
    assign();
  };

  return {
    async sign(request) {
      if (isClosed) throw closedError();
      return signMessage({ ...request, hashBody });
    },
    async close() {
      isClosed = true;
      const ending = [...threads];
      threads.clear();
      for (const { job } of ending) job?.reject(closedError());
      for (const job of waiting.splice(0)) job.reject(closedError());
      await Promise.all(ending.map(({ worker }) => worker.terminate()));
    },
  };
}

/** Sends as much of the body as there is memory for. */
function feed({ worker, spare }: Thread, job: Job): void {
  while (job.offset < job.body.length) {
    const memory = spare.pop();
    if (memory === undefined) return;
    const piece = job.body.subarray(job.offset, job.offset + memory.byteLength);
    new Uint8Array(memory).set(piece);
    job.offset += piece.length;
    const isLast = job.offset === job.body.length;
    worker.postMessage({ memory, length: piece.length, isLast } satisfies ToThread, [memory]);
  }
}

/** A built checkout runs .js, tests run .ts, which Node reads without a loader. */
function startSigningThread(): Worker {
  const name = import.meta.url.endsWith('.ts') ? './signing-thread.ts' : './signing-thread.js';
  return new Worker(new URL(name, import.meta.url), { name: 'signing', execArgv: [] });
}

const closedError = (): Error => new Error('signing: closed');
