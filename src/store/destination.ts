// Where a delivery is to go, as its row says it. A destination is fixed when the email is accepted, before anybody has
// asked the DNS: the lane that serves it (egress × MX site) is found when the hosts of the domain are known, and
// many destinations may share one.
//
//   sink · sandbox · smarthost · mx:<domain> · mx:<domain>@<pool>

/** Destinations that end on this machine: the built-in SMTP sink, and answers that are made up (mail/sandbox.ts). */
export const SINK_LANE = 'sink';
export const SANDBOX_LANE = 'sandbox';
export const SMARTHOST_LANE = 'smarthost';
/** The lane of mail that this appliance sends to itself; no row says it, since the DNS decides it. */
export const HOME_LANE = 'home';
/** The pool of whatever is not assigned to another. */
export const DEFAULT_POOL = 'default';
const MX_PREFIX = 'mx:';

export type Destination =
  | { readonly kind: 'sink' | 'sandbox' | 'smarthost' }
  /** `domain` in A-labels, lower case. */
  | { readonly kind: 'mx'; readonly domain: string; readonly pool: string };

/** The row's words for a domain that is sent to from an IP pool. */
export const mxDestination = (domain: string, pool: string = DEFAULT_POOL): string =>
  pool === DEFAULT_POOL ? `${MX_PREFIX}${domain}` : `${MX_PREFIX}${domain}@${pool}`;

/** Reads the row's words. What is not known is taken for a domain, as the first release wrote it. */
export function readDestination(lane: string): Destination {
  if (lane === SINK_LANE || lane === SANDBOX_LANE || lane === SMARTHOST_LANE) return { kind: lane };
  const name = lane.startsWith(MX_PREFIX) ? lane.slice(MX_PREFIX.length) : lane;
  const at = name.indexOf('@');
  if (at === -1) return { kind: 'mx', domain: name, pool: DEFAULT_POOL };
  return { kind: 'mx', domain: name.slice(0, at), pool: name.slice(at + 1) };
}
