// Whether this machine can reach port 25 at all, found out from the mail it sends: many networks let no such connection
// leave. Pure: told what dialling came to and what time it is, it says which egress is blocked.
//
// A block looks the same everywhere: for five minutes nothing answered, and hosts of three operators that have nothing
// to do with each other all stayed silent, or all were refused. One dead host, however often it is dialled, one
// hosting company that is down, or a mix of both kinds is somebody else's trouble.

/** What dialling port 25 of one address came to. */
export type DialKind =
  | 'connected'
  /** No answer in time: dropped on the way, or nobody there. */
  | 'timeout'
  /** An answer at once that nobody is there: a port that is closed, or no way to the address. */
  | 'refused'
  /** A failure that speaks about us. */
  | 'other';

export interface Dial {
  readonly egress: string;
  /** The MX site that was meant. */
  readonly site: string;
  readonly host: string;
  /** Null where the caller does not know. */
  readonly address?: string | null;
  readonly kind: DialKind;
}

/** An egress from which no connection to port 25 succeeds. */
export interface Block {
  readonly since: Date;
  /** What was seen, for people. */
  readonly reason: string;
}

/** What a worker asks and tells; see port25-watch.ts. */
export interface PortWatch {
  /** Null: mail may leave from there. */
  isBlocked(egress: string): Block | null;
  note(dial: Dial): void;
  /** True once in a while for a blocked egress: one delivery may be tried, to see whether the port has opened. */
  mayProbe(egress: string): boolean;
}

export interface Port25Detector {
  note(dial: Dial): void;
  /** What speaks for a block, in one sentence; null: nothing does. */
  finding(egress: string): string | null;
  /** Addresses that could not be connected to, the newest first. */
  silent(egress: string): readonly string[];
  /** Somebody else has seen a connection succeed. */
  clear(egress: string): void;
}

/** How long nothing may have succeeded, and what failed longer ago is forgotten. */
export const WINDOW_MS = 5 * 60_000;
const OPERATORS_MIN = 3;
/** Failures that are remembered of one egress; three decide. */
const FAILURES_MAX = 50;
const SILENT_MAX = 5;
const EGRESSES_MAX = 1_000;
/** Below a country's domain these are not an operator's own name. */
const SHARED_LABELS: ReadonlySet<string> = new Set(
  'ac co com edu gob gov gv mil ne net nom or org'.split(' '),
);
const UNREACHABLE = /\b(?:ECONNREFUSED|EHOSTUNREACH|ENETUNREACH|EHOSTDOWN|ENETDOWN|EACCES|EPERM)\b/;

interface Failure {
  readonly at: number;
  readonly host: string;
  readonly address: string | null;
  readonly kind: DialKind;
}

interface Seen {
  connectedAt: number | null;
  /** By host and address, the last one of each, oldest first. */
  readonly failures: Map<string, Failure>;
}

/** The kind of a failure to connect, from its cause and what the system said. */
export function kindOfFailure(cause: string | null, said: string): DialKind {
  if (cause === 'connect_timeout' || /\bETIMEDOUT\b/.test(said)) return 'timeout';
  if (cause === 'connect_refused' || UNREACHABLE.test(said)) return 'refused';
  return 'other';
}

/** Whoever the host belongs to, as far as its name tells: the domain that is registered. */
export function operatorOf(host: string): string {
  const labels = host.toLowerCase().split('.');
  const [second, top] = labels.slice(-2);
  const isShared = top?.length === 2 && second !== undefined && SHARED_LABELS.has(second);
  return labels.slice(isShared ? -3 : -2).join('.');
}

/** `now` in milliseconds, never going back. */
export function createPort25Detector(d: { readonly now: () => number }): Port25Detector {
  const byEgress = new Map<string, Seen>();

  const seenOf = (egress: string): Seen => {
    const known = byEgress.get(egress);
    if (known !== undefined) return known;
    if (byEgress.size >= EGRESSES_MAX) byEgress.clear();
    const seen: Seen = { connectedAt: null, failures: new Map() };
    byEgress.set(egress, seen);
    return seen;
  };

  const clear = (egress: string): void => {
    const seen = seenOf(egress);
    seen.connectedAt = d.now();
    seen.failures.clear();
  };

  return {
    clear,
    note({ egress, host, address = null, kind }) {
      if (kind === 'connected') return clear(egress);
      const { failures } = seenOf(egress);
      const key = `${host} ${address ?? ''}`;
      failures.delete(key);
      failures.set(key, { at: d.now(), host, address, kind });
      const [oldest] = failures.keys();
      if (failures.size > FAILURES_MAX && oldest !== undefined) failures.delete(oldest);
    },
    silent(egress) {
      const failures = [...(byEgress.get(egress)?.failures.values() ?? [])].toReversed();
      return [...new Set(failures.flatMap(({ address }) => address ?? []))].slice(0, SILENT_MAX);
    },
    finding(egress) {
      const seen = byEgress.get(egress);
      if (seen === undefined) return null;
      const after = d.now() - WINDOW_MS;
      if (seen.connectedAt !== null && seen.connectedAt > after) return null;
      const recent = [...seen.failures.values()].filter(({ at }) => at > after);
      // A machine without IPv6 is told so at once, whatever is done with its IPv4.
      const overIpv4 = recent.filter(({ address }) => address === null || !address.includes(':'));
      return judge(overIpv4.length > 0 ? overIpv4 : recent);
    },
  };
}

function judge(failures: readonly Failure[]): string | null {
  const [first] = failures;
  if (first === undefined || first.kind === 'other') return null;
  if (failures.some(({ kind }) => kind !== first.kind)) return null;
  // Customers of one hosting company have names of their own on its machines.
  const byOperator = new Map(failures.map((one) => [operatorOf(one.host), one]));
  const known = failures.flatMap(({ address }) => (address === null ? [] : [address]));
  const addresses = known.length === failures.length ? new Set(known).size : Infinity;
  if (Math.min(byOperator.size, addresses) < OPERATORS_MIN) return null;
  const hosts = [...byOperator.values()].slice(-OPERATORS_MIN).map(({ host }) => host);
  const how = first.kind === 'timeout' ? 'did not answer' : 'were refused or unreachable at once';
  return `Connections to port 25 of ${hosts.join(', ')} ${how}, and none to any other host succeeded.`;
}
