// How the clients of the inbound listener behave: what they cost without bringing mail, and how long they keep a place.
//
// Under stress, when four fifths of the places are taken, patience ends sooner and one command that brings nothing is
// allowed (Postfix's STRESS_README has the idea); a client that is sending mail does not notice.
import type { SMTPServerSession } from 'smtp-server';
import type { Life, Reply } from './listener.ts';
import { ERRORS, IDLE, JUNK, TOO_SLOW } from './mx-replies.ts';

/** Of how many commands that bring no mail, and of how many errors, a client is heard until it brings one. */
export interface Patience {
  readonly junkMax: number;
  readonly errorsMax: number;
  /** From our last reply to the next command that is whole. */
  readonly idleMaxMs: number;
  /** A message has this long, and a second more for each `messageBytesPerSecond` that came. */
  readonly messageGraceMs: number;
  readonly messageBytesPerSecond: number;
}

// RFC 5321 §4.5.3.2.7: a server waits at least 5 minutes for the next command.
const CALM: Patience = {
  junkMax: 100,
  errorsMax: 20,
  idleMaxMs: 300_000,
  messageGraceMs: 60_000,
  messageBytesPerSecond: 1_024,
};
const STRESSED: Patience = {
  junkMax: 1,
  errorsMax: 3,
  idleMaxMs: 10_000,
  messageGraceMs: 10_000,
  messageBytesPerSecond: 8_192,
};
/** Of the places that are taken. */
const STRESS_SHARE = 0.8;
/** From 354 to the final dot, however fast. */
const MESSAGE_MAX_MS = 30 * 60_000;

const BRINGS_NOTHING = new Set(['NOOP', 'RSET', 'VRFY', 'EXPN', 'HELP', 'EHLO', 'HELO']);
/** One before TLS and one in it. */
const GREETINGS = new Set(['EHLO', 'HELO']);
const GREETINGS_FREE = 2;

export const isStressed = (taken: number, max: number): boolean => taken > max * STRESS_SHARE;

export const patienceOf = (stressed: boolean): Patience => (stressed ? STRESSED : CALM);

interface Record {
  junk: number;
  greetings: number;
  errors: number;
}

export interface Conduct {
  /** Before a command: 421 when the client was heard for long enough. */
  judge(session: SMTPServerSession, verb: string): Reply | null;
  note(session: SMTPServerSession, code: number): void;
  /** It brought mail: all is forgotten. */
  forgive(session: SMTPServerSession): void;
}

export function createConduct(patience: () => Patience): Conduct {
  const records = new WeakMap<SMTPServerSession, Record>();
  const recordOf = (session: SMTPServerSession): Record => {
    const known = records.get(session);
    if (known !== undefined) return known;
    const record = { junk: 0, greetings: 0, errors: 0 };
    records.set(session, record);
    return record;
  };
  return {
    judge(session, verb) {
      const record = recordOf(session);
      if (GREETINGS.has(verb)) record.greetings += 1;
      const isFree = GREETINGS.has(verb) && record.greetings <= GREETINGS_FREE;
      if (BRINGS_NOTHING.has(verb) && !isFree) record.junk += 1;
      const { junkMax, errorsMax } = patience();
      if (verb === 'QUIT') return null;
      if (record.junk > junkMax) return JUNK;
      return record.errors >= errorsMax ? ERRORS : null;
    },
    note(session, code) {
      // Replies to RCPT are counted apart: lists of honest senders are old.
      if (code >= 500 && code !== 550) recordOf(session).errors += 1;
    },
    forgive: (session) => void records.delete(session),
  };
}

/** What is said to a client that keeps its place for too long; null: it may stay. */
export function overstays(life: Life, nowMs: number, patience: Patience): Reply | null {
  const waitedMs = nowMs - life.saidAtMs;
  if (life.owes === 'command') return waitedMs > patience.idleMaxMs ? IDLE : null;
  if (life.owes === null) return null;
  const earnedMs = (life.messageBytes / patience.messageBytesPerSecond) * 1_000;
  const isSlow = waitedMs > Math.min(MESSAGE_MAX_MS, patience.messageGraceMs + earnedMs);
  return isSlow ? TOO_SLOW : null;
}

/** Who gives its place to the next: the one that is idle longest, outside a transaction and since before `sinceMs`. */
export function longestIdle(lives: Iterable<Life>, sinceMs: number): Life | null {
  let found: Life | null = null;
  for (const life of lives) {
    const isIdle = life.owes === 'command' && !life.isInTransaction;
    if (!isIdle || life.saidAtMs > sinceMs) continue;
    if (found === null || life.saidAtMs < found.saidAtMs) found = life;
  }
  return found;
}
