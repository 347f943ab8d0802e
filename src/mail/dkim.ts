/**
 * DKIM signatures (RFC 6376, 8301, 8463): which fields they cover, what they hash, how they and their keys look in
 * a message and in DNS.
 *
 * In: the bytes of a message, the keys of its sending domain, an instant. Out: DKIM-Signature fields to put in
 * front, one a key, the same for the same input. The private-key arithmetic runs on the threads of libuv; the body
 * is hashed by whoever is passed as `hashBody` (delivery/signing.ts has a thread for large ones).
 *
 * It refuses (throws) what would leave a signature out or make it invalid: no keys, a key of another algorithm, a
 * name that cannot stand in `d=` or `s=`, a header without measure. Why dkim-signer canonicalises only some messages:
 * docs/architecture.md.
 */
import assert from 'node:assert/strict';
import { Buffer } from 'node:buffer';
import { createPublicKey, generateKeyPair as generate, hash, sign } from 'node:crypto';
import type { KeyObject } from 'node:crypto';
import { promisify } from 'node:util';
import { DKIMCanonicalizer } from 'dkim-signer';
import { hashBodyOctets } from './dkim-body.ts';
import { headerFieldsMax, headerOctetsMax } from './header.ts';

export type DkimAlgorithm = 'rsa-sha256' | 'ed25519-sha256';

export interface DkimKey {
  /** A-labels. */
  readonly domain: string;
  readonly selector: string;
  readonly algorithm: DkimAlgorithm;
  /** Made once and kept: reading a PEM doubles the cost of a signature. */
  readonly privateKey: KeyObject;
}

export interface SigningRequest {
  readonly message: Uint8Array;
  /** One signature each, in their order. */
  readonly keys: readonly DkimKey[];
  /** `t=`, cut to the second. */
  readonly signedAt: Date;
}

/** A message that does not lie in memory, from its first octet to its last, in pieces of any size. */
export type MessagePieces = AsyncIterable<Uint8Array>;

/** The hash of a body in its relaxed canonical form, as in `bh=`. */
export type HashBody = (body: Uint8Array) => string | Promise<string>;

/**
 * What is signed, and once more than it occurs, so that another one added on the way breaks the signature
 * (RFC 6376 §8.15). The rest of the header may change.
 */
const signedNames = [
  'from',
  'sender',
  'reply-to',
  'to',
  'cc',
  'subject',
  'date',
  'message-id',
  'mime-version',
  'content-type',
  'content-transfer-encoding',
  'in-reply-to',
  'references',
  'list-id',
  'list-unsubscribe',
  'list-unsubscribe-post',
  'feedback-id',
  'auto-submitted',
] as const;

/** Two identities with two algorithms each. */
const keysMax = 4;
const lineColumnsMax = 76;
const rsaModulusBits = 2_048;
const nameCharsMax = 253;
const nameSyntax = /^[a-z0-9_-]+(?:\.[a-z0-9_-]+)*$/i;

/** Bodies above this are ours even when dkim-signer would be right: it takes several times as long. */
const packageBodyOctetsMax = 1_024;
/** Its expressions are quadratic in a run; quoted-printable lines and `compose` stay below these. */
const packageWhiteRunMax = 77;
const packageLineEndRunMax = 128;

/** The DKIM-Signature fields, each with its CRLF, lines of at most 78 columns where the names allow it. */
export async function signMessage({
  message,
  keys,
  signedAt,
  hashBody = hashSmallBody,
}: SigningRequest & { readonly hashBody?: HashBody }): Promise<Buffer> {
  checkKeys(keys);
  const { header, body } = splitMessage(message);
  return signParts({ header, keys, signedAt, hashBody: () => hashBody(body) });
}

/**
 * The same for a message in pieces. They are read once; a piece must stay as it is until the next one is asked for,
 * and the header is held whole.
 */
export async function signPieces({
  pieces,
  keys,
  signedAt,
  hashBody,
}: Omit<SigningRequest, 'message'> & {
  readonly pieces: MessagePieces;
  readonly hashBody: (body: MessagePieces) => string | Promise<string>;
}): Promise<Buffer> {
  checkKeys(keys);
  const iterator = pieces[Symbol.asyncIterator]();
  try {
    const { header, rest } = await takeHeader(iterator);
    async function* body(): AsyncGenerator<Uint8Array> {
      yield rest;
      for (let next = await iterator.next(); next.done !== true; next = await iterator.next()) {
        yield next.value;
      }
    }
    return await signParts({ header, keys, signedAt, hashBody: () => hashBody(body()) });
  } finally {
    await iterator.return?.();
  }
}

async function signParts({
  header,
  keys,
  signedAt,
  hashBody,
}: Omit<SigningRequest, 'message'> & {
  readonly header: string;
  readonly hashBody: () => string | Promise<string>;
}): Promise<Buffer> {
  const second = Math.floor(signedAt.getTime() / 1_000);
  assert(second >= 0, 'dkim: signedAt is no instant after 1970');
  const covered = coverFields(header);
  const bodyHash = await hashBody();
  const fields = await Promise.all(
    keys.map((key) => signatureField(key, { ...covered, bodyHash, second })),
  );
  return Buffer.from(fields.join(''), 'latin1');
}

function checkKeys(keys: readonly DkimKey[]): void {
  assert(keys.length > 0, 'dkim: a message must not leave unsigned');
  assert(keys.length <= keysMax, `dkim: more than ${keysMax} keys`);
  for (const key of keys) checkKey(key);
}

/**
 * The hash of a body that is small enough for the event loop: by dkim-signer where it is right and quick, octet by
 * octet elsewhere. Both agree where both may be used.
 */
export function hashSmallBody(body: Uint8Array): string {
  if (!isPackageBody(body)) return hashBodyOctets(body);
  const text = Buffer.from(body.buffer, body.byteOffset, body.byteLength).toString('latin1');
  return hash('sha256', DKIMCanonicalizer.relaxedBody(text), 'base64');
}

/**
 * True for a body that dkim-signer canonicalises rightly and in linear time: short, 7-bit text with CRLF only,
 * something in it, no long runs of white space or blank lines. Up to that size `compose` makes nothing else.
 */
export function isPackageBody(body: Uint8Array): boolean {
  if (body.length > packageBodyOctetsMax) return false;
  let isBlank = true;
  let whiteRun = 0;
  let lineEndRun = 0;
  for (let i = 0; i < body.length; i += 1) {
    const octet = body[i] as number;
    if (octet > 0x20 && octet < 0x7f) {
      isBlank = false;
      whiteRun = 0;
      lineEndRun = 0;
    } else if (octet === 0x20 || octet === 0x09) {
      whiteRun += 1;
      if (whiteRun > packageWhiteRunMax) return false;
    } else if (octet === 0x0d && body[i + 1] === 0x0a) {
      i += 1;
      whiteRun = 0;
      lineEndRun += 1;
      if (lineEndRun > packageLineEndRunMax) return false;
    } else {
      return false;
    }
  }
  return !isBlank;
}

/** One field (latin1, without its last line end) as RFC 6376 §3.4.2 hashes it, without a line end. */
export function relaxedField(field: string): string {
  const line = field.replace(lineEnd, '');
  // dkim-signer's white space is wider than WSP and its lower case wider than ASCII, but not in printable ASCII.
  if (/^[\t\x20-\x7e]*$/.test(line)) {
    const { key, value } = DKIMCanonicalizer.relaxedHeaderLine(line);
    return `${key}:${value}`;
  }
  const colon = line.indexOf(':');
  return `${fieldName(line)}:${trimSpace(line.slice(colon + 1).replace(/[ \t]+/g, ' '))}`;
}

/**
 * The signature over canonical data.
 *
 * RFC 8463 §3: Ed25519 signs the SHA-256 of the data; RSA is RSASSA-PKCS1-v1_5 (RFC 6376 §3.3.2).
 */
export function signData(
  data: Buffer,
  { algorithm, privateKey }: Pick<DkimKey, 'algorithm' | 'privateKey'>,
): Promise<Buffer> {
  return new Promise((resolve, reject) => {
    const settle = (error: Error | null, signature: Buffer): void => {
      if (error) reject(error);
      else resolve(signature);
    };
    if (algorithm === 'rsa-sha256') sign('sha256', data, privateKey, settle);
    else sign(null, hash('sha256', data, 'buffer'), privateKey, settle);
  });
}

/** The text of the TXT record for a public key (or the public half of a private one). RFC 6376 §3.6.1, 8463 §4. */
export function publicKeyRecord(key: KeyObject): string {
  const publicKey = key.type === 'private' ? createPublicKey(key) : key;
  const der = publicKey.export({ type: 'spki', format: 'der' });
  if (publicKey.asymmetricKeyType === 'ed25519') {
    // RFC 8410 §4: the key is the last 32 octets. RFC 8463 §4: without the ASN.1 around it.
    return `v=DKIM1; k=ed25519; p=${der.subarray(-32).toString('base64')}`;
  }
  assert.equal(publicKey.asymmetricKeyType, 'rsa', 'dkim: neither an RSA nor an Ed25519 key');
  return `v=DKIM1; k=rsa; p=${der.toString('base64')}`;
}

/** A new key pair, generated off the event loop. RSA of 2048 bits: RFC 8301 §3.2. */
export function generateKeyPair(
  algorithm: DkimAlgorithm,
): Promise<{ readonly privateKey: KeyObject; readonly publicKey: KeyObject }> {
  return algorithm === 'rsa-sha256'
    ? promisify(generate)('rsa', { modulusLength: rsaModulusBits })
    : promisify(generate)('ed25519');
}

// The line ends that the SMTP engine turns into CRLF.
const lineEnd = /\r\n|\r|\n/g;
const foldedLineEnd = /(?:\r\n|\r|\n)(?=[ \t])/g;
// RFC 5322 §3.6.8; §4.5 allows white space, even a fold, before the colon.
const fieldStart = /^[!-9;-~]+[ \t]*:/;

interface Covered {
  /** The names of `h=`. */
  readonly names: readonly string[];
  /** The canonical fields they stand for, each with CRLF, in the same order. */
  readonly data: string;
}

/** The header as latin1 text and the body; a message that ends within its header has an empty body. */
function splitMessage(message: Uint8Array): {
  readonly header: string;
  readonly body: Uint8Array;
} {
  const bytes = Buffer.from(message.buffer, message.byteOffset, message.byteLength);
  const { headerEnd, bodyStart } = findBody(bytes);
  return { header: bytes.toString('latin1', 0, headerEnd), body: bytes.subarray(bodyStart) };
}

/** Both ends are those of the bytes where no empty line is found. Throws when the header is too long. */
function findBody(bytes: Buffer): { readonly headerEnd: number; readonly bodyStart: number } {
  let isLineStart = true;
  for (let i = 0; i < bytes.length; i += 1) {
    const octet = bytes[i];
    if (octet !== 0x0d && octet !== 0x0a) {
      isLineStart = false;
      continue;
    }
    const next = octet === 0x0d && bytes[i + 1] === 0x0a ? i + 2 : i + 1;
    if (isLineStart) return { headerEnd: i, bodyStart: next };
    assert(next <= headerOctetsMax, `dkim: a header of more than ${headerOctetsMax} octets`);
    isLineStart = true;
    i = next - 1;
  }
  assert(bytes.length <= headerOctetsMax, `dkim: a header of more than ${headerOctetsMax} octets`);
  return { headerEnd: bytes.length, bodyStart: bytes.length };
}

/** Reads as far as the header goes; `rest` is what came of the body with it. */
async function takeHeader(
  pieces: AsyncIterator<Uint8Array>,
): Promise<{ readonly header: string; readonly rest: Uint8Array }> {
  let bytes = Buffer.alloc(0);
  for (;;) {
    const next = await pieces.next();
    if (next.done !== true) bytes = Buffer.concat([bytes, next.value]);
    const { headerEnd, bodyStart } = findBody(bytes);
    // A CR at the very end may have its LF in the next piece.
    if (next.done === true || bodyStart < bytes.length) {
      return { header: bytes.toString('latin1', 0, headerEnd), rest: bytes.subarray(bodyStart) };
    }
  }
}

/** RFC 6376 §5.4.2: of several fields with one name the lowest is signed first. */
function coverFields(header: string): Covered {
  const fields = new Map<string, string[]>(signedNames.map((name) => [name, []]));
  let last: string[] | undefined;
  for (const line of header.replace(foldedLineEnd, '').split(lineEnd)) {
    if (fieldStart.test(line)) {
      last = fields.get(fieldName(line));
      last?.push(line);
    } else if (last !== undefined) {
      // Verifiers that pass such a line over or take it for a part of the field before: the strict reading.
      last.push(`${last.pop() ?? ''}${line}`);
    }
  }
  const names: string[] = [];
  let data = '';
  for (const [name, lines] of fields) {
    for (const line of lines.toReversed()) {
      names.push(name);
      data += `${relaxedField(line)}\r\n`;
    }
    names.push(name);
  }
  assert(names.length <= headerFieldsMax, `dkim: more than ${headerFieldsMax} fields to sign`);
  return { names, data };
}

async function signatureField(
  key: DkimKey,
  { names, data, bodyHash, second }: Covered & { bodyHash: string; second: number },
): Promise<string> {
  let field = 'DKIM-Signature:';
  let column = field.length;
  const put = (glue: string, text: string): void => {
    const isFolded = column + glue.length + text.length > lineColumnsMax;
    field += isFolded ? `\r\n ${text}` : glue + text;
    column = (isFolded ? 1 : column + glue.length) + text.length;
  };
  // No l= (RFC 6376 §8.2), no x=: a signature lives as long as its key is published.
  put(' ', 'v=1;');
  put(' ', `a=${key.algorithm};`);
  put(' ', 'c=relaxed/relaxed;');
  put(' ', `d=${key.domain};`);
  put(' ', `s=${key.selector};`);
  put(' ', `t=${second};`);
  for (const [at, name] of names.entries()) {
    // RFC 6376 §3.5: white space may follow the colons.
    put(
      at === 0 ? ' ' : '',
      `${at === 0 ? 'h=' : ''}${name}${at === names.length - 1 ? ';' : ':'}`,
    );
  }
  put(' ', `bh=${bodyHash};`);
  field += '\r\n b=';
  // RFC 6376 §3.7: the field itself comes last, with an empty b= and without CRLF.
  const signature = await signData(Buffer.from(data + relaxedField(field), 'latin1'), key);
  const lines = signature.toString('base64').match(/.{1,72}/g) ?? [];
  return `${field}${lines.join('\r\n ')}\r\n`;
}

function checkKey({ domain, selector, algorithm, privateKey }: DkimKey): void {
  for (const name of [domain, selector]) {
    assert(nameSyntax.test(name) && name.length <= nameCharsMax, `dkim: ${name} is no DNS name`);
  }
  assert(privateKey.type === 'private', 'dkim: not a private key');
  const type = algorithm === 'rsa-sha256' ? 'rsa' : 'ed25519';
  assert.equal(privateKey.asymmetricKeyType, type, `dkim: not a key for ${algorithm}`);
}

/** Of a line that `fieldStart` matches: ASCII. */
function fieldName(line: string): string {
  return line.slice(0, line.indexOf(':')).trimEnd().toLowerCase();
}

function trimSpace(text: string): string {
  const start = text.startsWith(' ') ? 1 : 0;
  return text.slice(start, text.endsWith(' ') ? -1 : undefined);
}
