/**
 * What a reply means for one recipient: delivered, deferred or bounced. Replies are judged here and nowhere else; what
 * silence means, delivery/transaction.ts says.
 *
 * In: a Reply with the stage it came at. Out: an Outcome, a value that is never thrown. The rule behind the rules: a
 * permanent verdict needs a peer that clearly speaks about this recipient or this message; everything else is deferred.
 */
import type { BounceRule } from './bounce-rules.ts';
import {
  isAboutFullMailbox,
  isAboutRate,
  isAboutRecipient,
  isAboutUs,
  topicOfRefusal,
  type RefusalTopic,
} from './refusal-words.ts';
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
  tls_policy_failed:
    'No mail host of the recipient domain has the verified encryption that the domain asks for (MTA-STS, DANE).',
  tls_policy_unknown:
    'Whether the recipient domain asks for verified encryption could not be found out safely.',
  auth_failed: 'The mail host did not accept our credentials.',
  timeout: 'The mail host took too long to answer a command.',
  protocol_error: 'The mail host gave an answer that SMTP does not allow here.',
  smtputf8_unsupported: 'The address needs SMTPUTF8, which the mail host does not offer.',
  eight_bit_unsupported:
    'The message has 8-bit text, which the mail host does not take (8BITMIME).',
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
  home_closed:
    'This server takes the mail of the recipient domain itself, and its inbound listener is off.',
  egress_unusable:
    'The address that mail is to leave from is none of this machine; the operator has been told.',
  store_unavailable: 'The store of large messages did not answer; nothing was sent.',
  internal: 'A fault of this server; the operator has been told.',
} as const;
export type Cause = keyof typeof causeTexts;
export const causes = Object.keys(causeTexts) as readonly Cause[];

/**
 * Whom a delivery that did not succeed speaks about: `permanent`, this recipient or this message, wherever it is sent
 * from; `block`, us, by address, domain, authentication or content, so that another sender might succeed; `transient`,
 * the moment.
 */
export type CauseClass = 'permanent' | 'transient' | 'block';

const BLOCKS: ReadonlySet<Cause> = new Set(['policy_refused', 'content_refused']);
const PERMANENT: ReadonlySet<Cause> = new Set([
  'no_domain',
  'null_mx',
  'domain_literal',
  'mail_loop',
  'smtputf8_unsupported',
  'eight_bit_unsupported',
  'message_refused',
  'peer_permanent',
  'no_mailbox',
  'domain_not_verified',
  'message_missing',
  'attachment_unavailable',
  'attachment_refused',
]);

export function classOf(cause: Cause): CauseClass {
  return BLOCKS.has(cause) ? 'block' : PERMANENT.has(cause) ? 'permanent' : 'transient';
}

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
      readonly reply: Reply;
      readonly via: Hop;
      readonly cause: Cause;
    }
  | {
      readonly kind: 'bounced';
      readonly reply: Reply;
      readonly via: Hop;
      readonly cause: Cause;
    };

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
  return asksToRetry.test(reply.text) || isAboutRate(reply.text) ? 'transient' : 'permanent';
}

/**
 * What a refusal at MAIL or later is about, final or not: first by the enhanced status code, then by the words, then by
 * the stage. Vague codes (`5.0.0`, `5.2.0`, …) and those of other subjects leave it to the words.
 */
export function causeOfRefusal(reply: Reply, stage: Stage): Cause {
  if (isDeadRecipient(reply, stage)) return 'no_mailbox';
  if (isMailboxFull(reply, stage)) return 'mailbox_full';
  if (greylistText.test(reply.text)) return 'greylisted';
  const isFinal = classifyReply(reply, stage) === 'permanent';
  const otherwise: Cause = isFinal ? 'peer_permanent' : 'peer_transient';
  const topic = topicOfRefusal(reply.text);
  // A host that turns away for now names itself, its rates or us; what else it says has no weight yet.
  if (!isFinal && isSilentGreylisting(reply, topic)) return 'greylisted';
  if (!isFinal) return topic === 'rate' ? 'rate_limited' : otherwise;
  const [, subject = '', detail = ''] = reply.enhanced?.split('.') ?? [];
  const spoken = topic === null ? null : topicCauses[topic];
  if (subject === '7') {
    // RFC 3463 §3.8, and what the registry adds: security and policy. 17 and 18: the owner has changed.
    if (detail === '17' || detail === '18') return 'peer_permanent';
    const isOther = topic === 'content' || topic === 'recipient' || topic === 'full';
    return spoken !== null && isOther ? spoken : 'policy_refused';
  }
  if (subject === '6') return spoken === 'content_refused' ? spoken : 'message_refused';
  const status = `${subject}.${detail}`;
  if (status === '2.3' || status === '3.4') return 'message_refused';
  // The address that is wrong is the sender's.
  if (status === '1.7' || status === '1.8') return 'policy_refused';
  if (spoken !== null) return spoken;
  // RFC 5321 §3.3: nobody has been named but the sender; what is wrong with a command is another matter.
  return stage === 'mail' && reply.code >= 550 && reply.code !== 555 ? 'policy_refused' : otherwise;
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
    const cause = ruled?.cause ?? causeOfRefusal(reply, stage);
    return { kind: 'bounced', reply, via, cause };
  }
  if (ruled !== null) return { kind: 'deferred', reply, via, cause: ruled.cause };
  const cause =
    reply.code < 400 ? 'protocol_error' : (laneCauses[stage] ?? causeOfRefusal(reply, stage));
  return { kind: 'deferred', reply, via, cause };
}

/**
 * True when a final refusal says that the mailbox does not exist or is closed, so that sending there again would be
 * wrong: the ground for a suppression. Never for refusals of content, reputation or policy.
 */
export function isDeadRecipient(reply: Reply, stage: Stage): boolean {
  // After the dot one reply speaks for all recipients of the transaction, so it proves nothing about one of them.
  if (stage !== 'rcpt') return false;
  if (classifyReply(reply, stage) !== 'permanent') return false;
  if (isAboutUs(reply.text)) return false;
  if (reply.enhanced !== null && deadStatus.has(reply.enhanced)) return true;
  const isVague = reply.enhanced === null || /^5\.[01235]\.0$/.test(reply.enhanced);
  return isVague && isAboutRecipient(reply.text);
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

/** Peers that say "later" with a 5yz: greylisting with the wrong code, locked and overloaded mailboxes. */
const asksToRetry =
  /\bgr[ea]y-?\s?list|\b(?:try|retry)(?: \w+)?(?: again)? (?:\w+ )?later\b|\btry again in \d|\btemporar(?:y|ily) (?:deferred|unavailable|locked|suspended|rejected|failure|error)|\bmail system (?:is )?full\b/i;

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
  if (isAboutFullMailbox(reply.text)) return true;
  return (
    reply.code === 552 &&
    stage === 'rcpt' &&
    reply.enhanced === null &&
    !tooBigText.test(reply.text) &&
    topicOfRefusal(reply.text) !== 'sender'
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

/** Most greylisting hosts that do not call it so say 450 or 451 4.7.1 and to come back, and nothing about us. */
function isSilentGreylisting({ code, enhanced }: Reply, topic: RefusalTopic | null): boolean {
  if (topic !== null && topic !== 'late') return false;
  return (code === 450 || code === 451) && (enhanced === '4.7.0' || enhanced === '4.7.1');
}

const greylistText = /\bgr[ea]y-?\s?list/i;

/** What words make of a final refusal. */
const topicCauses: Readonly<Record<RefusalTopic, Cause>> = {
  rate: 'rate_limited',
  full: 'mailbox_full',
  message: 'message_refused',
  sender: 'policy_refused',
  content: 'content_refused',
  domain: 'no_domain',
  recipient: 'peer_permanent',
  late: 'peer_permanent',
};
