// How many connections of a lane each worker should have: pure arithmetic, the same in every worker. Who wants little
// gets it, the others share what is left evenly. What nobody wants is spread over all workers, so that whoever needs a
// connection next need not wait for another to give one up.

export interface ShareClaim {
  /** The worker run. */
  readonly epoch: string;
  /** Connections that it may have now. */
  readonly held: number;
  /** Connections that it has work for. */
  readonly wanted: number;
}

/**
 * The part of each, by epoch; together at most `limit`. `workers` is how many there are, those without a claim included.
 * Where an even part is less than one, those that hold most keep their places: reused connections are worth more than
 * turns, and mail that a worker has no place for goes back to the queue, for those that have one.
 */
export function shareOut(
  limit: number,
  claims: readonly ShareClaim[],
  workers: number,
): ReadonlyMap<string, number> {
  const parts = new Map<string, number>();
  let left = limit;
  const modestFirst = claims.toSorted((a, b) => a.wanted - b.wanted);
  for (const [at, { epoch, wanted }] of modestFirst.entries()) {
    const level = Math.floor(left / (claims.length - at));
    if (wanted <= level) {
      parts.set(epoch, wanted);
      left -= wanted;
      continue;
    }
    const others = modestFirst.slice(at).toSorted(byHeld);
    left -= level * others.length;
    for (const [place, other] of others.entries()) {
      parts.set(other.epoch, level + Number(place < left));
    }
    return parts;
  }
  const places = Math.max(workers, claims.length);
  const each = Math.floor(left / places);
  // Places that are reserved for workers without a claim stay free.
  const rest = places === claims.length ? left - each * places : 0;
  for (const [place, { epoch, wanted }] of claims.toSorted(byHeld).entries()) {
    parts.set(epoch, wanted + each + Number(place < rest));
  }
  return parts;
}

const byHeld = (a: ShareClaim, b: ShareClaim): number =>
  b.held - a.held || (a.epoch < b.epoch ? -1 : 1);
