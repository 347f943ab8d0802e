// Starts what removes by age: part of the composition root.
import { createRetention, earlierNow } from './retention/retain.ts';
import { readRetentionPolicy, type RetentionPolicy } from './retention/policy.ts';
import type { Config } from './config.ts';
import { startTurns } from './jobs/turns.ts';
import type { Logger } from './log.ts';
import { openOperatorFile, type OperatorFile } from './operator-files.ts';
import type { BlobStore } from './store/blob.ts';
import type { Store } from './store/orm.ts';

/** How long things are kept: the shipped file, or the operator's. Throws when it cannot be used. */
export const openRetentionPolicy = (
  config: Pick<Config, 'messageLifetimeMs'>,
  folder: string,
  log: Logger,
): OperatorFile<RetentionPolicy> =>
  openOperatorFile('retention', {
    folder,
    log,
    read: (file) => readRetentionPolicy(file, config),
  });

/** Null where no jobs run; then the file is not looked at. */
export function startRetention(
  config: Config,
  d: {
    readonly store: Store;
    readonly blobs: BlobStore;
    readonly log: Logger;
    readonly configFolder: string;
  },
): { stop(): Promise<void> } | null {
  if (!config.roles.has('jobs')) return null;
  const policy = openRetentionPolicy(config, d.configFolder, d.log);
  const ending = new AbortController();
  const retention = createRetention({
    ...d,
    policy: policy.current,
    now: earlierNow(d.store.pool),
    elapsedMs: () => performance.now(),
  });
  const turns = startTurns({
    name: 'retention',
    log: d.log,
    turn: () => retention.run(ending.signal),
  });
  return {
    async stop() {
      ending.abort();
      policy.stop();
      await turns.stop();
    },
  };
}
