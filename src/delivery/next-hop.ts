// Where a lane's mail goes next: the built-in sink, the smarthost, or the MX hosts of a domain. The
// answer is a list of targets to try in order, or why there is none.
import { lookup } from 'node:dns/promises';
import { isIP } from 'node:net';
import type { MxFinder } from '../dns/mx.ts';
import type { Cause } from '../mail/outcome.ts';
import { SANDBOX_DOMAIN } from '../mail/sandbox.ts';
import { SANDBOX_LANE, SINK_LANE } from '../store/delivery.ts';
import type { Target } from './session.ts';

export type NextHops =
  | { readonly kind: 'targets'; readonly targets: readonly Target[] }
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

export interface NextHopDependencies {
  readonly helloName: string;
  /** The port of the built-in sink; null where there is none. */
  readonly sinkPort: number | null;
  readonly smarthost: Smarthost | null;
  readonly mx: MxFinder;
  readonly mxPort: number;
}

export const SMARTHOST_LANE = 'smarthost';
const MX_PREFIX = 'mx:';
/** Postfix's smtp_mx_address_limit. */
const ADDRESSES_MAX = 5;

/** The lane of a domain (A-labels) under the way of delivery that is set. */
export const laneFor =
  (delivery: 'sink' | 'smarthost' | 'direct') =>
  (domain: string): string =>
    domain === SANDBOX_DOMAIN
      ? SANDBOX_LANE
      : delivery === 'sink'
        ? SINK_LANE
        : delivery === 'smarthost'
          ? SMARTHOST_LANE
          : `${MX_PREFIX}${domain}`;

const none = (permanent: boolean, cause: Cause, about: [string, string]): NextHops => ({
  kind: 'none',
  permanent,
  cause,
  enhanced: about[0],
  message: about[1],
});

/** Asks DNS where the lane's mail goes now. Never throws for an answer of the world. */
export async function findNextHops(d: NextHopDependencies, lane: string): Promise<NextHops> {
  if (lane === SINK_LANE) return toSink(d);
  if (lane === SMARTHOST_LANE) return toSmarthost(d);
  return toMx(d, lane.slice(MX_PREFIX.length));
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
    trusted: true,
  };
  return { kind: 'targets', targets: [target] };
}

async function toSmarthost(d: NextHopDependencies): Promise<NextHops> {
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
      trusted: true,
    })),
  };
}

async function toMx(d: NextHopDependencies, domain: string): Promise<NextHops> {
  const result = await d.mx.findHosts(domain);
  if (result.kind === 'deferred') {
    return none(false, result.code, [result.enhanced, result.message]);
  }
  if (result.kind === 'refused') {
    return none(result.permanent, result.code, [result.enhanced, result.message]);
  }
  const targets = result.hosts.flatMap((host) =>
    host.addresses.map(({ address }): Target => ({
      host: host.name,
      address,
      port: d.mxPort,
      tls: 'opportunistic',
      verify: false,
      login: null,
      helloName: d.helloName,
      trusted: false,
    })),
  );
  return { kind: 'targets', targets: targets.slice(0, ADDRESSES_MAX) };
}
