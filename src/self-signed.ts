/**
 * A self-signed TLS server certificate (RFC 5280) for development, and for hosts that nobody verifies.
 *
 * In: a host name and a time. Out: PEM of a new P-256 key and its certificate. Node can sign but not write X.509;
 * see certificates/der.ts.
 */
import { generateKeyPairSync, randomBytes, sign } from 'node:crypto';
import {
  bits,
  ECDSA_WITH_SHA256,
  integer,
  octets,
  oid,
  sequence,
  set,
  tagged,
  toPem,
} from './certificates/der.ts';

const DAY_MS = 86_400_000;
const LIFETIME_MS = 730 * DAY_MS;
/** Clocks of clients may be late. */
const BACKDATE_MS = DAY_MS;
/** RFC 5280, upper bound of a common name. */
const COMMON_NAME_MAX = 64;

/** Valid for two years for `hostname`, `localhost` and 127.0.0.1: what every client of the last decade takes. */
export function makeSelfSigned(hostname: string, at: Date): { cert: string; key: string } {
  const { privateKey, publicKey } = generateKeyPairSync('ec', { namedCurve: 'P-256' });
  const name = sequence(
    set(sequence(oid('2.5.4.3'), tagged(0x0c, hostname.slice(0, COMMON_NAME_MAX)))),
  );
  const body = sequence(
    tagged(0xa0, integer(Buffer.of(2))), // version 3
    // RFC 5280 §4.1.2.2: positive, so its first bit is 0.
    integer(Buffer.concat([Buffer.of(0x5a), randomBytes(15)])),
    ECDSA_WITH_SHA256,
    name,
    sequence(time(at.getTime() - BACKDATE_MS), time(at.getTime() + LIFETIME_MS)),
    name,
    publicKey.export({ format: 'der', type: 'spki' }),
    tagged(0xa3, sequence(...extensions(hostname))),
  );
  const signature = sign('sha256', body, privateKey);
  const der = sequence(body, ECDSA_WITH_SHA256, bits(signature));
  return {
    cert: toPem('CERTIFICATE', der),
    key: privateKey.export({ format: 'pem', type: 'pkcs8' }).trim(),
  };
}

function extensions(hostname: string): readonly Buffer[] {
  const names = [...new Set([hostname, 'localhost'])].map((one) => tagged(0x82, one));
  const extension = (id: string, value: Buffer, isCritical: boolean): Buffer =>
    sequence(oid(id), ...(isCritical ? [tagged(0x01, Buffer.of(0xff))] : []), octets(value));
  return [
    extension('2.5.29.19', sequence(), true), // basicConstraints: no authority
    extension('2.5.29.15', tagged(0x03, Buffer.of(7, 0x80)), true), // keyUsage: digitalSignature
    extension('2.5.29.37', sequence(oid('1.3.6.1.5.5.7.3.1')), false), // extKeyUsage: serverAuth
    extension('2.5.29.17', sequence(...names, tagged(0x87, Buffer.of(127, 0, 0, 1))), false),
  ];
}

/** RFC 5280 §4.1.2.5: two digits of the year until 2049, four from then on. */
function time(ms: number): Buffer {
  const text = new Date(ms).toISOString().replace(/[-:T]|\.\d+/g, '');
  return text < '2050' ? tagged(0x17, text.slice(2)) : tagged(0x18, text);
}
