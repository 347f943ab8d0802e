// The TLS ladder: how much encryption each host of an attempt must have, and what is done when it cannot be had.
//
//   none < opportunistic < required < sts, dane        (smarthost: the engine verifies, dns/tls-policy.ts names them all)
//
// What the sender or the provider table asks for is the floor; what the recipient's domain publishes may only add to it.
// Only an opportunistic host is asked again in plaintext, once, and remembered for an hour when that went well. Every
// session towards an MX host, and every failure to have one, is noted for the reports of RFC 8460.
import {
  faultOf,
  type Demand,
  type HostPolicy,
  type Refusal,
  type Watched,
} from '../dns/tls-policy.ts';
import type { PhaseLimits } from './phases.ts';
import { openSession, type Failure, type Session, type Target } from './session.ts';
import type { TlsWishes } from './tls-required.ts';
import type { TlsResult } from './tls-results.ts';

/** One target with what its connection must have. */
export interface Rung {
  readonly target: Target & { readonly demand: Demand };
  /** It is not dialled. */
  readonly refusal: Refusal | null;
  /** What the domain asks for beyond the floor, as the middle of a sentence; null: nothing. */
  readonly because: string | null;
  readonly watched: readonly Watched[];
  /** The session is for one of our own reports about TLS. */
  readonly isForReport: boolean;
}

const OPPORTUNISTIC: Demand = { kind: 'opportunistic' };
/** Peers whose STARTTLS is broken, and until when plaintext is used without asking again. */
const brokenTls = new Map<string, number>();
const BROKEN_TLS_MAX = 1_000;
const BROKEN_TLS_MS = 3_600_000;

/**
 * The targets with what is demanded of each, those that are ruled out last. `policies`: of the recipient's domain, by
 * host. With `ignoresPolicy` (RFC 8689 §3) they are only watched; the floor stays.
 */
export function planRungs(
  targets: readonly Target[],
  policies: ReadonlyMap<string, HostPolicy>,
  { ignoresPolicy, isReport }: TlsWishes,
): readonly Rung[] {
  const rungs = targets.map((target): Rung => {
    const policy = policies.get(target.host) ?? null;
    const isIgnored = policy !== null && ignoresPolicy;
    const asked = isIgnored ? { ...policy, demand: OPPORTUNISTIC, refusal: null } : policy;
    return { ...demandOf(target, asked), isForReport: isReport };
  });
  const isRuledOut = ({ refusal }: Rung): boolean => refusal !== null;
  return [...rungs.filter((rung) => !isRuledOut(rung)), ...rungs.filter(isRuledOut)];
}

function demandOf(target: Target, policy: HostPolicy | null): Omit<Rung, 'isForReport'> {
  const floor = floorOf(target);
  const asked = policy?.demand ?? floor;
  // The floor is never lowered, and `required` is no more than that.
  const adds = asked.kind === 'sts' || asked.kind === 'dane' || floor.kind === 'opportunistic';
  const demand = adds && asked.kind !== 'opportunistic' ? asked : floor;
  const tls =
    target.tls === 'opportunistic' && demand.kind !== 'opportunistic' ? 'required' : target.tls;
  return {
    target: { ...target, tls, demand },
    because: demand === floor ? null : (BECAUSE[demand.kind] ?? null),
    refusal: policy?.refusal ?? null,
    watched: policy?.watched ?? [],
  };
}

const BECAUSE: Partial<Record<Demand['kind'], string>> = {
  required: 'its TLSA records ask for encryption',
  sts: 'its MTA-STS policy asks for verified encryption',
  dane: 'its TLSA records ask for verified encryption',
};

function floorOf({ tls, verify }: Target): Demand {
  if (tls === 'never') return { kind: 'none' };
  if (verify) return { kind: 'smarthost' };
  return { kind: tls === 'opportunistic' ? 'opportunistic' : 'required' };
}

/** Whether an open session may carry mail that needs this rung: it may have been opened for another domain's. */
export function isEnough(session: Session, { target, refusal }: Rung): boolean {
  const { host, address, port, demand } = target;
  const at = session.target;
  if (refusal !== null || at.host !== host || at.address !== address || at.port !== port) {
    return false;
  }
  // The operator's file may have given the egress another address or name since.
  if (at.source !== target.source || at.helloName !== target.helloName) return false;
  if (demand.kind === 'smarthost') return at.demand?.kind === 'smarthost';
  // Its handshake let pass what another one would have refused (tls-session.ts).
  if (demand.kind !== 'opportunistic' && at.tls === 'opportunistic') return false;
  return faultOf(demand, { peer: session.peer, host, now: new Date() }) === null;
}

export interface ClimbDependencies {
  readonly checkPeer: (
    address: string,
  ) => { readonly ok: true } | { readonly ok: false; readonly reason: string };
  readonly note: (result: TlsResult) => void;
  readonly limits?: PhaseLimits;
}

/** Opens a session that has what is demanded, or says why there is none; an opportunistic one may be in plaintext. */
export async function climb(rung: Rung, d: ClimbDependencies): Promise<Session | Failure> {
  const { target, refusal, because } = rung;
  const { demand, host } = target;
  if (refusal !== null) {
    note(rung, d, { fault: refusal, source: target.source });
    const message = `${host}: ${refusal.reason}`;
    return { stage: 'tls', cause: refusal.cause, reply: null, message, tlsFault: refusal.failure };
  }
  const mayBePlain = demand.kind === 'opportunistic';
  const key = `${target.address} ${target.port}`;
  if (mayBePlain && (brokenTls.get(key) ?? 0) > Date.now()) {
    return openPlain(rung, d, { failure: 'validation-failure', reason: 'its TLS failed before' });
  }
  const opened = await open(target, d);
  if (!('cause' in opened)) {
    note(rung, d, { session: opened });
    return opened;
  }
  if (opened.stage !== 'tls') return opened;
  const { reply, message } = opened;
  const fault = {
    failure: opened.tlsFault ?? (reply === null ? 'validation-failure' : 'starttls-not-supported'),
    reason: reply ?? message,
  } as const;
  if (!mayBePlain) {
    note(rung, d, { fault, source: target.source });
    if (because === null) return opened;
    // Our judgement, not the host's: its reply must not be taken for the answer to the mail.
    const why = `${host}: ${because}, and ${fault.reason}`;
    return { ...opened, cause: 'tls_policy_failed', reply: null, message: why };
  }
  const plain = await openPlain(rung, d, fault);
  if (!('cause' in plain)) {
    brokenTls.delete(key);
    if (brokenTls.size >= BROKEN_TLS_MAX) brokenTls.delete(brokenTls.keys().next().value!);
    brokenTls.set(key, Date.now() + BROKEN_TLS_MS);
  }
  return plain;
}

const open = (target: Target, d: ClimbDependencies): Promise<Session | Failure> =>
  openSession(target, target.trusted ? () => ({ ok: true }) : d.checkPeer, d.limits);

async function openPlain(
  rung: Rung,
  d: ClimbDependencies,
  fault: NoteFault,
): Promise<Session | Failure> {
  const opened = await open({ ...rung.target, tls: 'never' }, d);
  const source = 'cause' in opened ? rung.target.source : opened.source;
  note(rung, d, { fault, source });
  return opened;
}

type NoteFault = Pick<Refusal, 'failure' | 'reason'>;

function note(
  { target, watched, isForReport }: Rung,
  d: ClimbDependencies,
  how:
    { readonly session: Session } | { readonly fault: NoteFault; readonly source: string | null },
): void {
  const { host, address } = target;
  for (const { domain, policy, demand, fault: decided } of watched) {
    const met =
      'session' in how
        ? faultOf(demand, { peer: how.session.peer, host, now: new Date() })
        : how.fault;
    const fault = decided ?? met;
    d.note({
      domain,
      policy,
      mxHost: host,
      receivingIp: address,
      sendingIp: 'session' in how ? how.session.source : how.source,
      failure: fault?.failure ?? null,
      isForReport,
      ...(fault === null ? {} : { reason: fault.reason }),
    });
  }
}

/** A target that was tried, or refused, without getting a session. */
export interface Tried {
  readonly target: Target;
  readonly failure: Failure;
}

const POLICY_CAUSES: ReadonlySet<string> = new Set(['tls_policy_failed', 'tls_policy_unknown']);

/**
 * What to say of an attempt that found no host: the last failure; and where policies ruled hosts out, which of them and
 * why. Null: nothing was tried.
 */
export function sumUp(tried: readonly Tried[]): Tried | null {
  const isByPolicy = ({ failure }: Tried): boolean => POLICY_CAUSES.has(failure.cause);
  const ruledOut = tried.filter(isByPolicy);
  const last = tried.findLast((one) => !isByPolicy(one)) ?? tried.at(-1);
  if (last === undefined || ruledOut.length === 0) return last ?? null;
  const words = [...new Set(ruledOut.map(({ failure }) => failure.message))].join('; ');
  const { target, failure } = last;
  if (!isByPolicy(last)) {
    if (failure.reply !== null) return last;
    return { target, failure: { ...failure, message: `${failure.message}; ${words}` } };
  }
  const isFailed = ruledOut.some(({ failure: { cause } }) => cause === 'tls_policy_failed');
  const cause = isFailed ? 'tls_policy_failed' : 'tls_policy_unknown';
  return { target, failure: { ...failure, cause, message: words } };
}
