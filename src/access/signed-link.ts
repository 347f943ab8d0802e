// Links that work without an API key for a while: downloads of attachments and of raw messages, shared
// emails. A link names what it opens and until when, under an HMAC, so nothing is stored and nobody
// can make one or stretch one.
import { createHmac, timingSafeEqual } from 'node:crypto';

export const linkKinds = ['attachment', 'email', 'received_raw', 'received_attachment'] as const;
export type LinkKind = (typeof linkKinds)[number];

/** What a link opens. */
export interface LinkTarget {
  readonly kind: LinkKind;
  readonly tenantId: string;
  /** The email, or the received email. */
  readonly id: string;
  /** The attachment; null where the whole is meant. */
  readonly partId: string | null;
}

export interface SignedLink {
  /** Absolute. */
  readonly url: string;
  readonly expiresAt: Date;
}

export interface SignedLinks {
  sign(target: LinkTarget, lifetimeMs: number): SignedLink;
  /** What the token opens, or null when it is forged or over. */
  open(token: string): LinkTarget | null;
}

/** Where links lead: `/links/{token}`. */
export const LINK_PATH = '/links/';
/** Where links to a contact's choices lead, which never expire (audience/preference-links.ts). */
export const PREFERENCE_PATH = '/unsubscribe/';
const TOKEN = /^[A-Za-z0-9_-]{1,400}\.[A-Za-z0-9_-]{43}$/;

export function createSignedLinks(d: {
  readonly key: Buffer;
  readonly publicUrl: string;
  readonly now: () => Date;
}): SignedLinks {
  const base = d.publicUrl.replace(/\/+$/, '');
  const macOf = (payload: string): Buffer =>
    createHmac('sha256', d.key).update(`link ${payload}`).digest();
  return {
    sign(target, lifetimeMs) {
      // Whole seconds, rounded up: what is told is what holds.
      const expires = Math.ceil((d.now().getTime() + lifetimeMs) / 1_000);
      const fields = [target.kind, target.tenantId, target.id, target.partId ?? '', expires];
      const payload = Buffer.from(fields.join(' ')).toString('base64url');
      return {
        url: `${base}${LINK_PATH}${payload}.${macOf(payload).toString('base64url')}`,
        expiresAt: new Date(expires * 1_000),
      };
    },
    open(token) {
      if (!TOKEN.test(token)) return null;
      const [payload, mac] = token.split('.') as [string, string];
      // As text: unused bits of the last character may say anything, and one token has one spelling.
      const right = Buffer.from(macOf(payload).toString('base64url'));
      if (!timingSafeEqual(Buffer.from(mac), right)) return null;
      const fields = Buffer.from(payload, 'base64url').toString().split(' ');
      const [kind, tenantId, id, partId, expires] = fields as [LinkKind, ...string[]];
      if (!linkKinds.includes(kind) || Number(expires) * 1_000 <= d.now().getTime()) return null;
      return { kind, tenantId: tenantId!, id: id!, partId: partId === '' ? null : partId! };
    },
  };
}
