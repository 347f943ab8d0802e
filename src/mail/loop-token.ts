/**
 * The token that a forwarded message carries in `X-Mailstead-Loop`: which email it left as, and for which route, proven by
 * an HMAC. Where one comes in again it went round in a circle; in a returned message it names the email.
 *
 * 62 hexadecimal digits: email id (16 octets), route (5), tag (10). The route is a keyed digest of its target address, so
 * those who get the mail learn nothing from it.
 */
import assert from 'node:assert/strict';
import { Buffer } from 'node:buffer';
import { createHmac, timingSafeEqual } from 'node:crypto';
import { normalizedAddress } from './address.ts';

export const LOOP_HEADER = 'X-Mailstead-Loop';

export interface LoopToken {
  /** The outbound email. */
  readonly emailId: string;
  /** Whether it was forwarded for the route with this target address. */
  isFor(target: string): boolean;
}

const ID_OCTETS = 16;
const ROUTE_OCTETS = 5;
const TAG_OCTETS = 10;
const SHAPE = /^[0-9a-f]{62}$/;
const UUID = /^[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}$/i;

/** `keys`: at least one; the first makes tokens, all read them. */
export function mintLoopToken({
  emailId,
  target,
  keys,
}: {
  readonly emailId: string;
  readonly target: string;
  readonly keys: readonly Buffer[];
}): string {
  assert(UUID.test(emailId), 'loop token: the email id is not a uuid');
  const [key] = keys;
  assert(key !== undefined, 'loop token: no key');
  const id = Buffer.from(emailId.replaceAll('-', ''), 'hex');
  const signed = Buffer.concat([id, routeOf(target, key)]);
  return Buffer.concat([signed, tagOf(signed, key)]).toString('hex');
}

/** What a token of ours says; null for everything else, a forged tag included. */
export function readLoopToken(value: string, keys: readonly Buffer[]): LoopToken | null {
  const given = value.trim().toLowerCase();
  if (!SHAPE.test(given)) return null;
  const bytes = Buffer.from(given, 'hex');
  const signed = bytes.subarray(0, ID_OCTETS + ROUTE_OCTETS);
  const tag = bytes.subarray(ID_OCTETS + ROUTE_OCTETS);
  const key = keys.find((one) => timingSafeEqual(tag, tagOf(signed, one)));
  if (key === undefined) return null;
  const hex = signed.toString('hex', 0, ID_OCTETS);
  return {
    emailId: hex.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, '$1-$2-$3-$4-$5'),
    isFor: (target) => routeOf(target, key).equals(signed.subarray(ID_OCTETS)),
  };
}

const routeOf = (target: string, key: Buffer): Buffer =>
  createHmac('sha256', key)
    .update(`loop route ${normalizedAddress(target)}`)
    .digest()
    .subarray(0, ROUTE_OCTETS);

const tagOf = (signed: Buffer, key: Buffer): Buffer =>
  createHmac('sha256', key).update('loop ').update(signed).digest().subarray(0, TAG_OCTETS);
