// One transaction from its beginning to its settlements: attempts what a lane hands over, and turns what came of it into
// what the queue is told of each delivery and what the lane learns for all that follow.
import type { Logger } from '../log.ts';
import type { ClaimedDelivery } from '../queue/claim.ts';
import { pauseMs, UNKNOWN_DELAY_MS } from '../queue/backoff.ts';
import { NO_EVIDENCE, type Settlement } from '../queue/settle.ts';
import { isBlobsUnavailable } from '../store/blobs-unavailable.ts';
import {
  attempt,
  type AttemptDependencies,
  type Attempted,
  type Decided,
  type LaneSignal,
  type Line,
} from './attempt.ts';
import type { Lane, Learned, Planned } from './lane.ts';
import { beginAttempt } from './measured-attempts.ts';
import { kindOfFailure, type DialKind, type PortWatch } from './port25.ts';
import type { ReplyPause } from './providers.ts';

export interface DecideDependencies {
  readonly attempts: AttemptDependencies;
  readonly epoch: string;
  readonly retryScheduleMs: readonly number[];
  readonly random: () => number;
  readonly watch: PortWatch | null;
  readonly log: Logger;
  /** What has left, told early: a peer's word must not be lost while the attempt goes on for others. */
  readonly onSent: (settlement: Settlement) => void;
}

export interface Outcome {
  readonly settlements: readonly Settlement[];
  /** Nothing was tried that the mail or its hosts are to blame for: it goes back as if it had not been claimed. */
  readonly unbegun: readonly ClaimedDelivery[];
  readonly learned: Learned;
}

/** Never rejects. `pauses` are those of the lane's provider. */
export async function decide(
  d: DecideDependencies,
  line: Line,
  about: {
    readonly lane: Pick<Lane, 'name' | 'egress' | 'site' | 'provider'>;
    readonly group: readonly [Planned, ...Planned[]];
    readonly pauses: readonly ReplyPause[];
  },
): Promise<Outcome> {
  const { lane, group } = about;
  const deliveries = group.map(({ delivery }) => delivery);
  let attempted: Attempted;
  const begun = beginAttempt(lane, group[0].delivery);
  try {
    const onSent = (delivery: ClaimedDelivery, one: Decided): void =>
      d.onSent(settlementOf(d, { delivery, one, isLaneFault: false }));
    const attempts = deliveries.length === 1 ? d.attempts : { ...d.attempts, onSent };
    attempted = await begun.run(() => attempt(attempts, line, { deliveries, hops: group[0].hops }));
  } catch (error) {
    // A fault of ours: the peer is not to blame and the mail must not be lost over it.
    const { emailId, attempt: number } = group[0].delivery;
    const { tenantId } = group[0].delivery;
    const about = { err: error, email_id: emailId, tenant_id: tenantId, attempt: number };
    const isAway = isBlobsUnavailable(error);
    if (isAway) d.log.warn(about, 'the message cannot be read now: the blob store is away');
    else d.log.error(about, 'attempt broke');
    line.session?.close();
    line.session = null;
    const one = isAway ? unreadable : broken;
    attempted = { decided: deliveries.map(() => one), signal: { kind: 'nothing' } };
  }
  const { decided, signal } = attempted;
  const isBlocked = noteDial(d.watch, lane, attempted);
  const isFault = signal.kind === 'unreachable' || signal.kind === 'throttled';
  const settlements: Settlement[] = [];
  const unbegun: ClaimedDelivery[] = [];
  for (const [index, delivery] of deliveries.entries()) {
    const one = decided[index] ?? broken;
    const isDeferred = one.verdict === 'deferred';
    if (isDeferred && isBlocked && one.evidence.stage === 'connect') unbegun.push(delivery);
    else settlements.push(settlementOf(d, { delivery, one, isLaneFault: isDeferred && isFault }));
  }
  begun.end(deliveries, settlements);
  const pause = pauseAsked(about.pauses, decided);
  return { settlements, unbegun, learned: { signal, pause, isBlocked } };
}

const broken: Decided = {
  verdict: 'deferred',
  evidence: {
    ...NO_EVIDENCE,
    cause: 'internal',
    enhanced: '4.3.0',
    reply: 'An internal fault interrupted the attempt; it is tried again.',
  },
};

const unreadable: Decided = {
  verdict: 'deferred',
  evidence: {
    ...NO_EVIDENCE,
    cause: 'store_unavailable',
    enhanced: '4.3.0',
    reply: 'The store of large messages did not answer; nothing was sent, and it is tried again.',
  },
};

function settlementOf(
  d: DecideDependencies,
  about: {
    readonly delivery: ClaimedDelivery;
    readonly one: Decided;
    readonly isLaneFault: boolean;
  },
): Settlement {
  const { delivery } = about;
  const { verdict, evidence } = about.one;
  // Nothing was tried, so the pauses do not grow.
  const isLaneFault = about.isLaneFault || evidence.cause === 'store_unavailable';
  return {
    tenantId: delivery.tenantId,
    emailId: delivery.emailId,
    position: delivery.position,
    attempt: delivery.attempt,
    recipientCount: delivery.recipientCount,
    epoch: d.epoch,
    isLaneFault,
    verdict,
    evidence,
    delayMs:
      verdict === 'unknown'
        ? UNKNOWN_DELAY_MS
        : pauseMs(
            d.retryScheduleMs,
            {
              attempt: delivery.attempt,
              laneFaults: delivery.laneFaults + Number(isLaneFault),
              cause: evidence.cause,
              reply: evidence.reply,
            },
            d.random(),
          ),
  };
}

/** Tells the watch what dialling came to; whether the way out is blocked, and that is why it failed. */
function noteDial(
  watch: PortWatch | null,
  { egress, site }: Pick<Lane, 'egress' | 'site'>,
  { signal, decided }: Attempted,
): boolean {
  if (watch === null || egress === null || signal.kind === 'nothing') return false;
  const evidence = decided.at(-1)?.evidence;
  const host = evidence?.host ?? null;
  if (evidence === undefined || host === null) return false;
  const kind = dialKindOf(signal, evidence);
  watch.note({ egress, site, host, address: evidence.address, kind });
  return kind !== 'connected' && watch.isBlocked(egress) !== null;
}

const dialKindOf = (signal: LaneSignal, evidence: Decided['evidence']): DialKind =>
  signal.kind === 'unreachable' && signal.stage === 'connect'
    ? kindOfFailure(evidence.cause, evidence.reply ?? '')
    : 'connected';

/** The longest quiet that one of the replies asks for. */
function pauseAsked(pauses: readonly ReplyPause[], decided: readonly Decided[]): Learned['pause'] {
  let longest: Learned['pause'] = null;
  if (pauses.length === 0) return longest;
  for (const { evidence } of decided) {
    const { code, reply } = evidence;
    if (reply === null || (code !== null && code < 400)) continue;
    const found = pauses.filter(({ text }) => text.test(reply));
    for (const { forMs } of found) {
      if (forMs > (longest?.forMs ?? 0)) longest = { forMs, reason: reply };
    }
  }
  return longest;
}
