// Where a lane's mail goes next: the built-in sink, the smarthost, or the MX hosts of a domain. The
// answer is a list of targets to try in order, or why there is none.
import { lookup } from 'node:dns/promises';
import { isIP } from 'node:net';
import type { AddressPolicy } from '../dns/mx-hosts.ts';
import type { MxFinder } from '../dns/mx.ts';
import type { HostPolicy, TlsPolicies } from '../dns/tls-policy.ts';
import type { Cause } from '../mail/outcome.ts';
import { SANDBOX_DOMAIN } from '../mail/sandbox.ts';
import {
  mxDestination,
  readDestination,
  SANDBOX_LANE,
  SINK_LANE,
  SMARTHOST_LANE,
} from '../store/destination.ts';
import type { DeliveryPolicy, Egress } from './egress.ts';
import type { Target } from './session.ts';

export type NextHops =
  | {
      readonly kind: 'targets';
      readonly targets: readonly Target[];
      /** All MX hosts of the domain, also those that are not tried now; absent: as the targets say. */
      readonly mxNames?: readonly string[];
      /** It comes to our own inbound listener. */
      readonly isHome?: true;
      /** What the recipient's domain asks of each host's encryption; absent where mail does not go to MX hosts. */
      readonly policies?: ReadonlyMap<string, HostPolicy>;
    }
  | {
      readonly kind: 'none';
      readonly permanent: boolean;
      readonly cause: Cause;
      readonly enhanced: string;
      readonly message: string;
    };

export interface Smarthost {
  readonly host: string;
  readonly port: number;
  /** smtps: TLS from the first byte. */
  readonly implicitTls: boolean;
  readonly login: { readonly user: string; readonly pass: string } | null;
}

/** Where our inbound listener is, seen from a delivery worker. */
export type HomeListener =
  /** On this machine. */
  | { readonly kind: 'here'; readonly port: number }
  /** In another process of the appliance, perhaps on another machine: it is reached by our name. */
  | { readonly kind: 'elsewhere' }
  /** It should run in this process, and its port could not be opened. */
  | { readonly kind: 'closed' };

/** Mail whose best MX is this machine. */
interface Home {
  readonly listener: HomeListener;
  /** Whether our inbound listener takes mail for this domain (A-labels). */
  readonly takesMail: (domain: string) => Promise<boolean>;
  /** What the DNS has for our name; empty when it says nothing. */
  readonly addresses: () => Promise<readonly string[]>;
}

export interface NextHopDependencies {
  /** What config/delivery.json says now. */
  readonly policy: () => DeliveryPolicy;
  /** Our name in EHLO where the egress has none of its own. */
  readonly helloName: string;
  /** The port of the built-in sink; null where there is none. */
  readonly sinkPort: number | null;
  readonly smarthost: Smarthost | null;
  readonly mx: MxFinder;
  readonly home: Home;
  /** What recipients' domains publish about TLS. Asked here and not in the attempt: a policy host that hangs must not hold a lane. */
  readonly tlsPolicies: TlsPolicies;
  readonly mxPort: number;
}

/** Postfix's smtp_mx_address_limit. */
const ADDRESSES_MAX = 5;

/** Whose mail is to leave through a pool: the tenant, and the domain of `from` in A-labels. */
interface Sender {
  readonly tenantId: string;
  readonly domain: string;
}

/** The destination of a domain (A-labels) under the way of delivery that is set; `poolOf` is asked for MX hosts only. */
export const laneFor =
  (delivery: 'sink' | 'smarthost' | 'direct', poolOf: (sender: Sender) => string) =>
  (domain: string, sender: Sender): string =>
    domain === SANDBOX_DOMAIN
      ? SANDBOX_LANE
      : delivery === 'sink'
        ? SINK_LANE
        : delivery === 'smarthost'
          ? SMARTHOST_LANE
          : mxDestination(domain, poolOf(sender));

const none = (permanent: boolean, cause: Cause, about: [string, string]): NextHops => ({
  kind: 'none',
  permanent,
  cause,
  enhanced: about[0],
  message: about[1],
});

/** Asks DNS where mail for the destination goes now. Never throws for an answer of the world. */
export async function findNextHops(
  d: NextHopDependencies,
  lane: string,
  egress: Egress,
): Promise<NextHops> {
  const destination = readDestination(lane);
  switch (destination.kind) {
    case 'sandbox':
      return { kind: 'targets', targets: [] }; // answered here, without a host
    case 'sink':
      return toSink(d);
    case 'smarthost':
      return toSmarthost(d);
    case 'mx':
      return toMx(d, destination.domain, egress);
  }
}

function toSink(d: NextHopDependencies): NextHops {
  if (d.sinkPort === null) {
    return none(false, 'no_sink', ['4.3.5', 'delivery to the sink is set, but no sink is running']);
  }
  const target: Target = {
    host: 'sink',
    address: '127.0.0.1',
    port: d.sinkPort,
    tls: 'never',
    verify: false,
    login: null,
    helloName: d.helloName,
    source: null,
    trusted: true,
  };
  return { kind: 'targets', targets: [target] };
}

/** Also for mail that was to go to MX hosts, where port 25 is closed to us and the operator allows it. */
export async function toSmarthost(
  d: Pick<NextHopDependencies, 'smarthost' | 'helloName'>,
): Promise<NextHops> {
  const { smarthost } = d;
  if (smarthost === null) {
    return none(false, 'no_smarthost', [
      '4.3.5',
      'this delivery waits for a smarthost, but none is set',
    ]);
  }
  const { host, port, login, implicitTls } = smarthost;
  let addresses: readonly string[];
  try {
    // The operator's own name: whatever the machine resolves, /etc/hosts and container names included.
    addresses = isIP(host) ? [host] : (await lookup(host, { all: true })).map((a) => a.address);
  } catch (error) {
    const reason = (error as NodeJS.ErrnoException).code ?? 'unknown';
    return none(false, 'dns_failed', [
      '4.4.3',
      `the smarthost ${host} cannot be resolved: ${reason}`,
    ]);
  }
  // A password is only ever said over a connection that proved whose it is.
  const isLoopback = addresses.every((address) => address.startsWith('127.') || address === '::1');
  const mustVerify = login !== null && !isLoopback;
  return {
    kind: 'targets',
    targets: addresses.slice(0, ADDRESSES_MAX).map((address) => ({
      host,
      address,
      port,
      tls: implicitTls ? 'implicit' : mustVerify ? 'required' : 'opportunistic',
      verify: mustVerify,
      login,
      helloName: d.helloName,
      source: null,
      trusted: true,
    })),
  };
}

async function toMx(d: NextHopDependencies, domain: string, egress: Egress): Promise<NextHops> {
  const addresses = addressesFrom(egress, d.policy().addresses);
  const result = await d.mx.findHosts(domain, addresses);
  if (result.kind === 'deferred') {
    return none(false, result.code, [result.enhanced, result.message]);
  }
  if (result.kind === 'refused') {
    if (result.code === 'mail_loop' && (await isOurs(d, domain))) return toHome(d, domain);
    return none(result.permanent, result.code, [result.enhanced, result.message]);
  }
  const all = result.hosts.flatMap((host) =>
    host.addresses.map(({ address, family }): Target => ({
      host: host.name,
      address,
      port: d.mxPort,
      tls: 'opportunistic',
      verify: false,
      login: null,
      helloName: egress.helo ?? d.helloName,
      source: family === 4 ? egress.ipv4 : egress.ipv6,
      trusted: false,
    })),
  );
  const targets = all.slice(0, ADDRESSES_MAX);
  const policies = await d.tlsPolicies.of(
    domain,
    targets.map(({ host }) => host),
  );
  return { kind: 'targets', targets, mxNames: result.names, policies };
}

const isOurs = async ({ home, helloName }: NextHopDependencies, domain: string): Promise<boolean> =>
  domain === helloName || (await home.takesMail(domain));

/** The way to our own listener, for a domain whose mail we take and whose best MX is this machine; null for all others. */
export async function findHome(d: NextHopDependencies, domain: string): Promise<NextHops | null> {
  if (!(await isOurs(d, domain))) return null;
  const result = await d.mx.findHosts(domain);
  const isHome = result.kind === 'refused' && result.code === 'mail_loop';
  return isHome ? toHome(d, domain) : null;
}

/**
 * Over SMTP as from anybody, so the listener decides about recipients, limits and what is stored before its 250. It is
 * ours, as a smarthost is the operator's: neither its address nor its certificate is asked about.
 */
async function toHome(
  { home, helloName, mxPort }: NextHopDependencies,
  domain: string,
): Promise<NextHops> {
  const { listener } = home;
  const closed = (why: string): NextHops =>
    none(false, 'home_closed', [
      '4.3.2',
      `mail for ${domain} is received by this server itself, and ${why}`,
    ]);
  if (listener.kind === 'closed') return closed('its inbound listener is off');
  const isHere = listener.kind === 'here';
  const addresses = isHere ? ['127.0.0.1'] : await home.addresses();
  if (addresses.length === 0) {
    return closed(
      `its inbound listener runs elsewhere, where the DNS has no address for ${helloName}`,
    );
  }
  return {
    kind: 'targets',
    isHome: true,
    targets: addresses.slice(0, ADDRESSES_MAX).map((address) => ({
      host: helloName,
      address,
      port: isHere ? listener.port : mxPort,
      tls: 'opportunistic',
      verify: false,
      login: null,
      helloName,
      source: null,
      trusted: true,
    })),
  };
}

/** An egress with an address of one family only does not leave by the other (readDeliveryPolicy knows no other mix). */
function addressesFrom({ ipv4, ipv6 }: Egress, wanted: AddressPolicy): AddressPolicy {
  if (ipv4 !== null && ipv6 === null) return 'ipv4_only';
  if (ipv6 !== null && ipv4 === null) return 'ipv6_only';
  return wanted;
}
