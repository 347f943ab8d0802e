// A forwarded message as an email of the route's tenant: rows like those of any other, so it is delivered, retried, shown
// and suppressed as they are. It goes apart from the tenant's own mail: by the pool `forward`, and as bulk.
import { parseMailbox, type Mailbox } from '../mail/address.ts';
import type { NewEmail } from '../queue/enqueue.ts';
import type { Caller } from '../access/keys.ts';
import { MESSAGE_MAX_BYTES } from './message.ts';
import { describeEmail, findSuppressed, type NewEmailDependencies } from './new-email.ts';

export { MESSAGE_MAX_BYTES };

/** The pool that forwarded mail leaves through; the default one where the operator has none of that name. */
export const FORWARD_POOL = 'forward';

export interface Forward {
  readonly tenantId: string;
  /** The outbound email's. */
  readonly id: string;
  readonly createdAt: Date;
  /** Of the attempt. */
  readonly taskId: string;
  readonly receivedEmailId: string;
  readonly ruleId: string;
  readonly replayId: string | null;
  /** The route's. */
  readonly domain: { readonly id: string; readonly name: string };
  readonly method: 'relayed' | 'rebuilt';
  /** As people read it. */
  readonly author: string;
  readonly replyTo: string | null;
  readonly subject: string;
  /** With angle brackets; empty: the original has none. */
  readonly messageId: string;
  /** Of the rule, in A-labels. */
  readonly destinations: readonly string[];
  /** MAIL FROM; null: a return path of ours. */
  readonly envelopeFrom: string | null;
  readonly stored: Stored;
}

interface Stored {
  /** At most one of the two. */
  readonly raw: Buffer | null;
  readonly blobKey: string | null;
  readonly rawSizeBytes: number;
  readonly needsSmtpUtf8: boolean;
}

/** The destination cannot be sent to; the text says why. */
export class UnfitForward extends Error {
  override name = 'UnfitForward';
}

export type ForwardingDependencies = Pick<NewEmailDependencies, 'store' | 'laneOf' | 'lifetimeMs'>;

/** The rows of the email. Throws an UnfitForward when it cannot be sent. */
export async function describeForward(
  d: ForwardingDependencies,
  forward: Forward,
): Promise<NewEmail> {
  const { tenantId, domain, stored } = forward;
  if (stored.rawSizeBytes > MESSAGE_MAX_BYTES) {
    throw new UnfitForward(
      `The forwarded message would have ${stored.rawSizeBytes} bytes; at most ${MESSAGE_MAX_BYTES} are sent.`,
    );
  }
  const recipients = forward.destinations.map(destinationOf);
  const suppressed = await findSuppressed(d.store, tenantId, [{ recipients }]);
  // Nobody asked over HTTP: there is no key.
  const caller: Caller = { tenantId, keyId: '', permission: 'full_access', domainId: domain.id };
  return describeEmail(
    d,
    {
      caller,
      origin: { via: 'forward', requestId: forward.taskId, userAgent: null, address: null },
      idempotencyKey: null,
      isOfBatch: true,
      suppressed,
    },
    {
      id: forward.id,
      createdAt: forward.createdAt,
      messageId: forward.messageId,
      from: authorOf(forward),
      toGiven: forward.destinations,
      ccGiven: [],
      bccGiven: [],
      replyToGiven: forward.replyTo === null ? [] : [forward.replyTo],
      subject: forward.subject,
      html: null,
      text: null,
      headers: null,
      tags: null,
      scheduledAt: null,
      topicId: null,
      templateId: null,
      recipients,
      author: { signingTenantId: tenantId, signingDomainId: domain.id, warning: null },
      forwarding: {
        envelopeFrom: forward.envelopeFrom,
        about: {
          received_email_id: forward.receivedEmailId,
          forwarding_rule_id: forward.ruleId,
          forwarding_attempt_id: forward.taskId,
          method: forward.method,
          ...(forward.replayId === null ? {} : { replay_id: forward.replayId }),
        },
      },
      stored: { ...stored, attachments: [] },
    },
  );
}

function destinationOf(address: string): Mailbox {
  const parsed = parseMailbox(address);
  if (parsed.ok) return parsed.mailbox;
  throw new UnfitForward(`The destination ${address} ${parsed.problem}.`);
}

/** Shown is who wrote it; it counts for the route's domain, which signs it. */
function authorOf({ author, domain }: Forward): Mailbox {
  const given = author === '' ? `unknown@${domain.name}` : author;
  return {
    name: null,
    local: '',
    domain: domain.name,
    address: given,
    needsSmtpUtf8: false,
    given,
  };
}
