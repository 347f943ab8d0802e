// Seals a message that is relayed (ARC, RFC 8617): the domain of the route says what the checks showed when it came in, for
// hosts further on that believe it. Only on the operator's wish; nothing here relies on the seals of others.
import { Readable } from 'node:stream';
import { sealMessage } from 'mailauth/lib/arc/index.js';
import type { DomainLookup } from '../domains/lookup.ts';
import type { SealRequest } from './forward-task.ts';

/** RFC 8617 §4.2.1: no set has a higher number. */
const INSTANCES_MAX = 50;

/** The fields for the top; null: not wanted, no key, or a chain that nothing may be added to. */
export function createSealer(d: {
  readonly domains: Pick<DomainLookup, 'signer'>;
  readonly isWanted: () => boolean;
}): (request: SealRequest) => Promise<Buffer | null> {
  return async ({ tenantId, domainId, authentication, results, pieces }) => {
    const { arc } = authentication;
    // RFC 8617 §5.1.2: behind a failed seal there is nothing to say.
    if (!d.isWanted() || results === null || arc.result === 'fail') return null;
    if (arc.instances >= INSTANCES_MAX) return null;
    const signer = await d.domains.signer(tenantId, domainId);
    // RFC 8617 §4.1: RSA, which all verifiers know.
    const key = signer?.keys.find(({ algorithm }) => algorithm === 'rsa-sha256');
    if (key === undefined) return null;
    const sealed = await sealMessage(Readable.from(pieces, { objectMode: false }), {
      signingDomain: key.domain,
      selector: key.selector,
      privateKey: key.privateKey.export({ type: 'pkcs8', format: 'pem' }),
      cv: arc.result === 'pass' ? 'pass' : 'none',
      authResults: results,
    });
    return sealed.length === 0 ? null : sealed;
  };
}
