// A domain that a tenant sends from, and the DKIM keys that sign for it.
import { defineEntity, p } from '@mikro-orm/core';

export const domainStatuses = [
  'not_started',
  'pending',
  'verified',
  'partially_verified',
  'partially_failed',
  'failed',
] as const;

export const SendingDomain = defineEntity({
  name: 'SendingDomain',
  tableName: 'sending_domain',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    /** A-labels, lower case, no trailing dot. */
    name: p.text(),
    status: p.enum(domainStatuses),
    region: p.text(),
    /** The label before the name where bounces come home: `send` gives send.example.com. */
    returnPathLabel: p.text(),
    sending: p.boolean(),
    receiving: p.boolean(),
    createdAt: p.datetime(),
  },
});

export const DkimKeyRow = defineEntity({
  name: 'DkimKeyRow',
  tableName: 'dkim_key',
  properties: {
    tenantId: p.uuid().primary(),
    domainId: p.uuid().primary(),
    selector: p.text().primary(),
    algorithm: p.enum(['rsa-sha256', 'ed25519-sha256']),
    /** PKCS #8 DER, sealed with the master secret (store/seal.ts). */
    privateKeySealed: p.blob(),
    /** The TXT record to publish. */
    publicRecord: p.text(),
    createdAt: p.datetime(),
  },
});
