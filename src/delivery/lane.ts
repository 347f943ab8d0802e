// One lane in one worker: the deliveries it claimed for it, and the tracks that work them off. A track
// is one connection's worth of work: it takes the next delivery, attempts it, keeps its session for
// the one after, and ends when nothing has come for a while.
import type { ClaimedDelivery } from '../queue/claim.ts';
import type { Line } from './attempt.ts';

/** An idle connection is kept this long, so that a trickle of mail does not dial every time. */
const IDLE_MS = 2_000;
/** Longer than a healthy peer takes for a message; what waits behind is given back then. */
const STALLED_MS = 10_000;
const TRACKS_FIRST = 3;

export interface Lane {
  readonly name: string;
  /** Claimed and not begun. */
  queued(): number;
  /** Begun and not decided. */
  active(): number;
  add(delivery: ClaimedDelivery): void;
  /** Attempts are under way and none has ended for a while: the far end hangs. */
  isStalled(): boolean;
  /** Takes back what was not begun, so that it can be released. */
  takeQueued(): readonly ClaimedDelivery[];
  /** Closes idle connections at once; resolves when no track is left. */
  stop(): Promise<void>;
}

/** `work` decides one delivery and never rejects. */
export function createLane(options: {
  readonly name: string;
  readonly connectionsMax: number;
  readonly work: (line: Line, delivery: ClaimedDelivery) => Promise<void>;
}): Lane {
  const queue: ClaimedDelivery[] = [];
  const idle = new Set<() => void>();
  const tracks = new Set<Promise<void>>();
  let active = 0;
  let stopped = false;
  let lastProgressAt = Date.now();
  /** Grows with every attempt that ended, so that a lane that hangs holds few connections. */
  let tracksMax = Math.min(TRACKS_FIRST, options.connectionsMax);

  const next = async (): Promise<ClaimedDelivery | undefined> => {
    const ready = queue.shift();
    if (ready !== undefined || stopped) return ready;
    await new Promise<void>((resolve) => {
      const done = (): void => {
        clearTimeout(timer);
        idle.delete(done);
        resolve();
      };
      const timer = setTimeout(done, IDLE_MS);
      idle.add(done);
    });
    return queue.shift();
  };

  const run = async (): Promise<void> => {
    const line: Line = { session: null };
    for (;;) {
      const delivery = await next();
      if (delivery === undefined) break;
      if (active === 0) lastProgressAt = Date.now();
      active += 1;
      await options.work(line, delivery);
      active -= 1;
      lastProgressAt = Date.now();
      tracksMax = Math.min(tracksMax + 1, options.connectionsMax);
      if (queue.length > 0) addTrack();
    }
    line.session?.close();
  };

  const addTrack = (): void => {
    if (tracks.size >= tracksMax || stopped) return;
    const track = run().finally(() => {
      tracks.delete(track);
      if (queue.length > 0) addTrack(); // added while this one was on its way out
    });
    tracks.add(track);
  };

  return {
    name: options.name,
    queued: () => queue.length,
    active: () => active,
    add(delivery) {
      queue.push(delivery);
      const [waiting] = idle;
      if (waiting === undefined) addTrack();
      else waiting();
    },
    isStalled: () => active > 0 && Date.now() - lastProgressAt > STALLED_MS,
    takeQueued: () => queue.splice(0),
    async stop() {
      stopped = true;
      for (const wake of idle) wake();
      await Promise.all(tracks);
    },
  };
}
