// Where mail for a receiving domain belongs, and who gets a copy of it: routes, the forwarding rules that hang on
// them, and what came of each forward.
import { defineEntity, p } from '@mikro-orm/core';

export const routeTypes = ['exact', 'alias', 'catch_all'] as const;
export type RouteType = (typeof routeTypes)[number];

export const ReceivingRoute = defineEntity({
  name: 'ReceivingRoute',
  tableName: 'receiving_route',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    domainId: p.uuid(),
    type: p.enum(routeTypes),
    /** As given; null for `catch_all`. */
    localPart: p.text().nullable(),
    /** What is matched: case does not matter. Empty for `catch_all`. */
    localKey: p.text(),
    targetLocalPart: p.text(),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});

export const ruleStatuses = ['active', 'disabled', 'invalid'] as const;
export type RuleStatus = (typeof ruleStatuses)[number];

export const ForwardingRule = defineEntity({
  name: 'ForwardingRule',
  tableName: 'forwarding_rule',
  properties: {
    tenantId: p.uuid().primary(),
    id: p.uuid().primary(),
    domainId: p.uuid(),
    /** The domain's name, which a rule keeps when its domain is gone. */
    domain: p.text(),
    routeId: p.uuid(),
    routeTargetAddress: p.text(),
    /** Normalized, without repeats, in the order given. */
    destinations: p.json<readonly string[]>(),
    status: p.enum(ruleStatuses),
    /** One sentence; null unless `invalid`. */
    invalidReason: p.text().nullable(),
    /** Loops since `loopsSince`; too many make the rule invalid. */
    loops: p.integer(),
    loopsSince: p.datetime().nullable(),
    createdAt: p.datetime(),
    updatedAt: p.datetime(),
  },
});

export type AttemptStatus = 'queued' | 'skipped' | 'failed';

/** Why a message was not forwarded. */
export type ForwardReason =
  | 'rule_disabled'
  | 'rule_invalid'
  | 'rule_missing'
  | 'loop'
  | 'auto_reply'
  | 'message_missing'
  | 'refused'
  | 'internal';

export const ForwardingAttempt = defineEntity({
  name: 'ForwardingAttempt',
  tableName: 'forwarding_attempt',
  properties: {
    tenantId: p.uuid().primary(),
    /** Its task's. */
    id: p.uuid().primary(),
    receivedEmailId: p.uuid(),
    ruleId: p.uuid(),
    /** The envelope recipient that the route matched. */
    recipient: p.text(),
    /** As the rule had them at that time. */
    destinations: p.json<readonly string[]>(),
    status: p.enum(['queued', 'skipped', 'failed']),
    /** Null when queued. */
    reason: p.text().$type<ForwardReason>().nullable(),
    /** One sentence: what was done and why, or why not. */
    explanation: p.text(),
    /** `relayed`: the original bytes; `rebuilt`: a message of the route's own around them. */
    method: p.enum(['relayed', 'rebuilt']).nullable(),
    /** The outbound email; null unless queued. */
    emailId: p.uuid().nullable(),
    replayId: p.uuid().nullable(),
    /** Its author is still to hear of a failure of the outbound email. */
    isReportOpen: p.boolean(),
    createdAt: p.datetime(),
  },
});
