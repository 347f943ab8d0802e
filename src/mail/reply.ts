/**
 * What an SMTP peer said (RFC 5321 §4.2): code, enhanced status code (RFC 3463, 2034) and text, as a value.
 *
 * In: the raw reply as the client library hands it over, one or many lines. Out: a Reply whose text is safe to
 * store, log and show: no control characters, valid Unicode, cut at named limits. It refuses nothing but text that
 * has no reply code; what a reply means for a delivery is outcome.ts.
 */
import { Buffer } from 'node:buffer';

/** A reply line is at most 512 octets (RFC 5321 §4.5.3.1.5); peers send longer ones. */
export const replyLineCharsMax = 1_024;
export const replyLinesMax = 20;
export const replyCharsMax = 4_096;

export interface Reply {
  /** 200 to 599. */
  readonly code: number;
  /** `5.1.1`, as the peer gave it, even when its class contradicts the code; null when there was none. */
  readonly enhanced: string | null;
  /** The words of all lines without the codes, joined by one space; may be empty. */
  readonly text: string;
  /** The lines as they came, codes included. */
  readonly lines: readonly string[];
}

/**
 * Where in the conversation something was said or went wrong. `dns` and `connect` have no reply; `data` is the
 * command, `dot` everything from the first octet of the message to the reply after its final dot.
 */
export const stages = [
  'dns',
  'connect',
  'greeting',
  'ehlo',
  'tls',
  'auth',
  'mail',
  'rcpt',
  'data',
  'dot',
] as const;
export type Stage = (typeof stages)[number];

/** The reply, or null when no line starts with a reply code. The last line with a code decides. */
export function parseReply(raw: string): Reply | null {
  const lines = legible(raw.slice(0, replyCharsMax * 2))
    .slice(0, replyCharsMax)
    .split(/\r\n|\r|\n/)
    .map((line) => line.replace(controls, '?').slice(0, replyLineCharsMax).trim())
    .filter((line) => line !== '')
    .slice(0, replyLinesMax);
  let code: number | null = null;
  let enhanced: string | null = null;
  const words: string[] = [];
  for (const line of lines) {
    const match = replyLine.exec(line);
    if (match === null) {
      // A peer that wraps its text without repeating the code.
      words.push(line);
      continue;
    }
    code = Number(match[1]);
    const status = statusCode.exec(match[2] ?? '');
    enhanced = status?.[1] ?? enhanced;
    words.push((status === null ? match[2] : status[2]) ?? '');
  }
  if (code === null) return null;
  const text = words.filter((part) => part !== '').join(' ');
  return { code, enhanced, text, lines };
}

/** One line for people and API answers: `550 5.1.1 No such user`. */
export function formatReply(reply: Reply): string {
  return [String(reply.code), reply.enhanced ?? '', reply.text]
    .filter((part) => part !== '')
    .join(' ');
}

/** 5yz: the peer says that trying again will not help (RFC 5321 §4.2.1). What we make of it: outcome.ts. */
export function isPermanent(reply: Reply): boolean {
  return reply.code >= 500 && reply.code <= 599;
}

/** 4yz. */
export function isTransient(reply: Reply): boolean {
  return reply.code >= 400 && reply.code <= 499;
}

const replyLine = /^([2-5]\d\d)(?:[ -]\s*(.*))?$/s;
/** RFC 3463 §2; some peers put a `#` or brackets around it. */
const statusCode = /^[#([]?([245]\.\d{1,3}\.\d{1,3})[)\]:]?(?:[\s-]+|$)(.*)$/s;
// oxlint-disable-next-line no-control-regex -- control characters are what is looked for
const controls = /[\x00-\x1f\x7f-\x9f\u2028\u2029]+/g;

/** SMTP clients hand over octets as Latin-1; most peers that go beyond ASCII mean UTF-8 (RFC 6531 §3.7.4.2). */
function legible(raw: string): string {
  // oxlint-disable-next-line no-control-regex -- a class of all octets
  if (!/[\x80-\xff]/.test(raw) || /[^\x00-\xff]/.test(raw)) return raw.toWellFormed();
  const utf8 = Buffer.from(raw, 'latin1').toString('utf8');
  return utf8.includes('\ufffd') ? raw : utf8;
}
