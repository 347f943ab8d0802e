// A tenant: the owner of everything else. Every other tenant-owned table leads with its id.
import { defineEntity, p } from '@mikro-orm/core';

export const Tenant = defineEntity({
  name: 'Tenant',
  tableName: 'tenant',
  properties: {
    id: p.uuid().primary(),
    name: p.text(),
    createdAt: p.datetime(),
    /** It came from another appliance; null: it was made here. */
    importedAt: p.datetime().nullable(),
  },
});
