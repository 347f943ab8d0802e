// The few forms of DER (X.690) that a certificate and a request for one need. Node can sign but not write X.509, and the packages
// that do bring forty others, which clash with one another or with those of mailauth.

/** One element; lengths below 64 KiB. */
export function tagged(tag: number, content: Buffer | string): Buffer {
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

export const sequence = (...items: readonly Buffer[]): Buffer => tagged(0x30, Buffer.concat(items));
export const set = (...items: readonly Buffer[]): Buffer => tagged(0x31, Buffer.concat(items));
export const integer = (bytes: Buffer): Buffer => tagged(0x02, bytes);
export const bits = (bytes: Buffer): Buffer => tagged(0x03, Buffer.concat([Buffer.of(0), bytes]));
export const octets = (bytes: Buffer): Buffer => tagged(0x04, bytes);

export function oid(dotted: string): Buffer {
  const [first = 0, second = 0, ...rest] = dotted.split('.').map(Number);
  const arc = (value: number): number[] => {
    const septets = [value & 0x7f];
    for (let left = value >>> 7; left > 0; left >>>= 7) septets.unshift((left & 0x7f) | 0x80);
    return septets;
  };
  return tagged(0x06, Buffer.from([first * 40 + second, ...rest].flatMap(arc)));
}

export const ECDSA_WITH_SHA256 = sequence(oid('1.2.840.10045.4.3.2'));

/** RFC 7468. */
export function toPem(label: string, der: Buffer): string {
  const lines = der.toString('base64').match(/.{1,64}/g) ?? [];
  return [`-----BEGIN ${label}-----`, ...lines, `-----END ${label}-----`].join('\n');
}
