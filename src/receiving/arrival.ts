// What the listener and the rest of this room say to each other: whose a recipient is, and a message that is complete.
import type { Authentication, RouteDecision } from '../store/received-email.ts';
import type { InboundDmarc } from '../store/sending-domain.ts';

/** An envelope recipient that somebody here takes mail for. */
export interface Receiver {
  readonly tenantId: string;
  readonly domainId: string;
  /** As the client wrote it. */
  readonly recipient: string;
  readonly decision: RouteDecision;
  /** What the domain wants done with mail that its author's DMARC policy says to reject. */
  readonly inboundDmarc: InboundDmarc;
}

/** What becomes of an envelope recipient. */
export type Resolution =
  | { readonly kind: 'taken'; readonly receiver: Receiver }
  /** The domain has routes, and none of them is for this address: its `decision` says `unrouteable`. */
  | { readonly kind: 'unrouteable'; readonly receiver: Receiver }
  /** No verified receiving domain of ours. `isAwaited`: its owner wants it to be one, and it is looked at again by itself. */
  | { readonly kind: 'not_ours'; readonly isAwaited: boolean };

/** Who handed the message over. */
export interface ArrivalClient {
  readonly address: string;
  /** As it named itself. */
  readonly helo: string;
  readonly isTls: boolean;
}

/** A complete message, and for whom it is. */
export interface Arrival {
  /** Empty for the null sender. */
  readonly mailFrom: string;
  /** At least one. */
  readonly receivers: readonly Receiver[];
  /** Refused at RCPT in the same transaction: recorded with the copy of their tenant, if it gets one. */
  readonly unrouteable: readonly Receiver[];
  /** Our trace fields, and below them what came. */
  readonly raw: Buffer;
  /** Of our trace fields: from there on it is what came. */
  readonly traceSizeBytes: number;
  readonly receivedAt: Date;
  readonly client: ArrivalClient;
  /** Null: it was not checked. */
  readonly authentication: Authentication | null;
}
