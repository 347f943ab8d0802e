// The bytes of an email as they are sent: signed, and equal at every attempt, since the message, the time and the keys
// of its signatures are. Where they cannot be made, what that means for the delivery.
//
// Keys belong to a domain's row and do not change; a domain that was removed and added again has others. A host that
// may have the message already (its answer was lost) then gets nothing more: it could not tell the second copy.
import type { MessagePieces } from '../mail/dkim.ts';
import { mintReturnPathLocal, WHOLE_EMAIL } from '../mail/return-path.ts';
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
  if (found === null || found.signer.keys.length === 0) {
    return unverified(
      `The domain of \`from\`, ${delivery.fromDomain}, no longer exists, so the message cannot be signed. Add and verify the domain, then send again.`,
    );
  }
  const { signer } = found;
  if (!signer.canSend) {
    return unverified(
      `The domain ${signer.domain} may not send any more: its DNS records are not verified, or sending was switched off. Verify the domain, then send again.`,
    );
  }
  const signatures = await d.sign(bytes.whole ?? bytes.pieces(), signer, delivery.createdAt);
  const host =
    signer.domain === delivery.fromDomain
      ? `${signer.returnPathLabel}.${signer.domain}`
      : d.returnPath.hostname;
  const { whole } = bytes;
  const { key, keyId } = d.returnPath;
  return {
    body: () => (whole === null ? joined(signatures, bytes.pieces()) : [signatures, whole]),
    bytes,
    sizeBytes: signatures.length + bytes.sizeBytes,
    mailFrom(deliveries) {
      const [only] = deliveries.length === 1 ? deliveries : [];
      const position = only?.position ?? WHOLE_EMAIL;
      return `${mintReturnPathLocal({ emailId: delivery.emailId, position, key, keyId })}@${host}`;
    },
    hasOtherKeys: !found.isBound,
    // The sink is this machine, and has no certificate; a report about TLS has to arrive without (RFC 8460 §3).
    needsTls:
      signer.tls === 'enforced' && delivery.lane !== SINK_LANE && !delivery.ignoresTlsPolicy,
  };
}

/** Who was to sign when the email was accepted; where that domain was removed, the one that has its name now. */
async function findSigner(
  d: SigningDependencies,
  delivery: ClaimedDelivery,
): Promise<{ readonly signer: Signer; readonly isBound: boolean } | null> {
  const { signingTenantId, signingDomainId, tenantId, fromDomain } = delivery;
  const hadOne = signingTenantId !== null && signingDomainId !== null;
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
