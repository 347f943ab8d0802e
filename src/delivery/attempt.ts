// One attempt at deliveries of one email to one destination: make the bytes, go from host to host until every delivery is
// decided, and say what came of it. The claim has already stored the attempt, so a crash anywhere here costs one retry.
//
// A reply is a value. An unknown failure defers. Only a 5yz about this sender, recipient or message bounces; trouble
// with the host itself (connect, greeting, EHLO, TLS, AUTH, 421, a connection that breaks before the final dot) tries
// the next host and then defers. Lost after the final dot is `unknown`. A fault of our own that no retry can mend is
// `failed`, the dead letter.
import { isIPv6 } from 'node:net';
import type { Logger } from '../log.ts';
import type { BounceRule } from '../mail/bounce-rules.ts';
import { isAboutRate } from '../mail/refusal-words.ts';
import type { ClaimedDelivery } from '../queue/claim.ts';
import { SANDBOX_LANE } from '../store/destination.ts';
import { decided, fromFailure, viaTarget, type Decided } from './decided.ts';
import { withoutLogin } from './hidden-login.ts';
import { climb, isEnough, planRungs, sumUp, type Rung, type Tried } from './ladder.ts';
import type { NextHops } from './next-hop.ts';
import { answerInSandbox } from './sandbox.ts';
import type { Failure, Session, Target } from './session.ts';
import {
  notSentAgain,
  signMessageOf,
  type SignedMessage,
  type SigningDependencies,
} from './signed-message.ts';
import { readTlsWishes } from './tls-required.ts';
import type { TlsResult } from './tls-results.ts';
import { carry, type Carried } from './transaction.ts';

export type { Decided } from './decided.ts';

export interface AttemptDependencies extends SigningDependencies {
  readonly checkPeer: (
    address: string,
  ) => { readonly ok: true } | { readonly ok: false; readonly reason: string };
  /** What is known of replies beyond their codes. */
  readonly bounceRules: readonly BounceRule[];
  /** Counts how TLS went, for the daily reports. */
  readonly noteTls: (result: TlsResult) => void;
  /** What the operator must hear of. */
  readonly log: Pick<Logger, 'error'>;
  /** Called before the final dot of this delivery leaves; throws when it must not. */
  readonly onDot: (delivery: ClaimedDelivery) => void;
  /** Told of what has left while the attempt may go on for others: it must not be lost meanwhile. */
  readonly onSent?: (delivery: ClaimedDelivery, one: Decided) => void;
}

/** What one attempt is to carry: deliveries of one email to one destination, and where they go. */
export interface Work {
  /** At least one; more only of one email and one destination, with recipients that differ. */
  readonly deliveries: readonly ClaimedDelivery[];
  readonly hops: NextHops;
}

/** What an attempt taught about its lane, whatever became of the deliveries. */
export type LaneSignal =
  /** A host listened and talked; its words about this mail do not matter here. */
  | { readonly kind: 'talked' }
  /**
   * No host could be talked with: connect, greeting, EHLO or AUTH failed at all that were tried, or TLS with a smarthost.
   * Towards MX hosts TLS fails by what one sender or one recipient's domain asks for: no fault of the lane.
   */
  | { readonly kind: 'unreachable'; readonly stage: string; readonly why: string }
  /** A host wants less of us: 421, or a limit named in its reply. */
  | { readonly kind: 'throttled'; readonly why: string }
  /** Nothing was tried. */
  | { readonly kind: 'nothing' };

export interface Attempted {
  /** In the order of the deliveries. */
  readonly decided: readonly Decided[];
  readonly signal: LaneSignal;
}

/** A connection that a track keeps between attempts. */
export interface Line {
  session: Session | null;
  /** After so many messages it is not used again; absent: as MESSAGES_PER_SESSION_MAX says. */
  messagesMax?: number;
  /** Until it resolves, the connection of the session before is not closed: the next one waits for it. */
  leaving?: Promise<void>;
}

/** RFC 5321 does not say; Postfix and the large providers' own limits are near this. */
const MESSAGES_PER_SESSION_MAX = 100;
/** Postfix's smtp_mx_session_limit: hosts that answered, and did not take the mail. */
const SESSIONS_MAX = 2;
/** Dialling, while there are other addresses to dial. */
const CONNECT_MS_OF_MANY = 10_000;
/** No further host is tried after this: one delivery must not hold a connection's place for long. */
const HOSTS_MAX_MS = 120_000;

/** Attempts the work over the line's session or a new one. Throws only for faults of our own. */
export async function attempt(d: AttemptDependencies, line: Line, work: Work): Promise<Attempted> {
  const { deliveries, hops } = work;
  const [first] = deliveries;
  if (first === undefined) return { decided: [], signal: { kind: 'nothing' } };
  const all = (one: (delivery: ClaimedDelivery) => Decided): Attempted => ({
    decided: deliveries.map(one),
    signal: { kind: 'nothing' },
  });
  const message = await signMessageOf(d, first);
  if ('verdict' in message) {
    // A host that may have it all the same keeps the delivery from being called lost.
    return all(({ unknowns }) => (unknowns > 0 ? { ...message, verdict: 'unknown' } : message));
  }
  if (first.lane === SANDBOX_LANE) return all(({ recipient }) => answerInSandbox(recipient));
  if (hops.kind === 'none') {
    const { permanent, cause, enhanced, message: reply } = hops;
    const verdict = permanent ? 'bounced' : 'deferred';
    return all(() => decided(verdict, { cause, stage: 'dns', enhanced, reply }));
  }
  const course = new Course(d, line, { message, deliveries });
  const wishes = await readTlsWishes(message.bytes, first.ignoresTlsPolicy);
  const targets = message.needsTls ? hops.targets.map(withTls) : hops.targets;
  // Mail that goes to a smarthost has none: no policy of the domain speaks of it.
  const rungs = planRungs(targets, hops.policies ?? new Map(), wishes);
  try {
    await course.run(rungs);
  } catch (error) {
    // What is decided stays so: nobody may get the message twice over a fault of ours.
    if (!course.hasDecided()) throw error;
    const { emailId, tenantId, attempt: number } = first;
    d.log.error(
      { err: error, email_id: emailId, tenant_id: tenantId, attempt: number },
      'attempt broke in its middle',
    );
    course.breakOff();
  }
  return course.result();
}

const UNREAD = 'An internal fault kept the answer to the message from being read.';

const withTls = (target: Target): Target =>
  target.tls === 'opportunistic' ? { ...target, tls: 'required' } : target;

/** The way of one attempt from host to host. */
class Course {
  readonly #d: AttemptDependencies;
  readonly #line: Line;
  readonly #message: SignedMessage;
  readonly #deliveries: readonly ClaimedDelivery[];
  readonly #messagesMax: number;
  readonly #done = new Map<ClaimedDelivery, Decided>();
  /** What became of those that are not done, where no other host takes them. */
  readonly #open = new Map<ClaimedDelivery, Decided>();
  /** The final dot has left, or may have, and what came of it is not known yet. */
  readonly #dotted = new Set<ClaimedDelivery>();
  readonly #tried: Tried[] = [];
  /** Only this family may be dialled any more. */
  #family: 4 | 6 | null = null;
  #hasTalked = false;
  #hasDialled = false;
  #throttle: string | null = null;

  constructor(
    d: AttemptDependencies,
    line: Line,
    work: { readonly message: SignedMessage; readonly deliveries: readonly ClaimedDelivery[] },
  ) {
    this.#d = d;
    this.#line = line;
    this.#message = work.message;
    this.#deliveries = work.deliveries;
    this.#messagesMax = line.messagesMax ?? MESSAGES_PER_SESSION_MAX;
    if (!work.message.hasOtherKeys) return;
    for (const delivery of work.deliveries) {
      if (delivery.unknowns > 0) this.#done.set(delivery, notSentAgain(delivery));
    }
  }

  async run(all: readonly Rung[]): Promise<void> {
    let rungs = all;
    const kept = this.#line.session;
    if (kept !== null && this.#left().length > 0) {
      const rung = all.find((one) => isEnough(kept, one));
      const isUsable = rung !== undefined && kept.isOpen() && kept.sent < this.#messagesMax;
      if (isUsable) {
        const isSpent = await this.#carryOver(kept, rung, { others: all, mayGoOn: true });
        if (!isSpent) rungs = all.filter((one) => one !== rung);
      }
      if (!isUsable || this.#left().length > 0) this.#drop();
    }
    const until = Date.now() + HOSTS_MAX_MS;
    let sessions = this.#open.size > 0 ? 1 : 0;
    for (let at = 0; at < rungs.length && this.#left().length > 0;) {
      const rung = rungs[at]!;
      if ((at > 0 || sessions > 0) && Date.now() > until) break;
      if (sessions >= SESSIONS_MAX || this.#isOurFault()) break;
      if (!this.#mayDial(rung.target)) {
        at += 1;
        continue;
      }
      const others = rungs.slice(at + 1);
      const opened = await this.#dial(rung, others);
      if ('cause' in opened) {
        if (hasAnswered(opened)) sessions += 1;
        at += 1;
        continue;
      }
      this.#line.session = opened;
      const isSpent = await this.#carryOver(opened, rung, {
        others,
        mayGoOn: sessions + 1 < SESSIONS_MAX,
      });
      if (this.#left().length === 0) return;
      this.#drop();
      // It carried its share and takes no more over this connection: the same host again.
      if (isSpent) continue;
      sessions += 1;
      at += 1;
    }
  }

  hasDecided(): boolean {
    return this.#done.size > 0 || this.#dotted.size > 0;
  }

  /** A fault of ours ended it. */
  breakOff(): void {
    this.#drop();
    const reply = 'An internal fault interrupted the attempt; it is tried again.';
    const broken = decided('deferred', { cause: 'internal', enhanced: '4.3.0', reply });
    const reached = decided('unknown', { cause: 'unknown_after_dot', stage: 'dot', reply: UNREAD });
    for (const delivery of this.#left()) {
      this.#open.set(delivery, this.#dotted.has(delivery) ? reached : broken);
    }
  }

  result(): Attempted {
    const failed = this.#tried.length === 0 ? null : sumUp(this.#tried);
    const results = this.#deliveries.map((delivery) => {
      const done = this.#done.get(delivery);
      if (done !== undefined) return done;
      const open = this.#open.get(delivery);
      // What a host said tells more than that another could not be reached.
      if (open !== undefined) return open;
      if (failed === null) return decided('deferred', { cause: 'no_usable_host', stage: 'dns' });
      return this.#fromTried(failed, delivery);
    });
    return { decided: results, signal: this.#signal(failed) };
  }

  #signal(failed: Tried | null): LaneSignal {
    if (this.#throttle !== null) return { kind: 'throttled', why: this.#throttle };
    if (this.#hasTalked) return { kind: 'talked' };
    if (failed === null) return { kind: 'nothing' };
    const { failure, target } = failed;
    const { stage, reply, message } = failure;
    // A host that a policy rules out is not even dialled.
    if (stage === 'tls' && !target.trusted)
      return { kind: this.#hasDialled ? 'talked' : 'nothing' };
    return { kind: 'unreachable', stage, why: reply ?? message };
  }

  #left(): readonly ClaimedDelivery[] {
    return this.#deliveries.filter((delivery) => !this.#done.has(delivery));
  }

  /** No other host can mend it. */
  #isOurFault(): boolean {
    return [...this.#open.values()].some(({ evidence }) => evidence.cause === 'internal');
  }

  #mayDial({ address }: Target): boolean {
    return this.#family === null || this.#family === familyOf(address);
  }

  #drop(): void {
    const { session } = this.#line;
    if (session === null) return;
    session.close();
    this.#line.leaving = session.closed;
    this.#line.session = null;
  }

  async #dial(rung: Rung, others: readonly Rung[]): Promise<Session | Failure> {
    const d = this.#d;
    if (rung.refusal === null) this.#hasDialled = true;
    await this.#line.leaving;
    const isLast = !others.some(({ target }) => this.#mayDial(target));
    const target = isLast ? rung.target : { ...rung.target, connectMs: CONNECT_MS_OF_MANY };
    const opened = await climb({ ...rung, target }, { checkPeer: d.checkPeer, note: d.noteTls });
    if ('cause' in opened) {
      this.#tried.push({ target, failure: opened });
      if (opened.cause === 'egress_unusable') tellOnce(d.log, opened.message);
      if (opened.reply !== null) {
        this.#note(this.#judge(target, opened, this.#deliveries[0]!));
      }
    } else if (this.#message.needsTls && opened.tls === null) {
      opened.close();
      throw new Error('a session without encryption, where it is required');
    }
    return opened;
  }

  /** Carries what is left over the session. True: the same host may be asked again over a new one. */
  async #carryOver(
    session: Session,
    { target }: Rung,
    next: { readonly others: readonly Rung[]; readonly mayGoOn: boolean },
  ): Promise<boolean> {
    this.#hasTalked = true;
    const carried = await carry(session, this.#left(), {
      message: this.#message,
      rules: this.#d.bounceRules,
      tlsPolicy: target.demand.kind,
      messagesMax: this.#messagesMax,
      onDot: (delivery) => {
        this.#d.onDot(delivery);
        this.#dotted.add(delivery);
      },
      onSent: (delivery, one) => {
        this.#done.set(delivery, one);
        this.#d.onSent?.(delivery, one);
      },
    });
    this.#dotted.clear();
    this.#take(carried, { target, ...next });
    return carried.isSpent;
  }

  #take(
    carried: Carried,
    about: {
      readonly target: Target;
      readonly others: readonly Rung[];
      readonly mayGoOn: boolean;
    },
  ): void {
    for (const [delivery, one] of carried.open) {
      this.#open.set(delivery, one);
      this.#note(one);
    }
    const other = familyOf(about.target.address) === 4 ? 6 : 4;
    const hasOther =
      about.mayGoOn &&
      this.#family === null &&
      about.others.some(
        ({ target }) => target.host === about.target.host && familyOf(target.address) === other,
      );
    for (const [delivery, one] of carried.decided) {
      if (hasOther && delivery.attempt === 1 && isAboutOurAddress(one)) {
        // Often said of one of our addresses only (no PTR, not in SPF): the other one is heard before it is final.
        this.#open.set(delivery, { ...one, verdict: 'deferred' });
        this.#family = other;
      } else {
        this.#done.set(delivery, one);
        this.#note(one);
      }
    }
  }

  #note({ verdict, evidence }: Decided): void {
    const { code, cause, enhanced, reply, stage } = evidence;
    if (verdict !== 'deferred' || code === null || reply === null) return;
    // Of one mailbox (4.2.x) a limit says nothing about us.
    const isLimit = cause === 'rate_limited' && enhanced?.startsWith('4.2.') !== true;
    const isEarly = stage !== null && BEFORE_RCPT.has(stage) && isAboutRate(reply);
    if (code === 421 || (code < 500 && (isLimit || isEarly))) this.#throttle = reply;
  }

  #fromTried({ target, failure }: Tried, delivery: ClaimedDelivery): Decided {
    const { stage } = failure;
    if (target.login !== null && (stage === 'tls' || stage === 'auth')) {
      const { verdict, evidence } = this.#judge(target, failure, delivery);
      const why = evidence.reply ?? '';
      const reply = stage === 'tls' ? noPasswordSent(target, why) : loginRefused(target, why);
      return { verdict, evidence: { ...evidence, reply } };
    }
    // What the recipient's domain asks for says more.
    const isByPolicy = failure.cause.startsWith('tls_policy_');
    if (!this.#message.needsTls || stage !== 'tls' || isByPolicy) {
      return this.#judge(target, failure, delivery);
    }
    // It may learn TLS, and the sender may change the setting.
    return decided('deferred', {
      ...viaTarget(target),
      stage: 'tls',
      cause: 'tls_required',
      reply: `The domain ${delivery.fromDomain} is set to \`tls: enforced\`, and no encrypted connection to ${target.host} could be made: ${failure.reply ?? failure.message}`,
    });
  }

  #judge(target: Target, failure: Failure, { tenantId }: ClaimedDelivery): Decided {
    const rules = this.#d.bounceRules;
    const told = withoutLogin(failure, target.login);
    return fromFailure(told, { via: viaTarget(target), tenantId, rules });
  }
}

const noPasswordSent = ({ host }: Target, why: string): string =>
  `No password was sent to the smarthost ${host}, since the connection does not prove that it is this host: ${why}. Its certificate must be valid for the name in MAILSTEAD_SMARTHOST_URL, and the port must offer STARTTLS (or speak TLS at once: smtps).`;

const loginRefused = ({ host }: Target, why: string): string =>
  `The smarthost ${host} does not take the user and password of MAILSTEAD_SMARTHOST_URL: ${why}`;

/** Faults of the configuration that were told; they come back with every attempt. */
const told = new Set<string>();
const TOLD_MAX = 1_000;

function tellOnce(log: AttemptDependencies['log'], what: string): void {
  if (told.has(what)) return;
  if (told.size >= TOLD_MAX) told.clear();
  told.add(what);
  log.error(what);
}

const BEFORE_RCPT: ReadonlySet<string> = new Set(['greeting', 'ehlo', 'mail']);

const familyOf = (address: string): 4 | 6 => (isIPv6(address) ? 6 : 4);

/** It got as far as a greeting; TLS that fails says nothing of the mail, and of hosts with a policy all are to be tried. */
const hasAnswered = ({ stage, reply }: Failure): boolean =>
  stage !== 'connect' && stage !== 'tls' && (stage !== 'greeting' || reply !== null);

/** RFC 3463 §3.8: a refusal by policy. */
const isAboutOurAddress = ({ verdict, evidence: { enhanced } }: Decided): boolean =>
  verdict === 'bounced' && enhanced?.startsWith('5.7.') === true;
