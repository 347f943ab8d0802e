/**
 * What an operator decides about how long things are kept (config/retention.json), for each tenant and kind.
 *
 * In: the parsed file. Out: durations; null: for ever. Refuses, with the key and what to fix, whatever it does not know.
 */
import { duration, fields, isObject, wrong } from '../mail/rule-file.ts';
import { isUuid } from '../store/id.ts';

/** In the order in which they are removed. */
export const retentionKinds = [
  /** What sent emails say: html, text, headers, attachments, the message. Their records stay. */
  'email_bodies',
  /** Sent emails, with all that is known of them; what metrics count of them stays. */
  'emails',
  /** What received emails say; their records stay. */
  'received_bodies',
  'received',
  'request_logs',
  'webhook_events',
  /** Addresses and programs of readers; that they opened or clicked stays. */
  'engagement',
  'broadcast_recipients',
  'imports',
  'automation_runs',
  'replays',
  /** What became of forwards. */
  'forwarding',
] as const;
export type RetentionKind = (typeof retentionKinds)[number];
/** And what holds the first two off: mail that was given up can be sent after all. */
type Row = RetentionKind | 'dead_letters';

export interface RetentionPolicy {
  /** In milliseconds; null: for ever. */
  keptMs(tenantId: string, kind: Row): number | null;
  /** Those that the file names, in lower case. */
  readonly tenants: readonly string[];
}

const DAY_MS = 86_400_000;
/** A bounce by mail comes within days; after this the host that tried has given up, too. */
const LATE_BOUNCE_MS = 7 * DAY_MS;
const MAX = { ms: 36_500 * DAY_MS, words: '36500d' };
const TENANTS_MAX = 100_000;

const DEFAULTS: Readonly<Record<Row, string | null>> = {
  email_bodies: null,
  emails: null,
  dead_letters: null,
  received_bodies: null,
  received: null,
  request_logs: '30d',
  webhook_events: '30d',
  engagement: '90d',
  broadcast_recipients: null,
  imports: null,
  automation_runs: '90d',
  replays: '90d',
  forwarding: null,
};

/** Days that something has to be kept, where it is more than one, and why. */
const DAYS_MIN: Partial<Readonly<Record<Row, readonly [days: number, why: string]>>> = {
  automation_runs: [32, 'the runs of a month are counted from them'],
  forwarding: [7, 'a loop is recognised by them'],
};

type Durations = Readonly<Record<Row, number | null>>;

/** Throws an Error that names the key and says what is wrong with it. */
export function readRetentionPolicy(
  file: unknown,
  { messageLifetimeMs }: { readonly messageLifetimeMs: number },
): RetentionPolicy {
  const root = fields(file, 'the file', { default: {}, tenants: {} });
  const texts = fields(root.default, 'default', DEFAULTS);
  const standard = durations(texts, 'default', messageLifetimeMs);
  if (!isObject(root.tenants)) throw wrong('tenants', 'an object');
  const entries = Object.entries(root.tenants);
  if (entries.length > TENANTS_MAX) throw new Error(`tenants: has more than ${TENANTS_MAX}`);
  const own = new Map<string, Durations>();
  for (const [id, value] of entries) {
    const at = `tenants[${JSON.stringify(id)}]`;
    if (!isUuid(id)) throw new Error(`${at}: a tenant is named by its id, which is a UUID`);
    if (own.has(id.toLowerCase())) throw new Error(`${at}: the tenant is there twice`);
    own.set(id.toLowerCase(), durations(fields(value, at, texts), at, messageLifetimeMs));
  }
  return {
    keptMs: (tenantId, kind) => (own.get(tenantId) ?? standard)[kind],
    tenants: [...own.keys()],
  };
}

function durations(
  texts: Readonly<Record<Row, unknown>>,
  at: string,
  messageLifetimeMs: number,
): Durations {
  const one = (kind: Row): number | null => {
    if (texts[kind] === null) return null;
    const ms = duration(texts[kind], `${at}.${kind}`, MAX);
    const [days, why] = minimumOf(kind, messageLifetimeMs);
    if (ms >= days * DAY_MS) return ms;
    throw new Error(`${at}.${kind}: must be at least ${days}d: ${why}; or null, to keep it`);
  };
  const rows = Object.keys(DEFAULTS) as Row[];
  return Object.fromEntries(rows.map((kind) => [kind, one(kind)])) as unknown as Durations;
}

function minimumOf(kind: Row, messageLifetimeMs: number): readonly [days: number, why: string] {
  if (kind !== 'emails') return DAYS_MIN[kind] ?? [1, 'nothing goes on the day it came'];
  const days = Math.ceil((messageLifetimeMs + LATE_BOUNCE_MS) / DAY_MS);
  return [
    days,
    'the lifetime of a message and a week more, or a late bounce finds its email no more and suppresses nobody',
  ];
}
