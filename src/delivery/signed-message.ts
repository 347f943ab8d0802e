// The bytes of an email as they are sent: signed, and equal at every attempt, since the message, the time and the keys
// of its signatures are. Where they cannot be made, what that means for the delivery.
//
// Keys belong to a domain's row and do not change; a domain that was removed and added again has others. A host that
// may have the message already (its answer was lost) then gets nothing more: it could not tell the second copy.
//
// Mail of others that is sent on (`mayGoUnsigned`) is signed where there are keys, and leaves without where there are none.
import { AssertionError } from 'node:assert/strict';
import { isAscii } from 'node:buffer';
import type { MessagePieces } from '../mail/dkim.ts';
import { mintReturnPathLocal, sharedPosition } from '../mail/return-path.ts';
import type { Signer } from '../domains/lookup.ts';
import type { ClaimedDelivery } from '../queue/claim.ts';
import type { BlobStore } from '../store/blob.ts';
import { SINK_LANE } from '../store/destination.ts';
import { decided, type Decided } from './decided.ts';
import type { MessageBody } from './message-source.ts';
import { openMessage, type StoredBytes } from './stored-bytes.ts';

export interface SigningDependencies {
  readonly blobs: BlobStore;
  readonly signerOf: (tenantId: string, domainId: string) => Promise<Signer | null>;
  readonly signerByName: (tenantId: string, name: string) => Promise<Signer | null>;
  readonly sign: (
    message: Buffer | MessagePieces,
    signer: Signer,
    signedAt: Date,
  ) => Promise<Buffer>;
  readonly returnPath: { readonly key: Buffer; readonly keyId: string; readonly hostname: string };
}

export interface SignedMessage {
  /** Signatures and message; afresh for every transaction. */
  readonly body: () => MessageBody;
  readonly bytes: StoredBytes;
  readonly sizeBytes: number;
  /** The return path of a transaction with these recipients. */
  readonly mailFrom: (deliveries: readonly ClaimedDelivery[]) => string;
  /** Signed with other keys than at first, which makes it another message. */
  readonly hasOtherKeys: boolean;
  /** It has octets above 127, so the host must take 8-bit text (RFC 6152). */
  readonly is8Bit?: boolean;
  /** The sending domain says `tls: enforced`: no byte of the message leaves in plaintext. */
  readonly needsTls: boolean;
}

/** Of one of the deliveries of an email, for all of them. */
export async function signMessageOf(
  d: SigningDependencies,
  delivery: ClaimedDelivery,
): Promise<SignedMessage | Decided> {
  const bytes = await openMessage(d.blobs, delivery);
  if (bytes === null) {
    return decided('failed', {
      cause: 'message_missing',
      reply: 'The message bytes are missing from the blob store.',
    });
  }
  const found = await findSigner(d, delivery);
  const refused = delivery.mayGoUnsigned ? null : refusalOf(found?.signer ?? null, delivery);
  if (refused !== null) return refused;
  const signer = found?.signer ?? null;
  // All that we compose or take from programs is 7-bit.
  const survey = delivery.mayGoUnsigned ? surveyOf(bytes) : null;
  const signatures = await signaturesOf(d, delivery, {
    signer,
    message: bytes.whole ?? survey?.pieces ?? bytes.pieces(),
  });
  await survey?.finish();
  const { whole } = bytes;
  const { key, keyId } = d.returnPath;
  const host = returnPathHost(d, delivery, signer);
  return {
    body: () => (whole === null ? joined(signatures, bytes.pieces()) : [signatures, whole]),
    bytes,
    sizeBytes: signatures.length + bytes.sizeBytes,
    mailFrom(deliveries) {
      if (delivery.envelopeFrom !== null) return delivery.envelopeFrom;
      const [only] = deliveries.length === 1 ? deliveries : [];
      const position = only?.position ?? sharedPosition(delivery.emailId, delivery.lane);
      return `${mintReturnPathLocal({ emailId: delivery.emailId, position, key, keyId })}@${host}`;
    },
    hasOtherKeys: found === null ? delivery.signingDomainId !== null : !found.isBound,
    is8Bit: survey?.is8Bit() === true,
    // The sink is this machine, and has no certificate; a report about TLS has to arrive without (RFC 8460 §3).
    needsTls:
      signer?.tls === 'enforced' && delivery.lane !== SINK_LANE && !delivery.ignoresTlsPolicy,
  };
}

function refusalOf(signer: Signer | null, { fromDomain }: ClaimedDelivery): Decided | null {
  if (signer === null || signer.keys.length === 0) {
    return unverified(
      `The domain of \`from\`, ${fromDomain}, no longer exists, so the message cannot be signed. Add and verify the domain, then send again.`,
    );
  }
  if (signer.canSend) return null;
  return unverified(
    `The domain ${signer.domain} may not send any more: its DNS records are not verified, or sending was switched off. Verify the domain, then send again.`,
  );
}

/** Where bounces come home: at the domain itself only while its records say so. */
function returnPathHost(
  { returnPath }: SigningDependencies,
  { fromDomain, mayGoUnsigned }: ClaimedDelivery,
  signer: Signer | null,
): string {
  const isOwn = signer?.domain === fromDomain && (signer.canSend || !mayGoUnsigned);
  return isOwn ? `${signer.returnPathLabel}.${signer.domain}` : returnPath.hostname;
}

/** Empty where the message may go without. */
async function signaturesOf(
  d: SigningDependencies,
  delivery: ClaimedDelivery,
  about: {
    readonly signer: Signer | null;
    readonly message: Buffer | AsyncGenerator<Buffer>;
  },
): Promise<Buffer> {
  const { signer, message } = about;
  if (signer === null || signer.keys.length === 0) return NONE;
  try {
    return await d.sign(message, signer, delivery.createdAt);
  } catch (error) {
    // A header that others wrote, and that cannot be signed.
    if (delivery.mayGoUnsigned && error instanceof AssertionError) return NONE;
    throw error;
  }
}

const NONE = Buffer.alloc(0);

/** Looks at the octets while they are read for the signatures; `finish` reads what those left. */
function surveyOf(bytes: StoredBytes): {
  readonly pieces: AsyncGenerator<Buffer> | null;
  readonly is8Bit: () => boolean;
  readonly finish: () => Promise<void>;
} {
  const { whole } = bytes;
  if (whole !== null) {
    return { pieces: null, is8Bit: () => has8Bit(whole), finish: () => Promise.resolve() };
  }
  let is8Bit = false;
  let isRead = false;
  const read = async function* (): AsyncGenerator<Buffer> {
    for await (const piece of bytes.pieces()) {
      is8Bit ||= has8Bit(piece);
      yield piece;
    }
    isRead = true;
  };
  return {
    pieces: read(),
    is8Bit: () => is8Bit,
    async finish() {
      if (isRead || is8Bit) return;
      for await (const piece of bytes.pieces()) {
        is8Bit ||= has8Bit(piece);
        if (is8Bit) return;
      }
    },
  };
}

const has8Bit = (bytes: Buffer): boolean => !isAscii(bytes);

/** Who was to sign when the email was accepted; where that domain was removed, the one that has its name now. */
async function findSigner(
  d: SigningDependencies,
  delivery: ClaimedDelivery,
): Promise<{ readonly signer: Signer; readonly isBound: boolean } | null> {
  const { signingTenantId, signingDomainId, tenantId, fromDomain } = delivery;
  const hadOne = signingTenantId !== null && signingDomainId !== null;
  // Others wrote its author, too: a name there is no reason to vouch for it.
  if (!hadOne && delivery.mayGoUnsigned) return null;
  const bound = hadOne ? await d.signerOf(signingTenantId, signingDomainId) : null;
  if (bound !== null) return { signer: bound, isBound: true };
  const named = await d.signerByName(tenantId, fromDomain);
  return named === null ? null : { signer: named, isBound: !hadOne };
}

/** For a delivery whose host may have the message as it was signed before. */
export const notSentAgain = ({ fromDomain }: ClaimedDelivery): Decided =>
  decided('unknown', {
    cause: 'domain_not_verified',
    reply: `The domain of \`from\`, ${fromDomain}, was removed and added again since the message was sent and its answer lost. Signed with other keys it would be another message, so it is not sent again.`,
  });

const unverified = (reply: string): Decided =>
  decided('failed', { cause: 'domain_not_verified', enhanced: '5.7.1', reply });

async function* joined(signatures: Buffer, pieces: AsyncIterable<Buffer>): AsyncGenerator<Buffer> {
  yield signatures;
  yield* pieces;
}
