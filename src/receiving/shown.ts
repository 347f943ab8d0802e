// What a received message shows, as the columns that it is stored in.
import type { PoolClient } from 'pg';
import type { ParsedMessage } from '../mail/parse.ts';
import { newId } from '../store/id.ts';
import type { ReceivedAttachment } from '../store/received-email.ts';
import { tellWebhooks } from '../timeline/outbox.ts';

/** Which stored message. */
export interface Place {
  readonly tenantId: string;
  readonly id: string;
}

/** Fills in what was read from the message, once, and tells that it came: false when it was filled in before, or is gone. */
export async function saveShown(
  client: Pick<PoolClient, 'query'>,
  { tenantId, id }: Place,
  parsed: ParsedMessage | null,
): Promise<boolean> {
  const { rowCount } = await client.query(
    `update received_email set is_read = true, from_shown = $3, to_shown = $4, cc_shown = $5,
       bcc_shown = $6, reply_to_shown = $7, subject = $8, message_id = $9, attachments = $10,
       is_partial = $11
     where tenant_id = $1 and id = $2 and not is_read`,
    [tenantId, id, ...shownColumns(parsed), parsed?.isPartial ?? true],
  );
  if (rowCount === 0) return false;
  await client.query(
    `update received_content set html = $3, text = $4, headers = $5
     where tenant_id = $1 and email_id = $2`,
    [tenantId, id, ...contentColumns(parsed)],
  );
  await tellWebhooks(client, [{ tenantId, type: 'email.received', subjectId: id, detail: {} }]);
  return true;
}

/** from_shown, to_shown, cc_shown, bcc_shown, reply_to_shown, subject, message_id, attachments. */
export function shownColumns(parsed: ParsedMessage | null): readonly (string | null)[] {
  return [
    parsed?.from ?? '',
    JSON.stringify(parsed?.to ?? []),
    JSON.stringify(parsed?.cc ?? []),
    JSON.stringify(parsed?.bcc ?? []),
    JSON.stringify(parsed?.replyTo ?? []),
    parsed?.subject ?? '',
    parsed?.messageId ?? null,
    JSON.stringify(attachmentsOf(parsed)),
  ];
}

/** html, text, headers. */
export function contentColumns(parsed: ParsedMessage | null): readonly (string | null)[] {
  return [
    parsed?.html ?? null,
    parsed?.text ?? null,
    parsed === null ? null : JSON.stringify(parsed.headers),
  ];
}

const attachmentsOf = (parsed: ParsedMessage | null): ReceivedAttachment[] =>
  (parsed?.attachments ?? []).map((part) => ({
    id: newId(),
    filename: part.filename,
    size: part.content.length,
    content_type: part.contentType,
    content_id: part.contentId,
    content_disposition: part.disposition,
  }));
