// Ending a worker process of an earlier start, and no other that has its number by now. Part of the
// composition root.
import type { LostRun } from './delivery/journal.ts';
import { processStartTime } from './store/process.ts';

const POLL_MS = 20;
const END_MAX_MS = 10_000;

/**
 * Makes sure that a worker process of an earlier start is gone before anybody takes over what it held. Does
 * nothing when the number belongs to another process by now.
 */
export async function endProcess(run: Pick<LostRun, 'pid' | 'startTime'>): Promise<void> {
  const isAlive = (): boolean =>
    run.startTime !== null && processStartTime(run.pid) === run.startTime;
  if (!isAlive() || run.pid === process.pid) return;
  process.kill(run.pid, 'SIGKILL');
  const deadline = Date.now() + END_MAX_MS;
  while (isAlive()) {
    if (Date.now() > deadline)
      throw new Error(`process ${run.pid} of an earlier start does not end`);
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}
