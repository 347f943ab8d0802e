// The ordered certificates as one process has them: read from Postgres every few seconds, so that what any process orders is
// shown by all of them without a restart. While the database is away, what was read stays.
import { createSecureContext, type SecureContext } from 'node:tls';
import type { Pool } from 'pg';
import type { Logger } from '../log.ts';
import { KeyUnreadable, readDigests, readPair, type Pair } from './rows.ts';

export interface Shelf {
  /** The pair of exactly this name (lower case), or null. */
  find(name: string): Pair | null;
  /** The same for a TLS server. */
  context(name: string): SecureContext | null;
  /** Called when any pair came, changed or went. */
  onChange(listener: () => void): void;
  /** Looks now. Never rejects. */
  refresh(): Promise<void>;
  stop(): void;
}

const LOOK_MS = 2_000;

interface Shelved {
  readonly digest: string;
  readonly pair: Pair;
  readonly context: SecureContext;
}

/** Resolves when it was read once. */
export async function openShelf(d: {
  readonly pool: Pool;
  readonly sealingKey: Buffer;
  readonly log: Logger;
  /** Between two looks; 2 s unless a test is in a hurry. */
  readonly lookMs?: number;
}): Promise<Shelf> {
  const shelved = new Map<string, Shelved>();
  const listeners: (() => void)[] = [];
  /** By name, the digest that could not be used: said once. */
  const unusable = new Map<string, string>();
  let wasAway = false;
  let looking: Promise<void> | null = null;

  async function take(name: string, digest: string): Promise<boolean> {
    if (shelved.get(name)?.digest === digest || unusable.get(name) === digest) return false;
    const pair = await readPair(d.pool, name, d.sealingKey).catch((error: unknown) => {
      if (error instanceof KeyUnreadable) return error;
      throw error; // the database, not the key: the next look tries again
    });
    if (pair === null) return false;
    try {
      if (pair instanceof KeyUnreadable) throw pair;
      const context = createSecureContext({ ...pair, minVersion: 'TLSv1.2' });
      shelved.set(name, { digest, pair, context });
      return true;
    } catch (error) {
      unusable.set(name, digest);
      d.log.error({ err: error, name }, 'a stored certificate cannot be used');
      return false;
    }
  }

  async function look(): Promise<void> {
    try {
      const digests = await readDigests(d.pool);
      let isChanged = false;
      for (const [name, digest] of digests) {
        if (await take(name, digest)) isChanged = true;
      }
      for (const name of shelved.keys()) {
        if (!digests.has(name)) isChanged = shelved.delete(name) || isChanged;
      }
      for (const name of unusable.keys()) if (!digests.has(name)) unusable.delete(name);
      wasAway = false;
      if (isChanged) for (const listener of listeners) listener();
    } catch (error) {
      if (!wasAway) d.log.warn({ err: error }, 'stored certificates cannot be read now');
      wasAway = true;
    }
  }

  const refresh = (): Promise<void> =>
    (looking ??= look().finally(() => {
      looking = null;
    }));
  await refresh();
  const timer = setInterval(() => void refresh(), d.lookMs ?? LOOK_MS);
  timer.unref();
  return {
    find: (name) => shelved.get(name)?.pair ?? null,
    context: (name) => shelved.get(name)?.context ?? null,
    onChange: (listener) => void listeners.push(listener),
    refresh,
    stop: () => clearInterval(timer),
  };
}
