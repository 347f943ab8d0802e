// Which processes run roles of this appliance: each has a row with a heartbeat, for the doctor, metrics, and whoever asks
// who does what. Nothing is decided by it: a process without a row works all the same.
import { hostname } from 'node:os';
import type { Pool } from 'pg';
import type { Logger } from '../log.ts';
import { newId } from './id.ts';

export interface ApplianceProcess {
  readonly id: string;
  readonly host: string;
  readonly pid: number;
  readonly roles: readonly string[];
  readonly version: string;
  readonly startedAt: Date;
  readonly seenAt: Date;
}

const BEAT_MS = 10_000;
/** Silent for longer, it is gone, or cut off. */
const SILENCE_MAX_MS = 35_000;
/** After this its row is removed. */
const FORGET_AFTER_MS = 24 * 3_600_000;
const LISTED_MAX = 1_000;

export interface Presence {
  /** Takes the row away. */
  stop(): Promise<void>;
}

/** Stores the row of this process and keeps it fresh. Rejects when the first cannot be stored. */
export async function startPresence(d: {
  readonly pool: Pool;
  readonly log: Logger;
  readonly roles: ReadonlySet<string>;
  readonly version: string;
  /** Between two heartbeats; 10 s unless a test is in a hurry. */
  readonly everyMs?: number;
}): Promise<Presence> {
  const id = newId();
  const startedAt = new Date(Date.now() - process.uptime() * 1_000);
  const beat = async (): Promise<void> => {
    await d.pool.query(
      `insert into appliance_process (id, host, pid, roles, version, started_at, seen_at)
       values ($1, $2, $3, $4, $5, $6, now())
       on conflict (id) do update set seen_at = now()`,
      [id, hostname(), process.pid, [...d.roles], d.version, startedAt],
    );
    await d.pool.query(
      "delete from appliance_process where seen_at < now() - $1 * interval '1 millisecond'",
      [FORGET_AFTER_MS],
    );
  };
  await beat();
  let beating: Promise<void> | null = null;
  const timer = setInterval(() => {
    beating ??= beat()
      .catch((error: unknown) =>
        d.log.debug({ err: error }, 'this process cannot say that it is there'),
      )
      .finally(() => {
        beating = null;
      });
  }, d.everyMs ?? BEAT_MS);
  timer.unref();
  return {
    async stop() {
      clearInterval(timer);
      await beating;
      await d.pool
        .query('delete from appliance_process where id = $1', [id])
        .catch(() => undefined); // another beat of nobody's prunes it
    },
  };
}

/** Those that were heard of lately, oldest first; at most 1,000. */
export async function listProcesses(db: Pick<Pool, 'query'>): Promise<readonly ApplianceProcess[]> {
  const { rows } = await db.query<{
    id: string;
    host: string;
    pid: number;
    roles: string[];
    version: string;
    started_ms: number;
    seen_ms: number;
  }>(
    `select id, host, pid, roles, version,
       (extract(epoch from started_at) * 1000)::float8 as started_ms,
       (extract(epoch from seen_at) * 1000)::float8 as seen_ms
     from appliance_process where seen_at >= now() - $1 * interval '1 millisecond'
     order by id limit ${LISTED_MAX}`,
    [SILENCE_MAX_MS],
  );
  return rows.map(({ started_ms: startedMs, seen_ms: seenMs, ...row }) => ({
    ...row,
    startedAt: new Date(startedMs),
    seenAt: new Date(seenMs),
  }));
}
