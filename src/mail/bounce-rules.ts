/**
 * Rules about replies, as data (config/bounces.json): what the large providers mean by their words where the codes do
 * not tell, and what an operator decides differently for a tenant.
 *
 * In: the parsed file. Out: rules in the order in which they are asked, those of a tenant first. Refuses, with the name
 * of the rule and what to fix, whatever it does not know, and a rule that does not see its own example: one that
 * silently never matches is worse than none.
 */
import { causes, type Cause } from './outcome.ts';
import { formatReply, stages, type Reply, type Stage } from './reply.ts';
import { compile, isObject } from './rule-file.ts';

export interface BounceRule {
  readonly name: string;
  /** Ids; null: everybody's. */
  readonly tenants: readonly string[] | null;
  /** Ends of the mail host's name; null: any host, and what came back by mail. */
  readonly hosts: readonly string[] | null;
  /** Null: any. */
  readonly stages: readonly Stage[] | null;
  /** Looked for in code, enhanced status code and text, one space between them. */
  readonly text: RegExp;
  readonly verdict: 'permanent' | 'temporary';
  readonly cause: Cause;
}

export interface ReplyFacts {
  readonly reply: Reply;
  readonly stage: Stage;
  /** Null where the host is not known. */
  readonly host: string | null;
  readonly tenantId: string;
}

const RULES_MAX = 1_000;
const PATTERN_CHARS_MAX = 500;
const KEYS = ['name', 'tenants', 'hosts', 'stages', 'text', 'verdict', 'cause', 'example'];

/** Throws an Error that names the rule and says what is wrong with it. */
export function readBounceRules(file: unknown): readonly BounceRule[] {
  const list = isObject(file) ? file['rules'] : null;
  if (!Array.isArray(list)) throw new Error('bounce rules: the file must be {"rules": [...]}');
  if (list.length > RULES_MAX) throw new Error(`bounce rules: at most ${RULES_MAX} are allowed`);
  const rules = list.map(readRule);
  return [
    ...rules.filter(({ tenants }) => tenants !== null),
    ...rules.filter(({ tenants }) => tenants === null),
  ];
}

/** The first rule that speaks of this reply, or null. */
export function findBounceRule(
  rules: readonly BounceRule[],
  { reply, stage, host, tenantId }: ReplyFacts,
): BounceRule | null {
  if (reply.code < 400) return null;
  const said = formatReply(reply);
  const from = host?.toLowerCase().replace(/\.$/, '') ?? null;
  return (
    rules.find(
      (rule) =>
        (rule.tenants === null || rule.tenants.includes(tenantId)) &&
        (rule.stages === null || rule.stages.includes(stage)) &&
        (rule.hosts === null || from === null || rule.hosts.some((end) => endsWith(from, end))) &&
        rule.text.test(said),
    ) ?? null
  );
}

const endsWith = (host: string, end: string): boolean => host === end || host.endsWith(`.${end}`);

function readRule(given: unknown, index: number): BounceRule {
  const rule = isObject(given) ? given : {};
  const name = rule['name'];
  const label = typeof name === 'string' && name !== '' ? `"${name}"` : `number ${index + 1}`;
  const refuse = (what: string): never => {
    throw new Error(`bounce rules: rule ${label} ${what}`);
  };
  if (typeof name !== 'string' || name === '') return refuse('needs a `name`');
  const unknown = Object.keys(rule).find((key) => !KEYS.includes(key));
  if (unknown !== undefined)
    return refuse(`has \`${unknown}\`, which is not one of ${KEYS.join(', ')}`);
  const { text, verdict, cause } = rule;
  if (typeof text !== 'string' || text === '' || text.length > PATTERN_CHARS_MAX) {
    return refuse(
      `needs \`text\`, a regular expression of at most ${PATTERN_CHARS_MAX} characters`,
    );
  }
  if (verdict !== 'permanent' && verdict !== 'temporary') {
    return refuse('needs `verdict`, "permanent" or "temporary"');
  }
  const known = causes.find((one) => one === cause);
  if (known === undefined) return refuse(`needs \`cause\`, one of ${causes.join(', ')}`);
  const listOf = (key: string): readonly string[] | null => {
    const list = rule[key];
    if (list === undefined) return null;
    if (Array.isArray(list) && list.length > 0 && list.every((one) => typeof one === 'string')) {
      return list;
    }
    return refuse(`has \`${key}\`, which must be a list of texts`);
  };
  const named = listOf('stages');
  const at = named === null ? null : stages.filter((stage) => named.includes(stage));
  if (named !== null && at?.length !== named.length) {
    return refuse(`has \`stages\`, which must be among ${stages.join(', ')}`);
  }
  const pattern = compile(text) ?? refuse('has a `text` that is no regular expression');
  const { example } = rule;
  if (typeof example !== 'string' || !pattern.test(example)) {
    return refuse('needs an `example`, a reply in which its `text` is found');
  }
  return {
    name,
    tenants: listOf('tenants'),
    hosts: listOf('hosts'),
    stages: at,
    text: pattern,
    verdict,
    cause: known,
  };
}
