// What calls are signed with: secrets, sealed at rest, and signatures as Standard Webhooks has them: HMAC-SHA256 over
// `id.timestamp.body`.
import { randomBytes } from 'node:crypto';
import { Webhook } from 'standardwebhooks';
import { seal, unseal } from '../store/seal.ts';

/** Whose secret it is; a sealed one opens for this endpoint only. */
interface Owner {
  readonly tenantId: string;
  readonly webhookId: string;
}

const SECRET_BYTES = 32;
/** After a rotation the old secret signs as well for so long, so that nobody has to change it at the same moment. */
export const OVERLAP_MS = 24 * 3_600_000;

const contextOf = ({ tenantId, webhookId }: Owner): string =>
  `webhook secret ${tenantId} ${webhookId}`;

/** Standard base64, not the kind for URLs: libraries that verify read only that. */
export const newSecret = (): string => `whsec_${randomBytes(SECRET_BYTES).toString('base64')}`;

export const sealSecret = (key: Buffer, owner: Owner, secret: string): Buffer =>
  seal(key, contextOf(owner), Buffer.from(secret));

/** Throws when it was sealed with another key. */
export const unsealSecret = (key: Buffer, owner: Owner, sealed: Uint8Array): string =>
  unseal(key, contextOf(owner), sealed).toString();

/** The headers of a call, in both families; one signature for each secret. `id` as others see it. */
export function signatureHeaders(
  secrets: readonly string[],
  call: { readonly id: string; readonly at: Date; readonly body: string },
): Readonly<Record<string, string>> {
  const timestamp = String(Math.floor(call.at.getTime() / 1_000));
  const signature = secrets
    .map((secret) => new Webhook(secret).sign(call.id, call.at, call.body))
    .join(' ');
  return {
    'webhook-id': call.id,
    'webhook-timestamp': timestamp,
    'webhook-signature': signature,
    'svix-id': call.id,
    'svix-timestamp': timestamp,
    'svix-signature': signature,
  };
}
