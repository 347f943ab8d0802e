// Decides each recipient at RCPT, so that what is not for anybody here never arrives: the return paths of our own mail,
// the addresses that tenants receive at, the postmaster of this host. Whoever guesses is slowed down, then shown out.
import type { SMTPServerSession } from 'smtp-server';
import { normalizedAddress } from '../mail/address.ts';
import type { ReturnPathSubject } from '../mail/return-path.ts';
import type { Receiver, Resolution } from '../receiving/arrival.ts';
import { refuseForwardReturn, type ForwardReturn } from '../receiving/home.ts';
import type { Reply } from './listener.ts';
import * as replies from './mx-replies.ts';
import { senderOf } from './mx-trace.ts';
import { NEEDS_SMTPUTF8 } from './replies.ts';

export interface RecipientRules {
  readonly resolve: (address: string) => Promise<Resolution>;
  /** Who reads the mail for the postmaster of this host. */
  readonly findPostmaster: () => Promise<Receiver | null>;
  /** The delivery whose return path this address is. */
  readonly readReturnPath: (address: string) => ReturnPathSubject | null;
  /** Whether bounces come home at the domain of this address. */
  readonly isReturnPathDomain: (address: string) => Promise<boolean>;
  /** Whether this address is a sender that we have rewritten, and whose. */
  readonly readForwardReturn: (address: string) => Promise<ForwardReturn | null>;
  readonly recipientsMax: () => number;
  /** How long a guess waits for its answer. */
  readonly tarpitMs: number;
}

/** Who the running transaction is for, by normalized address. */
export interface Envelope {
  readonly receivers: Map<string, Receiver>;
  readonly subjects: Map<string, ReturnPathSubject>;
  /** What comes back of mail that we forwarded: whom it goes on to. */
  readonly returns: Map<string, { readonly address: string; readonly sender: string }>;
  /** Refused: no route of their domain is for them. */
  readonly unrouteable: Map<string, Receiver>;
}

export const emptyEnvelope = (): Envelope => ({
  receivers: new Map(),
  subjects: new Map(),
  returns: new Map(),
  unrouteable: new Map(),
});

/** RFC 5321 §4.5.1: the one recipient that has no domain. */
const POSTMASTER = /^postmaster$/i;
/** Guesses of a connection: behind these each waits, and the last one ends it. */
const GUESSES_FREE = 5;
const GUESSES_MAX = 20;
/** A client that does not understand that there are too many recipients. */
const OVERSHOOT_MAX = 1_000;

/** Null: it is taken, and noted in the envelope. Rejects when the database is away. */
export type DecideRecipient = (
  address: string,
  session: SMTPServerSession,
  envelope: Envelope,
) => Promise<Reply | null>;

export function createRecipientDecision(d: RecipientRules): DecideRecipient {
  const guesses = new WeakMap<SMTPServerSession, number>();
  const overshoots = new WeakMap<SMTPServerSession, number>();
  const count = (counts: typeof guesses, session: SMTPServerSession): number => {
    const now = (counts.get(session) ?? 0) + 1;
    counts.set(session, now);
    return now;
  };

  async function refuseGuess(session: SMTPServerSession, reply: Reply): Promise<Reply> {
    const guessed = count(guesses, session);
    if (guessed >= GUESSES_MAX) return replies.BAD_RECIPIENTS;
    if (guessed > GUESSES_FREE) {
      await new Promise<void>((resolve) => void setTimeout(resolve, d.tarpitMs).unref());
    }
    return reply;
  }

  return async (address, session, envelope) => {
    const { receivers, subjects, returns } = envelope;
    const key = normalizedAddress(address);
    if ([receivers, subjects, returns].some((known) => known.has(key))) return null;
    // RFC 6531 §3.4: what follows was not announced.
    if (/[^\0-\x7f]/.test(address) && session.envelope.smtpUtf8 !== true) {
      return NEEDS_SMTPUTF8;
    }
    const taken = receivers.size + subjects.size + returns.size;
    if (taken >= d.recipientsMax()) {
      return count(overshoots, session) > OVERSHOOT_MAX ? replies.ERRORS : replies.MANY_RECIPIENTS;
    }
    const isNotAlone = taken > 0 && senderOf(session) === '';

    const subject = d.readReturnPath(address);
    if (subject !== null) {
      if (isNotAlone) return replies.ONE_RECIPIENT;
      subjects.set(key, subject);
      return null;
    }
    const back = await d.readForwardReturn(address);
    if (back !== null) {
      const refused = refuseForwardReturn(back, senderOf(session));
      if (refused !== null) return refuseGuess(session, refused);
      if (isNotAlone) return replies.ONE_RECIPIENT;
      if (back.kind === 'open') returns.set(key, { address, sender: back.sender });
      return null;
    }
    const isPostmaster = POSTMASTER.test(address);
    const found = isPostmaster ? await findPostmaster(d) : await d.resolve(address);
    if (found.kind === 'not_ours') {
      if (isPostmaster) return refuseGuess(session, replies.NO_POSTMASTER);
      if (found.isAwaited) return refuseGuess(session, replies.NOT_YET);
      const isHome = await d.isReturnPathDomain(address);
      return refuseGuess(session, isHome ? replies.NO_RETURN_PATH : replies.NOT_OURS);
    }
    if (found.kind === 'unrouteable') {
      envelope.unrouteable.set(key, found.receiver);
      return refuseGuess(session, replies.NO_ROUTE);
    }
    if (isNotAlone) return replies.ONE_RECIPIENT;
    // One reply to the final dot speaks for all, so all must want the same of the author's policy.
    const [first] = receivers.values();
    if (first !== undefined && first.inboundDmarc !== found.receiver.inboundDmarc) {
      return replies.OTHER_POLICY;
    }
    receivers.set(key, found.receiver);
    return null;
  };
}

async function findPostmaster({ findPostmaster: find }: RecipientRules): Promise<Resolution> {
  const receiver = await find();
  return receiver === null ? { kind: 'not_ours', isAwaited: false } : { kind: 'taken', receiver };
}
