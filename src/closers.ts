// How what was started is stopped, in one bounded time: part of the composition root.
import type { Logger } from './log.ts';

/** Of a stop, all parts together; what is still busy then is left to the end of the process. */
const STOP_MAX_MS = 25_000;
/** What even the last part gets: the lock of the data directory should be released. */
const STOP_STEP_MIN_MS = 500;

/** Undoes, newest first, whatever was started. */
export class Closers {
  readonly #steps: (() => Promise<void>)[] = [];

  add(step: () => Promise<void>): void {
    this.#steps.push(step);
  }

  async run(log: Logger): Promise<void> {
    const deadline = Date.now() + STOP_MAX_MS;
    for (const step of this.#steps.splice(0).toReversed()) {
      const leftMs = Math.max(STOP_STEP_MIN_MS, deadline - Date.now());
      let timer: NodeJS.Timeout | undefined;
      const late = new Promise<never>((_, reject) => {
        timer = setTimeout(() => reject(new Error('it takes too long')), leftMs);
      });
      await Promise.race([step(), late]).catch((error: unknown) =>
        log.error({ err: error }, 'a part did not stop well'),
      );
      clearTimeout(timer);
    }
  }
}
