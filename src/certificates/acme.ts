/**
 * One order at an ACME authority (RFC 8555), validated over HTTP (HTTP-01, §8.3), by way of acme-client.
 *
 * In: a directory, an account, a name. Out: a chain and its new P-256 key, or an AcmeFailure with one sentence for the operator and
 * whether the authority said that there were too many orders. Names of the authority's hosts are asked through our own resolver.
 * acme-client's retries are switched off: a request that was refused waits in the database, not in memory.
 */
import acme from 'acme-client';
import { X509Certificate, createPrivateKey } from 'node:crypto';
import { Agent } from 'node:https';
import type { LookupFunction } from 'node:net';
import { rootCertificates } from 'node:tls';
import type { Resolver } from '../dns/resolver.ts';
import { makeRequest } from './csr.ts';
import { AcmeFailure } from './failure.ts';
import type { Pair } from './rows.ts';

const REQUEST_MAX_MS = 30_000;
const ANSWER_BYTES_MAX = 1024 * 1024;
/** An authority takes seconds as a rule; waiting ends after about three minutes. */
const POLLS = { attempts: 18, minMs: 500, maxMs: 15_000 } as const;
/** After it no answer counts. With the polls that then only fail, less than a lease (rows.ts). */
const ORDER_MAX_MS = 4 * 60_000;
const SENTENCE_MAX_CHARS = 500;

/** What the authority answered in place of what was asked for (RFC 8555 §6.7). */
class Problem extends Error {
  readonly type: string;
  readonly askedMs: number | null;

  constructor(type: string, detail: string, askedMs: number | null) {
    super(detail);
    this.type = type;
    this.askedMs = askedMs;
  }
}

const PROBLEM_PREFIX = 'urn:ietf:params:acme:error:';

acme.axios.defaults.timeout = REQUEST_MAX_MS;
acme.axios.defaults.maxContentLength = ANSWER_BYTES_MAX;
acme.axios.defaults.maxRedirects = 0;
acme.axios.defaults.proxy = false;
acme.axios.defaults.headers.common['User-Agent'] = 'Mailstead acme-client';
// acme-client's own wait in memory, for hours where an authority says so, and lose what a connection failed of.
acme.axios.interceptors.request.clear();
acme.axios.interceptors.response.clear();
let orderEnd: AbortSignal | null = null;
// The timeout above is of a silent socket: who sends a byte now and then would be waited for without end.
acme.axios.interceptors.request.use((config) => {
  const ends = [AbortSignal.timeout(config.timeout ?? REQUEST_MAX_MS)];
  config.signal = AbortSignal.any(orderEnd === null ? ends : [...ends, orderEnd]);
  return config;
});
acme.axios.interceptors.response.use((response) => {
  const data: unknown = response.data;
  const type =
    typeof data === 'object' && data !== null && 'type' in data && typeof data.type === 'string'
      ? data.type
      : '';
  const isLimited = response.status === 429 || response.status === 503;
  if (response.status < 400 || (!type.startsWith(PROBLEM_PREFIX) && !isLimited)) return response;
  const kind = type.slice(PROBLEM_PREFIX.length) || (isLimited ? 'rateLimited' : '');
  if (kind === 'badNonce') return response; // acme-client asks again with another
  const detail =
    typeof data === 'object' && data !== null && 'detail' in data && typeof data.detail === 'string'
      ? data.detail
      : `status ${response.status}`;
  throw new Problem(kind, detail, retryAfterMs(response.headers['retry-after']));
});

function retryAfterMs(header: unknown): number | null {
  if (typeof header !== 'string') return null;
  const ms = /^\d{1,9}$/.test(header) ? Number(header) * 1_000 : Date.parse(header) - Date.now();
  return Number.isFinite(ms) && ms > 0 ? ms : null;
}

export interface AcmeAuthority {
  readonly directory: string;
  readonly eab: { readonly kid: string; readonly hmacKey: string } | null;
  /** PEM; trusted beside the public ones, for the directory itself. */
  readonly authorities: readonly string[];
  readonly resolver: Pick<Resolver, 'a' | 'aaaa'>;
  /** The first pause between two looks at an order; half a second unless a test is in a hurry. */
  readonly pollMs?: number;
}

export interface AcmeAccount {
  /** PEM. */
  readonly key: string;
  readonly url: string | null;
}

export const newKey = async (): Promise<string> =>
  (await acme.crypto.createPrivateEcdsaKey('P-256')).toString();

function connect(authority: AcmeAuthority, account: AcmeAccount): acme.Client {
  // One order at a time in a process, so what is set for all requests is set for this one.
  orderEnd = AbortSignal.timeout(ORDER_MAX_MS);
  acme.axios.defaults.httpsAgent = new Agent({
    lookup: lookupBy(authority.resolver),
    ca: [...rootCertificates, ...authority.authorities],
    minVersion: 'TLSv1.2',
  });
  return new acme.Client({
    directoryUrl: authority.directory,
    accountKey: account.key,
    ...(account.url === null ? {} : { accountUrl: account.url }),
    ...(authority.eab === null ? {} : { externalAccountBinding: authority.eab }),
    backoffAttempts: POLLS.attempts,
    backoffMin: authority.pollMs ?? POLLS.minMs,
    backoffMax: POLLS.maxMs,
  });
}

/** Registers the account, or tells the authority its new address; the account's URL. Throws an AcmeFailure. */
export async function registerAccount(
  authority: AcmeAuthority,
  account: AcmeAccount,
  email: string | null,
): Promise<string> {
  return explained(authority, async () => {
    const client = connect(authority, account);
    const contact = email === null ? [] : [`mailto:${email}`];
    if (account.url === null) await client.createAccount({ termsOfServiceAgreed: true, contact });
    else await client.updateAccount({ contact });
    return client.getAccountUrl();
  });
}

/** Throws an AcmeFailure. */
export async function orderCertificate(
  authority: AcmeAuthority,
  account: AcmeAccount,
  order: {
    readonly name: string;
    readonly put: (challenge: {
      readonly token: string;
      readonly keyAuthorization: string;
    }) => Promise<void>;
    readonly drop: (token: string) => Promise<void>;
  },
): Promise<Pair> {
  const { name } = order;
  return explained(authority, async () => {
    const client = connect(authority, account);
    const placed = await client.createOrder({ identifiers: [{ type: 'dns', value: name }] });
    for (const authorization of await client.getAuthorizations(placed)) {
      if (authorization.status === 'valid') continue; // proven a short while ago
      const challenge = authorization.challenges.find(({ type }) => type === 'http-01');
      if (challenge === undefined) {
        throw new AcmeFailure(`The authority does not take HTTP-01 as a proof for ${name}.`);
      }
      const keyAuthorization = await client.getChallengeKeyAuthorization(challenge);
      await order.put({ token: challenge.token, keyAuthorization });
      try {
        await client.completeChallenge(challenge);
        await client.waitForValidStatus(challenge);
      } finally {
        await order.drop(challenge.token);
      }
    }
    const ready = await client.waitForValidStatus(placed);
    const { csr, key } = makeRequest(name);
    const finalized = await client.finalizeOrder({ ...ready, url: placed.url }, csr);
    const pair = { cert: await client.getCertificate(finalized), key };
    checkPair(pair, name);
    return pair;
  });
}

/** Throws an AcmeFailure. */
function checkPair(pair: Pair, name: string): void {
  const certificate = new X509Certificate(pair.cert);
  if (
    certificate.checkPrivateKey(createPrivateKey(pair.key)) &&
    certificate.checkHost(name, { subject: 'never' }) !== undefined
  ) {
    return;
  }
  throw new AcmeFailure(`The authority answered with a certificate that is not for ${name}.`);
}

async function explained<T>(authority: AcmeAuthority, work: () => Promise<T>): Promise<T> {
  try {
    return await work();
  } catch (error) {
    if (error instanceof AcmeFailure) throw error;
    throw explain(error, authority);
  }
}

/** What to do about it; other problems speak for themselves. */
const ADVICE: Readonly<Record<string, string>> = {
  caa: 'A CAA record forbids this authority; allow it or remove the record.',
  externalAccountRequired: 'Set acme.eab in config/tls.json to what the authority gave you.',
  rateLimited: 'It is tried again in some hours.',
  rejectedIdentifier: 'This authority does not certify such a name.',
  userActionRequired: 'Agree to its new terms as the authority describes.',
};

function explain(error: unknown, { directory }: AcmeAuthority): AcmeFailure {
  if (error instanceof Problem) {
    const advice = ADVICE[error.type];
    return new AcmeFailure(
      `The authority refuses: ${sentence(error.message)}${advice === undefined ? '' : ` ${advice}`}`,
      {
        kind: error.type === 'rateLimited' ? 'rate_limited' : 'refused',
        askedMs: error.askedMs,
        isAccountGone: error.type === 'accountDoesNotExist',
        cause: error,
      },
    );
  }
  const { code, message } = error as NodeJS.ErrnoException;
  if (code !== undefined) {
    const host = new URL(directory).host;
    const why = code === 'ERR_CANCELED' ? 'timeout' : code;
    const text = `The authority at ${host} cannot be reached (${why}); acme.directory and acme.ca_file in config/tls.json say where it is and who vouches for it.`;
    return new AcmeFailure(text, { kind: 'not_ready', cause: error });
  }
  return new AcmeFailure(`The authority found: ${sentence(message)}`, { cause: error });
}

/** As it may be shown; others wrote it. */
function sentence(text: string): string {
  const plain = text.replace(/[^\x20-\x7e]+/g, ' ').trim();
  const cut = plain.length > SENTENCE_MAX_CHARS ? `${plain.slice(0, SENTENCE_MAX_CHARS)}…` : plain;
  return /[.!?…]$/.test(cut) ? cut : `${cut}.`;
}

/** For a socket: asks our resolver, which need not be the system's. */
function lookupBy(resolver: Pick<Resolver, 'a' | 'aaaa'>): LookupFunction {
  return (hostname, options, callback) => {
    void (async () => {
      const [a, aaaa] = await Promise.all([resolver.a(hostname), resolver.aaaa(hostname)]);
      const of = (answer: typeof a, family: 4 | 6) =>
        answer.kind === 'found' ? answer.records.map((address) => ({ address, family })) : [];
      const found = [...of(a, 4), ...of(aaaa, 6)];
      const [first] = found;
      if (first === undefined) {
        callback(Object.assign(new Error('no address'), { code: 'ENOTFOUND' }), '', 4);
      } else if (options.all === true) callback(null, found);
      else callback(null, first.address, first.family);
    })();
  };
}
