// Emails that are shown to people who have no API key, by a link that ends.
import type { LinkedEmail } from '../access/linked.ts';
import { refuseFields } from '../access/refusal.ts';
import type { EmailRecord } from './read.ts';

const HOUR_MS = 3_600_000;
const SHARE_MAX_MS = 48 * HOUR_MS;
const DURATION = /^(\d{1,9}) ?([a-z]+)$/;
const UNITS: readonly (readonly [RegExp, number])[] = [
  [/^(?:s|secs?|seconds?)$/, 1_000],
  [/^(?:m|mins?|minutes?)$/, 60_000],
  [/^(?:h|hrs?|hours?)$/, HOUR_MS],
  [/^(?:d|days?)$/, 24 * HOUR_MS],
];

/** How long a shared email can be seen: `10m`, `1h`, at most and by default 48 hours. Throws a Refusal. */
export function shareLifetimeMs(given: string | null | undefined): number {
  if (given === null || given === undefined) return SHARE_MAX_MS;
  const [, number = '', unit = ''] = DURATION.exec(given.trim().toLowerCase()) ?? [];
  const unitMs = UNITS.find(([pattern]) => pattern.test(unit))?.[1] ?? 0;
  const lifetimeMs = Number(number) * unitMs;
  if (lifetimeMs > 0 && lifetimeMs <= SHARE_MAX_MS) return lifetimeMs;
  const message = '`expires_in` must be a duration of at most 48 hours, such as `10m` or `1h`.';
  throw refuseFields([{ path: 'expires_in', message }]);
}

/** What a shared email shows: no Bcc, no tags, nothing about its delivery. */
export const sharedEmail = (email: EmailRecord): LinkedEmail => ({
  kind: 'email',
  subject: email.subject,
  from: email.fromGiven,
  to: email.toGiven,
  cc: email.ccGiven ?? [],
  createdAt: email.createdAt,
  html: email.content.html ?? null,
  text: email.content.text ?? null,
});
