/**
 * What an operator decides about arriving mail (config/receiving.json): how many may come, through which proxies, what is
 * looked up about them, and what a message may be like.
 *
 * In: the parsed file. Out: values that answer without asking anybody. Refuses, with the key and what to fix, whatever
 * it does not know: a policy that is silently ignored is worse than none.
 */
import { isHostName, toALabels } from '../dns/host-name.ts';
import { duration, fields, list, networks, oneOf, wrong } from '../mail/rule-file.ts';

/** What becomes of a CR or LF that stands alone in a message. */
export type BareNewlines = 'reject' | 'normalize';

export interface ReceivingPolicy {
  readonly connections: {
    /** At a time, of all. */
    readonly max: number;
    /** At a time, of one address (IPv6: one /64). */
    readonly perClient: number;
    /** Of one /24 (IPv6: one /64). */
    readonly newPerMinute: number;
  };
  /** Whether this address is a proxy of ours: it must begin with a PROXY header, and nobody else may. */
  readonly isProxy: (address: string) => boolean;
  /** Zones that are asked about clients; empty: none. */
  readonly dnsbl: readonly string[];
  /** Of one message. */
  readonly recipientsMax: number;
  readonly bareNewlines: BareNewlines;
  /** Without CRLF. */
  readonly lineBytesMax: number;
  /** Fields of a message. */
  readonly receivedMax: number;
  readonly greylisting: {
    readonly enabled: boolean;
    /** From the first try to one that counts. */
    readonly delayMs: number;
    /** A sender who came again is let in for so long after its last message. */
    readonly forgetAfterMs: number;
  };
  /** Domains in A-labels. */
  readonly trustedArcSealers: readonly string[];
  readonly sealForwards: boolean;
}

const CONNECTIONS_MAX = 10_000;
const NEW_PER_MINUTE_MAX = 1_000_000;
const PROXIES_MAX = 1_000;
/** Each is a question to the DNS, for every client. */
const ZONES_MAX = 8;
const SEALERS_MAX = 1_000;
/** RFC 5321 §4.5.3.1.8: at least 100 are taken. */
const RECIPIENTS = { min: 100, max: 1_000 };
/** RFC 5321 §4.5.3.1.6: at least 998 octets are taken. */
const LINE_BYTES = { min: 998, max: 1024 * 1024 };
/** RFC 5321 §6.3: large enough for honest mail. */
const RECEIVED = { min: 30, max: 1_000 };
const DELAY_MAX = { ms: 3_600_000, words: '1h' };
const FORGET_MAX = { ms: 366 * 86_400_000, words: '366d' };

/** Throws an Error that names the key and says what is wrong with it. */
export function readReceivingPolicy(file: unknown): ReceivingPolicy {
  const root = fields(file, 'the file', {
    connections: {},
    proxy_from: [],
    dnsbl: [],
    recipients_max: 100,
    bare_newlines: 'reject',
    line_bytes_max: 8_192,
    received_max: 100,
    greylisting: {},
    trusted_arc_sealers: [],
    seal_forwards: false,
  });
  const connections = fields(root.connections, 'connections', {
    max: 200,
    per_client: 20,
    new_per_minute: 120,
  });
  const greylisting = fields(root.greylisting, 'greylisting', {
    enabled: false,
    delay: '60s',
    forget_after: '36d',
  });
  const many = { min: 1, max: CONNECTIONS_MAX };
  return {
    connections: {
      max: whole(connections.max, 'connections.max', many),
      perClient: whole(connections.per_client, 'connections.per_client', many),
      newPerMinute: whole(connections.new_per_minute, 'connections.new_per_minute', {
        min: 1,
        max: NEW_PER_MINUTE_MAX,
      }),
    },
    isProxy: networks(root.proxy_from, 'proxy_from', PROXIES_MAX),
    dnsbl: domains(root.dnsbl, 'dnsbl', ZONES_MAX),
    recipientsMax: whole(root.recipients_max, 'recipients_max', RECIPIENTS),
    bareNewlines: oneOf(root.bare_newlines, 'bare_newlines', ['reject', 'normalize']),
    lineBytesMax: whole(root.line_bytes_max, 'line_bytes_max', LINE_BYTES),
    receivedMax: whole(root.received_max, 'received_max', RECEIVED),
    greylisting: {
      enabled: yesOrNo(greylisting.enabled, 'greylisting.enabled'),
      delayMs: duration(greylisting.delay, 'greylisting.delay', DELAY_MAX),
      forgetAfterMs: duration(greylisting.forget_after, 'greylisting.forget_after', FORGET_MAX),
    },
    trustedArcSealers: domains(root.trusted_arc_sealers, 'trusted_arc_sealers', SEALERS_MAX),
    sealForwards: yesOrNo(root.seal_forwards, 'seal_forwards'),
  };
}

function whole(
  value: unknown,
  at: string,
  { min, max }: { readonly min: number; readonly max: number },
): number {
  if (Number.isInteger(value) && Number(value) >= min && Number(value) <= max) return Number(value);
  throw wrong(at, `a whole number from ${min} to ${max}`);
}

function yesOrNo(value: unknown, at: string): boolean {
  if (typeof value === 'boolean') return value;
  throw wrong(at, 'true or false');
}

function domains(value: unknown, at: string, max: number): readonly string[] {
  return list(value, at, max).map((one, index) => {
    const name = typeof one === 'string' ? toALabels(one) : '';
    if (name.includes('.') && isHostName(name)) return name;
    throw wrong(`${at}[${index}]`, 'a domain');
  });
}
