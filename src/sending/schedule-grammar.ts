// When an email is to be sent, as a caller writes it: a date-time with a time zone (ISO 8601 in the form of
// RFC 3339 §5.6; seconds, and the colon and the minutes of the zone, may be left out), or
// `in <positive integer> <unit>`. Pure: what a text says is apart from whether that time will do, so that a request
// which is repeated later still means the same.

const MINUTE_MS = 60_000;
/** The contract allows no other words. */
const UNIT_MS: Readonly<Record<string, number>> = {
  minute: MINUTE_MS,
  min: MINUTE_MS,
  minutes: MINUTE_MS,
  hour: 60 * MINUTE_MS,
  hours: 60 * MINUTE_MS,
  day: 24 * 60 * MINUTE_MS,
  days: 24 * 60 * MINUTE_MS,
};
const HORIZON_DAYS = 30;
const HORIZON_MS = HORIZON_DAYS * 24 * 60 * MINUTE_MS;
/** Far above every text of the grammar. */
const TEXT_MAX_CHARACTERS = 64;

const RELATIVE = /^in (\d{1,9}) ([a-z]+)$/;
const DATE_TIME =
  /^(\d{4})-(\d\d)-(\d\d)[Tt](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?(?:[Zz]|([+-])(\d\d)(?::?(\d\d))?)$/;
const WITHOUT_ZONE = /^\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(:\d\d([.,]\d+)?)?$/;

/** What the text says. */
export type Schedule =
  { readonly at: Date; readonly afterMs: null } | { readonly at: null; readonly afterMs: number };

export type ParsedSchedule =
  | { readonly ok: true; readonly schedule: Schedule }
  | { readonly ok: false; readonly problem: string };
export type PlannedTime =
  { readonly ok: true; readonly at: Date } | { readonly ok: false; readonly problem: string };

const no = (problem: string): { readonly ok: false; readonly problem: string } => ({
  ok: false,
  problem,
});
const GRAMMAR =
  'must be an ISO 8601 date-time with a time zone, such as `2030-01-31T09:30:00Z`, or `in <number> <minutes|hours|days>`';

/** Reads the text. `problem` is a sentence fragment that follows the field's name. */
export function parseSchedule(text: string): ParsedSchedule {
  if (text.length > TEXT_MAX_CHARACTERS) return no(GRAMMAR);
  const relative = RELATIVE.exec(text);
  if (relative !== null) {
    const count = Number(relative[1]);
    const unitMs = Object.hasOwn(UNIT_MS, relative[2]!) ? UNIT_MS[relative[2]!]! : null;
    if (unitMs === null) return no('must count in minutes, hours or days');
    if (count === 0) return no('must be in the future');
    return { ok: true, schedule: { at: null, afterMs: count * unitMs } };
  }
  if (WITHOUT_ZONE.test(text)) return no('needs a time zone: `Z` or an offset such as `+02:00`');
  const match = DATE_TIME.exec(text);
  if (match === null) return no(GRAMMAR);
  const at = readDateTime(match);
  return at === null
    ? no('names a date or time that does not exist')
    : { ok: true, schedule: { at, afterMs: null } };
}

function readDateTime(match: RegExpExecArray): Date | null {
  const [year, month, day, hour, minute, second] = match
    .slice(1, 7)
    .map((part) => Number(part ?? 0));
  const fractionMs = Number((match[7] ?? '').padEnd(3, '0').slice(0, 3));
  const [zoneHour, zoneMinute] = [Number(match[9] ?? 0), Number(match[10] ?? 0)];
  if (hour! > 23 || minute! > 59 || second! > 59 || zoneHour > 23 || zoneMinute > 59) return null;
  const local = new Date(0);
  local.setUTCFullYear(year!, month! - 1, day);
  // The 31st of February would silently be a day in March.
  const exists = local.getUTCMonth() === month! - 1 && local.getUTCDate() === day;
  if (!exists) return null;
  local.setUTCHours(hour!, minute, second, fractionMs);
  const offsetMs = (match[8] === '-' ? -1 : 1) * (zoneHour * 60 + zoneMinute) * MINUTE_MS;
  return new Date(local.getTime() - offsetMs);
}

/** The time itself, when it is in the future and at most 30 days away. */
export function planTime(schedule: Schedule, now: Date): PlannedTime {
  const afterMs = schedule.afterMs ?? schedule.at.getTime() - now.getTime();
  if (afterMs <= 0) return no('must be in the future');
  if (afterMs > HORIZON_MS) return no(`must be at most ${HORIZON_DAYS} days from now`);
  return { ok: true, at: new Date(now.getTime() + afterMs) };
}
