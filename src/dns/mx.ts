// Finds the hosts that take mail for a domain, in the order to try them (RFC 5321 §5.1, RFC 7505).
//
// In: the domain part of an address. Out: hosts with addresses that the guard let through; or a refusal that says
// whether it is final; or a deferral because the DNS did not answer. Never an exception for what the DNS said, and
// never a guess: a failed lookup is a deferral, not a reason to take the A record instead. It refuses address
// literals, the null MX, lists whose best host is this machine, and addresses that the guard refuses.

import { isIP } from 'node:net';
import { domainToASCII } from 'node:url';
import type { AddressGuard } from './address-guard.ts';
import type { DnsAnswer, MxRecord, Resolver } from './resolver.ts';

export type AddressPolicy = 'ipv4_first' | 'ipv6_first' | 'ipv4_only' | 'ipv6_only';
export type MxAddress = { readonly address: string; readonly family: 4 | 6 };
export type MxHost = {
  /** Lower-case A-label; what the certificate and an MTA-STS policy must match. */
  readonly name: string;
  readonly preference: number;
  /** In the order to try; never empty. */
  readonly addresses: readonly MxAddress[];
};

export type MxHosts = {
  readonly kind: 'hosts';
  /** The domain that was asked for, as a lower-case A-label: MTA-STS is looked up here, not at the CNAME's end. */
  readonly domain: string;
  /** In the order to try, at most `ADDRESSES_PER_ATTEMPT_MAX` addresses over all. */
  readonly hosts: readonly MxHost[];
  /** True when there is no MX and the domain itself is the host. */
  readonly implicit: boolean;
  /** The names that CNAMEs led to from `domain`, in order. */
  readonly cnames: readonly string[];
};

export type MxRefusalCode =
  'null_mx' | 'no_domain' | 'no_usable_host' | 'address_refused' | 'mail_loop' | 'domain_literal';

export type MxRefused = {
  readonly kind: 'refused';
  readonly code: MxRefusalCode;
  /** False: a later attempt may find it mended. */
  readonly permanent: boolean;
  /** Enhanced status code (RFC 3463, RFC 7505); its class agrees with `permanent`. */
  readonly enhanced: string;
  readonly message: string;
};

export type MxDeferred = {
  readonly kind: 'deferred';
  readonly code: 'dns_failed';
  readonly enhanced: '4.4.3';
  readonly message: string;
};

export type MxResult = MxHosts | MxRefused | MxDeferred;
export type MxFinder = { readonly findHosts: (domain: string) => Promise<MxResult> };

export type MxFinderOptions = {
  readonly resolver: Pick<Resolver, 'mx' | 'a' | 'aaaa' | 'cname'>;
  readonly guard: AddressGuard;
  /** Default `ipv4_first`: large receivers ask more of a sender over IPv6 (PTR, SPF) than over IPv4. */
  readonly addressPolicy?: AddressPolicy;
  /** A host of this name in the list is this machine. */
  readonly ownHostname?: string;
  /** In [0, 1). */
  readonly random: () => number;
};

export const ADDRESSES_PER_ATTEMPT_MAX = 5;
/** Hosts whose addresses are asked for at the same time; the next ones are asked only if none of these is usable. */
const HOSTS_IN_PARALLEL_MAX = 5;
const HOSTS_MAX = 20;
const CNAMES_MAX = 16;
const REASONS_IN_MESSAGE_MAX = 3;
// RFC 1035 §2.3.4.
const LABEL_CHARS_MAX = 63;
const NAME_CHARS_MAX = 253;

type Candidate = { readonly name: string; readonly preference: number };
type Route =
  | {
      readonly kind: 'mx';
      readonly cnames: readonly string[];
      readonly records: readonly MxRecord[];
    }
  | { readonly kind: 'implicit'; readonly cnames: readonly string[]; readonly name: string };
/** What one host's lookups came to; a host may have good, refused and unknown addresses at once. */
type Lookup = Candidate & {
  readonly addresses: readonly MxAddress[];
  readonly isOurs: boolean;
  readonly refusals: readonly string[];
  readonly failure: string | null;
};

/** A finder over one resolver and one guard. It keeps nothing; the resolver does. */
export function createMxFinder(options: MxFinderOptions): MxFinder {
  return { findHosts: (domain) => findHosts(options, domain) };
}

async function findHosts(options: MxFinderOptions, domain: string): Promise<MxResult> {
  const start = parseDomain(domain);
  if (typeof start !== 'string') return start;
  const route = await followDomain(options.resolver, start);
  if (route.kind === 'refused' || route.kind === 'deferred') return route;

  const ownName = nameOf(options.ownHostname ?? '');
  const implicit = route.kind === 'implicit';
  // RFC 5321 §5.1: without an MX the domain itself is the host, with preference 0.
  const named = implicit ? [{ name: route.name, preference: 0 }] : usableCandidates(route.records);
  if (named === 'null_mx') {
    return refused('null_mx', '5.1.10', `${start} accepts no mail: it publishes a null MX.`);
  }
  const ordered = inOrder(named, options.random);
  const ours = ordered.find(({ name }) => name === ownName);
  const candidates = ordered.filter(betterThan(ours));
  if (candidates.length === 0 && ours !== undefined) return mailLoop(start);

  const lookups = await lookUpHosts(options, candidates);
  const oursByAddress = lookups.find(({ isOurs }) => isOurs);
  const others = lookups.filter(betterThan(oursByAddress));
  if (others.length === 0 && oursByAddress !== undefined) return mailLoop(start);
  const usable = others.filter(({ addresses }) => addresses.length > 0);
  if (usable.length > 0) {
    const hosts = shareAttempts(usable);
    return { kind: 'hosts', domain: start, hosts, implicit, cnames: route.cnames };
  }
  return noHost(options, { domain: start, implicit, lookups: others });
}

/** The domain as a lower-case A-label, or why it cannot be one. */
function parseDomain(domain: string): string | MxRefused {
  if (domain.startsWith('[') || isIP(domain) !== 0) return domainLiteral(domain);
  const name = toALabels(domain);
  // Full-width digits become an address only here.
  if (isIP(name) !== 0) return domainLiteral(domain);
  if (isHostName(name)) return name;
  const shown = JSON.stringify(domain.slice(0, NAME_CHARS_MAX));
  return refused('no_domain', '5.1.2', `${shown} is not a domain name.`);
}

function domainLiteral(domain: string): MxRefused {
  const shown = domain.slice(0, NAME_CHARS_MAX);
  return refused('domain_literal', '5.1.2', `Mail to the address literal ${shown} is not sent.`);
}

/** RFC 5891 §4. Returns '' for what has no ASCII form. */
function toALabels(domain: string): string {
  const trimmed = domain.replace(/\.$/, '');
  // domainToASCII reads ASCII as a URL's host would be read: it rewrites 0x7f.1 and cuts at a slash.
  if (/^[\0-\x7f]*$/.test(trimmed)) return trimmed.toLowerCase();
  return /^[a-z0-9._\u0080-\u{10ffff}-]*$/iu.test(trimmed) ? domainToASCII(trimmed) : '';
}

/**
 * True for names that a mail host can have: letters, digits, hyphens inside (RFC 1123 §2.1), and underscores,
 * which are wrong and in use. The last label of an address in any notation is numeric, that of a name never is.
 */
function isHostName(name: string): boolean {
  const labels = name.split('.');
  return (
    name.length <= NAME_CHARS_MAX &&
    labels.every(
      (label) =>
        label.length <= LABEL_CHARS_MAX && /^[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?$/.test(label),
    ) &&
    !/^(\d+|0x[0-9a-f]*)$/.test(labels.at(-1) ?? '')
  );
}

/**
 * Follows CNAMEs of the domain and asks for its MX.
 *
 * A loop or an overlong chain is deferred, not refused: it is a slip in a zone, mended within the lifetime of a
 * message, and most resolvers report it as SERVFAIL, so that other MTAs defer as well.
 */
async function followDomain(
  resolver: MxFinderOptions['resolver'],
  domain: string,
): Promise<Route | MxRefused | MxDeferred> {
  const cnames: string[] = [];
  let name = domain;
  for (;;) {
    // At the same time, because nearly every domain has no CNAME.
    const [cname, mx] = await Promise.all([resolver.cname(name), resolver.mx(name)]);
    if (cname.kind === 'found') {
      // RFC 5321 §5.1: the name that a CNAME gives is processed as if it were the initial name.
      const target = nameOf(cname.records[0] ?? '');
      const why = cnameFault([domain, ...cnames], target);
      if (why !== null) return deferred(`The CNAME records of ${domain} ${why}.`);
      cnames.push(target);
      name = target;
      continue;
    }
    return routeOf({ name, cnames, cname, mx });
  }
}

function routeOf(found: {
  readonly name: string;
  readonly cnames: readonly string[];
  readonly cname: DnsAnswer<string>;
  readonly mx: DnsAnswer<MxRecord>;
}): Route | MxRefused | MxDeferred {
  const { name, cnames, cname, mx } = found;
  if (mx.kind === 'found') return { kind: 'mx', cnames, records: mx.records };
  if (mx.kind === 'failed') {
    return deferred(`The DNS lookup of the MX records of ${name} failed: ${mx.cause}.`);
  }
  // RFC 5321 §5.1: a non-existent domain is an error, not a case for the implicit MX.
  if (mx.kind === 'no_name') {
    return refused('no_domain', '5.1.2', `The domain ${name} does not exist in the DNS.`);
  }
  if (cname.kind === 'failed') {
    return deferred(`The DNS lookup of a CNAME record of ${name} failed: ${cname.cause}.`);
  }
  return { kind: 'implicit', cnames, name };
}

function cnameFault(seen: readonly string[], target: string): string | null {
  if (!isHostName(target)) return 'lead to an invalid name';
  if (seen.includes(target)) return `form a loop at ${target}`;
  return seen.length > CNAMES_MAX ? `form a chain of more than ${CNAMES_MAX}` : null;
}

/** Drops what cannot be a host: `.` beside others, addresses in place of names, bad labels. */
function usableCandidates(records: readonly MxRecord[]): readonly Candidate[] | 'null_mx' {
  const hosts = records.filter(({ exchange }) => exchange !== '');
  // RFC 7505 §3 asks for preference 0 and a single record; whoever writes only dots means the same.
  if (hosts.length === 0) return 'null_mx';
  return hosts
    .map(({ exchange, preference }) => ({ name: nameOf(exchange), preference }))
    .filter(({ name }) => isHostName(name));
}

/** RFC 5321 §5.1: by preference, at random among equals, so that load spreads. A name counts once. */
function inOrder(candidates: readonly Candidate[], random: () => number): readonly Candidate[] {
  // Sorting is stable, so equals stay shuffled.
  const sorted = shuffled(candidates, random).sort((a, b) => a.preference - b.preference);
  const seen = new Set<string>();
  return sorted.filter(({ name }) => {
    const isNew = !seen.has(name);
    seen.add(name);
    return isNew;
  });
}

/** Fisher and Yates. */
function shuffled<T>(items: readonly T[], random: () => number): T[] {
  const drawn: T[] = [];
  for (const item of items) {
    const at = Math.floor(random() * (drawn.length + 1));
    const displaced = drawn[at];
    if (displaced !== undefined) drawn.push(displaced);
    drawn[at] = item;
  }
  return drawn;
}

/**
 * RFC 5321 §5.1: when this machine is in the list, it is dropped with every host of equal or worse preference;
 * handing the message to one of those would bring it back.
 */
function betterThan(ours: Candidate | undefined): (host: Candidate) => boolean {
  return ({ preference }) => ours === undefined || preference < ours.preference;
}

/** The first batch with a usable host ends the search; a domain may list more dead hosts than one attempt tries. */
async function lookUpHosts(
  options: MxFinderOptions,
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

async function lookUpHost(options: MxFinderOptions, host: Candidate): Promise<Lookup> {
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
  resolver: MxFinderOptions['resolver'],
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

function familiesInOrder(options: MxFinderOptions): readonly (4 | 6)[] {
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

/** Gives every host its first address, then every host its second, until the attempt is full; order is kept. */
function shareAttempts(lookups: readonly Lookup[]): readonly MxHost[] {
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
      return { name, preference, addresses: addresses.slice(0, shares[at]) };
    })
    .filter(({ addresses }) => addresses.length > 0);
}

/** What to say when no host of a domain has an address that may be used. */
function noHost(
  options: MxFinderOptions,
  found: {
    readonly domain: string;
    readonly implicit: boolean;
    readonly lookups: readonly Lookup[];
  },
): MxRefused | MxDeferred {
  const { domain, implicit, lookups } = found;
  // First of all: the host behind a failed lookup may be the good one.
  const failures = lookups.flatMap(({ failure }) => failure ?? []);
  if (failures.length > 0) {
    return deferred(`The DNS lookup of mail hosts of ${domain} failed (${some(failures)}).`);
  }
  const refusals = lookups.flatMap((lookup) => lookup.refusals);
  if (refusals.length > 0) {
    const message =
      `The address guard refuses every address of the mail hosts of ${domain} (${some(refusals)}). ` +
      'MAILSTEAD_PRIVATE_HOSTS opens address ranges.';
    return refused('address_refused', '5.4.4', message);
  }
  if (!implicit) {
    // RFC 5321 §5.1 asks for an error and leaves its class open. Transient: an MX shows the will to take mail, and
    // a host that is renamed or whose record is late is a common slip, mended within the lifetime of a message.
    const message = `No mail host of ${domain} has a usable name and an address.`;
    return refused('no_usable_host', '4.4.4', message);
  }
  // Neither MX nor address: a name for other uses, or a typing error, of which its author should hear at once.
  // With one family not asked for, that is not known.
  const known = familiesInOrder(options).length === 2;
  const message = `The domain ${domain} has neither mail hosts nor an address.`;
  return refused('no_usable_host', known ? '5.4.4' : '4.4.4', message);
}

function mailLoop(domain: string): MxRefused {
  const message = `Mail for ${domain} loops: this host is its best mail host and does not take its mail.`;
  return refused('mail_loop', '5.4.6', message);
}

function refused(code: MxRefusalCode, enhanced: string, message: string): MxRefused {
  return { kind: 'refused', code, permanent: enhanced.startsWith('5'), enhanced, message };
}

function deferred(message: string): MxDeferred {
  return { kind: 'deferred', code: 'dns_failed', enhanced: '4.4.3', message };
}

function some(reasons: readonly string[]): string {
  const more = reasons.length > REASONS_IN_MESSAGE_MAX ? '; …' : '';
  return reasons.slice(0, REASONS_IN_MESSAGE_MAX).join('; ') + more;
}

/** A name as the DNS spells it, as names are compared here. */
function nameOf(text: string): string {
  return text.toLowerCase().replace(/\.$/, '');
}
