// Endpoints that are told what happens, what they are told, and every try at it.
import { defineEntity, p } from '@mikro-orm/core';

export const Webhook = defineEntity({
  name: 'Webhook',
  tableName: 'webhook',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    /** An absolute http or https URL. */
    endpoint: p.text(),
    events: p.array(),
    status: p.enum(['enabled', 'disabled']),
    /** Why the service disabled it; null when its owner did. */
    disabledReason: p.text().nullable(),
    secretSealed: p.blob(),
    /** Signs as well until `secretPreviousUntil`. */
    secretPreviousSealed: p.blob().nullable(),
    secretPreviousUntil: p.datetime().nullable(),
    /** Since when nothing was acknowledged; null: the last call was. */
    failingSince: p.datetime().nullable(),
    /** Calls since then that were not acknowledged. */
    failures: p.integer(),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});

export const webhookEventStatuses = ['pending', 'attempting', 'success', 'failed'] as const;

export const WebhookEvent = defineEntity({
  name: 'WebhookEvent',
  tableName: 'webhook_event',
  properties: {
    tenantId: p.uuid().primary(),
    webhookId: p.uuid().primary(),
    /** The same at every endpoint and on every try. */
    id: p.uuid().primary(),
    type: p.text(),
    /** The body of the call, byte for byte. */
    payload: p.text(),
    status: p.enum(webhookEventStatuses),
    /** Calls since it was made or replayed. */
    attempts: p.integer(),
    /** Null: no further try is planned. While a call is under way: when another process may take it for lost. */
    nextAttemptAt: p.datetime().nullable(),
    /** Of the claim that it is called under. */
    leaseId: p.uuid().nullable(),
    createdAt: p.datetime(),
  },
});

export const WebhookAttempt = defineEntity({
  name: 'WebhookAttempt',
  tableName: 'webhook_attempt',
  properties: {
    tenantId: p.uuid().primary(),
    webhookId: p.uuid().primary(),
    eventId: p.uuid().primary(),
    id: p.uuid().primary(),
    sentAt: p.datetime(),
    durationMs: p.integer().nullable(),
    httpStatus: p.smallint().nullable(),
    /** The beginning of the answer's body. */
    response: p.text().nullable(),
    /** What happened instead of an answer. */
    error: p.text().nullable(),
  },
});
