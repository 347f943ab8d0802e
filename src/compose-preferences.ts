// Composes the links to a contact's choices and what is behind them: part of the composition root.
import { readFileSync } from 'node:fs';
import { createPreferenceLinks, type PreferenceLinks } from './audience/preference-links.ts';
import { createPreferenceVerbs, type PreferenceVerbs } from './audience/preferences.ts';
import {
  readPreferencePolicy,
  readShippedPreferences,
  type PreferencePolicy,
} from './http/preference-policy.ts';
import type { Logger } from './log.ts';
import { openOperatorFile } from './operator-files.ts';
import type { Store } from './store/orm.ts';
import { deriveKey } from './store/seal.ts';

const SHIPPED = new URL('../config/preferences.json', import.meta.url);

export interface Preferences {
  readonly links: PreferenceLinks;
  readonly verbs: PreferenceVerbs;
  /** What config/preferences.json says now. */
  readonly policy: () => PreferencePolicy;
  stop(): void;
}

export function composePreferences(d: {
  readonly store: Store;
  readonly log: Logger;
  /** The master secret. */
  readonly secret: string;
  readonly publicUrl: string;
  readonly configFolder: string;
  readonly now: () => Date;
}): Preferences {
  const shipped = readShippedPreferences(JSON.parse(readFileSync(SHIPPED, 'utf8')));
  const file = openOperatorFile('preferences', {
    folder: d.configFolder,
    read: (own) => readPreferencePolicy(own, shipped),
    log: d.log,
  });
  const links = createPreferenceLinks({
    key: deriveKey(d.secret, 'preference links'),
    publicUrl: d.publicUrl,
  });
  return {
    links,
    verbs: createPreferenceVerbs({ store: d.store, links, now: d.now }),
    policy: file.current,
    stop: file.stop,
  };
}
