// Whether the world would take a certificate for a host: what a sender under an MTA-STS policy asks (RFC 8461 §4.2). Pure but for
// the authorities that the runtime trusts.
import { X509Certificate } from 'node:crypto';
import { rootCertificates } from 'node:tls';

const CHAIN_MAX = 10;
const BLOCK = /-----BEGIN CERTIFICATE-----[^-]+-----END CERTIFICATE-----/g;

let roots: readonly X509Certificate[] | null = null;
const publicRoots = (): readonly X509Certificate[] =>
  (roots ??= rootCertificates.map((pem) => new X509Certificate(pem)));

const parse = (pem: string): readonly X509Certificate[] =>
  (pem.match(BLOCK) ?? []).map((block) => new X509Certificate(block));

/** What is wrong with the chain, as the end of a sentence; null: nothing. `authorities`: PEM, trusted beside the public ones. */
export function chainFault(
  chain: string,
  about: { readonly host: string; readonly at: Date; readonly authorities: readonly string[] },
): string | null {
  const [own, ...others] = parse(chain).slice(0, CHAIN_MAX);
  if (own === undefined) return 'is missing';
  if (own.checkHost(about.host, { subject: 'never' }) === undefined) {
    return `is not for ${about.host}`;
  }
  const at = about.at.getTime();
  if (Date.parse(own.validTo) <= at) return `ended at ${new Date(own.validTo).toISOString()}`;
  if (Date.parse(own.validFrom) > at) return 'is not valid yet';
  const trusted = [...publicRoots(), ...about.authorities.flatMap(parse)];
  let current = own;
  for (let steps = 0; steps < CHAIN_MAX; steps += 1) {
    if (trusted.some((root) => isIssuedBy(current, root))) return null;
    const next = others.find((one) => one !== current && isIssuedBy(current, one));
    if (next === undefined) break;
    current = next;
  }
  return 'is vouched for by nobody that senders know';
}

const isIssuedBy = (certificate: X509Certificate, issuer: X509Certificate): boolean =>
  certificate.checkIssued(issuer) && certificate.verify(issuer.publicKey);
