/**
 * Who asked for a pixel or a link: a reader, the proxy that loads pictures for one, or a program that looks at whatever
 * arrives. What is known of programs is data (config/tracking.json), an operator's to correct.
 *
 * In: the parsed file. Out: values that answer without asking anybody. Refuses, with the key and what to fix, whatever it
 * does not know.
 */
import { isIP } from 'node:net';
import { fields, list, networks, wrong } from '../mail/rule-file.ts';
import type { Suspect } from '../queue/engagement.ts';

/** A request, as far as it tells who sent it. */
export interface Visit {
  readonly method: string;
  /** Of the connection. */
  readonly remoteAddress: string;
  /** The headers of these names; null where there is none. */
  readonly forwardedFor: string | null;
  readonly userAgent: string | null;
  readonly purpose: string | null;
}

export interface Readers {
  /** The client behind our own proxies. */
  addressOf(visit: Visit): string;
  /** Null: nothing speaks against a person. */
  suspectOf(kind: 'opened' | 'clicked', visit: Visit): Suspect | null;
}

const ENTRIES_MAX = 1_000;
const WORD_MAX_CHARS = 200;
/** Of the proxies that a header names. */
const HOPS_MAX = 20;
const FORWARDED_MAX_CHARS = 2_000;

/** Throws an Error that names the key and says what is wrong with it. */
export function readReaders(file: unknown): Readers {
  const root = fields(file, 'the file', { proxies: [], image_proxies: {}, scanners: {} });
  const isOurs = networks(root.proxies, 'proxies', ENTRIES_MAX);
  const isImageProxy = readKind(root.image_proxies, 'image_proxies');
  const isScanner = readKind(root.scanners, 'scanners');
  const addressOf = (visit: Visit): string => {
    let client = plain(visit.remoteAddress);
    const hops = (visit.forwardedFor ?? '').slice(-FORWARDED_MAX_CHARS).split(',');
    for (const hop of hops.slice(-HOPS_MAX).toReversed()) {
      // The nearest that is none of ours: what stands before it, anybody may have written.
      if (!isOurs(client)) break;
      const next = plain(hop.trim());
      if (isIP(next) === 0) break;
      client = next;
    }
    return client;
  };
  return {
    addressOf,
    suspectOf(kind, visit) {
      if (visit.method === 'HEAD') return 'head';
      if (visit.purpose !== null && PREFETCH.test(visit.purpose)) return 'prefetch';
      const address = addressOf(visit);
      const userAgent = (visit.userAgent ?? '').trim().toLowerCase();
      // Every mail program and browser says what it is.
      if (userAgent === '' || isScanner(userAgent, address)) return 'scanner';
      if (!isImageProxy(userAgent, address)) return null;
      return kind === 'opened' ? 'proxy' : 'scanner'; // a proxy for pictures follows no links
    },
  };
}

const PREFETCH = /\b(?:prefetch|preview|prerender)\b/i;
/** As some proxies write an address: with a port, or in brackets. */
const DECORATED = /^(?:\[([^\]]*)\](?::\d+)?|([\d.]+):\d+)$/;

function plain(address: string): string {
  const [, inBrackets, dotted] = DECORATED.exec(address) ?? [];
  // A socket that takes both families writes an IPv4 address as one of IPv6.
  return (inBrackets ?? dotted ?? address).replace(/^::ffff:(?=\d+\.)/i, '');
}

function readKind(value: unknown, at: string): (userAgent: string, address: string) => boolean {
  const kind = fields(value, at, { user_agents: [], user_agent_words: [], networks: [] });
  const whole = new Set(texts(kind.user_agents, `${at}.user_agents`));
  const words = texts(kind.user_agent_words, `${at}.user_agent_words`);
  const isIn = networks(kind.networks, `${at}.networks`, ENTRIES_MAX);
  return (userAgent, address) =>
    whole.has(userAgent) || words.some((word) => userAgent.includes(word)) || isIn(address);
}

function texts(value: unknown, at: string): readonly string[] {
  return list(value, at, ENTRIES_MAX).map((one, index) => {
    if (typeof one === 'string' && one.trim() !== '' && one.length <= WORD_MAX_CHARS) {
      return one.trim().toLowerCase();
    }
    throw wrong(`${at}[${index}]`, `a text of at most ${WORD_MAX_CHARS} characters`);
  });
}
