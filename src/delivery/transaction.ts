// Deliveries of one email over one session: each transaction carries as many recipients as the host takes, and the
// replies decide about each of them. A refused RCPT is that recipient's own, the reply to the final dot speaks for
// all that were accepted, and its loss makes all of those unknown.
import type { BounceRule } from '../mail/bounce-rules.ts';
import { parseReply } from '../mail/reply.ts';
import type { ClaimedDelivery } from '../queue/claim.ts';
import type { Cause } from '../mail/outcome.ts';
import { decided, fromFailure, viaSession, type Decided, type Via } from './decided.ts';
import type { SendResult, Session } from './session.ts';
import type { SignedMessage } from './signed-message.ts';

export interface Carrying {
  readonly message: SignedMessage;
  readonly rules: readonly BounceRule[];
  /** What had to hold for the connection (store/delivery.ts). */
  readonly tlsPolicy: string | null;
  /** Messages after which the session is not used again. */
  readonly messagesMax: number;
  /** Called for each delivery whose recipient was accepted, before the final dot leaves. */
  readonly onDot: (delivery: ClaimedDelivery) => void;
  /** Called for each delivery that has left, or may have, as soon as that is known. */
  readonly onSent?: ((delivery: ClaimedDelivery, one: Decided) => void) | undefined;
}

/** What one session made of the deliveries: each is in one of the maps, or in neither and was not tried. */
export interface Carried {
  readonly decided: ReadonlyMap<ClaimedDelivery, Decided>;
  /** Another host may take them; where there is none, this is what became of them. */
  readonly open: ReadonlyMap<ClaimedDelivery, Decided>;
  /** The session has done its part: what is left may go to the same host over a new one. */
  readonly isSpent: boolean;
}

/** RFC 5321 §4.5.3.1.8: a host takes at least as many, unless it says otherwise. */
const RECIPIENTS_MAX = 100;
// oxlint-disable-next-line no-control-regex
const NON_ASCII = /[^\u0000-\u007f]/;

/** Throws for faults of our own before anything was decided. */
export async function carry(
  session: Session,
  deliveries: readonly ClaimedDelivery[],
  about: Carrying,
): Promise<Carried> {
  const via: Via = { ...viaSession(session), tlsPolicy: about.tlsPolicy };
  const done = new Map<ClaimedDelivery, Decided>();
  const open = new Map<ClaimedDelivery, Decided>();
  const waiting: ClaimedDelivery[] = [];
  for (const delivery of deliveries) {
    const refused = refusedAsItIs(session, delivery, about.message);
    if (refused === null) waiting.push(delivery);
    else done.set(delivery, decided('bounced', { ...via, ...refused }));
  }
  while (waiting.length > 0) {
    const isKept = session.sent > 0;
    const messagesMax = Math.min(about.messagesMax, session.limits.messages);
    if (isKept && (!session.isOpen() || session.sent >= messagesMax)) {
      return { decided: done, open, isSpent: true };
    }
    const group = takeGroup(waiting, session);
    const result = await sendTo(session, group, about);
    const { fault } = about.message.bytes;
    if (fault !== null && done.size === 0) throw fault; // the connection was given up over our own disk
    const isGone = isKept && !session.isOpen();
    const end = judge(result, { group, via, isKept, isGone, rules: about.rules });
    for (const [delivery, one] of end.decided) {
      done.set(delivery, one);
      if (one.verdict === 'delivered' || one.verdict === 'unknown') about.onSent?.(delivery, one);
    }
    waiting.unshift(...end.again);
    if (end.takenMax !== null) session.takesAtMost(end.takenMax);
    for (const [delivery, one] of end.open) open.set(delivery, one);
    if (end.isSpent || open.size > 0) return { decided: done, open, isSpent: end.isSpent };
  }
  return { decided: done, open, isSpent: false };
}

/** What the message needs of a host and this one does not offer; null: nothing. */
function refusedAsItIs(
  session: Session,
  delivery: ClaimedDelivery,
  message: SignedMessage,
): {
  readonly cause: Cause;
  readonly stage: 'mail';
  readonly enhanced: string;
  readonly reply: string;
} | null {
  const needsSmtpUtf8 = delivery.needsSmtpUtf8 || NON_ASCII.test(delivery.recipient);
  if (needsSmtpUtf8 && !session.supportsSmtpUtf8) {
    return {
      cause: 'smtputf8_unsupported',
      stage: 'mail',
      enhanced: '5.6.7',
      reply: 'The host does not take internationalized addresses (SMTPUTF8).',
    };
  }
  if (message.is8Bit !== true || session.supports8Bit) return null;
  // RFC 6152 §3: converted or returned; converting it would break the signature that it is relayed for.
  return {
    cause: 'eight_bit_unsupported',
    stage: 'mail',
    enhanced: '5.6.3',
    reply: 'The message has 8-bit text, which the host does not take (8BITMIME).',
  };
}

/** The next recipients, as many as one transaction takes (RFC 9422 §4.1); the rest stays. */
function takeGroup(waiting: ClaimedDelivery[], { limits }: Session): readonly ClaimedDelivery[] {
  const domains = new Set<string>();
  const max = Math.min(RECIPIENTS_MAX, limits.recipients);
  let count = 0;
  for (const { recipient } of waiting) {
    domains.add(recipient.slice(recipient.lastIndexOf('@') + 1));
    if (count === max || domains.size > limits.recipientDomains) break;
    count += 1;
  }
  return waiting.splice(0, Math.max(1, count));
}

function sendTo(
  session: Session,
  group: readonly ClaimedDelivery[],
  { message, onDot }: Carrying,
): Promise<SendResult> {
  return session.send({
    mailFrom: message.mailFrom(group),
    recipients: group.map(({ recipient }) => recipient),
    body: message.body(),
    sizeBytes: message.sizeBytes,
    needsSmtpUtf8: group.some((delivery) => delivery.needsSmtpUtf8),
    is8Bit: message.is8Bit === true,
    onDot(accepted) {
      for (const delivery of group) if (accepted.has(delivery.recipient)) onDot(delivery);
    },
  });
}

interface Judged extends Carried {
  /** For the next transaction of this session. */
  readonly again: readonly ClaimedDelivery[];
  /** How many recipients the host took when it took no more; null: it took all it was told. */
  readonly takenMax: number | null;
}

function judge(
  result: SendResult,
  about: {
    readonly group: readonly ClaimedDelivery[];
    readonly via: Via;
    readonly isKept: boolean;
    /** It was kept, and did not outlive this transaction. */
    readonly isGone: boolean;
    readonly rules: readonly BounceRule[];
  },
): Judged {
  const { group, via, rules } = about;
  const refusedAt = (index: number): string | null => result.refusals[index] ?? null;
  const accepted = group.filter((_, index) => refusedAt(index) === null);
  const firstAccepted = group.findIndex((_, index) => refusedAt(index) === null);
  // Only once the message is through is it known that the host takes fewer, and not this recipient.
  const isOver = (index: number): boolean =>
    result.kind === 'accepted' && index > firstAccepted && isTooMany(refusedAt(index));
  const done = new Map<ClaimedDelivery, Decided>();
  const again: ClaimedDelivery[] = [];
  for (const [index, delivery] of group.entries()) {
    const reply = refusedAt(index);
    if (reply === null) continue;
    if (isOver(index)) {
      again.push(delivery);
      continue;
    }
    const failure = { stage: 'rcpt', cause: 'protocol_error', reply, message: reply } as const;
    done.set(delivery, fromFailure(failure, { via, tenantId: delivery.tenantId, rules }));
  }
  const ofAll = (one: (delivery: ClaimedDelivery) => Decided): Map<ClaimedDelivery, Decided> =>
    new Map(accepted.map((delivery) => [delivery, one(delivery)]));
  const none: ReadonlyMap<ClaimedDelivery, Decided> = new Map();
  const merge = (more: ReadonlyMap<ClaimedDelivery, Decided>): Map<ClaimedDelivery, Decided> =>
    new Map([...done, ...more]);
  const takenMax = again.length > 0 ? accepted.length : null;
  if (result.kind === 'accepted') {
    const reply = parseReply(result.reply);
    const yes = decided('delivered', {
      ...via,
      stage: 'dot',
      code: reply?.code ?? null,
      enhanced: reply?.enhanced ?? null,
      reply: result.reply,
    });
    return { decided: merge(ofAll(() => yes)), open: none, isSpent: false, again, takenMax };
  }
  if (result.kind === 'lost' && result.dotSent) {
    const unknown = decided('unknown', {
      ...via,
      cause: 'unknown_after_dot',
      stage: 'dot',
      reply: `The connection broke after the final dot: ${result.message}`,
    });
    return { decided: merge(ofAll(() => unknown)), open: none, isSpent: true, again, takenMax };
  }
  const refused = ofAll(({ tenantId }) => fromFailure(result, { via, tenantId, rules }));
  const isAboutConnection =
    result.kind === 'refused' &&
    (result.reply?.startsWith('421') === true || (about.isGone && result.stage === 'mail'));
  if (result.kind === 'refused' && !isAboutConnection) {
    return { decided: merge(refused), open: none, isSpent: false, again, takenMax };
  }
  // A kept connection may have been closed while it was idle, or have carried enough (RFC 5321 §3.8): that says
  // nothing about this mail.
  const isOurs = result.cause === 'internal';
  if (about.isKept && !isOurs && (result.kind === 'lost' || result.stage === 'mail')) {
    return { decided: done, open: none, isSpent: true, again: [], takenMax };
  }
  return { decided: done, open: refused, isSpent: false, again: [], takenMax };
}

/** RFC 5321 §4.5.3.1.10: 452, by old hosts 552, says too many; with a status of the mailbox it is about the mailbox. */
function isTooMany(raw: string | null): boolean {
  const reply = raw === null ? null : parseReply(raw);
  if (reply === null) return false;
  if (reply.enhanced !== null && /^[45]\.[12]\./.test(reply.enhanced)) return false;
  if (reply.code === 452 || reply.code === 552) return true;
  return reply.code < 500 && /\btoo many recipients\b/i.test(reply.text);
}
