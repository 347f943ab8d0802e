// An order to carry out again what rules say of mail that was received before, or to tell webhooks of it again, at a rate.
import { defineEntity, p } from '@mikro-orm/core';

export const replayStatuses = ['running', 'finished', 'canceled'] as const;

export const replayKinds = ['forward', 'webhook'] as const;
export type ReplayKind = (typeof replayKinds)[number];

export const ReceivingReplay = defineEntity({
  name: 'ReceivingReplay',
  tableName: 'receiving_replay',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    status: p.enum(replayStatuses),
    /** What happens again. */
    kinds: p.json<readonly ReplayKind[]>(),
    /** Messages. */
    perMinute: p.integer(),
    /** The only rule that counts; null: every one. */
    ruleId: p.uuid().nullable(),
    /** Of received emails, without repeats; null: a range of time. */
    ids: p.json<readonly string[]>().nullable(),
    /** Inside; null: ids. */
    startsAt: p.datetime().nullable(),
    /** Outside; null: ids. */
    endsAt: p.datetime().nullable(),
    /** The last message that was looked at. */
    cursorId: p.uuid().nullable(),
    /** Forwards, and events for webhooks, that were put in line. */
    planned: p.integer(),
    /** Messages that no rule is for, and no webhook hears of. */
    skipped: p.integer(),
    /** When the next message is due. */
    pacedAt: p.datetime(),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});
