// What a message's own header says about the encryption of its way (RFC 8689).
import type { StoredBytes } from './stored-bytes.ts';

export interface TlsWishes {
  /** `TLS-Required: No`: it is to arrive even where what the recipient's domain publishes cannot be had (RFC 8689 §3). */
  readonly ignoresPolicy: boolean;
  /** One of our daily reports (RFC 8460 §5.3). */
  readonly isReport: boolean;
}

const HEADER_BYTES_MAX = 64 * 1024;

export async function readTlsWishes(bytes: StoredBytes, isReport: boolean): Promise<TlsWishes> {
  if (isReport) return { ignoresPolicy: true, isReport };
  const header = (await headOf(bytes)).toString('latin1');
  const end = header.indexOf('\r\n\r\n');
  const fields = end === -1 ? header : header.slice(0, end + 2);
  const values = [...fields.matchAll(/^tls-required[ \t]*:(.*)\r$/gim)];
  return {
    ignoresPolicy: values.length === 1 && /^[ \t]*no[ \t]*$/i.test(values[0]?.[1] ?? ''),
    isReport,
  };
}

async function headOf(bytes: StoredBytes): Promise<Buffer> {
  if (bytes.whole !== null) return bytes.whole.subarray(0, HEADER_BYTES_MAX);
  for await (const piece of bytes.pieces()) return piece.subarray(0, HEADER_BYTES_MAX);
  return Buffer.alloc(0);
}
