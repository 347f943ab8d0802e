// Names of domains as tenants give them, and the labels below them. Pure.
import { domainToUnicode } from 'node:url';
import { isIP } from 'node:net';
import type { Issue } from '../access/refusal.ts';
import { isHostName } from '../dns/host-name.ts';
import { parseDomain } from '../mail/address.ts';

/** RFC 1035 §2.3.4, without the dots at the ends. */
const NAME_MAX_OCTETS = 253;
const LABEL_MAX_OCTETS = 63;
/** The longest label path that we put in front of a name, with its dot. */
const LONGEST_PREFIX = 'mailstead-ed25519._domainkey.';

export type CheckedName =
  { readonly ok: true; readonly name: string } | { readonly ok: false; readonly issue: Issue };

/** A domain in A-labels and lower case; U-labels are taken, too (RFC 5890 §2.3.2). */
export function checkDomainName(given: string): CheckedName {
  const text = given.trim();
  const bad = (what: string): CheckedName => {
    return { ok: false, issue: { path: 'name', message: `\`name\` ${what}.` } };
  };
  if (text === '') return bad('must be a domain name such as example.com');
  if (isIP(text) !== 0 || text.startsWith('[')) {
    return bad('must be a domain name, not an IP address');
  }
  if (text.includes('@')) return bad('must be a domain name, not an address: leave out the @');
  if (text.endsWith('.')) return bad('must not end with a dot');
  if (!text.includes('.')) {
    return bad('must be a full domain name with a dot, such as example.com');
  }
  const parsed = parseDomain(text);
  if (!parsed.ok) {
    return bad(
      'is not a domain name: labels have 1 to 63 letters, digits and hyphens, with no hyphen at either end',
    );
  }
  // A URL with such a host is one with an IP address, or none (WHATWG URL §3.5, "ends in a number").
  if (!isHostName(parsed.domain)) return bad('must not end with a number, as an IP address does');
  if (LONGEST_PREFIX.length + parsed.domain.length > NAME_MAX_OCTETS) {
    const most = NAME_MAX_OCTETS - LONGEST_PREFIX.length;
    return bad(`must have at most ${most} octets, so that the names of its DNS records still fit`);
  }
  return { ok: true, name: parsed.domain };
}

/** One DNS label that a host name can have (RFC 1123 §2.1), in lower case; null: it is none. */
export function toLabel(given: string): string | null {
  const label = given.toLowerCase();
  const fits = label.length <= LABEL_MAX_OCTETS && /^[a-z0-9]([a-z0-9-]*[a-z0-9])?$/.test(label);
  // RFC 5890 §2.3.1: a label with -- there is an A-label or nothing.
  const isReserved = label.slice(2, 4) === '--';
  return fits && (!isReserved || domainToUnicode(label) !== '') ? label : null;
}

/** What a label and the name after it come to. */
export const fitsBelow = (label: string, name: string): boolean =>
  label.length + 1 + name.length <= NAME_MAX_OCTETS;

/** Names that the public DNS never holds, or only as examples (RFC 2606 §2 and §3, RFC 6761 §6). */
export function isReservedName(name: string): boolean {
  return /(^|\.)(test|example|localhost|example\.(com|net|org))$/.test(name);
}
