// Where the values of an automation come from: the event that started the run, the contact, and the events it waited for.
// A path names one: `event.plan`, `contact.first_name`, `contact.properties.company`, `wait_events.paid.amount`. Pure.
import type { PropertyValue } from '../store/contact.ts';
import type { Issue } from '../access/refusal.ts';
import { isStorable } from '../templates/value.ts';

export type Payload = Readonly<Record<string, unknown>>;

/** What a path can reach of a contact. */
export interface ContactFacts {
  readonly id: string;
  readonly email: string;
  readonly first_name: string | null;
  readonly last_name: string | null;
  readonly unsubscribed: boolean;
  /** ISO 8601. */
  readonly created_at: string;
  /** With the fallbacks of those that it has no value for. */
  readonly properties: Readonly<Record<string, PropertyValue>>;
}

export interface Scope {
  readonly event: Payload | null;
  /** Null: there is none. */
  readonly contact: ContactFacts | null;
  /** Payloads by the name of the event, of each the last one. */
  readonly waits: ReadonlyMap<string, Payload | null>;
}

const PATH = /^(event|contact|wait_events)\.(.+)$/su;
const PATH_MAX_CHARACTERS = 300;

/** What is wrong with a path, as an issue about the field `at`. */
export function pathIssues(at: string, path: unknown): Issue[] {
  if (
    typeof path !== 'string' ||
    path.length > PATH_MAX_CHARACTERS ||
    !PATH.test(path) ||
    !isStorable(path)
  ) {
    const message = `\`${at}\` must name a value with \`event.\`, \`contact.\` or \`wait_events.\` before it, such as \`event.plan\`, in at most ${PATH_MAX_CHARACTERS} characters.`;
    return [{ path: at, message }];
  }
  return [];
}

/** The value at the path; undefined where there is none. */
export function valueAt(path: string, scope: Scope): unknown {
  const [, root = '', rest = ''] = PATH.exec(path) ?? [];
  if (root === 'event') return within(scope.event, rest);
  if (root === 'wait_events') {
    // Names of events have dots, too: the longest that fits.
    const [name] = [...scope.waits.keys()]
      .filter((one) => rest.startsWith(`${one}.`))
      .toSorted((a, b) => b.length - a.length);
    return name === undefined
      ? undefined
      : within(scope.waits.get(name) ?? null, rest.slice(name.length + 1));
  }
  const { contact } = scope;
  if (root !== 'contact' || contact === null) return undefined;
  return rest !== 'properties' && Object.hasOwn(contact, rest)
    ? contact[rest as keyof ContactFacts]
    : within(contact.properties, rest.replace(/^properties\./, ''));
}

/** A key may have dots itself: it is tried whole before it is taken apart. */
function within(value: unknown, path: string): unknown {
  let at = value;
  let rest = path;
  for (;;) {
    if (typeof at !== 'object' || at === null) return undefined;
    const members = at as Readonly<Record<string, unknown>>;
    if (isMember(members, rest)) return members[rest];
    const dot = rest.indexOf('.');
    if (dot === -1 || !isMember(members, rest.slice(0, dot))) return undefined;
    at = members[rest.slice(0, dot)];
    rest = rest.slice(dot + 1);
  }
}

const isMember = (of: object, key: string): boolean =>
  Object.hasOwn(of, key) && !(Array.isArray(of) && key === 'length');

/** A value that is found out when it is needed. */
export interface Reference {
  readonly var: string;
}

export const isReference = (value: unknown): value is Reference =>
  typeof value === 'object' &&
  value !== null &&
  !Array.isArray(value) &&
  Object.keys(value).length === 1 &&
  Object.hasOwn(value, 'var');

/** What the value stands for; undefined: a reference to nothing. */
export const resolved = (value: unknown, scope: Scope): unknown =>
  isReference(value) ? valueAt(value.var, scope) : value;
