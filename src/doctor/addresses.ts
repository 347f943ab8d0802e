// The addresses that mail leaves from, as receivers see them: does the PTR record lead to a name that leads back
// (forward-confirmed reverse DNS), and does our HELO name have the address.
import { isIPv6 } from 'node:net';
import { nameOf } from '../dns/host-name.ts';
import type { DnsAnswer } from '../dns/resolver.ts';
import { membersOf } from '../delivery/egress.ts';
import { reversed } from '../receiving/dnsbl.ts';
import { bad, info, ok, shown, unknown, type Finding } from './finding.ts';
import { whyNotDirect, type Surroundings } from './surroundings.ts';

export interface OwnAddress {
  readonly address: string;
  readonly helo: string;
  /** By their names in config/delivery.json. */
  readonly egresses: readonly string[];
}

export interface OwnAddresses {
  readonly list: readonly OwnAddress[];
  /** The DNS did not say which they are: what is known of them stands. */
  readonly isUnknown: boolean;
  /** Where they come from, and what could not be found out. */
  readonly findings: readonly Finding[];
}

const ADDRESSES_MAX = 64;
const NAMES_MAX = 10;

/**
 * Those of config/delivery.json; an egress that names none that the Internet could see leaves from an address that
 * this machine cannot know, and is taken to leave from those of MAILSTEAD_HOSTNAME.
 */
export async function findOwnAddresses(s: Surroundings): Promise<OwnAddresses> {
  const why = whyNotDirect(s);
  if (why !== null) {
    const about = ['egress_address', s.config.hostname] as const;
    return {
      list: [],
      isUnknown: false,
      findings: [info(about, `Our addresses are not looked at: ${why}.`)],
    };
  }
  const { hostname } = s.config;
  const egresses = [
    ...new Set([...s.delivery.pools.keys()].flatMap((p) => membersOf(s.delivery, p))),
  ];
  const findings: Finding[] = [];
  const found = new Map<string, { helo: string; egresses: string[] }>();
  const add = (address: string, about: { helo: string; egress: string }): void => {
    const known = found.get(address);
    if (known !== undefined) known.egresses.push(about.egress);
    else if (found.size < ADDRESSES_MAX) {
      found.set(address, { helo: about.helo, egresses: [about.egress] });
    }
  };
  let ofHostname: readonly string[] | null = null;
  for (const { name, ipv4, ipv6, helo } of egresses) {
    const about = { helo: helo ?? hostname, egress: name };
    const given = [ipv4, ipv6].filter((one) => one !== null && s.guard.check(one).ok) as string[];
    if (given.length === 0) ofHostname ??= await addressesOfHostname(s, findings);
    for (const address of given.length > 0 ? given : (ofHostname ?? [])) add(address, about);
  }
  return {
    list: [...found].map(([address, about]) => ({ address, ...about })),
    isUnknown: findings.some(({ severity }) => severity === 'unknown'),
    findings,
  };
}

async function addressesOfHostname(
  s: Surroundings,
  findings: Finding[],
): Promise<readonly string[]> {
  const { hostname } = s.config;
  const about = ['egress_address', hostname] as const;
  const answers = await Promise.all([s.resolver.a(hostname), s.resolver.aaaa(hostname)]);
  const addresses = answers.flatMap(recordsOf).filter((one) => s.guard.check(one).ok);
  if (addresses.length > 0) {
    findings.push(
      info(
        about,
        `config/delivery.json names no public address that mail leaves from, so those of ${hostname} are looked at: ${addresses.join(', ')}.`,
        {
          advice:
            'When mail leaves from another address than these, name it under `egresses` in config/delivery.json, so that it is looked at.',
          detail: { addresses },
        },
      ),
    );
    return addresses;
  }
  const failed = answers.find((one) => one.kind === 'failed');
  findings.push(
    failed === undefined
      ? bad('error', about, {
          message: `${hostname} has no public A or AAAA record, so no host can find or confirm this one.`,
          advice: `Publish an A record (and AAAA, with IPv6) of ${hostname} with the public address of this machine.`,
        })
      : unknown(about, {
          message: `The DNS did not answer the question for the addresses of ${hostname} (${failed.cause}).`,
          advice: 'See what `resolver` says.',
        }),
  );
  return [];
}

const recordsOf = (answer: DnsAnswer<string>): readonly string[] =>
  answer.kind === 'found' ? answer.records : [];

/** Two spellings of one address are the same here. */
const isSame = (one: string, other: string): boolean =>
  isIPv6(one) === isIPv6(other) && reversed(one) === reversed(other);

const forwardOf = (s: Surroundings, name: string, address: string): Promise<DnsAnswer<string>> =>
  isIPv6(address) ? s.resolver.aaaa(name) : s.resolver.a(name);

export async function checkReverse(s: Surroundings, own: OwnAddress): Promise<Finding> {
  const { address, helo } = own;
  const about = ['reverse_dns', address] as const;
  const answer = await s.resolver.ptr(
    `${reversed(address)}.${isIPv6(address) ? 'ip6' : 'in-addr'}.arpa`,
  );
  const silent = (cause: string): Finding =>
    unknown(about, {
      message: `The DNS did not answer the questions for the reverse DNS of ${address} (${cause}).`,
      advice:
        'See what `resolver` says; if that is well, ask whose address it is about its reverse zone.',
    });
  if (answer.kind === 'failed') return silent(answer.cause);
  if (answer.kind !== 'found') {
    return bad('error', about, {
      message: `${address} has no PTR record; Gmail, Yahoo and others refuse mail from such an address.`,
      advice: `Have the owner of the address (the hosting provider, in its control panel) set its PTR record to ${helo}.`,
    });
  }
  const names = answer.records.slice(0, NAMES_MAX).map(nameOf);
  const forwards = await Promise.all(names.map((name) => forwardOf(s, name, address)));
  const confirmed = names.filter((_, at) =>
    recordsOf(forwards[at]!).some((one) => isSame(one, address)),
  );
  const list = names.map((name) => shown(name)).join(', ');
  const detail = { names, confirmed };
  if (confirmed.length === 0) {
    const failed = forwards.find((one) => one.kind === 'failed');
    if (failed !== undefined) return silent(failed.cause);
    return bad('error', about, {
      message: `The PTR record of ${address} leads to ${list}, which does not lead back to it.`,
      advice: `Publish ${isIPv6(address) ? 'an AAAA' : 'an A'} record of ${list} with ${address}, or have the PTR record set to ${helo}.`,
      detail,
    });
  }
  if (confirmed.includes(nameOf(helo))) {
    return ok(about, `${address} is ${helo} in both directions.`, detail);
  }
  return info(about, `${address} is ${list} in both directions, while we say ${helo} in EHLO.`, {
    advice: `Have the PTR record of ${address} set to ${helo}: some receivers count a difference against us.`,
    detail,
  });
}

export async function checkHelo(s: Surroundings, own: OwnAddress): Promise<Finding> {
  const { address, helo } = own;
  const about = ['helo_name', address] as const;
  const answer = await forwardOf(s, helo, address);
  const type = isIPv6(address) ? 'AAAA' : 'A';
  if (answer.kind === 'failed') {
    return unknown(about, {
      message: `The DNS did not answer the question for the ${type} records of ${helo} (${answer.cause}).`,
      advice: 'See what `resolver` says.',
    });
  }
  const records = recordsOf(answer);
  if (records.some((one) => isSame(one, address))) {
    return ok(about, `${helo}, which we say in EHLO, has the address ${address}.`);
  }
  return bad(records.length === 0 ? 'error' : 'warning', about, {
    message:
      records.length === 0
        ? `${helo}, which we say in EHLO when mail leaves from ${address}, has no ${type} record.`
        : `${helo}, which we say in EHLO, has the address ${records.slice(0, NAMES_MAX).join(', ')} and not ${address}.`,
    advice: `Publish ${type === 'A' ? 'an A' : 'an AAAA'} record of ${helo} with ${address}.`,
    detail: { addresses: records.slice(0, NAMES_MAX) },
  });
}
