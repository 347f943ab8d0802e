// A subject that contacts can opt in to or out of.
import { defineEntity, p } from '@mikro-orm/core';

export const Topic = defineEntity({
  name: 'Topic',
  tableName: 'topic',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    name: p.text(),
    description: p.text().nullable(),
    /** What holds for a contact that has not chosen; never changes. */
    defaultSubscription: p.enum(['opt_in', 'opt_out']),
    visibility: p.enum(['public', 'private']),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});
