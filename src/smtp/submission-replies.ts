// What the submission listeners say: refusals of ours as SMTP replies, and smtp-server's own replies in words that say
// what to fix (RFC 2034, RFC 5248).
import { Refusal, refuseUnavailable } from '../access/refusal.ts';
import { UnfitMessage } from '../mail/mime-tree.ts';
import type { Reply, Said } from './listener.ts';
import { STOPPING } from './replies.ts';
import { SpoolFull } from './spool.ts';

/** RFC 5321 §4.5.3.1.5: a reply line has at most 512 octets. */
const TEXT_MAX = 400;

export const TOO_MANY_FAILED_LOGINS: Reply = {
  code: 421,
  text: '4.7.0 Too many failed logins: the user name is "resend", and the password is an API key',
};
const TLS_FIRST = 'Encryption is required first: send STARTTLS';
export const NEEDS_TLS: Reply = { code: 538, text: `5.7.11 ${TLS_FIRST}` };
export const LOGIN_AWAY: Reply = {
  code: 454,
  text: '4.7.0 The key cannot be checked right now, try again later',
};
export const AWAY: Reply = {
  code: 451,
  text: '4.3.0 The message cannot be accepted right now, try again later',
};
export const KEY_REVOKED: Reply = {
  code: 550,
  text: '5.7.1 This API key is no longer valid: log in with another one',
};
const NO_ROOM: Reply = { code: 452, text: '4.3.1 Too much mail at once, try again later' };

const BY_STATUS: Readonly<Record<number, readonly [code: number, enhanced: string]>> = {
  401: [550, '5.7.1'],
  403: [550, '5.7.1'],
  409: [554, '5.7.0'],
  413: [552, '5.3.4'],
  429: [450, '4.7.1'],
  503: [451, '4.3.0'],
};

export function refusalReply(refusal: Refusal): Reply {
  const { status, code: name, retryAfterSeconds } = refusal;
  const [code, enhanced] =
    name === 'domain_not_verified'
      ? ([550, '5.7.1'] as const)
      : (BY_STATUS[status] ?? (status >= 500 ? [451, '4.3.0'] : [550, '5.6.0']));
  const hint = retryAfterSeconds === null ? '' : ` Retry after ${retryAfterSeconds} s.`;
  return reply(code, enhanced, `${refusal.message}${hint}`);
}

/** The reply for what accepting threw; null: a fault of ours, which the client is told nothing of. */
export function replyTo(error: unknown): Reply | null {
  if (error instanceof UnfitMessage) return reply(550, error.enhancedCode, error.message);
  if (error instanceof SpoolFull) return NO_ROOM;
  const away = refuseUnavailable(error);
  if (away !== null) return refusalReply(away);
  return error instanceof Refusal ? refusalReply(error) : null;
}

export function reply(code: number, enhanced: string, text: string): Reply {
  const ascii = text.replace(/[^\x20-\x7e]+/g, '?');
  const short = ascii.length > TEXT_MAX ? `${ascii.slice(0, TEXT_MAX)}...` : ascii;
  return { code, text: `${enhanced} ${short}` };
}

const NEEDS_LOGIN = 'Log in first: user "resend", and an API key as the password';

/** smtp-server's words, and ours. */
export function createRewording(
  recipientsMax: number,
): (said: Said, isSecure: boolean) => Said['data'] {
  const words: Readonly<Record<string, string>> = {
    'Error: Must issue a STARTTLS command first': `5.7.11 ${TLS_FIRST}`,
    'Error: too many recipients': `4.5.3 A message has at most ${recipientsMax} recipients: send it again to the others`,
    'Error: Bad sender address syntax':
      '5.1.7 The address in MAIL FROM must be in <angle brackets>, or <>',
    'Error: Bad recipient address syntax':
      '5.1.3 The address in RCPT TO must be in <angle brackets>',
    'Error: command not recognized': '5.5.1 This command is not known here',
    'Error: too many unrecognized commands': '4.7.0 Too many unknown commands',
    'Error: too many unauthenticated commands': '4.7.0 Too many commands without a login',
    'Server shutting down': STOPPING.text,
    'Timeout - closing connection': '4.4.2 Nothing came for too long',
    'Error: Command line too long': '4.7.0 The command line is too long',
  };
  return ({ code, data }, isSecure) => {
    // RFC 4954 §4: a password must not be asked for where everybody can read it.
    if (Array.isArray(data)) {
      return isSecure ? data : data.filter((line: string) => !line.startsWith('AUTH '));
    }
    if (code === 530) return `5.7.0 ${isSecure ? NEEDS_LOGIN : TLS_FIRST}`;
    return typeof data === 'string' && Object.hasOwn(words, data) ? words[data]! : data;
  };
}
