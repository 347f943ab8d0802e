// Names of mail hosts and domains: how they are spelt and compared, and which of them can exist (RFC 1035, RFC 1123).
// Pure: nothing is asked here.

import { domainToASCII } from 'node:url';

// RFC 1035 §2.3.4.
const LABEL_CHARS_MAX = 63;
export const NAME_CHARS_MAX = 253;
const CNAMES_MAX = 16;

/** A name as the DNS spells it, as names are compared here. */
export function nameOf(text: string): string {
  return text.toLowerCase().replace(/\.$/, '');
}

/** RFC 5891 §4. Returns '' for what has no ASCII form. */
export function toALabels(domain: string): string {
  const trimmed = domain.replace(/\.$/, '');
  // domainToASCII reads ASCII as a URL's host would be read: it rewrites 0x7f.1 and cuts at a slash.
  if (/^[\0-\x7f]*$/.test(trimmed)) return trimmed.toLowerCase();
  return /^[a-z0-9._\u0080-\u{10ffff}-]*$/iu.test(trimmed) ? domainToASCII(trimmed) : '';
}

/**
 * True for names that a mail host can have: letters, digits, hyphens inside (RFC 1123 §2.1), and underscores,
 * which are wrong and in use. The last label of an address in any notation is numeric, that of a name never is.
 */
export function isHostName(name: string): boolean {
  const labels = name.split('.');
  return (
    name.length <= NAME_CHARS_MAX &&
    labels.every(
      (label) =>
        label.length <= LABEL_CHARS_MAX && /^[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?$/.test(label),
    ) &&
    !/^(\d+|0x[0-9a-f]*)$/.test(labels.at(-1) ?? '')
  );
}

/** What is wrong with a chain of CNAMEs that went through `seen` and now leads to `target`; null: nothing. */
export function cnameFault(seen: readonly string[], target: string): string | null {
  if (!isHostName(target)) return 'lead to an invalid name';
  if (seen.includes(target)) return `form a loop at ${target}`;
  return seen.length > CNAMES_MAX ? `form a chain of more than ${CNAMES_MAX}` : null;
}
