// Builds what tracks opens and clicks: part of the composition root.
import type { Logger } from './log.ts';
import { openOperatorFile } from './operator-files.ts';
import { deriveKey } from './store/seal.ts';
import type { Store } from './store/orm.ts';
import { readReaders } from './tracking/readers.ts';
import { createEngagementRecorder } from './tracking/recorder.ts';
import { createTrackingTokens, type TrackingTokens } from './tracking/tokens.ts';
import {
  createHtmlTracker,
  createTrackingVerbs,
  type HtmlTracker,
  type TrackingVerbs,
} from './tracking/tracker.ts';

export interface ComposedTracking {
  readonly tracker: HtmlTracker;
  readonly verbs: TrackingVerbs;
  /** Stores what waits. */
  stop(): Promise<void>;
}

export const trackingTokens = (secret: string): TrackingTokens =>
  createTrackingTokens(deriveKey(secret, 'tracking links'));

export function composeTracking(d: {
  readonly store: Store;
  readonly log: Logger;
  /** The master secret. */
  readonly secret: string;
  readonly publicUrl: string;
  readonly configFolder: string;
  /** Webhooks may have something to tell. */
  readonly onTold: () => void;
}): ComposedTracking {
  const tokens = trackingTokens(d.secret);
  const readers = openOperatorFile('tracking', {
    folder: d.configFolder,
    read: readReaders,
    log: d.log,
  });
  const recorder = createEngagementRecorder(d);
  return {
    tracker: createHtmlTracker({ tokens, publicUrl: d.publicUrl }),
    verbs: createTrackingVerbs({ tokens, recorder, readers: readers.current }),
    async stop() {
      readers.stop();
      await recorder.stop();
    },
  };
}
