// Finds the addresses of mail hosts that are known by name, and shares one attempt out among them.
//
// In: hosts in the order to try. Out: for each host the addresses that the guard let through, which of them are this
// machine's, and why there are no others. Never an exception for what the DNS said.

import type { AddressGuard } from './address-guard.ts';
import { cnameFault, nameOf } from './host-name.ts';
import type { DnsAnswer, Resolver } from './resolver.ts';

export const ADDRESSES_PER_ATTEMPT_MAX = 5;
/** Hosts whose addresses are asked for at the same time; the next ones are asked only if none of these is usable. */
const HOSTS_IN_PARALLEL_MAX = 5;
const HOSTS_MAX = 20;

export type AddressPolicy = 'ipv4_first' | 'ipv6_first' | 'ipv4_only' | 'ipv6_only';
type MxAddress = { readonly address: string; readonly family: 4 | 6 };
export type MxHost = {
  /** Lower-case A-label; what the certificate and an MTA-STS policy must match. */
  readonly name: string;
  readonly preference: number;
  /** In the order to try; never empty. */
  readonly addresses: readonly MxAddress[];
};

export type HostLookupOptions = {
  readonly resolver: Pick<Resolver, 'a' | 'aaaa' | 'cname'>;
  readonly guard: AddressGuard;
  /** Default `ipv4_first`: large receivers ask more of a sender over IPv6 (PTR, SPF) than over IPv4. */
  readonly addressPolicy?: AddressPolicy;
  /** In [0, 1). */
  readonly random: () => number;
};

export type Candidate = { readonly name: string; readonly preference: number };
/** What one host's lookups came to; a host may have good, refused and unknown addresses at once. */
export type Lookup = Candidate & {
  readonly addresses: readonly MxAddress[];
  readonly isOurs: boolean;
  readonly refusals: readonly string[];
  readonly failure: string | null;
};

/** The first batch with a usable host ends the search; a domain may list more dead hosts than one attempt tries. */
export async function lookUpHosts(
  options: HostLookupOptions,
  candidates: readonly Candidate[],
): Promise<readonly Lookup[]> {
  const looked: Lookup[] = [];
  const last = Math.min(candidates.length, HOSTS_MAX);
  for (let at = 0; at < last; at += HOSTS_IN_PARALLEL_MAX) {
    const batch = candidates.slice(at, Math.min(at + HOSTS_IN_PARALLEL_MAX, last));
    looked.push(...(await Promise.all(batch.map((host) => lookUpHost(options, host)))));
    if (looked.some(({ addresses }) => addresses.length > 0)) break;
  }
  return looked;
}

async function lookUpHost(options: HostLookupOptions, host: Candidate): Promise<Lookup> {
  const { resolver, guard, random } = options;
  const families = familiesInOrder(options);
  const answers = await askAddresses(resolver, { name: host.name, families });
  const found = answers.flatMap(({ family, answer }) => {
    const records = answer.kind === 'found' ? answer.records : [];
    return shuffled([...new Set(records)], random).map((address) => ({ address, family }));
  });
  const addresses: MxAddress[] = [];
  const refusals: string[] = [];
  let isOurs = false;
  for (const one of found) {
    const verdict = guard.check(one.address);
    if (verdict.ok) addresses.push(one);
    else refusals.push(`${host.name}: ${verdict.reason}`);
    if (!verdict.ok && verdict.kind === 'own_address') isOurs = true;
  }
  const failed = answers.map(({ answer }) => answer).find(({ kind }) => kind === 'failed');
  const failure = failed?.kind === 'failed' ? `${host.name}: ${failed.cause}` : null;
  return { ...host, addresses, isOurs, refusals, failure };
}

type AddressAnswer = { readonly family: 4 | 6; readonly answer: DnsAnswer<string> };

/**
 * Asks for the addresses of one host.
 *
 * An MX must not name a CNAME (RFC 2181 §10.3); where it does, the chain is followed, by the DNS server as a rule,
 * and here when that server sends a CNAME alone.
 */
async function askAddresses(
  resolver: HostLookupOptions['resolver'],
  asked: { readonly name: string; readonly families: readonly (4 | 6)[] },
): Promise<readonly AddressAnswer[]> {
  const seen: string[] = [];
  let name = asked.name;
  for (;;) {
    const answers = await Promise.all(asked.families.map((family) => askFamily(name, family)));
    const bare = answers.every(({ answer }) => answer.kind === 'no_data');
    if (!bare) return answers;
    const cname = await resolver.cname(name);
    if (cname.kind === 'failed') return [...answers, { family: 4, answer: cname }];
    if (cname.kind !== 'found') return answers;
    seen.push(name);
    name = nameOf(cname.records[0] ?? '');
    // Treated like a domain's own bad chain: nothing is known about the host.
    const why = cnameFault(seen, name);
    if (why === null) continue;
    return [{ family: 4, answer: { kind: 'failed', cause: `its CNAME records ${why}` } }];
  }

  async function askFamily(host: string, family: 4 | 6): Promise<AddressAnswer> {
    return { family, answer: await (family === 4 ? resolver.a(host) : resolver.aaaa(host)) };
  }
}

/** The families to ask for, in the order to try. */
export function familiesInOrder(
  options: Pick<HostLookupOptions, 'addressPolicy'>,
): readonly (4 | 6)[] {
  switch (options.addressPolicy ?? 'ipv4_first') {
    case 'ipv4_first':
      return [4, 6];
    case 'ipv6_first':
      return [6, 4];
    case 'ipv4_only':
      return [4];
    case 'ipv6_only':
      return [6];
  }
}

/**
 * Gives every host its first address, then every host its second, until the attempt is full; order is kept. A host with
 * both families and more than one address in the attempt is tried over both.
 */
export function shareAttempts(lookups: readonly Lookup[]): readonly MxHost[] {
  const shares = lookups.map(() => 0);
  let left = ADDRESSES_PER_ATTEMPT_MAX;
  for (let round = 0; round < ADDRESSES_PER_ATTEMPT_MAX; round += 1) {
    for (const [at, { addresses }] of lookups.entries()) {
      if (left === 0 || round >= addresses.length) continue;
      shares[at] = round + 1;
      left -= 1;
    }
  }
  return lookups
    .map(({ name, preference, addresses }, at) => {
      return { name, preference, addresses: someOf(addresses, shares[at] ?? 0) };
    })
    .filter(({ addresses }) => addresses.length > 0);
}

function someOf(addresses: readonly MxAddress[], count: number): readonly MxAddress[] {
  const some = addresses.slice(0, count);
  const [first] = some;
  const other = addresses.find(({ family }) => family !== first?.family);
  if (count < 2 || other === undefined || some.includes(other)) return some;
  return [...some.slice(0, -1), other];
}

/** Fisher and Yates. */
export function shuffled<T>(items: readonly T[], random: () => number): T[] {
  const drawn: T[] = [];
  for (const item of items) {
    const at = Math.floor(random() * (drawn.length + 1));
    const displaced = drawn[at];
    if (displaced !== undefined) drawn.push(displaced);
    drawn[at] = item;
  }
  return drawn;
}
