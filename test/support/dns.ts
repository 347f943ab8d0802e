// A DNS server for tests: real UDP and TCP sockets on one free loopback port, zones as a map.
//
// In: a map from name to its records (zone-file notation), or to the fault it answers with. Out: `ip:port`
// for createResolver, the questions it was asked, and the same map, which a test may change at any time.
// It answers like a recursive resolver: CNAMEs are followed inside the map, an unknown name is NXDOMAIN, a
// name that only has names below it is NODATA, an answer too large for UDP is truncated and asked for again
// over TCP. It refuses nothing and forwards nothing, so a name missing from the map cannot leave the machine.

import { createSocket } from 'node:dgram';
import type { Socket as UdpSocket } from 'node:dgram';
import { once } from 'node:events';
import { createServer } from 'node:net';
import type { AddressInfo, Server, Socket } from 'node:net';
import dnsPacket, { type Packet, type PacketAnswer, type PacketQuestion } from 'dns-packet';

type RecordType = 'A' | 'AAAA' | 'CNAME' | 'MX' | 'TXT' | 'TLSA' | 'PTR';

/**
 * An rcode; or `TIMEOUT` (no reply at all), `GARBAGE` (a reply cut inside its answer section), `HANGUP`
 * (TCP is closed, UDP truncated, so that no answer can be had).
 */
export type DnsFault =
  'SERVFAIL' | 'REFUSED' | 'NXDOMAIN' | 'NOTIMP' | 'FORMERR' | 'TIMEOUT' | 'GARBAGE' | 'HANGUP';

/** The records of one name. A fault in place of a list is the answer to that question type only. */
export type DnsRecords = {
  readonly A?: readonly string[] | DnsFault;
  readonly AAAA?: readonly string[] | DnsFault;
  /** `'10 mx.example.test'`; the null MX is `'0 .'`. */
  readonly MX?: readonly string[] | DnsFault;
  /** One string a record; cut into chunks of `chunkBytes` on the wire. */
  readonly TXT?: readonly string[] | DnsFault;
  /** Default 255, the most there can be. */
  readonly chunkBytes?: number;
  readonly PTR?: readonly string[] | DnsFault;
  /** `'3 1 1 hex'`. */
  readonly TLSA?: readonly string[] | DnsFault;
  /** A name, or a DnsFault. */
  readonly CNAME?: string;
  /** Answer with the CNAME alone, as a server does that is not asked to follow it. */
  readonly loneCname?: boolean;
  /** Seconds, default 300. */
  readonly ttlSeconds?: number;
};

/** Names in lower case, without a final dot. */
export type DnsZones = Record<string, DnsRecords | DnsFault>;

export type DnsQuestion = {
  readonly name: string;
  readonly type: string;
  readonly transport: 'udp' | 'tcp';
};

export type DnsServer = {
  /** `127.0.0.1:port`, as createResolver and MAILSTEAD_DNS_SERVERS take it. */
  readonly server: string;
  readonly zones: DnsZones;
  /** Zones that a validating resolver would call secure: answers from these alone have the AD bit. */
  readonly secure: Set<string>;
  /** In order of arrival; a test may empty it. */
  readonly questions: DnsQuestion[];
  readonly stop: () => Promise<void>;
};

const RCODES = { FORMERR: 1, SERVFAIL: 2, NXDOMAIN: 3, NOTIMP: 4, REFUSED: 5 } as const;
const FAULTS: readonly string[] = [...Object.keys(RCODES), 'TIMEOUT', 'GARBAGE', 'HANGUP'];
const DEFAULT_TTL_SECONDS = 300;
// RFC 1035 §4.2.1: what fits into UDP when the question carries no EDNS size.
const PLAIN_UDP_BYTES_MAX = 512;
const CNAME_STEPS_MAX = 20;
const TXT_CHUNK_BYTES = 255;
const TCP_QUESTION_BYTES_MAX = 65_537;
const BIND_TRIES_MAX = 20;

type Found = {
  readonly fault: DnsFault | null;
  readonly answers: readonly PacketAnswer[];
  readonly isSecure?: boolean;
};

/** Starts a server for `zones`; the caller must `stop()` it or the process does not exit. */
export async function startDns(zones: DnsZones): Promise<DnsServer> {
  const questions: DnsQuestion[] = [];
  const secure = new Set<string>();
  const isSecure = (name: string): boolean =>
    [...secure].some((zone) => name === zone || name.endsWith(`.${zone}`));
  const { udp, tcp, port } = await bindBoth();
  const connections = new Set<Socket>();

  udp.on('message', (bytes, peer) => {
    const query = decodeQuery(bytes);
    if (query === null) return;
    const question = noteQuestion(query, 'udp');
    const found = proven(lookUp(zones, question), question, isSecure);
    if (found.fault === 'TIMEOUT') return;
    const sizeMax = query.additionals?.find((extra) => extra.type === 'OPT')?.udpPayloadSize;
    udp.send(udpReply(query, found, sizeMax ?? PLAIN_UDP_BYTES_MAX), peer.port, peer.address);
  });

  tcp.on('connection', (socket) => {
    connections.add(socket);
    socket.on('close', () => connections.delete(socket));
    // A resolver that gives up resets the connection; nothing is owed to it.
    socket.on('error', () => socket.destroy());
    let pending: Buffer = Buffer.alloc(0);
    socket.on('data', (chunk: Buffer) => {
      pending = Buffer.concat([pending, chunk]);
      if (pending.length > TCP_QUESTION_BYTES_MAX) socket.destroy();
      while (pending.length >= 2 && pending.length >= 2 + pending.readUInt16BE(0)) {
        const end = 2 + pending.readUInt16BE(0);
        const query = decodeQuery(pending.subarray(2, end));
        pending = pending.subarray(end);
        if (query === null) continue;
        const question = noteQuestion(query, 'tcp');
        const found = proven(lookUp(zones, question), question, isSecure);
        if (found.fault === 'HANGUP') socket.destroy();
        else if (found.fault !== 'TIMEOUT') socket.write(tcpReply(query, found));
      }
    });
  });

  function noteQuestion(query: Packet, transport: 'udp' | 'tcp'): PacketQuestion {
    const first = query.questions[0] ?? { name: '.', type: 'A' };
    const name = first.name.toLowerCase();
    questions.push({ name, type: first.type, transport });
    return { name, type: first.type };
  }

  async function stop(): Promise<void> {
    for (const socket of connections) socket.destroy();
    const closed = [once(udp, 'close'), once(tcp, 'close')];
    udp.close();
    tcp.close();
    await Promise.all(closed);
  }

  return { server: `127.0.0.1:${port}`, zones, secure, questions, stop };
}

/** UDP and TCP on the same free port: another process may hold the TCP side of a port free on UDP. */
async function bindBoth(): Promise<{ udp: UdpSocket; tcp: Server; port: number }> {
  for (let tryCount = 0; tryCount < BIND_TRIES_MAX; tryCount += 1) {
    const udp = createSocket('udp4');
    udp.bind(0, '127.0.0.1');
    await once(udp, 'listening');
    const { port } = udp.address();
    const tcp = createServer();
    tcp.listen(port, '127.0.0.1');
    try {
      await once(tcp, 'listening');
      return { udp, tcp, port: (tcp.address() as AddressInfo).port };
    } catch {
      // The port is taken on TCP: the next turn takes another one.
      udp.close();
    }
  }
  throw new Error('no port is free on both UDP and TCP');
}

function decodeQuery(bytes: Buffer): Packet | null {
  try {
    const packet = dnsPacket.decode(bytes);
    return packet.type === 'query' && packet.questions.length === 1 ? packet : null;
  } catch {
    // Not a DNS message; a real server drops it too.
    return null;
  }
}

function lookUp(zones: DnsZones, question: PacketQuestion): Found {
  const answers: PacketAnswer[] = [];
  const seen = new Set<string>();
  let name = question.name;
  for (let step = 0; step < CNAME_STEPS_MAX; step += 1) {
    const zone = Object.hasOwn(zones, name) ? zones[name] : undefined;
    if (zone === undefined)
      return { fault: hasNamesBelow(zones, name) ? null : 'NXDOMAIN', answers };
    if (isFault(zone)) return { fault: zone, answers };
    const ttl = zone.ttlSeconds ?? DEFAULT_TTL_SECONDS;
    const own = zone[question.type as RecordType];
    if (isFault(own)) return { fault: own, answers };
    const { CNAME: cname } = zone;
    if (cname !== undefined && isFault(cname)) {
      if (question.type === 'CNAME') return { fault: cname, answers };
    } else if (cname !== undefined) {
      answers.push({ name, type: 'CNAME', ttl, data: cname });
      if (question.type === 'CNAME' || zone.loneCname === true) return { fault: null, answers };
      seen.add(name);
      name = cname.toLowerCase().replace(/\.$/, '');
      // Recursive resolvers give up on a loop in this way.
      if (seen.has(name)) return { fault: 'SERVFAIL', answers: [] };
      continue;
    }
    if (own === undefined || typeof own === 'string') return { fault: null, answers };
    const type = question.type as RecordType;
    for (const text of own) {
      answers.push({ name, type, ttl, data: recordData(type, text, zone.chunkBytes) });
    }
    return { fault: null, answers };
  }
  return { fault: 'SERVFAIL', answers: [] };
}

/** Secure is what every name on the way is. */
function proven(
  found: Found,
  question: PacketQuestion,
  isSecure: (name: string) => boolean,
): Found {
  const names = found.answers.flatMap(({ name, type, data }) =>
    type === 'CNAME' && question.type !== 'CNAME' ? [name, String(data).toLowerCase()] : [name],
  );
  return { ...found, isSecure: [question.name, ...names].every(isSecure) };
}

function isFault(value: unknown): value is DnsFault {
  return typeof value === 'string' && FAULTS.includes(value);
}

/** RFC 8020: a name with names below it exists, even without records. */
function hasNamesBelow(zones: DnsZones, name: string): boolean {
  return Object.keys(zones).some((other) => other.endsWith(`.${name}`));
}

function recordData(type: RecordType, text: string, chunkBytes = TXT_CHUNK_BYTES): unknown {
  if (type === 'MX') {
    const [preference = '', ...rest] = text.split(' ');
    return { preference: Number(preference), exchange: rest.join(' ') };
  }
  if (type === 'TXT') return textChunks(text, chunkBytes);
  if (type === 'TLSA') {
    const [usage, selector, matchingType, hex = ''] = text.split(' ');
    return {
      usage: Number(usage),
      selector: Number(selector),
      matchingType: Number(matchingType),
      certificate: Buffer.from(hex, 'hex'),
    };
  }
  return text;
}

function textChunks(text: string, chunkBytes: number): Buffer[] {
  const bytes = Buffer.from(text);
  const chunks: Buffer[] = [];
  for (let at = 0; at < bytes.length; at += chunkBytes) {
    chunks.push(bytes.subarray(at, at + chunkBytes));
  }
  return chunks.length === 0 ? [bytes] : chunks;
}

function reply(query: Packet, found: Found): Packet {
  const { fault } = found;
  const rcode = fault !== null && fault in RCODES ? RCODES[fault as keyof typeof RCODES] : 0;
  const desired = query.flags & dnsPacket.RECURSION_DESIRED;
  return {
    type: 'response',
    id: query.id,
    flags:
      desired |
      dnsPacket.RECURSION_AVAILABLE |
      dnsPacket.AUTHORITATIVE_ANSWER |
      (found.isSecure === true && wantsProof(query) ? dnsPacket.AUTHENTIC_DATA : 0) |
      rcode,
    questions: query.questions,
    answers: found.answers,
  };
}

/** RFC 6840 §5.7: AD or DO in the query. */
const wantsProof = (query: Packet): boolean =>
  (query.flags & dnsPacket.AUTHENTIC_DATA) !== 0 ||
  query.additionals?.some((extra) => extra.flag_do === true) === true;

function udpReply(query: Packet, found: Found, sizeBytesMax: number): Buffer {
  const packet = reply(query, found);
  if (found.fault === 'GARBAGE') return garbage(packet);
  const bytes = dnsPacket.encode(packet);
  if (found.fault !== 'HANGUP' && bytes.length <= sizeBytesMax) return bytes;
  const flags = packet.flags | dnsPacket.TRUNCATED_RESPONSE;
  return dnsPacket.encode({ ...packet, flags, answers: [] });
}

function tcpReply(query: Packet, found: Found): Buffer {
  const packet = reply(query, found);
  if (found.fault !== 'GARBAGE') return dnsPacket.streamEncode(packet);
  const bytes = garbage(packet);
  const size = Buffer.alloc(2);
  size.writeUInt16BE(bytes.length);
  return Buffer.concat([size, bytes]);
}

function garbage(packet: Packet): Buffer {
  const answers: PacketAnswer[] = packet.questions.map(({ name }) => {
    return { name, type: 'A', ttl: DEFAULT_TTL_SECONDS, data: '192.0.2.1' };
  });
  const bytes = dnsPacket.encode({ ...packet, answers });
  return bytes.subarray(0, bytes.length - 7);
}
