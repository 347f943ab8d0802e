// A message that arrived for a tenant, and apart from it what it says.
import { defineEntity, p } from '@mikro-orm/core';

/** What was decided for one envelope recipient; nulls where nothing applies. */
export interface RouteDecision {
  readonly recipient: string;
  readonly status: 'exact' | 'alias' | 'catch_all' | 'unrouteable';
  readonly route_id: string | null;
  readonly route_type: 'exact' | 'alias' | 'catch_all' | null;
  readonly local_part: string | null;
  readonly domain_id: string | null;
  readonly target_address: string | null;
  readonly forwarding_rule_id: string | null;
}

/** RFC 8601 §2.7, in the words of the field. */
export type SpfResult =
  'pass' | 'fail' | 'softfail' | 'neutral' | 'none' | 'temperror' | 'permerror';
export type DkimResult =
  'pass' | 'fail' | 'policy' | 'neutral' | 'none' | 'temperror' | 'permerror';
export type DmarcResult = 'pass' | 'fail' | 'none' | 'temperror' | 'permerror';
export type ArcResult = 'pass' | 'fail' | 'none';

/** One signature. */
export interface DkimVerdict {
  readonly result: DkimResult;
  readonly domain: string | null;
  readonly selector: string | null;
  /** Whether it speaks for the author's domain. */
  readonly aligned: boolean;
  readonly reason: string | null;
}

/** What the checks at the door showed; as the API shows it. */
export interface Authentication {
  readonly spf: {
    readonly result: SpfResult;
    /** Of MAIL FROM, or of EHLO for the null sender. */
    readonly domain: string | null;
    readonly reason: string | null;
  };
  /** In the order of the message; empty: not signed. */
  readonly dkim: readonly DkimVerdict[];
  readonly dmarc: {
    readonly result: DmarcResult;
    /** The author's. */
    readonly domain: string | null;
    readonly policy: 'none' | 'quarantine' | 'reject' | null;
    readonly aligned: { readonly spf: boolean; readonly dkim: boolean };
    readonly reason: string | null;
  };
  readonly arc: {
    readonly result: ArcResult;
    /** Of the newest seal. */
    readonly sealer: string | null;
    readonly instances: number;
  };
  /** What it came to: `tagged`: the author's policy says to refuse it, and it was taken all the same. */
  readonly verdict: 'accepted' | 'tagged';
}

/** A file of the message; its bytes are read from the message, by position. */
export interface ReceivedAttachment {
  readonly id: string;
  readonly filename: string | null;
  readonly size: number;
  readonly content_type: string;
  readonly content_id: string | null;
  readonly content_disposition: 'attachment' | 'inline';
}

export const ReceivedEmail = defineEntity({
  name: 'ReceivedEmail',
  tableName: 'received_email',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    createdAt: p.datetime(),
    /** MAIL FROM; empty for the null sender. */
    mailFrom: p.text(),
    /** The envelope recipients of this tenant, as the client wrote them. */
    receivedFor: p.json<readonly string[]>(),
    routeDecisions: p.json<readonly RouteDecision[]>(),
    /** As the header shows it, decoded; the same for the lists below. */
    fromShown: p.text(),
    toShown: p.json<readonly string[]>(),
    ccShown: p.json<readonly string[]>(),
    bccShown: p.json<readonly string[]>(),
    replyToShown: p.json<readonly string[]>(),
    subject: p.text(),
    /** With angle brackets; null when the message has none. */
    messageId: p.text().nullable(),
    attachments: p.json<readonly ReceivedAttachment[]>(),
    /** Null: it was not checked. */
    authentication: p.json<Authentication>().nullable(),
    /** False: its bytes are stored, and what they show is not known yet. */
    isRead: p.boolean(),
    /** Not all of what it has could be read, or is shown. */
    isPartial: p.boolean(),
    /** The sent email that it is a reply to. */
    answersEmailId: p.uuid().nullable(),
    /** Of the client that handed it over. */
    remoteAddress: p.text().nullable(),
    helo: p.text().nullable(),
    /** Retention took away what it says: it has no ReceivedContent any more. */
    contentRemovedAt: p.datetime().nullable(),
  },
});

export const ReceivedContent = defineEntity({
  name: 'ReceivedContent',
  tableName: 'received_content',
  properties: {
    tenantId: p.uuid().primary(),
    emailId: p.uuid().primary(),
    /** With `cid:` links as they are in the message. */
    html: p.text().nullable(),
    text: p.text().nullable(),
    headers: p.json<Readonly<Record<string, string>>>().nullable(),
    /** The message with our trace fields on top; null when it lies in the blob store. */
    raw: p.blob().nullable(),
    blobKey: p.text().nullable(),
    rawSizeBytes: p.integer(),
    /** Our own trace fields, which stand on top. */
    traceSizeBytes: p.integer(),
  },
});
