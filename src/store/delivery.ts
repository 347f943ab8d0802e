// A delivery: one recipient's journey of one email, one row; and its attempts. The row is the queue.
//
//   scheduled ─► preparing ─► ready ──claim──► in_flight ──settle──► delivered | bounced | failed
//   (its time)  (attachments)   ▲                  │  │
//                               │                  │  └──► unknown   (lost after the final dot; tried
//                               └──wake── deferred ◄┘                 once more, much later)
//
// A delivery that is not to be made ends as suppressed or canceled without an attempt.
// Only queue/ changes `state`.
import { defineEntity, p } from '@mikro-orm/core';

export const deliveryStates = [
  'scheduled',
  'preparing',
  'ready',
  'in_flight',
  'deferred',
  'delivered',
  'bounced',
  'failed',
  'unknown',
  'suppressed',
  'canceled',
] as const;
export type DeliveryState = (typeof deliveryStates)[number];

/** A delivery whose answer was lost is tried once more, then stays unknown. */
export const UNKNOWNS_MAX = 2;

/** After so many crashes in a row with a delivery under way, it is tried apart from other mail. */
export const SUSPECT_INTERRUPTIONS = 2;

/** Whether a next try is planned: it waits for its time. */
export const isTriedAgain = (row: { readonly state: string; readonly unknowns: number }): boolean =>
  row.state === 'deferred' || (row.state === 'unknown' && row.unknowns < UNKNOWNS_MAX);

export const Delivery = defineEntity({
  name: 'Delivery',
  tableName: 'delivery',
  properties: {
    tenantId: p.uuid().primary(),
    emailId: p.uuid().primary(),
    /** 0 for the first recipient of to, cc, bcc, in this order, without repeats. */
    position: p.smallint().primary(),
    /** RCPT TO: domain in A-labels. */
    recipient: p.text(),
    /** Its destination, in the words of store/destination.ts; which lane serves it is known when its hosts are. */
    lane: p.text(),
    state: p.enum(deliveryStates),
    /** Not before this. Final states keep their last value. */
    dueAt: p.datetime(),
    /** After this a deferral becomes a bounce. */
    expiresAt: p.datetime(),
    /** Attempts begun. */
    attempts: p.integer(),
    /** How often the answer to the final dot was lost. */
    unknowns: p.smallint(),
    /** One of many that were handed in together: one-recipient mail keeps room beside it. */
    isBulk: p.boolean(),
    /** Attempts that ended before a host listened: they do not make the pauses longer. */
    laneFaults: p.integer(),
    /** Attempts in a row at whose end the worker was gone; see SUSPECT_INTERRUPTIONS. */
    interruptions: p.smallint(),
    /** When it was let in as a suspect (queue/suspect.ts); null: not since its last crash. */
    letInAt: p.datetime().nullable(),
    /** When it was put off for the first time; null: never, or not since it was released. */
    deferredAt: p.datetime().nullable(),
    /** When its sender was told that it is late. */
    delayToldAt: p.datetime().nullable(),
    /** The worker run that holds it while in flight: the fencing token of every result. */
    leaseEpoch: p.uuid().nullable(),
    lastCause: p.text().nullable(),
    lastReply: p.text().nullable(),
  },
});

export const Attempt = defineEntity({
  name: 'Attempt',
  tableName: 'attempt',
  properties: {
    tenantId: p.uuid().primary(),
    emailId: p.uuid().primary(),
    position: p.smallint().primary(),
    /** 1 for the first. */
    number: p.integer().primary(),
    startedAt: p.datetime(),
    /** Null while under way. */
    finishedAt: p.datetime().nullable(),
    outcome: p.text().nullable(),
    cause: p.text().nullable(),
    stage: p.text().nullable(),
    host: p.text().nullable(),
    address: p.text().nullable(),
    port: p.integer().nullable(),
    tls: p.text().nullable(),
    /** What had to hold for the connection: `none`, `opportunistic`, `required`, `sts`, `dane`, `smarthost`. */
    tlsPolicy: p.text().nullable(),
    /** The address of this machine that was dialled from; null before a connection that the system chose one for. */
    source: p.text().nullable(),
    code: p.smallint().nullable(),
    enhanced: p.text().nullable(),
    reply: p.text().nullable(),
  },
});
