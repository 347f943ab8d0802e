// Secrets at rest: AES-256-GCM under a key derived from the master secret (MAILSTEAD_SECRET).
// Layout of a sealed value: version (1 byte, 1), nonce (12), tag (16), ciphertext. The context string
// is authenticated too, so a sealed value cannot be moved to another row.
import { createCipheriv, createDecipheriv, hkdfSync, randomBytes } from 'node:crypto';

const VERSION = 1;
const NONCE_BYTES = 12;
const TAG_BYTES = 16;

/** A 32-byte key for one purpose; the same secret and purpose always give the same key. */
export function deriveKey(secret: string, purpose: string): Buffer {
  return Buffer.from(hkdfSync('sha256', secret, 'mailstead', purpose, 32));
}

/** Encrypts and authenticates `plain`; `context` names the row it belongs to. */
export function seal(key: Buffer, context: string, plain: Uint8Array): Buffer {
  const nonce = randomBytes(NONCE_BYTES);
  const cipher = createCipheriv('aes-256-gcm', key, nonce).setAAD(Buffer.from(context));
  const body = Buffer.concat([cipher.update(plain), cipher.final()]);
  return Buffer.concat([Buffer.from([VERSION]), nonce, cipher.getAuthTag(), body]);
}

/** Undoes `seal`. Throws when the key or the context is another one, or a byte was changed. */
export function unseal(key: Buffer, context: string, sealed: Uint8Array): Buffer {
  const bytes = Buffer.from(sealed);
  if (bytes[0] !== VERSION) throw new Error('sealed value of an unknown version');
  const nonce = bytes.subarray(1, 1 + NONCE_BYTES);
  const tag = bytes.subarray(1 + NONCE_BYTES, 1 + NONCE_BYTES + TAG_BYTES);
  const decipher = createDecipheriv('aes-256-gcm', key, nonce)
    .setAAD(Buffer.from(context))
    .setAuthTag(tag);
  return Buffer.concat([
    decipher.update(bytes.subarray(1 + NONCE_BYTES + TAG_BYTES)),
    decipher.final(),
  ]);
}
