/**
 * What one attempt came to for one recipient: delivered, deferred, bounced or unknown. Replies are judged here and
 * nowhere else.
 *
 * In: a Reply with the stage it came at, or a failure without a reply. Out: an Outcome, a value that is never
 * thrown. The rule behind the rules: a permanent verdict needs a peer that clearly speaks about this recipient or
 * this message; everything else is deferred, and silence after the final dot is unknown, never a silent re-send.
 */
import type { BounceRule } from './bounce-rules.ts';
import type { Reply, Stage } from './reply.ts';

/** Why a delivery is where it is: short codes for rows, webhooks and the API, with the sentence that explains each. */
export const causeTexts = {
  dns_failed: 'The DNS servers of the recipient domain gave no answer.',
  no_domain: 'The recipient domain does not exist.',
  null_mx: 'The recipient domain declares that it accepts no mail (RFC 7505).',
  domain_literal: 'The recipient domain is an address or not a domain name.',
  no_usable_host: 'The recipient domain has no usable mail host.',
  mail_loop: 'The best mail host of the recipient domain is this machine.',
  address_refused: 'The mail host has no address that may be dialled (private or reserved).',
  connect_refused: 'The mail host refused the connection.',
  connect_failed: 'No connection to the mail host could be made.',
  connect_timeout: 'The mail host did not answer the connection attempt in time.',
  connection_lost: 'The connection broke before the message was handed over.',
  greeting_refused: 'The mail host turned this machine away before the conversation.',
  tls_failed: 'An acceptable encrypted connection could not be made.',
  tls_required:
    'The sender allows encrypted connections only, and none could be made to the mail host.',
  auth_failed: 'The mail host did not accept our credentials.',
  timeout: 'The mail host took too long to answer a command.',
  protocol_error: 'The mail host gave an answer that SMTP does not allow here.',
  smtputf8_unsupported: 'The address needs SMTPUTF8, which the mail host does not offer.',
  message_refused:
    'The message is larger than the mail host takes, or cannot be sent to it as it is.',
  peer_transient: 'The mail host refused for now.',
  peer_permanent: 'The mail host refused for good.',
  no_mailbox: 'The mailbox does not exist, or is closed.',
  mailbox_full: 'The mailbox of the recipient is full.',
  greylisted: 'The mail host puts off senders that it does not know yet (greylisting).',
  rate_limited: 'The mail host takes no more from this machine for now.',
  policy_refused: 'The mail host refuses mail from this machine or this domain by policy.',
  content_refused: 'The mail host takes the message for spam or refuses what it holds.',
  expired: 'The message could not be delivered within its lifetime.',
  unknown_after_dot:
    'The connection broke after the message was sent and before the mail host answered.',
  domain_not_verified: 'The domain of the sender is gone, or may not send any more.',
  message_missing: 'The bytes of the message are missing from the store.',
  attachment_unavailable: 'An attachment could not be fetched from its URL.',
  attachment_refused: 'An attachment has a URL that may not be fetched.',
  worker_lost: 'The delivery worker stopped again and again while it worked on this message.',
  no_smarthost: 'Delivery goes through a smarthost, but none is set.',
  no_sink: 'Delivery goes to the sink, but no sink is running.',
  internal: 'A fault of this server; the operator has been told.',
} as const;
export type Cause = keyof typeof causeTexts;
export const causes = Object.keys(causeTexts) as readonly Cause[];

/** The host that an attempt spoke with. */
export interface Hop {
  readonly host: string;
  /** IP address; null when none was chosen. */
  readonly address: string | null;
  readonly port: number;
  /** Protocol and cipher, such as `TLSv1.3 TLS_AES_256_GCM_SHA384`; null when the connection was not encrypted. */
  readonly tls: string | null;
}

export type Outcome =
  | { readonly kind: 'delivered'; readonly reply: Reply; readonly via: Hop }
  | {
      readonly kind: 'deferred';
      readonly reply: Reply | null;
      readonly via: Hop | null;
      readonly cause: Cause;
    }
  | {
      readonly kind: 'bounced';
      readonly reply: Reply | null;
      readonly via: Hop | null;
      readonly cause: Cause;
    }
  | { readonly kind: 'unknown'; readonly via: Hop; readonly cause: Cause };

/**
 * Whether a reply that is not a success is final for this delivery.
 *
 * A refusal before MAIL is about the lane (our address, TLS, credentials), so it is transient and the delivery can
 * go elsewhere; so are 421 and every code that makes no sense at its stage.
 */
export function classifyReply(reply: Reply, stage: Stage): 'transient' | 'permanent' {
  if (reply.code < 500) return 'transient';
  if (!messageStages.has(stage)) return 'transient';
  if (isAboutEncryption(reply) || isMailboxFull(reply, stage)) return 'transient';
  // RFC 3463 §3.4: "mail system full" is about a disk, not about an address.
  if (reply.enhanced === '5.3.1') return 'transient';
  return asksToRetry.test(reply.text) ? 'transient' : 'permanent';
}

/**
 * The outcome for a recipient after the reply that decided it. A 2yz counts as delivered only after the final dot.
 * `rule`, where one speaks of this reply, decides before the codes; but no rule makes a refusal final that came
 * before MAIL. The cause `no_mailbox` is the ground for a suppression.
 */
export function outcomeOfReply({
  reply,
  stage,
  via,
  rule = null,
}: {
  reply: Reply;
  stage: Stage;
  via: Hop;
  rule?: BounceRule | null;
}): Outcome {
  if (reply.code >= 200 && reply.code <= 299 && stage === 'dot')
    return { kind: 'delivered', reply, via };
  const ruled = rule?.verdict === 'permanent' && !messageStages.has(stage) ? null : rule;
  const isFinal =
    ruled === null ? classifyReply(reply, stage) === 'permanent' : ruled.verdict === 'permanent';
  if (isFinal) {
    const known = isDeadRecipient(reply, stage) ? 'no_mailbox' : 'peer_permanent';
    return { kind: 'bounced', reply, via, cause: ruled?.cause ?? known };
  }
  if (ruled !== null) return { kind: 'deferred', reply, via, cause: ruled.cause };
  const cause = reply.code < 400 ? 'protocol_error' : (laneCauses[stage] ?? 'peer_transient');
  return { kind: 'deferred', reply, via, cause };
}

/**
 * The outcome when no reply came. `wasSent`: the final dot may have reached the peer, so that only it knows whether
 * it has the message (RFC 1047).
 */
export function outcomeOfFailure({
  cause,
  via,
  wasSent = false,
}: {
  cause: Cause;
  via: Hop | null;
  wasSent?: boolean;
}): Outcome {
  if (wasSent && via !== null) return { kind: 'unknown', via, cause: 'unknown_after_dot' };
  if (finalCauses.has(cause)) return { kind: 'bounced', reply: null, via, cause };
  return { kind: 'deferred', reply: null, via, cause };
}

/**
 * True when a final refusal says that the mailbox does not exist or is closed, so that sending there again would be
 * wrong: the ground for a suppression. Never for refusals of content, reputation or policy.
 */
export function isDeadRecipient(reply: Reply, stage: Stage): boolean {
  // After the dot one reply speaks for all recipients of the transaction, so it proves nothing about one of them.
  if (stage !== 'rcpt') return false;
  if (classifyReply(reply, stage) !== 'permanent') return false;
  if (aboutUs.test(reply.text)) return false;
  if (reply.enhanced !== null && deadStatus.has(reply.enhanced)) return true;
  const vague = reply.enhanced === null || /^5\.[01]\.0$/.test(reply.enhanced);
  return vague && deadText.test(reply.text);
}

const messageStages: ReadonlySet<Stage> = new Set(['mail', 'rcpt', 'data', 'dot']);

const laneCauses: Partial<Record<Stage, Cause>> = {
  dns: 'dns_failed',
  connect: 'connect_refused',
  greeting: 'greeting_refused',
  ehlo: 'greeting_refused',
  tls: 'tls_failed',
  auth: 'auth_failed',
};

/** Facts that no further attempt changes. */
const finalCauses: ReadonlySet<Cause> = new Set([
  'no_domain',
  'null_mx',
  'mail_loop',
  'smtputf8_unsupported',
  'message_refused',
  'expired',
]);

/** Peers that say "later" with a 5yz: greylisting with the wrong code, locked and overloaded mailboxes. */
const asksToRetry =
  /\bgr[ea]y-?\s?list|\b(?:try|retry)(?: \w+)?(?: again)? (?:\w+ )?later\b|\btry again in \d|\btemporar(?:y|ily) (?:deferred|unavailable|locked|suspended|rejected|failure|error)|\bmail system (?:is )?full\b/i;

const mailboxFullText =
  /\bmailbox(?: \S+)? (?:is )?(?:full|exceeded)|\b(?:mail|in)box (?:is )?(?:full|out of)|\bover ?-?quota\b|\bquota (?:has been |is )?exceeded|\bexceed(?:s|ed|ing)? (?:\w+ ){0,3}(?:quota|storage|mailbox|disk)|\bout of storage|\bquota violation|\bmailbox limit|\binsufficient (?:disk|system) storage/i;

/** Gmail's word for an account that has been full for so long that it counts as abandoned. */
const abandonedText = /OverQuotaPerm/;
const tooBigText =
  /\b(?:message|size|content)\b.*\b(?:too (?:big|large)|exceeds?|maximum|limit)\b/i;

/** RFC 5321 §4.5.3.1.10 and RFC 3463 §3.3: 552 is a full mailbox, too many recipients at RCPT, or too big a message. */
function isMailboxFull(reply: Reply, stage: Stage): boolean {
  if (abandonedText.test(reply.text)) return false;
  if (reply.enhanced === '5.2.2') return true;
  if (reply.code === 552 && reply.enhanced === '5.5.3') return true;
  if (reply.enhanced !== null && /^5\.(?:2\.3|3\.4|6\.|7\.)/.test(reply.enhanced)) return false;
  if (mailboxFullText.test(reply.text)) return true;
  return (
    reply.code === 552 &&
    stage === 'rcpt' &&
    reply.enhanced === null &&
    !tooBigText.test(reply.text)
  );
}

/** RFC 3207 §4, RFC 4954 §6: the peer wants TLS first. Another connection may have it. */
function isAboutEncryption(reply: Reply): boolean {
  if (reply.code === 523 || reply.code === 538) return true;
  if (reply.enhanced === '5.7.10' || reply.enhanced === '5.7.11') return true;
  return reply.code === 530 && /\b(?:starttls|tls|encrypt)/i.test(reply.text);
}

/** RFC 3463 §3.2 and 3.3: no such mailbox, no such domain, moved, disabled. */
const deadStatus: ReadonlySet<string> = new Set(['5.1.1', '5.1.2', '5.1.6', '5.1.10', '5.2.1']);

const deadText =
  /\b(?:user|recipient|mailbox|address|account)\b.*\b(?:unknown|not found|does(?:n't| not) exist|no longer|disabled|inactive|invalid)\b|\b(?:unknown|invalid|no such|no) (?:local )?(?:user|recipient|mailbox|address|account)\b|\bnot a valid (?:user|mailbox)\b|\bno mailbox here\b|\bunrouteable address\b/i;

/** Refusals that talk about the sender, a list or the content, whatever code they carry. */
const aboutUs =
  /\bspam|\bblock(?:ed|list)|\bblacklist|\blisted (?:at|by|in|on)\b|\breputation\b|\bpolicy\b|\brelay|\baccess denied\b|\bsender\b|\bspf\b|\bdkim\b|\bdmarc\b|\brejected due to\b|\bdnsbl\b|\brbl\b/i;
