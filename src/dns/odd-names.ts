// Asks for names that c-ares refuses to ask for: those with characters that no host name has. SPF makes them out of
// local parts (RFC 7208 §7): `exists:%{l}._spf.example.com` for a sender with a plus sign.
//
// In: a name of printable characters. Out: what Reply of resolver.ts needs, from the first server that answers.
import type { Packet } from 'dns-packet';
import { exchange, readServer } from './dnssec.ts';
import type { DnsAnswer } from './resolver.ts';

export type OddType = 'A' | 'AAAA' | 'MX' | 'TXT';

const SERVERS_MAX = 2;
const RECORDS_MAX = 256;
const RCODE = 0xf;
const NXDOMAIN = 3;
const RCODES: Readonly<Record<number, string>> = { 1: 'FORMERR', 2: 'SERVFAIL', 5: 'REFUSED' };

/** RFC 1035 §3.1 and what c-ares lets pass. The dns-packet library has no escapes, so a backslash cannot be asked for. */
export const isOddName = (name: string): boolean =>
  /[^\w*\-./]/.test(name) &&
  /^[ -[\]-~]{1,253}$/.test(name) &&
  name.split('.').every((label) => label.length >= 1 && label.length <= 63);

/** `servers` as `getServers` of Node says them. */
export async function askOddName(
  servers: readonly string[],
  question: { readonly type: OddType; readonly name: string; readonly timeoutMs: number },
): Promise<DnsAnswer<unknown>> {
  let last: DnsAnswer<unknown> = { kind: 'failed', cause: 'no DNS server reachable' };
  for (const text of servers.slice(0, SERVERS_MAX)) {
    last = answerOf(
      await exchange({ ...question, server: readServer(withPort(text)) }),
      question.type,
    );
    if (last.kind !== 'failed') return last;
  }
  return last;
}

function withPort(server: string): string {
  if (/^\[.*\]:\d+$|^[^:]+:\d+$/.test(server)) return server;
  return `${server.includes(':') && !server.startsWith('[') ? `[${server}]` : server}:53`;
}

function answerOf(reply: Packet | string, type: OddType): DnsAnswer<unknown> {
  if (typeof reply === 'string') return { kind: 'failed', cause: reply };
  const rcode = reply.flags & RCODE;
  if (rcode === NXDOMAIN) return { kind: 'no_name' };
  if (rcode !== 0) return { kind: 'failed', cause: RCODES[rcode] ?? `rcode ${rcode}` };
  // Behind CNAMEs they have another name; the server is the one that followed them.
  const records = (reply.answers ?? [])
    .filter((answer) => answer.type === type)
    .slice(0, RECORDS_MAX)
    .map(({ data }) => (type === 'MX' ? mxOf(data) : type === 'TXT' ? textOf(data) : data));
  return records.length === 0 ? { kind: 'no_data' } : { kind: 'found', records };
}

function mxOf(data: unknown) {
  const { preference = 0, exchange: host = '' } = data as {
    readonly preference?: number;
    readonly exchange?: string;
  };
  return { preference, exchange: host === '.' ? '' : host };
}

/** One string a record, its chunks joined; bytes as c-ares gives them. */
function textOf(data: unknown): string {
  const chunks: readonly unknown[] = Array.isArray(data) ? data : [data];
  return chunks
    .map((chunk) => (Buffer.isBuffer(chunk) ? chunk.toString('latin1') : String(chunk)))
    .join('');
}
