/**
 * What a report that came back by mail says about one delivery.
 *
 * In: the Report, and who the delivery was for. Out: a LateVerdict, or null when it says nothing that counts: a
 * report of another kind (`not-spam`, `auth-failure`), or about nobody. The return path has tied the report to the
 * delivery; the addresses in it decide only whether a dead mailbox is the recipient's own, since behind an alias others
 * may have failed.
 */
import { normalizedAddress } from './address.ts';
import { findBounceRule, type BounceRule } from './bounce-rules.ts';
import { isDeadRecipient, type Cause } from './outcome.ts';
import { parseReply, type Reply, type Stage } from './reply.ts';
import type { Report, ReportAction, ReportedRecipient } from './report.ts';

export type LateVerdict =
  | {
      readonly kind: 'failed';
      readonly cause: Cause;
      readonly status: string | null;
      readonly diagnostic: string | null;
      /** The ground for a suppression. */
      readonly isDead: boolean;
    }
  | {
      readonly kind: 'delayed' | 'arrived';
      readonly status: string | null;
      readonly diagnostic: string | null;
    }
  | { readonly kind: 'complained'; readonly feedbackType: string };

/** Feedback types (RFC 5965 §7.3, and what providers add) by which a recipient says: no more of this. */
const COMPLAINTS: ReadonlySet<string> = new Set([
  'abuse',
  'fraud',
  'virus',
  'complaint',
  'opt-out',
  'opt-out-list',
]);

/** The worst first. */
const WORST: readonly ReportAction[] = ['failed', 'delayed', 'delivered', 'relayed', 'expanded'];

export function verdictOfReport(
  report: Report,
  about: {
    readonly recipient: string;
    readonly tenantId: string;
    readonly rules: readonly BounceRule[];
  },
): LateVerdict | null {
  if (report.kind === 'arf') {
    const { feedbackType } = report;
    return COMPLAINTS.has(feedbackType) ? { kind: 'complained', feedbackType } : null;
  }
  const recipient = normalizedAddress(about.recipient);
  const own = report.recipients.filter((one) =>
    [one.address, one.originalAddress].some(
      (address) => address !== null && normalizedAddress(address) === recipient,
    ),
  );
  const candidates = own.length > 0 ? own : report.recipients;
  const [worst] = candidates.toSorted((a, b) => WORST.indexOf(a.action) - WORST.indexOf(b.action));
  if (worst === undefined) return null;
  const { status, diagnostic } = worst;
  if (worst.action === 'delayed') return { kind: 'delayed', status, diagnostic };
  if (worst.action !== 'failed') return { kind: 'arrived', status, diagnostic };
  const cause = causeOf(worst, about);
  const isOwn = own.length > 0 || (worst.address === null && worst.originalAddress === null);
  return { kind: 'failed', cause, status, diagnostic, isDead: isOwn && cause === 'no_mailbox' };
}

function causeOf(
  failed: ReportedRecipient,
  about: { readonly tenantId: string; readonly rules: readonly BounceRule[] },
): Cause {
  const reply = replyOf(failed);
  if (reply === null) return 'peer_permanent';
  // Reporters that say which command was refused say it so (Postfix, Exim).
  const stage: Stage = /\bend of (?:message|data)\b|\bafter (?:pipelined )?data\b/i.test(
    failed.diagnostic ?? '',
  )
    ? 'dot'
    : 'rcpt';
  const rule = findBounceRule(about.rules, { reply, stage, host: null, tenantId: about.tenantId });
  return rule?.cause ?? (isDeadRecipient(reply, stage) ? 'no_mailbox' : 'peer_permanent');
}

/** The reply as the host gave it; where the reporter has only a status, what that would have been. */
function replyOf({ status, diagnostic }: ReportedRecipient): Reply | null {
  const said = diagnostic === null ? null : parseReply(diagnostic);
  if (said !== null) {
    const isVague = status === null || /^\d\.0\.0$/.test(status);
    return said.enhanced === null && !isVague ? { ...said, enhanced: status } : said;
  }
  if (status === null && diagnostic === null) return null;
  const text = diagnostic ?? '';
  return { code: status?.[0] === '4' ? 450 : 550, enhanced: status, text, lines: [text] };
}
