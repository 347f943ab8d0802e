// An HTTP client for URLs that somebody else named, which cannot be led into the operator's network: for files to fetch,
// reports to post, webhook endpoints to call.
//
// In: where a URL leads (url-guard.ts) and a signal that ends the wait. Out: an undici client with one connection, or a
// fault in words for whoever named the URL. The name is resolved once through our resolver, every address must pass the
// guard, and the socket goes to exactly such an address, so a second DNS answer (rebinding) is never asked for. No
// cookies, credentials, proxies; redirects are the caller's affair. A fault never shows an address that the DNS gave.
import { connect as connectTcp, type Socket } from 'node:net';
import { connect as connectTls } from 'node:tls';
import { Client } from 'undici';
import type { AddressGuard } from './address-guard.ts';
import { lookUpHosts } from './mx-hosts.ts';
import type { Resolver } from './resolver.ts';
import { isLocalhost, type WebTarget } from './url-guard.ts';

export interface GuardedDependencies {
  readonly resolver: Pick<Resolver, 'a' | 'aaaa' | 'cname'>;
  readonly guard: AddressGuard;
  /** PEM; in place of the certificate authorities that the runtime trusts. */
  readonly authorities?: readonly string[];
  /** What the URL leads to, for the advice in a fault. Default: `the file`. */
  readonly what?: string;
}

/** `refused`: by our rules, `permanent`: by the far end, for good; `transient`: worth another try. */
export interface Fault {
  readonly kind: 'refused' | 'permanent' | 'transient';
  /** Ends a sentence that named what was asked for: `… could not be fetched: <reason>`. */
  readonly reason: string;
}

const ADDRESSES_MAX = 4;
const DIAL_MAX_MS = 10_000;
const HEADER_BYTES_MAX = 32 * 1024;
/** RFC 9110 §15.5.9, RFC 8470 §5.2, RFC 6585 §4: the only 4xx that ask to come again. */
export const TRANSIENT_STATUSES: ReadonlySet<number> = new Set([408, 425, 429]);
/** RFC 6761 §6.3: whatever the DNS says. Asked for only where `readUrl` was told to let it pass. */
const LOOPBACK = ['127.0.0.1', '::1'];
const OWN_CODES: ReadonlySet<string> = new Set(
  'ENOSPC EDQUOT EACCES EPERM EROFS EMFILE ENFILE EIO ENOENT EEXIST'.split(' '),
);

/** A fault on its way to `faultOf`. */
export class FaultError extends Error {
  readonly fault: Fault;
  constructor(kind: Fault['kind'], reason: string) {
    super(reason);
    this.fault = { kind, reason };
  }
}

/**
 * A client with one connection to where the URL leads; the caller destroys both. Throws what `faultOf` reads.
 */
export async function openWeb(
  d: GuardedDependencies,
  target: WebTarget,
  signal: AbortSignal,
): Promise<{ readonly client: Client; readonly socket: Socket }> {
  const socket = await dialAny(d, target, signal);
  let isTaken = false;
  const client = new Client(target.url.origin, {
    // The one checked connection; the engine may not make another. It expects its answer in a later turn.
    connect: (_options, done) => {
      const isLost = isTaken || socket.destroyed;
      isTaken = true;
      process.nextTick(() => {
        if (isLost) done(new Error('the connection was lost'), null);
        else done(null, socket);
      });
    },
    maxHeaderSize: HEADER_BYTES_MAX,
    allowH2: false,
  });
  return { client, socket };
}

/** A connection, encrypted where the URL asks for it, to an address of the host that the guard let through. */
async function dialAny(
  d: GuardedDependencies,
  target: WebTarget,
  signal: AbortSignal,
): Promise<Socket> {
  const addresses = await unlessAborted(findAddresses(d, target), signal);
  let last: unknown = null;
  for (const address of addresses.slice(0, ADDRESSES_MAX)) {
    try {
      const socket = await dial({ address, port: target.port }, signal);
      const peer = d.guard.check(socket.remoteAddress ?? '');
      if (peer.ok)
        return target.url.protocol === 'https:' ? await secure(d, target, socket, signal) : socket;
      socket.destroy();
      throw notPublic(d, target);
    } catch (error) {
      if (error instanceof FaultError || signal.aborted) throw error;
      last = error;
    }
  }
  throw last;
}

/** Those that the guard lets through, at least one. Throws a FaultError: `transient` where the DNS gave no answer. */
export async function findAddresses(
  d: GuardedDependencies,
  target: WebTarget,
): Promise<readonly string[]> {
  if (target.isAddress) {
    if (!d.guard.check(target.host).ok) throw notPublic(d, target);
    return [target.host];
  }
  if (isLocalhost(target.host)) {
    const open = LOOPBACK.filter((address) => d.guard.check(address).ok);
    if (open.length === 0) throw notPublic(d, target);
    return open;
  }
  const [found] = await lookUpHosts({ ...d, random: Math.random }, [
    { name: target.host, preference: 0 },
  ]);
  // One bad address is enough: who mixes them is not to be trusted with the next answer.
  if (found !== undefined && found.refusals.length > 0) throw notPublic(d, target);
  const addresses = found?.addresses.map(({ address }) => address) ?? [];
  if (addresses.length > 0) return addresses;
  if (typeof found?.failure === 'string') {
    throw new FaultError('transient', `the DNS gave no answer for ${target.host}`);
  }
  throw notPublic(d, target);
}

/** Nobody learns which names exist inside: one that leads there and one that does not exist have the same fault. */
function notPublic({ what = 'the file' }: GuardedDependencies, target: WebTarget): FaultError {
  const { host, isAddress } = target;
  const toDo = `put ${what} on a public web server, or let the operator open the network with MAILSTEAD_PRIVATE_HOSTS`;
  return isAddress
    ? new FaultError('refused', `${host} is not a public address; ${toDo}`)
    : new FaultError(
        'permanent',
        `the host ${host} does not exist or has no public address; ${toDo}`,
      );
}

function dial(
  to: { readonly address: string; readonly port: number },
  signal: AbortSignal,
): Promise<Socket> {
  return new Promise((resolve, reject) => {
    // An address, so nothing is looked up.
    const socket = connectTcp({ host: to.address, port: to.port, noDelay: true });
    socket.on('error', () => undefined); // while nobody else listens
    const end = watch(socket, { signal, timeoutMs: DIAL_MAX_MS, reject });
    socket.once('connect', () => {
      end();
      resolve(socket);
    });
  });
}

function secure(
  d: GuardedDependencies,
  target: WebTarget,
  socket: Socket,
  signal: AbortSignal,
): Promise<Socket> {
  return new Promise((resolve, reject) => {
    const secured = connectTls({
      socket,
      // Whose certificate it must be; RFC 6066 §3: SNI takes names only.
      host: target.host,
      ...(target.isAddress ? {} : { servername: target.host }),
      ALPNProtocols: ['http/1.1'],
      minVersion: 'TLSv1.2',
      rejectUnauthorized: true,
      ...(d.authorities === undefined ? {} : { ca: [...d.authorities] }),
    });
    secured.on('error', () => undefined);
    const end = watch(secured, { signal, timeoutMs: DIAL_MAX_MS, reject });
    secured.once('secureConnect', () => {
      end();
      resolve(secured);
    });
  });
}

/** Ends the wait for a socket: by its error, by the signal, by time. The answer stops watching. */
function watch(
  socket: Socket,
  by: {
    readonly signal: AbortSignal;
    readonly timeoutMs: number;
    readonly reject: (error: Error) => void;
  },
): () => void {
  const fail = (error: Error): void => {
    end();
    socket.destroy();
    by.reject(error);
  };
  const onAbort = (): void => fail(new Error('aborted'));
  const onClose = (): void => fail(new Error('the connection was closed'));
  const timer = setTimeout(
    () => fail(new FaultError('transient', 'the server did not answer in time')),
    by.timeoutMs,
  );
  const end = (): void => {
    clearTimeout(timer);
    by.signal.removeEventListener('abort', onAbort);
    socket.removeListener('error', fail).removeListener('close', onClose);
  };
  by.signal.addEventListener('abort', onAbort);
  socket.on('error', fail).on('close', onClose);
  if (by.signal.aborted) onAbort();
  return end;
}

async function unlessAborted<T>(promise: Promise<T>, signal: AbortSignal): Promise<T> {
  signal.throwIfAborted();
  let onAbort = (): void => undefined;
  const aborted = new Promise<never>((_, reject) => {
    onAbort = () => reject(new Error('aborted'));
    signal.addEventListener('abort', onAbort);
  });
  try {
    return await Promise.race([promise, aborted]);
  } finally {
    signal.removeEventListener('abort', onAbort);
  }
}

/** What the engine, the socket or the disk said, in words without addresses. */
export function faultOf(error: unknown): Fault {
  if (error instanceof FaultError) return error.fault;
  const code = error instanceof Error && 'code' in error ? String(error.code) : '';
  if (OWN_CODES.has(code)) throw error; // of our own machine: a full disk, no more files
  if (code === 'ECONNREFUSED') {
    return { kind: 'transient', reason: 'the server refused the connection' };
  }
  if (/^UND_ERR_\w*TIMEOUT$|^ETIMEDOUT$/.test(code)) {
    return { kind: 'transient', reason: 'the server did not answer in time' };
  }
  if (/CERT|^UNABLE_TO_|^ERR_TLS_|SELF_SIGNED|^HOSTNAME_MISMATCH$/.test(code)) {
    return {
      kind: 'permanent',
      reason: 'the certificate of the server is not valid for its name, or nobody vouches for it',
    };
  }
  if (/^HPE_|^UND_ERR_HEADERS_OVERFLOW$|^ERR_SSL_WRONG_VERSION/.test(code)) {
    return { kind: 'permanent', reason: 'the server does not speak HTTP as it should' };
  }
  return { kind: 'transient', reason: 'the connection was lost' };
}
