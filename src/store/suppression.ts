// An address that a tenant does not send to any more, and why.
import { defineEntity, p } from '@mikro-orm/core';

export const suppressionOrigins = ['bounce', 'complaint', 'manual'] as const;

export const Suppression = defineEntity({
  name: 'Suppression',
  tableName: 'suppression',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    /** Lower case, domain in A-labels; unique in the tenant. */
    address: p.text(),
    origin: p.enum(suppressionOrigins),
    /** The email whose bounce or complaint it was. */
    sourceId: p.uuid().nullable(),
    createdAt: p.datetime(),
  },
});
