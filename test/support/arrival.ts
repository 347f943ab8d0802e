// Messages as the listener hands them over, for tests that store them without a socket.
import type { Arrival, Receiver } from '../../src/receiving/arrival.ts';
import { newId } from '../../src/store/id.ts';
import type { RouteDecision } from '../../src/store/received-email.ts';

/** An envelope recipient that no route decides about, unless `decision` says so. */
export function receiver(
  tenantId: string,
  recipient: string,
  decision: Partial<RouteDecision> = {},
): Receiver {
  const domainId = decision.domain_id ?? newId();
  return {
    tenantId,
    domainId,
    recipient,
    inboundDmarc: 'reject',
    decision: {
      recipient,
      status: 'unrouteable',
      route_id: null,
      route_type: null,
      local_part: null,
      domain_id: domainId,
      target_address: null,
      forwarding_rule_id: null,
      ...decision,
    },
  };
}

export const arrivalOf = (
  about: Pick<Arrival, 'receivers' | 'raw'> & Partial<Arrival>,
): Arrival => ({
  mailFrom: '',
  unrouteable: [],
  traceSizeBytes: 0,
  receivedAt: new Date(),
  client: { address: '192.0.2.1', helo: 'client.test', isTls: false },
  authentication: null,
  ...about,
});
