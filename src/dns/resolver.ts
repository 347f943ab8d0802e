// Asks the DNS and remembers the answer for a short while.
//
// In: a name. Out: a value that tells four things apart: records, a name without such records, a name that does
// not exist, and no answer at all. Nothing here throws for what the DNS said, since these four end in different
// outcomes for a message. It speaks through c-ares only (never getaddrinfo, which blocks the thread pool and reads
// /etc/hosts), keeps answers in a bounded cache and asks a question once, however many wait for it. The real cache
// is the resolver we ask: Node tells the TTL of A and AAAA only. It refuses names that c-ares would misread.

import { Resolver as CaresResolver } from 'node:dns/promises';
import { askOddName, isOddName, type OddType } from './odd-names.ts';

export type DnsAnswer<T> =
  | { readonly kind: 'found'; readonly records: readonly T[] }
  /** The name exists, without records of this type. */
  | { readonly kind: 'no_data' }
  /** NXDOMAIN, or a name that the DNS cannot carry. */
  | { readonly kind: 'no_name' }
  /** SERVFAIL, REFUSED, timeout, malformed reply: nothing is known. */
  | { readonly kind: 'failed'; readonly cause: string };

/** `exchange` is `''` for the null MX (RFC 7505), else as the DNS spells it, unchecked. */
export type MxRecord = { readonly preference: number; readonly exchange: string };

export type Resolver = {
  /** Follows CNAMEs as far as the DNS server does. NXDOMAIN was heard twice before it is `no_name`. */
  readonly mx: (name: string) => Promise<DnsAnswer<MxRecord>>;
  readonly a: (name: string) => Promise<DnsAnswer<string>>;
  readonly aaaa: (name: string) => Promise<DnsAnswer<string>>;
  /** The next name only, not the end of the chain. */
  readonly cname: (name: string) => Promise<DnsAnswer<string>>;
  /** One string a record, its chunks joined (RFC 7208 §3.3, RFC 6376 §3.6.2.2). */
  readonly txt: (name: string) => Promise<DnsAnswer<string>>;
  /** Of a reverse name, as `4.3.2.1.in-addr.arpa`. */
  readonly ptr: (name: string) => Promise<DnsAnswer<string>>;
  /** Ends every open question with `failed` and answers nothing any more. */
  readonly close: () => void;
};

const TIMEOUT_MS = 2_500;
const TRIES = 2;
const POSITIVE_LIFE_MS = 60_000;
const ADDRESS_LIFE_MAX_MS = 300_000;
const NEGATIVE_LIFE_MS = 30_000;
const FAILURE_LIFE_MS = 5_000;
const CACHE_ENTRIES_MAX = 10_000;
const OPEN_QUESTIONS_MAX = 5_000;

/** What one question brought: the answer and how long it may be kept. */
type Reply<T> = { readonly answer: DnsAnswer<T>; readonly lifeMs: number };
type Slot = Reply<unknown> & { readonly storedAtMs: number };
type Question<T> = {
  readonly type: string;
  readonly name: string;
  readonly ask: (cares: CaresResolver, name: string) => Promise<Records<T>>;
  /** Whether NXDOMAIN must be heard twice. */
  readonly confirmNoName?: boolean;
};
type Records<T> = { readonly records: readonly T[]; readonly lifeMs: number };

const CAUSES: Readonly<Record<string, string>> = {
  ESERVFAIL: 'SERVFAIL',
  EREFUSED: 'REFUSED',
  ENOTIMP: 'NOTIMP',
  EFORMERR: 'FORMERR',
  EBADRESP: 'malformed reply',
  ETIMEOUT: 'timeout',
  ECONNREFUSED: 'no DNS server reachable',
  ECANCELLED: 'cancelled',
};

/** Replies of one sick server: another server may know better. c-ares tries the others only on a timeout. */
const OTHER_SERVER_MAY_KNOW: ReadonlySet<string> = new Set([
  'SERVFAIL',
  'REFUSED',
  'NOTIMP',
  'FORMERR',
  'malformed reply',
]);

/**
 * A resolver over `servers` (`ip` or `ip:port`), or over the system's when null.
 *
 * `timeoutMs` is for the first try of a server; c-ares doubles it for the next, so the defaults end after 7 s.
 * Throws on a malformed server.
 */
export function createResolver(options: {
  readonly servers: readonly string[] | null;
  readonly timeoutMs?: number;
  readonly tries?: number;
  readonly now?: () => Date;
  /** False: every question is asked anew, for who wants to see what was just published. */
  readonly keepsAnswers?: boolean;
  /** Also names that no host can have, which SPF makes out of local parts. */
  readonly asksOddNames?: boolean;
}): Resolver {
  const { servers, timeoutMs = TIMEOUT_MS, tries = TRIES, now = () => new Date() } = options;
  const { keepsAnswers = true, asksOddNames = false } = options;
  const first = new CaresResolver({ timeout: timeoutMs, tries });
  const second = new CaresResolver({ timeout: timeoutMs, tries });
  if (servers !== null) first.setServers(servers);
  const [head, ...others] = first.getServers();
  const hasOthers = head !== undefined && others.length > 0;
  if (hasOthers) second.setServers([...others, head]);
  else if (servers !== null) second.setServers(servers);

  // Both are keyed by type and name.
  const cache = new Map<string, Slot>();
  const open = new Map<string, Promise<DnsAnswer<unknown>>>();
  let closed = false;

  async function resolve<T>(question: Question<T>): Promise<DnsAnswer<T>> {
    const name = question.name.toLowerCase().replace(/\.$/, '');
    if (!isAskable(name) && !isOddQuestion(question.type, name)) return { kind: 'no_name' };
    if (closed) return { kind: 'failed', cause: 'the resolver is closed' };
    const key = `${question.type} ${name}`;
    // Sound: the key begins with the type of record, and one method asks for one type.
    const kept = recall(key) as DnsAnswer<T> | null;
    if (kept !== null) return kept;
    const asked = open.get(key) as Promise<DnsAnswer<T>> | undefined;
    if (asked !== undefined) return asked;
    if (open.size >= OPEN_QUESTIONS_MAX)
      return { kind: 'failed', cause: 'too many open questions' };
    const asking = askAndKeep(key, { ...question, name });
    open.set(key, asking);
    return asking;
  }

  /** Where c-ares would say EBADNAME for a name that can exist. */
  const isOddQuestion = (type: string, name: string): type is OddType =>
    asksOddNames && ['A', 'AAAA', 'MX', 'TXT'].includes(type) && isOddName(name);

  async function askAndKeep<T>(key: string, question: Question<T>): Promise<DnsAnswer<T>> {
    try {
      const reply = await askTwiceIfNeeded(question);
      if (!closed && keepsAnswers) keep(key, reply);
      return reply.answer;
    } finally {
      open.delete(key);
    }
  }

  async function askTwiceIfNeeded<T>(question: Question<T>): Promise<Reply<T>> {
    const { type, name } = question;
    if (isOddQuestion(type, name)) {
      const answer = await askOddName(first.getServers(), { type, name, timeoutMs });
      const lifeMs = answer.kind === 'failed' ? FAILURE_LIFE_MS : NEGATIVE_LIFE_MS;
      // Sound: it answers with the form of the type, as the method that asks does.
      return { answer: answer as DnsAnswer<T>, lifeMs };
    }
    const reply = await askOnce(first, question);
    const { answer } = reply;
    const again =
      answer.kind === 'no_name'
        ? question.confirmNoName === true
        : answer.kind === 'failed' && hasOthers && OTHER_SERVER_MAY_KNOW.has(answer.cause);
    return again && !closed ? askOnce(second, question) : reply;
  }

  function recall(key: string): DnsAnswer<unknown> | null {
    const slot = cache.get(key);
    if (slot === undefined) return null;
    const ageMs = now().getTime() - slot.storedAtMs;
    // A negative age means that the clock was set back: the slot could live for hours.
    if (ageMs >= 0 && ageMs < slot.lifeMs) return slot.answer;
    cache.delete(key);
    return null;
  }

  function keep(key: string, reply: Reply<unknown>): void {
    if (reply.lifeMs <= 0) return;
    if (cache.size >= CACHE_ENTRIES_MAX) {
      // A Map iterates in order of insertion, so this is the oldest entry.
      const oldest = cache.keys().next();
      if (oldest.done !== true) cache.delete(oldest.value);
    }
    cache.set(key, { ...reply, storedAtMs: now().getTime() });
  }

  function close(): void {
    closed = true;
    first.cancel();
    second.cancel();
    cache.clear();
  }

  return {
    mx: (name) => resolve({ type: 'MX', name, ask: askMx, confirmNoName: true }),
    a: (name) => resolve({ type: 'A', name, ask: askA }),
    aaaa: (name) => resolve({ type: 'AAAA', name, ask: askAaaa }),
    cname: (name) => resolve({ type: 'CNAME', name, ask: askCname }),
    txt: (name) => resolve({ type: 'TXT', name, ask: askTxt }),
    ptr: (name) => resolve({ type: 'PTR', name, ask: askPtr }),
    close,
  };
}

async function askOnce<T>(cares: CaresResolver, question: Question<T>): Promise<Reply<T>> {
  try {
    const { records, lifeMs } = await question.ask(cares, question.name);
    // A CNAME alone, without records of the type asked for, comes from c-ares as an empty list, not as ENODATA.
    if (records.length === 0) return { answer: { kind: 'no_data' }, lifeMs: NEGATIVE_LIFE_MS };
    return { answer: { kind: 'found', records }, lifeMs };
  } catch (error) {
    return replyOfError(error);
  }
}

function replyOfError(error: unknown): Reply<never> {
  const code = error instanceof Error && 'code' in error ? String(error.code) : String(error);
  if (code === 'ENODATA') return { answer: { kind: 'no_data' }, lifeMs: NEGATIVE_LIFE_MS };
  // EBADNAME: an empty or overlong label. No later attempt can change that.
  if (code === 'ENOTFOUND' || code === 'EBADNAME') {
    return { answer: { kind: 'no_name' }, lifeMs: NEGATIVE_LIFE_MS };
  }
  return { answer: { kind: 'failed', cause: CAUSES[code] ?? code }, lifeMs: FAILURE_LIFE_MS };
}

/** c-ares cuts names at NUL, reads a backslash as an escape and sends raw UTF-8. */
function isAskable(name: string): boolean {
  return /^[!-~]{1,253}$/.test(name) && !name.includes('\\');
}

async function askMx(cares: CaresResolver, name: string): Promise<Records<MxRecord>> {
  const answers = await cares.resolveMx(name);
  const records = answers.map(({ priority, exchange }) => {
    return { preference: priority, exchange: exchange === '.' ? '' : exchange };
  });
  return { records, lifeMs: POSITIVE_LIFE_MS };
}

async function askA(cares: CaresResolver, name: string): Promise<Records<string>> {
  return addresses(await cares.resolve4(name, { ttl: true }));
}

async function askAaaa(cares: CaresResolver, name: string): Promise<Records<string>> {
  return addresses(await cares.resolve6(name, { ttl: true }));
}

function addresses(
  answers: readonly { readonly address: string; readonly ttl: number }[],
): Records<string> {
  const lifeMs = answers.reduce(
    (least, { ttl }) => Math.min(least, ttl * 1_000),
    ADDRESS_LIFE_MAX_MS,
  );
  return { records: answers.map(({ address }) => address), lifeMs };
}

async function askCname(cares: CaresResolver, name: string): Promise<Records<string>> {
  return { records: await cares.resolveCname(name), lifeMs: POSITIVE_LIFE_MS };
}

async function askTxt(cares: CaresResolver, name: string): Promise<Records<string>> {
  const answers = await cares.resolveTxt(name);
  return { records: answers.map((chunks) => chunks.join('')), lifeMs: POSITIVE_LIFE_MS };
}

async function askPtr(cares: CaresResolver, name: string): Promise<Records<string>> {
  return { records: await cares.resolvePtr(name), lifeMs: POSITIVE_LIFE_MS };
}
