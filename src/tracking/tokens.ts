// What pixels and tracked links are made of. A token names one email of one tenant, and for a link where it leads, under
// an HMAC: nothing is stored for it, and nobody can make one that leads elsewhere. It never expires: mail is kept for
// years, and its links have to work when tracking is off again, the domain is gone or the email is deleted.
import { createHmac, createSecretKey, timingSafeEqual } from 'node:crypto';

/** The email that carried the link. */
export interface TrackedEmail {
  readonly tenantId: string;
  readonly emailId: string;
}

export interface TrackedLink extends TrackedEmail {
  /** As the email had it. */
  readonly link: string;
  /** The same for a `Location` header: ASCII, absolute. */
  readonly location: string;
}

export interface TrackingTokens {
  pixel(of: TrackedEmail): string;
  /** `link`: from `readLink`. About 1.4 characters for each of its bytes, and 64 more. */
  link(of: TrackedEmail, link: string): string;
  /** Null: not one of ours. */
  openPixel(token: string): TrackedEmail | null;
  openLink(token: string): TrackedLink | null;
}

/** Longer ones are left as they are. */
export const LINK_MAX_CHARS = 2_000;

const MAC_BYTES = 16;
const ID_BYTES = 16;
const HEAD_BYTES = MAC_BYTES + 2 * ID_BYTES;
/** Three bytes of UTF-8 for each character. */
const TOKEN_MAX_CHARS = Math.ceil(((HEAD_BYTES + 3 * LINK_MAX_CHARS) * 4) / 3);
const TOKEN = /^[A-Za-z0-9_-]+$/;
/** With a host: what has none is not a link that a browser would follow. */
const HTTP = /^https?:\/\/([^/?#\\]+)/i;
/** User, host and port. No name is longer, and what a URL parser makes of a long label takes the square of its length. */
const AUTHORITY_MAX_CHARS = 255;
const SPACES = ' \t\n\f\r';
// oxlint-disable-next-line no-control-regex
const CONTROL = /[\u0000-\u001f\u007f-\u009f]/;

/** Layout of a token: MAC, tenant, email, and the link as UTF-8. */
export function createTrackingTokens(
  /** `deriveKey(secret, 'tracking links')`. */
  key: Buffer,
): TrackingTokens {
  const secret = createSecretKey(key);
  // The kind is in the MAC, so that a link with nothing behind it is not a pixel.
  const macOf = (kind: 'open' | 'click', payload: Buffer): Buffer =>
    createHmac('sha256', secret).update(kind).update(payload).digest().subarray(0, MAC_BYTES);
  const write = (kind: 'open' | 'click', of: TrackedEmail, link: string): string => {
    const token = Buffer.allocUnsafe(HEAD_BYTES + Buffer.byteLength(link));
    const ids = of.tenantId.replaceAll('-', '') + of.emailId.replaceAll('-', '');
    if (token.write(ids, MAC_BYTES, 'hex') !== 2 * ID_BYTES) throw new Error('not a UUID');
    token.write(link, HEAD_BYTES);
    macOf(kind, token.subarray(MAC_BYTES)).copy(token);
    return token.toString('base64url');
  };
  const read = (kind: 'open' | 'click', token: string): Buffer | null => {
    if (token.length > TOKEN_MAX_CHARS || !TOKEN.test(token)) return null;
    const bytes = Buffer.from(token, 'base64url');
    // Unused bits of the last character may say anything: one token has one spelling.
    if (bytes.length < HEAD_BYTES || bytes.toString('base64url') !== token) return null;
    const payload = bytes.subarray(MAC_BYTES);
    return timingSafeEqual(bytes.subarray(0, MAC_BYTES), macOf(kind, payload)) ? payload : null;
  };
  const emailIn = (payload: Buffer): TrackedEmail => ({
    tenantId: uuidOf(payload.subarray(0, ID_BYTES)),
    emailId: uuidOf(payload.subarray(ID_BYTES, 2 * ID_BYTES)),
  });
  return {
    pixel: (of) => write('open', of, ''),
    link: (of, link) => write('click', of, link),
    openPixel(token) {
      const payload = read('open', token);
      return payload?.length === 2 * ID_BYTES ? emailIn(payload) : null;
    },
    openLink(token) {
      const payload = read('click', token);
      if (payload === null) return null;
      const link = payload.toString('utf8', 2 * ID_BYTES);
      // What we sign has passed this already; whatever may lead a browser astray is asked again where it would happen.
      if (readLink(link) !== link) return null;
      return { ...emailIn(payload), link, location: new URL(link).href };
    },
  };
}

/**
 * Where a browser goes for this `href` (decoded), if that is an absolute http or https URL that can be tracked; null: it is
 * something else, malformed, or longer than LINK_MAX_CHARS.
 */
export function readLink(href: string): string | null {
  if (href.length > 2 * LINK_MAX_CHARS) return null;
  // Browsers leave out white space around a URL, but for other than ASCII's, and tabs and line ends inside it.
  let [start, end] = [0, href.length];
  while (start < end && SPACES.includes(href.charAt(start))) start++;
  while (end > start && SPACES.includes(href.charAt(end - 1))) end--;
  const link = href.slice(start, end).replace(/[\t\n\r]/g, '');
  if (link.length > LINK_MAX_CHARS) return null;
  const authority = HTTP.exec(link)?.[1] ?? '';
  if (authority === '' || authority.length > AUTHORITY_MAX_CHARS) return null;
  if (CONTROL.test(link) || !link.isWellFormed()) return null;
  return URL.canParse(link) ? link : null;
}

const uuidOf = (bytes: Buffer): string =>
  bytes.toString('hex').replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');
