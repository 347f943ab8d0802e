// Asks DNS block lists (RFC 5782) whether a client is known for bad mail. Off where the operator names no zone.
//
// In: the address of a client. Out: the zone that lists it, or null; always within a third of a second, since the client
// waits: a list that is slow or away lists nobody, and its late answer is kept for the next connection. Clients on this
// machine and in private networks are never asked about.
import { isIPv6 } from 'node:net';
import type { Resolver } from '../dns/resolver.ts';

/** The zone that lists this address, or null. Never rejects. */
export type FindListing = (address: string) => Promise<string | null>;

const BUDGET_MS = 300;
/** 127.0.0.1. */
const NEVER_LISTED = '1.0.0.127';

export function createDnsbl(d: {
  /** Keeps answers, at most so many: the cache of this. */
  readonly resolver: Pick<Resolver, 'a'>;
  readonly zones: () => readonly string[];
  /** False: a loopback, private or otherwise special address. */
  readonly isPublic: (address: string) => boolean;
}): FindListing {
  /** A list that was given up often lists everybody; RFC 5782 §5 says what a living one never lists. */
  const listsAll = async (zone: string): Promise<boolean> =>
    (await d.resolver.a(`${NEVER_LISTED}.${zone}`)).kind === 'found';
  return async (address) => {
    const zones = d.zones();
    if (zones.length === 0 || !d.isPublic(address)) return null;
    const name = reversed(address);
    const asked = zones.map(async (zone) => {
      const answer = await d.resolver.a(`${name}.${zone}`);
      if (answer.kind !== 'found' || !answer.records.some(isListing)) return null;
      return (await listsAll(zone)) ? null : zone;
    });
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<null>((resolve) => {
      timer = setTimeout(() => resolve(null), BUDGET_MS);
    });
    // The first that lists it decides; nobody does when all have said no, or time is up.
    const listing = Promise.any(
      asked.map(async (one) => (await one) ?? Promise.reject(new Error('not listed'))),
    ).catch(() => null);
    try {
      return await Promise.race([listing, late]);
    } finally {
      clearTimeout(timer);
    }
  };
}

/** RFC 5782 §2.1: listings lie in 127.0.0.0/8. Lists say with 127.255.255.0/24, or 127.0.0.1, that they do not answer us. */
const isListing = (record: string): boolean =>
  record.startsWith('127.') && !record.startsWith('127.255.255.') && record !== '127.0.0.1';

/** RFC 5782 §2.1 and §2.4. */
export function reversed(address: string): string {
  if (!isIPv6(address)) return address.split('.').toReversed().join('.');
  const [head = '', tail] = address.split('%')[0]!.split('::');
  const before = head === '' ? [] : head.split(':');
  const after = tail === undefined || tail === '' ? [] : tail.split(':');
  const zeros = Array.from({ length: 8 - before.length - after.length }, () => '0');
  const nibbles = [...before, ...zeros, ...after].map((part) => part.padStart(4, '0')).join('');
  return [...nibbles].toReversed().join('.');
}
