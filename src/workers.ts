// The worker processes beside the main one: started, nudged, replaced when they die, stopped. Part of the
// composition root.
import { fork, type ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { fileURLToPath } from 'node:url';
import type { DeliverySetup } from './compose-delivery.ts';
import type { FromWorker, ToWorker } from './delivery-process.ts';
import type { Logger } from './log.ts';
import type { Waiting } from './queue/settle.ts';
import type { Gathering } from './telemetry/gathering.ts';

export interface Workers {
  readonly isReady: () => boolean;
  /** Resolves when every worker has been ready once. */
  readonly started: Promise<void>;
  nudge(): void;
  stop(): Promise<void>;
}

/** A built checkout runs .js, tests run .ts. */
const ENTRY = fileURLToPath(
  new URL(
    import.meta.url.endsWith('.ts') ? './delivery-process.ts' : './delivery-process.js',
    import.meta.url,
  ),
);
/**
 * MB. Left to itself V8 lets garbage lie until a worker with a thousand connections holds 400 MB, of which 60 are in
 * use. Messages are not counted: they lie outside of its heap.
 */
const HEAP_MAX = 512;
/** In megabytes. Larger ones keep 30 MB more for nothing that could be measured. */
const SEMI_SPACE_MAX = 16;
/**
 * In megabytes; 30 are in use. From a smaller start V8's limit stays so near to what is in use that one full collection
 * follows the other under load.
 */
const OLD_SPACE_INITIAL = 96;
const RESTART_MS = 1_000;
/** A worker that dies again and again is started ever more slowly. */
const RESTART_MAX_MS = 30_000;
const HEALTHY_MS = 60_000;
/** A nudge is a hint: one for many. */
const NUDGE_EVERY_MS = 5;
const STOP_MAX_MS = 22_000;

export function startWorkers(options: {
  readonly count: number;
  readonly setup: DeliverySetup;
  readonly log: Logger;
  /** Where they are asked for what they counted. */
  readonly gathering: Pick<Gathering, 'join'>;
  readonly onWaiting: (waiting: readonly Waiting[]) => void;
  /** A worker process died; decides what it held. */
  readonly onLost: (pid: number) => Promise<void>;
}): Workers {
  const { log } = options;
  const children = new Map<ChildProcess, { ready: boolean }>();
  let stopping = false;
  let starting = options.count;
  let markStarted: () => void = () => undefined;
  const started = new Promise<void>((resolve) => {
    markStarted = resolve;
  });
  let nudgePlanned = false;
  let restartMs = RESTART_MS;

  const tell = (child: ChildProcess, message: ToWorker): void => {
    if (child.connected) child.send(message, () => undefined);
  };

  const start = (): void => {
    const child = fork(ENTRY, [], {
      stdio: 'inherit',
      execArgv: [
        ...process.execArgv,
        `--max-old-space-size=${HEAP_MAX}`,
        `--max-semi-space-size=${SEMI_SPACE_MAX}`,
        `--initial-old-space-size=${OLD_SPACE_INITIAL}`,
      ],
    });
    const state = { ready: false };
    children.set(child, state);
    const seat = options.gathering.join((number) => tell(child, { type: 'metrics', number }));
    tell(child, { type: 'setup', setup: options.setup });
    child.on('message', (message: FromWorker) => {
      if (message.type === 'ready') {
        state.ready = true;
        setTimeout(() => {
          if (children.has(child)) restartMs = RESTART_MS;
        }, HEALTHY_MS).unref();
        starting -= 1;
        if (starting === 0) markStarted();
      } else if (message.type === 'metrics') {
        seat.heard(message.number, message.snapshot);
      } else {
        options.onWaiting(
          message.waiting.map(({ lane, dueAtMs }) => ({ lane, dueAt: new Date(dueAtMs) })),
        );
      }
    });
    child.once('error', (error) => {
      log.error({ err: error }, 'a delivery worker has trouble');
      if (child.pid !== undefined) return;
      children.delete(child); // it was never born, so it will not exit
      seat.left();
      if (!stopping) void replace(undefined);
    });
    child.once('exit', (code, signal) => {
      children.delete(child);
      seat.left();
      if (stopping) return;
      log.error(
        { worker_pid: child.pid, code, signal },
        'a delivery worker died; starting another',
      );
      void replace(child.pid);
    });
  };

  const replace = async (pid: number | undefined): Promise<void> => {
    if (pid !== undefined) {
      await options.onLost(pid).catch((error: unknown) => {
        log.warn({ err: error }, 'what it held is decided by the sweep');
      });
    }
    await new Promise((resolve) => setTimeout(resolve, restartMs));
    restartMs = Math.min(restartMs * 2, RESTART_MAX_MS);
    if (!stopping) start();
  };

  for (let index = 0; index < options.count; index++) start();
  return {
    started,
    isReady: () => children.size > 0 && [...children.values()].every(({ ready }) => ready),
    nudge() {
      if (nudgePlanned) return;
      nudgePlanned = true;
      setTimeout(() => {
        nudgePlanned = false;
        for (const child of children.keys()) tell(child, { type: 'nudge' });
      }, NUDGE_EVERY_MS);
    },
    async stop() {
      stopping = true;
      await Promise.all(
        [...children.keys()].map(async (child) => {
          if (child.pid === undefined || child.exitCode !== null || child.signalCode !== null)
            return;
          tell(child, { type: 'stop' });
          const timer = setTimeout(() => child.kill('SIGKILL'), STOP_MAX_MS);
          await once(child, 'exit');
          clearTimeout(timer);
        }),
      );
    },
  };
}
