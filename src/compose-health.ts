// What `GET /health/ready` says of this process: part of the composition root.
import { readBlockedEgresses } from './queue/egress-state.ts';
import type { Store } from './store/orm.ts';

const READY_TIMEOUT_MS = 2_000;

/** Mail is accepted all the same; it waits. Anybody may ask for health, so whose hosts were tried is not said. */
export async function findDegraded(
  store: Store,
): Promise<readonly { what: string; why: string }[]> {
  const blocked = await withinReadyTime(readBlockedEgresses(store.pool)).catch(() => []);
  return blocked.map(({ since }) => ({
    what: 'port 25',
    why: `No connection to port 25 of a mail host succeeds since ${since.toISOString()}; the log says what to do.`,
  }));
}

/** Rejects when it takes too long for an answer about health. */
async function withinReadyTime<T>(work: Promise<T>): Promise<T> {
  const late = new Promise<never>((_, reject) => {
    setTimeout(() => reject(new Error('no answer')), READY_TIMEOUT_MS).unref();
  });
  return Promise.race([work, late]);
}

export async function findMissing(
  store: Store,
  isDelivering: () => boolean,
): Promise<readonly { what: string; why: string }[]> {
  const missing: { what: string; why: string }[] = [];
  const timeout = new Promise<boolean>((resolve) => {
    setTimeout(() => resolve(false), READY_TIMEOUT_MS).unref();
  });
  const answered = store.pool.query('select 1').then(
    () => true,
    () => false,
  );
  if (!(await Promise.race([answered, timeout]))) {
    missing.push({ what: 'database', why: 'Postgres does not answer.' });
  }
  if (!isDelivering()) missing.push({ what: 'delivery', why: 'A delivery worker is starting.' });
  return missing;
}
