/**
 * A self-signed TLS server certificate (RFC 5280) for development, and for hosts that nobody verifies.
 *
 * In: a host name and a time. Out: PEM of a new P-256 key and its certificate. Node can sign but not write X.509;
 * the few DER forms that one certificate needs are below. No package for it: the kept ones bring forty
 * others, which clash with those of mailauth.
 */
import { generateKeyPairSync, randomBytes, sign } from 'node:crypto';

const DAY_MS = 86_400_000;
const LIFETIME_MS = 730 * DAY_MS;
/** Clocks of clients may be late. */
const BACKDATE_MS = DAY_MS;
/** RFC 5280, upper bound of a common name. */
const COMMON_NAME_MAX = 64;

/** Valid for two years for `hostname`, `localhost` and 127.0.0.1: what every client of the last decade takes. */
export function makeSelfSigned(hostname: string, at: Date): { cert: string; key: string } {
  const { privateKey, publicKey } = generateKeyPairSync('ec', { namedCurve: 'P-256' });
  const algorithm = sequence(oid('1.2.840.10045.4.3.2')); // ecdsa-with-SHA256
  const name = sequence(
    set(sequence(oid('2.5.4.3'), tagged(0x0c, hostname.slice(0, COMMON_NAME_MAX)))),
  );
  const body = sequence(
    tagged(0xa0, integer(Buffer.of(2))), // version 3
    // RFC 5280 §4.1.2.2: positive, so its first bit is 0.
    integer(Buffer.concat([Buffer.of(0x5a), randomBytes(15)])),
    algorithm,
    name,
    sequence(time(at.getTime() - BACKDATE_MS), time(at.getTime() + LIFETIME_MS)),
    name,
    publicKey.export({ format: 'der', type: 'spki' }),
    tagged(0xa3, sequence(...extensions(hostname))),
  );
  const signature = sign('sha256', body, privateKey);
  const der = sequence(body, algorithm, bits(signature));
  const lines = der.toString('base64').match(/.{1,64}/g) ?? [];
  return {
    cert: ['-----BEGIN CERTIFICATE-----', ...lines, '-----END CERTIFICATE-----'].join('\n'),
    key: privateKey.export({ format: 'pem', type: 'pkcs8' }).trim(),
  };
}

function extensions(hostname: string): readonly Buffer[] {
  const names = [...new Set([hostname, 'localhost'])].map((one) => tagged(0x82, one));
  const extension = (id: string, value: Buffer, isCritical: boolean): Buffer =>
    sequence(oid(id), ...(isCritical ? [tagged(0x01, Buffer.of(0xff))] : []), tagged(0x04, value));
  return [
    extension('2.5.29.19', sequence(), true), // basicConstraints: no authority
    extension('2.5.29.15', tagged(0x03, Buffer.of(7, 0x80)), true), // keyUsage: digitalSignature
    extension('2.5.29.37', sequence(oid('1.3.6.1.5.5.7.3.1')), false), // extKeyUsage: serverAuth
    extension('2.5.29.17', sequence(...names, tagged(0x87, Buffer.of(127, 0, 0, 1))), false),
  ];
}

/** One element; lengths below 64 KiB. */
function tagged(tag: number, content: Buffer | string): Buffer {
  const bytes = Buffer.from(content);
  const { length } = bytes;
  const head =
    length < 0x80
      ? [tag, length]
      : length < 0x100
        ? [tag, 0x81, length]
        : [tag, 0x82, length >> 8, length & 0xff];
  return Buffer.concat([Buffer.from(head), bytes]);
}

const sequence = (...items: readonly Buffer[]): Buffer => tagged(0x30, Buffer.concat(items));
const set = (...items: readonly Buffer[]): Buffer => tagged(0x31, Buffer.concat(items));
const integer = (bytes: Buffer): Buffer => tagged(0x02, bytes);
const bits = (bytes: Buffer): Buffer => tagged(0x03, Buffer.concat([Buffer.of(0), bytes]));

/** RFC 5280 §4.1.2.5: two digits of the year until 2049, four from then on. */
function time(ms: number): Buffer {
  const text = new Date(ms).toISOString().replace(/[-:T]|\.\d+/g, '');
  return text < '2050' ? tagged(0x17, text.slice(2)) : tagged(0x18, text);
}

function oid(dotted: string): Buffer {
  const [first = 0, second = 0, ...rest] = dotted.split('.').map(Number);
  const arc = (value: number): number[] => {
    const septets = [value & 0x7f];
    for (let left = value >>> 7; left > 0; left >>>= 7) septets.unshift((left & 0x7f) | 0x80);
    return septets;
  };
  return tagged(0x06, Buffer.from([first * 40 + second, ...rest].flatMap(arc)));
}
