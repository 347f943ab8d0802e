// When each API key was last used: noted in memory on every request, written now and then in one statement.
import type { Pool } from 'pg';
import type { Logger } from '../log.ts';
import type { Caller } from './keys.ts';

const FLUSH_MS = 2_000;
/** A row is not written again for less than this. */
const PRECISION_MS = 60_000;
/** Keys that are remembered; beyond it some are written more often than they need to be. */
const KEYS_MAX = 10_000;

export interface KeyUsage {
  /** The key was used just now. */
  note(caller: Caller): void;
  /** Writes what was noted. */
  stop(): Promise<void>;
}

export function createKeyUsage(d: { readonly pool: Pool; readonly log: Logger }): KeyUsage {
  const noted = new Map<string, { tenantId: string; at: number }>();
  const written = new Map<string, number>();

  const flush = async (): Promise<void> => {
    if (noted.size === 0) return;
    const batch = [...noted].map(([id, { tenantId, at }]) => ({ id, tenantId, at }));
    noted.clear();
    for (const { id, at } of batch) written.set(id, at);
    try {
      await d.pool.query(
        `update api_key k set last_used_at = u.at
         from unnest($1::uuid[], $2::uuid[], $3::timestamptz[]) as u (tenant_id, id, at)
         where k.tenant_id = u.tenant_id and k.id = u.id
           and (k.last_used_at is null or k.last_used_at < u.at)`,
        [
          batch.map(({ tenantId }) => tenantId),
          batch.map(({ id }) => id),
          batch.map(({ at }) => new Date(at)),
        ],
      );
    } catch (error) {
      for (const { id } of batch) written.delete(id); // the next use tries again
      d.log.debug({ err: error }, 'when keys were last used cannot be written now');
    }
  };
  let flushing: Promise<void> = Promise.resolve();
  const tick = (): void => {
    flushing = flushing.then(flush);
  };
  const timer = setInterval(tick, FLUSH_MS);
  timer.unref();
  return {
    note({ tenantId, keyId }) {
      const at = Date.now();
      if (at - (written.get(keyId) ?? -Infinity) < PRECISION_MS) return;
      if (written.size >= KEYS_MAX) written.clear();
      if (noted.size < KEYS_MAX || noted.has(keyId)) noted.set(keyId, { tenantId, at });
    },
    async stop() {
      clearInterval(timer);
      tick();
      await flushing;
    },
  };
}
