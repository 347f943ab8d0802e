// One attempt at one delivery: load the bytes, sign them, find the next hop, converse, and say what
// came of it. The claim has already stored the attempt, so a crash anywhere here costs one retry.
//
// A reply is a value. An unknown failure defers. Only a 5yz about this sender, recipient or message
// bounces; trouble with the host itself (connect, greeting, EHLO, TLS, AUTH) tries the next host and
// then defers. Lost after the final dot is `unknown`. A fault of our own that no retry can mend is
// `failed`, the dead letter.
import type { MessagePieces } from '../mail/dkim.ts';
import { findBounceRule, type BounceRule } from '../mail/bounce-rules.ts';
import { outcomeOfReply, type Cause } from '../mail/outcome.ts';
import { parseReply } from '../mail/reply.ts';
import { mintReturnPathLocal } from '../mail/return-path.ts';
import type { Signer } from '../domains/lookup.ts';
import type { ClaimedDelivery } from '../queue/claim.ts';
import { NO_EVIDENCE, type Evidence, type Verdict } from '../queue/settle.ts';
import type { BlobStore } from '../store/blob.ts';
import { SANDBOX_LANE, SINK_LANE } from '../store/delivery.ts';
import { findNextHops, type NextHopDependencies } from './next-hop.ts';
import { answerInSandbox } from './sandbox.ts';
import {
  openSession,
  type Failure,
  type MessageBody,
  type Session,
  type Target,
} from './session.ts';
import { openMessage, type StoredBytes } from './stored-bytes.ts';

export interface AttemptDependencies {
  readonly nextHops: NextHopDependencies;
  readonly blobs: BlobStore;
  readonly signerOf: (tenantId: string, domainId: string) => Promise<Signer | null>;
  readonly signerByName: (tenantId: string, name: string) => Promise<Signer | null>;
  readonly sign: (
    message: Buffer | MessagePieces,
    signer: Signer,
    signedAt: Date,
  ) => Promise<Buffer>;
  readonly checkPeer: (
    address: string,
  ) => { readonly ok: true } | { readonly ok: false; readonly reason: string };
  readonly returnPath: { readonly key: Buffer; readonly keyId: string; readonly hostname: string };
  /** What is known of replies beyond their codes. */
  readonly bounceRules: readonly BounceRule[];
  /** Called before the final dot of this delivery leaves. */
  readonly onDot: (delivery: ClaimedDelivery) => void;
}

/** What an attempt came to; the delay of a retry is the queue's business. */
export interface Decided {
  readonly verdict: Verdict;
  readonly evidence: Evidence;
}

/** A connection that a track keeps between attempts. */
export interface Line {
  session: Session | null;
}

/** RFC 5321 does not say; Postfix and the large providers' own limits are near this. */
const MESSAGES_PER_SESSION_MAX = 100;
const REPLY_CHARS_MAX = 4_096;
/** No further host is tried after this: one delivery must not hold a connection's place for long. */
const HOSTS_MAX_MS = 120_000;
/** Peers whose STARTTLS is broken, and until when plaintext is used without asking again. */
const brokenTls = new Map<string, number>();
const BROKEN_TLS_MAX = 1_000;
const BROKEN_TLS_MS = 3_600_000;
// oxlint-disable-next-line no-control-regex
const NON_ASCII = /[^\u0000-\u007f]/;

const decided = (
  verdict: Verdict,
  evidence: Partial<Omit<Evidence, 'cause'>> & { readonly cause?: Cause | null },
): Decided => ({
  verdict,
  evidence: { ...NO_EVIDENCE, ...evidence, reply: legible(evidence.reply ?? null) },
});

/** What a peer said, as text that can be stored and shown: no control characters, of bounded length. */
function legible(reply: string | null): string | null {
  if (reply === null) return null;
  const printable = reply
    .replace(/\r\n?/g, '\n')
    // oxlint-disable-next-line no-control-regex
    .replace(/[\u0000-\u0009\u000b-\u001f\u007f]/g, ' ');
  return printable.slice(0, REPLY_CHARS_MAX).toWellFormed().trim();
}

/** Attempts the delivery over the line's session or a new one. Throws only for faults of our own. */
export async function attempt(
  d: AttemptDependencies,
  line: Line,
  delivery: ClaimedDelivery,
): Promise<Decided> {
  const prepared = await prepare(d, delivery);
  if ('verdict' in prepared) return prepared;
  if (delivery.lane === SANDBOX_LANE) return answerInSandbox(delivery.recipient);
  if (line.session !== null && !isReusable(line.session, prepared)) drop(line);
  if (line.session !== null) {
    const over = await sendOver(d, { session: line.session, delivery, prepared });
    // A kept connection may have been closed while idle: that says nothing about the peer.
    if (over !== 'stale') return over;
    drop(line);
  }
  const hops = await findNextHops(d.nextHops, delivery.lane);
  if (hops.kind === 'none') {
    return decided(hops.permanent ? 'bounced' : 'deferred', {
      cause: hops.cause,
      stage: 'dns',
      enhanced: hops.enhanced,
      reply: hops.message,
    });
  }
  const targets = prepared.needsTls ? hops.targets.map(withTls) : hops.targets;
  return converse(d, line, { targets, delivery, prepared });
}

interface Prepared {
  /** Signatures and message; afresh for every connection that is tried. */
  readonly body: () => MessageBody;
  readonly bytes: StoredBytes;
  readonly sizeBytes: number;
  readonly mailFrom: string;
  /** The sending domain says `tls: enforced`: no byte of the message leaves in plaintext. */
  readonly needsTls: boolean;
}

/** The bytes as they will be sent: equal on every attempt, since every part of them is. */
async function prepare(
  d: AttemptDependencies,
  delivery: ClaimedDelivery,
): Promise<Prepared | Decided> {
  const bytes = await openMessage(d.blobs, delivery);
  if (bytes === null) {
    return decided('failed', {
      cause: 'message_missing',
      reply: 'The message bytes are missing from the blob store.',
    });
  }
  const signer = await findSigner(d, delivery);
  if (signer === null || signer.keys.length === 0) {
    return unverified(
      `The domain of \`from\`, ${delivery.fromDomain}, no longer exists, so the message cannot be signed. Add and verify the domain, then send again.`,
    );
  }
  if (!signer.canSend) {
    return unverified(
      `The domain ${signer.domain} may not send any more: its DNS records are not verified, or sending was switched off. Verify the domain, then send again.`,
    );
  }
  const signatures = await d.sign(bytes.whole ?? bytes.pieces(), signer, delivery.createdAt);
  const local = mintReturnPathLocal({
    emailId: delivery.emailId,
    position: delivery.position,
    key: d.returnPath.key,
    keyId: d.returnPath.keyId,
  });
  const host =
    signer.domain === delivery.fromDomain
      ? `${signer.returnPathLabel}.${signer.domain}`
      : d.returnPath.hostname;
  const { whole } = bytes;
  return {
    body: () => (whole === null ? joined(signatures, bytes.pieces()) : [signatures, whole]),
    bytes,
    sizeBytes: signatures.length + bytes.sizeBytes,
    mailFrom: `${local}@${host}`,
    // The sink is this machine, and has no certificate.
    needsTls: signer.tls === 'enforced' && delivery.lane !== SINK_LANE,
  };
}

/** Who was to sign when the email was accepted; where that domain was removed, the one that has its name now. */
async function findSigner(
  d: AttemptDependencies,
  delivery: ClaimedDelivery,
): Promise<Signer | null> {
  const { signingTenantId, signingDomainId, tenantId, fromDomain } = delivery;
  const bound =
    signingTenantId === null || signingDomainId === null
      ? null
      : await d.signerOf(signingTenantId, signingDomainId);
  return bound ?? d.signerByName(tenantId, fromDomain);
}

const unverified = (reply: string): Decided =>
  decided('failed', { cause: 'domain_not_verified', enhanced: '5.7.1', reply });

async function* joined(signatures: Buffer, pieces: AsyncIterable<Buffer>): AsyncGenerator<Buffer> {
  yield signatures;
  yield* pieces;
}

const withTls = (target: Target): Target =>
  target.tls === 'opportunistic' ? { ...target, tls: 'required' } : target;

const isReusable = (session: Session, { needsTls }: Prepared): boolean =>
  session.isOpen() &&
  session.sent < MESSAGES_PER_SESSION_MAX &&
  (!needsTls || session.tls !== null);

function drop(line: Line): void {
  line.session?.close();
  line.session = null;
}

async function converse(
  d: AttemptDependencies,
  line: Line,
  about: {
    readonly targets: readonly Target[];
    readonly delivery: ClaimedDelivery;
    readonly prepared: Prepared;
  },
): Promise<Decided> {
  let last: { target: Target; failure: Failure } | null = null;
  const until = Date.now() + HOSTS_MAX_MS;
  for (const target of about.targets) {
    if (last !== null && Date.now() > until) break;
    const opened = await open(d, target);
    if ('cause' in opened) {
      last = { target, failure: opened };
      continue;
    }
    if (about.prepared.needsTls && opened.tls === null) {
      throw new Error('a session without encryption, where it is required');
    }
    line.session = opened;
    const result = await sendOver(d, { session: opened, ...about });
    if (result !== 'stale') return result;
    drop(line);
    last = {
      target,
      failure: {
        stage: 'mail',
        cause: 'connection_lost',
        reply: null,
        message: 'the peer closed the connection',
      },
    };
  }
  if (last === null) return decided('deferred', { cause: 'no_usable_host', stage: 'dns' });
  if (about.prepared.needsTls && last.failure.stage === 'tls') {
    return fromPlainHost(last.target, last.failure, about.delivery);
  }
  return fromFailure({ d, delivery: about.delivery, target: last.target }, last.failure);
}

/** A host that cannot be reached as the sender asks for: it may learn TLS, and the sender may change the setting. */
function fromPlainHost(target: Target, failure: Failure, delivery: ClaimedDelivery): Decided {
  return decided('deferred', {
    host: target.host,
    address: target.address,
    port: target.port,
    stage: 'tls',
    cause: 'tls_required',
    reply: `The domain ${delivery.fromDomain} is set to \`tls: enforced\`, and no encrypted connection to ${target.host} could be made: ${failure.reply ?? failure.message}`,
  });
}

/** Opens a session; where TLS is a wish and fails, the same host is asked again without it. */
async function open(d: AttemptDependencies, wanted: Target): Promise<Session | Failure> {
  const mayBePlain = wanted.tls === 'opportunistic';
  const target =
    mayBePlain && (brokenTls.get(wanted.address) ?? 0) > Date.now()
      ? { ...wanted, tls: 'never' as const }
      : wanted;
  const checkPeer = target.trusted ? () => ({ ok: true }) as const : d.checkPeer;
  const opened = await openSession(target, checkPeer);
  if (!('cause' in opened) || opened.stage !== 'tls' || !mayBePlain || target.tls === 'never') {
    return opened;
  }
  const plain = await openSession({ ...target, tls: 'never' }, checkPeer);
  if (!('cause' in plain)) {
    if (brokenTls.size >= BROKEN_TLS_MAX) brokenTls.clear();
    brokenTls.set(target.address, Date.now() + BROKEN_TLS_MS);
  }
  return plain;
}

async function sendOver(
  d: AttemptDependencies,
  about: {
    readonly session: Session;
    readonly delivery: ClaimedDelivery;
    readonly prepared: Prepared;
  },
): Promise<Decided | 'stale'> {
  const { session, delivery, prepared } = about;
  const { target } = session;
  const via = {
    host: target.host,
    address: target.address,
    port: target.port,
    tls: session.tls,
  };
  const needsSmtpUtf8 = delivery.needsSmtpUtf8 || NON_ASCII.test(delivery.recipient);
  if (needsSmtpUtf8 && !session.supportsSmtpUtf8) {
    return decided('bounced', {
      ...via,
      cause: 'smtputf8_unsupported',
      stage: 'mail',
      enhanced: '5.6.7',
      reply: 'The host does not take internationalized addresses (SMTPUTF8).',
    });
  }
  const isFirst = session.sent === 0;
  const result = await session.send({
    mailFrom: prepared.mailFrom,
    rcptTo: delivery.recipient,
    body: prepared.body(),
    sizeBytes: prepared.sizeBytes,
    onDot: () => d.onDot(delivery),
  });
  // The connection was given up over our own disk: the peer is not to blame.
  if (prepared.bytes.fault !== null) throw prepared.bytes.fault;
  if (result.kind === 'accepted') {
    const reply = parseReply(result.reply);
    return decided('delivered', {
      ...via,
      stage: 'dot',
      code: reply?.code ?? null,
      enhanced: reply?.enhanced ?? null,
      reply: result.reply,
    });
  }
  if (result.kind === 'lost') {
    if (result.dotSent) {
      return decided('unknown', {
        ...via,
        cause: 'unknown_after_dot',
        stage: 'dot',
        reply: `The connection broke after the final dot: ${result.message}`,
      });
    }
    if (!isFirst) return 'stale';
    return fromFailure({ d, delivery, target }, result, session.tls);
  }
  // RFC 5321 §3.8: 421 at MAIL says that this connection has carried enough, not that the mail is unwelcome.
  if (!isFirst && result.stage === 'mail' && result.reply?.startsWith('421')) return 'stale';
  return fromFailure({ d, delivery, target }, result, session.tls);
}

/** A reply decides by its stage and code; where none came, only what cannot be sent at all bounces. */
function fromFailure(
  about: {
    readonly d: Pick<AttemptDependencies, 'bounceRules'>;
    readonly delivery: ClaimedDelivery;
    readonly target: Target;
  },
  failure: Failure,
  tls: string | null = null,
): Decided {
  const { target } = about;
  const via = { host: target.host, address: target.address, port: target.port, tls };
  const reply = failure.reply === null ? null : parseReply(failure.reply);
  const said = { ...via, stage: failure.stage, reply: failure.reply ?? failure.message };
  if (reply === null) {
    const verdict = failure.cause === 'message_refused' ? 'bounced' : 'deferred';
    return decided(verdict, { ...said, cause: failure.cause });
  }
  const { stage } = failure;
  const { tenantId } = about.delivery;
  const rule = findBounceRule(about.d.bounceRules, { reply, stage, host: target.host, tenantId });
  const outcome = outcomeOfReply({ reply, stage, via, rule });
  const evidence = { ...said, code: reply.code, enhanced: reply.enhanced };
  return outcome.kind === 'delivered'
    ? decided('delivered', evidence)
    : decided(outcome.kind, { ...evidence, cause: outcome.cause });
}
