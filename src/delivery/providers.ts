/**
 * What mail providers ask of senders, as data (config/providers.json): how many connections, how many messages over
 * each, how fast; and which of their replies mean that the whole lane should be quiet for a while.
 *
 * In: the parsed file. Out: limits by the MX hosts of a domain. Refuses, with the name of the provider and what to fix,
 * whatever it does not know, and a pause that does not see its own example: a limit that is silently ignored is worse
 * than none.
 */
import type { CircuitRules } from './circuit.ts';
import { compile, isObject } from '../mail/rule-file.ts';

export interface Limits {
  /** At a time. */
  readonly connectionsMax: number;
  /** Null: any number. */
  readonly newConnectionsPerMinute: number | null;
  readonly messagesPerConnection: number;
  /** Transactions, however many recipients each has. Null: any number. */
  readonly messagesPerSecond: number | null;
  readonly recipientsPerTransaction: number;
  /** How long a connection is kept when nothing is to be sent. */
  readonly idleMs: number;
  /** True: no mail without TLS, whatever its sender says of it. Whose certificate it is is not asked. */
  readonly needsTls: boolean;
  readonly circuit: CircuitRules;
  readonly pauses: readonly ReplyPause[];
}

/** A reply after which nothing is sent for a while. */
export interface ReplyPause {
  /** Looked for in the reply as it came. */
  readonly text: RegExp;
  readonly forMs: number;
}

export interface Provider {
  readonly name: string;
  /** Ends of the names of its MX hosts, lower case. */
  readonly mx: readonly string[];
  readonly limits: Limits;
}

export interface Providers {
  readonly default: Limits;
  readonly smarthost: Limits;
  readonly list: readonly Provider[];
}

const PROVIDERS_MAX = 1_000;
const ENDS_MAX = 200;
const PAUSES_MAX = 100;
const PATTERN_CHARS_MAX = 500;
const MINUTE_MS = 60_000;
/** A part of lanes' names, so none of `/`, `,` or space. */
const NAME = /^[a-z0-9](?:[a-z0-9_-]{0,30}[a-z0-9])?$/;
const HOST_END = /^[a-z0-9_-]+(?:\.[a-z0-9_-]+)+$/;

/** Least, most, and whether null (no limit) is a word for it. */
const NUMBERS = {
  connections: { min: 1, max: 1_000, isWhole: true, mayBeNull: false },
  new_connections_per_minute: { min: 1, max: 1_000_000, isWhole: false, mayBeNull: true },
  messages_per_connection: { min: 1, max: 100_000, isWhole: true, mayBeNull: false },
  messages_per_second: { min: 0.001, max: 100_000, isWhole: false, mayBeNull: true },
  recipients_per_transaction: { min: 1, max: 100, isWhole: true, mayBeNull: false },
  idle_seconds: { min: 1, max: 60, isWhole: false, mayBeNull: false },
  circuit_failures: { min: 1, max: 1_000, isWhole: true, mayBeNull: false },
  circuit_minutes: { min: 0.001, max: 1_440, isWhole: false, mayBeNull: false },
  circuit_minutes_max: { min: 0.001, max: 1_440, isWhole: false, mayBeNull: false },
} as const;
type NumberKey = keyof typeof NUMBERS;
const LIMIT_KEYS = [...Object.keys(NUMBERS), 'tls', 'pauses'];
const TLS_WORDS = ['opportunistic', 'encrypt'];

/** Everything a section may say, as the file says it. */
type Section = Readonly<Record<NumberKey, number | null>> & {
  readonly needsTls: boolean;
  readonly pauses: readonly ReplyPause[];
};

/** Where `default` is silent. */
const SILENT: Section = {
  connections: 10,
  new_connections_per_minute: 100,
  messages_per_connection: 100,
  messages_per_second: null,
  recipients_per_transaction: 50,
  idle_seconds: 5,
  circuit_failures: 5,
  circuit_minutes: 5,
  circuit_minutes_max: 60,
  needsTls: false,
  pauses: [],
};

/** Throws an Error that names the provider and says what is wrong with it. */
export function readProviders(file: unknown): Providers {
  if (!isObject(file)) throw new Error('providers: the file must be an object');
  const strange = Object.keys(file).find(
    (key) => !['default', 'smarthost', 'providers'].includes(key),
  );
  if (strange !== undefined) {
    throw new Error(
      `providers: ${JSON.stringify(strange)} is not known; the file may hold default, smarthost, providers`,
    );
  }
  const list = file['providers'] ?? [];
  if (!Array.isArray(list)) throw new Error('providers: `providers` must be a list');
  if (list.length > PROVIDERS_MAX) {
    throw new Error(`providers: at most ${PROVIDERS_MAX} are allowed`);
  }
  const base = readSection('`default`', file['default'] ?? {}, SILENT);
  const providers = list.map((one, index) => readProvider(one, { index, base }));
  const names = providers.map(({ name }) => name);
  const twice = names.find((name, index) => names.indexOf(name) !== index);
  if (twice !== undefined) throw new Error(`providers: two are named "${twice}"`);
  return {
    default: limitsOf(base),
    smarthost: limitsOf(readSection('`smarthost`', file['smarthost'] ?? {}, base)),
    list: providers,
  };
}

/** The provider that all of these hosts belong to, the one with the longest end that fits; null: none. */
export function providerOf(providers: Providers, hosts: readonly string[]): Provider | null {
  if (hosts.length === 0) return null;
  const found = hosts.map((host) => providerOfHost(providers, host));
  const [first = null] = found;
  return first !== null && found.every((one) => one === first) ? first : null;
}

function providerOfHost({ list }: Providers, host: string): Provider | null {
  let best: { provider: Provider; length: number } | null = null;
  for (const provider of list) {
    for (const end of provider.mx) {
      const fits = host === end || host.endsWith(`.${end}`);
      if (fits && end.length > (best?.length ?? 0)) best = { provider, length: end.length };
    }
  }
  return best?.provider ?? null;
}

function readProvider(given: unknown, about: { index: number; base: Section }): Provider {
  const provider = isObject(given) ? given : {};
  const { name, mx, ...rest } = provider;
  if (typeof name !== 'string' || !NAME.test(name)) {
    throw new Error(
      `providers: number ${about.index + 1} needs a \`name\`: at most 32 of a-z, 0-9, hyphen and underscore`,
    );
  }
  const refuse = (what: string): never => {
    throw new Error(`providers: "${name}" ${what}`);
  };
  const ends: unknown = mx;
  if (
    !Array.isArray(ends) ||
    ends.length === 0 ||
    ends.length > ENDS_MAX ||
    !ends.every((end): end is string => typeof end === 'string' && HOST_END.test(end))
  ) {
    return refuse(
      'needs `mx`, a list of ends of MX host names in lower case, such as "example.com"',
    );
  }
  return { name, mx: ends, limits: limitsOf(readSection(`"${name}"`, rest, about.base)) };
}

/** What the section says, over what `base` says. */
function readSection(label: string, given: unknown, base: Section): Section {
  const refuse = (what: string): never => {
    throw new Error(`providers: ${label} ${what}`);
  };
  if (!isObject(given)) return refuse('must be an object');
  const strange = Object.keys(given).find((key) => !LIMIT_KEYS.includes(key));
  if (strange !== undefined) {
    return refuse(`has \`${strange}\`, which is not one of ${LIMIT_KEYS.join(', ')}`);
  }
  const read: Record<NumberKey, number | null> = { ...base };
  for (const [key, rule] of Object.entries(NUMBERS) as [NumberKey, (typeof NUMBERS)[NumberKey]][]) {
    const value = given[key];
    if (value === undefined) continue;
    if (value === null && rule.mayBeNull) {
      read[key] = null;
    } else if (
      typeof value === 'number' &&
      value >= rule.min &&
      value <= rule.max &&
      (!rule.isWhole || Number.isInteger(value))
    ) {
      read[key] = value;
    } else {
      const kind = `a ${rule.isWhole ? 'whole ' : ''}number from ${rule.min} to ${rule.max}`;
      return refuse(
        `has \`${key}\`, which must be ${kind}${rule.mayBeNull ? ', or null for no limit' : ''}`,
      );
    }
  }
  const { tls } = given;
  if (tls !== undefined && (typeof tls !== 'string' || !TLS_WORDS.includes(tls))) {
    return refuse(`has \`tls\`, which must be one of ${TLS_WORDS.join(', ')}`);
  }
  const { pauses = null } = given;
  if (pauses !== null && (!Array.isArray(pauses) || pauses.length > PAUSES_MAX)) {
    return refuse(`has \`pauses\`, which must be a list of at most ${PAUSES_MAX}`);
  }
  return {
    ...read,
    needsTls: tls === undefined ? base.needsTls : tls === 'encrypt',
    pauses:
      pauses === null
        ? base.pauses
        : (pauses as unknown[]).map((one, index) =>
            readPause(one, (what) => refuse(`has a pause, number ${index + 1}, that ${what}`)),
          ),
  };
}

function readPause(given: unknown, refuse: (what: string) => never): ReplyPause {
  const pause = isObject(given) ? given : {};
  const strange = Object.keys(pause).find((key) => !['text', 'minutes', 'example'].includes(key));
  if (strange !== undefined)
    refuse(`has \`${strange}\`, which is not one of text, minutes, example`);
  const { text, minutes, example } = pause;
  if (typeof text !== 'string' || text === '' || text.length > PATTERN_CHARS_MAX) {
    return refuse(
      `needs \`text\`, a regular expression of at most ${PATTERN_CHARS_MAX} characters`,
    );
  }
  const { min, max } = NUMBERS.circuit_minutes;
  if (typeof minutes !== 'number' || !(minutes >= min && minutes <= max)) {
    return refuse(`needs \`minutes\`, a number from ${min} to ${max}`);
  }
  const pattern = compile(text) ?? refuse('has a `text` that is no regular expression');
  if (example !== undefined && (typeof example !== 'string' || !pattern.test(example))) {
    return refuse('has an `example` in which its `text` is not found');
  }
  return { text: pattern, forMs: minutes * MINUTE_MS };
}

function limitsOf(section: Section): Limits {
  const openMs = Number(section.circuit_minutes) * MINUTE_MS;
  return {
    connectionsMax: Number(section.connections),
    newConnectionsPerMinute: section.new_connections_per_minute,
    messagesPerConnection: Number(section.messages_per_connection),
    messagesPerSecond: section.messages_per_second,
    recipientsPerTransaction: Number(section.recipients_per_transaction),
    idleMs: Number(section.idle_seconds) * 1_000,
    needsTls: section.needsTls,
    circuit: {
      failuresMax: Number(section.circuit_failures),
      openMs,
      openMaxMs: Math.max(openMs, Number(section.circuit_minutes_max) * MINUTE_MS),
    },
    pauses: section.pauses,
  };
}
