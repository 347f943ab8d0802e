// Reads the signatures of a message: DKIM (RFC 6376, RFC 8301, RFC 8463) and the ARC chain (RFC 8617), by mailauth, and
// who its authors are. Runs on the event loop or in a thread (verdicts-aside.ts), so it imports only what needs no
// loader, and what it answers can be sent between threads.
//
// mailauth reads any message; what costs it minutes is not given to it: the limits are below.
import { Readable, type Writable } from 'node:stream';
import { pipeline } from 'node:stream/promises';
import type { ARCChainEntry, ARCResult, DKIMResult } from 'mailauth';
import { arc, getARChain } from 'mailauth/lib/arc/index.js';
import {
  DkimVerifier,
  type ParsedHeaders,
  type SignatureHeader,
} from 'mailauth/lib/dkim/dkim-verifier.js';
import type { DkimResult } from '../store/received-email.ts';
import { plainField, readingsOf } from './verdicts-authors.ts';
import { isTemporary, type Ask } from './verdicts-questions.ts';

/** Of one message; the newest ones. */
const SIGNATURES_MAX = 10;
/** RFC 8301 §3.2. */
const KEY_BITS_MIN = 1_024;
/** Different ways to hash the body; each goes over all of it. */
const BODY_HASHES_MAX = 4;
/** Fields that one signature may name. */
const SIGNED_FIELDS_MAX = 1_000;
/** What mailauth does with a header grows with the square of its lines. */
const HEADER_LINES_MAX = 20_000;
/** Of one From field, where nothing else is read. */
const FROM_LINES_MAX = 1_000;
const FIELD_NAME_BYTES = 64;
const PIECE_BYTES = 64 * 1_024;

export interface Signatures {
  /** Addresses of the From fields, in every way that they may be read. */
  readonly authors: readonly string[];
  readonly fromFields: number;
  readonly dkim: readonly CheckedSignature[];
  /** Null: the message has none. */
  readonly arc: CheckedChain | null;
}

export interface CheckedSignature {
  readonly result: DkimResult;
  readonly domain: string | null;
  readonly selector: string | null;
  readonly reason: string | null;
  readonly algorithm: string | null;
  /** The first characters of the signature (RFC 6008 §3). */
  readonly start: string | null;
  /** At the end of the body. */
  readonly unsignedBytes: number;
  /** Whether the public suffix list says that it is of the author's organization. */
  readonly isNear: boolean;
}

export interface CheckedChain {
  readonly result: 'pass' | 'fail';
  readonly reason: string | null;
  /** It fails because the DNS did not answer. */
  readonly isUnknown: boolean;
  /** Whether the newest set covers the whole body. */
  readonly coversBody: boolean;
  /** Oldest first; empty: they make no chain. */
  readonly sets: readonly SealedSet[];
}

export interface SealedSet {
  readonly sealer: string | null;
  /** What the sealer says that DMARC was when it came there, and for which author's domain. */
  readonly dmarc: string | null;
  readonly author: string | null;
}

/** What nobody has looked at because it is made to keep a machine busy. */
const UNREAD = 'the header is too large to be checked';

export interface Asks {
  readonly askKeys: Ask;
  readonly askSeals: Ask;
}

/**
 * `askKeys` for the keys of signatures, `askSeals` for those of ARC seals. Throws where mailauth does. Costs up to
 * 0.3 s for headers of 32 KB and bodies of 128 KB made to, seconds for larger ones.
 */
export async function readSignatures(raw: Buffer, asks: Asks): Promise<Signatures> {
  const isTooLarge = countLines(raw) > HEADER_LINES_MAX;
  const verifier = new LimitedVerifier(asks);
  await feed(verifier, isTooLarge ? fromFieldsOf(raw) : raw);
  return {
    authors: [...new Set(verifier.headerFrom.flatMap(readingsOf))],
    fromFields: verifier.fieldsOfAuthors,
    dkim: isTooLarge ? [notRead('policy', UNREAD)] : verifier.checked(),
    arc: await checkChain(verifier, asks.askSeals),
  };
}

/** Who its authors are; cheap for every message. */
export async function readAuthors(
  raw: Buffer,
): Promise<Pick<Signatures, 'authors' | 'fromFields'>> {
  const nothing: Ask = () => Promise.reject(new Error('no signature is read'));
  const asks = { askKeys: nothing, askSeals: nothing };
  const { authors, fromFields } = await readSignatures(fromFieldsOf(raw), asks);
  return { authors, fromFields };
}

export const notRead = (result: DkimResult, reason: string): CheckedSignature => ({
  result,
  domain: null,
  selector: null,
  reason,
  algorithm: null,
  start: null,
  unsignedBytes: 0,
  isNear: false,
});

/** Of the header, up to more than are allowed. */
function countLines(raw: Buffer): number {
  let count = 0;
  let at = 0;
  while (count <= HEADER_LINES_MAX) {
    const end = raw.indexOf('\n', at);
    if (end === -1 || end - at <= 1) return count;
    count += 1;
    at = end + 1;
  }
  return count;
}

/** A message of nothing but its From fields: who its authors are decides, however it is dressed up. */
function fromFieldsOf(raw: Buffer): Buffer {
  const kept: Buffer[] = [];
  let left = 0;
  for (let at = 0; at < raw.length;) {
    const end = raw.indexOf('\n', at) + 1 || raw.length;
    const line = raw.subarray(at, end);
    const start = line.toString('latin1', 0, FIELD_NAME_BYTES);
    if (/^\r?\n$/.test(start)) break;
    if (/^from[ \t]*(?::|\r?\n)/i.test(start)) left = FROM_LINES_MAX;
    else if (!/^[ \t]/.test(start)) left = 0;
    if (left > 0) kept.push(line);
    left -= 1;
    at = end;
  }
  return Buffer.concat(kept);
}

/** A single piece goes in by itself: a pipeline makes a controller for each message, and aborts it. */
async function feed(verifier: Writable, raw: Buffer): Promise<void> {
  if (raw.length > PIECE_BYTES) return pipeline(Readable.from(piecesOf(raw)), verifier);
  await new Promise<void>((resolve, reject) => {
    verifier.once('error', reject);
    verifier.end(raw, (error?: Error | null) => (error ? reject(error) : resolve()));
  });
}

function* piecesOf(raw: Buffer): Generator<Buffer> {
  for (let at = 0; at < raw.length; at += PIECE_BYTES) yield raw.subarray(at, at + PIECE_BYTES);
}

class LimitedVerifier extends DkimVerifier {
  private readonly asks: Asks;
  fieldsOfAuthors = 0;

  constructor(asks: Asks) {
    super({ resolver: asks.askKeys, minBitLength: KEY_BITS_MIN, rejectRsaSha1: true });
    this.asks = asks;
  }

  override async messageHeaders(headers: ParsedHeaders): Promise<void> {
    let left = SIGNATURES_MAX;
    const parsed = headers.parsed.filter(({ key }) => key !== 'dkim-signature' || left-- > 0);
    const from = headers.parsed.filter(({ key }) => key === 'from');
    this.fieldsOfAuthors = from.length;
    const readOtherwise = from.flatMap(({ line }) => plainField(line.toString()) ?? []);
    const others = readOtherwise.map((line) => {
      return { key: 'from', casedKey: 'From', line: Buffer.from(line) };
    });
    await super.messageHeaders({ ...headers, parsed: [...parsed, ...others] });
    // A signature may cover others, those that are not checked among them.
    this.headers = headers;
    // All at once, while the body is read: a slow domain must not use up the time of the others.
    for (const { skip, selector, signingDomain } of this.signatureHeaders) {
      if (skip !== undefined || selector === undefined || signingDomain === undefined) continue;
      this.asks.askKeys(`${selector}._domainkey.${signingDomain}`, 'TXT').catch(() => undefined);
    }
    for (const { 'arc-seal': seal } of isChain(this.arc.chain) ? this.arc.chain : []) {
      const [domain, selector] = [
        at(seal, 'parsed', 'd', 'value'),
        at(seal, 'parsed', 's', 'value'),
      ];
      if (typeof domain !== 'string' || typeof selector !== 'string') continue;
      this.asks.askSeals(`${selector}._domainkey.${domain}`, 'TXT').catch(() => undefined);
    }
  }

  override prepareSignature(header: SignatureHeader): void {
    super.prepareSignature(header);
    const fields = header.parsed?.['h']?.value;
    if (typeof fields === 'string' && fields.split(':').length > SIGNED_FIELDS_MAX) {
      header.skip = 'too many signed fields';
    }
  }

  override addBodyHash(canonicalization: string, hash: string, lengthMax: number | ''): string {
    const key = [canonicalization, hash, lengthMax].join(':');
    // Without a hash the signature fails.
    if (!this.bodyHashes.has(key) && this.bodyHashes.size >= BODY_HASHES_MAX) return key;
    return super.addBodyHash(canonicalization, hash, lengthMax);
  }

  checked(): CheckedSignature[] {
    const results = this.results.filter(({ status }) => status.result !== 'none').values();
    return this.signatureHeaders
      .filter(({ type }) => type === 'DKIM')
      .flatMap((header) => {
        if (header.skip !== undefined) {
          const { signingDomain: domain = null, selector = null } = header;
          return [{ ...notRead('neutral', header.skip), domain, selector }];
        }
        const next = results.next();
        return next.done === true ? [] : [checkedOf(next.value)];
      });
  }
}

const KNOWN: readonly string[] = ['pass', 'fail', 'policy', 'temperror', 'permerror'];
/** RFC 6376 §6.1.1, §3.6.1: such a signature is not valid, which mailauth says only in passing. */
const INVALID = /^(?:identity-domain|invalid-v|missing-.*)$/;

function checkedOf(result: DKIMResult): CheckedSignature {
  const { status } = result;
  const { header, aligned, underSized, warnings = [] } = status;
  const invalid = warnings.find((warning) => INVALID.test(warning));
  const about = {
    domain: result.signingDomain ?? null,
    selector: result.selector ?? null,
    algorithm: result.algo ?? null,
    start: typeof header?.['b'] === 'string' ? header['b'] : null,
    unsignedBytes: underSized ?? 0,
    isNear: typeof aligned === 'string',
  };
  if (result.bodyHash === undefined && status.result !== 'temperror') {
    const reason = status.comment ?? 'the message has signatures over too many kinds of body';
    return { ...about, result: 'policy', reason };
  }
  // RFC 8601 §2.7.1: `fail` is what does not verify; mailauth calls it neutral when it is the body.
  if (status.result === 'neutral' && result.bodyHash !== result.bodyHashExpecting) {
    return { ...about, result: 'fail', reason: status.comment ?? null };
  }
  if (status.result === 'pass' && invalid !== undefined) {
    return { ...about, result: 'neutral', reason: `the signature is not valid: ${invalid}` };
  }
  const known = KNOWN.includes(status.result) ? (status.result as DkimResult) : 'neutral';
  return { ...about, result: known, reason: reasonOf(status, about.unsignedBytes) };
}

function reasonOf(status: DKIMResult['status'], unsignedBytes: number): string | null {
  const rule = (status.policy as Readonly<Record<string, unknown>> | undefined)?.['dkim-rules'];
  if (typeof status.comment === 'string' && status.comment !== '') return status.comment;
  if (typeof rule === 'string') return rule;
  return unsignedBytes > 0 ? `${unsignedBytes} bytes at the end of the body are not signed` : null;
}

async function checkChain(verifier: LimitedVerifier, ask: Ask): Promise<CheckedChain | null> {
  const { chain, lastEntry, error } = verifier.arc;
  if (!isChain(chain) && error === undefined) return null;
  let isUnknown = lastEntry?.messageSignature?.status.result === 'temperror';
  const resolver: Ask = async (name, type) => {
    try {
      return await ask(name, type);
    } catch (failure) {
      isUnknown ||= isTemporary(failure);
      throw failure;
    }
  };
  const sets = isChain(chain) ? chain.map(setOf) : [];
  const coversBody = lastEntry?.messageSignature?.status.underSized === undefined;
  const broken = (reason: string): CheckedChain => {
    return { result: 'fail', reason, isUnknown: false, coversBody, sets };
  };
  try {
    // The grammar of RFC 8617 §4 and RFC 6376 §3.2 as it is written.
    getARChain(verifier.headers, { strict: true });
  } catch (failure) {
    return broken(failure instanceof Error ? failure.message : 'no valid chain');
  }
  const { status }: ARCResult = await arc(verifier.arc, {
    resolver,
    minBitLength: KEY_BITS_MIN,
    strict: true,
  });
  if (status.result === 'pass') {
    return { result: 'pass', reason: null, isUnknown: false, coversBody, sets };
  }
  return { ...broken(status.comment ?? 'no valid chain'), isUnknown };
}

const isChain = (chain: unknown): chain is readonly ARCChainEntry[] => Array.isArray(chain);

function setOf(entry: ARCChainEntry): SealedSet {
  const dmarc = at(entry['arc-authentication-results'], 'parsed', 'dmarc');
  return {
    sealer: textOf(at(entry['arc-seal'], 'parsed', 'd', 'value')),
    dmarc: textOf(at(dmarc, 'value')),
    author: textOf(at(dmarc, 'header', 'from')),
  };
}

/** A field is whatever its writer made of it. */
function at(value: unknown, ...path: readonly string[]): unknown {
  return path.reduce<unknown>(
    (found, key) =>
      typeof found === 'object' && found !== null && Object.hasOwn(found, key)
        ? (found as Readonly<Record<string, unknown>>)[key]
        : undefined,
    value,
  );
}

const textOf = (value: unknown): string | null =>
  typeof value === 'string' && value !== '' ? value.toLowerCase().trim() : null;
