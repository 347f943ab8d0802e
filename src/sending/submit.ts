// From a message that came over SMTP to an accepted email: made fit for every host, read for the API, and handed to
// the same acceptance as a request. Throws a Refusal, or an UnfitMessage for what the message itself has.
import { Refusal } from '../access/refusal.ts';
import type { Caller } from '../access/keys.ts';
import type { Mailbox } from '../mail/address.ts';
import { fingerprintParts, readShownParts, type ShownFile } from '../mail/shown-parts.ts';
import { prepareSubmitted } from '../mail/submitted.ts';
import type { SubmittedHeader } from '../mail/submitted-header.ts';
import type { Survey } from '../mail/wire-survey.ts';
import type { NewAttachment } from '../queue/enqueue.ts';
import { newId } from '../store/id.ts';
import { acceptMessage, type AcceptDependencies } from './accept.ts';
import { checkIdempotencyKey } from './idempotency.ts';
import { MESSAGE_MAX_BYTES } from './message.ts';

export { MESSAGE_MAX_BYTES } from './message.ts';

export interface Submission {
  /** As it came, dot-stuffing undone. */
  readonly message: Buffer;
  readonly survey: Survey;
  /** The envelope; at least one. */
  readonly recipients: readonly Mailbox[];
  /** The client said SMTPUTF8. */
  readonly allowsUtf8: boolean;
  /** For the Received field; the id is in the timeline as well. */
  readonly trace: { readonly hostname: string; readonly id: string; readonly isTls: boolean };
  /** Of the client, for the timeline. */
  readonly address: string;
}

/** The id of the email; with an idempotency key that was used for the same message before, the first one's. */
export async function submitMessage(
  d: AcceptDependencies,
  caller: Caller,
  submission: Submission,
): Promise<{ readonly id: string }> {
  const { header, messageId, raw } = prepareSubmitted({
    ...submission,
    newMessageId: newId(),
    now: d.now(),
  });
  if (raw.length > MESSAGE_MAX_BYTES) {
    throw new Refusal(
      'request_too_large',
      `The message has ${raw.length} bytes once its 8-bit parts are encoded; at most ${MESSAGE_MAX_BYTES} are allowed.`,
    );
  }
  const idempotencyKey = keyOf(header);
  const parts = await readShownParts(raw);
  const { from, to, cc, replyTo, subject, custom } = header;
  const { body } = await acceptMessage(d, caller, {
    message: {
      from,
      to,
      cc,
      replyTo,
      recipients: submission.recipients,
      subject,
      html: parts.html,
      text: parts.text,
      raw,
      messageId,
      headers: custom,
      attachments: parts.files.map(attachmentOf),
      fingerprint:
        idempotencyKey === null
          ? ''
          : JSON.stringify([from.given, to, cc, replyTo, subject, custom, fingerprintParts(raw)]),
    },
    idempotencyKey,
    origin: {
      via: 'smtp',
      requestId: submission.trace.id,
      userAgent: header.mailer,
      address: submission.address,
    },
  });
  return { id: (body as { id: string }).id };
}

/** As an HTTP header has it, one character an octet: the same key is the same at both doors. */
function keyOf({ idempotencyKey }: SubmittedHeader): string | null {
  if (idempotencyKey === null) return null;
  return checkIdempotencyKey(Buffer.from(idempotencyKey).toString('latin1'));
}

function attachmentOf({ place, ...file }: ShownFile): NewAttachment {
  return {
    ...file,
    id: newId(),
    url: null,
    blobKey: null,
    rawOffset: place?.offset ?? null,
    rawLength: place?.length ?? null,
  };
}
