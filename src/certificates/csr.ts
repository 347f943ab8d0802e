// A request for a certificate (PKCS #10, RFC 2986) for one DNS name, with a new P-256 key. The name is only where it counts, in
// the subjectAltName: a common name would end at 64 characters, and nobody reads it any more.
import { generateKeyPairSync, sign } from 'node:crypto';
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
} from './der.ts';

const EXTENSION_REQUEST = '1.2.840.113549.1.9.14';
const SUBJECT_ALT_NAME = '2.5.29.17';
const DNS_NAME = 0x82;

/** PEM, both. */
export function makeRequest(name: string): { readonly csr: string; readonly key: string } {
  const { privateKey, publicKey } = generateKeyPairSync('ec', { namedCurve: 'P-256' });
  const names = octets(sequence(tagged(DNS_NAME, name)));
  const extensions = sequence(sequence(oid(SUBJECT_ALT_NAME), names));
  const attribute = sequence(oid(EXTENSION_REQUEST), set(extensions));
  const info = sequence(
    integer(Buffer.of(0)), // version 1
    sequence(), // no subject
    publicKey.export({ format: 'der', type: 'spki' }),
    tagged(0xa0, attribute),
  );
  const request = sequence(info, ECDSA_WITH_SHA256, bits(sign('sha256', info, privateKey)));
  return {
    csr: toPem('CERTIFICATE REQUEST', request),
    key: privateKey.export({ format: 'pem', type: 'pkcs8' }),
  };
}
