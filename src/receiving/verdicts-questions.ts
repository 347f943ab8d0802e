// What the checks of one message may ask the DNS: our resolver in the words that mailauth knows, with a limit on the
// questions and an end in time. After it every question that is open or new ends as a timeout, so that a check ends
// by itself with `temperror` for what it could not learn, and what was answered in time keeps its answer.
import type { DnsAnswer, Resolver } from '../dns/resolver.ts';

/** As `dns.promises.resolve`: rejects with a node error, `ENOTFOUND` or `ENODATA` for what is not there. */
export type Ask = (name: string, type: string) => Promise<DnsRecords>;
/** A list of the form that the type has in Node. */
export type DnsRecords = string[] | string[][];

export type VerdictResolver = Pick<Resolver, 'a' | 'aaaa' | 'cname' | 'mx' | 'ptr' | 'txt'>;

/** As `resolver`, but what `isAbsent` says is not there without a question. */
export function withoutNames(
  resolver: VerdictResolver,
  isAbsent: (name: string) => boolean,
): VerdictResolver {
  const unless =
    <T>(ask: (name: string) => Promise<DnsAnswer<T>>): typeof ask =>
    async (name) =>
      isAbsent(name.toLowerCase().replace(/\.$/, '')) ? { kind: 'no_name' } : ask(name);
  return {
    a: unless(resolver.a),
    aaaa: unless(resolver.aaaa),
    cname: unless(resolver.cname),
    mx: unless(resolver.mx),
    ptr: unless(resolver.ptr),
    txt: unless(resolver.txt),
  };
}

/** SPF needs up to 111 (RFC 7208 §4.6.4), 10 signatures 10, ARC 51, DMARC 8 for each of 11 names. */
const QUESTIONS_MAX = 300;

export interface Questions {
  readonly ask: Ask;
  /** Ends what is open. */
  readonly end: () => void;
}

/** Questions of one message until `endsAtMs` (`performance.now()`). Call `end` when they are not needed any more. */
export function openQuestions(resolver: VerdictResolver, endsAtMs: number): Questions {
  const asked = new Map<string, Promise<DnsRecords>>();
  let isOver = false;
  let finish = (): void => undefined;
  const over = new Promise<never>((_resolve, reject) => {
    finish = () => {
      isOver = true;
      reject(dnsError('ETIMEOUT', 'the time for this message is over'));
    };
  });
  over.catch(() => undefined);
  const timer = setTimeout(() => finish(), Math.max(0, endsAtMs - performance.now()));

  const ask: Ask = (name, type) => {
    const key = `${type} ${name.toLowerCase().replace(/\.$/, '')}`;
    const known = asked.get(key);
    if (known !== undefined) return known;
    if (isOver) return over;
    const answer =
      asked.size >= QUESTIONS_MAX
        ? Promise.reject(dnsError('ESERVFAIL', 'too many questions about one message'))
        : Promise.race([answerOf(resolver, name, type), over]);
    answer.catch(() => undefined); // asked ahead of time: nobody may wait for it yet
    if (asked.size < QUESTIONS_MAX) asked.set(key, answer);
    return answer;
  };
  return {
    ask,
    end: () => {
      clearTimeout(timer);
      finish();
    },
  };
}

async function answerOf(resolver: VerdictResolver, name: string, type: string) {
  switch (type) {
    case 'A':
      return recordsOf(await resolver.a(name));
    case 'AAAA':
      return recordsOf(await resolver.aaaa(name));
    case 'CNAME':
      return recordsOf(await resolver.cname(name));
    case 'PTR':
      return recordsOf(await resolver.ptr(name));
    case 'TXT':
      return recordsOf(await resolver.txt(name)).map((text) => [text]);
    case 'MX': {
      const hosts = recordsOf(await resolver.mx(name));
      const listed = hosts.map(({ preference, exchange }) => ({ priority: preference, exchange }));
      // mailauth types a resolver by its two most common answers; MX records are objects in Node.
      return listed as unknown as string[];
    }
    default:
      throw dnsError('ENOTIMP', `no check asks for ${type}`);
  }
}

function recordsOf<T>(answer: DnsAnswer<T>): T[] {
  switch (answer.kind) {
    case 'found':
      return [...answer.records];
    case 'no_data':
      throw dnsError('ENODATA', 'no such record');
    case 'no_name':
      throw dnsError('ENOTFOUND', 'no such name');
    default:
      throw dnsError(answer.cause === 'timeout' ? 'ETIMEOUT' : 'ESERVFAIL', answer.cause);
  }
}

/** Without a stack: most messages meet a few, and a stack costs more than the question. */
export const dnsError = (code: string, message: string): Error =>
  Object.assign(Object.create(Error.prototype) as Error, { code, message });

/** Whether nothing is known: the next try may bring an answer. */
export function isTemporary(error: unknown): boolean {
  const code = error instanceof Error && 'code' in error ? error.code : null;
  return code !== 'ENOTFOUND' && code !== 'ENODATA';
}
