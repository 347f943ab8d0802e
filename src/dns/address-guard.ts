// The one judge of which IP addresses the appliance may connect to on somebody else's word: MX hosts, attachment
// URLs, webhook endpoints, MTA-STS hosts.
//
// In: an address as text, from a DNS answer, from a URL or from `socket.remoteAddress` after connect (the second
// look closes the gap that DNS rebinding needs). Out: ok, or a reason in words. It lets through global unicast
// addresses only. It refuses every special range of IANA's registries, cloud metadata services, addresses of our
// own, IPv4 wrapped in IPv6 when the wrapped address would be refused, and notations that two parsers could read
// differently. The operator's allow list (MAILSTEAD_PRIVATE_HOSTS) wins over all but the notation.

import { isIP } from 'node:net';
import ipaddr from 'ipaddr.js';

type Address = ipaddr.IPv4 | ipaddr.IPv6;
type Range = readonly [Address, number];

export type AddressCheck =
  | { readonly ok: true }
  | {
      readonly ok: false;
      /** `own_address` lets the MX finder tell a mail loop from a forbidden range. */
      readonly kind: 'notation' | 'own_address' | 'range';
      /** For example `127.0.0.1 is a loopback address`. */
      readonly reason: string;
    };

export type AddressGuard = { readonly check: (ip: string) => AddressCheck };

const OK: AddressCheck = { ok: true };

/** Keys are the range names of ipaddr.js; a name missing here is refused as `special-purpose`. */
const RANGE_WORDS: Readonly<Record<string, string>> = {
  unspecified: 'an unspecified',
  broadcast: 'a broadcast',
  multicast: 'a multicast',
  linkLocal: 'a link-local',
  deprecatedSiteLocal: 'a site-local',
  loopback: 'a loopback',
  carrierGradeNat: 'a carrier-grade NAT',
  private: 'a private',
  uniqueLocal: 'a unique local',
  reserved: 'a reserved or documentation',
  benchmarking: 'a benchmarking',
  discard: 'a discard-only',
  rfc6145: 'an IPv4-translated',
  rfc6052: 'a local NAT64',
};

/**
 * Metadata services that hand out credentials to whoever asks from inside. All but Azure's are inside ranges
 * that are refused anyway; naming them makes the reason plain.
 */
const METADATA: readonly Range[] = [
  '169.254.169.254/32',
  '169.254.170.2/32', // AWS ECS task credentials.
  '100.100.100.200/32', // Alibaba.
  '168.63.129.16/32', // Azure, in public address space.
  '192.0.0.192/32', // Oracle.
  'fd00:ec2::254/128', // AWS.
  'fd20:ce::254/128', // Google.
].map((cidr) => ipaddr.parseCIDR(cidr));

/** One way of carrying IPv4 addresses inside an IPv6 address. */
type Wrapping = {
  readonly holds: (parts: readonly number[]) => boolean;
  readonly wrapped: (parts: readonly number[]) => readonly ipaddr.IPv4[];
  /** True when a harmless wrapped address makes the whole address harmless, wherever ipaddr.js files it. */
  readonly reachable: boolean;
};

const WRAPPINGS: readonly Wrapping[] = [
  // IPv4-mapped ::ffff:0:0/96: what a dual-stack socket reports as remoteAddress (RFC 4291 §2.5.5.2).
  { holds: startsWith([0, 0, 0, 0, 0, 0xffff]), wrapped: lastV4, reachable: true },
  // IPv4-compatible ::/96, deprecated (RFC 4291 §2.5.5.1). `::` and `::1` are no wrappings.
  {
    holds: (parts) =>
      startsWith([0, 0, 0, 0, 0, 0])(parts) && (part(parts, 6) > 0 || part(parts, 7) > 1),
    wrapped: lastV4,
    reachable: false,
  },
  // IPv4-translated ::ffff:0:0:0/96 (RFC 7915).
  { holds: startsWith([0, 0, 0, 0, 0xffff, 0]), wrapped: lastV4, reachable: false },
  // NAT64 64:ff9b::/96: how a host without IPv4 reaches every IPv4 address (RFC 6052 §2.1).
  { holds: startsWith([0x64, 0xff9b, 0, 0, 0, 0]), wrapped: lastV4, reachable: true },
  // Local NAT64 64:ff9b:1::/48 (RFC 8215): where the IPv4 address sits is a local choice, so never reachable.
  { holds: startsWith([0x64, 0xff9b, 1]), wrapped: lastV4, reachable: false },
  // 6to4 2002::/16 (RFC 3056 §2).
  {
    holds: startsWith([0x2002]),
    wrapped: (parts) => [v4(part(parts, 1), part(parts, 2))],
    reachable: true,
  },
  // Teredo 2001::/32: the server, and the client with all bits flipped (RFC 4380 §4).
  {
    holds: startsWith([0x2001, 0]),
    wrapped: (parts) => [
      v4(part(parts, 2), part(parts, 3)),
      v4(part(parts, 6) ^ 0xffff, part(parts, 7) ^ 0xffff),
    ],
    reachable: true,
  },
];

/**
 * A guard that knows the operator's exceptions.
 *
 * `allow` holds CIDRs or single addresses; IPv4 ones also open the same address wrapped in IPv6. `ownAddresses`
 * gives this machine's, as `os.networkInterfaces()` has them; it is asked at every check, since a machine gets
 * addresses while it runs. Throws on an entry of `allow` that is neither.
 */
export function createAddressGuard(options: {
  readonly allow: readonly string[];
  readonly ownAddresses?: () => readonly string[];
}): AddressGuard {
  const allowed = options.allow.map(parseRange);
  const isOwn = (address: Address): boolean =>
    (options.ownAddresses?.() ?? [])
      .filter(isStrict)
      .some((ip) => unmapped(parseStrictly(ip)).toString() === address.toString());

  function check(ip: string): AddressCheck {
    if (!isStrict(ip)) {
      const reason = `${JSON.stringify(ip.slice(0, 60))} is not a plainly written IP address`;
      return { ok: false, kind: 'notation', reason };
    }
    return judge(parseStrictly(ip));
  }

  function judge(address: Address): AddressCheck {
    if (allowed.some((range) => matches(address, range))) return OK;
    if (isOwn(address)) {
      return { ok: false, kind: 'own_address', reason: `${address.toString()} is our own address` };
    }
    return address instanceof ipaddr.IPv6 ? judgeV6(address) : judgeRange(address);
  }

  function judgeV6(address: ipaddr.IPv6): AddressCheck {
    const wrapping = WRAPPINGS.find(({ holds }) => holds(address.parts));
    // ISATAP sits behind any /64 prefix (RFC 5214 §6.1), so the prefix is judged as well, below.
    const wrapped =
      wrapping?.wrapped(address.parts) ?? (isIsatap(address) ? lastV4(address.parts) : []);
    for (const inner of wrapped) {
      const verdict = judge(inner);
      if (!verdict.ok) {
        return { ...verdict, reason: `${address.toString()} wraps ${verdict.reason}` };
      }
    }
    return wrapping?.reachable === true ? OK : judgeRange(address);
  }

  return { check };
}

function judgeRange(address: Address): AddressCheck {
  const words = METADATA.some((range) => matches(address, range))
    ? 'a cloud metadata'
    : rangeWords(address);
  if (words === null) return OK;
  return { ok: false, kind: 'range', reason: `${address.toString()} is ${words} address` };
}

function rangeWords(address: Address): string | null {
  const range: string = address.range();
  if (range !== 'unicast') return RANGE_WORDS[range] ?? 'a special-purpose';
  // RFC 4291 §2.4 and IANA's registry: of IPv6 only 2000::/3 is handed out as global unicast.
  if (address instanceof ipaddr.IPv6 && (part(address.parts, 0) & 0xe000) !== 0x2000) {
    return 'an unallocated';
  }
  return null;
}

/**
 * True for notations that every parser reads alike. `isIP` refuses what inet_aton would take: leading zeros
 * (octal), hex, integers, short forms. A zone id names an interface of ours, which no peer may choose.
 */
function isStrict(ip: string): boolean {
  return isIP(ip) !== 0 && !ip.includes('%');
}

function parseStrictly(ip: string): Address {
  if (!isStrict(ip)) throw new Error(`not an IP address: ${JSON.stringify(ip)}`);
  // ipaddr.js reads `::8.8.8.8` as `::ffff:8.8.8.8`, so it gets IPv6 in hexadecimal only.
  return ipaddr.parse(ip.includes(':') ? ip.replace(/[\d.]+\.\d+$/, quadInHex) : ip);
}

function quadInHex(quad: string): string {
  const [a = 0, b = 0, c = 0, d = 0] = quad.split('.').map(Number);
  return `${((a << 8) | b).toString(16)}:${((c << 8) | d).toString(16)}`;
}

function parseRange(text: string): Range {
  const [ip = '', bits, ...rest] = text.split('/');
  const address = parseStrictly(ip);
  const bitsMax = address instanceof ipaddr.IPv6 ? 128 : 32;
  if (bits === undefined) return [address, bitsMax];
  if (rest.length > 0 || !/^\d{1,3}$/.test(bits) || Number(bits) > bitsMax) {
    throw new Error(`not a CIDR range: ${JSON.stringify(text)}`);
  }
  return [address, Number(bits)];
}

function matches(address: Address, [base, bits]: Range): boolean {
  // ipaddr.js throws when the families differ.
  return address.kind() === base.kind() && address.match(base, bits);
}

function unmapped(address: Address): Address {
  const mapped = address instanceof ipaddr.IPv6 && address.isIPv4MappedAddress();
  return mapped ? address.toIPv4Address() : address;
}

function isIsatap(address: ipaddr.IPv6): boolean {
  // The universal and the group bit may be set: 0000:5efe, 0200:5efe and so on.
  return (part(address.parts, 4) & 0xfcff) === 0 && part(address.parts, 5) === 0x5efe;
}

function startsWith(prefix: readonly number[]): (parts: readonly number[]) => boolean {
  return (parts) => prefix.every((value, at) => parts[at] === value);
}

function lastV4(parts: readonly number[]): readonly ipaddr.IPv4[] {
  return [v4(part(parts, 6), part(parts, 7))];
}

function v4(high: number, low: number): ipaddr.IPv4 {
  return new ipaddr.IPv4([high >> 8, high & 0xff, low >> 8, low & 0xff]);
}

function part(parts: readonly number[], at: number): number {
  return parts[at] ?? 0;
}
