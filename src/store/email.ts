// An email as a tenant submitted it, and apart from it what it says. Bodies are apart so that the
// rows that every attempt updates stay narrow. Only sending/ inserts and only queue/ updates these.
import { defineEntity, p } from '@mikro-orm/core';

/** Resend's twelve values; `last_event` and `status` of the API. */
export const emailEvents = [
  'queued',
  'scheduled',
  'sent',
  'delivered',
  'delivery_delayed',
  'bounced',
  'complained',
  'opened',
  'clicked',
  'suppressed',
  'failed',
  'canceled',
] as const;
export type EmailEvent = (typeof emailEvents)[number];

export interface Tag {
  readonly name: string;
  readonly value: string;
}

export interface ProviderError {
  /** Enhanced status code, or the cause where no reply came. */
  readonly code: string;
  /** The peer's reply, or what failed, in one sentence. */
  readonly message: string;
}

export const Email = defineEntity({
  name: 'Email',
  tableName: 'email',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    createdAt: p.datetime(),
    /** With angle brackets; the same on every attempt. */
    messageId: p.text(),
    /** As the caller wrote it; the same for the lists below. */
    fromGiven: p.text(),
    /** A-labels, lower case. */
    fromDomain: p.text(),
    toGiven: p.json<readonly string[]>(),
    ccGiven: p.json<readonly string[]>().nullable(),
    bccGiven: p.json<readonly string[]>().nullable(),
    replyToGiven: p.json<readonly string[]>().nullable(),
    subject: p.text(),
    tags: p.json<readonly Tag[]>().nullable(),
    lastEvent: p.enum(emailEvents),
    recipientCount: p.smallint(),
    /** Not sent before this; null: at once. Stays when it was sent or canceled. */
    scheduledAt: p.datetime().nullable(),
    topicId: p.uuid().nullable(),
    templateId: p.uuid().nullable(),
    broadcastId: p.uuid().nullable(),
    attachmentCount: p.smallint(),
    /** Attempts after the first, over all recipients. */
    providerRetryCount: p.integer(),
    providerLastAttemptedAt: p.datetime().nullable(),
    /** The earliest next try of any recipient. */
    providerNextRetryAt: p.datetime().nullable(),
    providerLastError: p.json<ProviderError>().nullable(),
    providerDeadLetteredAt: p.datetime().nullable(),
    /** Retention took away what it says: it has no EmailContent and no attachments any more. */
    contentRemovedAt: p.datetime().nullable(),
  },
});

export const EmailContent = defineEntity({
  name: 'EmailContent',
  tableName: 'email_content',
  properties: {
    tenantId: p.uuid().primary(),
    emailId: p.uuid().primary(),
    /** As submitted. */
    html: p.text().nullable(),
    /** As submitted, or generated from html. */
    text: p.text().nullable(),
    headers: p.json<Readonly<Record<string, string>>>().nullable(),
    /** The message without its DKIM signatures; null when it lies in the blob store, or is not composed yet. */
    raw: p.blob().nullable(),
    rawSizeBytes: p.integer(),
    blobKey: p.text().nullable(),
    needsSmtpUtf8: p.boolean(),
    /** One of our TLS reports: it goes out whatever MTA-STS and DANE say. */
    ignoresTlsPolicy: p.boolean(),
    /** MAIL FROM, empty for the null sender; null: a return path of ours for each delivery. */
    envelopeFrom: p.text().nullable(),
    /** Relayed for others: a signature of ours is added where it can be made, and not waited for. */
    mayGoUnsigned: p.boolean(),
    /** The domain whose DKIM keys sign, and its tenant: another one only for development's stand-in. */
    signingTenantId: p.uuid().nullable(),
    signingDomainId: p.uuid().nullable(),
    /** How the html is tracked (tracking/track-html.ts); only where the message is composed after acceptance. */
    tracking: p.json<object>().nullable(),
  },
});
