// The TLS of one SMTP session: with which options it is opened, and what the peer showed. No certificate is judged by
// the engine but a smarthost's, because a password follows at once: all others are judged after the handshake and
// before MAIL, so that a fault has a name (dns/tls-policy.ts).
import { type Socket, isIP } from 'node:net';
import { DEFAULT_CIPHERS, TLSSocket, type ConnectionOptions } from 'node:tls';
import type { PeerFacts } from '../dns/tls-policy.ts';
import type { Target } from './session.ts';

const CHAIN_MAX = 10;

/** For the handshake with this target. */
export function tlsOptionsFor(
  target: Pick<Target, 'host' | 'tls' | 'verify' | 'demand'>,
): ConnectionOptions {
  const { demand, host } = target;
  // RFC 7672 §8.1: the TLSA base domain, which may be what the host's CNAMEs lead to.
  const servername = demand?.kind === 'dane' ? (demand.names[0] ?? host) : host;
  return {
    rejectUnauthorized: target.verify,
    // Where plaintext would do, anything is better: hosts of 2005 too.
    ...(target.tls === 'opportunistic' && !target.verify
      ? { minVersion: 'TLSv1', ciphers: `${DEFAULT_CIPHERS}:@SECLEVEL=0` }
      : { minVersion: 'TLSv1.2' }),
    // Else its answer would hide what OpenSSL says of the chain.
    ...(target.verify ? {} : { checkServerIdentity: () => undefined }),
    // RFC 6066 §3: a name, never an address; Node refuses one.
    ...(isIP(servername) === 0 ? { servername } : {}),
  };
}

/** Null in plaintext. */
export function peerFactsOf(socket: Socket): PeerFacts | null {
  if (!(socket instanceof TLSSocket)) return null;
  const chain: Buffer[] = [];
  let certificate = socket.getPeerX509Certificate();
  while (certificate !== undefined && chain.length < CHAIN_MAX) {
    chain.push(certificate.raw);
    certificate = certificate.issuerCertificate;
  }
  // Node has a code here, though it calls the type Error.
  const error: unknown = socket.authorizationError;
  return {
    protocol: socket.getProtocol() ?? 'TLS',
    cipher: socket.getCipher().name,
    chain,
    chainError: socket.authorized ? null : error instanceof Error ? error.message : String(error),
  };
}
