// Links to a contact's own choices: in the footer of broadcasts and in List-Unsubscribe (RFC 2369, RFC 8058). A link names
// one contact of one tenant and the email that carried it, under an HMAC, so nothing is stored for it. It never
// expires: mail is kept for years, and whoever kept it may still unsubscribe.
import { createHmac, timingSafeEqual } from 'node:crypto';
import { PREFERENCE_PATH } from '../access/signed-link.ts';

export { PREFERENCE_PATH } from '../access/signed-link.ts';

/** Whose choices, and where the link stood. */
export interface PreferenceTarget {
  readonly tenantId: string;
  readonly contactId: string;
  /** Of the email; null where it has none. */
  readonly topicId: string | null;
  readonly broadcastId: string | null;
  /** Null where the link was made for no email. */
  readonly emailId: string | null;
}

export interface PreferenceLinks {
  /** Absolute; the path is at most 150 characters. All ids are UUIDs. */
  url(target: PreferenceTarget): string;
  /** What the token names, or null when we did not make it. */
  open(token: string): PreferenceTarget | null;
}

const VERSION = 1;
/** Bits of the first byte; the version is above them. */
const FLAGS: readonly (readonly [name: 'topicId' | 'broadcastId' | 'emailId', bit: number])[] = [
  ['topicId', 1],
  ['broadcastId', 2],
  ['emailId', 4],
];
const ID_BYTES = 16;
const MAC_BYTES = 16;
const TOKEN = /^[A-Za-z0-9_-]{60,140}$/;

/** Layout of a token: version and flags (1 byte), tenant, contact, those of topic, broadcast and email that it has, MAC. */
export function createPreferenceLinks(d: {
  /** `deriveKey(secret, 'preference links')`. */
  readonly key: Buffer;
  readonly publicUrl: string;
}): PreferenceLinks {
  const base = d.publicUrl.replace(/\/+$/, '');
  const macOf = (payload: Buffer): Buffer =>
    createHmac('sha256', d.key)
      .update('preferences ')
      .update(payload)
      .digest()
      .subarray(0, MAC_BYTES);
  return {
    url(target) {
      let flags = VERSION << 3;
      const ids = [bytesOf(target.tenantId), bytesOf(target.contactId)];
      for (const [name, bit] of FLAGS) {
        const id = target[name];
        if (id === null) continue;
        flags |= bit;
        ids.push(bytesOf(id));
      }
      const payload = Buffer.concat([Buffer.from([flags]), ...ids]);
      const token = Buffer.concat([payload, macOf(payload)]).toString('base64url');
      return `${base}${PREFERENCE_PATH}${token}`;
    },

    open(token) {
      if (!TOKEN.test(token)) return null;
      const bytes = Buffer.from(token, 'base64url');
      // Unused bits of the last character may say anything: one token has one spelling.
      if (bytes.toString('base64url') !== token) return null;
      const payload = bytes.subarray(0, -MAC_BYTES);
      if (!timingSafeEqual(bytes.subarray(-MAC_BYTES), macOf(payload))) return null;
      const flags = payload[0]!;
      const named = FLAGS.filter(([, bit]) => (flags & bit) !== 0);
      if (flags >> 3 !== VERSION || payload.length !== 1 + ID_BYTES * (2 + named.length))
        return null;
      const idAt = (index: number): string => idOf(payload.subarray(1 + index * ID_BYTES));
      const target = { topicId: null, broadcastId: null, emailId: null };
      const found = named.map(([name], index) => [name, idAt(2 + index)] as const);
      return {
        tenantId: idAt(0),
        contactId: idAt(1),
        ...target,
        ...Object.fromEntries(found),
      };
    },
  };
}

const bytesOf = (id: string): Buffer => {
  const bytes = Buffer.from(id.replaceAll('-', ''), 'hex');
  if (bytes.length !== ID_BYTES) throw new Error(`not a UUID: ${id}`);
  return bytes;
};

const idOf = (bytes: Buffer): string =>
  bytes.toString('hex', 0, ID_BYTES).replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');
