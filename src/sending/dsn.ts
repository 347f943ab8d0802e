// Mail that has nobody as its sender (RFC 5321 §4.5.5): reports of ours about forwards that failed, and what came back
// about a forward and is sent on to its author. From a message that is complete to the rows of its email; the caller
// stores them together with what they follow from.
import type { Mailbox } from '../mail/address.ts';
import type { NewEmail } from '../queue/enqueue.ts';
import { INLINE_MAX_BYTES } from '../store/blob.ts';
import { newId } from '../store/id.ts';
import { describeEmail, type NewEmailDependencies } from './new-email.ts';

export interface NullSenderMessage {
  readonly tenantId: string;
  readonly id: string;
  readonly createdAt: Date;
  /** `dsn`: we wrote it; `returned`: it came back by mail. */
  readonly via: 'dsn' | 'returned';
  /** The author, as its header has it. */
  readonly from: Mailbox;
  /** The one recipient. */
  readonly to: Mailbox;
  readonly subject: string;
  readonly text: string | null;
  readonly headers: Readonly<Record<string, string>> | null;
  /** With angle brackets. */
  readonly messageId: string;
  /** RFC 5322, CRLF. */
  readonly raw: Buffer;
  readonly needsSmtpUtf8: boolean;
  /** Whose keys sign, where they can; null: nobody's. */
  readonly signingDomainId: string | null;
  /** The email that it is about; null: not known. */
  readonly about: string | null;
  /** What findSuppressed says of `to`; asked before, so that no transaction waits for a second connection. */
  readonly suppressed: ReadonlySet<string>;
}

/** The rows; a large message lies in the blob store when this resolves, and is the caller's to remove. */
export async function describeNullSender(
  d: NewEmailDependencies,
  message: NullSenderMessage,
): Promise<NewEmail> {
  const { tenantId, id, to, raw, needsSmtpUtf8, signingDomainId, suppressed } = message;
  const blobKey = raw.length <= INLINE_MAX_BYTES ? null : newId();
  if (blobKey !== null) await d.blobs.put(blobKey, raw);
  const email = describeEmail(
    d,
    {
      // Nobody asked for it over HTTP: there is no key.
      caller: { tenantId, keyId: '', permission: 'full_access', domainId: null },
      origin: { via: message.via, requestId: newId(), userAgent: null, address: null },
      idempotencyKey: null,
      isOfBatch: true,
      suppressed,
    },
    {
      ...message,
      toGiven: [to.address],
      ccGiven: [],
      bccGiven: [],
      replyToGiven: [],
      html: null,
      tags: null,
      scheduledAt: null,
      topicId: null,
      templateId: null,
      recipients: [to],
      author: { signingTenantId: tenantId, signingDomainId: signingDomainId ?? id, warning: null },
      forwarding: {
        envelopeFrom: '',
        about: message.about === null ? {} : { about_email_id: message.about },
      },
      stored: {
        raw: blobKey === null ? raw : null,
        blobKey,
        rawSizeBytes: raw.length,
        needsSmtpUtf8,
        attachments: [],
      },
    },
  );
  return signingDomainId === null
    ? { ...email, signingTenantId: null, signingDomainId: null }
    : email;
}
