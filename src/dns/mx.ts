// Finds the hosts that take mail for a domain, in the order to try them (RFC 5321 §5.1, RFC 7505).
//
// In: the domain part of an address. Out: hosts with addresses that the guard let through; or a refusal that says
// whether it is final; or a deferral because the DNS did not answer. Never an exception for what the DNS said, and
// never a guess: a failed lookup is a deferral, not a reason to take the A record instead. It refuses address
// literals, the null MX, lists whose best host is this machine, and addresses that the guard refuses.

import { isIP } from 'node:net';
import { cnameFault, isHostName, NAME_CHARS_MAX, nameOf, toALabels } from './host-name.ts';
import { familiesInOrder, lookUpHosts, shareAttempts, shuffled } from './mx-hosts.ts';
import type { AddressPolicy, Candidate, HostLookupOptions, Lookup, MxHost } from './mx-hosts.ts';
import type { DnsAnswer, MxRecord, Resolver } from './resolver.ts';

export type MxHosts = {
  readonly kind: 'hosts';
  /** The domain that was asked for, as a lower-case A-label: MTA-STS is looked up here, not at the CNAME's end. */
  readonly domain: string;
  /** In the order to try, at most `ADDRESSES_PER_ATTEMPT_MAX` addresses over all. */
  readonly hosts: readonly MxHost[];
  /** All hosts that the domain names and that are no part of this machine, whether they are tried now or not. */
  readonly names: readonly string[];
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
export type MxFinder = {
  /** `addresses` says which families to take, and which first; default: that of the finder. */
  readonly findHosts: (domain: string, addresses?: AddressPolicy) => Promise<MxResult>;
};

export type MxFinderOptions = HostLookupOptions & {
  readonly resolver: Pick<Resolver, 'mx'>;
  /** A host of this name in the list is this machine. */
  readonly ownHostname?: string;
};

const REASONS_IN_MESSAGE_MAX = 3;

type Route =
  | {
      readonly kind: 'mx';
      readonly cnames: readonly string[];
      readonly records: readonly MxRecord[];
    }
  | { readonly kind: 'implicit'; readonly cnames: readonly string[]; readonly name: string };

/** A finder over one resolver and one guard. It keeps nothing; the resolver does. */
export function createMxFinder(options: MxFinderOptions): MxFinder {
  return {
    findHosts: (domain, addressPolicy) =>
      findHosts(addressPolicy === undefined ? options : { ...options, addressPolicy }, domain),
  };
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
    const names = candidates.map(({ name }) => name);
    return { kind: 'hosts', domain: start, hosts, names, implicit, cnames: route.cnames };
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

/**
 * RFC 5321 §5.1: when this machine is in the list, it is dropped with every host of equal or worse preference;
 * handing the message to one of those would bring it back.
 */
function betterThan(ours: Candidate | undefined): (host: Candidate) => boolean {
  return ({ preference }) => ours === undefined || preference < ours.preference;
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
  const families = familiesInOrder(options);
  const kind = families.length === 2 ? 'an address' : `an IPv${families[0] ?? ''} address`;
  if (!implicit) {
    // RFC 5321 §5.1 asks for an error and leaves its class open. Transient: an MX shows the will to take mail, and
    // a host that is renamed or whose record is late is a common slip, mended within the lifetime of a message.
    const message = `No mail host of ${domain} has a usable name and ${kind}.`;
    return refused('no_usable_host', '4.4.4', message);
  }
  // Neither MX nor address: a name for other uses, or a typing error, of which its author should hear at once.
  // With one family not asked for, that is not known.
  const message = `The domain ${domain} has neither mail hosts nor ${kind}.`;
  return refused('no_usable_host', families.length === 2 ? '5.4.4' : '4.4.4', message);
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
