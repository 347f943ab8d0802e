// Fetches one file from a URL that a tenant named, without being led into the operator's network.
//
// In: a URL, a path to write to, a budget of bytes, a signal that ends it. Out: a value: fetched, or a fault in words
// for the tenant. Per hop: the URL is read strictly (dns/url-guard.ts), its name is resolved once through our resolver,
// every address must pass the guard, and the socket goes to exactly such an address, so a second DNS answer (rebinding)
// is never asked for. Redirects are followed by hand, at most five. No cookies, credentials, proxies; nothing is
// decompressed. A fault never shows an address that the DNS gave. It throws only for faults of our own disk.
import { createWriteStream } from 'node:fs';
import { connect as connectTcp, type Socket } from 'node:net';
import { pipeline } from 'node:stream/promises';
import { connect as connectTls } from 'node:tls';
import { Client, type Dispatcher } from 'undici';
import type { AddressGuard } from '../dns/address-guard.ts';
import { lookUpHosts } from '../dns/mx-hosts.ts';
import type { Resolver } from '../dns/resolver.ts';
import { readUrl, type WebTarget } from '../dns/url-guard.ts';

export interface FetchDependencies {
  readonly resolver: Pick<Resolver, 'a' | 'aaaa' | 'cname'>;
  readonly guard: AddressGuard;
  /** PEM; in place of the certificate authorities that the runtime trusts. */
  readonly authorities?: readonly string[];
}

/** How many more bytes may come, over all files that share it. */
export interface ByteBudget {
  left: number;
}

export interface Fetched {
  readonly kind: 'fetched';
  readonly sizeBytes: number;
  /** Of the response, as it came; null: it had none. */
  readonly contentType: string | null;
}

/** `refused`: by our rules, `permanent`: by the far end, for good; `transient`: worth another try. */
export interface Fault {
  readonly kind: 'refused' | 'permanent' | 'transient';
  /** Ends a sentence that named the file and the host: `… could not be fetched: <reason>`. */
  readonly reason: string;
}

/** For all files of one email together; what the signal of an order is to be made of. */
export const FETCH_MAX_MS = 30_000;
const REDIRECTS_MAX = 5;
const ADDRESSES_MAX = 4;
const DIAL_MAX_MS = 10_000;
const HEADER_BYTES_MAX = 32 * 1024;
/** Of what came, as much again as the file and this: else it is a flood of 1xx, tiny chunks or their extensions. */
const OVERHEAD_BYTES_MAX = 1024 * 1024;
const OVERHEAD_LOOK_MS = 50;
const REDIRECTS: ReadonlySet<number> = new Set([301, 302, 303, 307, 308]);
/** RFC 9110 §15.5.9, RFC 8470 §5.2, RFC 6585 §4: the only 4xx that ask to come again. */
export const TRANSIENT_STATUSES: ReadonlySet<number> = new Set([408, 425, 429]);
const BODY_ENDS = ['content-length', 'transfer-encoding'] as const;
const PLAIN_CODINGS = [
  ['content-encoding', 'identity'],
  ['transfer-encoding', 'chunked'],
] as const;
const DISK_CODES: ReadonlySet<string> = new Set(
  'ENOSPC EDQUOT EACCES EPERM EROFS EMFILE ENFILE EIO ENOENT EEXIST'.split(' '),
);

/** A fault on its way out of the steps below. */
class FaultError extends Error {
  readonly fault: Fault;
  constructor(kind: Fault['kind'], reason: string) {
    super(reason);
    this.fault = { kind, reason };
  }
}

/** What to fetch, and until when. `path` must not exist; after a fault it may, half written. */
export interface FetchOrder {
  readonly url: string;
  readonly path: string;
  readonly budget: ByteBudget;
  readonly signal: AbortSignal;
}

export async function fetchToFile(
  d: FetchDependencies,
  order: FetchOrder,
): Promise<Fetched | Fault> {
  try {
    return await follow(d, order);
  } catch (error) {
    if (order.signal.aborted && !(error instanceof FaultError))
      return { kind: 'transient', reason: `it took longer than ${FETCH_MAX_MS / 1_000} seconds` };
    return faultOf(error);
  }
}

async function follow(d: FetchDependencies, order: FetchOrder): Promise<Fetched> {
  const seen = new Set<string>();
  let text = order.url;
  for (;;) {
    const read = readUrl(text);
    const isFirst = seen.size === 0;
    if (!read.ok) {
      const whose = isFirst ? 'its URL' : 'it redirects to another URL, which';
      throw new FaultError('refused', `${whose} ${read.problem}`);
    }
    const { target } = read;
    target.url.hash = '';
    if (seen.has(target.url.href)) throw new FaultError('permanent', 'it redirects in a circle');
    if (seen.size > REDIRECTS_MAX) {
      throw new FaultError('permanent', `it redirects more than ${REDIRECTS_MAX} times`);
    }
    seen.add(target.url.href);
    const came = await visit(d, target, order);
    if ('kind' in came) return came;
    if (!URL.canParse(came.location, target.url.href)) {
      throw new FaultError('permanent', 'it redirects to something that is no URL');
    }
    text = new URL(came.location, target.url.href).href;
  }
}

async function visit(
  d: FetchDependencies,
  target: WebTarget,
  order: FetchOrder,
): Promise<Fetched | { readonly location: string }> {
  const { signal } = order;
  const { client, socket } = await openWeb(d, target, signal);
  const progress = { bytes: 0, isBroken: false };
  socket.on('error', (error: NodeJS.ErrnoException) => {
    progress.isBroken ||= error.code === 'ECONNRESET';
  });
  const overhead = setInterval(() => {
    if (socket.bytesRead - 2 * progress.bytes <= OVERHEAD_BYTES_MAX) return;
    socket.destroy(new FaultError('permanent', 'the server sends much that is not the file'));
  }, OVERHEAD_LOOK_MS);
  try {
    const response = await client.request({
      method: 'GET',
      path: `${target.url.pathname}${target.url.search}`,
      headers: { accept: '*/*', 'accept-encoding': 'identity', 'user-agent': 'Mailstead' },
      signal,
    });
    response.body.on('error', () => undefined); // told to whoever reads it; without a reader it ends the process
    const location = readStatus(response);
    if (location !== null) return { location };
    const fetched = await save(response, order, progress);
    // The engine takes a reset for the end of a body that does not say where it ends.
    const saysItsEnd = BODY_ENDS.some((name) => response.headers[name] !== undefined);
    if (progress.isBroken && !saysItsEnd) throw new Error('the connection was lost');
    return fetched;
  } finally {
    clearInterval(overhead);
    socket.destroy();
    await client.destroy().catch(() => undefined);
  }
}

/**
 * A client with one connection to where the URL leads, made as said above; the caller destroys both. Throws what
 * `faultOf` reads.
 */
export async function openWeb(
  d: FetchDependencies,
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

/** Where a redirect leads, or null for a response whose body is the file. */
function readStatus({ statusCode, headers }: Dispatcher.ResponseData): string | null {
  if (REDIRECTS.has(statusCode)) {
    const { location } = headers;
    if (typeof location === 'string') return location;
    throw new FaultError('permanent', `the server answered ${statusCode} without a Location`);
  }
  const isTransient = statusCode >= 500 || TRANSIENT_STATUSES.has(statusCode);
  if (statusCode !== 200 && statusCode !== 203) {
    throw new FaultError(
      isTransient ? 'transient' : 'permanent',
      `the server answered with status ${statusCode}`,
    );
  }
  // Unpacking would let a few kilobytes become gigabytes.
  for (const [name, plain] of PLAIN_CODINGS) {
    const coding = String(headers[name] ?? '').trim();
    if (coding !== '' && coding.toLowerCase() !== plain) {
      throw new FaultError(
        'permanent',
        `the server sends it compressed (${name}) although asked not to`,
      );
    }
  }
  return null;
}

async function save(
  response: Dispatcher.ResponseData,
  order: FetchOrder,
  progress: { bytes: number },
): Promise<Fetched> {
  const { budget } = order;
  const tooLarge = (): FaultError =>
    new FaultError(
      'permanent',
      'with it, the attachments of the email have more than 40 MB in base64',
    );
  const announced = Number(response.headers['content-length'] ?? 0);
  if (announced > budget.left) throw tooLarge();
  let sizeBytes = 0;
  await pipeline(
    response.body,
    async function* (source: AsyncIterable<Buffer>) {
      for await (const chunk of source) {
        sizeBytes += chunk.length;
        progress.bytes = sizeBytes;
        budget.left -= chunk.length;
        if (budget.left < 0) throw tooLarge();
        yield chunk;
      }
    },
    createWriteStream(order.path, { flags: 'wx', mode: 0o600 }),
    { signal: order.signal },
  );
  const { 'content-type': contentType } = response.headers;
  return {
    kind: 'fetched',
    sizeBytes,
    contentType: typeof contentType === 'string' ? contentType : null,
  };
}

/** A connection, encrypted where the URL asks for it, to an address of the host that the guard let through. */
async function dialAny(
  d: FetchDependencies,
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
      throw notPublic(target);
    } catch (error) {
      if (error instanceof FaultError || signal.aborted) throw error;
      last = error;
    }
  }
  throw last;
}

async function findAddresses(d: FetchDependencies, target: WebTarget): Promise<readonly string[]> {
  if (target.isAddress) {
    if (!d.guard.check(target.host).ok) throw notPublic(target);
    return [target.host];
  }
  const [found] = await lookUpHosts({ ...d, random: Math.random }, [
    { name: target.host, preference: 0 },
  ]);
  // One bad address is enough: who mixes them is not to be trusted with the next answer.
  if (found !== undefined && found.refusals.length > 0) throw notPublic(target);
  const addresses = found?.addresses.map(({ address }) => address) ?? [];
  if (addresses.length > 0) return addresses;
  if (typeof found?.failure === 'string') {
    throw new FaultError('transient', `the DNS gave no answer for ${target.host}`);
  }
  throw notPublic(target);
}

const WHAT_TO_DO =
  'put the file on a public web server, or let the operator open the network with MAILSTEAD_PRIVATE_HOSTS';

/** Nobody learns which names exist inside: one that leads there and one that does not exist have the same fault. */
const notPublic = ({ host, isAddress }: WebTarget): FaultError =>
  isAddress
    ? new FaultError('refused', `${host} is not a public address; ${WHAT_TO_DO}`)
    : new FaultError(
        'permanent',
        `the host ${host} does not exist or has no public address; ${WHAT_TO_DO}`,
      );

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
  d: FetchDependencies,
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
  if (DISK_CODES.has(code)) throw error;
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
