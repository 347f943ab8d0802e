// What a recipient's domain asks of the encryption to its mail hosts, and whether a connection has it.
//
// In: a domain, its hosts, later the facts of a TLS session. Out: for each host a demand, or why nothing may be sent to it.
// DANE wins over MTA-STS, and what DANE refuses MTA-STS does not rescue (RFC 8461 §2); a policy in mode `testing` only
// watches. What must not be ignored when it cannot be looked up (DNSSEC that does not validate, our own cache) refuses
// the host for now. Beside the demand stands what is to be reported (RFC 8460), whether it was demanded or not.

import {
  daneMismatch,
  findDane,
  findSecureHosts,
  isFor,
  readCertificate,
  shown,
  tlsaText,
  type HostDane,
  type SecureHosts,
} from './dane.ts';
import type { SecureResolver, TlsaRecord } from './dnssec.ts';
import { isHostOf, type StsAnswer, type StsPolicies, type StsPolicy } from './mta-sts.ts';

/** What a connection must have before mail goes over it. */
export type Demand =
  /** No TLS: the built-in sink. */
  | { readonly kind: 'none' }
  /** TLS where it is offered and works, whosever certificate; else plaintext. */
  | { readonly kind: 'opportunistic' }
  /** TLS, whosever certificate. */
  | { readonly kind: 'required' }
  /** A certificate that the authorities of the runtime vouch for, for the name of the host. */
  | { readonly kind: 'sts' }
  | {
      readonly kind: 'dane';
      readonly records: readonly TlsaRecord[];
      /** What the certificate may be for; first the base domain of the records. */
      readonly names: readonly string[];
    }
  /** A valid certificate for the name or address of the smarthost: the engine has seen to it. */
  | { readonly kind: 'smarthost' };

/** One end of a TLS session, as it showed itself. */
export interface PeerFacts {
  /** `TLSv1.3` */
  readonly protocol: string;
  readonly cipher: string;
  /** DER, its own certificate first. */
  readonly chain: readonly Buffer[];
  /** What is wrong with the chain for the authorities of the runtime, as OpenSSL calls it; null: nothing. */
  readonly chainError: string | null;
}

/** RFC 8460 §4.3, as far as a session or a lookup can say it. */
export type TlsFault =
  | 'starttls-not-supported'
  | 'certificate-host-mismatch'
  | 'certificate-expired'
  | 'certificate-not-trusted'
  | 'validation-failure'
  | 'tlsa-invalid'
  | 'dnssec-invalid'
  | 'sts-policy-fetch-error'
  | 'sts-policy-invalid'
  | 'sts-webpki-invalid';

export interface Fault {
  readonly failure: TlsFault;
  /** Ends a sentence that named the host. */
  readonly reason: string;
}

/** What was in force, RFC 8460 §4.2. */
export interface AppliedPolicy {
  readonly type: 'sts' | 'tlsa' | 'no-policy-found';
  /** The lines of the STS policy, or the TLSA records as text. */
  readonly strings: readonly string[];
  /** The `mx` patterns of an STS policy; for TLSA the host whose records they are. */
  readonly mxHosts: readonly string[];
}

/** A policy whose outcome is reported to its domain. */
export interface Watched {
  /** Whom the report is about: the recipient's domain; for TLSA the base domain of the host. */
  readonly domain: string;
  readonly policy: AppliedPolicy;
  /** What a session must have to count as a success. */
  readonly demand: Demand;
  /** Decided before any session. */
  readonly fault: Fault | null;
}

export interface Refusal extends Fault {
  readonly cause: 'tls_policy_failed' | 'tls_policy_unknown';
}

export interface HostPolicy {
  readonly demand: Demand;
  /** Nothing may be sent to this host now. */
  readonly refusal: Refusal | null;
  readonly watched: readonly Watched[];
}

export interface TlsPolicies {
  /** By host, for every one that was given. Never rejects. `domain`: the recipient's, in A-labels. */
  of(domain: string, hosts: readonly string[]): Promise<ReadonlyMap<string, HostPolicy>>;
}

const OPPORTUNISTIC: Demand = { kind: 'opportunistic' };
const REQUIRED: Demand = { kind: 'required' };
const STS: Demand = { kind: 'sts' };

export function createTlsPolicies(d: {
  readonly sts: StsPolicies;
  /** Null: no DANE. Asked each time, since the operator may change it. */
  readonly resolver: () => SecureResolver | null;
}): TlsPolicies {
  return {
    async of(domain, hosts) {
      const resolver = d.resolver();
      const [sts, secure] = await Promise.all([
        d.sts.find(domain),
        resolver === null ? { kind: 'insecure' as const } : findSecureHosts(resolver, domain),
      ]);
      const names = [...new Set(hosts)];
      const policies = await Promise.all(
        names.map(async (host) => {
          const dane = await daneOf(resolver, { secure, domain, host });
          return [host, join({ domain, host, sts, dane })] as const;
        }),
      );
      return new Map(policies);
    },
  };
}

type Dane =
  | (Exclude<HostDane, { kind: 'usable' | 'failed' }> & { readonly names?: never })
  | (Extract<HostDane, { kind: 'usable' }> & { readonly names: readonly string[] })
  | { readonly kind: 'refused'; readonly refusal: Refusal };

async function daneOf(
  resolver: SecureResolver | null,
  about: { readonly secure: SecureHosts; readonly domain: string; readonly host: string },
): Promise<Dane> {
  const { secure, domain, host } = about;
  const refused = (cause: Refusal['cause'], reason: string): Dane => ({
    kind: 'refused',
    refusal: { cause, failure: 'dnssec-invalid', reason },
  });
  if (secure.kind === 'failed') return refused('tls_policy_unknown', secure.reason);
  if (resolver === null || secure.kind === 'insecure') return { kind: 'none' };
  if (!secure.hosts.has(host)) {
    const reason = `DNSSEC does not prove that it takes mail for ${domain}`;
    return refused('tls_policy_failed', reason);
  }
  const found = await findDane(resolver, host);
  if (found.kind === 'failed') return refused('tls_policy_unknown', found.reason);
  if (found.kind !== 'usable') return found;
  // RFC 7672 §3.2.2
  return { ...found, names: [found.base, ...secure.names] };
}

function join(about: {
  readonly domain: string;
  readonly host: string;
  readonly sts: StsAnswer;
  readonly dane: Dane;
}): HostPolicy {
  const { domain, host, sts, dane } = about;
  const watched = watchedOf(about);
  const policy = (demand: Demand, refusal: Refusal | null = null): HostPolicy => ({
    demand,
    refusal,
    watched,
  });
  if (dane.kind === 'refused') return policy(REQUIRED, dane.refusal);
  if (dane.kind === 'usable') {
    return policy({ kind: 'dane', records: dane.records, names: dane.names });
  }
  const otherwise = dane.kind === 'unusable' ? REQUIRED : OPPORTUNISTIC;
  if (sts.kind === 'unknown') {
    const { reason } = sts;
    const failure = 'sts-policy-fetch-error';
    return policy(REQUIRED, { cause: 'tls_policy_unknown', failure, reason });
  }
  if (sts.policy?.mode !== 'enforce') return policy(otherwise);
  const fault = strangerFault(sts.policy, { domain, host });
  return policy(STS, fault === null ? null : { ...fault, cause: 'tls_policy_failed' });
}

const strangerFault = (
  policy: StsPolicy,
  { domain, host }: { readonly domain: string; readonly host: string },
): Fault | null =>
  isHostOf(policy, host)
    ? null
    : {
        failure: 'validation-failure',
        reason: `it is not among the hosts that the MTA-STS policy of ${domain} names`,
      };

const LINES_MAX = 100;

function watchedOf(about: Parameters<typeof join>[0]): readonly Watched[] {
  const { domain, host, sts, dane } = about;
  const watched: Watched[] = [];
  if (dane.kind === 'refused') {
    const policy = { type: 'tlsa', strings: [], mxHosts: [host] } as const;
    watched.push({ domain, policy, demand: REQUIRED, fault: dane.refusal });
  } else if (dane.kind !== 'none') {
    const { base, records } = dane;
    watched.push({
      domain: base,
      policy: { type: 'tlsa', strings: records.map(tlsaText), mxHosts: [base] },
      demand: dane.kind === 'usable' ? { kind: 'dane', records, names: dane.names } : REQUIRED,
      fault:
        dane.kind === 'usable'
          ? null
          : { failure: 'tlsa-invalid', reason: 'none of its TLSA records can be used for mail' },
    });
  }
  if (sts.kind === 'known' && sts.policy !== null) {
    const { raw, mx } = sts.policy;
    const strings = raw
      .split(/\r?\n/)
      .filter((line) => line !== '')
      .slice(0, LINES_MAX);
    const fault = strangerFault(sts.policy, { domain, host });
    const policy = { type: 'sts', strings, mxHosts: mx.slice(0, LINES_MAX) } as const;
    watched.push({ domain, policy, demand: STS, fault });
  } else if (sts.kind === 'known' && sts.trouble !== null) {
    const policy = { type: 'sts', strings: [], mxHosts: [] } as const;
    watched.push({ domain, policy, demand: REQUIRED, fault: sts.trouble });
  }
  // What our own store does not tell is no fault of the domain, and no news to it.
  if (watched.length > 0 || sts.kind === 'unknown') return watched;
  const policy = { type: 'no-policy-found', strings: [], mxHosts: [] } as const;
  return [{ domain, policy, demand: REQUIRED, fault: null }];
}

const OLD_PROTOCOLS: ReadonlySet<string> = new Set(['SSLv3', 'TLSv1', 'TLSv1.1']);
const OUT_OF_DATE: ReadonlySet<string> = new Set(['CERT_HAS_EXPIRED', 'CERT_NOT_YET_VALID']);

/** Null: the session (null: in plaintext) is what is demanded of the host. */
export function faultOf(
  demand: Demand,
  at: { readonly peer: PeerFacts | null; readonly host: string; readonly now: Date },
): Fault | null {
  const { peer, host, now } = at;
  if (demand.kind === 'none' || demand.kind === 'opportunistic') return null;
  if (peer === null) {
    return { failure: 'starttls-not-supported', reason: 'it offers no encryption (STARTTLS)' };
  }
  if (OLD_PROTOCOLS.has(peer.protocol)) {
    return { failure: 'validation-failure', reason: `it speaks ${peer.protocol} only` };
  }
  if (demand.kind === 'required' || demand.kind === 'smarthost') return null;
  if (demand.kind === 'dane') {
    return daneMismatch(demand.records, { chain: peer.chain, names: demand.names, now });
  }
  return certificateFault(peer, host);
}

/** RFC 8461 §4.2. */
function certificateFault(peer: PeerFacts, host: string): Fault | null {
  const leaf = peer.chain[0] === undefined ? null : readCertificate(peer.chain[0]);
  if (leaf === null) {
    return { failure: 'certificate-not-trusted', reason: 'it has no certificate that can be read' };
  }
  if (peer.chainError !== null && OUT_OF_DATE.has(peer.chainError)) {
    const reason = `its certificate is out of date (until ${leaf.validTo})`;
    return { failure: 'certificate-expired', reason };
  }
  if (peer.chainError !== null) {
    const reason = `nobody whom we trust vouches for its certificate (${peer.chainError})`;
    return { failure: 'certificate-not-trusted', reason };
  }
  if (isFor(leaf, host, 'never')) return null;
  const reason = `its certificate is for other names (${shown(leaf)})`;
  return { failure: 'certificate-host-mismatch', reason };
}

/** Protocol, cipher, and whether the certificate proved whose the connection is. */
export function describePeer(
  target: { readonly host: string; readonly demand?: Demand },
  peer: PeerFacts,
): string {
  const { host, demand } = target;
  const proof = demand?.kind === 'dane' || demand?.kind === 'smarthost' ? demand : STS;
  const isVerified = faultOf(proof, { peer, host, now: new Date() }) === null;
  return `${peer.protocol} ${peer.cipher} ${isVerified ? 'verified' : 'unverified'}`;
}
