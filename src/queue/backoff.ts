// When a delivery is tried again: by the operator's schedule, unless the peer said when.
//
// A greylisting host wants to see the same message once more after some minutes, so the schedule's first pause, made for
// hiccups, would come too early and its later ones needlessly late.

/** Jitter, so that what was deferred together is not tried together again. */
const JITTER = 0.2;

/** Long enough that a receiver that did accept has the message in its queue or mailbox. */
export const UNKNOWN_DELAY_MS = 20 * 60_000;

const MINUTE_MS = 60_000;
/** The pauses that greylisting hosts ask for where they do not say: five minutes in nearly all of them. */
const GREYLISTED_MS = { min: 5 * MINUTE_MS, max: 6 * MINUTE_MS };
/** Whoever says "greylisted" more often than this means something else: the schedule goes on. */
const GREYLISTED_TRIES_MAX = 3;
/** What a peer asks for is honoured within these. */
const ASKED_MS = { min: MINUTE_MS, max: 60 * MINUTE_MS };
/** Added to what a peer asks for, never taken off: a moment too early begins its wait anew. */
const ASKED_JITTER = 0.1;

/**
 * A lane that is at fault again and again has not noticed it: a host that answers each of its messages with 421 would
 * have every one of them once a minute for days. So many faults lengthen the pause by one entry of the schedule, and
 * by so many entries at most.
 */
const FAULTS_PER_STEP = 10;
const FAULT_STEPS_MAX = 3;

/** What is known of a delivery that was put off just now. */
export interface PutOff {
  /** Attempts made, this one included. */
  readonly attempt: number;
  /** How many of them were the lane's fault, this one included: they hardly make the pauses longer. */
  readonly laneFaults: number;
  /** As in mail/outcome.ts. */
  readonly cause: string | null;
  /** The peer's words. */
  readonly reply: string | null;
}

/**
 * The delay before the next attempt, after `attempt` attempts were made (1 for the first).
 *
 * The schedule's entry for this attempt, its last entry from then on, ±20 %. `random` is in [0, 1).
 * RFC 5321 §4.5.4.1 asks for 30 minutes in general and allows shorter pauses at first.
 */
export function nextDelayMs(
  scheduleMs: readonly number[],
  attempt: number,
  random: number,
): number {
  const planned = scheduleMs[Math.min(Math.max(attempt, 1), scheduleMs.length) - 1];
  if (planned === undefined) throw new Error('the retry schedule is empty');
  return Math.round(planned * (1 - JITTER + 2 * JITTER * random));
}

/** The delay before the next attempt, after what the peer said at this one. `random` is in [0, 1). */
export function pauseMs(scheduleMs: readonly number[], putOff: PutOff, random: number): number {
  const tries = putOff.attempt - putOff.laneFaults;
  const steps = Math.min(Math.floor(putOff.laneFaults / FAULTS_PER_STEP), FAULT_STEPS_MAX);
  const scheduled = nextDelayMs(scheduleMs, Math.max(tries, 1 + steps), random);
  const asked = askedPauseMs(putOff.reply ?? '');
  const wanted = asked === null ? null : Math.round(asked * (1 + ASKED_JITTER * random));
  if (putOff.cause === 'greylisted') {
    const { min, max } = GREYLISTED_MS;
    const pause = wanted ?? Math.round(min + (max - min) * random);
    return tries > GREYLISTED_TRIES_MAX ? Math.max(pause, scheduled) : pause;
  }
  if (putOff.cause === 'rate_limited' && wanted !== null) return Math.max(wanted, scheduled);
  return scheduled;
}

const REPLY_CHARS_MAX = 1_000;
const CLOCK_TIME = /\b(?:in|for|after|within) (\d{1,2}):(\d\d):(\d\d)\b/i;
const SPELLED_OUT =
  /\b(?:in|for|after|within|wait|least|another|about) {1,3}(\d{1,5}) ?(s|secs?|seconds?|m|mins?|minutes?|h|hours?)\b(?:,? (?:and )?(\d{1,2}) ?(?:s|secs?|seconds?)\b)?/i;

/**
 * How long a reply asks us to wait, between one minute and an hour: `try again in 300 seconds`, `in 5 minutes`,
 * `come back in 00:04:59`. Null where it does not say.
 */
export function askedPauseMs(reply: string): number | null {
  const text = reply.slice(0, REPLY_CHARS_MAX);
  const clamp = (seconds: number): number =>
    Math.min(Math.max(seconds * 1_000, ASKED_MS.min), ASKED_MS.max);
  const clock = CLOCK_TIME.exec(text);
  if (clock !== null) {
    return clamp(Number(clock[1]) * 3_600 + Number(clock[2]) * 60 + Number(clock[3]));
  }
  const spelled = SPELLED_OUT.exec(text);
  if (spelled === null) return null;
  const [, count, unit = '', rest = '0'] = spelled;
  const factor = { s: 1, m: 60, h: 3_600 }[unit[0]?.toLowerCase() as 's' | 'm' | 'h'];
  return clamp(Number(count) * factor + Number(rest));
}
