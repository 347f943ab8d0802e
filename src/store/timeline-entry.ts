// One fact about an email, never changed. Attempts are rows of their own (store/delivery.ts).
import { defineEntity, p } from '@mikro-orm/core';

export const TimelineEntry = defineEntity({
  name: 'TimelineEntry',
  tableName: 'timeline',
  properties: {
    tenantId: p.uuid().primary(),
    emailId: p.uuid().primary(),
    id: p.uuid().primary(),
    at: p.datetime(),
    kind: p.text(),
    detail: p.json<Readonly<Record<string, unknown>>>().nullable(),
  },
});
