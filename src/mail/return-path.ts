/**
 * The local part of the return path that ties a bounce to its delivery (VERP) and proves that we made it.
 *
 * `b+` · key id (1) · email id, position and tag in base32 (45) = 48 characters of [a-z0-9+]: case-insensitive,
 * because hosts on the way may change case, and under the 64 octets of RFC 5321 §4.5.3.1.1. The tag is the first 80
 * bits of HMAC-SHA256, so a forged bounce is refused at RCPT. Age is the business of the delivery's row.
 */
import assert from 'node:assert/strict';
import { Buffer } from 'node:buffer';
import { createHash, createHmac, timingSafeEqual } from 'node:crypto';

/** The largest position of a delivery. */
export const positionMax = 0x7fff;
/** Stands for every delivery of an email. */
export const WHOLE_EMAIL = 0xffff;
const sharedMin = 0x8000;

const idOctets = 16;
const positionOctets = 2;
const tagOctets = 10;
const octets = idOctets + positionOctets + tagOctets;
const alphabet = 'abcdefghijklmnopqrstuvwxyz234567';
const shape = /^b\+([a-z0-9])([a-z2-7]{45})$/;
const uuidShape = /^[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}$/i;

/**
 * Stands for the deliveries of an email to one destination: the return path of a transaction with several recipients.
 * Not of the email as a whole, since each of them could then speak of recipients elsewhere; and not of whom the
 * transaction happens to have, since greylisting hosts know us by it. Which destinations share one cannot be arranged:
 * the email's id is not known before.
 */
export function sharedPosition(emailId: string, destination: string): number {
  const hash = createHash('sha256').update(`${emailId.toLowerCase()} ${destination}`).digest();
  return sharedMin + (hash.readUInt16BE(0) % (WHOLE_EMAIL - sharedMin));
}

/** A delivery: the email and which of its recipients, from 0; above `positionMax`: one or more of several. */
export interface ReturnPathSubject {
  readonly emailId: string;
  readonly position: number;
}

/**
 * The local part for one delivery. `keyId`, one of a–z and 0–9, names the key, so that keys can be rotated while
 * bounces of the old one still arrive.
 */
export function mintReturnPathLocal({
  emailId,
  position,
  key,
  keyId,
}: ReturnPathSubject & { key: Buffer; keyId: string }): string {
  assert(uuidShape.test(emailId), 'return path: the email id is not a uuid');
  assert(Number.isInteger(position) && position >= 0 && position <= WHOLE_EMAIL);
  assert(/^[a-z0-9]$/.test(keyId), 'return path: the key id is not one of a-z, 0-9');
  const bytes = Buffer.alloc(octets);
  bytes.write(emailId.replaceAll('-', ''), 0, 'hex');
  bytes.writeUInt16BE(position, idOctets);
  const signed = bytes.subarray(0, idOctets + positionOctets);
  createHmac('sha256', key)
    .update(`return-path ${keyId} `)
    .update(signed)
    .digest()
    .copy(bytes, signed.length, 0, tagOctets);
  return `b+${keyId}${base32(bytes)}`;
}

/** The delivery that a return path of ours belongs to; null for everything else, a forged tag included. */
export function readReturnPathLocal(
  local: string,
  keys: Readonly<Record<string, Buffer>>,
): ReturnPathSubject | null {
  const given = local.toLowerCase();
  const match = shape.exec(given);
  const keyId = match?.[1] ?? '';
  const key = Object.hasOwn(keys, keyId) ? keys[keyId] : undefined;
  if (match === null || key === undefined) return null;
  const bytes = fromBase32(match[2] ?? '');
  const hex = bytes.toString('hex', 0, idOctets);
  const emailId = hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5');
  const position = bytes.readUInt16BE(idOctets);
  // Minting again also refuses a second spelling of the same octets (base32 has a spare bit at its end).
  const expected = mintReturnPathLocal({ emailId, position, key, keyId });
  return timingSafeEqual(Buffer.from(given, 'latin1'), Buffer.from(expected, 'latin1'))
    ? { emailId, position }
    : null;
}

/** RFC 4648 §6 without padding, lower case. */
function base32(bytes: Buffer): string {
  let text = '';
  let bits = 0;
  let held = 0;
  for (const octet of bytes) {
    held = ((held << 8) | octet) & 0xfff;
    bits += 8;
    while (bits >= 5) {
      bits -= 5;
      text += alphabet.charAt((held >> bits) & 31);
    }
  }
  return bits > 0 ? text + alphabet.charAt((held << (5 - bits)) & 31) : text;
}

function fromBase32(text: string): Buffer {
  const bytes = Buffer.alloc(octets);
  let bits = 0;
  let held = 0;
  let to = 0;
  for (const character of text) {
    held = ((held << 5) | alphabet.indexOf(character)) & 0xfff;
    bits += 5;
    if (bits < 8) continue;
    bits -= 8;
    bytes[to] = (held >> bits) & 0xff;
    to += 1;
  }
  return bytes;
}
