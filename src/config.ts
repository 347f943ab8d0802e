/**
 * Every setting, once: the only reader of the environment.
 *
 * In: `MAILSTEAD_*` variables, or `MAILSTEAD_*_FILE` naming a file that holds the value. Out: one frozen
 * Config; src/settings-reference.ts writes docs/config.md and config/mailstead.example.env from the same table.
 * Refuses unknown names, bad values, missing ones and what this release does not have, all in one
 * ConfigError that never shows the value of a secret.
 */
import { isIP } from 'node:net';
import { resolve } from 'node:path';
import {
  blobStore,
  duration,
  isCidr,
  isDnsName,
  isDnsServer,
  listOf,
  matching,
  oneOf,
  parsePublicUrl,
  parseRateLimit,
  parseSmarthostUrl,
  parseUrl,
  port,
  RATE_LIMIT_REQUESTS_MAX,
  wholeNumber,
} from './setting-kinds.ts';
import { findUnknownNames, readSetting, readSmallFile } from './setting-row.ts';
import type { Mode, Setting } from './setting-row.ts';

const SECRET_CHARACTERS_MIN = 32;
const DNS_SERVERS_MAX = 16;
const PRIVATE_HOSTS_MAX = 100;
const RETRY_DELAYS_MAX = 50;
const WORKERS_MAX = 256;
export const ROLES = ['api', 'mx', 'submission', 'delivery', 'jobs'] as const;

type Role = (typeof ROLES)[number];
/** A process without one of them is not the whole of an appliance. */
const NEVER_ALONE_WITHOUT: readonly Role[] = ['api', 'delivery', 'jobs'];

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
  /** 0: any free port. */
  readonly mxPort: number;
  /** 0: any free port. */
  readonly submissionPort: number;
  /** 0: any free port. */
  readonly submissionsPort: number;
  /** 0: any free port. */
  readonly metricsPort: number;
  /** Absolute path; null, together with tlsKey: what was ordered (config/tls.json), or self-signed. */
  readonly tlsCert: string | null;
  readonly tlsKey: string | null;
  /** Null: generate the first tenant's key. */
  readonly apiKey: string | null;
  /** Null, in development only: generate one into dataDir. */
  readonly secret: string | null;
  readonly delivery: 'sink' | 'direct' | 'smarthost';
  /** `smtp:` or `smtps:`; never null when delivery is `smarthost`, always when it is `sink`. User and password are percent-encoded. */
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

/** Whether no other process of the appliance needs to run. */
export const isWhole = (roles: Config['roles']): boolean => ROLES.every((role) => roles.has(role));

/** In the order of the reference; a row may use the value of one above it. */
const SETTINGS: { readonly [K in keyof Config]: Setting<NonNullable<Config[K]>> } = {
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
    kind: wholeNumber(0, 65_535),
    default: ['2525', '25'],
    meaning: 'Inbound SMTP; 0 picks a free port.',
  },
  submissionPort: {
    name: 'MAILSTEAD_SUBMISSION_PORT',
    kind: wholeNumber(0, 65_535),
    default: ['2587', '587'],
    meaning:
      'SMTP submission with STARTTLS; user `resend` or `mailstead`, the password is an API key; 0 picks a free port.',
  },
  submissionsPort: {
    name: 'MAILSTEAD_SUBMISSIONS_PORT',
    kind: wholeNumber(0, 65_535),
    default: ['2465', '465'],
    meaning: 'SMTP submission with implicit TLS; 0 picks a free port.',
  },
  metricsPort: {
    name: 'MAILSTEAD_METRICS_PORT',
    kind: wholeNumber(0, 65_535),
    default: '9464',
    meaning:
      'Prometheus: `GET /metrics`, without a key; on loopback only in development, 0 picks a free port.',
  },
  tlsCert: {
    name: 'MAILSTEAD_TLS_CERT',
    kind: { allowed: 'the path of a PEM file', parse: (value) => resolve(value) },
    example: '/tls/fullchain.pem',
    default: null,
    absent: 'ordered or self-signed',
    meaning:
      'Certificate chain. Without it one is ordered where config/tls.json says so, else there is no submission in production. Read again when it changes.',
  },
  tlsKey: {
    name: 'MAILSTEAD_TLS_KEY',
    kind: { allowed: 'the path of a PEM file', parse: (value) => resolve(value) },
    example: '/tls/key.pem',
    default: null,
    absent: 'ordered or self-signed',
    meaning: 'Private key of the certificate. Read again when it changes.',
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
    meaning:
      'Relay that takes all outbound mail with `MAILSTEAD_DELIVERY=smarthost`. With `direct`, it takes mail only while port 25 is blocked, and only with `"spill": { "smarthost": true }` in `delivery.json`.',
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
    default: ROLES.join(','),
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
    kind: blobStore,
    default: 'disk',
    secret: true,
    meaning:
      'Where large messages are kept; `disk` = in the data folder. Without a user in the URL, the key of a bucket is looked for where the AWS SDK looks: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, its files, the role of the machine.',
  },
  logLevel: {
    name: 'MAILSTEAD_LOG_LEVEL',
    kind: oneOf(['fatal', 'error', 'warn', 'info', 'debug', 'trace', 'silent']),
    default: 'info',
    meaning: 'Least important level that is logged.',
  },
};

/** The table as rows, in its order. */
export const ROWS: readonly (readonly [key: string, setting: Setting<unknown>])[] =
  Object.entries(SETTINGS);

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
    const read = readSetting(setting, values, { env, readFile });
    if ('problem' in read) problems.push(read.problem);
    else if (setting.notYet !== true) values[key] = read.value;
  }
  const { delivery, roles, smarthostUrl, tlsCert, tlsKey } = values;
  // Without these another process must do the rest of the work, on the same rows and with the same keys.
  const absent = NEVER_ALONE_WITHOUT.filter((role) => roles instanceof Set && !roles.has(role));
  for (const key of absent.length === 0 ? [] : (['databaseUrl', 'secret'] as const)) {
    if (values[key] !== null) continue;
    const { name } = SETTINGS[key];
    problems.push(
      `${name} is needed where MAILSTEAD_ROLES leaves out ${absent.map((role) => `\`${role}\``).join(', ')}: processes of one appliance share it.`,
    );
  }
  if ((tlsCert === null) !== (tlsKey === null) && tlsCert !== undefined && tlsKey !== undefined) {
    const [has, lacks] = tlsKey === null ? ['CERT', 'KEY'] : ['KEY', 'CERT'];
    problems.push(
      `MAILSTEAD_TLS_${has} is set, which needs MAILSTEAD_TLS_${lacks} to be set as well.`,
    );
  }
  if (delivery === 'smarthost' && smarthostUrl === null) {
    problems.push(
      'MAILSTEAD_DELIVERY is "smarthost", which needs MAILSTEAD_SMARTHOST_URL to be set.',
    );
  }
  if (smarthostUrl instanceof URL && delivery === 'sink') {
    problems.push(
      'MAILSTEAD_SMARTHOST_URL is set, but MAILSTEAD_DELIVERY is "sink"; it is allowed only with "smarthost" and "direct".',
    );
  }
  problems.push(
    ...findUnknownNames(
      ROWS.map(([, setting]) => setting),
      env,
    ),
  );
  if (problems.length > 0) throw new ConfigError(problems);
  values['privateHosts'] ??= Object.freeze([]);
  return Object.freeze(values) as unknown as Config; // The type of SETTINGS ties key and value.
}

/** The settings of this process. Throws as loadConfig does. */
export function readEnvironment(): Config {
  return loadConfig(process.env);
}

/**
 * OpenTelemetry's packages read these by themselves, and would send what is meant for somebody else's receiver (headers, a
 * token) to ours: config/telemetry.json alone says how traces are sent. Call it before they are used.
 */
export function forgetTracingVariables(): void {
  for (const name of Object.keys(process.env)) {
    if (name.startsWith('OTEL_')) delete process.env[name];
  }
}

/** Whether the locale that a terminal works in is one without Unicode; one that is not set is taken for a modern one. */
export function isTerminalAscii(env: NodeJS.ProcessEnv = process.env): boolean {
  const locale = env['LC_ALL'] || env['LC_CTYPE'] || env['LANG'] || '';
  return locale !== '' && !/utf-?8/i.test(locale);
}
