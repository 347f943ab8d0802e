// One request to the API by a known tenant, and apart from it what was said. Only access/request-log.ts
// inserts these.
import { defineEntity, p } from '@mikro-orm/core';

export const RequestLog = defineEntity({
  name: 'RequestLog',
  tableName: 'request_log',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    /** When the request arrived; the same instant as in the id. */
    createdAt: p.datetime(),
    apiKeyId: p.uuid(),
    method: p.text(),
    /** The path without `/api`, query and last slash. */
    endpoint: p.text(),
    responseStatus: p.smallint(),
    userAgent: p.text().nullable(),
    requestId: p.text(),
    durationMs: p.integer(),
    /** The tenant's emails that it was about. */
    emailIds: p.array().nullable(),
    /** `name` and `name=value` of every tag of those emails. */
    tags: p.array().nullable(),
  },
});

export const RequestLogBody = defineEntity({
  name: 'RequestLogBody',
  tableName: 'request_log_body',
  properties: {
    tenantId: p.uuid().primary(),
    logId: p.uuid().primary(),
    /** JSON without secrets (access/redact.ts); null: there was none, or it was not JSON. */
    requestBody: p.text().nullable(),
    responseBody: p.text().nullable(),
  },
});
