// A delivery worker in a process of its own. The parent says over IPC what to work with and when to look
// or stop; we say what now waits for a clock. When the parent is gone we are gone, at once: the next
// start takes over what we held, and two must never hold the same.
import { composeDelivery, type DeliverySetup, type RunningWorker } from './compose-delivery.ts';
import { startTraces } from './compose-telemetry.ts';
import { createLogger } from './log.ts';
import type { Waiting } from './queue/settle.ts';
import { takeSnapshot, type Snapshot } from './telemetry/gathering.ts';
import { traceFields } from './telemetry/trace.ts';

export type ToWorker =
  | { readonly type: 'setup'; readonly setup: DeliverySetup }
  | { readonly type: 'nudge' }
  | { readonly type: 'metrics'; readonly number: number }
  | { readonly type: 'stop' };
export type FromWorker =
  | { readonly type: 'ready' }
  | { readonly type: 'metrics'; readonly number: number; readonly snapshot: Snapshot }
  | { readonly type: 'waiting'; readonly waiting: readonly { lane: string; dueAtMs: number }[] };

process.on('disconnect', () => process.exit(1));
// The terminal's Ctrl-C reaches the whole group; the parent decides when we stop.
process.on('SIGINT', () => undefined);
process.on('SIGTERM', () => undefined);
process.on('SIGHUP', () => undefined);

const say = (message: FromWorker): void => void process.send?.(message);
let working: Promise<RunningWorker> | null = null;

async function run(setup: DeliverySetup): Promise<RunningWorker> {
  const log = createLogger({
    level: setup.logLevel,
    name: 'delivery',
    mode: setup.mode,
    fields: traceFields,
  });
  const { configFolder, hostname } = setup;
  const traces = await startTraces({ configFolder, hostname, name: 'delivery', log });
  const worker = await composeDelivery(setup, {
    log,
    // The parent decides what we held and starts another.
    onLost: () => process.exit(1),
    onWaiting: (waiting: readonly Waiting[]) =>
      say({
        type: 'waiting',
        waiting: waiting.map(({ lane, dueAt }) => ({ lane, dueAtMs: dueAt.getTime() })),
      }),
  });
  say({ type: 'ready' });
  return {
    nudge: worker.nudge,
    async stop() {
      await worker.stop();
      await traces.stop();
    },
  };
}

process.on('message', (message: ToWorker) => {
  if (message.type === 'setup') {
    working = run(message.setup);
    working.catch((error: unknown) => {
      console.error(error);
      process.exit(1);
    });
  } else if (message.type === 'metrics') {
    const { number } = message;
    void takeSnapshot().then((snapshot) => say({ type: 'metrics', number, snapshot }));
  } else if (message.type === 'nudge') {
    void working?.then((worker) => worker.nudge());
  } else {
    void (working ?? Promise.resolve(null)).then(async (worker) => {
      await worker?.stop();
      process.exit(0);
    });
  }
});
