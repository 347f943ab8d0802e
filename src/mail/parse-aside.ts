/**
 * Reads messages without holding up the event loop: mail/parse.ts, with all but small ones read by a thread.
 *
 * In: a complete message from anybody. Out: what it shows, or null when it cannot be read, which is also what a
 * message gets that takes longer or more memory than any honest one: a few megabytes of addresses or of UTF-7 keep a
 * parser busy for minutes.
 *
 * Threads start with the first large message and do not keep the process alive.
 */
import { Buffer } from 'node:buffer';
import { Worker } from 'node:worker_threads';
import { parseMessage, type ParsedMessage } from './parse.ts';

/** The worst of this size takes about 0.2 s. */
const SMALL_BYTES = 32 * 1024;
/** 50 MB of base64 take about 2 s, of quoted-printable 10 s. */
const READING_MAX_MS = 15_000;
const HEAP_MAX_MB = 1_024;
/** Of one parser. */
const THREADS_MAX = 2;
/** Then an idle thread ends, with the memory that its largest message took. */
const IDLE_MS = 10_000;

interface Job {
  readonly raw: Buffer;
  readonly resolve: (parsed: ParsedMessage | null) => void;
  /** Runs while it waits for a thread. */
  patience?: NodeJS.Timeout;
}

interface Thread {
  readonly worker: Worker;
  job: Job | null;
  timer: NodeJS.Timeout | undefined;
}

export type Parser = (raw: Buffer) => Promise<ParsedMessage | null>;

/** `waitingMaxMs`: null for a message that gets no thread within this time. */
export function createParser({
  readingMaxMs = READING_MAX_MS,
  waitingMaxMs = Infinity,
  threadsMax = THREADS_MAX,
} = {}): Parser {
  const threads = new Set<Thread>();
  const waiting: Job[] = [];

  const assign = (): void => {
    while (waiting.length > 0) {
      const idle = [...threads].find(({ job }) => job === null);
      if (idle === undefined && threads.size >= threadsMax) return;
      give(idle ?? start(), waiting.shift()!);
    }
  };

  const give = (thread: Thread, job: Job): void => {
    clearTimeout(job.patience);
    thread.job = job;
    endAfter(thread, readingMaxMs);
    thread.worker.ref();
    const copy = new Uint8Array(job.raw);
    thread.worker.postMessage(copy, [copy.buffer]);
  };

  const endAfter = (thread: Thread, ms: number): NodeJS.Timeout => {
    clearTimeout(thread.timer);
    thread.timer = setTimeout(() => {
      lose(thread);
      void thread.worker.terminate();
    }, ms);
    return thread.timer;
  };

  const lose = (thread: Thread): void => {
    if (!threads.delete(thread)) return;
    clearTimeout(thread.timer);
    thread.job?.resolve(null);
    assign();
  };

  const start = (): Thread => {
    const thread: Thread = { worker: startThread(), job: null, timer: undefined };
    threads.add(thread);
    thread.worker.on('message', (parsed: ParsedMessage | null) => {
      const { job } = thread;
      thread.job = null;
      endAfter(thread, IDLE_MS).unref();
      thread.worker.unref();
      job?.resolve(parsed === null ? null : withBuffers(parsed));
      assign();
    });
    thread.worker.on('error', () => lose(thread));
    thread.worker.on('exit', () => lose(thread));
    return thread;
  };

  return (raw) => {
    if (raw.length <= SMALL_BYTES) return parseMessage(raw);
    return new Promise((resolve) => {
      const job: Job = { raw, resolve };
      waiting.push(job);
      if (waitingMaxMs < Infinity) {
        job.patience = setTimeout(() => {
          waiting.splice(waiting.indexOf(job), 1);
          resolve(null);
        }, waitingMaxMs);
      }
      assign();
    });
  };
}

/** For who asks to see a message. Never rejects. */
export const parseAside: Parser = createParser();

/** A Buffer arrives as the plain array that it is. */
const withBuffers = (parsed: ParsedMessage): ParsedMessage => ({
  ...parsed,
  attachments: parsed.attachments.map(({ content, ...about }) => ({
    ...about,
    content: Buffer.from(content.buffer, content.byteOffset, content.byteLength),
  })),
});

/** A built checkout runs .js, tests run .ts, which Node reads without a loader. */
function startThread(): Worker {
  const name = import.meta.url.endsWith('.ts') ? './parse-thread.ts' : './parse-thread.js';
  return new Worker(new URL(name, import.meta.url), {
    name: 'parsing',
    execArgv: [],
    resourceLimits: { maxOldGenerationSizeMb: HEAP_MAX_MB },
  });
}
