// Asks one validating resolver, which the operator trusts, and says of each answer whether it was proven by DNSSEC.
//
// In: a name. Out: records, or their proven or unproven absence, or a failure; never an exception for what the DNS said.
// Node's own resolver does not tell the AD bit, so this is a stub of its own: UDP with a random port and id for every
// question, TCP where an answer is cut, EDNS with DO. It believes AD because it is told to: the way to the resolver has
// to be as safe as the resolver, so it belongs on the same machine. It validates nothing itself, and never asks anybody
// else.

import { randomInt } from 'node:crypto';
import { createSocket } from 'node:dgram';
import { connect, isIP, isIPv6 } from 'node:net';
import dnsPacket, { type Packet, type PacketAnswer } from 'dns-packet';
import { createAnswerCache } from './answer-cache.ts';
import { isHostName, NAME_CHARS_MAX, nameOf } from './host-name.ts';

/** One TLSA record as it came (RFC 6698 §2.1), any values. */
export interface TlsaRecord {
  readonly usage: number;
  readonly selector: number;
  readonly matching: number;
  readonly data: Buffer;
}

export type SecureAnswer<T> =
  | {
      readonly kind: 'found';
      /** Proven, the whole chain of CNAMEs included. */
      readonly secure: boolean;
      readonly records: readonly T[];
      /** Where CNAMEs led, in order; empty without them. */
      readonly cnames: readonly string[];
    }
  /** The name or the type does not exist; with `secure` that is proven too. */
  | { readonly kind: 'absent'; readonly secure: boolean; readonly cnames: readonly string[] }
  /** SERVFAIL (which is what a resolver says of a false signature), timeout, nonsense. */
  | { readonly kind: 'failed'; readonly cause: string };

export interface SecureResolver {
  /** Names of mail hosts in lower case; `''` for the null MX. */
  mx(name: string): Promise<SecureAnswer<string>>;
  a(name: string): Promise<SecureAnswer<string>>;
  aaaa(name: string): Promise<SecureAnswer<string>>;
  /** The alias of this very name. */
  cname(name: string): Promise<SecureAnswer<string>>;
  tlsa(name: string): Promise<SecureAnswer<TlsaRecord>>;
}

export interface SecureResolverOptions {
  /** `address:port`; IPv6 in brackets. */
  readonly server: string;
  /** For the first try; the second waits twice as long. */
  readonly timeoutMs?: number;
  readonly now?: () => Date;
}

const TIMEOUT_MS = 2_500;
const TRIES = 2;
/** What passes every path in one piece (DNS flag day 2020). */
const UDP_BYTES_MAX = 1_232;
const TCP_BYTES_MAX = 65_537;
const OPEN_MAX = 1_000;
const CACHE_MAX = 10_000;
/** Of what the kept answers say: names in characters, TLSA data in bytes; one answer may have 64 KB. */
const CACHE_WEIGHT_MAX = 8_000_000;
const LIFE_MAX_MS = 300_000;
const ABSENT_LIFE_MS = 30_000;
const FAILED_LIFE_MS = 5_000;
const CNAMES_MAX = 16;
const RECORDS_MAX = 256;
const RCODE = 0xf;
const NXDOMAIN = 3;
const RCODES: Readonly<Record<number, string>> = { 1: 'FORMERR', 2: 'SERVFAIL', 5: 'REFUSED' };

type Type = 'MX' | 'A' | 'AAAA' | 'CNAME' | 'TLSA' | 'TXT';

/** Throws on a server that is no `address:port`. */
export function createSecureResolver(options: SecureResolverOptions): SecureResolver {
  const server = readServer(options.server);
  const now = options.now ?? (() => new Date());
  const timeoutMs = options.timeoutMs ?? TIMEOUT_MS;
  const cache = createAnswerCache<SecureAnswer<unknown>>({
    now,
    entriesMax: CACHE_MAX,
    weightMax: CACHE_WEIGHT_MAX,
  });
  const open = new Map<string, Promise<SecureAnswer<unknown>>>();

  async function ask<T extends string | TlsaRecord>(
    type: Type,
    asked: string,
    read: (data: unknown) => T | null,
  ): Promise<SecureAnswer<T>> {
    const name = nameOf(asked);
    if (!/^[!-~]+$/.test(name) || name.length > NAME_CHARS_MAX || /\\|\.\.|^\./.test(name)) {
      return { kind: 'failed', cause: 'not a name that the DNS can carry' };
    }
    const key = `${type} ${name}`;
    const kept = cache.get(key);
    // Sound: the key begins with the type, and one method reads one type.
    if (kept !== null) return kept as SecureAnswer<T>;
    const asking = open.get(key) as Promise<SecureAnswer<T>> | undefined;
    if (asking !== undefined) return asking;
    if (open.size >= OPEN_MAX) return { kind: 'failed', cause: 'too many open questions' };
    const answering = exchange({ server, type, name, timeoutMs })
      .then((reply) => answerOf(reply, { type, name, read }))
      .then(({ answer, lifeMs }) => {
        cache.set(key, answer, { lifeMs, weight: weightOf(answer) });
        return answer;
      })
      .finally(() => open.delete(key));
    open.set(key, answering);
    return answering;
  }

  return {
    mx: (name) => ask('MX', name, readMx),
    a: (name) => ask('A', name, readText),
    aaaa: (name) => ask('AAAA', name, readText),
    cname: (name) => ask('CNAME', name, readText),
    tlsa: (name) => ask('TLSA', name, readTlsa),
  };
}

interface Server {
  readonly address: string;
  readonly port: number;
}

export function readServer(text: string): Server {
  const [, bracketed, plain, port] = /^(?:\[([^\]]+)\]|([^:]+)):(\d{1,5})$/.exec(text) ?? [];
  const address = bracketed ?? plain ?? '';
  if (isIP(address) === 0 || Number(port) < 1 || Number(port) > 65_535) {
    throw new Error(`the resolver ${JSON.stringify(text)} must be an address with a port`);
  }
  return { address, port: Number(port) };
}

interface Question {
  readonly server: Server;
  readonly type: Type;
  readonly name: string;
  readonly timeoutMs: number;
}

/** The reply, or why there is none. */
export async function exchange(question: Question): Promise<Packet | string> {
  let last = 'timeout';
  for (let number = 0; number < TRIES; number += 1) {
    const timeoutMs = question.timeoutMs * 2 ** number;
    const reply = await askUdp({ ...question, timeoutMs });
    if (typeof reply === 'string') {
      last = reply;
      continue;
    }
    if ((reply.flags & dnsPacket.TRUNCATED_RESPONSE) === 0) return reply;
    const whole = await askTcp({ ...question, timeoutMs });
    if (typeof whole !== 'string') return whole;
    last = whole;
  }
  return last;
}

/** RFC 6840 §5.7 and 5.8: AD in a query asks for AD in the answer; DO for those that want it said so. */
function queryOf({ type, name }: Question): Packet {
  return {
    type: 'query',
    id: randomInt(0x1_0000),
    flags: dnsPacket.RECURSION_DESIRED | dnsPacket.AUTHENTIC_DATA,
    questions: [{ type, name }],
    additionals: [
      { type: 'OPT', name: '.', udpPayloadSize: UDP_BYTES_MAX, flags: dnsPacket.DNSSEC_OK },
    ],
  };
}

/** Null for what is not the answer to this question. */
function readReply(bytes: Buffer, query: Packet): Packet | null {
  try {
    const reply = dnsPacket.decode(bytes);
    const [asked, ...more] = reply.questions;
    const [wanted] = query.questions;
    const isOurs =
      reply.type === 'response' &&
      reply.id === query.id &&
      more.length === 0 &&
      asked !== undefined &&
      nameOf(asked.name) === wanted?.name &&
      asked.type === wanted.type &&
      asked.class === 'IN';
    return isOurs ? reply : null;
  } catch {
    return null;
  }
}

function askUdp(question: Question): Promise<Packet | string> {
  const { server } = question;
  const query = queryOf(question);
  return new Promise((resolve) => {
    // A socket of its own: the system gives it a random port.
    const socket = createSocket(isIPv6(server.address) ? 'udp6' : 'udp4');
    let isDone = false;
    const done = (result: Packet | string): void => {
      if (isDone) return;
      isDone = true;
      clearTimeout(timer);
      socket.removeAllListeners('message').close();
      resolve(result);
    };
    const timer = setTimeout(() => done('timeout'), question.timeoutMs);
    socket.on('error', (error) => done(codeOf(error)));
    // Connected: what others send is not delivered.
    socket.connect(server.port, server.address, () => {
      socket.on('message', (bytes: Buffer) => {
        const reply = readReply(bytes, query);
        if (reply !== null) done(reply);
      });
      socket.send(dnsPacket.encode(query));
    });
  });
}

function askTcp(question: Question): Promise<Packet | string> {
  const { server } = question;
  const query = queryOf(question);
  return new Promise((resolve) => {
    const socket = connect({ host: server.address, port: server.port });
    const done = (result: Packet | string): void => {
      clearTimeout(timer);
      socket.destroy();
      resolve(result);
    };
    const timer = setTimeout(() => done('timeout'), question.timeoutMs);
    socket.on('error', (error) => done(codeOf(error)));
    socket.on('end', () => done('the connection was closed'));
    socket.once('connect', () => socket.write(dnsPacket.streamEncode(query)));
    let pending: Buffer = Buffer.alloc(0);
    socket.on('data', (chunk: Buffer) => {
      pending = Buffer.concat([pending, chunk]);
      const size = pending.length < 2 ? TCP_BYTES_MAX : 2 + pending.readUInt16BE(0);
      if (pending.length >= size) {
        done(readReply(pending.subarray(2, size), query) ?? 'malformed reply');
      }
    });
  });
}

const codeOf = (error: NodeJS.ErrnoException): string =>
  error.code === 'ECONNREFUSED' ? 'no resolver listens' : (error.code ?? 'network error');

function answerOf<T>(
  reply: Packet | string,
  asked: {
    readonly type: Type;
    readonly name: string;
    readonly read: (data: unknown) => T | null;
  },
): { readonly answer: SecureAnswer<T>; readonly lifeMs: number } {
  const failed = (cause: string): ReturnType<typeof answerOf<T>> => ({
    answer: { kind: 'failed', cause },
    lifeMs: FAILED_LIFE_MS,
  });
  if (typeof reply === 'string') return failed(reply);
  const rcode = reply.flags & RCODE;
  const extended = reply.additionals?.find(({ type }) => type === 'OPT')?.extendedRcode ?? 0;
  if ((rcode !== 0 && rcode !== NXDOMAIN) || extended !== 0) {
    return failed(RCODES[rcode] ?? `rcode ${rcode + extended * 16}`);
  }
  const secure = (reply.flags & dnsPacket.AUTHENTIC_DATA) !== 0;
  const answers = reply.answers ?? [];
  const chain = asked.type === 'CNAME' ? [] : followCnames(answers, asked.name);
  if (chain === null) return failed('its CNAME records lead nowhere');
  const end = chain.at(-1) ?? asked.name;
  const found = answers.filter(({ name, type }) => type === asked.type && nameOf(name) === end);
  const records = found.map(({ data }) => asked.read(data)).filter((record) => record !== null);
  if (records.length !== found.length || records.length > RECORDS_MAX) {
    return failed('malformed records');
  }
  if (records.length === 0) {
    return { answer: { kind: 'absent', secure, cnames: chain }, lifeMs: ABSENT_LIFE_MS };
  }
  const lifeMs = Math.min(LIFE_MAX_MS, ...answers.map(({ ttl }) => ttl * 1_000));
  return { answer: { kind: 'found', secure, records, cnames: chain }, lifeMs };
}

function weightOf(answer: SecureAnswer<string | TlsaRecord>): number {
  if (answer.kind === 'failed') return answer.cause.length;
  const records = answer.kind === 'found' ? answer.records : [];
  const texts = [...answer.cnames, ...records];
  return texts.reduce(
    (sum, one) => sum + (typeof one === 'string' ? one.length : one.data.length),
    0,
  );
}

/** The names that the answer leads to from `name`, in order; null: in a circle, too far, or to no name of a host. */
function followCnames(answers: readonly PacketAnswer[], name: string): readonly string[] | null {
  const chain: string[] = [];
  let at = name;
  for (;;) {
    const next = answers.find((answer) => answer.type === 'CNAME' && nameOf(answer.name) === at);
    if (next === undefined) return chain;
    at = nameOf(String(next.data));
    // The name goes into questions and reports.
    if (!isHostName(at) || at === name || chain.includes(at)) return null;
    if (chain.length >= CNAMES_MAX) return null;
    chain.push(at);
  }
}

const isObject = (data: unknown): data is Readonly<Record<string, unknown>> =>
  typeof data === 'object' && data !== null;

const readText = (data: unknown): string | null => (typeof data === 'string' ? nameOf(data) : null);

function readMx(data: unknown): string | null {
  if (!isObject(data) || typeof data['exchange'] !== 'string') return null;
  return nameOf(data['exchange']);
}

function readTlsa(data: unknown): TlsaRecord | null {
  if (!isObject(data) || !Buffer.isBuffer(data['certificate'])) return null;
  const { usage, selector, matchingType, certificate } = data;
  if (typeof usage !== 'number' || typeof selector !== 'number') return null;
  return typeof matchingType === 'number'
    ? { usage, selector, matching: matchingType, data: Buffer.from(certificate) }
    : null;
}
