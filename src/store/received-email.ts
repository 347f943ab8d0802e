// A message that arrived for a tenant, and apart from it what it says.
import { defineEntity, p } from '@mikro-orm/core';

/** What was decided for one envelope recipient; nulls where nothing applies. */
export interface RouteDecision {
  readonly recipient: string;
  readonly status: 'exact' | 'alias' | 'catch_all' | 'unrouteable';
  readonly route_id: string | null;
  readonly route_type: 'exact' | 'alias' | 'catch_all' | null;
  readonly local_part: string | null;
  readonly domain_id: string | null;
  readonly target_address: string | null;
  readonly forwarding_rule_id: string | null;
}

/** A file of the message; its bytes are read from the message, by position. */
export interface ReceivedAttachment {
  readonly id: string;
  readonly filename: string | null;
  readonly size: number;
  readonly content_type: string;
  readonly content_id: string | null;
  readonly content_disposition: 'attachment' | 'inline';
}

export const ReceivedEmail = defineEntity({
  name: 'ReceivedEmail',
  tableName: 'received_email',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    createdAt: p.datetime(),
    /** MAIL FROM; empty for the null sender. */
    mailFrom: p.text(),
    /** The envelope recipients of this tenant, as the client wrote them. */
    receivedFor: p.json<readonly string[]>(),
    routeDecisions: p.json<readonly RouteDecision[]>(),
    /** As the header shows it, decoded; the same for the lists below. */
    fromShown: p.text(),
    toShown: p.json<readonly string[]>(),
    ccShown: p.json<readonly string[]>(),
    bccShown: p.json<readonly string[]>(),
    replyToShown: p.json<readonly string[]>(),
    subject: p.text(),
    /** With angle brackets; null when the message has none. */
    messageId: p.text().nullable(),
    attachments: p.json<readonly ReceivedAttachment[]>(),
  },
});

export const ReceivedContent = defineEntity({
  name: 'ReceivedContent',
  tableName: 'received_content',
  properties: {
    tenantId: p.uuid().primary(),
    emailId: p.uuid().primary(),
    /** With `cid:` links as they are in the message. */
    html: p.text().nullable(),
    text: p.text().nullable(),
    headers: p.json<Readonly<Record<string, string>>>().nullable(),
    /** The message with our trace fields on top; null when it lies in the blob store. */
    raw: p.blob().nullable(),
    blobKey: p.text().nullable(),
    rawSizeBytes: p.integer(),
  },
});
