// The conditions of automations: rules over values, joined by `and` and `or`. A value that is not there equals null, exists
// not, is empty, and is neither greater nor less than anything: a missing field is no fault. Pure.
import type { Issue } from '../access/refusal.ts';
import { isStorable } from '../templates/value.ts';
import { pathIssues, valueAt, type Scope } from './automation-values.ts';

export type ConditionRule =
  | {
      readonly type: 'rule';
      readonly field: string;
      readonly operator: Operator;
      /** Absent with `exists` and `is_empty`. */
      readonly value?: RuleValue;
    }
  | { readonly type: 'and' | 'or'; readonly rules: readonly ConditionRule[] };

type RuleValue = string | number | boolean | null;

/** What each compares with. */
const OPERATORS = {
  eq: 'anything',
  neq: 'anything',
  gt: 'number',
  gte: 'number',
  lt: 'number',
  lte: 'number',
  contains: 'string',
  starts_with: 'string',
  ends_with: 'string',
  exists: 'nothing',
  is_empty: 'nothing',
} as const;
type Operator = keyof typeof OPERATORS;

/** Of one condition, groups included. */
const RULES_MAX = 100;
const DEPTH_MAX = 8;
const VALUE_MAX_CHARACTERS = 2_000;

/** The rule without what it does not need, or null with issues that are added to `issues`. */
export function readRule(given: unknown, path: string, issues: Issue[]): ConditionRule | null {
  const count = { left: RULES_MAX };
  const before = issues.length;
  const rule = read(given, { path, issues, depth: 1, count });
  return issues.length > before ? null : rule;
}

interface Reading {
  readonly path: string;
  readonly issues: Issue[];
  readonly depth: number;
  readonly count: { left: number };
}

function read(given: unknown, at: Reading): ConditionRule | null {
  const { path, issues, depth, count } = at;
  const add = (where: string, message: string): null => {
    issues.push({ path: where, message });
    return null;
  };
  count.left -= 1;
  if (count.left === -1) return add(path, `A condition has at most ${RULES_MAX} rules.`);
  if (count.left < 0) return null;
  if (typeof given !== 'object' || given === null || Array.isArray(given)) {
    return add(path, `\`${path}\` must be a rule: an object with a \`type\`.`);
  }
  const { type, field, operator, value, rules } = given as Readonly<Record<string, unknown>>;
  if (type === 'and' || type === 'or') {
    if (depth > DEPTH_MAX) return add(path, `Rules are nested at most ${DEPTH_MAX} deep.`);
    if (!Array.isArray(rules) || rules.length === 0) {
      return add(`${path}.rules`, `\`${path}.rules\` must have at least one rule.`);
    }
    const inner = rules.slice(0, RULES_MAX + 1).flatMap((one: unknown, index) => {
      const rule = read(one, { ...at, path: `${path}.rules.${index}`, depth: depth + 1 });
      return rule === null ? [] : [rule];
    });
    return { type, rules: inner };
  }
  if (type !== 'rule') {
    return add(`${path}.type`, `\`${path}.type\` must be \`rule\`, \`and\` or \`or\`.`);
  }
  issues.push(...pathIssues(`${path}.field`, field));
  if (typeof operator !== 'string' || !Object.hasOwn(OPERATORS, operator)) {
    const names = Object.keys(OPERATORS).join(', ');
    return add(`${path}.operator`, `\`${path}.operator\` must be one of ${names}.`);
  }
  const known = operator as Operator;
  const rule = { type, field: String(field), operator: known } as const;
  if (OPERATORS[known] === 'nothing') return rule;
  const problem = valueProblem(OPERATORS[known], value);
  if (problem !== null) return add(`${path}.value`, `\`${path}.value\` ${problem}.`);
  return { ...rule, value: value as RuleValue };
}

function valueProblem(kind: 'anything' | 'number' | 'string', value: unknown): string | null {
  if (typeof value === 'string' && value.length > VALUE_MAX_CHARACTERS) {
    return `must have at most ${VALUE_MAX_CHARACTERS} characters`;
  }
  if (typeof value === 'string' && !isStorable(value)) {
    return 'contains a NUL character or half a surrogate pair';
  }
  if (kind !== 'anything') return typeof value === kind ? null : `must be a ${kind}`;
  return value === null || ['string', 'number', 'boolean'].includes(typeof value)
    ? null
    : 'must be a string, a number, true, false or null';
}

/** Whether it is so. Strings are compared with their case; a number in a string is a string. */
export function holds(rule: ConditionRule, scope: Scope): boolean {
  if (rule.type !== 'rule') {
    return rule.type === 'and'
      ? rule.rules.every((one) => holds(one, scope))
      : rule.rules.some((one) => holds(one, scope));
  }
  const value = valueAt(rule.field, scope) ?? null;
  const wanted = rule.value ?? null;
  switch (rule.operator) {
    case 'eq':
      return value === wanted;
    case 'neq':
      return value !== wanted;
    case 'gt':
      return compared(value, wanted, (a, b) => a > b);
    case 'gte':
      return compared(value, wanted, (a, b) => a >= b);
    case 'lt':
      return compared(value, wanted, (a, b) => a < b);
    case 'lte':
      return compared(value, wanted, (a, b) => a <= b);
    case 'contains':
      return Array.isArray(value)
        ? value.includes(wanted)
        : typeof value === 'string' && value.includes(String(wanted));
    case 'starts_with':
      return typeof value === 'string' && value.startsWith(String(wanted));
    case 'ends_with':
      return typeof value === 'string' && value.endsWith(String(wanted));
    case 'exists':
      return value !== null;
    case 'is_empty':
      return (
        value === null ||
        value === '' ||
        (typeof value === 'object' && Object.keys(value).length === 0)
      );
  }
}

const compared = (a: unknown, b: unknown, is: (left: number, right: number) => boolean): boolean =>
  typeof a === 'number' && typeof b === 'number' && is(a, b);
