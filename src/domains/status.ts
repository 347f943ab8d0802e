// From what the DNS showed to what it means: the status of each record, of the domain, whether it may send and
// receive, and when to look again. Pure; the rules in words: docs/domains.md.
import type { Finding } from '../dns/records.ts';
import type {
  DomainStatus,
  RecordCheck,
  RecordChecks,
  RecordKind,
  RecordStatus,
} from '../store/sending-domain.ts';
import { tracks, type DomainSettings } from './records.ts';

/** How long new records may take to appear, and how long verified ones may be missing. */
export const PATIENCE_MS = 72 * 3_600_000;
const MINUTE_MS = 60_000;
/** Between the checks of a domain that is not all verified yet; the last repeats. */
const PAUSES_MS = [1, 5, 15, 30, 60].map((minutes) => minutes * MINUTE_MS);
const VANISHED_PAUSE_MS = 60 * MINUTE_MS;
const DAY_MS = 24 * 3_600_000;

/** What one look at a record makes of its status. */
export function judge(
  before: RecordCheck | undefined,
  finding: Finding,
  clock: { readonly now: Date; readonly verifyingSince: Date },
): RecordCheck {
  if (finding.kind === 'right') return { status: 'verified', detail: null, since: null };
  const { detail } = finding;
  const status = before?.status ?? 'not_started';
  const wasVerified = status === 'verified' || status === 'temporary_failure';
  if (finding.kind === 'unknown') {
    // A DNS that does not answer proves nothing.
    if (wasVerified || status === 'failed') return { ...before!, detail };
    return { status: 'pending', detail, since: null };
  }
  if (wasVerified) {
    const since = new Date(before?.since ?? clock.now);
    const isOver = clock.now.getTime() - since.getTime() >= PATIENCE_MS;
    if (isOver) return { status: 'failed', detail, since: null };
    return { status: 'temporary_failure', detail, since: since.toISOString() };
  }
  const mayAppear = finding.kind === 'absent' && isPatient(clock);
  return { status: mayAppear ? 'pending' : 'failed', detail, since: null };
}

/** New records may still appear. */
export const isPatient = (clock: { readonly now: Date; readonly verifyingSince: Date }): boolean =>
  clock.now.getTime() - clock.verifyingSince.getTime() < PATIENCE_MS;

/**
 * What each thing that a domain does needs. Everything needs the RSA key: the other records are the same for
 * every tenant of this appliance, and only the key proves whose the name is. Ed25519 is not needed, since every
 * verifier takes RSA, nor is DMARC, which is advice.
 */
const NEEDS = {
  sending: ['dkim_rsa', 'return_path_mx', 'return_path_spf'],
  receiving: ['dkim_rsa', 'receiving_mx'],
  tracking: ['dkim_rsa', 'tracking_cname'],
} as const satisfies Record<string, readonly RecordKind[]>;

type GroupState = 'verified' | 'pending' | 'failed';

function groupState(needs: readonly RecordKind[], checks: RecordChecks): GroupState {
  const statuses = needs.map((kind): RecordStatus => checks[kind]?.status ?? 'not_started');
  if (statuses.includes('failed')) return 'failed';
  const isThere = (status: RecordStatus): boolean =>
    status === 'verified' || status === 'temporary_failure';
  return statuses.every(isThere) ? 'verified' : 'pending';
}

export interface Standing {
  readonly status: DomainStatus;
  readonly sendingVerified: boolean;
  readonly receivingVerified: boolean;
}

/** The status of the domain. `clock` is null for one that nobody asked to verify. */
export function standingOf(
  domain: DomainSettings & { readonly recordChecks: RecordChecks },
  clock: { readonly now: Date; readonly verifyingSince: Date } | null,
): Standing {
  const stateOf = (group: keyof typeof NEEDS): GroupState =>
    groupState(NEEDS[group], domain.recordChecks);
  const states = [
    ...(domain.sending ? [stateOf('sending')] : []),
    ...(domain.receiving ? [stateOf('receiving')] : []),
    ...(tracks(domain) ? [stateOf('tracking')] : []),
  ];
  return {
    status: domainStatus(states, clock),
    sendingVerified: domain.sending && stateOf('sending') === 'verified',
    receivingVerified: domain.receiving && stateOf('receiving') === 'verified',
  };
}

function domainStatus(
  states: readonly GroupState[],
  clock: { readonly now: Date; readonly verifyingSince: Date } | null,
): DomainStatus {
  if (states.every((state) => state === 'verified')) return 'verified';
  if (states.includes('verified')) {
    return states.includes('failed') ? 'partially_failed' : 'partially_verified';
  }
  if (clock === null) return 'not_started';
  return isPatient(clock) || states.includes('pending') ? 'pending' : 'failed';
}

/** The tenant holds the name: something of it is verified, so nobody else can have it. */
export const holdsName = (status: DomainStatus): boolean =>
  status === 'verified' || status === 'partially_verified' || status === 'partially_failed';

/** Not needed for anything, and yet somebody waits for them. */
const AWAITED = ['mta_sts_host', 'mta_sts_txt'] as const satisfies readonly RecordKind[];

/** When to look again after the `count`th check of this window; null: not by itself. */
export function nextCheck(
  domain: { readonly status: DomainStatus; readonly recordChecks: RecordChecks },
  clock: { readonly now: Date; readonly verifyingSince: Date; readonly count: number },
): Date | null {
  const after = (ms: number): Date => new Date(clock.now.getTime() + ms);
  if (domain.status === 'failed') return null;
  const hasVanished = Object.values(domain.recordChecks).some(
    ({ status }) => status === 'temporary_failure',
  );
  if (hasVanished) return after(VANISHED_PAUSE_MS);
  // A record with the id of the policy before is there and wrong, until its owner gets to it.
  const isAwaited = AWAITED.some((kind) =>
    ['pending', 'failed'].includes(domain.recordChecks[kind]?.status ?? ''),
  );
  if ((domain.status === 'verified' && !isAwaited) || !isPatient(clock)) return after(DAY_MS);
  return after(PAUSES_MS[Math.min(Math.max(clock.count, 1), PAUSES_MS.length) - 1]!);
}
