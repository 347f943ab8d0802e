// What an attempt came to for one delivery, with its evidence: made from replies and failures, and from nothing else.
// How long until the next try is the queue's business.
import { findBounceRule, type BounceRule } from '../mail/bounce-rules.ts';
import { outcomeOfReply, type Cause } from '../mail/outcome.ts';
import { parseReply } from '../mail/reply.ts';
import { NO_EVIDENCE, type Evidence, type Verdict } from '../queue/settle.ts';
import type { Failure, Session, Target } from './session.ts';

export interface Decided {
  readonly verdict: Verdict;
  readonly evidence: Evidence;
}

const REPLY_CHARS_MAX = 4_096;

export const decided = (
  verdict: Verdict,
  evidence: Partial<Omit<Evidence, 'cause'>> & { readonly cause?: Cause | null },
): Decided => ({
  verdict,
  evidence: { ...NO_EVIDENCE, ...evidence, reply: legible(evidence.reply ?? null) },
});

/** What a peer said, as text that can be stored and shown: no control characters, of bounded length. */
function legible(reply: string | null): string | null {
  if (reply === null) return null;
  const printable = reply
    .replace(/\r\n?/g, '\n')
    // oxlint-disable-next-line no-control-regex
    .replace(/[\u0000-\u0009\u000b-\u001f\u007f]/g, ' ');
  return printable.slice(0, REPLY_CHARS_MAX).toWellFormed().trim();
}

/** The connection in an evidence's words. */
export type Via = Pick<Evidence, 'host' | 'address' | 'port' | 'tls' | 'tlsPolicy' | 'source'>;

export const viaTarget = ({ host, address, port, demand, source }: Target): Via => ({
  host,
  address,
  port,
  tls: null,
  tlsPolicy: demand?.kind ?? null,
  source,
});

export const viaSession = ({ target, tls, source }: Session): Via => ({
  ...viaTarget(target),
  tls,
  source,
});

/** A reply decides by its stage and code; where none came, only what cannot be sent at all bounces. */
export function fromFailure(
  failure: Failure,
  about: { readonly via: Via; readonly tenantId: string; readonly rules: readonly BounceRule[] },
): Decided {
  const { via, tenantId } = about;
  const { stage } = failure;
  const reply = failure.reply === null ? null : parseReply(failure.reply);
  const said = { ...via, stage, reply: failure.reply ?? failure.message };
  if (reply === null) {
    const verdict = failure.cause === 'message_refused' ? 'bounced' : 'deferred';
    return decided(verdict, { ...said, cause: failure.cause });
  }
  const rule = findBounceRule(about.rules, { reply, stage, host: via.host, tenantId });
  const hop = {
    host: via.host ?? '',
    address: via.address,
    port: via.port ?? 0,
    tls: via.tls,
  };
  const outcome = outcomeOfReply({ reply, stage, via: hop, rule });
  const evidence = { ...said, code: reply.code, enhanced: reply.enhanced };
  return outcome.kind === 'delivered'
    ? decided('delivered', evidence)
    : decided(outcome.kind, { ...evidence, cause: outcome.cause });
}
