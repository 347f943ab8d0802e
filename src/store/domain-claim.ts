// A tenant's claim of a name that another tenant may hold: decided by a TXT record that only who controls the DNS
// of the name can publish.
import { defineEntity, p } from '@mikro-orm/core';

export const claimStatuses = [
  'pending',
  'verified',
  'completed',
  'blocked',
  'expired',
  'superseded',
  'canceled',
  'failed',
] as const;
export type ClaimStatus = (typeof claimStatuses)[number];

export const blockedReasons = [
  'grace_period',
  'recent_owner_activity',
  'pending_scheduled_emails',
] as const;
export type BlockedReason = (typeof blockedReasons)[number];

export const DomainClaim = defineEntity({
  name: 'DomainClaim',
  tableName: 'domain_claim',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    /** The claimer's own row of the name. */
    domainId: p.uuid(),
    name: p.text(),
    /** What the TXT record must hold. */
    token: p.text(),
    status: p.enum(claimStatuses),
    blockedReason: p.enum(blockedReasons).nullable(),
    failureReason: p.text().nullable(),
    createdAt: p.datetime(),
    expiresAt: p.datetime(),
    /** When the record was first seen. */
    provenAt: p.datetime().nullable(),
  },
});
