// A queue in which tenants take turns: who brings one message does not wait behind another's thousands.

export interface FairQueue<T> {
  readonly size: number;
  add(item: T): void;
  /** Whose turn it is; undefined when nothing waits. */
  peek(): T | undefined;
  /** Takes what `peek` shows, and with it at most `max` - 1 more of the same tenant that `goesAlong` likes. */
  take(max: number, goesAlong: (item: T) => boolean): readonly [T, ...T[]];
  /** Takes out all that `which` likes, wherever they wait. */
  remove(which: (item: T) => boolean): readonly T[];
}

/** Each tenant's items stay in the order in which they came. */
export function createFairQueue<T>(tenantOf: (item: T) => string): FairQueue<T> {
  // In the order of turns: the first key is next, and goes to the end after its turn.
  const turns = new Map<string, T[]>();
  let size = 0;
  return {
    get size() {
      return size;
    },
    add(item) {
      const tenant = tenantOf(item);
      const waiting = turns.get(tenant);
      if (waiting === undefined) turns.set(tenant, [item]);
      else waiting.push(item);
      size += 1;
    },
    peek() {
      const [next] = turns.values();
      return next?.[0];
    },
    take(max, goesAlong) {
      const [entry] = turns;
      const first = entry?.[1].shift();
      if (entry === undefined || first === undefined) throw new Error('nothing waits');
      const [tenant, waiting] = entry;
      const group: [T, ...T[]] = [first];
      for (let at = 0; at < waiting.length && group.length < max;) {
        if (goesAlong(waiting[at]!)) group.push(...waiting.splice(at, 1));
        else at += 1;
      }
      turns.delete(tenant);
      if (waiting.length > 0) turns.set(tenant, waiting);
      size -= group.length;
      return group;
    },
    remove(which) {
      const removed: T[] = [];
      for (const [tenant, waiting] of turns) {
        const kept: T[] = [];
        for (const item of waiting) (which(item) ? removed : kept).push(item);
        if (kept.length > 0) turns.set(tenant, kept);
        else turns.delete(tenant);
      }
      size -= removed.length;
      return removed;
    },
  };
}
