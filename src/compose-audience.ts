// Starts what goes on by itself for audiences and endpoints: imports, the fan-out of broadcasts, automations, webhooks.
// Part of the composition root.
import { createImporter } from './audience/importer.ts';
import { startAutomations } from './compose-automations.ts';
import type { composeVerbs } from './compose-verbs.ts';
import { startWebhooks } from './compose-webhooks.ts';
import type { Config } from './config.ts';
import { startTurns, type Turns } from './jobs/turns.ts';
import type { Logger } from './log.ts';
import type { BlobStore } from './store/blob.ts';
import type { Store } from './store/orm.ts';

/** There is something to do. */
export interface AudienceNudges {
  imports(): void;
  broadcasts(): void;
  automations(): void;
  webhooks(): void;
}

export interface AudienceLoops {
  readonly nudges: AudienceNudges;
  stop(): Promise<void>;
}

/** Null where no jobs run. */
export function startAudienceLoops(
  config: Config,
  d: {
    readonly store: Store;
    readonly log: Logger;
    readonly blobs: BlobStore;
    /** The master secret. */
    readonly secret: string;
    readonly verbs: ReturnType<typeof composeVerbs>;
  },
): AudienceLoops | null {
  if (!config.roles.has('jobs')) return null;
  const loops: { -readonly [name in keyof AudienceNudges]?: Turns } = {};
  loops.imports = startImports(d);
  loops.webhooks = startWebhooks(config, d);
  loops.automations = startAutomations({ ...d, mail: d.verbs.automationMail });
  loops.broadcasts = startTurns({
    name: 'broadcasts',
    log: d.log,
    turn: () => d.verbs.fanOut.turn(),
  });
  return {
    nudges: {
      imports: () => loops.imports?.nudge(),
      broadcasts: () => loops.broadcasts?.nudge(),
      automations: () => loops.automations?.nudge(),
      webhooks: () => loops.webhooks?.nudge(),
    },
    async stop() {
      await Promise.all(Object.values(loops).map((loop) => loop.stop()));
    },
  };
}

function startImports(d: {
  readonly store: Store;
  readonly log: Logger;
  readonly blobs: BlobStore;
}): Turns {
  const { store, log, blobs } = d;
  const importer = createImporter({ store, log, blobs });
  const turns = startTurns({ name: 'imports', log, turn: () => importer.turn() });
  return {
    nudge: () => turns.nudge(),
    stop() {
      importer.stop();
      return turns.stop();
    },
  };
}
