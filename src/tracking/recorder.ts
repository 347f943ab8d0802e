// Takes note of opens and clicks beside the requests: a redirect waits for nothing. Repeats of one client within seconds
// are one, links that are followed too fast for a person are marked, and what is left is written in groups from a bounded
// buffer. While the database is away entries wait; when there are too many, the oldest are lost and the log says how many.
import { hash } from 'node:crypto';
import type { Logger } from '../log.ts';
import {
  ENGAGEMENTS_MAX,
  isByPerson,
  recordEngagements,
  type Engagement,
  type EngagementKind,
  type Suspect,
} from '../queue/engagement.ts';
import { newId } from '../store/id.ts';
import type { Store } from '../store/orm.ts';
import { isDatabaseUnavailable } from '../store/unavailable.ts';
import { networkOf } from '../access/rate-limit.ts';
import type { TrackedEmail } from './tokens.ts';

/** An open or a click, as it happened. */
export interface Sighting extends TrackedEmail {
  readonly kind: EngagementKind;
  /** Null: opened. */
  readonly link: string | null;
  readonly address: string;
  readonly userAgent: string | null;
  readonly suspect: Suspect | null;
}

export interface EngagementRecorder {
  /** Never throws. */
  note(sighting: Sighting): void;
  /** Writes what waits, as far as the database lets it; what is noted afterwards is written at once. */
  stop(): Promise<void>;
}

const FLUSH_MS = 250;
const GROUP_MAX = 200;
const WAITING_MAX = 10_000;
/** Between two tries while the database is away. */
const AWAY_MS = 1_000;
/** Of a stop. */
const STOP_MAX_MS = 3_000;
/** The same again by the same client is nothing new. */
const REPEAT_MS = 5_000;
/** Clicks wait so long to be judged together. */
export const BURST_MS = 1_000;
/** Different links of one email within that time: no person is so fast. */
export const BURST_LINKS = 3;
/** Whoever was too fast is a machine for so long, at its own pace. */
const BURST_MEMORY_MS = 60_000;
/** An email of which the database keeps no more is known for so long after the last one that was noted. */
const NOTED_MEMORY_MS = 3_600_000;
/** Emails, and clients of emails, that are remembered for that; the oldest are forgotten. */
const REMEMBERED_MAX = 20_000;
/** Of one email. */
const RECENT_MAX = 50;
const USER_AGENT_MAX = 500;
const ADDRESS_MAX = 64;

/** Waits to be written. */
type Entry = { -readonly [key in keyof Engagement]: Engagement[key] } & {
  readonly network: string;
  readonly notedAt: number;
};

export function createEngagementRecorder(d: {
  readonly store: Store;
  readonly log: Logger;
  /** Webhooks may have something to tell. */
  readonly onTold: () => void;
  /** In ms, and never back, as the clock of the machine may go. */
  readonly now?: () => number;
}): EngagementRecorder {
  const { store, log, now = () => performance.now() } = d;
  let waiting: Entry[] = [];
  let lost = 0;
  let awayUntil = 0;
  let isStopped = false;
  const seen = remember<true>(REPEAT_MS);
  const recent = remember<readonly Entry[]>(BURST_MS);
  const machines = remember<true>(BURST_MEMORY_MS);
  const noted = remember<number>(NOTED_MEMORY_MS);

  /** Clicks of one email in the last moments, with this one; marks those that came too fast. */
  const judgeBurst = (entry: Entry): void => {
    const client = `${entry.emailId} ${entry.network}`;
    if (machines.get(client, entry.notedAt) === true) {
      entry.suspect = 'burst';
      return;
    }
    const since = entry.notedAt - BURST_MS;
    const last = recent.get(entry.emailId, entry.notedAt) ?? [];
    const clicks = [...last.filter(({ notedAt }) => notedAt > since), entry];
    recent.set(entry.emailId, clicks.slice(-RECENT_MAX), entry.notedAt);
    const own = clicks.filter(({ network }) => network === entry.network);
    if (linksOf(own) >= BURST_LINKS) {
      machines.set(client, true, entry.notedAt);
      for (const one of own) one.suspect ??= 'burst';
    }
    if (linksOf(clicks) >= BURST_LINKS) for (const one of clicks) one.isOfCrowd = true;
  };

  const dropOldest = (): void => {
    if (waiting.length <= WAITING_MAX) return;
    // A tenth at a time: removing the first of a list moves all the others.
    lost += waiting.splice(0, WAITING_MAX / 10).length;
  };

  /** False: the database is away, and the group waits again. */
  const write = async (group: readonly Entry[]): Promise<boolean> => {
    try {
      const { told } = await recordEngagements(store, group);
      if (told > 0) d.onTold();
    } catch (error) {
      if (isDatabaseUnavailable(error) || mayPass(error)) {
        waiting = [...group, ...waiting];
        dropOldest();
        return false;
      }
      if (group.length > 1) {
        // One that the database refuses must not take the others with it.
        const half = Math.ceil(group.length / 2);
        const isLaterIn = await write(group.slice(half));
        return (await write(group.slice(0, half))) && isLaterIn;
      }
      lost += group.length;
      log.error({ err: error }, 'an open or a click cannot be recorded');
    }
    if (lost > 0) log.warn({ engagements: lost }, 'opens and clicks were lost');
    lost = 0;
    return true;
  };

  const takeGroup = (): readonly Entry[] => {
    const ripe = now() - BURST_MS;
    const group: Entry[] = [];
    waiting = waiting.filter((entry) => {
      const isJudged = entry.kind === 'opened' || entry.suspect !== null;
      const isDue = isStopped || isJudged || entry.notedAt <= ripe;
      if (!isDue || group.length === GROUP_MAX) return true;
      group.push(entry);
      return false;
    });
    return group;
  };
  let flushing: Promise<void> | null = null;
  const flush = async (first: readonly Entry[]): Promise<void> => {
    for (let group = first; group.length > 0; group = takeGroup()) {
      if (await write(group)) continue;
      awayUntil = now() + AWAY_MS;
      break;
    }
    flushing = null; // in the same turn as the last look
  };
  const tick = (): void => {
    if (flushing !== null || waiting.length === 0 || now() < awayUntil) return;
    const group = takeGroup();
    if (group.length > 0) flushing = flush(group);
  };
  const timer = setInterval(tick, FLUSH_MS);
  timer.unref();

  return {
    note(sighting) {
      const at = now();
      const { kind, emailId, link } = sighting;
      const address = sighting.address.slice(0, ADDRESS_MAX);
      const userAgent = sighting.userAgent?.slice(0, USER_AGENT_MAX) ?? null;
      const same = [emailId, kind, address, sighting.suspect, userAgent, link].join('\n');
      const key = hash('sha256', same, 'base64url');
      if (seen.get(key, at) === true) return;
      // One link that is asked for in a thousand ways takes no room from the others, and no work of the database.
      const place = `${emailId} ${kind} ${isByPerson(sighting.suspect)}`;
      const count = noted.get(place, at) ?? 0;
      if (count >= ENGAGEMENTS_MAX) return;
      noted.set(place, count + 1, at);
      seen.set(key, true, at);
      const entry: Entry = {
        id: newId(),
        tenantId: sighting.tenantId,
        emailId,
        kind,
        at: new Date(),
        link,
        remoteAddress: address === '' ? null : address,
        userAgent,
        suspect: sighting.suspect,
        isOfCrowd: false,
        network: networkOf(address),
        notedAt: at,
      };
      if (kind === 'clicked' && entry.suspect === null) judgeBurst(entry);
      waiting.push(entry);
      dropOldest();
      if (isStopped) setImmediate(tick);
    },
    async stop() {
      isStopped = true;
      clearInterval(timer);
      let late: NodeJS.Timeout | undefined;
      const timeout = new Promise<void>((resolve) => {
        late = setTimeout(resolve, STOP_MAX_MS);
      });
      await Promise.race([(flushing ?? Promise.resolve()).then(() => flush(takeGroup())), timeout]);
      clearTimeout(late);
      lost += waiting.length;
      if (lost > 0) log.warn({ engagements: lost }, 'opens and clicks were lost');
      lost = 0;
    },
  };
}

const linksOf = (clicks: readonly Entry[]): number => new Set(clicks.map(({ link }) => link)).size;

/** SQLSTATE: serialization, deadlock, lock and statement timeouts, and a server that only reads for now. */
const PASSING = new Set(['40001', '40P01', '55P03', '57014', '25006']);
/** It does not speak against what was to be written. */
const mayPass = (error: unknown): boolean =>
  PASSING.has(String((error as { code?: unknown }).code));

interface Memory<T> {
  get(key: string, at: number): T | undefined;
  set(key: string, value: T, at: number): void;
}

/** Forgets what was set so long ago, and the oldest where there are too many. */
function remember<T>(ageMaxMs: number): Memory<T> {
  const entries = new Map<string, { readonly until: number; readonly value: T }>();
  return {
    get(key, at) {
      const entry = entries.get(key);
      return entry !== undefined && entry.until > at ? entry.value : undefined;
    },
    set(key, value, at) {
      entries.delete(key);
      for (const [oldest, { until }] of entries) {
        if (until > at && entries.size < REMEMBERED_MAX) break;
        entries.delete(oldest);
      }
      entries.set(key, { until: at + ageMaxMs, value });
    },
  };
}
