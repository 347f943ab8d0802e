// One text for every contact of a segment, and what became of it for each of them.
import { defineEntity, p } from '@mikro-orm/core';

export const broadcastStatuses = [
  'draft',
  'scheduled',
  'queued',
  'sent',
  'failed',
  'canceled',
] as const;
export type BroadcastStatus = (typeof broadcastStatuses)[number];

export const Broadcast = defineEntity({
  name: 'Broadcast',
  tableName: 'broadcast',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    name: p.text(),
    segmentId: p.uuid().nullable(),
    topicId: p.uuid().nullable(),
    fromGiven: p.text().nullable(),
    subject: p.text().nullable(),
    replyToGiven: p.json<readonly string[]>(),
    previewText: p.text().nullable(),
    html: p.text().nullable(),
    text: p.text().nullable(),
    status: p.enum(broadcastStatuses),
    /** Why it failed, for the tenant. */
    failure: p.text().nullable(),
    scheduledAt: p.datetime().nullable(),
    queuedAt: p.datetime().nullable(),
    /** The last email of the fan-out was stored. */
    sentAt: p.datetime().nullable(),
    /** The fan-out has passed this contact; moved in the transaction that stores the emails. */
    cursorId: p.uuid().nullable(),
    /** Emails made. */
    recipients: p.integer(),
    /** Contacts that were passed over: suppressed, or not wanting it. */
    leftOut: p.integer(),
    /** Who asked for it to be sent. */
    apiKeyId: p.uuid().nullable(),
    /** When the fan-out goes on with it, at the earliest; null: it has not begun. */
    nextTurnAt: p.datetime().nullable(),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});

/** Why a contact got none. `failed`: no message could be made of what is known of it. */
export const leftOutReasons = ['suppressed', 'unsubscribed', 'failed'] as const;
export type LeftOutReason = (typeof leftOutReasons)[number];

/** A contact that the fan-out reached; written in one transaction with its email. */
export const BroadcastRecipient = defineEntity({
  name: 'BroadcastRecipient',
  tableName: 'broadcast_recipient',
  properties: {
    tenantId: p.uuid().primary(),
    broadcastId: p.uuid().primary(),
    contactId: p.uuid().primary(),
    /** Of the contact at that time. */
    address: p.text(),
    /** Null where none was made; `leftOut` says why. */
    emailId: p.uuid().nullable(),
    leftOut: p.enum(leftOutReasons).nullable(),
    /** By a link in this broadcast. */
    unsubscribedAt: p.datetime().nullable(),
  },
});
