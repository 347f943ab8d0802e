// A message that the built-in sink took. It is the far end of development mode, so it belongs to
// no tenant and is not part of any tenant's data.
import { defineEntity, p } from '@mikro-orm/core';

export const SinkMessage = defineEntity({
  name: 'SinkMessage',
  tableName: 'sink_message',
  properties: {
    id: p.uuid().primary(),
    /** Empty for the null sender. */
    mailFrom: p.text(),
    rcptTo: p.json<readonly string[]>(),
    raw: p.blob(),
    receivedAt: p.datetime(),
    tls: p.boolean(),
  },
});
