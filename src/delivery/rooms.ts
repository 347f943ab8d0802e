// What a worker remembers of destinations: the lanes that serve each, and so what the next claim may take of which. A
// lane is shared by many destinations, and which of them have mail is known to the database only: each is offered the
// room of its lane, and where that brought more than there is room for, fewer of them are asked the next time, in turn.
import type { Lane } from './lane.ts';

export interface Offer {
  /** Destinations that nothing is claimed for. */
  readonly exceptLanes: readonly string[];
  readonly rooms: ReadonlyMap<string, number>;
  readonly roomOfOthers: number;
}

export interface Rooms {
  /** `lane` serves the destination from this address of departure, as last resolved. */
  learn(destination: string, egress: string, lane: string): void;
  isKnown(destination: string): boolean;
  laneOf(destination: string, egress: string): string | undefined;
  /** These lanes serve nothing any more: what they served is asked about anew. */
  forget(lanes: ReadonlySet<string>): void;
  /** Nothing is kept for this lane that could not be known again. */
  drop(lane: string): void;
  /** What the next claim may take; `mayAsk`: whether unknown destinations are welcome. */
  offer(about: {
    readonly lanes: ReadonlyMap<string, Lane>;
    readonly isOut: (destination: string) => boolean;
    /** Whether its mail may leave from an address that it is not known to have a lane from. */
    readonly hasOtherWay: (destination: string, known: ReadonlyMap<string, string>) => boolean;
    /** Whether lanes are welcome in which nothing has gone well yet. */
    readonly mayTry: boolean;
    /** Whether slow lanes are welcome. */
    readonly mayLinger: boolean;
    readonly mayAsk: boolean;
  }): Offer;
  /** What the last offer brought, by destination. */
  note(claimed: ReadonlyMap<string, number>): void;
  /** The destinations that the lane was found to serve since this was asked last. */
  takeNews(lane: string): readonly string[];
  /** What was taken could not be told. */
  tell(lane: string, destination: string): void;
}

const DESTINATIONS_MAX = 5_000;
/** Of a destination that is not known, or that is not known to have much: all recipients of an email fit into it. */
const ROOM_OF_OTHERS = 50;
/** Of a way that is not known yet. */
const NO_LANE = '';
/** While one probe decides, so many destinations are asked for it. */
const PROBED_MAX = 8;
const NEWS_MAX = 20_000;

interface Known {
  /** By the address of departure. */
  readonly lanes: Map<string, string>;
  /** All of its room was taken at the last claim, so there may be more. */
  hasMore: boolean;
}

interface Asked {
  readonly room: number;
  readonly destinations: readonly string[];
}

export function createRooms(): Rooms {
  /** The least recently learned first. */
  const known = new Map<string, Known>();
  /** By lane: how many of its destinations are asked; absent: all. */
  const widths = new Map<string, number>();
  const turns = new Map<string, number>();
  const news = new Map<string, Set<string>>();
  let newsCount = 0;
  let asked = new Map<string, Asked>();
  let offered: Offer | null = null;

  /** The room of the fullest lane that takes it; null: none takes anything. */
  const roomOf = (
    entry: Known,
    lanes: ReadonlyMap<string, Lane>,
    rooms: Map<string, number>,
    may: { readonly mayTry: boolean; readonly mayLinger: boolean },
  ): { readonly room: number; readonly lane: string } | null => {
    let least: { room: number; lane: string } | null = null;
    for (const name of entry.lanes.values()) {
      const lane = lanes.get(name);
      if (lane !== undefined && (lane.closedBy() !== null || lane.isStalled())) continue;
      if (!may.mayTry && lane?.isProven() !== true) continue;
      if (!may.mayLinger && lane?.isSlow() === true) continue;
      if (lane !== undefined && !rooms.has(name)) rooms.set(name, lane.room());
      const room = rooms.get(name) ?? ROOM_OF_OTHERS;
      if (least === null || room < least.room) least = { room, lane: name };
    }
    return least;
  };

  const widthOf = (name: string, lane: Lane | undefined): number => {
    const width = widths.get(name) ?? Infinity;
    return lane?.isProbing() === true ? Math.min(width, PROBED_MAX) : width;
  };

  const tell = (lane: string, destination: string): void => {
    const ofLane = news.get(lane) ?? new Set();
    if (newsCount >= NEWS_MAX || ofLane.has(destination)) return;
    newsCount += 1;
    news.set(lane, ofLane.add(destination));
  };

  return {
    learn(destination, egress, lane) {
      const entry = known.get(destination) ?? { lanes: new Map<string, string>(), hasMore: false };
      known.delete(destination);
      if (known.size >= DESTINATIONS_MAX) known.delete(known.keys().next().value!);
      known.set(destination, entry);
      if (entry.lanes.get(egress) === lane) return;
      entry.lanes.set(egress, lane);
      tell(lane, destination);
    },
    tell,
    isKnown: (destination) => known.has(destination),
    laneOf: (destination, egress) => known.get(destination)?.lanes.get(egress),
    forget(gone) {
      for (const [destination, { lanes }] of known) {
        for (const [egress, lane] of lanes) if (gone.has(lane)) lanes.delete(egress);
        if (lanes.size === 0) known.delete(destination);
      }
    },
    drop(lane) {
      newsCount -= news.get(lane)?.size ?? 0;
      for (const map of [news, widths, turns]) map.delete(lane);
    },
    offer({ lanes, isOut, hasOtherWay, mayAsk, ...may }) {
      const exceptLanes: string[] = [];
      const rooms = new Map<string, number>();
      const roomOfOthers = mayAsk ? ROOM_OF_OTHERS : 0;
      const laneRooms = new Map<string, number>();
      const byLane = new Map<string, string[]>();
      const unknown = { room: roomOfOthers, lane: NO_LANE };
      for (const [destination, entry] of known) {
        let found = isOut(destination) ? null : roomOf(entry, lanes, laneRooms, may);
        if (found === null && !isOut(destination) && hasOtherWay(destination, entry.lanes)) {
          found = unknown;
        }
        if (found === null || found.room === 0) {
          exceptLanes.push(destination);
          continue;
        }
        const ofLane = byLane.get(found.lane);
        if (ofLane === undefined) byLane.set(found.lane, [destination]);
        else ofLane.push(destination);
      }
      asked = new Map();
      for (const [name, destinations] of byLane) {
        const room = laneRooms.get(name) ?? ROOM_OF_OTHERS;
        const width = widthOf(name, lanes.get(name));
        const chosen = inTurn(destinations, width, turns.get(name) ?? 0);
        if (chosen.length < destinations.length) {
          turns.set(name, (turns.get(name) ?? 0) + chosen.length);
          const isChosen = new Set(chosen);
          exceptLanes.push(...destinations.filter((one) => !isChosen.has(one)));
        }
        asked.set(name, { room, destinations: chosen });
        const isTrusted = lanes.get(name)?.isTrusted === true;
        for (const destination of chosen) {
          const hasMore = isTrusted || known.get(destination)?.hasMore === true;
          const own = hasMore ? room : Math.min(room, ROOM_OF_OTHERS);
          if (own !== roomOfOthers) rooms.set(destination, own);
        }
      }
      offered = { exceptLanes, rooms, roomOfOthers };
      return offered;
    },
    note(claimed) {
      for (const [name, { room, destinations }] of asked) {
        let sum = 0;
        for (const destination of destinations) {
          const count = claimed.get(destination) ?? 0;
          const entry = known.get(destination);
          const own = offered?.rooms.get(destination) ?? offered?.roomOfOthers ?? 0;
          if (entry !== undefined) entry.hasMore = count > 0 && count >= own;
          sum += count;
        }
        if (sum > room) {
          widths.set(name, Math.max(1, Math.floor((destinations.length * room) / sum)));
        } else if (widths.has(name)) {
          const width = widths.get(name)! * 2;
          if (width > known.size) widths.delete(name);
          else widths.set(name, width);
        }
      }
      asked = new Map();
    },
    takeNews(lane) {
      const destinations = [...(news.get(lane) ?? [])];
      news.delete(lane);
      newsCount -= destinations.length;
      return destinations;
    },
  };
}

/** At most `max` of them, beginning behind those that had their turn. */
function inTurn(items: readonly string[], max: number, from: number): readonly string[] {
  if (items.length <= max) return items;
  const start = from % items.length;
  const chosen = items.slice(start, start + max);
  return chosen.length === max ? chosen : [...chosen, ...items.slice(0, max - chosen.length)];
}
