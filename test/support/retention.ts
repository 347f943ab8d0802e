// Retention for tests: a policy out of a few durations, runs at a time that the test says, blobs in memory.
import { readFileSync } from 'node:fs';
import { Readable } from 'node:stream';
import { readRetentionPolicy, type RetentionKind } from '../../src/retention/policy.ts';
import { retain, type RetentionOptions, type RetentionRun } from '../../src/retention/retain.ts';
import type { BlobStore } from '../../src/store/blob.ts';
import type { Store } from '../../src/store/orm.ts';
import { silent } from './queue.ts';

export const DAY_MS = 86_400_000;
const SHIPPED = new URL('../../config/retention.json', import.meta.url);
const FOUR_DAYS = { messageLifetimeMs: 4 * DAY_MS };

export const shippedRetention = (): unknown => JSON.parse(readFileSync(SHIPPED, 'utf8'));

/** What is there may be looked at; `list` is not needed here. */
export function memoryBlobs(): BlobStore & { readonly kept: Map<string, Uint8Array> } {
  const kept = new Map<string, Uint8Array>();
  return {
    kept,
    put: async (key, bytes) => void kept.set(key, bytes),
    async write(key, chunks) {
      const parts: Uint8Array[] = [];
      for await (const chunk of chunks) parts.push(Buffer.from(chunk));
      kept.set(key, Buffer.concat(parts));
    },
    async get(key) {
      const bytes = kept.get(key);
      return bytes === undefined ? null : Buffer.from(bytes);
    },
    async read(key) {
      const bytes = kept.get(key);
      return bytes === undefined ? null : Readable.from([Buffer.from(bytes)]);
    },
    remove: async (key) => void kept.delete(key),
    async *list() {
      yield* kept.keys();
    },
  };
}

/** By default everything is kept. */
const FOR_EVER: Readonly<Record<string, null>> = {
  request_logs: null,
  webhook_events: null,
  engagement: null,
  automation_runs: null,
  replays: null,
};

/** One run over everything, `inDays` from now. */
export function runRetention(
  store: Store,
  about: {
    readonly keep: Readonly<Record<string, string | null>>;
    readonly tenants?: Readonly<Record<string, Readonly<Record<string, string | null>>>>;
    readonly inDays: number;
    readonly blobs?: BlobStore;
  } & Partial<RetentionOptions>,
): Promise<RetentionRun> {
  const { keep, tenants = {}, inDays, blobs = memoryBlobs(), ...options } = about;
  const policy = readRetentionPolicy({ default: { ...FOR_EVER, ...keep }, tenants }, FOUR_DAYS);
  return retain(
    {
      store,
      blobs,
      log: silent,
      policy: () => policy,
      now: () => new Date(Date.now() + inDays * DAY_MS),
    },
    { isDry: false, signal: new AbortController().signal, ...options },
  );
}

/** Removes what the shipped file keeps no longer of one kind; how many rows that were. */
export async function removeOld(
  store: Store,
  kind: RetentionKind,
  now: Date = new Date(),
): Promise<number> {
  const policy = readRetentionPolicy(shippedRetention(), FOUR_DAYS);
  const { rows } = await retain(
    { store, blobs: memoryBlobs(), log: silent, policy: () => policy, now: () => now },
    { isDry: false, signal: new AbortController().signal, kind },
  );
  return rows.reduce((sum, { count }) => sum + count, 0);
}
