// AUTH: which user names and passwords get in, and how guessing is slowed. Every failed login of a client's
// network makes its next ones wait longer, right ones too, for a quarter of an hour; nobody is locked out by a
// neighbour's mistake, since a key has too many bits to be guessed at any speed. So what is known of the networks may
// have a limit: the one that failed longest ago is forgotten.
import { setTimeout as sleep } from 'node:timers/promises';
import type { Caller } from '../access/keys.ts';
import { networkOf } from '../access/rate-limit.ts';
import type { Reply } from './listener.ts';

export interface LoginAttempt {
  readonly address: string;
  readonly user: string;
  readonly password: string;
}

/** Who got in, or the reply that says why not. Rejects when the keys cannot be asked. */
export type Logins = (attempt: LoginAttempt) => Promise<Caller | Reply>;

const USERS = /^(?:resend|mailstead)$/i;
const FAILURES_WINDOW_MS = 15 * 60_000;
const NETWORKS_MAX = 20_000;
const FIRST_DELAY_MS = 250;
const DELAY_MAX_MS = 8_000;

const WRONG_USER: Reply = {
  code: 535,
  text: '5.7.8 The user name is "resend" or "mailstead", and the password is an API key',
};
const WRONG_KEY: Reply = {
  code: 535,
  text: '5.7.8 This API key is not valid: the password is an API key (re_...), unchanged',
};

export function createLogins(d: {
  readonly authenticate: (token: string) => Promise<Caller | null>;
  /** Of the second attempt after a failed one; each failure doubles it. */
  readonly firstDelayMs?: number;
}): Logins {
  const { firstDelayMs = FIRST_DELAY_MS } = d;
  /** By network, the latest failure last. */
  const failures = new Map<string, { readonly count: number; readonly until: number }>();
  const failuresOf = (network: string): number => {
    const known = failures.get(network);
    return known === undefined || known.until <= Date.now() ? 0 : known.count;
  };
  return async ({ address, user, password }) => {
    const network = networkOf(address);
    const failed = failuresOf(network);
    if (failed > 0) await sleep(Math.min(DELAY_MAX_MS, firstDelayMs * 2 ** (failed - 1)));
    const isUser = USERS.test(user);
    const caller = isUser ? await d.authenticate(password) : null;
    if (caller !== null) return caller;
    const count = failuresOf(network) + 1;
    failures.delete(network);
    failures.set(network, { count, until: Date.now() + FAILURES_WINDOW_MS });
    const [longestAgo] = failures.keys();
    if (failures.size > NETWORKS_MAX && longestAgo !== undefined) failures.delete(longestAgo);
    return isUser ? WRONG_KEY : WRONG_USER;
  };
}
