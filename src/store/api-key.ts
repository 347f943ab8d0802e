// An API key. The token itself is never stored: only its SHA-256 hash and its first part.
import { defineEntity, p } from '@mikro-orm/core';

export const ApiKey = defineEntity({
  name: 'ApiKey',
  tableName: 'api_key',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    name: p.text(),
    /** `re_` and the eight characters after it, to recognise a key by. */
    prefix: p.text(),
    /** SHA-256 of the whole token. */
    hash: p.blob(),
    permission: p.enum(['full_access', 'sending_access']),
    /** Only this domain may be in `from`; null: every domain of the tenant. */
    domainId: p.uuid().nullable(),
    createdAt: p.datetime(),
    revokedAt: p.datetime().nullable(),
    /** To within a few minutes. */
    lastUsedAt: p.datetime().nullable(),
  },
});
