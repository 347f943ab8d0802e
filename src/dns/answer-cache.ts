// Remembers answers for a short while, bounded in number and in size: what somebody else can make large must not fill
// the memory. The oldest go first; a clock that was set back makes nothing live longer.

export interface AnswerCache<T> {
  /** Null: there is none that is still good. */
  get(key: string): T | null;
  /** `weight`: of the value, in the unit of `weightMax`; what is heavier than that is not kept. */
  set(key: string, value: T, about: { readonly lifeMs: number; readonly weight: number }): void;
}

export function createAnswerCache<T>(options: {
  readonly now: () => Date;
  readonly entriesMax: number;
  readonly weightMax: number;
}): AnswerCache<T> {
  const { now, entriesMax, weightMax } = options;
  const slots = new Map<
    string,
    {
      readonly value: T;
      readonly storedAtMs: number;
      readonly lifeMs: number;
      readonly weight: number;
    }
  >();
  let total = 0;

  const forget = (key: string): void => {
    total -= slots.get(key)?.weight ?? 0;
    slots.delete(key);
  };
  return {
    get(key) {
      const slot = slots.get(key);
      if (slot === undefined) return null;
      const ageMs = now().getTime() - slot.storedAtMs;
      if (ageMs >= 0 && ageMs < slot.lifeMs) return slot.value;
      forget(key);
      return null;
    },
    set(key, value, { lifeMs, weight }) {
      forget(key);
      if (lifeMs <= 0 || weight > weightMax) return;
      slots.set(key, { value, storedAtMs: now().getTime(), lifeMs, weight });
      total += weight;
      // A Map iterates in order of insertion, so the first is the oldest.
      for (const oldest of slots.keys()) {
        if (slots.size <= entriesMax && total <= weightMax) break;
        forget(oldest);
      }
    },
  };
}
