// What would become of a message to an address, without any mail: the decision at RCPT, and what its forwarding rule
// would do. Says nothing about domains of other tenants.
import type { Pool } from 'pg';
import { refuseFields, type Issue } from '../access/refusal.ts';
import { normalizedAddress, parseMailbox, type Mailbox } from '../mail/address.ts';
import type { RouteDecision } from '../store/received-email.ts';
import { suppressedAmong } from '../suppressions/suppressions.ts';
import type { Resolution } from './arrival.ts';
import { resolveRecipient } from './resolve.ts';
import type { RuleRecord, RuleVerbs } from './rules.ts';

export interface TestRouteRequest {
  /** The envelope recipient to ask about. */
  recipient: string;
  /** The envelope sender; empty for the null sender of bounces. Absent: somebody. */
  from?: string | null;
}

export interface DryRun {
  readonly recipient: string;
  readonly isTaken: boolean;
  /** Null: the address is at no receiving domain of the tenant. */
  readonly decision: RouteDecision | null;
  /** Null: no rule hangs on the route. */
  readonly forwarding: {
    readonly ruleId: string;
    readonly status: RuleRecord['status'];
    readonly outcome: 'queued' | 'skipped';
    readonly reason: 'rule_disabled' | 'rule_invalid' | null;
    readonly destinations: readonly string[];
    /** Those of them that would get nothing. */
    readonly suppressed: readonly string[];
  } | null;
  /** One or two sentences. */
  readonly explanation: string;
}

export interface DryRunDependencies {
  readonly pool: Pool;
  readonly rules: Pick<RuleVerbs, 'find'>;
}

/** Throws a Refusal for what is no address. */
export async function dryRun(
  d: DryRunDependencies,
  tenantId: string,
  request: TestRouteRequest,
): Promise<DryRun> {
  const { recipient, isNullSender } = checkRequest(request);
  const { address, domain } = recipient;
  const found = await resolveRecipient(d.pool, address);
  if (found.kind === 'not_ours' || found.receiver.tenantId !== tenantId) {
    const explanation = await whyNotOurs(d.pool, tenantId, domain);
    return { recipient: address, isTaken: false, decision: null, forwarding: null, explanation };
  }
  const { decision } = found.receiver;
  const isTaken = found.kind === 'taken';
  const arrival = describeArrival(found, recipient);
  const ruleId = decision.forwarding_rule_id;
  const about = { recipient: address, isTaken, decision };
  if (!isTaken) return { ...about, forwarding: null, explanation: arrival };
  if (ruleId === null) {
    return { ...about, forwarding: null, explanation: `${arrival} No forwarding rule is on it.` };
  }
  const rule = await d.rules.find(tenantId, ruleId);
  const keys = rule.destinations.map(normalizedAddress);
  const listed = await suppressedAmong(d.pool, tenantId, keys);
  const suppressed = rule.destinations.filter((one) => listed.has(normalizedAddress(one)));
  return {
    ...about,
    forwarding: {
      ruleId,
      status: rule.status,
      outcome: rule.status === 'active' ? 'queued' : 'skipped',
      reason:
        rule.status === 'active'
          ? null
          : rule.status === 'disabled'
            ? 'rule_disabled'
            : 'rule_invalid',
      destinations: rule.destinations,
      suppressed,
    },
    explanation: `${arrival} ${describeForward(rule, { isNullSender, suppressed })}`,
  };
}

function checkRequest(request: TestRouteRequest): {
  readonly recipient: Mailbox;
  readonly isNullSender: boolean;
} {
  const issues: Issue[] = [];
  const recipient = parseMailbox(request.recipient);
  if (!recipient.ok) {
    issues.push({ path: 'recipient', message: `The \`recipient\` ${recipient.problem}.` });
  }
  const from = request.from?.trim() ?? null;
  const isNullSender = from === '' || from === '<>';
  const sender = from === null || isNullSender ? null : parseMailbox(from);
  if (sender?.ok === false) {
    issues.push({ path: 'from', message: `The \`from\` ${sender.problem}.` });
  }
  if (!recipient.ok || issues.length > 0) throw refuseFields(issues);
  return { recipient: recipient.mailbox, isNullSender };
}

async function whyNotOurs(pool: Pool, tenantId: string, domain: string): Promise<string> {
  const { rows } = await pool.query<{ receiving: boolean }>(
    'select receiving from sending_domain where tenant_id = $1 and name = $2',
    [tenantId, domain],
  );
  const why =
    rows[0] === undefined
      ? `${domain} is no domain of this account`
      : rows[0].receiving
        ? `${domain} is not verified for receiving`
        : `receiving is off for ${domain}`;
  return `It would not arrive in this account: ${why}.`;
}

function describeArrival(
  { kind, receiver: { decision } }: Exclude<Resolution, { kind: 'not_ours' }>,
  { address, domain }: Mailbox,
): string {
  if (kind === 'unrouteable') {
    return `It would be refused with 550 5.1.1: ${domain} has routes, and none of them is for ${address}.`;
  }
  const { route_type: type, local_part: local, target_address: target } = decision;
  if (type === null) {
    return /^postmaster@/i.test(address)
      ? 'It would be stored: mail for the postmaster of a receiving domain is always taken.'
      : `It would be stored: ${domain} has no routes, and takes mail for every address.`;
  }
  return type === 'catch_all'
    ? `It would be stored: no other route is for it, and the catch-all of ${domain} takes it for ${target}.`
    : `It would be stored: the ${type} route ${local} takes it for ${target}.`;
}

function describeForward(
  rule: RuleRecord,
  about: { readonly isNullSender: boolean; readonly suppressed: readonly string[] },
): string {
  if (rule.status === 'disabled') {
    return 'It would not be forwarded: the rule on the route is disabled.';
  }
  if (rule.status === 'invalid') {
    return `It would not be forwarded: the rule on the route is invalid. ${rule.invalidReason ?? ''}`;
  }
  const to = rule.destinations.filter((one) => !about.suppressed.includes(one));
  if (to.length === 0) return 'It would be forwarded to nobody: every destination is suppressed.';
  const none =
    about.suppressed.length === 0
      ? ''
      : ` ${about.suppressed.join(', ')} would get nothing: suppressed.`;
  const whom = to.join(', ');
  return about.isNullSender
    ? `It would be forwarded to ${whom} with the null sender if its author's DMARC still passes there, and otherwise be skipped as an automatic message.${none}`
    : `It would be forwarded to ${whom}: as it came if its author's DMARC still passes there, otherwise in a message of ${rule.routeTargetAddress}.${none}`;
}
