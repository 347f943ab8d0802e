// The programs that a benchmark starts, and that none of them outlives it: every start leaves a step in a
// Cleanup, which runs newest first at the end, after a failure and on a signal.
import { spawn, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { closeSync, openSync, readFileSync } from 'node:fs';
import { createServer, connect, type AddressInfo } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';

const STOP_MAX_MS = 35_000;
const POLL_MS = 20;
const TAIL_CHARS = 2_000;

/** Something the user should read without a stack. */
export class BenchFailed extends Error {
  override name = 'BenchFailed';
}

export interface Cleanup {
  /** `stop` undoes now, once. Throws, after undoing, when the end has begun. */
  add(step: () => Promise<void>): { readonly stop: () => Promise<void> };
  /** The end: undoes everything. Repeated calls wait for the same end. */
  run(): Promise<void>;
}

export function createCleanup(): Cleanup {
  /** What is to undo, oldest first; a step that is being undone stays until that is done. */
  const undos = new Set<() => Promise<void>>();
  let ending: Promise<void> | null = null;
  return {
    add(step) {
      let undone: Promise<void> | null = null;
      const undo = (): Promise<void> => {
        undone ??= step()
          .catch((error: unknown) => console.error('bench: not cleaned up:', error))
          .finally(() => undos.delete(undo));
        return undone;
      };
      undos.add(undo);
      if (ending !== null) throw new BenchFailed('stopping');
      return { stop: undo };
    },
    run() {
      ending ??= (async () => {
        // What was being started when the end began is found at the end of the list again and again.
        for (let undo = last(undos); undo !== undefined; undo = last(undos)) await undo();
      })();
      return ending;
    },
  };
}

const last = <T>(set: ReadonlySet<T>): T | undefined => [...set].at(-1);

export interface Running {
  readonly pid: number;
  readonly hasEnded: () => boolean;
  /** The end of what it printed. */
  readonly tail: () => string;
  stop(): Promise<void>;
}

/** Starts a program that stays; its output goes to the file `log`. */
export async function startProgram(options: {
  readonly command: string;
  readonly args: readonly string[];
  readonly log: string;
  readonly cleanup: Cleanup;
  readonly env?: NodeJS.ProcessEnv;
  readonly cwd?: string;
}): Promise<Running> {
  const { command, args, env, cwd } = options;
  const output = openSync(options.log, 'a');
  let child: ChildProcess;
  try {
    child = spawn(command, args, {
      stdio: ['ignore', output, output],
      ...(env === undefined ? {} : { env }),
      ...(cwd === undefined ? {} : { cwd }),
    });
    await once(child, 'spawn');
  } finally {
    closeSync(output);
  }
  const { stop } = options.cleanup.add(() => endChild(child));
  return {
    pid: child.pid ?? 0,
    hasEnded: () => child.exitCode !== null || child.signalCode !== null,
    tail: () => readFileSync(options.log, 'utf8').slice(-TAIL_CHARS),
    stop,
  };
}

/** SIGTERM, and SIGKILL where that does not end it. */
export async function endChild(child: ChildProcess): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null || child.pid === undefined) return;
  const ended = once(child, 'exit');
  child.kill('SIGTERM');
  const timer = setTimeout(() => child.kill('SIGKILL'), STOP_MAX_MS);
  await ended;
  clearTimeout(timer);
}

/** Runs a program to its end. Throws BenchFailed with what it said when it fails. */
export async function runProgram(command: string, args: readonly string[]): Promise<string> {
  const child = spawn(command, args, { stdio: ['ignore', 'pipe', 'pipe'] });
  let output = '';
  for (const stream of [child.stdout, child.stderr]) {
    stream.setEncoding('utf8').on('data', (chunk: string) => {
      output = (output + chunk).slice(-TAIL_CHARS);
    });
  }
  const [code] = (await once(child, 'close')) as [number | null];
  if (code === 0) return output.trim();
  throw new BenchFailed(`${command} ${args.join(' ')} failed: ${output.trim()}`);
}

/** Repeats `read` until it gives something but null; throws BenchFailed with `what` after `maxMs`. */
export async function until<T>(
  what: string,
  options: { readonly maxMs: number; readonly pollMs?: number },
  read: () => Promise<T | null> | T | null,
): Promise<T> {
  const deadline = performance.now() + options.maxMs;
  for (;;) {
    const value = await read();
    if (value !== null) return value;
    if (performance.now() > deadline) throw new BenchFailed(`${what}: not in ${options.maxMs} ms`);
    await sleep(options.pollMs ?? POLL_MS);
  }
}

/** A port that nothing uses at this moment. */
export async function findFreePort(): Promise<number> {
  const server = createServer().listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as AddressInfo;
  server.close();
  await once(server, 'close');
  return port;
}

/** Waits until something accepts connections there. */
export async function untilListening(port: number, program: Running): Promise<void> {
  await until(`port ${port} of ${program.tail()}`, { maxMs: 30_000 }, async () => {
    if (program.hasEnded()) throw new BenchFailed(`it ended at once: ${program.tail()}`);
    const socket = connect({ port, host: '127.0.0.1' });
    const isOpen = await new Promise<boolean>((resolve) => {
      socket.once('connect', () => resolve(true)).once('error', () => resolve(false));
    });
    socket.destroy();
    return isOpen ? true : null;
  });
}
