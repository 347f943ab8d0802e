// What metrics and traces say of attempts: how many, how they ended, how long they took; nothing of whom they were for.
import type { ClaimedDelivery } from '../queue/claim.ts';
import type { Settlement } from '../queue/settle.ts';
import {
  attemptCauses,
  attemptDuration,
  attempts,
  deliveryDelay,
} from '../telemetry/instruments.ts';
import { beginSpan, inside, isTracing, placeOfEmail } from '../telemetry/trace.ts';
import type { Lane } from './lane.ts';
import { labelOf } from './measured-lanes.ts';

export interface BegunAttempt {
  run<T>(work: () => Promise<T>): Promise<T>;
  /** What came of it: of all that were tried, those that have an outcome. */
  end(deliveries: readonly ClaimedDelivery[], settlements: readonly Settlement[]): void;
}

/** `first`: of those that are tried together, which are of one email. */
export function beginAttempt(
  lane: Pick<Lane, 'name' | 'site' | 'provider'>,
  first: ClaimedDelivery,
): BegunAttempt {
  const begunAt = performance.now();
  const provider = labelOf(lane);
  const span = beginSpan('attempt', {
    kind: 'client',
    ...(isTracing() ? { parent: placeOfEmail(first.emailId) } : {}),
    attributes: {
      'mailstead.email_id': first.emailId,
      'mailstead.tenant_id': first.tenantId,
      'mailstead.attempt': first.attempt,
      'mailstead.provider': provider,
    },
  });
  return {
    run: (work) => inside(span, work),
    end(deliveries, settlements) {
      attemptDuration.observe({ provider }, (performance.now() - begunAt) / 1_000);
      const plannedOf = new Map(deliveries.map((one) => [one.position, one.plannedMs]));
      for (const { verdict, evidence, position } of settlements) {
        attempts.inc({ provider, outcome: verdict });
        const planned = plannedOf.get(position);
        if (verdict !== 'delivered') {
          attemptCauses.inc({ outcome: verdict, cause: evidence.cause ?? 'none' });
        } else if (planned !== undefined) {
          deliveryDelay.observe(Math.max(0, (Date.now() - planned) / 1_000));
        }
      }
      if (span === null) return;
      const worst = settlements.find(({ verdict }) => verdict !== 'delivered');
      const outcome = worst?.verdict ?? settlements[0]?.verdict ?? 'given_back';
      span.set({
        'mailstead.outcome': outcome,
        'mailstead.recipients': deliveries.length,
        ...(worst?.evidence.stage ? { 'mailstead.stage': worst.evidence.stage } : {}),
        ...(worst?.evidence.code ? { 'mailstead.smtp_code': worst.evidence.code } : {}),
      });
      span.end(worst === undefined ? undefined : (worst.evidence.cause ?? outcome));
    },
  };
}

/** They are stored. */
export function noteSettled(batch: readonly Settlement[], beganAtMs: number): void {
  if (!isTracing()) return;
  for (const { emailId, tenantId, attempt, verdict } of batch) {
    beginSpan('settle', {
      parent: placeOfEmail(emailId),
      startedAtMs: beganAtMs,
      attributes: {
        'mailstead.email_id': emailId,
        'mailstead.tenant_id': tenantId,
        'mailstead.attempt': attempt,
        'mailstead.outcome': verdict,
      },
    })?.end();
  }
}
