/**
 * Every setting, once: the only reader of the environment.
 *
 * In: `MAILSTEAD_*` variables, or `MAILSTEAD_*_FILE` naming a file that holds the value. Out: one frozen
 * Config, and the two files that are written from the same table (docs/config.md,
 * config/mailstead.example.env). Refuses unknown names, bad values, missing ones and what this release
 * does not have, all in one ConfigError that never shows the value of a secret.
 */
import { closeSync, mkdirSync, openSync, readSync, realpathSync, writeFileSync } from 'node:fs';
import { isIP } from 'node:net';
import { dirname, resolve } from 'node:path';

export type Mode = 'development' | 'production';
export type Role = (typeof ROLES)[number];

export interface Config {
  readonly mode: Mode;
  /** Absolute. */
  readonly dataDir: string;
  /** Null: the embedded Postgres under dataDir. */
  readonly databaseUrl: string | null;
  /** Null: Agenda keeps its jobs in Postgres. */
  readonly mongodbUrl: string | null;
  /** 0: any free port. */
  readonly httpPort: number;
  /** Null: all interfaces. */
  readonly httpHost: string | null;
  /** No slash at the end. Ends in `:0` when it is the default and httpPort is 0. */
  readonly publicUrl: string;
  /** Lower case, fully qualified, or `localhost`. */
  readonly hostname: string;
  /** Null: generate the first tenant's key. */
  readonly apiKey: string | null;
  /** Null, in development only: generate one into dataDir. */
  readonly secret: string | null;
  readonly delivery: 'sink' | 'direct' | 'smarthost';
  /** `smtp:` or `smtps:`; present exactly when delivery is `smarthost`. User and password are percent-encoded. */
  readonly smarthostUrl: URL | null;
  /** `ip` or `ip:port`, IPv6 in brackets, as dns.Resolver takes them. Null: the system's. */
  readonly dnsServers: readonly string[] | null;
  readonly mxDestinationPort: number;
  /** CIDRs; empty: no private address is let through. */
  readonly privateHosts: readonly string[];
  /** The last one repeats. Never empty. */
  readonly retryScheduleMs: readonly number[];
  readonly messageLifetimeMs: number;
  readonly rateLimit: { readonly requests: number; readonly windowMs: number };
  readonly roles: ReadonlySet<Role>;
  /** 0: deliver in the main process. */
  readonly workers: number;
  /** `disk` or an `s3:` URL. */
  readonly blobStore: string;
  readonly logLevel: string;
}

/** Holds every problem that was found, one sentence each. */
export class ConfigError extends Error {
  readonly problems: readonly string[];
  constructor(problems: readonly string[]) {
    super(`The settings cannot be used:\n${problems.map((problem) => `- ${problem}`).join('\n')}`);
    this.name = 'ConfigError';
    this.problems = Object.freeze([...problems]);
  }
}

// ---- kinds of values -------------------------------------------------------------------------

/** How one kind of value is written. `parse` gives undefined for what is not `allowed`. */
interface Kind<T> {
  readonly allowed: string;
  readonly parse: (text: string) => T | undefined;
}

const FILE_BYTES_MAX = 64 * 1024;
const SHOWN_CHARACTERS_MAX = 100;
const SECRET_CHARACTERS_MIN = 32;
const DNS_SERVERS_MAX = 16;
const PRIVATE_HOSTS_MAX = 100;
const RETRY_DELAYS_MAX = 50;
const WORKERS_MAX = 256;
const RATE_LIMIT_REQUESTS_MAX = 1_000_000;
const SECOND_MS = 1000;
const DAY_MS = 86_400 * SECOND_MS;
const UNIT_MS = { ms: 1, s: SECOND_MS, m: 60 * SECOND_MS, h: 3600 * SECOND_MS, d: DAY_MS } as const;
const ROLES = ['api', 'mx', 'submission', 'delivery', 'jobs'] as const;

function matching(allowed: string, accepts: (value: string) => boolean): Kind<string> {
  return { allowed, parse: (value) => (accepts(value) ? value : undefined) };
}

function oneOf<const T extends string>(values: readonly T[]): Kind<T> {
  const allowed = `one of ${values.map((value) => `\`${value}\``).join(', ')}`;
  return { allowed, parse: (value) => values.find((candidate) => candidate === value) };
}

function wholeNumber(min: number, max: number): Kind<number> {
  return {
    allowed: `a whole number from ${min} to ${max}`,
    parse: (value) => {
      const number = /^\d{1,9}$/.test(value) ? Number(value) : NaN;
      return number >= min && number <= max ? number : undefined;
    },
  };
}

/** Milliseconds. */
function duration(minMs: number, maxDays: number): Kind<number> {
  const min = minMs % SECOND_MS === 0 ? `${minMs / SECOND_MS}s` : `${minMs}ms`;
  return {
    allowed: `a duration from \`${min}\` to \`${maxDays}d\`, written like \`500ms\`, \`90s\`, \`1m\`, \`2h\` or \`4d\``,
    parse: (value) => {
      const [, count, unit] = /^(\d{1,9})(ms|s|m|h|d)$/.exec(value) ?? [];
      const ms = Number(count) * UNIT_MS[unit as keyof typeof UNIT_MS];
      return ms >= minMs && ms <= maxDays * DAY_MS ? ms : undefined;
    },
  };
}

function listOf<T>(item: Kind<T>, max: number): Kind<readonly T[]> {
  return {
    allowed: `a comma list of 1 to ${max}, each ${item.allowed}`,
    parse: (value) => {
      const parsed = value.split(',', max + 1).map((part) => item.parse(part.trim()));
      const known = parsed.filter((one) => one !== undefined);
      return known.length === parsed.length && known.length <= max
        ? Object.freeze(known)
        : undefined;
    },
  };
}

const port = wholeNumber(1, 65_535);

function isDnsName(value: string): boolean {
  // RFC 1035 §2.3.4: 63 octets a label, 253 characters a name; RFC 1123 §2.1: a label may begin with a
  // digit, but the last one is not a number, which keeps names apart from IPv4 addresses.
  const labels = value.split('.');
  return (
    value.length <= 253 &&
    labels.every((label) => /^[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?$/i.test(label)) &&
    !/^\d+$/.test(labels.at(-1) ?? '')
  );
}

function parseUrl(value: string, scheme: RegExp): URL | undefined {
  // The URL parser drops tabs and line breaks and repairs `http:host`; a setting is not repaired.
  return scheme.test(value) && !/\s/.test(value) ? (URL.parse(value) ?? undefined) : undefined;
}

function isPercentEncoded(value: string): boolean {
  try {
    decodeURIComponent(value);
    return true;
  } catch {
    return false; // A lone `%`, or bytes that are not UTF-8.
  }
}

function parsePublicUrl(value: string): string | undefined {
  const url = parseUrl(value, /^https?:\/\//i);
  if (url === undefined || url.username !== '' || url.password !== '' || /[?#]/.test(value)) {
    return undefined;
  }
  return `${url.origin}${url.pathname}`.replace(/\/+$/, '');
}

function parseSmarthostUrl(value: string): URL | undefined {
  const url = parseUrl(value, /^smtps?:\/\//i);
  if (url === undefined || /[?#]/.test(value) || !/^\/?$/.test(url.pathname)) return undefined;
  const host = url.hostname.replace(/^\[(.*)\]$/, '$1');
  const credentials = [url.username, url.password];
  const whole =
    credentials.every((part) => part === '') || credentials.every((part) => part !== '');
  const sound = (isIP(host) !== 0 || isDnsName(host)) && url.port !== '0';
  return sound && whole && credentials.every(isPercentEncoded) ? url : undefined;
}

function isDnsServer(value: string): boolean {
  const [, bracketed, bare, portText] =
    /^(?:\[([0-9a-f:.]+)\]|([0-9.]+))(?::(\d+))?$/i.exec(value) ?? [];
  const address = bracketed === undefined ? isIP(bare ?? '') === 4 : isIP(bracketed) === 6;
  return address && (portText === undefined || port.parse(portText) !== undefined);
}

function isCidr(value: string): boolean {
  const [, address, prefix] = /^([0-9a-f:.]+)\/(\d{1,3})$/i.exec(value) ?? [];
  const family = isIP(address ?? '');
  return family !== 0 && Number(prefix) <= (family === 4 ? 32 : 128);
}

function parseRateLimit(value: string): Config['rateLimit'] | undefined {
  const [count = '', window = '', ...rest] = value.split('/', 3);
  const requests = wholeNumber(1, RATE_LIMIT_REQUESTS_MAX).parse(count);
  const windowMs = duration(SECOND_MS, 1).parse(window);
  if (requests === undefined || windowMs === undefined || rest.length > 0) return undefined;
  return Object.freeze({ requests, windowMs });
}

// ---- the table -------------------------------------------------------------------------------

/** What is written when nothing is set, the same in both modes or `[development, production]`. Null: nothing. */
type Default = string | null | readonly [development: string | null, production: string | null];

interface Setting<T> {
  readonly name: string;
  readonly kind: Kind<T>;
  readonly default: Default;
  /** Sentences for docs/config.md. */
  readonly meaning: string;
  /** What the reference says in place of a default of null. */
  readonly absent?: string;
  /** There is no default in production. */
  readonly required?: true;
  /** The value is never shown. */
  readonly secret?: true;
  /** A value for the example file, where there is no default. */
  readonly example?: string;
  /** Not in this release: the whole setting, or these values (up to a colon). Delete it to turn it on. */
  readonly notYet?: true | readonly string[];
}

const ROLES_NOT_YET: readonly Role[] = ['mx', 'submission'];

/** Keys that come into Config when their row loses its `notYet`. */
type KeyNotYet =
  'mxPort' | 'submissionPort' | 'submissionsPort' | 'metricsPort' | 'tlsCert' | 'tlsKey';

/** In the order of the reference; a row may use the value of one above it. */
const SETTINGS: { readonly [K in keyof Config]: Setting<NonNullable<Config[K]>> } & {
  readonly [K in KeyNotYet]: Setting<unknown> & { readonly notYet: true };
} = {
  mode: {
    name: 'MAILSTEAD_MODE',
    kind: oneOf(['development', 'production']),
    default: 'development',
    example: 'production',
    meaning: 'Picks the column of defaults; the image sets `production`.',
  },
  dataDir: {
    name: 'MAILSTEAD_DATA_DIR',
    kind: { allowed: 'the path of a folder', parse: (value) => resolve(value) },
    default: ['./data', '/data'],
    meaning: 'Embedded database, blobs, generated secrets.',
  },
  databaseUrl: {
    name: 'MAILSTEAD_DATABASE_URL',
    kind: matching(
      'a `postgres://` or `postgresql://` URL',
      (value) => parseUrl(value, /^postgres(?:ql)?:\/\/./) !== undefined,
    ),
    default: null,
    secret: true,
    example: 'postgres://mailstead:password@db.example:5432/mailstead',
    meaning: 'Postgres to use; absent = the embedded one in the data folder.',
  },
  mongodbUrl: {
    name: 'MAILSTEAD_MONGODB_URL',
    // Not parsed as a URL: a replica set is a comma list of hosts with ports.
    kind: matching('a `mongodb://` or `mongodb+srv://` URL', (value) =>
      /^mongodb(?:\+srv)?:\/\/[^\s/]+\S*$/.test(value),
    ),
    default: null,
    secret: true,
    example: 'mongodb://mongo.example:27017/mailstead?replicaSet=rs0',
    meaning: 'Present = Agenda keeps its jobs in MongoDB, absent = in Postgres.',
  },
  httpPort: {
    name: 'MAILSTEAD_HTTP_PORT',
    kind: wholeNumber(0, 65_535),
    default: '3000',
    meaning: 'Port of the REST API, the dashboard and tracking; 0 picks a free one.',
  },
  httpHost: {
    name: 'MAILSTEAD_HTTP_HOST',
    kind: matching(
      'an IP address (IPv6 without brackets) or a host name',
      (value) => isIP(value) !== 0 || isDnsName(value),
    ),
    default: null,
    absent: 'all interfaces',
    example: '127.0.0.1',
    meaning: 'Address on which that port is opened.',
  },
  publicUrl: {
    name: 'MAILSTEAD_PUBLIC_URL',
    kind: {
      allowed: 'an `http://` or `https://` URL without user, query and fragment',
      parse: parsePublicUrl,
    },
    default: ['http://localhost:<port>', null],
    required: true,
    example: 'https://mail.example.com',
    meaning: 'Start of absolute links, signed download URLs and tracking links.',
  },
  hostname: {
    name: 'MAILSTEAD_HOSTNAME',
    kind: {
      allowed: 'a fully qualified DNS name in ASCII, or `localhost`',
      // RFC 5321 §2.3.5: HELO and MX take fully qualified names, no local aliases.
      parse: (value) =>
        isDnsName(value) && /\.|^localhost$/i.test(value) ? value.toLowerCase() : undefined,
    },
    default: ['localhost', null],
    required: true,
    example: 'mail.example.com',
    meaning: 'HELO name, MX target in DNS records, name in Received headers.',
  },
  mxPort: {
    name: 'MAILSTEAD_MX_PORT',
    kind: port,
    default: ['2525', '25'],
    notYet: true,
    meaning: 'Inbound SMTP.',
  },
  submissionPort: {
    name: 'MAILSTEAD_SUBMISSION_PORT',
    kind: port,
    default: ['2587', '587'],
    notYet: true,
    meaning:
      'SMTP submission with STARTTLS; user `resend` or `mailstead`, the password is an API key.',
  },
  submissionsPort: {
    name: 'MAILSTEAD_SUBMISSIONS_PORT',
    kind: port,
    default: ['2465', '465'],
    notYet: true,
    meaning: 'SMTP submission with implicit TLS.',
  },
  metricsPort: {
    name: 'MAILSTEAD_METRICS_PORT',
    kind: port,
    default: '9464',
    notYet: true,
    meaning: 'Prometheus; on loopback only in development.',
  },
  tlsCert: {
    name: 'MAILSTEAD_TLS_CERT',
    kind: matching('the path of a PEM file', () => true),
    default: null,
    absent: 'self-signed',
    notYet: true,
    meaning:
      'Certificate chain, required for submission in production; read again when it changes.',
  },
  tlsKey: {
    name: 'MAILSTEAD_TLS_KEY',
    kind: matching('the path of a PEM file', () => true),
    default: null,
    absent: 'self-signed',
    notYet: true,
    meaning: 'Private key of the certificate; read again when it changes.',
  },
  apiKey: {
    name: 'MAILSTEAD_API_KEY',
    kind: matching(
      '`re_`, 8 letters or digits, `_`, 24 letters or digits (A-Z, a-z, 0-9)',
      (value) => /^re_[A-Za-z0-9]{8}_[A-Za-z0-9]{24}$/.test(value),
    ),
    default: null,
    secret: true,
    meaning:
      "The first tenant's full-access key, set at the first start; absent = generated and printed once.",
  },
  secret: {
    name: 'MAILSTEAD_SECRET',
    kind: matching(
      `at least ${SECRET_CHARACTERS_MIN} characters`,
      (value) => value.length >= SECRET_CHARACTERS_MIN,
    ),
    default: null,
    absent: 'generated into the data folder',
    required: true,
    secret: true,
    meaning:
      'Master key: DKIM private keys at rest, signed URLs, return-path and SRS tokens. `openssl rand -hex 32` makes one.',
  },
  delivery: {
    name: 'MAILSTEAD_DELIVERY',
    kind: oneOf(['sink', 'direct', 'smarthost']),
    default: ['sink', 'direct'],
    meaning:
      '`direct` = to the MX hosts, `smarthost` = to `MAILSTEAD_SMARTHOST_URL`, `sink` = to the built-in SMTP sink.',
  },
  smarthostUrl: {
    name: 'MAILSTEAD_SMARTHOST_URL',
    kind: {
      allowed:
        '`smtp://` or `smtps://` with a host, optionally a port and a percent-encoded `user:password@`',
      parse: parseSmarthostUrl,
    },
    default: null,
    secret: true,
    example: 'smtp://user:password@relay.example:587',
    meaning: 'Relay that takes all outbound mail. Goes with `MAILSTEAD_DELIVERY=smarthost` only.',
  },
  dnsServers: {
    name: 'MAILSTEAD_DNS_SERVERS',
    kind: listOf(matching('`ip` or `ip:port`, IPv6 in brackets', isDnsServer), DNS_SERVERS_MAX),
    default: null,
    absent: "the system's",
    example: '192.0.2.53,[2001:db8::53]:5353',
    meaning: 'Servers for every DNS question that the appliance asks.',
  },
  mxDestinationPort: {
    name: 'MAILSTEAD_MX_DESTINATION_PORT',
    kind: port,
    default: '25',
    meaning: 'Port that `direct` dials (for test universes).',
  },
  privateHosts: {
    name: 'MAILSTEAD_PRIVATE_HOSTS',
    kind: listOf(matching('a CIDR like `10.0.0.0/8` or `fd00::/8`', isCidr), PRIVATE_HOSTS_MAX),
    default: null,
    example: '10.1.2.0/24,fd00::/8',
    meaning:
      'Networks that the address guard lets through (for test universes and private relays).',
  },
  retryScheduleMs: {
    name: 'MAILSTEAD_RETRY_SCHEDULE',
    kind: listOf(duration(100, 30), RETRY_DELAYS_MAX),
    default: '1m,5m,10m,20m,40m,1h,2h,4h',
    meaning: 'Delays between attempts; the last one repeats.',
  },
  messageLifetimeMs: {
    name: 'MAILSTEAD_MESSAGE_LIFETIME',
    kind: duration(100, 30),
    default: '4d',
    meaning: 'After it, a still deferred delivery bounces as expired.',
  },
  rateLimit: {
    name: 'MAILSTEAD_RATE_LIMIT',
    kind: {
      allowed: `\`requests/window\` like \`600/1s\`: 1 to ${RATE_LIMIT_REQUESTS_MAX} requests, a window from \`1s\` to \`1d\``,
      parse: parseRateLimit,
    },
    default: ['600/1s', '100/1s'],
    meaning: 'API requests per tenant.',
  },
  roles: {
    name: 'MAILSTEAD_ROLES',
    kind: {
      allowed: `a comma list of ${ROLES.map((role) => `\`${role}\``).join(', ')}`,
      parse: (value) => {
        const roles = listOf(oneOf(ROLES), ROLES.length).parse(value);
        return roles && new Set(roles);
      },
    },
    default: ROLES.filter((role) => !ROLES_NOT_YET.includes(role)).join(','),
    notYet: ROLES_NOT_YET,
    meaning: 'What this process runs; absent = everything this release has.',
  },
  workers: {
    name: 'MAILSTEAD_WORKERS',
    kind: wholeNumber(0, WORKERS_MAX),
    default: '1',
    meaning: 'Delivery worker processes beside the main one; 0 = deliver in the main process.',
  },
  blobStore: {
    name: 'MAILSTEAD_BLOB_STORE',
    kind: matching('`disk`, or `s3://bucket?endpoint=...&region=...`', (value) =>
      /^disk$|^s3:\/\/\S+$/.test(value),
    ),
    default: 'disk',
    notYet: ['s3'],
    meaning: 'Where large messages are kept; `disk` = in the data folder.',
  },
  logLevel: {
    name: 'MAILSTEAD_LOG_LEVEL',
    kind: oneOf(['fatal', 'error', 'warn', 'info', 'debug', 'trace', 'silent']),
    default: 'info',
    meaning: 'Least important level that is logged.',
  },
};

const ROWS: readonly (readonly [key: string, setting: Setting<unknown>])[] =
  Object.entries(SETTINGS);

// ---- reading ---------------------------------------------------------------------------------

type Read = { readonly value: unknown } | { readonly problem: string };

/**
 * The settings in `env`, complete and frozen. Throws ConfigError with all problems.
 *
 * An empty variable counts as absent. An empty file does not: a secret that failed to mount must not
 * turn into a default. `readFile` throws when the file cannot be read.
 */
export function loadConfig(
  env: NodeJS.ProcessEnv,
  readFile: (path: string) => string = readSmallFile,
): Config {
  const problems: string[] = [];
  const values: Record<string, unknown> = {};
  for (const [key, setting] of ROWS) {
    const read = readSetting(setting, values, findText(setting, env, readFile));
    if ('problem' in read) problems.push(read.problem);
    else if (setting.notYet !== true) values[key] = read.value;
  }
  const { delivery, smarthostUrl } = values;
  if (delivery === 'smarthost' && smarthostUrl === null) {
    problems.push(
      'MAILSTEAD_DELIVERY is "smarthost", which needs MAILSTEAD_SMARTHOST_URL to be set.',
    );
  }
  if (smarthostUrl instanceof URL && delivery !== undefined && delivery !== 'smarthost') {
    problems.push(
      `MAILSTEAD_SMARTHOST_URL is set, but MAILSTEAD_DELIVERY is "${String(delivery)}"; it is allowed only with "smarthost".`,
    );
  }
  problems.push(...findUnknownNames(env));
  if (problems.length > 0) throw new ConfigError(problems);
  values['privateHosts'] ??= Object.freeze([]);
  return Object.freeze(values) as unknown as Config; // The type of SETTINGS ties key and value.
}

/** The settings of this process. Throws as loadConfig does. */
export function readEnvironment(): Config {
  return loadConfig(process.env);
}

type Text = { readonly text: string | null } | { readonly problem: string };

function findText(
  { name, notYet, secret }: Setting<unknown>,
  env: NodeJS.ProcessEnv,
  readFile: (path: string) => string,
): Text {
  const direct = env[name] ?? '';
  const path = env[`${name}_FILE`] ?? '';
  if (notYet === true && `${direct}${path}` !== '') {
    return { problem: `${name} is set, but is not in this release; leave it out.` };
  }
  if (path === '') return { text: direct === '' ? null : direct };
  if (direct !== '') return { problem: `${name} and ${name}_FILE are both set; set only one.` };
  // Not shown for a secret: the easiest mistake is to put the secret itself here.
  const file = `${name}_FILE${secret ? '' : ` ${show(path)}`}`;
  try {
    const text = readFile(path).replace(/\r?\n$/, '');
    return text === ''
      ? { problem: `${file} names an empty file; it must hold the value.` }
      : { text };
  } catch (error) {
    const code = error instanceof Error && 'code' in error ? ` (${String(error.code)})` : '';
    return {
      problem: `${file} cannot be read${code}; it must be the path of a text file of at most ${FILE_BYTES_MAX} bytes.`,
    };
  }
}

function readSetting(
  setting: Setting<unknown>,
  above: Readonly<Record<string, unknown>>,
  found: Text,
): Read {
  if ('problem' in found) return found;
  const { name, kind, notYet } = setting;
  const must = `it must be ${describe(setting)}.`;
  if (found.text === null) {
    const mode = above['mode'] ?? null; // Null while the mode is read, and after a bad one.
    if (mode === 'production' && setting.required) {
      return { problem: `${name} is required in production: ${must}` };
    }
    const fallback = defaultIn(setting, mode === 'production' ? mode : 'development');
    const port = String(above['httpPort'] ?? 0);
    return { value: fallback === null ? null : kind.parse(fallback.replace('<port>', port)) };
  }
  const value = /\p{Cc}/u.test(found.text) ? undefined : kind.parse(found.text);
  if (value === undefined) {
    const shown = setting.secret
      ? 'has a bad value (a secret, not shown)'
      : `is ${show(found.text)}`;
    return { problem: `${name} ${shown}, but ${must}` };
  }
  const parts = found.text.split(',').map((part) => part.replace(/:.*/, '').trim());
  const early =
    notYet === undefined || notYet === true ? [] : notYet.filter((one) => parts.includes(one));
  if (early.length > 0) {
    return { problem: `${name} names ${early.join(', ')}, not in this release: ${must}` };
  }
  return { value };
}

function defaultIn(setting: Setting<unknown>, mode: Mode): string | null {
  if (setting.default === null || typeof setting.default === 'string') return setting.default;
  return setting.default[mode === 'production' ? 1 : 0];
}

/** What is allowed, with what this release cannot do yet. */
function describe({ kind, notYet }: Setting<unknown>): string {
  if (notYet === undefined || notYet === true) return kind.allowed;
  return `${kind.allowed} (not in this release: ${notYet.map((one) => `\`${one}\``).join(', ')})`;
}

/** One line, without the user and the query of a URL that should not have been there. */
function show(value: string): string {
  const safe = value.replace(/\/\/[^/]*@/g, '//...@').replace(/\?.*/s, '?...');
  const short =
    safe.length > SHOWN_CHARACTERS_MAX ? `${safe.slice(0, SHOWN_CHARACTERS_MAX)}...` : safe;
  return JSON.stringify(short);
}

function readSmallFile(path: string): string {
  const file = openSync(path, 'r');
  try {
    const buffer = Buffer.alloc(FILE_BYTES_MAX + 1);
    let lengthBytes = 0;
    for (let read = -1; read !== 0 && lengthBytes < buffer.length; lengthBytes += read) {
      read = readSync(file, buffer, lengthBytes, buffer.length - lengthBytes, null);
    }
    if (lengthBytes > FILE_BYTES_MAX)
      throw Object.assign(new Error('too large'), { code: 'EFBIG' });
    // A secret of random bytes would lose most of its randomness in a lenient decoder.
    return new TextDecoder('utf-8', { fatal: true }).decode(buffer.subarray(0, lengthBytes));
  } finally {
    closeSync(file);
  }
}

function findUnknownNames(env: NodeJS.ProcessEnv): readonly string[] {
  const known = new Set(ROWS.flatMap(([, { name }]) => [name, `${name}_FILE`]));
  return Object.keys(env)
    .filter((name) => name.startsWith('MAILSTEAD_') && env[name] !== '' && !known.has(name))
    .filter((name) => !name.startsWith('MAILSTEAD_TEST_') && name !== 'MAILSTEAD_CORPORA')
    .sort()
    .map((name) => name.slice(0, SHOWN_CHARACTERS_MAX))
    .map((name) => {
      const near = Math.min(3, (name.length - 'MAILSTEAD_'.length) / 2);
      const [nearest] = [...known]
        .map((other) => ({ other, distance: editDistance(name, other) }))
        .filter(({ distance }) => distance <= near)
        .sort((a, b) => a.distance - b.distance);
      return `${name} is not a setting; ${nearest ? `did you mean ${nearest.other}?` : 'leave it out.'}`;
    });
}

/** Insertions, deletions and replacements that turn `a` into `b` (Levenshtein). */
function editDistance(a: string, b: string): number {
  let row = Array.from({ length: b.length + 1 }, (_, index) => index);
  for (const [i, char] of [...a].entries()) {
    const next = [i + 1];
    for (let j = 0; j < b.length; j += 1) {
      const replaced = (row[j] ?? 0) + (char === b[j] ? 0 : 1);
      next.push(Math.min(replaced, (row[j + 1] ?? 0) + 1, (next[j] ?? 0) + 1));
    }
    row = next;
  }
  return row.at(-1) ?? 0;
}

// ---- the generated files ---------------------------------------------------------------------

const GENERATED_BY = 'Generated from src/config.ts by npm run generate';

/** The reference page and the example file, as path from the root of the repository and content. */
export function renderGeneratedFiles(): readonly {
  readonly path: string;
  readonly text: string;
}[] {
  return [
    { path: 'docs/config.md', text: renderReference() },
    { path: 'config/mailstead.example.env', text: renderExample() },
  ];
}

function defaultCell(setting: Setting<unknown>, mode: Mode): string {
  if (setting.required && mode === 'production') return 'required';
  const fallback = defaultIn(setting, mode);
  return fallback === null ? (setting.absent ?? 'absent') : `\`${fallback}\``;
}

function meaningOf(setting: Setting<unknown>): string {
  const note = setting.notYet === true ? '**Not in this release.** ' : '';
  const allowed = describe(setting);
  return `${note}${setting.meaning} Allowed: ${allowed}.`;
}

function renderReference(): string {
  const rows = [
    ['Setting', 'Default in development', 'Default in production', 'Meaning'],
    ...ROWS.map(([, setting]) => [
      `\`${setting.name}\``,
      defaultCell(setting, 'development'),
      defaultCell(setting, 'production'),
      meaningOf(setting),
    ]),
  ];
  // Prettier pads every column, so the generator does too.
  const widths = [0, 1, 2, 3].map((column) =>
    Math.max(...rows.map((row) => (row[column] ?? '').length)),
  );
  const lines = rows.map(
    (row) => `| ${row.map((cell, column) => cell.padEnd(widths[column] ?? 0)).join(' | ')} |`,
  );
  lines.splice(1, 0, `| ${widths.map((width) => '-'.repeat(width)).join(' | ')} |`);
  return `<!-- ${GENERATED_BY}. -->

# Settings

Every setting is an environment variable. An empty one counts as absent. Any of them can be read from a
file instead (Docker secrets): \`MAILSTEAD_SECRET_FILE=/run/secrets/mailstead\` holds the value of
\`MAILSTEAD_SECRET\`; one line break at the end of the file is dropped.

Unknown \`MAILSTEAD_*\` names, bad values, missing required ones and settings that are not in this release
stop the start, with all problems listed. \`config/mailstead.example.env\` has every setting to copy from.

${lines.join('\n')}
`;
}

function renderExample(): string {
  const rows = ROWS.map(([, setting]) => {
    const development = defaultCell(setting, 'development');
    const production = defaultCell(setting, 'production');
    const elsewhere = development === production ? '' : `, in development ${development}`;
    const fallback = setting.required
      ? `Required${elsewhere}`
      : `Default: ${production}${elsewhere}`;
    const value = setting.example ?? defaultIn(setting, 'production') ?? '';
    const comment = `${meaningOf(setting)} ${fallback}.`.replace(/[`*]/g, '');
    return `${wrap(comment)}\n#${setting.name}=${value}\n`;
  });
  return `# ${GENERATED_BY}\n#\n${wrap(
    'Every setting, with its default in production or an example. Remove the # in front of a line to set it. docs/config.md is the same as a table.',
  )}\n\n${rows.join('\n')}`;
}

/** Comment lines of at most 100 characters, as far as words allow. */
function wrap(sentences: string): string {
  return sentences.replace(/(?=\S)(.{1,98})(?:\s+|$)/g, '# $1\n').trimEnd();
}

if (
  process.argv[2] === '--write' &&
  realpathSync(process.argv[1] ?? '.') === import.meta.filename
) {
  for (const { path, text } of renderGeneratedFiles()) {
    const target = resolve(import.meta.dirname, '..', path);
    mkdirSync(dirname(target), { recursive: true });
    writeFileSync(target, text);
  }
}
