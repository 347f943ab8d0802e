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
import { causeOfRefusal, type Cause } from './outcome.ts';
import { topicOfRefusal } from './refusal-words.ts';
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

/**
 * Why it was given up. A reporter tells more than a reply: which command was refused, and by a status of class 4 that
 * it has tried for as long as it does.
 */
function causeOf(
  failed: ReportedRecipient,
  about: { readonly tenantId: string; readonly rules: readonly BounceRule[] },
): Cause {
  const stage = failed.stage ?? 'rcpt';
  const reply = replyOf(failed);
  if (reply === null) return 'peer_permanent';
  const rule = findBounceRule(about.rules, { reply, stage, host: null, tenantId: about.tenantId });
  if (rule !== null) return rule.cause;
  const isForNow = reply.code < 500 || failed.status?.[0] === '4' || isOutOfTime(reply);
  const topic = topicOfRefusal(reply.text);
  if (topic === 'late' || isOutOfTime(reply)) return 'expired';
  if (!messageStages.has(stage)) return 'policy_refused';
  // Of the last of many answers only the words count.
  const cause = causeOfRefusal(
    isForNow && reply.code < 500 ? { ...reply, code: reply.code + 100 } : reply,
    stage,
  );
  if (!isForNow) return cause;
  return topic === null ? 'expired' : cause === 'no_mailbox' ? 'peer_permanent' : cause;
}

/** RFC 3463 §3.5. */
const isOutOfTime = ({ enhanced }: Reply): boolean => enhanced?.endsWith('.4.7') === true;

const STAGE_NOTE = /\s*\(in reply to [^()]{1,40}\)/gi;

const messageStages: ReadonlySet<Stage> = new Set(['mail', 'rcpt', 'data', 'dot']);

/** The reply as the host gave it; where the reporter has only a status, what that would have been. */
function replyOf({ status, diagnostic }: ReportedRecipient): Reply | null {
  const words = diagnostic?.replace(STAGE_NOTE, '') ?? null;
  const said = words === null ? null : parseReply(words);
  if (said !== null) {
    const isVague = status === null || /^\d\.0\.0$/.test(status);
    return said.enhanced === null && !isVague ? { ...said, enhanced: status } : said;
  }
  if (status === null && words === null) return null;
  const text = words ?? '';
  return { code: status?.[0] === '4' ? 450 : 550, enhanced: status, text, lines: [text] };
}
