// Where the messages end: Postfix's own smtp-sink where it is installed, else sink-process.ts. Both write a
// running counter to a file, from which it is read; nothing is asked of them while they are measured.
import { chmodSync, fstatSync, mkdirSync, openSync, closeSync, readSync } from 'node:fs';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import {
  BenchFailed,
  startProgram,
  until,
  untilListening,
  type Cleanup,
  type Running,
} from './children.ts';
import { cpuOf, readTree } from './processes.ts';

export interface Sink {
  readonly port: number;
  /** Messages so far. */
  count(): number;
  /** Resolves with the time of the last one (performance.now), give or take 5 ms. */
  untilCount(count: number, maxMs: number): Promise<number>;
  cpuS(): number;
  stop(): Promise<void>;
}

const OWN_SINK = fileURLToPath(new URL('./sink-process.ts', import.meta.url));
const TAIL_BYTES = 256;
const POLL_MS = 5;
/** Without one more message for this long, no more is awaited. */
const STALL_MS = 30_000;
const CONNECTIONS_MAX = '300';
const BACKLOG = '1024';

/**
 * `dumpFolder`: keep every message there as a file, for samples only. `addresses`: so many of addresses.ts besides
 * 127.0.0.1, at the same port; then it is our own program.
 */
export async function startSink(options: {
  readonly program: string | null;
  readonly port: number;
  readonly folder: string;
  readonly dumpFolder?: string;
  readonly addresses?: number;
  /** How long each reply takes; then it is our own program as well. */
  readonly replyMs?: number;
  readonly cleanup: Cleanup;
}): Promise<Sink> {
  const { port, cleanup, dumpFolder, addresses = 0, replyMs = 0 } = options;
  const program = addresses + replyMs > 0 ? null : options.program;
  const log = join(options.folder, `sink-${Date.now()}.count`);
  if (dumpFolder !== undefined) {
    mkdirSync(dumpFolder);
    chmodSync(dumpFolder, 0o777);
  }
  // As root, smtp-sink wants to know whom to become.
  const user = process.getuid?.() === 0 ? ['-u', 'nobody'] : [];
  const dump = dumpFolder === undefined ? [] : ['-d', `${dumpFolder}/message.`];
  const running: Running = await startProgram({
    command: program ?? process.execPath,
    args:
      program === null
        ? [OWN_SINK, String(port), dumpFolder ?? '', String(addresses), String(replyMs)]
        : ['-c', '-m', CONNECTIONS_MAX, ...user, ...dump, `127.0.0.1:${port}`, BACKLOG],
    log,
    cleanup,
  });
  await untilListening(port, running);
  const file = openSync(log, 'r');
  const { stop } = cleanup.add(async () => {
    closeSync(file);
    await running.stop();
  });
  const count = (): number => {
    const sizeBytes = fstatSync(file).size;
    const tail = Buffer.alloc(TAIL_BYTES);
    const read = readSync(file, tail, 0, TAIL_BYTES, Math.max(0, sizeBytes - TAIL_BYTES));
    // The last counter may be half written; the one before it is whole.
    const counters = [...tail.toString('latin1', 0, read).matchAll(/mesg=(\d+)\r/g)];
    return Number(counters.at(-1)?.[1] ?? 0);
  };
  return {
    port,
    count,
    cpuS: () => cpuOf(readTree(running.pid)),
    stop,
    async untilCount(wanted, maxMs) {
      let last = { count: count(), at: performance.now() };
      await until(`${wanted} messages in the sink`, { maxMs, pollMs: POLL_MS }, () => {
        const now = { count: count(), at: performance.now() };
        if (now.count > last.count) last = now;
        else if (now.at - last.at > STALL_MS) {
          throw new BenchFailed(`only ${now.count} of ${wanted} messages came to the sink`);
        }
        return now.count >= wanted ? true : null;
      });
      return last.at;
    },
  };
}
