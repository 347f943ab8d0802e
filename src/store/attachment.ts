// A file that travels with a sent email. Its bytes lie base64-encoded inside the stored message, at a known
// place; until the message is composed they are staged as a blob, or not fetched yet.
import { defineEntity, p } from '@mikro-orm/core';

export const AttachmentRow = defineEntity({
  name: 'AttachmentRow',
  tableName: 'attachment',
  properties: {
    tenantId: p.uuid().primary(),
    emailId: p.uuid().primary(),
    id: p.uuid().primary(),
    /** 0 for the first. */
    position: p.smallint(),
    filename: p.text().nullable(),
    contentType: p.text(),
    /** Without angle brackets. */
    contentId: p.text().nullable(),
    disposition: p.enum(['attachment', 'inline']),
    /** Decoded; null until it is fetched. */
    sizeBytes: p.integer().nullable(),
    /** Where it is fetched from after acceptance; null when the request held it. */
    url: p.text().nullable(),
    /** Where it is staged until the message is composed. */
    blobKey: p.text().nullable(),
    /** Where its base64 lines begin in the stored message, and how many bytes they take; null for a submitted message. */
    rawOffset: p.integer().nullable(),
    rawLength: p.integer().nullable(),
  },
});
