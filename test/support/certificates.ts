// Certificates for tests: an authority of our own, and what it (or nobody) signs, with any name, date and purpose.
//
// In: what a certificate is to say. Out: PEM for a TLS server, DER and digests for TLSA records. Keys are P-256; nothing
// here is kept, and nobody trusts it but who is told to.
import { createHash, generateKeyPairSync, randomBytes, sign, type KeyObject } from 'node:crypto';

const DAY_MS = 86_400_000;

export interface Issued {
  /** PEM. */
  readonly cert: string;
  readonly key: string;
  readonly der: Buffer;
  /** SubjectPublicKeyInfo. */
  readonly spki: Buffer;
  readonly name: Buffer;
  readonly privateKey: KeyObject;
}

export interface Wanted {
  readonly commonName?: string;
  /** DNS-IDs; none: no subjectAltName at all. */
  readonly names?: readonly string[];
  readonly isAuthority?: boolean;
  /** Null: signed with its own key. */
  readonly issuer?: Issued | null;
  /** Days from now. */
  readonly from?: number;
  readonly to?: number;
  /** Extended key usage; default: none is said. */
  readonly uses?: readonly string[];
}

export function issue(wanted: Wanted = {}): Issued {
  const { privateKey, publicKey } = generateKeyPairSync('ec', { namedCurve: 'P-256' });
  const algorithm = sequence(oid('1.2.840.10045.4.3.2')); // ecdsa-with-SHA256
  const name = nameOf(wanted.commonName ?? wanted.names?.[0] ?? 'test');
  const issuer = wanted.issuer ?? null;
  const spki = publicKey.export({ format: 'der', type: 'spki' });
  const body = sequence(
    tagged(0xa0, tagged(0x02, Buffer.of(2))),
    tagged(0x02, Buffer.concat([Buffer.of(0x5a), randomBytes(15)])),
    algorithm,
    issuer?.name ?? name,
    sequence(time(wanted.from ?? -1), time(wanted.to ?? 30)),
    name,
    spki,
    tagged(0xa3, sequence(...extensions(wanted))),
  );
  const signature = sign('sha256', body, issuer?.privateKey ?? privateKey);
  const der = sequence(body, algorithm, tagged(0x03, Buffer.concat([Buffer.of(0), signature])));
  const lines = der.toString('base64').match(/.{1,64}/g) ?? [];
  return {
    cert: ['-----BEGIN CERTIFICATE-----', ...lines, '-----END CERTIFICATE-----', ''].join('\n'),
    key: privateKey.export({ format: 'pem', type: 'pkcs8' }),
    der,
    spki,
    name,
    privateKey,
  };
}

export const sha256 = (bytes: Buffer): string => createHash('sha256').update(bytes).digest('hex');
export const sha512 = (bytes: Buffer): string => createHash('sha512').update(bytes).digest('hex');

/** What a TLS server presents: its own certificate first. */
export const chainOf = (...issued: readonly Issued[]): { cert: string; key: string } => ({
  cert: issued.map(({ cert }) => cert).join(''),
  key: issued[0]?.key ?? '',
});

function extensions(wanted: Wanted): readonly Buffer[] {
  const { names = [], isAuthority = false, uses = [] } = wanted;
  const extension = (id: string, value: Buffer, isCritical = false): Buffer =>
    sequence(oid(id), ...(isCritical ? [TRUE] : []), tagged(0x04, value));
  return [
    extension('2.5.29.19', sequence(...(isAuthority ? [TRUE] : [])), true),
    ...(names.length > 0
      ? [extension('2.5.29.17', sequence(...names.map((one) => tagged(0x82, one))))]
      : []),
    ...(uses.length > 0 ? [extension('2.5.29.37', sequence(...uses.map(oid)))] : []),
  ];
}

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

const TRUE = tagged(0x01, Buffer.of(0xff));
const sequence = (...items: readonly Buffer[]): Buffer => tagged(0x30, Buffer.concat(items));
const nameOf = (text: string): Buffer =>
  sequence(tagged(0x31, sequence(oid('2.5.4.3'), tagged(0x0c, text))));

function time(days: number): Buffer {
  const text = new Date(Date.now() + days * DAY_MS).toISOString().replace(/[-:T]|\.\d+/g, '');
  return tagged(0x17, text.slice(2));
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
