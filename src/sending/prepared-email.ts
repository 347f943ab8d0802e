// Reads back what an email with attachments by URL was accepted with, so that its message can be composed once they
// are there: the same author, recipients, bodies, id and date that the request brought.
import type { ClaimedFetch } from '../queue/prepare.ts';
import type { Queryable } from '../queue/enqueue.ts';
import { isContentType } from '../mail/compose.ts';
import { parseMailbox, type Mailbox } from '../mail/address.ts';
import { AttachmentRow } from '../store/attachment.ts';
import { Email, EmailContent } from '../store/email.ts';
import type { Store } from '../store/orm.ts';
import type { CheckedAttachment, SpooledFile, StagedBlob } from './attachments.ts';
import type { TrackingTokens } from '../tracking/tokens.ts';
import { trackHtml, type TrackingPlan } from '../tracking/track-html.ts';
import type { MessageInput } from './message.ts';

/** An attachment as it was accepted; `content` is staged, or null while it is to be fetched. */
export interface Awaited extends CheckedAttachment {
  readonly id: string;
  readonly content: SpooledFile | StagedBlob | null;
  /** With the file, and the response's type where the request said nothing better. */
  readonly withContent: (content: SpooledFile, responseType: string | null) => Awaited;
}

export interface Prepared {
  readonly message: Omit<MessageInput, 'attachments'>;
  /** In order. */
  readonly attachments: readonly Awaited[];
}

const UNKNOWN_TYPE = 'application/octet-stream';

/** Null when the email is gone. */
export async function readPrepared(
  store: Store,
  { tenantId, emailId }: Pick<ClaimedFetch, 'tenantId' | 'emailId'>,
  tokens: TrackingTokens,
): Promise<Prepared | null> {
  const em = store.em();
  const ofEmail = { tenantId, emailId };
  const email = await em.findOne(Email, { tenantId, id: emailId });
  const content = await em.findOne(EmailContent, ofEmail);
  const [from] = email === null ? [] : mailboxes([email.fromGiven]);
  if (email === null || content === null || from === undefined) return null;
  const rows = await em.find(AttachmentRow, ofEmail, { orderBy: { position: 'asc' } });
  const { html = null, text = null } = content;
  // As was decided when it was accepted.
  const plan = (content.tracking ?? null) as TrackingPlan | null;
  const isTracked = html !== null && plan !== null;
  return {
    message: {
      emailId,
      from,
      to: mailboxes(email.toGiven),
      cc: mailboxes(email.ccGiven ?? []),
      replyTo: mailboxes(email.replyToGiven ?? []),
      subject: email.subject,
      text: text === '' && html !== null ? null : text,
      html: isTracked ? trackHtml(html, plan, { of: ofEmail, tokens }).html : html,
      headers: Object.entries(content.headers ?? {}),
      messageId: email.messageId,
      date: email.scheduledAt ?? email.createdAt,
    },
    attachments: rows.map((row) =>
      awaited({
        id: row.id,
        filename: row.filename ?? null,
        contentType: row.contentType,
        contentId: row.contentId ?? null,
        disposition: row.disposition,
        url: row.url ?? null,
        content:
          typeof row.blobKey === 'string'
            ? { blobKey: row.blobKey, sizeBytes: row.sizeBytes ?? 0 }
            : null,
      }),
    ),
  };
}

function awaited(one: Omit<Awaited, 'withContent'>): Awaited {
  return {
    ...one,
    withContent(content, responseType) {
      const type = responseType?.trim() ?? '';
      const isBetter = one.contentType === UNKNOWN_TYPE && isContentType(type);
      return awaited({ ...one, content, contentType: isBetter ? type : one.contentType });
    },
  };
}

/** They were parsed when the email was accepted, so all of them parse. */
function mailboxes(given: readonly string[]): readonly Mailbox[] {
  return given.flatMap((text) => {
    const parsed = parseMailbox(text);
    return parsed.ok ? [parsed.mailbox] : [];
  });
}

/** How many tries have ended in a fault; a lease that just ended is none. */
export async function countFailedTries(
  db: Queryable,
  { tenantId, emailId }: Pick<ClaimedFetch, 'tenantId' | 'emailId'>,
): Promise<number> {
  const { rows } = await db.query<{ count: number }>({
    name: 'failed-fetches',
    text: `select count(*)::int as count from timeline
      where tenant_id = $1 and email_id = $2 and kind = 'attachment_fetch_failed'`,
    values: [tenantId, emailId],
  });
  return rows[0]?.count ?? 0;
}
