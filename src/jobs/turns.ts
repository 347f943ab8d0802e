// A loop that does a piece of work again and again, with the pause that the work asks for; sooner when somebody knows that
// there is something to do. For what is owed to authors, replays, broadcasts, imports, automations, webhooks: what
// remains to be done is in the database, so a stop or a crash loses nothing.
import { AsyncLocalStorage } from 'node:async_hooks';
import type { Logger } from '../log.ts';
import { jobRuns } from '../telemetry/instruments.ts';

export interface Turns {
  /** There is something to do. */
  nudge(): void;
  /** Resolves when the turn under way has ended. */
  stop(): Promise<void>;
}

/** After a turn that failed, such as while the database was away. */
const RETRY_MS = 5_000;
/** Between turns that have more to do: others want the database, too. */
const PAUSE_MIN_MS = 20;

/** `turn` resolves with the milliseconds until the next one. */
export function startTurns(d: {
  readonly name: string;
  readonly log: Logger;
  readonly turn: () => Promise<number>;
}): Turns {
  let isStopped = false;
  let isNudged = false;
  let running: Promise<void> | null = null;
  let timer: NodeJS.Timeout | undefined;

  // In the context of the start: what a turn does is not part of the request that nudged it.
  const run = AsyncLocalStorage.bind(async (): Promise<void> => {
    isNudged = false;
    let pauseMs = RETRY_MS;
    try {
      pauseMs = Math.max(PAUSE_MIN_MS, await d.turn());
      jobRuns.inc({ task: d.name, result: 'done' });
    } catch (err) {
      jobRuns.inc({ task: d.name, result: 'failed' });
      if (!isStopped) d.log.warn({ err, what: d.name }, 'a turn failed; the next one goes on');
    }
    running = null;
    if (!isStopped) timer = setTimeout(start, isNudged ? PAUSE_MIN_MS : pauseMs).unref();
  });
  const start = (): void => {
    clearTimeout(timer);
    if (!isStopped) running ??= run();
  };

  start();
  return {
    nudge() {
      isNudged = true;
      start();
    },
    async stop() {
      isStopped = true;
      clearTimeout(timer);
      await running;
    },
  };
}
