// What the inbound listener says, and smtp-server's own replies where their enhanced codes say something else than what
// happened (RFC 3463, RFC 5248).
import type { Reply, Said } from './listener.ts';
import { SpoolFull } from './spool.ts';

export const HEADER_BYTES_MAX = 256 * 1024;

export const TOO_OFTEN: Reply = {
  code: 421,
  text: '4.7.0 Too many connections from your network within a minute, try again later',
};
export const listed = (zone: string, address: string): Reply => ({
  code: 554,
  text: `5.7.1 Mail from ${address} is not taken: it is listed at ${zone}`,
});
export const IDLE: Reply = { code: 421, text: '4.4.2 Idle for too long, closing' };
export const TOO_SLOW: Reply = { code: 421, text: '4.4.2 The message comes too slowly, closing' };
export const ENDLESS: Reply = {
  code: 552,
  text: '5.3.4 The message is far larger than the size that is taken here',
};
export const MAKING_ROOM: Reply = {
  code: 421,
  text: '4.3.2 Idle while others wait for a connection, closing',
};
export const JUNK: Reply = { code: 421, text: '4.7.0 Too many commands that bring no mail' };
export const ERRORS: Reply = { code: 421, text: '4.7.0 Too many errors' };

export const NOT_OURS: Reply = {
  code: 550,
  text: '5.7.1 We do not relay: this domain is not ours',
};
/** Its MX record has to point here before it can be verified, and then mail comes at once. */
export const NOT_YET: Reply = {
  code: 450,
  text: '4.2.1 This domain is not verified for receiving here yet: come again later',
};
export const NO_RETURN_PATH: Reply = {
  code: 550,
  text: '5.1.1 No such mailbox: this is no return path of ours',
};
export const NO_ROUTE: Reply = { code: 550, text: '5.1.1 No such mailbox' };
export const NO_POSTMASTER: Reply = {
  code: 550,
  text: '5.1.1 Nobody reads the mail for the postmaster of this host: write to postmaster@ a domain that receives here',
};
/** RFC 5321 §4.5.5: what has the null sender is about one message of one sender. */
export const ONE_RECIPIENT: Reply = {
  code: 452,
  text: '4.5.3 One recipient at a time for mail with the null sender',
};
/** RFC 5321 §4.5.3.1.10: the rest goes in another transaction. */
export const MANY_RECIPIENTS: Reply = {
  code: 452,
  text: '4.5.3 Too many recipients: send the rest in another transaction',
};
export const OTHER_POLICY: Reply = {
  code: 452,
  text: '4.5.3 This domain has other rules than the recipients before: send it in another transaction',
};
export const BAD_RECIPIENTS: Reply = { code: 421, text: '4.7.0 Too many unknown recipients' };

export const AWAY: Reply = {
  code: 451,
  text: '4.3.0 The mail cannot be stored right now, try again later',
};
export const NOT_NOW: Reply = {
  code: 451,
  text: '4.2.1 The delivery that this is about is under way, try again later',
};
export const GREYLISTED: Reply = {
  code: 451,
  text: '4.7.1 Not known here yet, try again in a few minutes',
};
const NO_ROOM: Reply = { code: 452, text: '4.3.1 No room for mail right now, try again later' };

export const BARE: Reply = {
  code: 550,
  text: '5.5.2 The message has a bare CR or LF; lines must end with CRLF',
};
export const NUL: Reply = { code: 550, text: '5.6.0 The message has a NUL character' };
export const longLine = (lineBytesMax: number): Reply => ({
  code: 554,
  text: `5.6.0 The message has a line of more than ${lineBytesMax} bytes`,
});
export const LOOP: Reply = {
  code: 554,
  text: '5.4.6 Too many hops: this message goes round in a circle',
};
export const ODD_FROM: Reply = {
  code: 550,
  text: '5.6.0 The message has a From field whose name is not written "From:"',
};
export const HEADER_TOO_LARGE: Reply = {
  code: 552,
  text: `5.3.4 The header has more than ${HEADER_BYTES_MAX} bytes`,
};

/** The disk, or Postgres's. */
const FULL = new Set(['ENOSPC', 'EDQUOT', '53100']);

/** What an error of ours comes to: never a 5xx, the client has done nothing wrong. */
export function replyToFailure(error: unknown): Reply {
  const code = (error as { readonly code?: unknown } | null)?.code;
  return error instanceof SpoolFull || FULL.has(String(code)) ? NO_ROOM : AWAY;
}

const OTHER_WORDS: readonly (readonly [words: RegExp, text: string])[] = [
  [/You talk too soon$/, '4.7.0 You talk too soon: wait for the greeting'],
  [/too many unrecognized commands$/, ERRORS.text],
  [/^HTTP requests/, '4.7.0 This is a mail server'],
  [/^Error: Command line too long$/, '4.7.0 The command is too long'],
];

export function reword({ code, data }: Said): Said['data'] {
  if (code !== 421 || typeof data !== 'string') return data;
  return OTHER_WORDS.find(([words]) => words.test(data))?.[1] ?? data;
}
