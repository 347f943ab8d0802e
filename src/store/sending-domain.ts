// A domain that a tenant sends from or receives at, what the DNS showed for its records, and the DKIM keys
// that sign for it.
import { defineEntity, p } from '@mikro-orm/core';

export const domainStatuses = [
  'not_started',
  'pending',
  'verified',
  'partially_verified',
  'partially_failed',
  'failed',
] as const;
export type DomainStatus = (typeof domainStatuses)[number];

export type RecordStatus = 'not_started' | 'pending' | 'verified' | 'failed' | 'temporary_failure';

/** The records that a domain can have, one of each kind at most. */
export const recordKinds = [
  'return_path_mx',
  'return_path_spf',
  'dkim_rsa',
  'dkim_ed25519',
  'receiving_mx',
  'tracking_cname',
  'dmarc',
  'mta_sts_txt',
  'mta_sts_host',
  'tls_rpt',
] as const;
export type RecordKind = (typeof recordKinds)[number];

/** What the DNS last showed for one record. */
export interface RecordCheck {
  readonly status: RecordStatus;
  /** What was found and what to fix; null when it is right. */
  readonly detail: string | null;
  /** ISO 8601: since when a record that was verified is missing; null unless `temporary_failure`. */
  readonly since: string | null;
}
export type RecordChecks = Readonly<Partial<Record<RecordKind, RecordCheck>>>;

export const tlsModes = ['opportunistic', 'enforced'] as const;
export type TlsMode = (typeof tlsModes)[number];

export const inboundDmarcModes = ['reject', 'tag'] as const;
export type InboundDmarc = (typeof inboundDmarcModes)[number];

/** The mode of the MTA-STS policy that we serve for a domain; `off`: none is served. */
export const stsHostings = ['off', 'none', 'testing', 'enforce'] as const;
export type StsHosting = (typeof stsHostings)[number];

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
    /** The label before the name where tracking links lead; null: the default. */
    trackingSubdomain: p.text().nullable(),
    openTracking: p.boolean(),
    clickTracking: p.boolean(),
    tls: p.enum(tlsModes),
    /** What becomes of mail to this domain that its author's DMARC policy says to reject. */
    inboundDmarc: p.enum(inboundDmarcModes),
    mtaSts: p.enum(stsHostings),
    sending: p.boolean(),
    receiving: p.boolean(),
    /** The DNS is right for sending, or was less than 72 h ago. Mail leaves when `sending` is on, too. */
    sendingVerified: p.boolean(),
    /** The same for receiving. */
    receivingVerified: p.boolean(),
    recordChecks: p.json().$type<RecordChecks>(),
    /** When the 72 hours began in which records may appear; null: never asked to verify. */
    verifyingSince: p.datetime().nullable(),
    /** Checks since then. */
    checkCount: p.integer(),
    checkedAt: p.datetime().nullable(),
    /** Null: not checked again by itself. */
    nextCheckAt: p.datetime().nullable(),
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
