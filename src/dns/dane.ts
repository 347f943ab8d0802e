// DANE for SMTP (RFC 7672): what a mail host's TLSA records ask of its certificate, and whether a chain has it.
//
// In: answers of a validating resolver (dnssec.ts), certificates as they were presented. Out: values. MX, address and
// TLSA answers must all be proven; TLSA is asked for only where the addresses are, since some servers fail on it. Of the
// usages only DANE-TA(2) and DANE-EE(3) count. What it does not do: path length and name constraints of intermediate
// certificates below a DANE-TA anchor are not read.

import { createHash, createPublicKey, X509Certificate, type KeyObject } from 'node:crypto';
import type { SecureAnswer, SecureResolver, TlsaRecord } from './dnssec.ts';

/** The mail hosts of a domain, as DNSSEC knows them. */
export type SecureHosts =
  /** The domain has no DANE: its MX records are not signed. */
  | { readonly kind: 'insecure' }
  | {
      readonly kind: 'secure';
      /** Nobody else may have the mail, whatever another resolver says. */
      readonly hosts: ReadonlySet<string>;
      /** The domain, and where CNAMEs lead from it: names that a certificate below a DANE-TA anchor may have. */
      readonly names: readonly string[];
    }
  | { readonly kind: 'failed'; readonly reason: string };

export type HostDane =
  /** Proven that there are no records, or nothing is proven about the host. */
  | { readonly kind: 'none' }
  /** There are records, none of which can be used: TLS all the same, whosever certificate (RFC 7672 §2.2). */
  | { readonly kind: 'unusable'; readonly base: string; readonly records: readonly TlsaRecord[] }
  | { readonly kind: 'usable'; readonly base: string; readonly records: readonly TlsaRecord[] }
  | { readonly kind: 'failed'; readonly reason: string };

const TA = 2;
const EE = 3;
const WHOLE = 0;
const DIGESTS = [
  { matching: 2, name: 'sha512', bytes: 64 },
  { matching: 1, name: 'sha256', bytes: 32 },
] as const;
const CHAIN_MAX = 10;
/** Of extended key usage (RFC 5280 §4.2.1.12). */
const SERVER_AUTH = '1.3.6.1.5.5.7.3.1';
const ANY_USE = '2.5.29.37.0';

/** Asks which hosts take mail for the domain (A-labels), with proof. */
export async function findSecureHosts(
  resolver: SecureResolver,
  domain: string,
): Promise<SecureHosts> {
  const mx = await resolver.mx(domain);
  if (mx.kind === 'failed') {
    return {
      kind: 'failed',
      reason: `the MX records of ${domain} cannot be validated: ${mx.cause}`,
    };
  }
  if (!mx.secure) return { kind: 'insecure' };
  const names = [domain, ...mx.cnames];
  // RFC 5321 §5.1: without an MX the domain itself is the host, or what its CNAMEs lead to.
  return { kind: 'secure', hosts: new Set(mx.kind === 'found' ? mx.records : names), names };
}

/** Asks what the TLSA records of a mail host say; the host is one of a domain whose MX records are secure. */
export async function findDane(resolver: SecureResolver, host: string): Promise<HostDane> {
  const answers = await Promise.all([resolver.a(host), resolver.aaaa(host)]);
  const known = answers.filter((answer) => answer.kind !== 'failed');
  if (known.length === 0) return failed(`the addresses of ${host}`, answers[0]);
  const cnames = known.flatMap((answer) => answer.cnames).slice(0, CHAIN_MAX);
  const end = cnames.at(-1);
  const bases: string[] = [];
  if (known.every(({ secure }) => secure)) {
    // RFC 7672 §2.1.3: the end of the chain is asked first, then the name in the MX.
    bases.push(...(end === undefined ? [] : [end]), host);
  } else if (end !== undefined) {
    // The alias may be signed where what it leads to is not.
    const alias = await resolver.cname(host);
    if (alias.kind === 'failed') return failed(`the CNAME record of ${host}`, alias);
    if (alias.kind === 'found' && alias.secure) bases.push(host);
  }
  for (const base of bases) {
    const tlsa = await resolver.tlsa(`_25._tcp.${base}`);
    if (tlsa.kind === 'failed') return failed(`the TLSA records of ${base}`, tlsa);
    if (tlsa.kind === 'absent' || !tlsa.secure) continue;
    const records = usable(tlsa.records);
    return records.length > 0
      ? { kind: 'usable', base, records }
      : { kind: 'unusable', base, records: tlsa.records };
  }
  return { kind: 'none' };
}

const failed = (what: string, answer: SecureAnswer<unknown>): HostDane => ({
  kind: 'failed',
  reason: `${what} cannot be validated: ${answer.kind === 'failed' ? answer.cause : 'no answer'}`,
});

/** RFC 7672 §3.1: the usages of SMTP, well formed; of each kind the strongest digest only (RFC 7671 §9). */
function usable(records: readonly TlsaRecord[]): readonly TlsaRecord[] {
  const sound = records.filter(isSound);
  return sound.filter(
    (one) =>
      one.matching !== 1 ||
      !sound.some(
        ({ usage, selector, matching }) =>
          usage === one.usage && selector === one.selector && matching === 2,
      ),
  );
}

function isSound({ usage, selector, matching, data }: TlsaRecord): boolean {
  if ((usage !== TA && usage !== EE) || selector > 1) return false;
  if (matching !== WHOLE) {
    return DIGESTS.some((one) => one.matching === matching && one.bytes === data.length);
  }
  return selector === 0 ? readCertificate(data) !== null : readKey(data) !== null;
}

/** As a zone file has it, for reports. */
export const tlsaText = ({ usage, selector, matching, data }: TlsaRecord): string =>
  `${usage} ${selector} ${matching} ${data.toString('hex')}`;

export interface Mismatch {
  readonly failure:
    | 'certificate-host-mismatch'
    | 'certificate-expired'
    | 'certificate-not-trusted'
    | 'validation-failure';
  /** Ends a sentence that named the host. */
  readonly reason: string;
}

/** Null: the chain (DER, the server's own certificate first) is what one of the records asks for. */
export function daneMismatch(
  records: readonly TlsaRecord[],
  peer: {
    readonly chain: readonly Buffer[];
    /** Any of them may be the name in the certificate; only below an anchor. */
    readonly names: readonly string[];
    readonly now: Date;
  },
): Mismatch | null {
  const [leaf, ...others] = peer.chain.slice(0, CHAIN_MAX).map(readCertificate);
  const none: Mismatch = {
    failure: 'validation-failure',
    reason: 'its certificate is none that its TLSA records name',
  };
  if (leaf === undefined || leaf === null) return none;
  // RFC 7672 §3.1.1: neither name nor dates count here.
  if (records.some((record) => record.usage === EE && matches(record, leaf))) return null;
  const anchors = records.filter(({ usage }) => usage === TA);
  if (anchors.length === 0) return none;
  const path = findPath(leaf, { others: others.filter((one) => one !== null), anchors });
  if (path === null) {
    return {
      failure: 'certificate-not-trusted',
      reason: 'no trust anchor in its TLSA records vouches for its certificate',
    };
  }
  if (path.some((one) => !isTimely(one, peer.now))) {
    return { failure: 'certificate-expired', reason: 'its certificate is out of date' };
  }
  // Node calls the extended key usage `keyUsage`.
  const uses = leaf.keyUsage as readonly string[] | undefined;
  if (uses !== undefined && !uses.includes(SERVER_AUTH) && !uses.includes(ANY_USE)) {
    return { failure: 'certificate-not-trusted', reason: 'its certificate is not for servers' };
  }
  return peer.names.some((name) => isFor(leaf, name, 'default'))
    ? null
    : {
        failure: 'certificate-host-mismatch',
        reason: `its certificate is for other names (${shown(leaf)})`,
      };
}

/** Whether a certificate is for this host: a wildcard is one whole label (RFC 6125 §6.4.3). */
export function isFor(certificate: X509Certificate, name: string, subject: 'default' | 'never') {
  return (
    certificate.checkHost(name, {
      subject,
      wildcards: true,
      partialWildcards: false,
      multiLabelWildcards: false,
      singleLabelSubdomains: false,
    }) !== undefined
  );
}

const NAMES_SHOWN_CHARS_MAX = 200;

/** Its names, for people. */
export const shown = (certificate: X509Certificate): string =>
  (certificate.subjectAltName ?? certificate.subject ?? 'none')
    .replaceAll('DNS:', '')
    .replaceAll(/\s+/g, ' ')
    .slice(0, NAMES_SHOWN_CHARS_MAX);

export const isTimely = (certificate: X509Certificate, now: Date): boolean =>
  Date.parse(certificate.validFrom) <= now.getTime() &&
  now.getTime() <= Date.parse(certificate.validTo);

/** From the server's certificate to an anchor, each signed by the next; the anchor is left out where only its key is known. */
function findPath(
  leaf: X509Certificate,
  from: { readonly others: readonly X509Certificate[]; readonly anchors: readonly TlsaRecord[] },
): readonly X509Certificate[] | null {
  const path = [leaf];
  while (path.length <= CHAIN_MAX) {
    const last = path.at(-1)!;
    const issuer = from.others.find((one) => !path.includes(one) && isIssuedBy(last, one));
    if (issuer !== undefined) {
      path.push(issuer);
      if (from.anchors.some((record) => matches(record, issuer))) return path;
      continue;
    }
    // RFC 7671 §5.2.3: a record with the whole anchor serves where the server leaves it out.
    for (const { selector, matching, data } of from.anchors) {
      if (matching !== WHOLE) continue;
      const anchor = selector === 0 ? readCertificate(data) : null;
      if (anchor !== null && isIssuedBy(last, anchor)) return [...path, anchor];
      const key = selector === 1 ? readKey(data) : null;
      if (key !== null && isSignedWith(last, key)) return path;
    }
    return null;
  }
  return null;
}

function isIssuedBy(certificate: X509Certificate, issuer: X509Certificate): boolean {
  const key = keyOf(issuer);
  return (
    key !== null && issuer.ca && certificate.checkIssued(issuer) && isSignedWith(certificate, key)
  );
}

/** Null: of a kind that the runtime does not know. */
function keyOf(certificate: X509Certificate): KeyObject | null {
  try {
    return certificate.publicKey;
  } catch {
    return null;
  }
}

function isSignedWith(certificate: X509Certificate, key: KeyObject): boolean {
  try {
    return certificate.verify(key);
  } catch {
    return false; // a key of another kind
  }
}

function matches({ selector, matching, data }: TlsaRecord, certificate: X509Certificate): boolean {
  const subject =
    selector === 0 ? certificate.raw : keyOf(certificate)?.export({ type: 'spki', format: 'der' });
  if (subject === undefined) return false;
  const digest = DIGESTS.find((one) => one.matching === matching);
  const expected =
    digest === undefined ? subject : createHash(digest.name).update(subject).digest();
  return expected.equals(data);
}

export function readCertificate(der: Buffer): X509Certificate | null {
  try {
    return new X509Certificate(der);
  } catch {
    return null;
  }
}

function readKey(der: Buffer): KeyObject | null {
  try {
    return createPublicKey({ key: der, format: 'der', type: 'spki' });
  } catch {
    return null;
  }
}
