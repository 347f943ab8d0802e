// What each step of an automation may say. Every rule that needs no database is here; all issues are found, by path, and
// what comes out has only the fields that are known. Pure.
import type { Issue } from '../access/refusal.ts';
import { parseMailbox } from '../mail/address.ts';
import type { AutomationConnection, AutomationStep, StepType } from '../store/automation.ts';
import { isUuid } from '../store/id.ts';
import { ALIAS } from '../templates/find.ts';
import { isStorable, VALUE_MAX_CHARACTERS } from '../templates/value.ts';
import { parseDuration } from './automation-duration.ts';
import { graphIssues, STEPS_MAX, type ConnectionType } from './automation-graph.ts';
import { readRule } from './automation-rules.ts';
import { isReference, pathIssues } from './automation-values.ts';
import { NAME_MAX_CHARACTERS } from './contact-fields.ts';
import { eventNameIssues, isStorableDeep } from './event-payload.ts';
import { lineIssues, nameIssues } from './texts.ts';

type Config = Readonly<Record<string, unknown>>;

const KEY_MAX_CHARACTERS = 100;
const SUBJECT_MAX_CHARACTERS = 2_000;
const REPLY_TO_MAX = 50;
const VARIABLES_MAX = 50;
const PROPERTIES_MAX = 100;
const MEMBER_MAX_CHARACTERS = 50;
/** Of all steps and connections, as JSON: every run has a copy. */
const GRAPH_MAX_BYTES = 256 * 1024;

/** As it comes in a request. */
export interface GivenStep {
  readonly key: string;
  readonly type: StepType;
  readonly config?: Config;
}
export interface GivenConnection {
  readonly from: string;
  readonly to: string;
  readonly type?: ConnectionType | undefined;
}

export interface Graph {
  readonly steps: readonly AutomationStep[];
  readonly connections: readonly AutomationConnection[];
}

/** The graph with what is known of it; issues are added to `issues`. */
export function readGraph(
  given: {
    readonly steps: readonly GivenStep[];
    readonly connections: readonly GivenConnection[];
  },
  issues: Issue[],
): Graph {
  const connections = given.connections.map(({ from, to, type }) => ({
    from,
    to,
    type: type ?? 'default',
  }));
  const problems = graphIssues(given.steps, connections);
  issues.push(...problems);
  const steps = given.steps.slice(0, STEPS_MAX).map(({ key, type, config }, index) => {
    const path = `steps.${index}`;
    issues.push(...nameIssues(`${path}.key`, key, KEY_MAX_CHARACTERS));
    const read = new Reader(config ?? {}, `${path}.config`, issues);
    READERS[type](read);
    return { key, type, config: read.config };
  });
  const graph = { steps, connections };
  if (issues.length === 0 && Buffer.byteLength(JSON.stringify(graph)) > GRAPH_MAX_BYTES) {
    const message = `The steps and connections together have more than ${GRAPH_MAX_BYTES} bytes as JSON.`;
    issues.push({ path: 'steps', message });
  }
  return graph;
}

/** Takes one field after the other out of a config. Null is the same as absent, but where it is said otherwise. */
class Reader {
  readonly config: Record<string, unknown> = {};
  private readonly given: Config;
  private readonly path: string;
  private readonly issues: Issue[];

  constructor(given: Config, path: string, issues: Issue[]) {
    this.given = given;
    this.path = path;
    this.issues = issues;
  }

  /** `find` says what is wrong with a value that is there. */
  take(
    field: string,
    is: 'needed' | 'optional' | 'nullable',
    find: (value: unknown, path: string) => readonly Issue[],
  ): void {
    const value = Object.hasOwn(this.given, field) ? this.given[field] : undefined;
    const path = `${this.path}.${field}`;
    if (value === undefined || (value === null && is !== 'nullable')) {
      if (is === 'needed') this.issues.push({ path, message: `Missing \`${path}\` field.` });
      return;
    }
    this.config[field] = value;
    this.issues.push(...(value === null ? [] : find(value, path)));
  }

  /** Instead of what was given. */
  put(field: string, value: unknown): void {
    this.config[field] = value;
  }

  refuse(message: string): void {
    this.issues.push({ path: this.path, message });
  }

  /** The whole config is one rule. */
  takeRule(): void {
    Object.assign(this.config, readRule(this.given, this.path, this.issues));
  }
}

const READERS: Readonly<Record<StepType, (read: Reader) => void>> = {
  trigger: (read) => read.take('event_name', 'needed', eventName),
  delay: (read) => read.take('duration', 'needed', duration),
  condition: (read) => read.takeRule(),
  wait_for_event(read) {
    read.take('event_name', 'needed', eventName);
    read.take('timeout', 'optional', duration);
    read.take('filter_rule', 'optional', (value, path) => {
      const found: Issue[] = [];
      const rule = readRule(value, path, found);
      read.put('filter_rule', rule);
      return found;
    });
  },
  send_email(read) {
    read.take('template', 'needed', (value, path) => {
      const issues = template(value, path);
      if (issues.length === 0) {
        const { id: name, variables } = value as Config;
        read.put('template', { id: name, ...(variables === undefined ? {} : { variables }) });
      }
      return issues;
    });
    read.take('subject', 'optional', (value, path) =>
      typeof value === 'string' && value !== ''
        ? lineIssues(path, value, SUBJECT_MAX_CHARACTERS)
        : [{ path, message: `\`${path}\` must be a text.` }],
    );
    read.take('from', 'optional', mailbox);
    read.take('reply_to', 'optional', (value, path) => {
      if (!Array.isArray(value)) return mailbox(value, path);
      return value.length === 0 || value.length > REPLY_TO_MAX
        ? [{ path, message: `\`${path}\` must have 1 to ${REPLY_TO_MAX} addresses.` }]
        : value.flatMap((one: unknown, index) => mailbox(one, `${path}.${index}`));
    });
    read.take('topic_id', 'optional', id);
  },
  contact_update(read) {
    for (const field of ['first_name', 'last_name']) {
      read.take(field, 'nullable', (value, path) =>
        typeof value === 'string'
          ? lineIssues(path, value, NAME_MAX_CHARACTERS)
          : referenceIssues(value, path, 'a string'),
      );
    }
    read.take('unsubscribed', 'optional', (value, path) =>
      typeof value === 'boolean' ? [] : referenceIssues(value, path, 'true, false'),
    );
    read.take('properties', 'optional', (value, path) =>
      members(value, { path, max: PROPERTIES_MAX, find: property }),
    );
    if (Object.keys(read.config).length === 0) {
      read.refuse('Give `first_name`, `last_name`, `unsubscribed` or `properties` to change.');
    }
  },
  contact_delete: () => undefined,
  add_to_segment: (read) => read.take('segment_id', 'needed', id),
};

const eventName = (value: unknown, path: string): readonly Issue[] =>
  typeof value === 'string'
    ? eventNameIssues(path, value)
    : [{ path, message: `\`${path}\` must be the name of an event.` }];

function duration(value: unknown, path: string): readonly Issue[] {
  const parsed = parseDuration(value);
  return parsed.ok ? [] : [{ path, message: `\`${path}\` ${parsed.problem}.` }];
}

const id = (value: unknown, path: string): readonly Issue[] =>
  typeof value === 'string' && isUuid(value)
    ? []
    : [{ path, message: `\`${path}\` must be a valid UUID.` }];

function mailbox(value: unknown, path: string): readonly Issue[] {
  if (typeof value !== 'string') return [{ path, message: `\`${path}\` must be an address.` }];
  const parsed = parseMailbox(value);
  return parsed.ok
    ? []
    : [{ path, message: `Invalid \`${path}\` field: the address ${parsed.problem}.` }];
}

function template(value: unknown, path: string): readonly Issue[] {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    return [{ path, message: `\`${path}\` must be an object with an \`id\`.` }];
  }
  const { id: name, variables } = value as Readonly<Record<string, unknown>>;
  const isName = typeof name === 'string' && (isUuid(name) || ALIAS.test(name));
  return [
    ...(isName
      ? []
      : [
          {
            path: `${path}.id`,
            message: `\`${path}.id\` must be the id or the alias of a template.`,
          },
        ]),
    ...(variables === undefined || variables === null
      ? []
      : members(variables, {
          path: `${path}.variables`,
          max: VARIABLES_MAX,
          find: variable,
        })),
  ];
}

function variable(value: unknown, path: string): readonly Issue[] {
  if (isReference(value)) return pathIssues(`${path}.var`, value.var);
  if (typeof value === 'number' || typeof value === 'boolean') return [];
  const text = typeof value === 'string' ? value : JSON.stringify(value);
  if (value === null || text === undefined || text.length > VALUE_MAX_CHARACTERS) {
    const message = `\`${path}\` must be a value of at most ${VALUE_MAX_CHARACTERS} characters, or an object with \`var\`.`;
    return [{ path, message }];
  }
  return isStorableDeep(value) ? [] : [unstorable(path)];
}

function property(value: unknown, path: string): readonly Issue[] {
  if (typeof value === 'string') {
    return value.length > VALUE_MAX_CHARACTERS
      ? [{ path, message: `\`${path}\` must have at most ${VALUE_MAX_CHARACTERS} characters.` }]
      : isStorable(value)
        ? []
        : [unstorable(path)];
  }
  return value === null || typeof value === 'number' || typeof value === 'boolean'
    ? []
    : referenceIssues(value, path, 'a string, a number, true, false, null');
}

function members(
  value: unknown,
  {
    path,
    max,
    find,
  }: {
    readonly path: string;
    readonly max: number;
    readonly find: (value: unknown, path: string) => readonly Issue[];
  },
): readonly Issue[] {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    return [{ path, message: `\`${path}\` must be an object.` }];
  }
  const entries = Object.entries(value);
  if (entries.length > max) {
    return [{ path, message: `\`${path}\` must have at most ${max} members.` }];
  }
  return entries.flatMap(([key, one]) =>
    /^\w+$/.test(key) && key.length <= MEMBER_MAX_CHARACTERS && key !== '__proto__'
      ? find(one, `${path}.${key}`)
      : [
          {
            path,
            message: `The keys of \`${path}\` must be 1 to ${MEMBER_MAX_CHARACTERS} letters, digits and underscores.`,
          },
        ],
  );
}

const referenceIssues = (value: unknown, path: string, others: string): readonly Issue[] =>
  isReference(value)
    ? pathIssues(`${path}.var`, value.var)
    : [{ path, message: `\`${path}\` must be ${others} or an object with \`var\`.` }];

const unstorable = (path: string): Issue => ({
  path,
  message: `\`${path}\` contains a NUL character or half a surrogate pair.`,
});
