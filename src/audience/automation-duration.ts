// How long a step lasts, as a caller writes it: `30 minutes`, `1 hour`, `1 day 12 hours`, `2h`. Pure.

const SECOND_MS = 1_000;
const MINUTE_MS = 60 * SECOND_MS;
const HOUR_MS = 60 * MINUTE_MS;
const DAY_MS = 24 * HOUR_MS;

const UNITS: ReadonlyMap<string, number> = new Map([
  ...unit(SECOND_MS, 's sec secs second seconds'),
  ...unit(MINUTE_MS, 'm min mins minute minutes'),
  ...unit(HOUR_MS, 'h hr hrs hour hours'),
  ...unit(DAY_MS, 'd day days'),
  ...unit(7 * DAY_MS, 'w week weeks'),
]);
const DURATION_MAX_DAYS = 30;
const DURATION_MAX_MS = DURATION_MAX_DAYS * DAY_MS;
/** Far above every text of the grammar. */
const TEXT_MAX_CHARACTERS = 100;
const PART = /^\s*(?:(?:,|and\b)\s*)?(\d{1,9})\s*([a-z]+)/i;

function unit(ms: number, names: string): readonly (readonly [string, number])[] {
  return names.split(' ').map((name) => [name, ms]);
}

export type ParsedDuration =
  { readonly ok: true; readonly ms: number } | { readonly ok: false; readonly problem: string };

/** Above 0 and at most 30 days. `problem` is a sentence fragment that follows the field's name. */
export function parseDuration(text: unknown): ParsedDuration {
  const no = {
    ok: false,
    problem:
      'must be a duration such as `30 minutes`, `12 hours`, `3 days` or `1 day 6 hours`, in seconds, minutes, hours, days or weeks',
  } as const;
  if (typeof text !== 'string' || text.length > TEXT_MAX_CHARACTERS) return no;
  let rest = text.trim();
  let ms = 0;
  for (let isFirst = true; isFirst || rest !== ''; isFirst = false) {
    const part = PART.exec(rest);
    const unitMs = part === null ? undefined : UNITS.get(part[2]!.toLowerCase());
    if (part === null || unitMs === undefined || (isFirst && !/^\d/.test(rest))) return no;
    ms += Number(part[1]) * unitMs;
    rest = rest.slice(part[0].length).trim();
  }
  if (ms === 0) return { ok: false, problem: 'must be longer than nothing' };
  if (ms > DURATION_MAX_MS) {
    return { ok: false, problem: `must be at most ${DURATION_MAX_DAYS} days` };
  }
  return { ok: true, ms };
}
