// What metrics say of the connections to Postgres.
import type { Pool } from 'pg';
import {
  databaseConnections,
  databaseDuration,
  databaseErrors,
  databaseWaiting,
} from '../telemetry/instruments.ts';

/** Until the function that it returns is called. */
export function measurePool(pool: Pool): () => void {
  const stops = [
    databaseConnections.read(() => [
      [{ state: 'in_use' }, pool.totalCount - pool.idleCount],
      [{ state: 'idle' }, pool.idleCount],
    ]),
    databaseWaiting.read(() => [[{}, pool.waitingCount]]),
  ];
  return () => {
    for (const stop of stops) stop();
  };
}

/** A statement was answered, or will not be. */
export function noteStatement(begunAt: number, error: Error | null | undefined): void {
  databaseDuration.observe((performance.now() - begunAt) / 1_000);
  if (error) databaseErrors.inc({ class: classOf(error) });
}

/** The two characters that SQLSTATE classes have. */
function classOf(error: Error & { readonly code?: unknown }): string {
  if (error.message === 'Query read timeout') return 'timeout';
  const { code } = error;
  return typeof code === 'string' && /^[0-9A-Z]{5}$/.test(code) ? code.slice(0, 2) : 'connection';
}
