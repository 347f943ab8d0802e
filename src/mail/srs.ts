/**
 * The Sender Rewriting Scheme: the envelope sender of mail that is forwarded, in a domain of ours, so that SPF can pass
 * for it and a bounce comes home, to be sent on to the sender inside.
 *
 *   SRS0=hash=day=domain=local@host            a sender, rewritten
 *   SRS1=hash=first==hash=day=domain=local@host   one that another forwarder, `first`, has rewritten: it goes back there
 *
 * The grammar is that of the SRS paper (M. Wong and S. Hall, 2004): the mark behind SRS0 and SRS1 may be `=`, `+` or `-`,
 * case does not matter. The hash is the first 40 bits of HMAC-SHA256 in base32, so nobody else can make an address that we
 * would send a bounce on from. An SRS0 address is good for 21 days; an SRS1 address has no date, the first forwarder's has.
 */
import { Buffer } from 'node:buffer';
import { createHmac, timingSafeEqual } from 'node:crypto';
import { localPartOctetsMax, parseMailbox } from './address.ts';

/** For how long a bounce is taken. */
export const SRS_DAYS = 21;

export interface SrsInput {
  /** The envelope sender, `local@domain`. */
  readonly sender: string;
  /** In A-labels: where the bounce is to come. */
  readonly host: string;
  /** At least one; the first makes addresses, all read them. */
  readonly keys: readonly Buffer[];
  readonly now: Date;
}

export type SrsSubject =
  | {
      readonly kind: 'srs0' | 'srs1';
      /** Where a bounce is to go: the sender, or the first forwarder's address for it. */
      readonly sender: string;
    }
  /** Ours, and older than 21 days. */
  | { readonly kind: 'expired' };

const HASH_CHARS = 8;
const HASH_OCTETS = 5;
const ALPHABET = 'ABCDEFGHIJKLMNOPQRSTUVWXYZ234567';
const DAY_MS = 86_400_000;
/** Two characters of base32. */
const DAYS_IN_ROUND = 1_024;
/** Clocks of two machines may disagree about the day. */
const DAYS_AHEAD_MAX = 1;
const MARKED = /^SRS([01])([=+-])(.+)$/isu;
/** What a forwarder puts behind its mark: hash, day, domain, local part. */
const OPAQUE = /^([^=]+)=([^=]+)=([^=]+)=(.+)$/su;
const SRS1_REST = /^([^=]+)=([^=]+)=([=+-].+)$/su;

/**
 * The rewritten address; null where it cannot be made: the sender is no address of a domain, or there is no room for it in
 * the 64 octets of a local part (RFC 5321 §4.5.3.1.1).
 */
export function mintSrs(input: SrsInput): string | null {
  const { host, keys, now } = input;
  const parsed = parseMailbox(`<${input.sender}>`);
  if (!parsed.ok) return null;
  const { domain, address } = parsed.mailbox;
  // Ours already: it comes home from wherever we send it.
  if (domain === host.toLowerCase() && readSrs(address, keys, now)?.kind.startsWith('srs')) {
    return address;
  }
  const local = contentOf(parsed.mailbox.local);
  const behind = behindMark(local, domain);
  if (behind !== null) {
    const { first, opaque } = behind;
    return addressOf(`SRS1=${hashOf(keys[0]!, ['1', first, opaque])}=${first}=${opaque}`, host);
  }
  const day = dayText(dayOf(now));
  const hash = hashOf(keys[0]!, ['0', day, domain, local]);
  return addressOf(`SRS0=${hash}=${day}=${domain}=${local}`, host);
}

/**
 * Reads an address of ours, or its local part; null for all others, a forged hash included. Whether its domain is ours is
 * the caller's to ask.
 */
export function readSrs(given: string, keys: readonly Buffer[], now: Date): SrsSubject | null {
  const text = contentOf(localOf(given));
  const [, kind, , rest = ''] = MARKED.exec(text) ?? [];
  if (kind === '0') {
    const [, hash = '', day = '', domain = '', local = ''] = OPAQUE.exec(rest) ?? [];
    if (!isOurs(hash, keys, ['0', day, domain, local])) return null;
    const sender = addressOf(local, domain);
    const age = ageOf(day, now);
    if (sender === null || age === null) return null;
    return age > SRS_DAYS ? { kind: 'expired' } : { kind: 'srs0', sender };
  }
  const [, hash = '', first = '', opaque = ''] = (kind === '1' && SRS1_REST.exec(rest)) || [];
  if (!isOurs(hash, keys, ['1', first, opaque])) return null;
  const sender = addressOf(`SRS0${opaque}`, first);
  return sender === null ? null : { kind: 'srs1', sender };
}

/** Of another forwarder's address: the first one's domain, and what only that one can read. Null: it is none. */
function behindMark(
  local: string,
  domain: string,
): { readonly first: string; readonly opaque: string } | null {
  const [, kind, mark = '', rest = ''] = MARKED.exec(local) ?? [];
  if (kind === '0' && OPAQUE.test(rest)) return { first: domain, opaque: `${mark}${rest}` };
  const [, , first, opaque] = (kind === '1' && SRS1_REST.exec(rest)) || [];
  if (first === undefined || opaque === undefined) return null;
  // What only looks like one has to come home as it is.
  return addressOf(`SRS0${opaque}`, first) === null ? null : { first, opaque };
}

/** `local@host` in wire form; null when it is no address, or too long. */
function addressOf(content: string, host: string): string | null {
  const quoted = `"${content.replace(/["\\]/g, '\\$&')}"`;
  // Quotes that are not needed are dropped.
  const parsed = parseMailbox(`<${quoted}@${host}>`);
  if (!parsed.ok || Buffer.byteLength(parsed.mailbox.local) > localPartOctetsMax) return null;
  return parsed.mailbox.address;
}

/** What stands before the last `@`, or all of it. */
function localOf(given: string): string {
  if (given.startsWith('"')) return /^("(?:[^"\\]|\\.)*")(?:@|$)/su.exec(given)?.[1] ?? given;
  const at = given.lastIndexOf('@');
  return at === -1 ? given : given.slice(0, at);
}

/** Without quotes and backslashes. */
const contentOf = (local: string): string =>
  /^".*"$/su.test(local) ? local.slice(1, -1).replace(/\\(.)/gsu, '$1') : local;

function isOurs(hash: string, keys: readonly Buffer[], parts: readonly string[]): boolean {
  const given = Buffer.from(hash.toUpperCase());
  if (given.length !== HASH_CHARS) return false;
  let isOne = false;
  for (const key of keys) {
    if (timingSafeEqual(given, Buffer.from(hashOf(key, parts)))) isOne = true;
  }
  return isOne;
}

/** Hosts on the way may change the case of ASCII letters. */
function hashOf(key: Buffer, parts: readonly string[]): string {
  const text = parts.join('=').replace(/[A-Z]/g, (letter) => letter.toLowerCase());
  const tag = createHmac('sha256', key).update(`srs ${text}`).digest();
  let bits = 0n;
  for (const octet of tag.subarray(0, HASH_OCTETS)) bits = (bits << 8n) | BigInt(octet);
  let hash = '';
  for (let i = 0; i < HASH_CHARS; i += 1, bits >>= 5n) hash = ALPHABET[Number(bits & 31n)] + hash;
  return hash;
}

const dayOf = (now: Date): number => Math.floor(now.getTime() / DAY_MS) % DAYS_IN_ROUND;

const dayText = (day: number): string => `${ALPHABET[day >> 5]}${ALPHABET[day & 31]}`;

/** In days; null: not made before tomorrow. */
function ageOf(day: string, now: Date): number | null {
  const [high = -1, low = -1] = [...day.toUpperCase()].map((letter) => ALPHABET.indexOf(letter));
  if (day.length !== 2 || high < 0 || low < 0) return null;
  const age = (dayOf(now) - (high * 32 + low) + DAYS_IN_ROUND) % DAYS_IN_ROUND;
  if (age <= DAYS_IN_ROUND / 2) return age;
  return age >= DAYS_IN_ROUND - DAYS_AHEAD_MAX ? 0 : SRS_DAYS + 1;
}
