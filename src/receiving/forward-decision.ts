// What becomes of a message that a forwarding rule is for: pure, from what is known of the message, its checks and the rule.
//
// Relayed is the message as it came, where the far end can still tell that it is its author's; rebuilt is a message of the
// route's own around it, where DMARC would have the copy refused. The envelope sender is rewritten only where it is
// plausible, so that nobody whose address was forged hears of what we could not deliver.
import type { ForwardHeader } from '../mail/forward-header.ts';
import { readLoopToken } from '../mail/loop-token.ts';
import { normalizedAddress } from '../mail/address.ts';
import type { Authentication } from '../store/received-email.ts';
import type { ForwardReason, RuleStatus } from '../store/receiving-route.ts';

export interface ForwardQuestion {
  readonly rule: {
    readonly status: RuleStatus;
    readonly invalidReason: string | null;
    readonly target: string;
  } | null;
  /** The envelope recipient that the route matched. */
  readonly recipient: string;
  /** Empty for the null sender. */
  readonly mailFrom: string;
  /** Null: it was not checked. */
  readonly authentication: Authentication | null;
  readonly header: ForwardHeader;
  /** The domain of the route, and this host: a relayed copy comes from them, which is a proof for these names. */
  readonly ownNames: readonly string[];
  /** Loop tokens are read with these. */
  readonly keys: readonly Buffer[];
}

export type ForwardDecision =
  | {
      readonly kind: 'skipped';
      readonly reason: ForwardReason;
      readonly explanation: string;
      /** It came back as this email of ours, which only those can make believe who have got it. */
      readonly loopedEmailId: string | null;
    }
  | {
      readonly kind: 'forward';
      readonly method: 'relayed' | 'rebuilt';
      /** One clause: why this method. */
      readonly because: string;
      /** `null`: it has none; `rewritten`: it is known to be true; `ours`: nobody vouches for it. */
      readonly sender: 'null' | 'rewritten' | 'ours';
      /** The sender is to hear of a failure. */
      readonly isReportOpen: boolean;
    };

/** RFC 5321 §6.3: so often through this host is a circle. */
export const OWN_HOPS_MAX = 4;

export function decideForward(q: ForwardQuestion): ForwardDecision {
  const { rule, header } = q;
  if (rule === null) {
    return skipped(
      'rule_missing',
      'The forwarding rule was deleted before the message was forwarded.',
    );
  }
  if (rule.status === 'disabled') {
    return skipped(
      'rule_disabled',
      'The forwarding rule is disabled, so the message is only kept.',
    );
  }
  if (rule.status === 'invalid') {
    const why = rule.invalidReason ?? 'it is no longer safe to run.';
    return skipped('rule_invalid', `The forwarding rule is invalid: ${why}`);
  }
  const loop = findLoop(q, rule.target);
  if (loop !== null) return loop;
  const isPlausible = isSenderPlausible(q.mailFrom, q.authentication);
  const { method, because } = isForgeryOfOurs(q)
    ? {
        method: 'rebuilt' as const,
        because:
          'nothing proves that its author wrote it, and sent on from here it would pass as proven',
      }
    : chooseMethod(q.authentication);
  if (method === 'rebuilt' && isFrom(header, rule.target)) {
    return skipped(
      'loop',
      `The message says, without proof, that it is from ${rule.target}, for which it would be sent on: a loop.`,
    );
  }
  if (method === 'rebuilt' && (header.isAutoReply || q.mailFrom === '')) {
    const what = header.isAutoReply ? 'It is an automatic reply' : 'It has no envelope sender';
    return skipped(
      'auto_reply',
      `${what} and cannot be relayed as it came, because ${because}; a copy in the name of the route could start an endless exchange.`,
    );
  }
  return {
    kind: 'forward',
    method,
    because,
    sender:
      q.mailFrom === '' && method === 'relayed'
        ? 'null'
        : isPlausible && method === 'relayed'
          ? 'rewritten'
          : 'ours',
    isReportOpen: isPlausible && !header.isAutomatic,
  };
}

function findLoop(
  { header, recipient, keys }: ForwardQuestion,
  target: string,
): ForwardDecision | null {
  const tokens = header.loopTokens.flatMap((value) => readLoopToken(value, keys) ?? []);
  const token = tokens.find((one) => one.isFor(target));
  if (token !== undefined) {
    const explanation = `The message was forwarded for ${target} before and came back: a loop.`;
    return { ...skipped('loop', explanation), loopedEmailId: token.emailId };
  }
  const passed = [target, recipient].find((address) =>
    header.deliveredTo.includes(normalizedAddress(address)),
  );
  if (passed !== undefined) {
    return skipped('loop', `The message says that it was delivered to ${passed} before: a loop.`);
  }
  if (header.ownHops > OWN_HOPS_MAX) {
    return skipped('loop', `The message came through this server ${header.ownHops} times: a loop.`);
  }
  return null;
}

const skipped = (
  reason: ForwardReason,
  explanation: string,
): Extract<ForwardDecision, { kind: 'skipped' }> => ({
  kind: 'skipped',
  reason,
  explanation,
  loopedEmailId: null,
});

/** SPF does not survive a forward, so what counts is a signature of the author's domain, or that it asks for none. */
function chooseMethod(authentication: Authentication | null): {
  readonly method: 'relayed' | 'rebuilt';
  readonly because: string;
} {
  if (authentication === null) {
    return { method: 'relayed', because: 'its authentication was not checked' };
  }
  const { dkim, dmarc } = authentication;
  const domain = dmarc.domain ?? 'its author';
  const signature = dkim.find(({ result, aligned }) => result === 'pass' && aligned);
  if (signature !== undefined) {
    const signer = signature.domain ?? domain;
    return { method: 'relayed', because: `the signature of ${signer} still proves its author` };
  }
  if (dmarc.result === 'temperror') {
    return {
      method: 'rebuilt',
      because: `it has no valid signature of ${domain}, whose DMARC policy could not be read`,
    };
  }
  if (dmarc.policy === null) {
    return { method: 'relayed', because: `${domain} has no DMARC policy` };
  }
  if (dmarc.policy === 'none') {
    return { method: 'relayed', because: `the DMARC policy of ${domain} is none` };
  }
  return {
    method: 'rebuilt',
    because: `it has no valid signature of ${domain}, whose DMARC policy is ${dmarc.policy}`,
  };
}

/** Whether the sender's own domain lets the client send for it, or it is the domain of a proven author. */
export function isSenderPlausible(
  mailFrom: string,
  authentication: Authentication | null,
): boolean {
  const at = mailFrom.lastIndexOf('@');
  if (at === -1 || authentication === null) return false;
  const { spf, dkim, dmarc } = authentication;
  if (spf.result === 'pass') return true;
  const sender = mailFrom.slice(at + 1).toLowerCase();
  const author = dmarc.domain?.toLowerCase() ?? '';
  if (dmarc.result !== 'pass' || author === '') return false;
  // Who has a name below another's speaks for that one only with its signature.
  const signers = dkim.filter(({ result, aligned }) => result === 'pass' && aligned);
  return [author, ...signers.map(({ domain }) => domain?.toLowerCase() ?? author)].some((name) =>
    isWithin(sender, name),
  );
}

const isWithin = (domain: string, name: string): boolean =>
  domain === name || domain.endsWith(`.${name}`);

const isFrom = ({ authorMailbox }: ForwardHeader, target: string): boolean =>
  authorMailbox !== null && normalizedAddress(authorMailbox.address) === normalizedAddress(target);

/**
 * Whether it names an author of the route's or this host's organization whom nothing proves: our envelope sender and
 * signature would make it pass DMARC (RFC 9989 §4.4), which it could not do as it came.
 */
function isForgeryOfOurs({ header, ownNames, authentication }: ForwardQuestion): boolean {
  const own = header.authorDomains.filter((author) =>
    ownNames.some((name) => isOfOneOrganization(author, name)),
  );
  if (own.length === 0) return false;
  if (authentication === null || header.authorDomains.length > 1) return true;
  const { dkim, dmarc, spf } = authentication;
  const sender = spf.result === 'pass' ? (spf.domain?.toLowerCase() ?? '') : '';
  return !(
    dmarc.result === 'pass' ||
    dkim.some(({ result, aligned }) => result === 'pass' && aligned) ||
    own.some((author) => isWithin(sender, author))
  );
}

/** Below which people register names, where a country has such (`co.uk`); others are taken for organizations. */
const REGISTRY =
  /^(?:ac|co|com|edu|firm|gen|go|gob|gouv|gov|gv|id|ind|ltd|me|mil|ne|net|nom|or|org|plc|sch|web)\.[a-z]{2}$/;

/** As far as names alone tell it, without the DNS: rather once too often. */
function isOfOneOrganization(one: string, other: string): boolean {
  if (isWithin(one, other) || isWithin(other, one)) return true;
  const end = one.split('.').slice(-2).join('.');
  return end === other.split('.').slice(-2).join('.') && !REGISTRY.test(end);
}
