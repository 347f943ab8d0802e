// Reads the signatures of messages without holding up the event loop: small ones at once, all others in a thread, which
// is ended when its time is over. Threads start with the first large message and do not keep the process alive.
import { Worker } from 'node:worker_threads';
import { readSignatures, type Asks, type Signatures } from './verdicts-signatures.ts';
import type { FromThread, ToThread } from './verdicts-thread.ts';

/** Beyond this a message may take longer than the event loop has. */
const SMALL_BYTES = 128 * 1_024;
const SMALL_HEADER_BYTES = 32 * 1_024;
const THREADS_MAX = 2;
const HEAP_MAX_MB = 512;
/** Then an idle thread ends. */
const IDLE_MS = 10_000;

interface Job {
  readonly raw: Buffer;
  readonly asks: Asks;
  readonly settle: (result: Signatures | Error | null) => void;
}

interface Thread {
  readonly worker: Worker;
  job: Job | null;
  idle: NodeJS.Timeout | undefined;
}

export interface SignatureReader {
  /**
   * Null: not within `endsAtMs` (`performance.now()`), with the wait for a thread; small messages have no such end, the
   * asks have. Rejects where mailauth throws and where a thread breaks.
   */
  read(raw: Buffer, asks: Asks, endsAtMs: number): Promise<Signatures | null>;
  /** What is being read in a thread ends as null, and nothing is read in one any more. */
  close(): Promise<void>;
}

export function createSignatureReader({
  startThread = startSignatureThread,
  threadsMax = THREADS_MAX,
}: {
  readonly startThread?: () => Worker;
  readonly threadsMax?: number;
} = {}): SignatureReader {
  const threads = new Set<Thread>();
  const waiting = new Set<Job>();
  let isClosed = false;

  const assign = (): void => {
    for (const job of waiting) {
      const idle = [...threads].find((thread) => thread.job === null);
      if (idle === undefined && threads.size >= threadsMax) return;
      waiting.delete(job);
      give(idle ?? start(), job);
    }
  };

  const give = (thread: Thread, job: Job): void => {
    clearTimeout(thread.idle);
    thread.job = job;
    thread.worker.ref();
    const raw = new Uint8Array(job.raw);
    post(thread, { kind: 'message', raw }, [raw.buffer]);
  };

  const start = (): Thread => {
    const thread: Thread = { worker: startThread(), job: null, idle: undefined };
    threads.add(thread);
    thread.worker.on('message', (message: FromThread) => hear(thread, message));
    thread.worker.on('error', (error: unknown) => {
      lose(thread, new Error('the thread that reads signatures broke', { cause: error }));
    });
    thread.worker.on('exit', (code) => {
      lose(thread, new Error(`the thread that reads signatures ended with ${code}`));
    });
    return thread;
  };

  const hear = (thread: Thread, message: FromThread): void => {
    const { job } = thread;
    if (job === null) return;
    if (message.kind === 'question') {
      const ask = message.about === 'keys' ? job.asks.askKeys : job.asks.askSeals;
      const { number } = message;
      ask(message.name, message.type).then(
        (records) => post(thread, { kind: 'answer', number, records }),
        (error: unknown) => {
          const code = error instanceof Error && 'code' in error ? String(error.code) : 'ESERVFAIL';
          post(thread, { kind: 'no_answer', number, code });
        },
      );
      return;
    }
    thread.job = null;
    thread.worker.unref();
    thread.idle = setTimeout(() => {
      if (threads.delete(thread)) void thread.worker.terminate();
    }, IDLE_MS).unref();
    const { kind } = message;
    job.settle(kind === 'read' ? message.signatures : errorOf(message.error));
    assign();
  };

  const lose = (thread: Thread, result: Error | null): void => {
    if (!threads.delete(thread)) return;
    clearTimeout(thread.idle);
    thread.job?.settle(result);
    if (!isClosed) assign();
  };

  const readAside = (raw: Buffer, asks: Asks, endsAtMs: number): Promise<Signatures | null> =>
    new Promise((resolve, reject) => {
      const timer = setTimeout(() => giveUp(job), Math.max(0, endsAtMs - performance.now()));
      const job: Job = {
        raw,
        asks,
        settle: (result) => {
          clearTimeout(timer);
          if (result instanceof Error) reject(result);
          else resolve(result);
        },
      };
      waiting.add(job);
      assign();
    });

  const giveUp = (job: Job): void => {
    if (waiting.delete(job)) return job.settle(null);
    const thread = [...threads].find((one) => one.job === job);
    if (thread === undefined) return;
    lose(thread, null);
    void thread.worker.terminate();
  };

  return {
    read: async (raw, asks, endsAtMs) => {
      if (isSmall(raw)) return readSignatures(raw, asks);
      return isClosed ? null : readAside(raw, asks, endsAtMs);
    },
    async close() {
      isClosed = true;
      for (const job of waiting) job.settle(null);
      waiting.clear();
      const ending = [...threads];
      for (const thread of ending) lose(thread, null);
      await Promise.all(ending.map(({ worker }) => worker.terminate()));
    },
  };
}

function isSmall(raw: Buffer): boolean {
  if (raw.length > SMALL_BYTES) return false;
  if (raw.length <= SMALL_HEADER_BYTES) return true;
  const end = raw.subarray(0, SMALL_HEADER_BYTES).indexOf('\r\n\r\n');
  return end !== -1 || raw.subarray(0, 2).equals(Buffer.from('\r\n'));
}

const post = (thread: Thread, message: ToThread, memory: readonly ArrayBuffer[] = []): void =>
  thread.worker.postMessage(message, memory);

const errorOf = (error: unknown): Error =>
  error instanceof Error ? error : new Error(`the signatures could not be read: ${String(error)}`);

/** A built checkout runs .js, tests run .ts, which Node reads without a loader. */
function startSignatureThread(): Worker {
  const name = import.meta.url.endsWith('.ts') ? './verdicts-thread.ts' : './verdicts-thread.js';
  return new Worker(new URL(name, import.meta.url), {
    name: 'signatures',
    execArgv: [],
    resourceLimits: { maxOldGenerationSizeMb: HEAP_MAX_MB },
  });
}
