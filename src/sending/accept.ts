// Accepting an email: read -> was it answered before? -> check -> complete -> compose -> store and enqueue in one
// transaction. After it returned, the email is durable and will be delivered or its fate explained. Both
// doors, HTTP and SMTP submission, come through here.
import type { Caller } from '../access/keys.ts';
import type { PreferenceLinks } from '../audience/preference-links.ts';
import { normalizedAddress, parseMailbox, type Mailbox } from '../mail/address.ts';
import type { NewAttachment } from '../queue/enqueue.ts';
import { INLINE_MAX_BYTES, type BlobStore } from '../store/blob.ts';
import { newId } from '../store/id.ts';
import type { Spooled } from './attachments.ts';
import { completeEmail, findAuthorDomain, type CompletionDependencies } from './complete.ts';
import type { FilledBudget } from './filled-budget.ts';
import { findAnswer, hashRequest, type IdempotentRequest } from './idempotency.ts';
import {
  describeEmail,
  findSuppressed,
  makeEmail,
  type NewEmailDependencies,
  type Origin,
} from './new-email.ts';
import type { HtmlTracker } from '../tracking/tracker.ts';
import { findOptOuts, offerOptOut, optOutLink } from './opt-out.ts';
import { distinct, meaningOf, planRequest, readRequest, type SendEmailRequest } from './request.ts';
import {
  keepBlobsUnlessRefused,
  removeBlobs,
  storeEmails,
  type Accepted,
  type StoringDependencies,
} from './store-emails.ts';

export type { Origin } from './new-email.ts';
export type { Accepted } from './store-emails.ts';

export type AcceptDependencies = CompletionDependencies &
  NewEmailDependencies &
  StoringDependencies & {
    readonly filled: FilledBudget;
    readonly preferenceLinks: PreferenceLinks;
    readonly tracker: HtmlTracker;
  };

/** What comes with every request beside its body. */
export interface Sending {
  readonly idempotencyKey: string | null;
  readonly origin: Origin;
}

const SCOPE = '/emails';

/**
 * Accepts one email. The answer is `{object, id}`; with an idempotency key that was used for the same
 * request before, it is the first answer again. Throws a Refusal that says what to fix.
 */
export async function acceptEmail(
  d: AcceptDependencies,
  caller: Caller,
  send: Sending & { readonly request: SendEmailRequest; readonly spooled: Spooled },
): Promise<Accepted> {
  const read = readRequest(send.request, send.spooled);
  const key =
    read.email === null ? null : keyOf(caller, send.idempotencyKey, meaningOf(read.email));
  const replay = await replayOf(d, key);
  if (replay !== null) return replay;

  return d.filled.share(async (hold) => {
    const planned = planRequest(read, d.now());
    const [optOut] = await findOptOuts(d.store, caller.tenantId, [planned]);
    const { unwanted, contactId } = optOut!;
    const about = { tenantId: caller.tenantId, id: newId(), contactId };
    const link = optOutLink(d.preferenceLinks, planned, about);
    const email = await completeEmail(d, caller, planned, link);
    hold(email);
    const suppressed = await findSuppressed(d.store, caller.tenantId, [email]);
    const made = await makeEmail(d, offerOptOut(email, link), {
      ...send,
      id: about.id,
      caller,
      suppressed,
      unwanted,
    });
    return storeEmails(d, [made], { key, answer: answerOf(made.id) });
  });
}

const answerOf = (id: string): { status: number; body: unknown } => ({
  status: 200,
  body: { object: 'email', id },
});

const keyOf = (caller: Caller, key: string | null, meaning: unknown): IdempotentRequest | null =>
  key === null
    ? null
    : { tenantId: caller.tenantId, scope: SCOPE, key, hash: hashRequest(meaning) };

/** The answer again, if there was one. Throws when the key belongs to another request. */
export async function replayOf(
  { store }: Pick<AcceptDependencies, 'store'>,
  key: IdempotentRequest | null,
): Promise<Accepted | null> {
  const answer = key === null ? null : await findAnswer(store.pool, key);
  return answer === null ? null : { ...answer, replayed: true };
}

// ---- a message that is complete already ----------------------------------------------------------

/** A message that was complete when it came, and its envelope. */
export interface SubmittedMessage {
  /** The author, whose domain must be a sending domain. */
  readonly from: Mailbox;
  /** The addresses of its header, each as written there; for showing, not for sending. */
  readonly to: readonly string[];
  readonly cc: readonly string[];
  readonly replyTo: readonly string[];
  /** The envelope: who gets it. At least one; repeats are dropped. */
  readonly recipients: readonly Mailbox[];
  readonly subject: string;
  readonly html: string | null;
  readonly text: string | null;
  /**
   * RFC 5322, CRLF, with Message-ID and Date, without Bcc. A blob is the email's from now on: it is removed
   * unless a row may name it.
   */
  readonly raw: Buffer | { readonly blobKey: string; readonly sizeBytes: number };
  /** With angle brackets, as in `raw`. */
  readonly messageId: string;
  readonly headers: Readonly<Record<string, string>> | null;
  readonly attachments: readonly NewAttachment[];
  /**
   * What makes two submissions the same, whatever a client writes anew each time (Date, Message-ID, boundaries); the
   * envelope is added here. Looked at with an idempotency key only.
   */
  readonly fingerprint: string;
  /** It goes out whatever MTA-STS and DANE say; for our TLS reports only. */
  readonly ignoresTlsPolicy?: boolean;
}

/**
 * Accepts a message as it is: the same questions about domain, suppressions and idempotency as for a request.
 * Throws a Refusal.
 */
export async function acceptMessage(
  d: Omit<AcceptDependencies, 'templates' | 'filled' | 'preferenceLinks' | 'tracker'>,
  caller: Caller,
  send: Sending & { readonly message: SubmittedMessage },
): Promise<Accepted> {
  const { message } = send;
  const blobKey = Buffer.isBuffer(message.raw) ? null : message.raw.blobKey;
  const given = { blobKey, attachments: message.attachments };
  const ready = await keepBlobsUnlessRefused(d, [given], async () => {
    const envelope = distinct(message.recipients).map(({ address }) => normalizedAddress(address));
    const meaning = { message: message.fingerprint, recipients: envelope };
    const key = keyOf(caller, send.idempotencyKey, meaning);
    const replay = await replayOf(d, key);
    if (replay !== null) return { replay };
    const author = await findAuthorDomain(d, caller, message.from.domain);
    const suppressed = await findSuppressed(d.store, caller.tenantId, [message]);
    return { replay, key, author, suppressed };
  });
  if (ready.replay !== null) {
    await removeBlobs(d.blobs, [given]);
    return ready.replay;
  }
  const { key, author, suppressed } = ready;
  const recipients = distinct(message.recipients);
  const email = describeEmail(
    d,
    { ...send, caller, suppressed },
    {
      id: newId(),
      createdAt: d.now(),
      messageId: message.messageId,
      from: message.from,
      toGiven: message.to,
      ccGiven: message.cc,
      bccGiven: hiddenRecipients(message, recipients),
      replyToGiven: message.replyTo,
      subject: message.subject,
      html: message.html,
      text: message.text,
      headers: message.headers,
      tags: null,
      scheduledAt: null,
      topicId: null,
      templateId: null,
      recipients,
      author,
      ignoresTlsPolicy: message.ignoresTlsPolicy === true,
      stored: await placeMessage(d.blobs, message),
    },
  );
  return storeEmails(d, [email], { key, answer: answerOf(email.id) });
}

/** Who gets it without being named in it. */
function hiddenRecipients(
  { to, cc }: SubmittedMessage,
  recipients: readonly Mailbox[],
): readonly string[] {
  const shown = new Set([...to, ...cc].map(addressIn));
  return recipients
    .map(({ address }) => address)
    .filter((address) => !shown.has(normalizedAddress(address)));
}

const addressIn = (text: string): string => {
  const parsed = parseMailbox(text);
  return normalizedAddress(parsed.ok ? parsed.mailbox.address : text);
};

async function placeMessage(
  blobs: BlobStore,
  { from, to, cc, replyTo, raw, attachments }: SubmittedMessage,
): Promise<Parameters<typeof describeEmail>[2]['stored']> {
  const isUtf8 = [...to, ...cc, ...replyTo].some((text) => {
    const parsed = parseMailbox(text);
    return parsed.ok && parsed.mailbox.needsSmtpUtf8;
  });
  const needsSmtpUtf8 = from.needsSmtpUtf8 || isUtf8;
  if (!Buffer.isBuffer(raw)) {
    const { blobKey, sizeBytes } = raw;
    return { raw: null, blobKey, rawSizeBytes: sizeBytes, needsSmtpUtf8, attachments };
  }
  const rest = { rawSizeBytes: raw.length, needsSmtpUtf8, attachments };
  if (raw.length <= INLINE_MAX_BYTES) return { raw, blobKey: null, ...rest };
  const blobKey = newId();
  await blobs.put(blobKey, raw);
  return { raw: null, blobKey, ...rest };
}
